-- Case b10: who is rescued, who never is, and what becomes of the job. Time moves by p_now.
\ir ../support.psql
SELECT * FROM no_plan();

-- Stores two heartbeats, as if they came at these distances from now, with what was held.
CREATE FUNCTION test.beat(p_worker integer, p_before interval, p_last interval, p_held_before bigint[] DEFAULT NULL, p_held bigint[] DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM awa._register_instance(test.worker(p_worker), '{}', clock_timestamp());
    UPDATE awa.runtime_instances SET heartbeat_before_at = clock_timestamp() + p_before, heartbeat_at = clock_timestamp() + p_last, suspect_at = NULL,
        held_before = CASE WHEN p_held_before IS NOT NULL THEN awa._to_set(p_held_before) END,
        held = CASE WHEN p_held IS NOT NULL THEN awa._to_set(p_held) END WHERE instance_id = test.worker(p_worker);
END $$;
ALTER FUNCTION test.beat(integer, interval, interval, bigint[], bigint[]) OWNER TO awa_owner;

-- An instance that never beat.
SELECT test.start('never') AS job \gset
SELECT is(test.rescue('80 s'), 0::bigint, 'an attempt whose worker never beat is not rescued before staleness');
SELECT is(test.rescue('100 s'), 1::bigint, 'and rescued after it');
SELECT results_eq(format('SELECT j.state, j.attempt, j.run_lease, j.errors #>> ''{0,error}'' FROM test.info(%L) j', :'job'),
    $$ VALUES ('retryable', 1, 1::bigint, 'no heartbeat since the claim: worker presumed dead') $$,
        'the job is retryable, charged, with the reason');
SELECT is(test.rescue('100 s'), 0::bigint, 'an attempt is rescued once');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'the old worker''s completion is stale');
SELECT is((awa.queue_counts('never'))::text, '(never,0,0,0,0,1,0,0,0,0)', 'and changes nothing');

-- A healthy worker.
SELECT test.start('healthy', '{}', 25, 2) AS job \gset
SELECT awa.heartbeat(test.worker(2)) \g /dev/null
SELECT is(test.rescue('80 s'), 0::bigint, 'a healthy attempt is not rescued');
SELECT test.beat(2, '590 s', '600 s') \g /dev/null
SELECT is(test.rescue('610 s'), 0::bigint, 'nor after ten minutes of healthy heartbeats');
SELECT is(test.status(:'job'), 'open', 'it still runs');
SELECT is(test.finish(:'job', 'completed', p_worker => 2), 'done', 'until it ends');

-- Silence: suspect, then dead.
SELECT test.start('silent', '{}', 25, 3) AS job \gset
SELECT awa.heartbeat(test.worker(3)) \g /dev/null
SELECT is(test.rescue('95 s'), 0::bigint, 'silence makes an instance suspect, no more');
SELECT is(test.rescue('100 s'), 0::bigint, 'until it stays silent for another interval');
SELECT awa.heartbeat(test.worker(3)) \g /dev/null
SELECT is(test.rescue('106 s'), 0::bigint, 'a heartbeat ends the suspicion');
SELECT is(test.rescue('115 s'), 0::bigint, 'which starts from the beginning');
SELECT is(test.rescue('117 s'), 1::bigint, 'an instance that stays silent for the interval after is dead');
SELECT is((test.info(:'job')).errors #>> '{0,error}', 'heartbeat stale: worker presumed dead', 'with the reason');
SELECT is(test.status(:'job'), 'rescued', 'attempt_status names the rescue');

-- Deadlines, also of a healthy worker.
SELECT test.start('d', '{"deadline_seconds": 20}', 25, 4) AS job \gset
SELECT test.start('d', '{}', 25, 4) AS other \gset
SELECT awa.heartbeat(test.worker(4)) \g /dev/null
SELECT is(test.rescue('19 s'), 0::bigint, 'before its deadline an attempt runs');
SELECT is(test.rescue('21 s'), 1::bigint, 'after it it is rescued, although its worker lives');
SELECT is((test.info(:'job')).errors #>> '{0,error}', 'hard deadline exceeded', 'with the reason');
SELECT is(test.status(:'other'), 'open', 'an attempt without a deadline is not');

-- Lost receipts.
SELECT test.start('lost', '{}', 25, 5) AS job \gset
SELECT test.start('lost', '{}', 25, 5) AS kept \gset
SELECT test.beat(5, '-10 s', '20 s', '{}', '{}') \g /dev/null
SELECT is(test.rescue('21 s'), 0::bigint, 'a claim is not missed by a heartbeat that came before it');
SELECT test.beat(5, '10 s', '20 s', NULL, '{}') \g /dev/null
SELECT is(test.rescue('21 s'), 0::bigint, 'a heartbeat that holds everything misses nothing');
SELECT test.beat(5, '10 s', '20 s', ARRAY[(:'kept'::jsonb ->> 'position')::bigint], ARRAY[(:'job'::jsonb ->> 'position')::bigint, (:'kept'::jsonb ->> 'position')::bigint]) \g /dev/null
SELECT is(test.rescue('21 s'), 0::bigint, 'what the later of two heartbeats holds is not lost');
SELECT test.beat(5, '10 s', '20 s', ARRAY[(:'job'::jsonb ->> 'position')::bigint, (:'kept'::jsonb ->> 'position')::bigint], ARRAY[(:'kept'::jsonb ->> 'position')::bigint]) \g /dev/null
SELECT is(test.rescue('21 s'), 0::bigint, 'nor what the earlier one holds');
SELECT test.beat(5, '10 s', '20 s', ARRAY[(:'kept'::jsonb ->> 'position')::bigint], ARRAY[(:'kept'::jsonb ->> 'position')::bigint]) \g /dev/null
SELECT is(test.rescue('21 s'), 1::bigint, 'an attempt that two heartbeats in a row do not hold is lost');
SELECT results_eq(format('SELECT test.status(%L), test.status(%L)', :'job', :'kept'), $$ VALUES ('rescued', 'open') $$,
    'its neighbour is not');

-- Exhaustion.
SELECT test.start('max', '{}', 1, 6) AS job \gset
SELECT cmp_ok(test.rescue('1 hour'), '>=', 1::bigint, 'a rescue at the last attempt');
SELECT results_eq(format('SELECT j.state, j.reason, j.attempt FROM test.info(%L) j', :'job'), $$ VALUES ('failed', 'rescued_out', 1) $$,
    'ends the job');
SELECT is(test.status(:'job'), 'rescued', 'the attempt is rescued all the same');

-- The sweep is not stopped by what it may not rescue.
CREATE FUNCTION test.claim_many(p_queue text, p_count integer, p_worker integer) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[p_count]), p_queue);
    RETURN (SELECT count(*) FROM test.claim(p_queue, p_count, '{"separate": ["k"]}', p_worker));
