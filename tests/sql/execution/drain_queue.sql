-- drain_queue: what waits is cancelled, in portions; what runs goes on.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT test.start('q') AS running, test.start('q') AS retried \gset
SELECT test.finish(:'retried', 'retry', '{"error": "e", "delay_seconds": 99}') \g /dev/null
SELECT count(*) FROM awa.insert_many('k', ARRAY(SELECT to_jsonb(g) FROM generate_series(1, 5) g), 'q') \g /dev/null
SELECT count(*) FROM awa.insert_many('k', ARRAY(SELECT to_jsonb(g) FROM generate_series(1, 3) g), 'q', 4) \g /dev/null
SELECT awa.insert_job('k', queue => 'q', run_at => now() + interval '1 day') \g /dev/null
SELECT awa.insert_job('k', queue => 'other'), awa.insert_job('k', queue => 'other', run_at => now() + interval '1 day') \g /dev/null

SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{}', 'nobody drains');
SELECT is(awa.drain_queue('q', '{"limit": 4}'), 4::bigint, 'at most so many');
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{q}', 'workers hear of the drain by their heartbeat');
SELECT results_eq($$ SELECT c.running, c.available + c.scheduled + c.retryable, c.cancelled FROM awa.queue_counts('q') c $$,
    $$ VALUES (1::bigint, 6::bigint, 4::bigint) $$, 'and no more');
BEGIN;
SELECT is(awa.drain_queue('q'), 6::bigint, 'all that is left');
ROLLBACK;
SELECT is(awa.drain_queue('q', '{"reason": "closed"}'), 6::bigint, 'a rollback brings them back');
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{q}', 'what a call leaves may not be all');
SELECT is(awa.drain_queue('q'), 0::bigint, 'then nothing waits');
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{}', 'and the drain is over');
SELECT results_eq($$ SELECT c.running, c.available, c.scheduled, c.retryable, c.cancelled FROM awa.queue_counts('q') c $$,
    $$ VALUES (1::bigint, 0::bigint, 0::bigint, 0::bigint, 10::bigint) $$, 'every job is counted once, the running one runs');
SELECT results_eq($$ SELECT j.reason, count(*) FROM awa.terminal_jobs j WHERE j.queue = 'q' GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('closed', 6::bigint), ('drained', 4) $$, 'with the reason');
SELECT is_empty($$ SELECT FROM test.claim('q') $$, 'nothing is claimed');
SELECT results_eq($$ SELECT c.available, c.scheduled, c.cancelled FROM awa.queue_counts('other') c $$, $$ VALUES (1::bigint, 1::bigint, 0::bigint) $$,
    'other queues are left alone');
SELECT is(test.finish(:'running', 'completed'), 'done', 'the running job completes');
SELECT is((SELECT r.state::text FROM awa.retry_job((:'retried'::jsonb ->> 'job_id')::bigint) r), 'available', 'a drained job can be retried');
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('q')), 2::bigint, 'the queue takes jobs as before');

SELECT awa.insert_many('k', '{1,2}', 'left') \g /dev/null
SELECT is(awa.drain_queue('left', '{"limit": 1}'), 1::bigint, 'a drain that nobody goes on with');
SELECT awa.pause_queue('left'), awa.declare_queue('left', '{"aging_seconds": 1}') \g /dev/null
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{left}', 'whatever else changes');
SELECT is(awa._drained_queues(clock_timestamp() + interval '11 seconds'), '{}', 'is over after ten seconds');
SELECT is(awa.drain_queue('nobody knows it'), 0::bigint, 'an unknown queue is empty');
SELECT test.refuses(format('SELECT awa.drain_queue(''q'', %L)', c.opts), '22023', c.pattern, c.pattern)
FROM (VALUES ('{"limit": 0}', 'option "limit" cannot be 0'), ('{"limit": 10001}', 'option "limit" cannot be 10001'), ('{"x": 1}', 'field "opts" has the unknown option x'),
             ('{"reason": 1}', 'option "reason" must be a string%')) c (opts, pattern);
SELECT test.refuses('SELECT awa.drain_queue('''')', '22023', 'field "queue" must not be empty', 'no name');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.drain_queue(''q'')', '25001', '%', 'an older snapshot');
COMMIT;

SELECT * FROM finish();
