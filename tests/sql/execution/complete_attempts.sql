-- complete_jobs and complete_job: success, once, by the owner of the attempt.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.complete_jobs(p_job jsonb, p_worker integer DEFAULT 1) RETURNS text LANGUAGE sql AS $$
    SELECT f.result FROM awa.complete_jobs(test.worker(p_worker), (p_job ->> 'claim_slot')::integer, (p_job ->> 'batch_id')::bigint, ARRAY[(p_job ->> 'position')::bigint]) f
$$;

SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[5]), 'q') \g /dev/null
CREATE TABLE test.claimed AS SELECT c.* FROM test.claim('q') c;
SELECT claim_slot, batch_id, array_agg("position" ORDER BY "position") AS positions FROM test.claimed GROUP BY 1, 2 \gset
SELECT results_eq(format('SELECT f.job_id, f.run_lease, f.result, f.reason FROM awa.complete_jobs(test.worker(1), %s, %s, %L::bigint[]) f', :claim_slot, :batch_id, (:'positions'::bigint[])[1:2]),
    $$ SELECT c.job_id, 1::bigint, 'done', NULL::text FROM test.claimed c ORDER BY c."position" LIMIT 2 $$,
        'one answer per position, in order');
SELECT results_eq(format('SELECT f.job_id, f.result FROM awa.complete_jobs(test.worker(1), %s, %s, %L::bigint[]) f', :claim_slot, :batch_id, (:'positions'::bigint[])[2:3]),
    $$ SELECT c.job_id, CASE WHEN row_number() OVER (ORDER BY c."position") = 2 THEN 'already_done' ELSE 'done' END FROM test.claimed c ORDER BY c."position" LIMIT 2 OFFSET 1 $$,
    'a repeated completion is already done, and a new one beside it is done');
SELECT results_eq(format('SELECT f.result FROM awa.complete_jobs(test.worker(2), %s, %s, %L::bigint[]) f', :claim_slot, :batch_id, (:'positions'::bigint[])[4:5]),
    $$ VALUES ('stale'), ('stale') $$, 'a worker cannot complete another one''s jobs');
SELECT results_eq(format('SELECT f.job_id, f.result FROM awa.complete_jobs(test.worker(1), %s, %s, ARRAY[1, 2]) f', :claim_slot, :batch_id),
    $$ VALUES (NULL::bigint, 'stale'), (NULL, 'stale') $$, 'positions that are not in the batch are stale');
SELECT is((SELECT f.result FROM awa.complete_jobs(test.worker(1), v.slot, v.batch, ARRAY[1::bigint]) f), 'stale', format('batch %s in slot %s is stale', v.batch, v.slot))
FROM (VALUES (0, 999999::bigint), (7, 1), (8, 1), (-1, 1), (2147483647, 1), (0, -1)) v (slot, batch);
SELECT is((SELECT f.result FROM awa.complete_jobs(test.worker(1), :claim_slot, :batch_id, '{9223372036854775807}') f), 'stale',
    'the largest number is no position');
SELECT results_eq(format('SELECT f.result FROM awa.complete_jobs(test.worker(1), %s, %s, %L::bigint[] || 9223372036854775807) f', :claim_slot, :batch_id, (:'positions'::bigint[])[1:1]),
    $$ VALUES ('already_done'), ('stale') $$, 'also beside one that is');
SELECT is_empty(format('SELECT FROM awa.complete_jobs(test.worker(1), %s, %s, ''{}'')', :claim_slot, :batch_id),
    'no positions, no answers');
SELECT results_eq($$ SELECT c.completed, c.running FROM awa.queue_counts('q') c $$, $$ VALUES (3::bigint, 2::bigint) $$,
    'exactly the completed ones are counted');
SELECT is((SELECT j.state FROM awa.job((:'positions'::bigint[])[1]) j), 'completed', 'a completed job is completed');
SELECT results_eq(format('SELECT j.attempt, j.run_lease, j.finalized_at >= j.attempted_at, j.errors FROM awa.job(%s) j', (:'positions'::bigint[])[1]),
    $$ VALUES (1, 1::bigint, true, NULL::jsonb) $$, 'with its attempt and times');
SELECT test.refuses(format('SELECT awa.complete_jobs(%s)', v.arguments), '22023', 'fields "instance_id"%', 'refused: ' || v.arguments)
FROM (VALUES ('NULL, 0, 1, ''{1}'''), ('test.worker(1), NULL, 1, ''{1}'''), ('test.worker(1), 0, NULL, ''{1}'''), ('test.worker(1), 0, 1, NULL'), ('test.worker(1), 0, 1, ''{1,NULL}''')) v (arguments);
SELECT test.refuses('SELECT awa.complete_jobs(test.worker(1), 0, 1, ''{{1,2},{3,4}}'')', '22023', 'field "positions"%', 'positions are a list');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses($$ SELECT awa.complete_jobs(test.worker(1), 0, 1, '{1}') $$,
    '25001', '%READ COMMITTED%', 'complete_jobs needs READ COMMITTED');
