-- Why a claim found nothing, and the doorbell.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT results_eq($$ SELECT s.reason, s.retry_after_ms FROM awa.claim_status('q') s $$, $$ VALUES ('idle', 2000) $$,
    'an unknown queue is idle');
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT results_eq($$ SELECT s.reason, s.retry_after_ms FROM awa.claim_status('q', true) s $$, $$ VALUES ('ready', 0) $$,
    'a waiting job is ready');
SELECT count(*) FROM test.claim('q') \g /dev/null
SELECT is((awa.claim_status('q', true)).reason, 'idle', 'a queue whose jobs are claimed is idle after a claim found nothing')
FROM (SELECT count(*) FROM test.claim('q')) c;
SELECT awa.pause_queue('q') \g /dev/null
SELECT results_eq($$ SELECT s.reason, s.retry_after_ms > 0 FROM awa.claim_status('q', true) s $$, $$ VALUES ('paused', true) $$,
    'a paused queue says so, whatever waits');
SELECT awa.set_setting('idle_poll_ms', '500') \g /dev/null
SELECT is((awa.claim_status('other')).retry_after_ms, 500, 'how long an idle worker sleeps is a setting');
SELECT is((awa.claim_status('q', NULL)).reason, 'paused', 'arm may be NULL');
SELECT test.refuses($$ SELECT awa.claim_status('') $$, '22023', 'field "queue"%', 'the queue has a name');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses($$ SELECT awa.claim_status('q') $$, '25001', '%READ COMMITTED%', 'claim_status needs READ COMMITTED');
COMMIT;

-- Channels.
SELECT awa.declare_queue('quiet', '{"notify": false}') \g /dev/null
SELECT is((awa.claim_status('quiet')).channel, NULL, 'a queue without wake-ups has no channel: poll');
SELECT isnt((awa.claim_status('a')).channel, (awa.claim_status('A')).channel, 'each queue has a channel of its own');

SELECT awa.set_setting('idle_poll_ms', '60000') \g /dev/null

-- Flags. pg_notification_queue_usage cannot be seen inside a transaction, so the internal call says whether it notified.
SELECT is(awa._ring_doorbell('fresh'), false, 'producers notify nobody before a worker slept');
SELECT is((awa.claim_status('fresh', false)).reason, 'idle', 'a worker looks without arming');
SELECT is(awa._ring_doorbell('fresh'), false, 'which changes nothing');
SELECT is((awa.claim_status('fresh', true)).reason, 'idle', 'a worker goes to sleep');
SELECT is(awa._ring_doorbell('fresh'), true, 'producers notify while one sleeps');
SELECT setval(awa._doorbell('fresh'), (extract(epoch FROM clock_timestamp()) * 1000)::bigint - 10) \g /dev/null
SELECT is(awa._ring_doorbell('fresh'), false, 'and no longer when its sleep is over');
SELECT is((awa.claim_status('fresh', true)).reason, 'idle', 'a worker goes to sleep again');
SELECT is(awa._ring_doorbell('fresh'), true, 'producers notify again');
SELECT awa._arm_doorbell('fresh', clock_timestamp() + interval '50 seconds') \g /dev/null
SELECT awa._arm_doorbell('fresh', clock_timestamp() + interval '1 second') \g /dev/null
SELECT cmp_ok(pg_sequence_last_value(awa._doorbell('fresh')), '>', (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 30000,
    'who sleeps for a shorter time does not shorten another one''s flag');
BEGIN;
SET LOCAL awa.notify = 'off';
SELECT is(awa._ring_doorbell('fresh'), false, 'a session can turn wake-ups off');
SET LOCAL awa.notify = 'OFF';
SELECT is(awa._ring_doorbell('fresh'), false, 'in capitals too, as other settings of this kind');
COMMIT;
SELECT is(awa._ring_doorbell('quiet'), false, 'a queue can turn wake-ups off');

-- Notifications that a session sends itself.
SELECT (awa.claim_status('n')).channel AS channel \gset
SELECT is((SELECT length(:'channel')), 28, 'a channel name is short');

SELECT * FROM finish();
