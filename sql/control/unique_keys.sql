-- Keys that name jobs: the key of a unique job, the digest of a concurrency key, and the claims on unique keys.

-- The published form: BLAKE3 over the kind, then for each part that is given a zero byte and the part; 16 bytes of it.
CREATE OR REPLACE FUNCTION @extschema@._unique_key(p_kind text, p_queue text, p_args jsonb, p_period_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_zero constant bytea := decode('00', 'hex');
    v_data bytea := convert_to(p_kind, 'UTF8');
BEGIN
    IF p_queue IS NOT NULL THEN
        v_data := v_data || c_zero || convert_to(p_queue, 'UTF8');
    END IF;
    IF p_args IS NOT NULL THEN
        v_data := v_data || c_zero || convert_to(@extschema@._canonical_json(p_args), 'UTF8');
    END IF;
    IF p_period_bucket IS NOT NULL THEN
        v_data := v_data || c_zero || (
            SELECT string_agg(substring(int8send(p_period_bucket) FROM i FOR 1), ''::bytea ORDER BY i DESC)
            FROM generate_series(1, 8) i);
    END IF;
    RETURN substring(@extschema@._blake3(v_data) FOR 16);
END
$function$;
COMMENT ON FUNCTION @extschema@._unique_key(text, text, jsonb, bigint) IS
    'Internal: the published key of a unique job; NULL arguments are left out.';

-- SHA-256 over a domain string, a zero byte and the key: no digest for another purpose can be the same.
CREATE OR REPLACE FUNCTION @extschema@._concurrency_digest(p_key text)
RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN sha256(convert_to('awa.concurrency_key.v1', 'UTF8') || decode('00', 'hex') || convert_to(p_key, 'UTF8'));
COMMENT ON FUNCTION @extschema@._concurrency_digest(text) IS 'Internal: the published digest of a concurrency key.';

CREATE OR REPLACE FUNCTION @extschema@._digest_shard(p_digest bytea, p_shards integer)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN (SELECT mod(sum(get_byte(p_digest, i) * 256::numeric ^ (7 - i)), p_shards)::integer
        FROM generate_series(0, 7) i);
COMMENT ON FUNCTION @extschema@._digest_shard(bytea, integer) IS
    'Internal: published shard of a digest: its first eight bytes, the highest first, modulo the number of shards.';