COMMIT;

-- Positions that are given several times, of jobs with options.
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[2]), 'twice', opts => '{"tags": ["t"]}') \g /dev/null
SELECT claim_slot AS slot, batch_id AS batch, array_agg("position" ORDER BY "position") AS twice FROM test.claim('twice') GROUP BY 1, 2 \gset
SELECT results_eq(format('SELECT f.job_id, f.result FROM awa.complete_jobs(test.worker(1), %s, %s, %L::bigint[] || %3$L::bigint[]) f', :slot, :batch, :'twice'),
    format('SELECT j, ''done'' FROM unnest(%L::bigint[] || %1$L::bigint[]) j', :'twice'), 'each of them gets one answer');

-- A stale attempt cannot complete the job.
SELECT test.start('r') AS first \gset
SELECT is(test.finish(:'first', 'retry', '{"delay_seconds": 0}'), 'done', 'an attempt is retried');
SELECT is(test.promote('r'), 1::bigint, 'its job is promoted');
SELECT test.claim_one('r') AS second \gset
SELECT is(:'second'::jsonb ->> 'run_lease', '2', 'the next attempt has the next lease');
SELECT is(test.complete_jobs(:'first'), 'stale', 'a stale attempt cannot complete the job');
SELECT test.refuses(format('SELECT test.complete(%L)', :'first'), 'JQ001', 'attempt with lease 1 of job % is no longer current',
    'a stale attempt cannot complete the job in a transaction either');
SELECT is(test.state(:'second'::jsonb), 'running', 'the job still runs');
SELECT is(test.complete_jobs(:'second'), 'done', 'the current attempt can');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease FROM awa.job(%s) j', :'second'::jsonb ->> 'job_id'), $$ VALUES ('completed', 2, 2::bigint) $$,
    'it ended at attempt 2');

-- complete_job
CREATE TABLE test.business (note text);
SELECT test.start('own', '{"keep_result": true}') AS job \gset
BEGIN;
INSERT INTO test.business VALUES ('rolled back');
SELECT is((test.complete(:'job')).outcome, 'completed', 'an attempt is completed in the application''s transaction');
ROLLBACK;
SELECT is(test.status(:'job'), 'open', 'a rollback takes the completion back');
BEGIN;
INSERT INTO test.business VALUES ('kept');
SELECT results_eq(format('SELECT r.job_id::text, r.run_lease, r.outcome, r.batch_id::text FROM test.complete(%L, ''{"result": {"r": 1}}'') r', :'job'),
    format($$ VALUES (%L, 1::bigint, 'completed', %L) $$,
        :'job'::jsonb ->> 'job_id', :'job'::jsonb ->> 'batch_id'), 'the receipt repeats the token');
COMMIT;
SELECT results_eq(format('SELECT j.state, j.result FROM awa.job(%s) j', :'job'::jsonb ->> 'job_id'), $$ VALUES ('completed', '{"r": 1}'::jsonb) $$,
    'job and result are kept with the commit');
SELECT is((SELECT string_agg(note, ',') FROM test.business), 'kept', 'and so are the business rows');
SELECT test.refuses(format('SELECT test.complete(%L)', :'job'), 'JQ001', '%no longer current',
    'a completed attempt cannot complete the job again');
SELECT is(test.complete_jobs(:'job'), 'already_done', 'complete_jobs says that it is done already');

