-- retry_job: another life for a job that ended, in every order of retry and prune; terminal counts stay exact.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.id(p_job jsonb) RETURNS bigint LANGUAGE sql AS $$ SELECT (p_job ->> 'job_id')::bigint $$;
CREATE FUNCTION test.retry(p_job jsonb, p_opts jsonb DEFAULT '{}') RETURNS text
LANGUAGE sql AS $$ SELECT r.state::text FROM awa.retry_job(test.id(p_job), p_opts) r $$;
CREATE FUNCTION test.turn() RETURNS text LANGUAGE sql AS $$
    SELECT pg_sleep(0.06);
    SELECT awa._plan_ring('queue', clock_timestamp());
$$;
CREATE FUNCTION test.ended(p_queue text) RETURNS text LANGUAGE sql AS $$
    SELECT concat_ws(' ', c.completed, c.failed, c.cancelled) FROM awa.queue_counts(p_queue) c $$;
-- What the views list agrees with job().
CREATE FUNCTION test.disagree() RETURNS SETOF bigint LANGUAGE sql AS $$
    SELECT j.job_id FROM awa.jobs j GROUP BY j.job_id HAVING count(*) > 1
    UNION ALL
    SELECT j.job_id FROM awa.jobs j, LATERAL awa.job(j.job_id) i WHERE i.* IS DISTINCT FROM j.*
$$;
SELECT awa.set_setting('queue_rotate_seconds', '0.05'), awa.set_setting('terminal_retention_seconds', '0'),
       awa.set_setting('dump_lock_seconds', '0') \g /dev/null

-- Failed.
SELECT test.start('q', '{"tags": ["a"], "metadata": {"m": 1}, "deadline_seconds": 60}', 3) AS job \gset
SELECT test.progress(:'job', '{"p": 1}') \g /dev/null
SELECT test.finish(:'job', 'fail', '{"error": "no", "reason": "why"}') \g /dev/null
SELECT is(test.ended('q'), '0 1 0', 'a job failed');
SELECT is(test.retry(:'job'), 'available', 'it runs again');
SELECT is(test.ended('q'), '0 0 0', 'and does not count as failed');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.max_attempts, j.tags, j.metadata, j.progress, '
                         'jsonb_array_length(j.errors), j.reason, j.created_at FROM test.info(%L) j', :'job'),
    format($$ VALUES ('available', 0, 1::bigint, 3, '{a}'::text[], '{"m": 1}'::jsonb, NULL::jsonb, 1, NULL::text, %L::timestamptz) $$,
        :'job'::jsonb ->> 'created_at'),
    'from the first attempt, with its errors, without its progress');
SELECT test.refuses(format('SELECT test.retry(%L)', :'job'), '55000', 'field "job_id": job % is available', 'a job that waits has it');
SELECT test.claim_one('q') AS again \gset
SELECT results_eq(format('SELECT j.job_id, j.attempt, j.run_lease, j.deadline_at - clock_timestamp() < interval ''1 minute'' '
                         'FROM jsonb_populate_record(NULL::awa.claimed_job, %L) j', :'again'),
    format('VALUES (%s::bigint, 1, 2::bigint, true)', test.id(:'job')), 'it is claimed under its id and a new lease');
SELECT test.refuses(format('SELECT test.retry(%L)', :'job'), '55000', 'field "job_id": job % is running', 'a running job has it');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'the former attempt does not fit');
SELECT is(test.status(:'job'), 'failed', 'and is known to have failed');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree while it runs');
SELECT test.finish(:'again', 'fail', '{"error": "again"}') \g /dev/null
SELECT is(test.ended('q'), '0 1 0', 'it fails again and is counted once');
SELECT results_eq(format('SELECT j.state, j.run_lease, jsonb_array_length(j.errors) FROM test.info(%L) j', :'job'),
    $$ VALUES ('failed', 2::bigint, 2) $$, 'job() shows the second end');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree');
SELECT is(test.retry(:'job'), 'available', 'a third life');
SELECT test.finish(test.claim_one('q'), 'completed') \g /dev/null
SELECT is(test.ended('q'), '1 0 0', 'it completes');
SELECT is(test.state(:'job'::jsonb), 'completed', 'job() shows that');
SELECT test.refuses(format('SELECT test.retry(%L)', :'job'), '55000', 'field "job_id": job % is completed', 'a job that succeeded does not run again');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree');

-- Cancelled: the run_lease of the second end is that of the first.
SELECT (awa.insert_job('k', queue => 'c')).job_id AS id \gset
SELECT awa.cancel_job(:id, 'one') \g /dev/null
SELECT is((SELECT r.state::text FROM awa.retry_job(:id) r), 'available', 'a job cancelled before it ran');
SELECT is(awa.cancel_job(:id, 'two'), 'cancelled', 'is cancelled again');
SELECT results_eq(format('SELECT j.state, j.reason, j.run_lease FROM awa.job(%s) j', :id), $$ VALUES ('cancelled', 'two', 0::bigint) $$,
    'with the second reason');
