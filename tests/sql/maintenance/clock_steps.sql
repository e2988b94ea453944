-- The clock is set back by a day, or forward: what was written before lies ahead, and nothing waits for it.
\ir ../support.psql
SELECT * FROM no_plan();

-- Sets the clock back: all times that are stored here are later than they were.
CREATE PROCEDURE test.set_back(p_by interval) LANGUAGE sql AS $$
    UPDATE awa.runtime_instances SET started_at = started_at + p_by, heartbeat_at = heartbeat_at + p_by,
        heartbeat_before_at = heartbeat_before_at + p_by, suspect_at = suspect_at + p_by;
    UPDATE awa.lease_claim_batches SET claimed_at = claimed_at + p_by;
    UPDATE awa.ready_entries SET run_at = run_at + p_by;
    UPDATE awa.queue_ring_rotations SET rotated_at = rotated_at + p_by;
    UPDATE awa.claim_ring_rotations SET rotated_at = rotated_at + p_by;
    UPDATE awa.queue_meta SET drained_until = drained_until + p_by;
$$;
CREATE FUNCTION test.holds(p_job jsonb) RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_build_array(jsonb_build_object('claim_slot', p_job -> 'claim_slot', 'batch_id', p_job -> 'batch_id',
                                                'positions', jsonb_build_array(p_job -> 'position'))) $$;

-- Set back: who lives, and who does not.
SELECT test.start('q', p_worker => 1) AS running, test.start('q', p_worker => 2) AS silent,
       test.start('q', p_worker => 3) AS unborn \gset
SELECT awa.heartbeat(test.worker(1)), awa.heartbeat(test.worker(2)) \g /dev/null
SELECT is(test.rescue('100 s'), 1::bigint, 'an owner that never beat is given up');
SELECT test.start('q', p_worker => 3) AS unborn \gset
CALL test.set_back('1 day');
SELECT bag_eq($$ SELECT i.is_live FROM awa.instances i $$, '{f,f,f}'::boolean[], 'a heartbeat that lies ahead tells nothing');
SELECT awa.heartbeat(test.worker(1), test.holds(:'running')) \g /dev/null
SELECT is((SELECT i.heartbeat_at <= clock_timestamp() AND i.is_live FROM awa.instances i WHERE i.instance_id = test.worker(1)),
    true, 'a worker lives with its first heartbeat after that');
SELECT is(test.rescue('0 s'), 1::bigint, 'an attempt of before, of an owner that never beat, is rescued');
SELECT is(test.status(:'unborn'), 'rescued', 'that one');
SELECT is(test.rescue('9 s'), 0::bigint, 'who was suspected before is suspected anew');
SELECT is(test.rescue('11 s'), 1::bigint, 'and dead one interval later, not a day later');
SELECT results_eq(format('SELECT test.status(%L), test.status(%L)', :'running', :'silent'), $$ VALUES ('open', 'rescued') $$,
    'the other one goes on');
SELECT is(test.finish(:'running', 'completed'), 'done', 'and ends as ever');

-- Set back: attempts of a worker that lives are its own, before and after.
SELECT awa.set_setting('heartbeat_seconds', '0.05') \g /dev/null
SELECT awa.heartbeat(test.worker(4), '[]') \g /dev/null
SELECT pg_sleep(0.06) \g /dev/null
SELECT awa.heartbeat(test.worker(4), '[]') \g /dev/null
SELECT test.start('q', p_worker => 4) AS held, test.start('q', p_worker => 4) AS lost \gset
CALL test.set_back('1 day');
SELECT test.start('q', p_worker => 4) AS fresh \gset
SELECT is(test.rescue('0 s'), 0::bigint, 'what is claimed now is not missed by heartbeats of before');
SELECT awa.heartbeat(test.worker(4), test.holds(:'held') || test.holds(:'fresh')) \g /dev/null
SELECT test.start('q', p_worker => 4) AS fresher \gset
SELECT is(test.rescue('0 s'), 0::bigint, 'nor by one heartbeat of now');
SELECT pg_sleep(0.06) \g /dev/null
SELECT awa.heartbeat(test.worker(4), test.holds(:'held') || test.holds(:'fresh') || test.holds(:'fresher')) \g /dev/null
SELECT is(test.rescue('0 s'), 1::bigint, 'what was claimed before, and two heartbeats of now do not hold, is lost');
SELECT results_eq(format('SELECT test.status(j) FROM unnest(%L::jsonb[]) j', ARRAY[:'held', :'lost', :'fresh', :'fresher']::jsonb[]),
    $$ VALUES ('open'), ('rescued'), ('open'), ('open') $$, 'and nothing else');
