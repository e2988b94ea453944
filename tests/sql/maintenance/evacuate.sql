-- Evacuation: what waits in an old slot does not keep the ring from turning.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT awa.set_setting('queue_rotate_seconds', '0.05'), awa.set_setting('queue_rotate_bytes', '8192'),
       awa.set_setting('terminal_retention_seconds', '0'), awa.set_setting('dump_lock_seconds', '0') \g /dev/null

CREATE PROCEDURE test.turn(p_times integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. p_times LOOP
        PERFORM awa.insert_job('busy', queue => 'busy');
        PERFORM pg_sleep(0.06);
        COMMIT;
        PERFORM awa.tick('{"steps": ["plan_queue"]}');
        COMMIT;
        PERFORM awa.tick('{"steps": ["publish_queue"]}');
        COMMIT;
        PERFORM awa.complete_jobs(test.worker(1), c.claim_slot, c.batch_id, ARRAY[c.position]) FROM test.claim('busy') c;
        COMMIT;
    END LOOP;
END $$;
CREATE FUNCTION test.report(p_step text) RETURNS awa.tick_report LANGUAGE sql AS
    $$ SELECT t.* FROM awa.tick(jsonb_build_object('steps', jsonb_build_array(p_step))) t $$;

SELECT awa.pause_queue('held'), awa.insert_many('k', array_fill('{"a": 1}'::jsonb, ARRAY[20]), 'held') \g /dev/null
SELECT awa.cancel_job(min(j.job_id)) FROM awa.jobs j WHERE j.queue = 'held' \g /dev/null
SELECT is((test.report('evacuate')).outcome, 'nothing', 'with room in the ring nothing moves');
SELECT (awa._find_ready(min(j.job_id))).slot AS home, min(j.job_id) AS first FROM awa.jobs j
WHERE j.queue = 'held' AND j.state = 'available' \gset

CALL test.turn(13);
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = :home), 'unclaimed',
    'a paused queue keeps its slot');
SELECT awa.set_setting('terminal_retention_seconds', '3600') \g /dev/null
SELECT is((test.report('evacuate')).outcome, 'nothing', 'what keeps a slot beside its history stays with it');
SELECT awa.set_setting('terminal_retention_seconds', '0'), awa.set_setting('evacuate_max_rows', '5') \g /dev/null
SELECT is((test.report('evacuate')).outcome, 'too_many', 'a slot with many waiting jobs is left alone');
SELECT awa.set_setting('evacuate_max_rows', NULL), awa.set_setting('evacuate_rows', '7') \g /dev/null
SELECT results_eq($$ SELECT t.outcome, t.rows FROM test.report('evacuate') t $$, $$ VALUES ('moved', 7::bigint) $$,
    'waiting jobs move, so many a step');
SELECT is((SELECT array_agg(t.outcome) FROM awa.tick('{"steps": ["evacuate", "prune_queue"]}') t),
    '{moved,skipped_pruned}', 'copy and truncate are two transactions');
SELECT results_eq($$ SELECT t.outcome, t.rows FROM test.report('evacuate') t $$, $$ VALUES ('moved', 5::bigint) $$,
    'until none is left; the cancelled one stays behind');
SELECT isnt((SELECT f.slot FROM awa._find_ready(:first) f WHERE NOT f.is_dead), :home, 'a moved job lies elsewhere');
SELECT results_eq($$ SELECT c.available, c.cancelled FROM awa.queue_counts('held') c $$,
    $$ VALUES (19::bigint, 1::bigint) $$, 'and is counted once');
SELECT is((awa.job(:first)).state, 'available', 'under its id');
SELECT is((test.report('prune_queue')).outcome, 'pruned', 'its old slot is emptied');
SELECT is(awa.cancel_job(:first), 'cancelled', 'a moved job can be cancelled');
SELECT awa.resume_queue('held') \g /dev/null
CREATE TABLE test.held AS SELECT * FROM test.claim('held', 100);
SELECT is((SELECT array_agg(c.job_id - :first) FROM test.held c), ARRAY(SELECT g::bigint FROM generate_series(1, 18) g),
    'moved jobs are claimed once, in their order');
SELECT is((awa.queue_counts('held')).available, 0::bigint, 'and nothing is left');
SELECT awa.complete_jobs(test.worker(1), h.claim_slot, h.batch_id, ARRAY[h.position]) FROM test.held h \g /dev/null

-- What waits in a large slot moves only where that frees more than it writes: else it would go round in the ring for ever.
SELECT awa.pause_queue('big'), awa.insert_many('k', array_agg(b.args), 'big')
FROM (SELECT jsonb_agg(md5(g::text || h)) AS args FROM generate_series(1, 60) g, generate_series(1, 250) h GROUP BY g) b \g /dev/null
SELECT (awa._find_ready(min(j.job_id))).slot AS home FROM awa.jobs j WHERE j.queue = 'big' \gset
CALL test.turn(1);
SELECT results_eq($$ SELECT t.outcome, t.rows, (t.detail ->> 'slot')::integer FROM test.report('evacuate') t $$,
    format('VALUES (%L, 0::bigint, %s)', 'too_many', :home), 'jobs that take more than half of a large slot are left');
SELECT results_eq($$ SELECT r.blocked_by, r.detail ->> 'queue' FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.blocked_by = 'unclaimed' $$,
    $$ VALUES ('unclaimed', 'big') $$, 'the slot is named');
