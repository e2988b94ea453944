-- Backpressure: a producer is told how much waits, or turned away, by subtraction.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.insert(p_queue text, p_backpressure jsonb, p_priority integer DEFAULT 2) RETURNS awa.insert_result LANGUAGE sql AS $$
    SELECT awa.insert_job('k', queue => p_queue, priority => p_priority, opts => jsonb_build_object('backpressure', p_backpressure)) $$;
-- The next answer is measured, not remembered.
CREATE FUNCTION test.forget() RETURNS text LANGUAGE sql AS $$ SELECT set_config('awa.pressure', '', false) $$;

-- Signal.
SELECT is((test.insert('q', '"off"')).pressure, NULL, 'off says nothing');
SELECT is((test.insert('q', 'null')).pressure, NULL, 'nor does null');
SELECT is((test.insert('q', '"signal"')).pressure, '3', 'a signal says how many wait');
SELECT awa.insert_many('k', array_fill('{}'::jsonb, ARRAY[10]), 'q') \g /dev/null
SELECT test.forget() \g /dev/null
SELECT is((test.insert('q', '"signal"')).pressure, '14', 'all producers counted');
SELECT is((test.insert('q', '"signal"', 1)).pressure, '0', 'other priorities not');
SELECT is((test.insert('other', '"signal"')).pressure, '0', 'nor other queues');
SELECT is((test.insert('Q/2', '"signal"')).pressure, '0', 'whatever their names');
SELECT test.forget() \g /dev/null
SELECT count(*) FROM test.claim('q', 10) \g /dev/null
SELECT is((test.insert('q', '"signal"')).pressure, '6', 'what was claimed does not count');
SELECT is((SELECT i.pressure FROM awa.insert_job('k', queue => 'q', run_at => now() + interval '1 day',
    opts => '{"backpressure": "signal", "tags": ["t"]}') i) ~ '^[56]$', true, 'a signal beside other options');
SELECT is((SELECT j.tags FROM awa.jobs j WHERE j.state = 'scheduled'), '{t}', 'which are kept, and nothing else');
SELECT is((SELECT count(*) FROM awa.ready_entries r WHERE r.ext IS NOT NULL), 0::bigint, 'backpressure is not stored');
SELECT test.forget() \g /dev/null
SELECT results_eq($$ SELECT i.pressure FROM awa.insert_jobs('[{"kind": "a", "queue": "new", "opts": {"backpressure": "signal"}}, {"kind": "b", "queue": "new"},
                                                             {"kind": "c", "queue": "other", "priority": 3, "opts": {"backpressure": "signal"}}]') i $$,
    $$ VALUES ('2'), (NULL), ('1') $$, 'insert_jobs answers for each job that asks, all of them counted');
-- Does a signal of q come from what the session remembers of a queue? A fifth of a second may end in between, seldom twice in a row.
CREATE FUNCTION test.recalls(p_queue text) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    FOR i IN 1 .. 20 LOOP
        PERFORM set_config('awa.pressure', awa._pressure_label(p_queue, 2) || 'known', false);
        IF (test.insert('q', '"signal"')).pressure = 'known' THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END $$;
SELECT is(test.recalls('q'), true, 'a fresh measure is used again');
SELECT is(test.recalls('qq'), false, 'but not that of a name which ends alike');
SELECT set_config('awa.pressure', regexp_replace(awa._pressure_label('q', 2), '[0-9a-f]+$', '12') || 'known', false) \g /dev/null
SELECT is((test.insert('q', '"signal"')).pressure ~ '^[0-9]+$', true, 'an old one is not');

-- Reject.
SELECT is((test.insert('r', '{"reject": 2}')).state, 'available', 'none waits');
SELECT is((test.insert('r', '{"reject": 2}')).state, 'available', 'one waits');
SELECT test.refuses('SELECT test.insert(''r'', ''{"reject": 2}'')', 'JQ003', 'option "backpressure": 2 jobs wait in queue "r" at priority 2', 'two wait');
SELECT is((test.insert('r', '{"reject": 2}', 1)).state, 'available', 'at another priority none does');
SELECT is((awa.queue_counts('r')).available, 3::bigint, 'a rejected job is not there');
SELECT test.refuses($$ SELECT awa.insert_many('k', '{1,2}', 'r', opts => '{"backpressure": {"reject": 2}}') $$, 'JQ003', 'option "backpressure": 2 jobs%', 'insert_many is turned away');
SELECT is((SELECT count(*) FROM awa.insert_many('k', '{1,2}', 'r', opts => '{"backpressure": {"reject": 3}}')), 2::bigint, 'or let in whole');
SELECT test.refuses($$ SELECT awa.insert_jobs('[{"kind": "k", "queue": "r", "opts": {"backpressure": {"reject": 5}}}, {"kind": "k", "queue": "r", "opts": {"backpressure": {"reject": 4}}}]') $$,
    'JQ003', 'option "backpressure": 4 jobs%', 'of many jobs the strictest counts');
SELECT is((SELECT count(*) FROM awa.insert_jobs('[{"kind": "k", "queue": "r", "opts": {"backpressure": {"reject": 5}}}, {"kind": "k", "queue": "r"}]')), 2::bigint, 'all or nothing');
SELECT awa.declare_queue('wide', '{"enqueue_shards": 8}') \g /dev/null
SELECT awa.insert_job('k', queue => 'wide') FROM generate_series(1, 20) \g /dev/null
SELECT test.refuses('SELECT test.insert(''wide'', ''{"reject": 20}'')', 'JQ003', 'option "backpressure": 20 jobs%', 'the shards of a queue count together');
SELECT is((test.insert('wide', '{"reject": 21}')).state, 'available', 'exactly');

-- Bad values.
SELECT test.refuses(format('SELECT test.insert(''q'', %L)', v.value), '22023', v.pattern, v.value)
FROM (VALUES ('"on"', 'option "backpressure" must be "off", "signal" or {"reject": n}'), ('1', 'option "backpressure" must be%'), ('{}', 'option "backpressure" must be%'),
             ('{"reject": 0}', 'option "reject" cannot be 0'), ('{"reject": 1.5}', 'option "reject" cannot be 1.5'), ('{"reject": "5"}', 'option "reject" cannot be "5"'),
             ('{"reject": null}', 'option "backpressure" must be%'), ('{"limit": 5}', 'field "backpressure" has the unknown option%'), ('[]', 'option "backpressure" must be%'))
    v (value, pattern);
SELECT test.refuses($$ SELECT awa.insert_many('k', '{1}', 'q', opts => '{"backpressure": "signal"}') $$, '22023', 'option "backpressure" of insert_many cannot be "signal"',
    'insert_many has no place for a signal');
SELECT test.refuses($$ SELECT awa.insert_jobs('[{"kind": "k"}, {"kind": "k", "opts": {"backpressure": 5}}]') $$, '22023', 'jobs[2]: option "backpressure" must be%', 'a bad item is named');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT test.insert(''q'', ''{"reject": 5}'')', '25001', '%', 'an older snapshot cannot tell');
COMMIT;
SELECT test.forget() \g /dev/null
BEGIN;
SELECT test.insert('q', '"signal"') \g /dev/null
SELECT is_empty($$ SELECT k.relation::regclass FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
                   WHERE k.pid = pg_backend_pid() AND c.relname ~ '^ready_claim_attempt' $$, 'the look keeps no leaf of the ledger locked');
COMMIT;

SELECT * FROM finish();
