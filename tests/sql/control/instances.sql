-- Worker processes: registration, heartbeats and what they answer.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT lives_ok($$ SELECT awa.register_instance(test.worker(1), '{"host": "a"}') $$, 'a worker registers');
SELECT results_eq($$ SELECT i.instance_id, i.info, i.heartbeat_at, i.is_live FROM awa.instances i $$,
    $$ VALUES (test.worker(1), '{"host": "a"}'::jsonb, NULL::timestamptz, false) $$, 'it is known, and not live before it beat');
SELECT lives_ok($$ SELECT awa.register_instance(test.worker(1), '{"host": "b"}') $$, 'it registers again');
SELECT is((SELECT i.info FROM awa.instances i), '{"host": "b"}'::jsonb, 'which replaces the description');
SELECT test.refuses(format('SELECT awa.register_instance(%s)', v.arguments), v.state, v.pattern, 'refused: ' || left(v.arguments, 50))
FROM (VALUES ('NULL', '22023', 'field "instance_id" must not be NULL'), ('test.worker(1), NULL', '22023',
    'field "info" must not be NULL'),
             ('test.worker(1), to_jsonb(repeat(''x'', 70000))', '23514', 'field "info" has%')) v (arguments, state, pattern);

SELECT results_eq($$ SELECT h.* FROM awa.heartbeat(test.worker(1)) h $$,
    $$ VALUES ('[]'::jsonb, '{}'::text[], '{}'::jsonb, false, '{}'::text[]) $$, 'a heartbeat of an idle worker hears nothing');
SELECT is((SELECT i.is_live FROM awa.instances i), true, 'and makes it live');
SELECT is((awa.heartbeat(test.worker(2))).drain, false, 'a heartbeat makes an unknown worker known');
SELECT is((SELECT count(*) FROM awa.instances i WHERE i.is_live), 2::bigint, 'both live');

-- The row is written once per interval, whatever the beat.
SELECT i.heartbeat_at AS beat FROM awa.instances i WHERE i.instance_id = test.worker(1) \gset
SELECT awa.heartbeat(test.worker(1)) FROM generate_series(1, 3) \g /dev/null
SELECT is((SELECT i.heartbeat_at FROM awa.instances i WHERE i.instance_id = test.worker(1)), :'beat'::timestamptz,
    'a beat within the interval does not write');
SELECT awa.set_setting('heartbeat_seconds', '0.05') \g /dev/null
SELECT pg_sleep(0.06) \g /dev/null
SELECT awa.heartbeat(test.worker(1), '[]') \g /dev/null
SELECT results_eq($$ SELECT r.heartbeat_at > r.heartbeat_before_at, r.heartbeat_before_at, r.held, r.held_before FROM awa.runtime_instances r WHERE r.instance_id = test.worker(1) $$,
    format('SELECT true, %L::timestamptz, ''{}''::int8multirange, NULL::int8multirange', :'beat'),
        'a later one keeps the beat before it, with what each held');

-- What is held and closed.
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[4]), 'q') \g /dev/null
CREATE TABLE test.held AS SELECT c.* FROM test.claim('q') c;
SELECT jsonb_build_array(jsonb_build_object('claim_slot', min(h.claim_slot), 'batch_id', min(h.batch_id)::text, 'positions', jsonb_agg(h."position" ORDER BY h."position"))) AS holds,
       array_agg(h."position" ORDER BY h."position") AS positions FROM test.held h \gset
SELECT is((awa.heartbeat(test.worker(1), :'holds')).cancelled, '[]'::jsonb, 'open attempts are not reported');
SELECT awa.cancel_job((:'positions'::bigint[])[2]) \g /dev/null
SELECT test.finish((SELECT to_jsonb(h) FROM test.held h WHERE h."position" = (:'positions'::bigint[])[3]), 'completed') \g /dev/null
SELECT results_eq(format($$ SELECT (c.value ->> 'position')::bigint, c.value ->> 'outcome', c.value -> 'batch_id' IS NOT NULL FROM jsonb_array_elements((awa.heartbeat(test.worker(1), %L)).cancelled) c ORDER BY 1 $$, :'holds'),
    format('VALUES (%s::bigint, ''cancelled'', true), (%s, ''completed'', true)', (:'positions'::bigint[])[2], (:'positions'::bigint[])[3]),
        'held attempts that are closed are reported, with their outcome');
SELECT is((awa.heartbeat(test.worker(1), 'null')).cancelled, '[]'::jsonb, 'null holds everything');
SELECT is((awa.heartbeat(test.worker(1), '[{"claim_slot": 99, "batch_id": 1, "positions": [1]}]')).cancelled, '[]'::jsonb,
    'an unknown slot is no error');
SELECT test.refuses(format('SELECT awa.heartbeat(test.worker(1), %L)', v.holds), '22023', 'field "holds" must be an array%', 'holds are checked: ' || v.holds)
FROM (VALUES ('{}'), ('5'), ('[5]'), ('[{}]'), ('[{"claim_slot": 0, "batch_id": 1}]'), ('[{"claim_slot": 0, "batch_id": 1, "positions": 5}]'), ('[{"claim_slot": 0, "positions": []}]'),
             ('[{"claim_slot": 0, "batch_id": 1, "positions": ["x"]}]'), ('[{"claim_slot": 0, "batch_id": 1, "positions": [-1]}]'), ('[{"claim_slot": 0, "batch_id": 1, "positions": [null]}]'),
             ('[{"claim_slot": 0, "batch_id": 1, "positions": [1.5]}]'), ('[{"claim_slot": 0, "batch_id": 1, "positions": [[1]]}]'), ('[{"claim_slot": 0, "batch_id": 1, "positions": [9223372036854775808]}]'),
             ('[{"claim_slot": "a", "batch_id": 1, "positions": []}]')) v (holds);
SELECT test.refuses('SELECT awa.heartbeat(NULL)', '22023', 'field "instance_id" must not be NULL', 'the instance is given');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.heartbeat(test.worker(1))', '25001', '%READ COMMITTED%', 'a heartbeat needs READ COMMITTED');
COMMIT;

-- Instances that are gone are forgotten, unless they own an attempt.
CREATE FUNCTION test.forget(p_later interval) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT awa._forget_instances(clock_timestamp() + p_later) $$;
ALTER FUNCTION test.forget(interval) OWNER TO awa_owner;
SELECT is(test.forget('23 hours'), 0::bigint, 'a silent instance is kept for a day');
SELECT is(test.forget('25 hours'), 0::bigint, 'and then, until it was suspect for an interval: the clock may be wrong');
SELECT is(test.rescue('25 hours'), 0::bigint, 'which rescue notices');
SELECT is(test.forget('25 hours 1 second'), 1::bigint, 'then it is forgotten');
SELECT is((SELECT i.instance_id FROM awa.instances i), test.worker(1), 'but not one that owns an attempt');

SELECT * FROM finish();
