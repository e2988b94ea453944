-- Case b14: each value comes back equal, or is refused before anything is written; all paths agree.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE TABLE test.payloads (id serial, title text, args jsonb);
INSERT INTO test.payloads (title, args) VALUES
    ('2^53 + 1', '{"n": 9007199254740993}'), ('-2^63', '{"n": -9223372036854775808}'), ('10^30',
        '{"n": 1000000000000000000000000000000}'),
    ('1e308', '{"n": 1e308}'), ('1e400', '{"n": 1e400}'), ('-0.0', '{"n": -0.0}'), ('1.0', '{"n": 1.0}'), ('many digits',
        '{"n": 0.1000000000000000055511151231257827}'),
    ('emoji', '{"s": "\ud83d\ude80"}'), ('right to left', U&'{"s": "\0645\0631\062D\0628\0627 \202B"}'), ('control characters',
        '{"s": "\u0001\t\n\\\u007f"}'),
    ('COPY text', '{"s": "\\N \\. \\t"}'), ('an empty key', '{"": {"": ""}}'), ('an empty object', '{}'), ('an empty array', '[]'), ('a bare string',
        '"text"'),
    ('a bare number', '7'), ('a bare boolean', 'false'), ('JSON null', 'null'), ('null inside', '{"x": null}'),
    ('256 levels', (repeat('[', 256) || repeat(']', 256))::jsonb), ('255 levels of objects', (repeat('{"a":', 255) || '1' || repeat('}', 255))::jsonb),
    ('1 KB', to_jsonb(repeat('x', 1000))), ('9 KB', to_jsonb(repeat('xyz', 3000))), ('9 KB that does not compress', (SELECT to_jsonb(string_agg(md5(i::text), '')) FROM generate_series(1, 290) i)),
    ('exactly 1 MiB', to_jsonb(repeat('x', 1048574))), ('many keys', (SELECT jsonb_object_agg('k' || i, i) FROM generate_series(1, 5000) i));

