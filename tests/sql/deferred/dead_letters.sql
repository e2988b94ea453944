-- Case b19: dead letters, their retry, purge and retention.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.id(p_job jsonb) RETURNS bigint LANGUAGE sql AS $$ SELECT (p_job ->> 'job_id')::bigint $$;
SELECT awa.declare_queue('q', '{"dlq": true}') \g /dev/null
SELECT test.start('q', '{"tags": ["t"]}') AS job \gset
SELECT test.progress(:'job', '{"p": 1}') \g /dev/null
SELECT is(test.finish(:'job', 'fail', '{"error": "bad"}'), 'done', 'a job fails for good');
SELECT is(test.finish(:'job', 'fail', '{"error": "bad"}'), 'already_done', 'a second report of it is already done');
SELECT results_eq($$ SELECT d.state, d.reason, d.attempt, d.run_lease, d.errors #>> '{0,error}', d.progress, d.tags, d.finalized_at IS NOT NULL FROM awa.dlq d $$,
    $$ VALUES ('failed', 'terminal_error', 1, 1::bigint, 'bad', '{"p": 1}'::jsonb, '{t}'::text[], true) $$,
        'there is one dead letter, with all it knew');
SELECT results_eq($$ SELECT c.failed, c.dead_lettered FROM awa.queue_counts('q') c $$, $$ VALUES (0::bigint, 1::bigint) $$,
    'it is counted on hold, not as history');

BEGIN;
SELECT is((awa.retry_dlq(test.id(:'job'))).state::text, 'available', 'a retry makes it available');
ROLLBACK;
SELECT is((SELECT count(*) FROM awa.dlq), 1::bigint, 'a rollback puts it back on hold');
SELECT is((awa.retry_dlq(test.id(:'job'))).job_id, test.id(:'job'), 'a retried job keeps its id');
SELECT test.refuses(format('SELECT awa.retry_dlq(%s)', test.id(:'job')), '42704', 'field "job_id": no dead letter has the id %',
    'a second retry finds no dead letter');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.errors #>> ''{0,error}'', j.progress, j.tags FROM test.info(%L) j', :'job'),
    $$ VALUES ('available', 0, 1::bigint, 'bad', NULL::jsonb, '{t}'::text[]) $$,
        'it starts at attempt 0, with its errors and its lease, without progress');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'no attempt of its former life can end it');
SELECT test.claim_one('q') AS again \gset
SELECT results_eq(format('SELECT (%L::jsonb ->> ''attempt'')::integer, (%1$L::jsonb ->> ''run_lease'')::integer', :'again'), $$ VALUES (1, 2) $$,
    'its next lease differs from every former one');
SELECT is(test.finish(:'job', 'fail'), 'already_done', 'the former life''s failure is still an old answer');
SELECT test.refuses(format('SELECT test.complete(%L)', :'job'), 'JQ001', '%no longer current', 'and its completion is stale');
SELECT is(test.finish(:'again', 'completed'), 'done', 'the new life completes');
SELECT is((awa.queue_counts('q'))::text, '(q,0,0,0,1,0,0,0,0,0)', 'the job is counted once');

-- Options of a retry.
SELECT test.start('q') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT results_eq(format('SELECT r.state::text FROM awa.retry_dlq(%s, ''{"delay_seconds": 60, "priority": 4, "queue": "other"}'') r', test.id(:'job')), $$ VALUES ('scheduled') $$,
    'a retry can be delayed');
