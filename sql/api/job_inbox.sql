-- Bulk loads: COPY into a view. An INSTEAD OF trigger sees one row at a time, so rows are collected and inserted by
-- portions, those that may have to wait at the end of the statement: keys must be taken in sorted order, or two loads
-- could wait for each other.
--
-- What is collected lies in settings of the session. They go back with the transaction and with each savepoint, so
-- that nothing of a statement that failed can get into another. Everybody may write them, so their rows are checked
-- when they are taken out, not when they are put in.
--   awa.inbox           rows of the current portion: JSON arrays, separated by commas
--   awa.inbox_rows      number of rows before the current portion
--   awa.inbox_held_n    rows that stay until the end, with their numbers, in chunks
--   awa.inbox_chunk     n of the last chunk

CREATE OR REPLACE VIEW @extschema@.job_inbox AS
SELECT NULL::text AS kind, NULL::jsonb AS args, NULL::text AS queue, NULL::integer AS priority,
       NULL::integer AS max_attempts, NULL::timestamptz AS run_at, NULL::jsonb AS opts
WHERE false;
COMMENT ON VIEW @extschema@.job_inbox IS
'For COPY ... FROM and INSERT: a row is a job. The columns are the parameters of insert_job; NULL means the default.
Nothing can be read from it.';

CREATE OR REPLACE FUNCTION @extschema@._collect_row()
RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_portion_bytes constant integer := 16384;
BEGIN
    IF octet_length(set_config('awa.inbox', concat_ws(',', nullif(current_setting('awa.inbox', true), ''),
            json_build_array(NEW.kind, coalesce(NEW.args, '{}'), NEW.queue, NEW.priority, NEW.max_attempts, NEW.run_at,
                             NEW.opts)), true)) > c_portion_bytes THEN
        PERFORM @extschema@._empty_inbox(false);
    END IF;
    RETURN NEW;
END
$function$;
COMMENT ON FUNCTION @extschema@._collect_row() IS 'Internal: takes one row of a load.';

CREATE OR REPLACE FUNCTION @extschema@._end_load()
RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._empty_inbox(true);
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_load() IS 'Internal: inserts what a load has collected.';

CREATE OR REPLACE TRIGGER collect_row INSTEAD OF INSERT ON @extschema@.job_inbox
    FOR EACH ROW EXECUTE FUNCTION @extschema@._collect_row();
CREATE OR REPLACE TRIGGER end_load AFTER INSERT ON @extschema@.job_inbox
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@._end_load();

CREATE OR REPLACE FUNCTION @extschema@._inbox_setting(p_name text)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN nullif(current_setting('awa.inbox' || p_name, true), '');
COMMENT ON FUNCTION @extschema@._inbox_setting(text) IS
    'Internal: what a load keeps under a name; NULL when it is empty.';

