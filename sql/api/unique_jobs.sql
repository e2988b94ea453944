-- Inserting jobs with a unique key.

CREATE OR REPLACE FUNCTION @extschema@._parse_states(p_states jsonb)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_known constant text[] := enum_range(NULL::@extschema@.job_state)::text[];
    v_mask integer;
BEGIN
    IF jsonb_typeof(p_states) <> 'array' OR p_states = '[]' OR NOT p_states <@ to_jsonb(v_known) THEN
        PERFORM @extschema@._refuse('22023',
            format('option "states" of "unique" cannot be %s', left(p_states::text, 100)),
            format('Give an array of states: %s.', array_to_string(v_known, ', ')));
    END IF;
    SELECT bit_or(@extschema@._state_bit(s::@extschema@.job_state)) INTO v_mask
    FROM jsonb_array_elements_text(p_states) s;
    IF NOT p_states ?| '{scheduled,available}'
       OR (p_states ?| '{running,completed}' AND NOT p_states ? 'available') THEN
        PERFORM @extschema@._refuse('22023',
            format('option "states" of "unique" cannot be %s', left(p_states::text, 100)),
            'A job takes its key before it runs: name "scheduled" or "available", '
            'and "available" beside "running" or "completed".');
    END IF;
    RETURN v_mask;
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_states(jsonb) IS 'Internal: states of opts.unique as a mask (22023).';

-- The part of args at some paths, as the object that holds only them. Paths lead through objects.
CREATE OR REPLACE FUNCTION @extschema@._args_at(p_args jsonb, p_paths text[])
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found jsonb := '{}'::jsonb;
    v_value jsonb;
    v_keys text[];
    v_path text;
BEGIN
    FOREACH v_path IN ARRAY p_paths LOOP
        v_keys := string_to_array(v_path, '.');
        v_value := p_args;
        FOR i IN 1 .. cardinality(v_keys) LOOP
            v_value := CASE WHEN jsonb_typeof(v_value) = 'object' THEN v_value -> v_keys[i] END;
        END LOOP;
        CONTINUE WHEN v_value IS NULL;
        FOR i IN 1 .. cardinality(v_keys) - 1 LOOP
            IF v_found #> v_keys[:i] IS NULL THEN
                v_found := jsonb_set(v_found, v_keys[:i], '{}');
            END IF;
        END LOOP;
        v_found := jsonb_set(v_found, v_keys, v_value);
    END LOOP;
    RETURN v_found;
END
$function$;
COMMENT ON FUNCTION @extschema@._args_at(jsonb, text[]) IS 'Internal: the object that holds only some paths of args.';

