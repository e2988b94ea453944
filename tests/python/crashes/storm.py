"""Runs a storm: a server of its own, the actors of the race, real workers, what befalls them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from conftest import TEMPLATE_SCRIPT
from crashes import hazards, verdict
from crashes.actors import WORKED_QUEUE, Claimer, Producer, Stage, Ticker
from crashes.disks import SmallDisk, SmallWalCluster, small_disk
from crashes.session import WITNESS
from race import supervisor
from race.actors import SLOTS, Board
from race.ledger import Effect, Insert
from race.supervisor import fork, unfinished
from tools.faketime import CACHE_SECONDS, FakeClock
from tools.servers import Cluster, cluster_directories, ensure_tree, own_directory

ROLES: dict[str, tuple[type[Producer | Claimer | Ticker], int]] = {
    "producer": (Producer, 4),
    "claimer": (Claimer, 3),
    "ticker": (Ticker, 2),
}
WORKERS = 2
DATABASE = "storm"
# Nothing that was answered may be lost with a process; pages may be torn by SIGKILL.
OPTIONS = {"synchronous_commit": "on", "full_page_writes": "on", "restart_after_crash": "on"}
SETTINGS = {**supervisor.SETTINGS, "heartbeat_seconds": 0.5, "staleness_seconds": 2}
MEGABYTES = {"full disk": 160, "full WAL": 64}
DRAIN_SECONDS = 60
SERVER_SECONDS = 30
KINDS = {
    "kills": hazards.KILLS,
    "ends": hazards.ENDS,
    "clocks": hazards.CLOCKS,
    "mixed": hazards.MIXED,
    "full disk": hazards.FULL_DISK,
    "full WAL": hazards.FULL_WAL,
}
GOES_ON_SECONDS = 20
GENERATIONS = "SELECT q.last_value / 64, c.last_value / 64 FROM awa.queue_ring q, awa.claim_ring c"
OPEN = "SELECT o.batch_id FROM generate_series(0, 7) s, awa._open_batches(s) o"
LIVE = "SELECT count(*) FROM awa.instances i WHERE i.is_live AND i.info ? 'kinds'"


class Probe:
    """A few jobs of which it must be seen that they run."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._directory = stage.directory
        self._name = f"probe-{number}"
        self._session = stage.session(self._name)
        self._tokens: set[str] = set()

    def enqueue(self, delay: float) -> bool:
        token = f"{self._name}/{len(self._tokens)}"

        def insert(conn: psycopg.Connection, effects: list[Effect]) -> None:
            row = conn.execute(
                "SELECT job_id FROM awa.insert_job('any', jsonb_build_object('token', %s::text),"
                " %s, opts => jsonb_build_object('delay_seconds', %s::numeric))",
                [token, WORKED_QUEUE, delay],
            ).fetchone()
            assert row
            effects.append(Insert(row[0], WORKED_QUEUE, 25, token))

        if self._session.transact(insert) is None:
            return False
        self._tokens.add(token)
        return True

    def has_run(self) -> bool:
        return self._tokens <= {run.token for run in verdict.read_runs(self._directory)}


