-- Receipts. A receipt (slot, batch, position) is open while its position is in the batch and in none of its closures.

SELECT @extschema@._create_for_slots('claim', $create$
CREATE OR REPLACE FUNCTION @extschema@._read_batch(
    p_slot integer, p_batch bigint,
    OUT ready_slot integer, OUT owner uuid, OUT is_plain boolean, OUT claimed_at timestamptz,
    OUT deadline_at timestamptz, OUT positions int8multirange, OUT closed int8multirange, OUT next_no integer)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $function$
BEGIN
    IF p_slot IS NULL OR p_slot NOT BETWEEN 0 AND @extschema@._slot_count('claim') - 1 THEN
        RETURN;
    END IF;
    -- for each slot, by p_slot:
    SELECT b.ready_slot, b.owner, b.is_plain, b.claimed_at, b.deadline_at, b.positions, x.closed, x.next_no
    INTO ready_slot, owner, is_plain, claimed_at, deadline_at, positions, closed, next_no
    FROM @extschema@.lease_claim_batches_{slot} b,
         LATERAL (SELECT coalesce(range_agg(c.closed), '{}') AS closed, coalesce(max(c.closure_no), 0) + 1 AS next_no
                  FROM @extschema@.lease_claim_closures_{slot} c WHERE c.batch_id = b.batch_id) x
    WHERE b.batch_id = p_batch;
    -- end of slots
END
$function$
$create$);
COMMENT ON FUNCTION @extschema@._read_batch(integer, bigint) IS
    'Internal: a claim batch with the union of its closures; positions is NULL when this snapshot has no such batch.';

CREATE OR REPLACE FUNCTION @extschema@._append_closure(
    p_slot integer, p_batch bigint, p_no integer, p_outcome @extschema@.attempt_outcome,
    p_closed int8multirange, p_reason text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.lease_claim_closures (batch_id, closed_at, closure_no, outcome, slot, closed, reason)
    VALUES (p_batch, p_now, p_no, p_outcome, p_slot, p_closed, p_reason);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_closure(
    integer, bigint, integer, @extschema@.attempt_outcome, int8multirange, text, timestamptz) IS
    'Internal: closes positions of a batch. The number is taken: a closure this snapshot cannot see raises 23505.';

-- Outcome of a closed position; NULL while open or when the evidence is gone.
CREATE OR REPLACE FUNCTION @extschema@._closure_outcome(p_slot integer, p_batch bigint, p_position bigint)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_outcome @extschema@.attempt_outcome;
BEGIN
    EXECUTE format('SELECT c.outcome FROM @extschema@.lease_claim_closures_%s c
                    WHERE c.batch_id = $1 AND c.closed @> $2 LIMIT 1', p_slot)
        INTO v_outcome USING p_batch, p_position;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._closure_outcome(integer, bigint, bigint) IS
    'Internal: how a position of a batch was closed.';

-- Batches of a slot with something open. Two ordered index scans merge, so the cost is one pass over the slot.
CREATE OR REPLACE FUNCTION @extschema@._open_batches(p_slot integer)
RETURNS TABLE (
    batch_id bigint, owner uuid, ready_slot integer, claimed_at timestamptz, deadline_at timestamptz,
    open int8multirange)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_hashagg = off
SET enable_nestloop = off
SET jit = off
AS $function$
BEGIN
    IF NOT @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT b.batch_id, b.owner, b.ready_slot::integer, b.claimed_at, b.deadline_at,
               b.positions - coalesce(c.closed, '{}')
        FROM @extschema@.lease_claim_batches_%1$s b
        LEFT JOIN (SELECT x.batch_id, range_agg(x.closed) AS closed
                   FROM @extschema@.lease_claim_closures_%1$s x
                   GROUP BY x.batch_id) c
            ON c.batch_id = b.batch_id
        WHERE b.positions IS DISTINCT FROM c.closed
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._open_batches(integer) IS 'Internal: batches of a claim slot that have open positions.';

-- The first open batch of a slot, or of those with bodies in one ready slot; it stops there.
CREATE OR REPLACE FUNCTION @extschema@._first_open_batch(
    p_slot integer, p_ready_slot integer,
    OUT batch_id bigint, OUT owner uuid, OUT claimed_at timestamptz, OUT open int8multirange)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
BEGIN
    IF NOT @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN;
    END IF;
    EXECUTE format($query$
        SELECT b.batch_id, b.owner, b.claimed_at, b.positions - c.closed
        FROM @extschema@.lease_claim_batches_%1$s b,
             LATERAL (SELECT coalesce(range_agg(x.closed), '{}') AS closed FROM @extschema@.lease_claim_closures_%1$s x
                      WHERE x.batch_id = b.batch_id) c
        WHERE b.positions <> c.closed AND ($1 IS NULL OR b.ready_slot = $1)
        ORDER BY b.batch_id LIMIT 1
        $query$, p_slot) INTO batch_id, owner, claimed_at, open USING p_ready_slot;
END
$function$;
COMMENT ON FUNCTION @extschema@._first_open_batch(integer, integer) IS
    'Internal: the first batch of a claim slot with open positions.';

-- Which of some positions of a batch have ended, and how: moved ones when their lease has.
CREATE OR REPLACE FUNCTION @extschema@._closed_positions(p_slot integer, p_batch bigint, p_positions int8multirange)
RETURNS TABLE ("position" bigint, outcome @extschema@.attempt_outcome)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    RETURN QUERY EXECUTE format('SELECT p, c.outcome
                                 FROM @extschema@.lease_claim_closures_%s c,
                                      LATERAL unnest(@extschema@._to_list(c.closed * $2)) p
                                 WHERE c.batch_id = $1 AND c.outcome <> ''moved''', p_slot)
        USING p_batch, p_positions;
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        RETURN QUERY SELECT l."position", l.outcome FROM @extschema@.leases l
                     WHERE l.batch_id = p_batch AND p_positions @> l."position" AND l.outcome IS NOT NULL;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._closed_positions(integer, bigint, int8multirange) IS
    'Internal: ended ones among positions of a batch.';