CREATE FUNCTION test.round_trip(p_args jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM awa.insert_job('k', p_args, 'one');
    RETURN test.claim_one('one') ->> 'args';
END $$;
SELECT is(test.round_trip(p.args), p.args #>> '{}', format('insert_job: %s', p.title))
FROM test.payloads p ORDER BY p.id;
SELECT results_eq($$ SELECT j.args::text FROM (SELECT awa.insert_many('k', (SELECT array_agg(p.args ORDER BY p.id) FROM test.payloads p), 'many') AS id) i, LATERAL awa.job(i.id) j $$,
    $$ SELECT p.args::text FROM test.payloads p ORDER BY p.id $$, 'insert_many: all of them');
SELECT results_eq($$ SELECT j.args::text FROM awa.insert_jobs((SELECT jsonb_agg(jsonb_build_object('kind', 'k', 'queue', 'jobs', 'args', p.args) ORDER BY p.id) FROM test.payloads p)) i,
                     LATERAL awa.job(i.job_id) j $$,
    $$ SELECT p.args::text FROM test.payloads p ORDER BY p.id $$, 'insert_jobs: all of them');
SELECT awa.set_setting('claim_max_bytes', '16777216') \g /dev/null
SELECT is((SELECT string_agg(c.args::text, '' ORDER BY c."position") FROM test.claim('many') c), (SELECT string_agg(p.args::text, '' ORDER BY p.id) FROM test.payloads p),
    'a claim returns them in order');

CREATE TABLE test.refused (title text, args jsonb, state text, message text);
INSERT INTO test.refused VALUES
    ('257 levels', (repeat('[', 257) || repeat(']', 257))::jsonb, '23514', '%nested more than 256 levels deep'),
    ('257 levels of objects', (repeat('{"a":', 257) || '1' || repeat('}', 257))::jsonb, '23514',
        '%nested more than 256 levels deep'),
    ('257 levels beside much else', jsonb_build_object('pad', repeat('x', 9000), 'deep', (repeat('[', 256) || repeat(']', 256))::jsonb), '23514',
        '%nested more%'),
    ('1 MiB and one byte', to_jsonb(repeat('x', 1048575)), '23514', '%has 1048577 bytes'),
    -- 152 bytes as they are stored.
    ('nine long numbers', '[1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071]', '23514', '%has 1179666 bytes');
SELECT test.refuses(format('SELECT awa.insert_job(''k'', (SELECT r.args FROM test.refused r WHERE r.title = %L), ''no'')', r.title), r.state, 'field "args"' || r.message,
    format('insert_job refuses %s', r.title)) FROM test.refused r;
SELECT test.refuses(format('SELECT awa.insert_many(''k'', ARRAY[''{}'', (SELECT r.args FROM test.refused r WHERE r.title = %L)]::jsonb[], ''no'')', r.title), r.state,
    'field "args[2]"' || r.message, format('insert_many refuses %s and names it', r.title)) FROM test.refused r;
SELECT test.refuses(format('SELECT awa.insert_jobs(jsonb_build_array(jsonb_build_object(''kind'', ''k'', ''queue'', ''no''), jsonb_build_object(''kind'', ''k'', ''queue'', ''no'',
    ''args'', (SELECT r.args FROM test.refused r WHERE r.title = %L))))', r.title), r.state, 'jobs[2]: field "args"' || r.message, format('insert_jobs refuses %s and names it', r.title))
FROM test.refused r;

-- What jsonb itself cannot hold never reaches a function.
SELECT throws_ok(format('SELECT awa.insert_job(''k'', %L, ''no'')', v.text), v.state, NULL, 'jsonb refuses ' || v.text)
FROM (VALUES ('{"s": "\u0000"}', '22P05'), ('{"s": "\ud800"}', '22P02'), ('{"n": NaN}', '22P02'), ('{"n": Infinity}', '22P02')) v (text, state);
SELECT is((awa.queue_counts('no'))::text, '(no,0,0,0,0,0,0,0,0,0)', 'a refused value leaves nothing behind');

-- A number that is written long takes a few bytes as it is stored: a low limit holds for its text all the same.
SELECT awa.set_setting('args_max_bytes', '1024') \g /dev/null
SELECT (awa.insert_job('k', '[1e1021]', 'low')).job_id AS id \gset
SELECT is(count(*), 40::bigint, 'what is as long as the limit passes') FROM awa.insert_many('k', array_fill('[1e1021]'::jsonb, ARRAY[40]), 'low');
SELECT test.refuses(c.call, '23514', c.field || ' has 1025 bytes', 'one digit more does not: ' || left(c.call, 40))
FROM (VALUES
    ('SELECT awa.insert_job(''k'', ''[1e1022]'', ''low'')', 'field "args"'),
    ('SELECT awa.insert_many(''k'', ARRAY[''1'', ''[1e1022]'']::jsonb[], ''low'')', 'field "args[2]"'),
    ('SELECT awa.insert_many(''k'', array_fill(''1''::jsonb, ARRAY[40]) || ''[1e1022]''::jsonb, ''low'')', 'field "args[41]"'),
    ('SELECT awa.insert_jobs(''[{"kind": "k", "queue": "low", "args": [1e1022]}]'')', 'jobs[1]: field "args"'),
    ('INSERT INTO awa.job_inbox (kind, queue, args) VALUES (''k'', ''low'', ''[1e1022]'')', 'row 1: field "args"'),
    (format('SELECT awa.update_job(%s, ''{"args": [1e1022]}'')', :id), 'field "args"')) c (call, field);
SELECT is((awa.queue_counts('low')).available, 41::bigint, 'nor is it stored');
SELECT lives_ok($$ SELECT awa.set_setting('args_max_bytes', '2000000') $$, 'the limit is a setting');
SELECT lives_ok($$ SELECT awa.insert_job('k', to_jsonb(repeat('x', 1999998)), 'big') $$, 'which allows larger args');

-- Claims are bounded in bytes: args that do not compress, 20 times 1 MB, with a bound of 4 MB.
SELECT awa.set_setting('claim_max_bytes', '4194304') \g /dev/null
SELECT awa.insert_many('k', array_fill((SELECT to_jsonb(string_agg(md5(random()::text), '')) FROM generate_series(1, 32768) i), ARRAY[6]), 'wide') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('wide')), 3::bigint, 'a claim returns what fits into claim_max_bytes');
SELECT is((SELECT count(*) FROM test.claim('wide')), 3::bigint, 'and the next claim the rest');
SELECT awa.set_setting('claim_max_bytes', '1048576') \g /dev/null
SELECT awa.insert_job('k', (SELECT to_jsonb(string_agg(md5(random()::text), '')) FROM generate_series(1, 40000) i), 'wide') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('wide')), 1::bigint, 'one job larger than the bound always passes');


