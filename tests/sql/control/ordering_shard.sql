-- The published vectors of the ordering hash, and routing by it.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT results_eq(
    $$ SELECT awa._ordering_hash(v.key) FROM (VALUES (''), ('a'), ('customer-42'), ('order:1001')) v (key) $$,
    $$ VALUES (14695981039346656037), (12638153115695167552), (695220319317454988), (14549007610802403233) $$,
    'the hash equals the published vectors');
SELECT is(awa.ordering_shard(v.key, v.shards), v.shard, format('key %s is in shard %s of %s', v.key, v.shard, v.shards))
FROM (VALUES ('customer-42', 8, 4), ('customer-42', 64, 12), ('order:1001', 2, 1), ('order:1001', 8, 1), ('order:1001', 64, 33),
             ('anything', 1, 0)) v (key, shards, shard);
SELECT is(awa._ordering_hash('é'), mod((mod(14695981039346656037 * 1099511628211 + 195, 18446744073709551616)) * 1099511628211 + 169, 18446744073709551616),
    'the hash runs over the UTF-8 bytes');
SELECT is((SELECT count(DISTINCT awa.ordering_shard('key ' || i, 64)) FROM generate_series(1, 2000) i), 64::bigint,
    'keys reach every shard');

SELECT test.refuses(format('SELECT awa.ordering_shard(%s)', v.arguments), '22023', 'fields "key" and "shards"%', 'refused: ' || v.arguments)
FROM (VALUES ('NULL, 8'), ('''k'', NULL'), ('''k'', 0'), ('''k'', 65'), ('''k'', -1')) v (arguments);

SELECT awa.declare_queue('q', '{"enqueue_shards": 8}') \g /dev/null
SELECT awa.insert_job('k', queue => 'q', opts => '{"ordering_key": "customer-42"}') FROM generate_series(1, 5) \g /dev/null
SELECT awa.insert_jobs('[{"kind": "k", "queue": "q", "opts": {"ordering_key": "customer-42"}}]') \g /dev/null
SELECT awa.insert_many('k', ARRAY['1', '2']::jsonb[], queue => 'q', opts => '{"ordering_key": "customer-42"}') \g /dev/null
SELECT results_eq($$ SELECT d.shard, d.depth FROM awa.queue_depths() d WHERE d.queue = 'q' AND d.depth > 0 $$,
    $$ VALUES (4, 8::bigint) $$,
    'all three inserts route an ordering key to the shard that ordering_shard names');
SELECT awa.insert_job('k', queue => 'q') FROM generate_series(1, 200) \g /dev/null
SELECT is((SELECT count(*) FROM awa.queue_depths() d WHERE d.queue = 'q' AND d.depth > 0), 8::bigint,
    'jobs without a key spread over all shards');
SELECT is((SELECT count(*) FROM test.claim('q', 1000)), 208::bigint, 'one claim takes from all shards');

-- A shard is kept for life.
SELECT awa.declare_queue('moved', '{"enqueue_shards": 8}') \g /dev/null
SELECT awa.insert_job('k', queue => 'moved', opts => '{"ordering_key": "customer-42"}') \g /dev/null
SELECT test.claim_one('moved') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 0}'), 'done', 'a job is retried');
SELECT awa.declare_queue('moved', '{"enqueue_shards": 2}') \g /dev/null
SELECT is(test.promote('moved'), 1::bigint, 'and promoted');
SELECT results_eq($$ SELECT d.shard, d.depth FROM awa.queue_depths() d WHERE d.queue = 'moved' AND d.depth > 0 $$,
    $$ VALUES (4, 1::bigint) $$,
    'a retried job comes back to its shard, whatever the width is now');
SELECT is((SELECT count(*) FROM test.claim('moved')), 1::bigint, 'lanes beyond the width stay claimable');

SELECT * FROM finish();
