-- Jobs that may not run yet, and dead letters: ordinary rows, moved by promotion, retry, purge and retention.
-- Written by this plane's files. Invariant: a job is here or in a ring, never in both.

CREATE TABLE @extschema@.deferred_jobs (
    job_id    bigint NOT NULL,
    run_at    timestamptz NOT NULL,
    run_lease bigint NOT NULL,
    state     @extschema@.job_state NOT NULL,
    priority  smallint NOT NULL,
    shard     smallint NOT NULL,
    attempt   smallint NOT NULL,
    queue     text NOT NULL,
    kind      text NOT NULL,
    args      jsonb NOT NULL,
    ext       jsonb,
    CONSTRAINT deferred_jobs_pkey PRIMARY KEY (job_id),
    CONSTRAINT deferred_jobs_state_check CHECK (state IN ('scheduled', 'retryable'))
) WITH (autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX deferred_jobs_due_idx ON @extschema@.deferred_jobs (run_at, job_id);
CREATE INDEX deferred_jobs_waiting_idx ON @extschema@.deferred_jobs (run_at, job_id)
    WHERE ext -> 'unique' ? 'waiting';
COMMENT ON TABLE @extschema@.deferred_jobs IS 'Jobs due later: scheduled, snoozed, or waiting for a retry.';

CREATE TABLE @extschema@.dlq_entries (
    job_id    bigint NOT NULL,
    dlq_at    timestamptz NOT NULL,
    run_lease bigint NOT NULL,
    priority  smallint NOT NULL,
    shard     smallint NOT NULL,
    attempt   smallint NOT NULL,
    queue     text NOT NULL,
    kind      text NOT NULL,
    reason    text NOT NULL,
    args      jsonb NOT NULL,
    ext       jsonb,
    CONSTRAINT dlq_entries_pkey PRIMARY KEY (job_id)
);
CREATE INDEX dlq_entries_queue_idx ON @extschema@.dlq_entries (queue, dlq_at, job_id);
CREATE INDEX dlq_entries_age_idx ON @extschema@.dlq_entries (dlq_at, job_id);
COMMENT ON TABLE @extschema@.dlq_entries IS 'Dead letters: failed jobs on hold, to be retried or purged.';

CREATE TYPE @extschema@._waiting_job AS (job_id bigint, unique_key jsonb);
COMMENT ON TYPE @extschema@._waiting_job IS 'Internal: a deferred job that waits for its unique key.';

SELECT @extschema@._mark_for_dump('@extschema@.deferred_jobs');
SELECT @extschema@._mark_for_dump('@extschema@.dlq_entries');
