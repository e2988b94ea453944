"""The worker's hot statements: calls of SQL functions with positional parameters."""

from __future__ import annotations

from ._calls import quote_schema
from .job import COLUMNS


class Statements:
    """Statement texts for one schema."""

    def __init__(self, schema: str) -> None:
        name = quote_schema(schema)
        self.claim = (
            f"SELECT {', '.join(COLUMNS)} FROM {name}.claim_ready_runtime("
            "queue => %s, max_batch => %s, instance_id => %s, opts => %s::jsonb)"
        )
        self.claim_status = (
            "SELECT reason, channel, retry_after_ms "
            f"FROM {name}.claim_status(queue => %s, arm => %s)"
        )
        # Only what is not simply done comes back, by its number in the list of positions. These go
        # as the text of one array, cut per batch here: far cheaper to write than nested arrays.
        self.complete = (
            "SELECT b.first + f.ordinal - 2, f.result, f.reason "
            "FROM unnest(%s::integer[], %s::bigint[], %s::integer[], %s::integer[]) "
            "AS b(claim_slot, batch_id, first, last) "
            f"CROSS JOIN LATERAL {name}.complete_jobs("
            "instance_id => %s, claim_slot => b.claim_slot, batch_id => b.batch_id, "
            "positions => (%s::bigint[])[b.first:b.last]) "
            "WITH ORDINALITY AS f(job_id, run_lease, result, reason, ordinal) "
            "WHERE f.result <> 'done'"
        )
        self.complete_one = (
            f"SELECT f.ordinal - 1, f.result, f.reason FROM {name}.complete_jobs("
            "instance_id => %s, claim_slot => %s, batch_id => %s, positions => %s::bigint[]) "
            "WITH ORDINALITY AS f(job_id, run_lease, result, reason, ordinal) "
            "WHERE f.result <> 'done'"
        )
        self.finish = (
            "SELECT job_id, run_lease, result, reason "
            f"FROM {name}.finish_jobs(instance_id => %s, outcomes => %s::jsonb)"
        )
        self.attempt_status = (
            f"SELECT {name}.attempt_status(job_id => t.a, run_lease => t.b, claim_slot => t.c, "
            'batch_id => t.d, "position" => t.e) '
            "FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::bigint[], %s::bigint[]) "
            "WITH ORDINALITY AS t(a, b, c, d, e, ordinal) ORDER BY t.ordinal"
        )


def int_array(values: list[int]) -> str:
    """PostgreSQL's text form of an array, faster than adapting each element."""
    return "{" + ",".join(map(str, values)) + "}"