SELECT results_eq(format('SELECT j.state, j.queue, j.priority, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('scheduled', 'other', 4, 0) $$,
    'and go to another queue and priority');
SELECT is(test.promote('other'), 1::bigint, 'it comes when it is due');
SELECT is(test.claim_one('other') ->> 'job_id', :'job'::jsonb ->> 'job_id', 'and runs there');
SELECT test.start('q') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((awa.retry_dlq(test.id(:'job'), '{"queue": null, "priority": null, "delay_seconds": null}')).state::text, 'available', 'null options are absent');
SELECT is(test.claim_one('q') ->> 'job_id', :'job'::jsonb ->> 'job_id', 'the job stays in its queue');
SELECT test.start('q') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT test.refuses(format('SELECT awa.retry_dlq(%s, %L)', test.id(:'job'), v.opts), v.state, v.pattern, 'a retry refuses ' || v.opts)
FROM (VALUES ('{"run_at": "now"}', '22023', '%unknown option run_at%'), ('{"priority": 5}', '22023', 'option "priority"%'), ('{"priority": 1.5}', '22023',
    'option "priority"%'),
             ('{"queue": ""}', '22023', 'option "queue"%'), ('{"queue": "a\n"}', '22023', 'field "queue" contains%'), ('{"delay_seconds": -1}', '22023',
                 'option "delay_seconds"%'),
             ('[]', '22023', 'field "opts"%')) v (opts, state, pattern);
SELECT is((SELECT count(*) FROM awa.dlq), 1::bigint, 'a refused retry leaves the dead letter');
SELECT awa.pause_queue('q') \g /dev/null
SELECT is((awa.retry_dlq(test.id(:'job'))).state::text, 'available', 'a dead letter can be retried into a paused queue');
SELECT is(test.claim_one('q'), NULL, 'where it waits');
SELECT awa.resume_queue('q') \g /dev/null
SELECT test.claim_one('q') AS job \gset
SELECT is(test.finish(:'job', 'fail'), 'done', 'and fails again');
SELECT is((SELECT d.run_lease FROM awa.dlq d), 2::bigint, 'as one dead letter, at the next lease');
SELECT test.refuses(format('SELECT awa.retry_dlq(%s)', v.id), v.state, v.pattern, 'no retry of ' || v.id)
FROM (VALUES ('NULL', '22023', 'field "job_id" must not be NULL'), ('5', '42704', '%no dead letter%')) v (id, state, pattern);

-- Routing.
SELECT test.start('plain') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((awa.queue_counts('plain'))::text, '(plain,0,0,0,0,0,1,0,0,0)',
    'a queue without dead letters keeps failures in history');
SELECT awa.set_setting('dlq_default', '1') \g /dev/null
SELECT test.start('plain') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((awa.queue_counts('plain'))::text, '(plain,0,0,0,0,0,1,0,0,1)', 'the default is a setting');
SELECT awa.declare_queue('never', '{"dlq": false}') \g /dev/null
SELECT test.start('never') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((awa.queue_counts('never'))::text, '(never,0,0,0,0,0,1,0,0,0)', 'which a queue can override');
SELECT test.start('q', '{}', 1) AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"error": "e"}'), 'done', 'attempts are used up');
SELECT is((test.info(:'job')).reason, 'max_attempts_exhausted', 'which makes a dead letter with that reason');
SELECT is(test.finish(:'job', 'retry', '{"error": "e"}'), 'already_done', 'once');
SELECT test.start('q', '{}', 1) AS job \gset
SELECT test.rescue('1 hour') \g /dev/null
SELECT is((test.info(:'job')).reason, 'rescued_out', 'a rescue at the last attempt as well');

-- Purge and retention.
SELECT count(*) AS held FROM awa.dlq \gset
SELECT is(awa.purge_dlq(test.id(:'job')), true, 'a dead letter is purged');
SELECT is(awa.purge_dlq(test.id(:'job')), false, 'once');
SELECT is((SELECT count(*) FROM awa.dlq), :held - 1::bigint, 'and no other one');
SELECT is(test.state(:'job'::jsonb), 'pruned', 'job() says that nothing is left');
SELECT test.refuses('SELECT awa.purge_dlq(NULL)', '22023', 'field "job_id" must not be NULL', 'purge needs an id');
SELECT is(awa._expire_dead_letters(1000, clock_timestamp() + interval '29 days'), 0::bigint, 'dead letters are kept for 30 days');
SELECT is(awa._expire_dead_letters(1, clock_timestamp() + interval '31 days'), 1::bigint,
    'then they are deleted, so many at a time');
SELECT is(awa._expire_dead_letters(1000, clock_timestamp() + interval '31 days'), :held - 2::bigint, 'until none is left');
SELECT is((SELECT count(*) FROM awa.dlq), 0::bigint, 'the dead letters are gone');

SELECT * FROM finish();