SELECT is(test.ended('c'), '0 0 1', 'counted once');
SELECT is((SELECT r.state::text FROM awa.retry_job(:id, '{"delay_seconds": 60}') r), 'scheduled', 'retried with a delay');
SELECT is(awa.cancel_job(:id, 'three'), 'cancelled', 'and cancelled a third time, without a body in the ring');
SELECT is(test.ended('c'), '0 0 1', 'counted once');
SELECT is((SELECT r.state::text FROM awa.retry_job(:id, '{"delay_seconds": 60}') r), 'scheduled', 'once more');
SELECT is(awa.cancel_job(:id, 'four'), 'cancelled', 'and once more');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree');
SELECT is((SELECT r.state::text FROM awa.retry_job(:id) r), 'available', 'and again');
SELECT is(test.ended('c'), '0 0 0', 'then nothing has ended');
SELECT is((test.claim_one('c') ->> 'job_id')::bigint, :id, 'and it runs');

-- Elsewhere, later.
SELECT test.start('from') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is(test.retry(:'job', '{"queue": "to", "priority": 1}'), 'available', 'a job goes to another queue');
SELECT results_eq(format('SELECT j.queue, j.priority FROM test.info(%L) j', :'job'), $$ VALUES ('to', 1) $$, 'and priority');
SELECT is(test.ended('from'), '0 0 0', 'it does not count as failed in the old queue');
SELECT test.refuses(format('SELECT test.retry(%L, %L)', :'job', o.opts), o.state, o.pattern, o.pattern)
FROM (VALUES ('{"x": 1}', '22023', 'field "opts" has the unknown option x'), ('[]', '22023', 'field "opts" must be a JSON object')) o (opts, state, pattern);
SELECT test.start('bad') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT test.refuses(format('SELECT test.retry(%L, %L)', :'job', o.opts), o.state, o.pattern, o.pattern)
FROM (VALUES ('{"priority": 5}', '22023', 'option "priority" cannot be 5'), ('{"queue": ""}', '22023', 'option "queue" must be%'),
             ('{"delay_seconds": -1}', '22023', 'option "delay_seconds" cannot be -1')) o (opts, state, pattern);
SELECT is(test.state(:'job'::jsonb), 'failed', 'a bad option changes nothing');

-- Not yet due.
SELECT (awa.insert_job('k', queue => 'later', run_at => now() + interval '1 day')).job_id AS id \gset
SELECT is((SELECT r.state::text FROM awa.retry_job(:id) r), 'available', 'a scheduled job runs now');
SELECT test.start('later2') AS job \gset
SELECT test.finish(:'job', 'retry', '{"error": "e", "delay_seconds": 99}') \g /dev/null
SELECT is(test.retry(:'job', '{"delay_seconds": 50}'), 'retryable', 'a retryable job comes at another time');
SELECT is(test.retry(:'job'), 'available', 'or now');
SELECT results_eq($$ SELECT c.attempt, c.run_lease FROM test.claim('later2') c $$, $$ VALUES (2, 2::bigint) $$, 'its attempts go on');

-- Dead letters.
SELECT awa.declare_queue('dead', '{"dlq": true}') \g /dev/null
SELECT test.start('dead') AS job \gset
SELECT test.finish(:'job', 'fail', '{"error": "e"}') \g /dev/null
SELECT is(test.retry(:'job'), 'available', 'a dead letter runs again');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease FROM test.info(%L) j', :'job'), $$ VALUES ('available', 0, 1::bigint) $$, 'as a fresh life');
SELECT is((SELECT count(*) FROM awa.dlq), 0::bigint, 'and is none any more');

-- Unique keys: a job that runs again takes its key, unless another job holds it.
SELECT (awa.insert_job('u', queue => 'u', opts => '{"unique": {}}')).job_id AS first \gset
SELECT awa.cancel_job(:first) \g /dev/null
SELECT (awa.insert_job('u', queue => 'u', opts => '{"unique": {}}')).job_id AS second \gset
SELECT isnt(:first::bigint, :second::bigint, 'a cancelled job does not hold its key');
SELECT test.refuses(format('SELECT awa.retry_job(%s)', :first), '23505', format('job %s holds the unique key', :second), 'it cannot come back while another holds it');
SELECT is((awa.job(:first)).state, 'cancelled', 'it stays as it was');
SELECT awa.cancel_job(:second) \g /dev/null
SELECT is((SELECT r.state::text FROM awa.retry_job(:first) r), 'available', 'it comes back when nobody does');
SELECT is((awa.insert_job('u', queue => 'u', opts => '{"unique": {}}')).job_id, :first::bigint, 'and holds it');
SELECT is(awa.update_job(:first, '{"priority": 1}'), 'available', 'a change keeps the key');
SELECT is((awa.insert_job('u', queue => 'u', opts => '{"unique": {}}')).job_id, :first::bigint, 'as it was');
SELECT awa.cancel_job(:first) \g /dev/null

