-- Changes of jobs that do not run: another life for one that ended, other values for one that waits. The job keeps its
-- id and its run_lease. Lock order: mutation (shared), position.

-- Where a job is. Runs in a block that ends by an exception, so that its relation locks vanish: a caller that idles in
-- its transaction blocks the prune of no slot it has only looked at.
CREATE OR REPLACE FUNCTION @extschema@._observe_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    BEGIN
        v_info := @extschema@._job_info(p_job_id);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._observe_job(bigint) IS
    'Internal: job() without its locks; 42704 and 40001 as there.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_state(p_job_id bigint, p_state text, p_hint text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._refuse('55000', format('field "job_id": job %s is %s', p_job_id, p_state), p_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_state(bigint, text, text) IS
    'Internal: raises 55000 for a job whose state does not allow a call.';

-- A due job goes to its lane, without waiting for one; else it is deferred. Then it takes its unique key, if it has
-- one: after the lane, as producers do. Outside its mask it gives the key up, and with it the end of its former life.
CREATE OR REPLACE FUNCTION @extschema@._place_job(
    p_job @extschema@._job, p_state @extschema@.job_state, p_now timestamptz)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_state @extschema@.job_state := 'available'::@extschema@.job_state;
BEGIN
    v_job.ext := v_job.ext #- '{unique,waiting}';
    IF v_job.run_at > p_now OR NOT EXISTS (SELECT FROM @extschema@._append_ready(ARRAY[v_job], true)) THEN
        v_state := p_state;
        PERFORM @extschema@._defer(ARRAY[v_job], v_state);
    END IF;
    IF v_job.ext ? 'unique' THEN
        IF @extschema@._key_counts_in(v_job.ext -> 'unique', v_state) THEN
            PERFORM @extschema@._retake_key(v_job, p_now);
        ELSE
            PERFORM @extschema@._drop_key(v_job.job_id, v_job.ext -> 'unique');
        END IF;
    END IF;
    RETURN v_state;
END
$function$;
COMMENT ON FUNCTION @extschema@._place_job(@extschema@._job, @extschema@.job_state, timestamptz) IS
    'Internal: makes a job available, or defers it in the given state until its run_at (23505 for a lost unique key).';

-- Another queue keeps the shard as far as it has so many.
CREATE OR REPLACE FUNCTION @extschema@._redirect_job(p_job @extschema@._job, p_opts jsonb, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.priority := coalesce(@extschema@._option_integer(p_opts, 'priority', 1, 4), v_job.priority);
    v_job.run_at := p_now + make_interval(
        secs => coalesce(@extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000), 0)::double precision);
    IF coalesce(p_opts -> 'queue', 'null') <> 'null' THEN
        v_job.queue := @extschema@._option_text(p_opts, 'queue', 200);
        PERFORM @extschema@._check_name('queue', v_job.queue);
        v_job.shard := mod(v_job.shard, (@extschema@._queue_options(v_job.queue)).enqueue_shards);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._redirect_job(@extschema@._job, jsonb, timestamptz) IS
    'Internal: a job that runs again, with the queue, priority and delay_seconds of the options (22023, 23514).';

-- A job that ended, out of history or the dead letters, as a fresh life; NULL when it is not there any more.
CREATE OR REPLACE FUNCTION @extschema@._take_ended(p_job_id bigint, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := @extschema@._take_dead_letter(p_job_id, p_now);
    v_done @extschema@.done_entries;
BEGIN
    IF v_job.job_id IS NOT NULL THEN
        RETURN v_job;
    END IF;
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('position', p_job_id));
    BEGIN
        v_done := @extschema@._find_done(p_job_id);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    IF v_done.job_id IS NULL OR v_done.state = 'completed' OR NOT @extschema@._undo_done(v_done) THEN
        RETURN NULL;
    END IF;
    v_job := @extschema@._job_of_done(v_done);
    v_job.attempt := 0;
    v_job.ext := v_job.ext - '{progress,releases}'::text[];
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_ended(bigint, timestamptz) IS
    'Internal: takes a failed or cancelled job back: attempt 0, errors and run_lease kept, progress dropped.';

