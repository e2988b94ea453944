-- Each capability can do exactly what its list says; a role without one can do nothing.
\ir ../support.psql
SELECT * FROM no_plan();

-- Roles belong to the cluster, so their names are this file's own.
DROP ROLE IF EXISTS awa_test_producer, awa_test_worker, awa_test_operator, awa_test_reader, awa_test_nobody;
CREATE ROLE awa_test_producer;
CREATE ROLE awa_test_worker;
CREATE ROLE awa_test_operator;
CREATE ROLE awa_test_reader;
CREATE ROLE awa_test_nobody;
SET ROLE awa_owner;
SELECT lives_ok(format('SELECT awa.grant_%s(%L)', c, 'awa_test_' || c), format('the owner grants %s', c)) FROM unnest('{producer,worker,operator,reader}'::text[]) c;
RESET ROLE;

CREATE TEMP VIEW rights AS
SELECT r.capability, p.proname::text AS name, has_function_privilege('awa_test_' || r.capability, p.oid, 'EXECUTE') AS allowed
FROM unnest('{producer,worker,operator,reader,nobody}'::text[]) r (capability), pg_proc p WHERE p.pronamespace = 'awa'::regnamespace
UNION ALL
SELECT r.capability, c.relname::text, CASE c.relkind WHEN 'S' THEN has_sequence_privilege('awa_test_' || r.capability, c.oid,
    'USAGE, SELECT, UPDATE')
    ELSE has_table_privilege('awa_test_' || r.capability, c.oid, CASE c.relname WHEN 'job_inbox' THEN 'INSERT' ELSE 'SELECT' END) END
FROM unnest('{producer,worker,operator,reader,nobody}'::text[]) r (capability), pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p', 'v',
    'S');
SELECT set_eq(format($$ SELECT r.name FROM rights r WHERE r.allowed AND r.capability = %L $$,
    c), format($$ SELECT DISTINCT c.object_name FROM awa._capabilities() c WHERE c.capability = %L $$, c),
    format('a %s can use exactly what its list says', c)) FROM unnest('{producer,worker,operator,reader}'::text[]) c;
SELECT is_empty($$ SELECT r.name FROM rights r WHERE r.allowed AND r.capability = 'nobody' $$,
    'a role without a capability can use nothing');
