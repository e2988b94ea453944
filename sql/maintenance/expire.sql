-- Instances that are silent for long and own nothing are forgotten. One that has beaten must be suspect for a while as
-- well: when the clock is set forward by a day all are silent, and those that live say so within a second.
CREATE OR REPLACE FUNCTION @extschema@._forget_instances(p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_before timestamptz := p_now - @extschema@._setting_interval('instance_retention_seconds');
    v_silent uuid[] := ARRAY(
        SELECT i.instance_id
        FROM @extschema@.runtime_instances i
        WHERE coalesce(i.heartbeat_at, i.started_at) < v_before
              AND (i.heartbeat_at IS NULL
                   OR i.suspect_at <= p_now - @extschema@._setting_interval('heartbeat_seconds')));
BEGIN
    IF cardinality(v_silent) = 0 THEN
        RETURN 0;
    END IF;
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        v_silent := ARRAY(
            SELECT u FROM unnest(v_silent) u
            EXCEPT
            SELECT o.owner FROM @extschema@._open_batches(v_slot) o);
    END LOOP;
    v_silent := ARRAY(
        SELECT u FROM unnest(v_silent) u
        EXCEPT
        SELECT l.owner FROM @extschema@.leases l WHERE l.outcome IS NULL);
    RETURN @extschema@._delete_instances(v_silent, v_before);
END
$function$;
COMMENT ON FUNCTION @extschema@._forget_instances(timestamptz) IS
    'Internal: deletes instances silent for instance_retention_seconds that own no attempt.';

-- A hint that leads its lane's ledger would hide jobs; nothing should make one, and this would repair it. Those that a
-- recovery left unreadable are made anew first; each takes several locks, so a hundred at once.
CREATE OR REPLACE FUNCTION @extschema@._audit_hints()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_cursor bigint;
    v_mended bigint := @extschema@._renew_hints(100);
BEGIN
    IF NOT @extschema@._hints_work() THEN
        RETURN v_mended;
    END IF;
    FOR v_lane IN SELECT l.lane_id, l.hint_seq FROM @extschema@.queue_lanes l ORDER BY random() LIMIT 512 LOOP
        CONTINUE WHEN coalesce(pg_sequence_last_value(v_lane.hint_seq), 0) = 0;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id));
        v_cursor := (@extschema@._newest_emission(v_lane.lane_id)).cursor;
        IF pg_sequence_last_value(v_lane.hint_seq) > v_cursor THEN
            PERFORM setval(v_lane.hint_seq, v_cursor);
            v_mended := v_mended + 1;
        END IF;
    END LOOP;
    RETURN v_mended;
END
$function$;
COMMENT ON FUNCTION @extschema@._audit_hints() IS
    'Internal: renews hints that cannot be read, and lowers those that lead the emission ledger.';
