-- After a restore or a logical copy: rows and sequences may come from different moments. Ring cursors
-- follow the ledger, other sequences are raised above what the tables show, and what belonged to the
-- old cluster (horizons, hints, what refill and prune remember) is cleared. tick does it too, once it sees that the
-- rows came from another database.

CREATE OR REPLACE FUNCTION @extschema@._raise_sequence(p_sequence regclass, p_seen bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_last bigint;
BEGIN
    EXECUTE format('SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END
                    FROM %s s', p_sequence)
        INTO v_last;
    IF p_seen IS NULL OR p_seen <= v_last THEN
        RETURN false;
    END IF;
    PERFORM setval(p_sequence, p_seen);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._raise_sequence(regclass, bigint) IS
    'Internal: raises a sequence to a value that is in use; never lowers it.';

CREATE OR REPLACE FUNCTION @extschema@._verify_rings()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_fresh boolean := pg_current_xact_id_if_assigned() IS NULL;
    v_ring text;
    v_newest record;
    v_changed bigint := 0;
BEGIN
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key(v_ring || '_ring', 0));
        SELECT s.slot, s.generation INTO v_newest
        FROM @extschema@._ring_slots(v_ring) s
        ORDER BY s.generation DESC
        LIMIT 1;
        PERFORM @extschema@._note_released(v_ring, s, NULL)
        FROM generate_series(0, @extschema@._slot_count(v_ring) - 1) s;
        IF @extschema@._ring_cursor(v_ring) <> v_newest.generation * 64 + v_newest.slot THEN
            IF NOT v_fresh THEN
                -- The ledger row may be this transaction's own: a rollback takes the row back, but not the cursor.
                PERFORM @extschema@._refuse('55000',
                    format('the %s ring cannot be verified in a transaction that has written', v_ring),
                    'Call verify() in a transaction of its own.');
            END IF;
            PERFORM @extschema@._set_ring_cursor(v_ring, v_newest.generation, v_newest.slot);
            v_changed := v_changed + 1;
        END IF;
    END LOOP;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_rings() IS 'Internal: sets ring cursors to their newest ledger row.';

-- Highest position of a lane that a row, its cursor or the id of a job shows: a job is called by its first position,
-- also where it went since. job_unique_claims has no index on its jobs, so the caller has looked there.
CREATE OR REPLACE FUNCTION @extschema@._highest_position(p_lane integer, p_claimed bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_end bigint := @extschema@._lane_base(p_lane + 1);
BEGIN
    RETURN greatest(p_claimed, (@extschema@._newest_emission(p_lane)).cursor,
        (SELECT max(r."position") FROM @extschema@.ready_entries r
         WHERE r."position" > v_base AND r."position" < v_end),
        (SELECT max(r.job_id) FROM @extschema@.ready_entries r WHERE r.job_id > v_base AND r.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.deferred_jobs d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.dlq_entries d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.done_entries d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(f.job_id) FROM @extschema@.failed_entries f WHERE f.job_id > v_base AND f.job_id < v_end),
        (SELECT max(l.job_id) FROM @extschema@.leases l WHERE l.job_id > v_base AND l.job_id < v_end));
END
$function$;
COMMENT ON FUNCTION @extschema@._highest_position(integer, bigint) IS
    'Internal: highest position of a lane that is in use, or the given one.';

-- A look that keeps no lock: with thousands of lanes they would fill the lock table. The hint and the highest position
-- are read before what they are compared with, which only grows.
CREATE OR REPLACE FUNCTION @extschema@._lane_is_sound(p_lane integer, p_claimed bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_is_sound boolean := false;
    v_hint bigint;
    v_highest bigint;
    v_emission @extschema@.queue_claim_heads;
BEGIN
    BEGIN
        IF @extschema@._hints_can_be_read(ARRAY[p_lane]) THEN
            EXECUTE format('SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END
                            FROM @extschema@.lane_%s_hint s', p_lane) INTO v_hint;
            v_highest := @extschema@._highest_position(p_lane, p_claimed);
            v_emission := @extschema@._newest_emission(p_lane);
            v_is_sound := v_hint <= v_emission.cursor AND v_emission.horizon IS NULL
                AND v_highest <= @extschema@._lane_tail(p_lane)
                -- pg_dump does not write the dependency.
                AND 2 = (SELECT count(*) FROM @extschema@.queue_lanes l
                         JOIN pg_depend d ON d.objid IN (l.position_seq, l.hint_seq)
                         WHERE l.lane_id = p_lane AND d.classid = 'pg_class'::regclass
                               AND d.refclassid = 'pg_class'::regclass
                               AND d.refobjid = '@extschema@.queue_lanes'::regclass AND d.deptype = 'a');
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        RETURN v_is_sound;
    END;
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_is_sound(integer, bigint) IS
    'Internal: whether a lane''s sequences, hint and newest emission need no repair.';

CREATE OR REPLACE FUNCTION @extschema@._verify_lanes()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_hint regclass;
    v_highest bigint;
    v_emission @extschema@.queue_claim_heads;
    v_changed bigint := 0;
BEGIN
    IF EXISTS (
        SELECT FROM @extschema@.queue_lanes l JOIN pg_class c ON c.oid IN (l.position_seq, l.hint_seq)
        WHERE c.relowner <> (SELECT t.relowner FROM pg_class t WHERE t.oid = '@extschema@.queue_lanes'::regclass)) THEN
        PERFORM @extschema@._refuse('55000', 'lane sequences and tables have different owners',
            'A restore gives the tables to its own role: call set_owner() first.');
    END IF;
    FOR v_lane IN SELECT l.lane_id, l.position_seq, u.claimed
                  FROM @extschema@.queue_lanes l
                  LEFT JOIN (SELECT @extschema@._lane_of(c.job_id) AS lane_id, max(c.job_id) AS claimed
                             FROM @extschema@.job_unique_claims c GROUP BY 1) u ON u.lane_id = l.lane_id
                  ORDER BY l.lane_id LOOP
        CONTINUE WHEN @extschema@._lane_is_sound(v_lane.lane_id, v_lane.claimed);
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id));
        v_changed := v_changed + @extschema@._renew_hint(v_lane.lane_id)::integer;
        v_hint := format('@extschema@.lane_%s_hint', v_lane.lane_id);
        v_highest := @extschema@._highest_position(v_lane.lane_id, v_lane.claimed);
        -- pg_dump does not write the dependency. ALTER also keeps producers out of the sequence until commit, and waits
        -- for them, so a lane that is sound goes without.
        IF 2 <> (SELECT count(*) FROM pg_depend d
                 WHERE d.classid = 'pg_class'::regclass AND d.objid IN (v_lane.position_seq, v_hint)
                   AND d.refclassid = 'pg_class'::regclass
                   AND d.refobjid = '@extschema@.queue_lanes'::regclass AND d.deptype = 'a')
           OR v_highest > @extschema@._lane_tail(v_lane.lane_id) THEN
            EXECUTE format('ALTER SEQUENCE %s OWNED BY @extschema@.queue_lanes.lane_id', v_lane.position_seq);
            EXECUTE format('ALTER SEQUENCE %s OWNED BY @extschema@.queue_lanes.lane_id', v_hint);
            -- What a producer wrote until ALTER had its lock is seen now.
            v_changed := v_changed + @extschema@._raise_sequence(v_lane.position_seq,
                @extschema@._highest_position(v_lane.lane_id, v_lane.claimed))::integer;
        END IF;
        PERFORM setval(v_hint, 0, false);
        v_emission := @extschema@._newest_emission(v_lane.lane_id);
        IF v_emission.horizon IS NOT NULL THEN
            v_emission.horizon := NULL;
            v_emission.claim_no := v_emission.claim_no + 1;
            PERFORM @extschema@._append_emission((@extschema@._ring_cursor('queue') % 64)::integer, v_emission);
            v_changed := v_changed + 1;
        END IF;
    END LOOP;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_lanes() IS
    'Internal: raises lane sequences, clears horizons and hints, restores dependencies.';

CREATE OR REPLACE FUNCTION @extschema@._verify_sequences()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_changed bigint := 0;
BEGIN
    PERFORM @extschema@._forget_refill();
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.lane_ids',
        (SELECT max(l.lane_id) FROM @extschema@.queue_lanes l))::integer;
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.claim_batch_ids',
        greatest((SELECT max(b.batch_id) FROM @extschema@.lease_claim_batches b),
                 (SELECT max(l.batch_id) FROM @extschema@.leases l)))::integer;
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.job_ids', (SELECT max(x.id) FROM (
        SELECT d.job_id AS id FROM @extschema@.deferred_jobs d UNION ALL
        SELECT d.job_id FROM @extschema@.dlq_entries d UNION ALL
        SELECT d.job_id FROM @extschema@.done_entries d UNION ALL
        SELECT f.job_id FROM @extschema@.failed_entries f UNION ALL
        SELECT l.job_id FROM @extschema@.leases l UNION ALL
        SELECT c.job_id FROM @extschema@.job_unique_claims c UNION ALL
        SELECT r.job_id FROM @extschema@.ready_entries r) x WHERE x.id < @extschema@._lane_base(1)))::integer;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_sequences() IS 'Internal: raises id sequences above what the tables show.';

CREATE OR REPLACE FUNCTION @extschema@._verify(p_now timestamptz)
RETURNS TABLE (step text, changed bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY VALUES
        ('verify_rings', @extschema@._verify_rings()),
        ('verify_lanes', @extschema@._verify_lanes()),
        ('verify_sequences', @extschema@._verify_sequences()),
        ('verify_identity', @extschema@._settle(p_now));
END
$function$;
COMMENT ON FUNCTION @extschema@._verify(timestamptz) IS 'Internal: brings cursors and sequences in line with the rows.';

CREATE OR REPLACE FUNCTION @extschema@._verify_after_move(p_now timestamptz, OUT outcome text, OUT changed bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    outcome := 'done';
    changed := 0;
    IF NOT @extschema@._is_at_home() THEN
        changed := (SELECT sum(v.changed) FROM @extschema@._verify(p_now) v);
    END IF;
EXCEPTION WHEN lock_not_available THEN
    outcome := 'locked';
    changed := NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_after_move(timestamptz) IS
    'Internal: verifies rows that came from another database: done, or locked when somebody has a lane for long.';
