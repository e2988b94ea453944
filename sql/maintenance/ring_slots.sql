-- What a slot of a ring consists of.

CREATE OR REPLACE FUNCTION @extschema@._ring_tables(p_ring text)
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring
    WHEN 'queue' THEN ARRAY['ready_entries', 'ready_tombstones', 'ready_claim_attempt_batches', 'done_entries',
                            'receipt_completion_batches']
    WHEN 'claim' THEN ARRAY['lease_claim_batches', 'lease_claim_closures']
    WHEN 'deferred' THEN ARRAY['deferred_jobs'] END;
COMMENT ON FUNCTION @extschema@._ring_tables(text) IS 'Internal: families of a ring, in lock order.';

CREATE OR REPLACE FUNCTION @extschema@._slot_is_empty(p_ring text, p_slot integer)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN NOT EXISTS (SELECT FROM unnest(@extschema@._ring_tables(p_ring)) t WHERE @extschema@._leaf_in_use(t, p_slot));
COMMENT ON FUNCTION @extschema@._slot_is_empty(text, integer) IS 'Internal: whether no leaf of a slot holds blocks.';

-- With indexes and oversized values; an empty slot counts as 0, although its indexes have a first page.
CREATE OR REPLACE FUNCTION @extschema@._slot_bytes(p_ring text, p_slot integer)
RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT CASE WHEN @extschema@._slot_is_empty(p_ring, p_slot) THEN 0
                    ELSE sum(pg_total_relation_size(('@extschema@.' || t || '_' || p_slot)::regclass)) END::bigint
        FROM unnest(@extschema@._ring_tables(p_ring)) t);
COMMENT ON FUNCTION @extschema@._slot_bytes(text, integer) IS
    'Internal: bytes of a slot, indexes and oversized values included.';
