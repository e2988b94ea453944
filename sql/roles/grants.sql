-- Who may do what: one list. The extension makes no roles; grant_* give rights to the roles of the user.

CREATE OR REPLACE FUNCTION @extschema@._capabilities()
RETURNS TABLE (capability text, object_class text, object_name text)
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT c.capability, 'function', f
    FROM (VALUES
        ('producer',
            '{insert_job,insert_jobs,insert_many,ordering_shard,unique_key,concurrency_digest,'
            'cancel_by_unique_key,version,schema_version,error_codes}'::text[]),
        ('worker',
            '{register_instance,heartbeat,claim_ready_runtime,claim_status,complete_jobs,finish_jobs,complete_job,'
            'attempt_status,set_progress,work,_sql_handler,tick,version,schema_version,error_codes}'::text[]),
        ('operator',
            '{declare_queue,pause_queue,resume_queue,drain_queue,cancel_job,retry_job,update_job,job,retry_dlq,'
            'purge_dlq,explain_job,queue_counts,queue_depths,ring_status,set_setting,register_sql_handler,verify,tick,'
            'api,version,schema_version,error_codes}'::text[]),
        ('reader',
            '{job,explain_job,queue_counts,queue_depths,ring_status,api,version,schema_version,error_codes}'::text[])
        ) c (capability, functions),
        unnest(c.functions) f
    UNION ALL
    SELECT c, 'view', v
    FROM unnest('{operator,reader}'::text[]) c, unnest('{jobs,terminal_jobs,dlq,queues,instances,settings}'::text[]) v
    UNION ALL
    SELECT 'producer', 'inbox', 'job_inbox'
    UNION ALL
    -- A view calls its function with the rights of the reader; the functions
    -- are security definer and take no arguments.
    SELECT c, 'function', f
    FROM unnest('{operator,reader}'::text[]) c,
         unnest('{_list_jobs,_list_terminal,_list_dlq,_list_queues,_list_instances,_list_settings}'::text[]) f
$function$;
COMMENT ON FUNCTION @extschema@._capabilities() IS 'Internal: functions and views of each capability.';

CREATE OR REPLACE FUNCTION @extschema@.api()
RETURNS SETOF @extschema@.api_function
LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT p.proname::text, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
           ARRAY(SELECT c.capability FROM @extschema@._capabilities() c
                 WHERE c.object_class = 'function' AND c.object_name = p.proname ORDER BY 1),
           obj_description(p.oid, 'pg_proc')
    FROM pg_proc p
    WHERE p.pronamespace = '@extschema@'::regnamespace AND NOT starts_with(p.proname, '_')
    ORDER BY p.proname
$function$;
COMMENT ON FUNCTION @extschema@.api() IS
    'The public functions, from the catalog: arguments, result, who may call them, and what they do.';

CREATE OR REPLACE FUNCTION @extschema@._grant(p_capability text, p_role regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_type regtype;
    v_object record;
BEGIN
    IF p_role IS NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "role" must not be NULL', 'Name an existing role.');
    ELSIF NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = p_role) THEN
        PERFORM @extschema@._refuse('42704', 'field "role" names no role', 'Name an existing role.');
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA @extschema@ TO %s', p_role);
    -- Calls need no right on the types of their answers; a function that takes a claimed_job does.
    FOR v_type IN
        SELECT t.oid FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE t.typnamespace = '@extschema@'::regnamespace AND (t.typtype = 'e' OR c.relkind = 'c')
          AND NOT starts_with(t.typname, '_')
    LOOP
        EXECUTE format('GRANT USAGE ON TYPE %s TO %s', v_type, p_role);
    END LOOP;
    FOR v_object IN SELECT c.* FROM @extschema@._capabilities() c WHERE c.capability = p_capability LOOP
        IF v_object.object_class = 'view' THEN
            EXECUTE format('GRANT SELECT ON @extschema@.%I TO %s', v_object.object_name, p_role);
        ELSIF v_object.object_class = 'inbox' THEN
            EXECUTE format('GRANT INSERT ON @extschema@.%I TO %s', v_object.object_name, p_role);
        ELSE
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s',
                (SELECT p.oid::regprocedure FROM pg_proc p
                 WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proname = v_object.object_name), p_role);
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._grant(text, regrole) IS 'Internal: grants a capability.';

CREATE OR REPLACE FUNCTION @extschema@.grant_producer(role regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$ SELECT @extschema@._grant('producer', role) $function$;
COMMENT ON FUNCTION @extschema@.grant_producer(regrole) IS
    'Lets a role enqueue. Owner or superuser only. Errors: 22023, 42704, 42501.';

CREATE OR REPLACE FUNCTION @extschema@.grant_worker(role regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$ SELECT @extschema@._grant('worker', role) $function$;
COMMENT ON FUNCTION @extschema@.grant_worker(regrole) IS
    'Lets a role claim and finish jobs and run maintenance. Owner or superuser only. Errors: 22023, 42704, 42501.';

CREATE OR REPLACE FUNCTION @extschema@.grant_operator(role regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$ SELECT @extschema@._grant('operator', role) $function$;
COMMENT ON FUNCTION @extschema@.grant_operator(regrole) IS
    'Lets a role manage queues and jobs and read the views. Owner or superuser only. Errors: 22023, 42704, 42501.';

CREATE OR REPLACE FUNCTION @extschema@.grant_reader(role regrole)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$ SELECT @extschema@._grant('reader', role) $function$;
COMMENT ON FUNCTION @extschema@.grant_reader(regrole) IS
    'Lets a role read the views and the read-only calls. Owner or superuser only. Errors: 22023, 42704, 42501.';

-- PostgreSQL gives PUBLIC EXECUTE on new functions and USAGE on new types, rows of tables included: somebody else's
-- table with a column of such a type would hold up an upgrade.
DO $block$
BEGIN
    PERFORM @extschema@._close_to_public();
END
$block$;
