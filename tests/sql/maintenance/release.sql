-- Release: a slot goes in two transactions, and not within a minute after something in it waited or ran.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE PROCEDURE test.turn(p_ring text) LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(0.06);
    PERFORM test.step('plan_' || p_ring);
    COMMIT;
    PERFORM test.step('publish_' || p_ring);
END $$;
SELECT awa.set_setting('queue_rotate_seconds', '0.05'), awa.set_setting('claim_rotate_seconds', '0.05'),
       awa.set_setting('terminal_retention_seconds', '0'), awa.set_setting('attempt_evidence_seconds', '0') \g /dev/null
CREATE FUNCTION test.prune_at(p_ring text, p_later interval) RETURNS text LANGUAGE sql SECURITY DEFINER AS $$
    SELECT p.outcome || coalesce(' ' || (p.detail ->> 'reason'), '') FROM awa._prune_ring(p_ring, clock_timestamp() + p_later) p $$;
ALTER FUNCTION test.prune_at(text, interval) OWNER TO awa_owner;
SELECT test.start('two') AS long \gset
SELECT test.start('two') AS failing \gset
SELECT test.finish(:'failing', 'fail') \g /dev/null
CALL test.turn('queue');
CALL test.turn('claim');
SELECT is(test.prune_at('queue', '0'), 'skipped receipts', 'what runs keeps its slots');
SELECT is(test.finish(:'long', 'retry', '{"delay_seconds": 999}'), 'done', 'it is retried');
SELECT is(test.prune_at(r, '0'), 'released', 'now nothing needs the slot') FROM unnest('{queue,claim}'::text[]) r;
SELECT results_eq($$ SELECT r.ring, r.blocked_by FROM awa.ring_status() r WHERE r.ring <> 'deferred' AND r.blocked_by = 'recent' ORDER BY 1 $$,
    $$ VALUES ('claim', 'recent'), ('queue', 'recent') $$, 'ring_status says so');
SELECT is(test.prune_at(r, '50 s'), 'skipped recent', 'it is kept for a minute') FROM unnest('{queue,claim}'::text[]) r;
-- A failed job is in two places meanwhile, and a retry takes it out of both.
SELECT is((SELECT count(*) FROM awa.failed_entries), 1::bigint, 'the failed job is copied');
BEGIN;
SELECT is((awa.retry_job((:'failing'::jsonb ->> 'job_id')::bigint)).state::text, 'available', 'it is retried');
SELECT is((SELECT count(*) FROM awa.failed_entries), 0::bigint, 'and has no copy');
ROLLBACK;
SELECT is((SELECT count(*) FROM awa.failed_entries), 1::bigint, 'unless that is undone');
-- A producer that read the ring before it turned: its job comes and goes between two looks.
SELECT s.last_value AS ring, (SELECT r.slot FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.blocked_by = 'recent') AS old FROM awa.queue_ring s \gset
SELECT setval('awa.queue_ring', (:ring / 64 - 1) * 64 + :old) \g /dev/null
SELECT (awa.insert_job('k', queue => 'late')).job_id AS late \gset
SELECT setval('awa.queue_ring', :ring) \g /dev/null
SELECT is((SELECT f.slot FROM awa._find_ready(:late) f), :old, 'it comes to the slot');
SELECT test.claim_one('late') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 999}'), 'done', 'and is deferred');
SELECT is(test.prune_at('queue', '61 s'), 'released', 'the slot is kept for another minute');
SELECT setval('awa.queue_ring', (:ring / 64 - 1) * 64 + :old) \g /dev/null
SELECT (awa.insert_job('k', queue => 'late')).job_id AS late \gset
SELECT setval('awa.queue_ring', :ring) \g /dev/null
SELECT is(awa.update_job(:late, '{"run_at": "2999-01-01T00:00:00Z"}')::text, 'scheduled', 'another is moved away from there');
SELECT is(test.prune_at('queue', '122 s'), 'released', 'and the slot is kept again');
SELECT setval('awa.queue_ring', (:ring / 64 - 1) * 64 + :old) \g /dev/null
SELECT (awa.insert_job('k', queue => 'late')).job_id AS late \gset
SELECT setval('awa.queue_ring', :ring) \g /dev/null
SELECT is(test.prune_at('queue', '183 s'), 'skipped unclaimed', 'another waits there');
SELECT is(test.finish(test.claim_one('late'), 'completed'), 'done', 'and completes');
SELECT is(test.prune_at('queue', '183 s'), 'released', 'only then is the slot released');
SELECT is(test.prune_at('queue', '244 s'), 'pruned', 'and it goes a minute later');
SELECT is(test.prune_at('claim', '61 s'), 'pruned', 'like that of the receipts');
SELECT is(test.prune_at('claim', '61 s'), 'nothing', 'once');

SELECT * FROM finish();
