-- Rotation: plan and publish, in two transactions, and what each answers.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.current(p_ring text) RETURNS text LANGUAGE sql AS $$ SELECT format('slot %s generation %s', r.slot, r.generation) FROM awa.ring_status() r WHERE r.ring = p_ring AND r.is_current $$;
SELECT is(test.current(r), 'slot 0 generation 0', format('the %s ring starts in slot 0', r)) FROM unnest('{queue,claim}'::text[]) r;
SELECT results_eq($$ SELECT r.ring, count(*), sum(r.row_count), sum(r.bytes), count(*) FILTER (WHERE r.is_current), count(*) FILTER (WHERE r.blocked_by <> 'current') FROM awa.ring_status() r GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('claim', 8::bigint, 0::numeric, 0::numeric, 1::bigint, 0::bigint), ('deferred', 17, 0, 0, 1, 0), ('queue', 16, 0, 0, 1, 0) $$,
        'ring_status shows every slot of all rings');

SELECT is(test.step('plan_queue'), 'skipped_idle', 'an idle queue ring does not turn');
SELECT is(test.step('plan_claim'), 'skipped_idle', 'nor an idle claim ring');
SELECT is(test.step('publish_queue'), 'nothing_planned', 'nothing is planned');
SELECT test.start('q') AS job \gset
SELECT is(test.step('plan_queue'), 'planned', 'a slot that holds something is left');
SELECT is(test.current('queue'), 'slot 0 generation 0', 'a plan alone moves nothing');
SELECT is(test.step('plan_queue'), 'planned', 'a second plan says that there is one');
SELECT is((SELECT count(*) FROM awa.queue_ring_rotations), 1::bigint, 'and adds none');
SELECT is((SELECT r.blocked_by FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = 1), NULL,
    'an empty slot is blocked by nothing');
BEGIN;
CREATE TABLE test.written ();
SELECT is(test.step('publish_queue'), 'not_fresh', 'a transaction that wrote publishes nothing');
ROLLBACK;
SELECT is(test.step('publish_queue'), 'published', 'another transaction publishes the plan');
SELECT is(test.current('queue'), 'slot 1 generation 1', 'the next slot is current');
SELECT is(test.step('publish_queue'), 'nothing_planned', 'once');
SELECT is(test.step('plan_queue'), 'skipped_idle', 'the new slot is empty');

-- One tick never plans and publishes the same ring.
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT is(test.step('plan_queue'), 'not_due', 'a young slot is not left');
SELECT awa.set_setting('queue_rotate_bytes', '8192') \g /dev/null
SELECT is(test.step('plan_queue'), 'planned', 'a large one is');
SELECT results_eq($$ SELECT t.step, t.outcome FROM awa.tick('{"steps": ["publish_queue", "plan_queue"]}') t $$,
    $$ VALUES ('publish_queue', 'published'), ('plan_queue', 'skipped_published') $$,
    'plan and publish of a ring never share a transaction');
SELECT awa.set_setting('queue_rotate_bytes', NULL), awa.set_setting('queue_rotate_seconds', '0.05') \g /dev/null
SELECT pg_sleep(0.06) \g /dev/null
SELECT awa.insert_job('k', queue => 'q') \g /dev/null
SELECT is(test.step('plan_queue'), 'planned', 'and so is an old one');
BEGIN;
SELECT is(test.step('publish_queue'), 'published', 'a publish');
ROLLBACK;
SELECT is(test.current('queue'), 'slot 3 generation 3',
    'is not undone by a rollback: the cursor may follow the ledger at any time');

-- Jobs in old slots are claimed first, in order.
SELECT awa.insert_job('k', to_jsonb('newest'::text), queue => 'q') \g /dev/null
SELECT results_eq($$ SELECT r.slot, r.row_count FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.row_count > 0 ORDER BY 1 $$,
    $$ VALUES (0, 1::bigint), (1, 1), (2, 1), (3, 1) $$, 'jobs lie in four slots');
SELECT results_eq($$ SELECT row_number() OVER (), c."position" & 63 FROM test.claim('q') c $$,
    $$ VALUES (1::bigint, 2::bigint), (2, 3), (3, 4) $$, 'a claim takes them in the order of their insert');

-- Full rings stop turning, and nothing is lost.
CREATE PROCEDURE test.turn(p_ring text) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 20 LOOP
        PERFORM awa.insert_job('k', to_jsonb(i), queue => 'full');
        PERFORM count(*) FROM test.claim('full', 1);
        COMMIT;
        PERFORM pg_sleep(0.06);
        PERFORM test.step('plan_' || p_ring);
        COMMIT;
        PERFORM test.step('publish_' || p_ring);
        COMMIT;
    END LOOP;
END $$;
CALL test.turn('queue');
SELECT is(test.step('plan_queue'), 'skipped_busy', 'without an empty slot the queue ring does not turn');
SELECT is((SELECT count(*) FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.row_count > 0), 16::bigint,
    'all its slots are in use');
SELECT is((awa.queue_counts('full'))::text, '(full,0,0,20,0,0,0,0,0,0)', 'producers and workers go on');
SELECT is((SELECT r.blocked_by || ' ' || (r.detail ->> 'instance') FROM awa.ring_status() r WHERE r.ring = 'queue' AND r.slot = 5), 'receipts ' || test.worker(1),
    'ring_status names the instance that blocks a slot');
SELECT awa.set_setting('claim_rotate_seconds', '0.05') \g /dev/null
CALL test.turn('claim');
SELECT is(test.step('plan_claim'), 'skipped_busy', 'without an empty slot the claim ring does not turn');
SELECT is((awa.queue_counts('full')).running, 40::bigint, 'claims go on');
SELECT is((SELECT count(*) FROM awa.finish_jobs(test.worker(1), (SELECT jsonb_agg(jsonb_build_object('job_id', b.p, 'run_lease', 1, 'claim_slot', b.slot, 'batch_id', b.batch_id, 'position', b.p, 'outcome', 'completed'))
    FROM (SELECT b.slot, b.batch_id, unnest(awa._to_list(b.positions)) AS p FROM awa.lease_claim_batches b) b)) f WHERE f.result = 'done'), 44::bigint,
        'attempts of every slot are finished in one call');
SELECT is((SELECT sum(c.running) FROM awa.queues q, LATERAL awa.queue_counts(q.queue) c), 0::numeric, 'nothing runs any more');

SELECT * FROM finish();
