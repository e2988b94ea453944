-- Checks of what callers give. One clear error: a message that names the field, a SQLSTATE, a hint.

CREATE OR REPLACE FUNCTION @extschema@._refuse(p_sqlstate text, p_message text, p_hint text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_sqlstate, MESSAGE = p_message, HINT = p_hint;
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse(text, text, text) IS 'Internal: raises an error with a hint.';

CREATE OR REPLACE FUNCTION @extschema@._check_name(p_field text, p_name text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_name IS NULL OR p_name = '' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must not be empty', p_field),
            'Give a name of 1 to 200 characters.');
    ELSIF length(p_name) > 200 THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" has %s characters', p_field, length(p_name)),
            'The limit is 200 characters.');
    ELSIF p_name ~ '[[:cntrl:]]' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" contains a control character', p_field),
            'Names may hold any printable characters.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_name(text, text) IS
    'Internal: a queue or kind has 1 to 200 printable characters (22023, 23514).';

-- Small enough to break no limit: every size limit is at least 1 KiB, and a nesting level takes 8 bytes. The text
-- counts, for it is what clients get: 1e131071 takes 12 bytes when it is stored and 128 KiB when it is read.
CREATE OR REPLACE FUNCTION @extschema@._is_small(p_value jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_column_size(p_value) < 1024 AND pg_column_compression(p_value) IS NULL
    AND octet_length(p_value::text) <= 1024;
COMMENT ON FUNCTION @extschema@._is_small(jsonb) IS
    'Internal: true for a JSON value that is within every limit; otherwise look closer.';

-- What args take in memory. Only compressed ones must be written out to tell.
CREATE OR REPLACE FUNCTION @extschema@._args_bytes(p_args jsonb)
RETURNS integer
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_compression(p_args) IS NULL THEN pg_column_size(p_args)
            ELSE octet_length(p_args::text) END;
COMMENT ON FUNCTION @extschema@._args_bytes(jsonb) IS 'Internal: about how many bytes args have once they are read.';

-- Writing args as text takes a twentieth of what storing many small jobs does. In 136 bytes there is room for seven
-- numbers such as 1e131071, whose text is as long as numbers get: less than 1 MiB.
CREATE OR REPLACE FUNCTION @extschema@._are_small_args(p_args jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_column_size(p_args) <= 136 OR @extschema@._is_small(p_args);
COMMENT ON FUNCTION @extschema@._are_small_args(jsonb) IS
    'Internal: true for args that are within any limit from 1 MiB on; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._is_too_deep(p_value jsonb)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN jsonb_path_exists(p_value, 'strict $.**{256} ? (@.type() == "object" || @.type() == "array")');
COMMENT ON FUNCTION @extschema@._is_too_deep(jsonb) IS 'Internal: whether a JSON value has more than 256 levels.';

CREATE OR REPLACE FUNCTION @extschema@._check_payload(p_field text, p_value jsonb, p_limit_bytes bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_value IS NULL THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must not be NULL', p_field),
            'Leave it out, or give {}.');
    END IF;
    IF @extschema@._is_small(p_value) THEN
        RETURN;
    END IF;
    IF octet_length(p_value::text) > coalesce(p_limit_bytes, @extschema@._setting('args_max_bytes')) THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" has %s bytes', p_field, octet_length(p_value::text)),
            format('The limit is %s bytes.', coalesce(p_limit_bytes, @extschema@._setting('args_max_bytes'))));
    END IF;
    IF @extschema@._is_too_deep(p_value) THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" is nested more than 256 levels deep', p_field),
            'The limit is 256 levels.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_payload(text, jsonb, bigint) IS
    'Internal: a JSON value within its size (NULL: args_max_bytes) and 256 levels (22023, 23514).';

-- One expression, inlined into its caller, decides the usual case; only what it cannot pass is looked at field by
-- field. A regular expression with a bound such as {1,200} would take fifty times as long.
CREATE OR REPLACE FUNCTION @extschema@._is_plain_name(p_name text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN length(p_name) <= 200 AND p_name ~ '^[^[:cntrl:]]+$';
COMMENT ON FUNCTION @extschema@._is_plain_name(text) IS
    'Internal: true for a queue or kind of 1 to 200 printable characters.';

CREATE OR REPLACE FUNCTION @extschema@._is_plain_body(p_kind text, p_args jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN @extschema@._is_plain_name(p_kind) AND @extschema@._is_small(p_args);
COMMENT ON FUNCTION @extschema@._is_plain_body(text, jsonb) IS
    'Internal: true for a kind and args that break no limit; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._is_plain_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN @extschema@._is_plain_body(p_kind, p_args) AND @extschema@._is_plain_name(p_queue)
    AND p_priority BETWEEN 1 AND 4 AND p_max_attempts BETWEEN 1 AND 1000
    AND coalesce(isfinite(p_run_at) AND p_run_at < '9999-12-31 00:00:00+00', true);
COMMENT ON FUNCTION @extschema@._is_plain_job(text, jsonb, text, integer, integer, timestamptz) IS
    'Internal: true for a job that breaks no limit; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._check_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF @extschema@._is_plain_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at) THEN
        RETURN;
    END IF;
    PERFORM @extschema@._check_name('kind', p_kind);
    PERFORM @extschema@._check_name('queue', p_queue);
    PERFORM @extschema@._check_payload('args', p_args, NULL);
    IF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
        PERFORM @extschema@._refuse('23514', format('field "priority" is %s', coalesce(p_priority::text, 'NULL')),
            'Priorities run from 1 (first) to 4.');
    END IF;
    IF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        PERFORM @extschema@._refuse('23514',
            format('field "max_attempts" is %s', coalesce(p_max_attempts::text, 'NULL')),
            'A job may have 1 to 1000 attempts.');
    END IF;
    IF p_run_at IS NOT NULL AND NOT isfinite(p_run_at) THEN
        PERFORM @extschema@._refuse('22023', format('field "run_at" is %s', p_run_at), 'Give a finite time.');
    ELSIF p_run_at >= '9999-12-31 00:00:00+00' THEN
        -- Most languages know no later year, so that one such job would hide all others of a listing.
        PERFORM @extschema@._refuse('23514', format('field "run_at" is %s', p_run_at),
            'The limit is 9999-12-30 in UTC.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_job(text, jsonb, text, integer, integer, timestamptz) IS
    'Internal: raises 22023 or 23514 for a field that a job cannot have.';

-- Keys of p_options that are not in p_known: JQ007 for those in p_later, 22023 for the rest. What is null is absent,
-- but a misspelt name is an error all the same.
CREATE OR REPLACE FUNCTION @extschema@._check_options(
    p_field text, p_options jsonb, p_known text[], p_later text[] DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_key text;
BEGIN
    IF p_options IS NULL OR jsonb_typeof(p_options) <> 'object' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must be a JSON object', p_field),
            'Leave it out, or give {}.');
    END IF;
    IF p_options - p_known = '{}' THEN
        RETURN;
    END IF;
    FOR v_key IN SELECT k FROM jsonb_object_keys(p_options) k WHERE k <> ALL (p_known) LOOP
        IF v_key = ANY (p_later) THEN
            CONTINUE WHEN p_options -> v_key = 'null';
            PERFORM @extschema@._refuse('JQ007', format('option "%s" is not enabled in this version', v_key),
                'Leave the option out.');
        END IF;
        PERFORM @extschema@._refuse('22023',
            format('field "%s" has the unknown option %s', p_field, quote_ident(left(v_key, 100))),
            format('Known options: %s.', array_to_string(p_known, ', ')));
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_options(text, jsonb, text[], text[]) IS
    'Internal: refuses unknown options (22023, JQ007).';

-- A number of an options object; NULL when absent. Bounds are inclusive.
CREATE OR REPLACE FUNCTION @extschema@._option_number(p_options jsonb, p_key text, p_minimum numeric, p_maximum numeric)
RETURNS numeric
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'number'
       OR (p_options ->> p_key)::numeric NOT BETWEEN p_minimum AND p_maximum THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            format('Give a number from %s to %s.', p_minimum, p_maximum));
    END IF;
    -- Nanoseconds are enough; what is smaller would not fit into double precision.
    RETURN round((p_options ->> p_key)::numeric, 9);
END
$function$;
COMMENT ON FUNCTION @extschema@._option_number(jsonb, text, numeric, numeric) IS
    'Internal: a bounded number from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_integer(
    p_options jsonb, p_key text, p_minimum integer, p_maximum integer)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_number numeric;
BEGIN
    IF NOT p_options ? p_key THEN
        RETURN NULL;
    END IF;
    v_number := @extschema@._option_number(p_options, p_key, p_minimum, p_maximum);
    IF v_number <> trunc(v_number) THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            format('Give a whole number from %s to %s.', p_minimum, p_maximum));
    END IF;
    RETURN v_number::integer;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_integer(jsonb, text, integer, integer) IS
    'Internal: a bounded whole number from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_boolean(p_options jsonb, p_key text)
RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'boolean' THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            'Give true or false.');
    END IF;
    RETURN (p_options -> p_key)::boolean;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_boolean(jsonb, text) IS 'Internal: a boolean from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_text(p_options jsonb, p_key text, p_max_length integer)
RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'string' OR length(p_options ->> p_key) NOT BETWEEN 1 AND p_max_length THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" must be a string of 1 to %s characters', p_key, p_max_length),
            'Correct it or leave it out.');
    END IF;
    RETURN p_options ->> p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_text(jsonb, text, integer) IS
    'Internal: a bounded string from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._check_tags(p_tags jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF jsonb_typeof(p_tags) <> 'array'
       OR EXISTS (SELECT FROM jsonb_array_elements(p_tags) t
                  WHERE jsonb_typeof(t) <> 'string' OR length(t #>> '{}') NOT BETWEEN 1 AND 200) THEN
        PERFORM @extschema@._refuse('22023', 'option "tags" must be an array of strings of 1 to 200 characters',
            'Correct it or leave it out.');
    ELSIF jsonb_array_length(p_tags) > 20 THEN
        PERFORM @extschema@._refuse('23514', format('option "tags" has %s entries', jsonb_array_length(p_tags)),
            'The limit is 20 tags.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_tags(jsonb) IS
    'Internal: at most 20 tags, strings of 1 to 200 characters (22023, 23514).';

CREATE OR REPLACE FUNCTION @extschema@._check_backoff(p_policy jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_options('backoff', p_policy, '{base_seconds,factor,cap_seconds,jitter,delays}');
    PERFORM @extschema@._option_number(p_policy, 'base_seconds', 0, 86400);
    PERFORM @extschema@._option_number(p_policy, 'factor', 1, 100);
    PERFORM @extschema@._option_number(p_policy, 'cap_seconds', 0, 86400);
    PERFORM @extschema@._option_number(p_policy, 'jitter', 0, 1);
    IF coalesce(p_policy -> 'delays', 'null') <> 'null' AND (
        jsonb_typeof(p_policy -> 'delays') <> 'array' OR jsonb_array_length(p_policy -> 'delays') NOT BETWEEN 1 AND 100
        OR jsonb_strip_nulls(p_policy) ?| '{base_seconds,factor,cap_seconds,jitter}'
        OR EXISTS (
            SELECT FROM jsonb_array_elements(p_policy -> 'delays') d
            WHERE CASE WHEN jsonb_typeof(d) = 'number' THEN d::numeric NOT BETWEEN 0 AND 86400 ELSE true END)) THEN
        PERFORM @extschema@._refuse('22023', 'option "backoff" has bad "delays"',
            'Give 1 to 100 numbers of seconds from 0 to 86400, and nothing else beside them.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_backoff(jsonb) IS 'Internal: a retry policy that a job may carry (22023).';

CREATE OR REPLACE FUNCTION @extschema@._check_backpressure(p_value jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF jsonb_typeof(p_value) = 'object' THEN
        PERFORM @extschema@._check_options('backpressure', p_value, '{reject}');
        IF @extschema@._option_integer(p_value, 'reject', 1, 2147483647) IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    IF coalesce(p_value, 'null') NOT IN ('null', '"off"', '"signal"') THEN
        PERFORM @extschema@._refuse('22023', 'option "backpressure" must be "off", "signal" or {"reject": n}',
            'Correct it or leave it out.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_backpressure(jsonb) IS
    'Internal: what a producer wants to know of waiting jobs (22023).';

-- What a job's options become in ext; NULL when all is default. Delay, routing, run time and unique key are not part of
-- it.
CREATE OR REPLACE FUNCTION @extschema@._job_ext(p_opts jsonb, p_max_attempts integer)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ext jsonb;
BEGIN
    IF p_opts = '{}' THEN
        RETURN CASE WHEN p_max_attempts <> 25 THEN jsonb_build_object('max_attempts', p_max_attempts) END;
    END IF;
    PERFORM @extschema@._check_options('opts', p_opts,
        '{tags,metadata,ordering_key,delay_seconds,deadline_seconds,keep_result,backoff,trace,unique,backpressure}',
        '{after,on_parent_failure,concurrency_key}');
    v_ext := jsonb_strip_nulls(jsonb_build_object(
        'max_attempts', nullif(p_max_attempts, 25),
        'deadline_seconds', @extschema@._option_number(p_opts, 'deadline_seconds', 0.001, 31536000),
        'keep_result', nullif(@extschema@._option_boolean(p_opts, 'keep_result'), false),
        'trace', @extschema@._option_text(p_opts, 'trace', 512)));
    PERFORM @extschema@._check_backpressure(p_opts -> 'backpressure');
    PERFORM @extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000);
    PERFORM @extschema@._option_text(p_opts, 'ordering_key', 1024);
    IF coalesce(p_opts -> 'tags', 'null') <> 'null' THEN
        PERFORM @extschema@._check_tags(p_opts -> 'tags');
        v_ext := v_ext || jsonb_build_object('tags', p_opts -> 'tags');
    END IF;
    IF coalesce(p_opts -> 'metadata', 'null') <> 'null' THEN
        IF jsonb_typeof(p_opts -> 'metadata') <> 'object' THEN
            PERFORM @extschema@._refuse('22023', 'option "metadata" must be a JSON object',
                'Correct it or leave it out.');
        END IF;
        PERFORM @extschema@._check_payload('metadata', p_opts -> 'metadata', 65536);
        v_ext := v_ext || jsonb_build_object('metadata', p_opts -> 'metadata');
    END IF;
    IF coalesce(p_opts -> 'backoff', 'null') <> 'null' THEN
        PERFORM @extschema@._check_backoff(p_opts -> 'backoff');
        v_ext := v_ext || jsonb_build_object('backoff', jsonb_strip_nulls(p_opts -> 'backoff'));
    END IF;
    RETURN nullif(v_ext, '{}');
END
$function$;
COMMENT ON FUNCTION @extschema@._job_ext(jsonb, integer) IS
    'Internal: validated options of a job in stored form (22023, 23514, JQ007).';
