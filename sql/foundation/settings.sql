-- Settings: defaults are code, overrides are rows. Hot paths read a setting only
-- when a cheap bound says it could matter.

CREATE OR REPLACE FUNCTION @extschema@._setting_definitions()
RETURNS TABLE (name text, default_value text, minimum numeric, maximum numeric, unit text, description text)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT d.name, d.default_value, d.minimum, d.maximum, d.unit, d.description
    FROM (VALUES
        ('aging_seconds', '60', 0, 86400, 'seconds',
            'Waiting time that raises a job by one priority; 0 is off.'),
        ('args_max_bytes', '1048576', 1024, 67108864, 'bytes',
            'Largest args of a job.'),
        ('attempt_evidence_seconds', '600', 0, 86400, 'seconds',
            'How long closed receipts stay, so that attempt_status can answer.'),
        ('claim_max_bytes', '131072', 65536, 268435456, 'bytes',
            'Most that one claim returns: args, and 100 bytes a job; one job always passes. What the buffers of a '
            'connection cannot take keeps the lane locked until the client reads it.'),
        ('claim_rotate_bytes', '4194304', 8192, 1073741824, 'bytes',
            'Size at which the current slot of the claim ring is left.'),
        ('claim_rotate_seconds', '60', 0.05, 86400, 'seconds',
            'Age at which the current slot of the claim ring is left; a fifth of attempt_evidence_seconds if that is '
            'more, unless set.'),
        ('dlq_default', '0', 0, 1, 'boolean',
            'Whether jobs that fail go to the dead letters unless their queue says otherwise.'),
        ('dlq_retention_seconds', '2592000', 1, 315360000, 'seconds',
            'How long dead letters are kept.'),
        ('dump_lock_seconds', '60', 0, 3600, 'seconds',
            'How long a slot is kept after a job left it, for dumps that began before and lock it later; 0 is off.'),
        ('errors_max_bytes', '16384', 1024, 1048576, 'bytes',
            'Largest error history of a job.'),
        ('errors_max_count', '20', 1, 1000, 'entries',
            'Longest error history of a job.'),
        ('evacuate_attempt_seconds', '60', 0, 86400, 'seconds',
            'Age from which a running attempt is moved out of a slot when slots run short.'),
        ('evacuate_max_rows', '100000', 1, 10000000, 'rows',
         'A slot with more waiting jobs than this is left alone when slots run short; so is a large one of which they '
             'take more than half.'),
        ('evacuate_rows', '2000', 1, 100000, 'rows',
         'Waiting jobs moved by one evacuation step.'),
        ('failed_retention_seconds', '259200', 0, 315360000, 'seconds',
            'How long failed jobs stay, also those whose slot was pruned.'),
        ('heartbeat_seconds', '10', 0.05, 3600, 'seconds',
            'Shortest time between two writes of the same heartbeat.'),
        ('idle_poll_ms', '2000', 10, 60000, 'milliseconds',
            'How long an idle worker sleeps between two looks when no doorbell rings.'),
        ('instance_retention_seconds', '86400', 60, 315360000, 'seconds',
            'How long a silent instance without receipts is kept.'),
        ('promote_rows', '4096', 1, 100000, 'rows',
            'Due jobs moved by one promotion step.'),
        ('queue_rotate_bytes', '134217728', 8192, 17179869184, 'bytes',
            'Size at which the current slot of the queue ring is left.'),
        ('queue_rotate_seconds', '6000', 0.05, 86400, 'seconds',
            'Age at which the current slot of the queue ring is left; a thirteenth of the terminal retention if that '
            'is more, unless set; the retention itself if less, 15 s or more.'),
        ('rescue_rows', '500', 1, 100000, 'attempts',
            'Attempts ended by one rescue step.'),
        ('ring_size_cap_bytes', '2147483648', 1048576, 1099511627776, 'bytes',
            'Size of the queue ring above which history is pruned before its retention.'),
        ('staleness_seconds', '90', 0.2, 86400, 'seconds',
            'Silence after which an instance is suspect, and one further heartbeat interval later dead.'),
        ('terminal_retention_seconds', '86400', 0, 315360000, 'seconds',
            'How long terminal jobs stay visible.')
    ) d (name, default_value, minimum, maximum, unit, description);
END;
COMMENT ON FUNCTION @extschema@._setting_definitions() IS 'Internal: every setting with its default, bounds and unit.';

CREATE OR REPLACE FUNCTION @extschema@._setting(p_name text)
RETURNS numeric
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    RETURN coalesce((SELECT o.value FROM @extschema@.setting_overrides o WHERE o.name = p_name),
                    (SELECT d.default_value FROM @extschema@._setting_definitions() d WHERE d.name = p_name))::numeric;
END
$function$;
COMMENT ON FUNCTION @extschema@._setting(text) IS 'Internal: value of a setting; NULL for an unknown name.';

CREATE OR REPLACE FUNCTION @extschema@._setting_interval(p_name text)
RETURNS interval
LANGUAGE sql STABLE PARALLEL SAFE
RETURN make_interval(secs => @extschema@._setting(p_name)::double precision);
COMMENT ON FUNCTION @extschema@._setting_interval(text) IS 'Internal: a setting in seconds as an interval.';

CREATE OR REPLACE FUNCTION @extschema@._set_setting(p_name text, p_value text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_definition record;
BEGIN
    SELECT d.* INTO v_definition FROM @extschema@._setting_definitions() d WHERE d.name = p_name;
    IF v_definition.name IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704',
            MESSAGE = format('field "name": there is no setting %s', coalesce(quote_ident(left(p_name, 100)), 'NULL')),
            HINT = 'The view settings lists them.';
    END IF;
    IF p_value IS NULL THEN
        DELETE FROM @extschema@.setting_overrides o WHERE o.name = p_name;
        RETURN;
    END IF;
    IF p_value !~ '^[0-9]{1,15}([.][0-9]{1,6})?$'
       OR p_value::numeric NOT BETWEEN v_definition.minimum AND v_definition.maximum
       OR (v_definition.unit = 'boolean' AND p_value NOT IN ('0', '1')) THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = format('field "value" of setting "%s" cannot be %L', p_name, left(p_value, 100)),
            HINT = format('Give a number from %s to %s (%s).',
                v_definition.minimum, v_definition.maximum, v_definition.unit);
    END IF;
    INSERT INTO @extschema@.setting_overrides AS o (name, value) VALUES (p_name, p_value)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_setting(text, text) IS
    'Internal: stores an override, or removes it when the value is NULL.';
