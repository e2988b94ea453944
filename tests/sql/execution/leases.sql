-- Leases: attempts that outlive their slots go on under their token, whatever is done with it.
\ir ../support.psql
SELECT * FROM no_plan();

-- Claims jobs of their own kinds and turns all but the first into leases; the rest of the engine sees them as running.
SELECT awa.insert_jobs($$[
    {"kind": "stays"}, {"kind": "done"}, {"kind": "compact"}, {"kind": "retry"}, {"kind": "snooze"}, {"kind": "cancel"},
    {"kind": "fail"}, {"kind": "release"}, {"kind": "kept", "opts": {"keep_result": true}}, {"kind": "own"},
    {"kind": "operator"}, {"kind": "lost", "max_attempts": 1}, {"kind": "late", "opts": {"deadline_seconds": 3600}}]$$)
\g /dev/null
CREATE TABLE test.token AS SELECT * FROM test.claim('default', 100);
CREATE FUNCTION test.token(p_kind text) RETURNS test.token LANGUAGE sql AS
    $$ SELECT t.* FROM test.token t WHERE t.kind = p_kind $$;
CREATE FUNCTION test.end_as(p_kind text, p_more jsonb) RETURNS text LANGUAGE sql AS $$
    SELECT f.result FROM test.token(p_kind) t,
        LATERAL awa.finish_jobs(test.worker(1), jsonb_build_array(to_jsonb(t) || p_more)) f $$;
CREATE FUNCTION test.status_of(p_kind text) RETURNS text LANGUAGE sql AS $$
    SELECT awa.attempt_status(t.job_id, t.run_lease, t.claim_slot, t.batch_id, t.position) FROM test.token(p_kind) t $$;
CREATE FUNCTION test.state_of(p_kind text) RETURNS text LANGUAGE sql AS
    $$ SELECT (awa.job(t.job_id)).state FROM test.token(p_kind) t $$;

SELECT is((SELECT awa.set_progress(t.job_id, t.run_lease, t.claim_slot, t.batch_id, t.position, '{"at": 1}')
           FROM test.token('retry') t), true, 'progress of a receipt');
SELECT lives_ok($$ SELECT awa.finish_jobs(test.worker(1), jsonb_build_array(to_jsonb(t) || '{"outcome": "completed"}'))
                   FROM test.token('stays') t $$, 'one ends before the move');
SELECT is((SELECT sum(awa._lease_receipts(b.claim_slot, b.batch_id, 100, now()))
           FROM (SELECT DISTINCT claim_slot, batch_id FROM test.token) b), 12::numeric, 'what is open moves');
SELECT is((SELECT sum(awa._lease_receipts(b.claim_slot, b.batch_id, 100, now()))
           FROM (SELECT DISTINCT claim_slot, batch_id FROM test.token) b), 0::numeric, 'and moves once');
SELECT is((SELECT count(*) FROM generate_series(0, 7) s, LATERAL awa._open_batches(s)), 0::bigint,
    'no receipt is open any more');

SELECT is((awa.queue_counts('default')).running, 12::bigint, 'leases count as running');
SELECT is((SELECT count(*) FROM awa.jobs j WHERE j.state = 'running'), 12::bigint, 'and are listed so');
SELECT results_eq($$ SELECT j.state, j.attempt, j.run_lease, j.instance_id, j.attempted_at IS NOT NULL, j.args
                     FROM test.token('done') t, LATERAL awa.job(t.job_id) j $$,
    $$ VALUES ('running', 1, 1::bigint, test.worker(1), true, '{}'::jsonb) $$, 'job() knows them');
SELECT is((awa.job((test.token('retry')).job_id)).progress, '{"at": 1}', 'with the progress of before');
SELECT is((awa.job((test.token('late')).job_id)).deadline_at, (test.token('late')).deadline_at, 'and the deadline');
SELECT is(test.status_of('done'), 'open', 'attempt_status knows them');
SELECT is((SELECT awa.set_progress(t.job_id, t.run_lease, t.claim_slot, t.batch_id, t.position, '{"at": 2}')
           FROM test.token('retry') t), true, 'progress of a lease');
SELECT is((SELECT awa.set_progress(t.job_id, t.run_lease + 1, t.claim_slot, t.batch_id, t.position, '{"at": 3}')
           FROM test.token('retry') t), false, 'not of another lease');
