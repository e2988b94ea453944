-- Wake-ups. A flag says until when some worker of its queues sleeps; producers notify only while that lies ahead.
-- Flags are sequences used as shared memory. Only workers that go to sleep write one; it expires by itself.

-- All of them are named, and planning makes one constant of that: to look up a name costs more than to read a flag.
DO $block$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION @extschema@._doorbell(p_queue text)
         RETURNS regclass
         LANGUAGE sql IMMUTABLE PARALLEL SAFE
         RETURN (ARRAY[%s])[1 + (hashtext(p_queue) & 63)]',
        (SELECT string_agg(format('%L::regclass', '@extschema@.doorbell_' || n), ', ' ORDER BY n)
         FROM generate_series(0, 63) n));
END
$block$;
COMMENT ON FUNCTION @extschema@._doorbell(text) IS 'Internal: flag of a queue, one of 64.';

CREATE OR REPLACE FUNCTION @extschema@._channel(p_queue text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN 'awa_' || left(md5('@extschema@/' || p_queue), 24);
COMMENT ON FUNCTION @extschema@._channel(text) IS
    'Internal: notification channel of a queue: short, whatever the name.';

CREATE OR REPLACE FUNCTION @extschema@._someone_sleeps(p_queue text)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN coalesce(pg_sequence_last_value(@extschema@._doorbell(p_queue)), 0)
    >= date_part('epoch', clock_timestamp()) * 1000;
COMMENT ON FUNCTION @extschema@._someone_sleeps(text) IS 'Internal: whether the flag of a queue lies ahead.';

CREATE OR REPLACE FUNCTION @extschema@._notify_workers(p_queue text, p_payload text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF lower(coalesce(current_setting('awa.notify', true), 'on')) IN ('off', 'false', '0', 'no')
       OR NOT (@extschema@._queue_options(p_queue)).notify THEN
        RETURN false;
    END IF;
    PERFORM pg_notify(@extschema@._channel(p_queue), p_payload);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._notify_workers(text, text) IS
    'Internal: notifies the workers of a queue, unless the session setting awa.notify or the queue turns that off.';

-- Called after the lane position was taken: a sleeper arms first and looks at positions second, so one sees the other.
CREATE OR REPLACE FUNCTION @extschema@._ring_doorbell(p_queue text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN @extschema@._someone_sleeps(p_queue) AND @extschema@._notify_workers(p_queue, '');
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_doorbell(text) IS
    'Internal: notifies the workers of a queue if one of them sleeps; whether it did.';

-- setval writes WAL; of 32 nextval only one does. So a flag that is kept up goes by its increment of half a second, and
-- is that much late at most. After a crash it is up to 32 increments ahead: so long producers notify nobody.
CREATE OR REPLACE FUNCTION @extschema@._arm_doorbell(p_queue text, p_until timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_flag regclass := @extschema@._doorbell(p_queue);
    v_until bigint := ceil(extract(epoch FROM p_until) * 1000);
    c_longest constant bigint := 60500;
    v_ahead bigint := v_until - coalesce(pg_sequence_last_value(v_flag), 0);
BEGIN
    -- Never shorten another sleeper's flag; but one further ahead than anybody sleeps is from before the clock was set
    -- back, and would let producers notify nobody all that time.
    IF v_ahead NOT BETWEEN -c_longest AND 16000 THEN
        PERFORM setval(v_flag, v_until);
    ELSIF v_ahead > 0 THEN
        PERFORM nextval(v_flag) FROM generate_series(1, ceil(v_ahead / 500.0));
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._arm_doorbell(text, timestamptz) IS
    'Internal: asks producers to notify until the given time.';
