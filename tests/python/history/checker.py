"""What a history must not show. Each violation has a name and the events that prove it.

A call took effect somewhere between its start and its end, so "before" means that one ended before
the other began, and everything else may have been either way: what is reported is certain. The
files are read once per part, and a part holds the jobs whose ids fall into it, so memory is bounded
by jobs per part and not by the length of the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from math import inf
from pathlib import Path

from .records import KNOWN, UNDONE, UNKNOWN, Event, read

PART_BYTES = 64 * 2**20  # of history for each pass
LANE_BITS = 42  # the id of a job that was inserted ready is its position: lane, then number
ENDING_OUTCOMES = {"completed", "cancel", "fail"}
CANCELLED = {"cancelled", "cancelled_running"}

NEVER_RAN = "a committed job never ran"
NEVER_ENDED = "a job did not end"
UNKNOWN_JOB = "a job ran that nobody inserted"
ID_TWICE = "a job id was given twice"
LEASE_TWICE = "a lease was given twice"
LEASE_BACK = "a lease is not above the ones before"
TWO_OWNERS = "two owners at once"
RESURRECTED = "a job ran after its end"
ENDED_TWICE = "a job ended twice"
NOT_ITS_OWNER = "an attempt was ended that nobody was given"
OUT_OF_ORDER = "a lane was claimed out of its order"
TWO_HOLDERS = "two jobs hold one unique key"
FALSE_HOLDER = "a duplicate was told of a job that does not hold the key"
VIOLATIONS = (
    *(NEVER_RAN, NEVER_ENDED, UNKNOWN_JOB, ID_TWICE, LEASE_TWICE, LEASE_BACK, TWO_OWNERS),
    *(RESURRECTED, ENDED_TWICE, NOT_ITS_OWNER, OUT_OF_ORDER, TWO_HOLDERS, FALSE_HOLDER),
)
ANY_QUEUE = "*"


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and the events that show it."""

    name: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return "\n    ".join([self.name, *map(str, self.events)])


@dataclass(slots=True)
class Life:
    """All that was said of one job."""

    inserts: list[Event] = field(default_factory=list)
    claims: list[Event] = field(default_factory=list)
    finishes: list[Event] = field(default_factory=list)
    cancels: list[Event] = field(default_factory=list)
    retries: list[Event] = field(default_factory=list)
    states: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """File an event."""
        lists = {
            "insert": self.inserts,
            "claim": self.claims,
            "finish": self.finishes,
            "cancel": self.cancels,
            "retry": self.retries,
            "state": self.states,
        }
        lists[event.what].append(event)

    def committed(self, events: Iterable[Event]) -> list[Event]:
        return [event for event in events if event.commit == KNOWN]

    def possible(self, events: Iterable[Event]) -> list[Event]:
        return [event for event in events if event.commit != UNDONE]

    def max_attempts_reached(self, finish: Event) -> bool:
        """Whether a retry was the last one, so that the job has ended by it."""
        lease = finish.args.get("lease")
        claim = next((c for c in self.claims if c.answer.get("lease") == lease), None)
        return claim is not None and claim.answer.get("is_last") is True

    def ends(self, events: Iterable[Event]) -> list[Event]:
        """Those by which the job ended for good."""
        return [
            event
            for event in events
            if (event.what == "cancel" and event.answer.get("answer") in CANCELLED)
            or (
                event.what == "finish"
                and event.answer.get("result") == "done"
                and (
                    event.args["outcome"] in ENDING_OUTCOMES
                    or (event.args["outcome"] == "retry" and self.max_attempts_reached(event))
                )
            )
        ]

    def known_ends(self) -> list[Event]:
        return self.ends(self.committed([*self.finishes, *self.cancels]))


