-- Evacuation: when empty slots run short, the waiting jobs that keep an old slot alive (a paused queue, a queue without
-- workers, a starved priority) move to the current slot under their position and id. The copy is an insert like any
-- other, and the old row gets a tombstone in the same transaction. It holds the lane and the mutation lock, so that no
-- claim and no cancel runs between the two; a lane in use waits for the next tick.

-- Moves waiting rows of one lane out of a slot; the locks of the lane are held.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_lane(p_slot integer, p_lane integer, p_limit bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_target integer;
    v_positions bigint[];
BEGIN
    PERFORM pg_current_xact_id();
    v_target := @extschema@._ring_cursor('queue') % 64;
    -- pause point: evacuate
    v_positions := (@extschema@._see_leaf(
        p_slot, @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane)), p_limit::integer, true)).positions;
    PERFORM @extschema@._move_ready(v_positions, p_slot, v_target);
    RETURN coalesce(cardinality(v_positions), 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_lane(integer, integer, bigint) IS
    'Internal: moves up to so many waiting jobs of a lane from a slot to the current one.';

CREATE OR REPLACE FUNCTION @extschema@._slots_are_short()
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT count(*) FILTER (WHERE @extschema@._slot_is_empty('queue', s)) * 4 <= @extschema@._slot_count('queue')
            OR sum(@extschema@._slot_bytes('queue', s)) > @extschema@._setting('ring_size_cap_bytes')
        FROM generate_series(0, @extschema@._slot_count('queue') - 1) s);
COMMENT ON FUNCTION @extschema@._slots_are_short() IS
    'Internal: whether at most a quarter of the slots is empty, or the ring is above its cap.';

CREATE OR REPLACE FUNCTION @extschema@._evacuate(p_limit bigint, OUT outcome text, OUT moved bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_lane integer;
    v_most bigint := @extschema@._setting('evacuate_max_rows');
    v_left bigint;
BEGIN
    PERFORM @extschema@._require_read_committed();
    outcome := 'nothing';
    moved := 0;
    IF NOT @extschema@._slots_are_short() THEN
        RETURN;
    END IF;
    FOR v_slot IN SELECT r.slot FROM @extschema@._ring_slots('queue') r
                  WHERE r.slot <> @extschema@._ring_cursor('queue') % 64
                    AND NOT @extschema@._slot_is_empty('queue', r.slot)
                  ORDER BY r.generation LOOP
        CONTINUE WHEN @extschema@._slot_blocker('queue', v_slot) ->> 'reason' IS DISTINCT FROM 'unclaimed';
        detail := jsonb_build_object('slot', v_slot);
        v_left := v_most + 1;
        FOR v_lane IN SELECT l FROM @extschema@._lanes_in_slot(v_slot) l LOOP
            v_left := v_left - @extschema@._count_waiting(v_slot, v_lane, v_left);
            EXIT WHEN v_left <= 0;
        END LOOP;
        IF v_left <= 0 THEN
            outcome := 'too_many';
            CONTINUE;
        END IF;
        FOR v_lane IN SELECT l FROM @extschema@._lanes_in_slot(v_slot) l LOOP
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane))
                OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', v_lane));
            moved := moved + @extschema@._evacuate_lane(v_slot, v_lane, p_limit - moved);
            EXIT WHEN moved >= p_limit;
        END LOOP;
        -- One slot a step: the oldest one is what the ring waits for.
        outcome := CASE WHEN moved > 0 THEN 'moved' ELSE 'contended' END;
        EXIT WHEN moved > 0;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate(bigint) IS
    'Internal: moves up to so many waiting jobs out of the oldest slot that they keep: moved, nothing, too_many or '
    'contended.';
