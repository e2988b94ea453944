-- Lanes: (queue, priority, shard), each with a sequence of positions and an UNLOGGED hint.

-- The hint is shared memory that costs no WAL, and the only UNLOGGED relation that there is. A crash resets it from its
-- init fork; a standby may come out of its promotion with an empty page instead, if the hint is younger than its last
-- restartpoint (PostgreSQL before 15.19, 16.15, 17.11 and 18.6). Then all reads of it fail for good, and only another
-- sequence helps. So nobody reads a hint before all were seen to work, once a session: what takes the page away
-- ends the sessions too, but for those of a standby.

-- The block ends by an exception in any case, so that it leaves no locks behind: those of pg_sequence_last_value would
-- last until the transaction ends. A sequence without its page has no row. By name, not by oid: one that is just being
-- renewed has another.
CREATE OR REPLACE FUNCTION @extschema@._hints_can_be_read(p_lanes integer[])
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_rows bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM (%s) x',
        (SELECT string_agg(format('SELECT FROM @extschema@.lane_%s_hint', l), ' UNION ALL ') FROM unnest(p_lanes) l))
        INTO v_rows;
    RAISE EXCEPTION USING ERRCODE = 'JQ000';
EXCEPTION WHEN SQLSTATE 'JQ000' THEN
    RETURN v_rows = cardinality(p_lanes);
WHEN internal_error OR data_corrupted OR undefined_file THEN
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._hints_can_be_read(integer[]) IS
    'Internal: whether the hints of lanes can be read, all of them.';

-- A thousand locks at once are too many.
CREATE OR REPLACE FUNCTION @extschema@._hints_work()
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lanes integer[];
BEGIN
    IF current_setting('awa.hints', true) = '@extschema@' OR pg_is_in_recovery() THEN
        RETURN true;
    END IF;
    FOR v_lanes IN SELECT array_agg(l.lane_id) FROM @extschema@.queue_lanes l GROUP BY l.lane_id / 256 LOOP
        IF NOT @extschema@._hints_can_be_read(v_lanes) THEN
            RETURN false;
        END IF;
    END LOOP;
    PERFORM set_config('awa.hints', '@extschema@', false);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._hints_work() IS
    'Internal: whether the hints of all lanes can be read; looks once a session, and not at all on a standby.';

CREATE OR REPLACE FUNCTION @extschema@._find_lane(p_queue text, p_priority integer, p_shard integer)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
BEGIN
    SELECT l.* INTO v_lane FROM @extschema@.queue_lanes l
    WHERE l.queue = p_queue AND l.priority = p_priority AND l.shard = p_shard
    ORDER BY l.lane_id LIMIT 1;
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_lane(text, integer, integer) IS
    'Internal: the lane of a queue, priority and shard; a NULL lane_id when there is none.';

-- Owned by the table of the extension, as the lane's sequence is, so that DROP EXTENSION takes it along.
CREATE OR REPLACE FUNCTION @extschema@._create_hint(p_lane integer)
RETURNS regclass
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    EXECUTE format('CREATE UNLOGGED SEQUENCE @extschema@.lane_%s_hint MINVALUE 0 START 0', p_lane);
    EXECUTE format('ALTER SEQUENCE @extschema@.lane_%s_hint OWNED BY @extschema@.queue_lanes.lane_id', p_lane);
    RETURN format('@extschema@.lane_%s_hint', p_lane);
END
$function$;
COMMENT ON FUNCTION @extschema@._create_hint(integer) IS 'Internal: makes the hint of a lane.';

