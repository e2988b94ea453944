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
