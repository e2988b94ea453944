-- Calls of producers. They join the caller's transaction; a job is visible on commit and gone on rollback.
-- A function takes the collation of its arguments into all that it compares and calls, so doors copy names into
-- variables of the default one: with a collation that ignores case 'Q' would find the lanes of 'q'.

CREATE OR REPLACE FUNCTION @extschema@.insert_job(
    kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default', priority integer DEFAULT 2,
    max_attempts integer DEFAULT 25, run_at timestamptz DEFAULT NULL, opts jsonb DEFAULT '{}')
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job_id bigint;
    v_pressure text;
BEGIN
    -- In autocommit each expression and statement is prepared anew, so the usual job has few of them. A lane that
    -- exists has a good queue and priority.
    IF max_attempts = 25 AND run_at IS NULL AND opts IN ('{}', '{"backpressure": "signal"}')
       AND @extschema@._is_plain_body(kind COLLATE "default", args) THEN
        IF opts <> '{}' THEN
            -- Empty when it has to be measured anew, which few calls have: the others do not prepare that.
            v_pressure := @extschema@._fresh_pressure(queue COLLATE "default", priority);
        END IF;
        v_job_id := @extschema@._append_ready_one(queue COLLATE "default", priority, kind COLLATE "default", args);
        IF v_job_id IS NOT NULL AND v_pressure IS DISTINCT FROM '' THEN
            RETURN ROW(v_job_id, 'available', false, v_pressure)::@extschema@.insert_result;
        ELSIF v_job_id IS NOT NULL THEN
            RETURN ROW(v_job_id, 'available', false, @extschema@._measure_pressure(
                queue COLLATE "default", priority))::@extschema@.insert_result;
        END IF;
    END IF;
    RETURN @extschema@._insert_any(kind COLLATE "default", args, queue COLLATE "default", priority, max_attempts,
        run_at, opts);
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_job(text, jsonb, text, integer, integer, timestamptz, jsonb) IS
'Enqueues one job in the caller''s transaction.
kind, queue: 1 to 200 printable characters. args: any JSON up to args_max_bytes
and 256 levels. priority: 1 (first) to 4.
max_attempts: 1 to 1000. run_at: not before this time; NULL or past means now.
opts: tags, metadata, ordering_key, delay_seconds, deadline_seconds (per attempt), keep_result, backoff, trace,
unique ({by, key, period_seconds, states, on_conflict: return, raise or replace}), backpressure (off, signal or
{"reject": n}). Returns the id and state, whether it is a duplicate, and with signal how many jobs wait. Errors: 22023
bad value or unknown option, 23514 limit, 23505 on_conflict raise, 25001 replace or backpressure outside READ COMMITTED,
40001 a snapshot that cannot see who holds the key, JQ003 n or more jobs wait, JQ007 option of a later version.';

CREATE OR REPLACE FUNCTION @extschema@._insert_any(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz,
    p_opts jsonb)
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_ext jsonb;
    v_run_at timestamptz;
    v_pressure text;
    v_job_id bigint;
BEGIN
    PERFORM @extschema@._check_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at);
    v_ext := @extschema@._job_ext(p_opts, p_max_attempts);
    v_run_at := @extschema@._delayed(p_run_at, p_opts, v_now);
    v_pressure := @extschema@._apply_backpressure(p_opts -> 'backpressure', p_queue, p_priority);
    IF coalesce(p_opts -> 'unique', 'null') <> 'null' THEN
        RETURN (
            SELECT ROW(i.job_id, i.state, i.duplicate, v_pressure)::@extschema@.insert_result
            FROM @extschema@._insert_unique(ARRAY[@extschema@._new_job(
                p_kind, p_args, p_queue, p_priority, p_opts ->> 'ordering_key', v_run_at,
                @extschema@._with_unique(v_ext, p_opts, p_kind, p_queue, p_args, v_now))], v_now) i);
    END IF;
    IF coalesce(v_run_at, v_now) <= v_now THEN
        v_job_id := (SELECT r.id FROM @extschema@._append_ready_many(
            p_queue, p_priority, p_opts ->> 'ordering_key', p_kind, ARRAY[p_args], v_now, v_ext) r (id));
        IF v_job_id IS NOT NULL THEN
            RETURN ROW(v_job_id, 'available', false, v_pressure)::@extschema@.insert_result;
        END IF;
    END IF;
    SELECT d.job_id INTO v_job_id
    FROM @extschema@._defer(ARRAY[@extschema@._born_at(
        @extschema@._new_job(p_kind, p_args, p_queue, p_priority, p_opts ->> 'ordering_key', v_run_at, v_ext),
        v_now)], 'scheduled') d;
    RETURN ROW(v_job_id, 'scheduled', false, v_pressure)::@extschema@.insert_result;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_any(text, jsonb, text, integer, integer, timestamptz, jsonb) IS
    'Internal: insert_job for jobs that are not the usual ones, with all its checks.';

