-- finish_jobs: mixed calls, bad items, and limits. The items that are good are done.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[8]), 'q') \g /dev/null
CREATE TABLE test.held AS SELECT row_number() OVER (ORDER BY c."position") AS n, to_jsonb(c) AS job FROM test.claim('q') c;
CREATE FUNCTION test.held_item(p_n integer, p_outcome text, p_more jsonb DEFAULT '{}') RETURNS jsonb LANGUAGE sql AS
$$ SELECT test.item(h.job, p_outcome, p_more) FROM test.held h WHERE h.n = p_n $$;
SELECT results_eq($$
    SELECT f.result, f.reason FROM awa.finish_jobs(test.worker(1), jsonb_build_array(
        test.held_item(1, 'completed'), test.held_item(2, 'explode'), '5', test.held_item(3, 'retry', '{"delay_seconds": -1}'), test.held_item(3, 'retry',
            '{"delay_seconds": 1e12}'),
        test.held_item(4, 'snooze'), test.held_item(5, 'cancel'), test.held_item(6, 'fail'), test.held_item(6, 'fail'), test.held_item(1, 'completed'), test.held_item(1,
            'retry'),
        test.held_item(2, 'completed') - 'position', test.held_item(2, 'completed', '{"position": -1}'), test.held_item(2, 'completed',
            '{"batch_id": 1.5}'),
        test.held_item(2, 'completed', '{"run_lease": 2}'), test.held_item(2, 'completed', '{"job_id": 77}'), test.held_item(2, 'completed',
            '{"claim_slot": 99}'),
        test.held_item(2, 'completed', '{"position": 99}'), test.held_item(7, 'released'), test.held_item(8, 'retry', '{"delay_seconds": "5"}'))) f $$,
    $$ VALUES ('done', NULL), ('invalid', 'field "outcome" must be completed, retry, snooze, cancel, fail or released'), ('invalid',
        'item must be a JSON object'),
              ('invalid', 'field "delay_seconds" must be a number from 0 to 31536000'), ('invalid',
                  'field "delay_seconds" must be a number from 0 to 31536000'),
              ('invalid', 'a snooze needs "delay_seconds"'), ('done', NULL), ('done', NULL), ('already_done', NULL), ('already_done', NULL), ('stale', NULL),
              ('invalid', 'field "position" must be a non-negative integer'), ('invalid',
                  'field "position" must be a non-negative integer'),
              ('invalid', 'field "batch_id" must be a non-negative integer'), ('stale', NULL), ('stale', NULL), ('stale', NULL), ('stale', NULL), ('done', NULL),
              ('invalid', 'field "delay_seconds" must be a number from 0 to 31536000') $$,
    'each item has its own answer, in order, and bad ones do not spoil the others');
SELECT results_eq($$ SELECT c.available, c.running, c.completed, c.failed, c.cancelled, c.scheduled, c.retryable FROM awa.queue_counts('q') c $$,
    $$ VALUES (1::bigint, 4::bigint, 1::bigint, 1::bigint, 1::bigint, 0::bigint, 0::bigint) $$, 'exactly the done ones moved');
SELECT results_eq($$ SELECT f.job_id, f.run_lease FROM awa.finish_jobs(test.worker(1), jsonb_build_array(test.held_item(2, 'completed'))) f $$,
    $$ SELECT (h.job ->> 'job_id')::bigint, 1::bigint FROM test.held h WHERE h.n = 2 $$, 'an answer names the attempt');
