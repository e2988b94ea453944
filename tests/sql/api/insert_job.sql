-- insert_job: what it takes, what it answers, what it refuses.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT (awa.insert_job('send')).* \gset
SELECT is(:'state'::text, 'available', 'a job without a time is available at once');
SELECT is(:'duplicate'::boolean, false, 'a new job is no duplicate');
SELECT results_eq(format('SELECT j.state, j.kind, j.queue, j.priority, j.args, j.attempt, j.max_attempts, j.run_lease, j.tags, j.metadata FROM awa.job(%s) j', :job_id),
    $$ VALUES ('available', 'send', 'default', 2, '{}'::jsonb, 0, 25, 0::bigint, NULL::text[], NULL::jsonb) $$,
        'the defaults are those of the contract');

SELECT awa.insert_job('k', '{"a": 1}', 'q', 1, 3, NULL, '{"tags": ["x", "y"], "metadata": {"m": 1}, "trace": "00-ab-cd-01", "deadline_seconds": 30}') AS ready \gset
SELECT results_eq($$
    SELECT c.kind, c.queue, c.args, c.priority, c.attempt, c.max_attempts, c.tags, c.metadata, c.progress, c.trace, c.run_lease,
           c.deadline_at - c.run_at > interval '29 s', c.created_at = c.run_at
    FROM test.claim('q') c $$,
    $$ VALUES ('k', 'q', '{"a": 1}'::jsonb, 1, 1, 3, '{x,y}'::text[], '{"m": 1}'::jsonb, NULL::jsonb, '00-ab-cd-01', 1::bigint, true, true) $$,
    'the claim returns what was inserted');

SELECT (awa.insert_job('k', queue => 'later', run_at => now() + interval '1 hour')).* \gset
SELECT is(:'state'::text, 'scheduled', 'a future run_at makes a scheduled job');
SELECT is((awa.job(:job_id)).state, 'scheduled', 'job() knows it');
SELECT is_empty($$ SELECT FROM test.claim('later') $$, 'it is not claimed before its time');
SELECT is((awa.insert_job('k', queue => 'q', run_at => now() - interval '1 hour')).state::text, 'available',
    'a past run_at means now');
