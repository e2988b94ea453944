-- Appends job bodies. The order of the first three steps is what makes gaps decidable: assign the
-- transaction id, read the ring, take the position. Answers NULL, or leaves rows out, where a lane cannot
-- be had without waiting: the caller defers.

-- The usual job, to a lane that exists, of a queue without shards and order. Few expressions and two statements: in
-- autocommit each of them is prepared anew, which costs as much as an index probe.
CREATE OR REPLACE FUNCTION @extschema@._append_ready_one(p_queue text, p_priority integer, p_kind text, p_args jsonb)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slot smallint;
    v_seq regclass;
    v_position bigint;
    v_rings boolean;
BEGIN
    PERFORM pg_current_xact_id();
    SELECT (coalesce(pg_sequence_last_value('@extschema@.queue_ring'), 0) % 64)::smallint, l.position_seq
    INTO v_slot, v_seq
    FROM @extschema@.queue_lanes l
    WHERE l.queue = p_queue AND l.priority = p_priority AND l.shard = 0
      AND NOT EXISTS (SELECT FROM @extschema@.queue_meta m
                      WHERE m.queue = p_queue AND (m.enqueue_shards > 1 OR m.strict_fifo))
    ORDER BY l.lane_id LIMIT 1;
    -- pause point: insert
    IF v_seq IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO @extschema@.ready_entries AS r ("position", run_at, slot, kind, args)
    VALUES (nextval(v_seq), clock_timestamp(), v_slot, p_kind, p_args)
    RETURNING r."position", @extschema@._someone_sleeps(p_queue) INTO v_position, v_rings;
    IF v_rings THEN
        PERFORM @extschema@._ring_doorbell(p_queue);
    END IF;
    RETURN v_position;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready_one(text, integer, text, jsonb) IS
    'Internal: appends one new job to the only lane of its priority and returns its id; NULL where that takes more.';

CREATE OR REPLACE FUNCTION @extschema@._append_ready_many(
    p_queue text, p_priority integer, p_ordering_key text, p_kind text, p_args jsonb[], p_run_at timestamptz,
    p_ext jsonb)
RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_lane @extschema@.queue_lanes;
BEGIN
    PERFORM pg_current_xact_id();
    v_slot := (SELECT s.last_value FROM @extschema@.queue_ring s) % 64;
    -- pause point: insert
    v_lane := @extschema@._producer_lane(p_queue, p_priority, p_ordering_key);
    IF v_lane.lane_id IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO @extschema@.ready_entries AS r ("position", run_at, slot, kind, args, ext)
    SELECT nextval(v_lane.position_seq), p_run_at, v_slot, p_kind, a.args, p_ext
    FROM unnest(p_args) a (args)
    RETURNING r."position";
    PERFORM @extschema@._ring_doorbell(p_queue);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready_many(text, integer, text, text, jsonb[], timestamptz, jsonb) IS
    'Internal: appends new jobs of one kind and returns their ids in order, '
    'or nothing where their lane cannot be had without waiting.';

-- The lane a producer writes to. strict_fifo producers of a lane follow each other until commit.
CREATE OR REPLACE FUNCTION @extschema@._producer_lane(p_queue text, p_priority integer, p_ordering_key text)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
BEGIN
    RETURN @extschema@._shard_lane(
        p_queue, p_priority, @extschema@._pick_shard(v_meta.enqueue_shards, p_ordering_key), v_meta.strict_fifo);
END
$function$;
COMMENT ON FUNCTION @extschema@._producer_lane(text, integer, text) IS
    'Internal: the lane for a new job; takes the strict_fifo lock where the queue asks for it.';

CREATE OR REPLACE FUNCTION @extschema@._shard_lane(
    p_queue text, p_priority integer, p_shard integer, p_is_strict boolean)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes := @extschema@._find_lane(p_queue, p_priority, p_shard);
BEGIN
    IF v_lane.lane_id IS NULL THEN
        v_lane := @extschema@._create_lane(p_queue, p_priority, p_shard, false);
    END IF;
    IF p_is_strict AND v_lane.lane_id IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
    END IF;
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._shard_lane(text, integer, integer, boolean) IS
    'Internal: a lane, made where it is missing, with its strict_fifo lock if wanted.';

-- A lane that is not there yet can be had: it is made on the way.
CREATE OR REPLACE FUNCTION @extschema@._try_lane(p_queue text, p_priority integer, p_shard integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane integer;
BEGIN
    IF NOT (@extschema@._queue_options(p_queue)).strict_fifo THEN
        RETURN true;
    END IF;
    v_lane := (@extschema@._find_lane(p_queue, p_priority, p_shard)).lane_id;
    RETURN v_lane IS NULL OR pg_try_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane));
END
$function$;
COMMENT ON FUNCTION @extschema@._try_lane(text, integer, integer) IS
    'Internal: takes the strict_fifo lock of a lane if its queue wants one; false where a producer holds it.';

