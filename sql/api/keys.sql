-- Keys: what producers can compute themselves, computed here.

CREATE OR REPLACE FUNCTION @extschema@.unique_key(kind text, queue text, args jsonb, period_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_kind text COLLATE "default" := kind;
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('kind', v_kind);
    IF v_queue IS NOT NULL THEN
        PERFORM @extschema@._check_name('queue', v_queue);
    END IF;
    IF NOT @extschema@._is_small(args) AND @extschema@._is_too_deep(args) THEN
        PERFORM @extschema@._refuse('23514', 'field "args" is nested more than 256 levels deep',
            'The limit is 256 levels.');
    END IF;
    RETURN @extschema@._unique_key(v_kind, v_queue, args, period_bucket);
END
$function$;
COMMENT ON FUNCTION @extschema@.unique_key(text, text, jsonb, bigint) IS
'Key of a unique job: the first 16 bytes of BLAKE3 over the kind and the arguments that are not NULL. period_bucket:
floor(seconds since 1970 / length of the period). Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.concurrency_digest(key text)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "key" must not be NULL', 'Give a text.');
    END IF;
    RETURN @extschema@._concurrency_digest(key);
END
$function$;
COMMENT ON FUNCTION @extschema@.concurrency_digest(text) IS
'Digest of a concurrency key: SHA-256 over awa.concurrency_key.v1, a zero byte and the key, 32 bytes. Jobs without an
ordering key will go to the shard that its first eight bytes name, the highest first, modulo enqueue_shards.
Errors: 22023.';

CREATE OR REPLACE FUNCTION @extschema@.cancel_by_unique_key(key bytea)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL OR length(key) <> 16 THEN
        PERFORM @extschema@._refuse('22023', 'field "key" must have 16 bytes', 'Give what unique_key() returns.');
    END IF;
    RETURN @extschema@._cancel_by_key(key, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.cancel_by_unique_key(bytea) IS
'Cancels the job that holds a unique key and waits or runs, in the caller''s transaction, as cancel_job does. Returns
its id, NULL when there is none. Errors: 22023, 25001, 40001.';
