-- Counts of terminal jobs: exact while they are in the ring, and folded into rollups when their slot is pruned.

CREATE OR REPLACE FUNCTION @extschema@._slot_terminal_counts(p_slot integer)
RETURNS TABLE (queue text, completed bigint, failed bigint, cancelled bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT x.queue, sum(x.completed)::bigint, sum(x.failed)::bigint, sum(x.cancelled)::bigint
        FROM (SELECT l.queue, @extschema@._cardinality(b.positions) AS completed, 0 AS failed, 0 AS cancelled
              FROM @extschema@.receipt_completion_batches_%1$s b
              JOIN @extschema@.queue_lanes l ON l.lane_id = @extschema@._lane_of(lower(b.positions))
              UNION ALL
              SELECT d.queue, s.sign * (d.state = 'completed')::integer, s.sign * (d.state = 'failed')::integer,
                     s.sign * (d.state = 'cancelled')::integer
              FROM @extschema@.done_entries_%1$s d, LATERAL (SELECT CASE WHEN d.is_undo THEN -1 ELSE 1 END) s (sign)) x
        GROUP BY x.queue
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_terminal_counts(integer) IS 'Internal: terminal jobs of a slot by queue.';

CREATE OR REPLACE FUNCTION @extschema@._fold_terminal_counts(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_jobs bigint;
BEGIN
    WITH folded AS (
        INSERT INTO @extschema@.queue_terminal_rollups AS r (queue, completed, failed, cancelled, pruned_at)
        SELECT c.queue, c.completed, c.failed, c.cancelled, p_now
        FROM @extschema@._slot_terminal_counts(p_slot) c
        ON CONFLICT (queue) DO UPDATE
        SET completed = r.completed + excluded.completed, failed = r.failed + excluded.failed,
            cancelled = r.cancelled + excluded.cancelled, pruned_at = excluded.pruned_at
        RETURNING 1)
    SELECT count(*) INTO v_jobs FROM folded;
    RETURN v_jobs;
END
$function$;
COMMENT ON FUNCTION @extschema@._fold_terminal_counts(integer, timestamptz) IS
    'Internal: adds the terminal jobs of a slot to the rollups; part of prune.';

CREATE OR REPLACE FUNCTION @extschema@._terminal_counts(p_queue text)
RETURNS TABLE (completed bigint, failed bigint, cancelled bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- One statement, one snapshot: rollups and leaves of a concurrent prune are seen together or not at all.
    RETURN QUERY
    SELECT coalesce(sum(x.completed), 0)::bigint, coalesce(sum(x.failed), 0)::bigint,
           coalesce(sum(x.cancelled), 0)::bigint
    FROM (SELECT r.completed, r.failed, r.cancelled
          FROM @extschema@.queue_terminal_rollups r
          WHERE r.queue = p_queue
          UNION ALL
          SELECT @extschema@._cardinality(b.positions), 0, 0
          FROM @extschema@.receipt_completion_batches b
          JOIN @extschema@.queue_lanes l ON l.lane_id = @extschema@._lane_of(lower(b.positions))
          WHERE l.queue = p_queue
          UNION ALL
          SELECT s.sign * (d.state = 'completed')::integer, s.sign * (d.state = 'failed')::integer,
                 s.sign * (d.state = 'cancelled')::integer
          FROM @extschema@.done_entries d, LATERAL (SELECT CASE WHEN d.is_undo THEN -1 ELSE 1 END) s (sign)
          WHERE d.queue = p_queue) x;
END
$function$;
COMMENT ON FUNCTION @extschema@._terminal_counts(text) IS
    'Internal: exact terminal jobs of a queue, pruned ones included.';

CREATE OR REPLACE FUNCTION @extschema@._retention_of(p_state @extschema@.job_state)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_state WHEN 'failed' THEN 'failed_retention_seconds' ELSE 'terminal_retention_seconds' END;
COMMENT ON FUNCTION @extschema@._retention_of(@extschema@.job_state) IS
    'Internal: the setting that says how long a job that ended so, and is no dead letter, is remembered.';

-- Part of prune. A body at a time by its position: the slot may be large, and most of its jobs have no unique key.
CREATE OR REPLACE FUNCTION @extschema@._ended_unique_jobs(p_slot integer)
RETURNS TABLE (job_id bigint, unique_key text, state @extschema@.job_state, finalized_at timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT coalesce(r.job_id, r."position"), r.ext -> 'unique' ->> 'key', 'completed'::@extschema@.job_state,
               b.finalized_at
        FROM @extschema@.receipt_completion_batches_%1$s b, unnest(b.positions) s (s), @extschema@.ready_entries_%1$s r
        WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s) AND r.ext ? 'unique'
        UNION ALL
        SELECT d.job_id, j.ext -> 'unique' ->> 'key', d.state, d.finalized_at
        FROM @extschema@.done_entries_%1$s d
        LEFT JOIN @extschema@.ready_entries_%1$s r ON r."position" = d."position",
             LATERAL (SELECT coalesce(d.body -> 'ext', r.ext)) j (ext)
        WHERE j.ext ? 'unique' AND NOT d.is_undo
              AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                              WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                                AND u.finalized_at = d.finalized_at AND u.is_undo)
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_unique_jobs(integer) IS
    'Internal: jobs with a unique key that ended in a slot, dead letters aside.';

-- Time of the newest terminal row of a slot: what retention counts from.
CREATE OR REPLACE FUNCTION @extschema@._newest_terminal_at(p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_newest timestamptz;
BEGIN
    EXECUTE format('SELECT greatest((SELECT max(b.finalized_at) FROM @extschema@.receipt_completion_batches_%1$s b),
                                    (SELECT max(d.finalized_at) FROM @extschema@.done_entries_%1$s d))', p_slot)
        INTO v_newest;
    RETURN v_newest;
END
$function$;
COMMENT ON FUNCTION @extschema@._newest_terminal_at(integer) IS 'Internal: when the last job of a slot ended.';

-- Failed jobs outlive their slot: they can be looked at, and tried again, for failed_retention_seconds. They are copied
-- some time before it is emptied; until then the row in the slot is the one that counts. Bodies are read in one
-- go: a slot may be full of failed jobs.
CREATE OR REPLACE FUNCTION @extschema@._keep_failed(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_nestloop = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_kept bigint;
BEGIN
    EXECUTE format($query$
        WITH failed AS MATERIALIZED (
            SELECT d.*
            FROM @extschema@.done_entries_%1$s d
            WHERE d.state = 'failed' AND d.finalized_at > $1 AND NOT d.is_undo
              AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                              WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                                AND u.finalized_at = d.finalized_at AND u.is_undo)
              AND coalesce((SELECT f.run_lease < d.run_lease FROM @extschema@.failed_entries f
                            WHERE f.job_id = d.job_id), true))
        INSERT INTO @extschema@.failed_entries AS f
            (job_id, run_lease, finalized_at, attempted_at, attempt, queue, body, detail)
        SELECT d.job_id, d.run_lease, d.finalized_at, d.attempted_at, d.attempt, d.queue,
               coalesce(d.body, @extschema@._done_body(r.job)), d.detail
        FROM failed d
        LEFT JOIN @extschema@._read_ready(
            %1$s, ARRAY(SELECT b."position" FROM failed b WHERE b.body IS NULL)) r ON r."position" = d."position"
        ON CONFLICT (job_id) DO UPDATE
        SET run_lease = excluded.run_lease, finalized_at = excluded.finalized_at,
            attempted_at = excluded.attempted_at, attempt = excluded.attempt, body = excluded.body,
            detail = excluded.detail
        WHERE f.run_lease < excluded.run_lease
        $query$, p_slot)
        USING p_now - @extschema@._setting_interval('failed_retention_seconds');
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END
$function$;
COMMENT ON FUNCTION @extschema@._keep_failed(integer, timestamptz) IS
    'Internal: copies failed jobs out of a slot that will be pruned; returns how many were not copied before.';

CREATE OR REPLACE FUNCTION @extschema@._expire_failed(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.failed_entries f
    WHERE f.job_id IN (
        SELECT x.job_id FROM @extschema@.failed_entries x
        WHERE x.finalized_at <= p_now - @extschema@._setting_interval('failed_retention_seconds')
        ORDER BY x.finalized_at, x.job_id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_failed(bigint, timestamptz) IS
    'Internal: forgets failed jobs older than failed_retention_seconds.';

CREATE OR REPLACE FUNCTION @extschema@._as_done(p_failed @extschema@.failed_entries)
RETURNS @extschema@.done_entries
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_failed).job_id, NULL, (p_failed).run_lease, (p_failed).finalized_at, (p_failed).attempted_at, 'failed',
    NULL, (p_failed).attempt, false, (p_failed).queue, (p_failed).body,
    (p_failed).detail)::@extschema@.done_entries;
COMMENT ON FUNCTION @extschema@._as_done(@extschema@.failed_entries) IS
    'Internal: a failed job that outlived its slot as a row of history.';

-- The terminal row that holds for a job, if one does: it ends once, and a retry takes that back.
CREATE OR REPLACE FUNCTION @extschema@._find_done(p_job_id bigint)
RETURNS @extschema@.done_entries
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_done @extschema@.done_entries;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('done_entries', v_slot);
        EXECUTE format('SELECT d.* FROM @extschema@.done_entries_%1$s d
                        WHERE d.job_id = $1 AND NOT d.is_undo
                          AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                                          WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                                            AND u.finalized_at = d.finalized_at AND u.is_undo)', v_slot)
            INTO v_done USING p_job_id;
        EXIT WHEN v_done.job_id IS NOT NULL;
    END LOOP;
    IF v_done.job_id IS NULL THEN
        SELECT (@extschema@._as_done(f)).* INTO v_done FROM @extschema@.failed_entries f WHERE f.job_id = p_job_id;
    END IF;
    RETURN v_done;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_done(bigint) IS 'Internal: the terminal row of a job.';

-- Takes a failed or cancelled job out of history: a row that cancels the first in every count, in the same slot, so
-- that both are pruned together. The second look keeps the leaf until commit: a prune, which folds and copies what it
-- finds, has come before it, or will come after. A job that outlived its slot is in the rollups, so its undo goes to
-- the current slot.
-- The caller holds the position lock of the job's id, so that two retries follow each other.
CREATE OR REPLACE FUNCTION @extschema@._undo_done(p_done @extschema@.done_entries)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_done @extschema@.done_entries := p_done;
    v_holds boolean;
BEGIN
    IF v_done.slot IS NULL THEN
        DELETE FROM @extschema@.failed_entries f
        WHERE f.job_id = v_done.job_id AND f.run_lease = v_done.run_lease AND f.finalized_at = v_done.finalized_at;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        v_done.slot := @extschema@._ring_cursor('queue') % 64;
    ELSE
        -- pause point: undo
        EXECUTE format('SELECT bool_and(NOT d.is_undo) FROM @extschema@.done_entries_%s d
                        WHERE d.job_id = $1 AND d.run_lease = $2 AND d.finalized_at = $3', v_done.slot)
            INTO v_holds USING v_done.job_id, v_done.run_lease, v_done.finalized_at;
        -- pause point: undo_seen
        IF v_holds IS NOT TRUE THEN
            RETURN false;
        END IF;
    END IF;
    INSERT INTO @extschema@.done_entries
        (job_id, "position", run_lease, finalized_at, state, slot, attempt, is_undo, queue, body)
    VALUES (v_done.job_id, v_done."position", v_done.run_lease, v_done.finalized_at, v_done.state, v_done.slot,
        v_done.attempt, true, v_done.queue, CASE WHEN v_done."position" IS NULL THEN '{}'::jsonb END);
    -- Prune may have copied it already; from here on it waits for this transaction.
    DELETE FROM @extschema@.failed_entries f
    WHERE f.job_id = v_done.job_id AND f.run_lease = v_done.run_lease AND f.finalized_at = v_done.finalized_at;
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._undo_done(@extschema@.done_entries) IS
    'Internal: takes back that a job ended; false when that does not hold any more.';

-- The other way round from _done_body().
CREATE OR REPLACE FUNCTION @extschema@._stored_job(p_done @extschema@.done_entries)
RETURNS @extschema@._job
LANGUAGE sql STABLE PARALLEL SAFE
RETURN ROW((p_done).job_id, (p_done).queue, ((p_done).body ->> 'priority')::integer,
    ((p_done).body ->> 'shard')::integer, ((p_done).body ->> 'run_at')::timestamptz, (p_done).attempt,
    (p_done).run_lease, (p_done).body ->> 'kind', (p_done).body -> 'args',
    nullif((p_done).body -> 'ext', 'null'))::@extschema@._job;
COMMENT ON FUNCTION @extschema@._stored_job(@extschema@.done_entries) IS
    'Internal: the job of a terminal row that stores its body.';

-- A terminal row as the job it was, errors included. Its leaf is locked.
CREATE OR REPLACE FUNCTION @extschema@._job_of_done(p_done @extschema@.done_entries)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    IF p_done."position" IS NULL THEN
        v_job := @extschema@._stored_job(p_done);
    ELSE
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(p_done.slot, ARRAY[p_done."position"]) r;
        v_job.attempt := p_done.attempt;
        v_job.run_lease := p_done.run_lease;
    END IF;
    v_job.ext := coalesce(v_job.ext, '{}') - 'errors';
    IF p_done.detail ? 'errors' THEN
        v_job.ext := v_job.ext || jsonb_build_object('errors', p_done.detail -> 'errors');
    END IF;
    IF NOT v_job.ext ? 'created_at' THEN
        v_job.ext := v_job.ext || jsonb_build_object('created_at', v_job.run_at);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_of_done(@extschema@.done_entries) IS
    'Internal: the job of a terminal row.';

-- How an attempt ended that history knows, also when the job was retried since.
CREATE OR REPLACE FUNCTION @extschema@._done_state(
    p_slot integer, p_job_id bigint, p_position bigint, p_run_lease bigint)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_state @extschema@.job_state;
BEGIN
    EXECUTE format('SELECT d.state FROM @extschema@.done_entries_%s d
                    WHERE d.job_id = $1 AND d."position" = $2 AND d.run_lease = $3 AND NOT d.is_undo LIMIT 1', p_slot)
        INTO v_state USING p_job_id, p_position, p_run_lease;
    RETURN v_state;
END
$function$;
COMMENT ON FUNCTION @extschema@._done_state(integer, bigint, bigint, bigint) IS
    'Internal: terminal state that an attempt ended in, by its slot and token.';

-- A moved attempt left its slot, so its row may lie in any. Rows of jobs that ended without running have no
-- attempted_at, and the lease of the attempt before.
CREATE OR REPLACE FUNCTION @extschema@._moved_state(p_job_id bigint, p_run_lease bigint)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_state @extschema@.job_state;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('done_entries', v_slot);
        EXECUTE format('SELECT d.state FROM @extschema@.done_entries_%s d
                        WHERE d.job_id = $1 AND d.run_lease = $2 AND d."position" IS NULL
                          AND d.attempted_at IS NOT NULL AND NOT d.is_undo LIMIT 1', v_slot)
            INTO v_state USING p_job_id, p_run_lease;
        EXIT WHEN v_state IS NOT NULL;
    END LOOP;
    RETURN coalesce(v_state, (
        SELECT 'failed' FROM @extschema@.failed_entries f
        WHERE f.job_id = p_job_id AND f.run_lease = p_run_lease AND f.attempted_at IS NOT NULL)::@extschema@.job_state);
END
$function$;
COMMENT ON FUNCTION @extschema@._moved_state(bigint, bigint) IS
    'Internal: terminal state of a moved attempt, or of a failed one that outlived its slot.';

CREATE OR REPLACE FUNCTION @extschema@._completion_of(
    p_slot integer, p_position bigint,
    OUT attempted_at timestamptz, OUT finalized_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    EXECUTE format('SELECT b.attempted_at, b.finalized_at FROM @extschema@.receipt_completion_batches_%s b
                    WHERE b.positions @> $1', p_slot)
        INTO attempted_at, finalized_at USING p_position;
END
$function$;
COMMENT ON FUNCTION @extschema@._completion_of(integer, bigint) IS
    'Internal: when the job at a position was claimed and completed.';
