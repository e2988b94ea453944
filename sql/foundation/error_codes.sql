CREATE OR REPLACE FUNCTION @extschema@.error_codes()
RETURNS SETOF @extschema@.error_code
LANGUAGE sql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT e.sqlstate, e.name, e.description, e.hint
    FROM (VALUES
        ('22023', 'invalid_argument',
            'A value or option that no retry can make right.', 'Correct the named field.'),
        ('23505', 'unique_conflict',
            'Another job holds the unique key.', 'Use the existing job, or another key.'),
        ('23514', 'limit_exceeded',
            'A value outside a documented limit.', 'Keep within the limit that the message names.'),
        ('25001', 'wrong_isolation',
            'A call that needs READ COMMITTED ran in an older snapshot.', 'Run it in READ COMMITTED.'),
        ('40001', 'serialization_failure',
            'The snapshot is older than a change of the same attempt.', 'Repeat the transaction.'),
        ('42704', 'not_found',
            'Unknown job, dead letter, setting, step or role.', 'Check the name or id.'),
        ('55000', 'wrong_state',
            'The job or object is not in a state that allows this.', 'Look at its state first.'),
        ('JQ001', 'stale_attempt',
            'The attempt is no longer current.', 'Drop this result; another attempt owns the job.'),
        ('JQ003', 'backpressure',
            'The queue is deeper than the producer allows.', 'Wait and try again.'),
        ('JQ004', 'parent_failed',
            'A job that this one depends on failed.', 'Retry the parent first.'),
        ('JQ005', 'callback_unknown',
            'The callback token is unknown or used.', 'Ask for the state of the job.'),
        ('JQ006', 'version_mismatch',
            'Client and schema versions do not fit.', 'Upgrade the older one.'),
        ('JQ007', 'not_enabled',
            'The capability is not enabled in this version.', 'Leave the option out.')
    ) e (sqlstate, name, description, hint)
$function$;
COMMENT ON FUNCTION @extschema@.error_codes() IS
    'SQLSTATEs that the public functions raise, with a name, what it means and what to do.';
