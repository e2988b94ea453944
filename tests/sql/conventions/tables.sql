-- Tables and sequences: what a dump keeps, and what makes TRUNCATE and NOWAIT locks possible.
SELECT * FROM no_plan();

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'S')
      AND c.oid <> ALL ((SELECT e.extconfig FROM pg_extension e WHERE e.extname = 'awa')::oid[])
$$, 'every table, leaf and sequence is marked for dump');

SELECT is_empty($$
    SELECT u.relation::regclass FROM pg_extension e, unnest(e.extconfig, e.extcondition) u (relation, condition)
    WHERE e.extname = 'awa' AND u.condition <> ''
$$, 'a dump keeps all rows');

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relispartition AND c.relname <> 'deferred_jobs_16'
      AND NOT coalesce(c.reloptions @> '{autovacuum_enabled=off}', false)
    UNION ALL
    SELECT c.oid::regclass FROM pg_class c JOIN pg_class t ON t.oid = c.reltoastrelid
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relispartition AND c.relname <> 'deferred_jobs_16'
      AND NOT coalesce(t.reloptions @> '{autovacuum_enabled=off}', false)
$$, 'no autovacuum on leaves, nor on what they toast, but where rows stay for long');

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relpersistence <> 'p'
$$, 'nothing is UNLOGGED at install, so that no promotion loses a page of it');

SELECT set_eq(
    $$ SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'p' $$,
    $$ SELECT unnest(awa._ring_tables('queue') || awa._ring_tables('claim') || awa._ring_tables('deferred')) $$,
    'the rings consist of the partitioned tables');

SELECT is_empty($$
    SELECT t.name, count(i.inhrelid) FROM unnest('{queue,claim,deferred}'::text[]) r (ring), unnest(awa._ring_tables(r.ring)) t (name)
    LEFT JOIN pg_inherits i ON i.inhparent = ('awa.' || t.name)::regclass
    GROUP BY r.ring, t.name HAVING count(i.inhrelid) <> awa._slot_count(r.ring)
$$, 'every ring table has a leaf per slot');

SELECT is_empty($$
    SELECT i.indrelid::regclass FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'p'
$$, 'indexes are on leaves, so that TRUNCATE of one slot is all it takes');

SELECT is_empty($$
    SELECT t.tgrelid::regclass, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    WHERE c.relnamespace = 'awa'::regnamespace AND c.oid <> 'awa.job_inbox'::regclass
$$, 'no triggers but those of job_inbox, no foreign keys');

SELECT is_empty($$
    SELECT c.oid::regclass, s.seqcache FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
    WHERE c.relnamespace = 'awa'::regnamespace AND (s.seqcache <> 1 OR s.seqcycle)
$$, 'sequences cache nothing and never start again');

SELECT is_empty($$
    SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relowner <> 'awa_owner'::regrole
    UNION ALL
    SELECT n.nspname FROM pg_namespace n WHERE n.nspname = 'awa' AND n.nspowner <> 'awa_owner'::regrole
$$, 'set_owner gave away every relation and the schema');

SELECT is_empty($$
    SELECT t.oid::regtype FROM pg_type t WHERE t.typnamespace = 'awa'::regnamespace AND t.typowner <> 'awa_owner'::regrole
$$, 'set_owner gave away every type');

SELECT is_empty($$ SELECT n FROM awa.queue_meta, generate_series(1, 1) n UNION ALL SELECT 1 FROM awa.queue_ring_rotations
                   UNION ALL SELECT 1 FROM awa.claim_ring_rotations UNION ALL SELECT 1 FROM awa.queue_lanes
                   UNION ALL SELECT 1 FROM awa.setting_overrides $$,
                'install makes no rows that a restore would collide with');

SELECT * FROM finish();
