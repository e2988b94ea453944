-- Options and pause of queues.

CREATE OR REPLACE FUNCTION @extschema@._queue_options(p_queue text)
RETURNS @extschema@.queue_meta
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_meta @extschema@.queue_meta;
BEGIN
    SELECT m.* INTO v_meta FROM @extschema@.queue_meta m WHERE m.queue = p_queue;
    IF NOT FOUND THEN
        v_meta := ROW(p_queue, 1, false, true, NULL, NULL, NULL, NULL, NULL);
    END IF;
    RETURN v_meta;
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_options(text) IS
    'Internal: options of a queue, the defaults when it was never declared.';

CREATE OR REPLACE FUNCTION @extschema@._declare_queue(p_queue text, p_opts jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
BEGIN
    INSERT INTO @extschema@.queue_meta AS m
        (queue, enqueue_shards, strict_fifo, notify, dlq, aging_seconds, deadline_seconds)
    VALUES (p_queue,
        CASE WHEN p_opts ? 'enqueue_shards'
             THEN coalesce(@extschema@._option_integer(p_opts, 'enqueue_shards', 1, 64), 1)
             ELSE v_meta.enqueue_shards END,
        CASE WHEN p_opts ? 'strict_fifo'
             THEN coalesce(@extschema@._option_boolean(p_opts, 'strict_fifo'), false)
             ELSE v_meta.strict_fifo END,
        CASE WHEN p_opts ? 'notify'
             THEN coalesce(@extschema@._option_boolean(p_opts, 'notify'), true)
             ELSE v_meta.notify END,
        CASE WHEN p_opts ? 'dlq'
             THEN @extschema@._option_boolean(p_opts, 'dlq')
             ELSE v_meta.dlq END,
        CASE WHEN p_opts ? 'aging_seconds'
             THEN @extschema@._option_number(p_opts, 'aging_seconds', 0, 86400)
             ELSE v_meta.aging_seconds END,
        CASE WHEN p_opts ? 'deadline_seconds'
             THEN @extschema@._option_number(p_opts, 'deadline_seconds', 0.001, 31536000)
             ELSE v_meta.deadline_seconds END)
    ON CONFLICT (queue) DO UPDATE SET
        enqueue_shards = excluded.enqueue_shards, strict_fifo = excluded.strict_fifo, notify = excluded.notify,
        dlq = excluded.dlq, aging_seconds = excluded.aging_seconds, deadline_seconds = excluded.deadline_seconds
    WHERE (m.enqueue_shards, m.strict_fifo, m.notify, m.dlq, m.aging_seconds, m.deadline_seconds)
        IS DISTINCT FROM (excluded.enqueue_shards, excluded.strict_fifo, excluded.notify, excluded.dlq,
                          excluded.aging_seconds, excluded.deadline_seconds);
END
$function$;
COMMENT ON FUNCTION @extschema@._declare_queue(text, jsonb) IS
    'Internal: stores queue options; those not named keep their value, null restores the default (22023).';

CREATE OR REPLACE FUNCTION @extschema@._set_paused(p_queue text, p_paused_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_paused_at IS NULL THEN
        UPDATE @extschema@.queue_meta m SET paused_at = NULL WHERE m.queue = p_queue AND m.paused_at IS NOT NULL;
        RETURN FOUND;
    END IF;
    INSERT INTO @extschema@.queue_meta AS m (queue, paused_at) VALUES (p_queue, p_paused_at)
    ON CONFLICT (queue) DO UPDATE SET paused_at = excluded.paused_at WHERE m.paused_at IS NULL;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_paused(text, timestamptz) IS
    'Internal: pauses or resumes (NULL) a queue; true when that changed anything.';

CREATE OR REPLACE FUNCTION @extschema@._paused_queues()
RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce(array_agg(m.queue ORDER BY m.queue), '{}')
    FROM @extschema@.queue_meta m
    WHERE m.paused_at IS NOT NULL
$function$;
COMMENT ON FUNCTION @extschema@._paused_queues() IS 'Internal: queues that are paused.';

-- A drain that nobody goes on with is over after a while, so a queue cannot be forgotten in it.
CREATE OR REPLACE FUNCTION @extschema@._note_drain(p_queue text, p_is_over boolean, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_pause constant interval := interval '10 seconds';
BEGIN
    IF p_is_over THEN
        UPDATE @extschema@.queue_meta m SET drained_until = NULL
        WHERE m.queue = p_queue AND m.drained_until IS NOT NULL;
    ELSE
        INSERT INTO @extschema@.queue_meta AS m (queue, drained_until) VALUES (p_queue, p_now + c_pause)
        ON CONFLICT (queue) DO UPDATE SET drained_until = excluded.drained_until;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_drain(text, boolean, timestamptz) IS
    'Internal: asks workers to leave a queue alone for ten seconds, or no longer.';

CREATE OR REPLACE FUNCTION @extschema@._drained_queues(p_now timestamptz)
RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce(array_agg(m.queue ORDER BY m.queue), '{}')
    FROM @extschema@.queue_meta m
    -- Further ahead than a drain writes: the clock was set back since.
    WHERE m.drained_until > p_now AND m.drained_until <= p_now + interval '10 seconds'
$function$;
COMMENT ON FUNCTION @extschema@._drained_queues(timestamptz) IS 'Internal: queues that somebody is draining.';
