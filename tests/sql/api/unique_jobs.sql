-- Unique jobs: the option, what a duplicate gets, and how long a key is held.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.insert(p_args jsonb, p_unique jsonb DEFAULT '{}', p_queue text DEFAULT 'q', p_more jsonb DEFAULT '{}')
RETURNS awa.insert_result
LANGUAGE sql AS $$ SELECT awa.insert_job('k', p_args, p_queue, opts => p_more || jsonb_build_object('unique', p_unique)) $$;
CREATE FUNCTION test.claims() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT count(*) FROM awa.job_unique_claims $$;
ALTER FUNCTION test.claims() OWNER TO awa_owner;

-- One key, one job.
SELECT (test.insert('{"a": 1}')).job_id AS first \gset
SELECT is(test.insert('{"a": 1}')::text, format('(%s,available,t,)', :first), 'the second insert is a duplicate of the first');
SELECT is((test.insert('{"a": 2}')).duplicate, false, 'other args are another job');
SELECT is((awa.insert_job('other', '{"a": 1}', 'q', opts => '{"unique": {}}')).duplicate, false, 'so is another kind');
SELECT is((test.insert('{"a": 1.0}', p_queue => 'elsewhere')).job_id, :first::bigint, 'queue is not part of the key by default, and 1.0 is 1');
SELECT is((test.insert('{"a": 1}', '{"by": ["queue", "args"]}', 'elsewhere')).duplicate, false, 'unless it is named');
SELECT is((awa.insert_job('k', '{"a": 1}', 'q')).duplicate, false, 'a job without the option is no duplicate');
SELECT test.refuses($$ SELECT test.insert('{"a": 1}', '{"on_conflict": "raise"}') $$, '23505', 'job % holds the unique key', 'raise raises');
SELECT is((test.insert('{"a": 1}', '{"on_conflict": "return"}')).state::text, 'available', 'return is the default');

-- The key.
SELECT is((test.insert('{"by": 1}', format('{"key": "%s"}', encode(awa.unique_key('k', NULL, '{"a": 1}', NULL), 'hex'))::jsonb)).job_id,
    :first::bigint, 'a key computed elsewhere is the same key');
SELECT is((test.insert('{"u": {"id": 7, "name": "x"}, "n": 1}', '{"by": ["args.u.id"]}')).duplicate, false, 'a path');
SELECT is((test.insert('{"u": {"id": 7, "name": "y"}, "n": 2}', '{"by": ["args.u.id"]}')).duplicate, true, 'leaves out all else');
SELECT is(awa._args_at('{"a": {"b": 1, "c": [1]}, "d": 2, "e": {}}', '{a.b,d,e,x.y,a.c.0}'), '{"a": {"b": 1}, "d": 2, "e": {}}',
    'missing paths are absent, and paths do not lead into arrays');
SELECT is(awa._args_at('[1]', '{a}'), '{}', 'args that are no object have no paths');
SELECT is(decode(awa._parse_unique('{"by": []}', 'k', 'q', '{}', now()) ->> 'key', 'hex'), awa.unique_key('k', NULL, NULL, NULL), 'the kind alone');
SELECT is(decode(awa._parse_unique('{"by": ["queue", "args.a", "args.b.c"], "period_seconds": 60}', 'k', 'q', '{"a": 1, "z": 0}', '2026-01-01 00:00:59Z')
    ->> 'key', 'hex'), awa.unique_key('k', 'q', '{"a": 1}', 29453760), 'all parts');
SELECT is((awa._parse_unique('{"period_seconds": 60}', 'k', 'q', '{}', '2026-01-01 00:00:59Z') ->> 'ends')::timestamptz, '2026-01-01 00:01:00Z',
    'a period ends where the next one begins');

-- Many in one call.
SELECT results_eq($$ SELECT i.duplicate, i.state::text FROM awa.insert_jobs('[
    {"kind": "m", "queue": "b", "args": 1, "opts": {"unique": {}}}, {"kind": "m", "queue": "b", "args": 2},
    {"kind": "m", "queue": "a", "priority": 3, "args": 1, "opts": {"unique": {}}},
    {"kind": "m", "queue": "a", "args": 3, "opts": {"unique": {}, "delay_seconds": 60}}, {"kind": "m", "queue": "a", "args": 3, "opts": {"unique": {}}}]') i $$,
    $$ VALUES (false, 'available'), (false, 'available'), (true, 'available'), (false, 'scheduled'), (true, 'scheduled') $$,
    'one call may hold duplicates of itself');
