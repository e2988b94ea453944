-- Progress of running attempts: the only mutable state of an attempt, paid for by those that use it.

CREATE OR REPLACE FUNCTION @extschema@._set_progress(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint, p_progress jsonb,
    p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_job @extschema@._job;
    v_lease @extschema@.leases;
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM pg_advisory_xact_lock_shared(@extschema@._lock_key('batch', p_batch));
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    IF coalesce(v_batch.positions @> p_position, false) AND NOT v_batch.closed @> p_position THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
        v_job.run_lease := v_job.run_lease + 1;
    ELSE
        v_lease := @extschema@._find_lease(p_batch, p_position);
        IF v_lease.outcome IS NULL THEN
            v_job := @extschema@._lease_job(v_lease);
        END IF;
    END IF;
    IF v_job.job_id IS DISTINCT FROM p_job_id OR v_job.run_lease IS DISTINCT FROM p_run_lease THEN
        RETURN false;
    END IF;
    INSERT INTO @extschema@.attempt_state (batch_id, "position", progress, updated_at)
    VALUES (p_batch, p_position, p_progress, p_now)
    ON CONFLICT (batch_id, "position") DO UPDATE SET progress = excluded.progress, updated_at = excluded.updated_at;
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_progress(bigint, bigint, integer, bigint, bigint, jsonb, timestamptz) IS
    'Internal: stores the progress of an open attempt; false when it is closed.';

CREATE OR REPLACE FUNCTION @extschema@._progress_of(p_batch bigint, p_position bigint)
RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (SELECT s.progress FROM @extschema@.attempt_state s
        WHERE s.batch_id = p_batch AND s."position" = p_position);
COMMENT ON FUNCTION @extschema@._progress_of(bigint, bigint) IS 'Internal: what a running attempt reported last.';

-- Removes the progress of ending attempts and returns it by position. Costs one look at
-- an empty file when nobody uses progress.
CREATE OR REPLACE FUNCTION @extschema@._take_progress(p_batch bigint, p_positions int8multirange)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_progress jsonb;
BEGIN
    IF pg_relation_size('@extschema@.attempt_state'::regclass) = 0 THEN
        RETURN NULL;
    END IF;
    WITH taken AS (
        DELETE FROM @extschema@.attempt_state s WHERE s.batch_id = p_batch AND p_positions @> s."position"
        RETURNING s."position", s.progress)
    SELECT jsonb_object_agg(t."position", t.progress) INTO v_progress FROM taken t;
    RETURN v_progress;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_progress(bigint, int8multirange) IS
    'Internal: removes and returns the progress of positions of a batch.';