SELECT is((awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": 60}')).state::text, 'scheduled',
    'a delay makes a scheduled job');
SELECT is((awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": 0}')).state::text, 'available', 'a delay of 0 means now');
SELECT is((awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": 1e-400}')).state::text, 'available',
    'and so does one too small for a float');
SELECT is((awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": null, "tags": null, "metadata": null, "backoff": null, "keep_result": null}')).state::text,
    'available', 'options that are null are absent');
SELECT is((SELECT j.created_at < j.run_at - interval '50 s' FROM awa.jobs j WHERE j.queue = 'q' AND j.state = 'scheduled'), true,
    'a delayed job knows when it was made');

-- Transactions.
BEGIN;
SELECT awa.insert_job('k', queue => 'tx') \g /dev/null
SAVEPOINT s;
SELECT awa.insert_job('gone', queue => 'tx') \g /dev/null
ROLLBACK TO s;
COMMIT;
BEGIN;
SELECT awa.insert_job('gone', queue => 'tx') \g /dev/null
ROLLBACK;
SELECT results_eq($$ SELECT c.kind FROM test.claim('tx') c $$, $$ VALUES ('k') $$,
    'a job exists exactly when its transaction committed');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT is((awa.insert_job('k', queue => 'tx')).state::text, 'available', 'a producer may use REPEATABLE READ');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT is((awa.insert_job('k', queue => 'made in an old snapshot')).state::text, 'scheduled',
    'where an old snapshot cannot make the lane, the job is due now and deferred');
COMMIT;
SELECT is((SELECT t.rows FROM awa.tick('{"steps": ["promote"]}') t), 1::bigint, 'it is promoted by the next tick');
SELECT is((SELECT count(*) FROM test.claim('made in an old snapshot')), 1::bigint, 'and claimed');

-- Refusals.
SELECT (awa.queue_counts('no')).* \gset before_
SELECT test.refuses(format('SELECT awa.insert_job(%s)', v.arguments), v.state, v.pattern, 'refused: ' || left(v.arguments, 60))
FROM (VALUES
    ('NULL', '22023', 'field "kind"%'), ('''''', '22023', 'field "kind"%'), ('repeat(''k'', 201)', '23514',
        'field "kind" has 201%'),
    ('E''a\tb''', '22023', 'field "kind" contains a control%'),
    ('''k'', queue => NULL', '22023', 'field "queue"%'), ('''k'', queue => ''''', '22023', 'field "queue"%'),
    ('''k'', queue => repeat(''q'', 201)', '23514', 'field "queue" has 201%'),
    ('''k'', NULL', '22023', 'field "args" must not be NULL'),
    ('''k'', priority => 0', '23514', 'field "priority" is 0'), ('''k'', priority => 5', '23514', 'field "priority" is 5'),
    ('''k'', priority => -1', '23514', 'field "priority" is -1'), ('''k'', priority => NULL', '23514',
        'field "priority" is NULL'),
    ('''k'', max_attempts => 0', '23514', 'field "max_attempts" is 0'), ('''k'', max_attempts => -1', '23514',
        'field "max_attempts" is -1'),
    ('''k'', max_attempts => 1001', '23514', 'field "max_attempts" is 1001'), ('''k'', max_attempts => 2147483647', '23514',
        'field "max_attempts"%'),
    ('''k'', max_attempts => NULL', '23514', 'field "max_attempts" is NULL'),
    ('''k'', run_at => ''infinity''', '22023', 'field "run_at" is infinity'), ('''k'', run_at => ''-infinity''', '22023',
        'field "run_at" is -infinity'),
    ('''k'', run_at => ''9999-12-31 00:00+00''', '23514', 'field "run_at" is 9999-12-31%'), ('''k'', run_at => ''294276-01-01 00:00+00''', '23514',
        'field "run_at" is 294276%'),
    ('''k'', opts => NULL', '22023', 'field "opts" must be a JSON object'), ('''k'', opts => ''[]''', '22023',
        'field "opts" must be%'),
    ('''k'', run_at => now(), opts => ''{"delay_seconds": 1}''', '22023', 'field "run_at" and option "delay_seconds"%')
) v (arguments, state, pattern);
SELECT test.refuses(format('SELECT awa.insert_job(''k'', queue => ''no'', opts => %L)', v.opts), v.state, v.pattern, 'refused option: ' || left(v.opts, 60))
FROM (VALUES
    ('{"tag": []}', '22023', '%unknown option tag%'), ('{"TAGS": []}', '22023', '%unknown option%'),
    ('{"backpressure": "on"}', '22023', 'option "backpressure"%'),
    ('{"after": [1]}', 'JQ007', 'option "after"%'), ('{"on_parent_failure": "x"}', 'JQ007', 'option "on_parent_failure"%'),
    ('{"concurrency_key": "x"}', 'JQ007', 'option "concurrency_key"%'),
    ('{"tags": "x"}', '22023', 'option "tags"%'), ('{"tags": [1]}', '22023', 'option "tags"%'), ('{"tags": [""]}', '22023',
        'option "tags"%'),
    (jsonb_build_object('tags', (SELECT jsonb_agg('t' || i) FROM generate_series(1, 21) i))::text, '23514',
        'option "tags" has 21%'),
    (jsonb_build_object('tags', jsonb_build_array(repeat('t', 201)))::text, '22023', 'option "tags"%'),
    ('{"metadata": []}', '22023', 'option "metadata"%'), (jsonb_build_object('metadata', jsonb_build_object('m', repeat('x', 65536)))::text, '23514',
        'field "metadata" has%'),
    ('{"ordering_key": ""}', '22023', 'option "ordering_key"%'), ('{"ordering_key": 5}', '22023', 'option "ordering_key"%'),
    (jsonb_build_object('ordering_key', repeat('x', 1025))::text, '22023', 'option "ordering_key"%'),
    ('{"delay_seconds": -1}', '22023', 'option "delay_seconds"%'), ('{"delay_seconds": "5"}', '22023', 'option "delay_seconds"%'),
    ('{"delay_seconds": 1e12}', '22023', 'option "delay_seconds"%'), ('{"deadline_seconds": 0}', '22023',
        'option "deadline_seconds"%'),
    ('{"deadline_seconds": -1}', '22023', 'option "deadline_seconds"%'), ('{"keep_result": 1}', '22023', 'option "keep_result"%'),
    ('{"trace": 5}', '22023', 'option "trace"%'), (jsonb_build_object('trace', repeat('x', 513))::text, '22023',
        'option "trace"%'),
    ('{"backoff": 5}', '22023', 'field "backoff" must be a JSON object'), ('{"backoff": {"base": 5}}', '22023',
        '%"backoff" has the unknown option base'),
    ('{"backoff": {"base_seconds": -1}}', '22023', 'option "base_seconds"%'), ('{"backoff": {"factor": 0.5}}', '22023',
        'option "factor"%'),
    ('{"backoff": {"jitter": 2}}', '22023', 'option "jitter"%'), ('{"backoff": {"cap_seconds": 86401}}', '22023',
        'option "cap_seconds"%'),
    ('{"backoff": {"delays": []}}', '22023', '%bad "delays"%'), ('{"backoff": {"delays": ["1"]}}', '22023', '%bad "delays"%'),
    ('{"backoff": {"delays": [-1]}}', '22023', '%bad "delays"%'), ('{"backoff": {"delays": [1], "factor": 2}}', '22023',
        '%bad "delays"%')
) v (opts, state, pattern);
SELECT is((awa.queue_counts('no'))::text, '(no,0,0,0,0,0,0,0,0,0)', 'a refused job leaves nothing behind');
SELECT ok(NOT EXISTS (SELECT FROM awa.queues q WHERE q.queue = 'no'), 'not even its queue');
SELECT lives_ok($$ SELECT awa.insert_job(repeat('k', 200), queue => repeat('q', 200), priority => 4, max_attempts => 1000,
    opts => jsonb_build_object('tags', (SELECT jsonb_agg(repeat('t', 200)) FROM generate_series(1, 20)), 'ordering_key', repeat('x', 1024),
                               'trace', repeat('x', 512))) $$, 'every limit itself is allowed');

SELECT is((awa.insert_job('k', queue => 'far', run_at => '9999-12-30 23:59+00')).state::text, 'scheduled', 'and so is the last run_at');

SELECT * FROM finish();
