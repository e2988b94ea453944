-- A worker inside the database: jobs whose kind is bound to a function run by a call, from pg_cron for example.

CREATE OR REPLACE FUNCTION @extschema@.register_sql_handler(kind text, handler regprocedure)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_kind text COLLATE "default" := kind;
BEGIN
    PERFORM @extschema@._check_name('kind', v_kind);
    -- Zero, written '-', is how a client that leaves NULLs out says none.
    IF handler <> 0 AND NOT EXISTS (
        SELECT FROM pg_proc p
        WHERE p.oid = handler AND p.prokind = 'f' AND NOT p.proretset AND p.pronargs = 1
          AND p.proargtypes[0] IN ('jsonb'::regtype, '@extschema@.claimed_job'::regtype)
          AND p.prorettype IN ('jsonb'::regtype, 'void'::regtype)) THEN
        PERFORM @extschema@._refuse('22023', format('field "handler" cannot be %s', handler),
            'Name a function that takes one jsonb (the args) or one claimed_job and returns jsonb or void.');
    END IF;
    PERFORM @extschema@._bind_sql_handler(v_kind, CASE WHEN handler <> 0 THEN handler::text END);
END
$function$;
COMMENT ON FUNCTION @extschema@.register_sql_handler(text, regprocedure) IS
'Binds a kind to a function, which work() calls as its own caller; NULL unbinds it. The function takes one jsonb (the
args) or one claimed_job and returns jsonb (the result) or void; it runs with search_path pg_catalog, pg_temp unless it
sets its own. Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@._sql_handler(p_kind text)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT h.handler FROM @extschema@.sql_handlers h WHERE h.kind = p_kind
$function$;
COMMENT ON FUNCTION @extschema@._sql_handler(text) IS
    'Internal: the function that a kind is bound to; for work(), which runs as its caller.';

-- Security invoker, so that handlers get the rights of the caller and no more; hence it calls nothing but what workers
-- may call. Handler and finish of a job share a savepoint: one that fails takes its own changes back and leaves the
-- others alone.
CREATE OR REPLACE FUNCTION @extschema@.work(queue text, max_jobs integer DEFAULT 32, opts jsonb DEFAULT '{}')
RETURNS @extschema@.work_report
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    -- One for each queue: it owns nothing beyond this transaction.
    v_instance uuid := md5('@extschema@/work/' || queue)::uuid;
    v_report @extschema@.work_report := ROW(queue, 0, 0, 0, 0);
    v_job @extschema@.claimed_job;
    v_handler text;
    v_query text;
    v_result jsonb;
    v_item jsonb;
    v_fault text;
    v_context text;
    v_names text[];
    v_found text[];
BEGIN
    IF max_jobs IS NULL OR max_jobs NOT BETWEEN 1 AND 32 THEN
        RAISE EXCEPTION USING ERRCODE = '22023', HINT = 'Run 1 to 32 jobs in a transaction.',
            MESSAGE = format('field "max_jobs" is %s', coalesce(max_jobs::text, 'NULL'));
    ELSIF opts IS DISTINCT FROM '{}' THEN
        RAISE EXCEPTION USING ERRCODE = '22023', HINT = 'Leave it out, or give {}.',
            MESSAGE = 'field "opts" has no options in this version';
    END IF;
    FOREACH v_job IN ARRAY ARRAY(
        SELECT ROW(c.*)::@extschema@.claimed_job FROM @extschema@.claim_ready_runtime(queue, max_jobs, v_instance) c)
    LOOP
        v_names := coalesce(v_names, 'role'::text || ARRAY(
            SELECT s.name FROM pg_settings s WHERE s.context IN ('user', 'superuser') AND s.name <> 'temp_buffers'));
        v_found := coalesce(v_found, ARRAY(SELECT current_setting(n) FROM unnest(v_names) n));
        v_report.claimed := v_report.claimed + 1;
        v_handler := @extschema@._sql_handler(v_job.kind);
        v_item := jsonb_build_object('job_id', v_job.job_id, 'run_lease', v_job.run_lease,
            'claim_slot', v_job.claim_slot, 'batch_id', v_job.batch_id, 'position', v_job."position");
        IF v_handler IS NULL THEN
            v_report.unknown := v_report.unknown + 1;
            PERFORM @extschema@.finish_jobs(v_instance, jsonb_build_array(
                v_item || '{"outcome": "released", "reason": "unknown_kind"}'));
            CONTINUE;
        END IF;
        BEGIN
            SELECT format(CASE p.prorettype WHEN 'void'::regtype THEN 'SELECT NULL::jsonb FROM %s(%s)'
                                            ELSE 'SELECT %s(%s)' END,
                          p.oid::regproc, CASE p.proargtypes[0] WHEN 'jsonb'::regtype THEN '$1' ELSE '$2' END)
            INTO STRICT v_query FROM pg_proc p WHERE p.oid = v_handler::regprocedure;
            EXECUTE v_query INTO v_result USING v_job.args, v_job;
            -- What a deferred constraint refuses would otherwise end the whole transaction at its commit, each time
            -- anew. The block ends by an exception, so that the constraints are deferred again.
            BEGIN
                SET CONSTRAINTS ALL IMMEDIATE;
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            EXCEPTION WHEN SQLSTATE 'JQ000' THEN
                NULL;
            END;
            -- What it has set, the path perhaps, is neither for the engine nor for the next function. Only temp_buffers
            -- cannot be put back.
            PERFORM pg_catalog.set_config(s.name, s.value, true) FROM unnest(v_names, v_found) s (name, value)
            WHERE pg_catalog.current_setting(s.name) OPERATOR(pg_catalog.<>) s.value;
            SELECT f.reason INTO v_fault
            FROM @extschema@.finish_jobs(v_instance, jsonb_build_array(
                v_item || jsonb_build_object('outcome', 'completed', 'result', v_result))) f
            WHERE f.result <> 'done';
            IF v_fault IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = v_fault, HINT = 'Return a smaller result.';
            END IF;
            v_report.completed := v_report.completed + 1;
        -- OTHERS leaves a failed ASSERT out.
        EXCEPTION WHEN assert_failure OR OTHERS THEN
            GET STACKED DIAGNOSTICS v_context = PG_EXCEPTION_CONTEXT;
            v_report.failed := v_report.failed + 1;
            PERFORM @extschema@.finish_jobs(v_instance, jsonb_build_array(
                v_item || jsonb_build_object('outcome', 'retry', 'error', jsonb_build_object(
                    'error', SQLERRM, 'sqlstate', SQLSTATE, 'context', v_context))));
        END;
    END LOOP;
    RETURN v_report;
END
$function$;
COMMENT ON FUNCTION @extschema@.work(text, integer, jsonb) IS
'Claims up to max_jobs (1 to 32) jobs of a queue and runs those whose kind is bound to a function, in the caller''s
transaction and with the caller''s rights. A function that raises takes its own changes back, and its job is retried
with the error; kinds that are not bound are handed back. Holds the lanes it claims from until the transaction ends.
Errors: 22023, 23514, 25001.';