SELECT test.start('nokeep') AS job \gset
SELECT is((test.complete(:'job', '{"result": 5}')).outcome, 'completed', 'a result may be given');
SELECT is((test.info(:'job')).result, NULL, 'it is dropped unless the job asked to keep it');
SELECT test.start('wrong') AS job \gset
SELECT test.refuses(format('SELECT test.complete(%L::jsonb || %L)', :'job', v.change), 'JQ001', '%no longer current', 'a wrong token is stale: ' || v.change)
FROM (VALUES ('{"job_id": 5}'), ('{"run_lease": 2}'), ('{"run_lease": 0}'), ('{"claim_slot": 7}'), ('{"claim_slot": 99}'), ('{"claim_slot": -1}'), ('{"batch_id": 999999}'), ('{"position": 7}'), ('{"position": 9223372036854775807}')) v (change);
SELECT test.refuses(format('SELECT test.complete(%L::jsonb || %L)', :'job', v.change), '22023', 'fields "job_id"%', 'an incomplete token is refused: ' || v.change)
FROM (VALUES ('{"job_id": null}'), ('{"run_lease": null}'), ('{"claim_slot": null}'), ('{"batch_id": null}'), ('{"position": null}')) v (change);
SELECT test.refuses(format('SELECT test.complete(%L, %L)', :'job', v.opts), '22023', v.pattern, 'opts are checked: ' || v.opts)
FROM (VALUES ('{"results": 1}', '%unknown option results%'), ('[]', 'field "opts" must be%')) v (opts, pattern);
SELECT is(test.status(:'job'), 'open', 'none of these changed anything');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT is((test.complete(:'job')).outcome, 'completed', 'complete_job works in the application''s isolation level');
COMMIT;

-- What savepoints do to it. Each is written down in docs/sql-contract.md.
TRUNCATE test.business;
SELECT test.start('own') AS job \gset
BEGIN;
SAVEPOINT mine;
INSERT INTO test.business VALUES ('released');
SELECT test.complete(:'job') \g /dev/null
RELEASE SAVEPOINT mine;
COMMIT;
SELECT is(test.status(:'job'), 'completed', 'a completion in a released savepoint counts');
SELECT test.start('own') AS job \gset
BEGIN;
INSERT INTO test.business VALUES ('by itself');
SAVEPOINT mine;
SELECT test.complete(:'job') \g /dev/null
ROLLBACK TO SAVEPOINT mine;
COMMIT;
SELECT is(test.status(:'job'), 'open', 'a savepoint that is rolled back takes the completion back, and leaves the rows before it');
BEGIN;
SAVEPOINT mine;
SELECT test.complete(:'job') \g /dev/null
ROLLBACK TO SAVEPOINT mine;
INSERT INTO test.business VALUES ('again');
SELECT is((test.complete(:'job')).outcome, 'completed', 'after it the same transaction can complete');
COMMIT;
SELECT is(test.status(:'job'), 'completed', 'and does');
CREATE FUNCTION test.swallow(p_job jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO test.business VALUES ('of a stale attempt');
    BEGIN
        PERFORM test.complete(p_job);
    EXCEPTION WHEN SQLSTATE 'JQ001' THEN
        RETURN SQLSTATE;
    END;
END $$;
SELECT is(test.swallow(:'job'), 'JQ001', 'an EXCEPTION block hides that an attempt is stale');
SELECT set_eq('SELECT note FROM test.business', $$ VALUES ('released'), ('by itself'), ('again'), ('of a stale attempt') $$, 'and keeps its rows');

-- The unique key goes with the job, and comes back with a rollback.
SELECT test.start('own', '{"unique": {"key": "00000000000000000000000000000001", "states": ["available", "running"]}}') AS job \gset
CREATE FUNCTION test.again(p_queue text) RETURNS boolean LANGUAGE sql AS $$
    SELECT (awa.insert_job('k', queue => p_queue, opts => '{"unique": {"key": "00000000000000000000000000000001", "states": ["available", "running"]}}')).duplicate
$$;
BEGIN;
SELECT test.complete(:'job') \g /dev/null
SELECT is(test.again('next'), false, 'with the completion the key is free, for the same transaction first');
ROLLBACK;
SELECT is(test.again('next'), true, 'a rollback gives it back');
SELECT test.complete(:'job') \g /dev/null
SELECT is(test.again('next'), false, 'a commit frees it');

-- The caller needs the right on this one function, and its own on its own rows.
DROP ROLE IF EXISTS awa_test_handler;
CREATE ROLE awa_test_handler;
GRANT USAGE ON SCHEMA awa, test TO awa_test_handler;
GRANT EXECUTE ON FUNCTION awa.complete_job(bigint, bigint, integer, bigint, bigint, jsonb) TO awa_test_handler;
GRANT INSERT ON test.business TO awa_test_handler;
SELECT test.start('own') AS job \gset
SET ROLE awa_test_handler;
BEGIN;
INSERT INTO test.business VALUES ('of a plain role');
SELECT is((test.complete(:'job')).outcome, 'completed', 'EXECUTE on complete_job is all it takes');
COMMIT;
SELECT throws_ok('SELECT awa.version()', '42501', NULL, 'and all there is');
RESET ROLE;
SELECT is(test.status(:'job'), 'completed', 'it is completed');
DROP OWNED BY awa_test_handler;
DROP ROLE awa_test_handler;

SELECT * FROM finish();
