-- Ends attempts whose worker is gone, whose deadline passed, or that their worker no longer knows. A rescue only
-- tries locks, and decides on what it reads under them: an attempt that finished meanwhile stays finished, and one
-- whose worker came back goes on.

CREATE OR REPLACE FUNCTION @extschema@._rescue_positions(
    p_slot integer, p_batch bigint, p_positions bigint[], p_error text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_body record;
    v_progress jsonb;
    v_set int8multirange;
    v_half integer := cardinality(p_positions) / 2;
    v_message text;
BEGIN
    BEGIN
        v_batch := @extschema@._read_batch(p_slot, p_batch);
        v_set := @extschema@._to_set(p_positions) * v_batch.positions - v_batch.closed;
        IF v_set IS NULL OR isempty(v_set) THEN
            RETURN 0;
        END IF;
        v_progress := @extschema@._take_progress(p_batch, v_set);
        FOR v_body IN SELECT r.* FROM @extschema@._read_ready(v_batch.ready_slot, @extschema@._to_list(v_set)) r LOOP
            PERFORM @extschema@._move_attempt(
                @extschema@._ended_job(
                    @extschema@._next_attempt(v_body.job), v_progress -> v_body."position"::text),
                'rescued', v_batch.ready_slot, v_body."position", v_batch.claimed_at, NULL, to_jsonb(p_error),
                p_error, NULL, p_now);
        END LOOP;
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'rescued', v_set, p_error, p_now);
        RETURN @extschema@._cardinality(v_set);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN @extschema@._rescue_positions(p_slot, p_batch, p_positions[:v_half], p_error, p_now)
             + @extschema@._rescue_positions(p_slot, p_batch, p_positions[v_half + 1:], p_error, p_now);
    END IF;
    FOR v_body IN SELECT r.* FROM @extschema@._read_ready(v_batch.ready_slot, p_positions) r LOOP
        PERFORM @extschema@._append_done(@extschema@._next_attempt(v_body.job), 'failed', v_batch.ready_slot,
            v_body."position", v_batch.claimed_at, p_now, 'rescue failed: ' || v_message, NULL);
    END LOOP;
    PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'failed', v_set, v_message, p_now);
    RETURN 1;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_positions(integer, bigint, bigint[], text, timestamptz) IS
    'Internal: ends open attempts of one batch as rescued; one that cannot be ends failed, with the reason.';

-- What of an open batch is to be rescued, and why.
CREATE OR REPLACE FUNCTION @extschema@._rescuable(
    p_owner uuid, p_claimed_at timestamptz, p_deadline_at timestamptz, p_open int8multirange, p_dead uuid[],
    p_stale interval, p_now timestamptz,
    OUT positions int8multirange, OUT error text)
RETURNS record
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_instance @extschema@.runtime_instances;
BEGIN
    positions := p_open;
    IF p_deadline_at < p_now THEN
        error := 'hard deadline exceeded';
        RETURN;
    END IF;
    SELECT i.* INTO v_instance FROM @extschema@.runtime_instances i WHERE i.instance_id = p_owner;
    -- A heartbeat since the dead were counted has ended the suspicion.
    IF p_owner = ANY (p_dead) AND v_instance.suspect_at IS NOT NULL THEN
        error := 'heartbeat stale: worker presumed dead';
    ELSIF v_instance.heartbeat_at IS NULL THEN
        error := 'no heartbeat since the claim: worker presumed dead';
        positions := CASE WHEN p_claimed_at NOT BETWEEN p_now - p_stale AND p_now + p_stale THEN p_open ELSE '{}' END;
    ELSIF v_instance.heartbeat_before_at <= p_now
          -- What was claimed so far ahead is from before the clock was set back, and the heartbeats are not.
          AND (p_claimed_at < v_instance.heartbeat_before_at OR p_claimed_at > p_now + p_stale)
          AND v_instance.held IS NOT NULL AND v_instance.held_before IS NOT NULL THEN
        error := 'attempt unknown to its worker: lost';
        positions := p_open - v_instance.held - v_instance.held_before;
    ELSE
        positions := '{}';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescuable(
    uuid, timestamptz, timestamptz, int8multirange, uuid[], interval, timestamptz) IS
    'Internal: positions of a batch that must be rescued, with the error to record.';

CREATE OR REPLACE FUNCTION @extschema@._rescuable_lease(
    p_lease @extschema@.leases, p_dead uuid[], p_stale interval, p_now timestamptz,
    OUT positions int8multirange, OUT error text)
RETURNS record
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT r.positions, r.error
    FROM @extschema@._rescuable(
        (p_lease).owner, (p_lease).claimed_at, (p_lease).deadline_at,
        int8multirange(int8range((p_lease)."position", (p_lease)."position", '[]')), p_dead, p_stale, p_now) r
$function$;
COMMENT ON FUNCTION @extschema@._rescuable_lease(@extschema@.leases, uuid[], interval, timestamptz) IS
    'Internal: the position of a moved attempt if it must be rescued, with the error to record.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_lease(
    p_batch bigint, p_position bigint, p_error text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.batch_id IS NULL OR v_lease.outcome IS NOT NULL THEN
        RETURN 0;
    END IF;
    BEGIN
        PERFORM @extschema@._end_lease(v_lease, 'rescued', NULL, to_jsonb(p_error), p_error, NULL, p_now);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        PERFORM @extschema@._append_done(@extschema@._lease_job(v_lease), 'failed', NULL, NULL, v_lease.claimed_at,
            p_now, 'rescue failed: ' || SQLERRM, NULL);
        PERFORM @extschema@._close_lease(p_batch, p_position, 'failed', p_now);
    END;
    RETURN 1;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_lease(bigint, bigint, text, timestamptz) IS
    'Internal: ends a moved attempt as rescued; one that cannot be ends failed, with the reason.';

