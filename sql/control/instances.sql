-- Worker processes and their heartbeats: one row per process, one UPDATE per heartbeat interval.

CREATE OR REPLACE FUNCTION @extschema@._instance_key(p_instance uuid)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._lock_key('instance/' || p_instance::text, 0);
COMMENT ON FUNCTION @extschema@._instance_key(uuid) IS
    'Internal: lock of whoever makes the row of an instance, so that a claim need not wait for it.';

CREATE OR REPLACE FUNCTION @extschema@._register_instance(p_instance uuid, p_info jsonb, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._instance_key(p_instance));
    INSERT INTO @extschema@.runtime_instances AS i (instance_id, info, started_at) VALUES (p_instance, p_info, p_now)
    ON CONFLICT (instance_id) DO UPDATE SET info = excluded.info WHERE i.info IS DISTINCT FROM excluded.info;
END
$function$;
COMMENT ON FUNCTION @extschema@._register_instance(uuid, jsonb, timestamptz) IS
    'Internal: makes an instance known, or replaces its description.';

-- A claim makes its owner known. It leaves that to another open transaction which does the same: rescue does without.
CREATE OR REPLACE FUNCTION @extschema@._note_owner(p_instance uuid, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
BEGIN
    -- Backwards, which EXISTS would not keep to: under a pinned snapshot heartbeats leave dead versions behind, and the
    -- living one is in the last page.
    IF (SELECT i.started_at FROM @extschema@.runtime_instances i
        WHERE i.instance_id >= p_instance AND i.instance_id <= p_instance
        ORDER BY i.instance_id DESC LIMIT 1) IS NULL
       AND pg_try_advisory_xact_lock(@extschema@._instance_key(p_instance)) THEN
        INSERT INTO @extschema@.runtime_instances (instance_id, info, started_at) VALUES (p_instance, '{}', p_now)
        ON CONFLICT (instance_id) DO NOTHING;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_owner(uuid, timestamptz) IS
    'Internal: makes sure that the owner of a claim has a row.';

CREATE OR REPLACE FUNCTION @extschema@._record_heartbeat(p_instance uuid, p_held int8multirange, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_interval interval := @extschema@._setting_interval('heartbeat_seconds');
BEGIN
    -- Callers beat often to hear of cancellations; the row changes once an interval, or at once to end a suspicion. A
    -- heartbeat that lies ahead is from before the clock was set back: it cannot be compared with what comes now.
    UPDATE @extschema@.runtime_instances i
    SET heartbeat_before_at = CASE WHEN i.heartbeat_at <= p_now THEN i.heartbeat_at END,
        held_before = CASE WHEN i.heartbeat_at <= p_now THEN i.held END,
        heartbeat_at = p_now, held = p_held, suspect_at = NULL
    WHERE i.instance_id = p_instance
      AND (i.heartbeat_at IS NULL OR i.suspect_at IS NOT NULL
           OR i.heartbeat_at <= p_now - v_interval OR i.heartbeat_at > p_now);
    IF NOT FOUND THEN
        PERFORM pg_advisory_xact_lock(@extschema@._instance_key(p_instance));
        INSERT INTO @extschema@.runtime_instances (instance_id, info, started_at, heartbeat_at, held)
        VALUES (p_instance, '{}', p_now, p_now, p_held)
        ON CONFLICT (instance_id) DO NOTHING;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._record_heartbeat(uuid, int8multirange, timestamptz) IS
    'Internal: stores a heartbeat and what the instance holds (NULL: all).';

CREATE OR REPLACE FUNCTION @extschema@._is_live(p_heartbeat_at timestamptz, p_now timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(p_heartbeat_at > p_now - @extschema@._setting_interval('staleness_seconds')
                AND p_heartbeat_at <= p_now + @extschema@._setting_interval('heartbeat_seconds'), false);
COMMENT ON FUNCTION @extschema@._is_live(timestamptz, timestamptz) IS
    'Internal: whether an instance with this last heartbeat is not silent. One ahead, by a clock that was set back '
    'since, tells nothing.';

-- What clients tell about themselves: info with kinds, and with queues as an array or as an object by name.
CREATE OR REPLACE FUNCTION @extschema@._is_served(p_queue text, p_kind text, p_now timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT @extschema@._has_sql_handler(p_kind) OR EXISTS (
        SELECT FROM @extschema@.runtime_instances i
        WHERE @extschema@._is_live(i.heartbeat_at, p_now)
          AND i.info -> 'kinds' ? p_kind AND coalesce(i.info -> 'queues' ? p_queue, true))
$function$;
COMMENT ON FUNCTION @extschema@._is_served(text, text, timestamptz) IS
    'Internal: whether a live instance says that it works on a queue and knows a kind, or a function is bound to it.';

-- Marks silent instances suspect and returns the ones that stayed silent one further interval.
CREATE OR REPLACE FUNCTION @extschema@._detect_dead_instances(p_now timestamptz)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_stale interval := @extschema@._setting_interval('staleness_seconds');
    v_beat interval := @extschema@._setting_interval('heartbeat_seconds');
BEGIN
    UPDATE @extschema@.runtime_instances i SET suspect_at = p_now
    WHERE i.instance_id IN (SELECT x.instance_id FROM @extschema@.runtime_instances x
                            WHERE x.heartbeat_at NOT BETWEEN p_now - v_stale AND p_now + v_beat
                              AND coalesce(x.suspect_at > p_now, true) FOR UPDATE SKIP LOCKED);
    RETURN coalesce((SELECT array_agg(i.instance_id) FROM @extschema@.runtime_instances i
                     WHERE i.suspect_at <= p_now - v_beat
                       AND i.heartbeat_at NOT BETWEEN p_now - v_stale AND p_now + v_beat), '{}');
END
$function$;
COMMENT ON FUNCTION @extschema@._detect_dead_instances(timestamptz) IS
    'Internal: two-step death: silent makes suspect, silent one interval longer makes dead.';

CREATE OR REPLACE FUNCTION @extschema@._delete_instances(p_instances uuid[], p_before timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.runtime_instances i
    WHERE i.instance_id IN (SELECT x.instance_id FROM @extschema@.runtime_instances x
                            WHERE x.instance_id = ANY (p_instances)
                              AND coalesce(x.heartbeat_at, x.started_at) < p_before FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_instances(uuid[], timestamptz) IS
    'Internal: forgets instances that were silent since before a time.';
