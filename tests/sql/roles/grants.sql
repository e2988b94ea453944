-- What grant_* and set_owner take and refuse. What each capability may do: tests/python/test_rights.py, by real calls.
\ir ../support.psql
SELECT * FROM no_plan();

-- Roles belong to the cluster, so their names are this file's own.
DROP ROLE IF EXISTS awa_test_producer, awa_test_both;
CREATE ROLE awa_test_producer;
CREATE ROLE awa_test_both;
SET ROLE awa_owner;
SELECT lives_ok(format('SELECT awa.grant_%s(%L)', g.capability, g.role), format('the owner grants %s', g.capability))
FROM (VALUES ('producer', 'awa_test_producer'), ('worker', 'awa_test_both'), ('reader', 'awa_test_both'), ('producer', 'awa_test_both'),
    ('producer', 'awa_test_both')) g (capability, role);
RESET ROLE;
SET ROLE awa_test_producer;
SELECT throws_ok(format('SELECT awa.grant_%s(''awa_test_producer'')', c), '42501', NULL, format('who has a capability cannot grant %s', c))
FROM unnest('{producer,worker,operator,reader}'::text[]) c;
SELECT throws_ok($$ SELECT awa.set_owner('awa_test_producer') $$, '42501', NULL, 'nor take the schema');
RESET ROLE;
SELECT ok(has_function_privilege('awa_test_both', 'awa.work(text, integer, jsonb)', 'EXECUTE')
    AND has_function_privilege('awa_test_both', 'awa.insert_jobs(jsonb, jsonb)', 'EXECUTE')
    AND has_table_privilege('awa_test_both', 'awa.jobs', 'SELECT')
    AND NOT has_function_privilege('awa_test_both', 'awa.pause_queue(text)', 'EXECUTE'), 'capabilities add up');

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

DROP OWNED BY awa_test_producer, awa_test_both;
DROP ROLE awa_test_producer, awa_test_both;
SELECT * FROM finish();
