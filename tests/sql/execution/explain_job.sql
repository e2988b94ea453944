-- explain_job: one sentence that names the reason, and the facts behind it, for every place a job can be in.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.says(p_job_id bigint, p_pattern text, p_facts jsonb DEFAULT '{}') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_answer awa.job_explanation := awa.explain_job(p_job_id);
BEGIN
    IF v_answer.sentence LIKE format('Job %s %s', p_job_id, p_pattern) AND v_answer.facts @> p_facts
       AND v_answer.sentence !~ ' \(\)| on ,' AND v_answer.state = (awa.job(p_job_id)).state THEN
        RETURN public.pass(p_pattern);
    END IF;
    RETURN public.fail(p_pattern) || E'\n' || public.diag(v_answer::text);
END $$;
CREATE FUNCTION test.id(p_job jsonb) RETURNS bigint LANGUAGE sql AS $$ SELECT (p_job ->> 'job_id')::bigint $$;

-- Waiting.
SELECT (awa.insert_job('k', queue => 'q')).job_id AS id \gset
SELECT test.says(:id, 'is available, but no live worker takes jobs of queue "q".', '{"live_instances": 0, "queue": "q", "kind": "k"}');
SELECT awa.register_instance(test.worker(1), '{"queues": ["other"], "kinds": ["k"]}'), awa.heartbeat(test.worker(1)) \g /dev/null
SELECT test.says(:id, 'is available, but no live worker takes jobs of queue "q".', '{"live_instances": 0}');
SELECT awa.register_instance(test.worker(1), '{"hostname": "h1", "queues": {"q": 1}, "kinds": ["x"]}') \g /dev/null
SELECT test.says(:id, 'is available, but no live worker of queue "q" says that it knows kind "k".', '{"live_instances": 1, "kind_is_known": false}');
SELECT awa.register_instance(test.worker(1), '{"hostname": "h1", "queues": {"q": 1}, "kinds": ["k"]}') \g /dev/null
SELECT test.says(:id, 'is available and next: the next claim of queue "q" takes it.', '{"ahead": 0, "lanes_first": 0}');
SELECT (awa.insert_job('k', queue => 'q')).job_id AS second \gset
SELECT (awa.insert_job('k', queue => 'q')).job_id AS third \gset
SELECT awa.cancel_job(:second) \g /dev/null
SELECT test.says(:third, 'is available and waits behind 1 job of queue "q" and priority 2.', '{"ahead": 1}');
SELECT (awa.insert_job('k', queue => 'q', priority => 4)).job_id AS low \gset
SELECT test.says(:low, 'is available and first in its lane, after 1 lane of queue "q" with better priority or older jobs.', '{"ahead": 0, "lanes_first": 1}');
SELECT awa.pause_queue('q') \g /dev/null
SELECT test.says(:id, 'is available, but its queue "q" is paused since %');
SELECT ok((awa.explain_job(:id)).facts ? 'paused_at', 'with the time');
SELECT awa.resume_queue('q') \g /dev/null
CREATE FUNCTION test.handler(args jsonb) RETURNS void LANGUAGE sql AS '';
SELECT awa.register_sql_handler('sql', 'test.handler(jsonb)') \g /dev/null
SELECT (awa.insert_job('sql', queue => 's')).job_id AS sql \gset
SELECT test.says(:sql, 'is available, and no live worker takes jobs of queue "s": the next work() of it may run it.', '{"has_sql_handler": true}');

-- Not due.
SELECT (awa.insert_job('k', queue => 'q', run_at => '2100-01-31T12:00:00Z')).job_id AS later \gset
SELECT test.says(:later, 'is scheduled: it may run from 2100-01-31%', '{"is_due": false}');
SELECT awa.claim_ready_runtime('q', 1, test.worker(1)) \g /dev/null
SELECT test.start('w') AS job \gset
SELECT test.finish(:'job', 'released', '{"reason": "unknown_kind"}') \g /dev/null
SELECT test.says(test.id(:'job'), 'is scheduled: no worker that claimed it knew kind "k" (1 time so far); it is offered again at %', '{"releases": 1}');
SELECT test.start('w') AS job \gset
SELECT test.finish(:'job', 'retry', '{"error": "no luck", "delay_seconds": 99}') \g /dev/null
SELECT test.says(test.id(:'job'), 'failed in attempt 1 of 25 (no luck) and is tried again at %', '{"last_error": "no luck", "attempt": 1}');
SELECT test.start('w2') AS job \gset
SELECT test.finish(:'job', 'released', '{"reason": "unknown_kind"}'), test.promote('w2') \g /dev/null
SELECT test.finish(test.claim_one('w2'), 'snooze', '{"delay_seconds": 99}') \g /dev/null
SELECT test.says(test.id(:'job'), 'is scheduled: it may run from %');
SELECT ok(NOT (awa.explain_job(test.id(:'job'))).facts ? 'releases', 'a worker that puts a job off knows its kind');
SELECT test.promote('w2'), test.finish(test.claim_one('w2'), 'retry') \g /dev/null
SELECT test.says(test.id(:'job'), 'failed in attempt 1 of 25 and is tried again at %');
SELECT test.start('w') AS job \gset
SELECT test.finish(:'job', 'snooze', '{"delay_seconds": 0}') \g /dev/null
SELECT test.says(test.id(:'job'), 'is scheduled: it is due since % and waits for a tick.', '{"is_due": true}');

