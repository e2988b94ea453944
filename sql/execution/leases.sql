-- Leases: attempts that outlived the ring. Evacuation closes the receipt as moved and writes the attempt here with its
-- body and under its token; from then on this row decides. As for a receipt, every change holds the lock of its batch.

-- The lease of a token, ended or not; NULL when it was never moved. Costs one look at an empty file when nothing was.
CREATE OR REPLACE FUNCTION @extschema@._find_lease(p_batch bigint, p_position bigint)
RETURNS @extschema@.leases
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lease @extschema@.leases;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        SELECT l.* INTO v_lease FROM @extschema@.leases l WHERE l.batch_id = p_batch AND l."position" = p_position;
    END IF;
    RETURN v_lease;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_lease(bigint, bigint) IS 'Internal: the lease of a moved attempt, or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._find_open_lease(p_job_id bigint)
RETURNS @extschema@.leases
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lease @extschema@.leases;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        SELECT l.* INTO v_lease FROM @extschema@.leases l WHERE l.job_id = p_job_id AND l.outcome IS NULL;
    END IF;
    RETURN v_lease;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_open_lease(bigint) IS 'Internal: the lease under which a job runs, or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._lease_job(p_lease @extschema@.leases)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_lease).job_id, (p_lease).queue, (p_lease).priority, (p_lease).shard, (p_lease).run_at,
    (p_lease).attempt, (p_lease).run_lease, (p_lease).kind, (p_lease).args, (p_lease).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._lease_job(@extschema@.leases) IS
    'Internal: the job of a lease, as its claim numbered it.';

