-- Finishing with mixed outcomes: one call, one lock per batch, by try and in
-- ascending order, so that nobody waits here.

-- A number given as a JSON number or string; NULL when it is neither.
CREATE OR REPLACE FUNCTION @extschema@._json_bigint(p_item jsonb, p_key text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE WHEN p_item ->> p_key ~ '^[0-9]{1,19}$'
            THEN CASE WHEN (p_item ->> p_key)::numeric <= 9223372036854775807 THEN (p_item ->> p_key)::bigint END END;
COMMENT ON FUNCTION @extschema@._json_bigint(jsonb, text) IS 'Internal: a non-negative integer from a JSON object.';

CREATE OR REPLACE FUNCTION @extschema@._parse_finish_item(p_item jsonb, p_ordinal bigint)
RETURNS @extschema@._finish_item
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_item @extschema@._finish_item;
    v_key text;
BEGIN
    v_item.ordinal := p_ordinal;
    IF jsonb_typeof(p_item) <> 'object' THEN
        v_item.fault := 'item must be a JSON object';
        RETURN v_item;
    END IF;
    FOREACH v_key IN ARRAY '{job_id,run_lease,claim_slot,batch_id,position}'::text[] LOOP
        IF @extschema@._json_bigint(p_item, v_key) IS NULL THEN
            v_item.fault := format('field "%s" must be a non-negative integer', v_key);
        END IF;
    END LOOP;
    v_item.job_id := @extschema@._json_bigint(p_item, 'job_id');
    v_item.run_lease := @extschema@._json_bigint(p_item, 'run_lease');
    v_item.claim_slot := least(@extschema@._json_bigint(p_item, 'claim_slot'), 99);
    v_item.batch_id := @extschema@._json_bigint(p_item, 'batch_id');
    v_item."position" := @extschema@._json_bigint(p_item, 'position');
    v_item.outcome := CASE p_item ->> 'outcome'
        WHEN 'completed' THEN 'completed'
        WHEN 'retry' THEN 'retried'
        WHEN 'snooze' THEN 'snoozed'
        WHEN 'cancel' THEN 'cancelled'
        WHEN 'fail' THEN 'failed'
        WHEN 'released' THEN 'released' END::@extschema@.attempt_outcome;
    v_item.result := nullif(p_item -> 'result', 'null');
    v_item.error := nullif(p_item -> 'error', 'null');
    v_item.reason := left(p_item ->> 'reason', 2000);
    IF v_item.fault IS NOT NULL THEN
        RETURN v_item;
    ELSIF v_item.outcome IS NULL THEN
        v_item.fault := 'field "outcome" must be completed, retry, snooze, cancel, fail or released';
    ELSIF coalesce(p_item -> 'delay_seconds', 'null') <> 'null' THEN
        IF jsonb_typeof(p_item -> 'delay_seconds') <> 'number'
           OR (p_item ->> 'delay_seconds')::numeric NOT BETWEEN 0 AND 31536000 THEN
            v_item.fault := 'field "delay_seconds" must be a number from 0 to 31536000';
        ELSE
            v_item.delay_seconds := round((p_item ->> 'delay_seconds')::numeric, 9);
        END IF;
    ELSIF v_item.outcome = 'snoozed' THEN
        v_item.fault := 'a snooze needs "delay_seconds"';
    END IF;
    IF NOT @extschema@._is_small(v_item.result) THEN
        IF octet_length(v_item.result::text) > @extschema@._setting('args_max_bytes') THEN
            v_item.fault := format('field "result" has more than %s bytes', @extschema@._setting('args_max_bytes'));
        ELSIF @extschema@._is_too_deep(v_item.result) THEN
            v_item.fault := 'field "result" is nested more than 256 levels deep';
        END IF;
    END IF;
    RETURN v_item;
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_finish_item(jsonb, bigint) IS 'Internal: one item of finish_jobs, checked.';

-- The items of one batch. The batch lock is held.
CREATE OR REPLACE FUNCTION @extschema@._finish_batch(
    p_instance uuid, p_slot integer, p_batch bigint, p_items @extschema@._finish_item[], p_now timestamptz)
RETURNS SETOF @extschema@._finish_answer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_item @extschema@._finish_item;
    v_body record;
    v_one int8multirange;
    v_compact int8multirange := '{}'::int8multirange;
    v_progress jsonb;
    v_outcome @extschema@.attempt_outcome;
    v_answer text;
BEGIN
    IF v_batch.positions IS NULL OR v_batch.owner <> p_instance THEN
        RETURN QUERY
        SELECT i.ordinal, i.job_id, i.run_lease, @extschema@._finish_lease(p_instance, i, p_now), NULL::text
        FROM unnest(p_items) i;
        RETURN;
    END IF;
    FOREACH v_item IN ARRAY p_items LOOP
        v_outcome := CASE WHEN v_compact @> v_item."position" THEN 'completed'
                          WHEN v_batch.closed @> v_item."position"
                          THEN @extschema@._closure_outcome(p_slot, p_batch, v_item."position") END;
        -- The body of a moved attempt may be pruned, so its lease says whose it is.
        SELECT r.job AS job INTO v_body FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[v_item."position"]) r;
        v_answer := CASE
            WHEN v_outcome = 'moved' THEN @extschema@._finish_lease(p_instance, v_item, p_now)
            WHEN NOT v_batch.positions @> v_item."position" OR (v_body.job).job_id IS DISTINCT FROM v_item.job_id
                 OR (v_body.job).run_lease + 1 IS DISTINCT FROM v_item.run_lease THEN 'stale'
            WHEN v_outcome IS NOT NULL THEN @extschema@._closed_answer(v_outcome, v_item)
            ELSE 'done' END;
        RETURN NEXT ROW(v_item.ordinal, v_item.job_id, v_item.run_lease, v_answer, NULL)::@extschema@._finish_answer;
        CONTINUE WHEN v_answer <> 'done' OR v_outcome IS NOT NULL;
        v_one := int8multirange(int8range(v_item."position", v_item."position", '[]'));
        v_batch.closed := v_batch.closed + v_one;
        IF v_item.outcome = 'completed'
           AND (v_item.result IS NULL OR ((v_body.job).ext -> 'keep_result') IS DISTINCT FROM 'true') THEN
            v_compact := v_compact + v_one;
        ELSE
            v_progress := @extschema@._take_progress(p_batch, v_one);
            v_outcome := @extschema@._move_attempt(
                @extschema@._ended_job(
                    @extschema@._next_attempt(v_body.job), v_progress -> v_item."position"::text),
                v_item.outcome, v_batch.ready_slot, v_item."position", v_batch.claimed_at, v_item.delay_seconds,
                v_item.error, v_item.reason, v_item.result, p_now);
            PERFORM @extschema@._append_closure(
                p_slot, p_batch, v_batch.next_no, v_outcome, v_one, v_item.reason, p_now);
            v_batch.next_no := v_batch.next_no + 1;
        END IF;
    END LOOP;
    IF NOT isempty(v_compact) THEN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_compact, NULL, p_now);
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_compact, v_batch.claimed_at, p_now);
        PERFORM @extschema@._take_progress(p_batch, v_compact);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_batch(uuid, integer, bigint, @extschema@._finish_item[], timestamptz) IS
    'Internal: finishes attempts of one batch.';

