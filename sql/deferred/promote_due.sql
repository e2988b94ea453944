-- The oldest due jobs, locked: those that wait for their unique key, or all others. So many, of so many bytes, because
-- a portion is held in memory, and of so many lanes with those that the caller has: each takes locks to the end, a new
-- one several, and more of them at once would fill the lock table.
-- Rows that others change are skipped; they are theirs. So are those of strict_fifo lanes that producers hold: nobody
-- must wait behind them. The far leaf is left to refill.
CREATE OR REPLACE FUNCTION @extschema@._due_jobs(
    p_is_waiting boolean, p_limit bigint, p_now timestamptz, p_lanes text[],
    OUT slots integer[], OUT ids bigint[], OUT lanes text[], OUT is_full boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
DECLARE
    c_portion constant bigint := 16777216;
    c_lanes constant integer := 256;
    -- After so many rows of held lanes the search goes on without these lanes.
    c_skipped constant integer := 64;
    v_due refcursor;
    v_row record;
    v_held text[] := '{}'::text[];
    v_skipped integer;
    v_at timestamptz := '-infinity'::timestamptz;
    v_id bigint := 0;
    v_bytes bigint := 0;
BEGIN
    slots := '{}';
    ids := '{}';
    lanes := p_lanes;
    is_full := false;
    LOOP
        v_skipped := 0;
        IF p_is_waiting THEN
            OPEN v_due FOR
                SELECT d.slot, d.job_id, d.run_at, d.queue, d.priority, d.shard, d.args,
                       d.priority || '/' || d.shard || '/' || d.queue AS lane
                FROM @extschema@.deferred_jobs d
                WHERE d.run_at <= p_now AND (d.run_at, d.job_id) > (v_at, v_id) AND d.ext -> 'unique' ? 'waiting'
                      AND d.priority || '/' || d.shard || '/' || d.queue <> ALL (v_held)
                ORDER BY d.run_at, d.job_id FOR UPDATE SKIP LOCKED;
        ELSE
            OPEN v_due FOR
                SELECT d.slot, d.job_id, d.run_at, d.queue, d.priority, d.shard, d.args,
                       d.priority || '/' || d.shard || '/' || d.queue AS lane
                FROM @extschema@.deferred_jobs d
                WHERE d.slot < 16 AND d.run_at <= p_now AND (d.run_at, d.job_id) > (v_at, v_id)
                      AND NOT coalesce(d.ext -> 'unique' ? 'waiting', false)
                      AND d.priority || '/' || d.shard || '/' || d.queue <> ALL (v_held)
                ORDER BY d.run_at, d.job_id FOR UPDATE SKIP LOCKED;
        END IF;
        WHILE v_skipped < c_skipped LOOP
            FETCH v_due INTO v_row;
            EXIT WHEN NOT FOUND;
            v_at := v_row.run_at;
            v_id := v_row.job_id;
            IF v_row.lane <> ALL (lanes || v_held) THEN
                EXIT WHEN cardinality(lanes) >= c_lanes;
                IF @extschema@._try_lane(v_row.queue, v_row.priority, v_row.shard) THEN
                    lanes := lanes || v_row.lane;
                ELSE
                    v_held := v_held || v_row.lane;
                END IF;
            END IF;
            IF v_row.lane = ANY (v_held) THEN
                v_skipped := v_skipped + 1;
                CONTINUE;
            END IF;
            slots := slots || v_row.slot::integer;
            ids := ids || v_row.job_id;
            v_bytes := v_bytes + @extschema@._args_bytes(v_row.args);
            is_full := v_bytes > c_portion;
            EXIT WHEN is_full OR cardinality(ids) >= p_limit;
        END LOOP;
        CLOSE v_due;
        EXIT WHEN v_skipped < c_skipped;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._due_jobs(boolean, bigint, timestamptz, text[]) IS
    'Internal: due jobs that can be promoted, locked, with their lanes; is_full when bytes were the limit.';

-- Moves due jobs from all buckets into the ready ring, oldest first. What does not fit into a second waits for the next
-- round.
CREATE OR REPLACE FUNCTION @extschema@._promote_due(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_due record;
    v_lanes text[] := '{}'::text[];
    v_moved bigint := 0;
BEGIN
    LOOP
        v_due := @extschema@._due_jobs(false, p_limit - v_moved, p_now, v_lanes);
        EXIT WHEN v_due.ids = '{}';
        v_moved := v_moved + @extschema@._promote(v_due.slots, v_due.ids, p_now);
        EXIT WHEN NOT v_due.is_full OR v_moved >= p_limit OR clock_timestamp() > p_now + interval '1 second';
        v_lanes := v_due.lanes;
    END LOOP;
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote_due(integer, timestamptz) IS
    'Internal: makes up to so many due jobs available.';

-- Rows by slot and job id; each costs a look into its own leaf.
CREATE OR REPLACE FUNCTION @extschema@._read_deferred(p_slots integer[], p_ids bigint[])
RETURNS SETOF @extschema@.deferred_jobs
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer;
BEGIN
    FOR v_slot IN SELECT DISTINCT s FROM unnest(p_slots) s LOOP
        RETURN QUERY EXECUTE format('SELECT d.* FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = ANY ($1)', v_slot)
            USING ARRAY(SELECT u.id FROM unnest(p_slots, p_ids) u (slot, id) WHERE u.slot = v_slot);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._read_deferred(integer[], bigint[]) IS 'Internal: deferred jobs by slot and job id.';

CREATE OR REPLACE FUNCTION @extschema@._delete_deferred(p_slots integer[], p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer;
    v_count bigint;
    v_deleted bigint := 0;
BEGIN
    FOR v_slot IN SELECT DISTINCT s FROM unnest(p_slots) s LOOP
        EXECUTE format('DELETE FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = ANY ($1)', v_slot)
            USING ARRAY(SELECT u.id FROM unnest(p_slots, p_ids) u (slot, id) WHERE u.slot = v_slot);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_deleted := v_deleted + v_count;
        PERFORM @extschema@._note_taken(v_slot, p_now);
    END LOOP;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_deferred(integer[], bigint[], timestamptz) IS
    'Internal: deletes deferred jobs by slot and job id; returns how many.';

-- A job that cannot be promoted ends failed with the reason, and the others go on:
-- the batch is halved until it stands alone.
CREATE OR REPLACE FUNCTION @extschema@._promote(p_slots integer[], p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $function$
DECLARE
    v_jobs @extschema@._job[];
    v_message text;
    v_half integer := cardinality(p_ids) / 2;
BEGIN
    BEGIN
        SELECT array_agg(
            ROW(d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease, d.kind, d.args,
                d.ext)::@extschema@._job
            ORDER BY d.run_at, d.job_id)
        INTO v_jobs
        FROM @extschema@._read_deferred(p_slots, p_ids) d;
        -- Those of a strict_fifo lane that a producer holds stay for the next round.
        RETURN (
            SELECT @extschema@._delete_deferred(
                coalesce(array_agg(u.slot), '{}'), coalesce(array_agg(u.id), '{}'), p_now)
            FROM @extschema@._append_ready(v_jobs, true) a
            JOIN unnest(p_slots, p_ids) u (slot, id) ON u.id = a.job_id);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN @extschema@._promote(p_slots[:v_half], p_ids[:v_half], p_now)
             + @extschema@._promote(p_slots[v_half + 1:], p_ids[v_half + 1:], p_now);
    END IF;
    PERFORM @extschema@._append_done(@extschema@._take_from_slot(p_slots[1], p_ids[1]), 'failed', NULL, NULL, NULL,
                                     p_now, 'promotion failed: ' || v_message, NULL);
    RETURN 0;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote(integer[], bigint[], timestamptz) IS
    'Internal: moves locked deferred jobs to their lanes; one that cannot go ends failed.';
