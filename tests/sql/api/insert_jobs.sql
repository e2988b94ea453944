-- insert_jobs and insert_many: order, all or nothing, and errors that name the item.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT results_eq($$
    SELECT r.state::text, j.kind, j.queue, j.priority, j.max_attempts, j.args
    FROM awa.insert_jobs('[{"kind": "a"},
                           {"kind": "b", "queue": "q2", "priority": 4, "max_attempts": 2, "args": {"n": 1}, "opts": {"tags": ["t"]}},
                           {"kind": "c", "run_at": "2999-01-31T12:00:00Z"},
                           {"kind": "d", "run_at": "2001-01-31 12:00:00+01:30"},
                           {"kind": "e", "opts": {"delay_seconds": 60}},
                           {"kind": "f", "priority": null, "run_at": null, "opts": null}]') WITH ORDINALITY r (job_id, state, duplicate, pressure, o),
         LATERAL awa.job(r.job_id) j ORDER BY r.o $$,
    $$ VALUES ('available', 'a', 'default', 2, 25, '{}'::jsonb), ('available', 'b', 'q2', 4, 2, '{"n": 1}'), ('scheduled', 'c', 'default', 2, 25,
        '{}'),
              ('available', 'd', 'default', 2, 25, '{}'), ('scheduled', 'e', 'default', 2, 25, '{}'), ('available', 'f', 'default', 2, 25, '{}') $$,
    'one result per job, in the order of the array');
SELECT is_empty($$ SELECT FROM awa.insert_jobs('[]') $$, 'an empty array inserts nothing');
SELECT results_eq($$ SELECT c.kind FROM test.claim('default') c $$, $$ VALUES ('a'), ('d'), ('f') $$,
    'jobs of a lane keep the order of the array');
SELECT is((awa.job(j.job_id)).run_at, '2999-01-31T12:00:00Z'::timestamptz, 'run_at is the instant that was given') FROM awa.jobs j WHERE j.kind = 'c';

SELECT test.refuses(format('SELECT awa.insert_jobs(%L)', '[{"kind": "ok", "queue": "no"}, ' || v.item || ']'), v.state, v.pattern, 'refused item: ' || left(v.item, 60))
FROM (VALUES
    ('5', '22023', 'jobs[2]: field "job" must be a JSON object'), ('{}', '22023', 'jobs[2]: field "kind"%'), ('{"kind": ""}', '22023',
        'jobs[2]: field "kind"%'),
    ('{"kind": 5}', '22023', 'jobs[2]: field "kind" must be a string'), ('{"kind": "k", "queue": 5}', '22023',
        'jobs[2]: field "queue" must be a string'),
    ('{"kind": null}', '22023', 'jobs[2]: field "kind" must be a string'), ('{"kind": "k", "queue": null}', '22023',
        'jobs[2]: field "queue" must be a string'),
    ('{"kind": "k", "quueue": "x"}', '22023', 'jobs[2]: %unknown option quueue%'), ('{"kind": "k", "tags": []}', '22023',
        'jobs[2]: %unknown option tags%'),
    ('{"kind": "k", "priority": 5}', '23514', 'jobs[2]: field "priority" is 5'), ('{"kind": "k", "priority": 1.5}', '22023',
        'jobs[2]: option "priority"%'),
    ('{"kind": "k", "priority": "2"}', '22023', 'jobs[2]: option "priority"%'), ('{"kind": "k", "priority": 1e20}', '22023',
        'jobs[2]: option "priority"%'),
    ('{"kind": "k", "max_attempts": 0}', '23514', 'jobs[2]: field "max_attempts" is 0'), ('{"kind": "k", "max_attempts": 2.5}', '22023',
        'jobs[2]: option "max_attempts"%'),
    ('{"kind": "k", "run_at": "2030-01-31T12:00:00"}', '22023', 'jobs[2]: field "run_at"%'), ('{"kind": "k", "run_at": "infinity"}', '22023',
        'jobs[2]: field "run_at"%'),
    ('{"kind": "k", "run_at": "2030-02-30T12:00:00Z"}', '22023', 'jobs[2]: field "run_at"%'), ('{"kind": "k", "run_at": "2030-01-31T12:00:00+99"}', '22023',
        'jobs[2]: field "run_at"%'),
    ('{"kind": "k", "run_at": "tomorrow"}', '22023', 'jobs[2]: field "run_at"%'), ('{"kind": "k", "run_at": 1893456000}', '22023',
        'jobs[2]: field "run_at"%'),
    ('{"kind": "k", "opts": 5}', '22023', 'jobs[2]: field "opts" must be%'), ('{"kind": "k", "opts": {"x": 1}}', '22023',
        'jobs[2]: %unknown option x%'),
    ('{"kind": "k", "opts": {"unique": {"by": 1}}}', '22023', 'jobs[2]: option "by" of "unique"%'), ('{"kind": "k", "opts": {"delay_seconds": "abc"}}', '22023',
        'jobs[2]: option "delay_seconds"%'),
    ('{"kind": "k", "opts": {"delay_seconds": 1e300}}', '22023', 'jobs[2]: option "delay_seconds"%'),
    ('{"kind": "k", "run_at": "2030-01-31T12:00:00Z", "opts": {"delay_seconds": 1}}', '22023', 'jobs[2]: %exclude each other%')
) v (item, state, pattern);
SELECT test.refuses($$ SELECT awa.insert_jobs('{"kind": "k"}') $$,
    '22023', 'field "jobs" must be a JSON array', 'jobs come in an array');
