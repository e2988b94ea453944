-- Promotion: due jobs become available, once, oldest first; one that cannot go does not hold up the others.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.promote_at(p_limit integer, p_now timestamptz) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT awa._promote_due(p_limit, p_now) $$;
ALTER FUNCTION test.promote_at(integer, timestamptz) OWNER TO awa_owner;

SELECT awa.insert_job('k', to_jsonb(i), 'q', run_at => now() + make_interval(mins => i)) FROM generate_series(6, 1, -1) i \g /dev/null
SELECT is(test.step('promote'), 'done', 'the step runs');
SELECT is((awa.queue_counts('q')).scheduled, 6::bigint, 'nothing is promoted before it is due');
SELECT is(test.promote_at(2, now() + interval '3 minutes'), 2::bigint, 'a step moves so many at most');
SELECT is(test.promote_at(9, now() + interval '3 minutes'), 1::bigint, 'the next one the rest of what is due');
SELECT results_eq($$ SELECT c.args, c.attempt FROM test.claim('q') c $$, $$ VALUES ('1'::jsonb, 1), ('2', 1), ('3', 1) $$,
    'jobs come in the order in which they were due');
SELECT results_eq($$ SELECT c.scheduled, c.available, c.running FROM awa.queue_counts('q') c $$,
    $$ VALUES (3::bigint, 0::bigint, 3::bigint) $$, 'each is in one place');
SELECT ok((SELECT bool_and(j.run_at - j.created_at > interval '30 s') FROM awa.jobs j WHERE j.queue = 'q'),
    'a promoted job keeps run_at and created_at');
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 0::bigint) $$,
    'tick reports how many it moved');

SELECT awa.insert_job('k', queue => 'new queue', opts => '{"delay_seconds": 1}') \g /dev/null
SELECT is(test.promote('new queue'), 1::bigint, 'a queue without lanes gets them');
SELECT is((SELECT count(*) FROM test.claim('new queue')), 1::bigint, 'and its job is claimed');

BEGIN;
SELECT awa.insert_job('k', queue => 'tx', opts => '{"delay_seconds": 1}') \g /dev/null
SELECT is(test.promote('tx'), 1::bigint, 'a promotion');
ROLLBACK;
SELECT is((awa.queue_counts('tx'))::text, '(tx,0,0,0,0,0,0,0,0,0)', 'that rolls back leaves nothing');

-- A job that cannot go. The constraint is the test's.
SELECT awa.insert_job(CASE WHEN i % 7 = 0 THEN 'poison' ELSE 'k' END, to_jsonb(i), 'mixed', opts => '{"delay_seconds": 5}') FROM generate_series(1, 20) i \g /dev/null
ALTER TABLE awa.ready_entries ADD CONSTRAINT test_check CHECK (kind <> 'poison');
SELECT cmp_ok(test.promote('mixed'), '>=', 0::bigint, 'a batch with jobs that cannot be promoted');
SELECT results_eq($$ SELECT c.available, c.failed, c.scheduled FROM awa.queue_counts('mixed') c $$,
    $$ VALUES (18::bigint, 2::bigint, 0::bigint) $$, 'all others go in the same call, and these end failed');
SELECT is_empty($$ SELECT j.job_id FROM awa.jobs j WHERE j.queue = 'mixed' AND j.state = 'failed' AND j.reason NOT LIKE 'promotion failed: %test_check%' $$,
    'with the reason');
SELECT is((SELECT count(*) FROM test.claim('mixed')), 18::bigint, 'the others are claimed');
ALTER TABLE awa.ready_entries DROP CONSTRAINT test_check;

SELECT * FROM finish();
