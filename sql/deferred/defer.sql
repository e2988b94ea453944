-- Jobs that may not run yet.

CREATE OR REPLACE FUNCTION @extschema@._defer(p_jobs @extschema@._job[], p_state @extschema@.job_state)
RETURNS TABLE (ordinal bigint, job_id bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT j.o, coalesce(j.job_id, nextval('@extschema@.job_ids')) AS id, j.run_at, j.run_lease, j.priority,
               j.shard, j.attempt, j.queue, j.kind, j.args, j.ext
        FROM unnest(p_jobs) WITH ORDINALITY
            j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)),
    stored AS (
        INSERT INTO @extschema@.deferred_jobs
            (job_id, run_at, run_lease, state, priority, shard, attempt, queue, kind, args, ext)
        SELECT c.id, c.run_at, c.run_lease, p_state, c.priority, c.shard, c.attempt, c.queue, c.kind, c.args,
               @extschema@._deferred_ext(c.ext, p_state)
        FROM chosen c)
    SELECT c.o, c.id FROM chosen c;
END
$function$;
COMMENT ON FUNCTION @extschema@._defer(@extschema@._job[], @extschema@.job_state) IS
    'Internal: stores jobs until their run_at; a job without an id gets one.';

-- Removes a deferred job and returns it; NULL job_id when it is not there. Waits for a concurrent change of the row.
CREATE OR REPLACE FUNCTION @extschema@._take_deferred(p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    DELETE FROM @extschema@.deferred_jobs d WHERE d.job_id = p_job_id
    RETURNING d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease, d.kind, d.args, d.ext
    INTO v_job;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_deferred(bigint) IS 'Internal: removes a deferred job and returns it.';
