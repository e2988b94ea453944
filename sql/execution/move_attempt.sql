-- Where a job goes when its attempt ends in anything but plain success. The caller has closed, or is about to close,
-- the receipt in the same transaction. p_job carries the attempt and run_lease of the attempt that ends.

CREATE OR REPLACE FUNCTION @extschema@._ended_job(p_job @extschema@._job, p_progress jsonb)
RETURNS @extschema@._job
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.ext := coalesce(v_job.ext, '{}');
    IF NOT v_job.ext ? 'created_at' THEN
        -- A first life was inserted when it became ready.
        v_job.ext := v_job.ext || jsonb_build_object('created_at', v_job.run_at);
    END IF;
    IF p_progress IS NOT NULL THEN
        v_job.ext := v_job.ext || jsonb_build_object('progress', p_progress);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_job(@extschema@._job, jsonb) IS
    'Internal: the job with what must survive its present place.';

-- Failed for good: dead letter where the queue has them, else terminal history.
CREATE OR REPLACE FUNCTION @extschema@._fail_job(
    p_job @extschema@._job, p_ready_slot integer, p_position bigint, p_attempted_at timestamptz,
    p_reason text, p_now timestamptz)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce((@extschema@._queue_options(p_job.queue)).dlq, @extschema@._setting('dlq_default') = 1) THEN
        PERFORM @extschema@._dead_letter(p_job, p_reason, p_now);
        RETURN 'dead_lettered'::@extschema@.attempt_outcome;
    END IF;
    PERFORM @extschema@._append_done(p_job, 'failed', p_ready_slot, p_position, p_attempted_at, p_now, p_reason, NULL);
    RETURN 'failed'::@extschema@.attempt_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._fail_job(@extschema@._job, integer, bigint, timestamptz, text, timestamptz) IS
    'Internal: ends a job failed, on hold or in history.';

-- What needs its unique key first, or a lane that cannot be had without waiting, is left to promotion.
CREATE OR REPLACE FUNCTION @extschema@._requeue_job(p_job @extschema@._job, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    IF v_job.ext -> 'unique' ? 'waiting'
       OR NOT EXISTS (SELECT FROM @extschema@._append_ready(ARRAY[v_job], true)) THEN
        v_job.run_at := p_now;
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._requeue_job(@extschema@._job, timestamptz) IS
    'Internal: puts a job at the end of its lane, or defers it, due now.';

CREATE OR REPLACE FUNCTION @extschema@._release_job(p_job @extschema@._job, p_reason text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_releases integer := coalesce((v_job.ext ->> 'releases')::integer, 0) + 1;
BEGIN
    v_job.attempt := v_job.attempt - 1;
    IF p_reason = 'unknown_kind' THEN
        -- No worker here knows the kind: come back later and later, at no cost, until one does. Where another one on
        -- the queue does, it is a matter of whose claim comes first.
        IF @extschema@._is_served(v_job.queue, v_job.kind, p_now) THEN
            v_releases := 1;
        END IF;
        v_job.ext := v_job.ext || jsonb_build_object('releases', v_releases);
        v_job.run_at := p_now + make_interval(secs => least(power(2, least(v_releases, 7) - 1), 60));
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    ELSE
        PERFORM @extschema@._requeue_job(v_job, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._release_job(@extschema@._job, text, timestamptz) IS
    'Internal: hands a job back without an attempt.';

-- p_outcome is what the worker or rescue wants; the answer is what became of it.
CREATE OR REPLACE FUNCTION @extschema@._move_attempt(
    p_job @extschema@._job, p_outcome @extschema@.attempt_outcome, p_ready_slot integer, p_position bigint,
    p_attempted_at timestamptz, p_delay_seconds numeric, p_error jsonb, p_reason text, p_result jsonb,
    p_now timestamptz)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_outcome @extschema@.attempt_outcome;
    v_kept @extschema@._kept_job;
    v_holder bigint;
BEGIN
    IF p_job.ext ? 'unique' THEN
        v_kept := @extschema@._keep_key(p_job, p_outcome, p_reason, p_now);
        v_job := v_kept.job;
        v_holder := v_kept.lost_to;
    END IF;
    IF p_error IS NOT NULL AND p_outcome IN ('retried', 'rescued', 'failed', 'cancelled') THEN
        v_job.ext := v_job.ext || jsonb_build_object(
            'errors', @extschema@._append_error(v_job.ext -> 'errors', p_error, v_job.attempt, p_now));
    END IF;
    IF v_holder IS NOT NULL THEN
        PERFORM @extschema@._append_done(v_job, 'cancelled', p_ready_slot, p_position, p_attempted_at, p_now,
            @extschema@._lost_key_reason(v_holder), NULL);
        RETURN CASE p_outcome WHEN 'rescued' THEN p_outcome ELSE 'cancelled' END;
    END IF;
    CASE p_outcome
    WHEN 'completed' THEN
        PERFORM @extschema@._append_done(
            v_job, 'completed', p_ready_slot, p_position, p_attempted_at, p_now, NULL, p_result);
    WHEN 'retried', 'rescued' THEN
        IF v_job.attempt >= coalesce((v_job.ext ->> 'max_attempts')::integer, 25) THEN
            v_outcome := @extschema@._fail_job(v_job, p_ready_slot, p_position, p_attempted_at,
                CASE p_outcome WHEN 'rescued' THEN 'rescued_out' ELSE 'max_attempts_exhausted' END, p_now);
            RETURN CASE p_outcome WHEN 'rescued' THEN 'rescued' ELSE v_outcome END;
        END IF;
        v_job.ext := v_job.ext - 'releases';
        v_job.run_at := p_now + make_interval(secs => coalesce(p_delay_seconds::double precision,
            @extschema@._backoff_seconds(v_job.attempt, v_job.ext -> 'backoff', random())));
        PERFORM @extschema@._defer(ARRAY[v_job], 'retryable');
    WHEN 'snoozed' THEN
        v_job.attempt := v_job.attempt - 1;
        v_job.ext := v_job.ext - 'releases';
        v_job.run_at := p_now + make_interval(secs => coalesce(p_delay_seconds, 0)::double precision);
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    WHEN 'cancelled' THEN
        PERFORM @extschema@._append_done(
            v_job, 'cancelled', p_ready_slot, p_position, p_attempted_at, p_now, p_reason, NULL);
    WHEN 'failed' THEN
        RETURN @extschema@._fail_job(
            v_job, p_ready_slot, p_position, p_attempted_at, coalesce(p_reason, 'terminal_error'), p_now);
    WHEN 'released' THEN
        PERFORM @extschema@._release_job(v_job, p_reason, p_now);
    END CASE;
    RETURN p_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_attempt(
    @extschema@._job, @extschema@.attempt_outcome, integer, bigint, timestamptz, numeric, jsonb, text, jsonb,
    timestamptz) IS
    'Internal: puts the job of an ending attempt where its outcome sends it.';
