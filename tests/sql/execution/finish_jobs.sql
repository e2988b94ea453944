-- finish_jobs: every outcome, what becomes of the job, and repeated answers.
\ir ../support.psql
SELECT * FROM no_plan();

-- retry
SELECT test.start('q') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"error": "boom", "delay_seconds": 120}'), 'done', 'an attempt is retried');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.errors -> 0 ->> ''error'', ceil(extract(epoch FROM j.run_at - clock_timestamp())) FROM test.info(%L) j', :'job'),
    $$ VALUES ('retryable', 1, 1::bigint, 'boom', 120::numeric) $$, 'its job is retryable after the delay, with the error');
SELECT is(test.status(:'job'), 'retried', 'attempt_status names the outcome');
SELECT is(test.finish(:'job', 'retry', '{"error": "boom"}'), 'already_done', 'the same retry again is already done');
SELECT is(test.finish(:'job', v.outcome, v.more), 'stale', format('a %s after the retry is stale', v.outcome))
FROM (VALUES ('completed', '{}'::jsonb), ('snooze', '{"delay_seconds": 1}'), ('cancel', '{}'), ('fail', '{}'), ('released', '{}')) v (outcome, more);
SELECT is((test.info(:'job')).attempt, 1, 'which changed nothing');
SELECT test.promote('q') \g /dev/null
SELECT test.claim_one('q') AS job \gset
SELECT results_eq(format('SELECT (%L::jsonb ->> ''attempt'')::integer, (%1$L::jsonb ->> ''run_lease'')::integer', :'job'), $$ VALUES (2, 2) $$,
    'the next claim is attempt 2 and lease 2');
SELECT is(test.finish(:'job', 'retry', '{"error": {"error": "again", "traceback": "t"}}'), 'done',
    'without a delay the backoff decides');
SELECT results_eq(format('SELECT extract(epoch FROM j.run_at - clock_timestamp()) BETWEEN 2.5 AND 5, jsonb_array_length(j.errors), j.errors #>> ''{1,traceback}'' FROM test.info(%L) j', :'job'),
    $$ VALUES (true, 2, 't') $$, 'it waits 2^attempt seconds plus jitter, and errors add up');

SELECT test.start('policy', '{"backoff": {"delays": [100, 200]}}') AS job \gset
SELECT test.finish(:'job', 'retry') \g /dev/null
SELECT is(ceil(extract(epoch FROM (test.info(:'job')).run_at - clock_timestamp())), 100::numeric,
    'a policy given with the job decides');
SELECT is((test.info(:'job')).errors, NULL, 'a retry without an error adds none');
SELECT test.start('max', '{}', 1) AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"error": "boom", "delay_seconds": 0}'), 'done', 'the last attempt is retried');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt, jsonb_array_length(j.errors) FROM test.info(%L) j', :'job'), $$ VALUES ('failed', 'max_attempts_exhausted', 1, 1) $$,
    'max_attempts = 1 runs once: the job is failed');
SELECT is(test.status(:'job'), 'failed', 'attempt_status says failed');
SELECT is(test.finish(:'job', 'retry', '{"error": "boom"}'), 'already_done', 'and the same retry again is already done');

-- snooze
SELECT test.start('snooze') AS job \gset
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 60, "error": "not kept"}'), 'done', 'an attempt snoozes');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.errors FROM test.info(%L) j', :'job'), $$ VALUES ('scheduled', 0, 1::bigint, NULL::jsonb) $$,
    'which does not count the attempt, but raises the lease');
SELECT is(test.status(:'job'), 'snoozed', 'attempt_status says snoozed');
SELECT test.promote('snooze') \g /dev/null
SELECT test.claim_one('snooze') AS again \gset
SELECT results_eq(format('SELECT (%L::jsonb ->> ''attempt'')::integer, (%1$L::jsonb ->> ''run_lease'')::integer', :'again'), $$ VALUES (1, 2) $$,
    'the next claim repeats the attempt under a new lease');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'the first lease cannot complete it');
SELECT is(test.finish(:'again', 'retry'), 'done', 'a retry after snoozes');
SELECT ok(extract(epoch FROM (test.info(:'again')).run_at - clock_timestamp()) BETWEEN 0.5 AND 2.6,
    'starts at the first backoff step');

-- cancel, fail, completed
SELECT test.start('cancel') AS job \gset
SELECT is(test.finish(:'job', 'cancel', '{"reason": "not wanted", "error": "e"}'), 'done', 'an attempt cancels its job');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt, j.errors -> 0 ->> ''error'' FROM test.info(%L) j', :'job'), $$ VALUES ('cancelled', 'not wanted', 1, 'e') $$,
    'with its reason');
