-- job_inbox: COPY and INSERT, checked as insert_jobs checks, all or nothing, and nothing is left over.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE VIEW test.stored AS
SELECT j.kind, j.queue, j.priority, j.max_attempts, j.args, j.state, j.tags FROM awa.jobs j;

COPY awa.job_inbox (kind, queue, priority, max_attempts, args, run_at, opts) FROM STDIN (FORMAT csv);
a,,,,,,
b,q2,4,2,"{""n"": 1.50}",,"{""tags"": [""t""]}"
c,,,,,2999-01-31T12:00:00Z,
d,,,,null,2001-01-31 12:00:00+01:30,
e,,,,"""x""",,"{""delay_seconds"": 60}"
\.
SELECT results_eq('SELECT * FROM test.stored s ORDER BY s.kind', $$
    VALUES ('a', 'default', 2, 25, '{}'::jsonb, 'available', NULL::text[]), ('b', 'q2', 4, 2, '{"n": 1.50}', 'available', '{t}'),
           ('c', 'default', 2, 25, '{}', 'scheduled', NULL), ('d', 'default', 2, 25, 'null', 'available', NULL),
           ('e', 'default', 2, 25, '"x"', 'scheduled', NULL) $$,
    'a row is a job; NULL means the default, and JSON null is a value');
SELECT is((awa.job(j.job_id)).run_at, '2999-01-31T12:00:00Z'::timestamptz, 'run_at is the instant that was given') FROM awa.jobs j WHERE j.kind = 'c';
SELECT results_eq($$ SELECT c.kind FROM test.claim('default') c $$, $$ VALUES ('a'), ('d') $$, 'jobs of a lane keep the order of the rows');

COPY awa.job_inbox (kind) FROM STDIN;
\.
SELECT is_empty($$ SELECT FROM awa.jobs j WHERE j.kind NOT IN ('a', 'b', 'c', 'd', 'e') $$, 'no rows, no jobs');

INSERT INTO awa.job_inbox (kind, queue) VALUES ('i1', 'insert'), ('i2', 'insert');
INSERT INTO awa.job_inbox (kind, queue) SELECT 'i' || n, 'insert' FROM generate_series(3, 2000) n;
SELECT is((SELECT array_agg(j.kind ORDER BY j.job_id) FROM awa.jobs j WHERE j.queue = 'insert'), ARRAY(SELECT 'i' || n FROM generate_series(1, 2000) n),
    'many portions keep the order as well');

-- Errors
CREATE FUNCTION test.load(p_before integer, p_row jsonb) RETURNS void LANGUAGE sql AS $$
    INSERT INTO awa.job_inbox
    SELECT r.* FROM generate_series(0, p_before) n,
        jsonb_populate_record(NULL::awa.job_inbox, CASE n WHEN p_before THEN p_row ELSE '{"kind": "k"}' END || '{"queue": "no"}') r
$$;
SELECT test.refuses(format('SELECT test.load(%s, %L)', b, v.item), v.state, format('row %s: ', b + 1) || v.pattern, format('row %s: %s', b + 1, left(v.item::text, 60)))
FROM (VALUES
    ('{}'::jsonb, '22023', 'field "kind" must not be empty'), ('{"kind": ""}', '22023', 'field "kind" must not be empty'),
    (jsonb_build_object('kind', repeat('x', 201)), '23514', 'field "kind" has 201 characters'),
    ('{"kind": "a\nb"}', '22023', 'field "kind" contains a control character'), ('{"kind": "k", "priority": 5}', '23514', 'field "priority" is 5'),
    ('{"kind": "k", "max_attempts": 0}', '23514', 'field "max_attempts" is 0'), ('{"kind": "k", "run_at": "infinity"}', '22023', 'field "run_at" is infinity'),
    ('{"kind": "k", "run_at": "10000-01-01Z"}', '23514', 'field "run_at" is 10000-01-01%'),
    (jsonb_build_object('kind', 'k', 'args', repeat('x', 1048576)), '23514', 'field "args" has 1048578 bytes'),
    ('{"kind": "k", "opts": {"x": 1}}', '22023', 'field "opts" has the unknown option x'), ('{"kind": "k", "opts": 5}', '22023', 'field "opts" must be a JSON object'),
    ('{"kind": "k", "opts": {"after": [1]}}', 'JQ007', 'option "after"%'),
    ('{"kind": "k", "run_at": "2999-01-01Z", "opts": {"delay_seconds": 1}}', '22023', 'field "run_at" and option "delay_seconds"%'),
    ('{"kind": "k", "opts": {"unique": {"by": 1}}}', '22023', 'option "by" of "unique"%'),
    ('{"kind": "k", "opts": {"backpressure": "signal"}}', '22023', 'option "backpressure" of job_inbox%')
) v (item, state, pattern), unnest('{0,1,1000}'::integer[]) b;
SELECT is((awa.queue_counts('no'))::text, '(no,0,0,0,0,0,0,0,0,0)', 'one bad row fails the whole load with nothing enqueued');

-- Nothing is left over: in the session, in a transaction, behind a savepoint, and with rows that wait for the end.
\set ON_ERROR_STOP off
BEGIN;
INSERT INTO awa.job_inbox (kind, queue) VALUES ('kept', 'rest');
SAVEPOINT s;
COPY awa.job_inbox (kind, queue, priority, opts) FROM STDIN (FORMAT csv);
lost,rest,,
lost,rest,,"{""unique"": {}}"
lost,rest,9,
\.
ROLLBACK TO s;
COPY awa.job_inbox (kind, priority) FROM STDIN;
lost	1
lost	no number
\.
ROLLBACK TO s;
INSERT INTO awa.job_inbox (kind, queue) VALUES ('lost', 'rest');
ROLLBACK TO s;
INSERT INTO awa.job_inbox (kind, queue, opts) VALUES ('kept', 'rest', '{"unique": {}}');
COMMIT;
COPY awa.job_inbox (kind, queue, priority) FROM STDIN;
lost	rest	\N
lost	rest	9
\.
\set ON_ERROR_STOP on
INSERT INTO awa.job_inbox (kind, queue) VALUES ('kept', 'rest');
SELECT results_eq($$ SELECT s.kind, count(*) FROM test.stored s WHERE s.queue = 'rest' OR s.kind IN ('kept', 'lost') GROUP BY s.kind $$,
    $$ VALUES ('kept', 3::bigint) $$, 'statements that failed leave nothing to those that follow');
