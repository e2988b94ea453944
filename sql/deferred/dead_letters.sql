-- Dead letters: failed jobs on hold. They keep errors, progress and run_lease,
-- so that no attempt of a former life fits.

CREATE OR REPLACE FUNCTION @extschema@._dead_letter(p_job @extschema@._job, p_reason text, p_now timestamptz)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO @extschema@.dlq_entries
        (job_id, dlq_at, run_lease, priority, shard, attempt, queue, kind, reason, args, ext)
    VALUES (p_job.job_id, p_now, p_job.run_lease, p_job.priority, p_job.shard, p_job.attempt, p_job.queue,
            p_job.kind, p_reason, p_job.args,
            coalesce(p_job.ext, '{}') || jsonb_build_object('run_at', p_job.run_at));
    SELECT @extschema@._end_key(p_job, 'failed', 'dlq_retention_seconds', p_now) WHERE p_job.ext ? 'unique'
$function$;
COMMENT ON FUNCTION @extschema@._dead_letter(@extschema@._job, text, timestamptz) IS
    'Internal: puts a failed job on hold.';

-- Removes a dead letter and returns it as a fresh life: attempt 0, run_lease kept, progress dropped.
CREATE OR REPLACE FUNCTION @extschema@._take_dead_letter(p_job_id bigint, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    DELETE FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id
    RETURNING d.job_id, d.queue, d.priority, d.shard, p_now, 0, d.run_lease, d.kind, d.args,
              nullif(d.ext - '{progress,run_at,releases}'::text[], '{}') INTO v_job;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_dead_letter(bigint, timestamptz) IS
    'Internal: removes a dead letter and returns the job, ready to run again.';

CREATE OR REPLACE FUNCTION @extschema@._purge_dead_letter(p_job_id bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_unique jsonb;
    v_purged boolean;
BEGIN
    DELETE FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id RETURNING d.ext -> 'unique' INTO v_unique;
    v_purged := FOUND;
    IF v_unique IS NOT NULL THEN
        PERFORM @extschema@._drop_key(p_job_id, v_unique);
    END IF;
    RETURN v_purged;
END
$function$;
COMMENT ON FUNCTION @extschema@._purge_dead_letter(bigint) IS 'Internal: deletes one dead letter for good.';

CREATE OR REPLACE FUNCTION @extschema@._expire_dead_letters(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_before timestamptz := p_now - @extschema@._setting_interval('dlq_retention_seconds');
    v_deleted bigint;
    v_keys bytea[];
    v_job_ids bigint[];
BEGIN
    WITH deleted AS (
        DELETE FROM @extschema@.dlq_entries d
        WHERE d.job_id IN (SELECT x.job_id FROM @extschema@.dlq_entries x WHERE x.dlq_at < v_before
                           ORDER BY x.dlq_at, x.job_id LIMIT p_limit FOR UPDATE SKIP LOCKED)
        RETURNING d.job_id, d.ext -> 'unique' ->> 'key' AS key)
    SELECT count(*), array_agg(decode(d.key, 'hex')) FILTER (WHERE d.key IS NOT NULL),
           array_agg(d.job_id) FILTER (WHERE d.key IS NOT NULL)
    INTO v_deleted, v_keys, v_job_ids
    FROM deleted d;
    IF v_keys IS NOT NULL THEN
        PERFORM @extschema@._end_keys(v_keys, v_job_ids,
            array_fill('failed'::@extschema@.job_state, ARRAY[cardinality(v_keys)]),
            array_fill(p_now, ARRAY[cardinality(v_keys)]), p_now);
    END IF;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_dead_letters(integer, timestamptz) IS
    'Internal: deletes dead letters older than dlq_retention_seconds.';
