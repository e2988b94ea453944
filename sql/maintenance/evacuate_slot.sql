-- Evacuation: when empty slots run short, and else after a wrap of the ring, what keeps an old slot alive moves out of
-- the way.
-- Waiting jobs (a paused queue, a queue without workers, a starved priority) move to the current slot under their
-- position and id. The copy is an insert like any other, and the old row gets a tombstone in the same transaction. It
-- holds the lane and the mutation lock, so that no claim and no cancel runs between the two; a lane in use waits for
-- the next tick. Attempts that run for long move into leases, under the lock of their batch.

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
    v_positions := (@extschema@._see_leaf(
        p_slot, @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane)), p_limit::integer, true)).positions;
    -- pause point: evacuate
    PERFORM @extschema@._move_ready(v_positions, p_slot, v_target);
    RETURN coalesce(cardinality(v_positions), 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_lane(integer, integer, bigint) IS
    'Internal: moves up to so many waiting jobs of a lane from a slot to the current one.';

-- About how much waits in a slot, counted up to p_most jobs.
CREATE OR REPLACE FUNCTION @extschema@._waiting_in_slot(
    p_slot integer, p_lanes integer[], p_most bigint, OUT row_count bigint, OUT bytes bigint)
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
    -- What a row takes beside its args and options, index included.
    c_row constant integer := 80;
BEGIN
    EXECUTE format($query$
        SELECT count(*), coalesce(sum(w.bytes), 0)
        FROM (SELECT $3 + pg_column_size(r.args) + coalesce(pg_column_size(r.ext), 0) AS bytes
              FROM unnest($1) e, LATERAL unnest(@extschema@._unclaimed_set(e)) g, @extschema@.ready_entries_%1$s r
              WHERE r."position" >= lower(g) AND r."position" < upper(g)
                AND NOT EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
              LIMIT $2) w
        $query$, p_slot) INTO row_count, bytes
        USING ARRAY(SELECT n FROM @extschema@._newest_emissions(p_lanes) n), p_most, c_row;
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_in_slot(integer, integer[], bigint) IS
    'Internal: waiting jobs of some lanes in a slot and about how many bytes they take.';

-- Moving is worth its while only where it frees more than it writes: else waiting jobs that fill the ring would go
-- round in it for ever. A small slot goes in any case, so that few jobs do not keep many slots.
CREATE OR REPLACE FUNCTION @extschema@._too_much_waits(p_slot integer, p_lanes integer[])
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_small constant bigint := 262144;
    v_most bigint := @extschema@._setting('evacuate_max_rows');
    v_waiting record := @extschema@._waiting_in_slot(p_slot, p_lanes, v_most + 1);
    v_bytes bigint := @extschema@._slot_bytes('queue', p_slot);
BEGIN
    RETURN v_waiting.row_count > v_most
        OR (v_waiting.bytes * 2 > v_bytes
            AND v_bytes > greatest(c_small, least(@extschema@._setting('queue_rotate_bytes') / 2,
                                                  @extschema@._setting('ring_size_cap_bytes') / 32)));
END
$function$;
COMMENT ON FUNCTION @extschema@._too_much_waits(integer, integer[]) IS
    'Internal: whether moving the waiting jobs of a slot costs more than the slot is worth.';

-- A lane in use waits for the next round, and so do those beyond a few hundred: each takes two locks to the end.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_lanes(
    p_slot integer, p_limit bigint, OUT outcome text, OUT moved bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_lanes constant integer := 256;
    v_lane integer;
    v_lanes integer[] := ARRAY(SELECT l FROM @extschema@._waiting_lanes_in_slot(p_slot, NULL) l);
BEGIN
    moved := 0;
    IF @extschema@._too_much_waits(p_slot, v_lanes) THEN
        outcome := 'too_many';
        RETURN;
    END IF;
    FOREACH v_lane IN ARRAY v_lanes[:c_lanes] LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane))
            OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', v_lane));
        moved := moved + @extschema@._evacuate_lane(p_slot, v_lane, p_limit - moved);
        EXIT WHEN moved >= p_limit;
    END LOOP;
    outcome := CASE WHEN moved > 0 THEN 'moved' ELSE 'contended' END;
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_lanes(integer, bigint) IS
    'Internal: moves waiting jobs out of a slot: moved, too_many or contended.';

