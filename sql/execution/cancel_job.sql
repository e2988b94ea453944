-- Cancel, and look-up of one job, wherever it is.

-- The open receipt of a position. A scan of the claim ring: rare, and the ring is small.
CREATE OR REPLACE FUNCTION @extschema@._find_receipt(
    p_position bigint,
    OUT claim_slot integer, OUT batch_id bigint, OUT owner uuid, OUT claimed_at timestamptz,
    OUT deadline_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('lease_claim_batches', v_slot);
        EXECUTE format('SELECT %1$s, b.batch_id, b.owner, b.claimed_at, b.deadline_at
                        FROM @extschema@.lease_claim_batches_%1$s b
                        WHERE b.positions @> $1', v_slot)
            INTO claim_slot, batch_id, owner, claimed_at, deadline_at USING p_position;
        EXIT WHEN batch_id IS NOT NULL;
    END LOOP;
    IF batch_id IS NOT NULL
       AND @extschema@._closure_outcome(claim_slot, batch_id, p_position) IS NOT NULL THEN
        batch_id := NULL;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_receipt(bigint) IS
    'Internal: the open receipt of a position; batch_id is NULL when there is none.';

-- The live ready row of a job with the cursor of its lane. Runs in a block that ends by an exception, so that its
-- relation locks vanish: a caller that idles in its transaction blocks the prune of no slot it has only looked at.
CREATE OR REPLACE FUNCTION @extschema@._look_up_ready(
    p_job_id bigint,
    OUT slot integer, OUT "position" bigint, OUT run_lease bigint, OUT is_unclaimed boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
BEGIN
    BEGIN
        SELECT f.slot, f."position", coalesce((f.ext ->> 'run_lease')::bigint, 0) AS run_lease INTO v_row
        FROM @extschema@._find_ready(p_job_id) f WHERE NOT f.is_dead
        ORDER BY coalesce((f.ext ->> 'run_lease')::bigint, 0) DESC LIMIT 1;
        slot := v_row.slot;
        "position" := v_row."position";
        run_lease := v_row.run_lease;
        IF slot IS NOT NULL THEN
            is_unclaimed := @extschema@._is_unclaimed(
                @extschema@._newest_emission(@extschema@._lane_of("position")), "position");
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_ready(bigint) IS
    'Internal: where the live body of a job lies and whether it was claimed.';

-- The same for a change, with its locks: the lane's mutation lock, shared, then the position's, then a second look. A
-- job that has changed its place meanwhile is locked where it lies now. One that was claimed there is not locked: the
-- claim is final, and who has a later place of the job locked must not wait for an earlier one.
CREATE OR REPLACE FUNCTION @extschema@._lock_ready(
    p_job_id bigint,
    OUT slot integer, OUT "position" bigint, OUT is_unclaimed boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_locked bigint;
BEGIN
    LOOP
        SELECT r.slot, r."position", r.is_unclaimed INTO slot, "position", is_unclaimed
        FROM @extschema@._look_up_ready(p_job_id) r;
        EXIT WHEN slot IS NULL OR NOT is_unclaimed OR "position" = v_locked;
        v_locked := "position";
        PERFORM pg_advisory_xact_lock_shared(@extschema@._lock_key('mutation', @extschema@._lane_of(v_locked)));
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('position', v_locked));
        -- pause point: cancel
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_ready(bigint) IS
    'Internal: where the live body of a job lies and whether it was claimed, locked if not; slot is NULL when it has '
    'none.';

-- Whoever calls it has locked the job there, or all of its lane, and has seen it wait.
CREATE OR REPLACE FUNCTION @extschema@._take_waiting(p_slot integer, p_position bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(p_slot, ARRAY[p_position]) r;
    PERFORM @extschema@._append_tombstone(p_slot, p_position);
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_waiting(integer, bigint) IS
    'Internal: removes a waiting job from its lane and returns it.';

-- A lane commits with the first job in it. Its maker holds the sequence of lane ids until then; one that committed
-- since the caller looked is seen by the second look.
CREATE OR REPLACE FUNCTION @extschema@._lane_may_come(p_lane integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_lane > coalesce((SELECT s.last_value FROM @extschema@.lane_ids s WHERE s.is_called), 0) THEN
        RETURN false;
    ELSIF NOT @extschema@._sequence_is_quiet('@extschema@.lane_ids') THEN
        RETURN true;
    END IF;
    RETURN EXISTS (SELECT FROM @extschema@.queue_lanes l WHERE l.lane_id = p_lane);
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_may_come(integer) IS
    'Internal: whether a lane that was not seen may be about to commit, or has just done so.';

-- Nobody knows who took which number. But it was taken before, so only who holds the sequence now can have it: most
-- producers commit within a moment, and those who come later do not count.
CREATE OR REPLACE FUNCTION @extschema@._numbers_settle(p_sequence regclass)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_rounds constant integer := 10;
    v_open text[] := @extschema@._open_takers(p_sequence);
BEGIN
    FOR v_round IN 1 .. c_rounds LOOP
        EXIT WHEN v_open = '{}';
        PERFORM pg_sleep(0.005);
        v_open := ARRAY(SELECT t FROM unnest(@extschema@._open_takers(p_sequence)) t
                        WHERE t = ANY (v_open) OR t = 'prepared');
    END LOOP;
    RETURN v_open = '{}';
END
$function$;
COMMENT ON FUNCTION @extschema@._numbers_settle(regclass) IS
    'Internal: waits a moment for the transactions that have taken numbers of a sequence; whether all of them ended.';

-- A transaction that is prepared gets another name, so that it cannot be followed.
CREATE OR REPLACE FUNCTION @extschema@._open_takers(p_sequence regclass)
RETURNS text[]
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce(array_agg(CASE WHEN k.pid IS NULL THEN 'prepared' ELSE k.virtualtransaction END), '{}')
    FROM pg_locks k
    WHERE k.locktype = 'relation' AND k.mode = 'RowExclusiveLock' AND k.relation = p_sequence
      AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      AND k.pid IS DISTINCT FROM pg_backend_pid()
$function$;
COMMENT ON FUNCTION @extschema@._open_takers(regclass) IS
    'Internal: the other transactions in flight that have taken numbers of a sequence.';

-- Not waiting and not running: what it is then.
CREATE OR REPLACE FUNCTION @extschema@._ended_state(p_job_id bigint, p_slot integer, p_position bigint)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_done @extschema@.done_entries;
    v_lane integer := @extschema@._lane_of(p_job_id);
BEGIN
    IF EXISTS (SELECT FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id) THEN
        RETURN 'dead_lettered';
    END IF;
    IF p_slot IS NOT NULL AND (@extschema@._completion_of(p_slot, p_position)).finalized_at IS NOT NULL THEN
        RETURN 'completed';
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL THEN
        RETURN v_done.state;
    END IF;
    IF p_job_id < @extschema@._lane_base(1) THEN
        RETURN (SELECT CASE WHEN @extschema@._numbers_settle('@extschema@.job_ids') THEN 'pruned' ELSE 'unsettled' END
                FROM @extschema@.job_ids s WHERE s.is_called AND p_job_id BETWEEN 1 AND s.last_value);
    ELSIF NOT EXISTS (SELECT FROM @extschema@.queue_lanes l WHERE l.lane_id = v_lane) THEN
        RETURN CASE WHEN @extschema@._lane_may_come(v_lane) THEN 'unsettled' END;
    ELSIF p_job_id > @extschema@._lane_tail(v_lane) THEN
        RETURN NULL;
    ELSIF @extschema@._is_unclaimed(@extschema@._newest_emission(v_lane), p_job_id)
          AND NOT @extschema@._lane_is_quiet(v_lane) THEN
        -- No claim has passed it and it has no row: its insert may still commit.
        RETURN 'unsettled';
    END IF;
    RETURN 'pruned';
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_state(bigint, integer, bigint) IS
    'Internal: dead_lettered, completed, failed, cancelled, pruned (an id that was given out and left no trace), '
    'unsettled (its insert may still commit), or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_unsettled(p_job_id bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._refuse('40001',
        format('job %s is not settled: it is on its way, or its insert has not committed', p_job_id), 'Try again.');
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_unsettled(bigint) IS
    'Internal: raises 40001 for a job that may appear any moment.';

-- The body lies where the batch says: the caller has not locked its place, and evacuation may have moved it.
CREATE OR REPLACE FUNCTION @extschema@._cancel_running(p_position bigint, p_reason text, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_receipt record := @extschema@._find_receipt(p_position);
    v_batch record;
    v_job @extschema@._job;
    v_progress jsonb;
    v_one int8multirange := int8multirange(int8range(p_position, p_position, '[]'));
BEGIN
    IF v_receipt.batch_id IS NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', v_receipt.batch_id));
    v_batch := @extschema@._read_batch(v_receipt.claim_slot, v_receipt.batch_id);
    IF v_batch.positions IS NULL OR v_batch.closed @> p_position THEN
        RETURN false;
    END IF;
    SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
    v_progress := @extschema@._take_progress(v_receipt.batch_id, v_one);
    PERFORM @extschema@._move_attempt(
        @extschema@._ended_job(@extschema@._next_attempt(v_job), v_progress -> p_position::text),
        'cancelled', v_batch.ready_slot, p_position, v_batch.claimed_at, NULL, NULL, p_reason, NULL, p_now);
    PERFORM @extschema@._append_closure(
        v_receipt.claim_slot, v_receipt.batch_id, v_batch.next_no, 'cancelled', v_one, p_reason, p_now);
    PERFORM @extschema@._notify_workers(v_job.queue, 'cancel');
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_running(bigint, text, timestamptz) IS
    'Internal: ends a running attempt as cancelled and tells its worker; false when it is not running.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_job(p_job_id bigint, p_reason text, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
    v_ready record;
    v_state text;
BEGIN
    PERFORM @extschema@._require_read_committed();
    -- A job can move on between look and lock; every move needs a claim or a tick, so a few rounds always settle it.
    FOR v_round IN 1 .. 5 LOOP
        v_job := @extschema@._take_deferred(p_job_id);
        IF v_job.job_id IS NOT NULL THEN
            PERFORM @extschema@._append_done(v_job, 'cancelled', NULL, NULL, NULL, p_now, p_reason, NULL);
            RETURN 'cancelled';
        ELSIF @extschema@._cancel_lease(p_job_id, p_reason, p_now) THEN
            RETURN 'cancelled_running';
        END IF;
        v_ready := @extschema@._lock_ready(p_job_id);
        IF v_ready.is_unclaimed THEN
            v_job := @extschema@._take_waiting(v_ready.slot, v_ready."position");
            PERFORM @extschema@._append_done(
                v_job, 'cancelled', v_ready.slot, v_ready."position", NULL, p_now, p_reason, NULL);
            RETURN 'cancelled';
        ELSIF v_ready.slot IS NOT NULL
              AND @extschema@._cancel_running(v_ready."position", p_reason, p_now) THEN
            RETURN 'cancelled_running';
        END IF;
        v_state := @extschema@._ended_state(p_job_id, v_ready.slot, v_ready."position");
        CASE
        WHEN v_state = 'dead_lettered' THEN
            RETURN v_state;
        WHEN v_state IN ('pruned', 'unsettled') THEN
            -- Also what a job on its way between two places looks like.
            CONTINUE;
        WHEN v_state IS NOT NULL THEN
            RETURN 'already_' || v_state;
        WHEN v_ready.slot IS NULL THEN
            PERFORM @extschema@._refuse('42704', format('field "job_id": there is no job %s', p_job_id),
                'Check the id.');
        ELSE
            NULL;
        END CASE;
    END LOOP;
    IF v_state = 'pruned' THEN
        RETURN v_state;
    END IF;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_job(bigint, text, timestamptz) IS
    'Internal: cancels a job wherever it is and says what was found; 42704 for an id that was never given out.';
