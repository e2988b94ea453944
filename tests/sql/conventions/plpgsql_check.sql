-- Static checks of PL/pgSQL bodies, where plpgsql_check is installed. Three kinds of notes are not findings here:
-- implicit casts between numbers; "should be STABLE", because a STABLE function would look at its caller's snapshot, and
-- these must look at the present; "maybe unmodified", which it says of every column that a dynamic query returns.
SELECT * FROM no_plan();

SELECT EXISTS (SELECT FROM pg_extension e WHERE e.extname = 'plpgsql_check') AS available \gset
\if :available
CREATE TEMP TABLE accepted (name text, pattern text, reason text);
INSERT INTO accepted VALUES
    ('_cancel_job', 'control reached end of function%', 'ends by _refuse'),
    ('_retry_job', 'control reached end of function%', 'ends by _refuse'),
    ('_update_job', 'control reached end of function%', 'ends by _refuse'),
    ('_parse_jobs', 'control reached end of function%', 'ends by _refuse'), ('_parse_rows', 'control reached end of function%', 'ends by _refuse'),
    ('_parse_run_at', 'control reached end of function%', 'ends by _refuse'),
    ('_find_done', 'cannot determinate a result of dynamic SQL', 'a row type whose columns are checked at install'),
    ('_create_for_slots', 'routine is marked as VOLATILE, should be IMMUTABLE', 'it makes a function'),
    ('_take_from_slot', 'cannot determinate a result of dynamic SQL', 'a row type whose columns are checked at install'),
    ('_read_ready', 'composite OUT variable%', 'a column of a set'),
    ('_find_deferred', 'composite OUT variable%', 'a column of a record'),
    ('_create_leaves', 'text type variable is not sanitized', 'index definitions from tables.sql'),
    ('_prune_slot', 'text type variable is not sanitized', 'leaf names from _ring_tables'),
    ('_waiting_lanes', 'text type variable is not sanitized', 'numbers only'),
    ('work', 'text type variable is not sanitized', 'a name from the catalog, quoted by regproc'),
    ('_close_to_public', 'text type variable is not sanitized', 'names from the catalog, quoted by regclass and the like'),
    ('_give_objects', 'text type variable is not sanitized', 'names from the catalog, quoted by regclass and regrole');

CREATE TEMP VIEW findings AS
SELECT p.proname::text AS name, c.level, c.lineno, c.message, c.detail
FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang AND l.lanname = 'plpgsql',
     plpgsql_check_function_tb(p.oid, CASE p.prorettype WHEN 'trigger'::regtype THEN 'awa.job_inbox'::regclass ELSE 0 END,
                               fatal_errors => false, other_warnings => true, performance_warnings => true,
                               extra_warnings => true, security_warnings => true, compatibility_warnings => true) c
WHERE p.pronamespace = 'awa'::regnamespace
  AND NOT (c.level = 'performance' AND (c.message = 'target type is different type than source type'
                                        OR c.message LIKE 'routine is marked as VOLATILE, should be STABLE%'
                                        OR c.message = 'routine is marked as STABLE, should be IMMUTABLE'))
  AND c.message NOT LIKE 'OUT variable % is maybe unmodified';

SELECT is_empty($$
    SELECT f.* FROM findings f
    WHERE NOT EXISTS (SELECT FROM accepted a WHERE a.name = f.name AND f.message LIKE a.pattern)
$$, 'plpgsql_check finds nothing but what is explained here');

SELECT is_empty($$
    SELECT a.* FROM accepted a WHERE NOT EXISTS (SELECT FROM findings f WHERE a.name = f.name AND f.message LIKE a.pattern)
$$, 'nothing is explained that it no longer finds');
\else
SELECT skip('plpgsql_check is not installed here', 2);
\endif

SELECT * FROM finish();