SELECT is((awa.heartbeat(test.worker(1), (
        SELECT jsonb_agg(jsonb_build_object('claim_slot', t.claim_slot, 'batch_id', t.batch_id,
                                            'positions', jsonb_build_array(t.position)))
        FROM test.token t WHERE t.kind <> 'stays'))).cancelled, '[]', 'to its worker a moved attempt has not ended');

-- Every outcome, then the same again, then another one.
SELECT is(test.end_as('done', '{"outcome": "completed", "run_lease": 2}'), 'stale', 'another lease is stale');
SELECT is((SELECT f.result FROM test.token('done') t,
               LATERAL awa.finish_jobs(test.worker(2), jsonb_build_array(to_jsonb(t) || '{"outcome": "fail"}')) f),
    'stale', 'another instance is stale');
SELECT is((SELECT f.result FROM test.token('compact') t,
               LATERAL awa.complete_jobs(test.worker(2), t.claim_slot, t.batch_id, ARRAY[t.position]) f),
    'stale', 'also for complete_jobs');
SELECT results_eq(
    $$ SELECT f.job_id = t.job_id, f.run_lease, f.result
       FROM test.token('compact') t,
            LATERAL awa.complete_jobs(test.worker(1), t.claim_slot, t.batch_id, ARRAY[t.position, t.position]) f $$,
    $$ VALUES (true, 1::bigint, 'done'), (true, 1, 'already_done') $$, 'complete_jobs completes it, once');
SELECT is(test.end_as('done', '{"outcome": "completed", "result": 7}'), 'done', 'completed');
SELECT is((awa.job((test.token('done')).job_id)).result, NULL, 'without the result that nobody asked for');
SELECT is(test.end_as('kept', '{"outcome": "completed", "result": 7}'), 'done', 'completed with a result');
SELECT is((awa.job((test.token('kept')).job_id)).result, '7', 'which is kept');
SELECT is(test.end_as('retry', '{"outcome": "retry", "error": "no", "delay_seconds": 60}'), 'done', 'retried');
SELECT results_eq($$ SELECT j.state, j.attempt, j.progress, jsonb_array_length(j.errors)
                     FROM test.token('retry') t, LATERAL awa.job(t.job_id) j $$,
    $$ VALUES ('retryable', 1, '{"at": 2}'::jsonb, 1) $$, 'with progress and error');
SELECT is(test.end_as('snooze', '{"outcome": "snooze", "delay_seconds": 60}'), 'done', 'snoozed');
SELECT is((awa.job((test.token('snooze')).job_id)).attempt, 0, 'without an attempt');
SELECT is(test.end_as('cancel', '{"outcome": "cancel", "reason": "why"}'), 'done', 'cancelled');
SELECT is(test.end_as('fail', '{"outcome": "fail", "error": "no"}'), 'done', 'failed');
SELECT is(test.end_as('release', '{"outcome": "released"}'), 'done', 'released');
SELECT results_eq($$ SELECT t.kind, test.state_of(t.kind), test.status_of(t.kind),
                            test.end_as(t.kind, jsonb_build_object('outcome', o.outcome, 'delay_seconds', 60)),
                            test.end_as(t.kind, '{"outcome": "snooze", "delay_seconds": 1}')
                     FROM (VALUES (1, 'done', 'completed'), (2, 'compact', 'completed'), (3, 'retry', 'retry'),
                                  (4, 'cancel', 'cancel'), (5, 'fail', 'fail'), (6, 'release', 'released'))
                         o (n, kind, outcome) JOIN test.token t USING (kind) ORDER BY o.n $$,
    $$ VALUES ('done', 'completed', 'completed', 'already_done', 'stale'),
              ('compact', 'completed', 'completed', 'already_done', 'stale'),
              ('retry', 'retryable', 'retried', 'already_done', 'stale'),
              ('cancel', 'cancelled', 'cancelled', 'already_done', 'stale'),
              ('fail', 'failed', 'failed', 'already_done', 'stale'),
              ('release', 'available', 'released', 'already_done', 'stale') $$,
    'each is where its outcome sent it; repeating is harmless, another outcome is stale');

-- In the caller's own transaction.
SELECT throws_ok($$ SELECT awa.complete_job(t.job_id, 2, t.claim_slot, t.batch_id, t.position) FROM test.token('own') t $$,
    'JQ001', NULL, 'complete_job of another lease raises');
SELECT is((SELECT (awa.complete_job(t.job_id, t.run_lease, t.claim_slot, t.batch_id, t.position)).outcome
           FROM test.token('own') t), 'completed', 'complete_job completes it');