SELECT (awa.insert_job('u', queue => 'u', opts => '{"delay_seconds": 60, "unique": {"states": ["available", "running"]}}')).job_id AS unique \gset
SELECT test.says(:unique, 'is scheduled: it may run from %');
SELECT (awa.insert_job('u', queue => 'u', opts => '{"unique": {"states": ["available", "running"]}}')).job_id AS holder \gset
SELECT test.says(:unique, format('is scheduled: it needs its unique key, which job %s has; at %% it gets it, or is cancelled.', :holder),
    jsonb_build_object('unique_key_holder', :holder));

-- Running.
SELECT test.says(:id, format('runs since %%, attempt 1 of 25, in worker %s on h1.', test.worker(1)),
    jsonb_build_object('instance_id', test.worker(1), 'instance_is_live', true, 'is_evacuated', false));
SELECT sum(awa._lease_receipts(s.slot, o.batch_id, 100, now())) FROM generate_series(0, 7) s (slot), LATERAL awa._open_batches(s.slot) o \g /dev/null
SELECT test.says(:id, 'runs since %', '{"is_evacuated": true}');
SELECT test.start('w', p_worker => 2) AS job \gset
SELECT test.progress(:'job', '{"done": null}') \g /dev/null
SELECT is((awa.explain_job(test.id(:'job'))).facts -> 'progress', '{"done": null}', 'progress as it was set');
SELECT test.says(test.id(:'job'), 'runs since %, attempt 1 of 25, in worker %, which is silent: the attempt will be rescued.', '{"instance_is_live": false}');

-- Ended.
SELECT test.finish(:'job', 'completed', p_worker => 2) \g /dev/null
SELECT test.says(test.id(:'job'), 'was completed at 2%.');
SELECT test.says(:second, 'was cancelled at 2%.');
SELECT test.start('w') AS job \gset
SELECT test.finish(:'job', 'cancel', '{"reason": "not needed"}') \g /dev/null
SELECT test.says(test.id(:'job'), 'was cancelled at % (not needed).', '{"reason": "not needed"}');
SELECT test.start('w', p_max_attempts => 1) AS job \gset
SELECT test.finish(:'job', 'retry', '{"error": "boom"}') \g /dev/null
SELECT test.says(test.id(:'job'), 'failed at % after 1 attempt (max_attempts_exhausted: boom).', '{"last_error": "boom", "is_dead_letter": false}');
SELECT awa.declare_queue('dead', '{"dlq": true}') \g /dev/null
SELECT test.start('dead') AS job \gset
SELECT test.finish(:'job', 'fail', '{"error": {"error": "boom", "traceback": "..."}}') \g /dev/null
SELECT test.says(test.id(:'job'), 'failed at % after 1 attempt (terminal_error: boom) and is a dead letter.', '{"is_dead_letter": true}');
SELECT awa.purge_dlq(test.id(:'job')) \g /dev/null
SELECT test.says(test.id(:'job'), 'left no trace: %');

-- It looks, and keeps nothing locked.
BEGIN;
SELECT awa.explain_job(:third) \g /dev/null
SELECT is_empty($$ SELECT k.relation::regclass FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
                   WHERE k.pid = pg_backend_pid() AND c.relispartition AND c.relnamespace = 'awa'::regnamespace $$, 'no leaf stays locked');
COMMIT;
SELECT test.refuses('SELECT awa.explain_job(999999)', '42704', 'field "job_id": there is no job %', 'an unknown id');
SELECT test.refuses('SELECT awa.explain_job(NULL)', '22023', 'field "job_id" must not be NULL', 'no id');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT test.refuses(format('SELECT awa.explain_job(%s)', :id), '25001', '%', 'an older snapshot');
COMMIT;

-- The list of functions.
SELECT set_eq($$ SELECT a.name FROM awa.api() a $$,
    $$ SELECT p.proname::text FROM pg_proc p WHERE p.pronamespace = 'awa'::regnamespace AND p.proname !~ '^_' $$, 'api() lists what is public');
SELECT results_eq($$ SELECT a.arguments, a.returns, a.capabilities, a.description LIKE 'Deletes a dead letter%' FROM awa.api() a WHERE a.name = 'purge_dlq' $$,
    $$ VALUES ('job_id bigint', 'boolean', '{operator}'::text[], true) $$, 'with its arguments, who may call it, and what it does');
SELECT results_eq($$ SELECT a.name FROM awa.api() a WHERE a.capabilities = '{}' $$,
    $$ VALUES ('grant_operator'), ('grant_producer'), ('grant_reader'), ('grant_worker'), ('set_owner') $$, 'the owner''s functions belong to no capability');

SELECT * FROM finish();
