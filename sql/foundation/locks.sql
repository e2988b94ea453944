-- Lock keys. They start from the schema's own name, so that tenants do not meet; the derivation never changes between
-- versions, because old and new clients must meet. Lock order: strict_fifo lanes, lane, mutation, position, batch, ring.

CREATE OR REPLACE FUNCTION @extschema@._lock_key(p_class text, p_id bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN hashtextextended('@extschema@/' || p_class, p_id);
COMMENT ON FUNCTION @extschema@._lock_key(text, bigint) IS
    'Internal: advisory lock key. Classes: fifo, new_lane, lane, mutation, position, batch, ring, step.';

CREATE OR REPLACE FUNCTION @extschema@._require_read_committed()
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION USING ERRCODE = '25001',
            MESSAGE = format('this call needs READ COMMITTED, the transaction is %s', upper(current_setting('transaction_isolation'))),
            HINT = 'Run it in a READ COMMITTED transaction: an older snapshot cannot see what later transactions claimed.';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._require_read_committed() IS 'Internal: raises 25001 in REPEATABLE READ and SERIALIZABLE.';
