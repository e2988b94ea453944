-- A ring turns in two transactions. Plan appends the ledger row of the next generation and an empty
-- slot; publish moves the cursor to a ledger row that its own transaction did not write. The ledger
-- leads, so a rollback anywhere is harmless.

-- History that shares a slot goes together, so a slot is left after one retention at the latest. Not more often than
-- four times a minute: each TRUNCATE leaves dead rows in the catalog. And where nobody says how often, no more often
-- than the ring can hold: of its slots one is current, one is empty, and one is about to be emptied.
CREATE OR REPLACE FUNCTION @extschema@._rotate_seconds(p_ring text)
RETURNS numeric
LANGUAGE sql STABLE PARALLEL SAFE
RETURN least(
    coalesce((SELECT o.value::numeric FROM @extschema@.setting_overrides o WHERE o.name = p_ring || '_rotate_seconds'),
             greatest(@extschema@._setting(p_ring || '_rotate_seconds'),
                      @extschema@._setting(CASE p_ring WHEN 'queue' THEN 'terminal_retention_seconds'
                                                       ELSE 'attempt_evidence_seconds' END)
                          / (@extschema@._slot_count(p_ring) - 3))),
    CASE p_ring WHEN 'queue' THEN greatest(@extschema@._setting('terminal_retention_seconds'), 15) END);
COMMENT ON FUNCTION @extschema@._rotate_seconds(text) IS 'Internal: age at which the current slot of a ring is left.';

CREATE OR REPLACE FUNCTION @extschema@._plan_ring(p_ring text, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint;
    v_slots integer := @extschema@._slot_count(p_ring);
    v_current integer;
    v_bytes bigint;
    v_since timestamptz;
    v_next integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        RETURN 'contended';
    END IF;
    v_cursor := @extschema@._ring_cursor(p_ring);
    v_current := v_cursor % 64;
    IF @extschema@._planned_slot(p_ring, v_cursor / 64) IS NOT NULL THEN
        RETURN 'planned';
    END IF;
    v_bytes := @extschema@._slot_bytes(p_ring, v_current);
    IF v_bytes = 0 THEN
        RETURN 'skipped_idle';
    END IF;
    v_since := (SELECT s.rotated_at FROM @extschema@._ring_slots(p_ring) s WHERE s.slot = v_current);
    -- A time ahead is from a clock that was set back since.
    IF v_bytes < @extschema@._setting(p_ring || '_rotate_bytes')
       AND p_now >= v_since
       AND p_now < v_since + make_interval(secs => @extschema@._rotate_seconds(p_ring)::double precision) THEN
        RETURN 'not_due';
    END IF;
    -- Any empty slot will do, so that one busy slot does not stop the ring.
    v_next := (
        SELECT s
        FROM generate_series(0, v_slots - 1) s
        WHERE s <> v_current AND @extschema@._slot_is_empty(p_ring, s)
        ORDER BY (s - v_current + v_slots) % v_slots
        LIMIT 1);
    IF v_next IS NULL THEN
        RETURN 'skipped_busy';
    END IF;
    PERFORM @extschema@._plan_rotation(p_ring, v_next, v_cursor / 64 + 1, p_now);
    RETURN 'planned';
END
$function$;
COMMENT ON FUNCTION @extschema@._plan_ring(text, timestamptz) IS
    'Internal: plans the next generation: planned, not_due, skipped_idle, skipped_busy or contended.';

CREATE OR REPLACE FUNCTION @extschema@._publish_ring(p_ring text)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint;
    v_slot integer;
BEGIN
    -- A transaction that wrote nothing yet has not written the ledger row, so the row it sees is committed.
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RETURN 'not_fresh';
    END IF;
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        RETURN 'contended';
    END IF;
    v_cursor := @extschema@._ring_cursor(p_ring);
    v_slot := @extschema@._planned_slot(p_ring, v_cursor / 64);
    -- pause point: publish
    IF v_slot IS NULL THEN
        RETURN 'nothing_planned';
    END IF;
    PERFORM @extschema@._set_ring_cursor(p_ring, v_cursor / 64 + 1, v_slot);
    RETURN 'published';
END
$function$;
COMMENT ON FUNCTION @extschema@._publish_ring(text) IS
    'Internal: makes the planned slot current: published, nothing_planned, not_fresh or contended.';
