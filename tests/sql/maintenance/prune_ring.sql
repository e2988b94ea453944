-- Prune: what keeps a slot, what goes, and that counts and answers stay right.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.prune(p_ring text) RETURNS text LANGUAGE sql AS $$
    SELECT t.outcome || coalesce(' ' || (t.detail ->> 'reason'), '') || coalesce(' slot ' || (t.detail ->> 'slot'), '') FROM awa.tick(jsonb_build_object('steps', jsonb_build_array('prune_' || p_ring))) t
$$;
CREATE PROCEDURE test.turn(p_ring text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.06);
    PERFORM test.step('plan_' || p_ring);
    COMMIT;
    IF test.step('publish_' || p_ring) <> 'published' THEN
        RAISE EXCEPTION 'the % ring did not turn', p_ring;
    END IF;
END $$;
SELECT awa.set_setting('queue_rotate_seconds', '0.05'), awa.set_setting('claim_rotate_seconds', '0.05') \g /dev/null
SELECT awa.set_setting('terminal_retention_seconds', '0'), awa.set_setting('attempt_evidence_seconds', '0'),
       awa.set_setting('failed_retention_seconds', '0'), awa.set_setting('dump_lock_seconds', '0') \g /dev/null
SELECT is(test.prune('queue'), 'nothing', 'nothing is there to prune');
SELECT is(test.prune('claim'), 'nothing', 'in either ring');

-- Slot 0 gets a job of every fate.
SELECT awa.declare_queue('dl', '{"dlq": true}') \g /dev/null
CREATE TABLE test.jobs (title text, job jsonb);
INSERT INTO test.jobs SELECT t, test.start(CASE t WHEN 'dead' THEN 'dl' ELSE 'q' END, '{"keep_result": true}') FROM unnest('{done,result,failed,cancelled,retried,dead,running}'::text[]) t;
SELECT test.finish((SELECT job FROM test.jobs WHERE title = v.title), v.outcome, v.more)
FROM (VALUES ('done', 'completed', '{}'::jsonb), ('result', 'completed', '{"result": 1}'), ('failed', 'fail', '{}'), ('cancelled', 'cancel', '{}'), ('retried', 'retry',
    '{"delay_seconds": 999}'),
             ('dead', 'fail', '{}')) v (title, outcome, more) \g /dev/null
SELECT (awa.insert_job('k', queue => 'wait')).job_id AS waiting \gset
SELECT (awa.queue_counts('q'))::text AS counts \gset
SELECT is(test.prune('queue'), 'nothing', 'the current slot is never pruned');
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = 0), 'current', 'ring_status says so');
CALL test.turn('queue');
CALL test.turn('claim');

SELECT is(test.prune('queue'), 'skipped unclaimed slot 0', 'a slot with a waiting job is kept');
SELECT results_eq($$ SELECT r.blocked_by, r.detail ->> 'queue' FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = 0 $$,
    $$ VALUES ('unclaimed', 'wait') $$, 'ring_status names its queue');
SELECT is(awa.cancel_job(:waiting), 'cancelled', 'that job is cancelled');
SELECT is(test.prune('queue'), 'skipped receipts slot 0', 'a slot with the body of a running job is kept');
SELECT is(test.prune('claim'), 'skipped receipts slot 0', 'and so is the slot of its receipt');
SELECT results_eq($$ SELECT r.blocked_by, r.detail ->> 'instance' FROM awa.ring_status() r WHERE r.slot = 0 AND r.ring = 'claim' $$, format('VALUES (''receipts'', %L)', test.worker(1)),
    'ring_status names its instance');
SELECT is(test.finish((SELECT job FROM test.jobs WHERE title = 'running'), 'completed'), 'done', 'it ends');
SELECT awa.set_setting('terminal_retention_seconds', NULL), awa.set_setting('attempt_evidence_seconds', NULL) \g /dev/null
SELECT is(test.prune('queue'), 'skipped retention slot 0', 'history is kept for its retention');
SELECT is(test.prune('claim'), 'skipped retention slot 0', 'and the evidence of attempts for theirs');
SELECT awa.set_setting('terminal_retention_seconds', '0'), awa.set_setting('attempt_evidence_seconds', '0') \g /dev/null
SELECT pg_sleep(0.01) \g /dev/null

BEGIN;
SELECT is(test.prune('queue'), 'pruned slot 0', 'then the slot goes');
ROLLBACK;
SELECT is((awa.queue_counts('q')).completed, 3::bigint, 'a rollback brings it back');
SELECT is((SELECT count(*) FROM awa.terminal_jobs), 6::bigint, 'with its history');
SELECT (awa.queue_counts('q'))::text AS counts \gset
SELECT is(test.prune('queue'), 'pruned slot 0', 'the slot goes for good');
SELECT is((awa.queue_counts('q'))::text, :'counts', 'counts stay exact');
SELECT is((awa.queue_counts('wait'))::text, '(wait,0,0,0,0,0,0,1,0,0)', 'of every queue');
SELECT is(test.prune('queue'), 'nothing', 'once');
SELECT is((SELECT sum(r.bytes) FROM awa.ring_status() r WHERE r.ring = 'queue'), 0::numeric, 'the ring is empty');
SELECT is((SELECT count(*) FROM awa.terminal_jobs), 0::bigint, 'the history is gone');