-- The bound holds for what a client gets: args that compress well, and several lanes.
SELECT awa.set_setting('claim_max_bytes', '4194304') \g /dev/null
SELECT awa.insert_many('k', array_fill(to_jsonb(repeat('x', 1000000)), ARRAY[40]), 'dense') \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('dense')), 4::bigint, 'args that compress count as they are returned');
SELECT awa.insert_many('k', array_fill(to_jsonb(repeat('x', 1000000)), ARRAY[3]), 'lanes', p) FROM generate_series(1, 4) p \g /dev/null
SELECT is((SELECT count(*) FROM test.claim('lanes')), 4::bigint, 'the bound is one for all lanes of a queue');
SELECT is((SELECT count(*) FROM test.claim('lanes')), 4::bigint, 'and the next claims get the rest');
SELECT is((SELECT count(*) FROM test.claim('lanes')), 4::bigint, 'all of it');

-- Metadata and results have limits of their own.
SELECT test.refuses($$ SELECT awa.register_instance(test.worker(1), jsonb_build_object('x', repeat('x', 65536))) $$,
    '23514', 'field "info" has%', 'info of an instance is bounded');
SELECT test.start('r', '{"keep_result": true}') AS job \gset
SELECT test.refuses(format('SELECT test.complete(%L, jsonb_build_object(''result'', repeat(''x'', 2000000)))', :'job'), '23514', 'field "result" has%',
    'complete_job bounds its result');
SELECT matches(test.finish(:'job', 'completed', jsonb_build_object('result', repeat('x', 2000000))), '^invalid: field "result" has more than',
    'finish_jobs bounds a result');
SELECT is(test.finish(:'job', 'completed', jsonb_build_object('result', repeat('x', 1000000))), 'done',
    'a large result within the limit is kept');
SELECT is(length((test.info(:'job')).result #>> '{}'), 1000000, 'whole');


-- No door lets a value in that is nested deeper than clients can read, or is larger as text than it looks.
CREATE FUNCTION test.nested(p_levels integer) RETURNS jsonb LANGUAGE sql AS $$ SELECT (repeat('[', p_levels) || repeat(']', p_levels))::jsonb $$;
CREATE FUNCTION test.digits(p_count integer) RETURNS jsonb LANGUAGE sql AS $$ SELECT jsonb_agg('1e131071'::jsonb) FROM generate_series(1, p_count) $$;
SELECT test.start('deep', '{"keep_result": true}') AS job \gset
SELECT is(test.finish(:'job', 'completed', jsonb_build_object('result', test.nested(257))), 'invalid: field "result" is nested more than 256 levels deep',
    'finish_jobs bounds the nesting of a result');
SELECT is(test.finish(:'job', 'completed', jsonb_build_object('result', test.nested(5000))), 'invalid: field "result" is nested more than 256 levels deep',
    'however deep it is');
SELECT matches(test.finish(:'job', 'completed', jsonb_build_object('result', test.digits(16))), '^invalid: field "result" has more than',
    'and the digits of its numbers');
SELECT test.refuses(format('SELECT test.complete(%L, jsonb_build_object(''result'', test.nested(257)))', :'job'), '23514', 'field "result" is nested more%',
    'complete_job bounds the nesting of a result');
SELECT test.refuses(format('SELECT test.progress(%L, test.nested(257))', :'job'), '23514', 'field "progress" is nested more%', 'set_progress that of progress');
SELECT test.refuses(format('SELECT test.progress(%L, test.digits(1))', :'job'), '23514', 'field "progress" has%', 'and the digits of its numbers');
SELECT test.refuses($$ SELECT awa.insert_job('k', opts => jsonb_build_object('metadata', jsonb_build_object('m', test.nested(256)))) $$, '23514',
    'field "metadata" is nested more%', 'insert_job that of metadata');
SELECT test.refuses($$ SELECT awa.register_instance(test.worker(1), test.nested(257)) $$, '23514', 'field "info" is nested more%', 'register_instance that of info');
SELECT is(test.finish(:'job', 'completed', jsonb_build_object('result', test.nested(256))), 'done', '256 levels are kept');
SELECT test.start('deep') AS job \gset
SELECT is(test.finish(:'job', 'retry', jsonb_build_object('error', test.nested(257))), 'done', 'an error must not keep a job from failing');
SELECT results_eq(format('SELECT jsonb_typeof(j.errors #> ''{0,error}''), j.errors #> ''{0,truncated}'' FROM test.info(%L) j', :'job'),
    $$ VALUES ('string', 'true'::jsonb) $$, 'one that is nested too deep is kept as text');

SELECT isnt(awa.unique_key('k', NULL, test.nested(256), NULL), NULL, 'unique_key takes 256 levels');
SELECT test.refuses($$ SELECT awa.unique_key('k', NULL, test.nested(3000), NULL) $$, '23514', 'field "args" is nested more than 256 levels deep',
    'and no more, before it would run out of stack');

SELECT * FROM finish();
