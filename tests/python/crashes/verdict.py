"""The verdict of the race, with what real workers ran."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from crashes.actors import WORKED_QUEUE
from race.ledger import Claim, read_story
from race.verdict import STATES, Receipt
from race.verdict import Verdict as RaceVerdict

# Beside what the race observes: the attempts that workers were given, since they keep no ledger. A
# row commits with its claim.
OBSERVER = f"""
CREATE TABLE observed.attempts (job_id bigint, run_lease bigint, attempt integer,
    max_attempts integer, batch_id bigint, position bigint, token text);
CREATE FUNCTION observed.note_attempts() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO observed.attempts
    SELECT coalesce(r.job_id, r.position), coalesce((r.ext ->> 'run_lease')::bigint, 0) + 1,
           coalesce((r.ext ->> 'attempt')::integer, 0) + 1,
           coalesce((r.ext ->> 'max_attempts')::integer, 25), NEW.batch_id, r.position,
           r.args ->> 'token'
    FROM unnest(NEW.positions) s (s), awa.ready_entries r
    WHERE r.slot = NEW.ready_slot AND r.position >= lower(s.s) AND r.position < upper(s.s)
          AND (SELECT l.queue FROM awa.queue_lanes l WHERE l.lane_id = r.position >> 42)
              = '{WORKED_QUEUE}';
    RETURN NULL;
END $$;
CREATE TRIGGER observe_attempts AFTER INSERT ON awa.lease_claim_batches
    FOR EACH ROW EXECUTE FUNCTION observed.note_attempts();
"""
WAITS_AGAIN = {"retried", "released", "snoozed"}


class Run(NamedTuple):
    """A handler was started."""

    job_id: int
    run_lease: int
    attempt: int
    max_attempts: int
    batch_id: int
    position: int
    token: str


def read_runs(directory: Path) -> Iterator[Run]:
    """All runs of all workers."""
    for path in sorted(directory.glob("*.runs")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield Run(*json.loads(line))


class Verdict(RaceVerdict):
    """All that is wrong with a storm."""

    def __init__(self, directory: Path, conn: psycopg.Connection) -> None:
        commits = {token for (token,) in conn.execute("SELECT token FROM observed.commits")}
        rows = conn.execute("SELECT * FROM observed.attempts").fetchall()
        self.given = [Claim(*row) for row in rows]
        self.worked = {(claim.batch_id, claim.position) for claim in self.given}
        self.runs = list(read_runs(directory))
        super().__init__(read_story(directory, commits.__contains__), conn)
        self._check_runs()
        self._check_verify(conn)

    def _claims(self) -> dict[Receipt, Claim]:
        claims = super()._claims()
        for claim in self.given:
            insert = self.inserts.get(claim.job_id)
            if insert is None or insert.token != claim.token:
                self._report("jobs invented", claim)
            claims[claim.batch_id, claim.position] = claim
        return claims

    def _add_untold(
        self, ends: dict[int, list[str]], told: set[Receipt], cancels: Counter[int]
    ) -> None:
        for receipt in self.worked:
            for outcome in self.observed.closures.get(receipt, ()):
                if outcome in STATES and outcome != "cancelled":
                    ends[self.claims[receipt].job_id].append(STATES[outcome])
                    told.add(receipt)
                elif outcome in WAITS_AGAIN:
                    told.add(receipt)
        super()._add_untold(ends, told, cancels)

    def _check_runs(self) -> None:
        """A run belongs to an attempt that was given, and no attempt runs twice."""
        runs = Counter((run.batch_id, run.position) for run in self.runs)
        self._report("attempts run twice", [r for r, n in runs.items() if n > 1])
        given = {(claim.batch_id, claim.position): claim for claim in self.given}
        wrong = [run for run in self.runs if given.get((run.batch_id, run.position)) != Claim(*run)]
        self._report("runs of no attempt", wrong)
        completed = {r for r in self.worked if self.observed.closures.get(r) == ["completed"]}
        self._report("completions without effect", completed - runs.keys())

    def _check_verify(self, conn: psycopg.Connection) -> None:
        """No number is in use that its sequence has still to give; rings stand at their ledger."""
        horizons = conn.execute(
            "SELECT count(*) FROM awa.queue_lanes l, awa._newest_emission(l.lane_id) e"
            " WHERE e.horizon IS NOT NULL"
        ).fetchone()
        for ring in ("queue", "claim"):  # each in a transaction of its own
            step = Jsonb({"steps": [f"publish_{ring}"]})
            conn.execute("SELECT awa.tick(%s)", [step])
        assert horizons
        expected = {"verify_rings": 0, "verify_lanes": horizons[0], "verify_sequences": 0}
        expected["verify_identity"] = 0
        for round_ in (expected, dict.fromkeys(expected, 0)):
            found: dict[str, int] = dict(
                conn.execute("SELECT step, rows FROM awa.verify()").fetchall()
            )
            if found != round_:
                self.problems.append(f"verify() changed {found}, not {round_}")

    def summary(self) -> str:
        """How much of everything there was."""
        return f"{super().summary()}; {len(self.runs)} runs by workers"
