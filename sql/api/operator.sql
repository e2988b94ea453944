-- Calls of operators and of readers.

CREATE OR REPLACE FUNCTION @extschema@.version()
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '0.2.0';
COMMENT ON FUNCTION @extschema@.version() IS 'Version of the installed code.';

CREATE OR REPLACE FUNCTION @extschema@.schema_version()
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 2;
COMMENT ON FUNCTION @extschema@.schema_version() IS 'Number of the schema; a client refuses one below what it needs.';

CREATE OR REPLACE FUNCTION @extschema@.declare_queue(queue text, opts jsonb DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    PERFORM @extschema@._check_options('opts', opts,
        '{enqueue_shards,strict_fifo,notify,dlq,aging_seconds,deadline_seconds}');
    PERFORM @extschema@._declare_queue(v_queue, opts);
    -- A strict queue's lanes must exist before its producers do: nobody may fall back to another lane there.
    PERFORM @extschema@._create_lanes(v_queue, (@extschema@._queue_options(v_queue)).strict_fifo);
END
$function$;
COMMENT ON FUNCTION @extschema@.declare_queue(text, jsonb) IS
'Declares a queue or changes its options; options not named keep their value, null restores the default. opts:
enqueue_shards (1 to 64), strict_fifo (producers of a lane follow each other until commit), notify (wake-ups), dlq
(failed jobs go to the dead letters), aging_seconds, deadline_seconds. Lowering enqueue_shards leaves
the old lanes claimable. Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.pause_queue(queue text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    RETURN @extschema@._set_paused(v_queue, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.pause_queue(text) IS
    'Stops claims of a queue; running attempts go on. False when it was paused already. Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.resume_queue(queue text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    IF @extschema@._set_paused(v_queue, NULL) THEN
        PERFORM @extschema@._ring_doorbell(v_queue);
        RETURN true;
    END IF;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@.resume_queue(text) IS
    'Lets a paused queue be claimed again. False when it was not paused. Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.drain_queue(queue text, opts jsonb DEFAULT '{}')
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    PERFORM @extschema@._check_options('opts', opts, '{limit,reason}');
    RETURN @extschema@._drain_queue(v_queue, coalesce(@extschema@._option_integer(opts, 'limit', 1, 10000), 1000),
        coalesce(@extschema@._option_text(opts, 'reason', 2000), 'drained'), clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.drain_queue(text, jsonb) IS
'Cancels jobs of a queue that wait (available, scheduled, retryable), at most opts.limit (default 1000, no more than ten
thousand) a call; running ones go on. Returns how many; call it in transactions of its own until it returns 0. What
producers have not committed yet stays. Until then, or ten seconds after the last call, workers claim nothing from the
queue once they hear of it by a heartbeat. opts: limit, reason (default drained). Errors: 40001 others work on all that
is left: try again; 22023, 23514, 25001.';

CREATE OR REPLACE FUNCTION @extschema@._check_job_id(p_job_id bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_job_id IS NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "job_id" must not be NULL',
            'Give the id that the insert returned.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_job_id(bigint) IS 'Internal: a job id is given (22023).';

CREATE OR REPLACE FUNCTION @extschema@.cancel_job(job_id bigint, reason text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_reason text COLLATE "default" := left(reason, 2000);
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    RETURN @extschema@._cancel_job(job_id, v_reason, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.cancel_job(bigint, text) IS
'Cancels a job, in the caller''s transaction. Answers what was found: cancelled (it waited), cancelled_running
(its attempt ends now and its worker is told), already_completed, already_failed, already_cancelled,
dead_lettered or pruned (nothing changed). While the transaction is open a running job''s batch cannot be
finished. Errors: 42704 unknown id, 22023, 25001, 40001.';

CREATE OR REPLACE FUNCTION @extschema@.job(job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    PERFORM @extschema@._require_read_committed();
    RETURN @extschema@._job_info(job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@.job(bigint) IS
'Everything known about one job. State pruned: the id was given out and nothing of the job is visible
(pruned, purged or rolled back); pruned_at is then the time of the newest prune. Errors: 42704 for an id that was never
given out, 40001 while its insert may still commit, 22023, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.explain_job(job_id bigint)
RETURNS @extschema@.job_explanation
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    PERFORM @extschema@._require_read_committed();
    RETURN @extschema@._explain_job(job_id, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.explain_job(bigint) IS
'Why a job is where it is, in one sentence for people and as facts for programs: paused, behind others, not due, unknown
to every live worker, running where, ended how. Errors: 42704 for an id that was never given out, 40001 while its insert
may still commit, 22023, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.retry_dlq(job_id bigint, opts jsonb DEFAULT '{}')
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    PERFORM @extschema@._check_options('opts', opts, '{queue,priority,delay_seconds}');
    v_job := @extschema@._take_dead_letter(job_id, v_now);
    IF v_job.job_id IS NULL THEN
        PERFORM @extschema@._refuse('42704', format('field "job_id": no dead letter has the id %s', job_id),
            'It was retried or purged, or never failed.');
    END IF;
    RETURN ROW(job_id,
        @extschema@._place_job(@extschema@._redirect_job(v_job, opts, v_now), 'scheduled', v_now),
        false, NULL)::@extschema@.insert_result;
END
$function$;
COMMENT ON FUNCTION @extschema@.retry_dlq(bigint, jsonb) IS
'Runs a dead letter again: attempt 0, errors kept, run_lease kept, so that no attempt of its former life can end it.
opts: queue, priority, delay_seconds. Errors: 42704 no such dead letter, 23505 another job holds its unique key (it
stays), 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.retry_job(job_id bigint, opts jsonb DEFAULT '{}')
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    PERFORM @extschema@._check_options('opts', opts, '{queue,priority,delay_seconds}');
    RETURN @extschema@._retry_job(job_id, opts, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.retry_job(bigint, jsonb) IS
'Makes a job run now, under its id. One that failed (dead letters included) or was cancelled gets a fresh life: attempt
0, errors kept, progress dropped; one that is scheduled or retryable goes on where it is. run_lease is kept, so that no
former attempt can end it. opts: queue, priority, delay_seconds. Errors: 55000 it is available, running, completed or
pruned; 23505 another job holds its unique key; 42704 unknown id, 22023, 23514, 25001, 40001.';

CREATE OR REPLACE FUNCTION @extschema@.update_job(job_id bigint, changes jsonb)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_run_at timestamptz;
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    PERFORM @extschema@._check_options('changes', changes,
        '{args,queue,priority,run_at,delay_seconds,max_attempts,tags,metadata,deadline_seconds,keep_result,backoff}');
    IF changes = '{}' THEN
        PERFORM @extschema@._refuse('22023', 'field "changes" names nothing to change', 'Give at least one key.');
    ELSIF changes ? 'queue' AND coalesce(jsonb_typeof(changes -> 'queue'), '') <> 'string' THEN
        PERFORM @extschema@._refuse('22023', 'option "queue" must be a string', 'Correct it or leave it out.');
    END IF;
    IF changes ?| '{run_at,delay_seconds}' THEN
        v_run_at := greatest(
            @extschema@._delayed(@extschema@._parse_run_at(changes -> 'run_at'), changes, v_now), v_now);
    END IF;
    RETURN @extschema@._update_job(job_id, changes, v_run_at, v_now);
END
$function$;
COMMENT ON FUNCTION @extschema@.update_job(bigint, jsonb) IS
'Changes a job that waits: available, scheduled or retryable. changes: args, queue, priority, run_at or delay_seconds
(null: now), max_attempts, tags, metadata, deadline_seconds, keep_result, backoff; what is not named stays, null
restores the default; a unique key stays what it was. An available job goes to the end of its lane. Returns the state
after it. Errors: 55000 the job does not wait, 23505 it would need its unique key and another job holds it, 42704
unknown id, 22023, 23514, 25001, 40001.';

CREATE OR REPLACE FUNCTION @extschema@.purge_dlq(job_id bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_job_id(job_id);
    RETURN @extschema@._purge_dead_letter(job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@.purge_dlq(bigint) IS
    'Deletes a dead letter for good; false when there is none. Errors: 22023.';

CREATE OR REPLACE FUNCTION @extschema@.queue_counts(queue text)
RETURNS @extschema@.queue_count
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
    v_counts @extschema@.queue_count;
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM @extschema@._check_name('queue', v_queue);
    -- TRUNCATE does not ask snapshots: the locks come before the one that counts, and vanish with the block.
    BEGIN
        LOCK TABLE @extschema@.ready_entries, @extschema@.ready_claim_attempt_batches, @extschema@.done_entries,
            @extschema@.receipt_completion_batches, @extschema@.lease_claim_batches,
            @extschema@.lease_claim_closures, @extschema@.leases, @extschema@.deferred_jobs IN ACCESS SHARE MODE;
        v_counts := @extschema@._count_jobs(v_queue);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_counts;
END
$function$;
COMMENT ON FUNCTION @extschema@.queue_counts(text) IS
'Exact number of jobs of a queue by state at one moment, pruned history included. It counts rows: for a dashboard that
looks often use queue_depths. Errors: 22023, 23514, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.queue_depths()
RETURNS SETOF @extschema@.queue_depth
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._require_read_committed();
    RETURN QUERY SELECT d.* FROM @extschema@._lane_depths() d;
END
$function$;
COMMENT ON FUNCTION @extschema@.queue_depths() IS
'Waiting positions per lane from cursor arithmetic, without a scan. An estimate: rolled back and cancelled jobs count
until a claim passes them, and a job that commits behind the cursor does not count. Errors: 25001.';

CREATE OR REPLACE FUNCTION @extschema@.ring_status()
RETURNS SETOF @extschema@.ring_slot_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._require_read_committed();
    RETURN QUERY SELECT s.* FROM @extschema@._ring_status(clock_timestamp()) s;
END
$function$;
COMMENT ON FUNCTION @extschema@.ring_status() IS
'Each slot of each ring: generation, rows and bytes, age, and what keeps it from being reused (current, planned,
unclaimed, receipts, retention; deferred, recent), with the queue or instance in detail. Errors: 25001.';

CREATE OR REPLACE FUNCTION @extschema@.set_setting(name text, value text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_name text COLLATE "default" := name;
    v_value text COLLATE "default" := value;
BEGIN
    PERFORM @extschema@._set_setting(v_name, v_value);
END
$function$;
COMMENT ON FUNCTION @extschema@.set_setting(text, text) IS
    'Changes a setting; NULL restores its default. '
    'The settings view lists them. Errors: 42704 unknown name, 22023 bad value.';

CREATE OR REPLACE FUNCTION @extschema@.verify()
RETURNS SETOF @extschema@.tick_report
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_start timestamptz := clock_timestamp();
BEGIN
    PERFORM @extschema@._require_read_committed();
    RETURN QUERY
    SELECT v.step, 'done', v.changed, extract(epoch FROM clock_timestamp() - v_start)::double precision * 1000,
           NULL::jsonb
    FROM @extschema@._verify(v_start) v;
END
$function$;
COMMENT ON FUNCTION @extschema@.verify() IS
'After a restore or a logical copy, before producers and workers start: brings cursors and sequences in line with the
rows. Call it in a transaction of its own. Harmless at any other time. Returns what it changed. Errors: 25001,
55000 when a ring must be repaired and the transaction has written, or when set_owner() must come first.';

-- Also after a restore: a dump does not hold what was taken from the types of rows of tables. What is closed is left
-- alone: in the script of an extension's update, a REVOKE makes all rights on the object initial ones, those of the
-- user's roles too, and pg_dump leaves initial rights out.
CREATE OR REPLACE FUNCTION @extschema@._close_to_public()
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_object record;
BEGIN
    FOR v_object IN
        SELECT o.class, o.name
        FROM (
            SELECT 'FUNCTION', p.oid::regprocedure::text, p.proacl
            FROM pg_proc p WHERE p.pronamespace = '@extschema@'::regnamespace
            UNION ALL
            SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text, c.relacl
            FROM pg_class c
            WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
              -- Nor sequences of lanes, which come and go.
              AND NOT EXISTS (SELECT FROM pg_depend d
                              WHERE d.objid = c.oid AND d.classid = 'pg_class'::regclass
                                AND d.refobjid = '@extschema@.queue_lanes'::regclass AND d.deptype = 'a')
            UNION ALL
            SELECT 'TYPE', t.oid::regtype::text, t.typacl
            FROM pg_type t WHERE t.typnamespace = '@extschema@'::regnamespace AND t.typcategory <> 'A'
            ) o (class, name, acl)
        WHERE o.acl IS NULL OR EXISTS (SELECT FROM aclexplode(o.acl) a WHERE a.grantee = 0)
    LOOP
        EXECUTE format('REVOKE ALL ON %s %s FROM PUBLIC', v_object.class, v_object.name);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._close_to_public() IS
    'Internal: takes from PUBLIC what PostgreSQL gives to it, EXECUTE on functions and USAGE on types.';

-- What belongs to the role already is not touched: ALTER locks a table against everybody.
CREATE OR REPLACE FUNCTION @extschema@._give_objects(p_owner regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_object record;
BEGIN
    FOR v_object IN
        SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS class,
               c.oid::regclass::text AS name
        FROM pg_class c
        WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
          AND c.relowner <> p_owner
          -- The owner of an owned sequence follows its table.
          AND NOT (c.relkind = 'S' AND EXISTS (
              SELECT FROM pg_depend d
              WHERE d.objid = c.oid AND d.classid = 'pg_class'::regclass
                AND d.refclassid = 'pg_class'::regclass AND d.deptype = 'a'))
        UNION ALL
        SELECT 'TYPE', t.oid::regtype::text FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE t.typnamespace = '@extschema@'::regnamespace AND (t.typtype IN ('e', 'd') OR c.relkind = 'c')
          AND t.typowner <> p_owner
        UNION ALL
        SELECT 'ROUTINE', p.oid::regprocedure::text FROM pg_proc p
        WHERE p.pronamespace = '@extschema@'::regnamespace AND p.proowner <> p_owner
    LOOP
        EXECUTE format('ALTER %s %s OWNER TO %s', v_object.class, v_object.name, p_owner);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._give_objects(regrole) IS 'Internal: gives all that is in the schema to a role.';

-- Ownership and rights. Security invoker: the caller must be allowed to do this.
CREATE OR REPLACE FUNCTION @extschema@.set_owner(owner regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF owner IS NULL OR NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner) THEN
        PERFORM @extschema@._refuse('42704', 'field "owner" names no role', 'Create a NOLOGIN role first.');
    END IF;
    IF EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner AND r.rolsuper) THEN
        PERFORM @extschema@._refuse('22023', format('field "owner": role %s is a superuser', owner),
            'Name a NOLOGIN role without attributes: SECURITY DEFINER functions will run as it.');
    END IF;
    EXECUTE format('ALTER SCHEMA @extschema@ OWNER TO %s', owner);
    PERFORM @extschema@._give_objects(owner);
    PERFORM @extschema@._close_to_public();
END
$function$;
COMMENT ON FUNCTION @extschema@.set_owner(regrole) IS
'Gives the schema and everything in it to a role, which should be NOLOGIN and without attributes or memberships:
SECURITY DEFINER functions run as it. Owner or superuser only. Errors: 42704, 22023 for a superuser, 42501.';