-- A hint that cannot be read goes unset: claims do without until it is renewed.
CREATE OR REPLACE FUNCTION @extschema@._set_hint(p_lane integer, p_cursor bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF @extschema@._hints_work() THEN
        PERFORM setval(('@extschema@.lane_' || p_lane || '_hint')::regclass, p_cursor);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_hint(integer, bigint) IS
    'Internal: remembers that nothing is left in a lane up to a cursor that the committed ledger shows.';

-- The new one says nothing yet, so every claim looks.
CREATE OR REPLACE FUNCTION @extschema@._renew_hint(p_lane integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_hint regclass := format('@extschema@.lane_%s_hint', p_lane);
BEGIN
    IF @extschema@._hints_can_be_read(ARRAY[p_lane]) THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP SEQUENCE %s', v_hint);
    v_hint := @extschema@._create_hint(p_lane);
    UPDATE @extschema@.queue_lanes l SET hint_seq = v_hint WHERE l.lane_id = p_lane;
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._renew_hint(integer) IS
    'Internal: a new sequence for a hint that cannot be read; the caller has the lane locked.';

CREATE OR REPLACE FUNCTION @extschema@._renew_hints(p_limit integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane integer;
    v_renewed bigint := 0;
BEGIN
    IF NOT @extschema@._hints_work() THEN
        FOR v_lane IN SELECT l.lane_id FROM @extschema@.queue_lanes l ORDER BY l.lane_id LOOP
            CONTINUE WHEN @extschema@._hints_can_be_read(ARRAY[v_lane]);
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane));
            v_renewed := v_renewed + @extschema@._renew_hint(v_lane)::integer;
            EXIT WHEN v_renewed = p_limit;
        END LOOP;
    END IF;
    RETURN v_renewed;
END
$function$;
COMMENT ON FUNCTION @extschema@._renew_hints(integer) IS
    'Internal: makes anew up to so many hints that cannot be read; returns how many.';

-- Nobody waits: where a creation of the same lane is in flight the answer is NULL,
-- unless p_sibling asks for a second lane.
CREATE OR REPLACE FUNCTION @extschema@._create_lane(
    p_queue text, p_priority integer, p_shard integer, p_sibling boolean)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
    v_id integer;
BEGIN
    -- An older snapshot may miss a lane that exists; it must not make a second one for every such transaction.
    IF NOT @extschema@._is_read_committed() THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('new_lane',
            hashtextextended(p_queue, p_priority * 64 + p_shard))) AND NOT p_sibling THEN
        RETURN NULL;
    END IF;
    v_lane := @extschema@._find_lane(p_queue, p_priority, p_shard);
    IF v_lane.lane_id IS NOT NULL THEN
        RETURN v_lane;
    END IF;
    v_id := nextval('@extschema@.lane_ids');
    EXECUTE format('CREATE SEQUENCE @extschema@.lane_%s MINVALUE %s MAXVALUE %s CACHE 1 NO CYCLE',
        v_id, @extschema@._lane_base(v_id) + 1, @extschema@._lane_base(v_id + 1) - 1);
    EXECUTE format('ALTER SEQUENCE @extschema@.lane_%s OWNED BY @extschema@.queue_lanes.lane_id', v_id);
    INSERT INTO @extschema@.queue_lanes AS l (lane_id, queue, priority, shard, position_seq, hint_seq, created_at)
    VALUES (v_id, p_queue, p_priority, p_shard, format('@extschema@.lane_%s', v_id)::regclass,
            @extschema@._create_hint(v_id), clock_timestamp())
    RETURNING l.* INTO v_lane;
    -- A worker that armed its flag could not see this lane and may think the queue idle: it hears of it at the commit.
    PERFORM @extschema@._notify_workers(p_queue, '');
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_lane(text, integer, integer, boolean) IS
    'Internal: finds or makes a lane; NULL where another transaction is making it and no sibling is wanted.';

CREATE OR REPLACE FUNCTION @extschema@._create_lanes(p_queue text, p_all_priorities boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_shards integer := (@extschema@._queue_options(p_queue)).enqueue_shards;
BEGIN
    FOR v_priority IN 1 .. 4 LOOP
        CONTINUE WHEN v_priority <> 2 AND NOT p_all_priorities;
        FOR v_shard IN 0 .. v_shards - 1 LOOP
            PERFORM @extschema@._create_lane(p_queue, v_priority, v_shard, false);
        END LOOP;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_lanes(text, boolean) IS
    'Internal: makes the lanes of a queue, of priority 2 or of all, ahead of use.';

-- Hash of an ordering key: start 14695981039346656037, then for each byte h * 1099511628211 + byte, modulo 2^64.
CREATE OR REPLACE FUNCTION @extschema@._ordering_hash(p_key text)
RETURNS numeric
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_bytes bytea := convert_to(p_key, 'UTF8');
    v_hash numeric := 14695981039346656037;
BEGIN
    FOR i IN 0 .. length(v_bytes) - 1 LOOP
        v_hash := mod(v_hash * 1099511628211 + get_byte(v_bytes, i), 18446744073709551616);
    END LOOP;
    RETURN v_hash;
END
$function$;
COMMENT ON FUNCTION @extschema@._ordering_hash(text) IS 'Internal: published 64-bit hash of an ordering key.';

CREATE OR REPLACE FUNCTION @extschema@._pick_shard(p_shards integer, p_ordering_key text)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_shards = 1 THEN
        RETURN 0;
    ELSIF p_ordering_key IS NULL THEN
        RETURN floor(random() * p_shards);
    END IF;
    RETURN mod(@extschema@._ordering_hash(p_ordering_key), p_shards);
END
$function$;
COMMENT ON FUNCTION @extschema@._pick_shard(integer, text) IS 'Internal: shard by ordering key, or any.';

-- Last position that a lane has given out, whatever the snapshot; takes no lock that the claim's proof would meet.
CREATE OR REPLACE FUNCTION @extschema@._lane_tail(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_tail bigint;
BEGIN
    EXECUTE format('SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END
                    FROM @extschema@.lane_%s s', p_lane)
        INTO v_tail;
    RETURN v_tail;
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_tail(integer) IS 'Internal: last position that a lane gave out.';

-- Who takes a number holds the sequence to the end of the top transaction, also after a savepoint rollback and after
-- PREPARE TRANSACTION (then without pid).
CREATE OR REPLACE FUNCTION @extschema@._sequence_is_quiet(p_sequence regclass)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT NOT EXISTS (
        SELECT FROM pg_locks k
        WHERE k.locktype = 'relation' AND k.mode = 'RowExclusiveLock' AND k.relation = p_sequence
          AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND k.pid IS DISTINCT FROM pg_backend_pid())
$function$;
COMMENT ON FUNCTION @extschema@._sequence_is_quiet(regclass) IS
    'Internal: proof that no other transaction in flight has taken a number of a sequence.';
