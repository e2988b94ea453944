-- Progress of an attempt, and attempt_status.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT test.start('q') AS job \gset
SELECT is(test.progress(:'job', '{"done": 1}'), true, 'a running attempt reports progress');
SELECT is(test.progress(:'job', '{"done": 2}'), true, 'and again');
SELECT is((test.info(:'job')).progress, '{"done": 2}'::jsonb, 'job() shows the newest');
SELECT is(test.progress(:'job'::jsonb || v.change, '{"done": 3}'), false, format('a wrong token reports nothing: %s', v.change))
FROM (VALUES ('{"job_id": 1}'::jsonb), ('{"run_lease": 2}'), ('{"claim_slot": 6}'), ('{"claim_slot": 99}'), ('{"batch_id": 999}'), ('{"position": 1}')) v (change);
SELECT is(test.finish(:'job', 'retry', '{"run_lease": 5}'), 'stale', 'a stale finish');
SELECT is((test.info(:'job')).progress, '{"done": 2}'::jsonb, 'takes no progress away');
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 0}'), 'done', 'the attempt is retried');
SELECT is((test.info(:'job')).progress, '{"done": 2}'::jsonb, 'progress survives the retry');
SELECT is(test.progress(:'job', '{"done": 4}'), false, 'a closed attempt reports nothing');
SELECT test.promote('q') \g /dev/null
SELECT test.claim_one('q') AS job \gset
SELECT is(:'job'::jsonb -> 'progress', '{"done": 2}'::jsonb, 'the next claim returns it');
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 0}'), 'done', 'a snooze without new progress');
SELECT test.promote('q') \g /dev/null
SELECT test.claim_one('q') AS job \gset
SELECT is(:'job'::jsonb -> 'progress', '{"done": 2}'::jsonb, 'keeps it');
SELECT test.progress(:'job', '{"done": 5}') \g /dev/null
SELECT is(test.finish(:'job', 'released'), 'done', 'a release');
SELECT test.claim_one('q') AS job \gset
SELECT is(:'job'::jsonb -> 'progress', '{"done": 5}'::jsonb, 'keeps it');
SELECT is(test.rescue('1 hour'), 1::bigint, 'a rescue');
SELECT test.promote('q') \g /dev/null
SELECT test.claim_one('q') AS job \gset
SELECT is(:'job'::jsonb -> 'progress', '{"done": 5}'::jsonb, 'keeps it');
SELECT test.progress(:'job', '{"done": 6}') \g /dev/null
SELECT is(test.finish(:'job', 'completed'), 'done', 'success');
SELECT is((test.info(:'job')).progress, NULL, 'drops it');
SELECT is((SELECT count(*) FROM awa.attempt_state), 0::bigint, 'and no row of it stays');

SELECT test.start('f') AS job \gset
SELECT test.progress(:'job', '{"done": 7}') \g /dev/null
SELECT is(test.finish(:'job', 'fail'), 'done', 'failure');
SELECT is((test.info(:'job')).progress, '{"done": 7}'::jsonb, 'keeps it for people to see');
SELECT test.start('f') AS job \gset
SELECT test.progress(:'job', '{"done": 8}') \g /dev/null
SELECT is((test.complete(:'job')).outcome, 'completed', 'complete_job');
SELECT is((SELECT count(*) FROM awa.attempt_state), 0::bigint, 'leaves no row of progress');

-- However it succeeds: with a result that is kept, in the caller's transaction, as a lease.
CREATE FUNCTION test.start_again(p_queue text, p_opts jsonb DEFAULT '{}') RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_job jsonb := test.start(p_queue, p_opts);
BEGIN
    PERFORM test.progress(v_job, '{"done": 9}');
    PERFORM test.finish(v_job, 'retry', '{"delay_seconds": 0}');
    PERFORM test.promote(p_queue);
    RETURN test.claim_one(p_queue);
END $$;
SELECT test.start_again('kept', '{"keep_result": true}') AS job \gset
SELECT is(test.finish(:'job', 'completed', '{"result": 1}'), 'done', 'success with a result');
SELECT is((test.info(:'job')).progress, NULL, 'drops it');
SELECT test.start_again('own', '{"keep_result": true}') AS job \gset
SELECT is((test.complete(:'job', '{"result": 1}')).outcome, 'completed', 'complete_job with a result');
SELECT is((test.info(:'job')).progress, NULL, 'drops it');
SELECT test.start_again('moved') AS job \gset
SELECT test.progress(:'job', '{"done": 10}') \g /dev/null
SELECT is((SELECT awa._lease_receipts((:'job'::jsonb ->> 'claim_slot')::integer, (:'job'::jsonb ->> 'batch_id')::bigint, 100, now())), 1::bigint, 'an attempt is moved');
SELECT is(test.finish(:'job', 'completed'), 'done', 'its success');
SELECT is((test.info(:'job')).progress, NULL, 'drops it');

SELECT test.refuses(format('SELECT test.progress(%L, NULL)', :'job'), '22023', 'field "progress" must not be NULL',
    'progress is given');
SELECT test.refuses(format('SELECT test.progress(%L, to_jsonb(repeat(''x'', 65536)))', :'job'), '23514', 'field "progress" has%',
    'progress is at most 64 KiB');
SELECT test.refuses(format('SELECT test.progress(%L::jsonb || ''{"position": null}'', ''1'')', :'job'), '22023', 'fields "job_id"%',
    'the token is complete');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses(format('SELECT test.progress(%L, ''1'')', :'job'), '25001', '%READ COMMITTED%',
    'set_progress needs READ COMMITTED');
COMMIT;

-- attempt_status
SELECT test.start('s') AS job \gset
SELECT is(test.status(:'job'), 'open', 'a running attempt is open');
SELECT is(test.status(:'job'::jsonb || v.change), 'unknown', format('a wrong token is unknown: %s', v.change))
FROM (VALUES ('{"job_id": 1}'::jsonb), ('{"run_lease": 2}'), ('{"claim_slot": 6}'), ('{"claim_slot": 99}'), ('{"batch_id": 999}'), ('{"position": 1}')) v (change);
SELECT test.refuses(format('SELECT test.status(%L::jsonb || ''{"batch_id": null}'')', :'job'), '22023', 'fields "job_id"%',
    'the token is complete');
SELECT test.finish(:'job', 'completed') \g /dev/null
SELECT is(test.status(:'job'), 'completed', 'a completed one is completed');
SELECT awa.declare_queue('dl', '{"dlq": true}') \g /dev/null
SELECT test.start('dl') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is(test.status(:'job'), 'dead_lettered', 'one that went to the dead letters says so');
SELECT test.start('r') AS job \gset
SELECT test.rescue('1 hour') \g /dev/null
SELECT is(test.status(:'job'), 'rescued', 'a rescued one is rescued');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'and its worker is told that it is stale');

SELECT * FROM finish();