SELECT results_eq($$ SELECT count(*), count(DISTINCT j) FROM awa.insert_many('m', ARRAY['1', '5', '5', '6']::jsonb[], 'b', opts => '{"unique": {}}') j $$,
    $$ VALUES (4::bigint, 3::bigint) $$, 'insert_many answers with the existing ids');
SELECT is((SELECT count(*) FROM test.claim('b')), 4::bigint, 'and stores the others alone');
SELECT test.refuses($$ SELECT awa.insert_many('m', ARRAY['7', '7']::jsonb[], 'b', opts => '{"unique": {"on_conflict": "raise"}}') $$, '23505', 'job % holds%',
    'raise refuses the whole call');
SELECT is((SELECT count(*) FROM test.claim('b')), 0::bigint, 'and nothing of it is left');
SELECT is_empty($$ SELECT awa.insert_many('m', '{}', opts => '{"unique": {}}') $$, 'no args, no jobs');

-- Replace.
SELECT (test.insert('{"v": 1}', '{"by": [], "on_conflict": "replace"}', 'r', '{"tags": ["t"]}')).job_id AS waiting \gset
SELECT is(test.insert('{"v": 2}', '{"by": [], "on_conflict": "replace"}', 'r')::text, format('(%s,available,t,)', :waiting), 'replace answers with the holder');
SELECT is((SELECT array_agg(j.args -> 'v') FROM awa.jobs j WHERE j.queue = 'r'), '{2}', 'which has the new args now');
SELECT is((test.insert('{"v": 3}', '{"by": [], "on_conflict": "replace"}', 'r')).job_id, :waiting::bigint, 'as often as you like');
SELECT test.claim_one('r') AS job \gset
SELECT is(:'job'::jsonb - '{run_at,created_at,batch_id,position,claim_slot}'::text[] @>
    format('{"job_id": %s, "args": {"v": 3}, "tags": ["t"], "attempt": 1}', :waiting)::jsonb, true, 'it runs with the last args and all else it had');
