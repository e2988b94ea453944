-- Everything known about one job.

CREATE OR REPLACE FUNCTION @extschema@._job_info_of(p_job @extschema@._job, p_state text)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info.job_id := p_job.job_id;
    v_info.state := p_state;
    v_info.kind := p_job.kind;
    v_info.queue := p_job.queue;
    v_info.priority := p_job.priority;
    v_info.args := p_job.args;
    v_info.attempt := p_job.attempt;
    v_info.max_attempts := coalesce((p_job.ext ->> 'max_attempts')::integer, 25);
    v_info.run_lease := p_job.run_lease;
    v_info.run_at := p_job.run_at;
    v_info.created_at := coalesce((p_job.ext ->> 'created_at')::timestamptz, p_job.run_at);
    v_info.tags := CASE WHEN p_job.ext ? 'tags' THEN ARRAY(SELECT jsonb_array_elements_text(p_job.ext -> 'tags')) END;
    v_info.metadata := p_job.ext -> 'metadata';
    v_info.progress := p_job.ext -> 'progress';
    v_info.errors := p_job.ext -> 'errors';
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_info_of(@extschema@._job, text) IS
    'Internal: a job in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._running_info(p_job @extschema@._job, p_position bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_receipt record := @extschema@._find_receipt(p_position);
    v_info @extschema@.job_info;
BEGIN
    IF v_receipt.batch_id IS NULL THEN
        RETURN NULL;
    END IF;
    v_info := @extschema@._job_info_of(@extschema@._next_attempt(p_job), 'running');
    v_info.attempted_at := v_receipt.claimed_at;
    v_info.deadline_at := v_receipt.deadline_at;
    v_info.instance_id := v_receipt.owner;
    v_info.progress := coalesce(@extschema@._progress_of(v_receipt.batch_id, p_position), v_info.progress);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._running_info(@extschema@._job, bigint) IS
    'Internal: a running job, or NULL when its position has no open receipt.';

CREATE OR REPLACE FUNCTION @extschema@._lease_info(p_lease @extschema@.leases)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info := @extschema@._job_info_of(@extschema@._lease_job(p_lease), 'running');
BEGIN
    v_info.attempted_at := p_lease.claimed_at;
    v_info.deadline_at := p_lease.deadline_at;
    v_info.instance_id := p_lease.owner;
    v_info.progress := coalesce(@extschema@._progress_of(p_lease.batch_id, p_lease."position"), v_info.progress);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._lease_info(@extschema@.leases) IS
    'Internal: a job that runs under a lease, in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._done_info(p_done @extschema@.done_entries, p_job @extschema@._job)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info := @extschema@._job_info_of(
        CASE WHEN p_done.body IS NULL THEN p_job ELSE @extschema@._stored_job(p_done) END, p_done.state::text);
    v_info.job_id := p_done.job_id;
    v_info.queue := p_done.queue;
    v_info.attempt := p_done.attempt;
    v_info.run_lease := p_done.run_lease;
    v_info.attempted_at := p_done.attempted_at;
    v_info.finalized_at := p_done.finalized_at;
    v_info.reason := p_done.detail ->> 'reason';
    v_info.errors := p_done.detail -> 'errors';
    v_info.progress := p_done.detail -> 'progress';
    v_info.result := p_done.detail -> 'result';
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._done_info(@extschema@.done_entries, @extschema@._job) IS
    'Internal: a terminal job in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._dead_letter_info(p_entry @extschema@.dlq_entries)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info := @extschema@._job_info_of(
        ROW(p_entry.job_id, p_entry.queue, p_entry.priority, p_entry.shard, (p_entry.ext ->> 'run_at')::timestamptz,
            p_entry.attempt, p_entry.run_lease, p_entry.kind, p_entry.args, p_entry.ext),
        'failed');
    v_info.finalized_at := p_entry.dlq_at;
    v_info.reason := p_entry.reason;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._dead_letter_info(@extschema@.dlq_entries) IS
    'Internal: a dead letter in the form that job() answers.';

-- A job on hold or deferred; NULL when it is neither.
CREATE OR REPLACE FUNCTION @extschema@._backlog_info(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_found record := @extschema@._find_deferred(p_job_id);
    v_entry @extschema@.dlq_entries;
BEGIN
    IF v_found.slot IS NOT NULL THEN
        RETURN @extschema@._job_info_of(v_found.job, v_found.state);
    END IF;
    SELECT d.* INTO v_entry FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id;
    IF FOUND THEN
        RETURN @extschema@._dead_letter_info(v_entry);
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._backlog_info(bigint) IS
    'Internal: a deferred job or a dead letter in the form that job() answers.';

-- A job wherever it is; NULL when no place has it at the moment of the look.
CREATE OR REPLACE FUNCTION @extschema@._look_up_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_job_id);
    v_done @extschema@.done_entries;
    v_job @extschema@._job;
    v_info @extschema@.job_info := @extschema@._backlog_info(p_job_id);
    v_lease @extschema@.leases := @extschema@._find_open_lease(p_job_id);
