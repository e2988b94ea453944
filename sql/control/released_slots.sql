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
    RETURN 'epoch'::timestamptz + nullif(pg_sequence_last_value(
        format('@extschema@.%s_%s_released', p_ring, p_slot)::regclass), 0) * interval '1 microsecond';
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_released_at(text, integer) IS
    'Internal: since when nothing needs a slot of a ring; NULL when prune has not seen that yet.';

-- Outside any transaction, like all that sequences remember: a rollback costs a minute. Each setval is a record of WAL,
-- so it is left out where it changes nothing: who makes a slot forgotten has it locked against prune.
CREATE OR REPLACE FUNCTION @extschema@._note_released(p_ring text, p_slot integer, p_at timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_clock regclass := format('@extschema@.%s_%s_released', p_ring, p_slot);
    v_at bigint := coalesce((extract(epoch FROM p_at) * 1000000)::bigint, 0);
BEGIN
    IF coalesce(pg_sequence_last_value(v_clock), 0) <> v_at THEN
        PERFORM setval(v_clock, v_at);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_released(text, integer, timestamptz) IS
    'Internal: remembers since when nothing needs a slot of a ring; NULL: it has to be seen again.';