-- Jobs of any lanes, new (job_id NULL) or re-entering, in the order of the array. Lanes are taken in sorted order.
-- Returns the ordinal and id of each job appended; a job whose lane cannot be had is left out. A
-- caller that never waits gets a sibling of a lane that another transaction is making, and is refused
-- a strict_fifo lane that a producer holds.
CREATE OR REPLACE FUNCTION @extschema@._append_ready(p_jobs @extschema@._job[], p_never_waits boolean)
RETURNS TABLE (ordinal bigint, job_id bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_group record;
    v_lane @extschema@.queue_lanes;
BEGIN
    PERFORM pg_current_xact_id();
    v_slot := @extschema@._ring_cursor('queue') % 64;
    -- pause point: insert
    FOR v_group IN SELECT DISTINCT j.queue, j.priority, j.shard FROM unnest(p_jobs) j ORDER BY 1, 2, 3 LOOP
        v_lane := @extschema@._find_lane(v_group.queue, v_group.priority, v_group.shard);
        IF v_lane.lane_id IS NULL THEN
            v_lane := @extschema@._create_lane(v_group.queue, v_group.priority, v_group.shard, p_never_waits);
        END IF;
        CONTINUE WHEN v_lane.lane_id IS NULL;
        IF (@extschema@._queue_options(v_group.queue)).strict_fifo THEN
            CONTINUE WHEN p_never_waits
                AND NOT pg_try_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
            PERFORM pg_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
        END IF;
        RETURN QUERY
        WITH chosen AS MATERIALIZED (
            SELECT j.o, nextval(v_lane.position_seq) AS pos, j.job_id AS old_id, j.run_at, j.kind, j.args,
                   nullif(jsonb_strip_nulls(jsonb_build_object(
                              'attempt', nullif(j.attempt, 0), 'run_lease', nullif(j.run_lease, 0)))
                          || coalesce(j.ext, '{}'), '{}') AS ext
            FROM (SELECT x.*
                  FROM unnest(p_jobs) WITH ORDINALITY
                      x (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
                  WHERE x.queue = v_group.queue AND x.priority = v_group.priority AND x.shard = v_group.shard
                  ORDER BY x.o) j),
        appended AS (
            INSERT INTO @extschema@.ready_entries ("position", run_at, job_id, slot, kind, args, ext)
            SELECT c.pos, c.run_at, c.old_id, v_slot, c.kind, c.args, c.ext FROM chosen c)
        SELECT c.o, coalesce(c.old_id, c.pos) FROM chosen c;
        PERFORM @extschema@._ring_doorbell(v_group.queue);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready(@extschema@._job[], boolean) IS
    'Internal: appends jobs to their lanes; those whose lane cannot be had are left out.';

-- Positions for jobs of one lane, ahead of the jobs: the transaction has its id and has read the ring.
CREATE OR REPLACE FUNCTION @extschema@._reserve_positions(
    p_queue text, p_priority integer, p_shard integer, p_count bigint)
RETURNS bigint[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes := @extschema@._shard_lane(
        p_queue, p_priority, p_shard, (@extschema@._queue_options(p_queue)).strict_fifo);
BEGIN
    IF v_lane.lane_id IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(SELECT nextval(v_lane.position_seq) FROM generate_series(1, p_count));
END
$function$;
COMMENT ON FUNCTION @extschema@._reserve_positions(text, integer, integer, bigint) IS
    'Internal: takes positions of a lane; NULL where it cannot be had without waiting.';

CREATE OR REPLACE FUNCTION @extschema@._append_at_positions(p_slot integer, p_jobs @extschema@._job[])
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.ready_entries ("position", run_at, slot, kind, args, ext)
    SELECT j.job_id, j.run_at, p_slot, j.kind, j.args, j.ext
    FROM unnest(p_jobs) WITH ORDINALITY
        j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
    ORDER BY j.o;
    PERFORM @extschema@._ring_doorbell(q.queue) FROM (SELECT DISTINCT j.queue FROM unnest(p_jobs) j) q;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_at_positions(integer, @extschema@._job[]) IS
    'Internal: appends new jobs at positions taken before, which are their ids.';

-- Waiting rows of one slot go to another under their positions; the old ones are dead from then on.
CREATE OR REPLACE FUNCTION @extschema@._move_ready(
    p_positions bigint[], p_from integer, p_to integer)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    -- From table to table: the bodies of a few thousand jobs may not fit into memory.
    EXECUTE format('INSERT INTO @extschema@.ready_entries ("position", run_at, job_id, slot, kind, args, ext)
                    SELECT r."position", r.run_at, r.job_id, $2, r.kind, r.args, r.ext
                    FROM unnest($1) s (s), @extschema@.ready_entries_%s r
                    WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s)', p_from)
        USING @extschema@._sorted_to_set(p_positions), p_to;
    INSERT INTO @extschema@.ready_tombstones ("position", slot)
    SELECT p, p_from FROM unnest(p_positions) p;
    PERFORM @extschema@._note_released('queue', p_from, NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._move_ready(bigint[], integer, integer) IS
    'Internal: copies waiting rows to a slot and marks the old ones dead.';
