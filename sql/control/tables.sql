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

CREATE TABLE @extschema@.database_identity (
    system_identifier bigint NOT NULL,
    database_oid      oid NOT NULL,
    since             timestamptz NOT NULL,
    CONSTRAINT database_identity_pkey PRIMARY KEY (system_identifier, database_oid)
);
COMMENT ON TABLE @extschema@.database_identity IS
    'The database whose rows these are, once verify() has seen it. A dump or logical copy brings that of the old one.';

SELECT @extschema@._mark_for_dump(x.relation::regclass)
FROM unnest(ARRAY['queue_meta', 'lane_ids', 'job_ids', 'queue_lanes', 'queue_ring', 'claim_ring',
                  'queue_ring_rotations', 'claim_ring_rotations', 'runtime_instances', 'job_unique_claims',
                  'sql_handlers', 'database_identity']) t (name),
     LATERAL (SELECT '@extschema@.' || t.name) x (relation);

DO $do$
DECLARE
    v_name text;
    v_comment text;
BEGIN
    -- Sequences used as shared memory. All are written so seldom that their WAL does not matter.
    CREATE SEQUENCE @extschema@.rescue_clock MINVALUE 0 START 0;
    COMMENT ON SEQUENCE @extschema@.rescue_clock IS
        'When every open attempt was last looked at (epoch milliseconds).';
    PERFORM @extschema@._mark_for_dump('@extschema@.rescue_clock');
    FOR v_name, v_comment IN
        SELECT format('%s_%s_released', r, s),
               format('Since when nothing needs slot %s of the %s ring (epoch microseconds); 0: not seen yet.', s, r)
        FROM unnest('{queue,claim}'::text[]) r, generate_series(0, @extschema@._slot_count(r) - 1) s
    LOOP
        EXECUTE format('CREATE SEQUENCE @extschema@.%I MINVALUE 0 START 0', v_name);
        EXECUTE format('COMMENT ON SEQUENCE @extschema@.%I IS %L', v_name, v_comment);
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_name)::regclass);
    END LOOP;
    FOR v_bell IN 0 .. 63 LOOP
        EXECUTE format('CREATE SEQUENCE @extschema@.doorbell_%s MINVALUE 0 START 0 INCREMENT 500', v_bell);
        EXECUTE format('COMMENT ON SEQUENCE @extschema@.doorbell_%s IS %L', v_bell,
            'Doorbell flag: some worker sleeps until this time (epoch milliseconds).');
        PERFORM @extschema@._mark_for_dump(format('@extschema@.doorbell_%s', v_bell)::regclass);
    END LOOP;
END
$do$;
