"""Compares what the processes of a race were told with what the database shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import psycopg

from history.checker import ANY_QUEUE, Checker
from history.records import Writer
from race.ledger import Cancel, Claim, End, Insert, Story

DEAD_QUEUE = "dead"  # the one whose failed jobs are dead letters
ASKED = {
    "completed": "completed",
    "snooze": "snoozed",
    "cancel": "cancelled",
    "released": "released",
}
STATES = {
    "completed": "completed",
    "cancelled": "cancelled",
    "failed": "failed",
    "dead_lettered": "dead_lettered",
}
SHOWN = 10
# What was inserted within this time was committed before the ring turned twice, so that no claim
# could pass its slot before; what came later may be found one claim late.
FIFO_WITHIN = 0.05

Receipt = tuple[int, int]  # batch id and position


@dataclass(frozen=True, slots=True)
class Observed:
    """Every receipt and closure that ever committed, pruned ones included."""

    receipts: Counter[Receipt]
    closures: dict[Receipt, list[str]]  # of receipts and leases
    moved: Counter[Receipt]  # receipts that were replaced by a lease
    leases: Counter[Receipt]


def observe(conn: psycopg.Connection) -> Observed:
    receipts = conn.execute(
        "SELECT b.batch_id, p FROM observed.batches b, unnest(b.positions) r,"
        " generate_series(lower(r), upper(r) - 1) p"
    ).fetchall()
    closures: dict[Receipt, list[str]] = defaultdict(list)
    moved = Counter[Receipt]()
    for batch, position, outcome in conn.execute(
        "SELECT c.batch_id, p, c.outcome FROM observed.closures c, unnest(c.closed) r,"
        " generate_series(lower(r), upper(r) - 1) p"
    ):
        if outcome == "moved":
            moved[batch, position] += 1
        else:
            closures[batch, position].append(outcome)
    leases = conn.execute("SELECT batch_id, position FROM observed.leases").fetchall()
    return Observed(count(receipts), closures, moved, count(leases))


def count(rows: list[tuple[int, int]]) -> Counter[Receipt]:
    return Counter((batch, position) for batch, position in rows)


class Verdict:
    """All that is wrong with a race; `problems` is empty when nothing is."""

    def __init__(self, story: Story, conn: psycopg.Connection) -> None:
        self.story = story
        self.observed = observe(conn)
        self.problems: list[str] = list(self.story.failures)
        self.untold: list[int] = []  # jobs whose end no session was told
        self.inserts = self._inserts()
        self.claims = self._claims()
        self._check_receipts()
        self._check_leases()
        self._check_counts(conn, self._final_states())

    def _report(self, text: str, culprits: object) -> None:
        found = list(culprits) if isinstance(culprits, (list, set, Counter, dict)) else [culprits]
        if found:
            self.problems.append(f"{len(found)} {text}: {found[:SHOWN]}")

    def _inserts(self) -> dict[int, Insert]:
        inserts: dict[int, Insert] = {}
        twice = []
        for effect in self.story.effects:
            if isinstance(effect, Insert):
                if effect.job_id in inserts:
                    twice.append(effect)
                inserts[effect.job_id] = effect
        self._report("ids given twice", twice)
        return inserts

    def _claims(self) -> dict[Receipt, Claim]:
        claims: dict[Receipt, Claim] = {}
        twice, invented = [], []
        for effect in self.story.effects:
            if isinstance(effect, Claim):
                key = (effect.batch_id, effect.position)
                if key in claims:
                    twice.append(effect)
                claims[key] = effect
                insert = self.inserts.get(effect.job_id)
                if insert is None or insert.token != effect.token:
                    invented.append(effect)
        self._report("receipts handed out twice", twice)
        self._report("jobs invented", invented)
        return claims

    def _check_receipts(self) -> None:
        observed = self.observed
        self._report("receipts unknown to any client", set(observed.receipts) - set(self.claims))
        self._report("receipts unknown to the database", set(self.claims) - set(observed.receipts))
        self._report("receipts twice", [r for r, n in observed.receipts.items() if n > 1])
        positions = Counter(position for _, position in observed.receipts)
        self._report("positions claimed twice", [p for p, n in positions.items() if n > 1])
        self._report(
            "attempts closed twice", [r for r, c in observed.closures.items() if len(c) > 1]
        )
        self._report("attempts left open", set(observed.receipts) - set(observed.closures))
        self._report("closures without receipt", set(observed.closures) - set(observed.receipts))
        self._report("moves without lease", observed.moved - observed.leases)
        self._report("leases without move", observed.leases - observed.moved)
        self._report("receipts moved twice", [r for r, n in observed.moved.items() if n > 1])

    def _check_leases(self) -> None:
        """Leases of a job are 1, 2, 3 ...; each is claimed once."""
        leases: dict[int, list[int]] = defaultdict(list)
        for claim in self.claims.values():
            leases[claim.job_id].append(claim.run_lease)
        wrong = {j: sorted(n) for j, n in leases.items() if sorted(n) != [*range(1, len(n) + 1)]}
        self._report("jobs with leases twice or missing", list(wrong.items()))
        late = [c for c in self.claims.values() if c.attempt > c.max_attempts]
        self._report("attempts beyond max_attempts", late)

    def _failed(self, job_id: int) -> str:
        insert = self.inserts.get(job_id)
        return "dead_lettered" if insert and insert.queue == DEAD_QUEUE else "failed"

    def _closure_of(self, end: End, claim: Claim) -> str:
        if end.outcome == "fail" or (
            end.outcome == "retry" and claim.attempt >= claim.max_attempts
        ):
            return self._failed(end.job_id)
        return "retried" if end.outcome == "retry" else ASKED[end.outcome]

    def _final_states(self) -> dict[int, list[str]]:
        """Every end of every job; exactly one each if all is well."""
        ends: dict[int, list[str]] = defaultdict(list, {job_id: [] for job_id in self.inserts})
        told: set[Receipt] = set()
        wrong: list[tuple[End | Cancel, str]] = []
        cancels = Counter[int]()
        for effect in self.story.effects:
            if isinstance(effect, End):
                receipt = (effect.batch_id, effect.position)
                told.add(receipt)
                claim = self.claims.get(receipt)
                if claim is None:
                    wrong.append((effect, "never claimed"))
                    continue
                closure = self._closure_of(effect, claim)
                if self.observed.closures.get(receipt) != [closure]:
                    wrong.append((effect, str(self.observed.closures.get(receipt))))
                if closure in STATES:
                    ends[effect.job_id].append(STATES[closure])
            elif isinstance(effect, Cancel):
                if effect.running:
                    cancels[effect.job_id] += 1
                elif effect.job_id in ends:
                    ends[effect.job_id].append("cancelled")
                else:
                    wrong.append((effect, "never inserted"))
        self._report("ends that the database denies", wrong)
        before = [job_id for job_id, found in ends.items() if not found]
        self._add_untold(ends, told, cancels)
        self.untold += [job_id for job_id in before if ends[job_id]]
        lost = [(j, self.inserts[j]) for j, found in ends.items() if not found]
        self._report("jobs lost", lost)
        self._report("jobs ended twice", [(j, e) for j, e in ends.items() if len(e) > 1])
        return ends

    def _add_untold(
        self, ends: dict[int, list[str]], told: set[Receipt], cancels: Counter[int]
    ) -> None:
        """Closures that no worker made: rescues, and cancellations of running attempts."""
        unexplained = []
        for receipt, (outcome, *_) in self.observed.closures.items():
            claim = self.claims.get(receipt)
            if receipt in told or claim is None:
                continue
            if outcome == "rescued":
                if claim.attempt >= claim.max_attempts:
                    ends[claim.job_id].append(self._failed(claim.job_id))
            elif outcome == "cancelled" and cancels[claim.job_id]:
                cancels[claim.job_id] -= 1
                ends[claim.job_id].append("cancelled")
            else:
                unexplained.append((claim, outcome))
        self._report("closures that nobody asked for", unexplained)
        self._report("cancellations without closure", [j for j, n in cancels.items() if n > 0])

    def _check_counts(self, conn: psycopg.Connection, ends: dict[int, list[str]]) -> None:
        expected = Counter(
            (self.inserts[job_id].queue, found[-1])
            for job_id, found in ends.items()
            if found and job_id in self.inserts
        )
        for queue in sorted({insert.queue for insert in self.inserts.values()}):
            with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                row = cursor.execute("SELECT * FROM awa.queue_counts(%s)", [queue]).fetchone()
            assert row
            shown = {state: n for state, n in row.items() if state != "queue"}
            ledger = {state: expected[queue, state] for state in shown}
            if shown != ledger:
                self.problems.append(f"queue {queue}: counts {shown}, ledger {ledger}")

    def check_history(self, directory: Path) -> str:
        """Let the checker of histories judge as well, which looks at no database."""
        writer = Writer(directory / "verdict.history", "verdict")
        writer.note("promise", {"queue": ANY_QUEUE, "fifo_within": FIFO_WITHIN}, {})
        for job_id in self.untold:
            writer.note("state", {"job": job_id}, {})
        writer.note("drained", {}, {})
        checker = Checker(sorted(directory.glob("*.history")))
        self.problems += map(str, checker.violations[:SHOWN])
        return f"history: {checker.summary()}"

    def summary(self) -> str:
        """How much of everything there was."""
        outcomes = Counter(o for found in self.observed.closures.values() for o in found)
        outcomes["moved to leases"] = self.observed.moved.total()
        parts = [f"{len(self.claims)} attempts ({_listed(outcomes)})", _listed(self.story.counts)]
        return "; ".join(parts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