-- Moves open attempts of one batch here. The batch lock is held; copy and closure share a transaction.
CREATE OR REPLACE FUNCTION @extschema@._lease_receipts(
    p_slot integer, p_batch bigint, p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_moved bigint[];
BEGIN
    IF v_batch.positions IS NULL THEN
        RETURN 0;
    END IF;
    WITH moved AS (
        INSERT INTO @extschema@.leases
            (batch_id, "position", job_id, run_lease, claimed_at, deadline_at, run_at, owner, priority, shard,
             attempt, queue, kind, args, ext)
        SELECT p_batch, r."position", (r.job).job_id, (r.job).run_lease + 1, v_batch.claimed_at, v_batch.deadline_at,
               (r.job).run_at, v_batch.owner, (r.job).priority, (r.job).shard, (r.job).attempt + 1, (r.job).queue,
               (r.job).kind, (r.job).args, (r.job).ext
        FROM @extschema@._read_ready(v_batch.ready_slot,
            (@extschema@._to_list(v_batch.positions - v_batch.closed))[:p_limit]) r
        RETURNING "position")
    SELECT array_agg(m."position" ORDER BY m."position") INTO v_moved FROM moved m;
    IF v_moved IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM @extschema@._append_closure(
        p_slot, p_batch, v_batch.next_no, 'moved', @extschema@._sorted_to_set(v_moved), NULL, p_now);
    RETURN cardinality(v_moved);
END
$function$;
COMMENT ON FUNCTION @extschema@._lease_receipts(integer, bigint, bigint, timestamptz) IS
    'Internal: turns up to so many open receipts of a batch into leases.';

-- The body goes, the evidence stays.
CREATE OR REPLACE FUNCTION @extschema@._close_lease(
    p_batch bigint, p_position bigint, p_outcome @extschema@.attempt_outcome, p_now timestamptz)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    UPDATE @extschema@.leases l SET outcome = p_outcome, ended_at = p_now, args = NULL, ext = NULL
    WHERE l.batch_id = p_batch AND l."position" = p_position
$function$;
COMMENT ON FUNCTION @extschema@._close_lease(bigint, bigint, @extschema@.attempt_outcome, timestamptz) IS
    'Internal: marks a lease as ended.';

-- Its body lies in no slot, so history stores it with the row. A result is kept when the job asks for it.
CREATE OR REPLACE FUNCTION @extschema@._end_lease(
    p_lease @extschema@.leases, p_outcome @extschema@.attempt_outcome, p_delay_seconds numeric, p_error jsonb,
    p_reason text, p_result jsonb, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_progress jsonb := @extschema@._take_progress(p_lease.batch_id,
        int8multirange(int8range(p_lease."position", p_lease."position", '[]')));
    v_outcome @extschema@.attempt_outcome;
BEGIN
    v_outcome := @extschema@._move_attempt(
        @extschema@._ended_job(@extschema@._lease_job(p_lease), v_progress -> p_lease."position"::text),
        p_outcome, NULL, NULL, p_lease.claimed_at, p_delay_seconds, p_error, p_reason,
        CASE WHEN p_lease.ext -> 'keep_result' = 'true' THEN p_result END, p_now);
    PERFORM @extschema@._close_lease(p_lease.batch_id, p_lease."position", v_outcome, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._end_lease(
    @extschema@.leases, @extschema@.attempt_outcome, numeric, jsonb, text, jsonb, timestamptz) IS
    'Internal: ends a moved attempt and puts its job where the outcome sends it.';

CREATE OR REPLACE FUNCTION @extschema@._complete_lease(
    p_instance uuid, p_batch bigint, p_position bigint, p_now timestamptz)
RETURNS @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.owner IS DISTINCT FROM p_instance THEN
        RETURN ROW(NULL, NULL, 'stale', NULL)::@extschema@.finish_result;
    ELSIF v_lease.outcome IS NULL THEN
        PERFORM @extschema@._end_lease(v_lease, 'completed', NULL, NULL, NULL, NULL, p_now);
    END IF;
    RETURN ROW(v_lease.job_id, v_lease.run_lease,
        CASE WHEN v_lease.outcome IS NULL THEN 'done'
             WHEN v_lease.outcome = 'completed' THEN 'already_done'
             ELSE 'stale' END, NULL)::@extschema@.finish_result;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_lease(uuid, bigint, bigint, timestamptz) IS
    'Internal: completes a moved attempt.';

CREATE OR REPLACE FUNCTION @extschema@._finish_lease(
    p_instance uuid, p_item @extschema@._finish_item, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_item.batch_id, p_item."position");
BEGIN
    IF v_lease.owner IS DISTINCT FROM p_instance OR v_lease.job_id <> p_item.job_id
       OR v_lease.run_lease <> p_item.run_lease THEN
        RETURN 'stale';
    ELSIF v_lease.outcome IS NOT NULL THEN
        RETURN @extschema@._closed_answer(v_lease.outcome, p_item);
    END IF;
    PERFORM @extschema@._end_lease(v_lease, p_item.outcome, p_item.delay_seconds, p_item.error, p_item.reason,
        p_item.result, p_now);
    RETURN 'done';
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_lease(uuid, @extschema@._finish_item, timestamptz) IS
    'Internal: finishes a moved attempt and answers: done, already_done or stale.';

-- For the caller's own transaction. An old snapshot that cannot see the lease must not take the attempt for ended: the
-- key knows better than the snapshot.
CREATE OR REPLACE FUNCTION @extschema@._complete_leased_job(
    p_job_id bigint, p_run_lease bigint, p_batch bigint, p_position bigint, p_result jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.batch_id IS NULL THEN
        IF NOT @extschema@._is_read_committed() AND pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
            BEGIN
                INSERT INTO @extschema@.leases
                    (batch_id, "position", job_id, run_lease, claimed_at, run_at, owner, priority, shard, attempt,
                     queue, kind)
                VALUES (p_batch, p_position, 0, 0, p_now, p_now, gen_random_uuid(), 1, 0, 0, '', '');
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            EXCEPTION WHEN SQLSTATE 'JQ000' THEN
                NULL;
            WHEN unique_violation THEN
                PERFORM @extschema@._refuse('40001', format('this snapshot is older than a change of job %s', p_job_id),
                    'Repeat the transaction in a fresh snapshot.');
            END;
        END IF;
        RETURN false;
    ELSIF v_lease.job_id <> p_job_id OR v_lease.run_lease <> p_run_lease OR v_lease.outcome IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM @extschema@._end_lease(v_lease, 'completed', NULL, NULL, NULL, p_result, p_now);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_leased_job(bigint, bigint, bigint, bigint, jsonb, timestamptz) IS
    'Internal: completes a moved attempt in the caller''s transaction; false when there is none to complete.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_lease(p_job_id bigint, p_reason text, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_open_lease(p_job_id);
BEGIN
    IF v_lease.batch_id IS NULL THEN
        RETURN false;
    END IF;
    -- pause point: cancel_lease
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', v_lease.batch_id));
    v_lease := @extschema@._find_lease(v_lease.batch_id, v_lease."position");
    IF v_lease.batch_id IS NULL OR v_lease.outcome IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM @extschema@._end_lease(v_lease, 'cancelled', NULL, NULL, p_reason, NULL, p_now);
    PERFORM @extschema@._notify_workers(v_lease.queue, 'cancel');
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_lease(bigint, text, timestamptz) IS
    'Internal: ends a moved attempt as cancelled and tells its worker; false when the job has none.';

CREATE OR REPLACE FUNCTION @extschema@._expire_leases(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) = 0 THEN
        RETURN 0;
    END IF;
    DELETE FROM @extschema@.leases l
    WHERE (l.batch_id, l."position") IN (
        SELECT x.batch_id, x."position" FROM @extschema@.leases x
        -- The table is truncated when it is empty: not before a dump that saw the attempt run has its lock.
        WHERE x.ended_at < p_now - greatest(@extschema@._setting_interval('attempt_evidence_seconds'),
                                            @extschema@._setting_interval('dump_lock_seconds'))
        ORDER BY x.ended_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_leases(bigint, timestamptz) IS
    'Internal: forgets leases that ended more than attempt_evidence_seconds ago.';