@dataclass(slots=True)
class Storm:
    """One storm, run in this process, which must have one thread, and its children."""

    cluster: Cluster
    stage: Stage
    clock: FakeClock | None = None
    full: SmallDisk | None = None
    database: str = DATABASE
    log: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    forked: int = 0
    actors: dict[str, list[int]] = field(default_factory=dict)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)  # until when

    # ---- what hazards need

    def connect(self) -> psycopg.Connection:
        """A connection that no timeout of the storm touches, once the server lets us in."""
        names = hazards.timeouts(self.cluster.tree.version)
        options = " ".join(["-c application_name=storm", *(f"-c {name}=0" for name in names)])
        end = time.monotonic() + SERVER_SECONDS
        while True:
            try:
                return psycopg.connect(self.stage.dsn, autocommit=True, options=options)
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def comes_back(self) -> bool:
        """Whether the server lets somebody in soon."""
        for _ in range(50):
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.stage.dsn).close()
                return True
            time.sleep(0.1)
        return False

    def pause(self, seconds: float) -> None:
        """Let the storm go on for a while; continue workers whose time has come."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for pid, until in list(self.stopped.items()):
                if time.monotonic() > until:
                    del self.stopped[pid]
                    os.kill(pid, signal.SIGCONT)
            time.sleep(min(left, 0.05))

    def add_actor(self, role: str) -> int:
        kind, _ = ROLES[role]
        pid = fork(partial(supervisor.act, kind, self.stage, self.forked))
        self.forked += 1
        self.actors.setdefault(role, []).append(pid)
        return pid

    def replace_actor(self, role: str, rng: random.Random) -> str:
        """Kill one process of a role and start another one."""
        pid = self.actors[role].pop(rng.randrange(len(self.actors[role])))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"a {role} had failed")
        self.add_actor(role)
        return role

    def add_worker(self) -> None:
        path = self.stage.directory / f"worker-{self.forked}.runs"
        command = [sys.executable, "-m", "crashes.worker", self.stage.dsn, str(path)]
        with (self.stage.directory / "workers.log").open("ab") as output:
            worker = subprocess.Popen([*command, str(self.forked)], stderr=output)
        self.workers.append(worker)
        self.forked += 1

    def replace_worker(self, rng: random.Random) -> int:
        """Kill one worker and start another one."""
        worker = self.workers.pop(rng.randrange(len(self.workers)))
        if worker.poll() is not None:
            raise RuntimeError(f"a worker had ended with status {worker.returncode}")
        self.stopped.pop(worker.pid, None)
        worker.kill()
        worker.wait()
        self.add_worker()
        return worker.pid

    def suspend_worker(self, rng: random.Random) -> None:
        """Stop a worker for longer than it takes to be given up."""
        worker = rng.choice(self.workers)
        os.kill(worker.pid, signal.SIGSTOP)
        self.stopped[worker.pid] = time.monotonic() + SETTINGS["staleness_seconds"] + 1.5

    def step_clock(self, offset: int) -> None:
        """Set the server's clock and see that everything goes on as before."""
        assert self.clock
        self.replace_worker(random.Random(offset))
        self.clock.set(offset)
        self.pause(CACHE_SECONDS + 0.1)
        with self.connect() as conn:
            left = {batch for (batch,) in conn.execute(OPEN)}
            self.expect_progress(conn)
            self.wait_for(
                lambda: left.isdisjoint(batch for (batch,) in conn.execute(OPEN)),
                "attempts of before the step are still open",
            )
            self.wait_for(
                lambda: conn.execute(LIVE).fetchall() >= [(WORKERS,)], "workers do not look alive"
            )

    @property
    def disk(self) -> SmallDisk:
        """The disk to be filled."""
        assert self.full
        return self.full

    def fill_disk(self, seconds: float) -> str:
        """Leave no room for so long, and see that everything goes on when there is some."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # what prune gives back is taken at once
            self.disk.fill()
            self.pause(0.02)
        self.disk.free()
        was_down = not self.comes_back()
        if was_down:
            # Without room for WAL recovery fails too, and the server ends, or hangs.
            self.cluster.kill()
            self.cluster.restart()
        with self.connect() as conn:
            self.expect_progress(conn)
        return f"disk full for {seconds:.1f} s{', server down' * was_down}"

    def expect_progress(self, conn: psycopg.Connection) -> None:
        """See that both rings turn, and that jobs run, deferred ones as well."""
        before = conn.execute(GENERATIONS).fetchall()[0]
        probe = Probe(self.stage, len(self.log))
        for delay in (0, 0.2):
            self.wait_for(partial(probe.enqueue, delay), "a job cannot be enqueued")
        self.wait_for(probe.has_run, "jobs do not run")

        def have_turned() -> bool:
            queue, claim = conn.execute(GENERATIONS).fetchall()[0]
            return bool(queue > before[0] and claim > before[1])

        self.wait_for(have_turned, "a ring does not turn")

    def wait_for(self, condition: Callable[[], object], text: str) -> None:
        """Wait for something that must come soon; say in the ledger when it did not."""
        end = time.monotonic() + GOES_ON_SECONDS
        while not condition():
            if time.monotonic() > end:
                self.problems.append(f"after {self.log[-1:]}: {text}")
                return
            self.pause(0.05)

    # ---- the storm

    def prepare(self) -> None:
        """Set up the database."""
        with psycopg.connect(self.cluster.dsn, autocommit=True) as conn:
            where = ""
            if self.full and not isinstance(self.cluster, SmallWalCluster):
                conn.execute(f"CREATE TABLESPACE small LOCATION '{self.disk.path}'".encode())
                where = "TABLESPACE small"
            conn.execute(f"CREATE DATABASE {DATABASE} {where}".encode())
        with psycopg.connect(self.stage.dsn, autocommit=True) as conn:
            conn.execute(TEMPLATE_SCRIPT.read_bytes())
            conn.execute(supervisor.OBSERVER.encode())
            conn.execute(f"{verdict.OBSERVER};{WITNESS}".encode())
            for name, value in SETTINGS.items():
                conn.execute("SELECT awa.set_setting(%s, %s)", [name, str(value)])
            conn.execute("SELECT awa.declare_queue('sharded', '{\"enqueue_shards\": 4}')")
            conn.execute("SELECT awa.declare_queue('dead', '{\"dlq\": true}')")
            conn.execute("SELECT awa.declare_queue(%s)", [WORKED_QUEUE])

    def run(self, kind: str, seconds: float) -> None:
        """Storm for so long, and at least until every hazard has come once; then drain."""
        rng = random.Random(self.stage.seed)
        for role, (_, count) in ROLES.items():
            for _ in range(count):
                self.add_actor(role)
        for _ in range(WORKERS):
            self.add_worker()
        try:
            self.pause(1)
            end = time.monotonic() + seconds
            interval = seconds / len(KINDS[kind])
            while True:
                self._blow(kind, rng, interval)
                if time.monotonic() > end:
                    break
            self._stop()
            self.drain()
        finally:
            for pid in [pid for pids in self.actors.values() for pid in pids]:
                os.kill(pid, signal.SIGKILL)
            for worker in self.workers:
                worker.kill()
                worker.wait()

    def _blow(self, kind: str, rng: random.Random, interval: float) -> None:
        """Each hazard once, in some order; a clock keeps to its course."""
        course = list(KINDS[kind])
        if kind != "clocks":
            rng.shuffle(course)
        for hazard in course:
            self.pause(min(1.0, interval) * rng.uniform(0.2, 1))
            self.log.append(hazard(self, rng))
            self._correct_backlog()

    def _correct_backlog(self) -> None:
        """Claims whose answer was lost are not counted on the board: say how many wait."""
        board = self.stage.board
        with self.connect() as conn:
            row = conn.execute("SELECT sum(depth) FROM awa.queue_depths()").fetchone()
        depth = int(row[0] or 0) if row else 0
        board.add("started", SLOTS - 1, board.backlog - depth)

    def _stop(self) -> None:
        self.stage.board.put("stop", 0, 1)
        for pid in list(self.stopped):
            os.kill(pid, signal.SIGCONT)
        self.stopped.clear()
        for pids in self.actors.values():
            while pids:
                supervisor.expect_success(pids.pop())

    def drain(self) -> None:
        """Run all that is left, what rescue brings back included; workers go on with theirs."""
        last = Claimer(self.stage, self.forked, calm=True)
        ticker = Ticker(self.stage, self.forked)
        end = time.monotonic() + DRAIN_SECONDS
        with self.connect() as conn:
            while left := unfinished(conn):
                if time.monotonic() > end:
                    last.session.write("failed", "drain", f"still at work: {left}")
                    break
                # Backoff is tested elsewhere; here nobody waits for it.
                conn.execute(
                    "UPDATE awa.deferred_jobs SET run_at = clock_timestamp(),"
                    " slot = awa._deferred_slot(clock_timestamp(), clock_timestamp())"
                    " WHERE run_at > clock_timestamp()"
                )
                ticker.tick()
                last.beat()
                for queue in set(left) - {WORKED_QUEUE}:
                    last.claim(queue)
                for batch in list(last.held):
                    last.complete(batch)
                if left == [WORKED_QUEUE]:
                    time.sleep(0.05)
        for worker in self.workers:
            worker.send_signal(signal.SIGTERM)
        for worker in self.workers:
            if worker.wait(30) != 0:
                last.session.write("failed", "worker", f"ended with {worker.returncode}")
        self.workers.clear()


def run(kind: str, directory: Path, seed: int, seconds: float) -> dict[str, object]:
    """Run one storm and return what happened and what is wrong."""
    tree = ensure_tree(int(os.environ["AWA_PG_VERSION"]))
    clock = FakeClock() if kind == "clocks" else None
    if clock:
        tree = clock.tree(tree)
    with contextlib.ExitStack() as stack:
        disk = None
        # Where the server's user can go.
        place = own_directory(cluster_directories()[0]) / f"disk-{os.getpid()}"
        if kind.startswith("full"):
            disk = stack.enter_context(small_disk(place, MEGABYTES[kind]))
        if disk and kind == "full WAL":
            cluster: Cluster = SmallWalCluster(tree, OPTIONS, disk)
        else:
            cluster = Cluster(tree, OPTIONS)
        stack.enter_context(cluster)
        stack.callback(lambda: shutil.copy(cluster.log_file, directory / "server.log"))
        dsn = make_conninfo(cluster.dsn, dbname=DATABASE)
        stage = Stage(dsn, directory, seed, Board(), time.monotonic())
        storm = Storm(cluster, stage, clock, disk)
        storm.prepare()
        storm.run(kind, seconds)
        with storm.connect() as conn:
            found = verdict.Verdict(directory, conn)
        history = found.check_history(directory)
        return {
            "log": storm.log,
            "jobs": sum(stage.board.values("jobs")),
            "runs": len(found.runs),
            "summary": f"{found.summary()}; {history}",
            "counts": found.story.counts,
            "problems": storm.problems + found.problems,
        }
