-- Terminal history. A job whose body lies in a ready leaf ends in the same slot, so both are pruned together.

CREATE OR REPLACE FUNCTION @extschema@._append_completions(
    p_slot integer, p_batch bigint, p_positions int8multirange, p_attempted_at timestamptz, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.receipt_completion_batches (batch_id, finalized_at, attempted_at, slot, positions)
    VALUES (p_batch, p_now, p_attempted_at, p_slot, p_positions);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_completions(integer, bigint, int8multirange, timestamptz, timestamptz) IS
    'Internal: records jobs of one batch as completed.';

CREATE OR REPLACE FUNCTION @extschema@._done_body(p_job @extschema@._job)
RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN jsonb_build_object(
    'kind', (p_job).kind, 'args', (p_job).args, 'priority', (p_job).priority, 'shard', (p_job).shard,
    'run_at', (p_job).run_at, 'ext', (p_job).ext - '{errors,progress}'::text[]);
COMMENT ON FUNCTION @extschema@._done_body(@extschema@._job) IS
    'Internal: what history stores of a job whose body lies in no slot.';

-- p_position NULL: the body is stored in the row, in the current slot; otherwise it is the ready row of p_slot.
CREATE OR REPLACE FUNCTION @extschema@._append_done(
    p_job @extschema@._job, p_state @extschema@.job_state, p_slot integer, p_position bigint,
    p_attempted_at timestamptz, p_now timestamptz, p_reason text, p_result jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pg_current_xact_id();
    INSERT INTO @extschema@.done_entries
        (job_id, "position", run_lease, finalized_at, attempted_at, state, slot, attempt, queue, body, detail)
    VALUES (p_job.job_id, p_position, p_job.run_lease, p_now, p_attempted_at, p_state,
        CASE WHEN p_position IS NULL THEN @extschema@._ring_cursor('queue') % 64 ELSE p_slot END,
        p_job.attempt, p_job.queue,
        CASE WHEN p_position IS NULL THEN @extschema@._done_body(p_job) END,
        nullif(CASE WHEN p_reason IS NOT NULL THEN jsonb_build_object('reason', p_reason) ELSE '{}' END
            || CASE WHEN p_job.ext ? 'errors'
                    THEN jsonb_build_object('errors', p_job.ext -> 'errors') ELSE '{}' END
            -- Success drops it.
            || CASE WHEN p_job.ext ? 'progress' AND p_state <> 'completed'
                    THEN jsonb_build_object('progress', p_job.ext -> 'progress') ELSE '{}' END
            || CASE WHEN p_result IS NOT NULL THEN jsonb_build_object('result', p_result) ELSE '{}' END, '{}'));
    IF p_job.ext ? 'unique' THEN
        PERFORM @extschema@._end_key(p_job, p_state, @extschema@._retention_of(p_state), p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_done(
    @extschema@._job, @extschema@.job_state, integer, bigint, timestamptz, timestamptz, text, jsonb) IS
    'Internal: records a terminal job with its errors, reason and result.';
