"""Bulk loads: jobs as rows of COPY into job_inbox, each checked before it is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import cast

from ._calls import aware, quote_schema
from ._codec import check_text, dump_json
from .errors import InvalidArgument
from .models import Json

# For connections of libraries that cannot COPY: jobs of one insert_jobs call.
PORTION = 1_000

_FIELDS = ("kind", "args", "queue", "priority", "max_attempts", "run_at", "opts")

Job = Mapping[str, Json]
Row = tuple[object, ...]


def statement(schema: str) -> bytes:
    """The COPY that takes the rows."""
    columns = ", ".join(_FIELDS)
    return f"COPY {quote_schema(schema)}.job_inbox ({columns}) FROM STDIN".encode()


def rows(jobs: Iterable[Job]) -> Iterator[Row]:
    """One row per job; COPY is laxer about types than insert_jobs, so they are checked here."""
    known = frozenset(_FIELDS)
    for index, job in enumerate(jobs):
        if not known.issuperset(job):
            name = min(set(job) - known)
            raise InvalidArgument(
                f'jobs[{index}] has the unknown field "{name}"',
                hint=f"Known fields: {', '.join(_FIELDS)}.",
            )
        opts = job.get("opts")
        yield (
            _text(job.get("kind", ""), index, "kind"),
            dump_json(job["args"], f"jobs[{index}].args") if "args" in job else None,
            _text(job["queue"], index, "queue") if "queue" in job else None,
            _integer(job.get("priority"), index, "priority"),
            _integer(job.get("max_attempts"), index, "max_attempts"),
            aware(cast("datetime | None", job.get("run_at")), f"jobs[{index}].run_at"),
            None if opts is None else dump_json(opts, f"jobs[{index}].opts"),
        )


def portions(jobs: Iterable[Job], most: int | None) -> Iterator[list[Job]]:
    """The jobs in lists for insert_jobs, of so many or in one."""
    source = iter(jobs)
    while portion := list(islice(source, most)):
        yield portion


def _text(value: Json, index: int, field: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidArgument(
            f"jobs[{index}].{field} must be a string without NUL, not {value!r:.100}",
            hint="Give a name of 1 to 200 characters.",
        )
    return check_text(value, f"jobs[{index}].{field}")


def _integer(value: Json, index: int, field: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidArgument(
            f"jobs[{index}].{field} must be a whole number, not {value!r:.100}",
            hint="Give an int, or leave it out.",
        )
    return value
