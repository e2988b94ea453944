-- The rules of docs/conformance.md that SQL can assert, through public functions alone. Each assertion names its rule.
\ir ../support.psql
SELECT * FROM no_plan();

-- S1: a job exists exactly if its transaction commits.
BEGIN;
SELECT awa.insert_job('k', queue => 's1') \g /dev/null
ROLLBACK;
SELECT is((awa.queue_counts('s1')).available, 0::bigint, 'S1: a job that is rolled back does not exist');
BEGIN;
SELECT (awa.insert_job('k', queue => 's1')).job_id AS id \gset
COMMIT;
SELECT is(test.state(:id), 'available', 'S1: a job that is committed is available');

-- S2: a claim starts an attempt and gives its token, and nobody else gets the job.
SELECT test.claim_one('s1') AS job \gset
SELECT ok((:'job'::jsonb) ?& ARRAY['job_id', 'run_lease', 'claim_slot', 'batch_id', 'position'], 'S2: a claim gives the five numbers of the token');
SELECT results_eq(format('SELECT j.state, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('running', 1) $$, 'S2: a claimed job runs its first attempt');
SELECT is(test.claim_one('s1', '{}', 2), NULL, 'S2: another worker gets nothing');
SELECT is(test.status(:'job'), 'open', 'S2: its attempt is open');

-- S3: completion happens once; the same call again says so.
SELECT is(test.finish(:'job', 'completed'), 'done', 'S3: an attempt is completed');
SELECT is(test.finish(:'job', 'completed'), 'already_done', 'S3: the same completion again is already done');
SELECT is(test.state(:'job'::jsonb), 'completed', 'S3: the job is completed');

-- S4: a stale attempt changes nothing.
SELECT test.start('s4') AS old \gset
SELECT is(test.finish(:'old', 'retry', '{"delay_seconds": 0, "error": "e"}'), 'done', 'S4: an attempt is retried');
SELECT test.promote('s4') \g /dev/null
SELECT test.claim_one('s4') AS new \gset
SELECT is(test.finish(:'old', v.outcome, v.more), 'stale', format('S4: %s by the old attempt is stale', v.outcome))
FROM (VALUES ('completed', '{}'::jsonb), ('snooze', '{"delay_seconds": 1}'), ('cancel', '{}'), ('fail', '{}'), ('released', '{}')) v (outcome, more);
SELECT is(test.progress(:'old', '1'), false, 'S4: its progress is refused');
SELECT test.refuses(format('SELECT test.complete(%L)', :'old'), 'JQ001', '%no longer current%', 'S4: complete_job by the old attempt raises JQ001');
SELECT is(test.state(:'new'::jsonb), 'running', 'S4: the new attempt still runs');

-- S5: attempts count from 1, the lease rises with each claim and is never given back.
SELECT results_eq(format('SELECT (%L::jsonb ->> ''attempt'')::int, (%1$L::jsonb ->> ''run_lease'')::int', :'new'), $$ VALUES (2, 2) $$, 'S5: a retry has the next attempt and lease');
SELECT test.finish(:'new', 'snooze', '{"delay_seconds": 0}') \g /dev/null
SELECT test.promote('s4') \g /dev/null
SELECT test.claim_one('s4') AS new \gset
SELECT results_eq(format('SELECT (%L::jsonb ->> ''attempt'')::int, (%1$L::jsonb ->> ''run_lease'')::int', :'new'), $$ VALUES (2, 3) $$, 'S5: a snooze gives the attempt back, not the lease');

-- S6: the last attempt that ends in a retry fails the job.
SELECT test.start('s6', '{}', 1) AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"error": "boom"}'), 'done', 'S6: the last attempt asks for a retry');
SELECT results_eq(format('SELECT j.state, j.reason, j.errors #>> ''{0,error}'' FROM test.info(%L) j', :'job'), $$ VALUES ('failed', 'max_attempts_exhausted', 'boom') $$,
    'S6: the job is failed, with the reason and the error');

-- S7: an unknown kind is handed back without an attempt, for longer each time.
SELECT test.start('s7') AS job \gset
SELECT is(test.finish(:'job', 'released', '{"reason": "unknown_kind"}'), 'done', 'S7: a job is handed back');
SELECT results_eq(format('SELECT j.state, j.attempt, round(extract(epoch FROM j.run_at - clock_timestamp())) FROM test.info(%L) j', :'job'), $$ VALUES ('scheduled', 0, 1::numeric) $$,
    'S7: it is put off by a second, without an attempt');
SELECT test.promote('s7') \g /dev/null
SELECT test.claim_one('s7') AS job \gset
SELECT test.finish(:'job', 'released', '{"reason": "unknown_kind"}') \g /dev/null
SELECT is(round(extract(epoch FROM (test.info(:'job')).run_at - clock_timestamp())), 2::numeric, 'S7: the second time by two seconds');

-- S8: a job released at shutdown is available at once, with the same attempt.
SELECT test.start('s8') AS job \gset
SELECT is(test.finish(:'job', 'released', '{"reason": "shutdown"}'), 'done', 'S8: a job is released');
SELECT results_eq(format('SELECT j.state, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('available', 0) $$, 'S8: it is available, the attempt is not charged');

-- S9: a job that is cancelled while it runs ends at once, and its result is refused.
SELECT test.start('s9') AS job \gset
SELECT is(awa.cancel_job((:'job'::jsonb ->> 'job_id')::bigint, 'stop'), 'cancelled_running', 'S9: a running job is cancelled');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'S9: its completion is stale');
SELECT results_eq(format('SELECT j.state, j.reason FROM test.info(%L) j', :'job'), $$ VALUES ('cancelled', 'stop') $$, 'S9: it stays cancelled');

-- S10: complete_job and the caller's rows are one transaction.
CREATE TABLE test.effects (job_id bigint);
SELECT test.start('s10') AS job \gset
BEGIN;
INSERT INTO test.effects VALUES (1);
SELECT is((test.complete(:'job')).outcome, 'completed', 'S10: complete_job answers with a receipt');
ROLLBACK;
SELECT is(test.status(:'job'), 'open', 'S10: rolled back, the attempt is open');
BEGIN;
INSERT INTO test.effects VALUES (2);
SELECT test.complete(:'job') \g /dev/null
COMMIT;
SELECT is(test.status(:'job'), 'completed', 'S10: committed, it is completed');
SELECT results_eq('SELECT job_id FROM test.effects', 'VALUES (2::bigint)', 'S10: the rows share its fate');

-- S11: one bad outcome does not hold up the others.
SELECT test.start('s11') AS a \gset
SELECT test.start('s11') AS b \gset
SELECT results_eq(format('SELECT f.result FROM awa.finish_jobs(test.worker(1), jsonb_build_array(test.item(%L, ''nonsense''), test.item(%L, ''completed''))) f', :'a', :'b'),
    $$ VALUES ('invalid'), ('done') $$, 'S11: the bad one is invalid, the good one done');

-- S12: numbers of a token may be given as text.
SELECT is((SELECT f.result FROM awa.finish_jobs(test.worker(1), jsonb_build_array((SELECT jsonb_object_agg(t.key, t.value #>> '{}') FROM jsonb_each(test.item(:'a', 'completed')) t))) f),
    'done', 'S12: a token of strings is the same token');

-- S13: progress survives a retry, and comes with the next claim.
SELECT test.start('s13') AS job \gset
SELECT is(test.progress(:'job', '{"step": 1}'), true, 'S13: progress is stored');
SELECT test.finish(:'job', 'retry', '{"delay_seconds": 0}') \g /dev/null
SELECT test.promote('s13') \g /dev/null
SELECT is(test.claim_one('s13') -> 'progress', '{"step": 1}', 'S13: the next attempt gets it');

-- S14: nothing is claimed from a paused queue.
SELECT awa.insert_job('k', queue => 's14') \g /dev/null
SELECT awa.pause_queue('s14') \g /dev/null
SELECT is(test.claim_one('s14'), NULL, 'S14: a paused queue gives nothing');
SELECT is((awa.claim_status('s14')).reason, 'paused', 'S14: claim_status says why');
SELECT awa.resume_queue('s14') \g /dev/null
SELECT isnt(test.claim_one('s14'), NULL, 'S14: a resumed queue gives its jobs');

-- S15: a worker that falls silent loses its attempts; the next attempt counts on.
SELECT test.start('s15', '{"backoff": {"delays": [0]}}') AS job \gset
SELECT test.rescue('1 day') \g /dev/null
SELECT test.rescue('2 days') \g /dev/null
SELECT is(test.status(:'job'), 'rescued', 'S15: the attempt is rescued');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'S15: its completion is stale');
SELECT is(test.state(:'job'::jsonb), 'retryable', 'S15: the job will run again');

-- S16: mistakes have their SQLSTATE, name the field and give a hint.
SELECT test.refuses('SELECT awa.insert_job(''k'', opts => ''{"nonsense": 1}'')', '22023', '%nonsense%', 'S16: an unknown option');
SELECT test.refuses('SELECT awa.insert_job(''k'', priority => 9)', '23514', '%priority%', 'S16: a value outside its limit');
SELECT test.refuses('SELECT awa.job(1)', '42704', '%', 'S16: a job that never was');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT test.claim_one(''s1'')', '25001', '%READ COMMITTED%', 'S16: a claim in an older snapshot');
COMMIT;

SELECT * FROM finish();
