-- update_job: other values for a job that waits, under its id.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.update(p_job_id bigint, p_changes jsonb) RETURNS text LANGUAGE sql AS $$ SELECT awa.update_job(p_job_id, p_changes)::text $$;

-- Available.
SELECT (awa.insert_job('one', '{"n": 1}', queue => 'q')).job_id AS id \gset
SELECT (awa.insert_job('two', queue => 'q')).job_id AS other \gset
CREATE TABLE test.born AS SELECT j.created_at, j.run_at FROM awa.job(:id) j;
SELECT is(test.update(:id, '{"args": {"n": 2}, "max_attempts": 3, "tags": ["x"], "metadata": {"m": 1}, "deadline_seconds": 9}'), 'available',
    'an available job is changed');
SELECT results_eq(format('SELECT j.state, j.kind, j.args, j.max_attempts, j.tags, j.metadata, j.attempt, j.run_lease, j.created_at, j.run_at FROM awa.job(%s) j', :id),
    $$ SELECT 'available', 'one', '{"n": 2}'::jsonb, 3, '{x}'::text[], '{"m": 1}'::jsonb, 0, 0::bigint, b.created_at, b.run_at FROM test.born b $$,
    'what is named changes, the rest stays');
SELECT is((awa.queue_counts('q')).available, 2::bigint, 'it is counted once');
SELECT is((SELECT count(*) FROM awa.jobs j WHERE j.job_id = :id), 1::bigint, 'and listed once');
SELECT is(test.update(:id, '{"tags": null, "max_attempts": 25, "priority": 2}'), 'available', 'changed once more');
SELECT results_eq($$ SELECT c.job_id, c.args, c.max_attempts, c.tags, c.metadata, c.attempt, c.run_lease, c.deadline_at IS NOT NULL FROM test.claim('q') c $$,
    format($$ VALUES (%s::bigint, '{}'::jsonb, 25, NULL::text[], NULL::jsonb, 1, 1::bigint, false),
                     (%s, '{"n": 2}', 25, NULL, '{"m": 1}', 1, 1, true) $$, :other, :id),
    'it is claimed once, with its last values, after the others of its lane');
SELECT test.refuses(format('SELECT test.update(%s, ''{"priority": 1}'')', :id), '55000', 'field "job_id": job % is running', 'a running job cannot be changed');

-- To another priority, queue, time.
SELECT (awa.insert_job('k', queue => 'a')).job_id AS id \gset
SELECT is(test.update(:id, '{"priority": 4}'), 'available', 'another priority');
SELECT is((awa.job(:id)).priority, 4, 'is set');
SELECT is(test.update(:id, '{"queue": "b"}'), 'available', 'another queue');
SELECT is_empty($$ SELECT FROM test.claim('a') $$, 'it has left the first');
SELECT is(test.update(:id, '{"delay_seconds": 60}'), 'scheduled', 'later');
SELECT is_empty($$ SELECT FROM test.claim('b') $$, 'it does not run yet');
SELECT is(test.update(:id, '{"args": [1]}'), 'scheduled', 'a scheduled job is changed');
SELECT is(test.update(:id, '{"run_at": "2030-01-31T12:00:00Z"}'), 'scheduled', 'to another time');
SELECT test.refuses(format('SELECT test.update(%s, ''{"run_at": "9999-12-31T23:59:59-15:00"}'')', :id), '23514', 'field "run_at" is %',
    'but not beyond the times that every language has');
SELECT results_eq(format('SELECT j.args, j.run_at FROM awa.job(%s) j', :id), $$ VALUES ('[1]'::jsonb, '2030-01-31T12:00:00Z'::timestamptz) $$, 'both stay');
SELECT is(test.update(:id, '{"run_at": null}'), 'available', 'now');
SELECT results_eq($$ SELECT c.job_id, c.args, c.priority FROM test.claim('b') c $$, format($$ VALUES (%s::bigint, '[1]'::jsonb, 4) $$, :id), 'it runs');

