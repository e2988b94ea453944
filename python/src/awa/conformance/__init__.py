"""Drives a worker of any implementation through the rules of docs/conformance.md.

The worker is a command that gets AWA_DSN and AWA_QUEUE in its environment, has handlers for the
kinds named conformance_*, and stops on SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import IO, Any

import psycopg
from psycopg import sql

from ..client import Client
from ..errors import InvalidArgument, WrongState
from ..models import JobInfo, Json

__all__ = ["QUEUE", "RULES", "Rule", "Verdict", "run"]

QUEUE = "conformance"
STALENESS = 3
SETTINGS = {"staleness_seconds": str(STALENESS), "heartbeat_seconds": "0.5"}
TABLE = "awa_conformance"
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Rule:
    """What a worker must or may do."""

    number: str
    level: str
    text: str


RULES = (
    Rule("W1", "must", "registers its instance and sends heartbeats"),
    Rule("W2", "must", "completes each of 10 jobs at its first attempt"),
    Rule("W3", "may", "hands args to the handler unchanged and stores its result"),
    Rule("W4", "must", "turns an error of a handler into a retry, with the error"),
    Rule("W5", "may", "lets a handler ask for a retry; the last attempt fails the job"),
    Rule("W6", "may", "lets a handler snooze; the attempt does not count"),
    Rule("W7", "may", "lets a handler cancel its job, with a reason"),
    Rule("W8", "may", "lets a handler fail its job for good, with a reason"),
    Rule("W9", "must", "hands a job of an unknown kind back, without an attempt"),
    Rule("W10", "must", "bears that a running job is cancelled: its result is dropped, it goes on"),
    Rule("W11", "must", "keeps a job that runs for longer than the staleness"),
    Rule("W12", "must", "takes over the job of a worker that was killed, as the next attempt"),
    Rule("W13", "must", "on SIGTERM ends with status 0 and leaves no job running"),
    Rule("W14", "must", "runs nothing of a paused queue, and goes on when it is resumed"),
    Rule("W15", "must", "goes on after the server has ended its connections"),
    Rule("W16", "may", "promotes scheduled jobs without help, by tick"),
    Rule("W17", "may", "lets a handler keep progress over a retry"),
    Rule("W18", "may", "lets a handler complete its job in its own transaction"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a rule: ok, failed, or cannot (the worker does not offer it)."""

    rule: Rule
    answer: str
    detail: str = ""


class _Cannot(Exception):
    """The worker has no handler for the kind."""


class _Failed(Exception):
    """The rule is broken."""


def run(
    dsn: str,
    command: str,
    *,
    schema: str = "awa",
    timeout: float = 30,
    output: IO[Any] | None = None,
    rules: Collection[str] = (),
) -> Iterator[Verdict]:
    """Yield the verdict on each rule as it is known; takes about half a minute for all of them.

    With `rules` only those are checked, and W1, without which there is no worker.

    The database must be one that nothing else uses: settings change for the time of the run, and
    connections are ended.
    """
    if unknown := set(rules) - {rule.number for rule in RULES}:
        raise InvalidArgument(f'field "rules" names no rule: {", ".join(sorted(unknown))}')
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidArgument(f'field "command" cannot be split into words: {error}') from error
    if not words:
        raise InvalidArgument('field "command" must not be empty')
    with psycopg.connect(dsn, autocommit=True) as conn:
        trial = _Trial(conn, dsn, words, schema, timeout, output)
        with trial.prepared():
            first = trial.judge(RULES[0])
            yield first
            for rule in [rule for rule in RULES[1:] if not rules or rule.number in rules]:
                if first.answer == "ok":
                    yield trial.judge(rule)
                else:
                    yield Verdict(rule, "failed", "the worker did not start")


