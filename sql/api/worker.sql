-- Calls of workers, in any language.

CREATE OR REPLACE FUNCTION @extschema@._check_token(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_job_id IS NULL OR p_run_lease IS NULL OR p_slot IS NULL OR p_batch IS NULL OR p_position IS NULL THEN
        PERFORM @extschema@._refuse('22023',
            'fields "job_id", "run_lease", "claim_slot", "batch_id" and "position" must not be NULL',
            'Pass the token that the claim returned.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_token(bigint, bigint, integer, bigint, bigint) IS
    'Internal: a complete attempt token (22023).';

CREATE OR REPLACE FUNCTION @extschema@._check_instance(p_instance uuid)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_instance IS NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "instance_id" must not be NULL',
            'Give each worker process a UUID of its own.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_instance(uuid) IS 'Internal: an instance id is given (22023).';

CREATE OR REPLACE FUNCTION @extschema@.register_instance(instance_id uuid, info jsonb DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_instance(instance_id);
    PERFORM @extschema@._check_payload('info', info, 65536);
    PERFORM @extschema@._register_instance(instance_id, info, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.register_instance(uuid, jsonb) IS
    'Makes a worker process known, with a description (JSON up to 64 KiB). '
    'Repeating it replaces the description. Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.heartbeat(instance_id uuid, holds jsonb DEFAULT NULL)
RETURNS @extschema@.heartbeat_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM @extschema@._check_instance(instance_id);
    PERFORM @extschema@._record_heartbeat(instance_id, @extschema@._held_positions(holds), clock_timestamp());
    RETURN ROW(@extschema@._closed_holds(holds), @extschema@._paused_queues(), '{}', false,
        @extschema@._drained_queues(clock_timestamp()))::@extschema@.heartbeat_result;
END
$function$;
COMMENT ON FUNCTION @extschema@.heartbeat(uuid, jsonb) IS
'Says that a worker lives and what it still holds: holds is an array of {claim_slot, batch_id, positions}, NULL means
all it claimed. A receipt stays in holds until its finish was answered. Call it about every second: the row is written
once per heartbeat_seconds. Returns held attempts that are closed in the database (cancelled, rescued, ...), paused
queues, overrides, drain, and queues that somebody drains: claim nothing from them while they are listed. Errors: 22023,
25001.';

CREATE OR REPLACE FUNCTION @extschema@._held_positions(p_holds jsonb)
RETURNS int8multirange
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_holds IS NULL OR jsonb_typeof(p_holds) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_holds) <> 'array' OR EXISTS (
        SELECT FROM jsonb_array_elements(p_holds) h
        WHERE jsonb_typeof(h) <> 'object'
           OR @extschema@._json_bigint(h, 'claim_slot') IS NULL
           OR @extschema@._json_bigint(h, 'batch_id') IS NULL
           OR jsonb_typeof(coalesce(h -> 'positions', 'null')) <> 'array'
           OR h -> 'positions' @? 'strict $[*] ? (@.type() != "number" && @.type() != "string")'
           OR EXISTS (
               SELECT FROM jsonb_array_elements_text(
                   CASE jsonb_typeof(h -> 'positions') WHEN 'array' THEN h -> 'positions' ELSE '[]' END) p
               WHERE CASE WHEN p ~ '^[0-9]{1,19}$' THEN p::numeric > 9223372036854775807 ELSE true END)) THEN
        PERFORM @extschema@._refuse('22023',
            'field "holds" must be an array of {"claim_slot", "batch_id", "positions": [...]}',
            'Pass the tokens that claims returned, or NULL.');
    END IF;
    RETURN @extschema@._to_set(ARRAY(
        SELECT p::bigint
        FROM jsonb_array_elements(p_holds) h, jsonb_array_elements_text(h -> 'positions') p));
END
$function$;
COMMENT ON FUNCTION @extschema@._held_positions(jsonb) IS 'Internal: positions of a holds list, NULL for all (22023).';

CREATE OR REPLACE FUNCTION @extschema@._closed_holds(p_holds jsonb)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_closed jsonb := '[]'::jsonb;
    v_hold record;
BEGIN
    FOR v_hold IN
        SELECT @extschema@._json_bigint(h, 'claim_slot')::integer AS slot,
               @extschema@._json_bigint(h, 'batch_id') AS batch,
               @extschema@._to_set(ARRAY(
                   SELECT p::bigint FROM jsonb_array_elements_text(h -> 'positions') p)) AS held
        FROM jsonb_array_elements(coalesce(nullif(p_holds, 'null'), '[]')) h
        WHERE @extschema@._json_bigint(h, 'claim_slot') < @extschema@._slot_count('claim')
    LOOP
        v_closed := v_closed || coalesce((
            SELECT jsonb_agg(jsonb_build_object(
                'claim_slot', v_hold.slot, 'batch_id', v_hold.batch, 'position', c."position", 'outcome', c.outcome))
            FROM @extschema@._closed_positions(v_hold.slot, v_hold.batch, v_hold.held) c), '[]');
    END LOOP;
    RETURN v_closed;
END
$function$;
COMMENT ON FUNCTION @extschema@._closed_holds(jsonb) IS 'Internal: held attempts that are closed.';

CREATE OR REPLACE FUNCTION @extschema@.claim_ready_runtime(
    queue text, max_batch integer, instance_id uuid, opts jsonb DEFAULT '{}')
RETURNS SETOF @extschema@.claimed_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    PERFORM @extschema@._check_instance(instance_id);
    IF max_batch IS NULL OR max_batch NOT BETWEEN 1 AND 1000 THEN
        PERFORM @extschema@._refuse('22023', format('field "max_batch" is %s', coalesce(max_batch::text, 'NULL')),
            'Claim 1 to 1000 jobs at a time.');
    END IF;
    IF opts <> '{}' OR opts IS NULL THEN
        PERFORM @extschema@._check_options('opts', opts, '{separate,deadline_seconds,wake_others}');
        IF jsonb_typeof(coalesce(nullif(opts -> 'separate', 'null'), '[]')) <> 'array' THEN
            PERFORM @extschema@._refuse('22023', 'option "separate" must be an array of kinds',
                'Correct it or leave it out.');
        END IF;
    END IF;
    RETURN QUERY
    SELECT c.*
    FROM @extschema@._claim_ready(v_queue, max_batch, instance_id,
        @extschema@._option_number(opts, 'deadline_seconds', 0.001, 31536000),
        ARRAY(SELECT jsonb_array_elements_text(nullif(opts -> 'separate', 'null'))),
        coalesce(@extschema@._option_boolean(opts, 'wake_others'), false)) c;
END
$function$;
COMMENT ON FUNCTION @extschema@.claim_ready_runtime(text, integer, uuid, jsonb) IS
'Claims up to max_batch (1 to 1000) jobs of a queue for a worker process; each claim is an attempt and raises
run_lease by one. Call it in a transaction of its own. opts: separate (kinds that complete in their own transaction:
one batch row per job), deadline_seconds (hard deadline of attempts that have none of their own), wake_others (wake a
sleeper when the limit was hit). Nothing found: ask claim_status. Errors: 22023, 23514, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.claim_status(queue text, arm boolean DEFAULT false)
RETURNS @extschema@.claim_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_queue text COLLATE "default" := queue;
BEGIN
    PERFORM @extschema@._check_name('queue', v_queue);
    PERFORM @extschema@._require_read_committed();
    RETURN @extschema@._claim_status(v_queue, coalesce(arm, false));
END
$function$;
COMMENT ON FUNCTION @extschema@.claim_status(text, boolean) IS
'Why a claim found nothing: ready (claim again), in_flight (a producer has not committed yet, or rolled back just
now), contended, paused or idle. With arm, producers notify the channel from now on, and what was inserted before is
seen: a caller that gets idle may sleep in LISTEN channel for at most retry_after_ms. channel is NULL where the queue
has notify off: poll. Errors: 22023, 23514, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.complete_jobs(
    instance_id uuid, claim_slot integer, batch_id bigint, positions bigint[])
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF array_ndims(positions) > 1 THEN
        PERFORM @extschema@._refuse('22023', 'field "positions" must be a one-dimensional array',
            'Pass the positions that the claim returned.');
    END IF;
    IF instance_id IS NULL OR claim_slot IS NULL OR batch_id IS NULL OR positions IS NULL
       OR array_position(positions, NULL) IS NOT NULL THEN
        PERFORM @extschema@._refuse('22023',
            'fields "instance_id", "claim_slot", "batch_id" and "positions" must not be NULL',
            'Pass the token that the claim returned.');
    END IF;
    RETURN QUERY
    SELECT r.*
    FROM @extschema@._complete_attempts(instance_id, claim_slot, batch_id, positions, clock_timestamp()) r;
END
$function$;
COMMENT ON FUNCTION @extschema@.complete_jobs(uuid, integer, bigint, bigint[]) IS
'Completes jobs of one claimed batch, the hot path. One answer per position, in order: done,
already_done, stale or busy (try again); busy and stale answers may lack job_id and run_lease, so match
them by order. Idempotent. Errors: 22023, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.finish_jobs(instance_id uuid, outcomes jsonb)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_instance(instance_id);
    IF outcomes IS NULL OR jsonb_typeof(outcomes) <> 'array' THEN
        PERFORM @extschema@._refuse('22023', 'field "outcomes" must be a JSON array', 'Give one object per attempt.');
    END IF;
    RETURN QUERY SELECT r.* FROM @extschema@._finish_attempts(instance_id, outcomes, clock_timestamp()) r;
END
$function$;
COMMENT ON FUNCTION @extschema@.finish_jobs(uuid, jsonb) IS
'Ends many attempts with mixed outcomes in one call. Items: the token (job_id, run_lease, claim_slot, batch_id,
position), outcome completed, retry, snooze, cancel, fail or released, and result, error, delay_seconds, reason. One
answer per item, in order: done, already_done, stale, busy (try again) or invalid (with the reason); the other items
are done. At most 64 batches a call, the rest is busy. retry waits delay_seconds or the backoff; snooze and released
do not count the attempt; released with reason unknown_kind comes back after 1 to 60 s, otherwise it goes to the end
of its lane. Idempotent. Errors: 22023, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.complete_job(
    job_id bigint, run_lease bigint, claim_slot integer, batch_id bigint, "position" bigint,
    opts jsonb DEFAULT '{}')
RETURNS @extschema@.finalization_receipt
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_token(job_id, run_lease, claim_slot, batch_id, "position");
    PERFORM @extschema@._check_options('opts', opts, '{result}');
    IF opts ? 'result' THEN
        PERFORM @extschema@._check_payload('result', opts -> 'result', NULL);
    END IF;
    RETURN @extschema@._complete_job(
        job_id, run_lease, claim_slot, batch_id, "position", nullif(opts -> 'result', 'null'), clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.complete_job(bigint, bigint, integer, bigint, bigint, jsonb) IS
'Completes one attempt inside the caller''s transaction, together with its business rows. The receipt counts once the
transaction commits; after a lost connection ask attempt_status. opts: result (kept when the job asked for it).
Errors: JQ001 the attempt is stale: roll back; 40001 the snapshot is too old: repeat; 22023.';

CREATE OR REPLACE FUNCTION @extschema@.attempt_status(
    job_id bigint, run_lease bigint, claim_slot integer, batch_id bigint, "position" bigint)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_token(job_id, run_lease, claim_slot, batch_id, "position");
    RETURN @extschema@._attempt_status(job_id, run_lease, claim_slot, batch_id, "position");
END
$function$;
COMMENT ON FUNCTION @extschema@.attempt_status(bigint, bigint, integer, bigint, bigint) IS
'What became of an attempt: open, completed, retried, snoozed, cancelled, failed, dead_lettered, released, rescued, or
unknown when the evidence is gone (attempt_evidence_seconds). Errors: 22023.';

CREATE OR REPLACE FUNCTION @extschema@.set_progress(
    job_id bigint, run_lease bigint, claim_slot integer, batch_id bigint, "position" bigint, progress jsonb)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_token(job_id, run_lease, claim_slot, batch_id, "position");
    PERFORM @extschema@._check_payload('progress', progress, 65536);
    RETURN @extschema@._set_progress(job_id, run_lease, claim_slot, batch_id, "position", progress, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.set_progress(bigint, bigint, integer, bigint, bigint, jsonb) IS
'Stores progress (JSON up to 64 KiB) of a running attempt. It survives retries, snoozes and rescue and is dropped on
success. Returns false when the attempt is no longer current. Errors: 22023, 23514, 25001.';

CREATE OR REPLACE FUNCTION @extschema@.tick(budget jsonb DEFAULT '{}')
RETURNS SETOF @extschema@.tick_report
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_steps text[] := @extschema@._tick_steps();
BEGIN
    PERFORM @extschema@._check_options('budget', budget, '{steps,milliseconds,rows}');
    IF coalesce(budget -> 'steps', 'null') <> 'null' THEN
        IF jsonb_typeof(budget -> 'steps') <> 'array' THEN
            PERFORM @extschema@._refuse('22023', 'option "steps" must be an array of step names',
                'Correct it or leave it out.');
        ELSIF NOT budget -> 'steps' <@ to_jsonb(v_steps) THEN
            PERFORM @extschema@._refuse('42704',
                format('option "steps" names an unknown step: %s', left((budget -> 'steps')::text, 200)),
                format('Steps: %s.', array_to_string(v_steps, ', ')));
        END IF;
        v_steps := ARRAY(SELECT jsonb_array_elements_text(budget -> 'steps'));
    END IF;
    RETURN QUERY
    SELECT t.*
    FROM @extschema@._tick(v_steps,
        coalesce(@extschema@._option_number(budget, 'milliseconds', 1, 600000), 1000),
        @extschema@._option_integer(budget, 'rows', 1, 100000)) t;
END
$function$;
COMMENT ON FUNCTION @extschema@.tick(jsonb) IS
'One bounded round of maintenance: rotation, promotion of due jobs, rescue, retention, prune. Any number of callers,
at any time, in a transaction of its own. budget: steps (all by default), milliseconds (1000: no step starts later),
rows (per step). Returns a report per step. Errors: 22023, 42704 unknown step, 25001.';
