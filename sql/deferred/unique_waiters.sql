-- Deferred jobs with a unique key: those that wait for it, and new arguments.

CREATE OR REPLACE FUNCTION @extschema@._waiting_for_keys(p_limit integer, p_now timestamptz)
RETURNS @extschema@._waiting_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_due record := @extschema@._due_jobs(true, p_limit, p_now, '{}');
BEGIN
    RETURN ARRAY(
        SELECT ROW(d.job_id, d.ext -> 'unique')::@extschema@._waiting_job
        FROM @extschema@._read_deferred(v_due.slots, v_due.ids) d
        ORDER BY d.run_at, d.job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_for_keys(integer, timestamptz) IS
    'Internal: due jobs that need their unique key first, locked.';

-- Both in one step: until it is available, the key of such a job is not safe.
CREATE OR REPLACE FUNCTION @extschema@._promote_with_keys(p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slots integer[];
    v_ids bigint[];
    v_moved bigint;
BEGIN
    WITH ready AS (
        UPDATE @extschema@.deferred_jobs d SET ext = d.ext #- '{unique,waiting}' WHERE d.job_id = ANY (p_ids)
        RETURNING d.slot, d.job_id)
    SELECT array_agg(r.slot::integer), array_agg(r.job_id) INTO v_slots, v_ids FROM ready r;
    IF v_ids IS NULL THEN
        RETURN 0;
    END IF;
    v_moved := @extschema@._promote(v_slots, v_ids, p_now);
    -- Those of a strict_fifo lane that a producer holds stay.
    UPDATE @extschema@.deferred_jobs d SET ext = jsonb_set(d.ext, '{unique,waiting}', 'true')
    WHERE d.job_id = ANY (p_ids);
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote_with_keys(bigint[], timestamptz) IS
    'Internal: promotes deferred jobs that have just taken their keys.';

CREATE OR REPLACE FUNCTION @extschema@._replace_deferred_args(p_job_id bigint, p_args jsonb)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slot integer := (@extschema@._find_deferred(p_job_id)).slot;
    v_count bigint;
BEGIN
    IF v_slot IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('UPDATE @extschema@.deferred_jobs_%s d SET args = $2 WHERE d.job_id = $1', v_slot)
        USING p_job_id, p_args;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count > 0;
END
$function$;
COMMENT ON FUNCTION @extschema@._replace_deferred_args(bigint, jsonb) IS
    'Internal: new arguments for a deferred job; false when it is not there.';