SELECT awa.set_setting('heartbeat_seconds', NULL) \g /dev/null

-- Set back: rings, drains, the doorbell, changes.
SELECT is(test.step('plan_' || r), 'planned', format('the %s ring turns', r)) FROM unnest('{queue,claim}'::text[]) r;
SELECT is(test.step('publish_queue'), 'published', 'as ever');
SELECT is(test.step('publish_claim'), 'published', 'both');
SELECT test.start('q') AS job \gset
SELECT is(test.step('plan_' || r), 'not_due', format('a young %s slot is not left', r)) FROM unnest('{queue,claim}'::text[]) r;
CALL test.set_back('1 day');
SELECT is(test.step('plan_' || r), 'planned', format('one whose age nobody knows is, %s', r)) FROM unnest('{queue,claim}'::text[]) r;

SELECT awa.insert_many('k', '{1,2}', 'left') \g /dev/null
SELECT awa.drain_queue('left', '{"limit": 1}') \g /dev/null
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{left}', 'a queue is drained');
CALL test.set_back('1 day');
SELECT is((awa.heartbeat(test.worker(1))).drained_queues, '{}', 'not for a day');

SELECT setval(awa._doorbell('q'), (extract(epoch FROM clock_timestamp() + interval '1 day') * 1000)::bigint) \g /dev/null
SELECT awa.claim_status('q', true) \g /dev/null
SELECT cmp_ok(pg_sequence_last_value(awa._doorbell('q')), '<',
    (extract(epoch FROM clock_timestamp() + interval '3 s') * 1000)::bigint, 'who goes to sleep sets the flag right');
SELECT cmp_ok(pg_sequence_last_value(awa._doorbell('q')), '>', (extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    'to a time to come');

SELECT (awa.insert_job('k', queue => 'changed')).job_id AS changed \gset
CALL test.set_back('1 day');
SELECT is(awa.update_job(:changed, '{"priority": 1}')::text, 'available', 'a job that is due stays so when it is changed');

-- Set back: an attempt that keeps a slot is moved when slots are short.
SELECT test.start('long') AS long \gset
CREATE FUNCTION test.evacuate(p_job jsonb) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM awa._evacuate_attempts('claim', (p_job ->> 'claim_slot')::integer, 10, clock_timestamp());
    RETURN (SELECT count(*) FROM awa.leases l WHERE l."position" = (p_job ->> 'position')::bigint);
END $$;
SELECT is(test.evacuate(:'long'), 0::bigint, 'a young attempt is not moved');
CALL test.set_back('1 day');
SELECT is(test.evacuate(:'long'), 1::bigint, 'one whose age nobody knows is');

-- Forward: whoever lives says so before it is forgotten.
CREATE FUNCTION test.forget(p_later interval) RETURNS bigint LANGUAGE sql AS
    $$ SELECT awa._forget_instances(clock_timestamp() + p_later) $$;
SELECT awa.register_instance(test.worker(9), '{"kinds": ["k"]}'), awa.heartbeat(test.worker(9)) \g /dev/null
SELECT is(test.forget('2 days'), 0::bigint, 'nobody is forgotten because the clock was set forward');
SELECT test.rescue('2 days') \g /dev/null
SELECT is(test.forget('2 days'), 0::bigint, 'nor when it is suspect');
SELECT cmp_ok(test.forget('2 days 11 s'), '>=', 1::bigint, 'but when it stays silent');
SELECT is_empty($$ SELECT FROM awa.instances i WHERE i.instance_id = test.worker(9) $$, 'that one');

SELECT * FROM finish();
