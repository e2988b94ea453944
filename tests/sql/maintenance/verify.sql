-- verify: brings cursors and sequences in line with the rows, as after a restore, and changes nothing otherwise.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT awa.declare_queue('dl', '{"dlq": true}') \g /dev/null
SELECT test.start('q') AS running \gset
SELECT test.finish(test.start('dl'), 'fail') \g /dev/null
SELECT (awa.insert_job('k', queue => 'later', opts => '{"delay_seconds": 99}')).job_id AS small \gset
SELECT awa.insert_job('k', '"waits"', 'q') \g /dev/null
SELECT test.step('plan_queue') \g /dev/null
SELECT test.step('publish_queue') \g /dev/null
SELECT results_eq('SELECT v.step, v.outcome, v.rows FROM awa.verify() v', $$ VALUES ('verify_rings', 'done', 0::bigint), ('verify_lanes', 'done', 0), ('verify_sequences', 'done', 0), ('verify_identity', 'done', 1) $$,
    'a sound database is left as it is, and its identity noted');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.verify()', '25001', '%READ COMMITTED%', 'verify needs READ COMMITTED');
COMMIT;
-- What a dump taken at another moment does.
SELECT last_value AS ring FROM awa.queue_ring \gset
SELECT setval('awa.queue_ring', 0) \g /dev/null
BEGIN;
SELECT awa.insert_job('k', queue => 'written') \g /dev/null
SELECT test.refuses('SELECT awa.verify()', '55000', 'the queue ring cannot be verified in a transaction that has written', 'verify needs a transaction of its own');
ROLLBACK;
SELECT setval('awa.job_ids', 1, false), setval('awa.claim_batch_ids', 1, false), setval('awa.lane_ids', 1, false) \g /dev/null
SELECT setval(l.position_seq, awa._lane_base(l.lane_id) + 1, false), setval(l.hint_seq, 9000000000000000000) FROM awa.queue_lanes l \g /dev/null
SELECT setval(format('awa.doorbell_%s', b)::regclass, 9000000000000) FROM generate_series(0, 63) b \g /dev/null
SELECT results_eq('SELECT v.step, v.rows > 0 FROM awa.verify() v', $$ VALUES ('verify_rings', true), ('verify_lanes', true), ('verify_sequences', true), ('verify_identity', false) $$,
    'each part reports what it changed');
SELECT is((SELECT last_value FROM awa.queue_ring), :ring::bigint, 'the ring cursor is at its ledger again');
SELECT cmp_ok((awa.insert_job('k', queue => 'later', opts => '{"delay_seconds": 99}')).job_id, '>', :small::bigint,
    'ids of deferred jobs go on above those in use');
SELECT is((SELECT count(*) FROM awa.insert_many('k', ARRAY['"new"']::jsonb[], 'q')), 1::bigint, 'the lane takes jobs again');
SELECT results_eq($$ SELECT c.args FROM test.claim('q') c $$, $$ VALUES ('"waits"'::jsonb), ('"new"') $$,
    'a claim finds what waited and what is new');
SELECT ok((SELECT count(DISTINCT b.batch_id) = count(*) FROM awa.lease_claim_batches b), 'batch ids are not used twice');
SELECT is(test.finish(:'running', 'completed'), 'done', 'an attempt from before is finished');
SELECT results_eq('SELECT v.rows FROM awa.verify() v', $$ VALUES (0::bigint), (0), (0), (0) $$, 'a second verify has nothing to do');

-- A lane's newest job may have gone elsewhere, under the id that was its position.
CREATE TABLE test.places AS
SELECT p AS place, (awa.insert_job('k', queue => p)).job_id + 1000 AS id
FROM unnest('{deferred,dead,done,failed,leased,elsewhere,unique}'::text[]) p;
CREATE FUNCTION test.job(p_place text) RETURNS awa._job LANGUAGE sql AS
    $$ SELECT ROW(t.id, p_place, 2, 0, now(), 0, 1, 'k', '{}', NULL)::awa._job FROM test.places t WHERE t.place = p_place $$;
SELECT count(*) FROM awa._defer(ARRAY[test.job('deferred')], 'scheduled') \g /dev/null
SELECT awa._dead_letter(test.job('dead'), 'r', now()),
       awa._append_done(test.job('done'), 'cancelled', NULL, NULL, NULL, now(), NULL, NULL) \g /dev/null
