-- queue_counts, queue_depths and the queues view.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT is((awa.queue_counts('none'))::text, '(none,0,0,0,0,0,0,0,0,0)', 'an unknown queue has no jobs');
SELECT test.refuses('SELECT awa.queue_counts(NULL)', '22023', 'field "queue"%', 'the queue is named');
SELECT test.refuses('SELECT awa.queue_counts(repeat(''q'', 201))', '23514', 'field "queue"%', 'and within the limit');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.queue_counts(''q'')', '25001', '%READ COMMITTED%', 'counts need READ COMMITTED');
COMMIT;

SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[10]), 'q', p) FROM generate_series(1, 4) p \g /dev/null
SELECT is((awa.queue_counts('q')).available, 40::bigint, 'all priorities are counted');
SELECT results_eq($$ SELECT d.priority, d.shard, d.depth, d.paused FROM awa.queue_depths() d WHERE d.queue = 'q' $$,
    $$ SELECT p, 0, 10::bigint, false FROM generate_series(1, 4) p $$, 'queue_depths shows each lane');
SELECT count(*) FROM test.claim('q', 15) \g /dev/null
SELECT results_eq($$ SELECT c.available, c.running FROM awa.queue_counts('q') c $$, $$ VALUES (25::bigint, 15::bigint) $$,
    'claimed ones run');
SELECT results_eq($$ SELECT d.priority, d.depth FROM awa.queue_depths() d WHERE d.queue = 'q' $$,
    $$ VALUES (1, 0::bigint), (2, 5), (3, 10), (4, 10) $$, 'and leave the depth');
BEGIN;
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[3]), 'q', 3) \g /dev/null
SELECT is((awa.queue_counts('q')).available, 28::bigint, 'a transaction counts its own jobs');
ROLLBACK;
SELECT is((awa.queue_counts('q')).available, 25::bigint, 'what rolled back is not counted');
SELECT is((SELECT d.depth FROM awa.queue_depths() d WHERE d.queue = 'q' AND d.priority = 3), 13::bigint,
    'the depth is an upper bound, until a claim passes');
SELECT awa.cancel_job(j.job_id) FROM awa.jobs j WHERE j.queue = 'q' AND j.state = 'available' AND j.priority = 4 LIMIT 4 \g /dev/null
SELECT results_eq($$ SELECT c.available, c.cancelled FROM awa.queue_counts('q') c $$, $$ VALUES (21::bigint, 4::bigint) $$,
    'cancelled ones do not wait');
SELECT awa.insert_job('k', queue => 'other') \g /dev/null
SELECT is((awa.queue_counts('q')).available, 21::bigint, 'another queue is not counted');
SELECT count(*) FROM test.claim('q', 100) \g /dev/null
SELECT is((awa.queue_counts('q')).running, 36::bigint, 'everything runs');
SELECT ok((SELECT bool_and(d.depth = 0) FROM awa.queue_depths() d WHERE d.queue = 'q' AND d.priority IN (1, 2)),
    'depths end at 0');

SELECT results_eq($$ SELECT q.queue, q.lanes, q.paused_at FROM awa.queues q ORDER BY 1 $$,
    $$ VALUES ('other', 1::bigint, NULL::timestamptz), ('q', 4, NULL) $$, 'queues that were never declared are listed');
SELECT awa.pause_queue('declared only') \g /dev/null
SELECT results_eq($$ SELECT q.lanes, q.paused_at IS NOT NULL FROM awa.queues q WHERE q.queue = 'declared only' $$,
    $$ VALUES (0::bigint, true) $$, 'and so are those without lanes');

SELECT matches(awa.version(), '^\d+\.\d+\.\d+', 'the code has a version');
SELECT is(awa.version(), (SELECT e.extversion FROM pg_extension e WHERE e.extname = 'awa'), 'which is the extension''s');
SELECT cmp_ok(awa.schema_version(), '>=', 1, 'the schema has a number');

SELECT * FROM finish();
