-- The emission ledger. A lane's newest row is its cursor; claims of a lane follow each other
-- under its lock and the ring only advances, so the first leaf with a row of the lane, from the
-- newest generation down, holds the newest one.

-- VOLATILE on purpose: each of its reads takes a snapshot younger than the one before. In one snapshot a prune or a
-- rotation that commits meanwhile would hide the newest row: TRUNCATE empties a leaf for every snapshot, while the
-- checkpoint and the ledger row show only in later ones.
SELECT @extschema@._create_for_slots('queue', $create$
CREATE OR REPLACE FUNCTION @extschema@._newest_emission(p_lane integer)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_end bigint := @extschema@._lane_base(p_lane + 1);
    v_current integer := @extschema@._ring_cursor('queue') % 64;
    v_found @extschema@.queue_claim_heads;
    v_head @extschema@.queue_claim_heads;
    v_slot integer := v_current;
    v_slots integer[];
BEGIN
    LOOP
        IF @extschema@._leaf_in_use('ready_claim_attempt_batches', v_slot) THEN
            -- for each slot, by v_slot:
            SELECT p_lane, e.claim_no, e.cursor, e.low, e.horizon, e.gaps_old, e.gaps_new, e.held INTO v_found
            FROM @extschema@.ready_claim_attempt_batches_{slot} e
            WHERE e.claim_no > v_base AND e.claim_no < v_end ORDER BY e.claim_no DESC LIMIT 1;
            -- end of slots
            -- pause point: newest
            EXIT WHEN v_found.claim_no IS NOT NULL;
        END IF;
        IF v_slots IS NULL THEN
            v_slots := ARRAY(
                SELECT s.slot
                FROM @extschema@._ring_slots('queue') s
                WHERE s.slot <> v_current
                ORDER BY s.generation DESC);
        END IF;
        EXIT WHEN cardinality(v_slots) = 0;
        v_slot := v_slots[1];
        v_slots := v_slots[2:];
    END LOOP;
    -- Backwards: under a pinned snapshot the row leaves dead versions behind, and the living one is in the last page.
    SELECT h.* INTO v_head
    FROM @extschema@.queue_claim_heads h
    WHERE h.lane_id >= p_lane AND h.lane_id <= p_lane ORDER BY h.lane_id DESC LIMIT 1;
    IF v_found.claim_no > coalesce(v_head.claim_no, 0) THEN
        v_head := v_found;
    END IF;
    RETURN ROW(p_lane, coalesce(v_head.claim_no, v_base), coalesce(v_head.cursor, v_base), coalesce(v_head.low, 0),
        v_head.horizon, coalesce(v_head.gaps_old, '{}'), coalesce(v_head.gaps_new, '{}'),
        coalesce(v_head.held, '{}'))::@extschema@.queue_claim_heads;
END
$function$
$create$);
COMMENT ON FUNCTION @extschema@._newest_emission(integer) IS
    'Internal: the claim cursor of a lane: newest emission row or checkpoint.';

-- The same for many lanes at once, in one statement per slot: maintenance asks for all lanes of a slot. VOLATILE for
-- the same reason, and slots are read in the same order. Who reads an older row takes more for unclaimed than is.
CREATE OR REPLACE FUNCTION @extschema@._newest_emissions(p_lanes integer[])
RETURNS SETOF @extschema@.queue_claim_heads
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer;
    v_missing integer[] := p_lanes;
    v_found @extschema@.queue_claim_heads[] := '{}'::@extschema@.queue_claim_heads[];
    v_more @extschema@.queue_claim_heads[];
BEGIN
    FOR v_slot IN SELECT s.slot FROM @extschema@._ring_slots('queue') s ORDER BY s.generation DESC LOOP
        EXIT WHEN v_missing = '{}';
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_claim_attempt_batches', v_slot);
        EXECUTE format($query$
            SELECT array_agg(ROW(l.lane_id, e.claim_no, e.cursor, e.low, e.horizon, e.gaps_old, e.gaps_new,
                                 e.held)::@extschema@.queue_claim_heads)
            FROM unnest($1) l (lane_id),
                 LATERAL (SELECT x.* FROM @extschema@.ready_claim_attempt_batches_%s x
                          WHERE x.claim_no > @extschema@._lane_base(l.lane_id)
                            AND x.claim_no < @extschema@._lane_base(l.lane_id + 1)
                          ORDER BY x.claim_no DESC LIMIT 1) e
            $query$, v_slot) INTO v_more USING v_missing;
        CONTINUE WHEN v_more IS NULL;
        v_found := v_found || v_more;
        v_missing := ARRAY(SELECT m FROM unnest(v_missing) m EXCEPT SELECT f.lane_id FROM unnest(v_more) f);
    END LOOP;
    RETURN QUERY
    SELECT DISTINCT ON (l.lane_id) l.lane_id, coalesce(e.claim_no, b.base), coalesce(e.cursor, b.base),
           coalesce(e.low, 0), e.horizon, coalesce(e.gaps_old, '{}'), coalesce(e.gaps_new, '{}'),
           coalesce(e.held, '{}')
    FROM unnest(p_lanes) l (lane_id)
    CROSS JOIN LATERAL (SELECT @extschema@._lane_base(l.lane_id) AS base) b
    LEFT JOIN (SELECT f.* FROM unnest(v_found) f
               UNION ALL
               SELECT h.* FROM @extschema@.queue_claim_heads h WHERE h.lane_id = ANY (p_lanes)) e
        ON e.lane_id = l.lane_id
    ORDER BY l.lane_id, e.claim_no DESC NULLS LAST;
