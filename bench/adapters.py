"""The systems under test as seen from a scenario: which there are, and a process of each."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.cluster import Connection, Server, connect
from tools.servers import BUILD, REPO

PEERS = BUILD / "bench"
SYSTEMS_FOLDER = REPO / "bench/systems"
ANSWER_SECONDS = 60
STOP_SECONDS = 30
TAIL_BYTES = 4_000
OWN = ("awa", "naive")  # they run in this environment


class MissingPeer(Exception):
    """A peer whose environment was not made yet."""


@dataclass(frozen=True, slots=True)
class System:
    """A system under test."""

    name: str
    # A slow one gets fewer jobs to drain, which still take longer than those of the fast ones.
    most_jobs: int = sys.maxsize
    # Jobs that failed are tried again, and a second queue can be filled that nobody runs.
    has_retries: bool = False

    @property
    def is_peer(self) -> bool:
        """Whether it is a full job queue of somebody else."""
        return self.name not in OWN

    def command(self) -> list[str | Path]:
        """How its program is run."""
        module = self.name.replace("-", "_")
        script = SYSTEMS_FOLDER / f"{module}.mjs"
        if script.exists():
            return [self._program("node_modules/.bin/node"), script]
        python = self._program("bin/python") if self.is_peer else Path(sys.executable)
        return [python, "-m", f"bench.systems.{module}"]

    def _program(self, path: str) -> Path:
        program = PEERS / self.name / path
        if not program.exists():
            raise MissingPeer(f"{self.name} is not installed: make bench-peers")
        return program


SYSTEMS = {
    system.name: system
    for system in (
        System("awa", has_retries=True),
        System("naive"),
        System("awa-pg", has_retries=True),
        System("procrastinate", most_jobs=25_000),
        System("pgqueuer"),
        System("graphile-worker", has_retries=True),
        System("pg-boss"),
    )
}
PEER_NAMES = tuple(name for name, system in SYSTEMS.items() if system.is_peer)


class Process:
    """A process of a system, which does one thing at a time; ends with its `with` block."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._log = PEERS / f"{system.name}-{os.getpid()}-{id(self):x}.log"

    def __enter__(self) -> Self:
        PEERS.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "BENCH_PACKAGES": str(PEERS / self.system.name)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.system.command(),
                cwd=REPO,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
        self._process.stdout.close()
        if exc_type is None:
            self._log.unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def kill(self) -> None:
        """End it without warning."""
        self._process.kill()
        self._process.wait()

    def ask(self, what: str, *, within: float = ANSWER_SECONDS, **arguments: Any) -> Any:
        """Ask for something and wait for the answer."""
        self.tell(what, **arguments)
        return self.answer(within)

    def tell(self, what: str, **arguments: Any) -> None:
        """Ask for something whose answer is fetched later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, within: float = ANSWER_SECONDS) -> Any:
        """The answer to the oldest request that has none."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], within)[0]:
            raise TimeoutError(f"{self.system.name} did not answer within {within:g} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            log = self._log.read_text(errors="replace")[-TAIL_BYTES:]
            raise RuntimeError(f"{self.system.name}: {answer['error']}\n{log}")
        return answer["ok"]


@contextmanager
def processes(system: System, count: int) -> Iterator[list[Process]]:
    """So many processes of a system."""
    with ExitStack() as stack:
        yield [stack.enter_context(Process(system)) for _ in range(count)]


class Installed:
    """Databases with the schemas of some systems, to be copied for each measurement."""

    def __init__(self, server: Server, systems: Sequence[System]) -> None:
        self._server = server
        self._systems = systems
        self._stack = ExitStack()
        self._templates: dict[str, str] = {}
        self.settings: dict[str, dict[str, str | int | float]] = {}

    def __enter__(self) -> Self:
        with self._stack:
            for system in self._systems:
                dsn = self._stack.enter_context(self._server.database())
                with Process(system) as process:
                    process.ask("install", dsn=dsn)
                    self.settings[system.name] = process.ask("settings")
                self._templates[system.name] = dsn
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextmanager
    def database(
        self,
        system: System,
        jobs: int = 0,
        batch: int = 1_000,
        prepare: Callable[[Connection], None] | None = None,
    ) -> Iterator[str]:
        """A fresh database of a system that holds so many jobs, with statistics."""
        with self._server.database(template=self._templates[system.name]) as dsn:
            if prepare is not None:
                with connect(dsn) as conn:
                    prepare(conn)
            if jobs:
                with Process(system) as process:
                    process.ask("connect", dsn=dsn)
                    process.ask("load", jobs=jobs, batch=batch, within=600)
            settle(dsn)
            yield dsn


def settle(dsn: str) -> None:
    """Leave no work of the load to what comes next; every system starts with statistics."""
    with connect(dsn) as conn:
        conn.execute("VACUUM ANALYZE")
        conn.execute("CHECKPOINT")


def add_systems_option(parser: argparse.ArgumentParser, default: str) -> None:
    """The option that chooses the systems: names, or `all`."""
    parser.add_argument(
        "--systems",
        type=_systems,
        default=_systems(default),
        metavar="NAME,...",
        help=f"of {', '.join(SYSTEMS)}; all; by default {default}",
    )


def _systems(names: str) -> list[System]:
    chosen = list(SYSTEMS) if names == "all" else names.split(",")
    unknown = [name for name in chosen if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown systems: {', '.join(unknown)}")
    return [SYSTEMS[name] for name in chosen]
