-- The hot path of finishing: plain successes of one batch are one closure row and one completion row.

CREATE OR REPLACE FUNCTION @extschema@._complete_attempts(
    p_instance uuid, p_slot integer, p_batch bigint, p_positions bigint[], p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_set int8multirange := @extschema@._to_set(p_positions);
    v_ok int8multirange;
BEGIN
    PERFORM @extschema@._require_read_committed();
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', p_batch)) THEN
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, 'busy', NULL::text FROM unnest(p_positions);
        RETURN;
    END IF;
    -- pause point: finish
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    IF v_batch.positions IS NULL OR v_batch.owner <> p_instance THEN
        RETURN QUERY
        SELECT l.*
        FROM unnest(p_positions) WITH ORDINALITY p (pos, o),
             LATERAL @extschema@._complete_lease(p_instance, p_batch, p.pos, p_now) l
        ORDER BY p.o;
        RETURN;
    END IF;
    v_ok := v_set * v_batch.positions - v_batch.closed;
    IF NOT isempty(v_ok) THEN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_ok, NULL, p_now);
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_ok, v_batch.claimed_at, p_now);
        PERFORM @extschema@._take_progress(p_batch, v_ok);
    END IF;
    IF v_batch.is_plain AND v_set = v_ok THEN
        RETURN QUERY SELECT p, 1::bigint, 'done', NULL::text FROM unnest(p_positions) p;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT a.*
    FROM @extschema@._completion_answers(
        p_instance, p_slot, p_batch, p_positions, v_ok, v_batch.is_plain, v_batch.ready_slot, v_batch.positions,
        p_now) a;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_attempts(uuid, integer, bigint, bigint[], timestamptz) IS
    'Internal: completes positions of one batch.';

CREATE OR REPLACE FUNCTION @extschema@._completion_answers(
    p_instance uuid, p_slot integer, p_batch bigint, p_positions bigint[], p_ok int8multirange, p_is_plain boolean,
    p_ready_slot integer, p_claimed int8multirange, p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT CASE WHEN p.outcome = 'moved' THEN (p.answer).job_id
                WHEN p_is_plain AND p_claimed @> p.pos THEN p.pos ELSE (r.job).job_id END,
           CASE WHEN p.outcome = 'moved' THEN (p.answer).run_lease
                WHEN p_is_plain AND p_claimed @> p.pos THEN 1 ELSE (r.job).run_lease + 1 END,
           CASE WHEN p.outcome = 'moved' THEN (p.answer).result
                WHEN p_ok @> p.pos THEN 'done'
                WHEN p.outcome = 'completed' THEN 'already_done' ELSE 'stale' END,
           NULL::text
    FROM (SELECT c.pos, c.o, c.outcome,
                 CASE c.outcome WHEN 'moved'
                                THEN @extschema@._complete_lease(p_instance, p_batch, c.pos, p_now) END AS answer
          FROM (SELECT u.pos, u.o,
                       CASE WHEN p_claimed @> u.pos AND NOT p_ok @> u.pos
                            THEN @extschema@._closure_outcome(p_slot, p_batch, u.pos) END AS outcome
                FROM unnest(p_positions) WITH ORDINALITY u (pos, o) OFFSET 0) c
          -- Evaluated once, whatever is asked of the answer.
          OFFSET 0) p
    LEFT JOIN @extschema@._read_ready(p_ready_slot, CASE WHEN p_is_plain THEN '{}'
        ELSE ARRAY(SELECT DISTINCT d FROM unnest(p_positions) d) END) r
        ON r."position" = p.pos
    ORDER BY p.o;
END
$function$;
COMMENT ON FUNCTION @extschema@._completion_answers(
    uuid, integer, bigint, bigint[], int8multirange, boolean, integer, int8multirange, timestamptz) IS
    'Internal: one answer per position of a completion.';

-- Success inside the caller's own transaction, whatever its isolation: a closed attempt raises, one that
-- this snapshot cannot judge raises 40001.
CREATE OR REPLACE FUNCTION @extschema@._complete_job(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint, p_result jsonb,
    p_now timestamptz)
RETURNS @extschema@.finalization_receipt
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_repeat constant text := 'Repeat the transaction in a fresh snapshot.';
    v_batch record;
    v_job @extschema@._job;
    v_one int8multirange;
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', p_batch));
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    -- A claim that this snapshot can see, by its emission, and whose batch is gone: the attempt has ended for good.
    IF v_batch.positions IS NULL AND NOT @extschema@._is_read_committed()
       AND @extschema@._is_unclaimed(
           @extschema@._emission_in_snapshot(@extschema@._lane_of(p_position)), p_position) THEN
        PERFORM @extschema@._refuse('40001', format('this snapshot cannot see the claim of job %s', p_job_id),
            c_repeat);
    END IF;
    IF v_batch.positions @> p_position THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
    END IF;
    IF NOT coalesce(v_batch.positions @> p_position, false) OR v_batch.closed @> p_position
       OR v_job.job_id IS DISTINCT FROM p_job_id OR v_job.run_lease + 1 IS DISTINCT FROM p_run_lease THEN
        IF @extschema@._complete_leased_job(p_job_id, p_run_lease, p_batch, p_position, p_result, p_now) THEN
            RETURN ROW(p_job_id, p_run_lease, 'completed', p_slot, p_batch, p_position,
                p_now)::@extschema@.finalization_receipt;
        END IF;
        PERFORM @extschema@._refuse('JQ001',
            format('attempt with lease %s of job %s is no longer current', p_run_lease, p_job_id),
            'Drop this result and roll back; another attempt owns the job, or it has ended.');
    END IF;
    v_one := int8multirange(int8range(p_position, p_position, '[]'));
    BEGIN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_one, NULL, p_now);
    EXCEPTION WHEN unique_violation THEN
        PERFORM @extschema@._refuse('40001', format('this snapshot is older than a change of job %s', p_job_id),
            c_repeat);
    END;
    PERFORM @extschema@._take_progress(p_batch, v_one);
    IF p_result IS NOT NULL AND (v_job.ext -> 'keep_result') = 'true' THEN
        v_job.attempt := v_job.attempt + 1;
        v_job.run_lease := p_run_lease;
        PERFORM @extschema@._append_done(
            v_job, 'completed', v_batch.ready_slot, p_position, v_batch.claimed_at, p_now, NULL, p_result);
    ELSE
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_one, v_batch.claimed_at, p_now);
    END IF;
    RETURN ROW(p_job_id, p_run_lease, 'completed', p_slot, p_batch, p_position,
        p_now)::@extschema@.finalization_receipt;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_job(bigint, bigint, integer, bigint, bigint, jsonb, timestamptz) IS
    'Internal: completes one attempt in the caller''s transaction; '
    'JQ001 when stale, 40001 when the snapshot is too old.';