END
$function$;
COMMENT ON FUNCTION @extschema@._newest_emissions(integer[]) IS
    'Internal: the claim cursors of some lanes, one row each, by lane.';

-- For counting: the cursor as one snapshot shows it. The caller holds the leaves, so that none is emptied meanwhile.
CREATE OR REPLACE FUNCTION @extschema@._emission_in_snapshot(p_lane integer)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_newest @extschema@.queue_claim_heads;
BEGIN
    SELECT p_lane, e.claim_no, e.cursor, e.low, e.horizon, coalesce(e.gaps_old, '{}'), coalesce(e.gaps_new, '{}'),
           coalesce(e.held, '{}')
    INTO v_newest
    FROM (SELECT b.claim_no, b.cursor, b.low, b.horizon, b.gaps_old, b.gaps_new, b.held
          FROM @extschema@.ready_claim_attempt_batches b
          WHERE b.claim_no > v_base AND b.claim_no < @extschema@._lane_base(p_lane + 1)
          UNION ALL
          SELECT h.claim_no, h.cursor, h.low, h.horizon, h.gaps_old, h.gaps_new, h.held
          FROM @extschema@.queue_claim_heads h WHERE h.lane_id = p_lane) e
    ORDER BY e.claim_no DESC LIMIT 1;
    IF NOT FOUND THEN
        v_newest := ROW(p_lane, v_base, v_base, 0, NULL, '{}', '{}', '{}');
    END IF;
    RETURN v_newest;
END
$function$;
COMMENT ON FUNCTION @extschema@._emission_in_snapshot(integer) IS
    'Internal: the claim cursor of a lane in the snapshot of the calling query.';

CREATE OR REPLACE FUNCTION @extschema@._append_emission(p_slot integer, p_emission @extschema@.queue_claim_heads)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.ready_claim_attempt_batches
        (claim_no, cursor, low, horizon, slot, gaps_old, gaps_new, held)
    VALUES (p_emission.claim_no, p_emission.cursor, p_emission.low, p_emission.horizon, p_slot,
            nullif(p_emission.gaps_old, '{}'), nullif(p_emission.gaps_new, '{}'), nullif(p_emission.held, '{}'));
END
$function$;
COMMENT ON FUNCTION @extschema@._append_emission(integer, @extschema@.queue_claim_heads) IS
    'Internal: appends an emission row to a slot.';

CREATE OR REPLACE FUNCTION @extschema@._is_unclaimed(p_emission @extschema@.queue_claim_heads, p_position bigint)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_position > (p_emission).cursor OR p_position <@ (p_emission).gaps_old OR p_position <@ (p_emission).gaps_new
    OR p_position <@ (p_emission).held;
COMMENT ON FUNCTION @extschema@._is_unclaimed(@extschema@.queue_claim_heads, bigint) IS
    'Internal: whether a position of the lane was not emitted yet.';

-- Everything a lane has not emitted: behind the cursor what is in gaps and held, beyond it all.
CREATE OR REPLACE FUNCTION @extschema@._unclaimed_set(p_emission @extschema@.queue_claim_heads)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (p_emission).gaps_old + (p_emission).gaps_new + (p_emission).held
    + int8multirange(int8range((p_emission).cursor, @extschema@._lane_base((p_emission).lane_id + 1), '()'));
COMMENT ON FUNCTION @extschema@._unclaimed_set(@extschema@.queue_claim_heads) IS
    'Internal: positions of the lane that were not emitted yet.';

-- Part of prune, some time before the leaf is emptied. Only upwards: a later claim may have been checkpointed already.
CREATE OR REPLACE FUNCTION @extschema@._checkpoint_claim_heads(p_slot integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_rows bigint;
BEGIN
    EXECUTE format('INSERT INTO @extschema@.queue_claim_heads AS h
            (lane_id, claim_no, cursor, low, horizon, gaps_old, gaps_new, held)
        SELECT DISTINCT ON (@extschema@._lane_of(e.claim_no)) @extschema@._lane_of(e.claim_no),
               e.claim_no, e.cursor, e.low, e.horizon, e.gaps_old, e.gaps_new, e.held
        FROM @extschema@.ready_claim_attempt_batches_%s e
        ORDER BY @extschema@._lane_of(e.claim_no), e.claim_no DESC
        ON CONFLICT (lane_id) DO UPDATE
        SET (claim_no, cursor, low, horizon, gaps_old, gaps_new, held)
            = (excluded.claim_no, excluded.cursor, excluded.low, excluded.horizon,
               excluded.gaps_old, excluded.gaps_new, excluded.held)
        WHERE excluded.claim_no > h.claim_no', p_slot);
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END
$function$;
COMMENT ON FUNCTION @extschema@._checkpoint_claim_heads(integer) IS
    'Internal: keeps the newest emission row of each lane of a slot that will be pruned; returns how many are new.';
