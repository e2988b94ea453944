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

-- What a job carries in ext: unique = {key, states (a mask, left out when it is the default), ends (end of the period),
-- waiting (deferred without the key: promotion settles it)}.

CREATE OR REPLACE FUNCTION @extschema@._state_bit(p_state @extschema@.job_state)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_state
    WHEN 'scheduled' THEN 1
    WHEN 'available' THEN 2
    WHEN 'running' THEN 4
    WHEN 'completed' THEN 8
    WHEN 'retryable' THEN 16
    WHEN 'failed' THEN 32
    WHEN 'cancelled' THEN 64
    WHEN 'waiting_external' THEN 128 END;
COMMENT ON FUNCTION @extschema@._state_bit(@extschema@.job_state) IS 'Internal: bit of a state in a mask of states.';

CREATE OR REPLACE FUNCTION @extschema@._unique_states(p_unique jsonb)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce((p_unique ->> 'states')::integer, 31);
COMMENT ON FUNCTION @extschema@._unique_states(jsonb) IS 'Internal: mask of states in which a job holds its key.';

CREATE OR REPLACE FUNCTION @extschema@._key_counts_in(p_unique jsonb, p_state @extschema@.job_state)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._unique_states(p_unique) & @extschema@._state_bit(p_state) <> 0;
COMMENT ON FUNCTION @extschema@._key_counts_in(jsonb, @extschema@.job_state) IS
    'Internal: whether a job holds its key in a state.';

-- A job that is deferred in a state outside its mask, and will have to hold its key when it is available.
CREATE OR REPLACE FUNCTION @extschema@._deferred_ext(p_ext jsonb, p_state @extschema@.job_state)
RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN p_ext ? 'unique' AND NOT @extschema@._key_counts_in(p_ext -> 'unique', p_state)
         AND @extschema@._key_counts_in(p_ext -> 'unique', 'available')
    THEN jsonb_set(p_ext, '{unique,waiting}', 'true')
    ELSE p_ext END;
COMMENT ON FUNCTION @extschema@._deferred_ext(jsonb, @extschema@.job_state) IS
    'Internal: ext of a job that is deferred, marked when promotion must take its key.';

CREATE OR REPLACE FUNCTION @extschema@._claim_of_key(p_key bytea)
RETURNS @extschema@.job_unique_claims
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_claim @extschema@.job_unique_claims;
BEGIN
    SELECT c.* INTO v_claim FROM @extschema@.job_unique_claims c WHERE c.key = p_key;
    RETURN v_claim;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_of_key(bytea) IS
    'Internal: the claim on a key, whether its job holds it or not; VOLATILE for a fresh snapshot.';

CREATE OR REPLACE FUNCTION @extschema@._lock_key_claim(p_claim @extschema@.job_unique_claims)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    PERFORM FROM @extschema@.job_unique_claims c
    WHERE c.key = p_claim.key AND c.job_id = p_claim.job_id AND c.taken_at = p_claim.taken_at
    FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_key_claim(@extschema@.job_unique_claims) IS
    'Internal: locks a claim if it is still the one that was looked at and nobody is changing it.';