-- Unknown, pruned.
SELECT test.refuses('SELECT awa.retry_job(999999999)', '42704', 'field "job_id": there is no job %', 'an unknown id');
SELECT test.refuses('SELECT awa.retry_job(NULL)', '22023', 'field "job_id" must not be NULL', 'no id');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.retry_job(1)', '25001', '%', 'an older snapshot');
COMMIT;

-- Prune after retry: the job that lives is not kept as failed, the two rows cancel each other.
SELECT test.start('p1') AS job, test.start('p1') AS other \gset
SELECT test.finish(:'job', 'fail', '{"error": 1}'), test.finish(:'other', 'fail') \g /dev/null
SELECT test.turn() \g /dev/null
SELECT awa._publish_ring('queue') \g /dev/null
SELECT is(test.retry(:'job', '{"delay_seconds": 60}'), 'scheduled', 'a failed job is retried, its slot left behind');
SELECT test.finish(c, 'completed') FROM (SELECT to_jsonb(x) AS c FROM awa.claim_ready_runtime('to', 9, test.worker(1)) x
    UNION ALL SELECT to_jsonb(x) FROM awa.claim_ready_runtime('later', 9, test.worker(1)) x
    UNION ALL SELECT to_jsonb(x) FROM awa.claim_ready_runtime('dead', 9, test.worker(1)) x
    UNION ALL SELECT to_jsonb(x) FROM awa.claim_ready_runtime('q', 9, test.worker(1)) x) t \g /dev/null
SELECT awa.cancel_job(j.job_id) FROM awa.jobs j WHERE j.state = 'running' \g /dev/null
SELECT is((SELECT p.outcome FROM awa._prune_ring('queue', clock_timestamp() + interval '1 hour') p), 'pruned', 'the slot is pruned');
SELECT is(test.ended('p1'), '0 1 0', 'one of the two counts');
SELECT results_eq($$ SELECT f.job_id FROM awa.failed_entries f WHERE f.queue = 'p1' $$, format('VALUES (%s::bigint)', test.id(:'other')),
    'and is kept');
SELECT is(test.state(:'job'::jsonb), 'scheduled', 'the other waits');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree');

-- Retry after prune: the job is in the rollups, and its undo in the current slot.
SELECT is(test.retry(:'other'), 'available', 'a failed job that outlived its slot runs again');
SELECT is(test.ended('p1'), '0 0 0', 'and does not count any more');
SELECT is((SELECT count(*) FROM awa.failed_entries f WHERE f.queue = 'p1'), 0::bigint, 'nor is it kept');
SELECT is_empty('SELECT test.disagree()', 'views and job() agree');
SELECT test.claim_one('p1') AS again \gset
SELECT results_eq(format('SELECT j.job_id, j.attempt, j.run_lease FROM jsonb_populate_record(NULL::awa.claimed_job, %L) j', :'again'),
    format('VALUES (%s::bigint, 1, 2::bigint)', test.id(:'other')), 'it is claimed under its id and a new lease');
SELECT test.finish(:'again', 'fail', '{"error": "last"}') \g /dev/null
SELECT is(test.ended('p1'), '0 1 0', 'it fails again');
SELECT test.turn() \g /dev/null
SELECT awa._publish_ring('queue') \g /dev/null
SELECT is((SELECT p.outcome FROM awa._prune_ring('queue', clock_timestamp() + interval '1 hour') p), 'pruned', 'that slot is pruned as well');
SELECT is(test.ended('p1'), '0 1 0', 'the count stays');
SELECT results_eq(format('SELECT j.state, j.run_lease, j.errors -> -1 ->> ''error'' FROM test.info(%L) j', :'other'),
    $$ VALUES ('failed', 2::bigint, 'last') $$, 'the last end is kept');
SELECT is(test.retry(:'other'), 'available', 'and it can be retried once more');
SELECT is(test.ended('p1'), '0 0 0', 'no failure is left');
SELECT awa.cancel_job(test.id(:'other')) \g /dev/null
SELECT is(awa.cancel_job(test.id(:'job')), 'cancelled', 'both are cancelled');
SELECT is(test.ended('p1'), '0 0 2', 'and counted');
SELECT test.turn() \g /dev/null
SELECT awa._publish_ring('queue') \g /dev/null
SELECT is((SELECT p.outcome FROM awa._prune_ring('queue', clock_timestamp() + interval '1 hour') p), 'pruned', 'and pruned');
SELECT is(test.ended('p1'), '0 0 2', 'and still counted');
SELECT test.refuses(format('SELECT test.retry(%L)', :'job'), '55000', 'field "job_id": job % is pruned', 'a cancelled one is gone then');

SELECT * FROM finish();
