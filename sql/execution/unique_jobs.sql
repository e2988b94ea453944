-- Who holds a unique key. The claim on a key names a job; whether that job still holds it is seen from its state, by
-- whoever meets the claim. Producers wait for each other by the primary key of the claims; moves of the engine
-- never wait.

-- Whether the job of a claim holds its key, and its state. NULL state: it cannot be found, so it completed and was
-- pruned, for any other end is written into the claim.
CREATE OR REPLACE FUNCTION @extschema@._key_holder(
    p_claim @extschema@.job_unique_claims, p_now timestamptz,
    OUT holds boolean, OUT state @extschema@.job_state, OUT is_alive boolean, OUT ends_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found record;
BEGIN
    state := p_claim.ended;
    ends_at := p_claim.expires_at;
    is_alive := false;
    IF state IS NULL THEN
        -- What is looked at must not stay locked: the caller may idle in its transaction.
        BEGIN
            SELECT s.state, s.finalized_at, s.retention INTO v_found FROM @extschema@._find_state(p_claim.job_id) s;
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        END;
        IF v_found.state IS NULL AND NOT @extschema@._is_read_committed() THEN
            -- TRUNCATE does not ask snapshots: this one may miss a job that lives.
            PERFORM @extschema@._refuse_unsettled(p_claim.job_id);
        END IF;
        state := coalesce(v_found.state, 'completed');
        is_alive := state NOT IN ('completed', 'failed', 'cancelled');
        ends_at := coalesce(p_claim.period_ends_at,
            v_found.finalized_at + @extschema@._setting_interval(v_found.retention), '-infinity');
    END IF;
    holds := p_claim.states & @extschema@._state_bit(state) <> 0 AND (is_alive OR ends_at > p_now);
    IF holds AND is_alive AND NOT @extschema@._still_holds(p_claim, p_now) THEN
        PERFORM @extschema@._refuse('40001',
            format('job %s may have left its unique key since this snapshot was taken', p_claim.job_id),
            'Try again, in READ COMMITTED: a snapshot cannot follow a job whose states leave some out.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._key_holder(@extschema@.job_unique_claims, timestamptz) IS
    'Internal: whether the job of a claim holds the key, in which state it is, and until when it holds the key there '
    '(40001).';

-- A claim and a completion do not touch the row, so an older snapshot does not follow them. They do not matter while
-- the mask has all states of a living job and the one they lead to. The caller knows that the row is the newest.
CREATE OR REPLACE FUNCTION @extschema@._still_holds(p_claim @extschema@.job_unique_claims, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    IF @extschema@._is_read_committed() THEN
        RETURN true;
    ELSIF p_claim.states & 31 = 31 AND p_now < coalesce(p_claim.period_ends_at,
            transaction_timestamp() + @extschema@._setting_interval('terminal_retention_seconds')) THEN
        RETURN true;
    END IF;
    -- A job of this very transaction is seen by nobody else. What an older snapshot shows of a transaction that began
    -- later is our own.
    RETURN EXISTS (SELECT FROM @extschema@.job_unique_claims c WHERE c.key = p_claim.key AND age(c.xmin) <= 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._still_holds(@extschema@.job_unique_claims, timestamptz) IS
    'Internal: whether a job that holds its key in this snapshot does so now.';

-- Waits for a transaction that is taking the same key.
CREATE OR REPLACE FUNCTION @extschema@._take_key(
    p_key bytea, p_job_id bigint, p_unique jsonb, p_now timestamptz,
    OUT holder bigint, OUT state @extschema@.job_state)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_claim @extschema@.job_unique_claims;
    v_found record;
BEGIN
    LOOP
        IF @extschema@._insert_key_claim(p_key, p_job_id, p_unique, p_now) THEN
            holder := p_job_id;
            RETURN;
        END IF;
        v_claim := @extschema@._claim_of_key(p_key);
        -- pause point: key
        CONTINUE WHEN v_claim.key IS NULL;
        IF v_claim.job_id <> p_job_id THEN
            v_found := @extschema@._key_holder(v_claim, clock_timestamp());
            IF v_found.holds THEN
                holder := v_claim.job_id;
                state := v_found.state;
                RETURN;
            END IF;
        END IF;
        IF @extschema@._replace_key_claim(v_claim, p_job_id, p_unique, p_now) THEN
            holder := p_job_id;
            RETURN;
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_key(bytea, bigint, jsonb, timestamptz) IS
    'Internal: takes a key for a job; the answer is the job that holds it, and its state when it is another.';

-- A claim that is there and that nobody is changing needs no subtransaction. One that another job holds is not locked:
-- its end would find it so.
CREATE OR REPLACE FUNCTION @extschema@._try_take_key(p_job_id bigint, p_unique jsonb, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5ms'
AS $function$
DECLARE
    v_key bytea := decode(p_unique ->> 'key', 'hex');
    v_claim @extschema@.job_unique_claims := @extschema@._claim_of_key(v_key);
BEGIN
    IF v_claim.job_id <> p_job_id AND (@extschema@._key_holder(v_claim, p_now)).holds THEN
        RETURN v_claim.job_id;
    ELSIF @extschema@._lock_key_claim(v_claim)
          AND @extschema@._replace_key_claim(v_claim, p_job_id, p_unique, p_now) THEN
        RETURN p_job_id;
    END IF;
    BEGIN
        RETURN (@extschema@._take_key(v_key, p_job_id, p_unique, p_now)).holder;
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;
END
$function$;
COMMENT ON FUNCTION @extschema@._try_take_key(bigint, jsonb, timestamptz) IS
    'Internal: takes a key for a job unless a transaction is open on it; the job that holds it, NULL when busy.';

-- A running job is about to wait again. While its mask has running, nobody can have taken its key.
CREATE OR REPLACE FUNCTION @extschema@._keep_key(
    p_job @extschema@._job, p_outcome @extschema@.attempt_outcome, p_reason text, p_now timestamptz)
RETURNS @extschema@._kept_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_unique jsonb := p_job.ext -> 'unique';
    v_kept @extschema@._kept_job := ROW(p_job, NULL);
    v_holder bigint;
    v_state constant @extschema@.job_state := CASE
        WHEN p_outcome IN ('retried', 'rescued')
             AND p_job.attempt < coalesce((p_job.ext ->> 'max_attempts')::integer, 25) THEN 'retryable'
        WHEN p_outcome = 'snoozed' OR (p_outcome = 'released' AND p_reason = 'unknown_kind') THEN 'scheduled'
        WHEN p_outcome = 'released' THEN 'available' END::@extschema@.job_state;
BEGIN
    IF v_state IS NULL OR @extschema@._key_counts_in(v_unique, 'running')
       OR NOT @extschema@._key_counts_in(v_unique, v_state) THEN
        RETURN v_kept;
    END IF;
    v_holder := @extschema@._try_take_key(p_job.job_id, v_unique, p_now);
    IF v_holder IS NULL THEN
        v_kept.job.ext := jsonb_set(p_job.ext, '{unique,waiting}', 'true');
    ELSIF v_holder <> p_job.job_id THEN
        v_kept.lost_to := v_holder;
    END IF;
    RETURN v_kept;
END
$function$;
COMMENT ON FUNCTION @extschema@._keep_key(@extschema@._job, @extschema@.attempt_outcome, text, timestamptz) IS
    'Internal: a job with a unique key after its attempt: unchanged, marked to wait for its key, or lost to another.';

CREATE OR REPLACE FUNCTION @extschema@._lost_key_reason(p_holder bigint)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 'unique key held by job ' || p_holder;
COMMENT ON FUNCTION @extschema@._lost_key_reason(bigint) IS 'Internal: why a job that lost its key was cancelled.';

CREATE OR REPLACE FUNCTION @extschema@._has_lost_its_key(p_job_id bigint, p_run_lease bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_done @extschema@.done_entries := @extschema@._find_done(p_job_id);
BEGIN
    RETURN coalesce(v_done.run_lease = p_run_lease AND v_done.state = 'cancelled'
        AND v_done.detail ->> 'reason' LIKE 'unique key held by job %', false);
END
$function$;
COMMENT ON FUNCTION @extschema@._has_lost_its_key(bigint, bigint) IS
    'Internal: whether a job was cancelled at the end of an attempt since another job holds its unique key.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_duplicate(p_holder bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RAISE EXCEPTION USING ERRCODE = '23505', MESSAGE = format('job %s holds the unique key', p_holder),
        DETAIL = format('job_id=%s', p_holder), CONSTRAINT = 'job_unique_claims_pkey',
        HINT = 'Use the existing job, or another key.';
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_duplicate(bigint) IS
    'Internal: raises 23505 and names the job that holds the key.';

CREATE OR REPLACE FUNCTION @extschema@._retake_key(p_job @extschema@._job, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_unique jsonb := p_job.ext -> 'unique';
    v_holder bigint;
BEGIN
    v_holder := (@extschema@._take_key(decode(v_unique ->> 'key', 'hex'), p_job.job_id, v_unique, p_now)).holder;
    IF v_holder <> p_job.job_id THEN
        PERFORM @extschema@._refuse_duplicate(v_holder);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._retake_key(@extschema@._job, timestamptz) IS
    'Internal: a job that had ended lives again and takes its unique key; 23505 when another job holds it.';

-- Deferred jobs that must have their key before they are available. One whose key another job holds ends cancelled. One
-- whose key is busy stays for the next round: the batch is halved until it stands alone.
CREATE OR REPLACE FUNCTION @extschema@._promote_waiting(p_jobs @extschema@._waiting_job[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5ms'
AS $function$
DECLARE
    v_row record;
    v_key text;
    v_holder bigint;
    v_ready bigint[] := '{}'::bigint[];
    v_half integer := cardinality(p_jobs) / 2;
BEGIN
    BEGIN
        FOR v_row IN SELECT w.job_id, w.unique_key, w.unique_key ->> 'key' AS key
                     FROM unnest(p_jobs) WITH ORDINALITY w (job_id, unique_key, o) ORDER BY key, w.o LOOP
            IF NOT @extschema@._key_counts_in(v_row.unique_key, 'available') THEN
                v_ready := v_ready || v_row.job_id;
                CONTINUE;
            ELSIF v_row.key IS DISTINCT FROM v_key THEN
                v_key := v_row.key;
                v_holder := (@extschema@._take_key(
                    decode(v_key, 'hex'), v_row.job_id, v_row.unique_key, p_now)).holder;
            END IF;
            IF v_holder = v_row.job_id THEN
                v_ready := v_ready || v_row.job_id;
            ELSE
                PERFORM @extschema@._append_done(@extschema@._take_deferred(v_row.job_id), 'cancelled', NULL, NULL,
                    NULL, p_now, @extschema@._lost_key_reason(v_holder), NULL);
            END IF;
        END LOOP;
        RETURN cardinality(p_jobs) - cardinality(v_ready) + @extschema@._promote_with_keys(v_ready, p_now);
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    IF v_half = 0 THEN
        RETURN 0;
    END IF;
    RETURN @extschema@._promote_waiting(p_jobs[:v_half], p_now)
         + @extschema@._promote_waiting(p_jobs[v_half + 1:], p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._promote_waiting(@extschema@._waiting_job[], timestamptz) IS
    'Internal: promotes due jobs that wait for their unique key, or ends them.';

-- Part of tick. A claim that is not known to have ended may still be of a job that completed, or of one that ended
-- while somebody had the claim locked.
CREATE OR REPLACE FUNCTION @extschema@._sweep_keys(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_claim @extschema@.job_unique_claims;
    v_found record;
    v_deleted bigint;
BEGIN
    PERFORM @extschema@._require_read_committed();
    v_deleted := @extschema@._expire_keys(p_limit, p_now);
    FOR v_claim IN SELECT s.* FROM @extschema@._sample_claims(least(p_limit, 20)) s LOOP
        v_found := @extschema@._key_holder(v_claim, p_now);
        IF v_found.is_alive OR NOT @extschema@._lock_key_claim(v_claim) THEN
            CONTINUE;
        ELSIF v_found.holds THEN
            PERFORM @extschema@._write_end(v_claim.key, v_found.state, v_found.ends_at);
        ELSE
            PERFORM @extschema@._delete_claim(v_claim.key);
            v_deleted := v_deleted + 1;
        END IF;
    END LOOP;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._sweep_keys(integer, timestamptz) IS
    'Internal: deletes claims that nobody holds: the expired ones, and what a small sample shows. Writes down the ends '
    'that it meets.';

-- New arguments for a job that waits; a ready one goes to the end of its lane.
CREATE OR REPLACE FUNCTION @extschema@._replace_args(p_job_id bigint, p_args jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_round IN 1 .. 5 LOOP
        IF @extschema@._replace_deferred_args(p_job_id, p_args) THEN
            RETURN true;
        END IF;
        v_ready := @extschema@._lock_ready(p_job_id);
        CONTINUE WHEN v_ready.slot IS NULL;
        EXIT WHEN NOT v_ready.is_unclaimed;
        v_job := @extschema@._take_waiting(v_ready.slot, v_ready."position");
        v_job.args := p_args;
        PERFORM @extschema@._requeue_job(v_job, p_now);
        RETURN true;
    END LOOP;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._replace_args(bigint, jsonb, timestamptz) IS
    'Internal: replaces the arguments of a job that waits; false when it runs or has ended.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_by_key(p_key bytea, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_claim @extschema@.job_unique_claims;
    v_found record;
BEGIN
    PERFORM @extschema@._require_read_committed();
    v_claim := @extschema@._claim_of_key(p_key);
    IF v_claim.key IS NULL THEN
        RETURN NULL;
    END IF;
    v_found := @extschema@._key_holder(v_claim, p_now);
    IF v_found.holds AND v_found.is_alive
       AND @extschema@._cancel_job(v_claim.job_id, 'cancelled by its unique key', p_now) LIKE 'cancelled%' THEN
        RETURN v_claim.job_id;
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_by_key(bytea, timestamptz) IS
    'Internal: cancels the job that holds a key and returns its id; NULL when none waits or runs.';
