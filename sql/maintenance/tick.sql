-- One bounded round of maintenance. Any number of callers: each step runs under its own try-lock and in
-- a block of its own, so a step that fails is reported and the others go on. Cheap steps first; at most
-- one step that locks leaves, and it is last.

CREATE OR REPLACE FUNCTION @extschema@._tick_steps()
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '{verify,publish_queue,publish_claim,plan_queue,plan_claim,refill,promote,rescue,expire,unique_keys,instances,'
    'hints,evacuate,prune_attempts,prune_claim,prune_queue,prune_deferred}'::text[];
COMMENT ON FUNCTION @extschema@._tick_steps() IS
    'Internal: steps of tick, in order. Verify and publish come first: they need a transaction that wrote nothing.';

CREATE OR REPLACE FUNCTION @extschema@._run_step(
    p_step text, p_rows integer, p_now timestamptz,
    OUT outcome text, OUT "rows" bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    outcome := 'done';
    CASE p_step
    WHEN 'verify' THEN SELECT v.outcome, v.changed INTO outcome, "rows" FROM @extschema@._verify_after_move(p_now) v;
    WHEN 'publish_queue' THEN outcome := @extschema@._publish_ring('queue');
    WHEN 'publish_claim' THEN outcome := @extschema@._publish_ring('claim');
    WHEN 'plan_queue' THEN outcome := @extschema@._plan_ring('queue', p_now);
    WHEN 'plan_claim' THEN outcome := @extschema@._plan_ring('claim', p_now);
    WHEN 'refill' THEN
        "rows" := @extschema@._refill_buckets(
            coalesce(p_rows, @extschema@._setting('promote_rows')::integer), p_now);
    WHEN 'promote' THEN
        p_rows := coalesce(p_rows, @extschema@._setting('promote_rows')::integer);
        "rows" := @extschema@._promote_waiting(@extschema@._waiting_for_keys(p_rows, p_now), p_now)
            + @extschema@._promote_due(p_rows, p_now);
    WHEN 'rescue' THEN
        "rows" := @extschema@._rescue_attempts(
            coalesce(p_rows, @extschema@._setting('rescue_rows')::integer), p_now);
    WHEN 'expire' THEN
        "rows" := @extschema@._expire_dead_letters(coalesce(p_rows, 1000), p_now)
            + @extschema@._expire_failed(coalesce(p_rows, 1000), p_now)
            + @extschema@._expire_leases(coalesce(p_rows, 1000), p_now);
    WHEN 'unique_keys' THEN "rows" := @extschema@._sweep_keys(coalesce(p_rows, 1000), p_now);
    WHEN 'instances' THEN "rows" := @extschema@._forget_instances(p_now);
    WHEN 'hints' THEN "rows" := @extschema@._audit_hints();
    WHEN 'evacuate' THEN
        SELECT e.outcome, e.moved, e.detail INTO outcome, "rows", detail
        FROM @extschema@._evacuate(coalesce(p_rows, @extschema@._setting('evacuate_rows')::integer), p_now) e;
    WHEN 'prune_attempts' THEN SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_attempts() p;
    WHEN 'prune_claim' THEN
        SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_ring('claim', p_now) p;
    WHEN 'prune_queue' THEN
        SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_ring('queue', p_now) p;
    WHEN 'prune_deferred' THEN
        SELECT p.outcome, p.moved, p.detail INTO outcome, "rows", detail FROM @extschema@._prune_deferred(p_now) p;
    END CASE;
END
$function$;
COMMENT ON FUNCTION @extschema@._run_step(text, integer, timestamptz) IS 'Internal: runs one maintenance step.';

CREATE OR REPLACE FUNCTION @extschema@._tick(p_steps text[], p_milliseconds numeric, p_rows integer)
RETURNS SETOF @extschema@.tick_report
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_all constant text[] := @extschema@._tick_steps();
    v_began timestamptz := clock_timestamp();
    v_step text;
    v_report @extschema@.tick_report;
    v_result record;
    v_leaves_locked boolean := false;
    v_published text := '';
    v_start timestamptz;
    v_lock_timeout constant text := current_setting('lock_timeout');
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM set_config('lock_timeout', '100ms', true);
    -- A caller that idles in this transaction must not hold the locks of its steps for long.
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    FOREACH v_step IN ARRAY v_all LOOP
        CONTINUE WHEN v_step <> ALL (p_steps);
        v_start := clock_timestamp();
        v_report := ROW(v_step, 'skipped_budget', NULL, 0, NULL);
        IF v_step LIKE 'plan_%' AND v_published LIKE '%' || v_step || '%' THEN
            -- Plan and publish of one ring never share a transaction.
            v_report.outcome := 'skipped_published';
        ELSIF v_leaves_locked AND v_step LIKE 'prune_%' THEN
            v_report.outcome := 'skipped_pruned';
        ELSIF extract(epoch FROM v_start - v_began) * 1000 < p_milliseconds THEN
            IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('step/' || v_step, 0)) THEN
                v_report.outcome := 'contended';
            ELSE
                BEGIN
                    v_result := @extschema@._run_step(v_step, p_rows, v_start);
                    v_report.outcome := v_result.outcome;
                    v_report."rows" := v_result."rows";
                    v_report.detail := v_result.detail;
                EXCEPTION
                WHEN read_only_sql_transaction THEN
                    -- No step will do better here, and a worker must look for the new primary.
                    RAISE;
                WHEN OTHERS THEN
                    v_report.outcome := 'failed';
                    v_report.detail := jsonb_build_object('sqlstate', SQLSTATE, 'message', SQLERRM);
                END;
            END IF;
            -- A step that answers locked or in_use has no lock left: what is in its way must not stop the next one.
            -- TRUNCATE is not MVCC: a dump that begins between copy and truncate must see one of them.
            v_leaves_locked := v_leaves_locked OR v_report.outcome IN ('pruned', 'released', 'moved');
            IF v_report.outcome = 'published' THEN
                v_published := v_published || replace(v_step, 'publish', 'plan') || ' ';
            END IF;
        END IF;
        v_report.milliseconds := extract(epoch FROM clock_timestamp() - v_start) * 1000;
        RETURN NEXT v_report;
    END LOOP;
    -- The commit of a transaction that notified waits for all others that do, and is not to be given up for that.
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
END
$function$;
COMMENT ON FUNCTION @extschema@._tick(text[], numeric, integer) IS
    'Internal: runs maintenance steps within a time budget and reports each.';
