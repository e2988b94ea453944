-- Which lanes of a queue may have something, best first: effective priority, then age of the head. The hint lets a lane
-- with nothing new be passed over for one sequence read; it may lag behind the ledger and never leads it, and claims
-- work without.

CREATE OR REPLACE FUNCTION @extschema@._waiting_lanes(p_queue text)
RETURNS TABLE (lane_id integer, priority integer, tail bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_hints boolean := @extschema@._hints_work();
    v_query text;
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM @extschema@.queue_lanes q WHERE q.queue = p_queue LIMIT 2) x) = 1 THEN
        -- Most queues have one lane, and most claims bring few jobs: this is a third of the work.
        RETURN QUERY
        SELECT w.lane_id, w.priority::integer, w.tail
        FROM (SELECT q.lane_id, q.priority, @extschema@._lane_tail(q.lane_id) AS tail, q.hint_seq
              FROM @extschema@.queue_lanes q WHERE q.queue = p_queue) w
        WHERE w.tail > CASE WHEN v_hints THEN coalesce(pg_sequence_last_value(w.hint_seq), 0) ELSE 0 END;
        RETURN;
    END IF;
    -- Thousands of sequences in one transaction would fill the lock table; a random 512 get there as surely.
    SELECT string_agg(format(
        'SELECT %s, %s, CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, %s::bigint
         FROM @extschema@.lane_%s s',
        x.lane_id, x.priority, x.hint, x.lane_id), ' UNION ALL ')
    INTO v_query
    FROM (SELECT l.lane_id, l.priority,
                 CASE WHEN v_hints THEN coalesce(pg_sequence_last_value(l.hint_seq), 0) ELSE 0 END AS hint
          FROM (SELECT q.lane_id, q.priority, q.hint_seq
                FROM @extschema@.queue_lanes q
                WHERE q.queue = p_queue
                ORDER BY CASE WHEN (SELECT count(*) FROM @extschema@.queue_lanes n WHERE n.queue = p_queue) > 512
                              THEN random() ELSE 0 END
                LIMIT 512) l) x;
    IF v_query IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format('SELECT w.lane_id, w.priority, w.tail
                                 FROM (%s) w (lane_id, priority, tail, hint)
                                 WHERE w.tail > w.hint', v_query);
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_lanes(text) IS
    'Internal: lanes of a queue whose sequence has moved past their hint.';

-- Run time of the first waiting job of a lane, late commits behind the cursor left aside; NULL when none is visible.
CREATE OR REPLACE FUNCTION @extschema@._head_run_at(p_lane integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_emission @extschema@.queue_claim_heads := @extschema@._newest_emission(p_lane);
    v_slot integer;
    v_run_at timestamptz;
BEGIN
    FOR v_slot IN
        SELECT s.slot
        FROM @extschema@._queue_slots_since(v_emission.low) s
        ORDER BY s.generation
    LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        EXECUTE format('SELECT r.run_at
                        FROM @extschema@.ready_entries_%1$s r
                        WHERE r."position" > $1 AND r."position" < $2
                          AND NOT EXISTS (
                              SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
                        ORDER BY r."position" LIMIT 1', v_slot)
            INTO v_run_at USING v_emission.cursor, @extschema@._lane_base(p_lane + 1);
        EXIT WHEN v_run_at IS NOT NULL;
    END LOOP;
    RETURN v_run_at;
END
$function$;
COMMENT ON FUNCTION @extschema@._head_run_at(integer) IS 'Internal: run time of the first waiting job of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._choose_lanes(p_queue text, p_aging_seconds numeric, p_now timestamptz)
RETURNS TABLE (lane_id integer, priority integer, tail bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lanes integer[];
    v_priorities integer[];
    v_tails bigint[];
    v_heads timestamptz[] := '{}'::timestamptz[];
    v_aging numeric;
BEGIN
    SELECT array_agg(w.lane_id), array_agg(w.priority), array_agg(w.tail) INTO v_lanes, v_priorities, v_tails
    FROM (SELECT x.* FROM @extschema@._waiting_lanes(p_queue) x ORDER BY random()) w;
    IF v_lanes IS NULL OR cardinality(v_lanes) = 1 THEN
        RETURN QUERY SELECT v_lanes[1], v_priorities[1], v_tails[1] WHERE v_lanes IS NOT NULL;
        RETURN;
    END IF;
    v_aging := coalesce(p_aging_seconds, @extschema@._setting('aging_seconds'));
    -- The block ends by an exception, so that the locks of this look-around
    -- vanish and prune is not in anyone's way.
    BEGIN
        FOR i IN 1 .. least(cardinality(v_lanes), 64) LOOP
            v_heads[i] := @extschema@._head_run_at(v_lanes[i]);
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN QUERY
    SELECT u.lane_id, u.priority, u.tail
    FROM unnest(v_lanes, v_priorities, v_tails, v_heads) u (lane_id, priority, tail, head)
    ORDER BY CASE WHEN v_aging > 0 AND u.head < p_now
                  THEN greatest(1, u.priority - floor(extract(epoch FROM p_now - u.head) / v_aging))
                  ELSE u.priority END, u.head, u.lane_id;
END
$function$;
COMMENT ON FUNCTION @extschema@._choose_lanes(text, numeric, timestamptz) IS
    'Internal: lanes worth a look, by effective priority and age of their head.';
