-- cancel_job in every state, and again.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.cancel(p_job jsonb, p_reason text DEFAULT NULL) RETURNS text LANGUAGE sql AS $$ SELECT awa.cancel_job((p_job ->> 'job_id')::bigint, p_reason) $$;

-- Waiting.
SELECT awa.insert_job('one', queue => 'q') \g /dev/null
SELECT (awa.insert_job('two', queue => 'q')).job_id AS id \gset
SELECT awa.insert_job('three', queue => 'q') \g /dev/null
BEGIN;
SELECT is(awa.cancel_job(:id, 'rolled back'), 'cancelled', 'a waiting job is cancelled in the caller''s transaction');
ROLLBACK;
SELECT is((awa.job(:id)).state, 'available', 'a rollback takes that back');
SELECT is(awa.cancel_job(:id, 'not wanted'), 'cancelled', 'a waiting job is cancelled');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt, j.run_lease, j.finalized_at IS NOT NULL, j.attempted_at FROM awa.job(%s) j', :id),
    $$ VALUES ('cancelled', 'not wanted', 0, 0::bigint, true, NULL::timestamptz) $$, 'it never ran');
SELECT is(awa.cancel_job(:id), 'already_cancelled', 'a second cancel says so');
SELECT results_eq($$ SELECT c.kind FROM test.claim('q') c $$, $$ VALUES ('one'), ('three') $$,
    'a cancelled job is not claimed, its neighbours are');
SELECT results_eq($$ SELECT c.cancelled, c.available, c.running FROM awa.queue_counts('q') c $$,
    $$ VALUES (1::bigint, 0::bigint, 2::bigint) $$, 'it is counted once');

SELECT (awa.insert_job('gone', queue => 'same')).job_id AS id \gset
SELECT awa.insert_job('stays', queue => 'same') \g /dev/null
BEGIN;
SELECT is(awa.cancel_job(:id), 'cancelled', 'a job is cancelled');
SELECT results_eq($$ SELECT c.kind FROM test.claim('same') c $$, $$ VALUES ('stays') $$, 'a claim in the same transaction does not get it');
COMMIT;
BEGIN;
SELECT (awa.insert_job('k', queue => 'same')).job_id AS id \gset
SELECT is(awa.cancel_job(:id), 'cancelled', 'a job is cancelled in the transaction that made it');
SELECT is((awa.job(:id)).state, 'cancelled', 'job() sees that');
COMMIT;
SELECT is_empty($$ SELECT FROM test.claim('same') $$, 'and nobody claims it');

-- Deferred.
SELECT (awa.insert_job('k', queue => 'later', run_at => now() + interval '1 day')).job_id AS id \gset
SELECT is(awa.cancel_job(:id), 'cancelled', 'a scheduled job is cancelled');
SELECT results_eq(format('SELECT j.state, j.kind, j.queue, j.reason FROM awa.job(%s) j', :id), $$ VALUES ('cancelled', 'k', 'later', NULL) $$,
    'without a reason there is none');
SELECT is(awa.cancel_job(:id), 'already_cancelled', 'a second cancel says so');
SELECT is(test.promote('later'), 0::bigint, 'it is not promoted');
SELECT test.start('later') AS job \gset
SELECT test.finish(:'job', 'retry', '{"error": "e", "delay_seconds": 99}') \g /dev/null
SELECT is(test.cancel(:'job'), 'cancelled', 'a retryable job is cancelled');
SELECT results_eq(format('SELECT j.state, j.attempt, j.errors -> 0 ->> ''error'' FROM test.info(%L) j', :'job'), $$ VALUES ('cancelled', 1, 'e') $$,
    'with its attempts and errors');
SELECT test.start('later') AS job \gset
SELECT test.finish(:'job', 'retry', '{"delay_seconds": 0}') \g /dev/null
SELECT test.promote('later') \g /dev/null
SELECT is(test.cancel(:'job'), 'cancelled', 'a job that waits for its second attempt is cancelled');
SELECT is_empty($$ SELECT FROM test.claim('later') $$, 'and not claimed');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease FROM test.info(%L) j', :'job'), $$ VALUES ('cancelled', 1, 1::bigint) $$,
    'job() shows its second life ended');