-- Looking at every open attempt costs a pass over the claim ring. Once a heartbeat interval is enough for what
-- heartbeats tell; in between only deadlines can pass. p_after is the time of the last pass, NULL for a pass.
CREATE OR REPLACE FUNCTION @extschema@._rescuable_batches(
    p_slot integer, p_after timestamptz, p_dead uuid[], p_stale interval, p_now timestamptz)
RETURNS TABLE (batch_id bigint, positions int8multirange, error text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    IF p_after IS NULL THEN
        RETURN QUERY
        SELECT o.batch_id, r.positions, r.error
        FROM @extschema@._open_batches(p_slot) o,
             LATERAL @extschema@._rescuable(
                 o.owner, o.claimed_at, o.deadline_at, o.open, p_dead, p_stale, p_now) r
        WHERE NOT isempty(r.positions)
        ORDER BY o.batch_id;
    ELSIF @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN QUERY EXECUTE format($query$
            SELECT b.batch_id, x.positions, x.error
            FROM @extschema@.lease_claim_batches_%1$s b,
                 LATERAL @extschema@._read_batch(%1$s, b.batch_id) r,
                 LATERAL @extschema@._rescuable(
                     r.owner, r.claimed_at, r.deadline_at, r.positions - r.closed, $2, $3, $4) x
            WHERE b.deadline_at > $1 AND b.deadline_at < $4 AND NOT isempty(x.positions)
            ORDER BY b.batch_id
            $query$, p_slot) USING p_after, p_dead, p_stale, p_now;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescuable_batches(integer, timestamptz, uuid[], interval, timestamptz) IS
    'Internal: batches of a claim slot with attempts to rescue, with the error to record.';

-- When the last pass was; NULL when the next one is due.
CREATE OR REPLACE FUNCTION @extschema@._last_rescue_pass(p_now timestamptz)
RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT l.at
    FROM (SELECT to_timestamp(c.last_value / 1000.0) AS at FROM @extschema@.rescue_clock c) l
    WHERE p_now >= l.at
      AND p_now < l.at + @extschema@._setting_interval('heartbeat_seconds')
$function$;
COMMENT ON FUNCTION @extschema@._last_rescue_pass(timestamptz) IS
    'Internal: when every open attempt was last looked at; NULL when it is time to do so again.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_attempts(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_dead uuid[] := @extschema@._detect_dead_instances(p_now);
    v_stale interval := @extschema@._setting_interval('staleness_seconds');
    v_after timestamptz := @extschema@._last_rescue_pass(p_now);
    v_slot integer;
    v_found record;
    v_now record;
    v_rescued bigint := 0;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_slot IN SELECT s.slot FROM @extschema@._ring_slots('claim') s ORDER BY s.generation LOOP
        FOR v_found IN
            SELECT b.* FROM @extschema@._rescuable_batches(v_slot, v_after, v_dead, v_stale, p_now) b
        LOOP
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_found.batch_id));
            -- pause point: rescue
            SELECT r.positions, r.error INTO v_now
            FROM @extschema@._read_batch(v_slot, v_found.batch_id) b,
                 LATERAL @extschema@._rescuable(
                     b.owner, b.claimed_at, b.deadline_at, b.positions - b.closed, v_dead, v_stale, p_now) r;
            v_rescued := v_rescued + @extschema@._rescue_positions(v_slot, v_found.batch_id,
                (@extschema@._to_list(v_now.positions))[:p_limit - v_rescued], v_now.error, p_now);
            IF v_rescued >= p_limit THEN
                RETURN v_rescued;
            END IF;
        END LOOP;
    END LOOP;
    v_rescued := v_rescued + @extschema@._rescue_leases(p_limit - v_rescued, v_dead, v_stale, p_now);
    IF v_after IS NULL AND v_rescued < p_limit THEN
        PERFORM setval('@extschema@.rescue_clock', (extract(epoch FROM p_now) * 1000)::bigint);
    END IF;
    RETURN v_rescued;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_attempts(bigint, timestamptz) IS
    'Internal: rescues up to so many attempts, oldest slot first.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_leases(
    p_limit bigint, p_dead uuid[], p_stale interval, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found record;
    v_now record;
    v_rescued bigint := 0;
BEGIN
    FOR v_found IN
        SELECT l.batch_id, l."position"
        FROM @extschema@.leases l, LATERAL @extschema@._rescuable_lease(l, p_dead, p_stale, p_now) r
        WHERE l.outcome IS NULL AND NOT isempty(r.positions)
        ORDER BY l.batch_id, l."position"
        LIMIT p_limit
    LOOP
        -- pause point: rescue_lease
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_found.batch_id));
        SELECT r.positions, r.error INTO v_now
        FROM @extschema@._find_lease(v_found.batch_id, v_found."position") l,
             LATERAL @extschema@._rescuable_lease(l, p_dead, p_stale, p_now) r;
        CONTINUE WHEN isempty(v_now.positions);
        v_rescued := v_rescued
            + @extschema@._rescue_lease(v_found.batch_id, v_found."position", v_now.error, p_now);
    END LOOP;
    RETURN v_rescued;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_leases(bigint, uuid[], interval, timestamptz) IS
    'Internal: rescues up to so many moved attempts.';
