-- PUBLIC gets nothing.
\ir ../support.psql
SELECT * FROM no_plan();

-- A queue that exists brings sequences that were made after install.
SELECT lives_ok($$ SELECT awa.declare_queue('q', '{"strict_fifo": true, "enqueue_shards": 2}') $$, 'a queue has lanes');

SELECT is_empty($$
    SELECT p.oid::regprocedure FROM pg_proc p
    WHERE p.pronamespace = 'awa'::regnamespace AND has_function_privilege('public', p.oid, 'EXECUTE')
$$, 'PUBLIC may call no function');

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind IN ('r', 'p', 'v')
      AND has_table_privilege('public', c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
$$, 'PUBLIC has no right on any table, leaf or view');

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace
      AND CASE WHEN c.relkind = 'S' THEN has_sequence_privilege('public', c.oid, 'USAGE, SELECT, UPDATE') END
$$, 'PUBLIC has no right on any sequence, those of lanes included');

SELECT is_empty($$
    SELECT t.oid::regtype FROM pg_type t
    WHERE t.typnamespace = 'awa'::regnamespace AND has_type_privilege('public', t.oid, 'USAGE')
$$, 'PUBLIC may use no type, rows of tables included');

SELECT ok(NOT has_schema_privilege('public', 'awa', 'USAGE') AND NOT has_schema_privilege('public', 'awa', 'CREATE'),
    'PUBLIC has no right on the schema');

SELECT is_empty($$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'S' AND c.relowner <> 'awa_owner'::regrole
$$, 'what is made later belongs to the owner as well');

SELECT is_empty($$
    SELECT c.oid::regclass, d.deptype FROM awa.queue_lanes l, LATERAL (VALUES (l.position_seq), (l.hint_seq)) s (seq)
    JOIN pg_class c ON c.oid = s.seq
    LEFT JOIN pg_depend d ON d.objid = c.oid AND d.classid = 'pg_class'::regclass AND d.refobjid = 'awa.queue_lanes'::regclass AND d.deptype = 'a'
    WHERE d.objid IS NULL
$$, 'the sequences of lanes go when the extension goes');

SELECT * FROM finish();