CREATE OR REPLACE FUNCTION @extschema@._delayed(p_run_at timestamptz, p_opts jsonb, p_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_run_at IS NOT NULL AND p_opts ->> 'delay_seconds' IS NOT NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "run_at" and option "delay_seconds" exclude each other',
            'Give one of them.');
    END IF;
    RETURN coalesce(p_run_at, p_now + make_interval(
        secs => @extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000)::double precision));
END
$function$;
COMMENT ON FUNCTION @extschema@._delayed(timestamptz, jsonb, timestamptz) IS
    'Internal: run time from run_at or delay_seconds (22023 when both are given).';

CREATE OR REPLACE FUNCTION @extschema@._new_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_ordering_key text, p_run_at timestamptz,
    p_ext jsonb)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN ROW(NULL, p_queue, p_priority,
        @extschema@._pick_shard((@extschema@._queue_options(p_queue)).enqueue_shards, p_ordering_key),
        p_run_at, 0, 0, p_kind, p_args, p_ext)::@extschema@._job;
END
$function$;
COMMENT ON FUNCTION @extschema@._new_job(text, jsonb, text, integer, text, timestamptz, jsonb) IS
    'Internal: a checked job, not yet stored.';

CREATE OR REPLACE FUNCTION @extschema@.insert_many(
    kind text, args jsonb[], queue text DEFAULT 'default', priority integer DEFAULT 2,
    max_attempts integer DEFAULT 25, run_at timestamptz DEFAULT NULL, opts jsonb DEFAULT '{}')
RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_kind text COLLATE "default" := kind;
    v_queue text COLLATE "default" := queue;
    v_now timestamptz := clock_timestamp();
    v_ext jsonb;
    v_run_at timestamptz := run_at;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._check_job(v_kind, '{}', v_queue, priority, max_attempts, run_at);
    PERFORM @extschema@._check_args_list(args);
    v_ext := @extschema@._job_ext(opts, max_attempts);
    v_run_at := @extschema@._delayed(run_at, opts, v_now);
    IF cardinality(args) = 0 THEN
        RETURN;
    ELSIF opts -> 'backpressure' = '"signal"' THEN
        PERFORM @extschema@._refuse('22023', 'option "backpressure" of insert_many cannot be "signal"',
            'The answer is ids alone: use {"reject": n}, or insert_jobs.');
    END IF;
    PERFORM @extschema@._apply_backpressure(opts -> 'backpressure', v_queue, priority);
    IF coalesce(opts -> 'unique', 'null') <> 'null' THEN
        v_job := @extschema@._new_job(v_kind, '{}', v_queue, priority, opts ->> 'ordering_key', v_run_at, v_ext);
        RETURN QUERY
        SELECT i.job_id
        FROM @extschema@._insert_unique(ARRAY(
            SELECT ROW(NULL, j.queue, j.priority, j.shard, j.run_at, 0, 0, j.kind, j.args,
                       @extschema@._with_unique(j.ext, opts, j.kind, j.queue, j.args, v_now))::@extschema@._job
            FROM unnest(@extschema@._with_args(v_job, args)) WITH ORDINALITY
                j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
            ORDER BY j.o), v_now) i
        ORDER BY i.ordinal;
        RETURN;
    END IF;
    IF coalesce(v_run_at, v_now) <= v_now THEN
        RETURN QUERY
        SELECT r.id
        FROM @extschema@._append_ready_many(
            v_queue, priority, opts ->> 'ordering_key', v_kind, args, v_now, v_ext) r (id);
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    v_job := @extschema@._born_at(
        @extschema@._new_job(v_kind, '{}', v_queue, priority, opts ->> 'ordering_key', v_run_at, v_ext), v_now);
    RETURN QUERY
    SELECT d.job_id
    FROM @extschema@._defer(@extschema@._with_args(v_job, args), 'scheduled') d
    ORDER BY d.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_many(text, jsonb[], text, integer, integer, timestamptz, jsonb) IS
