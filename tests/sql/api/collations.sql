-- Names are compared byte by byte, whatever the collation of the caller's columns: 'Q' is another queue than 'q'.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT EXISTS (SELECT FROM pg_collation c WHERE c.collprovider = 'i' AND c.collname = 'und-x-icu') AS has_icu \gset
\if :has_icu
CREATE COLLATION test.caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
SELECT ok('a' = 'A' COLLATE test.caseless, 'the collation ignores case');
CREATE TABLE test.names (queue text COLLATE test.caseless, kind text COLLATE "C", plain text);
INSERT INTO test.names VALUES ('Q', 'k', 'q');

SELECT awa.declare_queue('q', '{"enqueue_shards": 2, "dlq": true}') \g /dev/null
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT is((awa.insert_job(n.kind, queue => n.queue)).state::text, 'available', 'insert_job takes any collation') FROM test.names n;
SELECT isnt_empty($$ SELECT awa.insert_many(n.queue, '{1}', n.queue) FROM test.names n $$, 'so does insert_many');
SELECT results_eq($$ SELECT c.queue, c.available FROM test.names n, unnest(ARRAY[n.plain, n.queue COLLATE "C"]) x, LATERAL awa.queue_counts(x) c $$,
    $$ VALUES ('q', 1::bigint), ('Q', 2::bigint) $$, 'and their jobs go where the bytes of the name say');
SELECT is((SELECT c.available FROM test.names n, LATERAL awa.queue_counts(n.queue) c), 2::bigint, 'queue_counts tells the queues apart');
SELECT lives_ok($$ SELECT awa.declare_queue(n.queue, '{"notify": false}') FROM test.names n $$, 'declare_queue takes any collation');
SELECT results_eq($$ SELECT q.queue, q.notify FROM awa.queues q ORDER BY q.queue COLLATE "C" $$, $$ VALUES ('Q', false), ('q', true) $$,
    'and declares that one queue');
SELECT is(awa.pause_queue(n.queue), true, 'pause_queue pauses it') FROM test.names n;
SELECT is((awa.claim_status(n.plain)).reason, 'ready', 'and no other one') FROM test.names n;
SELECT is((awa.claim_status(n.queue)).reason, 'paused', 'claim_status tells them apart') FROM test.names n;
SELECT is(awa.resume_queue(n.queue), true, 'resume_queue resumes it') FROM test.names n;
SELECT is((SELECT count(*) FROM test.names n, LATERAL awa.claim_ready_runtime(n.queue, 10, test.worker(1)) c), 2::bigint, 'a claim gets its own jobs alone');
SELECT throws_ok($$ SELECT awa.set_setting('AGING_SECONDS' COLLATE test.caseless, '5' COLLATE test.caseless) $$, '42704', NULL, 'names of settings have case');
SELECT lives_ok($$ SELECT awa.set_setting('aging_seconds' COLLATE test.caseless, '5' COLLATE test.caseless) $$, 'set_setting takes any collation');
SELECT is(awa.ordering_shard('A' COLLATE test.caseless, 64), awa.ordering_shard('A', 64), 'ordering_shard hashes bytes');
SELECT isnt(awa.unique_key('k' COLLATE test.caseless, 'Q' COLLATE test.caseless, '{}', 1), awa.unique_key('k', 'q', '{}', 1),
    'unique_key takes any collation, and hashes bytes');
SELECT is(awa.cancel_job((awa.insert_job('k', queue => 'q')).job_id, 'why' COLLATE test.caseless) COLLATE "C", 'cancelled',
    'cancel_job takes any collation');
SELECT awa.insert_many('k', '{1,2}', n.queue) FROM test.names n \g /dev/null
SELECT is(awa.drain_queue(n.plain), 1::bigint, 'drain_queue drains') FROM test.names n;
SELECT is(awa.drain_queue(n.queue), 2::bigint, 'that one queue') FROM test.names n;
CREATE FUNCTION test.handler(args jsonb) RETURNS void LANGUAGE sql AS '';
SELECT lives_ok($$ SELECT awa.register_sql_handler('K' COLLATE test.caseless, 'test.handler(jsonb)') $$, 'register_sql_handler takes any collation');
SELECT awa.insert_job('k', queue => n.queue), awa.insert_job('K', queue => n.queue) FROM test.names n \g /dev/null
SELECT results_eq($$ SELECT w.completed, w.unknown FROM test.names n, LATERAL awa.work(n.queue) w $$, $$ VALUES (1, 1) $$, 'work tells kinds and queues apart');
\else
SELECT skip('this server has no ICU', 1);
\endif

SELECT * FROM finish();