-- Running.
SELECT test.start('run') AS job \gset
SELECT test.progress(:'job', '{"p": 1}') \g /dev/null
SELECT is(test.cancel(:'job', 'stop'), 'cancelled_running', 'a running job is cancelled');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt, j.run_lease, j.progress FROM test.info(%L) j', :'job'), $$ VALUES ('cancelled', 'stop', 1, 1::bigint, '{"p": 1}'::jsonb) $$,
    'at its attempt');
SELECT is(test.status(:'job'), 'cancelled', 'the attempt is closed');
SELECT is(test.finish(:'job', v.outcome, v.more), v.answer, format('its worker''s %s is answered %s', v.outcome, v.answer))
FROM (VALUES ('completed', '{}'::jsonb, 'stale'), ('retry', '{}', 'stale'), ('cancel', '{}', 'already_done')) v (outcome, more, answer);
SELECT test.refuses(format('SELECT test.complete(%L)', :'job'), 'JQ001', '%no longer current',
    'and its transaction must roll back');
SELECT results_eq(format($$ SELECT h.cancelled -> 0 ->> 'outcome', (h.cancelled -> 0 ->> 'position')::bigint FROM awa.heartbeat(test.worker(1), %L) h $$,
        jsonb_build_array(jsonb_build_object('claim_slot', :'job'::jsonb -> 'claim_slot', 'batch_id', :'job'::jsonb -> 'batch_id', 'positions', jsonb_build_array(:'job'::jsonb -> 'position')))),
    format('SELECT ''cancelled'', %s::bigint', :'job'::jsonb ->> 'position'), 'its worker hears of it by the next heartbeat');
SELECT is(test.cancel(:'job'), 'already_cancelled', 'a second cancel says so');
SELECT is((awa.queue_counts('run'))::text, '(run,0,0,0,0,0,0,1,0,0)', 'it is counted once');

-- Ended.
SELECT test.start('end') AS job \gset
SELECT test.finish(:'job', 'completed') \g /dev/null
SELECT is(test.cancel(:'job'), 'already_completed', 'a completed job stays completed');
SELECT test.start('end', '{"keep_result": true}') AS job \gset
SELECT test.finish(:'job', 'completed', '{"result": 1}') \g /dev/null
SELECT is(test.cancel(:'job'), 'already_completed', 'also with a kept result');
SELECT test.start('end') AS job \gset
SELECT test.finish(:'job', 'retry', '{"delay_seconds": 0}') \g /dev/null
SELECT test.promote('end') \g /dev/null
SELECT test.claim_one('end') AS job \gset
SELECT test.finish(:'job', 'completed') \g /dev/null
SELECT is(test.cancel(:'job'), 'already_completed', 'also at its second attempt');
SELECT test.start('end') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is(test.cancel(:'job'), 'already_failed', 'a failed job stays failed');
SELECT awa.declare_queue('dl', '{"dlq": true}') \g /dev/null
SELECT test.start('dl') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is(test.cancel(:'job'), 'dead_lettered', 'a dead letter is left on hold');
SELECT is((SELECT count(*) FROM awa.dlq), 1::bigint, 'where it can be retried');
SELECT is(awa.purge_dlq((:'job'::jsonb ->> 'job_id')::bigint), true, 'until it is purged');
SELECT is(test.cancel(:'job'), 'pruned', 'after which nothing is left to cancel');
SELECT is(test.state(:'job'::jsonb), 'pruned', 'and job() says so');

-- Unknown.
SELECT test.refuses(format('SELECT awa.cancel_job(%s)', v.id), v.state, v.pattern, 'cancel of ' || v.id)
FROM (VALUES ('0', '42704', 'field "job_id": there is no job 0'), ('-1', '42704', '%no job -1'), ('999999999', '42704',
    '%no job 999999999'),
             ('4398046511104 + 4000000', '42704', '%there is no job%'), ('9223372036854775807', '42704', '%there is no job%'), ('NULL', '22023', 'field "job_id" must not be NULL')) v (id, state, pattern);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses($$ SELECT awa.cancel_job(1) $$, '25001', '%READ COMMITTED%', 'cancel_job needs READ COMMITTED');
COMMIT;

SELECT * FROM finish();
