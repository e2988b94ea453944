-- Moves due jobs from all buckets into the ready ring, oldest first. Rows that others change are skipped; they are
-- theirs. They go in portions, because a portion is held in memory, and what does not fit into a second waits for the
-- next round. The far leaf is left to refill.
CREATE OR REPLACE FUNCTION @extschema@._promote_due(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
DECLARE
    c_portion constant bigint := 16777216;
    -- Each lane takes locks to the end, a new one several: more of them at once would fill the lock table.
    c_lanes constant integer := 256;
    v_row record;
    v_slots integer[];
    v_ids bigint[];
    v_bytes bigint;
    v_lanes text[] := '{}'::text[];
    v_held text[] := '{}'::text[];
    v_left text[];
    v_moved bigint := 0;
BEGIN
    LOOP
        v_slots := '{}'::integer[];
        v_ids := '{}'::bigint[];
        v_bytes := 0;
        FOR v_row IN
            SELECT d.slot, d.job_id, @extschema@._args_bytes(d.args) AS bytes,
                   d.priority || '/' || d.shard || '/' || d.queue AS lane
            FROM @extschema@.deferred_jobs d
            WHERE d.slot < 16 AND d.run_at <= p_now AND d.queue <> ALL (v_held)
                  AND NOT coalesce(d.ext -> 'unique' ? 'waiting', false)
            ORDER BY d.run_at, d.job_id
            LIMIT p_limit - v_moved
            FOR UPDATE SKIP LOCKED
        LOOP
            IF v_row.lane <> ALL (v_lanes) THEN
                EXIT WHEN cardinality(v_lanes) = c_lanes;
                v_lanes := v_lanes || v_row.lane;
            END IF;
            v_slots := v_slots || v_row.slot::integer;
            v_ids := v_ids || v_row.job_id;
            v_bytes := v_bytes + v_row.bytes;
            EXIT WHEN v_bytes > c_portion;
        END LOOP;
        EXIT WHEN cardinality(v_ids) = 0;
        v_moved := v_moved + @extschema@._promote(v_slots, v_ids, p_now);
        -- What is still there belongs to strict_fifo lanes that producers hold: the others must not wait behind it.
        v_left := ARRAY(SELECT DISTINCT d.queue FROM @extschema@._read_deferred(v_slots, v_ids) d);
        EXIT WHEN v_left = '{}' AND (v_bytes <= c_portion OR clock_timestamp() > p_now + interval '1 second');
        v_held := v_held || v_left;
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
