-- Counts and states for operators.

-- Waiting jobs of a lane: rows that no claim has emitted and no tombstone killed. Like all counting STABLE, so that
-- everything is seen in one snapshot.
CREATE OR REPLACE FUNCTION @extschema@._count_available(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_count bigint;
    v_total bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        EXECUTE format($query$
            SELECT count(*) FROM unnest($1) g, @extschema@.ready_entries_%1$s r
            WHERE r."position" >= lower(g) AND r."position" < upper(g)
              AND NOT EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            $query$, v_slot) INTO v_count USING @extschema@._unclaimed_set(@extschema@._emission_in_snapshot(p_lane));
        v_total := v_total + v_count;
    END LOOP;
    RETURN v_total;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_available(integer) IS 'Internal: exact waiting jobs of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._count_jobs(p_queue text)
RETURNS @extschema@.queue_count
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_counts @extschema@.queue_count := ROW(p_queue, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    v_lanes int8multirange := '{}'::int8multirange;
    v_lane integer;
BEGIN
    FOR v_lane IN SELECT l.lane_id FROM @extschema@.queue_lanes l WHERE l.queue = p_queue LOOP
        v_lanes := v_lanes + @extschema@._lane_range(v_lane);
        v_counts.available := v_counts.available + @extschema@._count_available(v_lane);
    END LOOP;
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        v_counts.running := v_counts.running + (
            SELECT coalesce(sum(@extschema@._cardinality(o.open * v_lanes)), 0)
            FROM @extschema@._open_batches(v_slot) o);
    END LOOP;
    v_counts.running := v_counts.running + (
        SELECT count(*) FROM @extschema@.leases l WHERE l.queue = p_queue AND l.outcome IS NULL);
    SELECT count(*) FILTER (WHERE d.state = 'scheduled'), count(*) FILTER (WHERE d.state = 'retryable')
    INTO v_counts.scheduled, v_counts.retryable FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue;
    SELECT count(*) INTO v_counts.dead_lettered FROM @extschema@.dlq_entries d WHERE d.queue = p_queue;
    SELECT t.completed, t.failed, t.cancelled INTO v_counts.completed, v_counts.failed, v_counts.cancelled
    FROM @extschema@._terminal_counts(p_queue) t;
    RETURN v_counts;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_jobs(text) IS 'Internal: exact jobs of a queue by state.';

CREATE OR REPLACE FUNCTION @extschema@._lane_depths()
RETURNS SETOF @extschema@.queue_depth
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
    v_depth bigint;
BEGIN
    FOR v_lane IN SELECT l.* FROM @extschema@.queue_lanes l ORDER BY l.queue, l.priority, l.shard, l.lane_id LOOP
        -- The block ends by an exception: a lock per lane, kept to the end, would fill the lock table.
        BEGIN
            v_depth := @extschema@._lane_depth(v_lane.lane_id);
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        END;
        RETURN NEXT ROW(v_lane.queue, v_lane.priority, v_lane.shard, v_depth,
            (@extschema@._queue_options(v_lane.queue)).paused_at IS NOT NULL)::@extschema@.queue_depth;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_depths() IS 'Internal: positions that claims have not passed, by lane.';

CREATE OR REPLACE FUNCTION @extschema@._slot_rows(p_ring text, p_slot integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_rows bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM @extschema@.%I',
        CASE p_ring WHEN 'queue' THEN 'ready_entries_' WHEN 'claim' THEN 'lease_claim_batches_'
                    ELSE 'deferred_jobs_' END || p_slot) INTO v_rows;
    RETURN v_rows;
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_rows(text, integer) IS 'Internal: bodies, batches or deferred jobs in a slot.';

-- Transactions of others that keep slots locked. Claims and prunes come and go; who is in the way stays for a moment.
CREATE OR REPLACE FUNCTION @extschema@._slot_holders()
RETURNS text[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_holders text[];
BEGIN
    FOR v_look IN 1 .. 5 LOOP
        v_holders := ARRAY(
            SELECT DISTINCT k.virtualtransaction
            FROM pg_locks k
            JOIN pg_class c ON c.oid = k.relation AND c.relispartition
                AND c.relnamespace = '@extschema@'::regnamespace
            WHERE k.locktype = 'relation' AND k.granted AND k.pid IS DISTINCT FROM pg_backend_pid()
              AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
              AND (v_holders IS NULL OR k.virtualtransaction = ANY (v_holders)));
        EXIT WHEN cardinality(v_holders) <= 1;
        PERFORM pg_sleep(0.02);
    END LOOP;
    RETURN v_holders;
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_holders() IS
    'Internal: transactions that have slots locked and are not gone after a moment.';

CREATE OR REPLACE FUNCTION @extschema@._deferred_status(p_now timestamptz, p_holders text[])
RETURNS SETOF @extschema@.ring_slot_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_bytes bigint;
    v_last record;
    v_blocker jsonb;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        v_bytes := @extschema@._slot_bytes('deferred', v_slot);
        v_blocker := NULL;
        IF v_bytes > 0 THEN
            v_last := @extschema@._last_deferred(v_slot);
            v_blocker := CASE
                WHEN v_last.run_at IS NOT NULL
                THEN jsonb_build_object('reason', 'deferred', 'queue', v_last.queue, 'run_at', v_last.run_at)
                WHEN NOT @extschema@._slot_is_calm(v_slot, p_now) THEN '{"reason": "recent"}'
                ELSE @extschema@._slot_holder('deferred', v_slot, p_now, p_holders) END;
        END IF;
        RETURN NEXT ROW('deferred', v_slot, NULL, v_slot = @extschema@._deferred_slot(p_now, p_now),
            CASE WHEN v_bytes > 0 THEN @extschema@._slot_rows('deferred', v_slot) ELSE 0 END, v_bytes, NULL,
            v_blocker ->> 'reason', v_blocker - 'reason')::@extschema@.ring_slot_status;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._deferred_status(timestamptz, text[]) IS
    'Internal: slots of deferred jobs with what keeps them.';

-- The longest transaction that has a slot locked. Its age is known to roles that may read the statistics of others.
CREATE OR REPLACE FUNCTION @extschema@._slot_holder(
    p_ring text, p_slot integer, p_now timestamptz, p_holders text[])
RETURNS jsonb
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT jsonb_build_object('reason', 'locked', 'pid', k.pid, 'table', t.name || '_' || p_slot, 'mode', k.mode,
        'age_seconds', round(extract(epoch FROM p_now - a.xact_start)::numeric, 1))
    FROM unnest(@extschema@._ring_tables(p_ring)) t (name)
    JOIN pg_locks k ON k.locktype = 'relation' AND k.granted
        AND k.relation = ('@extschema@.' || t.name || '_' || p_slot)::regclass
        AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND k.virtualtransaction = ANY (p_holders)
    LEFT JOIN pg_stat_activity a ON a.pid = k.pid
    ORDER BY a.xact_start NULLS LAST, k.pid
    LIMIT 1
$function$;
COMMENT ON FUNCTION @extschema@._slot_holder(text, integer, timestamptz, text[]) IS
    'Internal: which of these transactions has a slot locked, with pid (NULL: prepared), lock and age; or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._ring_status(p_now timestamptz)
RETURNS SETOF @extschema@.ring_slot_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring text;
    v_slot record;
    v_blocker jsonb;
    v_holders constant text[] := @extschema@._slot_holders();
BEGIN
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        FOR v_slot IN SELECT s AS slot, r.generation, r.rotated_at, @extschema@._slot_bytes(v_ring, s) AS bytes
                      FROM generate_series(0, @extschema@._slot_count(v_ring) - 1) s
                      LEFT JOIN @extschema@._ring_slots(v_ring) r ON r.slot = s ORDER BY s LOOP
            v_blocker := NULL;
            IF v_slot.bytes > 0 OR v_slot.slot = @extschema@._ring_cursor(v_ring) % 64 THEN
                v_blocker := coalesce(@extschema@._slot_blocker(v_ring, v_slot.slot),
                    CASE WHEN @extschema@._slot_is_retained(v_ring, v_slot.slot, p_now)
                         THEN '{"reason": "retention"}'::jsonb
                         WHEN NOT @extschema@._is_past_dumps(
                             @extschema@._slot_released_at(v_ring, v_slot.slot), p_now)
                         THEN '{"reason": "recent"}'::jsonb END,
                    @extschema@._slot_holder(v_ring, v_slot.slot, p_now, v_holders));
            END IF;
            RETURN NEXT ROW(v_ring, v_slot.slot, v_slot.generation, v_slot.slot = @extschema@._ring_cursor(v_ring) % 64,
                CASE WHEN v_slot.bytes > 0 THEN @extschema@._slot_rows(v_ring, v_slot.slot) ELSE 0 END, v_slot.bytes,
                p_now - v_slot.rotated_at, v_blocker ->> 'reason', v_blocker - 'reason')::@extschema@.ring_slot_status;
        END LOOP;
    END LOOP;
    RETURN QUERY SELECT d.* FROM @extschema@._deferred_status(p_now, v_holders) d;
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_status(timestamptz) IS 'Internal: slots of all rings with what blocks them.';
