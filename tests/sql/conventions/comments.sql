-- Every object of the schema says what it is for.
SELECT * FROM no_plan();

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM pg_proc p
    WHERE p.pronamespace = 'awa'::regnamespace AND coalesce(obj_description(p.oid, 'pg_proc'), '') = ''
$$, 'every function has a comment');

SELECT is_empty($$
    SELECT c.relkind, c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S') AND coalesce(obj_description(c.oid, 'pg_class'), '') = ''
$$, 'every table, leaf, view and sequence has a comment');

SELECT is_empty($$
    SELECT t.oid::regtype FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
    WHERE t.typnamespace = 'awa'::regnamespace AND (t.typtype IN ('e', 'd', 'r') OR c.relkind = 'c')
      AND coalesce(obj_description(t.oid, 'pg_type'), '') = ''
$$, 'every type has a comment');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM pg_proc p
    WHERE p.pronamespace = 'awa'::regnamespace
      AND (p.proname LIKE '\_%') <> (obj_description(p.oid, 'pg_proc') LIKE 'Internal: %')
$$, 'comments say which functions are internal');

SELECT is_empty($$
    SELECT p.oid::regprocedure, m[1] FROM pg_proc p, regexp_matches(obj_description(p.oid, 'pg_proc'), '\m(JQ\d{3}|\d{5})\M', 'g') m
    WHERE p.pronamespace = 'awa'::regnamespace AND m[1] NOT IN (SELECT e.sqlstate FROM awa.error_codes() e)
      AND m[1] <> '42501'  -- PostgreSQL's own: no right to do this
      AND m[1] NOT IN (SELECT s.default_value FROM awa.settings s)
$$, 'comments name only SQLSTATEs that error_codes() explains');

SELECT isnt_empty($$
    SELECT FROM pg_description d WHERE d.classoid = 'pg_extension'::regclass
    AND d.objoid = (SELECT e.oid FROM pg_extension e WHERE e.extname = 'awa')
$$, 'the extension has a comment');

SELECT * FROM finish();