SELECT results_eq($$ SELECT j.title, (test.info(j.job)).state, (test.info(j.job)).pruned_at IS NOT NULL FROM test.jobs j ORDER BY 1 $$,
    $$ VALUES ('cancelled', 'pruned', true), ('dead', 'failed', false), ('done', 'pruned', true), ('failed', 'pruned', true), ('result', 'pruned', true), ('retried', 'retryable', false), ('running', 'pruned', true) $$,
    'job() knows the pruned ones with a time, and the others as before');
SELECT is(awa.cancel_job((SELECT (job ->> 'job_id')::bigint FROM test.jobs WHERE title = 'done')), 'pruned',
    'a pruned job cannot be cancelled');
SELECT test.refuses(format('SELECT awa.job(%s)', (SELECT (job ->> 'job_id')::bigint + 50 FROM test.jobs WHERE title = 'done')), '42704', '%there is no job%',
    'an id that was never given out is still unknown');

-- Attempts after their jobs are gone, and after their evidence is.
SELECT results_eq($$ SELECT j.title, test.status(j.job) FROM test.jobs j WHERE j.title IN ('dead', 'done', 'failed', 'retried') ORDER BY 1 $$,
    $$ VALUES ('dead', 'dead_lettered'), ('done', 'completed'), ('failed', 'failed'), ('retried', 'retried') $$,
    'receipts tell what became of attempts whose jobs were pruned');
SELECT is(test.prune('claim'), 'pruned slot 0', 'the receipts go');
SELECT is(test.status((SELECT job FROM test.jobs WHERE title = 'done')), 'unknown', 'what became of an old attempt is unknown');
SELECT is(test.finish((SELECT job FROM test.jobs WHERE title = 'done'), 'completed'), 'stale', 'finishing it again is stale');
SELECT is((SELECT f.result FROM test.jobs j, LATERAL awa.complete_jobs(test.worker(1), 0, (j.job ->> 'batch_id')::bigint, ARRAY[(j.job ->> 'position')::bigint]) f WHERE j.title = 'done'), 'stale',
    'by either call');
SELECT test.refuses(format('SELECT test.complete(%L)', (SELECT job FROM test.jobs WHERE title = 'done')), 'JQ001', '%no longer current',
    'and in a transaction');

-- The lane goes on where it was.
SELECT is_empty($$ SELECT FROM test.claim('q') $$, 'nothing is claimed twice after its evidence was pruned');
SELECT test.start('q') AS next \gset
SELECT is(:'next'::jsonb ->> 'job_id', :'next'::jsonb ->> 'position', 'the lane goes on');
SELECT is(test.promote('q'), 1::bigint, 'the retried job comes back');
SELECT results_eq($$ SELECT c.job_id::text, c.attempt, c.run_lease FROM test.claim('q') c $$,
    $$ SELECT j.job ->> 'job_id', 2, 2::bigint FROM test.jobs j WHERE j.title = 'retried' $$,
        'as attempt 2, although its first body is gone');
SELECT is((awa.retry_dlq((SELECT (job ->> 'job_id')::bigint FROM test.jobs WHERE title = 'dead'))).state::text, 'available',
    'and the dead letter as well');
SELECT is((SELECT c.run_lease FROM test.claim('dl') c), 2::bigint, 'under a new lease');


-- A second prune adds to the counts, and moves the cursors on.
SELECT is(test.finish(:'next', 'completed'), 'done', 'the job of the next slot ends');
SELECT is(test.rescue('1 hour'), 2::bigint, 'and the others go back');
CALL test.turn('queue');
SELECT awa.set_setting('terminal_retention_seconds', '0') \g /dev/null
SELECT pg_sleep(0.01) \g /dev/null
SELECT (awa.queue_counts('q'))::text AS counts \gset
SELECT is(test.prune('queue'), 'pruned slot 1', 'the next slot goes');
SELECT is((awa.queue_counts('q'))::text, :'counts', 'counts stay exact');
SELECT is((awa.queue_counts('q')).completed, 4::bigint, 'over both slots');
SELECT results_eq($$ SELECT d.depth FROM awa.queue_depths() d WHERE d.queue = 'q' $$, $$ VALUES (0::bigint) $$,
    'the cursor of the lane is where it was');
SELECT is_empty($$ SELECT FROM test.claim('q') $$, 'and nothing of it is claimed again');
SELECT is(test.finish(test.start('q'), 'completed'), 'done', 'the lane goes on');

SELECT * FROM finish();
