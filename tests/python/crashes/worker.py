"""A worker process of a storm: python -m crashes.worker DSN FILE SEED. Runs go into the file."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys

import awa
from crashes.actors import WORKED_QUEUE

DSN, PATH, SEED = sys.argv[1:]
file = os.open(PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
rng = random.Random(SEED)
handlers = awa.Handlers()


@handlers.task(kind="any")
async def run_any(job: awa.Job, token: str) -> None:
    """Write down that it runs: the effect, outside the database."""
    record = [job.id, job.run_lease, job.attempt, job.max_attempts, *job.token[3:], token]
    os.write(file, (json.dumps(record) + "\n").encode())
    way = rng.random()
    await asyncio.sleep(rng.choice((0, 0, 0.005)) if way > 0.02 else 0.5)
    if way > 0.95:
        raise RuntimeError("on purpose")


if __name__ == "__main__":
    sys.exit(awa.run(handlers, dsn=DSN, queues={WORKED_QUEUE: 20}, grace=2))
