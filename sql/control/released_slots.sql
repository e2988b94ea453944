-- TRUNCATE is not MVCC. A dump takes its snapshot first and its locks a little later; a job that left a slot in between
-- would be in no place that the dump reads. So a slot is emptied only when dump_lock_seconds have passed since then.

-- A time ahead is from a clock that was wrong.
CREATE OR REPLACE FUNCTION @extschema@._is_past_dumps(p_at timestamptz, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_seconds numeric := @extschema@._setting('dump_lock_seconds');
BEGIN
    RETURN extract(epoch FROM p_now - p_at) NOT BETWEEN -v_seconds AND v_seconds;
END
$function$;
COMMENT ON FUNCTION @extschema@._is_past_dumps(timestamptz, timestamptz) IS
    'Internal: whether every dump that began before a time has its locks now.';

CREATE OR REPLACE FUNCTION @extschema@._slot_released_at(p_ring text, p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- A standby has no UNLOGGED sequence to read: there this function answers NULL, a plain SELECT an error.
    RETURN 'epoch'::timestamptz + nullif(pg_sequence_last_value(
        format('@extschema@.%s_%s_released', p_ring, p_slot)::regclass), 0) * interval '1 microsecond';
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_released_at(text, integer) IS
    'Internal: since when nothing needs a slot of a ring; NULL when prune has not seen that yet.';

-- Outside any transaction, like all that sequences remember: a rollback, or a crash, which resets it, costs a minute.
CREATE OR REPLACE FUNCTION @extschema@._note_released(p_ring text, p_slot integer, p_at timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM setval(format('@extschema@.%s_%s_released', p_ring, p_slot)::regclass,
                   coalesce((extract(epoch FROM p_at) * 1000000)::bigint, 0));
END
$function$;
COMMENT ON FUNCTION @extschema@._note_released(text, integer, timestamptz) IS
    'Internal: remembers since when nothing needs a slot of a ring; NULL: it has to be seen again.';