SELECT is_empty($$
    SELECT r.role, c.oid::regclass FROM unnest('{producer,worker,operator,reader,nobody}'::text[]) r (role), pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND has_table_privilege('awa_test_' || r.role, c.oid,
        CASE c.relname WHEN 'job_inbox' THEN 'SELECT, ' ELSE 'INSERT, ' END || 'UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
$$, 'nobody may write to a table or view, but insert into job_inbox, which nobody may read');
SELECT is_empty($$ SELECT r FROM unnest('{producer,worker,operator,reader,nobody}'::text[]) r WHERE has_schema_privilege('awa_test_' || r, 'awa', 'CREATE') $$,
    'nobody may create in the schema');
SELECT results_eq($$ SELECT has_schema_privilege('awa_test_' || r, 'awa', 'USAGE') FROM unnest('{producer,worker,operator,reader,nobody}'::text[]) r $$, $$ VALUES (true), (true), (true), (true), (false) $$,
    'a capability brings USAGE on the schema');

-- The lists of the contract.
SELECT set_eq($$ SELECT c.object_name FROM awa._capabilities() c WHERE c.capability = 'producer' $$,
    $$ SELECT unnest('{insert_job,insert_jobs,insert_many,ordering_shard,unique_key,concurrency_digest,cancel_by_unique_key,job_inbox,version,schema_version,error_codes}'::text[]) $$,
        'a producer enqueues');
SELECT is_empty($$ SELECT c.object_name FROM awa._capabilities() c WHERE c.capability = 'reader' AND (c.object_name ~ '^(insert|claim|finish|complete|cancel|pause|resume|retry|purge|declare|set_|verify|tick|heartbeat|register)') $$,
    'a reader changes nothing');

-- Real calls under each role.
GRANT USAGE ON SCHEMA test TO PUBLIC;
CREATE FUNCTION test.outcome(p_role text, p_sql text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('SET LOCAL ROLE %I', p_role);
    EXECUTE p_sql;
    RESET ROLE;
    RETURN 'allowed';
EXCEPTION
WHEN insufficient_privilege THEN
    RETURN SQLSTATE;
WHEN object_not_in_prerequisite_state THEN
    RETURN 'allowed'; -- verify() after a tick that planned, in one transaction
END $$;
CREATE TABLE test.calls (who text, sql text);
INSERT INTO test.calls VALUES
    ('producer', 'SELECT awa.insert_job(''k'', queue => ''q'')'), ('producer',
        'SELECT awa.insert_jobs(''[{"kind": "k", "queue": "q"}]'')'),
    ('producer', 'SELECT awa.insert_many(''k'', ''{1,2}'', ''q'')'), ('producer', 'SELECT awa.ordering_shard(''k'', 4)'),
    ('producer', 'INSERT INTO awa.job_inbox (kind, queue) VALUES (''k'', ''q'')'), ('', 'SELECT FROM awa.job_inbox'),
    ('', 'INSERT INTO awa.job_inbox (kind, queue) VALUES (''k'', ''q'') RETURNING kind'),
    ('producer', 'SELECT awa.unique_key(''k'', NULL, NULL, NULL)'), ('producer', 'SELECT awa.concurrency_digest(''k'')'),
    ('producer', 'SELECT awa.insert_job(''k'', queue => ''q'', opts => ''{"unique": {"on_conflict": "replace"}}'')'),
    ('producer', 'SELECT awa.cancel_by_unique_key(awa.unique_key(''k'', NULL, ''{}'', NULL))'),
    ('worker', 'SELECT awa.register_instance(''00000000-0000-4000-8000-000000000001'')'), ('worker',
        'SELECT awa.heartbeat(''00000000-0000-4000-8000-000000000001'')'),
    ('worker', 'SELECT awa.claim_ready_runtime(''q'', 1, ''00000000-0000-4000-8000-000000000001'')'), ('worker',
        'SELECT awa.claim_status(''q'', true)'),
    ('worker', 'SELECT awa.complete_jobs(''00000000-0000-4000-8000-000000000001'', 0, 1, ''{1}'')'), ('worker',
        'SELECT awa.finish_jobs(''00000000-0000-4000-8000-000000000001'', ''[]'')'),
    ('worker', 'SELECT awa.attempt_status(1, 1, 0, 1, 1)'), ('worker', 'SELECT awa.set_progress(1, 1, 0, 1, 1, ''{}'')'), ('worker operator',
        'SELECT awa.tick()'),
    ('operator', 'SELECT awa.declare_queue(''q'')'), ('operator', 'SELECT awa.pause_queue(''q'')'), ('operator',
        'SELECT awa.resume_queue(''q'')'),
    ('operator', 'SELECT awa.update_job((SELECT max(job_id) FROM awa.jobs WHERE state = ''available''), ''{"priority": 3}'')'),
    ('operator', 'SELECT awa.retry_job((SELECT max(job_id) FROM awa.jobs WHERE state = ''available''))'),
    ('operator', 'SELECT awa.drain_queue(''nothing'')'), ('operator', 'SELECT awa.register_sql_handler(''x'', NULL)'),
    ('worker', 'SELECT awa.work(''nothing'')'), ('operator reader', 'SELECT awa.api()'),
    ('operator reader', 'SELECT awa.explain_job((SELECT min(job_id) FROM awa.jobs))'),
    ('operator', 'SELECT awa.cancel_job((SELECT min(job_id) FROM awa.jobs))'), ('operator', 'SELECT awa.purge_dlq(1)'), ('operator', 'SELECT awa.set_setting(''rescue_rows'', ''10'')'), ('operator',
        'SELECT awa.verify()'),
    ('operator reader', 'SELECT awa.job((SELECT min(job_id) FROM awa.jobs))'), ('operator reader', 'SELECT awa.queue_counts(''q'')'), ('operator reader', 'SELECT awa.queue_depths()'), ('operator reader',
        'SELECT awa.ring_status()'),
    ('operator reader', 'SELECT FROM awa.jobs'), ('operator reader', 'SELECT FROM awa.terminal_jobs'), ('operator reader', 'SELECT FROM awa.dlq'), ('operator reader',
        'SELECT FROM awa.queues'),
    ('operator reader', 'SELECT FROM awa.instances'), ('operator reader', 'SELECT FROM awa.settings'),
    ('producer worker operator reader', 'SELECT awa.version(), awa.schema_version(), awa.error_codes()'),
    ('', 'SELECT awa.set_owner(''awa_test_nobody'')'), ('', 'SELECT awa.grant_worker(''awa_test_nobody'')'), ('', 'SELECT FROM awa.ready_entries'), ('',
        'SELECT awa._rescue_attempts(1, now())'),
    ('', 'SELECT awa._list_ready()'), ('', 'SELECT nextval(''awa.job_ids'')'), ('',
        'INSERT INTO awa.setting_overrides VALUES (''a'', ''1'')');
SELECT is(test.outcome('awa_test_' || r, c.sql), CASE WHEN r = ANY (string_to_array(c.who, ' ')) THEN 'allowed' ELSE '42501' END, format('%s: %s', r, c.sql))
FROM test.calls c, unnest('{producer,worker,operator,reader,nobody}'::text[]) r;

-- A caller's objects do not get in the way.
CREATE FUNCTION test.shadowed() RETURNS text LANGUAGE plpgsql SET search_path = pg_temp, awa AS $$
BEGIN
    CREATE TEMP TABLE pg_class (oid oid);
    CREATE TEMP TABLE queue_meta (queue text);
    RETURN (awa.insert_job('k', queue => 'shadowed')).state;
END $$;
SELECT is(test.shadowed(), 'available', 'temporary tables of the caller change nothing');

SELECT test.refuses(format('SELECT awa.%s(NULL)', f), v.state, v.pattern, f || ' needs a role')
FROM (VALUES ('grant_producer', '22023', 'field "role" must not be NULL'), ('grant_worker', '22023', 'field "role"%'), ('grant_operator', '22023', 'field "role"%'), ('grant_reader', '22023',
    'field "role"%'),
             ('set_owner', '42704', 'field "owner" names no role')) v (f, state, pattern);
SELECT test.refuses(format('SELECT awa.%s(4294967294::oid::regrole)', f), '42704', 'field "%" names no role', f || ' needs a role that exists')
FROM unnest('{grant_producer,grant_worker,grant_operator,grant_reader,set_owner}'::text[]) f;

DROP OWNED BY awa_test_producer, awa_test_worker, awa_test_operator, awa_test_reader, awa_test_nobody;
DROP ROLE awa_test_producer, awa_test_worker, awa_test_operator, awa_test_reader, awa_test_nobody;
SELECT * FROM finish();
