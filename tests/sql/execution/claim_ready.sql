-- Claims: what is taken, in which order, and under which conditions.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT test.refuses(format('SELECT awa.claim_ready_runtime(%s)', v.arguments), v.state, v.pattern, 'refused: ' || v.arguments)
FROM (VALUES
    ('''q'', 0, test.worker(1)', '22023', 'field "max_batch" is 0'), ('''q'', -1, test.worker(1)', '22023',
        'field "max_batch" is -1'),
    ('''q'', NULL, test.worker(1)', '22023', 'field "max_batch" is NULL'), ('''q'', 1001, test.worker(1)', '22023',
        'field "max_batch" is 1001'),
    ('''q'', 1, NULL', '22023', 'field "instance_id"%'), ('NULL, 1, test.worker(1)', '22023', 'field "queue"%'), ('''q'', 1, test.worker(1), NULL', '22023',
        'field "opts"%'),
    ('''q'', 1, test.worker(1), ''{"kinds": []}''', '22023', '%unknown option kinds%'), ('''q'', 1, test.worker(1), ''{"separate": "k"}''', '22023',
        'option "separate"%'),
    ('''q'', 1, test.worker(1), ''{"deadline_seconds": 0}''', '22023', 'option "deadline_seconds"%'), ('''q'', 1, test.worker(1), ''{"wake_others": 1}''', '22023',
        'option "wake_others"%')
) v (arguments, state, pattern);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses($$ SELECT test.claim('q') $$,
    '25001', '%needs READ COMMITTED%REPEATABLE READ', 'a claim in REPEATABLE READ is refused');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT test.refuses($$ SELECT test.claim('q') $$,
    '25001', '%needs READ COMMITTED%SERIALIZABLE', 'a claim in SERIALIZABLE is refused');
COMMIT;
SELECT is_empty($$ SELECT FROM test.claim('never seen') $$, 'a claim of an unknown queue finds nothing');
SELECT is((SELECT count(*) FROM awa.queues), 0::bigint, 'and makes nothing');

-- Order and limit.
SELECT awa.insert_job('k', to_jsonb(i), 'q') FROM generate_series(1, 10) i \g /dev/null
SELECT results_eq($$ SELECT c.args FROM test.claim('q', 4) c $$, $$ SELECT to_jsonb(i) FROM generate_series(1, 4) i $$,
    'jobs come in the order of their insert, up to the limit');
SELECT results_eq($$ SELECT c.args FROM test.claim('q', 4, '{}', 2) c $$, $$ SELECT to_jsonb(i) FROM generate_series(5, 8) i $$,
    'another worker gets the next ones');
SELECT is((SELECT count(*) FROM test.claim('q')), 2::bigint, 'the rest is less than the limit');
SELECT is_empty($$ SELECT FROM test.claim('q') $$, 'no job is claimed twice');
SELECT is((SELECT count(DISTINCT j.job_id) FROM awa.jobs j WHERE j.queue = 'q' AND j.state = 'running'), 10::bigint,
    'all of them run');

BEGIN;
SELECT awa.insert_job('k', to_jsonb(11), 'q') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('q')), 1::bigint, 'a claim sees the jobs of its own transaction');
ROLLBACK;
SELECT awa.insert_job('k', to_jsonb(12), 'q') \g /dev/null
BEGIN;
SELECT is((SELECT count(*) FROM test.claim('q')), 1::bigint, 'a job is claimed');
ROLLBACK;
SELECT results_eq($$ SELECT c.args, c.run_lease, c.attempt FROM test.claim('q') c $$, $$ VALUES ('12'::jsonb, 1::bigint, 1) $$,
    'a claim that rolled back took nothing and charged nothing');

SELECT awa.insert_job('k', to_jsonb(13), 'q') \g /dev/null
BEGIN;
SAVEPOINT s;
SELECT is((SELECT count(*) FROM test.claim('q')), 1::bigint, 'a job is claimed after a savepoint');
ROLLBACK TO s;
SELECT results_eq($$ SELECT c.args, c.run_lease FROM test.claim('q') c $$, $$ VALUES ('13'::jsonb, 1::bigint) $$,
    'a rollback to it hands the job to the next claim');
COMMIT;

