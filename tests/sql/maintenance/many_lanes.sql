-- Thousands of lanes: what looks at all of them keeps no lock on each, since the lock table has room for a few thousand.
\ir ../support.psql
SELECT * FROM no_plan();

-- Locks of this transaction on lanes and their hints.
CREATE FUNCTION test.lane_locks() RETURNS bigint LANGUAGE sql AS $$
    SELECT count(DISTINCT k.relation) FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
    WHERE k.pid = pg_backend_pid() AND c.relnamespace = 'awa'::regnamespace AND c.relname ~ '^lane_[0-9]+(_hint)?$'
$$;
SELECT awa.declare_queue('many', '{"enqueue_shards": 64}'), awa.declare_queue('one') \g /dev/null
SELECT awa.insert_job('k', queue => 'many', opts => jsonb_build_object('ordering_key', g::text)) FROM generate_series(1, 200) g \g /dev/null
SELECT awa.insert_job('k', queue => 'one') \g /dev/null

SET awa.hints = '';
BEGIN;
SELECT is((SELECT count(*) FROM test.claim('one')), 1::bigint, 'the first claim of a session looks at all hints');
SELECT ok(test.lane_locks() <= 2, 'and keeps none but those of its own lane');
COMMIT;
BEGIN;
SELECT is((SELECT sum(d.depth) FROM awa.queue_depths() d), 200::numeric, 'depths are those of all lanes');
SELECT is(test.lane_locks(), 0::bigint, 'and keep none');
COMMIT;
SELECT count(*) FROM test.claim('many', 1000) \g /dev/null
BEGIN;
SELECT is((SELECT v.rows FROM awa.verify() v WHERE v.step = 'verify_lanes'), 0::bigint, 'verify finds nothing to repair');
SELECT is(test.lane_locks(), 0::bigint, 'and keeps none');
COMMIT;

SELECT lives_ok($$ UPDATE awa.queue_lanes SET hint_seq = 4294967294::oid WHERE queue = 'one'; SET awa.hints = ''; SELECT awa._hints_work() $$,
    'a hint that is made anew meanwhile is found by its name');
UPDATE awa.queue_lanes SET hint_seq = format('awa.lane_%s_hint', lane_id)::regclass WHERE queue = 'one';

-- A slot is asked once for all of its lanes.
SET track_functions = 'all';
BEGIN;
SELECT awa._plan_ring('queue', now() + interval '1 day') \g /dev/null
COMMIT;
SELECT is(awa._publish_ring('queue'), 'published', 'the slot of all these lanes is left');
BEGIN;
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = 0), 'receipts', 'ring_status looks at all of them');
SELECT is((SELECT f.calls FROM pg_stat_xact_user_functions f WHERE f.funcname = '_newest_emission'), NULL, 'but not at one after the other');
COMMIT;

-- Each lane that is not there yet costs a promotion several locks.
SELECT awa.insert_job('k', queue => 'new' || g, opts => '{"delay_seconds": 0.001}') FROM generate_series(1, 300) g \g /dev/null
SELECT pg_sleep(0.01) \g /dev/null
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 256::bigint) $$,
    'a promotion goes to so many lanes');
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 44::bigint) $$,
    'and the next one goes on');
SELECT is((SELECT count(DISTINCT d.queue) FROM awa.queue_depths() d WHERE d.queue LIKE 'new%' AND d.depth = 1), 300::bigint, 'until all are there');
SELECT awa.insert_job('k', to_jsonb(g), 'key' || g, opts => '{"delay_seconds": 0.001, "unique": {"states": ["available"]}}')
FROM generate_series(1, 300) g \g /dev/null
SELECT pg_sleep(0.01) \g /dev/null
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 256::bigint) $$,
    'nor do jobs that wait for their unique key go to more of them');
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 44::bigint) $$,
    'at once');

-- Lanes that producers hold do not count: others go on. A prepared transaction holds them here.
CREATE FUNCTION test.create_lanes(p_queue text) RETURNS void LANGUAGE sql SECURITY DEFINER AS $$ SELECT awa._create_lanes(p_queue, true) $$;
ALTER FUNCTION test.create_lanes(text) OWNER TO awa_owner;
SELECT awa.declare_queue('held', '{"strict_fifo": true, "enqueue_shards": 64}'), test.create_lanes('held') \g /dev/null
SELECT awa.insert_job('k', queue => 'held', opts => '{"delay_seconds": 0.001}') FROM generate_series(1, 512) \g /dev/null
UPDATE awa.deferred_jobs d SET priority = 1 + x.n / 64, shard = x.n % 64
FROM (SELECT o.job_id, row_number() OVER () % 256 AS n FROM awa.deferred_jobs o) x WHERE x.job_id = d.job_id;
SELECT awa.insert_job('k', queue => 'free', opts => '{"delay_seconds": 0.001}') \g /dev/null
SELECT pg_sleep(0.01) \g /dev/null
BEGIN;
SELECT pg_advisory_xact_lock(awa._lock_key('fifo', l.lane_id)) FROM awa.queue_lanes l WHERE l.queue = 'held' \g /dev/null
PREPARE TRANSACTION 'many_lanes';
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 1::bigint) $$,
    'who is behind 256 lanes that producers hold is promoted');
SELECT is((SELECT count(*) FROM test.claim('free')), 1::bigint, 'and claimed');
COMMIT PREPARED 'many_lanes';
SELECT results_eq($$ SELECT t.outcome, t.rows FROM awa.tick('{"steps": ["promote"]}') t $$, $$ VALUES ('done', 512::bigint) $$,
    'the others are as soon as the lanes are free');

SELECT * FROM finish();
