-- Jobs that may not run yet, and dead letters: ordinary rows, moved by promotion, retry, purge and retention.
-- Written by this plane's files. Invariant: a job is here or in a ring, never in both.
-- Deferred jobs lie in buckets of a minute, which are emptied by TRUNCATE, and in one leaf for what is due later.
-- Nothing depends on the bucket of a job but the cost of finding it.

CREATE TABLE @extschema@.deferred_jobs (
    job_id    bigint NOT NULL,
    run_at    timestamptz NOT NULL,
    run_lease bigint NOT NULL,
    state     @extschema@.job_state NOT NULL,
    priority  smallint NOT NULL,
    shard     smallint NOT NULL,
    attempt   smallint NOT NULL,
    slot      smallint NOT NULL,
    queue     text NOT NULL,
    kind      text NOT NULL,
    args      jsonb NOT NULL,
    ext       jsonb,
    CONSTRAINT deferred_jobs_state_check CHECK (state IN ('scheduled', 'retryable'))
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.deferred_jobs IS
    'Jobs due later: scheduled, snoozed, or waiting for a retry. Slots 0 to 15 are minutes, 16 is all beyond them.';
SELECT @extschema@._create_leaves('deferred', 'deferred_jobs', jsonb_build_object(
    'job_id_key', 'UNIQUE INDEX %s ON %s (job_id)',
    'due_idx', 'INDEX %s ON %s (run_at, job_id)',
    'waiting_idx', 'INDEX %s ON %s (run_at, job_id) WHERE ext -> ''unique'' ? ''waiting'''));
-- Rows are deleted: what is published for logical replication must say which.
DO $do$
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        EXECUTE format('ALTER TABLE @extschema@.deferred_jobs_%s
                        REPLICA IDENTITY USING INDEX deferred_jobs_%1$s_job_id_key', v_slot);
    END LOOP;
END
$do$;
-- Jobs stay there for long, so vacuum has work there.
ALTER TABLE @extschema@.deferred_jobs_16 SET (
    autovacuum_enabled = on, toast.autovacuum_enabled = on,
    autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.02);

DO $do$
DECLARE
    v_name text;
    v_comment text;
BEGIN
    -- Sequences used as shared memory; 0 is "never".
    FOR v_name, v_comment IN
        SELECT format('deferred_%s_taken', s), format('When a job was last taken out of slot %s (epoch seconds).', s)
        FROM generate_series(0, @extschema@._slot_count('deferred') - 1) s
        UNION ALL
        SELECT 'deferred_refill', 'When refill last moved all that it looked for (epoch seconds).'
        UNION ALL
        SELECT 'deferred_full_look', 'Not before this time refill looks from the start (epoch seconds).'
    LOOP
        EXECUTE format('CREATE SEQUENCE @extschema@.%I MINVALUE 0 START 0', v_name);
        EXECUTE format('COMMENT ON SEQUENCE @extschema@.%I IS %L', v_name, v_comment);
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_name)::regclass);
    END LOOP;
END
$do$;

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

SELECT @extschema@._mark_for_dump('@extschema@.dlq_entries');
