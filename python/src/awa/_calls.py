"""Statement, parameters and row type of each SQL function; no I/O.

Arguments left at None are not sent, so that the defaults stay in SQL. Only the args of a job may be
None in earnest, JSON null; left out they are NO_ARGS.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Final, Generic, TypeVar, cast
from uuid import UUID

from . import models
from ._codec import MAX_LIST_BYTES, check_text, dump_json
from .errors import InvalidArgument, LimitExceeded
from .models import Json

T = TypeVar("T")
Options = Mapping[str, Json]
DEFAULT_SCHEMA = "awa"
NO_ARGS: Final = cast(Json, MappingProxyType[str, Json]({}))


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of one SQL function; `row_type` is a row dataclass or a scalar type."""

    sql: str
    params: Mapping[str, object]
    row_type: type[T]


def quote_schema(schema: str) -> str:
    """The schema name as an identifier, safe inside a statement with placeholders."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", schema):
        return schema
    if not schema or "\0" in schema:
        raise InvalidArgument(f"schema {schema!r} is not a name")
    return '"' + schema.replace('"', '""').replace("%", "%%") + '"'


@cache
def _columns(row_type: Hashable) -> str:
    # Columns by name: a newer schema may return more of them.
    if isinstance(row_type, type) and dataclasses.is_dataclass(row_type):
        return ", ".join(f.name for f in dataclasses.fields(row_type))
    return "*"


def _call(schema: str, name: str, row_type: type[T], params: Mapping[str, object]) -> Call[T]:
    given = {key: value for key, value in params.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, str) and key not in _CASTS:
            check_text(value, key)
    # Quoted, since "position" is a keyword.
    arguments = ", ".join(f'"{key}" => %({key})s{_CASTS.get(key, "")}' for key in given)
    columns = _columns(cast(Hashable, row_type))
    sql = f"SELECT {columns} FROM {quote_schema(schema)}.{name}({arguments})"
    return Call(sql, given, row_type)


# Text forms that need a type; all other parameters resolve by the function's signature.
_CASTS = {
    "args": "::jsonb",
    "jobs": "::jsonb",
    "opts": "::jsonb",
    "changes": "::jsonb",
    "info": "::jsonb",
    "holds": "::jsonb",
    "outcomes": "::jsonb",
    "progress": "::jsonb",
    "budget": "::jsonb",
}


def _json(value: Json, field: str) -> str | None:
    return None if value is None else dump_json(value, field)


def aware(value: datetime | None, field: str) -> datetime | None:
    """A time that says which instant it is, or None."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidArgument(
            f"{field} must be a datetime, not {type(value).__name__}",
            hint="Use datetime(..., tzinfo=timezone.utc).",
        )
    if value.utcoffset() is None:
        raise InvalidArgument(
            f"{field} has no time zone",
            hint="Use datetime.now(timezone.utc) or another aware time.",
        )
    return value


# Producers


def insert_job(
    kind: str,
    args: Json = NO_ARGS,
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    run_at: datetime | None = None,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.InsertResult]:
    """Enqueue one job."""
    return _call(
        schema,
        "insert_job",
        models.InsertResult,
        {
            "kind": kind,
            "args": None if args is NO_ARGS else dump_json(args, "args"),
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
            "run_at": aware(run_at, "run_at"),
            "opts": _json(opts, "opts"),
        },
    )


def insert_jobs(
    jobs: Sequence[Mapping[str, Json]],
    *,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.InsertResult]:
    """Enqueue jobs of any kinds, all or nothing, one result each in order."""
    for index, job in enumerate(jobs):
        if isinstance(job, Mapping):
            aware(_as_datetime(job.get("run_at")), f"jobs[{index}].run_at")
    return _call(
        schema,
        "insert_jobs",
        models.InsertResult,
        {"jobs": _json_items(jobs, "jobs"), "opts": _json(opts, "opts")},
    )


