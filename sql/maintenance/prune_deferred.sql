-- Deferred jobs are ordinary rows, and their leaves are emptied by TRUNCATE: it does not ask snapshots, so a pinned one
-- does not make promotion slow.

CREATE OR REPLACE FUNCTION @extschema@._slot_is_calm(p_slot integer, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_taken bigint := pg_sequence_last_value(format('@extschema@.deferred_%s_taken', p_slot)::regclass);
BEGIN
    RETURN @extschema@._is_past_dumps('epoch'::timestamptz + coalesce(v_taken, 0) * interval '1 second', p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_is_calm(integer, timestamptz) IS
    'Internal: whether nothing was taken out of a slot of deferred_jobs for dump_lock_seconds.';

CREATE OR REPLACE FUNCTION @extschema@._prune_bucket(p_slot integer, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_outcome text := 'pruned';
BEGIN
    -- The block undoes locks when the slot turns out to be in use.
    BEGIN
        IF (@extschema@._last_deferred(p_slot)).run_at IS NOT NULL THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        -- pause point: prune
        -- SHARE keeps writers out while the look is repeated; readers go on.
        IF NOT @extschema@._lock_slot('deferred', p_slot, 'SHARE', 1) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        IF (@extschema@._last_deferred(p_slot)).run_at IS NOT NULL
           OR NOT @extschema@._slot_is_calm(p_slot, p_now) THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        -- pause point: recheck
        IF NOT @extschema@._lock_slot('deferred', p_slot, 'ACCESS EXCLUSIVE', 10) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        EXECUTE format('TRUNCATE %s', format('@extschema@.deferred_jobs_%s', p_slot)::regclass);
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_bucket(integer, timestamptz) IS
    'Internal: empties a slot of deferred_jobs that holds no job: pruned, locked or in_use.';

-- One slot a call. A small one is left: truncating costs more than its dead rows.
CREATE OR REPLACE FUNCTION @extschema@._prune_deferred(
    p_now timestamptz, OUT outcome text, OUT moved bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_small constant bigint := 262144;
    v_outcome text;
BEGIN
    PERFORM @extschema@._require_read_committed();
    outcome := 'nothing';
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        CONTINUE WHEN @extschema@._slot_bytes('deferred', v_slot) < c_small
            OR NOT @extschema@._slot_is_calm(v_slot, p_now);
        v_outcome := @extschema@._prune_bucket(v_slot, p_now);
        IF v_outcome = 'in_use' THEN
            moved := nullif(@extschema@._move_stragglers(v_slot, p_now), 0);
            -- It is truncated by a later call.
            v_outcome := CASE WHEN moved IS NULL THEN 'nothing' ELSE 'moved' END;
        END IF;
        CONTINUE WHEN v_outcome = 'nothing';
        outcome := v_outcome;
        detail := jsonb_build_object('slot', v_slot);
        EXIT WHEN outcome <> 'locked';
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_deferred(timestamptz) IS
    'Internal: empties one slot of deferred_jobs without jobs: pruned, moved (a few overdue jobs, out of its way), '
    'locked or nothing.';
