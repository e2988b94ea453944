-- Conventions that every function of the schema keeps.
SELECT * FROM no_plan();

CREATE TEMP VIEW functions AS
SELECT p.oid, p.oid::regprocedure::text AS signature, p.proname AS name, p.proname NOT LIKE '\_%' AS is_public, l.lanname AS language,
       p.prosecdef AS is_definer, p.provolatile AS volatility, p.proparallel AS parallel, p.proisstrict AS is_strict,
       coalesce(p.proconfig, '{}') AS settings, p.prosrc AS source, p.proowner AS owner, p.proargnames AS arguments
FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
WHERE p.pronamespace = 'awa'::regnamespace;

SELECT cmp_ok((SELECT count(*) FROM functions), '>', 100::bigint, 'the catalog query sees the functions');

SELECT is_empty($$
    SELECT signature FROM functions
    WHERE (language = 'plpgsql' OR is_definer) AND 'search_path=pg_catalog, pg_temp' <> ALL (settings)
$$, 'every PL/pgSQL or definer function has a fixed search_path with pg_temp last');

SELECT is_empty($$
    SELECT signature FROM functions WHERE language = 'sql' AND source <> '' AND 'search_path=pg_catalog, pg_temp' <> ALL (settings)
$$, 'an SQL function without search_path has a body that was parsed at install');

SELECT is_empty($$ SELECT signature FROM functions WHERE strpos(source, chr(92)) > 0 $$,
    'no function has a backslash, which means something else where standard_conforming_strings is off');

SELECT is_empty($$ SELECT signature FROM functions WHERE language NOT IN ('sql', 'plpgsql') $$, 'functions are SQL or PL/pgSQL');

SELECT is_empty($$
    SELECT signature FROM functions
    WHERE is_definer AND NOT is_public AND name NOT IN (SELECT c.object_name FROM awa._capabilities() c)
      AND oid NOT IN (SELECT t.tgfoid FROM pg_trigger t WHERE t.tgrelid = 'awa.job_inbox'::regclass)
$$, 'only public functions and what is behind views are SECURITY DEFINER');

SELECT is_empty($$
    SELECT signature FROM functions
    WHERE name LIKE '\_list\_%' AND name IN (SELECT c.object_name FROM awa._capabilities() c)
      AND (NOT is_definer OR arguments IS NOT NULL AND signature NOT LIKE '%()')
$$, 'the readers behind views are SECURITY DEFINER and take no arguments');

SELECT is_empty($$
    SELECT f.signature FROM functions f JOIN awa._capabilities() c ON c.object_class = 'function' AND c.object_name = f.name
    WHERE NOT f.is_definer AND NOT (f.volatility = 'i' AND f.source = '') AND f.name <> 'work'
$$, 'every granted function is SECURITY DEFINER, but for constants and for work, which runs handlers as its caller');

SELECT is_empty($$
    SELECT signature FROM functions WHERE is_definer AND owner IN (SELECT oid FROM pg_roles WHERE rolsuper)
$$, 'no definer function belongs to a superuser');

SELECT is_empty($$ SELECT signature FROM functions WHERE owner <> 'awa_owner'::regrole $$, 'set_owner gave away every function');

SELECT is_empty($$
    SELECT rolname FROM pg_roles WHERE rolname = 'awa_owner'
    AND (rolsuper OR rolcanlogin OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls)
$$, 'the owner cannot log in and has no attributes');

SELECT is_empty($$
    SELECT m.roleid::regrole, m.member::regrole FROM pg_auth_members m WHERE 'awa_owner'::regrole IN (m.member, m.roleid)
$$, 'the owner is a member of nothing and has no members');

SELECT is_empty($$ SELECT name FROM functions GROUP BY name HAVING count(*) > 1 $$, 'no function is overloaded');