-- Retryable.
SELECT test.start('r') AS job \gset
SELECT test.finish(:'job', 'retry', '{"error": "e", "delay_seconds": 99}') \g /dev/null
SELECT (:'job'::jsonb ->> 'job_id')::bigint AS id \gset
SELECT is(test.update(:id, '{"args": {"fixed": true}}'), 'retryable', 'a retryable job is changed');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.args, jsonb_array_length(j.errors) FROM awa.job(%s) j', :id),
    $$ VALUES ('retryable', 1, 1::bigint, '{"fixed": true}'::jsonb, 1) $$, 'and stays so');

-- Ended, unknown, in the caller's transaction.
SELECT awa.cancel_job(:id) \g /dev/null
SELECT test.refuses(format('SELECT test.update(%s, ''{"args": 1}'')', :id), '55000', 'field "job_id": job % is cancelled', 'a job that ended cannot be changed');
SELECT test.refuses('SELECT test.update(999999, ''{"args": 1}'')', '42704', 'field "job_id": there is no job %', 'an unknown id');
SELECT (awa.insert_job('k', queue => 't')).job_id AS id \gset
BEGIN;
SELECT is(test.update(:id, '{"priority": 1}'), 'available', 'a change in the caller''s transaction');
ROLLBACK;
SELECT is((awa.job(:id)).priority, 2, 'is undone by a rollback');
SELECT test.refuses(format('SELECT test.update(%s, %L)', :id, c.changes), c.state, c.pattern, c.pattern)
FROM (VALUES ('{}', '22023', 'field "changes" names nothing to change'), ('[]', '22023', 'field "changes" must be a JSON object'),
             ('{"kind": "x"}', '22023', 'field "changes" has the unknown option kind'), ('{"priority": 5}', '23514', 'field "priority" is 5'),
             ('{"priority": 1.5}', '22023', 'option "priority" cannot be 1.5'), ('{"max_attempts": 0}', '23514', 'field "max_attempts" is 0'),
             ('{"queue": ""}', '22023', 'field "queue" must not be empty'), ('{"queue": null}', '22023', 'option "queue" must be a string'),
             ('{"run_at": "tomorrow"}', '22023', 'field "run_at" cannot be "tomorrow"'), ('{"tags": "x"}', '22023', 'option "tags" must be%'),
             ('{"run_at": "2030-01-31T12:00:00Z", "delay_seconds": 1}', '22023', 'field "run_at" and option "delay_seconds" exclude each other'),
             ('{"metadata": 1}', '22023', 'option "metadata" must be a JSON object'), ('{"backoff": {"x": 1}}', '22023', 'field "backoff" has the unknown option x'))
    c (changes, state, pattern);
SELECT results_eq(format('SELECT j.state, j.priority, j.args FROM awa.job(%s) j', :id), $$ VALUES ('available', 2, '{}'::jsonb) $$, 'a bad change changes nothing');

-- What a former life left in the ring does not come back.
SELECT test.start('l') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT (:'job'::jsonb ->> 'job_id')::bigint AS id \gset
SELECT awa.retry_job(:id) \g /dev/null
SELECT is(test.update(:id, '{"args": {"v": 2}}'), 'available', 'a job in its second life is changed');
SELECT test.finish(test.claim_one('l'), 'fail') \g /dev/null
SELECT results_eq(format('SELECT j.state, j.args, j.run_lease FROM awa.job(%s) j', :id), $$ VALUES ('failed', '{"v": 2}'::jsonb, 2::bigint) $$, 'and fails with the new values');
SELECT awa.retry_job(:id) \g /dev/null
SELECT results_eq($$ SELECT c.args, c.run_lease FROM test.claim('l') c $$, $$ VALUES ('{"v": 2}'::jsonb, 3::bigint) $$, 'which a third life has too');

SELECT * FROM finish();