-- Open attempts whose receipt (claim ring) or body (queue ring) lies in a slot become leases. Young ones are about to
-- end by themselves, and a lease costs more than a receipt.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_attempts(
    p_ring text, p_slot integer, p_limit bigint, p_now timestamptz, OUT outcome text, OUT moved bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_open record;
    v_before timestamptz := p_now - @extschema@._setting_interval('evacuate_attempt_seconds');
BEGIN
    moved := 0;
    outcome := 'young';
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN p_ring = 'claim' AND v_claim_slot <> p_slot;
        FOR v_open IN SELECT o.batch_id FROM @extschema@._open_batches(v_claim_slot) o
                      WHERE (p_ring = 'claim' OR o.ready_slot = p_slot)
                        -- Nobody knows the age of one that was claimed before the clock was set back.
                        AND (o.claimed_at <= v_before OR o.claimed_at > p_now)
                      ORDER BY o.batch_id LOOP
            outcome := 'contended';
            EXIT WHEN moved >= p_limit;
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_open.batch_id));
            -- pause point: lease
            moved := moved + @extschema@._lease_receipts(v_claim_slot, v_open.batch_id, p_limit - moved, p_now);
        END LOOP;
    END LOOP;
    IF moved > 0 THEN
        outcome := 'moved';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_attempts(text, integer, bigint, timestamptz) IS
    'Internal: turns attempts that keep a slot into leases: moved, young or contended.';

CREATE OR REPLACE FUNCTION @extschema@._slots_are_short(p_ring text)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT count(*) FILTER (WHERE @extschema@._slot_is_empty(p_ring, s)) * 4 <= @extschema@._slot_count(p_ring)
            OR (p_ring = 'queue'
                AND sum(@extschema@._slot_bytes(p_ring, s)) > @extschema@._setting('ring_size_cap_bytes'))
        FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s);
COMMENT ON FUNCTION @extschema@._slots_are_short(text) IS
    'Internal: whether at most a quarter of the slots is empty, or the queue ring is above its cap.';

-- One slot a step: the oldest one that can be freed is what the ring waits for.
CREATE OR REPLACE FUNCTION @extschema@._evacuate(
    p_limit bigint, p_now timestamptz, OUT outcome text, OUT moved bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring text;
    v_before bigint;
    v_slot integer;
    v_reason text;
    v_left integer := 0;
    -- In time for prune, which releases a slot so long before its history may go.
    v_soon timestamptz := p_now + @extschema@._setting_interval('dump_lock_seconds');
BEGIN
    PERFORM @extschema@._require_read_committed();
    moved := 0;
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        -- With room to spare a slot may be kept for one wrap of the ring.
        v_before := CASE WHEN @extschema@._slots_are_short(v_ring) THEN @extschema@._ring_cursor(v_ring) / 64
                         ELSE @extschema@._ring_cursor(v_ring) / 64 - @extschema@._slot_count(v_ring) + 1 END;
        FOR v_slot IN SELECT r.slot FROM @extschema@._ring_slots(v_ring) r
                      WHERE r.generation < v_before
                        AND NOT @extschema@._slot_is_empty(v_ring, r.slot)
                      ORDER BY r.generation LOOP
            -- What history keeps anyway need not be looked at. Nor need all that is left alone be counted again each
            -- round: after two of these the others take turns.
            CONTINUE WHEN (v_left >= 2 AND random() < 0.9) OR @extschema@._slot_is_retained(v_ring, v_slot, v_soon);
            v_reason := @extschema@._slot_blocker(v_ring, v_slot) ->> 'reason';
            IF v_reason = 'unclaimed' THEN
                SELECT e.outcome, e.moved INTO outcome, moved FROM @extschema@._evacuate_lanes(v_slot, p_limit) e;
            ELSIF v_reason = 'receipts' THEN
                SELECT e.outcome, e.moved INTO outcome, moved
                FROM @extschema@._evacuate_attempts(v_ring, v_slot, p_limit, p_now) e;
            ELSE
                CONTINUE;
            END IF;
            detail := jsonb_build_object('ring', v_ring, 'slot', v_slot);
            IF moved > 0 THEN
                RETURN;
            ELSIF outcome = 'too_many' THEN
                v_left := v_left + 1;
            END IF;
        END LOOP;
    END LOOP;
    outcome := coalesce(outcome, 'nothing');
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate(bigint, timestamptz) IS
    'Internal: moves up to so many jobs out of the oldest slot that they keep: moved, nothing, too_many, young or '
    'contended.';
