-- Prune: a slot is emptied by TRUNCATE once nothing in it waits or runs. Gates are cheap and prove nothing by
-- themselves; the recheck under EXCLUSIVE decides: nobody writes to the slot then, and a claim that has taken one of
-- its rows and not committed leaves that row unclaimed in our view. What takes long happens there, where readers pass;
-- ACCESS EXCLUSIVE is for TRUNCATE alone. Locks are taken NOWAIT: a queued exclusive lock would block every later
-- claim.
-- A slot goes in two transactions. The first finds that nothing needs it, copies what must outlive it and releases it.
-- The second, dump_lock_seconds later, finds the same again and truncates: by then a dump that still had to see a job
-- wait or run here has its locks.

-- Lanes with rows in a slot, found by skipping through the index.
CREATE OR REPLACE FUNCTION @extschema@._lanes_in_slot(p_slot integer)
RETURNS SETOF integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_position bigint := 0;
BEGIN
    IF NOT @extschema@._leaf_in_use('ready_entries', p_slot) THEN
        RETURN;
    END IF;
    LOOP
        EXECUTE format('SELECT r."position" FROM @extschema@.ready_entries_%s r
                        WHERE r."position" > $1 ORDER BY r."position" LIMIT 1', p_slot)
            INTO v_position USING v_position;
        EXIT WHEN v_position IS NULL;
        RETURN NEXT @extschema@._lane_of(v_position);
        v_position := @extschema@._lane_base(@extschema@._lane_of(v_position) + 1);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lanes_in_slot(integer) IS 'Internal: lanes that have rows in a slot.';

-- One statement for all lanes of a slot: with hundreds of queues one for each would take seconds a round.
CREATE OR REPLACE FUNCTION @extschema@._waiting_lanes_in_slot(p_slot integer, p_limit integer)
RETURNS SETOF integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT e.lane_id
        FROM unnest($1) e
        WHERE EXISTS (
            SELECT FROM unnest(@extschema@._unclaimed_set(e)) g,
                 LATERAL (SELECT FROM @extschema@.ready_entries_%1$s r
                          WHERE r."position" >= lower(g) AND r."position" < upper(g)
                            AND NOT EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t
                                            WHERE t."position" = r."position")
                          ORDER BY r."position" LIMIT 1) w)
        LIMIT $2
        $query$, p_slot)
        USING ARRAY(SELECT n FROM @extschema@._newest_emissions(
                        ARRAY(SELECT l FROM @extschema@._lanes_in_slot(p_slot) l)) n), p_limit;
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_lanes_in_slot(integer, integer) IS
    'Internal: up to so many lanes with waiting jobs in a slot, lowest first.';

-- What keeps the rows of a slot alive; NULL when nothing does. History is not a reason here.
CREATE OR REPLACE FUNCTION @extschema@._slot_blocker(p_ring text, p_slot integer)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint := @extschema@._ring_cursor(p_ring);
    v_lane integer;
    v_open record;
BEGIN
    IF p_slot = v_cursor % 64 THEN
        RETURN '{"reason": "current"}'::jsonb;
    ELSIF p_slot = @extschema@._planned_slot(p_ring, v_cursor / 64) THEN
        RETURN '{"reason": "planned"}'::jsonb;
    END IF;
    IF p_ring = 'queue' THEN
        v_lane := (SELECT l FROM @extschema@._waiting_lanes_in_slot(p_slot, 1) l);
        IF v_lane IS NOT NULL THEN
            RETURN (SELECT jsonb_build_object(
                        'reason', 'unclaimed', 'queue', l.queue, 'priority', l.priority, 'shard', l.shard)
                    FROM @extschema@.queue_lanes l
                    WHERE l.lane_id = v_lane);
        END IF;
    END IF;
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN p_ring = 'claim' AND v_claim_slot <> p_slot;
        v_open := @extschema@._first_open_batch(v_claim_slot, CASE p_ring WHEN 'queue' THEN p_slot END);
        IF v_open.batch_id IS NOT NULL THEN
            RETURN jsonb_build_object('reason', 'receipts', 'instance', v_open.owner, 'batch_id', v_open.batch_id,
                                      'position', lower(v_open.open), 'claimed_at', v_open.claimed_at);
        END IF;
    END LOOP;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_blocker(text, integer) IS
    'Internal: why a slot cannot be emptied: current, planned, unclaimed (queue) or receipts (instance).';