def insert_many(
    kind: str,
    args: Sequence[Json],
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    run_at: datetime | None = None,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[int]:
    """Enqueue many jobs of one kind."""
    items = [dump_json(item, f"args[{index}]") for index, item in enumerate(args)]
    call = _call(
        schema,
        "insert_many",
        int,
        {
            "kind": kind,
            "args": items,
            "queue": queue,
            "priority": priority,
            "max_attempts": max_attempts,
            "run_at": aware(run_at, "run_at"),
            "opts": _json(opts, "opts"),
        },
    )
    return dataclasses.replace(call, sql=call.sql.replace("%(args)s::jsonb", "%(args)s::jsonb[]"))


def ordering_shard(key: str, shards: int, *, schema: str = DEFAULT_SCHEMA) -> Call[int]:
    """The shard that an ordering key maps to."""
    return _call(schema, "ordering_shard", int, {"key": key, "shards": shards})


def unique_key(
    kind: str,
    queue: str | None,
    args: Json,
    period_bucket: int | None,
    *,
    schema: str = DEFAULT_SCHEMA,
) -> Call[bytes]:
    """The key of a unique job; what is None is left out of it."""
    arguments = "%(kind)s, %(queue)s, %(args)s::jsonb, %(period_bucket)s"
    params = {
        "kind": kind,
        "queue": queue,
        "args": _json(args, "args"),
        "period_bucket": period_bucket,
    }
    return Call(f"SELECT * FROM {quote_schema(schema)}.unique_key({arguments})", params, bytes)


def concurrency_digest(key: str, *, schema: str = DEFAULT_SCHEMA) -> Call[bytes]:
    """The digest of a concurrency key."""
    return _call(schema, "concurrency_digest", bytes, {"key": key})


def cancel_by_unique_key(key: bytes, *, schema: str = DEFAULT_SCHEMA) -> Call[int]:
    """Cancel the job that holds a key; its id, None when none waits or runs."""
    return _call(schema, "cancel_by_unique_key", int, {"key": key})


# Workers


def register_instance(
    instance_id: UUID, *, info: Options | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[None]:
    """Make this process known."""
    return _call(
        schema,
        "register_instance",
        type(None),
        {"instance_id": instance_id, "info": _json(info, "info")},
    )


def heartbeat(
    instance_id: UUID, *, holds: Json = None, schema: str = DEFAULT_SCHEMA
) -> Call[models.HeartbeatResult]:
    """Say that this process lives and what it holds; None means all it ever claimed."""
    return _call(
        schema,
        "heartbeat",
        models.HeartbeatResult,
        {"instance_id": instance_id, "holds": _json(holds, "holds")},
    )


def claim_ready_runtime(
    queue: str,
    max_batch: int,
    instance_id: UUID,
    *,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.ClaimedJob]:
    """Claim up to max_batch jobs."""
    return _call(
        schema,
        "claim_ready_runtime",
        models.ClaimedJob,
        {
            "queue": queue,
            "max_batch": max_batch,
            "instance_id": instance_id,
            "opts": _json(opts, "opts"),
        },
    )


def claim_status(
    queue: str, *, arm: bool | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[models.ClaimStatus]:
    """Why nothing was claimed; with arm, the next insert wakes the channel."""
    return _call(schema, "claim_status", models.ClaimStatus, {"queue": queue, "arm": arm})


def complete_jobs(
    instance_id: UUID,
    claim_slot: int,
    batch_id: int,
    positions: Sequence[int],
    *,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.FinishResult]:
    """Close plain successes of one claimed batch."""
    return _call(
        schema,
        "complete_jobs",
        models.FinishResult,
        {
            "instance_id": instance_id,
            "claim_slot": claim_slot,
            "batch_id": batch_id,
            "positions": list(positions),
        },
    )


def finish_jobs(
    instance_id: UUID, outcomes: Sequence[Mapping[str, Json]], *, schema: str = DEFAULT_SCHEMA
) -> Call[models.FinishResult]:
    """Close many attempts with mixed outcomes."""
    return _call(
        schema,
        "finish_jobs",
        models.FinishResult,
        {"instance_id": instance_id, "outcomes": _json_items(outcomes, "outcomes")},
    )


def complete_job(
    job_id: int,
    run_lease: int,
    claim_slot: int,
    batch_id: int,
    position: int,
    *,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.FinalizationReceipt]:
    """Close one attempt inside the caller's own transaction."""
    return _call(
        schema,
        "complete_job",
        models.FinalizationReceipt,
        {
            "job_id": job_id,
            "run_lease": run_lease,
            "claim_slot": claim_slot,
            "batch_id": batch_id,
            "position": position,
            "opts": _json(opts, "opts"),
        },
    )


def attempt_status(
    job_id: int,
    run_lease: int,
    claim_slot: int,
    batch_id: int,
    position: int,
    *,
    schema: str = DEFAULT_SCHEMA,
) -> Call[str]:
    """What became of one attempt."""
    return _call(
        schema,
        "attempt_status",
        str,
        {
            "job_id": job_id,
            "run_lease": run_lease,
            "claim_slot": claim_slot,
            "batch_id": batch_id,
            "position": position,
        },
    )


def set_progress(
    job_id: int,
    run_lease: int,
    claim_slot: int,
    batch_id: int,
    position: int,
    progress: Json,
    *,
    schema: str = DEFAULT_SCHEMA,
) -> Call[bool]:
    """Store progress that survives a retry."""
    return _call(
        schema,
        "set_progress",
        bool,
        {
            "job_id": job_id,
            "run_lease": run_lease,
            "claim_slot": claim_slot,
            "batch_id": batch_id,
            "position": position,
            "progress": dump_json(progress, "progress"),
        },
    )


def tick(*, budget: Options | None = None, schema: str = DEFAULT_SCHEMA) -> Call[models.TickReport]:
    """One bounded round of maintenance."""
    return _call(schema, "tick", models.TickReport, {"budget": _json(budget, "budget")})


def work(
    queue: str,
    *,
    max_jobs: int | None = None,
    opts: Options | None = None,
    schema: str = DEFAULT_SCHEMA,
) -> Call[models.WorkReport]:
    """Run jobs whose kind is bound to a function of the database."""
    return _call(
        schema,
        "work",
        models.WorkReport,
        {"queue": queue, "max_jobs": max_jobs, "opts": _json(opts, "opts")},
    )


# Operators


def declare_queue(
    queue: str, *, opts: Options | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[None]:
    """Make a queue, or change its options."""
    return _call(schema, "declare_queue", type(None), {"queue": queue, "opts": _json(opts, "opts")})


def pause_queue(queue: str, *, schema: str = DEFAULT_SCHEMA) -> Call[bool]:
    """Stop claims of a queue; false when it was paused."""
    return _call(schema, "pause_queue", bool, {"queue": queue})


def resume_queue(queue: str, *, schema: str = DEFAULT_SCHEMA) -> Call[bool]:
    """Let claims of a queue go on; false when it was not paused."""
    return _call(schema, "resume_queue", bool, {"queue": queue})


def cancel_job(
    job_id: int, *, reason: str | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[str]:
    """Cancel a job in whatever state it is; the answer says what it was."""
    return _call(schema, "cancel_job", str, {"job_id": job_id, "reason": reason})


def drain_queue(
    queue: str, *, opts: Options | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[int]:
    """Cancel waiting jobs of a queue; how many, 0 when none is left."""
    return _call(schema, "drain_queue", int, {"queue": queue, "opts": _json(opts, "opts")})


def retry_job(
    job_id: int, *, opts: Options | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[models.InsertResult]:
    """Make a job that failed, was cancelled or waits run now."""
    return _call(
        schema, "retry_job", models.InsertResult, {"job_id": job_id, "opts": _json(opts, "opts")}
    )


def update_job(job_id: int, changes: Options, *, schema: str = DEFAULT_SCHEMA) -> Call[str]:
    """Change a job that waits; its state afterwards."""
    return _call(
        schema, "update_job", str, {"job_id": job_id, "changes": _json(changes, "changes")}
    )


def retry_dlq(
    job_id: int, *, opts: Options | None = None, schema: str = DEFAULT_SCHEMA
) -> Call[models.InsertResult]:
    """Enqueue a dead letter again."""
    return _call(
        schema, "retry_dlq", models.InsertResult, {"job_id": job_id, "opts": _json(opts, "opts")}
    )


def purge_dlq(job_id: int, *, schema: str = DEFAULT_SCHEMA) -> Call[bool]:
    """Delete a dead letter."""
    return _call(schema, "purge_dlq", bool, {"job_id": job_id})


def queue_counts(queue: str, *, schema: str = DEFAULT_SCHEMA) -> Call[models.QueueCount]:
    """Exact job counts per state."""
    return _call(schema, "queue_counts", models.QueueCount, {"queue": queue})


def queue_depths(*, schema: str = DEFAULT_SCHEMA) -> Call[models.QueueDepth]:
    """Waiting jobs per lane, without a scan."""
    return _call(schema, "queue_depths", models.QueueDepth, {})


def ring_status(*, schema: str = DEFAULT_SCHEMA) -> Call[models.RingSlotStatus]:
    """Each slot of each ring, and what blocks its reuse."""
    return _call(schema, "ring_status", models.RingSlotStatus, {})


def job(job_id: int, *, schema: str = DEFAULT_SCHEMA) -> Call[models.JobInfo]:
    """Everything known about a job."""
    return _call(schema, "job", models.JobInfo, {"job_id": job_id})


def explain_job(job_id: int, *, schema: str = DEFAULT_SCHEMA) -> Call[models.JobExplanation]:
    """Why a job is where it is."""
    return _call(schema, "explain_job", models.JobExplanation, {"job_id": job_id})


def register_sql_handler(
    kind: str, handler: str | None, *, schema: str = DEFAULT_SCHEMA
) -> Call[None]:
    """Bind a kind to a function that work() runs; None unbinds it."""
    return _call(
        schema,
        "register_sql_handler",
        type(None),
        {"kind": kind, "handler": "-" if handler is None else handler},
    )


def api(*, schema: str = DEFAULT_SCHEMA) -> Call[models.ApiFunction]:
    """The public functions, from the catalog."""
    return _call(schema, "api", models.ApiFunction, {})


def set_setting(name: str, value: str, *, schema: str = DEFAULT_SCHEMA) -> Call[None]:
    """Change a setting."""
    return _call(schema, "set_setting", type(None), {"name": name, "value": value})


def error_codes(*, schema: str = DEFAULT_SCHEMA) -> Call[models.ErrorCode]:
    """The SQLSTATEs that the interface raises."""
    return _call(schema, "error_codes", models.ErrorCode, {})


def version(*, schema: str = DEFAULT_SCHEMA) -> Call[str]:
    """Version of the installed schema's release."""
    return _call(schema, "version", str, {})


def schema_version(*, schema: str = DEFAULT_SCHEMA) -> Call[int]:
    """Number of the installed schema."""
    return _call(schema, "schema_version", int, {})


def verify(*, schema: str = DEFAULT_SCHEMA) -> Call[models.TickReport]:
    """Check and repair what a restore or failover may have left behind."""
    return _call(schema, "verify", models.TickReport, {})


def settings(*, schema: str = DEFAULT_SCHEMA) -> Call[models.Setting]:
    """The settings view."""
    sql = f"SELECT {_columns(models.Setting)} FROM {quote_schema(schema)}.settings ORDER BY name"
    return Call(sql, {}, models.Setting)


def _as_datetime(value: object) -> datetime | None:
    return value if isinstance(value, datetime) else None


def _json_items(items: Sequence[Json], field: str) -> str:
    # One by one, so that an error names the item.
    try:
        return dump_json(list(items), field, MAX_LIST_BYTES)
    except (InvalidArgument, LimitExceeded):
        for index, item in enumerate(items):
            dump_json(item, f"{field}[{index}]")
        raise
