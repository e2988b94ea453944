-- The life of a job only inserts, and locks no more than the leaves it uses. Everything happens in one transaction here, so
-- that its locks and its statistics can be counted.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE VIEW test.leaf_locks AS
SELECT regexp_replace(c.relname::text, '_\d+$', '') COLLATE "default" AS family, count(DISTINCT c.relname) AS leaves
FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
WHERE k.locktype = 'relation' AND k.pid = pg_backend_pid() AND c.relispartition AND c.relnamespace = 'awa'::regnamespace
GROUP BY 1;
CREATE VIEW test.advisory_locks AS
SELECT k.mode FROM pg_locks k WHERE k.locktype = 'advisory' AND k.pid = pg_backend_pid() AND k.granted;
CREATE VIEW test.changes AS
SELECT s.relname, s.n_tup_upd + s.n_tup_del AS changed FROM pg_stat_xact_user_tables s
WHERE s.schemaname = 'awa' AND s.n_tup_upd + s.n_tup_del > 0;

SELECT awa.declare_queue('q') \g /dev/null
SELECT awa.declare_queue('strict', '{"strict_fifo": true}') \g /dev/null

BEGIN;
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[9]), 'q') \g /dev/null
SELECT awa.insert_jobs('[{"kind": "k", "queue": "q"}]') \g /dev/null
SELECT is((SELECT count(*) FROM test.advisory_locks), 0::bigint, 'a producer holds no lock that another one could wait for');
SELECT results_eq('SELECT l.family, l.leaves FROM test.leaf_locks l', $$ VALUES ('ready_entries', 1::bigint) $$,
    'it locks one leaf, that of the current slot');
SELECT is((SELECT count(*) FROM test.claim('q')), 11::bigint, 'the jobs are claimed');
SELECT is_empty('SELECT l.* FROM test.leaf_locks l WHERE l.leaves > 1', 'a claim locks one leaf of a family');
SELECT results_eq($$ SELECT f.result, count(*) FROM awa.lease_claim_batches b,
        LATERAL awa.complete_jobs(b.owner, b.slot, b.batch_id, awa._to_list(b.positions)) f GROUP BY 1 $$,
    $$ VALUES ('done', 11::bigint) $$, 'and completed');
SELECT is_empty('SELECT c.* FROM test.changes c', 'enqueue, claim and complete update and delete nothing');
COMMIT;

BEGIN;
SELECT awa.insert_job('k', queue => 'strict') \g /dev/null
SELECT results_eq('SELECT a.mode FROM test.advisory_locks a', $$ VALUES ('ExclusiveLock') $$,
    'a producer of a strict_fifo queue holds its lane until commit');
COMMIT;

-- Jobs of one flush and one batch cost one row, however many they are.
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[500]), 'wide') \g /dev/null
SELECT count(*) AS claimed FROM test.claim('wide', 500) \gset
SELECT is((SELECT count(*) FROM awa.lease_claim_batches b WHERE awa._cardinality(b.positions) = 500), 1::bigint,
    '500 claimed jobs are one receipt');
SELECT is((SELECT octet_length(b.positions::text) < 60 FROM awa.lease_claim_batches b WHERE awa._cardinality(b.positions) = 500), true,
    'of one range');
SELECT count(*) AS completed FROM awa.lease_claim_batches b, LATERAL awa.complete_jobs(b.owner, b.slot, b.batch_id, awa._to_list(b.positions)) f
WHERE awa._cardinality(b.positions) = 500 \gset
SELECT is((SELECT count(*) FROM awa.lease_claim_closures c WHERE awa._cardinality(c.closed) = 500), 1::bigint, 'one closure');
SELECT is((SELECT count(*) FROM awa.receipt_completion_batches c WHERE awa._cardinality(c.positions) = 500), 1::bigint,
    'and one completion');

SELECT * FROM finish();
