-- Look-ups by job id and position. A job may have several ready rows (one per life); the live one has no tombstone.

CREATE OR REPLACE FUNCTION @extschema@._find_ready(p_job_id bigint)
RETURNS TABLE (slot integer, "position" bigint, run_at timestamptz, kind text, args jsonb, ext jsonb, is_dead boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        RETURN QUERY EXECUTE format($query$
            SELECT %1$s, r."position", r.run_at, r.kind, r.args, r.ext,
                   EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            FROM @extschema@.ready_entries_%1$s r WHERE r."position" = $1 AND r.job_id IS NULL
            UNION ALL
            SELECT %1$s, r."position", r.run_at, r.kind, r.args, r.ext,
                   EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            FROM @extschema@.ready_entries_%1$s r WHERE r.job_id = $1 AND r.job_id IS NOT NULL
            $query$, v_slot) USING p_job_id;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_ready(bigint) IS 'Internal: all ready rows of a job, dead ones marked.';

-- Rows of one slot at the given positions, as jobs of their lane.
CREATE OR REPLACE FUNCTION @extschema@._read_ready(p_slot integer, p_positions bigint[])
RETURNS TABLE ("position" bigint, job @extschema@._job)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
BEGIN
    -- A batch that is unknown has no slot, and then no bodies.
    IF p_slot IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT r."position", ROW(coalesce(r.job_id, r."position"), l.queue, l.priority, l.shard, r.run_at,
            coalesce((r.ext ->> 'attempt')::integer, 0), coalesce((r.ext ->> 'run_lease')::bigint, 0), r.kind, r.args,
            nullif(r.ext - '{attempt,run_lease}'::text[], '{}'))::@extschema@._job
        FROM unnest($1) p, @extschema@.ready_entries_%s r, @extschema@.queue_lanes l
        WHERE r."position" = p AND l.lane_id = @extschema@._lane_of(p)
        $query$, p_slot) USING p_positions;
END
$function$;
COMMENT ON FUNCTION @extschema@._read_ready(integer, bigint[]) IS 'Internal: bodies at positions of a slot.';

CREATE OR REPLACE FUNCTION @extschema@._append_tombstone(p_slot integer, p_position bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.ready_tombstones ("position", slot) VALUES (p_position, p_slot);
    PERFORM @extschema@._note_released('queue', p_slot, NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_tombstone(integer, bigint) IS 'Internal: marks an unclaimed ready row dead.';