-- Positions that rolled back are passed, and do not hold up those behind them.
BEGIN;
SELECT awa.insert_job('k', '"gone"', 'gaps') FROM generate_series(1, 3) \g /dev/null
ROLLBACK;
SELECT awa.insert_job('k', '"first"', 'gaps') \g /dev/null
BEGIN;
SELECT awa.insert_job('k', '"gone"', 'gaps') FROM generate_series(1, 3) \g /dev/null
ROLLBACK;
SELECT awa.insert_job('k', '"second"', 'gaps') \g /dev/null
SELECT results_eq($$ SELECT c.args FROM test.claim('gaps', 1) c $$, $$ VALUES ('"first"'::jsonb) $$,
    'a rolled back insert is skipped');
SELECT results_eq($$ SELECT c.args FROM test.claim('gaps', 5) c $$, $$ VALUES ('"second"'::jsonb) $$,
    'also one behind the first claim');
SELECT count(*) FROM test.claim('gaps') \g /dev/null
SELECT count(*) FROM test.claim('gaps') \g /dev/null
SELECT is((awa.claim_status('gaps')).reason, 'idle', 'gaps of transactions that ended are forgotten');

-- Priorities and aging.
SELECT awa.declare_queue('p', '{"aging_seconds": 0}') \g /dev/null
SELECT awa.insert_job('k', to_jsonb(p), 'p', p) FROM generate_series(4, 1, -1) p \g /dev/null
SELECT results_eq($$ SELECT c.priority, c.args FROM test.claim('p') c $$,
    $$ SELECT p, to_jsonb(p) FROM generate_series(1, 4) p $$, 'a smaller priority comes first');
SELECT awa.declare_queue('aging', '{"aging_seconds": 0.02}') \g /dev/null
SELECT awa.insert_job('k', '"old"', 'aging', 4) \g /dev/null
SELECT pg_sleep(0.1) \g /dev/null
SELECT awa.insert_job('k', '"new"', 'aging', 1) \g /dev/null
SELECT results_eq($$ SELECT c.args, c.priority FROM test.claim('aging', 1) c $$, $$ VALUES ('"old"'::jsonb, 4) $$,
    'a job that waited for three aging steps goes before a new one of priority 1');
SELECT awa.insert_job('k', '"old"', 'young', 2) \g /dev/null
SELECT pg_sleep(0.1) \g /dev/null
SELECT awa.insert_job('k', '"new"', 'young', 1) \g /dev/null
SELECT results_eq($$ SELECT c.args FROM test.claim('young', 1) c $$, $$ VALUES ('"new"'::jsonb) $$,
    'before its first aging step a job keeps its priority');

-- Deadlines: the job's own, then the claim's, then the queue's.
SELECT awa.declare_queue('d', '{"deadline_seconds": 300}') \g /dev/null
SELECT awa.insert_job('own', queue => 'd', opts => '{"deadline_seconds": 10}') \g /dev/null
SELECT awa.insert_job('none', queue => 'd') \g /dev/null
SELECT results_eq($$ SELECT c.kind, ceil(extract(epoch FROM c.deadline_at - clock_timestamp()))::integer FROM test.claim('d', 5, '{"deadline_seconds": 60}') c ORDER BY 1 $$,
    $$ VALUES ('none', 60), ('own', 10) $$, 'a deadline is the job''s own, else the one of the claim');
SELECT awa.insert_job('none', queue => 'd') \g /dev/null
SELECT is((SELECT ceil(extract(epoch FROM c.deadline_at - clock_timestamp())) FROM test.claim('d') c), 300::numeric,
    'else the one of the queue');
SELECT awa.insert_job('none', queue => 'nd') \g /dev/null
SELECT is((SELECT c.deadline_at FROM test.claim('nd') c), NULL, 'without any there is none');
SELECT is((SELECT count(DISTINCT b.batch_id) FROM awa.lease_claim_batches b WHERE b.deadline_at IS NOT NULL), 3::bigint,
    'a batch has one deadline');

-- Separate kinds.
SELECT awa.insert_many('own', array_fill('{}'::jsonb, ARRAY[3]), 's') \g /dev/null
SELECT awa.insert_many('shared', array_fill('{}'::jsonb, ARRAY[3]), 's') \g /dev/null
SELECT results_eq($$ SELECT c.kind, count(DISTINCT c.batch_id), count(*) FROM test.claim('s', 10, '{"separate": ["own", "other"]}') c GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('own', 3::bigint, 3::bigint), ('shared', 1, 3) $$,
        'separate kinds have a batch per job, so that they never share its lock');

SELECT is((SELECT count(*) FROM awa.instances i WHERE i.instance_id IN (test.worker(1), test.worker(2))), 2::bigint,
    'a claim makes its worker known');

SELECT * FROM finish();
