-- Backpressure: how much waits, by subtraction. Producers ask on request only.

-- Positions of a lane that no claim has passed.
CREATE OR REPLACE FUNCTION @extschema@._lane_depth(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_emission @extschema@.queue_claim_heads := @extschema@._newest_emission(p_lane);
BEGIN
    RETURN greatest(@extschema@._lane_tail(p_lane) - v_emission.cursor, 0)
        + @extschema@._cardinality(v_emission.held);
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_depth(integer) IS 'Internal: positions of a lane that claims have not passed.';

-- Other priorities do not count: a starved backlog must not turn urgent jobs away. Runs in a block that ends by an
-- exception, so that the locks of the look vanish: a producer may idle in its transaction.
CREATE OR REPLACE FUNCTION @extschema@._queue_depth(p_queue text, p_priority integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_depth bigint;
BEGIN
    PERFORM @extschema@._require_read_committed();
    BEGIN
        v_depth := (SELECT sum(@extschema@._lane_depth(l.lane_id)) FROM @extschema@.queue_lanes l
                    WHERE l.queue = p_queue AND l.priority = p_priority);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN coalesce(v_depth, 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_depth(text, integer) IS
    'Internal: positions of a queue and priority that claims have not passed.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_pressure(p_queue text, p_priority integer, p_limit bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_depth bigint := @extschema@._queue_depth(p_queue, p_priority);
BEGIN
    IF v_depth >= p_limit THEN
        PERFORM @extschema@._refuse('JQ003',
            format('option "backpressure": %s jobs wait in queue "%s" at priority %s', v_depth, p_queue, p_priority),
            format('Try again when fewer than %s wait.', p_limit));
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_pressure(text, integer, bigint) IS
    'Internal: raises JQ003 when so many jobs wait.';

-- A producer's signal may cost next to nothing: the session keeps what it measured last, behind a label that holds the
-- fifth of a second too, so that one search of one setting tells whose it is, that it is fresh, and how much. Both are
-- expressions, so that they are inlined, with few functions: in autocommit each of them is looked up anew. No name
-- holds a control character and the number is of fixed width: labels cannot run into each other.
CREATE OR REPLACE FUNCTION @extschema@._pressure_label(p_queue text, p_priority integer)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN chr(31) || p_queue || chr(31)
    || to_hex((date_part('epoch', clock_timestamp()) * 5)::bigint * 8 + p_priority);
COMMENT ON FUNCTION @extschema@._pressure_label(text, integer) IS
    'Internal: what a measured depth is kept under until the next fifth of a second.';

CREATE OR REPLACE FUNCTION @extschema@._fresh_pressure(p_queue text, p_priority integer)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN split_part(coalesce(current_setting('awa.pressure', true), ''),
                  @extschema@._pressure_label(p_queue, p_priority), 2);
COMMENT ON FUNCTION @extschema@._fresh_pressure(text, integer) IS
    'Internal: the depth of a queue and priority that this session measured a moment ago, or nothing.';

CREATE OR REPLACE FUNCTION @extschema@._measure_pressure(p_queue text, p_priority integer)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_depth text := @extschema@._queue_depth(p_queue, p_priority);
BEGIN
    PERFORM set_config('awa.pressure', @extschema@._pressure_label(p_queue, p_priority) || v_depth, false);
    RETURN v_depth;
END
$function$;
COMMENT ON FUNCTION @extschema@._measure_pressure(text, integer) IS
    'Internal: the depth of a queue and priority, kept for a fifth of a second of this session.';

CREATE OR REPLACE FUNCTION @extschema@._apply_backpressure(p_value jsonb, p_queue text, p_priority integer)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_value = '"signal"' THEN
        RETURN coalesce(nullif(@extschema@._fresh_pressure(p_queue, p_priority), ''),
                        @extschema@._measure_pressure(p_queue, p_priority));
    ELSIF jsonb_typeof(p_value) = 'object' THEN
        PERFORM @extschema@._refuse_pressure(p_queue, p_priority, (p_value ->> 'reject')::numeric::bigint);
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._apply_backpressure(jsonb, text, integer) IS
    'Internal: does what the option asks for: the depth, or JQ003, or nothing.';