SELECT is(test.insert('{"v": 4}', '{"by": [], "on_conflict": "replace"}', 'r')::text, format('(%s,running,t,)', :waiting), 'a running holder stays as it is');
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 60}'), 'done', 'it is retried');
SELECT is((test.insert('{"v": 5}', '{"by": [], "on_conflict": "replace"}', 'r')).state::text, 'retryable', 'a deferred holder');
SELECT is((SELECT j.args FROM awa.jobs j WHERE j.job_id = :waiting), '{"v": 5}', 'gets new args');
SELECT is((SELECT array_agg(i.duplicate) FROM awa.insert_jobs('[{"kind": "s", "args": 1, "opts": {"unique": {"by": [], "on_conflict": "replace"}}},
    {"kind": "s", "args": 2, "opts": {"unique": {"by": [], "on_conflict": "replace"}}}]') i), '{f,t}', 'replace within one call');
SELECT is((SELECT array_agg(j.args) FROM awa.jobs j WHERE j.kind = 's'), '{2}', 'keeps the last args');

-- How long: states and periods.
SELECT (test.insert('{"life": 1}', p_queue => 'life')).job_id AS life \gset
SELECT test.claim_one('life') AS job \gset
SELECT is(test.insert('{"life": 1}', p_queue => 'life')::text, format('(%s,running,t,)', :life), 'a running job holds its key');
SELECT is((SELECT f.result FROM awa.complete_jobs(test.worker(1), (:'job'::jsonb ->> 'claim_slot')::integer, (:'job'::jsonb ->> 'batch_id')::bigint,
    ARRAY[(:'job'::jsonb ->> 'position')::bigint]) f), 'done', 'it completes');
SELECT is(test.insert('{"life": 1}', p_queue => 'life')::text, format('(%s,completed,t,)', :life), 'a completed one holds it too');
SELECT awa.set_setting('terminal_retention_seconds', '0') \g /dev/null
SELECT is((test.insert('{"life": 1}', p_queue => 'life')).duplicate, false, 'until its retention ends');
SELECT awa.set_setting('terminal_retention_seconds', NULL) \g /dev/null
SELECT test.claim_one('life') AS job \gset
SELECT is(test.finish(:'job', 'fail'), 'done', 'it fails');
SELECT is((test.insert('{"life": 1}', p_queue => 'life')).duplicate, false, 'a failed job does not hold its key');
SELECT is(awa.cancel_by_unique_key(awa.unique_key('k', NULL, '{"life": 1}', NULL)) IS NOT NULL, true, 'a key names the job to cancel');
SELECT is(awa.cancel_by_unique_key(awa.unique_key('k', NULL, '{"life": 1}', NULL)), NULL, 'once');
SELECT is((test.insert('{"life": 1}', p_queue => 'life')).duplicate, false, 'a cancelled job does not hold it either');
SELECT is((test.insert('{"life": 2}', '{"states": ["available", "failed", "cancelled"]}', 'life2')).duplicate, false, 'where the states say so');
SELECT test.claim_one('life2') AS job \gset
SELECT is((test.insert('{"life": 2}', '{"states": ["available"]}', 'life2')).duplicate, false, 'a running job whose states leave running out does not');
SELECT is(test.finish(:'job', 'fail'), 'done', 'it fails without its key');
SELECT test.claim_one('life2') AS job \gset
SELECT is(test.finish(:'job', 'completed'), 'done', 'the other one completes outside its states');
SELECT is((test.insert('{"life": 2}', '{"states": ["available", "failed"]}', 'life2')).duplicate, false, 'and frees the key');
SELECT test.claim_one('life2') AS job \gset
SELECT is(test.finish(:'job', 'fail'), 'done', 'a job that fails');
SELECT is((test.insert('{"life": 2}', '{"states": ["available"]}', 'life2')).state::text, 'failed', 'holds the key if its states say so');
SELECT test.refuses('SELECT awa.cancel_by_unique_key(''short'')', '22023', 'field "key"%', 'a key has 16 bytes');
SELECT test.refuses('SELECT awa.cancel_by_unique_key(NULL)', '22023', 'field "key"%', 'and is not NULL');

-- A rollback frees it.
BEGIN;
SELECT is((test.insert('{"back": 1}')).duplicate, false, 'a job');
SELECT is((test.insert('{"back": 1}')).duplicate, true, 'is seen by its own transaction');
SAVEPOINT s;
SELECT is((test.insert('{"back": 2}')).duplicate, false, 'another');
ROLLBACK TO s;
SELECT is((test.insert('{"back": 2}')).duplicate, false, 'is gone after ROLLBACK TO');
ROLLBACK;
SELECT is((test.insert('{"back": 1}')).duplicate, false, 'and the first after ROLLBACK');

-- A duplicate writes nothing.
SELECT is((test.insert('{"back": 1}')).duplicate AND pg_current_xact_id_if_assigned() IS NULL, true, 'no transaction id is assigned');

-- Bad options.
SELECT test.claims() AS claims \gset
SELECT test.refuses(format('SELECT test.insert(''{}'', %L)', v.options), v.state, v.pattern, 'refused: ' || v.options)
FROM (VALUES
    ('[]', '22023', 'field "unique" must be%'), ('{"colour": 1}', '22023', 'field "unique" has the unknown option colour'),
    ('{"by": "args"}', '22023', 'option "by" of "unique"%'), ('{"by": ["kind"]}', '22023', 'option "by"%'), ('{"by": ["args."]}', '22023', 'option "by"%'),
    ('{"by": ["args.a..b"]}', '22023', 'option "by"%'), ('{"by": [1]}', '22023', 'option "by"%'), ('{"by": ["args", "args.a"]}', '22023', 'option "by"%'),
    ('{"key": "zz"}', '22023', 'option "key" of "unique"%'), ('{"key": 5}', '22023', 'option "key"%'),
    ('{"key": "00000000000000000000000000000000", "by": ["args"]}', '22023', 'option "key"%'),
    ('{"period_seconds": 0}', '22023', 'option "period_seconds"%'), ('{"period_seconds": "60"}', '22023', 'option "period_seconds"%'),
    ('{"states": []}', '22023', 'option "states" of "unique"%'), ('{"states": "available"}', '22023', 'option "states"%'),
    ('{"states": ["waiting"]}', '22023', 'option "states"%'), ('{"states": ["failed"]}', '22023', 'option "states"%'),
    ('{"states": ["scheduled", "running"]}', '22023', 'option "states"%'), ('{"states": [null]}', '22023', 'option "states"%'),
    ('{"on_conflict": "ignore"}', '22023', 'option "on_conflict" cannot be%'), ('{"on_conflict": 1}', '22023', 'option "on_conflict"%')
) v (options, state, pattern);
SELECT is(test.claims(), :claims::bigint, 'a refused insert claims nothing');
SELECT is((awa.insert_job('k', opts => '{"unique": null}')).duplicate, false, 'null is no option');

SELECT * FROM finish();