CREATE OR REPLACE FUNCTION @extschema@._next_attempt(p_job @extschema@._job)
RETURNS @extschema@._job
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.attempt := v_job.attempt + 1;
    v_job.run_lease := v_job.run_lease + 1;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._next_attempt(@extschema@._job) IS 'Internal: a ready job as its claim numbers it.';

-- The same outcome again, by the same lease, is an answer that got lost; anything else is stale.
CREATE OR REPLACE FUNCTION @extschema@._repeat_answer(
    p_was @extschema@.attempt_outcome, p_wanted @extschema@.attempt_outcome)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_was = p_wanted OR (p_was IN ('failed', 'dead_lettered') AND p_wanted IN ('failed', 'retried'))
            THEN 'already_done' ELSE 'stale' END;
COMMENT ON FUNCTION @extschema@._repeat_answer(@extschema@.attempt_outcome, @extschema@.attempt_outcome) IS
    'Internal: answer to a finish of a closed attempt.';

-- An attempt that would have brought its job back, and lost the key, was closed as cancelled.
CREATE OR REPLACE FUNCTION @extschema@._closed_answer(
    p_was @extschema@.attempt_outcome, p_item @extschema@._finish_item)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_was = 'cancelled' AND p_item.outcome IN ('retried', 'snoozed', 'released')
       AND @extschema@._has_lost_its_key(p_item.job_id, p_item.run_lease) THEN
        RETURN 'already_done';
    END IF;
    RETURN @extschema@._repeat_answer(p_was, p_item.outcome);
END
$function$;
COMMENT ON FUNCTION @extschema@._closed_answer(@extschema@.attempt_outcome, @extschema@._finish_item) IS
    'Internal: answer to a finish of a closed attempt, also of one that was closed otherwise than it was asked to.';

-- One item that cannot be stored must not hold up its batch: the items are halved until it stands alone.
CREATE OR REPLACE FUNCTION @extschema@._finish_batch_isolated(
    p_instance uuid, p_slot integer, p_batch bigint, p_items @extschema@._finish_item[], p_now timestamptz)
RETURNS SETOF @extschema@._finish_answer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_half integer := cardinality(p_items) / 2;
    v_answers @extschema@._finish_answer[];
    v_message text;
