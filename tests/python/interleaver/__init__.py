"""A race test of the engine that moves one step at a time, so that every run can be repeated.

Two dozen connections play producers, claimers, finishers, cancellers, maintainers and bystanders.
One thread picks who moves next, from a seed; a move is one statement. A statement can also be left
suspended at a pause point inside a function while the others go on. What was committed is written
down in a ledger outside the database, and compared with what the engine answers.

    AWA_TEST_DSN="host=... dbname=postgres" python -m tests.python.interleaver --seeds 1-20
"""

from .mutants import MUTANTS
from .schedules import SCHEDULES
from .world import Broken, Result, play

__all__ = ["MUTANTS", "SCHEDULES", "Broken", "Result", "play"]
