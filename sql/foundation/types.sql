-- The row types and enums of the public API, and the engine's own job type. New attributes come last.

CREATE TYPE @extschema@.job_state AS ENUM
    ('scheduled', 'available', 'running', 'completed', 'retryable', 'failed', 'cancelled', 'waiting_external');
COMMENT ON TYPE @extschema@.job_state IS 'State of a job. Terminal: completed, failed, cancelled.';

CREATE TYPE @extschema@.attempt_outcome AS ENUM
    ('completed', 'retried', 'snoozed', 'cancelled', 'failed', 'dead_lettered', 'released', 'rescued', 'moved');
COMMENT ON TYPE @extschema@.attempt_outcome IS
    'What became of one attempt. moved: it goes on; its receipt was replaced by a lease.';

CREATE TYPE @extschema@.insert_result AS (job_id bigint, state @extschema@.job_state, duplicate boolean, pressure text);
COMMENT ON TYPE @extschema@.insert_result IS
    'Answer to an insert: id and state of the job; pressure is NULL unless backpressure was asked for.';

CREATE TYPE @extschema@.claimed_job AS (
    job_id bigint, kind text, queue text, args jsonb, priority integer, attempt integer, max_attempts integer,
    run_at timestamptz, created_at timestamptz, tags text[], metadata jsonb, progress jsonb, trace text,
    deadline_at timestamptz, run_lease bigint, claim_slot integer, batch_id bigint, "position" bigint);
COMMENT ON TYPE @extschema@.claimed_job IS
    'A job handed to a worker. run_lease, claim_slot, batch_id and position are the token of the attempt.';

CREATE TYPE @extschema@.claim_status AS (reason text, channel text, retry_after_ms integer);
COMMENT ON TYPE @extschema@.claim_status IS
    'Why a claim found nothing: ready, idle, in_flight, contended or paused; '
    'the channel to LISTEN on (NULL: poll); how long to sleep at most.';

CREATE TYPE @extschema@.finish_result AS (job_id bigint, run_lease bigint, result text, reason text);
COMMENT ON TYPE @extschema@.finish_result IS
    'Answer per attempt: done, already_done, stale, busy (try again) or invalid (with the reason).';

CREATE TYPE @extschema@.finalization_receipt AS (
    job_id bigint, run_lease bigint, outcome text, claim_slot integer, batch_id bigint, "position" bigint,
    finalized_at timestamptz);
COMMENT ON TYPE @extschema@.finalization_receipt IS
    'Proof that an attempt was closed; valid once the transaction commits.';

CREATE TYPE @extschema@.heartbeat_result AS (
    cancelled jsonb, paused_queues text[], overrides jsonb, drain boolean, drained_queues text[]);
COMMENT ON TYPE @extschema@.heartbeat_result IS
    'What the server tells a worker: held attempts that are closed, paused queues, overrides, whether to end, '
    'queues to leave alone while they are drained.';

CREATE TYPE @extschema@.tick_report AS (
    step text, outcome text, "rows" bigint, milliseconds double precision, detail jsonb);
COMMENT ON TYPE @extschema@.tick_report IS 'What one maintenance step did.';

CREATE TYPE @extschema@.work_report AS (
    queue text, claimed integer, completed integer, failed integer, unknown integer);
COMMENT ON TYPE @extschema@.work_report IS
    'What one call of work() did: failed ones are retried, or had their last attempt; unknown ones were handed back.';

CREATE TYPE @extschema@.job_info AS (
    job_id bigint, state text, kind text, queue text, priority integer, args jsonb, attempt integer,
    max_attempts integer, run_lease bigint, run_at timestamptz, created_at timestamptz, attempted_at timestamptz,
    finalized_at timestamptz, deadline_at timestamptz, tags text[], metadata jsonb, progress jsonb, result jsonb,
    errors jsonb, reason text, instance_id uuid, pruned_at timestamptz);
COMMENT ON TYPE @extschema@.job_info IS 'Everything known about one job. state is a job_state or pruned.';

CREATE TYPE @extschema@.job_explanation AS (job_id bigint, state text, sentence text, facts jsonb);
COMMENT ON TYPE @extschema@.job_explanation IS 'Why a job is where it is: one sentence, and the facts behind it.';

CREATE TYPE @extschema@.queue_count AS (
    queue text, scheduled bigint, available bigint, running bigint, completed bigint, retryable bigint, failed bigint,
    cancelled bigint, waiting_external bigint, dead_lettered bigint);
COMMENT ON TYPE @extschema@.queue_count IS 'Exact number of jobs of a queue by state, pruned history included.';

CREATE TYPE @extschema@.queue_depth AS (queue text, priority integer, shard integer, depth bigint, paused boolean);
COMMENT ON TYPE @extschema@.queue_depth IS
    'Positions of a lane that no claim has passed: an estimate of its waiting jobs.';

CREATE TYPE @extschema@.ring_slot_status AS (
    ring text, slot integer, generation bigint, is_current boolean, row_count bigint, bytes bigint, age interval,
    blocked_by text, detail jsonb);
COMMENT ON TYPE @extschema@.ring_slot_status IS
    'One slot of a ring: what it holds and what keeps it from being reused.';

CREATE TYPE @extschema@.api_function AS (
    name text, arguments text, returns text, capabilities text[], description text);
COMMENT ON TYPE @extschema@.api_function IS
    'A public function; without capabilities it is for the owner of the schema alone.';

CREATE TYPE @extschema@.error_code AS (sqlstate text, name text, description text, hint text);
COMMENT ON TYPE @extschema@.error_code IS 'A SQLSTATE that the public functions raise.';

-- A job on its way between places. ext holds what is not default: max_attempts, created_at, tags, metadata, trace,
-- backoff, deadline_seconds, keep_result, errors, progress, releases, unique.
CREATE TYPE @extschema@._job AS (
    job_id bigint, queue text, priority integer, shard integer, run_at timestamptz, attempt integer, run_lease bigint,
    kind text, args jsonb, ext jsonb);
COMMENT ON TYPE @extschema@._job IS 'Internal: a job between two places.';

CREATE TYPE @extschema@._kept_job AS (job @extschema@._job, lost_to bigint);
COMMENT ON TYPE @extschema@._kept_job IS
    'Internal: a job with a unique key after its attempt, and the job that it lost its key to.';

CREATE TYPE @extschema@._keyed_job AS (
    ordinal bigint, job @extschema@._job, wanted jsonb, state @extschema@.job_state, holder bigint);
COMMENT ON TYPE @extschema@._keyed_job IS
    'Internal: a new job with the unique key it wants, the state it will have, or the job that holds the key.';
