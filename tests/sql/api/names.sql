-- Case b03: queue names. Each one works everywhere with jobs and wake-ups of its own, or is refused at the first call.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE TABLE test.names (id serial, name text);
INSERT INTO test.names (name) VALUES
    ('a-b'), ('A'), ('a'), ('a.b'), ('a b'), ('a''b'), ('a"b'), ('a;--'), ('a%I'), ('a%s'), ('a\b'), ('$1'), ('a{b,c}'), ('NULL'), ('_'), (' '),
    (repeat('n', 57)), (repeat('n', 63)), (repeat('n', 64)), (repeat('n', 63) || repeat('x', 137)), (repeat('n', 63) || repeat('y', 137)),
    (repeat(U&'\+01F680', 200)), (U&'\0645\0631\062D\0628\0627'), ('select'), ('awa_000'), ('a,b'), (U&'e\0301'), (U&'\00E9');

SELECT is((awa.insert_job('k', to_jsonb(n.id), n.name)).state::text, 'available', format('%s: enqueue', left(n.name, 30))) FROM test.names n ORDER BY n.id;
SELECT is((SELECT jsonb_agg(c.args) FROM test.claim(n.name) c), to_jsonb(ARRAY[n.id]), format('%s: a claim gets its own job alone', left(n.name, 30)))
FROM test.names n ORDER BY n.id;
SELECT is((SELECT c.running FROM awa.queue_counts(n.name) c), 1::bigint, format('%s: counts', left(n.name, 30))) FROM test.names n ORDER BY n.id;
SELECT is((SELECT count(DISTINCT (awa.claim_status(n.name)).channel) FROM test.names n), (SELECT count(*) FROM test.names),
    'each name has a channel of its own');
SELECT is_empty($$ SELECT n.name FROM test.names n WHERE (awa.claim_status(n.name)).channel !~ '^awa_[0-9a-f]{24}$' $$,
    'a channel is a digest of fixed length');
SELECT is((SELECT count(DISTINCT l.lane_id) FROM awa.queue_lanes l), (SELECT count(*) FROM test.names),
    'each name has a lane of its own');

SELECT is(awa.pause_queue(n.name), true, format('%s: pause', left(n.name, 30))) FROM test.names n ORDER BY n.id;
SELECT is((awa.heartbeat(test.worker(1))).paused_queues, (SELECT array_agg(n.name ORDER BY n.name) FROM test.names n),
    'each name is paused by itself');
SELECT is(awa.resume_queue(n.name), true, format('%s: resume', left(n.name, 30))) FROM test.names n ORDER BY n.id;

SELECT lives_ok(format('SELECT awa.declare_queue(%L, ''{"dlq": true}'')', n.name), format('%s: declare', left(n.name, 30))) FROM test.names n ORDER BY n.id;
CREATE TABLE test.failed AS SELECT n.id, n.name, test.start(n.name) AS job FROM test.names n;
SELECT is(test.finish(f.job, 'fail'), 'done', format('%s: fail', left(f.name, 30))) FROM test.failed f ORDER BY f.id;
SELECT is((SELECT d.queue FROM awa.dlq d WHERE d.job_id = (f.job ->> 'job_id')::bigint), f.name, format('%s: dead letter', left(f.name, 30))) FROM test.failed f ORDER BY f.id;
SELECT is((awa.retry_dlq((f.job ->> 'job_id')::bigint)).state::text, 'available', format('%s: retry of the dead letter', left(f.name, 30))) FROM test.failed f ORDER BY f.id;
SELECT is(test.claim_one(f.name) ->> 'job_id', f.job ->> 'job_id', format('%s: claim of the retried one', left(f.name, 30))) FROM test.failed f ORDER BY f.id;

SELECT test.refuses(format('SELECT %s', replace(c.call, '$', quote_literal(v.name))), v.state, 'field "queue"%', format('%s refuses %s', c.call, v.title))
FROM (VALUES ('', '22023', 'an empty name'), (E'a\n', '22023', 'a name that ends in a newline'), (E'\x7f', '22023',
    'a control character'),
             (E'a\tb', '22023', 'a tab'), (repeat('n', 201), '23514', 'a name of 201 characters')) v (name, state, title),
     (VALUES ('awa.insert_job(''k'', queue => $)'), ('awa.insert_many(''k'', ''{"1"}'', $)'), ('test.claim($)'), ('awa.claim_status($)'), ('awa.declare_queue($)'),
             ('awa.pause_queue($)'), ('awa.resume_queue($)'), ('awa.queue_counts($)')) c (call);
SELECT is((SELECT count(*) FROM awa.queues), (SELECT count(*) FROM test.names), 'a refused name leaves nothing behind');

SELECT * FROM finish();
