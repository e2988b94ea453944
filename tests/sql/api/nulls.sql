-- JSON null counts as absent: every option of every call, in every way in. Where options are changed it restores the default.
\ir ../support.psql
SELECT * FROM no_plan();
\set job '{"tags": null, "metadata": null, "ordering_key": null, "delay_seconds": null, "deadline_seconds": null, "keep_result": null, "backoff": null, "trace": null, "unique": null, "backpressure": null, "after": null, "on_parent_failure": null, "concurrency_key": null}'

-- Jobs.
SELECT awa.insert_job('k', queue => 'plain', opts => :'job') \g /dev/null
SELECT awa.insert_many('k', '{"{}"}', 'plain', opts => :'job') \g /dev/null
SELECT count(*) FROM awa.insert_jobs(jsonb_build_array(jsonb_build_object(
    'kind', 'k', 'queue', 'plain', 'priority', NULL, 'max_attempts', NULL, 'run_at', NULL, 'opts', (:'job')::jsonb))) \g /dev/null
INSERT INTO awa.job_inbox (kind, queue, opts) VALUES ('k', 'plain', :'job');
SELECT results_eq($$ SELECT c.kind, c.args, c.priority, c.max_attempts, c.tags, c.metadata, c.trace, c.deadline_at, count(*)
                     FROM test.claim('plain') c GROUP BY 1, 2, 3, 4, 5, 6, 7, 8 $$,
    $$ VALUES ('k', '{}'::jsonb, 2, 25, NULL::text[], NULL::jsonb, NULL, NULL::timestamptz, 4::bigint) $$, 'four jobs without an option');
SELECT is((SELECT count(*) FROM awa.ready_entries r WHERE r.ext IS NULL), 4::bigint, 'with none stored');
SELECT is((SELECT count(*) FROM jsonb_object_keys((:'job')::jsonb) o WHERE (awa.insert_job('k', opts => jsonb_build_object(o, NULL))).state = 'available'),
    13::bigint, 'nor any of them alone');
INSERT INTO awa.job_inbox (kind, queue, opts)
VALUES ('first', 'order', '{"unique": null, "backpressure": null}'), ('second', 'order', NULL), ('third', 'order', '{"unique": {}}'), ('fourth', 'order', '{}');
SELECT results_eq($$ SELECT c.kind FROM test.claim('order') c $$, $$ VALUES ('first'), ('second'), ('fourth'), ('third') $$,
    'a row of a load without a key or backpressure keeps its place');
SELECT test.refuses(format('SELECT awa.insert_job(''k'', opts => %L)', o), '22023', '%unknown option%', 'a misspelt name is one: ' || o)
FROM unnest(ARRAY['{"tag": null}', '{"backoff": {"delay": null}}', '{"unique": {"keys": null}}']) o;

-- Parts of options.
SELECT (awa.insert_job('u', queue => 'u', opts => '{"unique": {}}')).job_id AS id \gset
SELECT is(i.job_id, :id::bigint, 'a unique key without parts')
FROM awa.insert_job('u', queue => 'u', opts => '{"unique": {"by": null, "key": null, "period_seconds": null, "states": null, "on_conflict": null}}') i;
CREATE FUNCTION test.delay(p_policy jsonb) RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE
    v_job jsonb := test.start('b', jsonb_build_object('backoff', p_policy));
BEGIN
    PERFORM test.finish(v_job, 'retry');
    RETURN round(extract(epoch FROM (test.info(v_job)).run_at - clock_timestamp()), 0);
END $$;
SELECT is(test.delay('{"delays": null, "base_seconds": 300, "factor": null, "cap_seconds": null, "jitter": 0}'), 600::numeric, 'a policy without delays');
SELECT is(test.delay('{"delays": [700], "base_seconds": null, "jitter": null}'), 700::numeric, 'and one of delays alone');
SELECT test.refuses($$ SELECT awa.insert_job('k', opts => '{"backoff": {"delays": [null]}}') $$, '22023', '%bad "delays"%', 'but a delay is a number');

-- Changes.
SELECT awa.declare_queue('q', '{"enqueue_shards": 3, "strict_fifo": true, "notify": false, "dlq": true, "aging_seconds": 5, "deadline_seconds": 9}') \g /dev/null
SELECT awa.declare_queue('q', '{"enqueue_shards": null, "strict_fifo": null, "notify": null, "dlq": null, "aging_seconds": null, "deadline_seconds": null}') \g /dev/null
SELECT results_eq($$ SELECT q.enqueue_shards, q.strict_fifo, q.notify, q.dlq, q.aging_seconds, q.deadline_seconds FROM awa.queues q WHERE q.queue = 'q' $$,
    $$ VALUES (1, false, true, false, 60::numeric, NULL::numeric) $$, 'options of a queue have their defaults back');
SELECT (awa.insert_job('k', queue => 'changed', priority => 4, max_attempts => 3, opts => '{"tags": ["t"], "metadata": {"m": 1}, "deadline_seconds": 9}')).job_id AS id \gset
SELECT is(awa.update_job(:id, '{"priority": null, "max_attempts": null, "tags": null, "metadata": null, "deadline_seconds": null, "keep_result": null, "backoff": null, "run_at": null, "delay_seconds": null}'),
    'available', 'a job');
SELECT results_eq($$ SELECT c.priority, c.max_attempts, c.tags, c.metadata, c.deadline_at FROM test.claim('changed') c $$,
    $$ VALUES (2, 25, NULL::text[], NULL::jsonb, NULL::timestamptz) $$, 'has them back as well');
SELECT awa.insert_job('k', queue => 'other') \g /dev/null
SELECT test.claim_one('other') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((awa.retry_job((:'job'::jsonb ->> 'job_id')::bigint, '{"queue": null, "priority": null, "delay_seconds": null}')).state::text, 'available', 'a retry');
SELECT results_eq($$ SELECT c.priority FROM test.claim('other', 1, '{"separate": null, "deadline_seconds": null, "wake_others": null}') c $$, $$ VALUES (2) $$,
    'goes where the job was, and a claim');

-- Calls.
SELECT is((SELECT count(DISTINCT t.step) FROM awa.tick('{"steps": null, "milliseconds": null, "rows": null}') t), 17::bigint, 'tick does all steps');
SELECT is(awa.drain_queue('nothing', '{"limit": null, "reason": null}'), 0::bigint, 'drain has its limit');
SELECT test.start('done', '{"keep_result": true}') AS job \gset
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": null}'), 'invalid: a snooze needs "delay_seconds"', 'what is needed is missing');
SELECT is((test.complete(:'job', '{"result": null}')).outcome, 'completed', 'a result');
SELECT is((test.info(:'job')).result, NULL, 'is none');

SELECT * FROM finish();