SELECT is(string_agg(current_setting(name, true), ''), '', 'and no row stays in the session')
FROM unnest('{awa.inbox,awa.inbox_rows,awa.inbox_chunk,awa.inbox_held_1,awa.inbox_held_2}'::text[]) name;

-- A statement within a statement: what is collected is stored once.
CREATE FUNCTION test.nested(p_kind text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO awa.job_inbox (kind, queue) VALUES ('inner ' || p_kind, 'nested');
    BEGIN
        INSERT INTO awa.job_inbox (kind, queue, priority) VALUES ('lost', 'nested', 9);
    EXCEPTION WHEN check_violation THEN
        NULL;
    END;
    RETURN p_kind;
END $$;
INSERT INTO awa.job_inbox (kind, queue) SELECT test.nested(k), 'nested' FROM unnest('{a,b}'::text[]) k;
SELECT set_eq($$ SELECT s.kind FROM test.stored s WHERE s.queue = 'nested' $$, '{a,b,inner a,inner b}'::text[], 'loads within loads');
SELECT is((SELECT count(*) FROM test.stored s WHERE s.queue = 'nested'), 4::bigint, 'each row once');

-- Duplicates
INSERT INTO awa.job_inbox (kind, queue, args, opts) SELECT 'u', 'unique', to_jsonb(n % 700), '{"unique": {}}' FROM generate_series(1, 2100) n;
SELECT is((SELECT count(*) FROM test.stored s WHERE s.queue = 'unique'), 700::bigint, 'a key that comes twice in a load belongs to the first row');
INSERT INTO awa.job_inbox (kind, queue, args, opts)
VALUES ('r', 'unique', '{"id": 1, "n": 1}', '{"unique": {"by": ["args.id"]}}'), ('r', 'unique', '{"id": 1, "n": 2}', '{"unique": {"by": ["args.id"], "on_conflict": "replace"}}'),
       ('plain', 'unique', '1', NULL), ('r', 'unique', '{"id": 2, "n": 1}', '{"unique": {"by": ["args.id"]}}');
INSERT INTO awa.job_inbox (kind, queue, args, opts) VALUES ('r', 'unique', '{"id": 2, "n": 9}', '{"unique": {"by": ["args.id"]}}');
SELECT results_eq($$ SELECT s.args FROM test.stored s WHERE s.kind = 'r' ORDER BY s.args -> 'id' $$, $$ VALUES ('{"n": 2, "id": 1}'::jsonb), ('{"n": 1, "id": 2}') $$,
    'each row''s own on_conflict decides');
SELECT test.refuses($$ INSERT INTO awa.job_inbox (kind, queue, args, opts) VALUES ('lost', 'unique', '1', NULL),
                       ('r', 'unique', '{"id": 2}', '{"unique": {"by": ["args.id"], "on_conflict": "raise"}}') $$, '23505', 'job % holds the unique key', 'raise');
SELECT is_empty($$ SELECT FROM test.stored s WHERE s.kind = 'lost' $$, 'fails the load');

-- Backpressure
SELECT test.refuses($$ INSERT INTO awa.job_inbox (kind, queue, opts) SELECT 'k', 'unique', '{"backpressure": {"reject": 700}}' FROM generate_series(1, 500) $$,
    'JQ003', 'option "backpressure": % jobs wait%', 'a load can be turned away');
INSERT INTO awa.job_inbox (kind, queue, opts) SELECT 'k', 'paced', '{"backpressure": {"reject": 10}}' FROM generate_series(1, 1000);
SELECT is((awa.queue_counts('paced')).available, 1000::bigint, 'its own jobs do not count');

-- Sharded and strict queues
SELECT lives_ok($$ SELECT awa.declare_queue('sharded', '{"enqueue_shards": 4}'), awa.declare_queue('strict', '{"strict_fifo": true}') $$, 'queues with options');
INSERT INTO awa.job_inbox (kind, queue, opts) SELECT 'k', q, jsonb_build_object('ordering_key', n::text) FROM generate_series(1, 100) n, unnest('{sharded,strict}'::text[]) q;
SELECT is((SELECT array_agg(d.depth ORDER BY d.shard) FROM awa.queue_depths() d WHERE d.queue = 'sharded'),
          (SELECT array_agg(x.c ORDER BY x.s) FROM (SELECT awa.ordering_shard(n::text, 4) AS s, count(*) AS c FROM generate_series(1, 100) n GROUP BY 1) x),
    'jobs go to the shards of their ordering keys');
SELECT is((awa.queue_counts('strict')).available, 100::bigint, 'and to strict queues');

-- Settings that somebody wrote by hand are rows like others.
SET awa.inbox = '["forged", {}, "forged", 9, 25, null, null]';
SELECT test.refuses($$ INSERT INTO awa.job_inbox (kind, queue) VALUES ('k', 'forged') $$, '23514', 'row 1: field "priority" is 9', 'forged rows are checked');
RESET awa.inbox;

SELECT is_empty($$ SELECT FROM awa.job_inbox $$, 'there is nothing to read');

SELECT * FROM finish();
