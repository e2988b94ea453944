-- What a slot of a ring consists of.

CREATE OR REPLACE FUNCTION @extschema@._ring_tables(p_ring text)
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring
    WHEN 'queue' THEN ARRAY['ready_entries', 'ready_tombstones', 'ready_claim_attempt_batches', 'done_entries',
                            'receipt_completion_batches']
    WHEN 'claim' THEN ARRAY['lease_claim_batches', 'lease_claim_closures'] END;
COMMENT ON FUNCTION @extschema@._ring_tables(text) IS 'Internal: families of a ring, in lock order.';

CREATE OR REPLACE FUNCTION @extschema@._slot_bytes(p_ring text, p_slot integer)
RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT coalesce(sum(pg_relation_size(('@extschema@.' || t || '_' || p_slot)::regclass)), 0)::bigint
        FROM unnest(@extschema@._ring_tables(p_ring)) t);
COMMENT ON FUNCTION @extschema@._slot_bytes(text, integer) IS 'Internal: bytes in the heaps of a slot; 0 means empty.';