SELECT test.refuses($$ SELECT awa.insert_jobs(NULL) $$, '22023', 'field "jobs" must be a JSON array', 'NULL is no array');
SELECT test.refuses($$ SELECT awa.insert_jobs('[]', '{"x": 1}') $$,
    '22023', '%unknown option x%', 'unknown options of the call are refused');
SELECT is((awa.queue_counts('no'))::text, '(no,0,0,0,0,0,0,0,0,0)', 'one bad item fails the whole call with nothing enqueued');

-- insert_many
SELECT results_eq($$
    SELECT j.args, j.kind, j.queue, j.priority, j.max_attempts, j.tags FROM awa.insert_many('m', ARRAY['{"n": 1}', '[2]', 'null', '"4"']::jsonb[], 'many', 3, 7,
        opts => '{"tags": ["t"]}') WITH ORDINALITY r (id, o), LATERAL awa.job(r.id) j ORDER BY r.o $$,
    $$ SELECT a::jsonb, 'm', 'many', 3, 7, '{t}'::text[] FROM unnest(ARRAY['{"n": 1}', '[2]', 'null', '"4"']) a $$,
    'insert_many returns an id per element, in order');
SELECT results_eq($$ SELECT c.args FROM test.claim('many') c $$, $$ VALUES ('{"n": 1}'::jsonb), ('[2]'), ('null'), ('"4"') $$,
    'and the jobs run in that order');
SELECT is_empty($$ SELECT awa.insert_many('m', '{}') $$, 'an empty array inserts nothing');
SELECT is((SELECT count(DISTINCT r) FROM awa.insert_many('m', array_fill('{}'::jsonb, ARRAY[1000]), 'many') r), 1000::bigint,
    'a thousand jobs are a thousand ids');
SELECT results_eq($$ SELECT j.state, j.args FROM awa.insert_many('m', ARRAY['1', '2']::jsonb[], 'later', run_at => '2999-01-01Z') WITH ORDINALITY r (id, o),
                     LATERAL awa.job(r.id) j ORDER BY r.o $$,
    $$ VALUES ('scheduled', '1'::jsonb), ('scheduled', '2') $$, 'a future run_at defers all of them, in order');
SELECT is((SELECT count(*) FROM awa.insert_many('m', ARRAY['1', '2']::jsonb[], 'later', opts => '{"delay_seconds": 9}') r, LATERAL awa.job(r) j WHERE j.state = 'scheduled'),
    2::bigint, 'and so does a delay');
SELECT test.refuses(format('SELECT awa.insert_many(%s)', v.arguments), v.state, v.pattern, 'refused: ' || left(v.arguments, 70))
FROM (VALUES
    ('''k'', NULL', '22023', 'field "args" must be a one-dimensional array'), ('''k'', ARRAY[[''1''], [''2'']]::jsonb[]', '22023',
        'field "args"%'),
    ('''k'', array_fill(''{}''::jsonb, ARRAY[499]) || NULL::jsonb || ''{}''::jsonb, ''no''', '22023',
        'field "args[500]" must not be NULL'),
    ('''k'', ARRAY[''{}'', to_jsonb(repeat(''x'', 1048576))]::jsonb[], ''no''', '23514', 'field "args[2]" has 1048578 bytes'),
    ('''k'', ARRAY[''1'']::jsonb[], ''no'', 5', '23514', 'field "priority" is 5'), ('''k'', ARRAY[''1'']::jsonb[], ''no'', opts => ''{"after": [1]}''', 'JQ007',
        'option "after"%'),
    ('NULL, ARRAY[''1'']::jsonb[]', '22023', 'field "kind"%'), ('''k'', ARRAY[''1'']::jsonb[], ''no'', run_at => ''infinity''', '22023',
        'field "run_at"%'),
    ('''k'', ARRAY[''1'']::jsonb[], ''no'', opts => NULL', '22023', 'field "opts"%'), ('''k'', ARRAY[''1'']::jsonb[], ''no'', max_attempts => 0', '23514',
        'field "max_attempts"%')
) v (arguments, state, pattern);
SELECT is((awa.queue_counts('no'))::text, '(no,0,0,0,0,0,0,0,0,0)', 'one bad element fails the whole call with nothing enqueued');

SELECT * FROM finish();