CREATE OR REPLACE FUNCTION @extschema@._empty_inbox(p_is_last boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most_chunks constant integer := 64;
    v_rows jsonb := ('[' || @extschema@._inbox_setting('') || ']')::jsonb;
    v_before bigint := coalesce(@extschema@._inbox_setting('_rows')::bigint, 0);
    v_plain jsonb;
    v_held text;
BEGIN
    PERFORM set_config('awa.inbox', '', true);
    PERFORM set_config('awa.inbox_rows',
        CASE WHEN p_is_last THEN '' ELSE (v_before + jsonb_array_length(v_rows))::text END, true);
    SELECT jsonb_agg(r.item ORDER BY r.o) FILTER (WHERE NOT r.is_held),
           string_agg(r.item::text, ',' ORDER BY r.o) FILTER (WHERE r.is_held)
    INTO v_plain, v_held
    FROM (SELECT j.item || to_jsonb(v_before + j.o) AS item, j.o,
                 coalesce(j.item -> 6 ->> 'unique', j.item -> 6 ->> 'backpressure') IS NOT NULL AS is_held
          FROM jsonb_array_elements(v_rows) WITH ORDINALITY j (item, o)) r;
    IF v_plain IS NOT NULL THEN
        PERFORM @extschema@._insert_rows(ARRAY[v_plain]);
    END IF;
    IF (v_held IS NOT NULL AND @extschema@._hold_rows(v_held) = c_most_chunks) OR p_is_last THEN
        PERFORM @extschema@._insert_rows(@extschema@._take_held_rows());
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._empty_inbox(boolean) IS
    'Internal: inserts the rows of a portion, or holds them back until the last one.';

CREATE OR REPLACE FUNCTION @extschema@._hold_rows(p_rows text)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_chunk_bytes constant integer := 1048576;
    v_chunk integer := coalesce(@extschema@._inbox_setting('_chunk')::integer, 1);
BEGIN
    IF octet_length(set_config('awa.inbox_held_' || v_chunk,
           concat_ws(',', @extschema@._inbox_setting('_held_' || v_chunk), p_rows), true)) > c_chunk_bytes THEN
        v_chunk := v_chunk + 1;
    END IF;
    PERFORM set_config('awa.inbox_chunk', v_chunk::text, true);
    RETURN v_chunk;
END
$function$;
COMMENT ON FUNCTION @extschema@._hold_rows(text) IS
    'Internal: keeps rows of a load for its end; the number of the chunk that comes next.';

CREATE OR REPLACE FUNCTION @extschema@._take_held_rows()
RETURNS jsonb[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_chunks jsonb[] := ARRAY(
        SELECT ('[' || @extschema@._inbox_setting('_held_' || n) || ']')::jsonb
        FROM generate_series(1, @extschema@._inbox_setting('_chunk')::integer) n
        WHERE @extschema@._inbox_setting('_held_' || n) IS NOT NULL
        ORDER BY n);
BEGIN
    PERFORM set_config('awa.inbox_held_' || n, '', true)
    FROM generate_series(1, @extschema@._inbox_setting('_chunk')::integer) n;
    PERFORM set_config('awa.inbox_chunk', '', true);
    RETURN v_chunks;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_held_rows() IS 'Internal: the rows that a load has held back.';

CREATE OR REPLACE FUNCTION @extschema@._insert_rows(p_chunks jsonb[])
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_jobs @extschema@._job[] := @extschema@._parse_rows(p_chunks, v_now);
BEGIN
    PERFORM @extschema@._refuse_pressure(r.queue, r.priority, min(r.most))
    FROM (SELECT coalesce(j ->> 2, 'default') AS queue, coalesce((j ->> 3)::integer, 2) AS priority,
                 (j -> 6 #>> '{backpressure,reject}')::numeric::bigint AS most
          FROM unnest(p_chunks) c, jsonb_array_elements(c) j) r
    WHERE r.most IS NOT NULL
    GROUP BY r.queue, r.priority;
    PERFORM FROM @extschema@._insert_parsed(v_jobs, v_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_rows(jsonb[]) IS
    'Internal: checks rows of a load and inserts them (errors as insert_jobs).';

CREATE OR REPLACE FUNCTION @extschema@._parse_rows(p_chunks jsonb[], p_now timestamptz)
RETURNS @extschema@._job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row jsonb;
    v_queue text;
    v_shards integer;
    v_jobs @extschema@._job[] := '{}'::@extschema@._job[];
    v_message text;
    v_hint text;
    v_state text;
BEGIN
    FOR v_row IN SELECT j FROM unnest(p_chunks) c, jsonb_array_elements(c) j LOOP
        IF v_shards IS NULL OR v_queue IS DISTINCT FROM v_row ->> 2 THEN
            v_queue := v_row ->> 2;
            v_shards := (@extschema@._queue_options(coalesce(v_queue, 'default'))).enqueue_shards;
        END IF;
        IF v_row #> '{6,backpressure}' = '"signal"' THEN
            PERFORM @extschema@._refuse('22023', 'option "backpressure" of job_inbox cannot be "signal"',
                'A load has no answer: use {"reject": n}, or insert_jobs.');
        END IF;
        v_jobs := v_jobs || @extschema@._checked_job(
            v_row ->> 0, v_row -> 1, coalesce(v_queue, 'default'), coalesce((v_row ->> 3)::integer, 2),
            coalesce((v_row ->> 4)::integer, 25), (v_row ->> 5)::timestamptz,
            coalesce(nullif(v_row -> 6, 'null'), '{}'), v_shards, p_now);
    END LOOP;
    RETURN v_jobs;
EXCEPTION WHEN invalid_parameter_value OR check_violation OR SQLSTATE 'JQ007' THEN
    GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT, v_state = RETURNED_SQLSTATE;
    PERFORM @extschema@._refuse(v_state, format('row %s: %s', v_row ->> 7, v_message), v_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_rows(jsonb[], timestamptz) IS
    'Internal: rows of a load, checked (22023, 23514, JQ007, with the row named).';