-- Whether the history of a slot must be kept a while. Room comes first: without an
-- empty slot, or above the size cap, it goes.
CREATE OR REPLACE FUNCTION @extschema@._slot_is_retained(p_ring text, p_slot integer, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_newest timestamptz;
    v_empty bigint;
    v_bytes bigint;
    v_before timestamptz := p_now - @extschema@._setting_interval(
        CASE p_ring WHEN 'queue' THEN 'terminal_retention_seconds' ELSE 'attempt_evidence_seconds' END);
BEGIN
    SELECT count(*) FILTER (WHERE b.bytes = 0), sum(b.bytes) INTO v_empty, v_bytes
    FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s,
         LATERAL (SELECT @extschema@._slot_bytes(p_ring, s) AS bytes) b;
    IF v_empty = 0 OR (p_ring = 'queue' AND v_bytes > @extschema@._setting('ring_size_cap_bytes')) THEN
        RETURN false;
    ELSIF @extschema@._slot_left_at(p_ring, p_slot) > v_before THEN
        -- Rows that ended there until then are not older than retention; no need to look.
        RETURN true;
    END IF;
    IF p_ring = 'queue' THEN
        v_newest := @extschema@._newest_terminal_at(p_slot);
    ELSE
        EXECUTE format('SELECT max(c.closed_at) FROM @extschema@.lease_claim_closures_%s c', p_slot) INTO v_newest;
    END IF;
    RETURN coalesce(v_newest > v_before, false);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_is_retained(text, integer, timestamptz) IS
    'Internal: whether retention keeps a slot.';

CREATE OR REPLACE FUNCTION @extschema@._lock_slot(p_ring text, p_slot integer, p_mode text, p_tries integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_try IN 1 .. p_tries LOOP
        BEGIN
            EXECUTE format('LOCK TABLE %s IN %s MODE NOWAIT',
                (SELECT string_agg('@extschema@.' || t.name || '_' || p_slot, ', ' ORDER BY t.o)
                 FROM unnest(@extschema@._ring_tables(p_ring)) WITH ORDINALITY t (name, o)), p_mode);
            RETURN true;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.002);
        END;
    END LOOP;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_slot(text, integer, text, integer) IS
    'Internal: locks all leaves of a slot, or none, without queueing.';

-- Whether TRUNCATE could have its locks now; they are given back at once.
CREATE OR REPLACE FUNCTION @extschema@._is_lockable(p_ring text, p_slot integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_is_locked boolean;
BEGIN
    BEGIN
        v_is_locked := @extschema@._lock_slot(p_ring, p_slot, 'ACCESS EXCLUSIVE', 10);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        RETURN v_is_locked;
    END;
END
$function$;
COMMENT ON FUNCTION @extschema@._is_lockable(text, integer) IS 'Internal: whether nobody else has a slot locked.';

CREATE OR REPLACE FUNCTION @extschema@._end_keys_of_slot(p_slot integer, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_keys bytea[];
    v_job_ids bigint[];
    v_states @extschema@.job_state[];
    v_expires_at timestamptz[];
BEGIN
    IF NOT EXISTS (SELECT FROM @extschema@.job_unique_claims) THEN
        RETURN;
    END IF;
    SELECT array_agg(decode(j.unique_key, 'hex')), array_agg(j.job_id), array_agg(j.state),
           array_agg(j.finalized_at + @extschema@._setting_interval(@extschema@._retention_of(j.state)))
    INTO v_keys, v_job_ids, v_states, v_expires_at
    FROM @extschema@._ended_unique_jobs(p_slot) j;
    PERFORM @extschema@._end_keys(v_keys, v_job_ids, v_states, v_expires_at, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._end_keys_of_slot(integer, timestamptz) IS
    'Internal: settles the unique keys of jobs whose end is about to be forgotten.';

-- Whether something ended or was moved in a slot since it was released: a producer with an old view of the ring can
-- have put a job there that came and went between two looks.
CREATE OR REPLACE FUNCTION @extschema@._ended_since(p_ring text, p_slot integer, p_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found boolean;
BEGIN
    IF p_ring = 'queue' AND @extschema@._newest_terminal_at(p_slot) > p_at THEN
        RETURN true;
    END IF;
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN (p_ring = 'claim' AND v_claim_slot <> p_slot)
            OR NOT @extschema@._leaf_in_use('lease_claim_closures', v_claim_slot);
        EXECUTE format('SELECT EXISTS (
                SELECT FROM @extschema@.lease_claim_closures_%1$s c
                JOIN @extschema@.lease_claim_batches_%1$s b ON b.batch_id = c.batch_id
                WHERE c.closed_at > $1 AND ($2 IS NULL OR b.ready_slot = $2))', v_claim_slot)
            INTO v_found USING p_at, CASE p_ring WHEN 'queue' THEN p_slot END;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_since(text, integer, timestamptz) IS
    'Internal: whether an attempt or a job ended in a slot since a time.';

CREATE OR REPLACE FUNCTION @extschema@._prune_slot(p_ring text, p_slot integer, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_released timestamptz := @extschema@._slot_released_at(p_ring, p_slot);
    v_kept bigint := 0;
    v_outcome text := 'pruned';
    v_used text;
BEGIN
    -- A reader that stays, such as a dump, must not let all that follows be done in vain each time.
    IF (v_released IS NOT NULL OR @extschema@._setting('dump_lock_seconds') = 0)
       AND NOT @extschema@._is_lockable(p_ring, p_slot) THEN
        RETURN 'locked';
    END IF;
    -- The block undoes counts and locks when the slot turns out to be in use.
    BEGIN
        IF NOT @extschema@._lock_slot(p_ring, p_slot, 'EXCLUSIVE', 1) THEN
            RETURN 'locked';
        END IF;
        -- pause point: recheck
        IF @extschema@._slot_blocker(p_ring, p_slot) IS NOT NULL THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        IF p_ring = 'queue' THEN
            v_kept := @extschema@._keep_failed(p_slot, p_now) + @extschema@._checkpoint_claim_heads(p_slot);
        END IF;
        IF @extschema@._setting('dump_lock_seconds') > 0
           AND (v_released IS NULL OR v_kept > 0 OR @extschema@._ended_since(p_ring, p_slot, v_released)) THEN
            PERFORM @extschema@._note_released(p_ring, p_slot, p_now);
            RETURN 'released';
        END IF;
        IF p_ring = 'queue' THEN
            PERFORM @extschema@._fold_terminal_counts(p_slot, p_now);
            PERFORM @extschema@._end_keys_of_slot(p_slot, p_now);
        END IF;
        IF NOT @extschema@._lock_slot(p_ring, p_slot, 'ACCESS EXCLUSIVE', 10) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        v_used := (
            SELECT string_agg('@extschema@.' || t.name || '_' || p_slot, ', ')
            FROM unnest(@extschema@._ring_tables(p_ring)) t (name)
            WHERE @extschema@._leaf_in_use(t.name, p_slot));
        PERFORM @extschema@._note_released(p_ring, p_slot, NULL);
        EXECUTE format('TRUNCATE %s', v_used);
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_slot(text, integer, timestamptz) IS
    'Internal: empties one slot, or releases it, so that a later call does: pruned, released, locked or in_use.';

-- The gates of prune. A slot is released so early that it can go when its retention ends. While it is released nobody
-- looks at it, and one that is needed again has to be seen free again.
CREATE OR REPLACE FUNCTION @extschema@._prune_blocker(p_ring text, p_slot integer, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_dumps interval := @extschema@._setting_interval('dump_lock_seconds');
    v_released timestamptz := CASE WHEN v_dumps > interval '0' THEN @extschema@._slot_released_at(p_ring, p_slot) END;
    v_blocker jsonb;
BEGIN
    IF NOT @extschema@._is_past_dumps(v_released, p_now) THEN
        RETURN '{"reason": "recent"}'::jsonb;
    ELSIF @extschema@._slot_is_retained(
            p_ring, p_slot, CASE WHEN v_released IS NULL THEN p_now + v_dumps ELSE p_now END) THEN
        RETURN '{"reason": "retention"}'::jsonb;
    END IF;
    v_blocker := @extschema@._slot_blocker(p_ring, p_slot);
    IF v_blocker IS NOT NULL AND v_released IS NOT NULL THEN
        PERFORM @extschema@._note_released(p_ring, p_slot, NULL);
    END IF;
    RETURN v_blocker;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_blocker(text, integer, timestamptz) IS
    'Internal: why a slot is not emptied now: retention, recent (a dump may not have locked it yet), or what keeps it '
    'alive.';

-- The oldest slot that can go, at most one.
CREATE OR REPLACE FUNCTION @extschema@._prune_ring(p_ring text, p_now timestamptz, OUT outcome text, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_blocker jsonb;
    v_outcome text;
BEGIN
    outcome := 'nothing';
    PERFORM @extschema@._require_read_committed();
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        outcome := 'contended';
        RETURN;
    END IF;
    FOR v_slot IN SELECT s FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s
                  LEFT JOIN @extschema@._ring_slots(p_ring) r ON r.slot = s
                  WHERE s <> @extschema@._ring_cursor(p_ring) % 64 AND NOT @extschema@._slot_is_empty(p_ring, s)
                  ORDER BY r.generation NULLS FIRST LOOP
        -- What the gates look at must not stay locked: they look into other slots than the one that is pruned.
        BEGIN
            v_blocker := @extschema@._prune_blocker(p_ring, v_slot, p_now);
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        END;
        IF v_blocker IS NULL THEN
            -- pause point: prune
            v_outcome := @extschema@._prune_slot(p_ring, v_slot, p_now);
            IF v_outcome IN ('pruned', 'released') OR detail IS NULL THEN
                outcome := v_outcome;
                detail := jsonb_build_object('slot', v_slot);
            END IF;
            -- A slot that an idle transaction has locked does not stop the others.
            EXIT WHEN v_outcome IN ('pruned', 'released');
        ELSIF detail IS NULL THEN
            outcome := 'skipped';
            detail := v_blocker || jsonb_build_object('slot', v_slot);
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_ring(text, timestamptz) IS
    'Internal: empties the oldest slot that nothing needs; otherwise says what keeps the oldest one.';

-- leases and attempt_state are ordinary tables. Once empty they are truncated, so that no snapshot can keep what died
-- in them; below 256 kB that is not worth the dead rows that TRUNCATE leaves in the catalog.
CREATE OR REPLACE FUNCTION @extschema@._prune_attempts(OUT outcome text, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_table text;
BEGIN
    outcome := 'nothing';
    FOREACH v_table IN ARRAY '{leases,attempt_state}'::text[] LOOP
        CONTINUE WHEN pg_relation_size(('@extschema@.' || v_table)::regclass) < 262144
            OR NOT @extschema@._is_vacant(v_table);
        BEGIN
            EXECUTE format('LOCK TABLE @extschema@.%I IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
            IF NOT @extschema@._is_vacant(v_table) THEN
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            END IF;
            EXECUTE format('TRUNCATE @extschema@.%I', v_table);
            outcome := 'pruned';
            detail := jsonb_build_object('table', v_table);
            RETURN;
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        WHEN lock_not_available THEN
            outcome := 'locked';
            detail := jsonb_build_object('table', v_table);
        END;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_attempts() IS
    'Internal: truncates leases or attempt_state when nothing is in it: nothing, pruned or locked.';

CREATE OR REPLACE FUNCTION @extschema@._is_vacant(p_table text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_is_vacant boolean;
BEGIN
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM @extschema@.%I)', p_table) INTO v_is_vacant;
    RETURN v_is_vacant;
END
$function$;
COMMENT ON FUNCTION @extschema@._is_vacant(text) IS 'Internal: whether a table has no visible row.';
