-- tick: the steps, their reports, and the budget.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT results_eq($$ SELECT t.step FROM awa.tick() t $$, $$ SELECT unnest(awa._tick_steps()) $$,
    'a round reports every step, in order');
SELECT is_empty($$ SELECT t.* FROM awa.tick() t WHERE t.outcome IN ('failed', 'contended', 'skipped_budget') OR t.milliseconds IS NULL OR t.milliseconds < 0 $$,
    'an idle round does nothing wrong');
SELECT is((SELECT count(*) FROM awa.tick()), (SELECT count(*) FROM awa.tick()), 'rounds can follow each other');
SELECT results_eq($$ SELECT t.step FROM awa.tick('{"steps": ["rescue", "promote", "rescue"]}') t $$,
    $$ VALUES ('promote'), ('rescue') $$, 'chosen steps run once, in the order of the round');
SELECT is_empty($$ SELECT FROM awa.tick('{"steps": []}') $$, 'no steps, no reports');

SELECT awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": 1}') FROM generate_series(1, 5) \g /dev/null
UPDATE awa.deferred_jobs SET run_at = now() - interval '1 s';
SELECT is((SELECT t.rows FROM awa.tick('{"steps": ["promote"], "rows": 2}') t), 2::bigint, 'rows bounds a step');
SELECT is((SELECT t.rows FROM awa.tick('{"steps": ["promote"]}') t), 3::bigint, 'without it a setting does');

SELECT test.refuses(format('SELECT awa.tick(%L)', v.budget), v.state, v.pattern, 'refused: ' || coalesce(v.budget, 'NULL'))
FROM (VALUES ('{"step": []}', '22023', '%unknown option step%'), ('{"steps": "rescue"}', '22023',
    'option "steps" must be an array%'),
             ('{"steps": ["vacuum"]}', '42704', 'option "steps" names an unknown step%'), ('{"steps": [1]}', '42704', 'option "steps"%'), ('{"milliseconds": 0}', '22023',
                 'option "milliseconds"%'),
             ('{"rows": 0}', '22023', 'option "rows"%'), ('{"rows": 1.5}', '22023', 'option "rows"%'), ('[]', '22023', 'field "budget"%'), (NULL, '22023', 'field "budget"%')) v (budget, state, pattern);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.tick()', '25001', '%READ COMMITTED%', 'tick in REPEATABLE READ is refused');
COMMIT;

-- A step that fails is reported, and the others go on. The constraint is the test's.
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT count(*) FROM test.claim('q') \g /dev/null
ALTER TABLE awa.queue_ring_rotations ADD CONSTRAINT test_check CHECK (generation = 0) NOT VALID;
SELECT results_eq($$ SELECT t.step, t.outcome, t.detail ->> 'sqlstate' FROM awa.tick('{"steps": ["plan_queue", "plan_claim", "promote"]}') t $$,
    $$ VALUES ('plan_queue', 'failed', '23514'), ('plan_claim', 'planned', NULL), ('promote', 'done', NULL) $$,
        'a step that fails is reported with its SQLSTATE, and the others go on');
ALTER TABLE awa.queue_ring_rotations DROP CONSTRAINT test_check;
SELECT is(test.step('plan_queue'), 'planned', 'it succeeds when it can');

-- A tick that notified met its own 100 ms at commit, where it waits for the commits of others that notify.
BEGIN;
SET LOCAL lock_timeout = '7s';
SELECT count(*) FROM awa.tick() \g /dev/null
SELECT is(current_setting('lock_timeout'), '7s', 'a tick leaves the lock_timeout of its caller as it was');
SELECT is(current_setting('idle_in_transaction_session_timeout'), '10s', 'who idles after it has its locks for ten seconds');
COMMIT;
SELECT is(current_setting('idle_in_transaction_session_timeout'), '0', 'in this transaction only');

-- Hints that lead are lowered.
SELECT format('%s', l.hint_seq) AS hint FROM awa.queue_lanes l WHERE l.queue = 'q' LIMIT 1 \gset
SELECT setval(:'hint', 9000000000000000000) \g /dev/null
SELECT awa.insert_job('k', '"hidden"', 'q') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('q')), 0::bigint, 'a hint that leads hides a job');
SELECT is((SELECT t.rows FROM awa.tick('{"steps": ["hints"]}') t), 1::bigint, 'the audit lowers it');
SELECT is((SELECT c.args FROM test.claim('q') c), '"hidden"'::jsonb, 'and the job is claimed');

SELECT * FROM finish();