'Enqueues many jobs of one kind, the fast path: one job per element of args, all with the same options; all or nothing.
Parameters, options and errors as insert_job, but for backpressure signal; an error names the item, counted from 1.
Returns the ids in order.';

CREATE OR REPLACE FUNCTION @extschema@._with_args(p_job @extschema@._job, p_args jsonb[])
RETURNS @extschema@._job[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ARRAY(SELECT ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, (p_job).run_at, (p_job).attempt,
                        (p_job).run_lease, (p_job).kind, a.args, (p_job).ext)::@extschema@._job
             FROM unnest(p_args) WITH ORDINALITY a (args, o) ORDER BY a.o);
COMMENT ON FUNCTION @extschema@._with_args(@extschema@._job, jsonb[]) IS 'Internal: the same job once per args.';

CREATE OR REPLACE FUNCTION @extschema@._check_args_list(p_args jsonb[])
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_few constant integer := 64;
    v_has_room boolean;
    v_item record;
BEGIN
    IF p_args IS NULL OR array_ndims(p_args) > 1 THEN
        PERFORM @extschema@._refuse('22023', 'field "args" must be a one-dimensional array',
            'Give one JSON value per job.');
    END IF;
    -- For a few the look at the setting would cost more than it saves.
    v_has_room := cardinality(p_args) > c_few AND @extschema@._setting('args_max_bytes') >= 1048576;
    FOR v_item IN
        SELECT a.args, a.o
        FROM unnest(p_args) WITH ORDINALITY a (args, o)
        WHERE NOT coalesce(CASE WHEN v_has_room THEN @extschema@._are_small_args(a.args)
                                ELSE @extschema@._is_small(a.args) END, false)
    LOOP
        PERFORM @extschema@._check_payload(format('args[%s]', v_item.o), v_item.args, NULL);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_args_list(jsonb[]) IS
    'Internal: checks each args of a bulk insert (22023, 23514).';

