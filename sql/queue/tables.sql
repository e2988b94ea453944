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
