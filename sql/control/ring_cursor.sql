-- Ring cursors and ledgers. The cursor is a sequence moved only by setval, so every snapshot reads the present slot.
-- A ring turns in two transactions: plan appends the ledger row, publish moves the cursor to a committed row.

CREATE OR REPLACE FUNCTION @extschema@._ring_cursor(p_ring text)
RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT s.last_value FROM @extschema@.queue_ring s);
    END IF;
    RETURN (SELECT s.last_value FROM @extschema@.claim_ring s);
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_cursor(text) IS
    'Internal: generation * 64 + slot of the current slot, whatever the snapshot.';

-- Newest generation of each slot that was ever current.
CREATE OR REPLACE FUNCTION @extschema@._ring_slots(p_ring text)
RETURNS TABLE (slot integer, generation bigint, rotated_at timestamptz)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN QUERY
        SELECT s.slot, coalesce(r.generation, 0), r.rotated_at
        FROM generate_series(0, @extschema@._slot_count('queue') - 1) s (slot)
        LEFT JOIN LATERAL (SELECT x.generation, x.rotated_at FROM @extschema@.queue_ring_rotations x
                           WHERE x.slot = s.slot ORDER BY x.generation DESC LIMIT 1) r ON true
        WHERE r.generation IS NOT NULL OR s.slot = 0;
    ELSE
        RETURN QUERY
        SELECT s.slot, coalesce(r.generation, 0), r.rotated_at
        FROM generate_series(0, @extschema@._slot_count('claim') - 1) s (slot)
        LEFT JOIN LATERAL (SELECT x.generation, x.rotated_at FROM @extschema@.claim_ring_rotations x
                           WHERE x.slot = s.slot ORDER BY x.generation DESC LIMIT 1) r ON true
        WHERE r.generation IS NOT NULL OR s.slot = 0;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_slots(text) IS
    'Internal: newest generation of every slot in use, and when it became current.';

-- Slots whose newest generation is p_low or later. Claims ask for them whenever more than the current slot matters,
-- so a few generations are read from the end of the ledger; only for a lane far behind is every slot probed.
CREATE OR REPLACE FUNCTION @extschema@._queue_slots_since(p_low bigint)
RETURNS TABLE (slot integer, generation bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    IF @extschema@._ring_cursor('queue') / 64 - p_low > @extschema@._slot_count('queue') THEN
        RETURN QUERY SELECT s.slot, s.generation FROM @extschema@._ring_slots('queue') s WHERE s.generation >= p_low;
    ELSE
        RETURN QUERY
        SELECT r.slot, max(r.generation)
        FROM @extschema@.queue_ring_rotations r
        WHERE r.generation >= p_low
        GROUP BY r.slot
        UNION ALL
        -- Generation 0 is slot 0 and has no row.
        SELECT 0, 0::bigint
        WHERE p_low <= 0 AND NOT EXISTS (SELECT FROM @extschema@.queue_ring_rotations r WHERE r.slot = 0);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_slots_since(bigint) IS
    'Internal: queue slots that became current in a generation or later, with their newest one.';

-- When a slot stopped being current; NULL for the current one and for one that never was.
CREATE OR REPLACE FUNCTION @extschema@._slot_left_at(p_ring text, p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_generation bigint := (SELECT s.generation FROM @extschema@._ring_slots(p_ring) s WHERE s.slot = p_slot);
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT r.rotated_at FROM @extschema@.queue_ring_rotations r WHERE r.generation = v_generation + 1);
    END IF;
    RETURN (SELECT r.rotated_at FROM @extschema@.claim_ring_rotations r WHERE r.generation = v_generation + 1);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_left_at(text, integer) IS 'Internal: when a slot stopped being current.';

CREATE OR REPLACE FUNCTION @extschema@._plan_rotation(
    p_ring text, p_slot integer, p_generation bigint, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        INSERT INTO @extschema@.queue_ring_rotations (generation, slot, rotated_at)
        VALUES (p_generation, p_slot, p_now);
    ELSE
        INSERT INTO @extschema@.claim_ring_rotations (generation, slot, rotated_at)
        VALUES (p_generation, p_slot, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._plan_rotation(text, integer, bigint, timestamptz) IS
    'Internal: appends the ledger row of the next generation.';

-- Slot planned for the generation after the current one; NULL when none is.
CREATE OR REPLACE FUNCTION @extschema@._planned_slot(p_ring text, p_generation bigint)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT r.slot FROM @extschema@.queue_ring_rotations r WHERE r.generation = p_generation + 1);
    END IF;
    RETURN (SELECT r.slot FROM @extschema@.claim_ring_rotations r WHERE r.generation = p_generation + 1);
END
$function$;
COMMENT ON FUNCTION @extschema@._planned_slot(text, bigint) IS 'Internal: slot of the planned next generation, if any.';

CREATE OR REPLACE FUNCTION @extschema@._set_ring_cursor(p_ring text, p_generation bigint, p_slot integer)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM setval(CASE p_ring WHEN 'queue' THEN '@extschema@.queue_ring' ELSE '@extschema@.claim_ring' END::regclass,
                   p_generation * 64 + p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._set_ring_cursor(text, bigint, integer) IS
    'Internal: moves a ring cursor to a ledger row that is committed.';

-- Whether a leaf holds blocks. Reads no row, and holds no lock on the leaf afterwards. VOLATILE like what it calls, or
-- it would not be inlined.
CREATE OR REPLACE FUNCTION @extschema@._leaf_in_use(p_table text, p_slot integer)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN pg_relation_size(('@extschema@.' || p_table || '_' || p_slot)::regclass) > 0;
COMMENT ON FUNCTION @extschema@._leaf_in_use(text, integer) IS 'Internal: whether a leaf of a ring table holds blocks.';