SELECT is_empty($$
    SELECT f.signature FROM functions f JOIN pg_proc p ON p.oid = f.oid
    WHERE f.is_public AND ('smallint'::regtype = ANY (p.proargtypes) OR 'smallint[]'::regtype = ANY (p.proargtypes))
$$, 'public functions take integer or bigint, never smallint');

SELECT is_empty($$
    SELECT f.signature, a.name FROM functions f, unnest(f.arguments[:(SELECT pronargs FROM pg_proc p WHERE p.oid = f.oid)]) a (name)
    WHERE f.is_public = (a.name LIKE 'p\_%')
$$, 'internal parameters start with p_, public ones carry the names of the contract');

SELECT is_empty($$
    SELECT signature FROM functions
    WHERE source ~* '\m(INSERT\s+INTO|UPDATE\s+@?awa|DELETE\s+FROM|TRUNCATE|nextval|setval|pg_notify|set_config|pg_current_xact_id|LOCK\s+TABLE)\M'
    AND NOT (volatility = 'v' AND parallel = 'u')
$$, 'functions that write are VOLATILE PARALLEL UNSAFE');

SELECT is_empty($$
    SELECT signature FROM functions WHERE source ~ 'advisory_xact_lock' AND NOT (volatility = 'v' AND parallel = 'u')
$$, 'functions that lock are VOLATILE PARALLEL UNSAFE');

SELECT is_empty($$
    SELECT signature FROM functions WHERE volatility IN ('s', 'i') AND parallel <> 's'
$$, 'functions that only read are PARALLEL SAFE');

SELECT is_empty($$
    SELECT signature FROM functions WHERE volatility = 'v' AND parallel <> 'u' AND name <> '_pick_shard'  -- that is random() alone
$$, 'VOLATILE functions are PARALLEL UNSAFE');

SELECT is_empty($$ SELECT signature FROM functions WHERE is_strict AND volatility = 'v' $$, 'STRICT is for pure functions');

SELECT is_empty($$
    SELECT signature FROM functions WHERE volatility = 'i' AND source ~* '\mawa\.(_setting|queue_meta|queue_lanes|deferred_jobs)\M'
$$, 'nothing IMMUTABLE reads a table');

SELECT is_empty($$
    SELECT name FROM functions WHERE source ~* 'WHEN\s+OTHERS' AND name NOT IN ('_tick', 'work')
$$, 'nothing but tick and work, which report it, catches every error');

SELECT is_empty($$ SELECT signature FROM functions WHERE source ~ '#variable_conflict' $$, 'no function guesses between names');

SELECT is_empty($$
    SELECT f.signature, o.name FROM functions f,
         (SELECT c.relname::text AS name FROM pg_class c WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p', 'v')) o
    WHERE f.source ~ ('\m(FROM|JOIN|INTO|UPDATE|TABLE|TRUNCATE)\s+' || o.name || '\M')
    UNION ALL
    SELECT f.signature, g.name FROM functions f, functions g
    WHERE NOT g.is_public AND f.source ~ ('[^.a-z0-9_]' || g.name || '\(')
$$, 'our own names are qualified');

SELECT is_empty($$
    SELECT f.signature FROM functions f WHERE f.is_public
    AND f.name NOT IN (SELECT c.object_name FROM awa._capabilities() c WHERE c.object_class = 'function')
    AND f.name NOT IN ('set_owner', 'grant_producer', 'grant_worker', 'grant_operator', 'grant_reader')
$$, 'every public function belongs to a capability or to the owner alone');

SELECT is_empty($$
    SELECT c.object_name FROM awa._capabilities() c WHERE c.object_class = 'function' AND c.object_name NOT IN (SELECT name FROM functions)
    UNION ALL
    SELECT c.object_name FROM awa._capabilities() c WHERE c.object_class IN ('view', 'inbox') AND to_regclass('awa.' || c.object_name) IS NULL
$$, 'capabilities name nothing that does not exist');

SELECT * FROM finish();