CREATE OR REPLACE FUNCTION @extschema@.insert_jobs(jobs jsonb, opts jsonb DEFAULT '{}')
RETURNS SETOF @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_jobs @extschema@._job[];
BEGIN
    PERFORM @extschema@._check_options('opts', opts, '{}');
    IF jobs IS NULL OR jsonb_typeof(jobs) <> 'array' THEN
        PERFORM @extschema@._refuse('22023', 'field "jobs" must be a JSON array', 'Give an array of job objects.');
    END IF;
    v_jobs := @extschema@._parse_jobs(jobs, v_now);
    IF jobs @? '$[*].opts.backpressure.reject' THEN
        PERFORM @extschema@._refuse_pressure(
            coalesce(j ->> 'queue', 'default'), coalesce((j ->> 'priority')::numeric::integer, 2),
            min((j #>> '{opts,backpressure,reject}')::numeric::bigint))
        FROM jsonb_array_elements(jobs) j
        WHERE j #> '{opts,backpressure,reject}' IS NOT NULL
        GROUP BY coalesce(j ->> 'queue', 'default'), coalesce((j ->> 'priority')::numeric::integer, 2);
    END IF;
    RETURN QUERY
    SELECT i.job_id, i.state, i.duplicate,
           CASE WHEN o.item #> '{opts,backpressure}' = '"signal"' THEN @extschema@._apply_backpressure('"signal"',
               coalesce(o.item ->> 'queue', 'default'), coalesce((o.item ->> 'priority')::numeric::integer, 2)) END
    FROM @extschema@._insert_parsed(v_jobs, v_now) i, LATERAL (SELECT jobs -> (i.ordinal - 1)::integer) o (item)
    ORDER BY i.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_jobs(jsonb, jsonb) IS
'Enqueues an array of job objects whose keys are the parameter names of insert_job; one result each, in order, all or
nothing. Errors as insert_job; the message names the item, counted from 1.';

-- One block for all of them: a subtransaction per job would be one too many from the 65th on.
CREATE OR REPLACE FUNCTION @extschema@._parse_jobs(p_items jsonb, p_now timestamptz)
RETURNS @extschema@._job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_item jsonb;
    v_ordinal bigint := 0;
    v_queue text;
    v_shards integer;
    v_jobs @extschema@._job[] := '{}'::@extschema@._job[];
    v_message text;
    v_hint text;
    v_state text;
BEGIN
    FOR v_item IN SELECT j FROM jsonb_array_elements(p_items) j LOOP
        v_ordinal := v_ordinal + 1;
        IF v_shards IS NULL OR v_queue IS DISTINCT FROM v_item ->> 'queue' THEN
            v_queue := v_item ->> 'queue';
            v_shards := (@extschema@._queue_options(coalesce(v_queue, 'default'))).enqueue_shards;
        END IF;
        v_jobs := v_jobs || @extschema@._parse_job(v_item, v_shards, p_now);
    END LOOP;
    RETURN v_jobs;
EXCEPTION WHEN invalid_parameter_value OR check_violation OR SQLSTATE 'JQ007' THEN
    GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT, v_state = RETURNED_SQLSTATE;
    PERFORM @extschema@._refuse(v_state, format('jobs[%s]: %s', v_ordinal, v_message), v_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_jobs(jsonb, timestamptz) IS
    'Internal: the items of insert_jobs, checked (22023, 23514, JQ007, with the item named).';

CREATE OR REPLACE FUNCTION @extschema@._parse_job(p_item jsonb, p_shards integer, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_options('job', p_item, '{kind,args,queue,priority,max_attempts,run_at,opts}');
    IF jsonb_typeof(coalesce(p_item -> 'kind', '""')) <> 'string' THEN
        PERFORM @extschema@._refuse('22023', 'field "kind" must be a string', 'Give a name of 1 to 200 characters.');
    ELSIF jsonb_typeof(coalesce(p_item -> 'queue', '""')) <> 'string' THEN
        PERFORM @extschema@._refuse('22023', 'field "queue" must be a string', 'Give a name, or leave it out.');
    END IF;
    RETURN @extschema@._checked_job(
        p_item ->> 'kind', coalesce(p_item -> 'args', '{}'), coalesce(p_item ->> 'queue', 'default'),
        coalesce(@extschema@._option_integer(p_item, 'priority', -2147483648, 2147483647), 2),
        coalesce(@extschema@._option_integer(p_item, 'max_attempts', -2147483648, 2147483647), 25),
        @extschema@._parse_run_at(p_item -> 'run_at'), coalesce(nullif(p_item -> 'opts', 'null'), '{}'),
        p_shards, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_job(jsonb, integer, timestamptz) IS
    'Internal: one item of insert_jobs, checked (22023, 23514, JQ007).';

CREATE OR REPLACE FUNCTION @extschema@._checked_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz,
    p_opts jsonb, p_shards integer, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ext jsonb;
    v_run_at timestamptz := p_run_at;
BEGIN
    IF @extschema@._is_plain_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at) IS NOT true THEN
        PERFORM @extschema@._check_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at);
    END IF;
    IF p_opts <> '{}' OR p_max_attempts <> 25 THEN
        v_ext := @extschema@._with_unique(@extschema@._job_ext(p_opts, p_max_attempts), p_opts,
            p_kind, p_queue, p_args, p_now);
        v_run_at := @extschema@._delayed(p_run_at, p_opts, p_now);
    END IF;
    RETURN ROW(NULL, p_queue, p_priority, @extschema@._pick_shard(p_shards, p_opts ->> 'ordering_key'), v_run_at, 0, 0,
        p_kind, p_args, v_ext)::@extschema@._job;
END
$function$;
COMMENT ON FUNCTION @extschema@._checked_job(
    text, jsonb, text, integer, integer, timestamptz, jsonb, integer, timestamptz) IS
    'Internal: a job not yet stored, for a queue with so many shards (22023, 23514, JQ007).';

-- Times in JSON carry their offset: a time without one would mean another instant in another session.
CREATE OR REPLACE FUNCTION @extschema@._parse_run_at(p_value jsonb)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(p_value, 'null') = 'null' THEN
        RETURN NULL;
    END IF;
    IF p_value #>> '{}' !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,9})?)?'
        '(Z|[+-][0-9]{2}(:?[0-9]{2})?)$' THEN
        PERFORM @extschema@._refuse('22023', format('field "run_at" cannot be %s', left(p_value::text, 100)),
            'Give an ISO 8601 time with its offset, such as 2030-01-31T12:00:00Z.');
    END IF;
    RETURN (p_value #>> '{}')::timestamptz;
EXCEPTION WHEN datetime_field_overflow OR invalid_datetime_format OR invalid_time_zone_displacement_value THEN
    PERFORM @extschema@._refuse('22023', format('field "run_at" cannot be %s', left(p_value::text, 100)),
        'Give an ISO 8601 time with its offset, such as 2030-01-31T12:00:00Z.');
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_run_at(jsonb) IS 'Internal: an ISO 8601 time with offset from JSON (22023).';

-- New jobs of any lanes: what is due goes to the ring; the rest, and what has no lane yet, is deferred. Never by
-- p_jobs[o]: a session's first plans hold the array as a constant, in which each look walks from its start.
CREATE OR REPLACE FUNCTION @extschema@._insert_parsed(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS TABLE (ordinal bigint, job_id bigint, state @extschema@.job_state, duplicate boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_due bigint[];
    v_due_jobs @extschema@._job[];
    v_appended bigint[];
    v_ids bigint[];
    v_later bigint[];
BEGIN
    IF EXISTS (SELECT FROM unnest(p_jobs) j WHERE j.ext ? 'unique') THEN
        RETURN QUERY SELECT i.* FROM @extschema@._insert_unique(p_jobs, p_now) i;
        RETURN;
    END IF;
    SELECT array_agg(j.o ORDER BY j.o),
           array_agg(@extschema@._due_at(
                         ROW(NULL, j.queue, j.priority, j.shard, NULL, 0, 0, j.kind, j.args, j.ext)::@extschema@._job,
                         p_now) ORDER BY j.o)
    INTO v_due, v_due_jobs
    FROM unnest(p_jobs) WITH ORDINALITY
        j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
    WHERE coalesce(j.run_at, p_now) <= p_now;
    IF v_due IS NOT NULL THEN
        SELECT array_agg(v_due[a.ordinal]), array_agg(a.job_id) INTO v_appended, v_ids
        FROM @extschema@._append_ready(v_due_jobs, false) a;
        RETURN QUERY
        SELECT u.o, u.id, 'available'::@extschema@.job_state, false FROM unnest(v_appended, v_ids) u (o, id);
    END IF;
    v_later := ARRAY(
        SELECT o FROM generate_series(1, cardinality(p_jobs)) o
        EXCEPT
        SELECT o FROM unnest(v_appended) o
        ORDER BY 1);
    IF cardinality(v_later) > 0 THEN
        RETURN QUERY
        SELECT v_later[d.ordinal], d.job_id, 'scheduled'::@extschema@.job_state, false
        FROM @extschema@._defer(ARRAY(
            SELECT @extschema@._born_at(
                ROW(NULL, j.queue, j.priority, j.shard, j.run_at, 0, 0, j.kind, j.args, j.ext)::@extschema@._job,
                p_now)
            FROM unnest(p_jobs) WITH ORDINALITY
                j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
                JOIN unnest(v_later) l (o) ON l.o = j.o
            ORDER BY j.o), 'scheduled') d;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_parsed(@extschema@._job[], timestamptz) IS
    'Internal: inserts checked jobs; one answer each.';

CREATE OR REPLACE FUNCTION @extschema@._due_at(p_job @extschema@._job, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, p_now, (p_job).attempt,
           (p_job).run_lease, (p_job).kind, (p_job).args, (p_job).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._due_at(@extschema@._job, timestamptz) IS 'Internal: a job that is ready from now on.';

CREATE OR REPLACE FUNCTION @extschema@._born_at(p_job @extschema@._job, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, greatest((p_job).run_at, p_now),
           (p_job).attempt, (p_job).run_lease, (p_job).kind, (p_job).args,
           coalesce((p_job).ext, '{}') || jsonb_build_object('created_at', p_now))::@extschema@._job;
COMMENT ON FUNCTION @extschema@._born_at(@extschema@._job, timestamptz) IS
    'Internal: a job that starts deferred, with its time of birth.';

CREATE OR REPLACE FUNCTION @extschema@.ordering_shard(key text, shards integer)
RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL OR shards IS NULL OR shards NOT BETWEEN 1 AND 64 THEN
        PERFORM @extschema@._refuse('22023', 'fields "key" and "shards" need a text and a number from 1 to 64',
            'Correct them.');
    END IF;
    RETURN mod(@extschema@._ordering_hash(key), shards);
END
$function$;
COMMENT ON FUNCTION @extschema@.ordering_shard(text, integer) IS
'Shard of an ordering key in a queue with so many enqueue_shards (1 to 64). Errors: 22023.';