class _Trial:
    def __init__(
        self,
        conn: psycopg.Connection[Any],
        dsn: str,
        command: list[str],
        schema: str,
        timeout: float,
        output: IO[Any] | None,
    ) -> None:
        self.conn = conn
        self.client = Client(conn, schema=schema)
        self.schema = sql.Identifier(schema)
        self.dsn = dsn
        self.command = command
        self.timeout = timeout
        self.output = subprocess.DEVNULL if output is None else output
        self.worker: subprocess.Popen[bytes] | None = None

    # The stage

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """A database with short times; all is put back at the end."""
        if self.live_instances():
            raise WrongState(
                "a worker is connected to this database",
                hint="Use a database that nothing else works on. Workers of an earlier run count"
                " for staleness_seconds (90).",
            )
        before = {s.name: s.value for s in self.client.settings() if s.name in SETTINGS}
        for name, value in SETTINGS.items():
            self.client.set_setting(name, value)
        self.conn.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} (job_id bigint)".encode())
        try:
            yield
        finally:
            self.kill()
            self.conn.execute(f"DROP TABLE {TABLE}".encode())
            for name, value in before.items():
                self.client.set_setting(name, value)

    def start(self) -> subprocess.Popen[bytes]:
        try:
            self.worker = subprocess.Popen(
                self.command,
                env={**os.environ, "AWA_DSN": self.dsn, "AWA_QUEUE": QUEUE},
                stdout=self.output,
                stderr=self.output,
                start_new_session=True,
            )
        except OSError as error:
            raise _Failed(f"{self.command[0]!r} cannot be started: {error.strerror}") from error
        return self.worker

    def kill(self) -> None:
        """End the worker and all that it started, at once."""
        if self.worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()
            self.worker = None

    def judge(self, rule: Rule) -> Verdict:
        test: Callable[[], None] = getattr(self, f"_{rule.number.lower()}")
        try:
            if rule.number != "W1" and (self.worker is None or self.worker.poll() is not None):
                self.kill()
                self.start()
            test()
        except _Cannot as error:
            answer = "failed" if rule.level == "must" else "cannot"
            return Verdict(rule, answer, str(error))
        except _Failed as error:
            return Verdict(rule, "failed", str(error))
        return Verdict(rule, "ok")

    # What the tests use

    def insert(self, kind: str, args: Json = None, **options: Any) -> int:
        return self.client.insert_job(
            f"conformance_{kind}", args or {}, queue=QUEUE, **options
        ).job_id

    def live_instances(self) -> int:
        query = sql.SQL("SELECT count(*) FROM {}.instances WHERE is_live").format(self.schema)
        [(count,)] = self.conn.execute(query)
        return int(count)

    def last_heartbeat(self) -> datetime:
        query = sql.SQL("SELECT max(heartbeat_at) FROM {}.instances").format(self.schema)
        [(at,)] = self.conn.execute(query)
        assert isinstance(at, datetime)
        return at

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + self.timeout
        while not condition():
            if time.monotonic() > end:
                raise _Failed(f"not within {self.timeout:g} s: {what}")
            if self.worker is not None and (code := self.worker.poll()) is not None:
                raise _Failed(f"the worker ended with status {code}; missing: {what}")
            time.sleep(LOOK_SECONDS)

    def wait(self, job_id: int, state: str, *, help_out: bool = False) -> JobInfo:
        """The job once it is in a state; the promotion of due jobs may need help."""
        info: list[JobInfo] = []

        def reached() -> bool:
            if help_out:
                self.client.tick(budget={"steps": ["refill", "promote", "rescue"]})
            info[:] = [self.client.job(job_id)]
            if _is_handed_back(info[0]) and not (info[0].kind or "").endswith("_unknown"):
                raise _Cannot(f"no handler for kind {info[0].kind}")
            if info[0].is_terminal and info[0].state != state:
                raise _Failed(f"the job is {info[0].state}, not {state}")
            return info[0].state == state

        try:
            self.until(reached, f"job {state}")
        except _Failed as error:
            if info[0].is_terminal:
                raise
            raise _Failed(f"{error}, is {info[0].state}") from None
        return info[0]

    def runs(self, job_id: int) -> None:
        self.wait(job_id, "running")

    def goes_on(self) -> None:
        self.wait(self.insert("succeed"), "completed", help_out=True)

    # The rules

    def _w1(self) -> None:
        self.start()
        self.until(lambda: self.live_instances() == 1, "a live row in the instances view")
        first = self.last_heartbeat()
        self.until(lambda: self.last_heartbeat() > first, "a second heartbeat")

    def _w2(self) -> None:
        ids = self.client.insert_many(
            "conformance_succeed", [{"n": n} for n in range(10)], queue=QUEUE
        )
        for job_id in ids:
            info = self.wait(job_id, "completed")
            _expect(info.attempt == 1, f"job completed at attempt {info.attempt}")

    def _w3(self) -> None:
        args = {"text": 'ünï "\\ \n\t$1 %s ', "deep": [{"a": [None, True, 1.5, -7]}], "": {}}
        info = self.wait(self.insert("echo", args, opts={"keep_result": True}), "completed")
        _expect(info.result == args, f"the result is {info.result!r}")

    def _w4(self) -> None:
        info = self.wait(self.insert("raise"), "retryable")
        _expect(info.attempt == 1, f"attempt {info.attempt}")
        _expect(bool(info.errors), "no error was stored")
        self.client.cancel_job(info.job_id)

    def _w5(self) -> None:
        info = self.wait(self.insert("retry", max_attempts=2), "failed", help_out=True)
        _expect(info.attempt == 2, f"failed at attempt {info.attempt}")
        _expect(len(info.errors or ()) == 2, f"errors {info.errors}")

    def _w6(self) -> None:
        job_id = self.insert("snooze")
        info = self.wait(job_id, "scheduled")
        _expect(info.attempt == 0, f"attempt {info.attempt} was charged")
        self.client.cancel_job(job_id)

    def _w7(self) -> None:
        info = self.wait(self.insert("cancel"), "cancelled")
        _expect(info.reason == "not needed", f"the reason is {info.reason!r}")

    def _w8(self) -> None:
        info = self.wait(self.insert("fail"), "failed")
        _expect(info.attempt == 1, f"attempt {info.attempt}")
        _expect(info.reason == "hopeless", f"the reason is {info.reason!r}")

    def _w9(self) -> None:
        job_id = self.insert("unknown")
        info: list[JobInfo] = []

        def is_settled() -> bool:
            info[:] = [self.client.job(job_id)]
            return info[0].is_terminal or _is_handed_back(info[0])

        self.until(is_settled, "job handed back")
        _expect(not info[0].is_terminal, f"the job is {info[0].state}")
        _expect(not info[0].errors, "an error was stored")
        self.client.cancel_job(job_id)

    def _w10(self) -> None:
        job_id = self.insert("sleep", {"seconds": 1})
        self.runs(job_id)
        self.client.cancel_job(job_id)
        self.goes_on()
        time.sleep(1)  # so that the handler comes to its end in a worker with several slots
        self.goes_on()
        _expect(self.client.job(job_id).state == "cancelled", "the job is no longer cancelled")

    def _w11(self) -> None:
        job_id = self.insert("sleep", {"seconds": STALENESS + 2})
        info = self.wait(job_id, "completed", help_out=True)
        _expect(info.attempt == 1, f"the job was rescued, and completed at attempt {info.attempt}")

    def _w12(self) -> None:
        job_id = self.insert("sleep", {"seconds": 1})
        self.runs(job_id)
        self.kill()
        self.start()
        info = self.wait(job_id, "completed", help_out=True)
        _expect(info.attempt == 2, f"completed at attempt {info.attempt}")

    def _w13(self) -> None:
        worker = self.worker
        assert worker is not None
        job_id = self.insert("sleep", {"seconds": 1})
        self.runs(job_id)
        worker.terminate()
        try:
            code = worker.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise _Failed(f"still there after {self.timeout:g} s") from None
        _expect(code == 0, f"status {code}")
        counts = self.client.queue_counts(QUEUE)
        _expect(counts.running == 0, f"{counts.running} jobs are left running")
        state = self.client.job(job_id).state
        _expect(state in ("completed", "available", "retryable"), f"the job is {state}")

    def _w14(self) -> None:
        self.client.pause_queue(QUEUE)
        job_id = self.insert("succeed")
        time.sleep(1)
        state = self.client.job(job_id).state
        self.client.resume_queue(QUEUE)
        _expect(state == "available", f"the job is {state} while the queue is paused")
        self.wait(job_id, "completed")

    def _w15(self) -> None:
        self.goes_on()
        try:
            self.conn.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'"
            )
        except psycopg.errors.InsufficientPrivilege as error:
            raise _Failed(f"this role may not end connections: {error}") from error
        self.goes_on()

    def _w16(self) -> None:
        job_id = self.insert("succeed", opts={"delay_seconds": 0.5})
        end = time.monotonic() + self.timeout / 3
        while self.client.job(job_id).state != "completed":
            if time.monotonic() > end:
                self.client.cancel_job(job_id)
                raise _Cannot("some other process must call tick")
            time.sleep(LOOK_SECONDS)

    def _w17(self) -> None:
        job_id = self.insert("progress", opts={"keep_result": True})
        info = self.wait(job_id, "completed", help_out=True)
        _expect(info.result == {"step": 1}, f"the progress is {info.result!r}")

    def _w18(self) -> None:
        job_id = self.insert("transaction", {"seconds": 0})
        self.wait(job_id, "completed")
        rows = self.rows_of(job_id)
        _expect(rows == 1, f"{rows} rows for one completed job")
        job_id = self.insert("transaction", {"seconds": 1})
        self.runs(job_id)
        self.client.cancel_job(job_id)
        self.goes_on()
        time.sleep(1.5)  # so that the handler comes to its end in a worker with several slots
        self.goes_on()
        rows = self.rows_of(job_id)
        _expect(rows == 0, f"{rows} rows for a job that was cancelled before it completed")

    def rows_of(self, job_id: int) -> int:
        query = f"SELECT count(*) FROM {TABLE} WHERE job_id = %s"
        [(count,)] = self.conn.execute(query.encode(), [job_id])
        return int(count)


def _is_handed_back(info: JobInfo) -> bool:
    """Deferred by a worker that does not know the kind: by a minute at most, a snooze by ten."""
    return (
        info.state == "scheduled"
        and (info.run_lease or 0) > 0
        and info.attempt == 0
        and info.run_at is not None
        and info.run_at < datetime.now(UTC) + timedelta(seconds=120)
    )


def _expect(condition: bool, detail: str) -> None:
    if not condition:
        raise _Failed(detail)