-- Waits for a transaction that is inserting the same key.
CREATE OR REPLACE FUNCTION @extschema@._insert_key_claim(
    p_key bytea, p_job_id bigint, p_unique jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.job_unique_claims AS c (key, job_id, taken_at, period_ends_at, states)
    VALUES (p_key, p_job_id, p_now, (p_unique ->> 'ends')::timestamptz, @extschema@._unique_states(p_unique))
    ON CONFLICT (key) DO NOTHING;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_key_claim(bytea, bigint, jsonb, timestamptz) IS
    'Internal: claims a key that has no claim; false when it has one.';

CREATE OR REPLACE FUNCTION @extschema@._replace_key_claim(
    p_old @extschema@.job_unique_claims, p_job_id bigint, p_unique jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    UPDATE @extschema@.job_unique_claims c
    SET job_id = p_job_id, taken_at = greatest(p_now, c.taken_at + interval '1 microsecond'),
        period_ends_at = (p_unique ->> 'ends')::timestamptz, expires_at = NULL, ended = NULL,
        states = @extschema@._unique_states(p_unique)
    WHERE c.key = p_old.key AND c.job_id = p_old.job_id AND c.taken_at = p_old.taken_at
          AND c.expires_at IS NOT DISTINCT FROM p_old.expires_at;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._replace_key_claim(@extschema@.job_unique_claims, bigint, jsonb, timestamptz) IS
    'Internal: hands a claim to a job if it is still the claim that was looked at.';

CREATE OR REPLACE FUNCTION @extschema@._delete_claim(p_key bytea)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    DELETE FROM @extschema@.job_unique_claims c WHERE c.key = p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_claim(bytea) IS 'Internal: deletes a claim that the caller has locked.';

CREATE OR REPLACE FUNCTION @extschema@._write_end(
    p_key bytea, p_state @extschema@.job_state, p_expires_at timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    UPDATE @extschema@.job_unique_claims c SET ended = p_state, expires_at = p_expires_at WHERE c.key = p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._write_end(bytea, @extschema@.job_state, timestamptz) IS
    'Internal: writes the end of its job into a claim that the caller has locked.';

-- Part of a transition to a terminal state. Nobody waits: who has the row locked saw that the job does not hold it and
-- is taking it over. If that is rolled back, the row stays without its end, and its readers judge it by the job.
CREATE OR REPLACE FUNCTION @extschema@._end_key(
    p_job @extschema@._job, p_state @extschema@.job_state, p_retention text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_key bytea := decode(p_job.ext -> 'unique' ->> 'key', 'hex');
    v_period_ends_at timestamptz;
BEGIN
    SELECT c.period_ends_at INTO v_period_ends_at
    FROM @extschema@.job_unique_claims c
    WHERE c.key = v_key AND c.job_id = p_job.job_id
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    ELSIF @extschema@._key_counts_in(p_job.ext -> 'unique', p_state) THEN
        PERFORM @extschema@._write_end(v_key, p_state,
            coalesce(v_period_ends_at, p_now + @extschema@._setting_interval(p_retention)));
    ELSE
        PERFORM @extschema@._delete_claim(v_key);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_key(@extschema@._job, @extschema@.job_state, text, timestamptz) IS
    'Internal: a job with a unique key ends: its claim gets an expiry, or goes when the state is not in its mask.';

CREATE OR REPLACE FUNCTION @extschema@._drop_key(p_job_id bigint, p_unique jsonb)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    DELETE FROM @extschema@.job_unique_claims c
    WHERE c.key = decode(p_unique ->> 'key', 'hex') AND c.job_id = p_job_id
$function$;
COMMENT ON FUNCTION @extschema@._drop_key(bigint, jsonb) IS 'Internal: a job is gone for good, and its claim with it.';

-- Before the history of jobs is forgotten: claims without an end get it. A plain completion does not touch the claim,
-- and another end may have found it locked.
CREATE OR REPLACE FUNCTION @extschema@._end_keys(
    p_keys bytea[], p_job_ids bigint[], p_states @extschema@.job_state[], p_expires_at timestamptz[], p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    WITH found AS MATERIALIZED (
        SELECT c.key, x.state, c.states & @extschema@._state_bit(x.state) <> 0 AS counts,
               coalesce(c.period_ends_at, x.expires_at) AS expires_at
        FROM unnest(p_keys, p_job_ids, p_states, p_expires_at) x (key, job_id, state, expires_at)
        JOIN @extschema@.job_unique_claims c ON c.key = x.key AND c.job_id = x.job_id
        WHERE c.ended IS NULL
        FOR UPDATE OF c SKIP LOCKED),
    deleted AS (
        DELETE FROM @extschema@.job_unique_claims c
        USING found f
        WHERE c.key = f.key AND NOT (f.counts AND f.expires_at > p_now))
    UPDATE @extschema@.job_unique_claims c
    SET ended = f.state, expires_at = f.expires_at
    FROM found f
    WHERE c.key = f.key AND f.counts AND f.expires_at > p_now;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_keys(
    bytea[], bigint[], @extschema@.job_state[], timestamptz[], timestamptz) IS
    'Internal: gives the claims of ended jobs their end and expiry (that of the period goes first), or deletes them.';

CREATE OR REPLACE FUNCTION @extschema@._expire_keys(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.job_unique_claims d
    WHERE d.key IN (SELECT c.key FROM @extschema@.job_unique_claims c WHERE c.expires_at <= p_now
                    ORDER BY c.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_keys(integer, timestamptz) IS 'Internal: deletes expired claims, oldest first.';

-- Keys are digests, so a random place to start is a random sample.
CREATE OR REPLACE FUNCTION @extschema@._sample_claims(p_limit integer)
RETURNS SETOF @extschema@.job_unique_claims
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    SELECT c.* FROM @extschema@.job_unique_claims c
    WHERE c.key >= (SELECT uuid_send(gen_random_uuid())) AND c.ended IS NULL
    ORDER BY c.key LIMIT p_limit
$function$;
COMMENT ON FUNCTION @extschema@._sample_claims(integer) IS
    'Internal: some claims whose jobs are not known to have ended.';