CREATE OR REPLACE FUNCTION @extschema@._key_by(
    p_by jsonb, p_kind text, p_queue text, p_args jsonb, p_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_paths text[];
BEGIN
    IF jsonb_typeof(p_by) <> 'array'
       OR EXISTS (SELECT FROM jsonb_array_elements(p_by) b
                  WHERE jsonb_typeof(b) <> 'string' OR b #>> '{}' !~ '^(queue|args([.][^.]+)*)$') THEN
        PERFORM @extschema@._refuse('22023', format('option "by" of "unique" cannot be %s', left(p_by::text, 100)),
            'Give an array of "queue", "args", or paths such as "args.customer.id".');
    END IF;
    v_paths := ARRAY(SELECT DISTINCT substring(b FROM 6) FROM jsonb_array_elements_text(p_by) b WHERE b LIKE 'args.%');
    IF p_by ? 'args' AND v_paths <> '{}' THEN
        PERFORM @extschema@._refuse('22023', 'option "by" of "unique" has "args" and a path in it',
            'Give one of them.');
    END IF;
    RETURN @extschema@._unique_key(
        p_kind, CASE WHEN p_by ? 'queue' THEN p_queue END,
        CASE WHEN p_by ? 'args' THEN p_args
             WHEN v_paths <> '{}' THEN @extschema@._args_at(p_args, v_paths) END,
        p_bucket);
END
$function$;
COMMENT ON FUNCTION @extschema@._key_by(jsonb, text, text, jsonb, bigint) IS
    'Internal: the unique key over the parts that opts.unique names (22023).';

-- opts.unique as the job carries it, with on_conflict until the job is stored.
CREATE OR REPLACE FUNCTION @extschema@._parse_unique(
    p_unique jsonb, p_kind text, p_queue text, p_args jsonb, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_period numeric;
    v_bucket bigint;
    v_key text;
    v_states integer := 31;
    v_policy text;
BEGIN
    PERFORM @extschema@._check_options('unique', p_unique, '{by,key,period_seconds,states,on_conflict}');
    v_period := @extschema@._option_number(p_unique, 'period_seconds', 0.001, 315360000);
    v_bucket := floor(extract(epoch FROM p_now) / v_period);
    v_policy := coalesce(@extschema@._option_text(p_unique, 'on_conflict', 20), 'return');
    IF v_policy <> ALL ('{return,raise,replace}') THEN
        PERFORM @extschema@._refuse('22023', format('option "on_conflict" cannot be %s', quote_ident(v_policy)),
            'Give return, raise or replace.');
    END IF;
    IF coalesce(p_unique -> 'states', 'null') <> 'null' THEN
        v_states := @extschema@._parse_states(p_unique -> 'states');
    END IF;
    v_key := lower(@extschema@._option_text(p_unique, 'key', 32));
    IF v_key IS NULL THEN
        v_key := encode(@extschema@._key_by(coalesce(nullif(p_unique -> 'by', 'null'), '["args"]'),
            p_kind, p_queue, p_args, v_bucket), 'hex');
    ELSIF v_key !~ '^[0-9a-f]{32}$' OR coalesce(p_unique -> 'by', 'null') <> 'null' THEN
        PERFORM @extschema@._refuse('22023', 'option "key" of "unique" must be 32 hex digits, without "by" beside it',
            'Give the key that unique_key() or your client computed, or name the parts in "by".');
    END IF;
    RETURN jsonb_strip_nulls(jsonb_build_object(
        'key', v_key, 'states', nullif(v_states, 31),
        'ends', to_timestamp(((v_bucket + 1) * v_period)::double precision), 'on_conflict', v_policy));
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_unique(jsonb, text, text, jsonb, timestamptz) IS
    'Internal: opts.unique, checked, with its key (22023).';

CREATE OR REPLACE FUNCTION @extschema@._with_unique(
    p_ext jsonb, p_opts jsonb, p_kind text, p_queue text, p_args jsonb, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(p_opts -> 'unique', 'null') = 'null' THEN
        RETURN p_ext;
    END IF;
    RETURN coalesce(p_ext, '{}') || jsonb_build_object('unique',
        @extschema@._parse_unique(p_opts -> 'unique', p_kind, p_queue, p_args, p_now));
END
$function$;
COMMENT ON FUNCTION @extschema@._with_unique(jsonb, jsonb, text, text, jsonb, timestamptz) IS
    'Internal: ext of a new job with its unique key, if it asks for one (22023).';

CREATE OR REPLACE FUNCTION @extschema@._answer_duplicate(
    p_policy text, p_holder bigint, p_args jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_policy = 'raise' THEN
        PERFORM @extschema@._refuse_duplicate(p_holder);
    END IF;
    RETURN p_policy = 'replace' AND NOT @extschema@._replace_args(p_holder, p_args, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._answer_duplicate(text, bigint, jsonb, timestamptz) IS
    'Internal: applies on_conflict to a duplicate: 23505 for raise, new arguments for the holder for replace; '
    'true when the holder did not wait any more.';

-- An older snapshot does not see who took a key since, or gave one up: there the insert of the claim decides alone.
CREATE OR REPLACE FUNCTION @extschema@._look_for_holders(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
BEGIN
    RETURN (
        SELECT array_agg(
            ROW(j.o,
                ROW(j.job_id, j.queue, j.priority, j.shard, CASE j.state WHEN 'available' THEN p_now ELSE j.run_at END,
                    j.attempt, j.run_lease, j.kind, j.args, j.ext #- '{unique,on_conflict}')::@extschema@._job,
                j.ext -> 'unique', coalesce(h.state, j.state), h.job_id)::@extschema@._keyed_job
            ORDER BY j.o)
        FROM (SELECT u.*, CASE WHEN coalesce(u.run_at, p_now) <= p_now THEN 'available' ELSE 'scheduled'
                          END::@extschema@.job_state AS state
              FROM unnest(p_jobs) WITH ORDINALITY
                  u (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)) j
        LEFT JOIN LATERAL (
            SELECT c.job_id, k.state
            FROM @extschema@.job_unique_claims c, @extschema@._key_holder(c, p_now) k
            WHERE c.key = decode(j.ext -> 'unique' ->> 'key', 'hex') AND @extschema@._is_read_committed()
                  AND @extschema@._key_counts_in(j.ext -> 'unique', j.state) AND k.holds) h ON true);
END
$function$;
COMMENT ON FUNCTION @extschema@._look_for_holders(@extschema@._job[], timestamptz) IS
    'Internal: new jobs with who holds their keys now.';

CREATE OR REPLACE FUNCTION @extschema@._take_positions(p_jobs @extschema@._keyed_job[])
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_group record;
    v_positions bigint[];
    v_ids bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(p_jobs)]);
BEGIN
    FOR v_group IN SELECT (j.job).queue, (j.job).priority, (j.job).shard,
                          array_agg(j.ordinal ORDER BY j.ordinal) AS members
                   FROM unnest(p_jobs) j WHERE j.holder IS NULL AND j.state = 'available'
                   GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LOOP
        v_positions := @extschema@._reserve_positions(
            v_group.queue, v_group.priority, v_group.shard, cardinality(v_group.members));
        CONTINUE WHEN v_positions IS NULL;
        FOR i IN 1 .. cardinality(v_positions) LOOP
            v_ids[v_group.members[i]] := v_positions[i];
        END LOOP;
    END LOOP;
    RETURN ARRAY(
        SELECT CASE WHEN j.holder IS NOT NULL THEN j
                    WHEN v_ids[j.ordinal] IS NOT NULL
                    THEN ROW(j.ordinal, @extschema@._with_id(j.job, v_ids[j.ordinal]), j.wanted, j.state,
                             NULL)::@extschema@._keyed_job
                    ELSE ROW(j.ordinal, @extschema@._with_id(j.job, nextval('@extschema@.job_ids')), j.wanted,
                             'scheduled', NULL)::@extschema@._keyed_job END
        FROM unnest(p_jobs) j
        ORDER BY j.ordinal);
END
$function$;
COMMENT ON FUNCTION @extschema@._take_positions(@extschema@._keyed_job[]) IS
    'Internal: gives new jobs their positions, or ids where they are deferred.';

CREATE OR REPLACE FUNCTION @extschema@._with_id(p_job @extschema@._job, p_id bigint)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(p_id, (p_job).queue, (p_job).priority, (p_job).shard, (p_job).run_at, (p_job).attempt,
           (p_job).run_lease, (p_job).kind, (p_job).args, (p_job).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._with_id(@extschema@._job, bigint) IS 'Internal: the job under an id.';

-- A key that comes twice in one call belongs to the first of them.
CREATE OR REPLACE FUNCTION @extschema@._take_keys(p_jobs @extschema@._keyed_job[], p_now timestamptz)
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
    v_key bytea;
    v_owner bigint;
    v_owner_state @extschema@.job_state;
    v_first bigint;
    v_holders bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(p_jobs)]);
    v_states @extschema@.job_state[] := ARRAY(SELECT j.state FROM unnest(p_jobs) j ORDER BY j.ordinal);
    v_args jsonb[] := array_fill(NULL::jsonb, ARRAY[cardinality(p_jobs)]);
BEGIN
    FOR v_row IN SELECT j.ordinal, (j.job).job_id, (j.job).args, j.wanted, j.state, j.holder,
                        decode(j.wanted ->> 'key', 'hex') AS key
                 FROM unnest(p_jobs) j
                 WHERE j.wanted IS NOT NULL
                       AND (j.holder IS NOT NULL OR @extschema@._key_counts_in(j.wanted, j.state))
                 ORDER BY key, j.ordinal LOOP
        IF v_row.key IS DISTINCT FROM v_key THEN
            v_key := v_row.key;
            v_owner := v_row.holder;
            v_owner_state := v_row.state;
            v_first := v_row.ordinal;
            IF v_owner IS NULL THEN
                SELECT t.holder, coalesce(t.state, v_row.state) INTO v_owner, v_owner_state
                FROM @extschema@._take_key(v_key, v_row.job_id, v_row.wanted, p_now) t;
                CONTINUE WHEN v_owner = v_row.job_id;
            END IF;
            v_first := NULL;
        END IF;
        v_holders[v_row.ordinal] := v_owner;
        v_states[v_row.ordinal] := v_owner_state;
        IF v_first IS NOT NULL AND v_row.wanted ->> 'on_conflict' = 'replace' THEN
            v_args[v_first] := v_row.args;
        ELSIF @extschema@._answer_duplicate(v_row.wanted ->> 'on_conflict', v_owner, v_row.args, p_now) THEN
            v_states[v_row.ordinal] := coalesce(
                (@extschema@._key_holder(@extschema@._claim_of_key(v_key), clock_timestamp())).state, v_owner_state);
        END IF;
    END LOOP;
    RETURN ARRAY(
        SELECT ROW(j.ordinal,
                   CASE WHEN j.args IS NULL THEN j.job ELSE (@extschema@._with_args(j.job, ARRAY[j.args]))[1] END,
                   j.wanted, j.state, j.holder)::@extschema@._keyed_job
        FROM unnest(p_jobs, v_states, v_holders, v_args)
            j (ordinal, job, wanted, old_state, old_holder, state, holder, args)
        ORDER BY j.ordinal);
END
$function$;
COMMENT ON FUNCTION @extschema@._take_keys(@extschema@._keyed_job[], timestamptz) IS
    'Internal: takes the keys of new jobs, and applies on_conflict where another job holds one (23505).';

-- First a look without locks: a duplicate then writes nothing. Then positions, lanes in sorted order; then keys, in
-- sorted order; then the jobs. A job that turns out to be a duplicate only now leaves its position unused.
CREATE OR REPLACE FUNCTION @extschema@._insert_unique(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS TABLE (ordinal bigint, job_id bigint, state @extschema@.job_state, duplicate boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_jobs @extschema@._keyed_job[] := @extschema@._look_for_holders(p_jobs, p_now);
    v_slot integer;
BEGIN
    IF EXISTS (SELECT FROM unnest(v_jobs) j WHERE j.holder IS NULL) THEN
        PERFORM pg_current_xact_id();
        v_slot := @extschema@._ring_cursor('queue') % 64;
        -- pause point: insert
        v_jobs := @extschema@._take_positions(v_jobs);
    END IF;
    v_jobs := @extschema@._take_keys(v_jobs, p_now);
    PERFORM @extschema@._append_at_positions(v_slot, ARRAY(
        SELECT j.job FROM unnest(v_jobs) j WHERE j.state = 'available' AND j.holder IS NULL ORDER BY j.ordinal));
    PERFORM @extschema@._defer(ARRAY(
        SELECT @extschema@._born_at(j.job, p_now)
        FROM unnest(v_jobs) j
        WHERE j.state = 'scheduled' AND j.holder IS NULL
        ORDER BY j.ordinal), 'scheduled');
    RETURN QUERY
    SELECT j.ordinal, coalesce(j.holder, (j.job).job_id), j.state, j.holder IS NOT NULL
    FROM unnest(v_jobs) j
    ORDER BY j.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_unique(@extschema@._job[], timestamptz) IS
    'Internal: inserts checked jobs of which some have a unique key; one answer each.';
