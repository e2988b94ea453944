"""A worker that breaks rules of docs/conformance.md, which the conformance run must notice."""

from __future__ import annotations

import os
import signal
import time
import uuid

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

ME = uuid.uuid4()
TOKEN = ("job_id", "run_lease", "claim_slot", "batch_id", "position")
BREAKS = {"W4", "W6", "W9", "W11", "W13"}

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # W13
with psycopg.connect(os.environ["AWA_DSN"], autocommit=True, row_factory=dict_row) as conn:
    # One heartbeat and never again: W11.
    conn.execute("SELECT awa.register_instance(%s)", [ME])
    conn.execute("SELECT awa.heartbeat(%s)", [ME])
    while True:
        claim = "SELECT * FROM awa.claim_ready_runtime(%s, 1, %s)"
        for job in conn.execute(claim, [os.environ["AWA_QUEUE"], ME]).fetchall():
            kind = job["kind"].removeprefix("conformance_")
            item = {key: job[key] for key in TOKEN} | {"outcome": "completed"}  # W4
            if kind == "sleep":
                time.sleep(job["args"]["seconds"])
            elif kind == "snooze":
                item |= {"outcome": "retry", "delay_seconds": 600}  # W6
            elif kind in ("unknown", "echo"):
                item |= {"outcome": "fail"}  # W9
            conn.execute("SELECT * FROM awa.finish_jobs(%s, %s)", [ME, Jsonb([item])])
        time.sleep(0.02)