class Checker:
    """Checks files, and holds what it found."""

    def __init__(self, paths: Sequence[Path], parts: int | None = None) -> None:
        self.paths = list(paths)
        size = sum(path.stat().st_size for path in self.paths)
        self.parts = parts or 1 + size // PART_BYTES
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.is_drained = False
        self.fifo: dict[str, float] = {}  # by queue: inserts that took less keep their order
        for event in self.read(lambda _: True):
            self.seen[f"{event.what} {event.commit}"] += 1
            self.is_drained |= event.what == "drained"
            if event.what == "promise":
                within = event.args["fifo_within"]
                self.fifo[event.args["queue"]] = inf if within is None else within
        for part in range(self.parts):
            self.check_jobs(part)
            self.check_lanes(part)
        self.check_keys()

    def read(self, wanted: Callable[[Event], bool]) -> Iterator[Event]:
        for path in self.paths:
            yield from filter(wanted, read(path))

    def report(self, name: str, *events: Event) -> None:
        self.violations.append(Violation(name, events))

    def lives(self, wanted: Callable[[int], bool]) -> dict[int, Life]:
        lives: dict[int, Life] = {}
        for event in self.read(lambda e: e.job is not None and wanted(e.job)):
            if event.job is not None and not event.answer.get("duplicate"):
                lives.setdefault(event.job, Life()).add(event)
        return lives

    # ---- jobs

    def check_jobs(self, part: int) -> None:
        """At least once, one owner, no resurrection."""
        for life in self.lives(lambda job: job % self.parts == part).values():
            self.check_insert(life)
            self.check_leases(life)
            self.check_owners(life)
            self.check_end(life)

    def check_insert(self, life: Life) -> None:
        inserts = life.committed(life.inserts)
        claims = life.possible(life.claims)
        for first, second in pairwise(inserts):
            self.report(ID_TWICE, first, second)
        if not life.possible(life.inserts):
            for claim in life.committed(life.claims):
                self.report(UNKNOWN_JOB, claim)
        ends = life.ends(life.possible([*life.finishes, *life.cancels]))
        if self.is_drained and inserts and not ends and not life.states:
            self.report(NEVER_ENDED if claims else NEVER_RAN, inserts[0], *claims)

    def check_leases(self, life: Life) -> None:
        claims = sorted(life.committed(life.claims), key=lambda c: c.start)
        by_lease: dict[int, Event] = {}
        for claim in claims:
            lease = claim.answer["lease"]
            if lease in by_lease:
                self.report(LEASE_TWICE, by_lease[lease], claim)
            by_lease[lease] = claim
            for other in claims:
                if other.end < claim.start and other.answer["lease"] > lease:
                    self.report(LEASE_BACK, other, claim)
                    break

    def check_owners(self, life: Life) -> None:
        """An attempt that was ended by its owner was its owner's all the time."""
        claims = life.possible(life.claims)
        for finish in life.committed(life.finishes):
            if finish.answer.get("result") != "done":
                continue
            lease = finish.args["lease"]
            own = [claim for claim in claims if claim.answer["lease"] == lease]
            if not own:
                self.report(NOT_ITS_OWNER, finish)
            for other in life.committed(life.claims):
                if other.answer["lease"] == lease:
                    continue
                if any(c.end < other.start for c in own) and other.end < finish.start:
                    self.report(TWO_OWNERS, *own, other, finish)

    def check_end(self, life: Life) -> None:
        ends = sorted(life.known_ends(), key=lambda end: end.start)
        retries = life.possible(life.retries)
        for end in ends:
            for claim in life.committed(life.claims):
                may_be_retried = any(r.end > end.start and r.start < claim.end for r in retries)
                if end.end < claim.start and not may_be_retried:
                    self.report(RESURRECTED, end, claim)
        for first, second in pairwise(ends):
            if not any(r.end > first.start and r.start < second.end for r in retries):
                self.report(ENDED_TWICE, first, second)

    # ---- lanes

    def check_lanes(self, part: int) -> None:
        """Of two jobs, the first committed before the second was inserted, the first goes first."""
        if not self.fifo:
            return
        lives = self.lives(
            lambda job: job >> LANE_BITS > 0 and (job >> LANE_BITS) % self.parts == part
        )
        lanes: dict[int, list[tuple[Event, Event, float]]] = {}
        for job, life in lives.items():
            inserts = life.committed(life.inserts)
            firsts = [c for c in life.possible(life.claims) if c.answer["lease"] == 1]
            # Who changes a waiting job holds it back, also where that is rolled back.
            if inserts and firsts and not life.cancels and not life.retries:
                claim = min(firsts, key=lambda c: c.start)
                known_end = min((c.end for c in firsts if c.commit == KNOWN), default=inf)
                lanes.setdefault(job >> LANE_BITS, []).append((inserts[0], claim, known_end))
        for lane in lanes.values():
            self.check_lane(lane)

    def check_lane(self, lane: list[tuple[Event, Event, float]]) -> None:
        lane.sort(key=lambda row: row[0].start)
        before: list[tuple[float, int]] = []  # inserts by their end
        latest: tuple[Event, Event] | None = None  # of those before: the one that was claimed last
        for number, (insert, claim, known_end) in enumerate(lane):
            while before and before[0][0] < insert.start:
                other, its_claim, _ = lane[heapq.heappop(before)[1]]
                if latest is None or its_claim.start > latest[1].start:
                    latest = (other, its_claim)
            if latest and known_end < latest[1].start:
                self.report(OUT_OF_ORDER, latest[0], insert, claim, latest[1])
            within = self.fifo.get(insert.args["queue"], self.fifo.get(ANY_QUEUE, -inf))
            if insert.end - insert.start < within:
                heapq.heappush(before, (insert.end, number))

    # ---- unique keys

    def check_keys(self) -> None:
        """Jobs with keys are few, so they are held all at once."""
        inserts: dict[str, list[Event]] = {}
        for event in self.read(lambda e: e.what == "insert" and bool(e.args.get("key"))):
            if event.commit != UNDONE:
                inserts.setdefault(event.args["key"], []).append(event)
        jobs = {e.job for events in inserts.values() for e in events}
        lives = self.lives(jobs.__contains__) if jobs else {}
        for events in inserts.values():
            self.check_key(events, lives)

    def check_key(self, events: list[Event], lives: dict[int, Life]) -> None:
        new = [e for e in events if not e.answer.get("duplicate")]
        for first, second in permutations([e for e in new if e.commit == KNOWN], 2):
            life = lives[first.job or 0]
            ends = life.ends(life.possible([*life.finishes, *life.cancels]))
            # It lives at least until the first call that may have ended it began.
            is_told = self.is_drained and not life.states
            last = min((end.start for end in ends), default=inf if is_told else -inf)
            if first.end < second.start and second.end < last:
                self.report(TWO_HOLDERS, first, second)
        holders = {e.job: e for e in new}
        for told in events:
            if not told.answer.get("duplicate") or told.commit == UNKNOWN:
                continue
            holder = holders.get(told.job)
            if holder is None or told.end < holder.start:
                self.report(FALSE_HOLDER, told)
                continue
            life = lives[told.job or 0]
            # One that completed keeps its key for a while.
            left = [e for e in life.known_ends() if e.args.get("outcome") != "completed"]
            if any(end.end < told.start for end in left) and not life.retries:
                self.report(FALSE_HOLDER, holder, told)

    def summary(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.seen.items()))
        return f"{len(self.paths)} files in {self.parts} parts: {counts}"
