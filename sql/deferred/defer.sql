-- Jobs that may not run yet.

-- The bucket of a time: its minute, or this one for the past. A bucket takes jobs of its next minute ten minutes ahead,
-- so that it stands empty for six.
CREATE OR REPLACE FUNCTION @extschema@._deferred_slot(p_run_at timestamptz, p_now timestamptz)
RETURNS smallint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN p_run_at >= p_now + interval '10 minutes' THEN 16
            ELSE floor(date_part('epoch', greatest(p_run_at, p_now)) / 60)::bigint % 16 END::smallint;
COMMENT ON FUNCTION @extschema@._deferred_slot(timestamptz, timestamptz) IS
    'Internal: slot of deferred_jobs for a job with this run_at.';

CREATE OR REPLACE FUNCTION @extschema@._defer(p_jobs @extschema@._job[], p_state @extschema@.job_state)
RETURNS TABLE (ordinal bigint, job_id bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT j.o, coalesce(j.job_id, nextval('@extschema@.job_ids')) AS id, j.run_at, j.run_lease, j.priority,
               j.shard, j.attempt, j.queue, j.kind, j.args, j.ext
        FROM unnest(p_jobs) WITH ORDINALITY
            j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)),
    stored AS (
        INSERT INTO @extschema@.deferred_jobs
            (job_id, run_at, run_lease, state, priority, shard, attempt, slot, queue, kind, args, ext)
        SELECT c.id, c.run_at, c.run_lease, p_state, c.priority, c.shard, c.attempt,
               @extschema@._deferred_slot(c.run_at, v_now), c.queue, c.kind, c.args,
               @extschema@._deferred_ext(c.ext, p_state)
        FROM chosen c)
    SELECT c.o, c.id FROM chosen c;
END
$function$;
COMMENT ON FUNCTION @extschema@._defer(@extschema@._job[], @extschema@.job_state) IS
    'Internal: stores jobs until their run_at; a job without an id gets one.';

-- Where a deferred job is; slot NULL when it is not there. The block gives the locks of the other leaves back: they
-- must not stay with an application that idles.
CREATE OR REPLACE FUNCTION @extschema@._find_deferred(
    p_job_id bigint, OUT slot integer, OUT state text, OUT job @extschema@._job)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_row record;
BEGIN
    BEGIN
        SELECT d.* INTO v_row FROM @extschema@.deferred_jobs d WHERE d.job_id = p_job_id;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    slot := v_row.slot;
    state := v_row.state;
    job := ROW(v_row.job_id, v_row.queue, v_row.priority, v_row.shard, v_row.run_at, v_row.attempt, v_row.run_lease,
               v_row.kind, v_row.args, v_row.ext);
END
$function$;
COMMENT ON FUNCTION @extschema@._find_deferred(bigint) IS 'Internal: slot, state and body of a deferred job.';

-- Remembers that jobs leave a slot. A dump whose snapshot is older than this may not have locked the slot yet: prune
-- waits for it. Asked for before the commit, so a transaction that deletes must not idle for long.
CREATE OR REPLACE FUNCTION @extschema@._note_taken(p_slot integer, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_clock regclass := format('@extschema@.deferred_%s_taken', p_slot);
    v_second bigint := extract(epoch FROM p_now);
BEGIN
    -- Each setval is a record of WAL.
    IF pg_sequence_last_value(v_clock) IS DISTINCT FROM v_second THEN
        PERFORM setval(v_clock, v_second);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_taken(integer, timestamptz) IS
    'Internal: remembers when a job was last taken out of a slot of deferred_jobs.';

CREATE OR REPLACE FUNCTION @extschema@._take_from_slot(p_slot integer, p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    EXECUTE format('DELETE FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = $1
                    RETURNING d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease, d.kind, d.args,
                              d.ext', p_slot)
        INTO v_job USING p_job_id;
    PERFORM @extschema@._note_taken(p_slot, clock_timestamp());
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_from_slot(integer, bigint) IS
    'Internal: removes a deferred job from a slot and returns it; NULL job_id when it is not there.';

-- Removes a deferred job and returns it; NULL job_id when it is not there. Waits for a concurrent change of the row; if
-- that was a move to another slot or to its lane, the caller must look again.
CREATE OR REPLACE FUNCTION @extschema@._take_deferred(p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer := (@extschema@._find_deferred(p_job_id)).slot;
BEGIN
    -- pause point: take
    RETURN CASE WHEN v_slot IS NOT NULL THEN @extschema@._take_from_slot(v_slot, p_job_id) END;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_deferred(bigint) IS 'Internal: removes a deferred job and returns it.';