SELECT throws_ok($$ SELECT awa.complete_job(t.job_id, 1, t.claim_slot, t.batch_id, t.position) FROM test.token('own') t $$,
    'JQ001', NULL, 'once');

-- By others.
SELECT is(awa.cancel_job((test.token('operator')).job_id), 'cancelled_running', 'an operator cancels it');
SELECT is(awa.cancel_job((test.token('operator')).job_id), 'already_cancelled', 'once');
SELECT is((awa.heartbeat(test.worker(1), (
        SELECT jsonb_build_array(jsonb_build_object('claim_slot', t.claim_slot, 'batch_id', t.batch_id,
                                                    'positions', jsonb_build_array(t.position)))
        FROM test.token('operator') t))).cancelled -> 0 ->> 'outcome', 'cancelled', 'and its worker hears of it');
SELECT is(awa._rescue_attempts(100, now() + interval '61 minutes'), 1::bigint, 'a passed deadline is rescued');
SELECT is(awa._rescue_attempts(100, now() + interval '62 minutes'), 1::bigint, 'and what a dead instance held');
SELECT is(test.state_of('late'), 'retryable', 'the one with attempts left runs again');
SELECT results_eq($$ SELECT j.state, j.reason FROM test.token('lost') t, LATERAL awa.job(t.job_id) j $$,
    $$ VALUES ('failed', 'rescued_out') $$, 'the other has had its last');
SELECT is(test.status_of('late'), 'rescued', 'attempt_status names the rescue');
SELECT is(test.end_as('late', '{"outcome": "completed"}'), 'stale', 'and the old token is stale');

SELECT results_eq($$ SELECT c.running, c.completed, c.failed, c.cancelled, c.available, c.scheduled, c.retryable
                     FROM awa.queue_counts('default') c $$,
    $$ VALUES (0::bigint, 5::bigint, 2::bigint, 2::bigint, 1::bigint, 1::bigint, 2::bigint) $$,
    'every job is counted once');
SELECT is((SELECT count(*) FROM awa.jobs), 13::bigint, 'and listed once');

-- Evidence does not stay for ever, nor do the pages.
SELECT is((SELECT count(*) FROM awa.leases l WHERE l.args IS NOT NULL), 0::bigint, 'ended leases keep no body');
SELECT is(awa._expire_leases(100, now() + interval '9 minutes'), 0::bigint, 'evidence stays a while');
SELECT is(awa._expire_leases(100, now() + interval '73 minutes'), 12::bigint, 'and goes then');
SELECT results_eq($$ SELECT k, test.status_of(k)
                     FROM unnest('{done,kept,cancel,fail,operator,lost,retry,release,late}'::text[]) k $$,
    $$ VALUES ('done', 'completed'), ('kept', 'completed'), ('cancel', 'cancelled'), ('fail', 'failed'),
              ('operator', 'cancelled'), ('lost', 'failed'), ('retry', 'unknown'), ('release', 'unknown'),
              ('late', 'unknown') $$,
    'attempt_status knows from history how those ended that were their job''s last');
SELECT awa.cancel_job((test.token('late')).job_id) \g /dev/null
SELECT is(test.status_of('late'), 'unknown', 'and does not take the end of a waiting job for that of its attempt');
INSERT INTO awa.failed_entries (job_id, run_lease, finalized_at, attempted_at, attempt, queue, body)
SELECT d.job_id, d.run_lease, d.finalized_at, d.attempted_at, d.attempt, d.queue, d.body FROM awa.done_entries d
WHERE d.job_id = (test.token('fail')).job_id;
DELETE FROM awa.done_entries d WHERE d.job_id = (test.token('fail')).job_id;
SELECT is(test.status_of('fail'), 'failed', 'a failed one also when it has outlived its slot');
INSERT INTO awa.attempt_state SELECT 0, g, to_jsonb(repeat('x', 1000)), now() FROM generate_series(1, 400) g;
SELECT is((SELECT p.outcome FROM awa._prune_attempts() p), 'nothing', 'a table in use is left alone');
DELETE FROM awa.attempt_state;
SELECT is((SELECT p.outcome FROM awa._prune_attempts() p), 'pruned', 'an empty one is truncated');
SELECT is(pg_relation_size('awa.attempt_state'), 0::bigint, 'whatever snapshots there are');

SELECT * FROM finish();