SELECT is((SELECT f.result FROM awa.finish_jobs(test.worker(1), jsonb_build_array((SELECT jsonb_object_agg(t.key, t.value #>> '{}') FROM jsonb_each(test.held_item(3, 'completed')) t))) f),
    'done', 'numbers may be strings, for clients whose numbers are floats');
SELECT is(test.finish((SELECT h.job FROM test.held h WHERE h.n = 4), 'completed', '{}', 2), 'stale',
    'a worker cannot finish another one''s attempt');
SELECT is_empty($$ SELECT FROM awa.finish_jobs(test.worker(1), '[]') $$, 'no items, no answers');
SELECT test.refuses($$ SELECT awa.finish_jobs(NULL, '[]') $$, '22023', 'field "instance_id"%', 'the instance is given');
SELECT test.refuses($$ SELECT awa.finish_jobs(test.worker(1), '{}') $$,
    '22023', 'field "outcomes" must be a JSON array', 'outcomes are an array');
SELECT test.refuses($$ SELECT awa.finish_jobs(test.worker(1), NULL) $$,
    '22023', 'field "outcomes" must be a JSON array', 'outcomes are given');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses($$ SELECT awa.finish_jobs(test.worker(1), '[]') $$,
    '25001', '%READ COMMITTED%', 'finish_jobs needs READ COMMITTED');
COMMIT;

-- An item that cannot be stored stands alone. The constraint is the test's: no value is known that the checks let through.
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[9]), 'bad') \g /dev/null
CREATE TABLE test.bad AS SELECT row_number() OVER (ORDER BY c."position") AS n, to_jsonb(c) AS job FROM test.claim('bad') c;
ALTER TABLE awa.deferred_jobs ADD CONSTRAINT test_check CHECK (NOT ext::text LIKE '%poison%');
SELECT results_eq($$
    SELECT f.result, f.reason LIKE '%test_check%' FROM awa.finish_jobs(test.worker(1),
        (SELECT jsonb_agg(test.item(b.job, 'retry', jsonb_build_object('error', CASE b.n WHEN 5 THEN 'poison' ELSE 'plain' END)) ORDER BY b.n) FROM test.bad b)) f $$,
    $$ SELECT CASE n WHEN 5 THEN 'invalid' ELSE 'done' END, CASE n WHEN 5 THEN true END FROM generate_series(1, 9) n $$,
        'one attempt that cannot be stored is invalid, the others are done');
SELECT results_eq($$ SELECT c.retryable, c.running FROM awa.queue_counts('bad') c $$, $$ VALUES (8::bigint, 1::bigint) $$,
    'and it still runs');
ALTER TABLE awa.deferred_jobs DROP CONSTRAINT test_check;
SELECT is(test.finish((SELECT b.job FROM test.bad b WHERE b.n = 5), 'completed'), 'done', 'so that it can be finished otherwise');

-- 64 batches a call.
SELECT awa.insert_many('one', array_fill('{}'::jsonb, ARRAY[70]), 'wide') \g /dev/null
CREATE TABLE test.wide AS SELECT to_jsonb(c) AS job FROM test.claim('wide', 100, '{"separate": ["one"]}') c;
SELECT results_eq($$ SELECT f.result, count(*) FROM awa.finish_jobs(test.worker(1), (SELECT jsonb_agg(test.item(w.job, 'completed')) FROM test.wide w)) f GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('busy', 6::bigint), ('done', 64) $$, 'more than 64 batches in a call are busy');
SELECT results_eq($$ SELECT f.result, count(*) FROM awa.finish_jobs(test.worker(1), (SELECT jsonb_agg(test.item(w.job, 'completed') ORDER BY (w.job ->> 'batch_id')::bigint DESC) FROM test.wide w LIMIT 64)) f GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('already_done', 64::bigint), ('busy', 6) $$, 'a call takes the batches in ascending order');
SELECT results_eq($$ SELECT f.result, count(*) FROM awa.finish_jobs(test.worker(1), (SELECT jsonb_agg(test.item(w.job, 'completed')) FROM test.wide w WHERE test.status(w.job) = 'open')) f GROUP BY 1 $$,
    $$ VALUES ('done', 6::bigint) $$, 'the busy ones are done next time');

-- Bounded errors and reasons.
SELECT test.start('long') AS job \gset
SELECT is(test.finish(:'job', 'cancel', jsonb_build_object('reason', repeat('r', 5000))), 'done', 'a long reason is no obstacle');
SELECT is(length((test.info(:'job')).reason), 2000, 'it is cut');
CREATE FUNCTION test.fail_often() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_job jsonb := test.start('often');
BEGIN
    FOR i IN 1 .. 24 LOOP
        PERFORM test.finish(v_job, 'retry', jsonb_build_object('error', i || repeat('e', 300), 'delay_seconds', 0));
        PERFORM test.promote('often');
        v_job := test.claim_one('often');
    END LOOP;
    PERFORM test.finish(v_job, 'retry', '{"error": "last"}');
    RETURN (v_job ->> 'attempt')::integer;
END $$;
SELECT is(test.fail_often(), 25, 'a job with 25 attempts fails 25 times');
SELECT results_eq($$ SELECT j.state, j.attempt, jsonb_array_length(j.errors), j.errors -> -1 ->> 'error', j.errors -> -1 ->> 'attempt' FROM awa.jobs j WHERE j.queue = 'often' $$,
    $$ VALUES ('failed', 25, 20, 'last', '25') $$, 'and keeps its newest 20 errors');

-- Lanes with large ids.
SELECT setval('awa.lane_ids', 2000000) \g /dev/null
SELECT test.start('high') AS job \gset
SELECT is(test.finish(:'job', 'completed'), 'done', 'a position of 19 digits is a number too');
SELECT is((awa.heartbeat(test.worker(1), jsonb_build_array(jsonb_build_object('claim_slot', :'job'::jsonb -> 'claim_slot', 'batch_id', :'job'::jsonb -> 'batch_id',
    'positions', jsonb_build_array(:'job'::jsonb -> 'position'))))).cancelled #>> '{0,outcome}', 'completed',
        'for the heartbeat as well');
SELECT is(test.finish(:'job', 'completed', '{"position": "9223372036854775808"}'), 'invalid: field "position" must be a non-negative integer',
    'beyond bigint it is invalid');

SELECT * FROM finish();