INSERT INTO awa.failed_entries (job_id, run_lease, finalized_at, attempt, queue, body)
SELECT t.id, 1, now(), 1, 'failed', '{}' FROM test.places t WHERE t.place = 'failed';
INSERT INTO awa.leases (batch_id, "position", job_id, run_lease, claimed_at, run_at, owner, priority, shard, attempt, queue, kind, args)
SELECT 1, 1, t.id, 1, now(), now(), test.worker(1), 2, 0, 1, 'leased', 'k', '{}' FROM test.places t WHERE t.place = 'leased';
SELECT j.ordinal FROM awa._append_ready(ARRAY(SELECT ROW(t.id, 'q', 2, 0, now(), 0, 1, 'k', '{}', NULL)::awa._job FROM test.places t WHERE t.place = 'elsewhere'), true) j \g /dev/null
SELECT last_value AS last_id FROM awa.job_ids \gset
INSERT INTO awa.job_unique_claims (key, job_id, taken_at, states)
SELECT decode(lpad(to_hex(t.id), 32, '0'), 'hex'), t.id, now(), 15 FROM test.places t WHERE t.place = 'unique'
UNION ALL SELECT '\x01', :last_id + 1000, now(), 15;
SELECT results_eq('SELECT v.rows FROM awa.verify() v', $$ VALUES (0::bigint), (7), (1), (0) $$, 'verify looks everywhere');
SELECT is_empty($$ SELECT t.place, t.id FROM test.places t WHERE (awa.insert_job('k', queue => t.place)).job_id <= t.id $$,
    'and no id is given out twice');
SELECT cmp_ok((awa.insert_job('k', queue => 'later', opts => '{"delay_seconds": 99}')).job_id, '>', :last_id + 1000::bigint,
    'nor one of a deferred job');

-- A purged dependency of a lane's sequence comes back.
SELECT format('%s', l.position_seq) AS seq FROM awa.queue_lanes l WHERE l.queue = 'q' \gset
ALTER SEQUENCE :seq OWNED BY NONE;
SELECT count(*) FROM awa.verify() \g /dev/null
SELECT isnt(pg_get_serial_sequence('awa.queue_lanes', 'lane_id'), NULL, 'the sequences of lanes belong to their table again');
SELECT isnt_empty(format($$ SELECT FROM pg_depend d WHERE d.objid = %L::regclass AND d.refobjid = 'awa.queue_lanes'::regclass AND d.deptype = 'a' $$, :'seq'),
    'so that DROP EXTENSION takes them along');

-- Horizons belong to the cluster they were drawn in.
BEGIN;
SELECT awa.insert_job('k', queue => 'h') \g /dev/null
ROLLBACK;
SELECT awa.declare_queue('h') \g /dev/null
BEGIN;
SELECT awa.insert_job('k', queue => 'h') \g /dev/null
ROLLBACK;
SELECT awa.insert_job('k', queue => 'h') \g /dev/null
SELECT count(*) FROM test.claim('h') \g /dev/null
SELECT count(*) AS gaps FROM awa.queue_lanes l, LATERAL awa._newest_emission(l.lane_id) e WHERE l.queue = 'h' AND e.horizon IS NOT NULL \gset
SELECT is(:gaps::integer, 1, 'a gap has a horizon');
SELECT count(*) FROM awa.verify() \g /dev/null
SELECT is((SELECT e.horizon FROM awa.queue_lanes l, LATERAL awa._newest_emission(l.lane_id) e WHERE l.queue = 'h'), NULL,
    'verify takes it away');
SELECT count(*) FROM test.claim('h') \g /dev/null
SELECT count(*) FROM test.claim('h') \g /dev/null
SELECT is((awa.claim_status('h')).reason, 'idle', 'and claims settle the gap again');

-- Rows that came from another database are verified by tick, once.
CREATE FUNCTION test.verify_step() RETURNS text
LANGUAGE sql AS $$ SELECT t.outcome || ' ' || t.rows FROM awa.tick('{"steps": ["verify"]}') t $$;
SELECT is(test.verify_step(), 'done 0', 'at home, tick verifies nothing');
BEGIN;
SELECT awa.insert_job('k', queue => 'h') \g /dev/null
ROLLBACK;
SELECT awa.insert_job('k', queue => 'h') \g /dev/null
SELECT count(*) FROM test.claim('h') \g /dev/null
SELECT isnt((SELECT e.horizon FROM awa.queue_lanes l, LATERAL awa._newest_emission(l.lane_id) e WHERE l.queue = 'h'), NULL,
    'a gap has a horizon again');
UPDATE awa.database_identity SET system_identifier = system_identifier + 1;
SELECT is(test.verify_step(), 'done 2', 'rows of another cluster are verified');
SELECT is((SELECT e.horizon FROM awa.queue_lanes l, LATERAL awa._newest_emission(l.lane_id) e WHERE l.queue = 'h'), NULL,
    'so that transaction ids of the other cluster are gone');
SELECT is(test.verify_step(), 'done 0', 'and have come home');
UPDATE awa.database_identity SET database_oid = 1;
SELECT is(test.verify_step(), 'done 1', 'so are those of another database of the cluster');
INSERT INTO awa.database_identity (system_identifier, database_oid, since) VALUES (1, 1, now());
SELECT is(test.verify_step(), 'done 1', 'so are those that a logical copy brings later');
SELECT is((SELECT count(*) FROM awa.database_identity), 1::bigint, 'only this database is known now');
DELETE FROM awa.database_identity;
SELECT is(test.verify_step(), 'done 1', 'rows of an unknown database are verified');
REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
SELECT is(test.verify_step(), 'done 1', 'where the host keeps the identifier of the cluster to itself,');
SELECT is(test.verify_step(), 'done 0', 'databases are still told apart');

SELECT * FROM finish();
