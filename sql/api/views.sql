-- Views for people and dashboards. They scan: look-ups of one job have job(). Those that read rings refuse an older
-- snapshot (25001): it would miss what prune has emptied, and show ended jobs as waiting.

CREATE OR REPLACE FUNCTION @extschema@._list_ready()
RETURNS TABLE (job @extschema@._job, slot integer, "position" bigint, is_dead boolean, is_unclaimed boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT ROW(coalesce(r.job_id, r."position"), l.queue, l.priority, l.shard, r.run_at,
               coalesce((r.ext ->> 'attempt')::integer, 0), coalesce((r.ext ->> 'run_lease')::bigint, 0),
               r.kind, r.args, nullif(r.ext - '{attempt,run_lease}'::text[], '{}'))::@extschema@._job,
           r.slot::integer, r."position",
           EXISTS (SELECT FROM @extschema@.ready_tombstones t WHERE t.slot = r.slot AND t."position" = r."position"),
           @extschema@._is_unclaimed(l.emission, r."position")
    FROM (SELECT q.*, @extschema@._newest_emission(q.lane_id) AS emission FROM @extschema@.queue_lanes q OFFSET 0) l
    JOIN @extschema@.ready_entries r
      ON r."position" > @extschema@._lane_base(l.lane_id) AND r."position" < @extschema@._lane_base(l.lane_id + 1);
END
$function$;
COMMENT ON FUNCTION @extschema@._list_ready() IS 'Internal: every ready row with its lane and whether it waits.';

CREATE OR REPLACE FUNCTION @extschema@._list_terminal()
RETURNS SETOF @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._require_read_committed();
    RETURN QUERY
    SELECT i.*
    FROM @extschema@.done_entries d
    LEFT JOIN @extschema@._list_ready() r ON r.slot = d.slot AND r."position" = d."position",
    LATERAL @extschema@._done_info(d, r.job) i
    WHERE NOT d.is_undo
      AND NOT EXISTS (SELECT FROM @extschema@.done_entries u
                      WHERE u.slot = d.slot AND u.job_id = d.job_id AND u.run_lease = d.run_lease
                        AND u.finalized_at = d.finalized_at AND u.is_undo);
    RETURN QUERY
    SELECT i.* FROM @extschema@.failed_entries f, LATERAL @extschema@._done_info(@extschema@._as_done(f), NULL) i
    WHERE NOT EXISTS (SELECT FROM @extschema@.done_entries d
                      WHERE d.job_id = f.job_id AND d.run_lease = f.run_lease AND d.finalized_at = f.finalized_at);
    RETURN QUERY
    SELECT (x.info).job_id, 'completed', (x.info).kind, (x.info).queue, (x.info).priority, (x.info).args,
           (x.info).attempt, (x.info).max_attempts, (x.info).run_lease, (x.info).run_at, (x.info).created_at,
           x.attempted_at, x.finalized_at, NULL::timestamptz, (x.info).tags, (x.info).metadata, NULL::jsonb,
           NULL::jsonb, (x.info).errors, NULL::text, NULL::uuid, NULL::timestamptz
    FROM (SELECT @extschema@._job_info_of(@extschema@._next_attempt(r.job), 'completed') AS info,
                 b.attempted_at, b.finalized_at
          FROM (SELECT c.slot, c.attempted_at, c.finalized_at, unnest(@extschema@._to_list(c.positions)) AS "position"
                FROM @extschema@.receipt_completion_batches c) b
          JOIN @extschema@._list_ready() r ON r.slot = b.slot AND r."position" = b."position") x;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_terminal() IS 'Internal: terminal jobs within retention.';

CREATE OR REPLACE FUNCTION @extschema@._list_dlq()
RETURNS SETOF @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY SELECT i.* FROM @extschema@.dlq_entries d, LATERAL @extschema@._dead_letter_info(d) i;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_dlq() IS 'Internal: dead letters.';

CREATE OR REPLACE FUNCTION @extschema@._list_jobs()
RETURNS SETOF @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._require_read_committed();
    RETURN QUERY
    SELECT i.*
    FROM @extschema@.deferred_jobs d,
         LATERAL @extschema@._job_info_of(ROW(d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease,
                                              d.kind, d.args, d.ext)::@extschema@._job, d.state::text) i;
    RETURN QUERY SELECT i.* FROM @extschema@._list_ready() r, LATERAL @extschema@._job_info_of(r.job, 'available') i
                 WHERE r.is_unclaimed AND NOT r.is_dead;
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        RETURN QUERY
        SELECT i.* FROM @extschema@._open_batches(v_slot) o,
            LATERAL @extschema@._read_ready(o.ready_slot, @extschema@._to_list(o.open)) r,
            LATERAL @extschema@._running_info(r.job, r."position") i
        WHERE i.job_id IS NOT NULL;
    END LOOP;
    RETURN QUERY SELECT i.* FROM @extschema@.leases l, LATERAL @extschema@._lease_info(l) i WHERE l.outcome IS NULL;
    RETURN QUERY SELECT t.* FROM @extschema@._list_terminal() t;
    RETURN QUERY SELECT d.* FROM @extschema@._list_dlq() d;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_jobs() IS 'Internal: every job that is not pruned.';

CREATE OR REPLACE VIEW @extschema@.jobs AS SELECT j.* FROM @extschema@._list_jobs() j;
COMMENT ON VIEW @extschema@.jobs IS
    'Every job that is not pruned, in the form of job(). Dead letters are failed, with reason. It reads all of them.';

CREATE OR REPLACE VIEW @extschema@.terminal_jobs AS SELECT j.* FROM @extschema@._list_terminal() j;
COMMENT ON VIEW @extschema@.terminal_jobs IS
    'Completed, failed and cancelled jobs within retention; dead letters are not among them.';

CREATE OR REPLACE VIEW @extschema@.dlq AS SELECT j.* FROM @extschema@._list_dlq() j;
COMMENT ON VIEW @extschema@.dlq IS
    'Dead letters: failed jobs on hold until retry_dlq, purge_dlq or dlq_retention_seconds.';

CREATE OR REPLACE FUNCTION @extschema@._list_queues()
RETURNS TABLE (
    queue text, enqueue_shards integer, strict_fifo boolean, notify boolean, dlq boolean, aging_seconds numeric,
    deadline_seconds numeric, paused_at timestamptz, lanes bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT n.name, o.enqueue_shards, o.strict_fifo, o.notify, coalesce(o.dlq, @extschema@._setting('dlq_default') = 1),
           coalesce(o.aging_seconds, @extschema@._setting('aging_seconds')), o.deadline_seconds, o.paused_at,
           (SELECT count(*) FROM @extschema@.queue_lanes l WHERE l.queue = n.name)
    FROM (SELECT m.queue FROM @extschema@.queue_meta m
          UNION SELECT l.queue FROM @extschema@.queue_lanes l
          UNION SELECT d.queue FROM @extschema@.deferred_jobs d
          UNION SELECT d.queue FROM @extschema@.dlq_entries d) n (name),
         LATERAL @extschema@._queue_options(n.name) o;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_queues() IS 'Internal: queues and their options.';

CREATE OR REPLACE VIEW @extschema@.queues AS SELECT q.* FROM @extschema@._list_queues() q;
COMMENT ON VIEW @extschema@.queues IS 'Queues that were declared, were paused or have jobs, with the options in force.';

CREATE OR REPLACE FUNCTION @extschema@._list_instances()
RETURNS TABLE (instance_id uuid, info jsonb, started_at timestamptz, heartbeat_at timestamptz, is_live boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT i.instance_id, i.info, i.started_at, i.heartbeat_at,
           @extschema@._is_live(i.heartbeat_at, clock_timestamp())
    FROM @extschema@.runtime_instances i;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_instances() IS 'Internal: worker processes.';

CREATE OR REPLACE VIEW @extschema@.instances AS SELECT i.* FROM @extschema@._list_instances() i;
COMMENT ON VIEW @extschema@.instances IS 'Worker processes and their last heartbeat.';

CREATE OR REPLACE FUNCTION @extschema@._list_settings()
RETURNS TABLE (name text, value text, default_value text, unit text, description text)
LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY
    SELECT d.name, coalesce(o.value, d.default_value), d.default_value, d.unit, d.description
    FROM @extschema@._setting_definitions() d LEFT JOIN @extschema@.setting_overrides o ON o.name = d.name;
END
$function$;
COMMENT ON FUNCTION @extschema@._list_settings() IS 'Internal: settings in force.';

CREATE OR REPLACE VIEW @extschema@.settings AS SELECT s.* FROM @extschema@._list_settings() s;
COMMENT ON VIEW @extschema@.settings IS 'Settings in force, with defaults and units; change them with set_setting().';