BEGIN
    IF v_info.job_id IS NOT NULL THEN
        RETURN v_info;
    ELSIF v_lease.job_id IS NOT NULL THEN
        RETURN @extschema@._lease_info(v_lease);
    END IF;
    IF v_ready.slot IS NOT NULL THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_ready.slot, ARRAY[v_ready."position"]) r;
        IF v_ready.is_unclaimed THEN
            RETURN @extschema@._job_info_of(v_job, 'available');
        END IF;
        v_info := @extschema@._running_info(v_job, v_ready."position");
        IF v_info.job_id IS NOT NULL THEN
            RETURN v_info;
        END IF;
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL AND (v_ready.slot IS NULL OR v_done.run_lease > v_ready.run_lease) THEN
        IF v_done."position" IS NOT NULL THEN
            SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_done.slot, ARRAY[v_done."position"]) r;
        END IF;
        RETURN @extschema@._done_info(v_done, v_job);
    ELSIF v_ready.slot IS NOT NULL THEN
        v_info := @extschema@._job_info_of(@extschema@._next_attempt(v_job), 'completed');
        v_info.progress := NULL;
        SELECT c.attempted_at, c.finalized_at INTO v_info.attempted_at, v_info.finalized_at
        FROM @extschema@._completion_of(v_ready.slot, v_ready."position") c;
        IF v_info.finalized_at IS NOT NULL THEN
            RETURN v_info;
        END IF;
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_job(bigint) IS 'Internal: everything known about one job, or NULL.';

-- The same places without the bodies, and with when and for how long an end counts.
CREATE OR REPLACE FUNCTION @extschema@._look_up_state(
    p_job_id bigint, OUT state @extschema@.job_state, OUT finalized_at timestamptz, OUT retention text)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_job_id);
    v_done @extschema@.done_entries;
BEGIN
    IF v_ready.is_unclaimed THEN
        state := 'available'::@extschema@.job_state;
        RETURN;
    END IF;
    state := (@extschema@._find_deferred(p_job_id)).state::@extschema@.job_state;
    IF state IS NULL AND ((@extschema@._find_open_lease(p_job_id)).job_id IS NOT NULL
        OR (v_ready.slot IS NOT NULL AND (@extschema@._find_receipt(v_ready."position")).batch_id IS NOT NULL)) THEN
        state := 'running'::@extschema@.job_state;
    END IF;
    IF state IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT 'failed'::@extschema@.job_state, d.dlq_at, 'dlq_retention_seconds' INTO state, finalized_at, retention
    FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id;
    IF FOUND THEN
        RETURN;
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL AND (v_ready.slot IS NULL OR v_done.run_lease > v_ready.run_lease) THEN
        state := v_done.state;
        finalized_at := v_done.finalized_at;
    ELSIF v_ready.slot IS NOT NULL THEN
        finalized_at := (@extschema@._completion_of(v_ready.slot, v_ready."position")).finalized_at;
        state := CASE WHEN finalized_at IS NOT NULL THEN 'completed'::@extschema@.job_state END;
    END IF;
    retention := @extschema@._retention_of(state);
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_state(bigint) IS
    'Internal: state of a job, when it ended, and the setting of how long that counts; or NULL.';

-- A job that moves between the looks is in neither place; the next round finds it where it went.
CREATE OR REPLACE FUNCTION @extschema@._find_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._look_up_job(p_job_id);
        EXIT WHEN v_info.job_id IS NOT NULL;
    END LOOP;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_job(bigint) IS
    'Internal: everything known about one job, or NULL when nothing of it is left.';

CREATE OR REPLACE FUNCTION @extschema@._find_state(
    p_job_id bigint, OUT state @extschema@.job_state, OUT finalized_at timestamptz, OUT retention text)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_round IN 1 .. 5 LOOP
        SELECT s.* INTO state, finalized_at, retention FROM @extschema@._look_up_state(p_job_id) s;
        EXIT WHEN state IS NOT NULL;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_state(bigint) IS
    'Internal: state of a job, when it ended, and the setting of how long that counts; NULLs when nothing is left.';

CREATE OR REPLACE FUNCTION @extschema@._job_info(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info := @extschema@._find_job(p_job_id);
    v_state text;
BEGIN
    IF v_info.job_id IS NOT NULL THEN
        RETURN v_info;
    END IF;
    v_state := @extschema@._ended_state(p_job_id, NULL, NULL);
    IF v_state IS NULL THEN
        PERFORM @extschema@._refuse('42704', format('field "job_id": there is no job %s', p_job_id), 'Check the id.');
    ELSIF v_state = 'unsettled' THEN
        PERFORM @extschema@._refuse_unsettled(p_job_id);
    END IF;
    -- It may have come between the look and the proof that nothing can come any more.
    v_info := @extschema@._find_job(p_job_id);
    IF v_info.job_id IS NOT NULL THEN
        RETURN v_info;
    END IF;
    v_info.job_id := p_job_id;
    v_info.state := 'pruned';
    v_info.pruned_at := (SELECT max(r.pruned_at) FROM @extschema@.queue_terminal_rollups r);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_info(bigint) IS
    'Internal: everything known about one job; 42704 for an id that was never given out.';
