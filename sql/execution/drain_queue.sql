-- Drain: cancels what waits in a queue, a bounded number at a time. What runs goes on.

-- Waiting jobs of one lane. Lane and mutation lock are held, so that no claim and no cancel runs between look and mark.
CREATE OR REPLACE FUNCTION @extschema@._drain_lane(p_lane integer, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_waiting int8multirange := @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane));
    v_positions bigint[];
    v_position bigint;
    v_job @extschema@._job;
    v_drained bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        EXIT WHEN v_drained >= p_limit;
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        v_positions := (@extschema@._see_leaf(v_slot, v_waiting, (p_limit - v_drained)::integer, true)).positions;
        CONTINUE WHEN v_positions IS NULL;
        FOREACH v_position IN ARRAY v_positions LOOP
            -- One by one: the bodies of a few thousand jobs may not fit into memory.
            v_job := @extschema@._take_waiting(v_slot, v_position);
            PERFORM @extschema@._append_done(
                v_job, 'cancelled', v_slot, v_position, NULL, p_now, p_reason, NULL);
        END LOOP;
        v_drained := v_drained + cardinality(v_positions);
    END LOOP;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_lane(integer, bigint, text, timestamptz) IS
    'Internal: cancels up to so many waiting jobs of a lane.';

-- Rows that others change are theirs.
CREATE OR REPLACE FUNCTION @extschema@._drain_deferred(p_queue text, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
    v_drained bigint := 0;
BEGIN
    FOR v_row IN
        SELECT d.slot::integer, d.job_id FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue
        LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM @extschema@._append_done(@extschema@._take_from_slot(v_row.slot, v_row.job_id), 'cancelled', NULL,
            NULL, NULL, p_now, p_reason, NULL);
        v_drained := v_drained + 1;
    END LOOP;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_deferred(text, bigint, text, timestamptz) IS
    'Internal: cancels up to so many deferred jobs of a queue.';

CREATE OR REPLACE FUNCTION @extschema@._drain_queue(p_queue text, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_drained bigint := 0;
    v_is_busy boolean := false;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_lane IN SELECT w.lane_id FROM @extschema@._waiting_lanes(p_queue) w LOOP
        EXIT WHEN v_drained >= p_limit;
        IF pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id))
           AND pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', v_lane.lane_id)) THEN
            v_drained := v_drained + @extschema@._drain_lane(v_lane.lane_id, p_limit - v_drained, p_reason, p_now);
        ELSE
            v_is_busy := true;
        END IF;
    END LOOP;
    IF v_drained < p_limit THEN
        v_drained := v_drained + @extschema@._drain_deferred(p_queue, p_limit - v_drained, p_reason, p_now);
        v_is_busy := v_is_busy OR EXISTS (SELECT FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue);
    END IF;
    PERFORM @extschema@._note_drain(p_queue, v_drained = 0 AND NOT v_is_busy, p_now);
    IF v_drained = 0 AND v_is_busy THEN
        PERFORM @extschema@._refuse('40001', format('others work on the jobs of queue "%s" just now', p_queue),
            'Try again.');
    END IF;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_queue(text, bigint, text, timestamptz) IS
    'Internal: cancels waiting jobs of a queue; zero only when none was seen.';