CREATE OR REPLACE FUNCTION @extschema@._retry_job(p_job_id bigint, p_opts jsonb, p_now timestamptz)
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._require_read_committed();
    -- A job can move on between look and lock.
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._observe_job(p_job_id);
        -- pause point: retry
        CASE
        WHEN v_info.state IN ('scheduled', 'retryable') THEN
            v_job := @extschema@._take_deferred(p_job_id);
            v_job.ext := v_job.ext - 'releases';
        WHEN v_info.state IN ('failed', 'cancelled') THEN
            v_job := @extschema@._take_ended(p_job_id, p_now);
            v_info.state := 'scheduled';
        WHEN v_info.state = 'pruned' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'pruned', 'Nothing of it is left: insert it again.');
        WHEN v_info.state = 'completed' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'completed', 'A job that succeeded stays so: insert another.');
        ELSE
            PERFORM @extschema@._refuse_state(p_job_id, v_info.state, 'It runs already, or will without help.');
        END CASE;
        IF v_job.job_id IS NOT NULL THEN
            v_job := @extschema@._redirect_job(v_job, p_opts, p_now);
            RETURN ROW(p_job_id, @extschema@._place_job(v_job, v_info.state::@extschema@.job_state, p_now),
                false, NULL)::@extschema@.insert_result;
        END IF;
    END LOOP;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._retry_job(bigint, jsonb, timestamptz) IS
    'Internal: makes a job that ended or waits for its time run now.';

-- NULL when it is not there, or was claimed.
CREATE OR REPLACE FUNCTION @extschema@._take_available(p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._lock_ready(p_job_id);
BEGIN
    RETURN CASE WHEN v_ready.is_unclaimed
                THEN @extschema@._take_waiting(v_ready.slot, v_ready."position") END;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_available(bigint) IS
    'Internal: removes a waiting job from its lane and returns it.';

-- Options not named keep their value; null restores the default.
CREATE OR REPLACE FUNCTION @extschema@._changed_job(
    p_job @extschema@._job, p_changes jsonb, p_run_at timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_options constant text[] := '{tags,metadata,deadline_seconds,keep_result,backoff}'::text[];
    v_job @extschema@._job := @extschema@._ended_job(p_job, NULL);
    v_queue text := CASE WHEN p_changes ? 'queue' THEN p_changes ->> 'queue' ELSE v_job.queue END;
    v_priority integer := CASE
        WHEN p_changes ? 'priority'
        THEN coalesce(@extschema@._option_integer(p_changes, 'priority', -2147483648, 2147483647), 2)
        ELSE v_job.priority END;
    v_max_attempts integer := coalesce(
        CASE WHEN p_changes ? 'max_attempts'
             THEN @extschema@._option_integer(p_changes, 'max_attempts', -2147483648, 2147483647)
             ELSE (v_job.ext ->> 'max_attempts')::integer END, 25);
    v_opts jsonb := (SELECT coalesce(jsonb_object_agg(o.key, o.value), '{}')
                     FROM jsonb_each(p_changes) o WHERE o.key = ANY (c_options));
BEGIN
    v_job.args := CASE WHEN p_changes ? 'args' THEN p_changes -> 'args' ELSE v_job.args END;
    PERFORM @extschema@._check_job(v_job.kind, v_job.args, v_queue, v_priority, v_max_attempts, p_run_at);
    v_job.ext := v_job.ext - (ARRAY(SELECT jsonb_object_keys(v_opts)) || 'max_attempts'::text)
        || coalesce(@extschema@._job_ext(v_opts, v_max_attempts), '{}');
    v_job.priority := v_priority;
    IF v_queue <> v_job.queue THEN
        v_job.queue := v_queue;
        v_job.shard := mod(v_job.shard, (@extschema@._queue_options(v_queue)).enqueue_shards);
    END IF;
    v_job.run_at := coalesce(p_run_at, v_job.run_at);
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._changed_job(@extschema@._job, jsonb, timestamptz) IS
    'Internal: a job with other values, checked (22023, 23514); its run_at stays when p_run_at is NULL.';

CREATE OR REPLACE FUNCTION @extschema@._update_job(
    p_job_id bigint, p_changes jsonb, p_run_at timestamptz, p_now timestamptz)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._observe_job(p_job_id);
        -- pause point: update
        CASE
        WHEN v_info.state IN ('scheduled', 'retryable') THEN
            v_job := @extschema@._take_deferred(p_job_id);
        WHEN v_info.state = 'available' THEN
            v_job := @extschema@._take_available(p_job_id);
            -- It is due, also when the clock was set back since it became so.
            v_job.run_at := least(v_job.run_at, p_now);
            v_info.state := 'scheduled';
        WHEN v_info.state = 'running' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'running', 'Cancel it, or wait for the attempt to end.');
        ELSE
            PERFORM @extschema@._refuse_state(p_job_id, v_info.state, 'Only a job that waits can be changed.');
        END CASE;
        IF v_job.job_id IS NOT NULL THEN
            RETURN @extschema@._place_job(
                @extschema@._changed_job(v_job, p_changes, p_run_at), v_info.state::@extschema@.job_state, p_now);
        END IF;
    END LOOP;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._update_job(bigint, jsonb, timestamptz, timestamptz) IS
    'Internal: gives a waiting job other values; a waiting one goes to the end of its lane.';
