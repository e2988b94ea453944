"""The install script as it is tested: as plain SQL, with pause points, and with small rings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.edits import Edit, apply_all, install_script

QUEUE_SLOTS, CLAIM_SLOTS = 6, 4
PAUSE_LOCK = 7999  # class of the advisory locks that suspended statements wait for
LOCK_TIMEOUT = "5ms"  # one thread moves all: what has to wait at all would wait for ever

# A statement waits at the pause point that its transaction names, after passing it `skip` times; or
# once at each point it meets, up to STOPS of them, each behind a lock of its own.
STOPS = 4
PAUSE = f"""
CREATE FUNCTION awa._pause_point(p_name text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_skip integer;
    v_passed text[];
BEGIN
    IF current_setting('awa_test.pause_at', true) = '*' THEN
        v_passed := current_setting('awa_test.passed');
        IF p_name <> ALL (v_passed) AND cardinality(v_passed) < {STOPS} THEN
            PERFORM set_config('awa_test.passed', (v_passed || p_name)::text, true);
            PERFORM awa._wait_at_pause(pg_backend_pid() * {STOPS} + cardinality(v_passed));
        END IF;
    ELSIF current_setting('awa_test.pause_at', true) = p_name THEN
        v_skip := current_setting('awa_test.pause_skip');
        PERFORM set_config('awa_test.pause_skip', (v_skip - 1)::text, true);
        IF v_skip = 0 THEN
            PERFORM awa._wait_at_pause(pg_backend_pid());
        END IF;
    END IF;
END
$function$;
CREATE FUNCTION awa._wait_at_pause(p_key integer)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_timeout text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', '0', true);
    PERFORM pg_advisory_lock_shared({PAUSE_LOCK}, p_key);
    PERFORM pg_advisory_unlock_shared({PAUSE_LOCK}, p_key);
    PERFORM set_config('lock_timeout', v_timeout, true);
END
$function$;
"""

# A producer can also stop between taking a position and writing the row: the pause point "row".
PAUSE_AT_ROW = """
CREATE FUNCTION awa._pause_at_row()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM awa._pause_point('row');
    RETURN NEW;
END
$function$;
CREATE TRIGGER pause_at_row BEFORE INSERT ON awa.ready_entries
    FOR EACH ROW EXECUTE FUNCTION awa._pause_at_row();
"""


# What keeps a run short and bound to its seed: few slots, and nothing that depends on the clock.
TEST_BUILD = (
    Edit(
        "_slot_count",
        "WHEN 'queue' THEN 16 WHEN 'claim' THEN 8",
        f"WHEN 'queue' THEN {QUEUE_SLOTS} WHEN 'claim' THEN {CLAIM_SLOTS}",
    ),
    Edit("_tick", "'100ms'", f"'{LOCK_TIMEOUT}'"),
    Edit("_sample_claims", "uuid_send(gen_random_uuid())", "''::bytea"),
    Edit("_claim_ready", "'10s'", "'0'"),
    Edit("_tick", "'10s'", "'0'"),
    Edit("_rescuable", "p_deadline_at < p_now", "p_deadline_at IS NOT NULL"),
    Edit("_due_jobs", "d.slot < 16 AND d.run_at <= p_now", "d.slot < 16 AND d.run_at < 'infinity'"),
    # Deferred jobs: any leaf, all of them due, and each leaf ready to be emptied.
    Edit("_defer", "@extschema@._deferred_slot(c.run_at, v_now)", "(c.id % 17)::smallint"),
    Edit(
        "_move_deferred",
        "@extschema@._deferred_slot(g.run_at, $4)",
        "((g.job_id + %1$s + 1) %% 16)::smallint",
    ),
    Edit("_refill_buckets", "v_second / 15 = v_last / 15", "false"),
    Edit("_refill_buckets", ":= v_last > v_second", ":= true OR v_last > v_second"),
    Edit("_refill_buckets", "p_now + interval '10 minutes'", "'infinity'"),
    Edit("_move_stragglers", "@extschema@._deferred_slot(p_now, p_now)", "16"),
    Edit("_move_stragglers", "p_now - interval '2 minutes'", "'infinity'"),
    Edit("_is_past_dumps", "NOT BETWEEN -v_seconds AND v_seconds", "IS DISTINCT FROM -1"),
    Edit("_prune_deferred", ":= 262144", ":= 1"),
    Edit(
        "_move_attempt",
        "@extschema@._backoff_seconds(v_job.attempt, v_job.ext -> 'backoff', random())",
        "0",
    ),
)


def build(edits: Sequence[Edit] = ()) -> str:
    """Return the script that installs schema awa for a play, with some edits of a mutant."""
    text = apply_all(install_script().read_text(), (*TEST_BUILD, *edits))
    text = re.sub(
        r"^( *)-- pause point: (\w+)$",
        r"\1PERFORM @extschema@._pause_point('\2');",
        text,
        flags=re.M,
    )
    return "CREATE SCHEMA awa;\n" + PAUSE + text.replace("@extschema@", "awa") + PAUSE_AT_ROW
