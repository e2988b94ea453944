"""What this worker holds: claimed batches and their open positions."""

from __future__ import annotations

import time
from typing import TypedDict

from .job import Job


class Held(TypedDict):
    """Open positions of one batch, as heartbeat() takes them."""

    claim_slot: int
    batch_id: int
    positions: list[int]


class Batch:
    """One batch row of the claim ring; a position is open until its finish was answered."""

    __slots__ = ("batch_id", "claim_slot", "done", "open", "tries")

    def __init__(self, claim_slot: int, batch_id: int) -> None:
        self.claim_slot = claim_slot
        self.batch_id = batch_id
        self.open: dict[int, Job] = {}
        # Positions of plain successes, waiting for the next flush.
        self.done: list[int] = []
        # How often in a row the database was busy with this batch.
        self.tries = 0


class Holds:
    """All open batches. Written by the event loop, read by the heartbeat thread."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], Batch] = {}
        self._claims: dict[object, float] = {}
        self._last_snapshot = time.monotonic()

    def __len__(self) -> int:
        return sum(len(batch.open) for batch in list(self.batches.values()))

    def is_empty(self) -> bool:
        """Whether nothing is held, nor on its way from a claim."""
        return not self.batches and not self._claims

    def claim_started(self, claimer: object) -> None:
        """A claim is about to be sent: what it returns is not in `batches` yet."""
        self._claims[claimer] = time.monotonic()

    def claim_ended(self, claimer: object) -> None:
        """The claim's jobs are in `batches`, or there are none."""
        self._claims.pop(claimer, None)

    def drop(self, batch: Batch, positions: list[int]) -> None:
        """Forget positions whose finish was answered."""
        opened = batch.open
        if len(positions) == len(opened):
            opened.clear()
        else:
            for position in positions:
                opened.pop(position, None)
        if not opened:
            self.batches.pop((batch.claim_slot, batch.batch_id), None)

    def snapshot(self) -> list[Held] | None:
        """What is held, or None ("all I ever claimed") when that is not known.

        A receipt may be missing from one heartbeat, not from two: so a claim whose answer was
        still unread at the last snapshot (a handler blocks the event loop) makes this one None.
        """
        before, self._last_snapshot = self._last_snapshot, time.monotonic()
        if any(started <= before for started in list(self._claims.values())):
            return None
        held: list[Held] = []
        # list() of a dict is one step under the interpreter's lock.
        for batch in list(self.batches.values()):
            positions = list(batch.open)
            if positions:
                held.append(
                    {
                        "claim_slot": batch.claim_slot,
                        "batch_id": batch.batch_id,
                        "positions": positions,
                    }
                )
        return held
