-- Why a job is where it is: one sentence for people, facts for programs.

-- Live instances that say they work on a queue; those that say nothing may.
CREATE OR REPLACE FUNCTION @extschema@._live_instances(p_queue text, p_now timestamptz)
RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT count(*)
    FROM @extschema@.runtime_instances i
    WHERE @extschema@._is_live(i.heartbeat_at, p_now)
      AND coalesce(i.info -> 'queues' ? p_queue, true)
$function$;
COMMENT ON FUNCTION @extschema@._live_instances(text, timestamptz) IS
    'Internal: how many live instances work on a queue.';

-- Waiting jobs before a position of its lane, counted up to 10,000.
CREATE OR REPLACE FUNCTION @extschema@._count_ahead(p_position bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most constant integer := 10000;
    v_ahead int8multirange := @extschema@._unclaimed_set(
        @extschema@._newest_emission(@extschema@._lane_of(p_position))) * int8multirange(int8range(NULL, p_position));
    v_count bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        v_count := v_count + coalesce(cardinality(
            (@extschema@._see_leaf(v_slot, v_ahead, c_most, false)).positions), 0);
        EXIT WHEN v_count >= c_most;
    END LOOP;
    RETURN least(v_count, c_most);
END
$function$;
COMMENT ON FUNCTION @extschema@._count_ahead(bigint) IS 'Internal: waiting jobs before a position of its lane.';

-- Lanes of its queue that a claim takes before this one: better effective priority, or an older head.
CREATE OR REPLACE FUNCTION @extschema@._count_lanes_first(p_lane integer, p_queue text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lanes integer[] := ARRAY(
        SELECT c.lane_id
        FROM @extschema@._choose_lanes(p_queue, (@extschema@._queue_options(p_queue)).aging_seconds, p_now) c);
BEGIN
    RETURN (SELECT count(*) FROM unnest(v_lanes[:array_position(v_lanes, p_lane) - 1]) l
            WHERE @extschema@._head_run_at(l) IS NOT NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._count_lanes_first(integer, text, timestamptz) IS
    'Internal: lanes with waiting jobs that come before a lane.';

CREATE OR REPLACE FUNCTION @extschema@._available_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_info.job_id);
BEGIN
    RETURN jsonb_build_object(
        'paused_at', (@extschema@._queue_options(p_info.queue)).paused_at,
        'live_instances', @extschema@._live_instances(p_info.queue, p_now),
        'kind_is_known', @extschema@._is_served(p_info.queue, p_info.kind, p_now),
        'has_sql_handler', @extschema@._has_sql_handler(p_info.kind),
        'ahead', CASE WHEN v_ready.is_unclaimed THEN @extschema@._count_ahead(v_ready."position") ELSE 0 END,
        'lanes_first', CASE WHEN v_ready.is_unclaimed THEN @extschema@._count_lanes_first(
            @extschema@._lane_of(v_ready."position"), p_info.queue, p_now) ELSE 0 END);
END
$function$;
COMMENT ON FUNCTION @extschema@._available_facts(@extschema@.job_info, timestamptz) IS
    'Internal: what decides when an available job is claimed.';

CREATE OR REPLACE FUNCTION @extschema@._deferred_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT jsonb_build_object(
        'paused_at', (@extschema@._queue_options(p_info.queue)).paused_at, 'is_due', p_info.run_at <= p_now,
        'last_error', left(p_info.errors -> -1 ->> 'error', 1000),
        'releases', (d.job).ext -> 'releases',
        'unique_key_holder', (
            SELECT c.job_id FROM @extschema@.job_unique_claims c
            WHERE (d.job).ext -> 'unique' ? 'waiting' AND c.job_id <> p_info.job_id
              AND c.key = decode((d.job).ext -> 'unique' ->> 'key', 'hex')))
    FROM @extschema@._find_deferred(p_info.job_id) d
$function$;
COMMENT ON FUNCTION @extschema@._deferred_facts(@extschema@.job_info, timestamptz) IS
    'Internal: what a deferred job waits for.';

CREATE OR REPLACE FUNCTION @extschema@._running_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_instance @extschema@.runtime_instances;
BEGIN
    SELECT i.* INTO v_instance FROM @extschema@.runtime_instances i WHERE i.instance_id = p_info.instance_id;
    RETURN jsonb_build_object(
        'instance_id', p_info.instance_id, 'hostname', v_instance.info -> 'hostname', 'pid', v_instance.info -> 'pid',
        'heartbeat_at', v_instance.heartbeat_at,
        'instance_is_live', @extschema@._is_live(v_instance.heartbeat_at, p_now),
        'deadline_at', p_info.deadline_at, 'progress', p_info.progress,
        'is_evacuated', (@extschema@._find_open_lease(p_info.job_id)).job_id IS NOT NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._running_facts(@extschema@.job_info, timestamptz) IS
    'Internal: who runs a job, and until when.';

CREATE OR REPLACE FUNCTION @extschema@._counted(p_number bigint, p_noun text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_number || ' ' || p_noun || CASE p_number WHEN 1 THEN '' ELSE 's' END;
COMMENT ON FUNCTION @extschema@._counted(bigint, text) IS 'Internal: a number with its noun.';

-- The first reason that holds, the hardest one first.
CREATE OR REPLACE FUNCTION @extschema@._waiting_sentence(p_info @extschema@.job_info, p_facts jsonb)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT format('Job %s is available', p_info.job_id) || CASE
        WHEN p_facts ? 'paused_at'
        THEN format(', but its queue "%s" is paused since %s.', p_info.queue, p_facts ->> 'paused_at')
        WHEN (p_facts ->> 'live_instances')::bigint = 0 AND p_facts -> 'has_sql_handler' = 'true'
        THEN format(', and no live worker takes jobs of queue "%s": the next work() of it may run it.', p_info.queue)
        WHEN (p_facts ->> 'live_instances')::bigint = 0
        THEN format(', but no live worker takes jobs of queue "%s".', p_info.queue)
        WHEN p_facts -> 'kind_is_known' = 'false'
        THEN format(', but no live worker of queue "%s" says that it knows kind "%s".', p_info.queue, p_info.kind)
        WHEN (p_facts ->> 'ahead')::bigint > 0
        THEN format(' and waits behind %s%s of queue "%s" and priority %s%s.',
            CASE WHEN (p_facts ->> 'ahead')::bigint >= 10000 THEN 'at least ' ELSE '' END,
            @extschema@._counted((p_facts ->> 'ahead')::bigint, 'job'), p_info.queue, p_info.priority,
            CASE WHEN (p_facts ->> 'lanes_first')::bigint > 0
                 THEN format(', after %s with better priority or older jobs',
                             @extschema@._counted((p_facts ->> 'lanes_first')::bigint, 'lane')) ELSE '' END)
        WHEN (p_facts ->> 'lanes_first')::bigint > 0
        THEN format(' and first in its lane, after %s of queue "%s" with better priority or older jobs.',
            @extschema@._counted((p_facts ->> 'lanes_first')::bigint, 'lane'), p_info.queue)
        ELSE format(' and next: the next claim of queue "%s" takes it.', p_info.queue) END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_sentence(@extschema@.job_info, jsonb) IS
    'Internal: why an available job does not run yet.';

CREATE OR REPLACE FUNCTION @extschema@._job_sentence(p_info @extschema@.job_info, p_facts jsonb)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT CASE p_info.state
    WHEN 'available' THEN @extschema@._waiting_sentence(p_info, p_facts)
    WHEN 'scheduled' THEN format('Job %s is scheduled: ', p_info.job_id) || CASE
        WHEN p_facts ? 'unique_key_holder'
        THEN format('it needs its unique key, which job %s has; at %s it gets it, or is cancelled.',
            p_facts ->> 'unique_key_holder', p_info.run_at)
        WHEN p_facts ? 'releases'
        THEN format('no worker that claimed it knew kind "%s" (%s so far); it is offered again at %s.',
            p_info.kind, @extschema@._counted((p_facts ->> 'releases')::bigint, 'time'), p_info.run_at)
        WHEN p_facts -> 'is_due' = 'true' THEN format('it is due since %s and waits for a tick.', p_info.run_at)
        ELSE format('it may run from %s.', p_info.run_at) END
    WHEN 'retryable' THEN format('Job %s failed in attempt %s of %s%s and %s.', p_info.job_id, p_info.attempt,
        p_info.max_attempts, coalesce(' (' || (p_facts ->> 'last_error') || ')', ''),
        CASE WHEN p_facts ? 'unique_key_holder'
             THEN format('is tried again at %s, if job %s gives its unique key free by then', p_info.run_at,
                         p_facts ->> 'unique_key_holder')
             WHEN p_facts -> 'is_due' = 'true' THEN format('is due since %s: it waits for a tick', p_info.run_at)
             ELSE format('is tried again at %s', p_info.run_at) END)
    WHEN 'running' THEN format('Job %s runs since %s, attempt %s of %s, in worker %s%s%s.', p_info.job_id,
        p_info.attempted_at, p_info.attempt, p_info.max_attempts, p_info.instance_id,
        coalesce(' on ' || (p_facts ->> 'hostname'), ''),
        CASE WHEN p_facts -> 'instance_is_live' = 'true' THEN ''
             ELSE ', which is silent: the attempt will be rescued' END)
    WHEN 'pruned' THEN format('Job %s left no trace: its history was pruned, it was purged, or its insert rolled back.',
        p_info.job_id)
    WHEN 'failed' THEN format('Job %s failed at %s after %s (%s)%s.', p_info.job_id, p_info.finalized_at,
        @extschema@._counted(p_info.attempt, 'attempt'), concat_ws(': ', p_info.reason, p_facts ->> 'last_error'),
        CASE WHEN p_facts -> 'is_dead_letter' = 'true' THEN ' and is a dead letter' ELSE '' END)
    ELSE format('Job %s was %s at %s%s.', p_info.job_id, p_info.state, p_info.finalized_at,
        coalesce(' (' || p_info.reason || ')', ''))
    END
$function$;
COMMENT ON FUNCTION @extschema@._job_sentence(@extschema@.job_info, jsonb) IS
    'Internal: what is to say about a job, in one sentence.';

CREATE OR REPLACE FUNCTION @extschema@._explain_job(p_job_id bigint, p_now timestamptz)
RETURNS @extschema@.job_explanation
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_facts jsonb;
BEGIN
    -- The look-ups end by an exception, so that their relation locks vanish.
    BEGIN
        v_info := @extschema@._job_info(p_job_id);
        v_facts := CASE
            WHEN v_info.state = 'available' THEN @extschema@._available_facts(v_info, p_now)
            WHEN v_info.state IN ('scheduled', 'retryable') THEN @extschema@._deferred_facts(v_info, p_now)
            WHEN v_info.state = 'running' THEN @extschema@._running_facts(v_info, p_now)
            WHEN v_info.state = 'pruned' THEN jsonb_build_object('pruned_at', v_info.pruned_at)
            ELSE jsonb_build_object(
                'last_error', left(v_info.errors -> -1 ->> 'error', 1000),
                'is_dead_letter', EXISTS (SELECT FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id)) END;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    v_facts := v_facts || jsonb_build_object(
        'queue', v_info.queue, 'kind', v_info.kind, 'priority', v_info.priority, 'attempt', v_info.attempt,
        'max_attempts', v_info.max_attempts, 'run_at', v_info.run_at, 'created_at', v_info.created_at,
        'attempted_at', v_info.attempted_at, 'finalized_at', v_info.finalized_at, 'reason', v_info.reason);
    -- What is null within progress stays.
    v_facts := (SELECT coalesce(jsonb_object_agg(f.key, f.value), '{}')
                FROM jsonb_each(v_facts) f WHERE f.value <> 'null');
    RETURN ROW(p_job_id, v_info.state, @extschema@._job_sentence(v_info, v_facts),
        v_facts)::@extschema@.job_explanation;
END
$function$;
COMMENT ON FUNCTION @extschema@._explain_job(bigint, timestamptz) IS
    'Internal: a job''s state with its reasons; 42704 and 40001 as job().';