END $$;
SELECT is(test.claim_many('alive', 150, 7), 150::bigint, '150 healthy attempts');
SELECT is(test.claim_many('dead', 5, 8), 5::bigint, 'and 5 dead ones behind them');
SELECT test.beat(7, '190 s', '199 s') \g /dev/null
SELECT is(test.rescue('200 s', 3), 3::bigint, 'a step rescues so many at most');
SELECT is(test.rescue('200 s', 100), 2::bigint, 'all dead ones are found in two steps');
SELECT is((awa.queue_counts('alive')).running, 150::bigint, 'no healthy one was touched');

-- One that cannot be stored. The constraint is the test's.
SELECT awa.insert_job(CASE i WHEN 4 THEN 'poison' ELSE 'k' END, queue => 'bad') FROM generate_series(1, 8) i \g /dev/null
SELECT count(*) FROM test.claim('bad', 10, '{}', 9) \g /dev/null
ALTER TABLE awa.deferred_jobs ADD CONSTRAINT test_check CHECK (kind <> 'poison');
SET client_min_messages = error;
SELECT is(test.rescue('150 s', 100), 8::bigint, 'an attempt that cannot be stored does not hold up the others');
SELECT results_eq($$ SELECT c.retryable, c.running, c.failed FROM awa.queue_counts('bad') c $$,
    $$ VALUES (7::bigint, 0::bigint, 1::bigint) $$, 'and ends failed');
SELECT ok(bool_and(j.reason LIKE 'rescue failed: %test_check%'), 'with the reason')
FROM awa.jobs j WHERE j.kind = 'poison' AND j.state = 'failed';
ALTER TABLE awa.deferred_jobs DROP CONSTRAINT test_check;
SELECT is(test.rescue('150 s', 100), 0::bigint, 'nothing is left to rescue');

-- Every attempt is looked at once a heartbeat interval, those whose deadline passes at once.
SELECT test.start('cadence', '{"deadline_seconds": 15}', p_worker => 10) AS overdue,
       test.start('cadence', p_worker => 11) AS silent, now() AS at \gset
SELECT is(awa._rescue_attempts(100, :'at'::timestamptz + interval '11 seconds'), 0::bigint, 'a look at all');
SELECT is(awa._rescue_attempts(100, :'at'::timestamptz + interval '16 seconds'), 1::bigint, 'a deadline passes in between');
SELECT is(test.status(:'overdue'::jsonb), 'rescued', 'and is not missed');
SELECT test.beat(7, '85 s', '95 s') \g /dev/null
SELECT is(awa._rescue_attempts(100, :'at'::timestamptz + interval '95 seconds'), 1::bigint, 'the next look at all');
SELECT test.start('cadence', p_worker => 12) AS silent \gset
SELECT is(awa._rescue_attempts(100, :'at'::timestamptz + interval '96 seconds'), 0::bigint, 'is not repeated at once');
SELECT test.beat(7, '185 s', '195 s') \g /dev/null
SELECT cmp_ok(awa._rescue_attempts(100, :'at'::timestamptz + interval '195 seconds'), '>=', 1::bigint, 'but in its time');
SELECT is(test.status(:'silent'::jsonb), 'rescued', 'and the silent one is found');
SELECT is(awa._rescue_attempts(100, :'at'::timestamptz), 0::bigint, 'a clock that goes back does no harm');

SELECT results_eq($$ SELECT t.step, t.outcome, t.rows FROM awa.tick('{"steps": ["rescue"]}') t $$,
    $$ VALUES ('rescue', 'done', 0::bigint) $$, 'tick reports how many it rescued');

SELECT * FROM finish();