SELECT is(test.status(:'job'), 'cancelled', 'attempt_status says cancelled');
SELECT is(test.finish(:'job', 'cancel'), 'already_done', 'a second cancel is already done');
SELECT test.start('fail') AS job \gset
SELECT is(test.finish(:'job', 'fail', '{"error": "bad input"}'), 'done', 'an attempt fails for good');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt, j.max_attempts, j.errors -> 0 ->> ''error'' FROM test.info(%L) j', :'job'), $$ VALUES ('failed', 'terminal_error', 1, 25, 'bad input') $$,
    'although attempts were left');
SELECT is(test.finish(:'job', 'fail'), 'already_done', 'a second failure is already done');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'a failed attempt cannot complete');
SELECT test.start('done', '{"keep_result": true}') AS job \gset
SELECT is(test.finish(:'job', 'completed', '{"result": [1, 2]}'), 'done', 'an attempt completes with a result');
SELECT results_eq(format('SELECT j.state, j.result, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('completed', '[1, 2]'::jsonb, 1) $$,
    'which is kept, since the job asked for it');
SELECT is(test.finish(:'job', 'completed', '{"result": 5}'), 'already_done', 'a second completion is already done');
SELECT is((test.info(:'job')).result, '[1, 2]'::jsonb, 'and the first result stays');
SELECT test.start('done') AS job \gset
SELECT is(test.finish(:'job', 'completed', '{"result": 1}'), 'done', 'a result that nobody asked for');
SELECT is((test.info(:'job')).result, NULL, 'is dropped');

-- released
SELECT test.start('rel') AS job \gset
SELECT awa.insert_job('other', queue => 'rel') \g /dev/null
SELECT is(test.finish(:'job', 'released', '{"reason": "shutdown"}'), 'done', 'a job is handed back');
SELECT is(test.status(:'job'), 'released', 'attempt_status says released');
SELECT results_eq(format('SELECT j.state, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('available', 0) $$,
    'it waits again and was not charged');
SELECT results_eq($$ SELECT c.kind, c.attempt, c.run_lease FROM test.claim('rel') c $$,
    $$ VALUES ('other', 1, 1::bigint), ('k', 1, 2) $$, 'at the end of its lane, under a new lease');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'the released attempt cannot complete it');
CREATE FUNCTION test.unknown_kind_delays() RETURNS SETOF numeric LANGUAGE plpgsql AS $$
DECLARE
    v_job jsonb := test.start('unknown');
BEGIN
    FOR i IN 1 .. 8 LOOP
        PERFORM test.finish(v_job, 'released', '{"reason": "unknown_kind"}');
        RETURN NEXT ceil(extract(epoch FROM (test.info(v_job)).run_at - clock_timestamp()));
        PERFORM test.promote('unknown');
        v_job := test.claim_one('unknown');
    END LOOP;
    PERFORM test.finish(v_job, 'retry', '{"delay_seconds": 0}');
    PERFORM test.promote('unknown');
    v_job := test.claim_one('unknown');
    RETURN NEXT (v_job ->> 'attempt')::integer;
    PERFORM test.finish(v_job, 'released', '{"reason": "unknown_kind"}');
    RETURN NEXT ceil(extract(epoch FROM (test.info(v_job)).run_at - clock_timestamp()));
    PERFORM awa.cancel_job((v_job ->> 'job_id')::bigint);
END $$;
SELECT results_eq('SELECT test.unknown_kind_delays()', $$ VALUES (1::numeric), (2), (4), (8), (16), (32), (60), (60), (2), (1) $$,
    'a job of an unknown kind comes back after 1 s doubling to 60 s, without an attempt; a real attempt starts this over');

SELECT awa.register_instance(test.worker(9), '{"kinds": ["k"], "queues": {"unknown": 5}}') \g /dev/null
SELECT results_eq('SELECT d FROM test.unknown_kind_delays() WITH ORDINALITY u (d, o) WHERE o IN (2, 8)', $$ VALUES (2::numeric), (60) $$,
    'an instance that never beat counts for nothing');
SELECT awa.heartbeat(test.worker(9)) \g /dev/null
SELECT results_eq('SELECT DISTINCT d FROM test.unknown_kind_delays() WITH ORDINALITY u (d, o) WHERE o <> 9', $$ VALUES (1::numeric) $$,
    'where a live worker on the queue knows the kind, each wait is 1 s');
SELECT awa.register_instance(test.worker(9), '{"kinds": ["k"], "queues": ["another"]}') \g /dev/null
SELECT is((SELECT max(d) FROM test.unknown_kind_delays() d), 60::numeric, 'a worker on another queue does not help');

-- Numbers at the ends of their types.
SELECT test.start('ends') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"position": 9223372036854775807}'), 'stale', 'the largest number is no position');
SELECT lives_ok($$ SELECT awa.heartbeat(test.worker(1), '[{"claim_slot": 0, "batch_id": 1, "positions": [9223372036854775807]}]') $$,
    'nor does a heartbeat trip over it');
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 1e-400}'), 'done', 'a delay may be smaller than any double');

SELECT * FROM finish();
