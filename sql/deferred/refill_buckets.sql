-- Moves of deferred jobs between leaves: from the far leaf into the buckets as they come near, and overdue ones out of
-- an old bucket, so that it can be emptied.

-- Moves jobs of a slot that are due from p_from on and before p_before to the slot where they belong now: up to
-- p_limit, and so many bytes of args, since all of it is one statement.
CREATE OR REPLACE FUNCTION @extschema@._move_deferred(
    p_slot integer, p_from timestamptz, p_before timestamptz, p_limit bigint, p_now timestamptz,
    OUT moved bigint, OUT is_all boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    c_portion constant bigint := 16777216;
    v_bytes bigint;
BEGIN
    EXECUTE format($query$
        WITH due AS MATERIALIZED (
            SELECT x.job_id, x.bytes, sum(x.bytes) OVER (ORDER BY x.run_at, x.job_id) - x.bytes AS ahead
            FROM (SELECT d.job_id, d.run_at, @extschema@._args_bytes(d.args) AS bytes
                  FROM @extschema@.deferred_jobs_%1$s d
                  WHERE d.run_at >= $1 AND d.run_at < $2
                  ORDER BY d.run_at, d.job_id
                  LIMIT $3
                  FOR UPDATE SKIP LOCKED) x),
        gone AS (
            DELETE FROM @extschema@.deferred_jobs_%1$s d
            -- A list, not a join, which statistics could turn into a walk over all rows, dead ones included.
            WHERE d.job_id = ANY (ARRAY(SELECT u.job_id FROM due u WHERE u.ahead <= $5))
            RETURNING d.*),
        stored AS (
            INSERT INTO @extschema@.deferred_jobs
                (job_id, run_at, run_lease, state, priority, shard, attempt, slot, queue, kind, args, ext)
            SELECT g.job_id, g.run_at, g.run_lease, g.state, g.priority, g.shard, g.attempt,
                   @extschema@._deferred_slot(g.run_at, $4), g.queue, g.kind, g.args, g.ext
            FROM gone g)
        SELECT count(*) FILTER (WHERE u.ahead <= $5), sum(u.bytes) FROM due u
        $query$, p_slot)
        INTO moved, v_bytes USING p_from, p_before, p_limit, p_now, c_portion;
    is_all := moved < p_limit AND coalesce(v_bytes, 0) <= c_portion;
    IF moved > 0 THEN
        PERFORM @extschema@._note_taken(p_slot, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_deferred(integer, timestamptz, timestamptz, bigint, timestamptz) IS
    'Internal: moves deferred jobs of a slot to the slots where they belong now; is_all when none is left.';

-- Every 15 s; at once again when there was more than one call moves. From a minute before where the last one ended,
-- so that under a pinned snapshot it does not walk over all dead rows; what was committed behind that mark is found by
-- a look from the start, which may take a hundredth of the time.
CREATE OR REPLACE FUNCTION @extschema@._refill_buckets(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_second bigint := extract(epoch FROM p_now);
    v_last bigint := (SELECT s.last_value FROM @extschema@.deferred_refill s);
    -- A time too far ahead is from a clock that was wrong.
    v_is_full boolean := v_last > v_second
        OR (SELECT s.last_value FROM @extschema@.deferred_full_look s) NOT BETWEEN v_second + 1 AND v_second + 3600;
    v_portion record;
    v_moved bigint := 0;
BEGIN
    IF v_second / 15 = v_last / 15 THEN
        RETURN 0;
    END IF;
    LOOP
        v_portion := @extschema@._move_deferred(
            16, CASE WHEN v_is_full THEN '-infinity' ELSE to_timestamp(v_last) + interval '9 minutes' END,
            p_now + interval '10 minutes', p_limit - v_moved, p_now);
        v_moved := v_moved + v_portion.moved;
        EXIT WHEN v_portion.is_all OR v_moved >= p_limit OR clock_timestamp() > v_began + interval '1 second';
    END LOOP;
    IF v_portion.is_all THEN
        PERFORM setval('@extschema@.deferred_refill', v_second);
    END IF;
    IF v_is_full THEN
        PERFORM setval('@extschema@.deferred_full_look', v_second
            + least(3600, 100 * extract(epoch FROM clock_timestamp() - v_began))::bigint);
    END IF;
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._refill_buckets(integer, timestamptz) IS
    'Internal: moves up to so many jobs that are due within ten minutes from the far leaf to their buckets.';

CREATE OR REPLACE FUNCTION @extschema@._forget_refill()
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT setval('@extschema@.deferred_refill', 0, false), setval('@extschema@.deferred_full_look', 0, false)
$function$;
COMMENT ON FUNCTION @extschema@._forget_refill() IS 'Internal: lets the next refill look from the start.';

-- The job of a slot that is due last; NULL when the slot holds none. Looked for from the end, where the living are.
CREATE OR REPLACE FUNCTION @extschema@._last_deferred(p_slot integer, OUT queue text, OUT run_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
BEGIN
    EXECUTE format('SELECT d.queue, d.run_at FROM @extschema@.deferred_jobs_%s d
                    ORDER BY d.run_at DESC, d.job_id DESC LIMIT 1', p_slot) INTO queue, run_at;
END
$function$;
COMMENT ON FUNCTION @extschema@._last_deferred(integer) IS 'Internal: the job of a slot that is due last, or NULL.';

-- A few overdue jobs must not keep a bucket from being emptied: those of a strict_fifo lane that a producer holds, say.
-- Many are what promotion will come to.
CREATE OR REPLACE FUNCTION @extschema@._move_stragglers(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most constant bigint := 1000;
    v_before timestamptz := p_now - interval '2 minutes';
    v_count bigint;
BEGIN
    IF p_slot IN (16, @extschema@._deferred_slot(p_now, p_now))
       OR (@extschema@._last_deferred(p_slot)).run_at >= v_before THEN
        RETURN 0;
    END IF;
    EXECUTE format('SELECT count(*) FROM (SELECT FROM @extschema@.deferred_jobs_%s d LIMIT $1) x', p_slot)
        INTO v_count USING c_most + 1;
    IF v_count > c_most THEN
        RETURN 0;
    END IF;
    RETURN (@extschema@._move_deferred(p_slot, '-infinity', v_before, c_most, p_now)).moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_stragglers(integer, timestamptz) IS
    'Internal: moves the jobs of a bucket to the one of this minute, if they are few and all long overdue.';
