-- Lock keys. They start from the schema's own name, so that tenants do not meet; the derivation never changes between
-- versions, because old and new clients must meet. Waiting is only ever for, in this order: fifo, unique key,
-- mutation, position, batch. All others are taken by try, but for lane, which a claim that holds none waits 50 ms for,
-- for verify(), which is for a database without workers, and for instance, where a worker waits for itself alone.

CREATE OR REPLACE FUNCTION @extschema@._lock_key(p_class text, p_id bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN hashtextextended('@extschema@/' || p_class, p_id);
COMMENT ON FUNCTION @extschema@._lock_key(text, bigint) IS
    'Internal: advisory lock key. Classes: fifo, new_lane, lane, mutation, position, batch,
queue_ring, claim_ring, step, instance.';

CREATE OR REPLACE FUNCTION @extschema@._is_read_committed()
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
COMMENT ON FUNCTION @extschema@._is_read_committed() IS
    'Internal: whether each statement of this transaction sees what was committed before it.';

CREATE OR REPLACE FUNCTION @extschema@._require_read_committed()
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT @extschema@._is_read_committed() THEN
        RAISE EXCEPTION USING ERRCODE = '25001',
            MESSAGE = format('this call needs READ COMMITTED, the transaction is %s',
                upper(current_setting('transaction_isolation'))),
            HINT = 'Run it in a READ COMMITTED transaction: '
                'an older snapshot cannot see what later transactions claimed.';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._require_read_committed() IS
    'Internal: raises 25001 in REPEATABLE READ and SERIALIZABLE.';