SELECT count(awa.cancel_job(j.job_id)) FROM (SELECT j.job_id FROM awa.jobs j WHERE j.queue = 'big' ORDER BY 1 LIMIT 40) j \g /dev/null
DO $$ BEGIN FOR i IN 1 .. 3 LOOP PERFORM awa.tick('{"steps": ["evacuate"]}'); END LOOP; END $$;
SELECT isnt((SELECT f.slot FROM awa._find_ready((SELECT max(j.job_id) FROM awa.jobs j WHERE j.queue = 'big')) f WHERE NOT f.is_dead), :home,
    'less than half moves');
SELECT is((awa.queue_counts('big')).available, 20::bigint, 'all that is left');
SELECT awa.cancel_job(j.job_id) FROM awa.jobs j WHERE j.queue = 'big' AND j.state = 'available' \g /dev/null

-- Attempts that run for long keep neither the slot of their receipt nor that of their body.
SELECT awa.set_setting('claim_rotate_seconds', '0.05'), awa.set_setting('claim_rotate_bytes', '8192'),
       awa.set_setting('attempt_evidence_seconds', '0') \g /dev/null
CREATE PROCEDURE test.turn_claims(p_times integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. p_times LOOP
        PERFORM awa.insert_job('busy', queue => 'busy');
        PERFORM awa.complete_jobs(test.worker(1), c.claim_slot, c.batch_id, ARRAY[c.position]) FROM test.claim('busy') c;
        PERFORM pg_sleep(0.06);
        COMMIT;
        PERFORM awa.tick('{"steps": ["plan_claim"]}');
        COMMIT;
        PERFORM awa.tick('{"steps": ["publish_claim"]}');
        COMMIT;
    END LOOP;
END $$;
CREATE FUNCTION test.blockers(p_ring text) RETURNS text[] LANGUAGE sql AS $$
    SELECT array_agg(DISTINCT r.blocked_by) FILTER (WHERE r.blocked_by NOT IN ('current', 'planned'))
    FROM awa.ring_status() r WHERE r.ring = p_ring $$;
SELECT test.start('long') AS long \gset
SELECT test.start('long2') AS long2 \gset
CALL test.turn_claims(6);
SELECT is(test.blockers('claim'), '{receipts}', 'open attempts keep a slot of the claim ring');
SELECT is((test.report('evacuate')).outcome, 'young', 'those of the last minute are left where they are');
SELECT awa.set_setting('evacuate_attempt_seconds', '0'), awa.set_setting('evacuate_rows', '1') \g /dev/null
SELECT results_eq($$ SELECT t.outcome, t.rows, t.detail ->> 'ring' FROM test.report('evacuate') t $$,
    $$ VALUES ('moved', 1::bigint, 'claim') $$, 'older ones move, so many a step');
SELECT results_eq($$ SELECT t.outcome, t.rows FROM test.report('evacuate') t $$, $$ VALUES ('moved', 1::bigint) $$,
    'until none is left');
SELECT is(test.blockers('claim'), NULL, 'the claim ring is free');
SELECT is((test.report('evacuate')).outcome, 'nothing', 'and nothing is left to do');
SELECT is((test.report('prune_claim')).outcome, 'pruned', 'their slot is emptied');
SELECT is(test.status(:'long'::jsonb), 'open', 'while they run');
SELECT is(test.finish(:'long'::jsonb, 'retry', '{"error": "no", "delay_seconds": 0}'), 'done', 'and end as they would');
SELECT is((awa.job((:'long'::jsonb ->> 'job_id')::bigint)).attempt, 1, 'with their attempt');
CALL test.turn(13);
DO $$ BEGIN FOR i IN 1 .. 16 LOOP PERFORM awa.tick('{"steps": ["prune_queue"]}'); END LOOP; END $$;
SELECT is((SELECT count(*) FROM awa._find_ready((:'long2'::jsonb ->> 'job_id')::bigint)), 0::bigint, 'the body is pruned too');
SELECT is(test.state(:'long2'::jsonb), 'running', 'and the job runs on');
SELECT is(test.complete(:'long2'::jsonb) IS NOT NULL, true, 'until it is done');
SELECT is(test.state(:'long2'::jsonb), 'completed', 'and is history then');

-- A body alone may be what keeps a slot: its receipt lies in the current slot of the claim ring.
SELECT test.start('long') AS long \gset
SELECT (awa._look_up_ready((:'long'::jsonb ->> 'job_id')::bigint)).slot AS home \gset
CALL test.turn(15);
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = :home), 'receipts',
    'an open attempt keeps the slot of its body');
SELECT results_eq($$ SELECT t.outcome, t.detail ->> 'ring' FROM test.report('evacuate') t $$,
    $$ VALUES ('moved', 'queue') $$, 'it moves');
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = :home), NULL,
    'and the slot can go');
SELECT is(test.finish(:'long'::jsonb, 'completed'), 'done', 'the attempt ends as it would');

-- With room to spare, what waits stays where it is for one wrap of the ring.
CREATE PROCEDURE test.turn_and_prune(p_times integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. p_times LOOP
        CALL test.turn(1);
        PERFORM awa.tick('{"steps": ["prune_queue"]}');
        COMMIT;
        PERFORM awa.tick('{"steps": ["prune_queue"]}');
        COMMIT;
    END LOOP;
END $$;
CALL test.turn_and_prune(16);
SELECT awa.pause_queue('held'), awa.insert_job('k', queue => 'held') \g /dev/null
CALL test.turn_and_prune(15);
SELECT is((test.report('evacuate')).outcome, 'nothing', 'a slot is kept for a wrap');
SELECT ok((SELECT count(*) FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.bytes = 0) >= 13, 'there is room');
CALL test.turn_and_prune(1);
SELECT is((test.report('evacuate')).outcome, 'moved', 'and not longer');

SELECT * FROM finish();
