-- Every SQLSTATE that the code raises is one that error_codes() explains.
SELECT * FROM no_plan();

CREATE TEMP VIEW raised AS
SELECT p.proname AS name, m[1] AS sqlstate
FROM pg_proc p, regexp_matches(p.prosrc, $re$(?:_refuse\(\s*|ERRCODE\s*=\s*|SQLSTATE\s+)'([0-9A-Z]{5})'$re$, 'gi') m
WHERE p.pronamespace = 'awa'::regnamespace;

SELECT cmp_ok((SELECT count(*) FROM raised), '>', 30::bigint, 'the catalog query sees where errors are raised');

SELECT is_empty($$
    SELECT r.name, r.sqlstate FROM raised r
    WHERE r.sqlstate NOT IN (SELECT e.sqlstate FROM awa.error_codes() e)
      AND r.sqlstate <> 'JQ000'  -- ends a block whose locks must vanish; never leaves its function
$$, 'every SQLSTATE that is raised is listed');

SELECT is_empty($$
    SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace
    AND p.prosrc ~ 'ERRCODE = ''JQ000''' AND p.prosrc !~ 'EXCEPTION WHEN SQLSTATE ''JQ000'''
$$, 'the internal SQLSTATE is caught where it is raised');

SELECT is_empty($$
    SELECT e.sqlstate FROM awa.error_codes() e
    WHERE '' IN (e.sqlstate, e.name, e.description, e.hint) OR (e.*) IS NULL OR e.name !~ '^[a-z_]+$'
$$, 'every code has a name, a description and a hint');

SELECT is_empty($$ SELECT e.sqlstate FROM awa.error_codes() e GROUP BY e.sqlstate HAVING count(*) > 1 $$, 'codes are unique');
SELECT is_empty($$ SELECT e.name FROM awa.error_codes() e GROUP BY e.name HAVING count(*) > 1 $$, 'names are unique');

SELECT set_eq(
    $$ SELECT e.sqlstate FROM awa.error_codes() e WHERE e.sqlstate LIKE 'JQ%' $$,
    $$ VALUES ('JQ001'), ('JQ003'), ('JQ004'), ('JQ005'), ('JQ006'), ('JQ007') $$,
    'class JQ is what the contract says');

SELECT is_empty($$
    SELECT p.proname FROM pg_proc p
    WHERE p.pronamespace = 'awa'::regnamespace AND p.prosrc ~ 'RAISE\s+EXCEPTION\s+USING' AND p.prosrc !~ 'HINT\s*=' AND p.prosrc !~ 'JQ000'
$$, 'every error has a hint');

SELECT is_empty($$
    SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace AND p.prosrc ~ 'RAISE\s+EXCEPTION\s+''' $$,
    'no error goes without a SQLSTATE');

SELECT * FROM finish();
