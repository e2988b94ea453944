-- Run once, in this order.
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
-- Leaves of ring tables, and the marks that make pg_dump keep the rows of extension members.

CREATE OR REPLACE FUNCTION @extschema@._mark_for_dump(p_relation regclass)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- As plain SQL the relation is an ordinary one and dumped anyway.
    IF EXISTS (SELECT FROM pg_extension e
               WHERE e.extname = 'awa' AND e.extnamespace = '@extschema@'::regnamespace) THEN
        PERFORM pg_extension_config_dump(p_relation, '');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._mark_for_dump(regclass) IS
    'Internal: registers a table or sequence whose rows pg_dump must keep.';

CREATE OR REPLACE FUNCTION @extschema@._slot_count(p_ring text)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring WHEN 'queue' THEN 16 WHEN 'claim' THEN 8 WHEN 'deferred' THEN 17 END;
COMMENT ON FUNCTION @extschema@._slot_count(text) IS 'Internal: number of slots of a ring, fixed at install.';

-- p_indexes: index definitions by suffix, created on every leaf, because a
-- partitioned unique index would need the slot.
CREATE OR REPLACE FUNCTION @extschema@._create_leaves(p_ring text, p_table text, p_indexes jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_leaf text;
    v_index record;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count(p_ring) - 1 LOOP
        v_leaf := p_table || '_' || v_slot;
        -- Leaves are emptied by TRUNCATE; a vacuum there would only hold locks that prune must not wait for.
        EXECUTE format('CREATE TABLE @extschema@.%I PARTITION OF @extschema@.%I FOR VALUES IN (%s)
                        WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_leaf, p_table, v_slot);
        EXECUTE format('COMMENT ON TABLE @extschema@.%I IS %L', v_leaf, format('Slot %s of %s.', v_slot, p_table));
        FOR v_index IN SELECT i.key AS suffix, i.value AS definition FROM jsonb_each_text(p_indexes) i LOOP
            EXECUTE format('CREATE %s', format(v_index.definition,
                quote_ident(v_leaf || '_' || v_index.suffix), '@extschema@.' || quote_ident(v_leaf)));
        END LOOP;
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_leaf)::regclass);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_leaves(text, text, jsonb) IS
    'Internal: makes the leaves of a ring table at install.';
-- Settings that differ from their defaults. Written by set_setting(); the defaults are code (settings.sql).
CREATE TABLE @extschema@.setting_overrides (
    name  text NOT NULL,
    value text NOT NULL,
    CONSTRAINT setting_overrides_pkey PRIMARY KEY (name)
);
COMMENT ON TABLE @extschema@.setting_overrides IS 'Settings that differ from their defaults.';
SELECT @extschema@._mark_for_dump('@extschema@.setting_overrides');
-- Coordination rows: queues, lanes, ring ledgers, instances, unique keys. Narrow and cold: nothing here is written per
-- job, but for jobs that have a unique key.
-- Written by this plane. Ring ledgers only grow (a row per rotation); the rest is bounded by queues and workers.
-- Invariants: a lane id is never reused; the newest ledger row is at most one generation ahead of the ring's sequence.

CREATE TABLE @extschema@.queue_meta (
    queue            text NOT NULL,
    enqueue_shards   integer NOT NULL DEFAULT 1,
    strict_fifo      boolean NOT NULL DEFAULT false,
    notify           boolean NOT NULL DEFAULT true,
    dlq              boolean,
    aging_seconds    numeric,
    deadline_seconds numeric,
    paused_at        timestamptz,
    drained_until    timestamptz,
    CONSTRAINT queue_meta_pkey PRIMARY KEY (queue),
    CONSTRAINT queue_meta_enqueue_shards_check CHECK (enqueue_shards BETWEEN 1 AND 64)
);
COMMENT ON TABLE @extschema@.queue_meta IS 'Options and pause of a queue; a queue without a row has the defaults.';

CREATE SEQUENCE @extschema@.lane_ids AS integer MAXVALUE 2097150;
COMMENT ON SEQUENCE @extschema@.lane_ids IS 'Lane ids; lane 0 is the number space of jobs that start deferred.';

CREATE SEQUENCE @extschema@.job_ids MAXVALUE 4398046511103;
COMMENT ON SEQUENCE @extschema@.job_ids IS
    'Ids of jobs that start deferred; a job inserted ready is called by its position.';

CREATE TABLE @extschema@.queue_lanes (
    lane_id      integer NOT NULL,
    queue        text NOT NULL,
    priority     smallint NOT NULL,
    shard        smallint NOT NULL,
    position_seq regclass NOT NULL,
    hint_seq     regclass NOT NULL,
    created_at   timestamptz NOT NULL,
    CONSTRAINT queue_lanes_pkey PRIMARY KEY (lane_id),
    CONSTRAINT queue_lanes_priority_check CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT queue_lanes_shard_check CHECK (shard BETWEEN 0 AND 63)
);
CREATE INDEX queue_lanes_queue_idx ON @extschema@.queue_lanes (queue, priority, shard, lane_id);
COMMENT ON TABLE @extschema@.queue_lanes IS
    'Registry of lanes: (queue, priority, shard) with the sequence of positions and the idle hint.';

CREATE SEQUENCE @extschema@.queue_ring MINVALUE 0 START 0;
CREATE SEQUENCE @extschema@.claim_ring MINVALUE 0 START 0;
COMMENT ON SEQUENCE @extschema@.queue_ring IS 'Cursor of the queue ring: generation * 64 + slot, moved by setval only.';
COMMENT ON SEQUENCE @extschema@.claim_ring IS 'Cursor of the claim ring: generation * 64 + slot, moved by setval only.';

CREATE TABLE @extschema@.queue_ring_rotations (
    generation bigint NOT NULL,
    slot       integer NOT NULL,
    rotated_at timestamptz NOT NULL,
    CONSTRAINT queue_ring_rotations_pkey PRIMARY KEY (generation),
    CONSTRAINT queue_ring_rotations_slot_key UNIQUE (slot, generation)
);
COMMENT ON TABLE @extschema@.queue_ring_rotations IS 'Ledger of the queue ring; generation 0 is slot 0 and has no row.';
CREATE TABLE @extschema@.claim_ring_rotations (
    generation bigint NOT NULL,
    slot       integer NOT NULL,
    rotated_at timestamptz NOT NULL,
    CONSTRAINT claim_ring_rotations_pkey PRIMARY KEY (generation),
    CONSTRAINT claim_ring_rotations_slot_key UNIQUE (slot, generation)
);
COMMENT ON TABLE @extschema@.claim_ring_rotations IS 'Ledger of the claim ring; generation 0 is slot 0 and has no row.';

CREATE TABLE @extschema@.runtime_instances (
    instance_id         uuid NOT NULL,
    info                jsonb NOT NULL,
    started_at          timestamptz NOT NULL,
    heartbeat_at        timestamptz,
    heartbeat_before_at timestamptz,
    held                int8multirange,
    held_before         int8multirange,
    suspect_at          timestamptz,
    CONSTRAINT runtime_instances_pkey PRIMARY KEY (instance_id)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0);
COMMENT ON TABLE @extschema@.runtime_instances IS
    'Worker processes: last two heartbeats and the positions they hold (NULL: all they ever claimed).';

CREATE TABLE @extschema@.job_unique_claims (
    key            bytea NOT NULL,
    job_id         bigint NOT NULL,
    taken_at       timestamptz NOT NULL,
    period_ends_at timestamptz,
    expires_at     timestamptz,
    ended          @extschema@.job_state,
    states         smallint NOT NULL,
    CONSTRAINT job_unique_claims_pkey PRIMARY KEY (key),
    CONSTRAINT job_unique_claims_ended_check CHECK ((ended IS NULL) = (expires_at IS NULL))
) WITH (autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX job_unique_claims_expiry_idx ON @extschema@.job_unique_claims (expires_at) WHERE expires_at IS NOT NULL;
COMMENT ON TABLE @extschema@.job_unique_claims IS
    'The job of each unique key. It holds the key while its state is in states (bit 0: the first of job_state); '
    'once it is known to have ended there, until expires_at.';

CREATE TABLE @extschema@.sql_handlers (
    kind    text NOT NULL,
    handler text NOT NULL,
    CONSTRAINT sql_handlers_pkey PRIMARY KEY (kind)
);
COMMENT ON TABLE @extschema@.sql_handlers IS 'Kinds that work() runs, each with the full name of its function.';

SELECT @extschema@._mark_for_dump(x.relation::regclass)
FROM unnest(ARRAY['queue_meta', 'lane_ids', 'job_ids', 'queue_lanes', 'queue_ring', 'claim_ring',
                  'queue_ring_rotations', 'claim_ring_rotations', 'runtime_instances', 'job_unique_claims',
                  'sql_handlers']) t (name),
     LATERAL (SELECT '@extschema@.' || t.name) x (relation);

DO $do$
DECLARE
    v_name text;
    v_comment text;
BEGIN
    -- UNLOGGED sequences used as shared memory.
    CREATE UNLOGGED SEQUENCE @extschema@.rescue_clock MINVALUE 0 START 0;
    COMMENT ON SEQUENCE @extschema@.rescue_clock IS
        'When every open attempt was last looked at (epoch milliseconds).';
    PERFORM @extschema@._mark_for_dump('@extschema@.rescue_clock');
    FOR v_name, v_comment IN
        SELECT format('%s_%s_released', r, s),
               format('Since when nothing needs slot %s of the %s ring (epoch microseconds); 0: not seen yet.', s, r)
        FROM unnest('{queue,claim}'::text[]) r, generate_series(0, @extschema@._slot_count(r) - 1) s
    LOOP
        EXECUTE format('CREATE UNLOGGED SEQUENCE @extschema@.%I MINVALUE 0 START 0', v_name);
        EXECUTE format('COMMENT ON SEQUENCE @extschema@.%I IS %L', v_name, v_comment);
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_name)::regclass);
    END LOOP;
    FOR v_bell IN 0 .. 63 LOOP
        EXECUTE format('CREATE UNLOGGED SEQUENCE @extschema@.doorbell_%s MINVALUE 0 START 0', v_bell);
        EXECUTE format('COMMENT ON SEQUENCE @extschema@.doorbell_%s IS %L', v_bell,
            'Doorbell flag: some worker sleeps until this time (epoch milliseconds).');
        PERFORM @extschema@._mark_for_dump(format('@extschema@.doorbell_%s', v_bell)::regclass);
    END LOOP;
END
$do$;
-- Job bodies, claim evidence and terminal history: the queue ring, 16 slots. Append only; a slot is emptied by TRUNCATE
-- when nothing in it is waiting or running and its history is old enough. Written by this plane's files.
-- Invariants: a position has at most one live row (a row without tombstone) over all leaves; a position is emitted
-- once; every position at or below the newest emission's cursor is emitted, dead, held, or a gap.

CREATE TABLE @extschema@.ready_entries (
    "position" bigint NOT NULL,
    run_at     timestamptz NOT NULL,
    job_id     bigint,
    slot       smallint NOT NULL,
    kind       text NOT NULL,
    args       jsonb NOT NULL,
    ext        jsonb
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.ready_entries IS
    'Bodies of jobs that may run. job_id NULL: the job is called by its position. ext: what is not default.';
SELECT @extschema@._create_leaves('queue', 'ready_entries', jsonb_build_object(
    'position_key', 'UNIQUE INDEX %s ON %s ("position")',
    'job_id_idx', 'INDEX %s ON %s (job_id) WHERE job_id IS NOT NULL'));

CREATE TABLE @extschema@.ready_tombstones (
    "position" bigint NOT NULL,
    slot       smallint NOT NULL
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.ready_tombstones IS
    'Positions whose row in the same slot is dead (cancelled or moved) and was never emitted.';
SELECT @extschema@._create_leaves('queue', 'ready_tombstones', jsonb_build_object(
    'position_key', 'UNIQUE INDEX %s ON %s ("position")'));

CREATE TABLE @extschema@.ready_claim_attempt_batches (
    claim_no bigint NOT NULL,
    cursor   bigint NOT NULL,
    low      bigint NOT NULL,
    horizon  xid8,
    slot     smallint NOT NULL,
    gaps_old int8multirange,
    gaps_new int8multirange,
    held     int8multirange
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.ready_claim_attempt_batches IS
    'Emission ledger: the newest row of a lane is its claim cursor. claim_no = lane_id * 2^42 + number of the claim.';
SELECT @extschema@._create_leaves('queue', 'ready_claim_attempt_batches', jsonb_build_object(
    'claim_no_key', 'UNIQUE INDEX %s ON %s (claim_no)'));

CREATE TABLE @extschema@.queue_claim_heads (
    lane_id  integer NOT NULL,
    claim_no bigint NOT NULL,
    cursor   bigint NOT NULL,
    low      bigint NOT NULL,
    horizon  xid8,
    gaps_old int8multirange,
    gaps_new int8multirange,
    held     int8multirange,
    CONSTRAINT queue_claim_heads_pkey PRIMARY KEY (lane_id)
);
COMMENT ON TABLE @extschema@.queue_claim_heads IS
    'Newest emission row of a lane whose slot was pruned; written by prune only.';

SELECT @extschema@._mark_for_dump('@extschema@.queue_claim_heads');

CREATE TABLE @extschema@.done_entries (
    job_id       bigint NOT NULL,
    "position"   bigint,
    run_lease    bigint NOT NULL,
    finalized_at timestamptz NOT NULL,
    attempted_at timestamptz,
    state        @extschema@.job_state NOT NULL,
    slot         smallint NOT NULL,
    attempt      smallint NOT NULL,
    is_undo      boolean NOT NULL DEFAULT false,
    queue        text NOT NULL,
    body         jsonb,
    detail       jsonb,
    CONSTRAINT done_entries_state_check CHECK (state IN ('completed', 'failed', 'cancelled')),
    CONSTRAINT done_entries_body_check CHECK (("position" IS NULL) = (body IS NOT NULL))
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.done_entries IS
    'Jobs that ended failed, cancelled, or completed with a kept result. '
    'The body is the ready row of the same slot and position, or stored here. '
    'is_undo takes back the row with the same job_id, run_lease and finalized_at: the job was retried.';
SELECT @extschema@._create_leaves('queue', 'done_entries', jsonb_build_object(
    'job_id_idx', 'INDEX %s ON %s (job_id)'));

CREATE TABLE @extschema@.receipt_completion_batches (
    batch_id     bigint NOT NULL,
    finalized_at timestamptz NOT NULL,
    attempted_at timestamptz NOT NULL,
    slot         smallint NOT NULL,
    positions    int8multirange NOT NULL
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.receipt_completion_batches IS
    'Jobs that completed: one row per flush and batch, in the slot of their bodies.';
SELECT @extschema@._create_leaves('queue', 'receipt_completion_batches', '{}');

CREATE TABLE @extschema@.failed_entries (
    job_id       bigint NOT NULL,
    run_lease    bigint NOT NULL,
    finalized_at timestamptz NOT NULL,
    attempted_at timestamptz,
    attempt      smallint NOT NULL,
    queue        text NOT NULL,
    body         jsonb NOT NULL,
    detail       jsonb,
    CONSTRAINT failed_entries_pkey PRIMARY KEY (job_id)
);
CREATE INDEX failed_entries_age_idx ON @extschema@.failed_entries (finalized_at, job_id);
COMMENT ON TABLE @extschema@.failed_entries IS
    'Failed jobs whose slot was pruned, until failed_retention_seconds; written by prune only. Counted in the rollups.';
SELECT @extschema@._mark_for_dump('@extschema@.failed_entries');

CREATE TABLE @extschema@.queue_terminal_rollups (
    queue     text NOT NULL,
    completed bigint NOT NULL,
    failed    bigint NOT NULL,
    cancelled bigint NOT NULL,
    pruned_at timestamptz NOT NULL,
    CONSTRAINT queue_terminal_rollups_pkey PRIMARY KEY (queue)
);
COMMENT ON TABLE @extschema@.queue_terminal_rollups IS
    'Terminal jobs of pruned slots, by queue; written by prune only.';
SELECT @extschema@._mark_for_dump('@extschema@.queue_terminal_rollups');
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
-- Jobs stay there for long, so vacuum has work there.
ALTER TABLE @extschema@.deferred_jobs_16 SET (
    autovacuum_enabled = on, toast.autovacuum_enabled = on,
    autovacuum_vacuum_threshold = 200, autovacuum_vacuum_scale_factor = 0.02);

DO $do$
DECLARE
    v_name text;
    v_comment text;
BEGIN
    -- UNLOGGED sequences used as shared memory; 0 is "never".
    FOR v_name, v_comment IN
        SELECT format('deferred_%s_taken', s), format('When a job was last taken out of slot %s (epoch seconds).', s)
        FROM generate_series(0, @extschema@._slot_count('deferred') - 1) s
        UNION ALL
        SELECT 'deferred_refill', 'When refill last moved all that it looked for (epoch seconds).'
        UNION ALL
        SELECT 'deferred_full_look', 'Not before this time refill looks from the start (epoch seconds).'
    LOOP
        EXECUTE format('CREATE UNLOGGED SEQUENCE @extschema@.%I MINVALUE 0 START 0', v_name);
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
-- Receipts of running attempts: the claim ring, 8 slots, append only, emptied by TRUNCATE once every receipt is closed.
-- leases and attempt_state are ordinary tables, written only for attempts that outlive their slots or report progress.
-- Written by this plane's files.
-- Invariants: closures of a batch are disjoint and within its positions; (batch_id, closure_no) is unique, so that a
-- closure which an old snapshot cannot see makes a second one fail instead of being ignored.

CREATE SEQUENCE @extschema@.claim_batch_ids;
COMMENT ON SEQUENCE @extschema@.claim_batch_ids IS
    'Ids of claim batches; never reused, because closures match by them.';
SELECT @extschema@._mark_for_dump('@extschema@.claim_batch_ids');

CREATE TABLE @extschema@.lease_claim_batches (
    batch_id    bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,
    owner       uuid NOT NULL,
    slot        smallint NOT NULL,
    ready_slot  smallint NOT NULL,
    is_plain    boolean NOT NULL,
    positions   int8multirange NOT NULL
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.lease_claim_batches IS
    'Claimed positions of one lane, one ready slot, one deadline. '
    'is_plain: first attempts of jobs called by their position.';
SELECT @extschema@._create_leaves('claim', 'lease_claim_batches', jsonb_build_object(
    'batch_id_key', 'UNIQUE INDEX %s ON %s (batch_id)',
    'deadline_idx', 'INDEX %s ON %s (deadline_at) WHERE deadline_at IS NOT NULL'));

CREATE TABLE @extschema@.lease_claim_closures (
    batch_id   bigint NOT NULL,
    closed_at  timestamptz NOT NULL,
    closure_no integer NOT NULL,
    outcome    @extschema@.attempt_outcome NOT NULL,
    slot       smallint NOT NULL,
    closed     int8multirange NOT NULL,
    reason     text
) PARTITION BY LIST (slot);
COMMENT ON TABLE @extschema@.lease_claim_closures IS 'Positions of a batch that ended, by outcome.';
SELECT @extschema@._create_leaves('claim', 'lease_claim_closures', jsonb_build_object(
    'batch_id_key', 'UNIQUE INDEX %s ON %s (batch_id, closure_no)'));

CREATE TABLE @extschema@.leases (
    batch_id    bigint NOT NULL,
    "position"  bigint NOT NULL,
    job_id      bigint NOT NULL,
    run_lease   bigint NOT NULL,
    claimed_at  timestamptz NOT NULL,
    deadline_at timestamptz,
    run_at      timestamptz NOT NULL,
    ended_at    timestamptz,
    outcome     @extschema@.attempt_outcome,
    owner       uuid NOT NULL,
    priority    smallint NOT NULL,
    shard       smallint NOT NULL,
    attempt     smallint NOT NULL,
    queue       text NOT NULL,
    kind        text NOT NULL,
    args        jsonb,
    ext         jsonb,
    CONSTRAINT leases_pkey PRIMARY KEY (batch_id, "position"),
    CONSTRAINT leases_outcome_check CHECK ((outcome IS NULL) = (ended_at IS NULL))
) WITH (fillfactor = 80, autovacuum_vacuum_threshold = 100, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX leases_job_id_idx ON @extschema@.leases (job_id);
CREATE INDEX leases_ended_at_idx ON @extschema@.leases (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON TABLE @extschema@.leases IS
    'Attempts that outlived the slots of their receipt and body, with the body. '
    'An ended one stays without body for attempt_evidence_seconds, as evidence.';
SELECT @extschema@._mark_for_dump('@extschema@.leases');

CREATE TABLE @extschema@.attempt_state (
    batch_id   bigint NOT NULL,
    "position" bigint NOT NULL,
    progress   jsonb NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT attempt_state_pkey PRIMARY KEY (batch_id, "position")
) WITH (fillfactor = 70, autovacuum_vacuum_threshold = 50, autovacuum_vacuum_scale_factor = 0);
COMMENT ON TABLE @extschema@.attempt_state IS
    'Progress of running attempts that report it; gone when the attempt ends.';
SELECT @extschema@._mark_for_dump('@extschema@.attempt_state');

CREATE TYPE @extschema@._seen_rows AS (
    positions bigint[], leaves integer[], sizes integer[], frontier bigint, probe_full boolean, scan_full boolean,
    low bigint, is_plain boolean);
COMMENT ON TYPE @extschema@._seen_rows IS
    'Internal: candidates of a claim, each with its leaf and the size of its args, '
    'and up to where everything was seen.';

CREATE TYPE @extschema@._finish_item AS (
    ordinal bigint, job_id bigint, run_lease bigint, claim_slot integer, batch_id bigint, "position" bigint,
    outcome @extschema@.attempt_outcome, result jsonb, error jsonb, delay_seconds numeric, reason text, fault text);
COMMENT ON TYPE @extschema@._finish_item IS
    'Internal: one item of finish_jobs, parsed; fault says what is wrong with it.';

CREATE TYPE @extschema@._finish_answer AS (ordinal bigint, job_id bigint, run_lease bigint, result text, reason text);
COMMENT ON TYPE @extschema@._finish_answer IS 'Internal: the answer to one item of finish_jobs.';
-- Re-runnable: run again at each update. The order is the direction of dependencies.

-- foundation: what all planes use
-- Leaves of ring tables, and the marks that make pg_dump keep the rows of extension members.

CREATE OR REPLACE FUNCTION @extschema@._mark_for_dump(p_relation regclass)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- As plain SQL the relation is an ordinary one and dumped anyway.
    IF EXISTS (SELECT FROM pg_extension e
               WHERE e.extname = 'awa' AND e.extnamespace = '@extschema@'::regnamespace) THEN
        PERFORM pg_extension_config_dump(p_relation, '');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._mark_for_dump(regclass) IS
    'Internal: registers a table or sequence whose rows pg_dump must keep.';

CREATE OR REPLACE FUNCTION @extschema@._slot_count(p_ring text)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring WHEN 'queue' THEN 16 WHEN 'claim' THEN 8 WHEN 'deferred' THEN 17 END;
COMMENT ON FUNCTION @extschema@._slot_count(text) IS 'Internal: number of slots of a ring, fixed at install.';

-- p_indexes: index definitions by suffix, created on every leaf, because a
-- partitioned unique index would need the slot.
CREATE OR REPLACE FUNCTION @extschema@._create_leaves(p_ring text, p_table text, p_indexes jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_leaf text;
    v_index record;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count(p_ring) - 1 LOOP
        v_leaf := p_table || '_' || v_slot;
        -- Leaves are emptied by TRUNCATE; a vacuum there would only hold locks that prune must not wait for.
        EXECUTE format('CREATE TABLE @extschema@.%I PARTITION OF @extschema@.%I FOR VALUES IN (%s)
                        WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_leaf, p_table, v_slot);
        EXECUTE format('COMMENT ON TABLE @extschema@.%I IS %L', v_leaf, format('Slot %s of %s.', v_slot, p_table));
        FOR v_index IN SELECT i.key AS suffix, i.value AS definition FROM jsonb_each_text(p_indexes) i LOOP
            EXECUTE format('CREATE %s', format(v_index.definition,
                quote_ident(v_leaf || '_' || v_index.suffix), '@extschema@.' || quote_ident(v_leaf)));
        END LOOP;
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_leaf)::regclass);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_leaves(text, text, jsonb) IS
    'Internal: makes the leaves of a ring table at install.';
CREATE OR REPLACE FUNCTION @extschema@.error_codes()
RETURNS SETOF @extschema@.error_code
LANGUAGE sql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT e.sqlstate, e.name, e.description, e.hint
    FROM (VALUES
        ('22023', 'invalid_argument',
            'A value or option that no retry can make right.', 'Correct the named field.'),
        ('23505', 'unique_conflict',
            'Another job holds the unique key.', 'Use the existing job, or another key.'),
        ('23514', 'limit_exceeded',
            'A value outside a documented limit.', 'Keep within the limit that the message names.'),
        ('25001', 'wrong_isolation',
            'A call that needs READ COMMITTED ran in an older snapshot.', 'Run it in READ COMMITTED.'),
        ('40001', 'serialization_failure',
            'The snapshot is older than a change of the same attempt.', 'Repeat the transaction.'),
        ('42704', 'not_found',
            'Unknown job, dead letter, setting, step or role.', 'Check the name or id.'),
        ('55000', 'wrong_state',
            'The job or object is not in a state that allows this.', 'Look at its state first.'),
        ('JQ001', 'stale_attempt',
            'The attempt is no longer current.', 'Drop this result; another attempt owns the job.'),
        ('JQ003', 'backpressure',
            'The queue is deeper than the producer allows.', 'Wait and try again.'),
        ('JQ004', 'parent_failed',
            'A job that this one depends on failed.', 'Retry the parent first.'),
        ('JQ005', 'callback_unknown',
            'The callback token is unknown or used.', 'Ask for the state of the job.'),
        ('JQ006', 'version_mismatch',
            'Client and schema versions do not fit.', 'Upgrade the older one.'),
        ('JQ007', 'not_enabled',
            'The capability is not enabled in this version.', 'Leave the option out.')
    ) e (sqlstate, name, description, hint)
$function$;
COMMENT ON FUNCTION @extschema@.error_codes() IS
    'SQLSTATEs that the public functions raise, with a name, what it means and what to do.';
-- Settings: defaults are code, overrides are rows. Hot paths read a setting only
-- when a cheap bound says it could matter.

CREATE OR REPLACE FUNCTION @extschema@._setting_definitions()
RETURNS TABLE (name text, default_value text, minimum numeric, maximum numeric, unit text, description text)
LANGUAGE sql IMMUTABLE PARALLEL SAFE
BEGIN ATOMIC
    SELECT d.name, d.default_value, d.minimum, d.maximum, d.unit, d.description
    FROM (VALUES
        ('aging_seconds', '60', 0, 86400, 'seconds',
            'Waiting time that raises a job by one priority; 0 is off.'),
        ('args_max_bytes', '1048576', 1024, 67108864, 'bytes',
            'Largest args of a job.'),
        ('attempt_evidence_seconds', '600', 0, 86400, 'seconds',
            'How long closed receipts stay, so that attempt_status can answer.'),
        ('claim_max_bytes', '131072', 65536, 268435456, 'bytes',
            'Most that one claim returns: args, and 100 bytes a job; one job always passes. What the buffers of a '
            'connection cannot take keeps the lane locked until the client reads it.'),
        ('claim_rotate_bytes', '4194304', 8192, 1073741824, 'bytes',
            'Size at which the current slot of the claim ring is left.'),
        ('claim_rotate_seconds', '60', 0.05, 86400, 'seconds',
            'Age at which the current slot of the claim ring is left.'),
        ('dlq_default', '0', 0, 1, 'boolean',
            'Whether jobs that fail go to the dead letters unless their queue says otherwise.'),
        ('dlq_retention_seconds', '2592000', 1, 315360000, 'seconds',
            'How long dead letters are kept.'),
        ('dump_lock_seconds', '60', 0, 3600, 'seconds',
            'How long a slot is kept after a job left it, for dumps that began before and lock it later; 0 is off.'),
        ('errors_max_bytes', '16384', 1024, 1048576, 'bytes',
            'Largest error history of a job.'),
        ('errors_max_count', '20', 1, 1000, 'entries',
            'Longest error history of a job.'),
        ('evacuate_attempt_seconds', '60', 0, 86400, 'seconds',
            'Age from which a running attempt is moved out of a slot when slots run short.'),
        ('evacuate_max_rows', '100000', 1, 10000000, 'rows',
         'A slot with more waiting jobs than this is left alone when slots run short.'),
        ('evacuate_rows', '2000', 1, 100000, 'rows',
         'Waiting jobs moved by one evacuation step.'),
        ('failed_retention_seconds', '259200', 0, 315360000, 'seconds',
            'How long failed jobs stay, also those whose slot was pruned.'),
        ('heartbeat_seconds', '10', 0.05, 3600, 'seconds',
            'Shortest time between two writes of the same heartbeat.'),
        ('idle_poll_ms', '2000', 10, 60000, 'milliseconds',
            'How long an idle worker sleeps between two looks when no doorbell rings.'),
        ('instance_retention_seconds', '86400', 60, 315360000, 'seconds',
            'How long a silent instance without receipts is kept.'),
        ('promote_rows', '4096', 1, 100000, 'rows',
            'Due jobs moved by one promotion step.'),
        ('queue_rotate_bytes', '134217728', 8192, 17179869184, 'bytes',
            'Size at which the current slot of the queue ring is left.'),
        ('queue_rotate_seconds', '6000', 0.05, 86400, 'seconds',
            'Age at which the current slot of the queue ring is left; the terminal retention if less, 15 s or more.'),
        ('rescue_rows', '500', 1, 100000, 'attempts',
            'Attempts ended by one rescue step.'),
        ('ring_size_cap_bytes', '2147483648', 1048576, 1099511627776, 'bytes',
            'Size of the queue ring above which history is pruned before its retention.'),
        ('staleness_seconds', '90', 0.2, 86400, 'seconds',
            'Silence after which an instance is suspect, and one further heartbeat interval later dead.'),
        ('terminal_retention_seconds', '86400', 0, 315360000, 'seconds',
            'How long terminal jobs stay visible.')
    ) d (name, default_value, minimum, maximum, unit, description);
END;
COMMENT ON FUNCTION @extschema@._setting_definitions() IS 'Internal: every setting with its default, bounds and unit.';

CREATE OR REPLACE FUNCTION @extschema@._setting(p_name text)
RETURNS numeric
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    RETURN coalesce((SELECT o.value FROM @extschema@.setting_overrides o WHERE o.name = p_name),
                    (SELECT d.default_value FROM @extschema@._setting_definitions() d WHERE d.name = p_name))::numeric;
END
$function$;
COMMENT ON FUNCTION @extschema@._setting(text) IS 'Internal: value of a setting; NULL for an unknown name.';

CREATE OR REPLACE FUNCTION @extschema@._setting_interval(p_name text)
RETURNS interval
LANGUAGE sql STABLE PARALLEL SAFE
RETURN make_interval(secs => @extschema@._setting(p_name)::double precision);
COMMENT ON FUNCTION @extschema@._setting_interval(text) IS 'Internal: a setting in seconds as an interval.';

CREATE OR REPLACE FUNCTION @extschema@._set_setting(p_name text, p_value text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_definition record;
BEGIN
    SELECT d.* INTO v_definition FROM @extschema@._setting_definitions() d WHERE d.name = p_name;
    IF v_definition.name IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = '42704',
            MESSAGE = format('field "name": there is no setting %s', coalesce(quote_ident(left(p_name, 100)), 'NULL')),
            HINT = 'The view settings lists them.';
    END IF;
    IF p_value IS NULL THEN
        DELETE FROM @extschema@.setting_overrides o WHERE o.name = p_name;
        RETURN;
    END IF;
    IF p_value !~ '^[0-9]{1,15}([.][0-9]{1,6})?$'
       OR p_value::numeric NOT BETWEEN v_definition.minimum AND v_definition.maximum
       OR (v_definition.unit = 'boolean' AND p_value NOT IN ('0', '1')) THEN
        RAISE EXCEPTION USING ERRCODE = '22023',
            MESSAGE = format('field "value" of setting "%s" cannot be %L', p_name, left(p_value, 100)),
            HINT = format('Give a number from %s to %s (%s).',
                v_definition.minimum, v_definition.maximum, v_definition.unit);
    END IF;
    INSERT INTO @extschema@.setting_overrides AS o (name, value) VALUES (p_name, p_value)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_setting(text, text) IS
    'Internal: stores an override, or removes it when the value is NULL.';
-- A position is lane_id * 2^42 + n, and sets of positions are multiranges. Not STRICT where that would keep the
-- planner from inlining: a call costs ten times the expression.
-- The largest bigint would overflow as the end of a range; like its neighbour, which stands for it, it is no position.

CREATE OR REPLACE FUNCTION @extschema@._lane_base(p_lane integer)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN p_lane::bigint << 42;
COMMENT ON FUNCTION @extschema@._lane_base(integer) IS 'Internal: number below the first position of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._lane_of(p_position bigint)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN (p_position >> 42)::integer;
COMMENT ON FUNCTION @extschema@._lane_of(bigint) IS 'Internal: lane of a position.';

CREATE OR REPLACE FUNCTION @extschema@._lane_range(p_lane integer)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN int8multirange(int8range(p_lane::bigint << 42, (p_lane + 1)::bigint << 42));
COMMENT ON FUNCTION @extschema@._lane_range(integer) IS 'Internal: all positions of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._cardinality(p_set int8multirange)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM unnest(p_set) r);
COMMENT ON FUNCTION @extschema@._cardinality(int8multirange) IS 'Internal: number of positions in a bounded set.';

CREATE OR REPLACE FUNCTION @extschema@._to_set(p_positions bigint[])
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(range_agg(int8range(p, p, '[]')), '{}')
        FROM (SELECT least(u, 9223372036854775806) FROM unnest(p_positions) u WHERE u IS NOT NULL) x (p));
COMMENT ON FUNCTION @extschema@._to_set(bigint[]) IS 'Internal: a list of positions as a set.';

-- Ascending and distinct positions are one range when their ends lie as far apart as their number says.
CREATE OR REPLACE FUNCTION @extschema@._sorted_to_set(p_positions bigint[])
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN p_positions[cardinality(p_positions)] - p_positions[1] = cardinality(p_positions) - 1
    THEN int8multirange(int8range(p_positions[1], p_positions[cardinality(p_positions)], '[]'))
    ELSE @extschema@._to_set(p_positions) END;
COMMENT ON FUNCTION @extschema@._sorted_to_set(bigint[]) IS
    'Internal: an ascending list of distinct positions as a set, fast.';

CREATE OR REPLACE FUNCTION @extschema@._to_list(p_set int8multirange)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(array_agg(p ORDER BY p), '{}') FROM unnest(p_set) r, generate_series(lower(r), upper(r) - 1) p);
COMMENT ON FUNCTION @extschema@._to_list(int8multirange) IS 'Internal: a bounded set of positions as a sorted list.';
-- Lock keys. They start from the schema's own name, so that tenants do not meet; the derivation never changes between
-- versions, because old and new clients must meet. Waiting is only ever for, in this order: fifo, unique key,
-- mutation, position, batch. All others are taken by try, but for lane, which a claim that holds none waits 50 ms for,
-- for verify(), which is for a database without workers, and for instance, where a worker waits for itself alone.

CREATE OR REPLACE FUNCTION @extschema@._lock_key(p_class text, p_id bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN hashtextextended('@extschema@/' || p_class, p_id);
COMMENT ON FUNCTION @extschema@._lock_key(text, bigint) IS
    'Internal: advisory lock key. Classes: fifo, new_lane, lane, mutation, position, batch,
queue_ring, claim_ring, step, instance.';

CREATE OR REPLACE FUNCTION @extschema@._is_read_committed()
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
COMMENT ON FUNCTION @extschema@._is_read_committed() IS
    'Internal: whether each statement of this transaction sees what was committed before it.';

CREATE OR REPLACE FUNCTION @extschema@._require_read_committed()
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT @extschema@._is_read_committed() THEN
        RAISE EXCEPTION USING ERRCODE = '25001',
            MESSAGE = format('this call needs READ COMMITTED, the transaction is %s',
                upper(current_setting('transaction_isolation'))),
            HINT = 'Run it in a READ COMMITTED transaction: '
                'an older snapshot cannot see what later transactions claimed.';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._require_read_committed() IS
    'Internal: raises 25001 in REPEATABLE READ and SERIALIZABLE.';
-- Delay before the next attempt, in seconds, always within [0, 24 h]. The
-- exponent is clamped before the power is taken.
-- p_policy: NULL, {"delays": [...]} (the last one repeats), or base_seconds, factor, cap_seconds, jitter.
CREATE OR REPLACE FUNCTION @extschema@._backoff_seconds(p_attempt integer, p_policy jsonb, p_random double precision)
RETURNS double precision
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_cap constant double precision := 86400;
    v_base double precision := coalesce(round((p_policy ->> 'base_seconds')::numeric, 9)::double precision, 1);
    v_factor double precision := coalesce(round((p_policy ->> 'factor')::numeric, 9)::double precision, 2);
    v_cap double precision := least(
        coalesce(round((p_policy ->> 'cap_seconds')::numeric, 9)::double precision, c_cap), c_cap);
    v_jitter double precision := coalesce(round((p_policy ->> 'jitter')::numeric, 9)::double precision, 0.25);
    v_attempt integer := greatest(coalesce(p_attempt, 1), 1);
    v_delay double precision;
BEGIN
    IF p_policy ? 'delays' THEN
        v_delay := round((p_policy -> 'delays'
            ->> (least(v_attempt, jsonb_array_length(p_policy -> 'delays')) - 1))::numeric, 9)::double precision;
        RETURN least(v_delay, c_cap);
    END IF;
    -- 1.01^1000 and 2^20 both fit; a larger factor reaches the cap long before the clamp.
    v_delay := CASE WHEN v_base = 0 THEN 0
                    WHEN ln(v_base) + v_attempt * ln(v_factor) > ln(c_cap) THEN c_cap
                    ELSE v_base * power(v_factor, v_attempt) END;
    RETURN least(v_delay * (1 + v_jitter * p_random), v_cap);
END
$function$;
COMMENT ON FUNCTION @extschema@._backoff_seconds(integer, jsonb, double precision) IS
    'Internal: seconds to wait after a failed attempt: '
    'base * factor^attempt plus up to jitter of it, at most the cap (24 h).';

CREATE OR REPLACE FUNCTION @extschema@._append_error(
    p_errors jsonb, p_error jsonb, p_attempt integer, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_max_count integer := @extschema@._setting('errors_max_count');
    v_max_bytes integer := @extschema@._setting('errors_max_bytes');
    v_entry jsonb := CASE jsonb_typeof(p_error)
        WHEN 'object' THEN p_error ELSE jsonb_build_object('error', p_error) END;
    v_errors jsonb := coalesce(p_errors, '[]');
BEGIN
    IF octet_length(v_entry::text) > v_max_bytes / 2 OR @extschema@._is_too_deep(v_entry) THEN
        v_entry := jsonb_build_object(
            'error', left(coalesce(v_entry ->> 'error', v_entry::text), v_max_bytes / 16), 'truncated', true);
    END IF;
    v_errors := v_errors || (v_entry || jsonb_build_object('attempt', p_attempt, 'at', p_now));
    -- The newest entries are the ones that explain the job.
    WHILE jsonb_array_length(v_errors) > 1
          AND (jsonb_array_length(v_errors) > v_max_count OR octet_length(v_errors::text) > v_max_bytes) LOOP
        v_errors := v_errors - 0;
    END LOOP;
    RETURN v_errors;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_error(jsonb, jsonb, integer, timestamptz) IS
    'Internal: error history with one more entry, bounded by errors_max_count and errors_max_bytes.';
-- Checks of what callers give. One clear error: a message that names the field, a SQLSTATE, a hint.

CREATE OR REPLACE FUNCTION @extschema@._refuse(p_sqlstate text, p_message text, p_hint text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RAISE EXCEPTION USING ERRCODE = p_sqlstate, MESSAGE = p_message, HINT = p_hint;
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse(text, text, text) IS 'Internal: raises an error with a hint.';

CREATE OR REPLACE FUNCTION @extschema@._check_name(p_field text, p_name text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_name IS NULL OR p_name = '' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must not be empty', p_field),
            'Give a name of 1 to 200 characters.');
    ELSIF length(p_name) > 200 THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" has %s characters', p_field, length(p_name)),
            'The limit is 200 characters.');
    ELSIF p_name ~ '[[:cntrl:]]' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" contains a control character', p_field),
            'Names may hold any printable characters.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_name(text, text) IS
    'Internal: a queue or kind has 1 to 200 printable characters (22023, 23514).';

-- Small enough to break no limit: every size limit is at least 1 KiB, and a nesting level takes 8 bytes. The text
-- counts, for it is what clients get: 1e131071 takes 12 bytes when it is stored and 128 KiB when it is read.
CREATE OR REPLACE FUNCTION @extschema@._is_small(p_value jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_column_size(p_value) < 1024 AND pg_column_compression(p_value) IS NULL
    AND octet_length(p_value::text) <= 1024;
COMMENT ON FUNCTION @extschema@._is_small(jsonb) IS
    'Internal: true for a JSON value that is within every limit; otherwise look closer.';

-- What args take in memory. Only compressed ones must be written out to tell.
CREATE OR REPLACE FUNCTION @extschema@._args_bytes(p_args jsonb)
RETURNS integer
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN pg_column_compression(p_args) IS NULL THEN pg_column_size(p_args)
            ELSE octet_length(p_args::text) END;
COMMENT ON FUNCTION @extschema@._args_bytes(jsonb) IS 'Internal: about how many bytes args have once they are read.';

-- Writing args as text takes a tenth of what storing a small job does. In 136 bytes there is room for seven numbers
-- such as 1e131071, whose text is as long as numbers get: less than the default limit.
CREATE OR REPLACE FUNCTION @extschema@._are_small_args(p_args jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_column_size(p_args) <= 136 OR @extschema@._is_small(p_args);
COMMENT ON FUNCTION @extschema@._are_small_args(jsonb) IS
    'Internal: true for args that are within the limits; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._is_too_deep(p_value jsonb)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN jsonb_path_exists(p_value, 'strict $.**{256} ? (@.type() == "object" || @.type() == "array")');
COMMENT ON FUNCTION @extschema@._is_too_deep(jsonb) IS 'Internal: whether a JSON value has more than 256 levels.';

CREATE OR REPLACE FUNCTION @extschema@._check_payload(p_field text, p_value jsonb, p_limit_bytes bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_value IS NULL THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must not be NULL', p_field),
            'Leave it out, or give {}.');
    END IF;
    IF @extschema@._is_small(p_value) THEN
        RETURN;
    END IF;
    IF octet_length(p_value::text) > coalesce(p_limit_bytes, @extschema@._setting('args_max_bytes')) THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" has %s bytes', p_field, octet_length(p_value::text)),
            format('The limit is %s bytes.', coalesce(p_limit_bytes, @extschema@._setting('args_max_bytes'))));
    END IF;
    IF @extschema@._is_too_deep(p_value) THEN
        PERFORM @extschema@._refuse('23514', format('field "%s" is nested more than 256 levels deep', p_field),
            'The limit is 256 levels.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_payload(text, jsonb, bigint) IS
    'Internal: a JSON value within its size (NULL: args_max_bytes) and 256 levels (22023, 23514).';

-- One expression, inlined into its caller, decides the usual case; only what it cannot pass is looked at field by
-- field. A regular expression with a bound such as {1,200} would take fifty times as long.
CREATE OR REPLACE FUNCTION @extschema@._is_plain_name(p_name text)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN length(p_name) <= 200 AND p_name ~ '^[^[:cntrl:]]+$';
COMMENT ON FUNCTION @extschema@._is_plain_name(text) IS
    'Internal: true for a queue or kind of 1 to 200 printable characters.';

CREATE OR REPLACE FUNCTION @extschema@._is_plain_body(p_kind text, p_args jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN @extschema@._is_plain_name(p_kind) AND @extschema@._are_small_args(p_args);
COMMENT ON FUNCTION @extschema@._is_plain_body(text, jsonb) IS
    'Internal: true for a kind and args that break no limit; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._is_plain_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN @extschema@._is_plain_body(p_kind, p_args) AND @extschema@._is_plain_name(p_queue)
    AND p_priority BETWEEN 1 AND 4 AND p_max_attempts BETWEEN 1 AND 1000
    AND coalesce(isfinite(p_run_at) AND p_run_at < '9999-12-31 00:00:00+00', true);
COMMENT ON FUNCTION @extschema@._is_plain_job(text, jsonb, text, integer, integer, timestamptz) IS
    'Internal: true for a job that breaks no limit; otherwise look closer.';

CREATE OR REPLACE FUNCTION @extschema@._check_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF @extschema@._is_plain_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at) THEN
        RETURN;
    END IF;
    PERFORM @extschema@._check_name('kind', p_kind);
    PERFORM @extschema@._check_name('queue', p_queue);
    PERFORM @extschema@._check_payload('args', p_args, NULL);
    IF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
        PERFORM @extschema@._refuse('23514', format('field "priority" is %s', coalesce(p_priority::text, 'NULL')),
            'Priorities run from 1 (first) to 4.');
    END IF;
    IF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        PERFORM @extschema@._refuse('23514',
            format('field "max_attempts" is %s', coalesce(p_max_attempts::text, 'NULL')),
            'A job may have 1 to 1000 attempts.');
    END IF;
    IF p_run_at IS NOT NULL AND NOT isfinite(p_run_at) THEN
        PERFORM @extschema@._refuse('22023', format('field "run_at" is %s', p_run_at), 'Give a finite time.');
    ELSIF p_run_at >= '9999-12-31 00:00:00+00' THEN
        -- Most languages know no later year, so that one such job would hide all others of a listing.
        PERFORM @extschema@._refuse('23514', format('field "run_at" is %s', p_run_at),
            'The limit is 9999-12-30 in UTC.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_job(text, jsonb, text, integer, integer, timestamptz) IS
    'Internal: raises 22023 or 23514 for a field that a job cannot have.';

-- Keys of p_options that are not in p_known: JQ007 for those in p_later, 22023 for the rest.
CREATE OR REPLACE FUNCTION @extschema@._check_options(
    p_field text, p_options jsonb, p_known text[], p_later text[] DEFAULT '{}')
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_key text;
BEGIN
    IF p_options IS NULL OR jsonb_typeof(p_options) <> 'object' THEN
        PERFORM @extschema@._refuse('22023', format('field "%s" must be a JSON object', p_field),
            'Leave it out, or give {}.');
    END IF;
    IF p_options - p_known = '{}' THEN
        RETURN;
    END IF;
    FOR v_key IN SELECT k FROM jsonb_object_keys(p_options) k WHERE k <> ALL (p_known) LOOP
        IF v_key = ANY (p_later) THEN
            PERFORM @extschema@._refuse('JQ007', format('option "%s" is not enabled in this version', v_key),
                'Leave the option out.');
        END IF;
        PERFORM @extschema@._refuse('22023',
            format('field "%s" has the unknown option %s', p_field, quote_ident(left(v_key, 100))),
            format('Known options: %s.', array_to_string(p_known, ', ')));
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_options(text, jsonb, text[], text[]) IS
    'Internal: refuses unknown options (22023, JQ007).';

-- A number of an options object; NULL when absent. Bounds are inclusive.
CREATE OR REPLACE FUNCTION @extschema@._option_number(p_options jsonb, p_key text, p_minimum numeric, p_maximum numeric)
RETURNS numeric
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'number'
       OR (p_options ->> p_key)::numeric NOT BETWEEN p_minimum AND p_maximum THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            format('Give a number from %s to %s.', p_minimum, p_maximum));
    END IF;
    -- Nanoseconds are enough; what is smaller would not fit into double precision.
    RETURN round((p_options ->> p_key)::numeric, 9);
END
$function$;
COMMENT ON FUNCTION @extschema@._option_number(jsonb, text, numeric, numeric) IS
    'Internal: a bounded number from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_integer(
    p_options jsonb, p_key text, p_minimum integer, p_maximum integer)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_number numeric;
BEGIN
    IF NOT p_options ? p_key THEN
        RETURN NULL;
    END IF;
    v_number := @extschema@._option_number(p_options, p_key, p_minimum, p_maximum);
    IF v_number <> trunc(v_number) THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            format('Give a whole number from %s to %s.', p_minimum, p_maximum));
    END IF;
    RETURN v_number::integer;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_integer(jsonb, text, integer, integer) IS
    'Internal: a bounded whole number from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_boolean(p_options jsonb, p_key text)
RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'boolean' THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" cannot be %s', p_key, left((p_options -> p_key)::text, 100)),
            'Give true or false.');
    END IF;
    RETURN (p_options -> p_key)::boolean;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_boolean(jsonb, text) IS 'Internal: a boolean from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._option_text(p_options jsonb, p_key text, p_max_length integer)
RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF NOT p_options ? p_key OR jsonb_typeof(p_options -> p_key) = 'null' THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(p_options -> p_key) <> 'string' OR length(p_options ->> p_key) NOT BETWEEN 1 AND p_max_length THEN
        PERFORM @extschema@._refuse('22023',
            format('option "%s" must be a string of 1 to %s characters', p_key, p_max_length),
            'Correct it or leave it out.');
    END IF;
    RETURN p_options ->> p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._option_text(jsonb, text, integer) IS
    'Internal: a bounded string from an options object (22023).';

CREATE OR REPLACE FUNCTION @extschema@._check_tags(p_tags jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF jsonb_typeof(p_tags) <> 'array'
       OR EXISTS (SELECT FROM jsonb_array_elements(p_tags) t
                  WHERE jsonb_typeof(t) <> 'string' OR length(t #>> '{}') NOT BETWEEN 1 AND 200) THEN
        PERFORM @extschema@._refuse('22023', 'option "tags" must be an array of strings of 1 to 200 characters',
            'Correct it or leave it out.');
    ELSIF jsonb_array_length(p_tags) > 20 THEN
        PERFORM @extschema@._refuse('23514', format('option "tags" has %s entries', jsonb_array_length(p_tags)),
            'The limit is 20 tags.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_tags(jsonb) IS
    'Internal: at most 20 tags, strings of 1 to 200 characters (22023, 23514).';

CREATE OR REPLACE FUNCTION @extschema@._check_backoff(p_policy jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_options('backoff', p_policy, '{base_seconds,factor,cap_seconds,jitter,delays}');
    PERFORM @extschema@._option_number(p_policy, 'base_seconds', 0, 86400);
    PERFORM @extschema@._option_number(p_policy, 'factor', 1, 100);
    PERFORM @extschema@._option_number(p_policy, 'cap_seconds', 0, 86400);
    PERFORM @extschema@._option_number(p_policy, 'jitter', 0, 1);
    IF p_policy ? 'delays' AND (
        jsonb_typeof(p_policy -> 'delays') <> 'array' OR jsonb_array_length(p_policy -> 'delays') NOT BETWEEN 1 AND 100
        OR p_policy ?| '{base_seconds,factor,cap_seconds,jitter}'
        OR EXISTS (
            SELECT FROM jsonb_array_elements(p_policy -> 'delays') d
            WHERE CASE WHEN jsonb_typeof(d) = 'number' THEN d::numeric NOT BETWEEN 0 AND 86400 ELSE true END)) THEN
        PERFORM @extschema@._refuse('22023', 'option "backoff" has bad "delays"',
            'Give 1 to 100 numbers of seconds from 0 to 86400, and nothing else beside them.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_backoff(jsonb) IS 'Internal: a retry policy that a job may carry (22023).';

CREATE OR REPLACE FUNCTION @extschema@._check_backpressure(p_value jsonb)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF jsonb_typeof(p_value) = 'object' THEN
        PERFORM @extschema@._check_options('backpressure', p_value, '{reject}');
        IF @extschema@._option_integer(p_value, 'reject', 1, 2147483647) IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    IF coalesce(p_value, 'null') NOT IN ('null', '"off"', '"signal"') THEN
        PERFORM @extschema@._refuse('22023', 'option "backpressure" must be "off", "signal" or {"reject": n}',
            'Correct it or leave it out.');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_backpressure(jsonb) IS
    'Internal: what a producer wants to know of waiting jobs (22023).';

-- What a job's options become in ext; NULL when all is default. Delay, routing, run time and unique key are not part of
-- it.
CREATE OR REPLACE FUNCTION @extschema@._job_ext(p_opts jsonb, p_max_attempts integer)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ext jsonb;
BEGIN
    IF p_opts = '{}' THEN
        RETURN CASE WHEN p_max_attempts <> 25 THEN jsonb_build_object('max_attempts', p_max_attempts) END;
    END IF;
    PERFORM @extschema@._check_options('opts', p_opts,
        '{tags,metadata,ordering_key,delay_seconds,deadline_seconds,keep_result,backoff,trace,unique,backpressure}',
        '{after,on_parent_failure,concurrency_key}');
    v_ext := jsonb_strip_nulls(jsonb_build_object(
        'max_attempts', nullif(p_max_attempts, 25),
        'deadline_seconds', @extschema@._option_number(p_opts, 'deadline_seconds', 0.001, 31536000),
        'keep_result', nullif(@extschema@._option_boolean(p_opts, 'keep_result'), false),
        'trace', @extschema@._option_text(p_opts, 'trace', 512)));
    PERFORM @extschema@._check_backpressure(p_opts -> 'backpressure');
    PERFORM @extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000);
    PERFORM @extschema@._option_text(p_opts, 'ordering_key', 1024);
    IF coalesce(p_opts -> 'tags', 'null') <> 'null' THEN
        PERFORM @extschema@._check_tags(p_opts -> 'tags');
        v_ext := v_ext || jsonb_build_object('tags', p_opts -> 'tags');
    END IF;
    IF coalesce(p_opts -> 'metadata', 'null') <> 'null' THEN
        IF jsonb_typeof(p_opts -> 'metadata') <> 'object' THEN
            PERFORM @extschema@._refuse('22023', 'option "metadata" must be a JSON object',
                'Correct it or leave it out.');
        END IF;
        PERFORM @extschema@._check_payload('metadata', p_opts -> 'metadata', 65536);
        v_ext := v_ext || jsonb_build_object('metadata', p_opts -> 'metadata');
    END IF;
    IF coalesce(p_opts -> 'backoff', 'null') <> 'null' THEN
        PERFORM @extschema@._check_backoff(p_opts -> 'backoff');
        v_ext := v_ext || jsonb_build_object('backoff', p_opts -> 'backoff');
    END IF;
    RETURN nullif(v_ext, '{}');
END
$function$;
COMMENT ON FUNCTION @extschema@._job_ext(jsonb, integer) IS
    'Internal: validated options of a job in stored form (22023, 23514, JQ007).';
-- BLAKE3 with 32 bytes of output, no key: byte for byte what every other implementation gives. A 32-bit word is a
-- bigint below 2^32: sums cannot overflow, and a mask drops what a word cannot hold.

-- The quarter rounds are written out, and the state is in scalars: an array would cost a copy or a look-up per step.
CREATE OR REPLACE FUNCTION @extschema@._blake3_compress(
    p_chain bigint[], p_words bigint[], p_counter bigint, p_length integer, p_flags integer)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_32 constant bigint := 4294967295;
    m bigint[] := p_words;
    v0 bigint := p_chain[1]; v1 bigint := p_chain[2]; v2 bigint := p_chain[3]; v3 bigint := p_chain[4];
    v4 bigint := p_chain[5]; v5 bigint := p_chain[6]; v6 bigint := p_chain[7]; v7 bigint := p_chain[8];
    v8 bigint := 1779033703; v9 bigint := 3144134277; v10 bigint := 1013904242; v11 bigint := 2773480762;
    v12 bigint := p_counter & c_32; v13 bigint := p_counter >> 32; v14 bigint := p_length; v15 bigint := p_flags;
BEGIN
    FOR v_round IN 1 .. 7 LOOP
        v0 := (v0 + v4 + m[1]) & c_32; v12 := (((v12 # v0) >> 16) | ((v12 # v0) << 16)) & c_32;
        v8 := (v8 + v12) & c_32; v4 := (((v4 # v8) >> 12) | ((v4 # v8) << 20)) & c_32;
        v0 := (v0 + v4 + m[2]) & c_32; v12 := (((v12 # v0) >> 8) | ((v12 # v0) << 24)) & c_32;
        v8 := (v8 + v12) & c_32; v4 := (((v4 # v8) >> 7) | ((v4 # v8) << 25)) & c_32;
        v1 := (v1 + v5 + m[3]) & c_32; v13 := (((v13 # v1) >> 16) | ((v13 # v1) << 16)) & c_32;
        v9 := (v9 + v13) & c_32; v5 := (((v5 # v9) >> 12) | ((v5 # v9) << 20)) & c_32;
        v1 := (v1 + v5 + m[4]) & c_32; v13 := (((v13 # v1) >> 8) | ((v13 # v1) << 24)) & c_32;
        v9 := (v9 + v13) & c_32; v5 := (((v5 # v9) >> 7) | ((v5 # v9) << 25)) & c_32;
        v2 := (v2 + v6 + m[5]) & c_32; v14 := (((v14 # v2) >> 16) | ((v14 # v2) << 16)) & c_32;
        v10 := (v10 + v14) & c_32; v6 := (((v6 # v10) >> 12) | ((v6 # v10) << 20)) & c_32;
        v2 := (v2 + v6 + m[6]) & c_32; v14 := (((v14 # v2) >> 8) | ((v14 # v2) << 24)) & c_32;
        v10 := (v10 + v14) & c_32; v6 := (((v6 # v10) >> 7) | ((v6 # v10) << 25)) & c_32;
        v3 := (v3 + v7 + m[7]) & c_32; v15 := (((v15 # v3) >> 16) | ((v15 # v3) << 16)) & c_32;
        v11 := (v11 + v15) & c_32; v7 := (((v7 # v11) >> 12) | ((v7 # v11) << 20)) & c_32;
        v3 := (v3 + v7 + m[8]) & c_32; v15 := (((v15 # v3) >> 8) | ((v15 # v3) << 24)) & c_32;
        v11 := (v11 + v15) & c_32; v7 := (((v7 # v11) >> 7) | ((v7 # v11) << 25)) & c_32;
        v0 := (v0 + v5 + m[9]) & c_32; v15 := (((v15 # v0) >> 16) | ((v15 # v0) << 16)) & c_32;
        v10 := (v10 + v15) & c_32; v5 := (((v5 # v10) >> 12) | ((v5 # v10) << 20)) & c_32;
        v0 := (v0 + v5 + m[10]) & c_32; v15 := (((v15 # v0) >> 8) | ((v15 # v0) << 24)) & c_32;
        v10 := (v10 + v15) & c_32; v5 := (((v5 # v10) >> 7) | ((v5 # v10) << 25)) & c_32;
        v1 := (v1 + v6 + m[11]) & c_32; v12 := (((v12 # v1) >> 16) | ((v12 # v1) << 16)) & c_32;
        v11 := (v11 + v12) & c_32; v6 := (((v6 # v11) >> 12) | ((v6 # v11) << 20)) & c_32;
        v1 := (v1 + v6 + m[12]) & c_32; v12 := (((v12 # v1) >> 8) | ((v12 # v1) << 24)) & c_32;
        v11 := (v11 + v12) & c_32; v6 := (((v6 # v11) >> 7) | ((v6 # v11) << 25)) & c_32;
        v2 := (v2 + v7 + m[13]) & c_32; v13 := (((v13 # v2) >> 16) | ((v13 # v2) << 16)) & c_32;
        v8 := (v8 + v13) & c_32; v7 := (((v7 # v8) >> 12) | ((v7 # v8) << 20)) & c_32;
        v2 := (v2 + v7 + m[14]) & c_32; v13 := (((v13 # v2) >> 8) | ((v13 # v2) << 24)) & c_32;
        v8 := (v8 + v13) & c_32; v7 := (((v7 # v8) >> 7) | ((v7 # v8) << 25)) & c_32;
        v3 := (v3 + v4 + m[15]) & c_32; v14 := (((v14 # v3) >> 16) | ((v14 # v3) << 16)) & c_32;
        v9 := (v9 + v14) & c_32; v4 := (((v4 # v9) >> 12) | ((v4 # v9) << 20)) & c_32;
        v3 := (v3 + v4 + m[16]) & c_32; v14 := (((v14 # v3) >> 8) | ((v14 # v3) << 24)) & c_32;
        v9 := (v9 + v14) & c_32; v4 := (((v4 # v9) >> 7) | ((v4 # v9) << 25)) & c_32;
        m := ARRAY[m[3], m[7], m[4], m[11], m[8], m[1],
                   m[5], m[14], m[2], m[12], m[13], m[6], m[10], m[15], m[16], m[9]];
    END LOOP;
    RETURN ARRAY[v0 # v8, v1 # v9, v2 # v10, v3 # v11, v4 # v12, v5 # v13, v6 # v14, v7 # v15];
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_compress(bigint[], bigint[], bigint, integer, integer) IS
    'Internal: BLAKE3 compression of one block.';

CREATE OR REPLACE FUNCTION @extschema@._blake3_words(p_block bytea)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    b bytea := p_block;
    w bigint[] := '{}'::bigint[];
BEGIN
    IF length(b) < 64 THEN
        b := b || decode(repeat('00', 64 - length(b)), 'hex');
    END IF;
    FOR i IN 0 .. 60 BY 4 LOOP
        w := w || (get_byte(b, i) | (get_byte(b, i + 1) << 8) | (get_byte(b, i + 2) << 16)
                   | (get_byte(b, i + 3)::bigint << 24));
    END LOOP;
    RETURN w;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_words(bytea) IS
    'Internal: up to 64 bytes as 16 little-endian words, padded with zeros.';

-- Flags: 1 the first block of a chunk, 2 its last, 4 a parent, 8 the root of the tree.
CREATE OR REPLACE FUNCTION @extschema@._blake3_chunk(p_chunk bytea, p_counter bigint, p_root_flag integer)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_start constant bigint[] := '{1779033703,3144134277,1013904242,2773480762,'
        '1359893119,2600822924,528734635,1541459225}'::bigint[];
    v_length integer := length(p_chunk);
    v_chain bigint[] := c_start;
    v_last integer := greatest(v_length - 1, 0) / 64;
BEGIN
    FOR v_block IN 0 .. v_last LOOP
        v_chain := @extschema@._blake3_compress(
            v_chain, @extschema@._blake3_words(substring(p_chunk FROM v_block * 64 + 1 FOR 64)), p_counter,
            least(v_length - v_block * 64, 64),
            CASE v_block WHEN 0 THEN 1 ELSE 0 END | CASE v_block WHEN v_last THEN 2 | p_root_flag ELSE 0 END);
    END LOOP;
    RETURN v_chain;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_chunk(bytea, bigint, integer) IS
    'Internal: BLAKE3 chaining value of one chunk of up to 1024 bytes.';

CREATE OR REPLACE FUNCTION @extschema@._blake3_parent(p_left bigint[], p_right bigint[], p_root_flag integer)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._blake3_compress(
    '{1779033703,3144134277,1013904242,2773480762,1359893119,2600822924,528734635,1541459225}'::bigint[],
    p_left || p_right, 0, 64, 4 | p_root_flag);
COMMENT ON FUNCTION @extschema@._blake3_parent(bigint[], bigint[], integer) IS
    'Internal: BLAKE3 chaining value of a node of the tree.';

-- Chunks are the leaves of a binary tree whose left subtrees are full. v_stack holds the roots of the subtrees that
-- are complete, eight words each, the largest first.
CREATE OR REPLACE FUNCTION @extschema@._blake3(p_data bytea)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_last integer := greatest(length(p_data) - 1, 0) / 1024;
    v_stack bigint[] := '{}'::bigint[];
    v_top integer := 0;
    v_node bigint[];
    v_chunks integer;
    v_digest bytea := ''::bytea;
BEGIN
    FOR v_chunk IN 0 .. v_last LOOP
        v_node := @extschema@._blake3_chunk(
            substring(p_data FROM v_chunk * 1024 + 1 FOR 1024), v_chunk, CASE v_last WHEN 0 THEN 8 ELSE 0 END);
        EXIT WHEN v_chunk = v_last;
        v_chunks := v_chunk + 1;
        WHILE v_chunks % 2 = 0 LOOP
            v_node := @extschema@._blake3_parent(v_stack[v_top - 7:v_top], v_node, 0);
            v_top := v_top - 8;
            v_chunks := v_chunks / 2;
        END LOOP;
        v_stack := v_stack[:v_top] || v_node;
        v_top := v_top + 8;
    END LOOP;
    WHILE v_top > 0 LOOP
        v_node := @extschema@._blake3_parent(v_stack[v_top - 7:v_top], v_node, CASE v_top WHEN 8 THEN 8 ELSE 0 END);
        v_top := v_top - 8;
    END LOOP;
    FOR i IN 1 .. 8 LOOP
        -- The lowest byte first.
        v_digest := v_digest || substring(int8send(
            ((v_node[i] & 255) << 24) | ((v_node[i] & 65280) << 8)
            | ((v_node[i] >> 8) & 65280) | (v_node[i] >> 24)) FROM 5);
    END LOOP;
    RETURN v_digest;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3(bytea) IS 'Internal: BLAKE3 of any bytes, 32 bytes.';
-- One text per JSON value, so that equal arguments give equal keys whoever wrote them down: no white space; the keys of
-- an object in the order of their code points; characters as they are, but for the quote, the backslash and the control
-- characters below U+0020 (backslash with b, t, n, f or r, otherwise u and four hex digits in lower case); a number is
-- its exact decimal value with neither exponent nor needless zeros, so 1.0 and 1e0 are 1, and nothing is rounded.

CREATE OR REPLACE FUNCTION @extschema@._canonical_scalar(p_value jsonb)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN jsonb_typeof(p_value) = 'number' THEN trim_scale(p_value::numeric)::text ELSE p_value::text END;
COMMENT ON FUNCTION @extschema@._canonical_scalar(jsonb) IS
    'Internal: canonical text of a JSON value that is neither object nor array.';

CREATE OR REPLACE FUNCTION @extschema@._canonical_json(p_value jsonb)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    CASE jsonb_typeof(p_value)
    WHEN 'object' THEN
        RETURN (
            SELECT '{' || coalesce(string_agg(to_json(e.key)::text || ':'
                       || CASE WHEN jsonb_typeof(e.value) IN ('object', 'array')
                               THEN @extschema@._canonical_json(e.value)
                               ELSE @extschema@._canonical_scalar(e.value) END,
                       ',' ORDER BY convert_to(e.key, 'UTF8')), '') || '}'
            FROM jsonb_each(p_value) e);
    WHEN 'array' THEN
        RETURN (
            SELECT '[' || coalesce(string_agg(
                       CASE WHEN jsonb_typeof(e.value) IN ('object', 'array')
                            THEN @extschema@._canonical_json(e.value)
                            ELSE @extschema@._canonical_scalar(e.value) END,
                       ',' ORDER BY e.o), '') || ']'
            FROM jsonb_array_elements(p_value) WITH ORDINALITY e (value, o));
    ELSE
        RETURN @extschema@._canonical_scalar(p_value);
    END CASE;
END
$function$;
COMMENT ON FUNCTION @extschema@._canonical_json(jsonb) IS 'Internal: the canonical text of a JSON value.';

-- control: small coordination rows
-- Ring cursors and ledgers. The cursor is a sequence moved only by setval, so every snapshot reads the present slot.
-- A ring turns in two transactions: plan appends the ledger row, publish moves the cursor to a committed row.

CREATE OR REPLACE FUNCTION @extschema@._ring_cursor(p_ring text)
RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT s.last_value FROM @extschema@.queue_ring s);
    END IF;
    RETURN (SELECT s.last_value FROM @extschema@.claim_ring s);
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_cursor(text) IS
    'Internal: generation * 64 + slot of the current slot, whatever the snapshot.';

-- Newest generation of each slot that was ever current.
CREATE OR REPLACE FUNCTION @extschema@._ring_slots(p_ring text)
RETURNS TABLE (slot integer, generation bigint, rotated_at timestamptz)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN QUERY
        SELECT s.slot, coalesce(r.generation, 0), r.rotated_at
        FROM generate_series(0, @extschema@._slot_count('queue') - 1) s (slot)
        LEFT JOIN LATERAL (SELECT x.generation, x.rotated_at FROM @extschema@.queue_ring_rotations x
                           WHERE x.slot = s.slot ORDER BY x.generation DESC LIMIT 1) r ON true
        WHERE r.generation IS NOT NULL OR s.slot = 0;
    ELSE
        RETURN QUERY
        SELECT s.slot, coalesce(r.generation, 0), r.rotated_at
        FROM generate_series(0, @extschema@._slot_count('claim') - 1) s (slot)
        LEFT JOIN LATERAL (SELECT x.generation, x.rotated_at FROM @extschema@.claim_ring_rotations x
                           WHERE x.slot = s.slot ORDER BY x.generation DESC LIMIT 1) r ON true
        WHERE r.generation IS NOT NULL OR s.slot = 0;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_slots(text) IS
    'Internal: newest generation of every slot in use, and when it became current.';

-- Slots whose newest generation is p_low or later. Claims ask for them whenever more than the current slot matters,
-- so a few generations are read from the end of the ledger; only for a lane far behind is every slot probed.
CREATE OR REPLACE FUNCTION @extschema@._queue_slots_since(p_low bigint)
RETURNS TABLE (slot integer, generation bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    IF @extschema@._ring_cursor('queue') / 64 - p_low > @extschema@._slot_count('queue') THEN
        RETURN QUERY SELECT s.slot, s.generation FROM @extschema@._ring_slots('queue') s WHERE s.generation >= p_low;
    ELSE
        RETURN QUERY
        SELECT r.slot, max(r.generation)
        FROM @extschema@.queue_ring_rotations r
        WHERE r.generation >= p_low
        GROUP BY r.slot
        UNION ALL
        -- Generation 0 is slot 0 and has no row.
        SELECT 0, 0::bigint
        WHERE p_low <= 0 AND NOT EXISTS (SELECT FROM @extschema@.queue_ring_rotations r WHERE r.slot = 0);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_slots_since(bigint) IS
    'Internal: queue slots that became current in a generation or later, with their newest one.';

-- When a slot stopped being current; NULL for the current one and for one that never was.
CREATE OR REPLACE FUNCTION @extschema@._slot_left_at(p_ring text, p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_generation bigint := (SELECT s.generation FROM @extschema@._ring_slots(p_ring) s WHERE s.slot = p_slot);
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT r.rotated_at FROM @extschema@.queue_ring_rotations r WHERE r.generation = v_generation + 1);
    END IF;
    RETURN (SELECT r.rotated_at FROM @extschema@.claim_ring_rotations r WHERE r.generation = v_generation + 1);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_left_at(text, integer) IS 'Internal: when a slot stopped being current.';

CREATE OR REPLACE FUNCTION @extschema@._plan_rotation(
    p_ring text, p_slot integer, p_generation bigint, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        INSERT INTO @extschema@.queue_ring_rotations (generation, slot, rotated_at)
        VALUES (p_generation, p_slot, p_now);
    ELSE
        INSERT INTO @extschema@.claim_ring_rotations (generation, slot, rotated_at)
        VALUES (p_generation, p_slot, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._plan_rotation(text, integer, bigint, timestamptz) IS
    'Internal: appends the ledger row of the next generation.';

-- Slot planned for the generation after the current one; NULL when none is.
CREATE OR REPLACE FUNCTION @extschema@._planned_slot(p_ring text, p_generation bigint)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_ring = 'queue' THEN
        RETURN (SELECT r.slot FROM @extschema@.queue_ring_rotations r WHERE r.generation = p_generation + 1);
    END IF;
    RETURN (SELECT r.slot FROM @extschema@.claim_ring_rotations r WHERE r.generation = p_generation + 1);
END
$function$;
COMMENT ON FUNCTION @extschema@._planned_slot(text, bigint) IS 'Internal: slot of the planned next generation, if any.';

CREATE OR REPLACE FUNCTION @extschema@._set_ring_cursor(p_ring text, p_generation bigint, p_slot integer)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM setval(CASE p_ring WHEN 'queue' THEN '@extschema@.queue_ring' ELSE '@extschema@.claim_ring' END::regclass,
                   p_generation * 64 + p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._set_ring_cursor(text, bigint, integer) IS
    'Internal: moves a ring cursor to a ledger row that is committed.';

-- Whether a leaf holds blocks. Reads no row, and holds no lock on the leaf afterwards.
CREATE OR REPLACE FUNCTION @extschema@._leaf_in_use(p_table text, p_slot integer)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN pg_relation_size(('@extschema@.' || p_table || '_' || p_slot)::regclass) > 0;
COMMENT ON FUNCTION @extschema@._leaf_in_use(text, integer) IS 'Internal: whether a leaf of a ring table holds blocks.';
-- TRUNCATE is not MVCC. A dump takes its snapshot first and its locks a little later; a job that left a slot in between
-- would be in no place that the dump reads. So a slot is emptied only when dump_lock_seconds have passed since then.

-- A time ahead is from a clock that was wrong.
CREATE OR REPLACE FUNCTION @extschema@._is_past_dumps(p_at timestamptz, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_seconds numeric := @extschema@._setting('dump_lock_seconds');
BEGIN
    RETURN extract(epoch FROM p_now - p_at) NOT BETWEEN -v_seconds AND v_seconds;
END
$function$;
COMMENT ON FUNCTION @extschema@._is_past_dumps(timestamptz, timestamptz) IS
    'Internal: whether every dump that began before a time has its locks now.';

CREATE OR REPLACE FUNCTION @extschema@._slot_released_at(p_ring text, p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- A standby has no UNLOGGED sequence to read: there this function answers NULL, a plain SELECT an error.
    RETURN 'epoch'::timestamptz + nullif(pg_sequence_last_value(
        format('@extschema@.%s_%s_released', p_ring, p_slot)::regclass), 0) * interval '1 microsecond';
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_released_at(text, integer) IS
    'Internal: since when nothing needs a slot of a ring; NULL when prune has not seen that yet.';

-- Outside any transaction, like all that sequences remember: a rollback, or a crash, which resets it, costs a minute.
CREATE OR REPLACE FUNCTION @extschema@._note_released(p_ring text, p_slot integer, p_at timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM setval(format('@extschema@.%s_%s_released', p_ring, p_slot)::regclass,
                   coalesce((extract(epoch FROM p_at) * 1000000)::bigint, 0));
END
$function$;
COMMENT ON FUNCTION @extschema@._note_released(text, integer, timestamptz) IS
    'Internal: remembers since when nothing needs a slot of a ring; NULL: it has to be seen again.';
-- Options and pause of queues.

CREATE OR REPLACE FUNCTION @extschema@._queue_options(p_queue text)
RETURNS @extschema@.queue_meta
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_meta @extschema@.queue_meta;
BEGIN
    SELECT m.* INTO v_meta FROM @extschema@.queue_meta m WHERE m.queue = p_queue;
    IF NOT FOUND THEN
        v_meta := ROW(p_queue, 1, false, true, NULL, NULL, NULL, NULL, NULL);
    END IF;
    RETURN v_meta;
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_options(text) IS
    'Internal: options of a queue, the defaults when it was never declared.';

CREATE OR REPLACE FUNCTION @extschema@._declare_queue(p_queue text, p_opts jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
    v_shards integer;
BEGIN
    v_shards := @extschema@._option_integer(p_opts, 'enqueue_shards', 1, 64);
    INSERT INTO @extschema@.queue_meta AS m
        (queue, enqueue_shards, strict_fifo, notify, dlq, aging_seconds, deadline_seconds)
    VALUES (p_queue,
        coalesce(v_shards, v_meta.enqueue_shards),
        coalesce(@extschema@._option_boolean(p_opts, 'strict_fifo'), v_meta.strict_fifo),
        coalesce(@extschema@._option_boolean(p_opts, 'notify'), v_meta.notify),
        CASE WHEN p_opts ? 'dlq'
             THEN @extschema@._option_boolean(p_opts, 'dlq')
             ELSE v_meta.dlq END,
        CASE WHEN p_opts ? 'aging_seconds'
             THEN @extschema@._option_number(p_opts, 'aging_seconds', 0, 86400)
             ELSE v_meta.aging_seconds END,
        CASE WHEN p_opts ? 'deadline_seconds'
             THEN @extschema@._option_number(p_opts, 'deadline_seconds', 0.001, 31536000)
             ELSE v_meta.deadline_seconds END)
    ON CONFLICT (queue) DO UPDATE SET
        enqueue_shards = excluded.enqueue_shards, strict_fifo = excluded.strict_fifo, notify = excluded.notify,
        dlq = excluded.dlq, aging_seconds = excluded.aging_seconds, deadline_seconds = excluded.deadline_seconds
    WHERE (m.enqueue_shards, m.strict_fifo, m.notify, m.dlq, m.aging_seconds, m.deadline_seconds)
        IS DISTINCT FROM (excluded.enqueue_shards, excluded.strict_fifo, excluded.notify, excluded.dlq,
                          excluded.aging_seconds, excluded.deadline_seconds);
END
$function$;
COMMENT ON FUNCTION @extschema@._declare_queue(text, jsonb) IS
    'Internal: stores queue options; those not named keep their value (22023).';

CREATE OR REPLACE FUNCTION @extschema@._set_paused(p_queue text, p_paused_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_paused_at IS NULL THEN
        UPDATE @extschema@.queue_meta m SET paused_at = NULL WHERE m.queue = p_queue AND m.paused_at IS NOT NULL;
        RETURN FOUND;
    END IF;
    INSERT INTO @extschema@.queue_meta AS m (queue, paused_at) VALUES (p_queue, p_paused_at)
    ON CONFLICT (queue) DO UPDATE SET paused_at = excluded.paused_at WHERE m.paused_at IS NULL;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_paused(text, timestamptz) IS
    'Internal: pauses or resumes (NULL) a queue; true when that changed anything.';

CREATE OR REPLACE FUNCTION @extschema@._paused_queues()
RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce(array_agg(m.queue ORDER BY m.queue), '{}')
    FROM @extschema@.queue_meta m
    WHERE m.paused_at IS NOT NULL
$function$;
COMMENT ON FUNCTION @extschema@._paused_queues() IS 'Internal: queues that are paused.';

-- A drain that nobody goes on with is over after a while, so a queue cannot be forgotten in it.
CREATE OR REPLACE FUNCTION @extschema@._note_drain(p_queue text, p_is_over boolean, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_pause constant interval := interval '10 seconds';
BEGIN
    IF p_is_over THEN
        UPDATE @extschema@.queue_meta m SET drained_until = NULL
        WHERE m.queue = p_queue AND m.drained_until IS NOT NULL;
    ELSE
        INSERT INTO @extschema@.queue_meta AS m (queue, drained_until) VALUES (p_queue, p_now + c_pause)
        ON CONFLICT (queue) DO UPDATE SET drained_until = excluded.drained_until;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_drain(text, boolean, timestamptz) IS
    'Internal: asks workers to leave a queue alone for ten seconds, or no longer.';

CREATE OR REPLACE FUNCTION @extschema@._drained_queues(p_now timestamptz)
RETURNS text[]
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT coalesce(array_agg(m.queue ORDER BY m.queue), '{}')
    FROM @extschema@.queue_meta m
    WHERE m.drained_until > p_now
$function$;
COMMENT ON FUNCTION @extschema@._drained_queues(timestamptz) IS 'Internal: queues that somebody is draining.';
-- Wake-ups. A flag says until when some worker of its queues sleeps; producers notify only while that lies ahead.
-- Flags are UNLOGGED sequences used as shared memory. Only workers that go to sleep write one; it expires by itself,
-- and a crash resets it, which is right: the crash has woken every sleeper by closing its connection.

-- All of them are named, and planning makes one constant of that: to look up a name costs more than to read a flag.
DO $block$
BEGIN
    EXECUTE format(
        'CREATE OR REPLACE FUNCTION @extschema@._doorbell(p_queue text)
         RETURNS regclass
         LANGUAGE sql IMMUTABLE PARALLEL SAFE
         RETURN (ARRAY[%s])[1 + (hashtext(p_queue) & 63)]',
        (SELECT string_agg(format('%L::regclass', '@extschema@.doorbell_' || n), ', ' ORDER BY n)
         FROM generate_series(0, 63) n));
END
$block$;
COMMENT ON FUNCTION @extschema@._doorbell(text) IS 'Internal: flag of a queue, one of 64.';

CREATE OR REPLACE FUNCTION @extschema@._channel(p_queue text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN 'awa_' || left(md5('@extschema@/' || p_queue), 24);
COMMENT ON FUNCTION @extschema@._channel(text) IS
    'Internal: notification channel of a queue: short, whatever the name.';

CREATE OR REPLACE FUNCTION @extschema@._someone_sleeps(p_queue text)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN coalesce(pg_sequence_last_value(@extschema@._doorbell(p_queue)), 0)
    >= date_part('epoch', clock_timestamp()) * 1000;
COMMENT ON FUNCTION @extschema@._someone_sleeps(text) IS 'Internal: whether the flag of a queue lies ahead.';

CREATE OR REPLACE FUNCTION @extschema@._notify_workers(p_queue text, p_payload text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(current_setting('awa.notify', true), 'on') IN ('off', 'false', '0', 'no')
       OR NOT (@extschema@._queue_options(p_queue)).notify THEN
        RETURN false;
    END IF;
    PERFORM pg_notify(@extschema@._channel(p_queue), p_payload);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._notify_workers(text, text) IS
    'Internal: notifies the workers of a queue, unless the session setting awa.notify or the queue turns that off.';

-- Called after the lane position was taken: a sleeper arms first and looks at positions second, so one sees the other.
CREATE OR REPLACE FUNCTION @extschema@._ring_doorbell(p_queue text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN @extschema@._someone_sleeps(p_queue) AND @extschema@._notify_workers(p_queue, '');
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_doorbell(text) IS
    'Internal: notifies the workers of a queue if one of them sleeps; whether it did.';

CREATE OR REPLACE FUNCTION @extschema@._arm_doorbell(p_queue text, p_until timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_flag regclass := @extschema@._doorbell(p_queue);
    v_until bigint := ceil(extract(epoch FROM p_until) * 1000);
BEGIN
    -- Never shorten another sleeper's flag.
    IF coalesce(pg_sequence_last_value(v_flag), 0) < v_until THEN
        PERFORM setval(v_flag, v_until);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._arm_doorbell(text, timestamptz) IS
    'Internal: asks producers to notify until the given time.';
-- Lanes: (queue, priority, shard), each with a sequence of positions and an UNLOGGED hint.

CREATE OR REPLACE FUNCTION @extschema@._find_lane(p_queue text, p_priority integer, p_shard integer)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
BEGIN
    SELECT l.* INTO v_lane FROM @extschema@.queue_lanes l
    WHERE l.queue = p_queue AND l.priority = p_priority AND l.shard = p_shard
    ORDER BY l.lane_id LIMIT 1;
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_lane(text, integer, integer) IS
    'Internal: the lane of a queue, priority and shard; a NULL lane_id when there is none.';

-- Nobody waits: where a creation of the same lane is in flight the answer is NULL,
-- unless p_sibling asks for a second lane.
CREATE OR REPLACE FUNCTION @extschema@._create_lane(
    p_queue text, p_priority integer, p_shard integer, p_sibling boolean)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
    v_id integer;
BEGIN
    -- An older snapshot may miss a lane that exists; it must not make a second one for every such transaction.
    IF NOT @extschema@._is_read_committed() THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('new_lane',
            hashtextextended(p_queue, p_priority * 64 + p_shard))) AND NOT p_sibling THEN
        RETURN NULL;
    END IF;
    v_lane := @extschema@._find_lane(p_queue, p_priority, p_shard);
    IF v_lane.lane_id IS NOT NULL THEN
        RETURN v_lane;
    END IF;
    v_id := nextval('@extschema@.lane_ids');
    EXECUTE format('CREATE SEQUENCE @extschema@.lane_%s MINVALUE %s MAXVALUE %s CACHE 1 NO CYCLE',
        v_id, @extschema@._lane_base(v_id) + 1, @extschema@._lane_base(v_id + 1) - 1);
    EXECUTE format('CREATE UNLOGGED SEQUENCE @extschema@.lane_%s_hint MINVALUE 0 START 0', v_id);
    -- Ties the sequences to the extension's table, so that DROP EXTENSION takes them along.
    EXECUTE format('ALTER SEQUENCE @extschema@.lane_%s OWNED BY @extschema@.queue_lanes.lane_id', v_id);
    EXECUTE format('ALTER SEQUENCE @extschema@.lane_%s_hint OWNED BY @extschema@.queue_lanes.lane_id', v_id);
    INSERT INTO @extschema@.queue_lanes AS l (lane_id, queue, priority, shard, position_seq, hint_seq, created_at)
    VALUES (v_id, p_queue, p_priority, p_shard, format('@extschema@.lane_%s', v_id)::regclass,
            format('@extschema@.lane_%s_hint', v_id)::regclass, clock_timestamp())
    RETURNING l.* INTO v_lane;
    -- A worker that armed its flag could not see this lane and may think the queue idle: it hears of it at the commit.
    PERFORM @extschema@._notify_workers(p_queue, '');
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_lane(text, integer, integer, boolean) IS
    'Internal: finds or makes a lane; NULL where another transaction is making it and no sibling is wanted.';

CREATE OR REPLACE FUNCTION @extschema@._create_lanes(p_queue text, p_all_priorities boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_shards integer := (@extschema@._queue_options(p_queue)).enqueue_shards;
BEGIN
    FOR v_priority IN 1 .. 4 LOOP
        CONTINUE WHEN v_priority <> 2 AND NOT p_all_priorities;
        FOR v_shard IN 0 .. v_shards - 1 LOOP
            PERFORM @extschema@._create_lane(p_queue, v_priority, v_shard, false);
        END LOOP;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_lanes(text, boolean) IS
    'Internal: makes the lanes of a queue, of priority 2 or of all, ahead of use.';

-- Hash of an ordering key: start 14695981039346656037, then for each byte h * 1099511628211 + byte, modulo 2^64.
CREATE OR REPLACE FUNCTION @extschema@._ordering_hash(p_key text)
RETURNS numeric
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_bytes bytea := convert_to(p_key, 'UTF8');
    v_hash numeric := 14695981039346656037;
BEGIN
    FOR i IN 0 .. length(v_bytes) - 1 LOOP
        v_hash := mod(v_hash * 1099511628211 + get_byte(v_bytes, i), 18446744073709551616);
    END LOOP;
    RETURN v_hash;
END
$function$;
COMMENT ON FUNCTION @extschema@._ordering_hash(text) IS 'Internal: published 64-bit hash of an ordering key.';

CREATE OR REPLACE FUNCTION @extschema@._pick_shard(p_shards integer, p_ordering_key text)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_shards = 1 THEN
        RETURN 0;
    ELSIF p_ordering_key IS NULL THEN
        RETURN floor(random() * p_shards);
    END IF;
    RETURN mod(@extschema@._ordering_hash(p_ordering_key), p_shards);
END
$function$;
COMMENT ON FUNCTION @extschema@._pick_shard(integer, text) IS 'Internal: shard by ordering key, or any.';

-- Last position that a lane has given out, whatever the snapshot; takes no lock that the claim's proof would meet.
CREATE OR REPLACE FUNCTION @extschema@._lane_tail(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_tail bigint;
BEGIN
    EXECUTE format('SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END
                    FROM @extschema@.lane_%s s', p_lane)
        INTO v_tail;
    RETURN v_tail;
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_tail(integer) IS 'Internal: last position that a lane gave out.';
-- Keys that name jobs: the key of a unique job, the digest of a concurrency key, and the claims on unique keys.

-- The published form: BLAKE3 over the kind, then for each part that is given a zero byte and the part; 16 bytes of it.
CREATE OR REPLACE FUNCTION @extschema@._unique_key(p_kind text, p_queue text, p_args jsonb, p_period_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_zero constant bytea := decode('00', 'hex');
    v_data bytea := convert_to(p_kind, 'UTF8');
BEGIN
    IF p_queue IS NOT NULL THEN
        v_data := v_data || c_zero || convert_to(p_queue, 'UTF8');
    END IF;
    IF p_args IS NOT NULL THEN
        v_data := v_data || c_zero || convert_to(@extschema@._canonical_json(p_args), 'UTF8');
    END IF;
    IF p_period_bucket IS NOT NULL THEN
        v_data := v_data || c_zero || (
            SELECT string_agg(substring(int8send(p_period_bucket) FROM i FOR 1), ''::bytea ORDER BY i DESC)
            FROM generate_series(1, 8) i);
    END IF;
    RETURN substring(@extschema@._blake3(v_data) FOR 16);
END
$function$;
COMMENT ON FUNCTION @extschema@._unique_key(text, text, jsonb, bigint) IS
    'Internal: the published key of a unique job; NULL arguments are left out.';

-- SHA-256 over a domain string, a zero byte and the key: no digest for another purpose can be the same.
CREATE OR REPLACE FUNCTION @extschema@._concurrency_digest(p_key text)
RETURNS bytea
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN sha256(convert_to('awa.concurrency_key.v1', 'UTF8') || decode('00', 'hex') || convert_to(p_key, 'UTF8'));
COMMENT ON FUNCTION @extschema@._concurrency_digest(text) IS 'Internal: the published digest of a concurrency key.';

CREATE OR REPLACE FUNCTION @extschema@._digest_shard(p_digest bytea, p_shards integer)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN (SELECT mod(sum(get_byte(p_digest, i) * 256::numeric ^ (7 - i)), p_shards)::integer
        FROM generate_series(0, 7) i);
COMMENT ON FUNCTION @extschema@._digest_shard(bytea, integer) IS
    'Internal: published shard of a digest: its first eight bytes, the highest first, modulo the number of shards.';

-- What a job carries in ext: unique = {key, states (a mask, left out when it is the default), ends (end of the period),
-- waiting (deferred without the key: promotion settles it)}.

CREATE OR REPLACE FUNCTION @extschema@._state_bit(p_state @extschema@.job_state)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_state
    WHEN 'scheduled' THEN 1
    WHEN 'available' THEN 2
    WHEN 'running' THEN 4
    WHEN 'completed' THEN 8
    WHEN 'retryable' THEN 16
    WHEN 'failed' THEN 32
    WHEN 'cancelled' THEN 64
    WHEN 'waiting_external' THEN 128 END;
COMMENT ON FUNCTION @extschema@._state_bit(@extschema@.job_state) IS 'Internal: bit of a state in a mask of states.';

CREATE OR REPLACE FUNCTION @extschema@._unique_states(p_unique jsonb)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce((p_unique ->> 'states')::integer, 31);
COMMENT ON FUNCTION @extschema@._unique_states(jsonb) IS 'Internal: mask of states in which a job holds its key.';

CREATE OR REPLACE FUNCTION @extschema@._key_counts_in(p_unique jsonb, p_state @extschema@.job_state)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._unique_states(p_unique) & @extschema@._state_bit(p_state) <> 0;
COMMENT ON FUNCTION @extschema@._key_counts_in(jsonb, @extschema@.job_state) IS
    'Internal: whether a job holds its key in a state.';

-- A job that is deferred in a state outside its mask, and will have to hold its key when it is available.
CREATE OR REPLACE FUNCTION @extschema@._deferred_ext(p_ext jsonb, p_state @extschema@.job_state)
RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN p_ext ? 'unique' AND NOT @extschema@._key_counts_in(p_ext -> 'unique', p_state)
         AND @extschema@._key_counts_in(p_ext -> 'unique', 'available')
    THEN jsonb_set(p_ext, '{unique,waiting}', 'true')
    ELSE p_ext END;
COMMENT ON FUNCTION @extschema@._deferred_ext(jsonb, @extschema@.job_state) IS
    'Internal: ext of a job that is deferred, marked when promotion must take its key.';

CREATE OR REPLACE FUNCTION @extschema@._claim_of_key(p_key bytea)
RETURNS @extschema@.job_unique_claims
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_claim @extschema@.job_unique_claims;
BEGIN
    SELECT c.* INTO v_claim FROM @extschema@.job_unique_claims c WHERE c.key = p_key;
    RETURN v_claim;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_of_key(bytea) IS
    'Internal: the claim on a key, whether its job holds it or not; VOLATILE for a fresh snapshot.';

CREATE OR REPLACE FUNCTION @extschema@._lock_key_claim(p_claim @extschema@.job_unique_claims)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    PERFORM FROM @extschema@.job_unique_claims c
    WHERE c.key = p_claim.key AND c.job_id = p_claim.job_id AND c.taken_at = p_claim.taken_at
    FOR UPDATE SKIP LOCKED;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_key_claim(@extschema@.job_unique_claims) IS
    'Internal: locks a claim if it is still the one that was looked at and nobody is changing it.';

-- Waits for a transaction that is inserting the same key.
CREATE OR REPLACE FUNCTION @extschema@._insert_key_claim(
    p_key bytea, p_job_id bigint, p_unique jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.job_unique_claims AS c (key, job_id, taken_at, period_ends_at, states)
    VALUES (p_key, p_job_id, p_now, (p_unique ->> 'ends')::timestamptz, @extschema@._unique_states(p_unique))
    ON CONFLICT (key) DO NOTHING;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_key_claim(bytea, bigint, jsonb, timestamptz) IS
    'Internal: claims a key that has no claim; false when it has one.';

CREATE OR REPLACE FUNCTION @extschema@._replace_key_claim(
    p_old @extschema@.job_unique_claims, p_job_id bigint, p_unique jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    UPDATE @extschema@.job_unique_claims c
    SET job_id = p_job_id, taken_at = greatest(p_now, c.taken_at + interval '1 microsecond'),
        period_ends_at = (p_unique ->> 'ends')::timestamptz, expires_at = NULL, ended = NULL,
        states = @extschema@._unique_states(p_unique)
    WHERE c.key = p_old.key AND c.job_id = p_old.job_id AND c.taken_at = p_old.taken_at
          AND c.expires_at IS NOT DISTINCT FROM p_old.expires_at;
    RETURN FOUND;
END
$function$;
COMMENT ON FUNCTION @extschema@._replace_key_claim(@extschema@.job_unique_claims, bigint, jsonb, timestamptz) IS
    'Internal: hands a claim to a job if it is still the claim that was looked at.';

CREATE OR REPLACE FUNCTION @extschema@._delete_claim(p_key bytea)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    DELETE FROM @extschema@.job_unique_claims c WHERE c.key = p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_claim(bytea) IS 'Internal: deletes a claim that the caller has locked.';

CREATE OR REPLACE FUNCTION @extschema@._write_end(
    p_key bytea, p_state @extschema@.job_state, p_expires_at timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    UPDATE @extschema@.job_unique_claims c SET ended = p_state, expires_at = p_expires_at WHERE c.key = p_key;
END
$function$;
COMMENT ON FUNCTION @extschema@._write_end(bytea, @extschema@.job_state, timestamptz) IS
    'Internal: writes the end of its job into a claim that the caller has locked.';

-- Part of a transition to a terminal state. Nobody waits: who has the row locked saw that the job does not hold it and
-- is taking it over. If that is rolled back, the row stays without its end, and its readers judge it by the job.
CREATE OR REPLACE FUNCTION @extschema@._end_key(
    p_job @extschema@._job, p_state @extschema@.job_state, p_retention text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_key bytea := decode(p_job.ext -> 'unique' ->> 'key', 'hex');
    v_period_ends_at timestamptz;
BEGIN
    SELECT c.period_ends_at INTO v_period_ends_at
    FROM @extschema@.job_unique_claims c
    WHERE c.key = v_key AND c.job_id = p_job.job_id
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    ELSIF @extschema@._key_counts_in(p_job.ext -> 'unique', p_state) THEN
        PERFORM @extschema@._write_end(v_key, p_state,
            coalesce(v_period_ends_at, p_now + @extschema@._setting_interval(p_retention)));
    ELSE
        PERFORM @extschema@._delete_claim(v_key);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_key(@extschema@._job, @extschema@.job_state, text, timestamptz) IS
    'Internal: a job with a unique key ends: its claim gets an expiry, or goes when the state is not in its mask.';

CREATE OR REPLACE FUNCTION @extschema@._drop_key(p_job_id bigint, p_unique jsonb)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    DELETE FROM @extschema@.job_unique_claims c
    WHERE c.key = decode(p_unique ->> 'key', 'hex') AND c.job_id = p_job_id
$function$;
COMMENT ON FUNCTION @extschema@._drop_key(bigint, jsonb) IS 'Internal: a job is gone for good, and its claim with it.';

-- Before the history of jobs is forgotten: claims without an end get it. A plain completion does not touch the claim,
-- and another end may have found it locked.
CREATE OR REPLACE FUNCTION @extschema@._end_keys(
    p_keys bytea[], p_job_ids bigint[], p_states @extschema@.job_state[], p_expires_at timestamptz[], p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    WITH found AS MATERIALIZED (
        SELECT c.key, x.state, c.states & @extschema@._state_bit(x.state) <> 0 AS counts,
               coalesce(c.period_ends_at, x.expires_at) AS expires_at
        FROM unnest(p_keys, p_job_ids, p_states, p_expires_at) x (key, job_id, state, expires_at)
        JOIN @extschema@.job_unique_claims c ON c.key = x.key AND c.job_id = x.job_id
        WHERE c.ended IS NULL
        FOR UPDATE OF c SKIP LOCKED),
    deleted AS (
        DELETE FROM @extschema@.job_unique_claims c
        USING found f
        WHERE c.key = f.key AND NOT (f.counts AND f.expires_at > p_now))
    UPDATE @extschema@.job_unique_claims c
    SET ended = f.state, expires_at = f.expires_at
    FROM found f
    WHERE c.key = f.key AND f.counts AND f.expires_at > p_now;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_keys(
    bytea[], bigint[], @extschema@.job_state[], timestamptz[], timestamptz) IS
    'Internal: gives the claims of ended jobs their end and expiry (that of the period goes first), or deletes them.';

CREATE OR REPLACE FUNCTION @extschema@._expire_keys(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.job_unique_claims d
    WHERE d.key IN (SELECT c.key FROM @extschema@.job_unique_claims c WHERE c.expires_at <= p_now
                    ORDER BY c.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_keys(integer, timestamptz) IS 'Internal: deletes expired claims, oldest first.';

-- Keys are digests, so a random place to start is a random sample.
CREATE OR REPLACE FUNCTION @extschema@._sample_claims(p_limit integer)
RETURNS SETOF @extschema@.job_unique_claims
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
    SELECT c.* FROM @extschema@.job_unique_claims c
    WHERE c.key >= (SELECT uuid_send(gen_random_uuid())) AND c.ended IS NULL
    ORDER BY c.key LIMIT p_limit
$function$;
COMMENT ON FUNCTION @extschema@._sample_claims(integer) IS
    'Internal: some claims whose jobs are not known to have ended.';
-- Kinds that are bound to a function of the database. The function is stored by name: pg_upgrade refuses columns of
-- type regprocedure, and a function that is dropped and made again stays bound.

CREATE OR REPLACE FUNCTION @extschema@._bind_sql_handler(p_kind text, p_handler text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_handler IS NULL THEN
        DELETE FROM @extschema@.sql_handlers h WHERE h.kind = p_kind;
    ELSE
        INSERT INTO @extschema@.sql_handlers AS h (kind, handler) VALUES (p_kind, p_handler)
        ON CONFLICT (kind) DO UPDATE SET handler = excluded.handler;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._bind_sql_handler(text, text) IS
    'Internal: binds a kind to a function by its full name, or unbinds it (NULL).';

CREATE OR REPLACE FUNCTION @extschema@._has_sql_handler(p_kind text)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN EXISTS (SELECT FROM @extschema@.sql_handlers h WHERE h.kind = p_kind);
COMMENT ON FUNCTION @extschema@._has_sql_handler(text) IS 'Internal: whether a kind is bound to a function.';
-- Worker processes and their heartbeats: one row per process, one UPDATE per heartbeat interval.

CREATE OR REPLACE FUNCTION @extschema@._instance_key(p_instance uuid)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._lock_key('instance/' || p_instance::text, 0);
COMMENT ON FUNCTION @extschema@._instance_key(uuid) IS
    'Internal: lock of whoever makes the row of an instance, so that a claim need not wait for it.';

CREATE OR REPLACE FUNCTION @extschema@._register_instance(p_instance uuid, p_info jsonb, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._instance_key(p_instance));
    INSERT INTO @extschema@.runtime_instances AS i (instance_id, info, started_at) VALUES (p_instance, p_info, p_now)
    ON CONFLICT (instance_id) DO UPDATE SET info = excluded.info WHERE i.info IS DISTINCT FROM excluded.info;
END
$function$;
COMMENT ON FUNCTION @extschema@._register_instance(uuid, jsonb, timestamptz) IS
    'Internal: makes an instance known, or replaces its description.';

-- A claim makes its owner known. It leaves that to another open transaction which does the same: rescue does without.
CREATE OR REPLACE FUNCTION @extschema@._note_owner(p_instance uuid, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
BEGIN
    -- Backwards, which EXISTS would not keep to: under a pinned snapshot heartbeats leave dead versions behind, and the
    -- living one is in the last page.
    IF (SELECT i.started_at FROM @extschema@.runtime_instances i
        WHERE i.instance_id >= p_instance AND i.instance_id <= p_instance
        ORDER BY i.instance_id DESC LIMIT 1) IS NULL
       AND pg_try_advisory_xact_lock(@extschema@._instance_key(p_instance)) THEN
        INSERT INTO @extschema@.runtime_instances (instance_id, info, started_at) VALUES (p_instance, '{}', p_now)
        ON CONFLICT (instance_id) DO NOTHING;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._note_owner(uuid, timestamptz) IS
    'Internal: makes sure that the owner of a claim has a row.';

CREATE OR REPLACE FUNCTION @extschema@._record_heartbeat(p_instance uuid, p_held int8multirange, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_interval interval := @extschema@._setting_interval('heartbeat_seconds');
BEGIN
    -- Callers beat often to hear of cancellations; the row changes once an interval, or at once to end a suspicion.
    UPDATE @extschema@.runtime_instances i
    SET heartbeat_before_at = i.heartbeat_at, held_before = i.held,
        heartbeat_at = p_now, held = p_held, suspect_at = NULL
    WHERE i.instance_id = p_instance
      AND (i.heartbeat_at IS NULL OR i.suspect_at IS NOT NULL OR i.heartbeat_at <= p_now - v_interval);
    IF NOT FOUND THEN
        PERFORM pg_advisory_xact_lock(@extschema@._instance_key(p_instance));
        INSERT INTO @extschema@.runtime_instances (instance_id, info, started_at, heartbeat_at, held)
        VALUES (p_instance, '{}', p_now, p_now, p_held)
        ON CONFLICT (instance_id) DO NOTHING;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._record_heartbeat(uuid, int8multirange, timestamptz) IS
    'Internal: stores a heartbeat and what the instance holds (NULL: all).';

CREATE OR REPLACE FUNCTION @extschema@._is_live(p_heartbeat_at timestamptz, p_now timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN coalesce(p_heartbeat_at > p_now - @extschema@._setting_interval('staleness_seconds'), false);
COMMENT ON FUNCTION @extschema@._is_live(timestamptz, timestamptz) IS
    'Internal: whether an instance with this last heartbeat is not silent.';

-- What clients tell about themselves: info with kinds, and with queues as an array or as an object by name.
CREATE OR REPLACE FUNCTION @extschema@._is_served(p_queue text, p_kind text, p_now timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT @extschema@._has_sql_handler(p_kind) OR EXISTS (
        SELECT FROM @extschema@.runtime_instances i
        WHERE @extschema@._is_live(i.heartbeat_at, p_now)
          AND i.info -> 'kinds' ? p_kind AND coalesce(i.info -> 'queues' ? p_queue, true))
$function$;
COMMENT ON FUNCTION @extschema@._is_served(text, text, timestamptz) IS
    'Internal: whether a live instance says that it works on a queue and knows a kind, or a function is bound to it.';

-- Marks silent instances suspect and returns the ones that stayed silent one further interval.
CREATE OR REPLACE FUNCTION @extschema@._detect_dead_instances(p_now timestamptz)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_stale interval := @extschema@._setting_interval('staleness_seconds');
    v_beat interval := @extschema@._setting_interval('heartbeat_seconds');
BEGIN
    UPDATE @extschema@.runtime_instances i SET suspect_at = p_now
    WHERE i.instance_id IN (SELECT x.instance_id FROM @extschema@.runtime_instances x
                            WHERE x.heartbeat_at < p_now - v_stale AND x.suspect_at IS NULL FOR UPDATE SKIP LOCKED);
    RETURN coalesce((SELECT array_agg(i.instance_id) FROM @extschema@.runtime_instances i
                     WHERE i.suspect_at <= p_now - v_beat AND i.heartbeat_at < p_now - v_stale), '{}');
END
$function$;
COMMENT ON FUNCTION @extschema@._detect_dead_instances(timestamptz) IS
    'Internal: two-step death: silent makes suspect, silent one interval longer makes dead.';

CREATE OR REPLACE FUNCTION @extschema@._delete_instances(p_instances uuid[], p_before timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.runtime_instances i
    WHERE i.instance_id IN (SELECT x.instance_id FROM @extschema@.runtime_instances x
                            WHERE x.instance_id = ANY (p_instances)
                              AND coalesce(x.heartbeat_at, x.started_at) < p_before FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_instances(uuid[], timestamptz) IS
    'Internal: forgets instances that were silent since before a time.';

-- queue: append-only job bodies and terminal history
-- The emission ledger. A lane's newest row is its cursor; claims of a lane follow each other
-- under its lock and the ring only advances, so the first leaf with a row of the lane, from the
-- newest generation down, holds the newest one.

-- VOLATILE on purpose: each of its reads takes a snapshot younger than the one before. In one snapshot a prune or a
-- rotation that commits meanwhile would hide the newest row: TRUNCATE empties a leaf for every snapshot, while the
-- checkpoint and the ledger row show only in later ones.
CREATE OR REPLACE FUNCTION @extschema@._newest_emission(p_lane integer)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_end bigint := @extschema@._lane_base(p_lane + 1);
    v_current integer := @extschema@._ring_cursor('queue') % 64;
    v_found @extschema@.queue_claim_heads;
    v_head @extschema@.queue_claim_heads;
    v_slot integer := v_current;
    v_slots integer[];
BEGIN
    LOOP
        IF @extschema@._leaf_in_use('ready_claim_attempt_batches', v_slot) THEN
            EXECUTE format('SELECT $3, e.claim_no, e.cursor, e.low, e.horizon, e.gaps_old, e.gaps_new, e.held
                            FROM @extschema@.ready_claim_attempt_batches_%s e
                            WHERE e.claim_no > $1 AND e.claim_no < $2 ORDER BY e.claim_no DESC LIMIT 1', v_slot)
                INTO v_found USING v_base, v_end, p_lane;
            -- pause point: newest
            EXIT WHEN v_found.claim_no IS NOT NULL;
        END IF;
        IF v_slots IS NULL THEN
            v_slots := ARRAY(
                SELECT s.slot
                FROM @extschema@._ring_slots('queue') s
                WHERE s.slot <> v_current
                ORDER BY s.generation DESC);
        END IF;
        EXIT WHEN cardinality(v_slots) = 0;
        v_slot := v_slots[1];
        v_slots := v_slots[2:];
    END LOOP;
    -- Backwards: under a pinned snapshot the row leaves dead versions behind, and the living one is in the last page.
    SELECT h.* INTO v_head
    FROM @extschema@.queue_claim_heads h
    WHERE h.lane_id >= p_lane AND h.lane_id <= p_lane ORDER BY h.lane_id DESC LIMIT 1;
    IF v_found.claim_no > coalesce(v_head.claim_no, 0) THEN
        v_head := v_found;
    END IF;
    RETURN ROW(p_lane, coalesce(v_head.claim_no, v_base), coalesce(v_head.cursor, v_base), coalesce(v_head.low, 0),
        v_head.horizon, coalesce(v_head.gaps_old, '{}'), coalesce(v_head.gaps_new, '{}'),
        coalesce(v_head.held, '{}'))::@extschema@.queue_claim_heads;
END
$function$;
COMMENT ON FUNCTION @extschema@._newest_emission(integer) IS
    'Internal: the claim cursor of a lane: newest emission row or checkpoint.';

-- For counting: the cursor as one snapshot shows it. The caller holds the leaves, so that none is emptied meanwhile.
CREATE OR REPLACE FUNCTION @extschema@._emission_in_snapshot(p_lane integer)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_newest @extschema@.queue_claim_heads;
BEGIN
    SELECT p_lane, e.claim_no, e.cursor, e.low, e.horizon, coalesce(e.gaps_old, '{}'), coalesce(e.gaps_new, '{}'),
           coalesce(e.held, '{}')
    INTO v_newest
    FROM (SELECT b.claim_no, b.cursor, b.low, b.horizon, b.gaps_old, b.gaps_new, b.held
          FROM @extschema@.ready_claim_attempt_batches b
          WHERE b.claim_no > v_base AND b.claim_no < @extschema@._lane_base(p_lane + 1)
          UNION ALL
          SELECT h.claim_no, h.cursor, h.low, h.horizon, h.gaps_old, h.gaps_new, h.held
          FROM @extschema@.queue_claim_heads h WHERE h.lane_id = p_lane) e
    ORDER BY e.claim_no DESC LIMIT 1;
    IF NOT FOUND THEN
        v_newest := ROW(p_lane, v_base, v_base, 0, NULL, '{}', '{}', '{}');
    END IF;
    RETURN v_newest;
END
$function$;
COMMENT ON FUNCTION @extschema@._emission_in_snapshot(integer) IS
    'Internal: the claim cursor of a lane in the snapshot of the calling query.';

CREATE OR REPLACE FUNCTION @extschema@._append_emission(p_slot integer, p_emission @extschema@.queue_claim_heads)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO @extschema@.ready_claim_attempt_batches
        (claim_no, cursor, low, horizon, slot, gaps_old, gaps_new, held)
    VALUES (p_emission.claim_no, p_emission.cursor, p_emission.low, p_emission.horizon, p_slot,
            nullif(p_emission.gaps_old, '{}'), nullif(p_emission.gaps_new, '{}'), nullif(p_emission.held, '{}'))
$function$;
COMMENT ON FUNCTION @extschema@._append_emission(integer, @extschema@.queue_claim_heads) IS
    'Internal: appends an emission row to a slot.';

CREATE OR REPLACE FUNCTION @extschema@._is_unclaimed(p_emission @extschema@.queue_claim_heads, p_position bigint)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_position > (p_emission).cursor OR p_position <@ (p_emission).gaps_old OR p_position <@ (p_emission).gaps_new
    OR p_position <@ (p_emission).held;
COMMENT ON FUNCTION @extschema@._is_unclaimed(@extschema@.queue_claim_heads, bigint) IS
    'Internal: whether a position of the lane was not emitted yet.';

-- Everything a lane has not emitted: behind the cursor what is in gaps and held, beyond it all.
CREATE OR REPLACE FUNCTION @extschema@._unclaimed_set(p_emission @extschema@.queue_claim_heads)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (p_emission).gaps_old + (p_emission).gaps_new + (p_emission).held
    + int8multirange(int8range((p_emission).cursor, @extschema@._lane_base((p_emission).lane_id + 1), '()'));
COMMENT ON FUNCTION @extschema@._unclaimed_set(@extschema@.queue_claim_heads) IS
    'Internal: positions of the lane that were not emitted yet.';

-- Part of prune, some time before the leaf is emptied. Only upwards: a later claim may have been checkpointed already.
CREATE OR REPLACE FUNCTION @extschema@._checkpoint_claim_heads(p_slot integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_rows bigint;
BEGIN
    EXECUTE format('INSERT INTO @extschema@.queue_claim_heads AS h
            (lane_id, claim_no, cursor, low, horizon, gaps_old, gaps_new, held)
        SELECT DISTINCT ON (@extschema@._lane_of(e.claim_no)) @extschema@._lane_of(e.claim_no),
               e.claim_no, e.cursor, e.low, e.horizon, e.gaps_old, e.gaps_new, e.held
        FROM @extschema@.ready_claim_attempt_batches_%s e
        ORDER BY @extschema@._lane_of(e.claim_no), e.claim_no DESC
        ON CONFLICT (lane_id) DO UPDATE
        SET (claim_no, cursor, low, horizon, gaps_old, gaps_new, held)
            = (excluded.claim_no, excluded.cursor, excluded.low, excluded.horizon,
               excluded.gaps_old, excluded.gaps_new, excluded.held)
        WHERE excluded.claim_no > h.claim_no', p_slot);
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END
$function$;
COMMENT ON FUNCTION @extschema@._checkpoint_claim_heads(integer) IS
    'Internal: keeps the newest emission row of each lane of a slot that will be pruned; returns how many are new.';
-- Appends job bodies. The order of the first three steps is what makes gaps decidable: assign the
-- transaction id, read the ring, take the position. Answers NULL, or leaves rows out, where a lane cannot
-- be had without waiting: the caller defers.

-- The usual job, to a lane that exists, of a queue without shards and order. Few expressions and two statements: in
-- autocommit each of them is prepared anew, which costs as much as an index probe.
CREATE OR REPLACE FUNCTION @extschema@._append_ready_one(p_queue text, p_priority integer, p_kind text, p_args jsonb)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slot smallint;
    v_seq regclass;
    v_position bigint;
    v_rings boolean;
BEGIN
    PERFORM pg_current_xact_id();
    SELECT (coalesce(pg_sequence_last_value('@extschema@.queue_ring'), 0) % 64)::smallint, l.position_seq
    INTO v_slot, v_seq
    FROM @extschema@.queue_lanes l
    WHERE l.queue = p_queue AND l.priority = p_priority AND l.shard = 0
      AND NOT EXISTS (SELECT FROM @extschema@.queue_meta m
                      WHERE m.queue = p_queue AND (m.enqueue_shards > 1 OR m.strict_fifo))
    ORDER BY l.lane_id LIMIT 1;
    -- pause point: insert
    IF v_seq IS NULL THEN
        RETURN NULL;
    END IF;
    INSERT INTO @extschema@.ready_entries AS r ("position", run_at, slot, kind, args)
    VALUES (nextval(v_seq), clock_timestamp(), v_slot, p_kind, p_args)
    RETURNING r."position", @extschema@._someone_sleeps(p_queue) INTO v_position, v_rings;
    IF v_rings THEN
        PERFORM @extschema@._ring_doorbell(p_queue);
    END IF;
    RETURN v_position;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready_one(text, integer, text, jsonb) IS
    'Internal: appends one new job to the only lane of its priority and returns its id; NULL where that takes more.';

CREATE OR REPLACE FUNCTION @extschema@._append_ready_many(
    p_queue text, p_priority integer, p_ordering_key text, p_kind text, p_args jsonb[], p_run_at timestamptz,
    p_ext jsonb)
RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_lane @extschema@.queue_lanes;
BEGIN
    PERFORM pg_current_xact_id();
    v_slot := (SELECT s.last_value FROM @extschema@.queue_ring s) % 64;
    -- pause point: insert
    v_lane := @extschema@._producer_lane(p_queue, p_priority, p_ordering_key);
    IF v_lane.lane_id IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO @extschema@.ready_entries AS r ("position", run_at, slot, kind, args, ext)
    SELECT nextval(v_lane.position_seq), p_run_at, v_slot, p_kind, a.args, p_ext
    FROM unnest(p_args) a (args)
    RETURNING r."position";
    PERFORM @extschema@._ring_doorbell(p_queue);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready_many(text, integer, text, text, jsonb[], timestamptz, jsonb) IS
    'Internal: appends new jobs of one kind and returns their ids in order, '
    'or nothing where their lane cannot be had without waiting.';

-- The lane a producer writes to. strict_fifo producers of a lane follow each other until commit.
CREATE OR REPLACE FUNCTION @extschema@._producer_lane(p_queue text, p_priority integer, p_ordering_key text)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
BEGIN
    RETURN @extschema@._shard_lane(
        p_queue, p_priority, @extschema@._pick_shard(v_meta.enqueue_shards, p_ordering_key), v_meta.strict_fifo);
END
$function$;
COMMENT ON FUNCTION @extschema@._producer_lane(text, integer, text) IS
    'Internal: the lane for a new job; takes the strict_fifo lock where the queue asks for it.';

CREATE OR REPLACE FUNCTION @extschema@._shard_lane(
    p_queue text, p_priority integer, p_shard integer, p_is_strict boolean)
RETURNS @extschema@.queue_lanes
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes := @extschema@._find_lane(p_queue, p_priority, p_shard);
BEGIN
    IF v_lane.lane_id IS NULL THEN
        v_lane := @extschema@._create_lane(p_queue, p_priority, p_shard, false);
    END IF;
    IF p_is_strict AND v_lane.lane_id IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
    END IF;
    RETURN v_lane;
END
$function$;
COMMENT ON FUNCTION @extschema@._shard_lane(text, integer, integer, boolean) IS
    'Internal: a lane, made where it is missing, with its strict_fifo lock if wanted.';

-- Jobs of any lanes, new (job_id NULL) or re-entering, in the order of the array. Lanes are taken in sorted order.
-- Returns the ordinal and id of each job appended; a job whose lane cannot be had is left out. A
-- caller that never waits gets a sibling of a lane that another transaction is making, and is refused
-- a strict_fifo lane that a producer holds.
CREATE OR REPLACE FUNCTION @extschema@._append_ready(p_jobs @extschema@._job[], p_never_waits boolean)
RETURNS TABLE (ordinal bigint, job_id bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_group record;
    v_lane @extschema@.queue_lanes;
BEGIN
    PERFORM pg_current_xact_id();
    v_slot := @extschema@._ring_cursor('queue') % 64;
    -- pause point: insert
    FOR v_group IN SELECT DISTINCT j.queue, j.priority, j.shard FROM unnest(p_jobs) j ORDER BY 1, 2, 3 LOOP
        v_lane := @extschema@._find_lane(v_group.queue, v_group.priority, v_group.shard);
        IF v_lane.lane_id IS NULL THEN
            v_lane := @extschema@._create_lane(v_group.queue, v_group.priority, v_group.shard, p_never_waits);
        END IF;
        CONTINUE WHEN v_lane.lane_id IS NULL;
        IF (@extschema@._queue_options(v_group.queue)).strict_fifo THEN
            CONTINUE WHEN p_never_waits
                AND NOT pg_try_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
            PERFORM pg_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));
        END IF;
        RETURN QUERY
        WITH chosen AS MATERIALIZED (
            SELECT j.o, nextval(v_lane.position_seq) AS pos, j.job_id AS old_id, j.run_at, j.kind, j.args,
                   nullif(jsonb_strip_nulls(jsonb_build_object(
                              'attempt', nullif(j.attempt, 0), 'run_lease', nullif(j.run_lease, 0)))
                          || coalesce(j.ext, '{}'), '{}') AS ext
            FROM (SELECT x.*
                  FROM unnest(p_jobs) WITH ORDINALITY
                      x (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
                  WHERE x.queue = v_group.queue AND x.priority = v_group.priority AND x.shard = v_group.shard
                  ORDER BY x.o) j),
        appended AS (
            INSERT INTO @extschema@.ready_entries ("position", run_at, job_id, slot, kind, args, ext)
            SELECT c.pos, c.run_at, c.old_id, v_slot, c.kind, c.args, c.ext FROM chosen c)
        SELECT c.o, coalesce(c.old_id, c.pos) FROM chosen c;
        PERFORM @extschema@._ring_doorbell(v_group.queue);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_ready(@extschema@._job[], boolean) IS
    'Internal: appends jobs to their lanes; those whose lane cannot be had are left out.';

-- Positions for jobs of one lane, ahead of the jobs: the transaction has its id and has read the ring.
CREATE OR REPLACE FUNCTION @extschema@._reserve_positions(
    p_queue text, p_priority integer, p_shard integer, p_count bigint)
RETURNS bigint[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes := @extschema@._shard_lane(
        p_queue, p_priority, p_shard, (@extschema@._queue_options(p_queue)).strict_fifo);
BEGIN
    IF v_lane.lane_id IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN ARRAY(SELECT nextval(v_lane.position_seq) FROM generate_series(1, p_count));
END
$function$;
COMMENT ON FUNCTION @extschema@._reserve_positions(text, integer, integer, bigint) IS
    'Internal: takes positions of a lane; NULL where it cannot be had without waiting.';

CREATE OR REPLACE FUNCTION @extschema@._append_at_positions(p_slot integer, p_jobs @extschema@._job[])
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.ready_entries ("position", run_at, slot, kind, args, ext)
    SELECT j.job_id, j.run_at, p_slot, j.kind, j.args, j.ext
    FROM unnest(p_jobs) WITH ORDINALITY
        j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
    ORDER BY j.o;
    PERFORM @extschema@._ring_doorbell(q.queue) FROM (SELECT DISTINCT j.queue FROM unnest(p_jobs) j) q;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_at_positions(integer, @extschema@._job[]) IS
    'Internal: appends new jobs at positions taken before, which are their ids.';

-- Waiting rows of one slot go to another under their positions; the old ones are dead from then on.
CREATE OR REPLACE FUNCTION @extschema@._move_ready(
    p_positions bigint[], p_from integer, p_to integer)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    -- From table to table: the bodies of a few thousand jobs may not fit into memory.
    EXECUTE format('INSERT INTO @extschema@.ready_entries ("position", run_at, job_id, slot, kind, args, ext)
                    SELECT r."position", r.run_at, r.job_id, $2, r.kind, r.args, r.ext
                    FROM unnest($1) s (s), @extschema@.ready_entries_%s r
                    WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s)', p_from)
        USING @extschema@._sorted_to_set(p_positions), p_to;
    INSERT INTO @extschema@.ready_tombstones ("position", slot)
    SELECT p, p_from FROM unnest(p_positions) p;
    PERFORM @extschema@._note_released('queue', p_from, NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._move_ready(bigint[], integer, integer) IS
    'Internal: copies waiting rows to a slot and marks the old ones dead.';
-- Look-ups by job id and position. A job may have several ready rows (one per life); the live one has no tombstone.

CREATE OR REPLACE FUNCTION @extschema@._find_ready(p_job_id bigint)
RETURNS TABLE (slot integer, "position" bigint, run_at timestamptz, kind text, args jsonb, ext jsonb, is_dead boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        RETURN QUERY EXECUTE format($query$
            SELECT %1$s, r."position", r.run_at, r.kind, r.args, r.ext,
                   EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            FROM @extschema@.ready_entries_%1$s r WHERE r."position" = $1 AND r.job_id IS NULL
            UNION ALL
            SELECT %1$s, r."position", r.run_at, r.kind, r.args, r.ext,
                   EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            FROM @extschema@.ready_entries_%1$s r WHERE r.job_id = $1 AND r.job_id IS NOT NULL
            $query$, v_slot) USING p_job_id;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_ready(bigint) IS 'Internal: all ready rows of a job, dead ones marked.';

-- Rows of one slot at the given positions, as jobs of their lane.
CREATE OR REPLACE FUNCTION @extschema@._read_ready(p_slot integer, p_positions bigint[])
RETURNS TABLE ("position" bigint, job @extschema@._job)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
BEGIN
    -- A batch that is unknown has no slot, and then no bodies.
    IF p_slot IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT r."position", ROW(coalesce(r.job_id, r."position"), l.queue, l.priority, l.shard, r.run_at,
            coalesce((r.ext ->> 'attempt')::integer, 0), coalesce((r.ext ->> 'run_lease')::bigint, 0), r.kind, r.args,
            nullif(r.ext - '{attempt,run_lease}'::text[], '{}'))::@extschema@._job
        FROM unnest($1) p, @extschema@.ready_entries_%s r, @extschema@.queue_lanes l
        WHERE r."position" = p AND l.lane_id = @extschema@._lane_of(p)
        $query$, p_slot) USING p_positions;
END
$function$;
COMMENT ON FUNCTION @extschema@._read_ready(integer, bigint[]) IS 'Internal: bodies at positions of a slot.';

CREATE OR REPLACE FUNCTION @extschema@._append_tombstone(p_slot integer, p_position bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    INSERT INTO @extschema@.ready_tombstones ("position", slot) VALUES (p_position, p_slot);
    PERFORM @extschema@._note_released('queue', p_slot, NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._append_tombstone(integer, bigint) IS 'Internal: marks an unclaimed ready row dead.';
-- Terminal history. A job whose body lies in a ready leaf ends in the same slot, so both are pruned together.

CREATE OR REPLACE FUNCTION @extschema@._append_completions(
    p_slot integer, p_batch bigint, p_positions int8multirange, p_attempted_at timestamptz, p_now timestamptz)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO @extschema@.receipt_completion_batches (batch_id, finalized_at, attempted_at, slot, positions)
    VALUES (p_batch, p_now, p_attempted_at, p_slot, p_positions)
$function$;
COMMENT ON FUNCTION @extschema@._append_completions(integer, bigint, int8multirange, timestamptz, timestamptz) IS
    'Internal: records jobs of one batch as completed.';

CREATE OR REPLACE FUNCTION @extschema@._done_body(p_job @extschema@._job)
RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN jsonb_build_object(
    'kind', (p_job).kind, 'args', (p_job).args, 'priority', (p_job).priority, 'shard', (p_job).shard,
    'run_at', (p_job).run_at, 'ext', (p_job).ext - '{errors,progress}'::text[]);
COMMENT ON FUNCTION @extschema@._done_body(@extschema@._job) IS
    'Internal: what history stores of a job whose body lies in no slot.';

-- p_position NULL: the body is stored in the row, in the current slot; otherwise it is the ready row of p_slot.
CREATE OR REPLACE FUNCTION @extschema@._append_done(
    p_job @extschema@._job, p_state @extschema@.job_state, p_slot integer, p_position bigint,
    p_attempted_at timestamptz, p_now timestamptz, p_reason text, p_result jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM pg_current_xact_id();
    INSERT INTO @extschema@.done_entries
        (job_id, "position", run_lease, finalized_at, attempted_at, state, slot, attempt, queue, body, detail)
    VALUES (p_job.job_id, p_position, p_job.run_lease, p_now, p_attempted_at, p_state,
        CASE WHEN p_position IS NULL THEN @extschema@._ring_cursor('queue') % 64 ELSE p_slot END,
        p_job.attempt, p_job.queue,
        CASE WHEN p_position IS NULL THEN @extschema@._done_body(p_job) END,
        nullif(CASE WHEN p_reason IS NOT NULL THEN jsonb_build_object('reason', p_reason) ELSE '{}' END
            || CASE WHEN p_job.ext ? 'errors'
                    THEN jsonb_build_object('errors', p_job.ext -> 'errors') ELSE '{}' END
            || CASE WHEN p_job.ext ? 'progress'
                    THEN jsonb_build_object('progress', p_job.ext -> 'progress') ELSE '{}' END
            || CASE WHEN p_result IS NOT NULL THEN jsonb_build_object('result', p_result) ELSE '{}' END, '{}'));
    IF p_job.ext ? 'unique' THEN
        PERFORM @extschema@._end_key(p_job, p_state, @extschema@._retention_of(p_state), p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_done(
    @extschema@._job, @extschema@.job_state, integer, bigint, timestamptz, timestamptz, text, jsonb) IS
    'Internal: records a terminal job with its errors, reason and result.';
-- Counts of terminal jobs: exact while they are in the ring, and folded into rollups when their slot is pruned.

CREATE OR REPLACE FUNCTION @extschema@._slot_terminal_counts(p_slot integer)
RETURNS TABLE (queue text, completed bigint, failed bigint, cancelled bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT x.queue, sum(x.completed)::bigint, sum(x.failed)::bigint, sum(x.cancelled)::bigint
        FROM (SELECT l.queue, @extschema@._cardinality(b.positions) AS completed, 0 AS failed, 0 AS cancelled
              FROM @extschema@.receipt_completion_batches_%1$s b
              JOIN @extschema@.queue_lanes l ON l.lane_id = @extschema@._lane_of(lower(b.positions))
              UNION ALL
              SELECT d.queue, s.sign * (d.state = 'completed')::integer, s.sign * (d.state = 'failed')::integer,
                     s.sign * (d.state = 'cancelled')::integer
              FROM @extschema@.done_entries_%1$s d, LATERAL (SELECT CASE WHEN d.is_undo THEN -1 ELSE 1 END) s (sign)) x
        GROUP BY x.queue
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_terminal_counts(integer) IS 'Internal: terminal jobs of a slot by queue.';

CREATE OR REPLACE FUNCTION @extschema@._fold_terminal_counts(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_jobs bigint;
BEGIN
    WITH folded AS (
        INSERT INTO @extschema@.queue_terminal_rollups AS r (queue, completed, failed, cancelled, pruned_at)
        SELECT c.queue, c.completed, c.failed, c.cancelled, p_now
        FROM @extschema@._slot_terminal_counts(p_slot) c
        ON CONFLICT (queue) DO UPDATE
        SET completed = r.completed + excluded.completed, failed = r.failed + excluded.failed,
            cancelled = r.cancelled + excluded.cancelled, pruned_at = excluded.pruned_at
        RETURNING 1)
    SELECT count(*) INTO v_jobs FROM folded;
    RETURN v_jobs;
END
$function$;
COMMENT ON FUNCTION @extschema@._fold_terminal_counts(integer, timestamptz) IS
    'Internal: adds the terminal jobs of a slot to the rollups; part of prune.';

CREATE OR REPLACE FUNCTION @extschema@._terminal_counts(p_queue text)
RETURNS TABLE (completed bigint, failed bigint, cancelled bigint)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- One statement, one snapshot: rollups and leaves of a concurrent prune are seen together or not at all.
    RETURN QUERY
    SELECT coalesce(sum(x.completed), 0)::bigint, coalesce(sum(x.failed), 0)::bigint,
           coalesce(sum(x.cancelled), 0)::bigint
    FROM (SELECT r.completed, r.failed, r.cancelled
          FROM @extschema@.queue_terminal_rollups r
          WHERE r.queue = p_queue
          UNION ALL
          SELECT @extschema@._cardinality(b.positions), 0, 0
          FROM @extschema@.receipt_completion_batches b
          JOIN @extschema@.queue_lanes l ON l.lane_id = @extschema@._lane_of(lower(b.positions))
          WHERE l.queue = p_queue
          UNION ALL
          SELECT s.sign * (d.state = 'completed')::integer, s.sign * (d.state = 'failed')::integer,
                 s.sign * (d.state = 'cancelled')::integer
          FROM @extschema@.done_entries d, LATERAL (SELECT CASE WHEN d.is_undo THEN -1 ELSE 1 END) s (sign)
          WHERE d.queue = p_queue) x;
END
$function$;
COMMENT ON FUNCTION @extschema@._terminal_counts(text) IS
    'Internal: exact terminal jobs of a queue, pruned ones included.';

CREATE OR REPLACE FUNCTION @extschema@._retention_of(p_state @extschema@.job_state)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE p_state WHEN 'failed' THEN 'failed_retention_seconds' ELSE 'terminal_retention_seconds' END;
COMMENT ON FUNCTION @extschema@._retention_of(@extschema@.job_state) IS
    'Internal: the setting that says how long a job that ended so, and is no dead letter, is remembered.';

-- Part of prune. A body at a time by its position: the slot may be large, and most of its jobs have no unique key.
CREATE OR REPLACE FUNCTION @extschema@._ended_unique_jobs(p_slot integer)
RETURNS TABLE (job_id bigint, unique_key text, state @extschema@.job_state, finalized_at timestamptz)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
BEGIN
    RETURN QUERY EXECUTE format($query$
        SELECT coalesce(r.job_id, r."position"), r.ext -> 'unique' ->> 'key', 'completed'::@extschema@.job_state,
               b.finalized_at
        FROM @extschema@.receipt_completion_batches_%1$s b, unnest(b.positions) s (s), @extschema@.ready_entries_%1$s r
        WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s) AND r.ext ? 'unique'
        UNION ALL
        SELECT d.job_id, j.ext -> 'unique' ->> 'key', d.state, d.finalized_at
        FROM @extschema@.done_entries_%1$s d
        LEFT JOIN @extschema@.ready_entries_%1$s r ON r."position" = d."position",
             LATERAL (SELECT coalesce(d.body -> 'ext', r.ext)) j (ext)
        WHERE j.ext ? 'unique' AND NOT d.is_undo
              AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                              WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                                AND u.finalized_at = d.finalized_at AND u.is_undo)
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_unique_jobs(integer) IS
    'Internal: jobs with a unique key that ended in a slot, dead letters aside.';

-- Time of the newest terminal row of a slot: what retention counts from.
CREATE OR REPLACE FUNCTION @extschema@._newest_terminal_at(p_slot integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_newest timestamptz;
BEGIN
    EXECUTE format('SELECT greatest((SELECT max(b.finalized_at) FROM @extschema@.receipt_completion_batches_%1$s b),
                                    (SELECT max(d.finalized_at) FROM @extschema@.done_entries_%1$s d))', p_slot)
        INTO v_newest;
    RETURN v_newest;
END
$function$;
COMMENT ON FUNCTION @extschema@._newest_terminal_at(integer) IS 'Internal: when the last job of a slot ended.';

-- Failed jobs outlive their slot: they can be looked at, and tried again, for failed_retention_seconds. They are copied
-- some time before it is emptied; until then the row in the slot is the one that counts.
CREATE OR REPLACE FUNCTION @extschema@._keep_failed(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_kept bigint;
BEGIN
    EXECUTE format($query$
        INSERT INTO @extschema@.failed_entries AS f
            (job_id, run_lease, finalized_at, attempted_at, attempt, queue, body, detail)
        SELECT d.job_id, d.run_lease, d.finalized_at, d.attempted_at, d.attempt, d.queue,
               coalesce(d.body, @extschema@._done_body(r.job)), d.detail
        FROM @extschema@.done_entries_%1$s d
        LEFT JOIN LATERAL @extschema@._read_ready(
            CASE WHEN d.body IS NULL THEN %1$s END, ARRAY[d."position"]) r ON true
        WHERE d.state = 'failed' AND d.finalized_at > $1 AND NOT d.is_undo
          AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                          WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                            AND u.finalized_at = d.finalized_at AND u.is_undo)
        ON CONFLICT (job_id) DO UPDATE
        SET run_lease = excluded.run_lease, finalized_at = excluded.finalized_at,
            attempted_at = excluded.attempted_at, attempt = excluded.attempt, body = excluded.body,
            detail = excluded.detail
        WHERE f.run_lease < excluded.run_lease
        $query$, p_slot)
        USING p_now - @extschema@._setting_interval('failed_retention_seconds');
    GET DIAGNOSTICS v_kept = ROW_COUNT;
    RETURN v_kept;
END
$function$;
COMMENT ON FUNCTION @extschema@._keep_failed(integer, timestamptz) IS
    'Internal: copies failed jobs out of a slot that will be pruned; returns how many were not copied before.';

CREATE OR REPLACE FUNCTION @extschema@._expire_failed(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM @extschema@.failed_entries f
    WHERE f.job_id IN (
        SELECT x.job_id FROM @extschema@.failed_entries x
        WHERE x.finalized_at <= p_now - @extschema@._setting_interval('failed_retention_seconds')
        ORDER BY x.finalized_at, x.job_id LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_failed(bigint, timestamptz) IS
    'Internal: forgets failed jobs older than failed_retention_seconds.';

CREATE OR REPLACE FUNCTION @extschema@._as_done(p_failed @extschema@.failed_entries)
RETURNS @extschema@.done_entries
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_failed).job_id, NULL, (p_failed).run_lease, (p_failed).finalized_at, (p_failed).attempted_at, 'failed',
    NULL, (p_failed).attempt, false, (p_failed).queue, (p_failed).body,
    (p_failed).detail)::@extschema@.done_entries;
COMMENT ON FUNCTION @extschema@._as_done(@extschema@.failed_entries) IS
    'Internal: a failed job that outlived its slot as a row of history.';

-- The terminal row that holds for a job, if one does: it ends once, and a retry takes that back.
CREATE OR REPLACE FUNCTION @extschema@._find_done(p_job_id bigint)
RETURNS @extschema@.done_entries
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_done @extschema@.done_entries;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('done_entries', v_slot);
        EXECUTE format('SELECT d.* FROM @extschema@.done_entries_%1$s d
                        WHERE d.job_id = $1 AND NOT d.is_undo
                          AND NOT EXISTS (SELECT FROM @extschema@.done_entries_%1$s u
                                          WHERE u.job_id = d.job_id AND u.run_lease = d.run_lease
                                            AND u.finalized_at = d.finalized_at AND u.is_undo)', v_slot)
            INTO v_done USING p_job_id;
        EXIT WHEN v_done.job_id IS NOT NULL;
    END LOOP;
    IF v_done.job_id IS NULL THEN
        SELECT (@extschema@._as_done(f)).* INTO v_done FROM @extschema@.failed_entries f WHERE f.job_id = p_job_id;
    END IF;
    RETURN v_done;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_done(bigint) IS 'Internal: the terminal row of a job.';

-- Takes a failed or cancelled job out of history: a row that cancels the first in every count, in the same slot, so
-- that both are pruned together. The second look keeps the leaf until commit: a prune, which folds and copies what it
-- finds, has come before it, or will come after. A job that outlived its slot is in the rollups, so its undo goes to
-- the current slot.
-- The caller holds the position lock of the job's id, so that two retries follow each other.
CREATE OR REPLACE FUNCTION @extschema@._undo_done(p_done @extschema@.done_entries)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_done @extschema@.done_entries := p_done;
    v_holds boolean;
BEGIN
    IF v_done.slot IS NULL THEN
        DELETE FROM @extschema@.failed_entries f
        WHERE f.job_id = v_done.job_id AND f.run_lease = v_done.run_lease AND f.finalized_at = v_done.finalized_at;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        v_done.slot := @extschema@._ring_cursor('queue') % 64;
    ELSE
        -- pause point: undo
        EXECUTE format('SELECT bool_and(NOT d.is_undo) FROM @extschema@.done_entries_%s d
                        WHERE d.job_id = $1 AND d.run_lease = $2 AND d.finalized_at = $3', v_done.slot)
            INTO v_holds USING v_done.job_id, v_done.run_lease, v_done.finalized_at;
        -- pause point: undo_seen
        IF v_holds IS NOT TRUE THEN
            RETURN false;
        END IF;
    END IF;
    INSERT INTO @extschema@.done_entries
        (job_id, "position", run_lease, finalized_at, state, slot, attempt, is_undo, queue, body)
    VALUES (v_done.job_id, v_done."position", v_done.run_lease, v_done.finalized_at, v_done.state, v_done.slot,
        v_done.attempt, true, v_done.queue, CASE WHEN v_done."position" IS NULL THEN '{}'::jsonb END);
    -- Prune may have copied it already; from here on it waits for this transaction.
    DELETE FROM @extschema@.failed_entries f
    WHERE f.job_id = v_done.job_id AND f.run_lease = v_done.run_lease AND f.finalized_at = v_done.finalized_at;
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._undo_done(@extschema@.done_entries) IS
    'Internal: takes back that a job ended; false when that does not hold any more.';

-- The other way round from _done_body().
CREATE OR REPLACE FUNCTION @extschema@._stored_job(p_done @extschema@.done_entries)
RETURNS @extschema@._job
LANGUAGE sql STABLE PARALLEL SAFE
RETURN ROW((p_done).job_id, (p_done).queue, ((p_done).body ->> 'priority')::integer,
    ((p_done).body ->> 'shard')::integer, ((p_done).body ->> 'run_at')::timestamptz, (p_done).attempt,
    (p_done).run_lease, (p_done).body ->> 'kind', (p_done).body -> 'args',
    nullif((p_done).body -> 'ext', 'null'))::@extschema@._job;
COMMENT ON FUNCTION @extschema@._stored_job(@extschema@.done_entries) IS
    'Internal: the job of a terminal row that stores its body.';

-- A terminal row as the job it was, errors included. Its leaf is locked.
CREATE OR REPLACE FUNCTION @extschema@._job_of_done(p_done @extschema@.done_entries)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    IF p_done."position" IS NULL THEN
        v_job := @extschema@._stored_job(p_done);
    ELSE
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(p_done.slot, ARRAY[p_done."position"]) r;
        v_job.attempt := p_done.attempt;
        v_job.run_lease := p_done.run_lease;
    END IF;
    v_job.ext := coalesce(v_job.ext, '{}') - 'errors';
    IF p_done.detail ? 'errors' THEN
        v_job.ext := v_job.ext || jsonb_build_object('errors', p_done.detail -> 'errors');
    END IF;
    IF NOT v_job.ext ? 'created_at' THEN
        v_job.ext := v_job.ext || jsonb_build_object('created_at', v_job.run_at);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_of_done(@extschema@.done_entries) IS
    'Internal: the job of a terminal row.';

-- How an attempt ended that history knows, also when the job was retried since.
CREATE OR REPLACE FUNCTION @extschema@._done_state(
    p_slot integer, p_job_id bigint, p_position bigint, p_run_lease bigint)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_state @extschema@.job_state;
BEGIN
    EXECUTE format('SELECT d.state FROM @extschema@.done_entries_%s d
                    WHERE d.job_id = $1 AND d."position" = $2 AND d.run_lease = $3 AND NOT d.is_undo LIMIT 1', p_slot)
        INTO v_state USING p_job_id, p_position, p_run_lease;
    RETURN v_state;
END
$function$;
COMMENT ON FUNCTION @extschema@._done_state(integer, bigint, bigint, bigint) IS
    'Internal: terminal state that an attempt ended in, by its slot and token.';

-- A moved attempt left its slot, so its row may lie in any. Rows of jobs that ended without running have no
-- attempted_at, and the lease of the attempt before.
CREATE OR REPLACE FUNCTION @extschema@._moved_state(p_job_id bigint, p_run_lease bigint)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_state @extschema@.job_state;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('done_entries', v_slot);
        EXECUTE format('SELECT d.state FROM @extschema@.done_entries_%s d
                        WHERE d.job_id = $1 AND d.run_lease = $2 AND d."position" IS NULL
                          AND d.attempted_at IS NOT NULL AND NOT d.is_undo LIMIT 1', v_slot)
            INTO v_state USING p_job_id, p_run_lease;
        EXIT WHEN v_state IS NOT NULL;
    END LOOP;
    RETURN coalesce(v_state, (
        SELECT 'failed' FROM @extschema@.failed_entries f
        WHERE f.job_id = p_job_id AND f.run_lease = p_run_lease AND f.attempted_at IS NOT NULL)::@extschema@.job_state);
END
$function$;
COMMENT ON FUNCTION @extschema@._moved_state(bigint, bigint) IS
    'Internal: terminal state of a moved attempt, or of a failed one that outlived its slot.';

CREATE OR REPLACE FUNCTION @extschema@._completion_of(
    p_slot integer, p_position bigint,
    OUT attempted_at timestamptz, OUT finalized_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    EXECUTE format('SELECT b.attempted_at, b.finalized_at FROM @extschema@.receipt_completion_batches_%s b
                    WHERE b.positions @> $1', p_slot)
        INTO attempted_at, finalized_at USING p_position;
END
$function$;
COMMENT ON FUNCTION @extschema@._completion_of(integer, bigint) IS
    'Internal: when the job at a position was claimed and completed.';
-- Backpressure: how much waits, by subtraction. Producers ask on request only.

-- Positions of a lane that no claim has passed.
CREATE OR REPLACE FUNCTION @extschema@._lane_depth(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_emission @extschema@.queue_claim_heads := @extschema@._newest_emission(p_lane);
BEGIN
    RETURN greatest(@extschema@._lane_tail(p_lane) - v_emission.cursor, 0)
        + @extschema@._cardinality(v_emission.held);
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_depth(integer) IS 'Internal: positions of a lane that claims have not passed.';

-- Other priorities do not count: a starved backlog must not turn urgent jobs away. Runs in a block that ends by an
-- exception, so that the locks of the look vanish: a producer may idle in its transaction.
CREATE OR REPLACE FUNCTION @extschema@._queue_depth(p_queue text, p_priority integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_depth bigint;
BEGIN
    PERFORM @extschema@._require_read_committed();
    BEGIN
        v_depth := (SELECT sum(@extschema@._lane_depth(l.lane_id)) FROM @extschema@.queue_lanes l
                    WHERE l.queue = p_queue AND l.priority = p_priority);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN coalesce(v_depth, 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._queue_depth(text, integer) IS
    'Internal: positions of a queue and priority that claims have not passed.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_pressure(p_queue text, p_priority integer, p_limit bigint)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_depth bigint := @extschema@._queue_depth(p_queue, p_priority);
BEGIN
    IF v_depth >= p_limit THEN
        PERFORM @extschema@._refuse('JQ003',
            format('option "backpressure": %s jobs wait in queue "%s" at priority %s', v_depth, p_queue, p_priority),
            format('Try again when fewer than %s wait.', p_limit));
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_pressure(text, integer, bigint) IS
    'Internal: raises JQ003 when so many jobs wait.';

-- What this session measured last, while it is fresh; NULL otherwise. An expression, so that it is inlined: a signal
-- may cost next to nothing.
CREATE OR REPLACE FUNCTION @extschema@._fresh_pressure(p_queue text, p_priority integer)
RETURNS text
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN CASE
    WHEN starts_with(current_setting('awa.pressure', true), p_queue || chr(31) || p_priority || chr(31))
         AND date_part('epoch', clock_timestamp())
             < split_part(current_setting('awa.pressure', true), chr(31), 3)::double precision
    THEN split_part(current_setting('awa.pressure', true), chr(31), 4) END;
COMMENT ON FUNCTION @extschema@._fresh_pressure(text, integer) IS
    'Internal: the depth of a queue and priority that this session measured a moment ago, or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._measure_pressure(p_queue text, p_priority integer)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_fresh_seconds constant double precision := 0.05;
    v_depth text := @extschema@._queue_depth(p_queue, p_priority);
BEGIN
    -- No name holds a control character, so the parts cannot run into each other.
    PERFORM set_config('awa.pressure', concat_ws(chr(31), p_queue, p_priority,
        date_part('epoch', clock_timestamp()) + c_fresh_seconds, v_depth), false);
    RETURN v_depth;
END
$function$;
COMMENT ON FUNCTION @extschema@._measure_pressure(text, integer) IS
    'Internal: the depth of a queue and priority, kept for the next 50 ms of this session.';

CREATE OR REPLACE FUNCTION @extschema@._apply_backpressure(p_value jsonb, p_queue text, p_priority integer)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_value = '"signal"' THEN
        RETURN coalesce(@extschema@._fresh_pressure(p_queue, p_priority),
                        @extschema@._measure_pressure(p_queue, p_priority));
    ELSIF jsonb_typeof(p_value) = 'object' THEN
        PERFORM @extschema@._refuse_pressure(p_queue, p_priority, (p_value ->> 'reject')::numeric::bigint);
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._apply_backpressure(jsonb, text, integer) IS
    'Internal: does what the option asks for: the depth, or JQ003, or nothing.';

-- deferred: jobs that may not run yet, and dead letters
-- Jobs that may not run yet.

-- The bucket of a time: its minute, or this one for the past. A bucket takes jobs of its next minute ten minutes ahead,
-- so that it stands empty for six.
CREATE OR REPLACE FUNCTION @extschema@._deferred_slot(p_run_at timestamptz, p_now timestamptz)
RETURNS smallint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN CASE WHEN p_run_at >= p_now + interval '10 minutes' THEN 16
            ELSE floor(date_part('epoch', greatest(p_run_at, p_now)) / 60)::bigint % 16 END::smallint;
COMMENT ON FUNCTION @extschema@._deferred_slot(timestamptz, timestamptz) IS
    'Internal: slot of deferred_jobs for a job with this run_at.';

CREATE OR REPLACE FUNCTION @extschema@._defer(p_jobs @extschema@._job[], p_state @extschema@.job_state)
RETURNS TABLE (ordinal bigint, job_id bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    WITH chosen AS MATERIALIZED (
        SELECT j.o, coalesce(j.job_id, nextval('@extschema@.job_ids')) AS id, j.run_at, j.run_lease, j.priority,
               j.shard, j.attempt, j.queue, j.kind, j.args, j.ext
        FROM unnest(p_jobs) WITH ORDINALITY
            j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)),
    stored AS (
        INSERT INTO @extschema@.deferred_jobs
            (job_id, run_at, run_lease, state, priority, shard, attempt, slot, queue, kind, args, ext)
        SELECT c.id, c.run_at, c.run_lease, p_state, c.priority, c.shard, c.attempt,
               @extschema@._deferred_slot(c.run_at, v_now), c.queue, c.kind, c.args,
               @extschema@._deferred_ext(c.ext, p_state)
        FROM chosen c)
    SELECT c.o, c.id FROM chosen c;
END
$function$;
COMMENT ON FUNCTION @extschema@._defer(@extschema@._job[], @extschema@.job_state) IS
    'Internal: stores jobs until their run_at; a job without an id gets one.';

-- Where a deferred job is; slot NULL when it is not there. The block gives the locks of the other leaves back: they
-- must not stay with an application that idles.
CREATE OR REPLACE FUNCTION @extschema@._find_deferred(
    p_job_id bigint, OUT slot integer, OUT state text, OUT job @extschema@._job)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_row record;
BEGIN
    BEGIN
        SELECT d.* INTO v_row FROM @extschema@.deferred_jobs d WHERE d.job_id = p_job_id;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    slot := v_row.slot;
    state := v_row.state;
    job := ROW(v_row.job_id, v_row.queue, v_row.priority, v_row.shard, v_row.run_at, v_row.attempt, v_row.run_lease,
               v_row.kind, v_row.args, v_row.ext);
END
$function$;
COMMENT ON FUNCTION @extschema@._find_deferred(bigint) IS 'Internal: slot, state and body of a deferred job.';

-- Remembers that jobs leave a slot. A dump whose snapshot is older than this may not have locked the slot yet: prune
-- waits for it. Asked for before the commit, so a transaction that deletes must not idle for long.
CREATE OR REPLACE FUNCTION @extschema@._note_taken(p_slot integer, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM setval(format('@extschema@.deferred_%s_taken', p_slot)::regclass, extract(epoch FROM p_now)::bigint);
END
$function$;
COMMENT ON FUNCTION @extschema@._note_taken(integer, timestamptz) IS
    'Internal: remembers when a job was last taken out of a slot of deferred_jobs.';

CREATE OR REPLACE FUNCTION @extschema@._take_from_slot(p_slot integer, p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    EXECUTE format('DELETE FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = $1
                    RETURNING d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease, d.kind, d.args,
                              d.ext', p_slot)
        INTO v_job USING p_job_id;
    PERFORM @extschema@._note_taken(p_slot, clock_timestamp());
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_from_slot(integer, bigint) IS
    'Internal: removes a deferred job from a slot and returns it; NULL job_id when it is not there.';

-- Removes a deferred job and returns it; NULL job_id when it is not there. Waits for a concurrent change of the row; if
-- that was a move to another slot or to its lane, the caller must look again.
CREATE OR REPLACE FUNCTION @extschema@._take_deferred(p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer := (@extschema@._find_deferred(p_job_id)).slot;
BEGIN
    -- pause point: take
    RETURN CASE WHEN v_slot IS NOT NULL THEN @extschema@._take_from_slot(v_slot, p_job_id) END;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_deferred(bigint) IS 'Internal: removes a deferred job and returns it.';
-- Moves due jobs from all buckets into the ready ring, oldest first. Rows that others change are skipped; they are
-- theirs. They go in portions, because a portion is held in memory, and what does not fit into a second waits for the
-- next round. The far leaf is left to refill.
CREATE OR REPLACE FUNCTION @extschema@._promote_due(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
DECLARE
    c_portion constant bigint := 16777216;
    v_row record;
    v_slots integer[];
    v_ids bigint[];
    v_bytes bigint;
    v_held text[] := '{}'::text[];
    v_left text[];
    v_moved bigint := 0;
BEGIN
    LOOP
        v_slots := '{}'::integer[];
        v_ids := '{}'::bigint[];
        v_bytes := 0;
        FOR v_row IN
            SELECT d.slot, d.job_id, @extschema@._args_bytes(d.args) AS bytes
            FROM @extschema@.deferred_jobs d
            WHERE d.slot < 16 AND d.run_at <= p_now AND d.queue <> ALL (v_held)
                  AND NOT coalesce(d.ext -> 'unique' ? 'waiting', false)
            ORDER BY d.run_at, d.job_id
            LIMIT p_limit - v_moved
            FOR UPDATE SKIP LOCKED
        LOOP
            v_slots := v_slots || v_row.slot::integer;
            v_ids := v_ids || v_row.job_id;
            v_bytes := v_bytes + v_row.bytes;
            EXIT WHEN v_bytes > c_portion;
        END LOOP;
        EXIT WHEN cardinality(v_ids) = 0;
        v_moved := v_moved + @extschema@._promote(v_slots, v_ids, p_now);
        -- What is still there belongs to strict_fifo lanes that producers hold: the others must not wait behind it.
        v_left := ARRAY(SELECT DISTINCT d.queue FROM @extschema@._read_deferred(v_slots, v_ids) d);
        EXIT WHEN v_left = '{}' AND (v_bytes <= c_portion OR clock_timestamp() > p_now + interval '1 second');
        v_held := v_held || v_left;
    END LOOP;
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote_due(integer, timestamptz) IS
    'Internal: makes up to so many due jobs available.';

-- Rows by slot and job id; each costs a look into its own leaf.
CREATE OR REPLACE FUNCTION @extschema@._read_deferred(p_slots integer[], p_ids bigint[])
RETURNS SETOF @extschema@.deferred_jobs
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer;
BEGIN
    FOR v_slot IN SELECT DISTINCT s FROM unnest(p_slots) s LOOP
        RETURN QUERY EXECUTE format('SELECT d.* FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = ANY ($1)', v_slot)
            USING ARRAY(SELECT u.id FROM unnest(p_slots, p_ids) u (slot, id) WHERE u.slot = v_slot);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._read_deferred(integer[], bigint[]) IS 'Internal: deferred jobs by slot and job id.';

CREATE OR REPLACE FUNCTION @extschema@._delete_deferred(p_slots integer[], p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer;
    v_count bigint;
    v_deleted bigint := 0;
BEGIN
    FOR v_slot IN SELECT DISTINCT s FROM unnest(p_slots) s LOOP
        EXECUTE format('DELETE FROM @extschema@.deferred_jobs_%s d WHERE d.job_id = ANY ($1)', v_slot)
            USING ARRAY(SELECT u.id FROM unnest(p_slots, p_ids) u (slot, id) WHERE u.slot = v_slot);
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_deleted := v_deleted + v_count;
        PERFORM @extschema@._note_taken(v_slot, p_now);
    END LOOP;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._delete_deferred(integer[], bigint[], timestamptz) IS
    'Internal: deletes deferred jobs by slot and job id; returns how many.';

-- A job that cannot be promoted ends failed with the reason, and the others go on:
-- the batch is halved until it stands alone.
CREATE OR REPLACE FUNCTION @extschema@._promote(p_slots integer[], p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET jit = off
AS $function$
DECLARE
    v_jobs @extschema@._job[];
    v_message text;
    v_half integer := cardinality(p_ids) / 2;
BEGIN
    BEGIN
        SELECT array_agg(
            ROW(d.job_id, d.queue, d.priority, d.shard, d.run_at, d.attempt, d.run_lease, d.kind, d.args,
                d.ext)::@extschema@._job
            ORDER BY d.run_at, d.job_id)
        INTO v_jobs
        FROM @extschema@._read_deferred(p_slots, p_ids) d;
        -- Those of a strict_fifo lane that a producer holds stay for the next round.
        RETURN (
            SELECT @extschema@._delete_deferred(
                coalesce(array_agg(u.slot), '{}'), coalesce(array_agg(u.id), '{}'), p_now)
            FROM @extschema@._append_ready(v_jobs, true) a
            JOIN unnest(p_slots, p_ids) u (slot, id) ON u.id = a.job_id);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN @extschema@._promote(p_slots[:v_half], p_ids[:v_half], p_now)
             + @extschema@._promote(p_slots[v_half + 1:], p_ids[v_half + 1:], p_now);
    END IF;
    PERFORM @extschema@._append_done(@extschema@._take_from_slot(p_slots[1], p_ids[1]), 'failed', NULL, NULL, NULL,
                                     p_now, 'promotion failed: ' || v_message, NULL);
    RETURN 0;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote(integer[], bigint[], timestamptz) IS
    'Internal: moves locked deferred jobs to their lanes; one that cannot go ends failed.';
-- Moves of deferred jobs between leaves: from the far leaf into the buckets as they come near, and overdue ones out of
-- an old bucket, so that it can be emptied.

-- Moves jobs of a slot that are due from p_from on and before p_before to the slot where they belong now: up to
-- p_limit, and so many bytes of args, since all of it is one statement.
CREATE OR REPLACE FUNCTION @extschema@._move_deferred(
    p_slot integer, p_from timestamptz, p_before timestamptz, p_limit bigint, p_now timestamptz,
    OUT moved bigint, OUT is_all boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    c_portion constant bigint := 16777216;
    v_bytes bigint;
BEGIN
    EXECUTE format($query$
        WITH due AS MATERIALIZED (
            SELECT x.job_id, x.bytes, sum(x.bytes) OVER (ORDER BY x.run_at, x.job_id) - x.bytes AS ahead
            FROM (SELECT d.job_id, d.run_at, @extschema@._args_bytes(d.args) AS bytes
                  FROM @extschema@.deferred_jobs_%1$s d
                  WHERE d.run_at >= $1 AND d.run_at < $2
                  ORDER BY d.run_at, d.job_id
                  LIMIT $3
                  FOR UPDATE SKIP LOCKED) x),
        gone AS (
            DELETE FROM @extschema@.deferred_jobs_%1$s d
            -- A list, not a join, which statistics could turn into a walk over all rows, dead ones included.
            WHERE d.job_id = ANY (ARRAY(SELECT u.job_id FROM due u WHERE u.ahead <= $5))
            RETURNING d.*),
        stored AS (
            INSERT INTO @extschema@.deferred_jobs
                (job_id, run_at, run_lease, state, priority, shard, attempt, slot, queue, kind, args, ext)
            SELECT g.job_id, g.run_at, g.run_lease, g.state, g.priority, g.shard, g.attempt,
                   @extschema@._deferred_slot(g.run_at, $4), g.queue, g.kind, g.args, g.ext
            FROM gone g)
        SELECT count(*) FILTER (WHERE u.ahead <= $5), sum(u.bytes) FROM due u
        $query$, p_slot)
        INTO moved, v_bytes USING p_from, p_before, p_limit, p_now, c_portion;
    is_all := moved < p_limit AND coalesce(v_bytes, 0) <= c_portion;
    IF moved > 0 THEN
        PERFORM @extschema@._note_taken(p_slot, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_deferred(integer, timestamptz, timestamptz, bigint, timestamptz) IS
    'Internal: moves deferred jobs of a slot to the slots where they belong now; is_all when none is left.';

-- Every 15 s; at once again when there was more than one call moves. From a minute before where the last one ended,
-- so that under a pinned snapshot it does not walk over all dead rows; what was committed behind that mark is found by
-- a look from the start, which may take a hundredth of the time.
CREATE OR REPLACE FUNCTION @extschema@._refill_buckets(p_limit integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_began timestamptz := clock_timestamp();
    v_second bigint := extract(epoch FROM p_now);
    v_last bigint := (SELECT s.last_value FROM @extschema@.deferred_refill s);
    -- A time too far ahead is from a clock that was wrong.
    v_is_full boolean := v_last > v_second
        OR (SELECT s.last_value FROM @extschema@.deferred_full_look s) NOT BETWEEN v_second + 1 AND v_second + 3600;
    v_portion record;
    v_moved bigint := 0;
BEGIN
    IF v_second / 15 = v_last / 15 THEN
        RETURN 0;
    END IF;
    LOOP
        v_portion := @extschema@._move_deferred(
            16, CASE WHEN v_is_full THEN '-infinity' ELSE to_timestamp(v_last) + interval '9 minutes' END,
            p_now + interval '10 minutes', p_limit - v_moved, p_now);
        v_moved := v_moved + v_portion.moved;
        EXIT WHEN v_portion.is_all OR v_moved >= p_limit OR clock_timestamp() > v_began + interval '1 second';
    END LOOP;
    IF v_portion.is_all THEN
        PERFORM setval('@extschema@.deferred_refill', v_second);
    END IF;
    IF v_is_full THEN
        PERFORM setval('@extschema@.deferred_full_look', v_second
            + least(3600, 100 * extract(epoch FROM clock_timestamp() - v_began))::bigint);
    END IF;
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._refill_buckets(integer, timestamptz) IS
    'Internal: moves up to so many jobs that are due within ten minutes from the far leaf to their buckets.';

CREATE OR REPLACE FUNCTION @extschema@._forget_refill()
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT setval('@extschema@.deferred_refill', 0, false), setval('@extschema@.deferred_full_look', 0, false)
$function$;
COMMENT ON FUNCTION @extschema@._forget_refill() IS 'Internal: lets the next refill look from the start.';

-- The job of a slot that is due last; NULL when the slot holds none. Looked for from the end, where the living are.
CREATE OR REPLACE FUNCTION @extschema@._last_deferred(p_slot integer, OUT queue text, OUT run_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
AS $function$
BEGIN
    EXECUTE format('SELECT d.queue, d.run_at FROM @extschema@.deferred_jobs_%s d
                    ORDER BY d.run_at DESC, d.job_id DESC LIMIT 1', p_slot) INTO queue, run_at;
END
$function$;
COMMENT ON FUNCTION @extschema@._last_deferred(integer) IS 'Internal: the job of a slot that is due last, or NULL.';

-- A few overdue jobs must not keep a bucket from being emptied: those of a strict_fifo lane that a producer holds, say.
-- Many are what promotion will come to.
CREATE OR REPLACE FUNCTION @extschema@._move_stragglers(p_slot integer, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most constant bigint := 1000;
    v_before timestamptz := p_now - interval '2 minutes';
    v_count bigint;
BEGIN
    IF p_slot IN (16, @extschema@._deferred_slot(p_now, p_now))
       OR (@extschema@._last_deferred(p_slot)).run_at >= v_before THEN
        RETURN 0;
    END IF;
    EXECUTE format('SELECT count(*) FROM (SELECT FROM @extschema@.deferred_jobs_%s d LIMIT $1) x', p_slot)
        INTO v_count USING c_most + 1;
    IF v_count > c_most THEN
        RETURN 0;
    END IF;
    RETURN (@extschema@._move_deferred(p_slot, '-infinity', v_before, c_most, p_now)).moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_stragglers(integer, timestamptz) IS
    'Internal: moves the jobs of a bucket to the one of this minute, if they are few and all long overdue.';
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
-- Deferred jobs with a unique key: those that wait for it, and new arguments.

CREATE OR REPLACE FUNCTION @extschema@._waiting_for_keys(p_limit integer, p_now timestamptz)
RETURNS @extschema@._waiting_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
BEGIN
    RETURN ARRAY(
        SELECT ROW(d.job_id, d.ext -> 'unique')::@extschema@._waiting_job
        FROM @extschema@.deferred_jobs d
        WHERE d.run_at <= p_now AND d.ext -> 'unique' ? 'waiting'
        ORDER BY d.run_at, d.job_id
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED);
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_for_keys(integer, timestamptz) IS
    'Internal: due jobs that need their unique key first, locked.';

-- Both in one step: until it is available, the key of such a job is not safe.
CREATE OR REPLACE FUNCTION @extschema@._promote_with_keys(p_ids bigint[], p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slots integer[];
    v_ids bigint[];
    v_moved bigint;
BEGIN
    WITH ready AS (
        UPDATE @extschema@.deferred_jobs d SET ext = d.ext #- '{unique,waiting}' WHERE d.job_id = ANY (p_ids)
        RETURNING d.slot, d.job_id)
    SELECT array_agg(r.slot::integer), array_agg(r.job_id) INTO v_slots, v_ids FROM ready r;
    IF v_ids IS NULL THEN
        RETURN 0;
    END IF;
    v_moved := @extschema@._promote(v_slots, v_ids, p_now);
    -- Those of a strict_fifo lane that a producer holds stay.
    UPDATE @extschema@.deferred_jobs d SET ext = jsonb_set(d.ext, '{unique,waiting}', 'true')
    WHERE d.job_id = ANY (p_ids);
    RETURN v_moved;
END
$function$;
COMMENT ON FUNCTION @extschema@._promote_with_keys(bigint[], timestamptz) IS
    'Internal: promotes deferred jobs that have just taken their keys.';

CREATE OR REPLACE FUNCTION @extschema@._replace_deferred_args(p_job_id bigint, p_args jsonb)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_slot integer := (@extschema@._find_deferred(p_job_id)).slot;
    v_count bigint;
BEGIN
    IF v_slot IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('UPDATE @extschema@.deferred_jobs_%s d SET args = $2 WHERE d.job_id = $1', v_slot)
        USING p_job_id, p_args;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count > 0;
END
$function$;
COMMENT ON FUNCTION @extschema@._replace_deferred_args(bigint, jsonb) IS
    'Internal: new arguments for a deferred job; false when it is not there.';

-- execution: attempts
-- Receipts. A receipt (slot, batch, position) is open while its position is in the batch and in none of its closures.

CREATE OR REPLACE FUNCTION @extschema@._read_batch(
    p_slot integer, p_batch bigint,
    OUT ready_slot integer, OUT owner uuid, OUT is_plain boolean, OUT claimed_at timestamptz,
    OUT deadline_at timestamptz, OUT positions int8multirange, OUT closed int8multirange, OUT next_no integer)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
BEGIN
    IF p_slot IS NULL OR p_slot NOT BETWEEN 0 AND @extschema@._slot_count('claim') - 1 THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT b.ready_slot, b.owner, b.is_plain, b.claimed_at, b.deadline_at, b.positions
                    FROM @extschema@.lease_claim_batches_%s b WHERE b.batch_id = $1', p_slot)
        INTO ready_slot, owner, is_plain, claimed_at, deadline_at, positions USING p_batch;
    IF positions IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT coalesce(range_agg(c.closed), ''{}''), coalesce(max(c.closure_no), 0) + 1
                    FROM @extschema@.lease_claim_closures_%s c WHERE c.batch_id = $1', p_slot)
        INTO closed, next_no USING p_batch;
END
$function$;
COMMENT ON FUNCTION @extschema@._read_batch(integer, bigint) IS
    'Internal: a claim batch with the union of its closures; positions is NULL when this snapshot has no such batch.';

CREATE OR REPLACE FUNCTION @extschema@._append_closure(
    p_slot integer, p_batch bigint, p_no integer, p_outcome @extschema@.attempt_outcome,
    p_closed int8multirange, p_reason text, p_now timestamptz)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    INSERT INTO @extschema@.lease_claim_closures (batch_id, closed_at, closure_no, outcome, slot, closed, reason)
    VALUES (p_batch, p_now, p_no, p_outcome, p_slot, p_closed, p_reason)
$function$;
COMMENT ON FUNCTION @extschema@._append_closure(
    integer, bigint, integer, @extschema@.attempt_outcome, int8multirange, text, timestamptz) IS
    'Internal: closes positions of a batch. The number is taken: a closure this snapshot cannot see raises 23505.';

-- Outcome of a closed position; NULL while open or when the evidence is gone.
CREATE OR REPLACE FUNCTION @extschema@._closure_outcome(p_slot integer, p_batch bigint, p_position bigint)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_outcome @extschema@.attempt_outcome;
BEGIN
    EXECUTE format('SELECT c.outcome FROM @extschema@.lease_claim_closures_%s c
                    WHERE c.batch_id = $1 AND c.closed @> $2 LIMIT 1', p_slot)
        INTO v_outcome USING p_batch, p_position;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._closure_outcome(integer, bigint, bigint) IS
    'Internal: how a position of a batch was closed.';

-- Batches of a slot with something open. Two ordered index scans merge, so the cost is one pass over the slot.
CREATE OR REPLACE FUNCTION @extschema@._open_batches(p_slot integer)
RETURNS TABLE (
    batch_id bigint, owner uuid, ready_slot integer, claimed_at timestamptz, deadline_at timestamptz,
    open int8multirange)
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_hashagg = off
SET enable_nestloop = off
SET jit = off
AS $function$
BEGIN
    IF NOT @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT b.batch_id, b.owner, b.ready_slot::integer, b.claimed_at, b.deadline_at,
               b.positions - coalesce(c.closed, '{}')
        FROM @extschema@.lease_claim_batches_%1$s b
        LEFT JOIN (SELECT x.batch_id, range_agg(x.closed) AS closed
                   FROM @extschema@.lease_claim_closures_%1$s x
                   GROUP BY x.batch_id) c
            ON c.batch_id = b.batch_id
        WHERE b.positions IS DISTINCT FROM c.closed
        $query$, p_slot);
END
$function$;
COMMENT ON FUNCTION @extschema@._open_batches(integer) IS 'Internal: batches of a claim slot that have open positions.';

-- The first open batch of a slot, or of those with bodies in one ready slot; it stops there.
CREATE OR REPLACE FUNCTION @extschema@._first_open_batch(
    p_slot integer, p_ready_slot integer,
    OUT batch_id bigint, OUT owner uuid, OUT claimed_at timestamptz, OUT open int8multirange)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET jit = off
AS $function$
BEGIN
    IF NOT @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN;
    END IF;
    EXECUTE format($query$
        SELECT b.batch_id, b.owner, b.claimed_at, b.positions - c.closed
        FROM @extschema@.lease_claim_batches_%1$s b,
             LATERAL (SELECT coalesce(range_agg(x.closed), '{}') AS closed FROM @extschema@.lease_claim_closures_%1$s x
                      WHERE x.batch_id = b.batch_id) c
        WHERE b.positions <> c.closed AND ($1 IS NULL OR b.ready_slot = $1)
        ORDER BY b.batch_id LIMIT 1
        $query$, p_slot) INTO batch_id, owner, claimed_at, open USING p_ready_slot;
END
$function$;
COMMENT ON FUNCTION @extschema@._first_open_batch(integer, integer) IS
    'Internal: the first batch of a claim slot with open positions.';

-- Which of some positions of a batch have ended, and how: moved ones when their lease has.
CREATE OR REPLACE FUNCTION @extschema@._closed_positions(p_slot integer, p_batch bigint, p_positions int8multirange)
RETURNS TABLE ("position" bigint, outcome @extschema@.attempt_outcome)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    RETURN QUERY EXECUTE format('SELECT p, c.outcome
                                 FROM @extschema@.lease_claim_closures_%s c,
                                      LATERAL unnest(@extschema@._to_list(c.closed * $2)) p
                                 WHERE c.batch_id = $1 AND c.outcome <> ''moved''', p_slot)
        USING p_batch, p_positions;
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        RETURN QUERY SELECT l."position", l.outcome FROM @extschema@.leases l
                     WHERE l.batch_id = p_batch AND p_positions @> l."position" AND l.outcome IS NOT NULL;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._closed_positions(integer, bigint, int8multirange) IS
    'Internal: ended ones among positions of a batch.';
-- Which lanes of a queue may have something, best first: effective priority, then age of the head. The hint lets a lane
-- with nothing new be passed over for one sequence read; it may lag behind the ledger and never leads it.

CREATE OR REPLACE FUNCTION @extschema@._waiting_lanes(p_queue text)
RETURNS TABLE (lane_id integer, priority integer, tail bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_query text;
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM @extschema@.queue_lanes q WHERE q.queue = p_queue LIMIT 2) x) = 1 THEN
        -- Most queues have one lane, and most claims bring few jobs: this is a third of the work.
        RETURN QUERY
        SELECT w.lane_id, w.priority::integer, w.tail
        FROM (SELECT q.lane_id, q.priority, @extschema@._lane_tail(q.lane_id) AS tail, q.hint_seq
              FROM @extschema@.queue_lanes q WHERE q.queue = p_queue) w
        WHERE w.tail > coalesce(pg_sequence_last_value(w.hint_seq), 0);
        RETURN;
    END IF;
    -- Thousands of sequences in one transaction would fill the lock table; a random 512 get there as surely.
    SELECT string_agg(format(
        'SELECT %s, %s, CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, %s::bigint
         FROM @extschema@.lane_%s s',
        x.lane_id, x.priority, x.hint, x.lane_id), ' UNION ALL ')
    INTO v_query
    FROM (SELECT l.lane_id, l.priority, coalesce(pg_sequence_last_value(l.hint_seq), 0) AS hint
          FROM (SELECT q.lane_id, q.priority, q.hint_seq
                FROM @extschema@.queue_lanes q
                WHERE q.queue = p_queue
                ORDER BY CASE WHEN (SELECT count(*) FROM @extschema@.queue_lanes n WHERE n.queue = p_queue) > 512
                              THEN random() ELSE 0 END
                LIMIT 512) l) x;
    IF v_query IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format('SELECT w.lane_id, w.priority, w.tail
                                 FROM (%s) w (lane_id, priority, tail, hint)
                                 WHERE w.tail > w.hint', v_query);
END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_lanes(text) IS
    'Internal: lanes of a queue whose sequence has moved past their hint.';

-- Run time of the first waiting job of a lane, late commits behind the cursor left aside; NULL when none is visible.
CREATE OR REPLACE FUNCTION @extschema@._head_run_at(p_lane integer)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_emission @extschema@.queue_claim_heads := @extschema@._newest_emission(p_lane);
    v_slot integer;
    v_run_at timestamptz;
BEGIN
    FOR v_slot IN
        SELECT s.slot
        FROM @extschema@._queue_slots_since(v_emission.low) s
        ORDER BY s.generation
    LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        EXECUTE format('SELECT r.run_at
                        FROM @extschema@.ready_entries_%1$s r
                        WHERE r."position" > $1 AND r."position" < $2
                          AND NOT EXISTS (
                              SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
                        ORDER BY r."position" LIMIT 1', v_slot)
            INTO v_run_at USING v_emission.cursor, @extschema@._lane_base(p_lane + 1);
        EXIT WHEN v_run_at IS NOT NULL;
    END LOOP;
    RETURN v_run_at;
END
$function$;
COMMENT ON FUNCTION @extschema@._head_run_at(integer) IS 'Internal: run time of the first waiting job of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._choose_lanes(p_queue text, p_aging_seconds numeric, p_now timestamptz)
RETURNS TABLE (lane_id integer, priority integer, tail bigint)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lanes integer[];
    v_priorities integer[];
    v_tails bigint[];
    v_heads timestamptz[] := '{}'::timestamptz[];
    v_aging numeric;
BEGIN
    SELECT array_agg(w.lane_id), array_agg(w.priority), array_agg(w.tail) INTO v_lanes, v_priorities, v_tails
    FROM (SELECT x.* FROM @extschema@._waiting_lanes(p_queue) x ORDER BY random()) w;
    IF v_lanes IS NULL OR cardinality(v_lanes) = 1 THEN
        RETURN QUERY SELECT v_lanes[1], v_priorities[1], v_tails[1] WHERE v_lanes IS NOT NULL;
        RETURN;
    END IF;
    v_aging := coalesce(p_aging_seconds, @extschema@._setting('aging_seconds'));
    -- The block ends by an exception, so that the locks of this look-around
    -- vanish and prune is not in anyone's way.
    BEGIN
        FOR i IN 1 .. least(cardinality(v_lanes), 64) LOOP
            v_heads[i] := @extschema@._head_run_at(v_lanes[i]);
        END LOOP;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN QUERY
    SELECT u.lane_id, u.priority, u.tail
    FROM unnest(v_lanes, v_priorities, v_tails, v_heads) u (lane_id, priority, tail, head)
    ORDER BY CASE WHEN v_aging > 0 AND u.head < p_now
                  THEN greatest(1, u.priority - floor(extract(epoch FROM p_now - u.head) / v_aging))
                  ELSE u.priority END, u.head, u.lane_id;
END
$function$;
COMMENT ON FUNCTION @extschema@._choose_lanes(text, numeric, timestamptz) IS
    'Internal: lanes worth a look, by effective priority and age of their head.';
-- Claim: one short transaction under the lane lock. Nothing is updated: one emission row moves the cursor, one batch
-- row per ready slot, deadline and separate job is the receipt. Lock order: lane, mutation, position (all by try).

-- Waiting rows of one leaf among the wanted positions, lowest first. Only nested loops over the position index can
-- answer this, so the plan is the same on an empty, a truncated and a full leaf. A size is about that of the text that
-- the claim returns; -1 where only decompressing the args would tell it.
CREATE OR REPLACE FUNCTION @extschema@._see_leaf(
    p_slot integer, p_wanted int8multirange, p_limit integer, p_alone boolean,
    OUT positions bigint[], OUT sizes integer[], OUT is_plain boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_alive text := '';
    v_rows text;
BEGIN
    -- With the mutation lock no tombstone can come, and a leaf without blocks has none: that saves two buffers a row.
    IF NOT p_alone OR @extschema@._leaf_in_use('ready_tombstones', p_slot) THEN
        v_alive := format('AND NOT EXISTS (
            SELECT FROM @extschema@.ready_tombstones_%s t WHERE t."position" = e."position")', p_slot);
    END IF;
    v_rows := format($query$
        SELECT e."position",
               CASE WHEN pg_column_compression(e.args) IS NULL THEN pg_column_size(e.args) ELSE -1 END AS bytes,
               e.job_id IS NULL AND e.ext IS NULL AS is_plain
        FROM @extschema@.ready_entries_%s e
        WHERE e."position" >= lower(g.g) AND e."position" < upper(g.g) %s
        ORDER BY e."position" LIMIT $2
        $query$, p_slot, v_alive);
    IF p_wanted = int8multirange(range_merge(p_wanted)) THEN
        -- One range, as always beyond the cursor, needs no loop over ranges.
        v_rows := replace(v_rows, '(g.g)', '($1)');
    ELSE
        v_rows := format('SELECT x.* FROM unnest($1) g (g), LATERAL (%s) x LIMIT $2', v_rows);
    END IF;
    EXECUTE format('SELECT array_agg(r."position"), array_agg(r.bytes), bool_and(r.is_plain) FROM (%s) r', v_rows)
        INTO positions, sizes, is_plain USING p_wanted, p_limit;
END
$function$;
COMMENT ON FUNCTION @extschema@._see_leaf(integer, int8multirange, integer, boolean) IS
    'Internal: waiting rows of one leaf among the wanted positions; alone: the caller holds the mutation lock.';

-- What a claim looks at: positions behind the cursor (gaps and held) in every leaf, then those beyond
-- it from the oldest leaf that can matter.
CREATE OR REPLACE FUNCTION @extschema@._leaves_to_see(
    p_emission @extschema@.queue_claim_heads, p_ring bigint, p_limit integer)
RETURNS TABLE (slot integer, generation bigint, is_beyond boolean, wanted int8multirange, max_rows integer)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_behind int8multirange := p_emission.gaps_old + p_emission.gaps_new + p_emission.held;
    v_beyond int8multirange := int8multirange(
        int8range(p_emission.cursor, @extschema@._lane_base(p_emission.lane_id + 1), '()'));
BEGIN
    IF NOT isempty(v_behind) THEN
        RETURN QUERY
        SELECT s, NULL::bigint, false, v_behind, p_limit + @extschema@._cardinality(p_emission.held)::integer
        FROM generate_series(0, @extschema@._slot_count('queue') - 1) s
        WHERE @extschema@._leaf_in_use('ready_entries', s);
    END IF;
    IF p_emission.low >= p_ring / 64 THEN
        RETURN QUERY SELECT (p_ring % 64)::integer, p_ring / 64, true, v_beyond, p_limit;
    ELSE
        RETURN QUERY
        SELECT s.slot, s.generation, true, v_beyond, p_limit
        FROM @extschema@._queue_slots_since(p_emission.low) s
        ORDER BY s.generation;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._leaves_to_see(@extschema@.queue_claim_heads, bigint, integer) IS
    'Internal: the reads of a claim, in order.';

CREATE OR REPLACE FUNCTION @extschema@._see_rows(
    p_emission @extschema@.queue_claim_heads, p_ring bigint, p_limit integer, p_alone boolean)
RETURNS @extschema@._seen_rows
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_seen @extschema@._seen_rows := ROW('{}', '{}', '{}', NULL, false, false, p_emission.low, true);
    v_reads integer := 0;
    v_at_low boolean := true;
    v_is_bounded boolean;
    v_leaf record;
    v_more record;
BEGIN
    FOR v_leaf IN SELECT l.* FROM @extschema@._leaves_to_see(p_emission, p_ring, p_limit) l LOOP
        -- Nothing beyond the frontier will be kept, so a backlog over many leaves
        -- costs little more than one in a single leaf.
        v_is_bounded := v_seen.frontier IS NOT NULL;
        IF v_is_bounded THEN
            v_leaf.wanted := v_leaf.wanted * int8multirange(int8range(NULL, v_seen.frontier, '(]'));
        END IF;
        v_more := @extschema@._see_leaf(v_leaf.slot, v_leaf.wanted, v_leaf.max_rows, p_alone);
        -- pause point: leaf
        IF v_more.positions IS NOT NULL THEN
            v_reads := v_reads + 1;
            v_seen.positions := v_seen.positions || v_more.positions;
            v_seen.sizes := v_seen.sizes || v_more.sizes;
            v_seen.leaves := v_seen.leaves || array_fill(v_leaf.slot, ARRAY[cardinality(v_more.positions)]);
            v_seen.is_plain := v_seen.is_plain AND v_more.is_plain;
            IF cardinality(v_more.positions) >= v_leaf.max_rows THEN
                -- This leaf may have more: beyond its last row other leaves are ahead of it.
                v_seen.frontier := least(v_seen.frontier, v_more.positions[v_leaf.max_rows]);
                v_seen.scan_full := v_seen.scan_full OR v_leaf.is_beyond;
                v_seen.probe_full := v_seen.probe_full OR NOT v_leaf.is_beyond;
            END IF;
        END IF;
        IF v_leaf.is_beyond THEN
            -- Never past the current or the previous generation; a row that still
            -- arrives in an older leaf is found as a gap.
            v_at_low := v_at_low AND v_more.positions IS NULL AND NOT v_is_bounded
                AND v_leaf.generation < p_ring / 64 - 1;
            IF v_at_low THEN
                v_seen.low := v_leaf.generation + 1;
            END IF;
        END IF;
    END LOOP;
    IF v_reads > 1 THEN
        SELECT coalesce(array_agg(d."position" ORDER BY d."position"), '{}'),
               coalesce(array_agg(d.leaf ORDER BY d."position"), '{}'),
               coalesce(array_agg(d.bytes ORDER BY d."position"), '{}')
        INTO v_seen.positions, v_seen.leaves, v_seen.sizes
        FROM (SELECT DISTINCT ON (u."position") u.*
              FROM unnest(v_seen.positions, v_seen.leaves, v_seen.sizes) u ("position", leaf, bytes)
              WHERE v_seen.frontier IS NULL OR u."position" <= v_seen.frontier
              ORDER BY u."position") d;
    END IF;
    RETURN v_seen;
END
$function$;
COMMENT ON FUNCTION @extschema@._see_rows(@extschema@.queue_claim_heads, bigint, integer, boolean) IS
    'Internal: candidates of a claim, in lane order.';

-- No other transaction holds the sequence of the lane: every position seen so far is settled. Released only at the
-- end of the top transaction, also after a savepoint rollback and after PREPARE TRANSACTION (then without pid).
CREATE OR REPLACE FUNCTION @extschema@._lane_is_quiet(p_lane integer)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT NOT EXISTS (
        SELECT FROM pg_locks k
        WHERE k.locktype = 'relation' AND k.mode = 'RowExclusiveLock'
          AND k.relation = ('@extschema@.lane_' || p_lane)::regclass
          AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND k.pid IS DISTINCT FROM pg_backend_pid())
$function$;
COMMENT ON FUNCTION @extschema@._lane_is_quiet(integer) IS 'Internal: proof that no producer of the lane is in flight.';

-- Candidates that no cancel or update holds, up to the limit: their lock is had, and no tombstone came before it.
CREATE OR REPLACE FUNCTION @extschema@._take_unlocked(
    p_seen @extschema@._seen_rows, p_limit integer,
    OUT taken int8multirange, OUT dead int8multirange)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_is_dead boolean;
    v_one int8multirange;
    v_count integer := 0;
BEGIN
    taken := '{}';
    dead := '{}';
    FOR i IN 1 .. cardinality(p_seen.positions) LOOP
        EXIT WHEN v_count >= p_limit;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('position', p_seen.positions[i]));
        EXECUTE format('SELECT EXISTS (
                            SELECT FROM @extschema@.ready_tombstones_%s t
                            WHERE t."position" = $1)', p_seen.leaves[i])
            INTO v_is_dead USING p_seen.positions[i];
        v_one := int8multirange(int8range(p_seen.positions[i], p_seen.positions[i], '[]'));
        IF v_is_dead THEN
            dead := dead + v_one;
        ELSE
            taken := taken + v_one;
            v_count := v_count + 1;
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_unlocked(@extschema@._seen_rows, integer) IS
    'Internal: takes candidates one by one while application transactions change jobs of the lane.';

-- Sizes of some candidates once more, now with those of one leaf decompressed.
CREATE OR REPLACE FUNCTION @extschema@._measure_args(p_leaf integer, p_positions bigint[], p_sizes integer[])
RETURNS integer[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_sizes integer[];
BEGIN
    EXECUTE format('SELECT array_agg(coalesce(octet_length(r.args::text), u.bytes) ORDER BY u.o)
                    FROM unnest($1, $2) WITH ORDINALITY u (pos, bytes, o)
                    LEFT JOIN @extschema@.ready_entries_%s r ON r."position" = u.pos', p_leaf)
        INTO v_sizes USING p_positions, p_sizes;
    RETURN v_sizes;
END
$function$;
COMMENT ON FUNCTION @extschema@._measure_args(integer, bigint[], integer[]) IS
    'Internal: text sizes of args in one leaf; those of other leaves are passed through.';

-- How many of the first p_limit candidates fit into claim_max_bytes beside what the claim has from other lanes; at
-- least one job of all. What is compressed is measured in portions and only until the bound is reached: the
-- claim decompresses little that it does not return.
CREATE OR REPLACE FUNCTION @extschema@._count_fitting(
    p_seen @extschema@._seen_rows, p_limit integer, p_bytes bigint,
    OUT fitting integer, OUT bytes bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_portion constant integer := 32;
    c_row constant integer := 100;
    v_sizes integer[] := p_seen.sizes;
    v_most integer := least(p_limit, cardinality(p_seen.sizes));
    v_last integer;
    v_max bigint;
BEGIN
    fitting := p_limit;
    bytes := p_bytes + coalesce((SELECT sum(s + c_row) FROM unnest(v_sizes) s), 0);
    -- The setting cannot be smaller, so most claims need not read it.
    IF bytes <= 65536 AND -1 <> ALL (v_sizes) THEN
        RETURN;
    END IF;
    v_max := @extschema@._setting('claim_max_bytes');
    IF bytes <= v_max AND -1 <> ALL (v_sizes) THEN
        RETURN;
    END IF;
    bytes := p_bytes;
    FOR i IN 1 .. v_most LOOP
        IF v_sizes[i] < 0 THEN
            v_last := least(i + c_portion - 1, v_most);
            v_sizes[i:v_last] := @extschema@._measure_args(
                p_seen.leaves[i], p_seen.positions[i:v_last], v_sizes[i:v_last]);
        END IF;
        IF bytes + v_sizes[i] + c_row > v_max AND (bytes > 0 OR i > 1) THEN
            fitting := i - 1;
            RETURN;
        END IF;
        bytes := bytes + v_sizes[i] + c_row;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_fitting(@extschema@._seen_rows, integer, bigint) IS
    'Internal: size of a claim bounded by claim_max_bytes.';

-- The emission after this claim. Behind its cursor a position is emitted, dead, held
-- (seen, not taken) or a gap (never seen).
CREATE OR REPLACE FUNCTION @extschema@._next_emission(
    p_emission @extschema@.queue_claim_heads, p_seen @extschema@._seen_rows, p_taken int8multirange,
    p_dead int8multirange, p_tail bigint, p_snapshot pg_snapshot, p_quiet boolean)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_next @extschema@.queue_claim_heads := p_emission;
    v_seen int8multirange := @extschema@._sorted_to_set(p_seen.positions);
BEGIN
    v_next.low := p_seen.low;
    IF NOT isempty(p_taken) THEN
        v_next.cursor := greatest(p_emission.cursor, upper(p_taken) - 1);
    ELSIF p_seen.scan_full OR p_seen.probe_full THEN
        v_next.cursor := greatest(p_emission.cursor, upper(v_seen) - 1);
    ELSE
        v_next.cursor := greatest(p_emission.cursor, p_tail);
    END IF;
    v_seen := v_seen * int8multirange(int8range(NULL, v_next.cursor, '(]'));
    v_next.held := v_seen - p_taken - p_dead;
    v_next.gaps_old := p_emission.gaps_old - v_seen;
    v_next.gaps_new := p_emission.gaps_new - v_seen;
    IF p_seen.probe_full THEN
        -- Not everything was looked at, so nothing is dropped.
        v_next.held := v_next.held + (p_emission.held - p_taken - p_dead);
    ELSIF p_quiet THEN
        v_next.gaps_old := '{}';
        v_next.gaps_new := '{}';
    ELSIF coalesce(p_emission.horizon <= pg_snapshot_xmin(p_snapshot), false) THEN
        -- Every owner of gaps_old had an id below the horizon and has ended: what was not seen was rolled back.
        v_next.gaps_old := v_next.gaps_new;
        v_next.gaps_new := '{}';
        v_next.horizon := NULL;
    END IF;
    v_next.gaps_new := v_next.gaps_new + (int8multirange(int8range(p_emission.cursor, v_next.cursor, '(]')) - v_seen);
    IF isempty(v_next.gaps_old) OR v_next.horizon IS NULL THEN
        v_next.gaps_old := v_next.gaps_old + v_next.gaps_new;
        v_next.gaps_new := '{}';
        v_next.horizon := NULL;
    END IF;
    -- An id assigned now lies above those of all owners of positions seen before; one assigned earlier proves nothing.
    IF v_next.horizon IS NULL AND NOT isempty(v_next.gaps_old) AND pg_current_xact_id_if_assigned() IS NULL THEN
        v_next.horizon := pg_current_xact_id();
    END IF;
    RETURN v_next;
END
$function$;
COMMENT ON FUNCTION @extschema@._next_emission(
    @extschema@.queue_claim_heads, @extschema@._seen_rows, int8multirange, int8multirange, bigint,
    pg_snapshot, boolean) IS
    'Internal: cursor, gaps, held and horizon after a claim.';

-- A claim ends within milliseconds. Whoever comes meanwhile waits for it rather than going away empty-handed and coming
-- back later, but not for long: the holder may be a stalled client.
CREATE OR REPLACE FUNCTION @extschema@._wait_for_lane(p_lane integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '50ms'
AS $function$
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('lane', p_lane));
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._wait_for_lane(integer) IS
    'Internal: locks a lane that another claim works on; false when that takes longer than 50 ms.';

-- positions and leaves are the candidates, of which those in taken are claimed: NULL when none is. bytes is p_bytes
-- and what the claimed args add to it.
CREATE OR REPLACE FUNCTION @extschema@._claim_lane(
    p_lane integer, p_tail bigint, p_limit integer, p_bytes bigint, p_fresh boolean,
    OUT positions bigint[], OUT leaves integer[], OUT is_plain boolean, OUT taken int8multirange, OUT bytes bigint,
    OUT is_locked boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring bigint;
    v_alone boolean;
    v_emission @extschema@.queue_claim_heads;
    v_next @extschema@.queue_claim_heads;
    v_snapshot pg_snapshot;
    v_gaps int8multirange;
    v_seen @extschema@._seen_rows;
    v_limit integer;
    v_taken int8multirange := '{}'::int8multirange;
    v_dead int8multirange := '{}'::int8multirange;
    v_quiet boolean := false;
BEGIN
    bytes := p_bytes;
    is_locked := pg_try_advisory_xact_lock(@extschema@._lock_key('lane', p_lane));
    IF NOT is_locked THEN
        RETURN;
    END IF;
    v_alone := pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', p_lane));
    -- The lock keeps this slot from being pruned and planned again before our emission lies in it: in a slot that comes
    -- round once more it would hide later ones of the lane.
    LOOP
        v_ring := @extschema@._ring_cursor('queue');
        EXECUTE format('LOCK TABLE @extschema@.ready_claim_attempt_batches_%s IN ROW EXCLUSIVE MODE', v_ring % 64);
        EXIT WHEN v_ring = @extschema@._ring_cursor('queue');
    END LOOP;
    v_emission := @extschema@._newest_emission(p_lane);
    v_gaps := v_emission.gaps_old + v_emission.gaps_new;
    IF p_tail <= v_emission.cursor AND isempty(v_gaps) AND isempty(v_emission.held) THEN
        IF p_fresh THEN
            -- Without an id at entry, what was read is committed: the hint cannot lead the ledger.
            PERFORM setval(('@extschema@.lane_' || p_lane || '_hint')::regclass, v_emission.cursor);
        END IF;
        RETURN;
    END IF;
    v_snapshot := pg_current_snapshot();
    -- The proof by locks costs more than the horizon, so it is for many gaps, or for a lane that is otherwise idle.
    IF NOT isempty(v_gaps) AND NOT coalesce(v_emission.horizon <= pg_snapshot_xmin(v_snapshot), false)
       AND (p_tail <= v_emission.cursor OR (SELECT count(*) FROM unnest(v_gaps)) > 16) THEN
        v_quiet := @extschema@._lane_is_quiet(p_lane);
    END IF;
    -- pause point: probe
    v_seen := @extschema@._see_rows(v_emission, v_ring, p_limit, v_alone);
    SELECT f.fitting, f.bytes INTO v_limit, bytes FROM @extschema@._count_fitting(v_seen, p_limit, p_bytes) f;
    IF v_limit = 0 THEN
        RETURN;
    ELSIF v_alone THEN
        v_taken := @extschema@._sorted_to_set(v_seen.positions[:v_limit]);
    ELSE
        SELECT t.taken, t.dead INTO v_taken, v_dead FROM @extschema@._take_unlocked(v_seen, v_limit) t;
    END IF;
    -- pause point: write
    v_next := @extschema@._next_emission(v_emission, v_seen, v_taken, v_dead, p_tail, v_snapshot, v_quiet);
    IF v_next IS NOT DISTINCT FROM v_emission THEN
        RETURN;
    END IF;
    v_next.claim_no := v_emission.claim_no + 1;
    PERFORM @extschema@._append_emission((v_ring % 64)::integer, v_next);
    taken := nullif(v_taken, '{}');
    positions := v_seen.positions;
    leaves := v_seen.leaves;
    is_plain := v_seen.is_plain;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_lane(integer, bigint, integer, bigint, boolean) IS
    'Internal: takes up to so many jobs of one lane; nothing when another claim holds the lane.';

-- Claimed positions of a leaf in groups that share a receipt: one per deadline, and one per job of the kinds in
-- p_separate, so that jobs which complete in transactions of their own never wait for one another's batch lock.
CREATE OR REPLACE FUNCTION @extschema@._receipt_groups(
    p_leaf integer, p_positions bigint[], p_is_plain boolean, p_deadline_seconds numeric, p_separate text[])
RETURNS TABLE (positions bigint[], seconds numeric, is_plain boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    IF p_is_plain AND p_separate = '{}' THEN
        RETURN QUERY SELECT p_positions, p_deadline_seconds, true WHERE p_positions <> '{}';
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT array_agg(g."position" ORDER BY g."position"), g.seconds, bool_and(g.is_plain)
        FROM (SELECT r."position", r.job_id IS NULL AND r.ext IS NULL AS is_plain,
                     coalesce((r.ext ->> 'deadline_seconds')::numeric, $2) AS seconds,
                     CASE WHEN r.kind = ANY ($3) THEN r."position" END AS separate
              FROM unnest($1) s (s), @extschema@.ready_entries_%s r
              WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s)) g
        GROUP BY g.seconds, g.separate ORDER BY min(g."position")
        $query$, p_leaf) USING @extschema@._sorted_to_set(p_positions), p_deadline_seconds, p_separate;
END
$function$;
COMMENT ON FUNCTION @extschema@._receipt_groups(integer, bigint[], boolean, numeric, text[]) IS
    'Internal: positions of a leaf that share a receipt.';

CREATE OR REPLACE FUNCTION @extschema@._issue_receipts(
    p_leaf integer, p_queue text, p_priority integer, p_positions bigint[], p_is_plain boolean, p_owner uuid,
    p_deadline_seconds numeric, p_separate text[], p_now timestamptz)
RETURNS SETOF @extschema@.claimed_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_slot integer := @extschema@._ring_cursor('claim') % 64;
    v_group record;
    v_batch bigint;
    v_deadline timestamptz;
    v_positions int8multirange;
    v_values text;
BEGIN
    -- pause point: receipt
    FOR v_group IN
        SELECT g.*
        FROM @extschema@._receipt_groups(p_leaf, p_positions, p_is_plain, p_deadline_seconds, p_separate) g
    LOOP
        v_batch := nextval('@extschema@.claim_batch_ids');
        v_deadline := p_now + make_interval(secs => v_group.seconds::double precision);
        v_positions := @extschema@._sorted_to_set(v_group.positions);
        INSERT INTO @extschema@.lease_claim_batches
            (batch_id, claimed_at, deadline_at, owner, slot, ready_slot, is_plain, positions)
        VALUES (v_batch, p_now, v_deadline, p_owner, v_slot, p_leaf, v_group.is_plain, v_positions);
        -- First attempts of jobs without options need no look into ext; planning that costs more than running it.
        v_values := CASE WHEN v_group.is_plain THEN
            $values$r."position", r.kind, $2, r.args, $3, 1, 25, r.run_at, r.run_at,
                NULL::text[], NULL::jsonb, NULL::jsonb, NULL::text, $4, 1::bigint, $5, $6, r."position"$values$
        ELSE
            $values$coalesce(r.job_id, r."position"), r.kind, $2, r.args, $3,
                coalesce((r.ext ->> 'attempt')::integer, 0) + 1, coalesce((r.ext ->> 'max_attempts')::integer, 25),
                r.run_at, coalesce((r.ext ->> 'created_at')::timestamptz, r.run_at),
                CASE WHEN r.ext ? 'tags' THEN ARRAY(SELECT jsonb_array_elements_text(r.ext -> 'tags')) END,
                r.ext -> 'metadata', r.ext -> 'progress', r.ext ->> 'trace', $4,
                coalesce((r.ext ->> 'run_lease')::bigint, 0) + 1, $5, $6, r."position"$values$
        END;
        -- By ranges: a list of positions costs a descent of the index for each before PostgreSQL 17.
        RETURN QUERY EXECUTE format('SELECT %s
                                     FROM unnest($1) s (s), @extschema@.ready_entries_%s r
                                     WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s)', v_values, p_leaf)
            USING v_positions, p_queue, p_priority, v_deadline, v_slot, v_batch;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._issue_receipts(
    integer, text, integer, bigint[], boolean, uuid, numeric, text[], timestamptz) IS
    'Internal: writes the receipts of claimed positions of one leaf and returns the jobs.';

CREATE OR REPLACE FUNCTION @extschema@._claim_ready(
    p_queue text, p_limit integer, p_owner uuid, p_deadline_seconds numeric, p_separate text[],
    p_wake_others boolean)
RETURNS SETOF @extschema@.claimed_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_fresh boolean := pg_current_xact_id_if_assigned() IS NULL;
    v_now timestamptz := clock_timestamp();
    v_meta @extschema@.queue_meta;
    v_lane record;
    v_got record;
    v_rows bigint;
    v_bytes bigint := 0;
    v_left integer := p_limit;
    v_contended integer;
    v_is_holder boolean := false;
BEGIN
    PERFORM @extschema@._require_read_committed();
    v_meta := @extschema@._queue_options(p_queue);
    IF v_meta.paused_at IS NOT NULL THEN
        RETURN;
    END IF;
    -- A client that vanishes inside this transaction must not hold the lane for long.
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    FOR v_round IN 1 .. 2 LOOP
        FOR v_lane IN SELECT l.* FROM @extschema@._choose_lanes(p_queue, v_meta.aging_seconds, v_now) l LOOP
            v_got := @extschema@._claim_lane(v_lane.lane_id, v_lane.tail, v_left, v_bytes, v_fresh);
            v_bytes := v_got.bytes;
            IF v_got.is_locked THEN
                v_is_holder := true;
            ELSE
                v_contended := coalesce(v_contended, v_lane.lane_id);
            END IF;
            CONTINUE WHEN v_got.taken IS NULL;
            -- A late row lies in another leaf than its neighbours, but is handed out in its place.
            RETURN QUERY
            SELECT c.*
            FROM (SELECT u.leaf, array_agg(u."position" ORDER BY u."position") AS positions
                  FROM unnest(v_got.positions, v_got.leaves) u ("position", leaf)
                  WHERE v_got.taken @> u."position"
                  GROUP BY u.leaf) l,
                 LATERAL @extschema@._issue_receipts(
                     l.leaf, p_queue, v_lane.priority, l.positions, v_got.is_plain, p_owner,
                     coalesce(p_deadline_seconds, v_meta.deadline_seconds), p_separate, v_now) c
            ORDER BY c."position";
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            v_left := v_left - v_rows;
            EXIT WHEN v_left <= 0;
        END LOOP;
        -- Who holds a lane does not wait for another one: two claims could wait for each other.
        EXIT WHEN v_round = 2 OR v_contended IS NULL OR v_is_holder OR NOT @extschema@._wait_for_lane(v_contended);
    END LOOP;
    IF v_left < p_limit THEN
        PERFORM @extschema@._note_owner(p_owner, v_now);
        IF v_left <= 0 AND p_wake_others THEN
            PERFORM @extschema@._ring_doorbell(p_queue);
        END IF;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_ready(text, integer, uuid, numeric, text[], boolean) IS
    'Internal: claims jobs of a queue, lane after lane, best first.';

-- Why a claim found nothing. With p_arm the flag is written before the positions are read, so that a producer
-- which takes its position later sees the flag.
CREATE OR REPLACE FUNCTION @extschema@._claim_status(p_queue text, p_arm boolean)
RETURNS @extschema@.claim_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
    v_sleep_ms integer := @extschema@._setting('idle_poll_ms');
    v_channel text := CASE WHEN v_meta.notify THEN @extschema@._channel(p_queue) END;
    v_lane record;
    v_emission @extschema@.queue_claim_heads;
    v_is_free boolean;
    v_reason text := 'idle';
BEGIN
    IF v_meta.paused_at IS NOT NULL THEN
        RETURN ROW('paused', v_channel, v_sleep_ms)::@extschema@.claim_status;
    END IF;
    IF p_arm AND v_meta.notify THEN
        PERFORM @extschema@._arm_doorbell(
            p_queue, clock_timestamp() + make_interval(secs => v_sleep_ms / 1000.0 + 0.5));
    END IF;
    FOR v_lane IN SELECT w.lane_id, w.tail FROM @extschema@._waiting_lanes(p_queue) w LOOP
        v_emission := @extschema@._newest_emission(v_lane.lane_id);
        IF v_lane.tail > v_emission.cursor THEN
            -- Positions that no claim has looked at, unless one does so just now.
            -- The block ends by an exception, so that the lock vanishes and the caller's transaction stops no claim.
            BEGIN
                v_is_free := pg_try_advisory_xact_lock_shared(@extschema@._lock_key('lane', v_lane.lane_id));
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            EXCEPTION WHEN SQLSTATE 'JQ000' THEN
                NULL;
            END;
            IF v_is_free THEN
                RETURN ROW('ready', v_channel, 0)::@extschema@.claim_status;
            END IF;
            v_reason := 'contended';
        ELSIF v_reason = 'idle'
              AND NOT isempty(v_emission.gaps_old + v_emission.gaps_new + v_emission.held) THEN
            v_reason := 'in_flight';
        END IF;
    END LOOP;
    RETURN ROW(v_reason, v_channel, CASE v_reason WHEN 'idle' THEN v_sleep_ms ELSE 5 END)::@extschema@.claim_status;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_status(text, boolean) IS
    'Internal: why a claim found nothing, and how long to sleep.';
-- Where a job goes when its attempt ends in anything but plain success. The caller has closed, or is about to close,
-- the receipt in the same transaction. p_job carries the attempt and run_lease of the attempt that ends.

CREATE OR REPLACE FUNCTION @extschema@._ended_job(p_job @extschema@._job, p_progress jsonb)
RETURNS @extschema@._job
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.ext := coalesce(v_job.ext, '{}');
    IF NOT v_job.ext ? 'created_at' THEN
        -- A first life was inserted when it became ready.
        v_job.ext := v_job.ext || jsonb_build_object('created_at', v_job.run_at);
    END IF;
    IF p_progress IS NOT NULL THEN
        v_job.ext := v_job.ext || jsonb_build_object('progress', p_progress);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_job(@extschema@._job, jsonb) IS
    'Internal: the job with what must survive its present place.';

-- Failed for good: dead letter where the queue has them, else terminal history.
CREATE OR REPLACE FUNCTION @extschema@._fail_job(
    p_job @extschema@._job, p_ready_slot integer, p_position bigint, p_attempted_at timestamptz,
    p_reason text, p_now timestamptz)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce((@extschema@._queue_options(p_job.queue)).dlq, @extschema@._setting('dlq_default') = 1) THEN
        PERFORM @extschema@._dead_letter(p_job, p_reason, p_now);
        RETURN 'dead_lettered'::@extschema@.attempt_outcome;
    END IF;
    PERFORM @extschema@._append_done(p_job, 'failed', p_ready_slot, p_position, p_attempted_at, p_now, p_reason, NULL);
    RETURN 'failed'::@extschema@.attempt_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._fail_job(@extschema@._job, integer, bigint, timestamptz, text, timestamptz) IS
    'Internal: ends a job failed, on hold or in history.';

-- What needs its unique key first, or a lane that cannot be had without waiting, is left to promotion.
CREATE OR REPLACE FUNCTION @extschema@._requeue_job(p_job @extschema@._job, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    IF v_job.ext -> 'unique' ? 'waiting'
       OR NOT EXISTS (SELECT FROM @extschema@._append_ready(ARRAY[v_job], true)) THEN
        v_job.run_at := p_now;
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._requeue_job(@extschema@._job, timestamptz) IS
    'Internal: puts a job at the end of its lane, or defers it, due now.';

CREATE OR REPLACE FUNCTION @extschema@._release_job(p_job @extschema@._job, p_reason text, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_releases integer := coalesce((v_job.ext ->> 'releases')::integer, 0) + 1;
BEGIN
    v_job.attempt := v_job.attempt - 1;
    IF p_reason = 'unknown_kind' THEN
        -- No worker here knows the kind: come back later and later, at no cost, until one does. Where another one on
        -- the queue does, it is a matter of whose claim comes first.
        IF @extschema@._is_served(v_job.queue, v_job.kind, p_now) THEN
            v_releases := 1;
        END IF;
        v_job.ext := v_job.ext || jsonb_build_object('releases', v_releases);
        v_job.run_at := p_now + make_interval(secs => least(power(2, least(v_releases, 7) - 1), 60));
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    ELSE
        PERFORM @extschema@._requeue_job(v_job, p_now);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._release_job(@extschema@._job, text, timestamptz) IS
    'Internal: hands a job back without an attempt.';

-- p_outcome is what the worker or rescue wants; the answer is what became of it.
CREATE OR REPLACE FUNCTION @extschema@._move_attempt(
    p_job @extschema@._job, p_outcome @extschema@.attempt_outcome, p_ready_slot integer, p_position bigint,
    p_attempted_at timestamptz, p_delay_seconds numeric, p_error jsonb, p_reason text, p_result jsonb,
    p_now timestamptz)
RETURNS @extschema@.attempt_outcome
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_outcome @extschema@.attempt_outcome;
    v_kept @extschema@._kept_job;
    v_holder bigint;
BEGIN
    IF p_job.ext ? 'unique' THEN
        v_kept := @extschema@._keep_key(p_job, p_outcome, p_reason, p_now);
        v_job := v_kept.job;
        v_holder := v_kept.lost_to;
    END IF;
    IF p_error IS NOT NULL AND p_outcome IN ('retried', 'rescued', 'failed', 'cancelled') THEN
        v_job.ext := v_job.ext || jsonb_build_object(
            'errors', @extschema@._append_error(v_job.ext -> 'errors', p_error, v_job.attempt, p_now));
    END IF;
    IF v_holder IS NOT NULL THEN
        PERFORM @extschema@._append_done(v_job, 'cancelled', p_ready_slot, p_position, p_attempted_at, p_now,
            @extschema@._lost_key_reason(v_holder), NULL);
        RETURN CASE p_outcome WHEN 'rescued' THEN p_outcome ELSE 'cancelled' END;
    END IF;
    CASE p_outcome
    WHEN 'completed' THEN
        PERFORM @extschema@._append_done(
            v_job, 'completed', p_ready_slot, p_position, p_attempted_at, p_now, NULL, p_result);
    WHEN 'retried', 'rescued' THEN
        IF v_job.attempt >= coalesce((v_job.ext ->> 'max_attempts')::integer, 25) THEN
            v_outcome := @extschema@._fail_job(v_job, p_ready_slot, p_position, p_attempted_at,
                CASE p_outcome WHEN 'rescued' THEN 'rescued_out' ELSE 'max_attempts_exhausted' END, p_now);
            RETURN CASE p_outcome WHEN 'rescued' THEN 'rescued' ELSE v_outcome END;
        END IF;
        v_job.ext := v_job.ext - 'releases';
        v_job.run_at := p_now + make_interval(secs => coalesce(p_delay_seconds::double precision,
            @extschema@._backoff_seconds(v_job.attempt, v_job.ext -> 'backoff', random())));
        PERFORM @extschema@._defer(ARRAY[v_job], 'retryable');
    WHEN 'snoozed' THEN
        v_job.attempt := v_job.attempt - 1;
        v_job.run_at := p_now + make_interval(secs => coalesce(p_delay_seconds, 0)::double precision);
        PERFORM @extschema@._defer(ARRAY[v_job], 'scheduled');
    WHEN 'cancelled' THEN
        PERFORM @extschema@._append_done(
            v_job, 'cancelled', p_ready_slot, p_position, p_attempted_at, p_now, p_reason, NULL);
    WHEN 'failed' THEN
        RETURN @extschema@._fail_job(
            v_job, p_ready_slot, p_position, p_attempted_at, coalesce(p_reason, 'terminal_error'), p_now);
    WHEN 'released' THEN
        PERFORM @extschema@._release_job(v_job, p_reason, p_now);
    END CASE;
    RETURN p_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._move_attempt(
    @extschema@._job, @extschema@.attempt_outcome, integer, bigint, timestamptz, numeric, jsonb, text, jsonb,
    timestamptz) IS
    'Internal: puts the job of an ending attempt where its outcome sends it.';
-- Progress of running attempts: the only mutable state of an attempt, paid for by those that use it.

CREATE OR REPLACE FUNCTION @extschema@._set_progress(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint, p_progress jsonb,
    p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_job @extschema@._job;
    v_lease @extschema@.leases;
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM pg_advisory_xact_lock_shared(@extschema@._lock_key('batch', p_batch));
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    IF coalesce(v_batch.positions @> p_position, false) AND NOT v_batch.closed @> p_position THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
        v_job.run_lease := v_job.run_lease + 1;
    ELSE
        v_lease := @extschema@._find_lease(p_batch, p_position);
        IF v_lease.outcome IS NULL THEN
            v_job := @extschema@._lease_job(v_lease);
        END IF;
    END IF;
    IF v_job.job_id IS DISTINCT FROM p_job_id OR v_job.run_lease IS DISTINCT FROM p_run_lease THEN
        RETURN false;
    END IF;
    INSERT INTO @extschema@.attempt_state (batch_id, "position", progress, updated_at)
    VALUES (p_batch, p_position, p_progress, p_now)
    ON CONFLICT (batch_id, "position") DO UPDATE SET progress = excluded.progress, updated_at = excluded.updated_at;
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._set_progress(bigint, bigint, integer, bigint, bigint, jsonb, timestamptz) IS
    'Internal: stores the progress of an open attempt; false when it is closed.';

CREATE OR REPLACE FUNCTION @extschema@._progress_of(p_batch bigint, p_position bigint)
RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
RETURN (SELECT s.progress FROM @extschema@.attempt_state s
        WHERE s.batch_id = p_batch AND s."position" = p_position);
COMMENT ON FUNCTION @extschema@._progress_of(bigint, bigint) IS 'Internal: what a running attempt reported last.';

-- Removes the progress of ending attempts and returns it by position. Costs one look at
-- an empty file when nobody uses progress.
CREATE OR REPLACE FUNCTION @extschema@._take_progress(p_batch bigint, p_positions int8multirange)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_progress jsonb;
BEGIN
    IF pg_relation_size('@extschema@.attempt_state'::regclass) = 0 THEN
        RETURN NULL;
    END IF;
    WITH taken AS (
        DELETE FROM @extschema@.attempt_state s WHERE s.batch_id = p_batch AND p_positions @> s."position"
        RETURNING s."position", s.progress)
    SELECT jsonb_object_agg(t."position", t.progress) INTO v_progress FROM taken t;
    RETURN v_progress;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_progress(bigint, int8multirange) IS
    'Internal: removes and returns the progress of positions of a batch.';
-- The hot path of finishing: plain successes of one batch are one closure row and one completion row.

CREATE OR REPLACE FUNCTION @extschema@._complete_attempts(
    p_instance uuid, p_slot integer, p_batch bigint, p_positions bigint[], p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_set int8multirange := @extschema@._to_set(p_positions);
    v_ok int8multirange;
BEGIN
    PERFORM @extschema@._require_read_committed();
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', p_batch)) THEN
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, 'busy', NULL::text FROM unnest(p_positions);
        RETURN;
    END IF;
    -- pause point: finish
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    IF v_batch.positions IS NULL OR v_batch.owner <> p_instance THEN
        RETURN QUERY
        SELECT l.*
        FROM unnest(p_positions) WITH ORDINALITY p (pos, o),
             LATERAL @extschema@._complete_lease(p_instance, p_batch, p.pos, p_now) l
        ORDER BY p.o;
        RETURN;
    END IF;
    v_ok := v_set * v_batch.positions - v_batch.closed;
    IF NOT isempty(v_ok) THEN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_ok, NULL, p_now);
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_ok, v_batch.claimed_at, p_now);
        PERFORM @extschema@._take_progress(p_batch, v_ok);
    END IF;
    RETURN QUERY
    SELECT a.*
    FROM @extschema@._completion_answers(
        p_instance, p_slot, p_batch, p_positions, v_ok, v_batch.is_plain, v_batch.ready_slot, v_batch.positions,
        p_now) a;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_attempts(uuid, integer, bigint, bigint[], timestamptz) IS
    'Internal: completes positions of one batch.';

CREATE OR REPLACE FUNCTION @extschema@._completion_answers(
    p_instance uuid, p_slot integer, p_batch bigint, p_positions bigint[], p_ok int8multirange, p_is_plain boolean,
    p_ready_slot integer, p_claimed int8multirange, p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_is_plain AND @extschema@._to_set(p_positions) = p_ok THEN
        RETURN QUERY SELECT p, 1::bigint, 'done', NULL::text FROM unnest(p_positions) p;
        RETURN;
    END IF;
    RETURN QUERY
    SELECT CASE WHEN p.outcome = 'moved' THEN (p.answer).job_id
                WHEN p_is_plain AND p_claimed @> p.pos THEN p.pos ELSE (r.job).job_id END,
           CASE WHEN p.outcome = 'moved' THEN (p.answer).run_lease
                WHEN p_is_plain AND p_claimed @> p.pos THEN 1 ELSE (r.job).run_lease + 1 END,
           CASE WHEN p.outcome = 'moved' THEN (p.answer).result
                WHEN p_ok @> p.pos THEN 'done'
                WHEN p.outcome = 'completed' THEN 'already_done' ELSE 'stale' END,
           NULL::text
    FROM (SELECT c.pos, c.o, c.outcome,
                 CASE c.outcome WHEN 'moved'
                                THEN @extschema@._complete_lease(p_instance, p_batch, c.pos, p_now) END AS answer
          FROM (SELECT u.pos, u.o,
                       CASE WHEN p_claimed @> u.pos AND NOT p_ok @> u.pos
                            THEN @extschema@._closure_outcome(p_slot, p_batch, u.pos) END AS outcome
                FROM unnest(p_positions) WITH ORDINALITY u (pos, o) OFFSET 0) c
          -- Evaluated once, whatever is asked of the answer.
          OFFSET 0) p
    LEFT JOIN @extschema@._read_ready(p_ready_slot, CASE WHEN p_is_plain THEN '{}'
        ELSE ARRAY(SELECT DISTINCT d FROM unnest(p_positions) d) END) r
        ON r."position" = p.pos
    ORDER BY p.o;
END
$function$;
COMMENT ON FUNCTION @extschema@._completion_answers(
    uuid, integer, bigint, bigint[], int8multirange, boolean, integer, int8multirange, timestamptz) IS
    'Internal: one answer per position of a completion.';

-- Success inside the caller's own transaction, whatever its isolation: a closed attempt raises, one that
-- this snapshot cannot judge raises 40001.
CREATE OR REPLACE FUNCTION @extschema@._complete_job(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint, p_result jsonb,
    p_now timestamptz)
RETURNS @extschema@.finalization_receipt
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_repeat constant text := 'Repeat the transaction in a fresh snapshot.';
    v_batch record;
    v_job @extschema@._job;
    v_one int8multirange;
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', p_batch));
    v_batch := @extschema@._read_batch(p_slot, p_batch);
    -- A claim that this snapshot can see, by its emission, and whose batch is gone: the attempt has ended for good.
    IF v_batch.positions IS NULL AND NOT @extschema@._is_read_committed()
       AND @extschema@._is_unclaimed(
           @extschema@._emission_in_snapshot(@extschema@._lane_of(p_position)), p_position) THEN
        PERFORM @extschema@._refuse('40001', format('this snapshot cannot see the claim of job %s', p_job_id),
            c_repeat);
    END IF;
    IF v_batch.positions @> p_position THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r;
    END IF;
    IF NOT coalesce(v_batch.positions @> p_position, false) OR v_batch.closed @> p_position
       OR v_job.job_id IS DISTINCT FROM p_job_id OR v_job.run_lease + 1 IS DISTINCT FROM p_run_lease THEN
        IF @extschema@._complete_leased_job(p_job_id, p_run_lease, p_batch, p_position, p_result, p_now) THEN
            RETURN ROW(p_job_id, p_run_lease, 'completed', p_slot, p_batch, p_position,
                p_now)::@extschema@.finalization_receipt;
        END IF;
        PERFORM @extschema@._refuse('JQ001',
            format('attempt with lease %s of job %s is no longer current', p_run_lease, p_job_id),
            'Drop this result and roll back; another attempt owns the job, or it has ended.');
    END IF;
    v_one := int8multirange(int8range(p_position, p_position, '[]'));
    BEGIN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_one, NULL, p_now);
    EXCEPTION WHEN unique_violation THEN
        PERFORM @extschema@._refuse('40001', format('this snapshot is older than a change of job %s', p_job_id),
            c_repeat);
    END;
    PERFORM @extschema@._take_progress(p_batch, v_one);
    IF p_result IS NOT NULL AND (v_job.ext -> 'keep_result') = 'true' THEN
        v_job.attempt := v_job.attempt + 1;
        v_job.run_lease := p_run_lease;
        PERFORM @extschema@._append_done(
            v_job, 'completed', v_batch.ready_slot, p_position, v_batch.claimed_at, p_now, NULL, p_result);
    ELSE
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_one, v_batch.claimed_at, p_now);
    END IF;
    RETURN ROW(p_job_id, p_run_lease, 'completed', p_slot, p_batch, p_position,
        p_now)::@extschema@.finalization_receipt;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_job(bigint, bigint, integer, bigint, bigint, jsonb, timestamptz) IS
    'Internal: completes one attempt in the caller''s transaction; '
    'JQ001 when stale, 40001 when the snapshot is too old.';
-- Finishing with mixed outcomes: one call, one lock per batch, by try and in
-- ascending order, so that nobody waits here.

-- A number given as a JSON number or string; NULL when it is neither.
CREATE OR REPLACE FUNCTION @extschema@._json_bigint(p_item jsonb, p_key text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE WHEN p_item ->> p_key ~ '^[0-9]{1,19}$'
            THEN CASE WHEN (p_item ->> p_key)::numeric <= 9223372036854775807 THEN (p_item ->> p_key)::bigint END END;
COMMENT ON FUNCTION @extschema@._json_bigint(jsonb, text) IS 'Internal: a non-negative integer from a JSON object.';

CREATE OR REPLACE FUNCTION @extschema@._parse_finish_item(p_item jsonb, p_ordinal bigint)
RETURNS @extschema@._finish_item
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_item @extschema@._finish_item;
    v_key text;
BEGIN
    v_item.ordinal := p_ordinal;
    IF jsonb_typeof(p_item) <> 'object' THEN
        v_item.fault := 'item must be a JSON object';
        RETURN v_item;
    END IF;
    FOREACH v_key IN ARRAY '{job_id,run_lease,claim_slot,batch_id,position}'::text[] LOOP
        IF @extschema@._json_bigint(p_item, v_key) IS NULL THEN
            v_item.fault := format('field "%s" must be a non-negative integer', v_key);
        END IF;
    END LOOP;
    v_item.job_id := @extschema@._json_bigint(p_item, 'job_id');
    v_item.run_lease := @extschema@._json_bigint(p_item, 'run_lease');
    v_item.claim_slot := least(@extschema@._json_bigint(p_item, 'claim_slot'), 99);
    v_item.batch_id := @extschema@._json_bigint(p_item, 'batch_id');
    v_item."position" := @extschema@._json_bigint(p_item, 'position');
    v_item.outcome := CASE p_item ->> 'outcome'
        WHEN 'completed' THEN 'completed'
        WHEN 'retry' THEN 'retried'
        WHEN 'snooze' THEN 'snoozed'
        WHEN 'cancel' THEN 'cancelled'
        WHEN 'fail' THEN 'failed'
        WHEN 'released' THEN 'released' END::@extschema@.attempt_outcome;
    v_item.result := nullif(p_item -> 'result', 'null');
    v_item.error := nullif(p_item -> 'error', 'null');
    v_item.reason := left(p_item ->> 'reason', 2000);
    IF v_item.fault IS NOT NULL THEN
        RETURN v_item;
    ELSIF v_item.outcome IS NULL THEN
        v_item.fault := 'field "outcome" must be completed, retry, snooze, cancel, fail or released';
    ELSIF coalesce(p_item -> 'delay_seconds', 'null') <> 'null' THEN
        IF jsonb_typeof(p_item -> 'delay_seconds') <> 'number'
           OR (p_item ->> 'delay_seconds')::numeric NOT BETWEEN 0 AND 31536000 THEN
            v_item.fault := 'field "delay_seconds" must be a number from 0 to 31536000';
        ELSE
            v_item.delay_seconds := round((p_item ->> 'delay_seconds')::numeric, 9);
        END IF;
    ELSIF v_item.outcome = 'snoozed' THEN
        v_item.fault := 'a snooze needs "delay_seconds"';
    END IF;
    IF NOT @extschema@._is_small(v_item.result) THEN
        IF octet_length(v_item.result::text) > @extschema@._setting('args_max_bytes') THEN
            v_item.fault := format('field "result" has more than %s bytes', @extschema@._setting('args_max_bytes'));
        ELSIF @extschema@._is_too_deep(v_item.result) THEN
            v_item.fault := 'field "result" is nested more than 256 levels deep';
        END IF;
    END IF;
    RETURN v_item;
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_finish_item(jsonb, bigint) IS 'Internal: one item of finish_jobs, checked.';

-- The items of one batch. The batch lock is held.
CREATE OR REPLACE FUNCTION @extschema@._finish_batch(
    p_instance uuid, p_slot integer, p_batch bigint, p_items @extschema@._finish_item[], p_now timestamptz)
RETURNS SETOF @extschema@._finish_answer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_item @extschema@._finish_item;
    v_body record;
    v_one int8multirange;
    v_compact int8multirange := '{}'::int8multirange;
    v_progress jsonb;
    v_outcome @extschema@.attempt_outcome;
    v_answer text;
BEGIN
    IF v_batch.positions IS NULL OR v_batch.owner <> p_instance THEN
        RETURN QUERY
        SELECT i.ordinal, i.job_id, i.run_lease, @extschema@._finish_lease(p_instance, i, p_now), NULL::text
        FROM unnest(p_items) i;
        RETURN;
    END IF;
    FOREACH v_item IN ARRAY p_items LOOP
        v_outcome := CASE WHEN v_compact @> v_item."position" THEN 'completed'
                          WHEN v_batch.closed @> v_item."position"
                          THEN @extschema@._closure_outcome(p_slot, p_batch, v_item."position") END;
        -- The body of a moved attempt may be pruned, so its lease says whose it is.
        SELECT r.job AS job INTO v_body FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[v_item."position"]) r;
        v_answer := CASE
            WHEN v_outcome = 'moved' THEN @extschema@._finish_lease(p_instance, v_item, p_now)
            WHEN NOT v_batch.positions @> v_item."position" OR (v_body.job).job_id IS DISTINCT FROM v_item.job_id
                 OR (v_body.job).run_lease + 1 IS DISTINCT FROM v_item.run_lease THEN 'stale'
            WHEN v_outcome IS NOT NULL THEN @extschema@._repeat_answer(v_outcome, v_item.outcome)
            ELSE 'done' END;
        RETURN NEXT ROW(v_item.ordinal, v_item.job_id, v_item.run_lease, v_answer, NULL)::@extschema@._finish_answer;
        CONTINUE WHEN v_answer <> 'done' OR v_outcome IS NOT NULL;
        v_one := int8multirange(int8range(v_item."position", v_item."position", '[]'));
        v_batch.closed := v_batch.closed + v_one;
        IF v_item.outcome = 'completed'
           AND (v_item.result IS NULL OR ((v_body.job).ext -> 'keep_result') IS DISTINCT FROM 'true') THEN
            v_compact := v_compact + v_one;
        ELSE
            v_progress := @extschema@._take_progress(p_batch, v_one);
            v_outcome := @extschema@._move_attempt(
                @extschema@._ended_job(
                    @extschema@._next_attempt(v_body.job), v_progress -> v_item."position"::text),
                v_item.outcome, v_batch.ready_slot, v_item."position", v_batch.claimed_at, v_item.delay_seconds,
                v_item.error, v_item.reason, v_item.result, p_now);
            PERFORM @extschema@._append_closure(
                p_slot, p_batch, v_batch.next_no, v_outcome, v_one, v_item.reason, p_now);
            v_batch.next_no := v_batch.next_no + 1;
        END IF;
    END LOOP;
    IF NOT isempty(v_compact) THEN
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'completed', v_compact, NULL, p_now);
        PERFORM @extschema@._append_completions(v_batch.ready_slot, p_batch, v_compact, v_batch.claimed_at, p_now);
        PERFORM @extschema@._take_progress(p_batch, v_compact);
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_batch(uuid, integer, bigint, @extschema@._finish_item[], timestamptz) IS
    'Internal: finishes attempts of one batch.';

CREATE OR REPLACE FUNCTION @extschema@._next_attempt(p_job @extschema@._job)
RETURNS @extschema@._job
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.attempt := v_job.attempt + 1;
    v_job.run_lease := v_job.run_lease + 1;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._next_attempt(@extschema@._job) IS 'Internal: a ready job as its claim numbers it.';

-- The same outcome again, by the same lease, is an answer that got lost; anything else is stale.
CREATE OR REPLACE FUNCTION @extschema@._repeat_answer(
    p_was @extschema@.attempt_outcome, p_wanted @extschema@.attempt_outcome)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_was = p_wanted OR (p_was IN ('failed', 'dead_lettered') AND p_wanted IN ('failed', 'retried'))
            THEN 'already_done' ELSE 'stale' END;
COMMENT ON FUNCTION @extschema@._repeat_answer(@extschema@.attempt_outcome, @extschema@.attempt_outcome) IS
    'Internal: answer to a finish of a closed attempt.';

-- One item that cannot be stored must not hold up its batch: the items are halved until it stands alone.
CREATE OR REPLACE FUNCTION @extschema@._finish_batch_isolated(
    p_instance uuid, p_slot integer, p_batch bigint, p_items @extschema@._finish_item[], p_now timestamptz)
RETURNS SETOF @extschema@._finish_answer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_half integer := cardinality(p_items) / 2;
    v_answers @extschema@._finish_answer[];
    v_message text;
BEGIN
    BEGIN
        v_answers := ARRAY(
            SELECT ROW(a.*)::@extschema@._finish_answer
            FROM @extschema@._finish_batch(p_instance, p_slot, p_batch, p_items, p_now) a);
        RETURN QUERY SELECT a.* FROM unnest(v_answers) a;
        RETURN;
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN QUERY
        SELECT a.*
        FROM @extschema@._finish_batch_isolated(p_instance, p_slot, p_batch, p_items[:v_half], p_now) a;
        RETURN QUERY
        SELECT a.*
        FROM @extschema@._finish_batch_isolated(p_instance, p_slot, p_batch, p_items[v_half + 1:], p_now) a;
    ELSE
        RETURN NEXT ROW(p_items[1].ordinal, p_items[1].job_id, p_items[1].run_lease, 'invalid',
            v_message)::@extschema@._finish_answer;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_batch_isolated(
    uuid, integer, bigint, @extschema@._finish_item[], timestamptz) IS
    'Internal: finishes attempts of one batch; an item that fails is answered invalid and the others are done.';

CREATE OR REPLACE FUNCTION @extschema@._finish_attempts(p_instance uuid, p_outcomes jsonb, p_now timestamptz)
RETURNS SETOF @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_items @extschema@._finish_item[];
    v_answers @extschema@._finish_answer[] := '{}'::@extschema@._finish_answer[];
    v_group record;
    v_batches integer := 0;
BEGIN
    PERFORM @extschema@._require_read_committed();
    SELECT array_agg(@extschema@._parse_finish_item(o.item, o.n) ORDER BY o.n) INTO v_items
    FROM jsonb_array_elements(p_outcomes) WITH ORDINALITY o (item, n);
    FOR v_group IN SELECT i.batch_id, i.claim_slot, array_agg(i ORDER BY i.ordinal) AS items FROM unnest(v_items) i
                   WHERE i.fault IS NULL GROUP BY i.batch_id, i.claim_slot ORDER BY i.batch_id, i.claim_slot LOOP
        v_batches := v_batches + 1;
        IF v_batches > 64 OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_group.batch_id)) THEN
            v_answers := v_answers || ARRAY(
                SELECT ROW(i.ordinal, i.job_id, i.run_lease, 'busy', NULL)::@extschema@._finish_answer
                FROM unnest(v_group.items) i);
            CONTINUE;
        END IF;
        -- pause point: finish
        v_answers := v_answers || ARRAY(
            SELECT ROW(a.*)::@extschema@._finish_answer
            FROM @extschema@._finish_batch_isolated(
                p_instance, v_group.claim_slot, v_group.batch_id, v_group.items, p_now) a);
    END LOOP;
    RETURN QUERY
    SELECT i.job_id, i.run_lease, coalesce(a.result, 'invalid'), coalesce(i.fault, a.reason)
    FROM unnest(v_items) i LEFT JOIN unnest(v_answers) a ON a.ordinal = i.ordinal
    ORDER BY i.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_attempts(uuid, jsonb, timestamptz) IS
    'Internal: finishes many attempts with mixed outcomes, each answered by itself.';

-- What became of an attempt, from its closure, or from terminal history when the receipt is gone.
CREATE OR REPLACE FUNCTION @extschema@._attempt_status(
    p_job_id bigint, p_run_lease bigint, p_slot integer, p_batch bigint, p_position bigint)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_row record;
    v_state @extschema@.job_state;
    v_outcome @extschema@.attempt_outcome;
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.job_id = p_job_id AND v_lease.run_lease = p_run_lease THEN
        RETURN coalesce(v_lease.outcome::text, 'open');
    ELSIF v_batch.positions @> p_position AND EXISTS (
        SELECT FROM @extschema@._read_ready(v_batch.ready_slot, ARRAY[p_position]) r
        WHERE (r.job).job_id = p_job_id AND (r.job).run_lease + 1 = p_run_lease) THEN
        v_outcome := @extschema@._closure_outcome(p_slot, p_batch, p_position);
        -- A moved one without a lease has ended, and history alone may know how.
        IF v_outcome IS DISTINCT FROM 'moved' THEN
            RETURN coalesce(v_outcome::text, 'open');
        END IF;
    END IF;
    FOR v_row IN SELECT f.slot FROM @extschema@._find_ready(p_job_id) f WHERE f."position" = p_position
                     AND coalesce((f.ext ->> 'run_lease')::bigint, 0) + 1 = p_run_lease LOOP
        IF (@extschema@._completion_of(v_row.slot, p_position)).finalized_at IS NOT NULL THEN
            RETURN 'completed';
        END IF;
        v_state := @extschema@._done_state(v_row.slot, p_job_id, p_position, p_run_lease);
        IF v_state IS NOT NULL THEN
            RETURN v_state;
        END IF;
    END LOOP;
    RETURN coalesce(@extschema@._moved_state(p_job_id, p_run_lease)::text, 'unknown');
END
$function$;
COMMENT ON FUNCTION @extschema@._attempt_status(bigint, bigint, integer, bigint, bigint) IS
    'Internal: what became of an attempt.';
-- Leases: attempts that outlived the ring. Evacuation closes the receipt as moved and writes the attempt here with its
-- body and under its token; from then on this row decides. As for a receipt, every change holds the lock of its batch.

-- The lease of a token, ended or not; NULL when it was never moved. Costs one look at an empty file when nothing was.
CREATE OR REPLACE FUNCTION @extschema@._find_lease(p_batch bigint, p_position bigint)
RETURNS @extschema@.leases
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lease @extschema@.leases;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        SELECT l.* INTO v_lease FROM @extschema@.leases l WHERE l.batch_id = p_batch AND l."position" = p_position;
    END IF;
    RETURN v_lease;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_lease(bigint, bigint) IS 'Internal: the lease of a moved attempt, or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._find_open_lease(p_job_id bigint)
RETURNS @extschema@.leases
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_lease @extschema@.leases;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
        SELECT l.* INTO v_lease FROM @extschema@.leases l WHERE l.job_id = p_job_id AND l.outcome IS NULL;
    END IF;
    RETURN v_lease;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_open_lease(bigint) IS 'Internal: the lease under which a job runs, or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._lease_job(p_lease @extschema@.leases)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_lease).job_id, (p_lease).queue, (p_lease).priority, (p_lease).shard, (p_lease).run_at,
    (p_lease).attempt, (p_lease).run_lease, (p_lease).kind, (p_lease).args, (p_lease).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._lease_job(@extschema@.leases) IS
    'Internal: the job of a lease, as its claim numbered it.';

-- Moves open attempts of one batch here. The batch lock is held; copy and closure share a transaction.
CREATE OR REPLACE FUNCTION @extschema@._lease_receipts(
    p_slot integer, p_batch bigint, p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record := @extschema@._read_batch(p_slot, p_batch);
    v_moved bigint[];
BEGIN
    IF v_batch.positions IS NULL THEN
        RETURN 0;
    END IF;
    WITH moved AS (
        INSERT INTO @extschema@.leases
            (batch_id, "position", job_id, run_lease, claimed_at, deadline_at, run_at, owner, priority, shard,
             attempt, queue, kind, args, ext)
        SELECT p_batch, r."position", (r.job).job_id, (r.job).run_lease + 1, v_batch.claimed_at, v_batch.deadline_at,
               (r.job).run_at, v_batch.owner, (r.job).priority, (r.job).shard, (r.job).attempt + 1, (r.job).queue,
               (r.job).kind, (r.job).args, (r.job).ext
        FROM @extschema@._read_ready(v_batch.ready_slot,
            (@extschema@._to_list(v_batch.positions - v_batch.closed))[:p_limit]) r
        RETURNING "position")
    SELECT array_agg(m."position" ORDER BY m."position") INTO v_moved FROM moved m;
    IF v_moved IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM @extschema@._append_closure(
        p_slot, p_batch, v_batch.next_no, 'moved', @extschema@._sorted_to_set(v_moved), NULL, p_now);
    RETURN cardinality(v_moved);
END
$function$;
COMMENT ON FUNCTION @extschema@._lease_receipts(integer, bigint, bigint, timestamptz) IS
    'Internal: turns up to so many open receipts of a batch into leases.';

-- The body goes, the evidence stays.
CREATE OR REPLACE FUNCTION @extschema@._close_lease(
    p_batch bigint, p_position bigint, p_outcome @extschema@.attempt_outcome, p_now timestamptz)
RETURNS void
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    UPDATE @extschema@.leases l SET outcome = p_outcome, ended_at = p_now, args = NULL, ext = NULL
    WHERE l.batch_id = p_batch AND l."position" = p_position
$function$;
COMMENT ON FUNCTION @extschema@._close_lease(bigint, bigint, @extschema@.attempt_outcome, timestamptz) IS
    'Internal: marks a lease as ended.';

-- Its body lies in no slot, so history stores it with the row. A result is kept when the job asks for it.
CREATE OR REPLACE FUNCTION @extschema@._end_lease(
    p_lease @extschema@.leases, p_outcome @extschema@.attempt_outcome, p_delay_seconds numeric, p_error jsonb,
    p_reason text, p_result jsonb, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_progress jsonb := @extschema@._take_progress(p_lease.batch_id,
        int8multirange(int8range(p_lease."position", p_lease."position", '[]')));
    v_outcome @extschema@.attempt_outcome;
BEGIN
    v_outcome := @extschema@._move_attempt(
        @extschema@._ended_job(@extschema@._lease_job(p_lease), v_progress -> p_lease."position"::text),
        p_outcome, NULL, NULL, p_lease.claimed_at, p_delay_seconds, p_error, p_reason,
        CASE WHEN p_lease.ext -> 'keep_result' = 'true' THEN p_result END, p_now);
    PERFORM @extschema@._close_lease(p_lease.batch_id, p_lease."position", v_outcome, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._end_lease(
    @extschema@.leases, @extschema@.attempt_outcome, numeric, jsonb, text, jsonb, timestamptz) IS
    'Internal: ends a moved attempt and puts its job where the outcome sends it.';

CREATE OR REPLACE FUNCTION @extschema@._complete_lease(
    p_instance uuid, p_batch bigint, p_position bigint, p_now timestamptz)
RETURNS @extschema@.finish_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.owner IS DISTINCT FROM p_instance THEN
        RETURN ROW(NULL, NULL, 'stale', NULL)::@extschema@.finish_result;
    ELSIF v_lease.outcome IS NULL THEN
        PERFORM @extschema@._end_lease(v_lease, 'completed', NULL, NULL, NULL, NULL, p_now);
    END IF;
    RETURN ROW(v_lease.job_id, v_lease.run_lease,
        CASE WHEN v_lease.outcome IS NULL THEN 'done'
             WHEN v_lease.outcome = 'completed' THEN 'already_done'
             ELSE 'stale' END, NULL)::@extschema@.finish_result;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_lease(uuid, bigint, bigint, timestamptz) IS
    'Internal: completes a moved attempt.';

CREATE OR REPLACE FUNCTION @extschema@._finish_lease(
    p_instance uuid, p_item @extschema@._finish_item, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_item.batch_id, p_item."position");
BEGIN
    IF v_lease.owner IS DISTINCT FROM p_instance OR v_lease.job_id <> p_item.job_id
       OR v_lease.run_lease <> p_item.run_lease THEN
        RETURN 'stale';
    ELSIF v_lease.outcome IS NOT NULL THEN
        RETURN @extschema@._repeat_answer(v_lease.outcome, p_item.outcome);
    END IF;
    PERFORM @extschema@._end_lease(v_lease, p_item.outcome, p_item.delay_seconds, p_item.error, p_item.reason,
        p_item.result, p_now);
    RETURN 'done';
END
$function$;
COMMENT ON FUNCTION @extschema@._finish_lease(uuid, @extschema@._finish_item, timestamptz) IS
    'Internal: finishes a moved attempt and answers: done, already_done or stale.';

-- For the caller's own transaction. An old snapshot that cannot see the lease must not take the attempt for ended: the
-- key knows better than the snapshot.
CREATE OR REPLACE FUNCTION @extschema@._complete_leased_job(
    p_job_id bigint, p_run_lease bigint, p_batch bigint, p_position bigint, p_result jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.batch_id IS NULL THEN
        IF NOT @extschema@._is_read_committed() AND pg_relation_size('@extschema@.leases'::regclass) > 0 THEN
            BEGIN
                INSERT INTO @extschema@.leases
                    (batch_id, "position", job_id, run_lease, claimed_at, run_at, owner, priority, shard, attempt,
                     queue, kind)
                VALUES (p_batch, p_position, 0, 0, p_now, p_now, gen_random_uuid(), 1, 0, 0, '', '');
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            EXCEPTION WHEN SQLSTATE 'JQ000' THEN
                NULL;
            WHEN unique_violation THEN
                PERFORM @extschema@._refuse('40001', format('this snapshot is older than a change of job %s', p_job_id),
                    'Repeat the transaction in a fresh snapshot.');
            END;
        END IF;
        RETURN false;
    ELSIF v_lease.job_id <> p_job_id OR v_lease.run_lease <> p_run_lease OR v_lease.outcome IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM @extschema@._end_lease(v_lease, 'completed', NULL, NULL, NULL, p_result, p_now);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._complete_leased_job(bigint, bigint, bigint, bigint, jsonb, timestamptz) IS
    'Internal: completes a moved attempt in the caller''s transaction; false when there is none to complete.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_lease(p_job_id bigint, p_reason text, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_open_lease(p_job_id);
BEGIN
    IF v_lease.batch_id IS NULL THEN
        RETURN false;
    END IF;
    -- pause point: cancel_lease
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', v_lease.batch_id));
    v_lease := @extschema@._find_lease(v_lease.batch_id, v_lease."position");
    IF v_lease.batch_id IS NULL OR v_lease.outcome IS NOT NULL THEN
        RETURN false;
    END IF;
    PERFORM @extschema@._end_lease(v_lease, 'cancelled', NULL, NULL, p_reason, NULL, p_now);
    PERFORM @extschema@._notify_workers(v_lease.queue, 'cancel');
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_lease(bigint, text, timestamptz) IS
    'Internal: ends a moved attempt as cancelled and tells its worker; false when the job has none.';

CREATE OR REPLACE FUNCTION @extschema@._expire_leases(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    IF pg_relation_size('@extschema@.leases'::regclass) = 0 THEN
        RETURN 0;
    END IF;
    DELETE FROM @extschema@.leases l
    WHERE (l.batch_id, l."position") IN (
        SELECT x.batch_id, x."position" FROM @extschema@.leases x
        -- The table is truncated when it is empty: not before a dump that saw the attempt run has its lock.
        WHERE x.ended_at < p_now - greatest(@extschema@._setting_interval('attempt_evidence_seconds'),
                                            @extschema@._setting_interval('dump_lock_seconds'))
        ORDER BY x.ended_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
COMMENT ON FUNCTION @extschema@._expire_leases(bigint, timestamptz) IS
    'Internal: forgets leases that ended more than attempt_evidence_seconds ago.';
-- Cancel, and look-up of one job, wherever it is.

-- The open receipt of a position. A scan of the claim ring: rare, and the ring is small.
CREATE OR REPLACE FUNCTION @extschema@._find_receipt(
    p_position bigint,
    OUT claim_slot integer, OUT batch_id bigint, OUT owner uuid, OUT claimed_at timestamptz,
    OUT deadline_at timestamptz)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('lease_claim_batches', v_slot);
        EXECUTE format('SELECT %1$s, b.batch_id, b.owner, b.claimed_at, b.deadline_at
                        FROM @extschema@.lease_claim_batches_%1$s b
                        WHERE b.positions @> $1', v_slot)
            INTO claim_slot, batch_id, owner, claimed_at, deadline_at USING p_position;
        EXIT WHEN batch_id IS NOT NULL;
    END LOOP;
    IF batch_id IS NOT NULL
       AND @extschema@._closure_outcome(claim_slot, batch_id, p_position) IS NOT NULL THEN
        batch_id := NULL;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_receipt(bigint) IS
    'Internal: the open receipt of a position; batch_id is NULL when there is none.';

-- The live ready row of a job with the cursor of its lane. Runs in a block that ends by an exception, so that its
-- relation locks vanish: a caller that idles in its transaction blocks the prune of no slot it has only looked at.
CREATE OR REPLACE FUNCTION @extschema@._look_up_ready(
    p_job_id bigint,
    OUT slot integer, OUT "position" bigint, OUT run_lease bigint, OUT is_unclaimed boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
BEGIN
    BEGIN
        SELECT f.slot, f."position", coalesce((f.ext ->> 'run_lease')::bigint, 0) AS run_lease INTO v_row
        FROM @extschema@._find_ready(p_job_id) f WHERE NOT f.is_dead
        ORDER BY coalesce((f.ext ->> 'run_lease')::bigint, 0) DESC LIMIT 1;
        slot := v_row.slot;
        "position" := v_row."position";
        run_lease := v_row.run_lease;
        IF slot IS NOT NULL THEN
            is_unclaimed := @extschema@._is_unclaimed(
                @extschema@._newest_emission(@extschema@._lane_of("position")), "position");
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_ready(bigint) IS
    'Internal: where the live body of a job lies and whether it was claimed.';

-- The same for a change, with its locks: the lane's mutation lock, shared, then the position's, then a second look. A
-- job that has changed its place meanwhile is locked where it lies now.
CREATE OR REPLACE FUNCTION @extschema@._lock_ready(
    p_job_id bigint,
    OUT slot integer, OUT "position" bigint, OUT is_unclaimed boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_locked bigint;
BEGIN
    LOOP
        SELECT r.slot, r."position", r.is_unclaimed INTO slot, "position", is_unclaimed
        FROM @extschema@._look_up_ready(p_job_id) r;
        EXIT WHEN slot IS NULL OR "position" = v_locked;
        v_locked := "position";
        PERFORM pg_advisory_xact_lock_shared(@extschema@._lock_key('mutation', @extschema@._lane_of(v_locked)));
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('position', v_locked));
        -- pause point: cancel
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_ready(bigint) IS
    'Internal: where the live body of a job lies and whether it was claimed, locked; slot is NULL when it has none.';

-- Whoever calls it has locked the job there, or all of its lane, and has seen it wait.
CREATE OR REPLACE FUNCTION @extschema@._take_waiting(p_slot integer, p_position bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
BEGIN
    SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(p_slot, ARRAY[p_position]) r;
    PERFORM @extschema@._append_tombstone(p_slot, p_position);
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_waiting(integer, bigint) IS
    'Internal: removes a waiting job from its lane and returns it.';

-- Not waiting and not running: what it is then.
CREATE OR REPLACE FUNCTION @extschema@._ended_state(p_job_id bigint, p_slot integer, p_position bigint)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_done @extschema@.done_entries;
    v_lane integer := @extschema@._lane_of(p_job_id);
BEGIN
    IF EXISTS (SELECT FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id) THEN
        RETURN 'dead_lettered';
    END IF;
    IF p_slot IS NOT NULL AND (@extschema@._completion_of(p_slot, p_position)).finalized_at IS NOT NULL THEN
        RETURN 'completed';
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL THEN
        RETURN v_done.state;
    END IF;
    IF p_job_id < @extschema@._lane_base(1) THEN
        RETURN (SELECT 'pruned' FROM @extschema@.job_ids s WHERE s.is_called AND p_job_id BETWEEN 1 AND s.last_value);
    ELSIF NOT EXISTS (SELECT FROM @extschema@.queue_lanes l WHERE l.lane_id = v_lane)
          OR p_job_id > @extschema@._lane_tail(v_lane) THEN
        RETURN NULL;
    ELSIF @extschema@._is_unclaimed(@extschema@._newest_emission(v_lane), p_job_id)
          AND NOT @extschema@._lane_is_quiet(v_lane) THEN
        -- No claim has passed it and it has no row: its insert may still commit.
        RETURN 'unsettled';
    END IF;
    RETURN 'pruned';
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_state(bigint, integer, bigint) IS
    'Internal: dead_lettered, completed, failed, cancelled, pruned (an id that was given out and left no trace), '
    'unsettled (its insert may still commit), or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_unsettled(p_job_id bigint)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._refuse('40001',
        format('job %s is not settled: it is on its way, or its insert has not committed', p_job_id), 'Try again.');
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_unsettled(bigint) IS
    'Internal: raises 40001 for a job that may appear any moment.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_running(
    p_position bigint, p_slot integer, p_reason text, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_receipt record := @extschema@._find_receipt(p_position);
    v_batch record;
    v_job @extschema@._job;
    v_progress jsonb;
    v_one int8multirange := int8multirange(int8range(p_position, p_position, '[]'));
BEGIN
    IF v_receipt.batch_id IS NULL THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('batch', v_receipt.batch_id));
    v_batch := @extschema@._read_batch(v_receipt.claim_slot, v_receipt.batch_id);
    IF v_batch.positions IS NULL OR v_batch.closed @> p_position THEN
        RETURN false;
    END IF;
    SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(p_slot, ARRAY[p_position]) r;
    v_progress := @extschema@._take_progress(v_receipt.batch_id, v_one);
    PERFORM @extschema@._move_attempt(
        @extschema@._ended_job(@extschema@._next_attempt(v_job), v_progress -> p_position::text),
        'cancelled', p_slot, p_position, v_batch.claimed_at, NULL, NULL, p_reason, NULL, p_now);
    PERFORM @extschema@._append_closure(
        v_receipt.claim_slot, v_receipt.batch_id, v_batch.next_no, 'cancelled', v_one, p_reason, p_now);
    PERFORM @extschema@._notify_workers(v_job.queue, 'cancel');
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_running(bigint, integer, text, timestamptz) IS
    'Internal: ends a running attempt as cancelled and tells its worker; false when it is not running.';

CREATE OR REPLACE FUNCTION @extschema@._cancel_job(p_job_id bigint, p_reason text, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job;
    v_ready record;
    v_state text;
BEGIN
    PERFORM @extschema@._require_read_committed();
    -- A job can move on between look and lock; every move needs a claim or a tick, so a few rounds always settle it.
    FOR v_round IN 1 .. 5 LOOP
        v_job := @extschema@._take_deferred(p_job_id);
        IF v_job.job_id IS NOT NULL THEN
            PERFORM @extschema@._append_done(v_job, 'cancelled', NULL, NULL, NULL, p_now, p_reason, NULL);
            RETURN 'cancelled';
        ELSIF @extschema@._cancel_lease(p_job_id, p_reason, p_now) THEN
            RETURN 'cancelled_running';
        END IF;
        v_ready := @extschema@._lock_ready(p_job_id);
        IF v_ready.is_unclaimed THEN
            v_job := @extschema@._take_waiting(v_ready.slot, v_ready."position");
            PERFORM @extschema@._append_done(
                v_job, 'cancelled', v_ready.slot, v_ready."position", NULL, p_now, p_reason, NULL);
            RETURN 'cancelled';
        ELSIF v_ready.slot IS NOT NULL
              AND @extschema@._cancel_running(v_ready."position", v_ready.slot, p_reason, p_now) THEN
            RETURN 'cancelled_running';
        END IF;
        v_state := @extschema@._ended_state(p_job_id, v_ready.slot, v_ready."position");
        CASE
        WHEN v_state = 'dead_lettered' THEN
            RETURN v_state;
        WHEN v_state IN ('pruned', 'unsettled') THEN
            -- Also what a job on its way between two places looks like.
            CONTINUE;
        WHEN v_state IS NOT NULL THEN
            RETURN 'already_' || v_state;
        WHEN v_ready.slot IS NULL THEN
            PERFORM @extschema@._refuse('42704', format('field "job_id": there is no job %s', p_job_id),
                'Check the id.');
        ELSE
            NULL;
        END CASE;
    END LOOP;
    IF v_state = 'pruned' THEN
        RETURN v_state;
    END IF;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._cancel_job(bigint, text, timestamptz) IS
    'Internal: cancels a job wherever it is and says what was found; 42704 for an id that was never given out.';
-- Everything known about one job.

CREATE OR REPLACE FUNCTION @extschema@._job_info_of(p_job @extschema@._job, p_state text)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info.job_id := p_job.job_id;
    v_info.state := p_state;
    v_info.kind := p_job.kind;
    v_info.queue := p_job.queue;
    v_info.priority := p_job.priority;
    v_info.args := p_job.args;
    v_info.attempt := p_job.attempt;
    v_info.max_attempts := coalesce((p_job.ext ->> 'max_attempts')::integer, 25);
    v_info.run_lease := p_job.run_lease;
    v_info.run_at := p_job.run_at;
    v_info.created_at := coalesce((p_job.ext ->> 'created_at')::timestamptz, p_job.run_at);
    v_info.tags := CASE WHEN p_job.ext ? 'tags' THEN ARRAY(SELECT jsonb_array_elements_text(p_job.ext -> 'tags')) END;
    v_info.metadata := p_job.ext -> 'metadata';
    v_info.progress := p_job.ext -> 'progress';
    v_info.errors := p_job.ext -> 'errors';
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_info_of(@extschema@._job, text) IS
    'Internal: a job in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._running_info(p_job @extschema@._job, p_position bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_receipt record := @extschema@._find_receipt(p_position);
    v_info @extschema@.job_info;
BEGIN
    IF v_receipt.batch_id IS NULL THEN
        RETURN NULL;
    END IF;
    v_info := @extschema@._job_info_of(@extschema@._next_attempt(p_job), 'running');
    v_info.attempted_at := v_receipt.claimed_at;
    v_info.deadline_at := v_receipt.deadline_at;
    v_info.instance_id := v_receipt.owner;
    v_info.progress := coalesce(@extschema@._progress_of(v_receipt.batch_id, p_position), v_info.progress);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._running_info(@extschema@._job, bigint) IS
    'Internal: a running job, or NULL when its position has no open receipt.';

CREATE OR REPLACE FUNCTION @extschema@._lease_info(p_lease @extschema@.leases)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info := @extschema@._job_info_of(@extschema@._lease_job(p_lease), 'running');
BEGIN
    v_info.attempted_at := p_lease.claimed_at;
    v_info.deadline_at := p_lease.deadline_at;
    v_info.instance_id := p_lease.owner;
    v_info.progress := coalesce(@extschema@._progress_of(p_lease.batch_id, p_lease."position"), v_info.progress);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._lease_info(@extschema@.leases) IS
    'Internal: a job that runs under a lease, in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._done_info(p_done @extschema@.done_entries, p_job @extschema@._job)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info := @extschema@._job_info_of(
        CASE WHEN p_done.body IS NULL THEN p_job ELSE @extschema@._stored_job(p_done) END, p_done.state::text);
    v_info.job_id := p_done.job_id;
    v_info.queue := p_done.queue;
    v_info.attempt := p_done.attempt;
    v_info.run_lease := p_done.run_lease;
    v_info.attempted_at := p_done.attempted_at;
    v_info.finalized_at := p_done.finalized_at;
    v_info.reason := p_done.detail ->> 'reason';
    v_info.errors := p_done.detail -> 'errors';
    v_info.progress := p_done.detail -> 'progress';
    v_info.result := p_done.detail -> 'result';
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._done_info(@extschema@.done_entries, @extschema@._job) IS
    'Internal: a terminal job in the form that job() answers.';

CREATE OR REPLACE FUNCTION @extschema@._dead_letter_info(p_entry @extschema@.dlq_entries)
RETURNS @extschema@.job_info
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    v_info := @extschema@._job_info_of(
        ROW(p_entry.job_id, p_entry.queue, p_entry.priority, p_entry.shard, (p_entry.ext ->> 'run_at')::timestamptz,
            p_entry.attempt, p_entry.run_lease, p_entry.kind, p_entry.args, p_entry.ext),
        'failed');
    v_info.finalized_at := p_entry.dlq_at;
    v_info.reason := p_entry.reason;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._dead_letter_info(@extschema@.dlq_entries) IS
    'Internal: a dead letter in the form that job() answers.';

-- A job on hold or deferred; NULL when it is neither.
CREATE OR REPLACE FUNCTION @extschema@._backlog_info(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_found record := @extschema@._find_deferred(p_job_id);
    v_entry @extschema@.dlq_entries;
BEGIN
    IF v_found.slot IS NOT NULL THEN
        RETURN @extschema@._job_info_of(v_found.job, v_found.state);
    END IF;
    SELECT d.* INTO v_entry FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id;
    IF FOUND THEN
        RETURN @extschema@._dead_letter_info(v_entry);
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._backlog_info(bigint) IS
    'Internal: a deferred job or a dead letter in the form that job() answers.';

-- A job wherever it is; NULL when no place has it at the moment of the look.
CREATE OR REPLACE FUNCTION @extschema@._look_up_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_job_id);
    v_done @extschema@.done_entries;
    v_job @extschema@._job;
    v_info @extschema@.job_info := @extschema@._backlog_info(p_job_id);
    v_lease @extschema@.leases := @extschema@._find_open_lease(p_job_id);
BEGIN
    IF v_info.job_id IS NOT NULL THEN
        RETURN v_info;
    ELSIF v_lease.job_id IS NOT NULL THEN
        RETURN @extschema@._lease_info(v_lease);
    END IF;
    IF v_ready.slot IS NOT NULL THEN
        SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_ready.slot, ARRAY[v_ready."position"]) r;
        IF v_ready.is_unclaimed THEN
            RETURN @extschema@._job_info_of(v_job, 'available');
        END IF;
        v_info := @extschema@._running_info(v_job, v_ready."position");
        IF v_info.job_id IS NOT NULL THEN
            RETURN v_info;
        END IF;
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL AND (v_ready.slot IS NULL OR v_done.run_lease > v_ready.run_lease) THEN
        IF v_done."position" IS NOT NULL THEN
            SELECT (r.job).* INTO v_job FROM @extschema@._read_ready(v_done.slot, ARRAY[v_done."position"]) r;
        END IF;
        RETURN @extschema@._done_info(v_done, v_job);
    ELSIF v_ready.slot IS NOT NULL THEN
        v_info := @extschema@._job_info_of(@extschema@._next_attempt(v_job), 'completed');
        v_info.progress := NULL;
        SELECT c.attempted_at, c.finalized_at INTO v_info.attempted_at, v_info.finalized_at
        FROM @extschema@._completion_of(v_ready.slot, v_ready."position") c;
        IF v_info.finalized_at IS NOT NULL THEN
            RETURN v_info;
        END IF;
    END IF;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_job(bigint) IS 'Internal: everything known about one job, or NULL.';

-- The same places without the bodies, and with when and for how long an end counts.
CREATE OR REPLACE FUNCTION @extschema@._look_up_state(
    p_job_id bigint, OUT state @extschema@.job_state, OUT finalized_at timestamptz, OUT retention text)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_job_id);
    v_done @extschema@.done_entries;
BEGIN
    IF v_ready.is_unclaimed THEN
        state := 'available'::@extschema@.job_state;
        RETURN;
    END IF;
    state := (@extschema@._find_deferred(p_job_id)).state::@extschema@.job_state;
    IF state IS NULL AND ((@extschema@._find_open_lease(p_job_id)).job_id IS NOT NULL
        OR (v_ready.slot IS NOT NULL AND (@extschema@._find_receipt(v_ready."position")).batch_id IS NOT NULL)) THEN
        state := 'running'::@extschema@.job_state;
    END IF;
    IF state IS NOT NULL THEN
        RETURN;
    END IF;
    SELECT 'failed'::@extschema@.job_state, d.dlq_at, 'dlq_retention_seconds' INTO state, finalized_at, retention
    FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id;
    IF FOUND THEN
        RETURN;
    END IF;
    v_done := @extschema@._find_done(p_job_id);
    IF v_done.job_id IS NOT NULL AND (v_ready.slot IS NULL OR v_done.run_lease > v_ready.run_lease) THEN
        state := v_done.state;
        finalized_at := v_done.finalized_at;
    ELSIF v_ready.slot IS NOT NULL THEN
        finalized_at := (@extschema@._completion_of(v_ready.slot, v_ready."position")).finalized_at;
        state := CASE WHEN finalized_at IS NOT NULL THEN 'completed'::@extschema@.job_state END;
    END IF;
    retention := @extschema@._retention_of(state);
END
$function$;
COMMENT ON FUNCTION @extschema@._look_up_state(bigint) IS
    'Internal: state of a job, when it ended, and the setting of how long that counts; or NULL.';

-- A job that moves between the looks is in neither place; the next round finds it where it went.
CREATE OR REPLACE FUNCTION @extschema@._find_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._look_up_job(p_job_id);
        EXIT WHEN v_info.job_id IS NOT NULL;
    END LOOP;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_job(bigint) IS
    'Internal: everything known about one job, or NULL when nothing of it is left.';

CREATE OR REPLACE FUNCTION @extschema@._find_state(
    p_job_id bigint, OUT state @extschema@.job_state, OUT finalized_at timestamptz, OUT retention text)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_round IN 1 .. 5 LOOP
        SELECT s.* INTO state, finalized_at, retention FROM @extschema@._look_up_state(p_job_id) s;
        EXIT WHEN state IS NOT NULL;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._find_state(bigint) IS
    'Internal: state of a job, when it ended, and the setting of how long that counts; NULLs when nothing is left.';

CREATE OR REPLACE FUNCTION @extschema@._job_info(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info := @extschema@._find_job(p_job_id);
    v_state text;
BEGIN
    IF v_info.job_id IS NOT NULL THEN
        RETURN v_info;
    END IF;
    v_state := @extschema@._ended_state(p_job_id, NULL, NULL);
    IF v_state IS NULL THEN
        PERFORM @extschema@._refuse('42704', format('field "job_id": there is no job %s', p_job_id), 'Check the id.');
    ELSIF v_state = 'unsettled' THEN
        PERFORM @extschema@._refuse_unsettled(p_job_id);
    END IF;
    v_info.job_id := p_job_id;
    v_info.state := 'pruned';
    v_info.pruned_at := (SELECT max(r.pruned_at) FROM @extschema@.queue_terminal_rollups r);
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._job_info(bigint) IS
    'Internal: everything known about one job; 42704 for an id that was never given out.';
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
-- Changes of jobs that do not run: another life for one that ended, other values for one that waits. The job keeps its
-- id and its run_lease. Lock order: mutation (shared), position.

-- Where a job is. Runs in a block that ends by an exception, so that its relation locks vanish: a caller that idles in
-- its transaction blocks the prune of no slot it has only looked at.
CREATE OR REPLACE FUNCTION @extschema@._observe_job(p_job_id bigint)
RETURNS @extschema@.job_info
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
BEGIN
    BEGIN
        v_info := @extschema@._job_info(p_job_id);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_info;
END
$function$;
COMMENT ON FUNCTION @extschema@._observe_job(bigint) IS
    'Internal: job() without its locks; 42704 and 40001 as there.';

CREATE OR REPLACE FUNCTION @extschema@._refuse_state(p_job_id bigint, p_state text, p_hint text)
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._refuse('55000', format('field "job_id": job %s is %s', p_job_id, p_state), p_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._refuse_state(bigint, text, text) IS
    'Internal: raises 55000 for a job whose state does not allow a call.';

-- A due job goes to its lane, without waiting for one; else it is deferred. Then it takes its unique key, if it has
-- one: after the lane, as producers do. Outside its mask it gives the key up, and with it the end of its former life.
CREATE OR REPLACE FUNCTION @extschema@._place_job(
    p_job @extschema@._job, p_state @extschema@.job_state, p_now timestamptz)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
    v_state @extschema@.job_state := 'available'::@extschema@.job_state;
BEGIN
    v_job.ext := v_job.ext #- '{unique,waiting}';
    IF v_job.run_at > p_now OR NOT EXISTS (SELECT FROM @extschema@._append_ready(ARRAY[v_job], true)) THEN
        v_state := p_state;
        PERFORM @extschema@._defer(ARRAY[v_job], v_state);
    END IF;
    IF v_job.ext ? 'unique' THEN
        IF @extschema@._key_counts_in(v_job.ext -> 'unique', v_state) THEN
            PERFORM @extschema@._retake_key(v_job, p_now);
        ELSE
            PERFORM @extschema@._drop_key(v_job.job_id, v_job.ext -> 'unique');
        END IF;
    END IF;
    RETURN v_state;
END
$function$;
COMMENT ON FUNCTION @extschema@._place_job(@extschema@._job, @extschema@.job_state, timestamptz) IS
    'Internal: makes a job available, or defers it in the given state until its run_at (23505 for a lost unique key).';

-- Another queue keeps the shard as far as it has so many.
CREATE OR REPLACE FUNCTION @extschema@._redirect_job(p_job @extschema@._job, p_opts jsonb, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := p_job;
BEGIN
    v_job.priority := coalesce(@extschema@._option_integer(p_opts, 'priority', 1, 4), v_job.priority);
    v_job.run_at := p_now + make_interval(
        secs => coalesce(@extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000), 0)::double precision);
    IF coalesce(p_opts -> 'queue', 'null') <> 'null' THEN
        v_job.queue := @extschema@._option_text(p_opts, 'queue', 200);
        PERFORM @extschema@._check_name('queue', v_job.queue);
        v_job.shard := mod(v_job.shard, (@extschema@._queue_options(v_job.queue)).enqueue_shards);
    END IF;
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._redirect_job(@extschema@._job, jsonb, timestamptz) IS
    'Internal: a job that runs again, with the queue, priority and delay_seconds of the options (22023, 23514).';

-- A job that ended, out of history or the dead letters, as a fresh life; NULL when it is not there any more.
CREATE OR REPLACE FUNCTION @extschema@._take_ended(p_job_id bigint, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job @extschema@._job := @extschema@._take_dead_letter(p_job_id, p_now);
    v_done @extschema@.done_entries;
BEGIN
    IF v_job.job_id IS NOT NULL THEN
        RETURN v_job;
    END IF;
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('position', p_job_id));
    BEGIN
        v_done := @extschema@._find_done(p_job_id);
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    IF v_done.job_id IS NULL OR v_done.state = 'completed' OR NOT @extschema@._undo_done(v_done) THEN
        RETURN NULL;
    END IF;
    v_job := @extschema@._job_of_done(v_done);
    v_job.attempt := 0;
    v_job.ext := v_job.ext - '{progress,releases}'::text[];
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_ended(bigint, timestamptz) IS
    'Internal: takes a failed or cancelled job back: attempt 0, errors and run_lease kept, progress dropped.';

CREATE OR REPLACE FUNCTION @extschema@._retry_job(p_job_id bigint, p_opts jsonb, p_now timestamptz)
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._require_read_committed();
    -- A job can move on between look and lock.
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._observe_job(p_job_id);
        -- pause point: retry
        CASE
        WHEN v_info.state IN ('scheduled', 'retryable') THEN
            v_job := @extschema@._take_deferred(p_job_id);
            v_job.ext := v_job.ext - 'releases';
        WHEN v_info.state IN ('failed', 'cancelled') THEN
            v_job := @extschema@._take_ended(p_job_id, p_now);
            v_info.state := 'scheduled';
        WHEN v_info.state = 'pruned' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'pruned', 'Nothing of it is left: insert it again.');
        WHEN v_info.state = 'completed' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'completed', 'A job that succeeded stays so: insert another.');
        ELSE
            PERFORM @extschema@._refuse_state(p_job_id, v_info.state, 'It runs already, or will without help.');
        END CASE;
        IF v_job.job_id IS NOT NULL THEN
            v_job := @extschema@._redirect_job(v_job, p_opts, p_now);
            RETURN ROW(p_job_id, @extschema@._place_job(v_job, v_info.state::@extschema@.job_state, p_now),
                false, NULL)::@extschema@.insert_result;
        END IF;
    END LOOP;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._retry_job(bigint, jsonb, timestamptz) IS
    'Internal: makes a job that ended or waits for its time run now.';

-- NULL when it is not there, or was claimed.
CREATE OR REPLACE FUNCTION @extschema@._take_available(p_job_id bigint)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._lock_ready(p_job_id);
BEGIN
    RETURN CASE WHEN v_ready.is_unclaimed
                THEN @extschema@._take_waiting(v_ready.slot, v_ready."position") END;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_available(bigint) IS
    'Internal: removes a waiting job from its lane and returns it.';

-- Options not named keep their value; null restores the default.
CREATE OR REPLACE FUNCTION @extschema@._changed_job(
    p_job @extschema@._job, p_changes jsonb, p_run_at timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_options constant text[] := '{tags,metadata,deadline_seconds,keep_result,backoff}'::text[];
    v_job @extschema@._job := @extschema@._ended_job(p_job, NULL);
    v_queue text := CASE WHEN p_changes ? 'queue' THEN p_changes ->> 'queue' ELSE v_job.queue END;
    v_priority integer := coalesce(
        @extschema@._option_integer(p_changes, 'priority', -2147483648, 2147483647), v_job.priority);
    v_max_attempts integer := coalesce(
        @extschema@._option_integer(p_changes, 'max_attempts', -2147483648, 2147483647),
        (v_job.ext ->> 'max_attempts')::integer, 25);
    v_opts jsonb := (SELECT coalesce(jsonb_object_agg(o.key, o.value), '{}')
                     FROM jsonb_each(p_changes) o WHERE o.key = ANY (c_options));
BEGIN
    v_job.args := CASE WHEN p_changes ? 'args' THEN p_changes -> 'args' ELSE v_job.args END;
    PERFORM @extschema@._check_job(v_job.kind, v_job.args, v_queue, v_priority, v_max_attempts, NULL);
    v_job.ext := v_job.ext - (ARRAY(SELECT jsonb_object_keys(v_opts)) || 'max_attempts'::text)
        || coalesce(@extschema@._job_ext(v_opts, v_max_attempts), '{}');
    v_job.priority := v_priority;
    IF v_queue <> v_job.queue THEN
        v_job.queue := v_queue;
        v_job.shard := mod(v_job.shard, (@extschema@._queue_options(v_queue)).enqueue_shards);
    END IF;
    v_job.run_at := coalesce(p_run_at, v_job.run_at);
    RETURN v_job;
END
$function$;
COMMENT ON FUNCTION @extschema@._changed_job(@extschema@._job, jsonb, timestamptz) IS
    'Internal: a job with other values, checked (22023, 23514); its run_at stays when p_run_at is NULL.';

CREATE OR REPLACE FUNCTION @extschema@._update_job(
    p_job_id bigint, p_changes jsonb, p_run_at timestamptz, p_now timestamptz)
RETURNS @extschema@.job_state
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_round IN 1 .. 5 LOOP
        v_info := @extschema@._observe_job(p_job_id);
        -- pause point: update
        CASE
        WHEN v_info.state IN ('scheduled', 'retryable') THEN
            v_job := @extschema@._take_deferred(p_job_id);
        WHEN v_info.state = 'available' THEN
            v_job := @extschema@._take_available(p_job_id);
            v_info.state := 'scheduled';
        WHEN v_info.state = 'running' THEN
            PERFORM @extschema@._refuse_state(p_job_id, 'running', 'Cancel it, or wait for the attempt to end.');
        ELSE
            PERFORM @extschema@._refuse_state(p_job_id, v_info.state, 'Only a job that waits can be changed.');
        END CASE;
        IF v_job.job_id IS NOT NULL THEN
            RETURN @extschema@._place_job(
                @extschema@._changed_job(v_job, p_changes, p_run_at), v_info.state::@extschema@.job_state, p_now);
        END IF;
    END LOOP;
    PERFORM @extschema@._refuse_unsettled(p_job_id);
END
$function$;
COMMENT ON FUNCTION @extschema@._update_job(bigint, jsonb, timestamptz, timestamptz) IS
    'Internal: gives a waiting job other values; a waiting one goes to the end of its lane.';
-- Drain: cancels what waits in a queue, a bounded number at a time. What runs goes on.

-- Waiting jobs of one lane. Lane and mutation lock are held, so that no claim and no cancel runs between look and mark.
CREATE OR REPLACE FUNCTION @extschema@._drain_lane(p_lane integer, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_waiting int8multirange := @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane));
    v_positions bigint[];
    v_position bigint;
    v_job @extschema@._job;
    v_drained bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        EXIT WHEN v_drained >= p_limit;
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        v_positions := (@extschema@._see_leaf(v_slot, v_waiting, (p_limit - v_drained)::integer, true)).positions;
        CONTINUE WHEN v_positions IS NULL;
        FOREACH v_position IN ARRAY v_positions LOOP
            -- One by one: the bodies of a few thousand jobs may not fit into memory.
            v_job := @extschema@._take_waiting(v_slot, v_position);
            PERFORM @extschema@._append_done(
                v_job, 'cancelled', v_slot, v_position, NULL, p_now, p_reason, NULL);
        END LOOP;
        v_drained := v_drained + cardinality(v_positions);
    END LOOP;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_lane(integer, bigint, text, timestamptz) IS
    'Internal: cancels up to so many waiting jobs of a lane.';

-- Rows that others change are theirs.
CREATE OR REPLACE FUNCTION @extschema@._drain_deferred(p_queue text, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
    v_drained bigint := 0;
BEGIN
    FOR v_row IN
        SELECT d.slot::integer, d.job_id FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue
        LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM @extschema@._append_done(@extschema@._take_from_slot(v_row.slot, v_row.job_id), 'cancelled', NULL,
            NULL, NULL, p_now, p_reason, NULL);
        v_drained := v_drained + 1;
    END LOOP;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_deferred(text, bigint, text, timestamptz) IS
    'Internal: cancels up to so many deferred jobs of a queue.';

CREATE OR REPLACE FUNCTION @extschema@._drain_queue(p_queue text, p_limit bigint, p_reason text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_drained bigint := 0;
    v_is_busy boolean := false;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_lane IN SELECT w.lane_id FROM @extschema@._waiting_lanes(p_queue) w LOOP
        EXIT WHEN v_drained >= p_limit;
        IF pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id))
           AND pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', v_lane.lane_id)) THEN
            v_drained := v_drained + @extschema@._drain_lane(v_lane.lane_id, p_limit - v_drained, p_reason, p_now);
        ELSE
            v_is_busy := true;
        END IF;
    END LOOP;
    IF v_drained < p_limit THEN
        v_drained := v_drained + @extschema@._drain_deferred(p_queue, p_limit - v_drained, p_reason, p_now);
        v_is_busy := v_is_busy OR EXISTS (SELECT FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue);
    END IF;
    PERFORM @extschema@._note_drain(p_queue, v_drained = 0 AND NOT v_is_busy, p_now);
    IF v_drained = 0 AND v_is_busy THEN
        PERFORM @extschema@._refuse('40001', format('others work on the jobs of queue "%s" just now', p_queue),
            'Try again.');
    END IF;
    RETURN v_drained;
END
$function$;
COMMENT ON FUNCTION @extschema@._drain_queue(text, bigint, text, timestamptz) IS
    'Internal: cancels waiting jobs of a queue; zero only when none was seen.';
-- Why a job is where it is: one sentence for people, facts for programs.

-- Live instances that say they work on a queue; those that say nothing may.
CREATE OR REPLACE FUNCTION @extschema@._live_instances(p_queue text, p_now timestamptz)
RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT count(*)
    FROM @extschema@.runtime_instances i
    WHERE @extschema@._is_live(i.heartbeat_at, p_now)
      AND coalesce(i.info -> 'queues' ? p_queue, true)
$function$;
COMMENT ON FUNCTION @extschema@._live_instances(text, timestamptz) IS
    'Internal: how many live instances work on a queue.';

-- Waiting jobs before a position of its lane, counted up to 10,000.
CREATE OR REPLACE FUNCTION @extschema@._count_ahead(p_position bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most constant integer := 10000;
    v_ahead int8multirange := @extschema@._unclaimed_set(
        @extschema@._newest_emission(@extschema@._lane_of(p_position))) * int8multirange(int8range(NULL, p_position));
    v_count bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        v_count := v_count + coalesce(cardinality(
            (@extschema@._see_leaf(v_slot, v_ahead, c_most, false)).positions), 0);
        EXIT WHEN v_count >= c_most;
    END LOOP;
    RETURN least(v_count, c_most);
END
$function$;
COMMENT ON FUNCTION @extschema@._count_ahead(bigint) IS 'Internal: waiting jobs before a position of its lane.';

-- Lanes of its queue that a claim takes before this one: better effective priority, or an older head.
CREATE OR REPLACE FUNCTION @extschema@._count_lanes_first(p_lane integer, p_queue text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lanes integer[] := ARRAY(
        SELECT c.lane_id
        FROM @extschema@._choose_lanes(p_queue, (@extschema@._queue_options(p_queue)).aging_seconds, p_now) c);
BEGIN
    RETURN (SELECT count(*) FROM unnest(v_lanes[:array_position(v_lanes, p_lane) - 1]) l
            WHERE @extschema@._head_run_at(l) IS NOT NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._count_lanes_first(integer, text, timestamptz) IS
    'Internal: lanes with waiting jobs that come before a lane.';

CREATE OR REPLACE FUNCTION @extschema@._available_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ready record := @extschema@._look_up_ready(p_info.job_id);
BEGIN
    RETURN jsonb_build_object(
        'paused_at', (@extschema@._queue_options(p_info.queue)).paused_at,
        'live_instances', @extschema@._live_instances(p_info.queue, p_now),
        'kind_is_known', @extschema@._is_served(p_info.queue, p_info.kind, p_now),
        'has_sql_handler', @extschema@._has_sql_handler(p_info.kind),
        'ahead', CASE WHEN v_ready.is_unclaimed THEN @extschema@._count_ahead(v_ready."position") ELSE 0 END,
        'lanes_first', CASE WHEN v_ready.is_unclaimed THEN @extschema@._count_lanes_first(
            @extschema@._lane_of(v_ready."position"), p_info.queue, p_now) ELSE 0 END);
END
$function$;
COMMENT ON FUNCTION @extschema@._available_facts(@extschema@.job_info, timestamptz) IS
    'Internal: what decides when an available job is claimed.';

CREATE OR REPLACE FUNCTION @extschema@._deferred_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT jsonb_build_object(
        'paused_at', (@extschema@._queue_options(p_info.queue)).paused_at, 'is_due', p_info.run_at <= p_now,
        'last_error', left(p_info.errors -> -1 ->> 'error', 1000),
        'releases', (d.job).ext -> 'releases',
        'unique_key_holder', (
            SELECT c.job_id FROM @extschema@.job_unique_claims c
            WHERE (d.job).ext -> 'unique' ? 'waiting' AND c.job_id <> p_info.job_id
              AND c.key = decode((d.job).ext -> 'unique' ->> 'key', 'hex')))
    FROM @extschema@._find_deferred(p_info.job_id) d
$function$;
COMMENT ON FUNCTION @extschema@._deferred_facts(@extschema@.job_info, timestamptz) IS
    'Internal: what a deferred job waits for.';

CREATE OR REPLACE FUNCTION @extschema@._running_facts(p_info @extschema@.job_info, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_instance @extschema@.runtime_instances;
BEGIN
    SELECT i.* INTO v_instance FROM @extschema@.runtime_instances i WHERE i.instance_id = p_info.instance_id;
    RETURN jsonb_build_object(
        'instance_id', p_info.instance_id, 'hostname', v_instance.info -> 'hostname', 'pid', v_instance.info -> 'pid',
        'heartbeat_at', v_instance.heartbeat_at,
        'instance_is_live', @extschema@._is_live(v_instance.heartbeat_at, p_now),
        'deadline_at', p_info.deadline_at, 'progress', p_info.progress,
        'is_evacuated', (@extschema@._find_open_lease(p_info.job_id)).job_id IS NOT NULL);
END
$function$;
COMMENT ON FUNCTION @extschema@._running_facts(@extschema@.job_info, timestamptz) IS
    'Internal: who runs a job, and until when.';

CREATE OR REPLACE FUNCTION @extschema@._counted(p_number bigint, p_noun text)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN p_number || ' ' || p_noun || CASE p_number WHEN 1 THEN '' ELSE 's' END;
COMMENT ON FUNCTION @extschema@._counted(bigint, text) IS 'Internal: a number with its noun.';

-- The first reason that holds, the hardest one first.
CREATE OR REPLACE FUNCTION @extschema@._waiting_sentence(p_info @extschema@.job_info, p_facts jsonb)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT format('Job %s is available', p_info.job_id) || CASE
        WHEN p_facts ? 'paused_at'
        THEN format(', but its queue "%s" is paused since %s.', p_info.queue, p_facts ->> 'paused_at')
        WHEN (p_facts ->> 'live_instances')::bigint = 0 AND p_facts -> 'has_sql_handler' = 'true'
        THEN format(', and no live worker takes jobs of queue "%s": the next work() of it may run it.', p_info.queue)
        WHEN (p_facts ->> 'live_instances')::bigint = 0
        THEN format(', but no live worker takes jobs of queue "%s".', p_info.queue)
        WHEN p_facts -> 'kind_is_known' = 'false'
        THEN format(', but no live worker of queue "%s" says that it knows kind "%s".', p_info.queue, p_info.kind)
        WHEN (p_facts ->> 'ahead')::bigint > 0
        THEN format(' and waits behind %s%s of queue "%s" and priority %s%s.',
            CASE WHEN (p_facts ->> 'ahead')::bigint >= 10000 THEN 'at least ' ELSE '' END,
            @extschema@._counted((p_facts ->> 'ahead')::bigint, 'job'), p_info.queue, p_info.priority,
            CASE WHEN (p_facts ->> 'lanes_first')::bigint > 0
                 THEN format(', after %s with better priority or older jobs',
                             @extschema@._counted((p_facts ->> 'lanes_first')::bigint, 'lane')) ELSE '' END)
        WHEN (p_facts ->> 'lanes_first')::bigint > 0
        THEN format(' and first in its lane, after %s of queue "%s" with better priority or older jobs.',
            @extschema@._counted((p_facts ->> 'lanes_first')::bigint, 'lane'), p_info.queue)
        ELSE format(' and next: the next claim of queue "%s" takes it.', p_info.queue) END
$function$;
COMMENT ON FUNCTION @extschema@._waiting_sentence(@extschema@.job_info, jsonb) IS
    'Internal: why an available job does not run yet.';

CREATE OR REPLACE FUNCTION @extschema@._job_sentence(p_info @extschema@.job_info, p_facts jsonb)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT CASE p_info.state
    WHEN 'available' THEN @extschema@._waiting_sentence(p_info, p_facts)
    WHEN 'scheduled' THEN format('Job %s is scheduled: ', p_info.job_id) || CASE
        WHEN p_facts ? 'unique_key_holder'
        THEN format('it needs its unique key, which job %s has; at %s it gets it, or is cancelled.',
            p_facts ->> 'unique_key_holder', p_info.run_at)
        WHEN p_facts ? 'releases'
        THEN format('no worker that claimed it knew kind "%s" (%s so far); it is offered again at %s.',
            p_info.kind, @extschema@._counted((p_facts ->> 'releases')::bigint, 'time'), p_info.run_at)
        WHEN p_facts -> 'is_due' = 'true' THEN format('it is due since %s and waits for a tick.', p_info.run_at)
        ELSE format('it may run from %s.', p_info.run_at) END
    WHEN 'retryable' THEN format('Job %s failed in attempt %s of %s%s and %s.', p_info.job_id, p_info.attempt,
        p_info.max_attempts, coalesce(format(' (%s)', p_facts ->> 'last_error'), ''),
        CASE WHEN p_facts ? 'unique_key_holder'
             THEN format('is tried again at %s, if job %s gives its unique key free by then', p_info.run_at,
                         p_facts ->> 'unique_key_holder')
             WHEN p_facts -> 'is_due' = 'true' THEN format('is due since %s: it waits for a tick', p_info.run_at)
             ELSE format('is tried again at %s', p_info.run_at) END)
    WHEN 'running' THEN format('Job %s runs since %s, attempt %s of %s, in worker %s%s%s.', p_info.job_id,
        p_info.attempted_at, p_info.attempt, p_info.max_attempts, p_info.instance_id,
        coalesce(format(' on %s', p_facts ->> 'hostname'), ''),
        CASE WHEN p_facts -> 'instance_is_live' = 'true' THEN ''
             ELSE ', which is silent: the attempt will be rescued' END)
    WHEN 'pruned' THEN format('Job %s left no trace: its history was pruned, it was purged, or its insert rolled back.',
        p_info.job_id)
    WHEN 'failed' THEN format('Job %s failed at %s after %s (%s)%s.', p_info.job_id, p_info.finalized_at,
        @extschema@._counted(p_info.attempt, 'attempt'), concat_ws(': ', p_info.reason, p_facts ->> 'last_error'),
        CASE WHEN p_facts -> 'is_dead_letter' = 'true' THEN ' and is a dead letter' ELSE '' END)
    ELSE format('Job %s was %s at %s%s.', p_info.job_id, p_info.state, p_info.finalized_at,
        coalesce(format(' (%s)', p_info.reason), ''))
    END
$function$;
COMMENT ON FUNCTION @extschema@._job_sentence(@extschema@.job_info, jsonb) IS
    'Internal: what is to say about a job, in one sentence.';

CREATE OR REPLACE FUNCTION @extschema@._explain_job(p_job_id bigint, p_now timestamptz)
RETURNS @extschema@.job_explanation
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_info @extschema@.job_info;
    v_facts jsonb;
BEGIN
    -- The look-ups end by an exception, so that their relation locks vanish.
    BEGIN
        v_info := @extschema@._job_info(p_job_id);
        v_facts := CASE
            WHEN v_info.state = 'available' THEN @extschema@._available_facts(v_info, p_now)
            WHEN v_info.state IN ('scheduled', 'retryable') THEN @extschema@._deferred_facts(v_info, p_now)
            WHEN v_info.state = 'running' THEN @extschema@._running_facts(v_info, p_now)
            WHEN v_info.state = 'pruned' THEN jsonb_build_object('pruned_at', v_info.pruned_at)
            ELSE jsonb_build_object(
                'last_error', left(v_info.errors -> -1 ->> 'error', 1000),
                'is_dead_letter', EXISTS (SELECT FROM @extschema@.dlq_entries d WHERE d.job_id = p_job_id)) END;
        RAISE EXCEPTION USING ERRCODE = 'JQ000';
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    v_facts := jsonb_strip_nulls(v_facts || jsonb_build_object(
        'queue', v_info.queue, 'kind', v_info.kind, 'priority', v_info.priority, 'attempt', v_info.attempt,
        'max_attempts', v_info.max_attempts, 'run_at', v_info.run_at, 'created_at', v_info.created_at,
        'attempted_at', v_info.attempted_at, 'finalized_at', v_info.finalized_at, 'reason', v_info.reason));
    RETURN ROW(p_job_id, v_info.state, @extschema@._job_sentence(v_info, v_facts),
        v_facts)::@extschema@.job_explanation;
END
$function$;
COMMENT ON FUNCTION @extschema@._explain_job(bigint, timestamptz) IS
    'Internal: a job''s state with its reasons; 42704 and 40001 as job().';

-- maintenance: bounded steps, each under its own try-lock
-- What a slot of a ring consists of.

CREATE OR REPLACE FUNCTION @extschema@._ring_tables(p_ring text)
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring
    WHEN 'queue' THEN ARRAY['ready_entries', 'ready_tombstones', 'ready_claim_attempt_batches', 'done_entries',
                            'receipt_completion_batches']
    WHEN 'claim' THEN ARRAY['lease_claim_batches', 'lease_claim_closures']
    WHEN 'deferred' THEN ARRAY['deferred_jobs'] END;
COMMENT ON FUNCTION @extschema@._ring_tables(text) IS 'Internal: families of a ring, in lock order.';

CREATE OR REPLACE FUNCTION @extschema@._slot_is_empty(p_ring text, p_slot integer)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN NOT EXISTS (SELECT FROM unnest(@extschema@._ring_tables(p_ring)) t WHERE @extschema@._leaf_in_use(t, p_slot));
COMMENT ON FUNCTION @extschema@._slot_is_empty(text, integer) IS 'Internal: whether no leaf of a slot holds blocks.';

-- With indexes and oversized values; an empty slot counts as 0, although its indexes have a first page.
CREATE OR REPLACE FUNCTION @extschema@._slot_bytes(p_ring text, p_slot integer)
RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT CASE WHEN @extschema@._slot_is_empty(p_ring, p_slot) THEN 0
                    ELSE sum(pg_total_relation_size(('@extschema@.' || t || '_' || p_slot)::regclass)) END::bigint
        FROM unnest(@extschema@._ring_tables(p_ring)) t);
COMMENT ON FUNCTION @extschema@._slot_bytes(text, integer) IS
    'Internal: bytes of a slot, indexes and oversized values included.';
-- A ring turns in two transactions. Plan appends the ledger row of the next generation and an empty
-- slot; publish moves the cursor to a ledger row that its own transaction did not write. The ledger
-- leads, so a rollback anywhere is harmless.

-- History that shares a slot goes together, so a slot is left after one retention at the latest. Not more often than
-- four times a minute: each TRUNCATE leaves dead rows in the catalog.
CREATE OR REPLACE FUNCTION @extschema@._rotate_seconds(p_ring text)
RETURNS numeric
LANGUAGE sql STABLE PARALLEL SAFE
RETURN least(@extschema@._setting(p_ring || '_rotate_seconds'),
    CASE p_ring WHEN 'queue' THEN greatest(@extschema@._setting('terminal_retention_seconds'), 15) END);
COMMENT ON FUNCTION @extschema@._rotate_seconds(text) IS 'Internal: age at which the current slot of a ring is left.';

CREATE OR REPLACE FUNCTION @extschema@._plan_ring(p_ring text, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint;
    v_slots integer := @extschema@._slot_count(p_ring);
    v_current integer;
    v_bytes bigint;
    v_since timestamptz;
    v_next integer;
BEGIN
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        RETURN 'contended';
    END IF;
    v_cursor := @extschema@._ring_cursor(p_ring);
    v_current := v_cursor % 64;
    IF @extschema@._planned_slot(p_ring, v_cursor / 64) IS NOT NULL THEN
        RETURN 'planned';
    END IF;
    v_bytes := @extschema@._slot_bytes(p_ring, v_current);
    IF v_bytes = 0 THEN
        RETURN 'skipped_idle';
    END IF;
    v_since := (SELECT s.rotated_at FROM @extschema@._ring_slots(p_ring) s WHERE s.slot = v_current);
    IF v_bytes < @extschema@._setting(p_ring || '_rotate_bytes')
       AND p_now < v_since + make_interval(secs => @extschema@._rotate_seconds(p_ring)::double precision) THEN
        RETURN 'not_due';
    END IF;
    -- Any empty slot will do, so that one busy slot does not stop the ring.
    v_next := (
        SELECT s
        FROM generate_series(0, v_slots - 1) s
        WHERE s <> v_current AND @extschema@._slot_is_empty(p_ring, s)
        ORDER BY (s - v_current + v_slots) % v_slots
        LIMIT 1);
    IF v_next IS NULL THEN
        RETURN 'skipped_busy';
    END IF;
    PERFORM @extschema@._plan_rotation(p_ring, v_next, v_cursor / 64 + 1, p_now);
    RETURN 'planned';
END
$function$;
COMMENT ON FUNCTION @extschema@._plan_ring(text, timestamptz) IS
    'Internal: plans the next generation: planned, not_due, skipped_idle, skipped_busy or contended.';

CREATE OR REPLACE FUNCTION @extschema@._publish_ring(p_ring text)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint;
    v_slot integer;
BEGIN
    -- A transaction that wrote nothing yet has not written the ledger row, so the row it sees is committed.
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        RETURN 'not_fresh';
    END IF;
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        RETURN 'contended';
    END IF;
    v_cursor := @extschema@._ring_cursor(p_ring);
    v_slot := @extschema@._planned_slot(p_ring, v_cursor / 64);
    -- pause point: publish
    IF v_slot IS NULL THEN
        RETURN 'nothing_planned';
    END IF;
    PERFORM @extschema@._set_ring_cursor(p_ring, v_cursor / 64 + 1, v_slot);
    RETURN 'published';
END
$function$;
COMMENT ON FUNCTION @extschema@._publish_ring(text) IS
    'Internal: makes the planned slot current: published, nothing_planned, not_fresh or contended.';
-- Prune: a slot is emptied by TRUNCATE once nothing in it waits or runs. Gates are cheap and prove nothing by
-- themselves; the recheck under EXCLUSIVE decides: nobody writes to the slot then, and a claim that has taken one of
-- its rows and not committed leaves that row unclaimed in our view. What takes long happens there, where readers pass;
-- ACCESS EXCLUSIVE is for TRUNCATE alone. Locks are taken NOWAIT: a queued exclusive lock would block every later
-- claim.
-- A slot goes in two transactions. The first finds that nothing needs it, copies what must outlive it and releases it.
-- The second, dump_lock_seconds later, finds the same again and truncates: by then a dump that still had to see a job
-- wait or run here has its locks.

-- Lanes with rows in a slot, found by skipping through the index.
CREATE OR REPLACE FUNCTION @extschema@._lanes_in_slot(p_slot integer)
RETURNS SETOF integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
DECLARE
    v_position bigint := 0;
BEGIN
    IF NOT @extschema@._leaf_in_use('ready_entries', p_slot) THEN
        RETURN;
    END IF;
    LOOP
        EXECUTE format('SELECT r."position" FROM @extschema@.ready_entries_%s r
                        WHERE r."position" > $1 ORDER BY r."position" LIMIT 1', p_slot)
            INTO v_position USING v_position;
        EXIT WHEN v_position IS NULL;
        RETURN NEXT @extschema@._lane_of(v_position);
        v_position := @extschema@._lane_base(@extschema@._lane_of(v_position) + 1);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lanes_in_slot(integer) IS 'Internal: lanes that have rows in a slot.';

-- Waiting rows of a lane in a slot, counted up to p_most.
CREATE OR REPLACE FUNCTION @extschema@._count_waiting(p_slot integer, p_lane integer, p_most bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN coalesce(cardinality((@extschema@._see_leaf(
        p_slot, @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane)), p_most::integer, false
        )).positions), 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._count_waiting(integer, integer, bigint) IS
    'Internal: waiting jobs of a lane in a slot, up to a bound.';

CREATE OR REPLACE FUNCTION @extschema@._unclaimed_lane(p_slot integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane integer;
BEGIN
    FOR v_lane IN SELECT l FROM @extschema@._lanes_in_slot(p_slot) l LOOP
        IF @extschema@._count_waiting(p_slot, v_lane, 1) > 0 THEN
            RETURN v_lane;
        END IF;
    END LOOP;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._unclaimed_lane(integer) IS 'Internal: a lane with waiting jobs in a slot, or NULL.';

-- What keeps the rows of a slot alive; NULL when nothing does. History is not a reason here.
CREATE OR REPLACE FUNCTION @extschema@._slot_blocker(p_ring text, p_slot integer)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_cursor bigint := @extschema@._ring_cursor(p_ring);
    v_lane integer;
    v_open record;
BEGIN
    IF p_slot = v_cursor % 64 THEN
        RETURN '{"reason": "current"}'::jsonb;
    ELSIF p_slot = @extschema@._planned_slot(p_ring, v_cursor / 64) THEN
        RETURN '{"reason": "planned"}'::jsonb;
    END IF;
    IF p_ring = 'queue' THEN
        v_lane := @extschema@._unclaimed_lane(p_slot);
        IF v_lane IS NOT NULL THEN
            RETURN (SELECT jsonb_build_object(
                        'reason', 'unclaimed', 'queue', l.queue, 'priority', l.priority, 'shard', l.shard)
                    FROM @extschema@.queue_lanes l
                    WHERE l.lane_id = v_lane);
        END IF;
    END IF;
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN p_ring = 'claim' AND v_claim_slot <> p_slot;
        v_open := @extschema@._first_open_batch(v_claim_slot, CASE p_ring WHEN 'queue' THEN p_slot END);
        IF v_open.batch_id IS NOT NULL THEN
            RETURN jsonb_build_object('reason', 'receipts', 'instance', v_open.owner, 'batch_id', v_open.batch_id,
                                      'position', lower(v_open.open), 'claimed_at', v_open.claimed_at);
        END IF;
    END LOOP;
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_blocker(text, integer) IS
    'Internal: why a slot cannot be emptied: current, planned, unclaimed (queue) or receipts (instance).';

-- Whether the history of a slot must be kept a while. Room comes first: without an
-- empty slot, or above the size cap, it goes.
CREATE OR REPLACE FUNCTION @extschema@._slot_is_retained(p_ring text, p_slot integer, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_newest timestamptz;
    v_empty bigint;
    v_bytes bigint;
    v_before timestamptz := p_now - @extschema@._setting_interval(
        CASE p_ring WHEN 'queue' THEN 'terminal_retention_seconds' ELSE 'attempt_evidence_seconds' END);
BEGIN
    SELECT count(*) FILTER (WHERE b.bytes = 0), sum(b.bytes) INTO v_empty, v_bytes
    FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s,
         LATERAL (SELECT @extschema@._slot_bytes(p_ring, s) AS bytes) b;
    IF v_empty = 0 OR (p_ring = 'queue' AND v_bytes > @extschema@._setting('ring_size_cap_bytes')) THEN
        RETURN false;
    ELSIF @extschema@._slot_left_at(p_ring, p_slot) > v_before THEN
        -- Rows that ended there until then are not older than retention; no need to look.
        RETURN true;
    END IF;
    IF p_ring = 'queue' THEN
        v_newest := @extschema@._newest_terminal_at(p_slot);
    ELSE
        EXECUTE format('SELECT max(c.closed_at) FROM @extschema@.lease_claim_closures_%s c', p_slot) INTO v_newest;
    END IF;
    RETURN coalesce(v_newest > v_before, false);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_is_retained(text, integer, timestamptz) IS
    'Internal: whether retention keeps a slot.';

CREATE OR REPLACE FUNCTION @extschema@._lock_slot(p_ring text, p_slot integer, p_mode text, p_tries integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR v_try IN 1 .. p_tries LOOP
        BEGIN
            EXECUTE format('LOCK TABLE %s IN %s MODE NOWAIT',
                (SELECT string_agg('@extschema@.' || t.name || '_' || p_slot, ', ' ORDER BY t.o)
                 FROM unnest(@extschema@._ring_tables(p_ring)) WITH ORDINALITY t (name, o)), p_mode);
            RETURN true;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.002);
        END;
    END LOOP;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._lock_slot(text, integer, text, integer) IS
    'Internal: locks all leaves of a slot, or none, without queueing.';

CREATE OR REPLACE FUNCTION @extschema@._end_keys_of_slot(p_slot integer, p_now timestamptz)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_keys bytea[];
    v_job_ids bigint[];
    v_states @extschema@.job_state[];
    v_expires_at timestamptz[];
BEGIN
    IF NOT EXISTS (SELECT FROM @extschema@.job_unique_claims) THEN
        RETURN;
    END IF;
    SELECT array_agg(decode(j.unique_key, 'hex')), array_agg(j.job_id), array_agg(j.state),
           array_agg(j.finalized_at + @extschema@._setting_interval(@extschema@._retention_of(j.state)))
    INTO v_keys, v_job_ids, v_states, v_expires_at
    FROM @extschema@._ended_unique_jobs(p_slot) j;
    PERFORM @extschema@._end_keys(v_keys, v_job_ids, v_states, v_expires_at, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._end_keys_of_slot(integer, timestamptz) IS
    'Internal: settles the unique keys of jobs whose end is about to be forgotten.';

-- Whether something ended or was moved in a slot since it was released: a producer with an old view of the ring can
-- have put a job there that came and went between two looks.
CREATE OR REPLACE FUNCTION @extschema@._ended_since(p_ring text, p_slot integer, p_at timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found boolean;
BEGIN
    IF p_ring = 'queue' AND @extschema@._newest_terminal_at(p_slot) > p_at THEN
        RETURN true;
    END IF;
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN (p_ring = 'claim' AND v_claim_slot <> p_slot)
            OR NOT @extschema@._leaf_in_use('lease_claim_closures', v_claim_slot);
        EXECUTE format('SELECT EXISTS (
                SELECT FROM @extschema@.lease_claim_closures_%1$s c
                JOIN @extschema@.lease_claim_batches_%1$s b ON b.batch_id = c.batch_id
                WHERE c.closed_at > $1 AND ($2 IS NULL OR b.ready_slot = $2))', v_claim_slot)
            INTO v_found USING p_at, CASE p_ring WHEN 'queue' THEN p_slot END;
        IF v_found THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._ended_since(text, integer, timestamptz) IS
    'Internal: whether an attempt or a job ended in a slot since a time.';

CREATE OR REPLACE FUNCTION @extschema@._prune_slot(p_ring text, p_slot integer, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_released timestamptz := @extschema@._slot_released_at(p_ring, p_slot);
    v_kept bigint := 0;
    v_outcome text := 'pruned';
    v_used text;
BEGIN
    -- The block undoes counts and locks when the slot turns out to be in use.
    BEGIN
        IF NOT @extschema@._lock_slot(p_ring, p_slot, 'EXCLUSIVE', 1) THEN
            RETURN 'locked';
        END IF;
        -- pause point: recheck
        IF @extschema@._slot_blocker(p_ring, p_slot) IS NOT NULL THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        IF p_ring = 'queue' THEN
            v_kept := @extschema@._keep_failed(p_slot, p_now) + @extschema@._checkpoint_claim_heads(p_slot);
        END IF;
        IF @extschema@._setting('dump_lock_seconds') > 0
           AND (v_released IS NULL OR v_kept > 0 OR @extschema@._ended_since(p_ring, p_slot, v_released)) THEN
            PERFORM @extschema@._note_released(p_ring, p_slot, p_now);
            RETURN 'released';
        END IF;
        IF p_ring = 'queue' THEN
            PERFORM @extschema@._fold_terminal_counts(p_slot, p_now);
            PERFORM @extschema@._end_keys_of_slot(p_slot, p_now);
        END IF;
        IF NOT @extschema@._lock_slot(p_ring, p_slot, 'ACCESS EXCLUSIVE', 10) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        v_used := (
            SELECT string_agg('@extschema@.' || t.name || '_' || p_slot, ', ')
            FROM unnest(@extschema@._ring_tables(p_ring)) t (name)
            WHERE @extschema@._leaf_in_use(t.name, p_slot));
        PERFORM @extschema@._note_released(p_ring, p_slot, NULL);
        EXECUTE format('TRUNCATE %s', v_used);
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_slot(text, integer, timestamptz) IS
    'Internal: empties one slot, or releases it, so that a later call does: pruned, released, locked or in_use.';

-- The gates of prune. A slot is released so early that it can go when its retention ends. While it is released nobody
-- looks at it, and one that is needed again has to be seen free again.
CREATE OR REPLACE FUNCTION @extschema@._prune_blocker(p_ring text, p_slot integer, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_dumps interval := @extschema@._setting_interval('dump_lock_seconds');
    v_released timestamptz := CASE WHEN v_dumps > interval '0' THEN @extschema@._slot_released_at(p_ring, p_slot) END;
    v_blocker jsonb;
BEGIN
    IF NOT @extschema@._is_past_dumps(v_released, p_now) THEN
        RETURN '{"reason": "recent"}'::jsonb;
    ELSIF @extschema@._slot_is_retained(
            p_ring, p_slot, CASE WHEN v_released IS NULL THEN p_now + v_dumps ELSE p_now END) THEN
        RETURN '{"reason": "retention"}'::jsonb;
    END IF;
    v_blocker := @extschema@._slot_blocker(p_ring, p_slot);
    IF v_blocker IS NOT NULL AND v_released IS NOT NULL THEN
        PERFORM @extschema@._note_released(p_ring, p_slot, NULL);
    END IF;
    RETURN v_blocker;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_blocker(text, integer, timestamptz) IS
    'Internal: why a slot is not emptied now: retention, recent (a dump may not have locked it yet), or what keeps it '
    'alive.';

-- The oldest slot that can go, at most one.
CREATE OR REPLACE FUNCTION @extschema@._prune_ring(p_ring text, p_now timestamptz, OUT outcome text, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_slot integer;
    v_blocker jsonb;
    v_outcome text;
BEGIN
    outcome := 'nothing';
    PERFORM @extschema@._require_read_committed();
    IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key(p_ring || '_ring', 0)) THEN
        outcome := 'contended';
        RETURN;
    END IF;
    FOR v_slot IN SELECT s FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s
                  LEFT JOIN @extschema@._ring_slots(p_ring) r ON r.slot = s
                  WHERE s <> @extschema@._ring_cursor(p_ring) % 64 AND NOT @extschema@._slot_is_empty(p_ring, s)
                  ORDER BY r.generation NULLS FIRST LOOP
        -- What the gates look at must not stay locked: they look into other slots than the one that is pruned.
        BEGIN
            v_blocker := @extschema@._prune_blocker(p_ring, v_slot, p_now);
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        END;
        IF v_blocker IS NULL THEN
            -- pause point: prune
            v_outcome := @extschema@._prune_slot(p_ring, v_slot, p_now);
            IF v_outcome IN ('pruned', 'released') OR detail IS NULL THEN
                outcome := v_outcome;
                detail := jsonb_build_object('slot', v_slot);
            END IF;
            -- A slot that an idle transaction has locked does not stop the others.
            EXIT WHEN v_outcome IN ('pruned', 'released');
        ELSIF detail IS NULL THEN
            outcome := 'skipped';
            detail := v_blocker || jsonb_build_object('slot', v_slot);
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_ring(text, timestamptz) IS
    'Internal: empties the oldest slot that nothing needs; otherwise says what keeps the oldest one.';

-- leases and attempt_state are ordinary tables. Once empty they are truncated, so that no snapshot can keep what died
-- in them; below 256 kB that is not worth the dead rows that TRUNCATE leaves in the catalog.
CREATE OR REPLACE FUNCTION @extschema@._prune_attempts(OUT outcome text, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_table text;
BEGIN
    outcome := 'nothing';
    FOREACH v_table IN ARRAY '{leases,attempt_state}'::text[] LOOP
        CONTINUE WHEN pg_relation_size(('@extschema@.' || v_table)::regclass) < 262144
            OR NOT @extschema@._is_vacant(v_table);
        BEGIN
            EXECUTE format('LOCK TABLE @extschema@.%I IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
            IF NOT @extschema@._is_vacant(v_table) THEN
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            END IF;
            EXECUTE format('TRUNCATE @extschema@.%I', v_table);
            outcome := 'pruned';
            detail := jsonb_build_object('table', v_table);
            RETURN;
        EXCEPTION WHEN SQLSTATE 'JQ000' THEN
            NULL;
        WHEN lock_not_available THEN
            outcome := 'locked';
            detail := jsonb_build_object('table', v_table);
        END;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_attempts() IS
    'Internal: truncates leases or attempt_state when nothing is in it: nothing, pruned or locked.';

CREATE OR REPLACE FUNCTION @extschema@._is_vacant(p_table text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_is_vacant boolean;
BEGIN
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM @extschema@.%I)', p_table) INTO v_is_vacant;
    RETURN v_is_vacant;
END
$function$;
COMMENT ON FUNCTION @extschema@._is_vacant(text) IS 'Internal: whether a table has no visible row.';
-- Deferred jobs are ordinary rows, and their leaves are emptied by TRUNCATE: it does not ask snapshots, so a pinned one
-- does not make promotion slow.

CREATE OR REPLACE FUNCTION @extschema@._slot_is_calm(p_slot integer, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    -- NULL on a standby, where no UNLOGGED sequence can be read.
    v_taken bigint := pg_sequence_last_value(format('@extschema@.deferred_%s_taken', p_slot)::regclass);
BEGIN
    RETURN @extschema@._is_past_dumps('epoch'::timestamptz + coalesce(v_taken, 0) * interval '1 second', p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_is_calm(integer, timestamptz) IS
    'Internal: whether nothing was taken out of a slot of deferred_jobs for dump_lock_seconds.';

CREATE OR REPLACE FUNCTION @extschema@._prune_bucket(p_slot integer, p_now timestamptz)
RETURNS text
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_outcome text := 'pruned';
BEGIN
    -- The block undoes locks when the slot turns out to be in use.
    BEGIN
        IF (@extschema@._last_deferred(p_slot)).run_at IS NOT NULL THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        -- pause point: prune
        -- SHARE keeps writers out while the look is repeated; readers go on.
        IF NOT @extschema@._lock_slot('deferred', p_slot, 'SHARE', 1) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        IF (@extschema@._last_deferred(p_slot)).run_at IS NOT NULL
           OR NOT @extschema@._slot_is_calm(p_slot, p_now) THEN
            v_outcome := 'in_use';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        -- pause point: recheck
        IF NOT @extschema@._lock_slot('deferred', p_slot, 'ACCESS EXCLUSIVE', 10) THEN
            v_outcome := 'locked';
            RAISE EXCEPTION USING ERRCODE = 'JQ000';
        END IF;
        EXECUTE format('TRUNCATE %s', format('@extschema@.deferred_jobs_%s', p_slot)::regclass);
    EXCEPTION WHEN SQLSTATE 'JQ000' THEN
        NULL;
    END;
    RETURN v_outcome;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_bucket(integer, timestamptz) IS
    'Internal: empties a slot of deferred_jobs that holds no job: pruned, locked or in_use.';

-- One slot a call. A small one is left: truncating costs more than its dead rows.
CREATE OR REPLACE FUNCTION @extschema@._prune_deferred(
    p_now timestamptz, OUT outcome text, OUT moved bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_small constant bigint := 262144;
    v_outcome text;
BEGIN
    PERFORM @extschema@._require_read_committed();
    outcome := 'nothing';
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        CONTINUE WHEN @extschema@._slot_bytes('deferred', v_slot) < c_small
            OR NOT @extschema@._slot_is_calm(v_slot, p_now);
        v_outcome := @extschema@._prune_bucket(v_slot, p_now);
        IF v_outcome = 'in_use' THEN
            moved := nullif(@extschema@._move_stragglers(v_slot, p_now), 0);
            -- It is truncated by a later call.
            v_outcome := CASE WHEN moved IS NULL THEN 'nothing' ELSE 'moved' END;
        END IF;
        CONTINUE WHEN v_outcome = 'nothing';
        outcome := v_outcome;
        detail := jsonb_build_object('slot', v_slot);
        EXIT WHEN outcome <> 'locked';
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._prune_deferred(timestamptz) IS
    'Internal: empties one slot of deferred_jobs without jobs: pruned, moved (a few overdue jobs, out of its way), '
    'locked or nothing.';
-- Evacuation: when empty slots run short, and else after a wrap of the ring, what keeps an old slot alive moves out of
-- the way.
-- Waiting jobs (a paused queue, a queue without workers, a starved priority) move to the current slot under their
-- position and id. The copy is an insert like any other, and the old row gets a tombstone in the same transaction. It
-- holds the lane and the mutation lock, so that no claim and no cancel runs between the two; a lane in use waits for
-- the next tick. Attempts that run for long move into leases, under the lock of their batch.

-- Moves waiting rows of one lane out of a slot; the locks of the lane are held.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_lane(p_slot integer, p_lane integer, p_limit bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_target integer;
    v_positions bigint[];
BEGIN
    PERFORM pg_current_xact_id();
    v_target := @extschema@._ring_cursor('queue') % 64;
    v_positions := (@extschema@._see_leaf(
        p_slot, @extschema@._unclaimed_set(@extschema@._newest_emission(p_lane)), p_limit::integer, true)).positions;
    -- pause point: evacuate
    PERFORM @extschema@._move_ready(v_positions, p_slot, v_target);
    RETURN coalesce(cardinality(v_positions), 0);
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_lane(integer, integer, bigint) IS
    'Internal: moves up to so many waiting jobs of a lane from a slot to the current one.';

-- All lanes of a slot, or nothing when more waits there than moving is worth: then the queue ring grows instead.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_lanes(
    p_slot integer, p_limit bigint, OUT outcome text, OUT moved bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane integer;
    v_left bigint := @extschema@._setting('evacuate_max_rows') + 1;
BEGIN
    moved := 0;
    FOR v_lane IN SELECT l FROM @extschema@._lanes_in_slot(p_slot) l LOOP
        v_left := v_left - @extschema@._count_waiting(p_slot, v_lane, v_left);
        IF v_left <= 0 THEN
            outcome := 'too_many';
            RETURN;
        END IF;
    END LOOP;
    FOR v_lane IN SELECT l FROM @extschema@._lanes_in_slot(p_slot) l LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane))
            OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', v_lane));
        moved := moved + @extschema@._evacuate_lane(p_slot, v_lane, p_limit - moved);
        EXIT WHEN moved >= p_limit;
    END LOOP;
    outcome := CASE WHEN moved > 0 THEN 'moved' ELSE 'contended' END;
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_lanes(integer, bigint) IS
    'Internal: moves waiting jobs out of a slot: moved, too_many or contended.';

-- Open attempts whose receipt (claim ring) or body (queue ring) lies in a slot become leases. Young ones are about to
-- end by themselves, and a lease costs more than a receipt.
CREATE OR REPLACE FUNCTION @extschema@._evacuate_attempts(
    p_ring text, p_slot integer, p_limit bigint, p_now timestamptz, OUT outcome text, OUT moved bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_open record;
    v_before timestamptz := p_now - @extschema@._setting_interval('evacuate_attempt_seconds');
BEGIN
    moved := 0;
    outcome := 'young';
    FOR v_claim_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        CONTINUE WHEN p_ring = 'claim' AND v_claim_slot <> p_slot;
        FOR v_open IN SELECT o.batch_id FROM @extschema@._open_batches(v_claim_slot) o
                      WHERE (p_ring = 'claim' OR o.ready_slot = p_slot) AND o.claimed_at <= v_before
                      ORDER BY o.batch_id LOOP
            outcome := 'contended';
            EXIT WHEN moved >= p_limit;
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_open.batch_id));
            -- pause point: lease
            moved := moved + @extschema@._lease_receipts(v_claim_slot, v_open.batch_id, p_limit - moved, p_now);
        END LOOP;
    END LOOP;
    IF moved > 0 THEN
        outcome := 'moved';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate_attempts(text, integer, bigint, timestamptz) IS
    'Internal: turns attempts that keep a slot into leases: moved, young or contended.';

CREATE OR REPLACE FUNCTION @extschema@._slots_are_short(p_ring text)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN (SELECT count(*) FILTER (WHERE @extschema@._slot_is_empty(p_ring, s)) * 4 <= @extschema@._slot_count(p_ring)
            OR (p_ring = 'queue'
                AND sum(@extschema@._slot_bytes(p_ring, s)) > @extschema@._setting('ring_size_cap_bytes'))
        FROM generate_series(0, @extschema@._slot_count(p_ring) - 1) s);
COMMENT ON FUNCTION @extschema@._slots_are_short(text) IS
    'Internal: whether at most a quarter of the slots is empty, or the queue ring is above its cap.';

-- One slot a step: the oldest one that can be freed is what the ring waits for.
CREATE OR REPLACE FUNCTION @extschema@._evacuate(
    p_limit bigint, p_now timestamptz, OUT outcome text, OUT moved bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring text;
    v_before bigint;
    v_slot integer;
    v_reason text;
BEGIN
    PERFORM @extschema@._require_read_committed();
    moved := 0;
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        -- With room to spare a slot may be kept for one wrap of the ring.
        v_before := CASE WHEN @extschema@._slots_are_short(v_ring) THEN @extschema@._ring_cursor(v_ring) / 64
                         ELSE @extschema@._ring_cursor(v_ring) / 64 - @extschema@._slot_count(v_ring) + 1 END;
        FOR v_slot IN SELECT r.slot FROM @extschema@._ring_slots(v_ring) r
                      WHERE r.generation < v_before
                        AND NOT @extschema@._slot_is_empty(v_ring, r.slot)
                      ORDER BY r.generation LOOP
            v_reason := @extschema@._slot_blocker(v_ring, v_slot) ->> 'reason';
            IF v_reason = 'unclaimed' THEN
                SELECT e.outcome, e.moved INTO outcome, moved FROM @extschema@._evacuate_lanes(v_slot, p_limit) e;
            ELSIF v_reason = 'receipts' THEN
                SELECT e.outcome, e.moved INTO outcome, moved
                FROM @extschema@._evacuate_attempts(v_ring, v_slot, p_limit, p_now) e;
            ELSE
                CONTINUE;
            END IF;
            detail := jsonb_build_object('ring', v_ring, 'slot', v_slot);
            IF moved > 0 THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
    outcome := coalesce(outcome, 'nothing');
END
$function$;
COMMENT ON FUNCTION @extschema@._evacuate(bigint, timestamptz) IS
    'Internal: moves up to so many jobs out of the oldest slot that they keep: moved, nothing, too_many, young or '
    'contended.';
-- Ends attempts whose worker is gone, whose deadline passed, or that their worker no longer knows. A rescue only
-- tries locks, and decides on what it reads under them: an attempt that finished meanwhile stays finished.

CREATE OR REPLACE FUNCTION @extschema@._rescue_positions(
    p_slot integer, p_batch bigint, p_positions bigint[], p_error text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_batch record;
    v_body record;
    v_progress jsonb;
    v_set int8multirange;
    v_half integer := cardinality(p_positions) / 2;
    v_message text;
BEGIN
    BEGIN
        v_batch := @extschema@._read_batch(p_slot, p_batch);
        v_set := @extschema@._to_set(p_positions) * v_batch.positions - v_batch.closed;
        IF v_set IS NULL OR isempty(v_set) THEN
            RETURN 0;
        END IF;
        v_progress := @extschema@._take_progress(p_batch, v_set);
        FOR v_body IN SELECT r.* FROM @extschema@._read_ready(v_batch.ready_slot, @extschema@._to_list(v_set)) r LOOP
            PERFORM @extschema@._move_attempt(
                @extschema@._ended_job(
                    @extschema@._next_attempt(v_body.job), v_progress -> v_body."position"::text),
                'rescued', v_batch.ready_slot, v_body."position", v_batch.claimed_at, NULL, to_jsonb(p_error),
                p_error, NULL, p_now);
        END LOOP;
        PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'rescued', v_set, p_error, p_now);
        RETURN @extschema@._cardinality(v_set);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT;
    END;
    IF v_half > 0 THEN
        RETURN @extschema@._rescue_positions(p_slot, p_batch, p_positions[:v_half], p_error, p_now)
             + @extschema@._rescue_positions(p_slot, p_batch, p_positions[v_half + 1:], p_error, p_now);
    END IF;
    FOR v_body IN SELECT r.* FROM @extschema@._read_ready(v_batch.ready_slot, p_positions) r LOOP
        PERFORM @extschema@._append_done(@extschema@._next_attempt(v_body.job), 'failed', v_batch.ready_slot,
            v_body."position", v_batch.claimed_at, p_now, 'rescue failed: ' || v_message, NULL);
    END LOOP;
    PERFORM @extschema@._append_closure(p_slot, p_batch, v_batch.next_no, 'failed', v_set, v_message, p_now);
    RETURN 1;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_positions(integer, bigint, bigint[], text, timestamptz) IS
    'Internal: ends open attempts of one batch as rescued; one that cannot be ends failed, with the reason.';

-- What of an open batch is to be rescued, and why.
CREATE OR REPLACE FUNCTION @extschema@._rescuable(
    p_owner uuid, p_claimed_at timestamptz, p_deadline_at timestamptz, p_open int8multirange, p_dead uuid[],
    p_stale interval, p_now timestamptz,
    OUT positions int8multirange, OUT error text)
RETURNS record
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_instance @extschema@.runtime_instances;
BEGIN
    positions := p_open;
    IF p_deadline_at < p_now THEN
        error := 'hard deadline exceeded';
        RETURN;
    ELSIF p_owner = ANY (p_dead) THEN
        error := 'heartbeat stale: worker presumed dead';
        RETURN;
    END IF;
    SELECT i.* INTO v_instance FROM @extschema@.runtime_instances i WHERE i.instance_id = p_owner;
    IF v_instance.heartbeat_at IS NULL THEN
        error := 'no heartbeat since the claim: worker presumed dead';
        positions := CASE WHEN p_claimed_at < p_now - p_stale THEN p_open ELSE '{}' END;
    ELSIF p_claimed_at < v_instance.heartbeat_before_at
          AND v_instance.held IS NOT NULL AND v_instance.held_before IS NOT NULL THEN
        error := 'attempt unknown to its worker: lost';
        positions := p_open - v_instance.held - v_instance.held_before;
    ELSE
        positions := '{}';
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescuable(
    uuid, timestamptz, timestamptz, int8multirange, uuid[], interval, timestamptz) IS
    'Internal: positions of a batch that must be rescued, with the error to record.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_lease(
    p_batch bigint, p_position bigint, p_error text, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lease @extschema@.leases := @extschema@._find_lease(p_batch, p_position);
BEGIN
    IF v_lease.batch_id IS NULL OR v_lease.outcome IS NOT NULL THEN
        RETURN 0;
    END IF;
    BEGIN
        PERFORM @extschema@._end_lease(v_lease, 'rescued', NULL, to_jsonb(p_error), p_error, NULL, p_now);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR program_limit_exceeded THEN
        PERFORM @extschema@._append_done(@extschema@._lease_job(v_lease), 'failed', NULL, NULL, v_lease.claimed_at,
            p_now, 'rescue failed: ' || SQLERRM, NULL);
        PERFORM @extschema@._close_lease(p_batch, p_position, 'failed', p_now);
    END;
    RETURN 1;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_lease(bigint, bigint, text, timestamptz) IS
    'Internal: ends a moved attempt as rescued; one that cannot be ends failed, with the reason.';

-- Looking at every open attempt costs a pass over the claim ring. Once a heartbeat interval is enough for what
-- heartbeats tell; in between only deadlines can pass. p_after is the time of the last pass, NULL for a pass.
CREATE OR REPLACE FUNCTION @extschema@._rescuable_batches(
    p_slot integer, p_after timestamptz, p_dead uuid[], p_stale interval, p_now timestamptz)
RETURNS TABLE (batch_id bigint, positions int8multirange, error text)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    IF p_after IS NULL THEN
        RETURN QUERY
        SELECT o.batch_id, r.positions, r.error
        FROM @extschema@._open_batches(p_slot) o,
             LATERAL @extschema@._rescuable(
                 o.owner, o.claimed_at, o.deadline_at, o.open, p_dead, p_stale, p_now) r
        WHERE NOT isempty(r.positions)
        ORDER BY o.batch_id;
    ELSIF @extschema@._leaf_in_use('lease_claim_batches', p_slot) THEN
        RETURN QUERY EXECUTE format($query$
            SELECT b.batch_id, x.positions, x.error
            FROM @extschema@.lease_claim_batches_%1$s b,
                 LATERAL @extschema@._read_batch(%1$s, b.batch_id) r,
                 LATERAL @extschema@._rescuable(
                     r.owner, r.claimed_at, r.deadline_at, r.positions - r.closed, $2, $3, $4) x
            WHERE b.deadline_at > $1 AND b.deadline_at < $4 AND NOT isempty(x.positions)
            ORDER BY b.batch_id
            $query$, p_slot) USING p_after, p_dead, p_stale, p_now;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescuable_batches(integer, timestamptz, uuid[], interval, timestamptz) IS
    'Internal: batches of a claim slot with attempts to rescue, with the error to record.';

-- When the last pass was; NULL when the next one is due.
CREATE OR REPLACE FUNCTION @extschema@._last_rescue_pass(p_now timestamptz)
RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT l.at
    FROM (SELECT to_timestamp(c.last_value / 1000.0) AS at FROM @extschema@.rescue_clock c) l
    WHERE p_now >= l.at
      AND p_now < l.at + @extschema@._setting_interval('heartbeat_seconds')
$function$;
COMMENT ON FUNCTION @extschema@._last_rescue_pass(timestamptz) IS
    'Internal: when every open attempt was last looked at; NULL when it is time to do so again.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_attempts(p_limit bigint, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_dead uuid[] := @extschema@._detect_dead_instances(p_now);
    v_stale interval := @extschema@._setting_interval('staleness_seconds');
    v_after timestamptz := @extschema@._last_rescue_pass(p_now);
    v_slot integer;
    v_found record;
    v_rescued bigint := 0;
BEGIN
    PERFORM @extschema@._require_read_committed();
    FOR v_slot IN SELECT s.slot FROM @extschema@._ring_slots('claim') s ORDER BY s.generation LOOP
        FOR v_found IN
            SELECT b.* FROM @extschema@._rescuable_batches(v_slot, v_after, v_dead, v_stale, p_now) b
        LOOP
            CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_found.batch_id));
            -- pause point: rescue
            v_rescued := v_rescued + @extschema@._rescue_positions(v_slot, v_found.batch_id,
                (@extschema@._to_list(v_found.positions))[:p_limit - v_rescued], v_found.error, p_now);
            IF v_rescued >= p_limit THEN
                RETURN v_rescued;
            END IF;
        END LOOP;
    END LOOP;
    v_rescued := v_rescued + @extschema@._rescue_leases(p_limit - v_rescued, v_dead, v_stale, p_now);
    IF v_after IS NULL AND v_rescued < p_limit THEN
        PERFORM setval('@extschema@.rescue_clock', (extract(epoch FROM p_now) * 1000)::bigint);
    END IF;
    RETURN v_rescued;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_attempts(bigint, timestamptz) IS
    'Internal: rescues up to so many attempts, oldest slot first.';

CREATE OR REPLACE FUNCTION @extschema@._rescue_leases(
    p_limit bigint, p_dead uuid[], p_stale interval, p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found record;
    v_rescued bigint := 0;
BEGIN
    FOR v_found IN
        SELECT l.batch_id, l."position", r.error
        FROM @extschema@.leases l,
             LATERAL @extschema@._rescuable(
                 l.owner, l.claimed_at, l.deadline_at, int8multirange(int8range(l."position", l."position", '[]')),
                 p_dead, p_stale, p_now) r
        WHERE l.outcome IS NULL AND NOT isempty(r.positions)
        ORDER BY l.batch_id, l."position"
        LIMIT p_limit
    LOOP
        -- pause point: rescue_lease
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_found.batch_id));
        v_rescued := v_rescued
            + @extschema@._rescue_lease(v_found.batch_id, v_found."position", v_found.error, p_now);
    END LOOP;
    RETURN v_rescued;
END
$function$;
COMMENT ON FUNCTION @extschema@._rescue_leases(bigint, uuid[], interval, timestamptz) IS
    'Internal: rescues up to so many moved attempts.';
-- Instances that are silent for long and own nothing are forgotten.
CREATE OR REPLACE FUNCTION @extschema@._forget_instances(p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_before timestamptz := p_now - @extschema@._setting_interval('instance_retention_seconds');
    v_silent uuid[] := ARRAY(
        SELECT i.instance_id
        FROM @extschema@.runtime_instances i
        WHERE coalesce(i.heartbeat_at, i.started_at) < v_before);
BEGIN
    IF cardinality(v_silent) = 0 THEN
        RETURN 0;
    END IF;
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        v_silent := ARRAY(
            SELECT u FROM unnest(v_silent) u
            EXCEPT
            SELECT o.owner FROM @extschema@._open_batches(v_slot) o);
    END LOOP;
    v_silent := ARRAY(
        SELECT u FROM unnest(v_silent) u
        EXCEPT
        SELECT l.owner FROM @extschema@.leases l WHERE l.outcome IS NULL);
    RETURN @extschema@._delete_instances(v_silent, v_before);
END
$function$;
COMMENT ON FUNCTION @extschema@._forget_instances(timestamptz) IS
    'Internal: deletes instances silent for instance_retention_seconds that own no attempt.';

-- A hint that leads its lane's ledger would hide jobs; nothing should make one, and this would repair it.
CREATE OR REPLACE FUNCTION @extschema@._audit_hints()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_cursor bigint;
    v_lowered bigint := 0;
BEGIN
    FOR v_lane IN SELECT l.lane_id, l.hint_seq FROM @extschema@.queue_lanes l ORDER BY random() LIMIT 512 LOOP
        CONTINUE WHEN coalesce(pg_sequence_last_value(v_lane.hint_seq), 0) = 0;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id));
        v_cursor := (@extschema@._newest_emission(v_lane.lane_id)).cursor;
        IF pg_sequence_last_value(v_lane.hint_seq) > v_cursor THEN
            PERFORM setval(v_lane.hint_seq, v_cursor);
            v_lowered := v_lowered + 1;
        END IF;
    END LOOP;
    RETURN v_lowered;
END
$function$;
COMMENT ON FUNCTION @extschema@._audit_hints() IS 'Internal: lowers idle hints that lead the emission ledger.';
-- After a restore or a failover: rows and sequences may come from different moments. Ring cursors
-- follow the ledger, other sequences are raised above what the tables show, and what belonged to the
-- old cluster (horizons, hints, what refill and prune remember) is cleared.

CREATE OR REPLACE FUNCTION @extschema@._raise_sequence(p_sequence regclass, p_seen bigint)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_last bigint;
BEGIN
    EXECUTE format('SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END
                    FROM %s s', p_sequence)
        INTO v_last;
    IF p_seen IS NULL OR p_seen <= v_last THEN
        RETURN false;
    END IF;
    PERFORM setval(p_sequence, p_seen);
    RETURN true;
END
$function$;
COMMENT ON FUNCTION @extschema@._raise_sequence(regclass, bigint) IS
    'Internal: raises a sequence to a value that is in use; never lowers it.';

CREATE OR REPLACE FUNCTION @extschema@._verify_rings()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_fresh boolean := pg_current_xact_id_if_assigned() IS NULL;
    v_ring text;
    v_newest record;
    v_changed bigint := 0;
BEGIN
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key(v_ring || '_ring', 0));
        SELECT s.slot, s.generation INTO v_newest
        FROM @extschema@._ring_slots(v_ring) s
        ORDER BY s.generation DESC
        LIMIT 1;
        PERFORM @extschema@._note_released(v_ring, s, NULL)
        FROM generate_series(0, @extschema@._slot_count(v_ring) - 1) s;
        IF @extschema@._ring_cursor(v_ring) <> v_newest.generation * 64 + v_newest.slot THEN
            IF NOT v_fresh THEN
                -- The ledger row may be this transaction's own: a rollback takes the row back, but not the cursor.
                PERFORM @extschema@._refuse('55000',
                    format('the %s ring cannot be verified in a transaction that has written', v_ring),
                    'Call verify() in a transaction of its own.');
            END IF;
            PERFORM @extschema@._set_ring_cursor(v_ring, v_newest.generation, v_newest.slot);
            v_changed := v_changed + 1;
        END IF;
    END LOOP;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_rings() IS 'Internal: sets ring cursors to their newest ledger row.';

-- Highest position of a lane that a row, its cursor or the id of a job shows: a job is called by its first position,
-- also where it went since. job_unique_claims has no index on its jobs, so the caller has looked there.
CREATE OR REPLACE FUNCTION @extschema@._highest_position(p_lane integer, p_claimed bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_base bigint := @extschema@._lane_base(p_lane);
    v_end bigint := @extschema@._lane_base(p_lane + 1);
BEGIN
    RETURN greatest(p_claimed, (@extschema@._newest_emission(p_lane)).cursor,
        (SELECT max(r."position") FROM @extschema@.ready_entries r
         WHERE r."position" > v_base AND r."position" < v_end),
        (SELECT max(r.job_id) FROM @extschema@.ready_entries r WHERE r.job_id > v_base AND r.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.deferred_jobs d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.dlq_entries d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(d.job_id) FROM @extschema@.done_entries d WHERE d.job_id > v_base AND d.job_id < v_end),
        (SELECT max(f.job_id) FROM @extschema@.failed_entries f WHERE f.job_id > v_base AND f.job_id < v_end),
        (SELECT max(l.job_id) FROM @extschema@.leases l WHERE l.job_id > v_base AND l.job_id < v_end));
END
$function$;
COMMENT ON FUNCTION @extschema@._highest_position(integer, bigint) IS
    'Internal: highest position of a lane that is in use, or the given one.';

CREATE OR REPLACE FUNCTION @extschema@._verify_lanes()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane record;
    v_highest bigint;
    v_emission @extschema@.queue_claim_heads;
    v_changed bigint := 0;
BEGIN
    IF EXISTS (
        SELECT FROM @extschema@.queue_lanes l JOIN pg_class c ON c.oid IN (l.position_seq, l.hint_seq)
        WHERE c.relowner <> (SELECT t.relowner FROM pg_class t WHERE t.oid = '@extschema@.queue_lanes'::regclass)) THEN
        PERFORM @extschema@._refuse('55000', 'lane sequences and tables have different owners',
            'A restore gives the tables to its own role: call set_owner() first.');
    END IF;
    FOR v_lane IN SELECT l.lane_id, l.position_seq, l.hint_seq, u.claimed
                  FROM @extschema@.queue_lanes l
                  LEFT JOIN (SELECT @extschema@._lane_of(c.job_id) AS lane_id, max(c.job_id) AS claimed
                             FROM @extschema@.job_unique_claims c GROUP BY 1) u ON u.lane_id = l.lane_id
                  ORDER BY l.lane_id LOOP
        PERFORM pg_advisory_xact_lock(@extschema@._lock_key('lane', v_lane.lane_id));
        v_highest := @extschema@._highest_position(v_lane.lane_id, v_lane.claimed);
        -- pg_dump does not write the dependency. ALTER also keeps producers out of the sequence until commit, and waits
        -- for them, so a lane that is sound goes without.
        IF 2 <> (SELECT count(*) FROM pg_depend d
                 WHERE d.classid = 'pg_class'::regclass AND d.objid IN (v_lane.position_seq, v_lane.hint_seq)
                   AND d.refclassid = 'pg_class'::regclass
                   AND d.refobjid = '@extschema@.queue_lanes'::regclass AND d.deptype = 'a')
           OR v_highest > @extschema@._lane_tail(v_lane.lane_id) THEN
            EXECUTE format('ALTER SEQUENCE %s OWNED BY @extschema@.queue_lanes.lane_id', v_lane.position_seq);
            EXECUTE format('ALTER SEQUENCE %s OWNED BY @extschema@.queue_lanes.lane_id', v_lane.hint_seq);
            -- What a producer wrote until ALTER had its lock is seen now.
            v_changed := v_changed + @extschema@._raise_sequence(v_lane.position_seq,
                @extschema@._highest_position(v_lane.lane_id, v_lane.claimed))::integer;
        END IF;
        PERFORM setval(v_lane.hint_seq, 0, false);
        v_emission := @extschema@._newest_emission(v_lane.lane_id);
        IF v_emission.horizon IS NOT NULL THEN
            v_emission.horizon := NULL;
            v_emission.claim_no := v_emission.claim_no + 1;
            PERFORM @extschema@._append_emission((@extschema@._ring_cursor('queue') % 64)::integer, v_emission);
            v_changed := v_changed + 1;
        END IF;
    END LOOP;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_lanes() IS
    'Internal: raises lane sequences, clears horizons and hints, restores dependencies.';

CREATE OR REPLACE FUNCTION @extschema@._verify_sequences()
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_changed bigint := 0;
BEGIN
    PERFORM @extschema@._forget_refill();
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.lane_ids',
        (SELECT max(l.lane_id) FROM @extschema@.queue_lanes l))::integer;
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.claim_batch_ids',
        greatest((SELECT max(b.batch_id) FROM @extschema@.lease_claim_batches b),
                 (SELECT max(l.batch_id) FROM @extschema@.leases l)))::integer;
    v_changed := v_changed + @extschema@._raise_sequence('@extschema@.job_ids', (SELECT max(x.id) FROM (
        SELECT d.job_id AS id FROM @extschema@.deferred_jobs d UNION ALL
        SELECT d.job_id FROM @extschema@.dlq_entries d UNION ALL
        SELECT d.job_id FROM @extschema@.done_entries d UNION ALL
        SELECT f.job_id FROM @extschema@.failed_entries f UNION ALL
        SELECT l.job_id FROM @extschema@.leases l UNION ALL
        SELECT c.job_id FROM @extschema@.job_unique_claims c UNION ALL
        SELECT r.job_id FROM @extschema@.ready_entries r) x WHERE x.id < @extschema@._lane_base(1)))::integer;
    RETURN v_changed;
END
$function$;
COMMENT ON FUNCTION @extschema@._verify_sequences() IS 'Internal: raises id sequences above what the tables show.';
-- One bounded round of maintenance. Any number of callers: each step runs under its own try-lock and in
-- a block of its own, so a step that fails is reported and the others go on. Cheap steps first; at most
-- one step that locks leaves, and it is last.

CREATE OR REPLACE FUNCTION @extschema@._tick_steps()
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '{publish_queue,publish_claim,plan_queue,plan_claim,refill,promote,rescue,expire,unique_keys,instances,hints,'
    'evacuate,prune_attempts,prune_claim,prune_queue,prune_deferred}'::text[];
COMMENT ON FUNCTION @extschema@._tick_steps() IS
    'Internal: steps of tick, in order. Publish comes first: it needs a transaction that wrote nothing.';

CREATE OR REPLACE FUNCTION @extschema@._run_step(
    p_step text, p_rows integer, p_now timestamptz,
    OUT outcome text, OUT "rows" bigint, OUT detail jsonb)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    outcome := 'done';
    CASE p_step
    WHEN 'publish_queue' THEN outcome := @extschema@._publish_ring('queue');
    WHEN 'publish_claim' THEN outcome := @extschema@._publish_ring('claim');
    WHEN 'plan_queue' THEN outcome := @extschema@._plan_ring('queue', p_now);
    WHEN 'plan_claim' THEN outcome := @extschema@._plan_ring('claim', p_now);
    WHEN 'refill' THEN
        "rows" := @extschema@._refill_buckets(
            coalesce(p_rows, @extschema@._setting('promote_rows')::integer), p_now);
    WHEN 'promote' THEN
        p_rows := coalesce(p_rows, @extschema@._setting('promote_rows')::integer);
        "rows" := @extschema@._promote_waiting(@extschema@._waiting_for_keys(p_rows, p_now), p_now)
            + @extschema@._promote_due(p_rows, p_now);
    WHEN 'rescue' THEN
        "rows" := @extschema@._rescue_attempts(
            coalesce(p_rows, @extschema@._setting('rescue_rows')::integer), p_now);
    WHEN 'expire' THEN
        "rows" := @extschema@._expire_dead_letters(coalesce(p_rows, 1000), p_now)
            + @extschema@._expire_failed(coalesce(p_rows, 1000), p_now)
            + @extschema@._expire_leases(coalesce(p_rows, 1000), p_now);
    WHEN 'unique_keys' THEN "rows" := @extschema@._sweep_keys(coalesce(p_rows, 1000), p_now);
    WHEN 'instances' THEN "rows" := @extschema@._forget_instances(p_now);
    WHEN 'hints' THEN "rows" := @extschema@._audit_hints();
    WHEN 'evacuate' THEN
        SELECT e.outcome, e.moved, e.detail INTO outcome, "rows", detail
        FROM @extschema@._evacuate(coalesce(p_rows, @extschema@._setting('evacuate_rows')::integer), p_now) e;
    WHEN 'prune_attempts' THEN SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_attempts() p;
    WHEN 'prune_claim' THEN
        SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_ring('claim', p_now) p;
    WHEN 'prune_queue' THEN
        SELECT p.outcome, p.detail INTO outcome, detail FROM @extschema@._prune_ring('queue', p_now) p;
    WHEN 'prune_deferred' THEN
        SELECT p.outcome, p.moved, p.detail INTO outcome, "rows", detail FROM @extschema@._prune_deferred(p_now) p;
    END CASE;
END
$function$;
COMMENT ON FUNCTION @extschema@._run_step(text, integer, timestamptz) IS 'Internal: runs one maintenance step.';

CREATE OR REPLACE FUNCTION @extschema@._tick(p_steps text[], p_milliseconds numeric, p_rows integer)
RETURNS SETOF @extschema@.tick_report
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_all constant text[] := @extschema@._tick_steps();
    v_began timestamptz := clock_timestamp();
    v_step text;
    v_report @extschema@.tick_report;
    v_result record;
    v_leaves_locked boolean := false;
    v_published text := '';
    v_start timestamptz;
    v_lock_timeout constant text := current_setting('lock_timeout');
BEGIN
    PERFORM @extschema@._require_read_committed();
    PERFORM set_config('lock_timeout', '100ms', true);
    FOREACH v_step IN ARRAY v_all LOOP
        CONTINUE WHEN v_step <> ALL (p_steps);
        v_start := clock_timestamp();
        v_report := ROW(v_step, 'skipped_budget', NULL, 0, NULL);
        IF v_step LIKE 'plan_%' AND v_published LIKE '%' || v_step || '%' THEN
            -- Plan and publish of one ring never share a transaction.
            v_report.outcome := 'skipped_published';
        ELSIF v_leaves_locked AND v_step LIKE 'prune_%' THEN
            v_report.outcome := 'skipped_pruned';
        ELSIF extract(epoch FROM v_start - v_began) * 1000 < p_milliseconds THEN
            IF NOT pg_try_advisory_xact_lock(@extschema@._lock_key('step/' || v_step, 0)) THEN
                v_report.outcome := 'contended';
            ELSE
                BEGIN
                    v_result := @extschema@._run_step(v_step, p_rows, v_start);
                    v_report.outcome := v_result.outcome;
                    v_report."rows" := v_result."rows";
                    v_report.detail := v_result.detail;
                EXCEPTION
                WHEN read_only_sql_transaction THEN
                    -- No step will do better here, and a worker must look for the new primary.
                    RAISE;
                WHEN OTHERS THEN
                    v_report.outcome := 'failed';
                    v_report.detail := jsonb_build_object('sqlstate', SQLSTATE, 'message', SQLERRM);
                END;
            END IF;
            -- A step that answers locked or in_use has no lock left: what is in its way must not stop the next one.
            -- TRUNCATE is not MVCC: a dump that begins between copy and truncate must see one of them.
            v_leaves_locked := v_leaves_locked OR v_report.outcome IN ('pruned', 'released', 'moved');
            IF v_report.outcome = 'published' THEN
                v_published := v_published || replace(v_step, 'publish', 'plan') || ' ';
            END IF;
        END IF;
        v_report.milliseconds := extract(epoch FROM clock_timestamp() - v_start) * 1000;
        RETURN NEXT v_report;
    END LOOP;
    -- The commit of a transaction that notified waits for all others that do, and is not to be given up for that.
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
END
$function$;
COMMENT ON FUNCTION @extschema@._tick(text[], numeric, integer) IS
    'Internal: runs maintenance steps within a time budget and reports each.';
-- Counts and states for operators.

-- Waiting jobs of a lane: rows that no claim has emitted and no tombstone killed. Like all counting STABLE, so that
-- everything is seen in one snapshot.
CREATE OR REPLACE FUNCTION @extschema@._count_available(p_lane integer)
RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_count bigint;
    v_total bigint := 0;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('queue') - 1 LOOP
        CONTINUE WHEN NOT @extschema@._leaf_in_use('ready_entries', v_slot);
        EXECUTE format($query$
            SELECT count(*) FROM unnest($1) g, @extschema@.ready_entries_%1$s r
            WHERE r."position" >= lower(g) AND r."position" < upper(g)
              AND NOT EXISTS (SELECT FROM @extschema@.ready_tombstones_%1$s t WHERE t."position" = r."position")
            $query$, v_slot) INTO v_count USING @extschema@._unclaimed_set(@extschema@._emission_in_snapshot(p_lane));
        v_total := v_total + v_count;
    END LOOP;
    RETURN v_total;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_available(integer) IS 'Internal: exact waiting jobs of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._count_jobs(p_queue text)
RETURNS @extschema@.queue_count
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_counts @extschema@.queue_count := ROW(p_queue, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    v_lanes int8multirange := '{}'::int8multirange;
    v_lane integer;
BEGIN
    FOR v_lane IN SELECT l.lane_id FROM @extschema@.queue_lanes l WHERE l.queue = p_queue LOOP
        v_lanes := v_lanes + @extschema@._lane_range(v_lane);
        v_counts.available := v_counts.available + @extschema@._count_available(v_lane);
    END LOOP;
    FOR v_slot IN 0 .. @extschema@._slot_count('claim') - 1 LOOP
        v_counts.running := v_counts.running + (
            SELECT coalesce(sum(@extschema@._cardinality(o.open * v_lanes)), 0)
            FROM @extschema@._open_batches(v_slot) o);
    END LOOP;
    v_counts.running := v_counts.running + (
        SELECT count(*) FROM @extschema@.leases l WHERE l.queue = p_queue AND l.outcome IS NULL);
    SELECT count(*) FILTER (WHERE d.state = 'scheduled'), count(*) FILTER (WHERE d.state = 'retryable')
    INTO v_counts.scheduled, v_counts.retryable FROM @extschema@.deferred_jobs d WHERE d.queue = p_queue;
    SELECT count(*) INTO v_counts.dead_lettered FROM @extschema@.dlq_entries d WHERE d.queue = p_queue;
    SELECT t.completed, t.failed, t.cancelled INTO v_counts.completed, v_counts.failed, v_counts.cancelled
    FROM @extschema@._terminal_counts(p_queue) t;
    RETURN v_counts;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_jobs(text) IS 'Internal: exact jobs of a queue by state.';

CREATE OR REPLACE FUNCTION @extschema@._lane_depths()
RETURNS SETOF @extschema@.queue_depth
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_lane @extschema@.queue_lanes;
BEGIN
    FOR v_lane IN SELECT l.* FROM @extschema@.queue_lanes l ORDER BY l.queue, l.priority, l.shard, l.lane_id LOOP
        RETURN NEXT ROW(v_lane.queue, v_lane.priority, v_lane.shard, @extschema@._lane_depth(v_lane.lane_id),
            (@extschema@._queue_options(v_lane.queue)).paused_at IS NOT NULL)::@extschema@.queue_depth;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._lane_depths() IS 'Internal: positions that claims have not passed, by lane.';

CREATE OR REPLACE FUNCTION @extschema@._slot_rows(p_ring text, p_slot integer)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_rows bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM @extschema@.%I',
        CASE p_ring WHEN 'queue' THEN 'ready_entries_' WHEN 'claim' THEN 'lease_claim_batches_'
                    ELSE 'deferred_jobs_' END || p_slot) INTO v_rows;
    RETURN v_rows;
END
$function$;
COMMENT ON FUNCTION @extschema@._slot_rows(text, integer) IS 'Internal: bodies, batches or deferred jobs in a slot.';

CREATE OR REPLACE FUNCTION @extschema@._deferred_status(p_now timestamptz)
RETURNS SETOF @extschema@.ring_slot_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_bytes bigint;
    v_last record;
    v_blocker jsonb;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        v_bytes := @extschema@._slot_bytes('deferred', v_slot);
        v_blocker := NULL;
        IF v_bytes > 0 THEN
            v_last := @extschema@._last_deferred(v_slot);
            v_blocker := CASE
                WHEN v_last.run_at IS NOT NULL
                THEN jsonb_build_object('reason', 'deferred', 'queue', v_last.queue, 'run_at', v_last.run_at)
                WHEN NOT @extschema@._slot_is_calm(v_slot, p_now) THEN '{"reason": "recent"}'
                ELSE @extschema@._slot_holder('deferred', v_slot, p_now) END;
        END IF;
        RETURN NEXT ROW('deferred', v_slot, NULL, v_slot = @extschema@._deferred_slot(p_now, p_now),
            CASE WHEN v_bytes > 0 THEN @extschema@._slot_rows('deferred', v_slot) ELSE 0 END, v_bytes, NULL,
            v_blocker ->> 'reason', v_blocker - 'reason')::@extschema@.ring_slot_status;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._deferred_status(timestamptz) IS
    'Internal: slots of deferred jobs with what keeps them.';

-- The longest transaction that has a slot locked. Its age is known to roles that may read the statistics of others.
CREATE OR REPLACE FUNCTION @extschema@._slot_holder(p_ring text, p_slot integer, p_now timestamptz)
RETURNS jsonb
LANGUAGE sql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
    SELECT jsonb_build_object('reason', 'locked', 'pid', k.pid, 'table', t.name || '_' || p_slot, 'mode', k.mode,
        'age_seconds', round(extract(epoch FROM p_now - a.xact_start)::numeric, 1))
    FROM unnest(@extschema@._ring_tables(p_ring)) t (name)
    JOIN pg_locks k ON k.locktype = 'relation' AND k.granted
        AND k.relation = ('@extschema@.' || t.name || '_' || p_slot)::regclass
        AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
        AND k.pid IS DISTINCT FROM pg_backend_pid()
    LEFT JOIN pg_stat_activity a ON a.pid = k.pid
    ORDER BY a.xact_start NULLS LAST, k.pid
    LIMIT 1
$function$;
COMMENT ON FUNCTION @extschema@._slot_holder(text, integer, timestamptz) IS
    'Internal: another transaction that has a slot locked, with pid (NULL: prepared), lock and age; or NULL.';

CREATE OR REPLACE FUNCTION @extschema@._ring_status(p_now timestamptz)
RETURNS SETOF @extschema@.ring_slot_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring text;
    v_slot record;
    v_blocker jsonb;
BEGIN
    FOREACH v_ring IN ARRAY '{queue,claim}'::text[] LOOP
        FOR v_slot IN SELECT s AS slot, r.generation, r.rotated_at, @extschema@._slot_bytes(v_ring, s) AS bytes
                      FROM generate_series(0, @extschema@._slot_count(v_ring) - 1) s
                      LEFT JOIN @extschema@._ring_slots(v_ring) r ON r.slot = s ORDER BY s LOOP
            v_blocker := NULL;
            IF v_slot.bytes > 0 OR v_slot.slot = @extschema@._ring_cursor(v_ring) % 64 THEN
                v_blocker := coalesce(@extschema@._slot_blocker(v_ring, v_slot.slot),
                    CASE WHEN @extschema@._slot_is_retained(v_ring, v_slot.slot, p_now)
                         THEN '{"reason": "retention"}'::jsonb
                         WHEN NOT @extschema@._is_past_dumps(
                             @extschema@._slot_released_at(v_ring, v_slot.slot), p_now)
                         THEN '{"reason": "recent"}'::jsonb END,
                    @extschema@._slot_holder(v_ring, v_slot.slot, p_now));
            END IF;
            RETURN NEXT ROW(v_ring, v_slot.slot, v_slot.generation, v_slot.slot = @extschema@._ring_cursor(v_ring) % 64,
                CASE WHEN v_slot.bytes > 0 THEN @extschema@._slot_rows(v_ring, v_slot.slot) ELSE 0 END, v_slot.bytes,
                p_now - v_slot.rotated_at, v_blocker ->> 'reason', v_blocker - 'reason')::@extschema@.ring_slot_status;
        END LOOP;
    END LOOP;
    RETURN QUERY SELECT d.* FROM @extschema@._deferred_status(p_now) d;
END
$function$;
COMMENT ON FUNCTION @extschema@._ring_status(timestamptz) IS 'Internal: slots of all rings with what blocks them.';

-- api: the only functions and views that applications use
-- Calls of producers. They join the caller's transaction; a job is visible on commit and gone on rollback.
-- A function takes the collation of its arguments into all that it compares and calls, so doors copy names into
-- variables of the default one: with a collation that ignores case 'Q' would find the lanes of 'q'.

CREATE OR REPLACE FUNCTION @extschema@.insert_job(
    kind text, args jsonb DEFAULT '{}', queue text DEFAULT 'default', priority integer DEFAULT 2,
    max_attempts integer DEFAULT 25, run_at timestamptz DEFAULT NULL, opts jsonb DEFAULT '{}')
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_job_id bigint;
    v_pressure text;
BEGIN
    -- In autocommit each expression and statement is prepared anew, so the usual job has few of them. A lane that
    -- exists has a good queue and priority.
    IF max_attempts = 25 AND run_at IS NULL AND opts IN ('{}', '{"backpressure": "signal"}')
       AND @extschema@._is_plain_body(kind COLLATE "default", args) THEN
        IF opts <> '{}' THEN
            v_pressure := coalesce(@extschema@._fresh_pressure(queue COLLATE "default", priority),
                                   @extschema@._measure_pressure(queue COLLATE "default", priority));
        END IF;
        v_job_id := @extschema@._append_ready_one(queue COLLATE "default", priority, kind COLLATE "default", args);
        IF v_job_id IS NOT NULL THEN
            RETURN ROW(v_job_id, 'available', false, v_pressure)::@extschema@.insert_result;
        END IF;
    END IF;
    RETURN @extschema@._insert_any(kind COLLATE "default", args, queue COLLATE "default", priority, max_attempts,
        run_at, opts);
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_job(text, jsonb, text, integer, integer, timestamptz, jsonb) IS
'Enqueues one job in the caller''s transaction.
kind, queue: 1 to 200 printable characters. args: any JSON up to args_max_bytes
and 256 levels. priority: 1 (first) to 4.
max_attempts: 1 to 1000. run_at: not before this time; NULL or past means now.
opts: tags, metadata, ordering_key, delay_seconds, deadline_seconds (per attempt), keep_result, backoff, trace,
unique ({by, key, period_seconds, states, on_conflict: return, raise or replace}), backpressure (off, signal or
{"reject": n}). Returns the id and state, whether it is a duplicate, and with signal how many jobs wait. Errors: 22023
bad value or unknown option, 23514 limit, 23505 on_conflict raise, 25001 replace or backpressure outside READ COMMITTED,
40001 a snapshot that cannot see who holds the key, JQ003 n or more jobs wait, JQ007 option of a later version.';

CREATE OR REPLACE FUNCTION @extschema@._insert_any(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz,
    p_opts jsonb)
RETURNS @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_ext jsonb;
    v_run_at timestamptz;
    v_pressure text;
    v_job_id bigint;
BEGIN
    PERFORM @extschema@._check_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at);
    v_ext := @extschema@._job_ext(p_opts, p_max_attempts);
    v_run_at := @extschema@._delayed(p_run_at, p_opts, v_now);
    v_pressure := @extschema@._apply_backpressure(p_opts -> 'backpressure', p_queue, p_priority);
    IF coalesce(p_opts -> 'unique', 'null') <> 'null' THEN
        RETURN (
            SELECT ROW(i.job_id, i.state, i.duplicate, v_pressure)::@extschema@.insert_result
            FROM @extschema@._insert_unique(ARRAY[@extschema@._new_job(
                p_kind, p_args, p_queue, p_priority, p_opts ->> 'ordering_key', v_run_at,
                @extschema@._with_unique(v_ext, p_opts, p_kind, p_queue, p_args, v_now))], v_now) i);
    END IF;
    IF coalesce(v_run_at, v_now) <= v_now THEN
        v_job_id := (SELECT r.id FROM @extschema@._append_ready_many(
            p_queue, p_priority, p_opts ->> 'ordering_key', p_kind, ARRAY[p_args], v_now, v_ext) r (id));
        IF v_job_id IS NOT NULL THEN
            RETURN ROW(v_job_id, 'available', false, v_pressure)::@extschema@.insert_result;
        END IF;
    END IF;
    SELECT d.job_id INTO v_job_id
    FROM @extschema@._defer(ARRAY[@extschema@._born_at(
        @extschema@._new_job(p_kind, p_args, p_queue, p_priority, p_opts ->> 'ordering_key', v_run_at, v_ext),
        v_now)], 'scheduled') d;
    RETURN ROW(v_job_id, 'scheduled', false, v_pressure)::@extschema@.insert_result;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_any(text, jsonb, text, integer, integer, timestamptz, jsonb) IS
    'Internal: insert_job for jobs that are not the usual ones, with all its checks.';

CREATE OR REPLACE FUNCTION @extschema@._delayed(p_run_at timestamptz, p_opts jsonb, p_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_run_at IS NOT NULL AND p_opts ->> 'delay_seconds' IS NOT NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "run_at" and option "delay_seconds" exclude each other',
            'Give one of them.');
    END IF;
    RETURN coalesce(p_run_at, p_now + make_interval(
        secs => @extschema@._option_number(p_opts, 'delay_seconds', 0, 315360000)::double precision));
END
$function$;
COMMENT ON FUNCTION @extschema@._delayed(timestamptz, jsonb, timestamptz) IS
    'Internal: run time from run_at or delay_seconds (22023 when both are given).';

CREATE OR REPLACE FUNCTION @extschema@._new_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_ordering_key text, p_run_at timestamptz,
    p_ext jsonb)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN ROW(NULL, p_queue, p_priority,
        @extschema@._pick_shard((@extschema@._queue_options(p_queue)).enqueue_shards, p_ordering_key),
        p_run_at, 0, 0, p_kind, p_args, p_ext)::@extschema@._job;
END
$function$;
COMMENT ON FUNCTION @extschema@._new_job(text, jsonb, text, integer, text, timestamptz, jsonb) IS
    'Internal: a checked job, not yet stored.';

CREATE OR REPLACE FUNCTION @extschema@.insert_many(
    kind text, args jsonb[], queue text DEFAULT 'default', priority integer DEFAULT 2,
    max_attempts integer DEFAULT 25, run_at timestamptz DEFAULT NULL, opts jsonb DEFAULT '{}')
RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_kind text COLLATE "default" := kind;
    v_queue text COLLATE "default" := queue;
    v_now timestamptz := clock_timestamp();
    v_ext jsonb;
    v_run_at timestamptz := run_at;
    v_job @extschema@._job;
BEGIN
    PERFORM @extschema@._check_job(v_kind, '{}', v_queue, priority, max_attempts, run_at);
    PERFORM @extschema@._check_args_list(args);
    v_ext := @extschema@._job_ext(opts, max_attempts);
    v_run_at := @extschema@._delayed(run_at, opts, v_now);
    IF cardinality(args) = 0 THEN
        RETURN;
    ELSIF opts -> 'backpressure' = '"signal"' THEN
        PERFORM @extschema@._refuse('22023', 'option "backpressure" of insert_many cannot be "signal"',
            'The answer is ids alone: use {"reject": n}, or insert_jobs.');
    END IF;
    PERFORM @extschema@._apply_backpressure(opts -> 'backpressure', v_queue, priority);
    IF coalesce(opts -> 'unique', 'null') <> 'null' THEN
        v_job := @extschema@._new_job(v_kind, '{}', v_queue, priority, opts ->> 'ordering_key', v_run_at, v_ext);
        RETURN QUERY
        SELECT i.job_id
        FROM @extschema@._insert_unique(ARRAY(
            SELECT ROW(NULL, j.queue, j.priority, j.shard, j.run_at, 0, 0, j.kind, j.args,
                       @extschema@._with_unique(j.ext, opts, j.kind, j.queue, j.args, v_now))::@extschema@._job
            FROM unnest(@extschema@._with_args(v_job, args)) WITH ORDINALITY
                j (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)
            ORDER BY j.o), v_now) i
        ORDER BY i.ordinal;
        RETURN;
    END IF;
    IF coalesce(v_run_at, v_now) <= v_now THEN
        RETURN QUERY
        SELECT r.id
        FROM @extschema@._append_ready_many(
            v_queue, priority, opts ->> 'ordering_key', v_kind, args, v_now, v_ext) r (id);
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    v_job := @extschema@._born_at(
        @extschema@._new_job(v_kind, '{}', v_queue, priority, opts ->> 'ordering_key', v_run_at, v_ext), v_now);
    RETURN QUERY
    SELECT d.job_id
    FROM @extschema@._defer(@extschema@._with_args(v_job, args), 'scheduled') d
    ORDER BY d.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_many(text, jsonb[], text, integer, integer, timestamptz, jsonb) IS
'Enqueues many jobs of one kind, the fast path: one job per element of args, all with the same options; all or nothing.
Parameters, options and errors as insert_job, but for backpressure signal; an error names the item, counted from 1.
Returns the ids in order.';

CREATE OR REPLACE FUNCTION @extschema@._with_args(p_job @extschema@._job, p_args jsonb[])
RETURNS @extschema@._job[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ARRAY(SELECT ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, (p_job).run_at, (p_job).attempt,
                        (p_job).run_lease, (p_job).kind, a.args, (p_job).ext)::@extschema@._job
             FROM unnest(p_args) WITH ORDINALITY a (args, o) ORDER BY a.o);
COMMENT ON FUNCTION @extschema@._with_args(@extschema@._job, jsonb[]) IS 'Internal: the same job once per args.';

CREATE OR REPLACE FUNCTION @extschema@._check_args_list(p_args jsonb[])
RETURNS void
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_item record;
BEGIN
    IF p_args IS NULL OR array_ndims(p_args) > 1 THEN
        PERFORM @extschema@._refuse('22023', 'field "args" must be a one-dimensional array',
            'Give one JSON value per job.');
    END IF;
    FOR v_item IN
        SELECT a.args, a.o
        FROM unnest(p_args) WITH ORDINALITY a (args, o)
        WHERE NOT coalesce(@extschema@._are_small_args(a.args), false)
    LOOP
        PERFORM @extschema@._check_payload(format('args[%s]', v_item.o), v_item.args, NULL);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._check_args_list(jsonb[]) IS
    'Internal: checks each args of a bulk insert (22023, 23514).';

CREATE OR REPLACE FUNCTION @extschema@.insert_jobs(jobs jsonb, opts jsonb DEFAULT '{}')
RETURNS SETOF @extschema@.insert_result
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_jobs @extschema@._job[];
BEGIN
    PERFORM @extschema@._check_options('opts', opts, '{}');
    IF jobs IS NULL OR jsonb_typeof(jobs) <> 'array' THEN
        PERFORM @extschema@._refuse('22023', 'field "jobs" must be a JSON array', 'Give an array of job objects.');
    END IF;
    v_jobs := @extschema@._parse_jobs(jobs, v_now);
    IF jobs @? '$[*].opts.backpressure.reject' THEN
        PERFORM @extschema@._refuse_pressure(
            coalesce(j ->> 'queue', 'default'), coalesce((j ->> 'priority')::numeric::integer, 2),
            min((j #>> '{opts,backpressure,reject}')::numeric::bigint))
        FROM jsonb_array_elements(jobs) j
        WHERE j #> '{opts,backpressure,reject}' IS NOT NULL
        GROUP BY coalesce(j ->> 'queue', 'default'), coalesce((j ->> 'priority')::numeric::integer, 2);
    END IF;
    RETURN QUERY
    SELECT i.job_id, i.state, i.duplicate,
           CASE WHEN o.item #> '{opts,backpressure}' = '"signal"' THEN @extschema@._apply_backpressure('"signal"',
               coalesce(o.item ->> 'queue', 'default'), coalesce((o.item ->> 'priority')::numeric::integer, 2)) END
    FROM @extschema@._insert_parsed(v_jobs, v_now) i, LATERAL (SELECT jobs -> (i.ordinal - 1)::integer) o (item)
    ORDER BY i.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@.insert_jobs(jsonb, jsonb) IS
'Enqueues an array of job objects whose keys are the parameter names of insert_job; one result each, in order, all or
nothing. Errors as insert_job; the message names the item, counted from 1.';

-- One block for all of them: a subtransaction per job would be one too many from the 65th on.
CREATE OR REPLACE FUNCTION @extschema@._parse_jobs(p_items jsonb, p_now timestamptz)
RETURNS @extschema@._job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_item jsonb;
    v_ordinal bigint := 0;
    v_queue text;
    v_shards integer;
    v_jobs @extschema@._job[] := '{}'::@extschema@._job[];
    v_message text;
    v_hint text;
    v_state text;
BEGIN
    FOR v_item IN SELECT j FROM jsonb_array_elements(p_items) j LOOP
        v_ordinal := v_ordinal + 1;
        IF v_shards IS NULL OR v_queue IS DISTINCT FROM v_item ->> 'queue' THEN
            v_queue := v_item ->> 'queue';
            v_shards := (@extschema@._queue_options(coalesce(v_queue, 'default'))).enqueue_shards;
        END IF;
        v_jobs := v_jobs || @extschema@._parse_job(v_item, v_shards, p_now);
    END LOOP;
    RETURN v_jobs;
EXCEPTION WHEN invalid_parameter_value OR check_violation OR SQLSTATE 'JQ007' THEN
    GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT, v_state = RETURNED_SQLSTATE;
    PERFORM @extschema@._refuse(v_state, format('jobs[%s]: %s', v_ordinal, v_message), v_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_jobs(jsonb, timestamptz) IS
    'Internal: the items of insert_jobs, checked (22023, 23514, JQ007, with the item named).';

CREATE OR REPLACE FUNCTION @extschema@._parse_job(p_item jsonb, p_shards integer, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_options('job', p_item, '{kind,args,queue,priority,max_attempts,run_at,opts}');
    IF jsonb_typeof(coalesce(p_item -> 'kind', '""')) <> 'string'
       OR jsonb_typeof(coalesce(p_item -> 'queue', '""')) <> 'string' THEN
        PERFORM @extschema@._refuse('22023', 'fields "kind" and "queue" must be strings', 'Correct them.');
    END IF;
    RETURN @extschema@._checked_job(
        p_item ->> 'kind', coalesce(p_item -> 'args', '{}'), coalesce(p_item ->> 'queue', 'default'),
        coalesce(@extschema@._option_integer(p_item, 'priority', -2147483648, 2147483647), 2),
        coalesce(@extschema@._option_integer(p_item, 'max_attempts', -2147483648, 2147483647), 25),
        @extschema@._parse_run_at(p_item -> 'run_at'), coalesce(nullif(p_item -> 'opts', 'null'), '{}'),
        p_shards, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_job(jsonb, integer, timestamptz) IS
    'Internal: one item of insert_jobs, checked (22023, 23514, JQ007).';

CREATE OR REPLACE FUNCTION @extschema@._checked_job(
    p_kind text, p_args jsonb, p_queue text, p_priority integer, p_max_attempts integer, p_run_at timestamptz,
    p_opts jsonb, p_shards integer, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ext jsonb;
    v_run_at timestamptz := p_run_at;
BEGIN
    IF @extschema@._is_plain_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at) IS NOT true THEN
        PERFORM @extschema@._check_job(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_run_at);
    END IF;
    IF p_opts <> '{}' OR p_max_attempts <> 25 THEN
        v_ext := @extschema@._with_unique(@extschema@._job_ext(p_opts, p_max_attempts), p_opts,
            p_kind, p_queue, p_args, p_now);
        v_run_at := @extschema@._delayed(p_run_at, p_opts, p_now);
    END IF;
    RETURN ROW(NULL, p_queue, p_priority, @extschema@._pick_shard(p_shards, p_opts ->> 'ordering_key'), v_run_at, 0, 0,
        p_kind, p_args, v_ext)::@extschema@._job;
END
$function$;
COMMENT ON FUNCTION @extschema@._checked_job(
    text, jsonb, text, integer, integer, timestamptz, jsonb, integer, timestamptz) IS
    'Internal: a job not yet stored, for a queue with so many shards (22023, 23514, JQ007).';

-- Times in JSON carry their offset: a time without one would mean another instant in another session.
CREATE OR REPLACE FUNCTION @extschema@._parse_run_at(p_value jsonb)
RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(p_value, 'null') = 'null' THEN
        RETURN NULL;
    END IF;
    IF p_value #>> '{}' !~ '^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,9})?)?'
        '(Z|[+-][0-9]{2}(:?[0-9]{2})?)$' THEN
        PERFORM @extschema@._refuse('22023', format('field "run_at" cannot be %s', left(p_value::text, 100)),
            'Give an ISO 8601 time with its offset, such as 2030-01-31T12:00:00Z.');
    END IF;
    RETURN (p_value #>> '{}')::timestamptz;
EXCEPTION WHEN datetime_field_overflow OR invalid_datetime_format OR invalid_time_zone_displacement_value THEN
    PERFORM @extschema@._refuse('22023', format('field "run_at" cannot be %s', left(p_value::text, 100)),
        'Give an ISO 8601 time with its offset, such as 2030-01-31T12:00:00Z.');
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_run_at(jsonb) IS 'Internal: an ISO 8601 time with offset from JSON (22023).';

-- New jobs of any lanes: what is due goes to the ring; the rest, and what has no lane yet, is deferred.
CREATE OR REPLACE FUNCTION @extschema@._insert_parsed(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS TABLE (ordinal bigint, job_id bigint, state @extschema@.job_state, duplicate boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_due bigint[] := ARRAY(
        SELECT o
        FROM generate_subscripts(p_jobs, 1) o
        WHERE coalesce(p_jobs[o].run_at, p_now) <= p_now
        ORDER BY o);
    v_appended bigint[];
    v_ids bigint[];
    v_later bigint[];
BEGIN
    IF EXISTS (SELECT FROM unnest(p_jobs) j WHERE j.ext ? 'unique') THEN
        RETURN QUERY SELECT i.* FROM @extschema@._insert_unique(p_jobs, p_now) i;
        RETURN;
    END IF;
    IF cardinality(v_due) > 0 THEN
        SELECT array_agg(v_due[a.ordinal]), array_agg(a.job_id) INTO v_appended, v_ids
        FROM @extschema@._append_ready(
            ARRAY(SELECT @extschema@._due_at(p_jobs[o], p_now) FROM unnest(v_due) o), false) a;
        RETURN QUERY
        SELECT u.o, u.id, 'available'::@extschema@.job_state, false FROM unnest(v_appended, v_ids) u (o, id);
    END IF;
    v_later := ARRAY(
        SELECT o FROM generate_subscripts(p_jobs, 1) o
        EXCEPT
        SELECT o FROM unnest(v_appended) o
        ORDER BY 1);
    IF cardinality(v_later) > 0 THEN
        RETURN QUERY
        SELECT v_later[d.ordinal], d.job_id, 'scheduled'::@extschema@.job_state, false
        FROM @extschema@._defer(
            ARRAY(SELECT @extschema@._born_at(p_jobs[o], p_now) FROM unnest(v_later) o), 'scheduled') d;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_parsed(@extschema@._job[], timestamptz) IS
    'Internal: inserts checked jobs; one answer each.';

CREATE OR REPLACE FUNCTION @extschema@._due_at(p_job @extschema@._job, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, p_now, (p_job).attempt,
           (p_job).run_lease, (p_job).kind, (p_job).args, (p_job).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._due_at(@extschema@._job, timestamptz) IS 'Internal: a job that is ready from now on.';

CREATE OR REPLACE FUNCTION @extschema@._born_at(p_job @extschema@._job, p_now timestamptz)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW((p_job).job_id, (p_job).queue, (p_job).priority, (p_job).shard, coalesce((p_job).run_at, p_now),
           (p_job).attempt, (p_job).run_lease, (p_job).kind, (p_job).args,
           coalesce((p_job).ext, '{}') || jsonb_build_object('created_at', p_now))::@extschema@._job;
COMMENT ON FUNCTION @extschema@._born_at(@extschema@._job, timestamptz) IS
    'Internal: a job that starts deferred, with its time of birth.';

CREATE OR REPLACE FUNCTION @extschema@.ordering_shard(key text, shards integer)
RETURNS integer
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL OR shards IS NULL OR shards NOT BETWEEN 1 AND 64 THEN
        PERFORM @extschema@._refuse('22023', 'fields "key" and "shards" need a text and a number from 1 to 64',
            'Correct them.');
    END IF;
    RETURN mod(@extschema@._ordering_hash(key), shards);
END
$function$;
COMMENT ON FUNCTION @extschema@.ordering_shard(text, integer) IS
'Shard of an ordering key in a queue with so many enqueue_shards (1 to 64). Errors: 22023.';
-- Bulk loads: COPY into a view. An INSTEAD OF trigger sees one row at a time, so rows are collected and inserted by
-- portions, those that may have to wait at the end of the statement: keys must be taken in sorted order, or two loads
-- could wait for each other.
--
-- What is collected lies in settings of the session. They go back with the transaction and with each savepoint, so
-- that nothing of a statement that failed can get into another. Everybody may write them, so their rows are checked
-- when they are taken out, not when they are put in.
--   awa.inbox           rows of the current portion: JSON arrays, separated by commas
--   awa.inbox_rows      number of rows before the current portion
--   awa.inbox_held_n    rows that stay until the end, with their numbers, in chunks
--   awa.inbox_chunk     n of the last chunk

CREATE OR REPLACE VIEW @extschema@.job_inbox AS
SELECT NULL::text AS kind, NULL::jsonb AS args, NULL::text AS queue, NULL::integer AS priority,
       NULL::integer AS max_attempts, NULL::timestamptz AS run_at, NULL::jsonb AS opts
WHERE false;
COMMENT ON VIEW @extschema@.job_inbox IS
'For COPY ... FROM and INSERT: a row is a job. The columns are the parameters of insert_job; NULL means the default.
Nothing can be read from it.';

CREATE OR REPLACE FUNCTION @extschema@._collect_row()
RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_portion_bytes constant integer := 16384;
BEGIN
    IF octet_length(set_config('awa.inbox', concat_ws(',', nullif(current_setting('awa.inbox', true), ''),
            json_build_array(NEW.kind, coalesce(NEW.args, '{}'), NEW.queue, NEW.priority, NEW.max_attempts, NEW.run_at,
                             NEW.opts)), true)) > c_portion_bytes THEN
        PERFORM @extschema@._empty_inbox(false);
    END IF;
    RETURN NEW;
END
$function$;
COMMENT ON FUNCTION @extschema@._collect_row() IS 'Internal: takes one row of a load.';

CREATE OR REPLACE FUNCTION @extschema@._end_load()
RETURNS trigger
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._empty_inbox(true);
    RETURN NULL;
END
$function$;
COMMENT ON FUNCTION @extschema@._end_load() IS 'Internal: inserts what a load has collected.';

CREATE OR REPLACE TRIGGER collect_row INSTEAD OF INSERT ON @extschema@.job_inbox
    FOR EACH ROW EXECUTE FUNCTION @extschema@._collect_row();
CREATE OR REPLACE TRIGGER end_load AFTER INSERT ON @extschema@.job_inbox
    FOR EACH STATEMENT EXECUTE FUNCTION @extschema@._end_load();

CREATE OR REPLACE FUNCTION @extschema@._inbox_setting(p_name text)
RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN nullif(current_setting('awa.inbox' || p_name, true), '');
COMMENT ON FUNCTION @extschema@._inbox_setting(text) IS
    'Internal: what a load keeps under a name; NULL when it is empty.';

CREATE OR REPLACE FUNCTION @extschema@._empty_inbox(p_is_last boolean)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_most_chunks constant integer := 64;
    v_rows jsonb := ('[' || @extschema@._inbox_setting('') || ']')::jsonb;
    v_before bigint := coalesce(@extschema@._inbox_setting('_rows')::bigint, 0);
    v_plain jsonb;
    v_held text;
BEGIN
    PERFORM set_config('awa.inbox', '', true);
    PERFORM set_config('awa.inbox_rows',
        CASE WHEN p_is_last THEN '' ELSE (v_before + jsonb_array_length(v_rows))::text END, true);
    SELECT jsonb_agg(r.item ORDER BY r.o) FILTER (WHERE NOT r.is_held),
           string_agg(r.item::text, ',' ORDER BY r.o) FILTER (WHERE r.is_held)
    INTO v_plain, v_held
    FROM (SELECT j.item || to_jsonb(v_before + j.o) AS item, j.o,
                 coalesce(j.item -> 6 ?| '{unique,backpressure}', false) AS is_held
          FROM jsonb_array_elements(v_rows) WITH ORDINALITY j (item, o)) r;
    IF v_plain IS NOT NULL THEN
        PERFORM @extschema@._insert_rows(ARRAY[v_plain]);
    END IF;
    IF (v_held IS NOT NULL AND @extschema@._hold_rows(v_held) = c_most_chunks) OR p_is_last THEN
        PERFORM @extschema@._insert_rows(@extschema@._take_held_rows());
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._empty_inbox(boolean) IS
    'Internal: inserts the rows of a portion, or holds them back until the last one.';

CREATE OR REPLACE FUNCTION @extschema@._hold_rows(p_rows text)
RETURNS integer
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_chunk_bytes constant integer := 1048576;
    v_chunk integer := coalesce(@extschema@._inbox_setting('_chunk')::integer, 1);
BEGIN
    IF octet_length(set_config('awa.inbox_held_' || v_chunk,
           concat_ws(',', @extschema@._inbox_setting('_held_' || v_chunk), p_rows), true)) > c_chunk_bytes THEN
        v_chunk := v_chunk + 1;
    END IF;
    PERFORM set_config('awa.inbox_chunk', v_chunk::text, true);
    RETURN v_chunk;
END
$function$;
COMMENT ON FUNCTION @extschema@._hold_rows(text) IS
    'Internal: keeps rows of a load for its end; the number of the chunk that comes next.';

CREATE OR REPLACE FUNCTION @extschema@._take_held_rows()
RETURNS jsonb[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_chunks jsonb[] := ARRAY(
        SELECT ('[' || @extschema@._inbox_setting('_held_' || n) || ']')::jsonb
        FROM generate_series(1, @extschema@._inbox_setting('_chunk')::integer) n
        WHERE @extschema@._inbox_setting('_held_' || n) IS NOT NULL
        ORDER BY n);
BEGIN
    PERFORM set_config('awa.inbox_held_' || n, '', true)
    FROM generate_series(1, @extschema@._inbox_setting('_chunk')::integer) n;
    PERFORM set_config('awa.inbox_chunk', '', true);
    RETURN v_chunks;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_held_rows() IS 'Internal: the rows that a load has held back.';

CREATE OR REPLACE FUNCTION @extschema@._insert_rows(p_chunks jsonb[])
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_jobs @extschema@._job[] := @extschema@._parse_rows(p_chunks, v_now);
BEGIN
    PERFORM @extschema@._refuse_pressure(r.queue, r.priority, min(r.most))
    FROM (SELECT coalesce(j ->> 2, 'default') AS queue, coalesce((j ->> 3)::integer, 2) AS priority,
                 (j -> 6 #>> '{backpressure,reject}')::numeric::bigint AS most
          FROM unnest(p_chunks) c, jsonb_array_elements(c) j) r
    WHERE r.most IS NOT NULL
    GROUP BY r.queue, r.priority;
    PERFORM FROM @extschema@._insert_parsed(v_jobs, v_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_rows(jsonb[]) IS
    'Internal: checks rows of a load and inserts them (errors as insert_jobs).';

CREATE OR REPLACE FUNCTION @extschema@._parse_rows(p_chunks jsonb[], p_now timestamptz)
RETURNS @extschema@._job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row jsonb;
    v_queue text;
    v_shards integer;
    v_jobs @extschema@._job[] := '{}'::@extschema@._job[];
    v_message text;
    v_hint text;
    v_state text;
BEGIN
    FOR v_row IN SELECT j FROM unnest(p_chunks) c, jsonb_array_elements(c) j LOOP
        IF v_shards IS NULL OR v_queue IS DISTINCT FROM v_row ->> 2 THEN
            v_queue := v_row ->> 2;
            v_shards := (@extschema@._queue_options(coalesce(v_queue, 'default'))).enqueue_shards;
        END IF;
        IF v_row #> '{6,backpressure}' = '"signal"' THEN
            PERFORM @extschema@._refuse('22023', 'option "backpressure" of job_inbox cannot be "signal"',
                'A load has no answer: use {"reject": n}, or insert_jobs.');
        END IF;
        v_jobs := v_jobs || @extschema@._checked_job(
            v_row ->> 0, v_row -> 1, coalesce(v_queue, 'default'), coalesce((v_row ->> 3)::integer, 2),
            coalesce((v_row ->> 4)::integer, 25), (v_row ->> 5)::timestamptz,
            coalesce(nullif(v_row -> 6, 'null'), '{}'), v_shards, p_now);
    END LOOP;
    RETURN v_jobs;
EXCEPTION WHEN invalid_parameter_value OR check_violation OR SQLSTATE 'JQ007' THEN
    GET STACKED DIAGNOSTICS v_message = MESSAGE_TEXT, v_hint = PG_EXCEPTION_HINT, v_state = RETURNED_SQLSTATE;
    PERFORM @extschema@._refuse(v_state, format('row %s: %s', v_row ->> 7, v_message), v_hint);
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_rows(jsonb[], timestamptz) IS
    'Internal: rows of a load, checked (22023, 23514, JQ007, with the row named).';
-- Inserting jobs with a unique key.

CREATE OR REPLACE FUNCTION @extschema@._parse_states(p_states jsonb)
RETURNS integer
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_known constant text[] := enum_range(NULL::@extschema@.job_state)::text[];
    v_mask integer;
BEGIN
    IF jsonb_typeof(p_states) <> 'array' OR p_states = '[]' OR NOT p_states <@ to_jsonb(v_known) THEN
        PERFORM @extschema@._refuse('22023',
            format('option "states" of "unique" cannot be %s', left(p_states::text, 100)),
            format('Give an array of states: %s.', array_to_string(v_known, ', ')));
    END IF;
    SELECT bit_or(@extschema@._state_bit(s::@extschema@.job_state)) INTO v_mask
    FROM jsonb_array_elements_text(p_states) s;
    IF NOT p_states ?| '{scheduled,available}'
       OR (p_states ?| '{running,completed}' AND NOT p_states ? 'available') THEN
        PERFORM @extschema@._refuse('22023',
            format('option "states" of "unique" cannot be %s', left(p_states::text, 100)),
            'A job takes its key before it runs: name "scheduled" or "available", '
            'and "available" beside "running" or "completed".');
    END IF;
    RETURN v_mask;
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_states(jsonb) IS 'Internal: states of opts.unique as a mask (22023).';

-- The part of args at some paths, as the object that holds only them. Paths lead through objects.
CREATE OR REPLACE FUNCTION @extschema@._args_at(p_args jsonb, p_paths text[])
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_found jsonb := '{}'::jsonb;
    v_value jsonb;
    v_keys text[];
    v_path text;
BEGIN
    FOREACH v_path IN ARRAY p_paths LOOP
        v_keys := string_to_array(v_path, '.');
        v_value := p_args;
        FOR i IN 1 .. cardinality(v_keys) LOOP
            v_value := CASE WHEN jsonb_typeof(v_value) = 'object' THEN v_value -> v_keys[i] END;
        END LOOP;
        CONTINUE WHEN v_value IS NULL;
        FOR i IN 1 .. cardinality(v_keys) - 1 LOOP
            IF v_found #> v_keys[:i] IS NULL THEN
                v_found := jsonb_set(v_found, v_keys[:i], '{}');
            END IF;
        END LOOP;
        v_found := jsonb_set(v_found, v_keys, v_value);
    END LOOP;
    RETURN v_found;
END
$function$;
COMMENT ON FUNCTION @extschema@._args_at(jsonb, text[]) IS 'Internal: the object that holds only some paths of args.';

CREATE OR REPLACE FUNCTION @extschema@._key_by(
    p_by jsonb, p_kind text, p_queue text, p_args jsonb, p_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_paths text[];
BEGIN
    IF jsonb_typeof(p_by) <> 'array'
       OR EXISTS (SELECT FROM jsonb_array_elements(p_by) b
                  WHERE jsonb_typeof(b) <> 'string' OR b #>> '{}' !~ '^(queue|args([.][^.]+)*)$') THEN
        PERFORM @extschema@._refuse('22023', format('option "by" of "unique" cannot be %s', left(p_by::text, 100)),
            'Give an array of "queue", "args", or paths such as "args.customer.id".');
    END IF;
    v_paths := ARRAY(SELECT DISTINCT substring(b FROM 6) FROM jsonb_array_elements_text(p_by) b WHERE b LIKE 'args.%');
    IF p_by ? 'args' AND v_paths <> '{}' THEN
        PERFORM @extschema@._refuse('22023', 'option "by" of "unique" has "args" and a path in it',
            'Give one of them.');
    END IF;
    RETURN @extschema@._unique_key(
        p_kind, CASE WHEN p_by ? 'queue' THEN p_queue END,
        CASE WHEN p_by ? 'args' THEN p_args
             WHEN v_paths <> '{}' THEN @extschema@._args_at(p_args, v_paths) END,
        p_bucket);
END
$function$;
COMMENT ON FUNCTION @extschema@._key_by(jsonb, text, text, jsonb, bigint) IS
    'Internal: the unique key over the parts that opts.unique names (22023).';

-- opts.unique as the job carries it, with on_conflict until the job is stored.
CREATE OR REPLACE FUNCTION @extschema@._parse_unique(
    p_unique jsonb, p_kind text, p_queue text, p_args jsonb, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_period numeric;
    v_bucket bigint;
    v_key text;
    v_states integer := 31;
    v_policy text;
BEGIN
    PERFORM @extschema@._check_options('unique', p_unique, '{by,key,period_seconds,states,on_conflict}');
    v_period := @extschema@._option_number(p_unique, 'period_seconds', 0.001, 315360000);
    v_bucket := floor(extract(epoch FROM p_now) / v_period);
    v_policy := coalesce(@extschema@._option_text(p_unique, 'on_conflict', 20), 'return');
    IF v_policy <> ALL ('{return,raise,replace}') THEN
        PERFORM @extschema@._refuse('22023', format('option "on_conflict" cannot be %s', quote_ident(v_policy)),
            'Give return, raise or replace.');
    END IF;
    IF coalesce(p_unique -> 'states', 'null') <> 'null' THEN
        v_states := @extschema@._parse_states(p_unique -> 'states');
    END IF;
    v_key := lower(@extschema@._option_text(p_unique, 'key', 32));
    IF v_key IS NULL THEN
        v_key := encode(@extschema@._key_by(coalesce(nullif(p_unique -> 'by', 'null'), '["args"]'),
            p_kind, p_queue, p_args, v_bucket), 'hex');
    ELSIF v_key !~ '^[0-9a-f]{32}$' OR coalesce(p_unique -> 'by', 'null') <> 'null' THEN
        PERFORM @extschema@._refuse('22023', 'option "key" of "unique" must be 32 hex digits, without "by" beside it',
            'Give the key that unique_key() or your client computed, or name the parts in "by".');
    END IF;
    RETURN jsonb_strip_nulls(jsonb_build_object(
        'key', v_key, 'states', nullif(v_states, 31),
        'ends', to_timestamp(((v_bucket + 1) * v_period)::double precision), 'on_conflict', v_policy));
END
$function$;
COMMENT ON FUNCTION @extschema@._parse_unique(jsonb, text, text, jsonb, timestamptz) IS
    'Internal: opts.unique, checked, with its key (22023).';

CREATE OR REPLACE FUNCTION @extschema@._with_unique(
    p_ext jsonb, p_opts jsonb, p_kind text, p_queue text, p_args jsonb, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(p_opts -> 'unique', 'null') = 'null' THEN
        RETURN p_ext;
    END IF;
    RETURN coalesce(p_ext, '{}') || jsonb_build_object('unique',
        @extschema@._parse_unique(p_opts -> 'unique', p_kind, p_queue, p_args, p_now));
END
$function$;
COMMENT ON FUNCTION @extschema@._with_unique(jsonb, jsonb, text, text, jsonb, timestamptz) IS
    'Internal: ext of a new job with its unique key, if it asks for one (22023).';

CREATE OR REPLACE FUNCTION @extschema@._answer_duplicate(
    p_policy text, p_holder bigint, p_args jsonb, p_now timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_policy = 'raise' THEN
        PERFORM @extschema@._refuse_duplicate(p_holder);
    END IF;
    RETURN p_policy = 'replace' AND NOT @extschema@._replace_args(p_holder, p_args, p_now);
END
$function$;
COMMENT ON FUNCTION @extschema@._answer_duplicate(text, bigint, jsonb, timestamptz) IS
    'Internal: applies on_conflict to a duplicate: 23505 for raise, new arguments for the holder for replace; '
    'true when the holder did not wait any more.';

-- An older snapshot does not see who took a key since, or gave one up: there the insert of the claim decides alone.
CREATE OR REPLACE FUNCTION @extschema@._look_for_holders(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $function$
BEGIN
    RETURN (
        SELECT array_agg(
            ROW(j.o,
                ROW(j.job_id, j.queue, j.priority, j.shard, CASE j.state WHEN 'available' THEN p_now ELSE j.run_at END,
                    j.attempt, j.run_lease, j.kind, j.args, j.ext #- '{unique,on_conflict}')::@extschema@._job,
                j.ext -> 'unique', coalesce(h.state, j.state), h.job_id)::@extschema@._keyed_job
            ORDER BY j.o)
        FROM (SELECT u.*, CASE WHEN coalesce(u.run_at, p_now) <= p_now THEN 'available' ELSE 'scheduled'
                          END::@extschema@.job_state AS state
              FROM unnest(p_jobs) WITH ORDINALITY
                  u (job_id, queue, priority, shard, run_at, attempt, run_lease, kind, args, ext, o)) j
        LEFT JOIN LATERAL (
            SELECT c.job_id, k.state
            FROM @extschema@.job_unique_claims c, @extschema@._key_holder(c, p_now) k
            WHERE c.key = decode(j.ext -> 'unique' ->> 'key', 'hex') AND @extschema@._is_read_committed()
                  AND @extschema@._key_counts_in(j.ext -> 'unique', j.state) AND k.holds) h ON true);
END
$function$;
COMMENT ON FUNCTION @extschema@._look_for_holders(@extschema@._job[], timestamptz) IS
    'Internal: new jobs with who holds their keys now.';

CREATE OR REPLACE FUNCTION @extschema@._take_positions(p_jobs @extschema@._keyed_job[])
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_group record;
    v_positions bigint[];
    v_ids bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(p_jobs)]);
BEGIN
    FOR v_group IN SELECT (j.job).queue, (j.job).priority, (j.job).shard,
                          array_agg(j.ordinal ORDER BY j.ordinal) AS members
                   FROM unnest(p_jobs) j WHERE j.holder IS NULL AND j.state = 'available'
                   GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LOOP
        v_positions := @extschema@._reserve_positions(
            v_group.queue, v_group.priority, v_group.shard, cardinality(v_group.members));
        CONTINUE WHEN v_positions IS NULL;
        FOR i IN 1 .. cardinality(v_positions) LOOP
            v_ids[v_group.members[i]] := v_positions[i];
        END LOOP;
    END LOOP;
    RETURN ARRAY(
        SELECT CASE WHEN j.holder IS NOT NULL THEN j
                    WHEN v_ids[j.ordinal] IS NOT NULL
                    THEN ROW(j.ordinal, @extschema@._with_id(j.job, v_ids[j.ordinal]), j.wanted, j.state,
                             NULL)::@extschema@._keyed_job
                    ELSE ROW(j.ordinal, @extschema@._with_id(j.job, nextval('@extschema@.job_ids')), j.wanted,
                             'scheduled', NULL)::@extschema@._keyed_job END
        FROM unnest(p_jobs) j
        ORDER BY j.ordinal);
END
$function$;
COMMENT ON FUNCTION @extschema@._take_positions(@extschema@._keyed_job[]) IS
    'Internal: gives new jobs their positions, or ids where they are deferred.';

CREATE OR REPLACE FUNCTION @extschema@._with_id(p_job @extschema@._job, p_id bigint)
RETURNS @extschema@._job
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN ROW(p_id, (p_job).queue, (p_job).priority, (p_job).shard, (p_job).run_at, (p_job).attempt,
           (p_job).run_lease, (p_job).kind, (p_job).args, (p_job).ext)::@extschema@._job;
COMMENT ON FUNCTION @extschema@._with_id(@extschema@._job, bigint) IS 'Internal: the job under an id.';

-- A key that comes twice in one call belongs to the first of them.
CREATE OR REPLACE FUNCTION @extschema@._take_keys(p_jobs @extschema@._keyed_job[], p_now timestamptz)
RETURNS @extschema@._keyed_job[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_row record;
    v_key bytea;
    v_owner bigint;
    v_owner_state @extschema@.job_state;
    v_first bigint;
    v_holders bigint[] := array_fill(NULL::bigint, ARRAY[cardinality(p_jobs)]);
    v_states @extschema@.job_state[] := ARRAY(SELECT j.state FROM unnest(p_jobs) j ORDER BY j.ordinal);
    v_args jsonb := '{}'::jsonb;
BEGIN
    FOR v_row IN SELECT j.ordinal, (j.job).job_id, (j.job).args, j.wanted, j.state, j.holder,
                        decode(j.wanted ->> 'key', 'hex') AS key
                 FROM unnest(p_jobs) j
                 WHERE j.wanted IS NOT NULL
                       AND (j.holder IS NOT NULL OR @extschema@._key_counts_in(j.wanted, j.state))
                 ORDER BY key, j.ordinal LOOP
        IF v_row.key IS DISTINCT FROM v_key THEN
            v_key := v_row.key;
            v_owner := v_row.holder;
            v_owner_state := v_row.state;
            v_first := v_row.ordinal;
            IF v_owner IS NULL THEN
                SELECT t.holder, coalesce(t.state, v_row.state) INTO v_owner, v_owner_state
                FROM @extschema@._take_key(v_key, v_row.job_id, v_row.wanted, p_now) t;
                CONTINUE WHEN v_owner = v_row.job_id;
            END IF;
            v_first := NULL;
        END IF;
        v_holders[v_row.ordinal] := v_owner;
        v_states[v_row.ordinal] := v_owner_state;
        IF v_first IS NOT NULL AND v_row.wanted ->> 'on_conflict' = 'replace' THEN
            v_args := v_args || jsonb_build_object(v_first::text, v_row.args);
        ELSIF @extschema@._answer_duplicate(v_row.wanted ->> 'on_conflict', v_owner, v_row.args, p_now) THEN
            v_states[v_row.ordinal] := coalesce(
                (@extschema@._key_holder(@extschema@._claim_of_key(v_key), clock_timestamp())).state, v_owner_state);
        END IF;
    END LOOP;
    RETURN ARRAY(
        SELECT ROW(j.ordinal,
                   CASE WHEN v_args ? j.ordinal::text
                        THEN (@extschema@._with_args(j.job, ARRAY[v_args -> j.ordinal::text]))[1] ELSE j.job END,
                   j.wanted, v_states[j.ordinal], v_holders[j.ordinal])::@extschema@._keyed_job
        FROM unnest(p_jobs) j
        ORDER BY j.ordinal);
END
$function$;
COMMENT ON FUNCTION @extschema@._take_keys(@extschema@._keyed_job[], timestamptz) IS
    'Internal: takes the keys of new jobs, and applies on_conflict where another job holds one (23505).';

-- First a look without locks: a duplicate then writes nothing. Then positions, lanes in sorted order; then keys, in
-- sorted order; then the jobs. A job that turns out to be a duplicate only now leaves its position unused.
CREATE OR REPLACE FUNCTION @extschema@._insert_unique(p_jobs @extschema@._job[], p_now timestamptz)
RETURNS TABLE (ordinal bigint, job_id bigint, state @extschema@.job_state, duplicate boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_jobs @extschema@._keyed_job[] := @extschema@._look_for_holders(p_jobs, p_now);
    v_slot integer;
BEGIN
    IF EXISTS (SELECT FROM unnest(v_jobs) j WHERE j.holder IS NULL) THEN
        PERFORM pg_current_xact_id();
        v_slot := @extschema@._ring_cursor('queue') % 64;
        -- pause point: insert
        v_jobs := @extschema@._take_positions(v_jobs);
    END IF;
    v_jobs := @extschema@._take_keys(v_jobs, p_now);
    PERFORM @extschema@._append_at_positions(v_slot, ARRAY(
        SELECT j.job FROM unnest(v_jobs) j WHERE j.state = 'available' AND j.holder IS NULL ORDER BY j.ordinal));
    PERFORM @extschema@._defer(ARRAY(
        SELECT @extschema@._born_at(j.job, p_now)
        FROM unnest(v_jobs) j
        WHERE j.state = 'scheduled' AND j.holder IS NULL
        ORDER BY j.ordinal), 'scheduled');
    RETURN QUERY
    SELECT j.ordinal, coalesce(j.holder, (j.job).job_id), j.state, j.holder IS NOT NULL
    FROM unnest(v_jobs) j
    ORDER BY j.ordinal;
END
$function$;
COMMENT ON FUNCTION @extschema@._insert_unique(@extschema@._job[], timestamptz) IS
    'Internal: inserts checked jobs of which some have a unique key; one answer each.';
-- Keys: what producers can compute themselves, computed here.

CREATE OR REPLACE FUNCTION @extschema@.unique_key(kind text, queue text, args jsonb, period_bucket bigint)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    PERFORM @extschema@._check_name('kind', kind);
    IF queue IS NOT NULL THEN
        PERFORM @extschema@._check_name('queue', queue);
    END IF;
    RETURN @extschema@._unique_key(kind, queue, args, period_bucket);
END
$function$;
COMMENT ON FUNCTION @extschema@.unique_key(text, text, jsonb, bigint) IS
'Key of a unique job: the first 16 bytes of BLAKE3 over the kind and the arguments that are not NULL. period_bucket:
floor(seconds since 1970 / length of the period). Errors: 22023, 23514.';

CREATE OR REPLACE FUNCTION @extschema@.concurrency_digest(key text)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL THEN
        PERFORM @extschema@._refuse('22023', 'field "key" must not be NULL', 'Give a text.');
    END IF;
    RETURN @extschema@._concurrency_digest(key);
END
$function$;
COMMENT ON FUNCTION @extschema@.concurrency_digest(text) IS
'Digest of a concurrency key: SHA-256 over awa.concurrency_key.v1, a zero byte and the key, 32 bytes. Jobs without an
ordering key will go to the shard that its first eight bytes name, the highest first, modulo enqueue_shards.
Errors: 22023.';

CREATE OR REPLACE FUNCTION @extschema@.cancel_by_unique_key(key bytea)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF key IS NULL OR length(key) <> 16 THEN
        PERFORM @extschema@._refuse('22023', 'field "key" must have 16 bytes', 'Give what unique_key() returns.');
    END IF;
    RETURN @extschema@._cancel_by_key(key, clock_timestamp());
END
$function$;
COMMENT ON FUNCTION @extschema@.cancel_by_unique_key(bytea) IS
'Cancels the job that holds a unique key and waits or runs, in the caller''s transaction, as cancel_job does. Returns
its id, NULL when there is none. Errors: 22023, 25001, 40001.';
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
sleeper when the limit was hit). Nothing found: ask claim_status. Errors: 22023, 25001 outside READ COMMITTED.';

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
has notify off: poll. Errors: 22023, 25001.';

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
BEGIN
    IF max_jobs IS NULL OR max_jobs NOT BETWEEN 1 AND 32 THEN
        RAISE EXCEPTION USING ERRCODE = '22023', HINT = 'Run 1 to 32 jobs in a transaction.',
            MESSAGE = format('field "max_jobs" is %s', coalesce(max_jobs::text, 'NULL'));
    ELSIF opts IS DISTINCT FROM '{}' THEN
        RAISE EXCEPTION USING ERRCODE = '22023', HINT = 'Leave it out, or give {}.',
            MESSAGE = 'field "opts" has no options in this version';
    END IF;
    FOREACH v_job IN ARRAY ARRAY(
        SELECT ROW(c.*)::@extschema@.claimed_job
        FROM @extschema@.claim_ready_runtime(queue, max_jobs, v_instance) c)
    LOOP
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
            SELECT f.reason INTO v_fault
            FROM @extschema@.finish_jobs(v_instance, jsonb_build_array(
                v_item || jsonb_build_object('outcome', 'completed', 'result', v_result))) f
            WHERE f.result <> 'done';
            IF v_fault IS NOT NULL THEN
                RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = v_fault, HINT = 'Return a smaller result.';
            END IF;
            v_report.completed := v_report.completed + 1;
        EXCEPTION WHEN OTHERS THEN
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
Errors: 22023, 25001.';
-- Calls of operators and of readers.

CREATE OR REPLACE FUNCTION @extschema@.version()
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN '0.1.0';
COMMENT ON FUNCTION @extschema@.version() IS 'Version of the installed code.';

CREATE OR REPLACE FUNCTION @extschema@.schema_version()
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;
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
'Declares a queue or changes its options; options not named keep their value. opts: enqueue_shards (1
to 64), strict_fifo (producers of a lane follow each other until commit), notify (wake-ups), dlq
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
        v_run_at := coalesce(
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
    FROM (VALUES
        ('verify_rings', @extschema@._verify_rings()),
        ('verify_lanes', @extschema@._verify_lanes()),
        ('verify_sequences', @extschema@._verify_sequences())
        ) v (step, changed);
END
$function$;
COMMENT ON FUNCTION @extschema@.verify() IS
'After a restore, a logical copy or a failover, before workers start: brings cursors and sequences in line with the
rows. Call it in a transaction of its own. Harmless at any other time. Returns what it changed. Errors: 25001,
55000 when a ring must be repaired and the transaction has written, or when set_owner() must come first.';

-- Also after a restore: a dump does not hold what was taken from the types of rows of tables.
CREATE OR REPLACE FUNCTION @extschema@._close_types()
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_type regtype;
BEGIN
    FOR v_type IN
        SELECT t.oid FROM pg_type t
        WHERE t.typnamespace = '@extschema@'::regnamespace AND t.typcategory <> 'A'
    LOOP
        EXECUTE format('REVOKE ALL ON TYPE %s FROM PUBLIC', v_type);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._close_types() IS 'Internal: takes USAGE on the types of the schema from PUBLIC.';

-- Ownership and rights. Security invoker: the caller must be allowed to do this.
CREATE OR REPLACE FUNCTION @extschema@.set_owner(owner regrole)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_object record;
BEGIN
    IF owner IS NULL OR NOT EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner) THEN
        PERFORM @extschema@._refuse('42704', 'field "owner" names no role', 'Create a NOLOGIN role first.');
    END IF;
    IF EXISTS (SELECT FROM pg_roles r WHERE r.oid = owner AND r.rolsuper) THEN
        PERFORM @extschema@._refuse('22023', format('field "owner": role %s is a superuser', owner),
            'Name a NOLOGIN role without attributes: SECURITY DEFINER functions will run as it.');
    END IF;
    EXECUTE format('ALTER SCHEMA @extschema@ OWNER TO %s', owner);
    FOR v_object IN
        SELECT CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS class,
               c.oid::regclass::text AS name
        FROM pg_class c
        WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
          -- The owner of an owned sequence follows its table.
          AND NOT (c.relkind = 'S' AND EXISTS (
              SELECT FROM pg_depend d
              WHERE d.objid = c.oid AND d.classid = 'pg_class'::regclass
                AND d.refclassid = 'pg_class'::regclass AND d.deptype = 'a'))
        UNION ALL
        SELECT 'TYPE', t.oid::regtype::text FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE t.typnamespace = '@extschema@'::regnamespace AND (t.typtype IN ('e', 'd') OR c.relkind = 'c')
        UNION ALL
        SELECT 'ROUTINE', p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = '@extschema@'::regnamespace
    LOOP
        EXECUTE format('ALTER %s %s OWNER TO %s', v_object.class, v_object.name, owner);
    END LOOP;
    PERFORM @extschema@._close_types();
END
$function$;
COMMENT ON FUNCTION @extschema@.set_owner(regrole) IS
'Gives the schema and everything in it to a role, which should be NOLOGIN and without attributes or memberships:
SECURITY DEFINER functions run as it. Owner or superuser only. Errors: 42704, 22023 for a superuser, 42501.';
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
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA @extschema@ FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA @extschema@ FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA @extschema@ FROM PUBLIC;
DO $block$
BEGIN
    PERFORM @extschema@._close_types();
END
$block$;
