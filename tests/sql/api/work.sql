-- work(): jobs whose kind is bound to a function run inside the database, with the rights of the caller.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE TABLE test.done (n integer, job_id bigint);
CREATE FUNCTION test.note(args jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO test.done (n) VALUES ((args ->> 'n')::integer) $$;
CREATE FUNCTION test.double(args jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$ SELECT to_jsonb((args ->> 'n')::integer * 2) $$;
CREATE FUNCTION test.whole(job awa.claimed_job) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO test.done VALUES ((job.args ->> 'n')::integer, job.job_id);
    RETURN to_jsonb(job.attempt);
END $$;
CREATE FUNCTION test.fails(args jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO test.done VALUES (-1);
    RAISE EXCEPTION USING ERRCODE = 'P0001', MESSAGE = 'no luck with ' || args::text;
END $$;
CREATE FUNCTION test.set_of(args jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT args';
CREATE FUNCTION test.no_args() RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION test.text_args(args text) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION test.number(args jsonb) RETURNS integer LANGUAGE sql AS 'SELECT 1';

-- Binding.
SELECT lives_ok($$ SELECT awa.register_sql_handler('note', 'test.note(jsonb)'), awa.register_sql_handler('double', 'test.double(jsonb)'),
                          awa.register_sql_handler('whole', 'test.whole'::regproc), awa.register_sql_handler('fails', 'test.fails(jsonb)') $$,
    'functions of one jsonb or one claimed_job are bound');
SELECT test.refuses(format('SELECT awa.register_sql_handler(''k'', %L)', f.name), '22023', 'field "handler" cannot be %', f.name)
FROM unnest('{test.set_of(jsonb),test.no_args(),test.text_args(text),test.number(jsonb)}'::text[]) f (name);
SELECT test.refuses('SELECT awa.register_sql_handler('''', ''test.note(jsonb)'')', '22023', 'field "kind" must not be empty', 'a kind has a name');
SELECT is((awa.work('q'))::text, '(q,0,0,0,0)', 'an empty queue');

-- Outcomes.
SELECT awa.insert_job('note', '{"n": 1}', 'q') \g /dev/null
SELECT awa.insert_job('fails', '{"n": 2}', 'q'), awa.insert_job('stranger', queue => 'q') \g /dev/null
SELECT (awa.insert_job('double', '{"n": 3}', 'q', opts => '{"keep_result": true}')).job_id AS double \gset
SELECT (awa.insert_job('whole', '{"n": 4}', 'q', opts => '{"keep_result": true}')).job_id AS whole \gset
SELECT is((awa.work('q'))::text, '(q,5,3,1,1)', 'five jobs in one call');
SELECT results_eq($$ SELECT d.n, d.job_id FROM test.done d ORDER BY 1 $$, format('VALUES (1, NULL::bigint), (4, %s)', :whole),
    'what the handlers wrote is there, but for the one that raised');
SELECT results_eq($$ SELECT c.completed, c.retryable, c.scheduled, c.running FROM awa.queue_counts('q') c $$,
    $$ VALUES (3::bigint, 1::bigint, 1::bigint, 0::bigint) $$, 'a failure is retried, a kind that is not bound is handed back');
SELECT is((awa.job(:double)).result, '6', 'a result is kept');
SELECT is((awa.job(:whole)).result, '1', 'of a function of the whole job too');
SELECT results_eq($$ SELECT j.attempt, j.errors -> 0 ->> 'error', j.errors -> 0 ->> 'sqlstate', j.errors -> 0 ->> 'context' LIKE '%test.fails%'
                     FROM awa.jobs j WHERE j.kind = 'fails' $$,
    $$ VALUES (1, 'no luck with {"n": 2}', 'P0001', true) $$, 'the error says what and where');
SELECT results_eq($$ SELECT j.attempt FROM awa.jobs j WHERE j.kind = 'stranger' $$, $$ VALUES (0) $$, 'handing back costs no attempt');
SELECT awa.insert_job('fails', queue => 'q', max_attempts => 1) \g /dev/null
SELECT is((awa.work('q'))::text, '(q,1,0,1,0)', 'a last attempt');
SELECT is((awa.queue_counts('q')).failed, 1::bigint, 'ends the job');

-- A transaction like any other.
SELECT awa.insert_many('note', ARRAY(SELECT jsonb_build_object('n', g) FROM generate_series(10, 49) g), 'many') \g /dev/null
BEGIN;
SELECT is((awa.work('many')).completed, 32, 'at most 32 jobs');
ROLLBACK;
SELECT is((SELECT count(*) FROM test.done d WHERE d.n >= 10), 0::bigint, 'a rollback takes back what they wrote');
SELECT is((awa.queue_counts('many')).available, 40::bigint, 'and that they ran');
SELECT is((awa.work('many', 30)).completed, 30, 'fewer when asked');
SELECT is((awa.work('many')).completed, 10, 'the rest');
SELECT is((SELECT count(DISTINCT d.n) FROM test.done d WHERE d.n >= 10), 40::bigint, 'each ran once');
SELECT is((SELECT count(*) FROM awa.runtime_instances), 2::bigint, 'one row for each queue that was worked on');

-- One job's failure, whatever its kind, is no other's.
CREATE FUNCTION test.asserts(args jsonb) RETURNS void LANGUAGE plpgsql AS $$ BEGIN ASSERT false, 'not so'; END $$;
CREATE TABLE test.parent (id integer PRIMARY KEY);
CREATE TABLE test.child (id integer REFERENCES test.parent DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION test.orphan(args jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO test.child VALUES (1)';
CREATE FUNCTION test.family(args jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO test.child VALUES (2); INSERT INTO test.parent VALUES (2)';
SELECT awa.register_sql_handler(k, format('test.%I(jsonb)', k)::regprocedure) FROM unnest('{asserts,orphan,family}'::text[]) k \g /dev/null
SELECT awa.insert_job(k, '{"n": 1}', 'poison') FROM unnest('{asserts,orphan,family,note}'::text[]) k \g /dev/null
SELECT is((awa.work('poison'))::text, '(poison,4,2,2,0)', 'a failed ASSERT and a violated deferred constraint fail their jobs alone');
SELECT results_eq($$ SELECT j.kind, j.state, j.errors -> 0 ->> 'sqlstate' FROM awa.jobs j WHERE j.queue = 'poison' ORDER BY 1 $$,
    $$ VALUES ('asserts', 'retryable', 'P0004'), ('family', 'completed', NULL), ('note', 'completed', NULL), ('orphan', 'retryable', '23503') $$,
    'with the error; what is right by its end may be wrong before');
SELECT results_eq('SELECT c.id FROM test.child c', 'VALUES (2)', 'and only they write nothing');

-- What cannot be stored, and what is gone.
SELECT awa.set_setting('args_max_bytes', '1024') \g /dev/null
CREATE FUNCTION test.large(args jsonb) RETURNS jsonb LANGUAGE sql AS $$
    INSERT INTO test.done VALUES (-2); SELECT to_jsonb(repeat('x', 2000)) $$;
CREATE FUNCTION test.gone(args jsonb) RETURNS void LANGUAGE sql AS '';
SELECT awa.register_sql_handler('large', 'test.large(jsonb)'), awa.register_sql_handler('gone', 'test.gone(jsonb)') \g /dev/null
DROP FUNCTION test.gone(jsonb);
SELECT awa.insert_job('large', queue => 'bad', opts => '{"keep_result": true}'), awa.insert_job('gone', queue => 'bad') \g /dev/null
SELECT is((awa.work('bad'))::text, '(bad,2,0,2,0)', 'both fail');
SELECT results_eq($$ SELECT j.kind, j.state, j.errors -> 0 ->> 'error' FROM awa.jobs j WHERE j.queue = 'bad' ORDER BY 1 $$,
    $$ VALUES ('gone', 'retryable', 'function "test.gone(jsonb)" does not exist'), ('large', 'retryable', 'field "result" has more than 1024 bytes') $$, 'with what is wrong');
SELECT is((SELECT count(*) FROM test.done d WHERE d.n < 0), 0::bigint, 'and have written nothing');
SELECT awa.register_sql_handler('gone', NULL) \g /dev/null
SELECT test.promote('bad') \g /dev/null
SELECT is((SELECT w.unknown FROM awa.work('bad') w), 1, 'a kind that was unbound is unknown');

-- A kind with a function is known, so a worker that meets it does not put it off for long.
SELECT test.start('shared') AS job \gset
SELECT awa.register_sql_handler('k', 'test.note(jsonb)') \g /dev/null
SELECT test.finish(:'job', 'released', '{"reason": "unknown_kind"}') \g /dev/null
SELECT test.promote('shared') \g /dev/null
SELECT test.finish(test.claim_one('shared'), 'released', '{"reason": "unknown_kind"}') \g /dev/null
SELECT cmp_ok((SELECT max(j.run_at) FROM awa.jobs j WHERE j.queue = 'shared'), '<', clock_timestamp() + interval '1.1 seconds', 'it comes back after a second');

-- Rights: the caller's.
CREATE ROLE awa_test_work;
SELECT awa.grant_worker('awa_test_work');
GRANT USAGE ON SCHEMA test TO awa_test_work;
SELECT awa.insert_job('note', '{"n": 100}', 'rights') \g /dev/null
SET ROLE awa_test_work;
SELECT is((awa.work('rights'))::text, '(rights,1,0,1,0)', 'a worker without rights on the table');
RESET ROLE;
SELECT results_eq($$ SELECT j.errors -> 0 ->> 'sqlstate' FROM awa.jobs j WHERE j.queue = 'rights' $$, $$ VALUES ('42501') $$, 'cannot use it through its handler');
GRANT INSERT ON test.done TO awa_test_work;
SELECT test.promote('rights') \g /dev/null
SET ROLE awa_test_work;
SELECT is((awa.work('rights'))::text, '(rights,1,1,0,0)', 'one with rights can');
SELECT throws_ok('SELECT awa.register_sql_handler(''note'', NULL)', '42501', NULL, 'binding is for operators');
RESET ROLE;
DROP OWNED BY awa_test_work;
DROP ROLE awa_test_work;

-- What a function sets is not for the next one, nor for the caller.
CREATE ROLE awa_test_work;
CREATE ROLE awa_test_other;
GRANT awa_test_other TO awa_test_work;
SELECT awa.grant_worker('awa_test_work');
GRANT USAGE ON SCHEMA test TO awa_test_work, awa_test_other;
CREATE TABLE test.seen (path text, who text, lock_timeout text, statement_timeout text, work_mem text, tenant text);
GRANT INSERT ON test.seen TO awa_test_work;
CREATE FUNCTION test.sets(args jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('test.tenant', 'one', true);
    SET LOCAL search_path = test, pg_catalog;
    SET LOCAL lock_timeout = '7s';
    SET statement_timeout = '70s';
    RESET work_mem;
END $$;
ALTER FUNCTION test.sets(jsonb) SET test.tenant = '';
CREATE FUNCTION test.becomes(args jsonb) RETURNS void LANGUAGE plpgsql AS 'BEGIN SET LOCAL ROLE awa_test_other; END';
CREATE FUNCTION test.sees(args jsonb) RETURNS void LANGUAGE sql AS $$
    INSERT INTO test.seen
    SELECT current_setting('search_path'), current_user, current_setting('lock_timeout'), current_setting('statement_timeout'),
           current_setting('work_mem'), current_setting('test.tenant', true) $$;
SELECT awa.register_sql_handler(k, format('test.%I(jsonb)', k)::regprocedure) FROM unnest('{sets,becomes,sees}'::text[]) k \g /dev/null
SELECT awa.insert_job(k, queue => 'set') FROM unnest('{sets,sees,becomes,fails,sees}'::text[]) k \g /dev/null
SELECT current_setting('search_path') AS path \gset
BEGIN;
SET LOCAL ROLE awa_test_work;
SET LOCAL work_mem = '5MB';
SET LOCAL statement_timeout = '80s';
SELECT is((awa.work('set'))::text, '(set,5,4,1,0)', 'functions that set what they like');
SELECT is(concat_ws(' ', current_setting('search_path'), current_user, current_setting('lock_timeout'), current_setting('statement_timeout'),
                    current_setting('work_mem'), current_setting('test.tenant')), :'path' || ' awa_test_work 0 80s 5MB ', 'leave the caller''s settings alone');
COMMIT;
SELECT results_eq('SELECT s.* FROM test.seen s', $$ SELECT 'pg_catalog, pg_temp', 'awa_test_work', '0', '80s', '5MB', '' FROM generate_series(1, 2) $$,
    'and those of the next function');
RESET statement_timeout;
DROP OWNED BY awa_test_work, awa_test_other;
DROP ROLE awa_test_work, awa_test_other;

-- Bad calls.
SELECT test.refuses(format('SELECT awa.work(%s)', c.arguments), '22023', c.pattern, c.pattern)
FROM (VALUES ('''q'', 0', 'field "max_jobs" is 0'), ('''q'', 33', 'field "max_jobs" is 33'), ('''q'', NULL', 'field "max_jobs" is NULL'),
             ('''q'', opts => ''{"x": 1}''', 'field "opts" has no options in this version'), ('''''', 'field "queue" must not be empty'),
             ('NULL', 'field % must not be%')) c (arguments, pattern);
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses('SELECT awa.work(''q'')', '25001', '%', 'an older snapshot');
COMMIT;

SELECT * FROM finish();
