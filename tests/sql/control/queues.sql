-- Queues: options, pause, shards.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT lives_ok($$ SELECT awa.declare_queue('q') $$, 'a queue can be declared without options');
SELECT results_eq(
    $$ SELECT q.enqueue_shards, q.strict_fifo, q.notify, q.dlq, q.aging_seconds, q.deadline_seconds, q.paused_at, q.lanes FROM awa.queues q WHERE q.queue = 'q' $$,
    $$ VALUES (1, false, true, false, 60::numeric, NULL::numeric, NULL::timestamptz, 1::bigint) $$,
        'an option that is not given has its default');
SELECT lives_ok($$ SELECT awa.declare_queue('q', '{"enqueue_shards": 4, "dlq": true, "aging_seconds": 5, "deadline_seconds": 9}') $$,
    'options can be changed later');
SELECT lives_ok($$ SELECT awa.declare_queue('q', '{"notify": false}') $$, 'one of them alone as well');
SELECT results_eq(
    $$ SELECT q.enqueue_shards, q.notify, q.dlq, q.aging_seconds, q.deadline_seconds, q.lanes FROM awa.queues q WHERE q.queue = 'q' $$,
    $$ VALUES (4, false, true, 5::numeric, 9::numeric, 4::bigint) $$, 'options that are not named keep their value');
SELECT lives_ok($$ SELECT awa.declare_queue('q', '{"deadline_seconds": null, "aging_seconds": null, "dlq": null}') $$,
    'null takes an option back');
SELECT results_eq($$ SELECT q.dlq, q.aging_seconds, q.deadline_seconds FROM awa.queues q WHERE q.queue = 'q' $$,
    $$ VALUES (false, 60::numeric, NULL::numeric) $$, 'and the default holds again');
SELECT lives_ok($$ SELECT awa.declare_queue('strict', '{"strict_fifo": true}') $$, 'a strict queue can be declared');
SELECT is((SELECT q.lanes FROM awa.queues q WHERE q.queue = 'strict'), 4::bigint,
    'a strict queue has the lanes of all priorities before its producers come');

SELECT test.refuses(format('SELECT awa.declare_queue(''q'', %L)', v.opts), v.state, v.pattern, 'declare_queue refuses ' || v.opts)
FROM (VALUES ('{"shards": 2}', '22023', '%unknown option shards%'), ('{"enqueue_shards": 0}', '22023',
    'option "enqueue_shards"%'),
             ('{"enqueue_shards": 65}', '22023', 'option "enqueue_shards"%'), ('{"enqueue_shards": 1.5}', '22023',
                 'option "enqueue_shards"%'),
             ('{"enqueue_shards": "2"}', '22023', 'option "enqueue_shards"%'), ('{"dlq": 1}', '22023', 'option "dlq"%'),
             ('{"notify": "no"}', '22023', 'option "notify"%'), ('{"strict_fifo": 0}', '22023', 'option "strict_fifo"%'),
             ('{"aging_seconds": -1}', '22023', 'option "aging_seconds"%'), ('{"deadline_seconds": 0}', '22023',
                 'option "deadline_seconds"%'),
             ('{"deadline_seconds": -5}', '22023', 'option "deadline_seconds"%'), ('[]', '22023',
                 'field "opts" must be a JSON object%'),
             ('{"unique": true}', '22023', '%unknown option%')) v (opts, state, pattern);
SELECT test.refuses($$ SELECT awa.declare_queue('q', NULL) $$, '22023', '%must be a JSON object%', 'NULL options are refused');
SELECT test.refuses($$ SELECT awa.declare_queue('') $$, '22023', 'field "queue"%', 'a queue has a name');
SELECT test.refuses($$ SELECT awa.declare_queue(NULL) $$, '22023', 'field "queue"%', 'a queue has a name that is not NULL');
SELECT test.refuses($$ SELECT awa.declare_queue(repeat('q', 201)) $$,
    '23514', 'field "queue" has 201 characters', 'a name has at most 200 characters');
SELECT ok(NOT EXISTS (SELECT FROM awa.queues q WHERE q.queue NOT IN ('q', 'strict')), 'a refused queue does not exist');

-- Pause.
SELECT is((awa.insert_job('k', queue => 'p')).state::text, 'available', 'a queue need not be declared');
SELECT is(awa.pause_queue('p'), true, 'a queue can be paused');
SELECT is(awa.pause_queue('p'), false, 'a second pause changes nothing');
SELECT is_empty($$ SELECT FROM test.claim('p') $$, 'nothing is claimed from a paused queue');
SELECT is((awa.claim_status('p')).reason, 'paused', 'claim_status says why');
SELECT is((awa.insert_job('k', queue => 'p')).state::text, 'available', 'a paused queue takes jobs');
SELECT ok((SELECT bool_and(d.paused) FROM awa.queue_depths() d WHERE d.queue = 'p'), 'queue_depths shows the pause');
SELECT is((awa.heartbeat(test.worker(1))).paused_queues, '{p}', 'workers hear of the pause by their heartbeat');
SELECT lives_ok($$ SELECT awa.declare_queue('p', '{"dlq": true}') $$, 'a paused queue can be declared');
SELECT isnt((SELECT q.paused_at FROM awa.queues q WHERE q.queue = 'p'), NULL, 'which does not resume it');
SELECT is(awa.resume_queue('p'), true, 'a paused queue can be resumed');
SELECT is(awa.resume_queue('p'), false, 'a second resume changes nothing');
SELECT is(awa.resume_queue('never seen'), false, 'an unknown queue is not paused');
SELECT is((SELECT count(*) FROM test.claim('p')), 2::bigint, 'what waited is claimed after resume');
SELECT test.refuses($$ SELECT awa.pause_queue(NULL) $$, '22023', 'field "queue"%', 'pause needs a queue');
SELECT test.refuses($$ SELECT awa.resume_queue(E'a\n') $$,
    '22023', 'field "queue" contains a control%', 'resume checks the name');

-- A queue that only waits, on time or on hold, is a queue.
SELECT is(awa.pause_queue('not used yet'), true, 'a queue can be paused before its first job');
SELECT isnt((SELECT q.paused_at FROM awa.queues q WHERE q.queue = 'not used yet'), NULL, 'and is listed from then on');
SELECT awa.insert_job('k', queue => 'deferred', run_at => now() + interval '1 hour') \g /dev/null
SELECT results_eq($$ SELECT q.enqueue_shards, q.lanes FROM awa.queues q WHERE q.queue = 'deferred' $$, $$ VALUES (1, 0::bigint) $$,
    'a queue with nothing but deferred jobs is listed');
SELECT awa.declare_queue('held', '{"dlq": true}') \g /dev/null
SELECT test.finish(test.start('held'), 'fail') \g /dev/null
DELETE FROM awa.queue_meta WHERE queue = 'held';
DELETE FROM awa.queue_lanes WHERE queue = 'held';
SELECT is((SELECT q.lanes FROM awa.queues q WHERE q.queue = 'held'), 0::bigint, 'and one with nothing but dead letters');

SELECT is(test.start('running') ->> 'attempt', '1', 'a job runs');
SELECT awa.pause_queue('running') \g /dev/null
SELECT is((awa.queue_counts('running')).running, 1::bigint, 'pause lets running attempts go on');

SELECT * FROM finish();