BEGIN
    BEGIN
        v_answers := ARRAY(
            SELECT ROW(a.*)::@extschema@._finish_answer
            FROM @extschema@._finish_batch(p_instance, p_slot, p_batch, p_items, p_now) a);
        RETURN QUERY SELECT a.* FROM unnest(v_answers) a;
        RETURN;
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN QUERY
        SELECT a.*
        FROM @extschema@._finish_batch_isolated(p_instance, p_slot, p_batch, p_items[:v_half], p_now) a;
        RETURN QUERY
        SELECT a.*
        FROM @extschema@._finish_batch_isolated(p_instance, p_slot, p_batch, p_items[v_half + 1:], p_now) a;
    ELSE
        RETURN NEXT ROW(p_items[1].ordinal, p_items[1].job_id, p_items[1].run_lease, 'invalid',
            v_message)::@extschema@._finish_answer;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_batch_isolated(
    uuid, integer, bigint, @extschema@._finish_item[], timestamptz) IS
    'Internal: finishes attempts of one batch; an item that fails is answered invalid and the others are done.';

CREATE OR REPLACE FUNCTION @extschema@._finish_attempts(p_instance uuid, p_outcomes jsonb, p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_items @extschema@._finish_item[];
    v_answers @extschema@._finish_answer[] := '{}'::@extschema@._finish_answer[];
    v_group record;
    v_batches integer := 0;
BEGIN
    PERFORM @extschema@._require_read_committed();
    SELECT array_agg(@extschema@._parse_finish_item(o.item, o.n) ORDER BY o.n) INTO v_items
    FROM jsonb_array_elements(p_outcomes) WITH ORDINALITY o (item, n);
    FOR v_group IN SELECT i.batch_id, i.claim_slot, array_agg(i ORDER BY i.ordinal) AS items FROM unnest(v_items) i
                   WHERE i.fault IS NULL GROUP BY i.batch_id, i.claim_slot ORDER BY i.batch_id, i.claim_slot LOOP
        v_batches := v_batches + 1;
        IF v_batches > 64 OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_group.batch_id)) THEN
            v_answers := v_answers || ARRAY(
                SELECT ROW(i.ordinal, i.job_id, i.run_lease, 'busy', NULL)::@extschema@._finish_answer
                FROM unnest(v_group.items) i);
            CONTINUE;
        END IF;
        -- pause point: finish
        v_answers := v_answers || ARRAY(
            SELECT ROW(a.*)::@extschema@._finish_answer
            FROM @extschema@._finish_batch_isolated(
                p_instance, v_group.claim_slot, v_group.batch_id, v_group.items, p_now) a);
    END LOOP;
    RETURN QUERY
    SELECT i.job_id, i.run_lease, coalesce(a.result, 'invalid'), coalesce(i.fault, a.reason)
    FROM unnest(v_items) i LEFT JOIN unnest(v_answers) a ON a.ordinal = i.ordinal
    ORDER BY i.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_attempts(uuid, jsonb, timestamptz) IS
    'Internal: finishes many attempts with mixed outcomes, each answered by itself.';

-- What became of an attempt, from its closure, or from terminal history when the receipt is gone.
CREATE OR REPLACE FUNCTION @extschema@._attempt_status(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_job @extschema@._job;
    v_row record;
    v_state @extschema@.job_state;
    v_outcome @extschema@.attempt_outcome;
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.job_id = p_job_id AND v_lease.run_lease = p_run_lease THEN
        RETURN coalesce(v_lease.outcome::text, 'open');
    ELSIF v_batch.positions @> p_position THEN
        v_outcome := @extschema@._closure_outcome(p_slot, p_batch, p_position);
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
        -- The body of one that has ended may be pruned before its receipt. A moved one without a lease has ended, and
        -- history alone may know how.
        IF v_outcome IS DISTINCT FROM 'moved'
           AND ((v_job.job_id IS NULL AND v_outcome IS NOT NULL)
                OR (v_job.job_id = p_job_id AND v_job.run_lease + 1 = p_run_lease)) THEN
            RETURN coalesce(v_outcome::text, 'open');
        END IF;
    END IF;
    FOR v_row IN SELECT f.slot FROM @extschema@._find_ready(p_job_id) f WHERE f."position" = p_position
                     AND coalesce((f.ext ->> 'run_lease')::bigint, 0) + 1 = p_run_lease LOOP
        IF (@extschema@._completion_of(v_row.slot, p_position)).finalized_at IS NOT NULL THEN
            RETURN 'completed';
        END IF;
        v_state := @extschema@._done_state(v_row.slot, p_job_id, p_position, p_run_lease);
        IF v_state IS NOT NULL THEN
            RETURN v_state;
        END IF;
    END LOOP;
    RETURN coalesce(@extschema@._moved_state(p_job_id, p_run_lease)::text, 'unknown');
END
$function$;
COMMENT ON FUNCTION @extschema@._attempt_status(bigint, bigint, integer, bigint, bigint) IS
    'Internal: what became of an attempt.';
