-- job() in every state, and the views in the same form.
\ir ../support.psql
SELECT * FROM no_plan();

SELECT test.refuses(format('SELECT awa.job(%s)', v.id), v.state, v.pattern, 'job of ' || v.id)
FROM (VALUES ('0', '42704', 'field "job_id": there is no job 0'), ('-5', '42704', '%no job -5'), ('1', '42704', '%no job 1'), ('4398046511105', '42704',
    '%no job 4398046511105'),
             ('9223372036854775807', '42704', '%there is no job%'), ('NULL', '22023', 'field "job_id" must not be NULL')) v (id, state, pattern);
SELECT is((SELECT count(*) FROM awa.jobs), 0::bigint, 'no jobs, no rows');

CREATE TABLE test.expected (job_id bigint, title text, state text, reason text, attempt integer, run_lease bigint);
CREATE FUNCTION test.note(p_job_id bigint, p_title text, p_state text, p_reason text DEFAULT NULL, p_attempt integer DEFAULT 0, p_lease bigint DEFAULT 0) RETURNS void
LANGUAGE sql AS $$ INSERT INTO test.expected VALUES (p_job_id, p_title, p_state, p_reason, p_attempt, p_lease) $$;
CREATE FUNCTION test.note(p_job jsonb, p_title text, p_state text, p_reason text DEFAULT NULL, p_attempt integer DEFAULT 1, p_lease bigint DEFAULT 1) RETURNS void
LANGUAGE sql AS $$ INSERT INTO test.expected VALUES ((p_job ->> 'job_id')::bigint, p_title, p_state, p_reason, p_attempt, p_lease) $$;
SELECT awa.declare_queue('dl', '{"dlq": true}') \g /dev/null

CREATE FUNCTION test.populate() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c_opts constant jsonb := '{"tags": ["t"], "metadata": {"m": 1}, "keep_result": true, "deadline_seconds": 600}';
    v_job jsonb;
BEGIN
    PERFORM test.note((awa.insert_job('k', '{"a": 1}', 'wait', 1, 7, opts => c_opts)).job_id, 'waiting', 'available');
    PERFORM test.note((awa.insert_job('k', '{"a": 2}', 'later', 3, 7, now() + interval '1 day', c_opts)).job_id, 'scheduled',
        'scheduled');
    v_job := test.start('a', c_opts); PERFORM test.progress(v_job, '{"p": 1}'); PERFORM test.note(v_job, 'running', 'running');
    v_job := test.start('b'); PERFORM test.finish(v_job, 'completed'); PERFORM test.note(v_job, 'completed', 'completed');
    v_job := test.start('c', c_opts); PERFORM test.finish(v_job, 'completed', '{"result": {"r": 1}}'); PERFORM test.note(v_job, 'completed with a result',
        'completed');
    v_job := test.start('d', c_opts); PERFORM test.finish(v_job, 'retry', '{"error": "e", "delay_seconds": 900}'); PERFORM test.note(v_job, 'retryable',
        'retryable');
    v_job := test.start('e', c_opts); PERFORM test.finish(v_job, 'snooze', '{"delay_seconds": 900}'); PERFORM test.note(v_job, 'snoozed', 'scheduled', NULL, 0, 1);
    v_job := test.start('f', c_opts); PERFORM test.finish(v_job, 'fail', '{"error": "e", "reason": "why"}'); PERFORM test.note(v_job, 'failed', 'failed',
        'why');
    v_job := test.start('dl', c_opts); PERFORM test.finish(v_job, 'fail', '{"error": "e"}'); PERFORM test.note(v_job, 'dead letter', 'failed',
        'terminal_error');
    v_job := test.start('g', c_opts); PERFORM awa.cancel_job((v_job ->> 'job_id')::bigint, 'stop'); PERFORM test.note(v_job, 'cancelled while running', 'cancelled',
        'stop');
    v_job := test.start('h', c_opts); PERFORM test.finish(v_job, 'released'); PERFORM test.note(v_job, 'released', 'available', NULL, 0, 1);
    v_job := test.start('i', c_opts); PERFORM test.finish(v_job, 'retry', '{"error": "e", "delay_seconds": 0}'); PERFORM test.promote('i');
    PERFORM test.note(v_job, 'promoted', 'available');
    v_job := test.start('j', c_opts); PERFORM test.finish(v_job, 'retry', '{"delay_seconds": 0}'); PERFORM test.promote('j'); v_job := test.claim_one('j');
    PERFORM test.note(v_job, 'running again', 'running', NULL, 2, 2);
    v_job := test.start('l', c_opts); PERFORM test.finish(v_job, 'retry', '{"error": "e", "delay_seconds": 0}'); PERFORM test.promote('l'); v_job := test.claim_one('l');
    PERFORM test.finish(v_job, 'completed'); PERFORM test.note(v_job, 'completed at last', 'completed', NULL, 2, 2);
    v_job := test.start('m', c_opts); PERFORM test.finish(v_job, 'retry', '{"delay_seconds": 0}'); PERFORM test.promote('m'); v_job := test.claim_one('m');
    PERFORM test.finish(v_job, 'fail'); PERFORM test.note(v_job, 'failed at last', 'failed', 'terminal_error', 2, 2);
    v_job := to_jsonb(awa.insert_job('k', queue => 'n')); PERFORM awa.cancel_job((v_job ->> 'job_id')::bigint); PERFORM test.note((v_job ->> 'job_id')::bigint, 'cancelled while waiting',
        'cancelled');
    v_job := to_jsonb(awa.insert_job('k', queue => 'o', opts => '{"delay_seconds": 99}')); PERFORM awa.cancel_job((v_job ->> 'job_id')::bigint);
    PERFORM test.note((v_job ->> 'job_id')::bigint, 'cancelled while scheduled', 'cancelled');
END $$;
SELECT test.populate() \g /dev/null

SELECT is((SELECT format('%s %s %s %s', j.state, j.reason, j.attempt, j.run_lease) FROM awa.job(e.job_id) j), format('%s %s %s %s', e.state, e.reason, e.attempt, e.run_lease), 'job(): ' || e.title)
FROM test.expected e;
SELECT results_eq($$ SELECT j.* FROM awa.jobs j ORDER BY j.job_id $$,
    $$ SELECT j.* FROM (SELECT e.job_id FROM test.expected e ORDER BY 1) e, LATERAL awa.job(e.job_id) j $$,
    'the view jobs has the same rows as job(), once each');
SELECT set_eq($$ SELECT t.job_id FROM awa.terminal_jobs t $$,
    $$ SELECT e.job_id FROM test.expected e WHERE e.state IN ('completed', 'failed', 'cancelled') AND e.title <> 'dead letter' $$,
    'terminal_jobs has what ended, without dead letters');
SELECT results_eq($$ SELECT t.* FROM awa.terminal_jobs t ORDER BY t.job_id $$,
    $$ SELECT j.* FROM (SELECT t.job_id FROM awa.terminal_jobs t ORDER BY 1) t, LATERAL awa.job(t.job_id) j $$,
        'in the same form');
SELECT results_eq($$ SELECT d.* FROM awa.dlq d $$,
    $$ SELECT j.* FROM test.expected e, LATERAL awa.job(e.job_id) j WHERE e.title = 'dead letter' $$,
        'dlq has the dead letter, in the same form');

SELECT results_eq($$ SELECT j.kind, j.queue, j.priority, j.args, j.max_attempts, j.tags, j.metadata, j.progress, j.instance_id, round(extract(epoch FROM j.deadline_at - j.attempted_at)),
                            j.finalized_at, j.created_at <= j.attempted_at FROM awa.jobs j WHERE j.queue = 'a' $$,
    $$ VALUES ('k', 'a', 2, '{}'::jsonb, 25, '{t}'::text[], '{"m": 1}'::jsonb, '{"p": 1}'::jsonb, test.worker(1), 600::numeric, NULL::timestamptz, true) $$,
        'a running job shows owner, deadline and progress');
SELECT results_eq($$ SELECT j.result, j.finalized_at >= j.attempted_at, j.instance_id, j.pruned_at FROM awa.jobs j WHERE j.queue = 'c' $$, $$ VALUES ('{"r": 1}'::jsonb, true, NULL::uuid, NULL::timestamptz) $$,
    'a completed one its result and times');
SELECT is_empty($$ SELECT j.job_id FROM awa.jobs j WHERE j.queue IN ('d', 'f', 'dl', 'i', 'l') AND (j.errors #>> '{0,error}') IS DISTINCT FROM 'e' $$,
    'errors stay with the job, whatever became of it');
SELECT is_empty($$ SELECT j.job_id FROM awa.jobs j JOIN test.expected e ON e.job_id = j.job_id WHERE j.created_at IS NULL OR j.run_at IS NULL OR j.kind IS NULL OR j.args IS NULL $$,
    'no state loses kind, args or times');
SELECT is_empty($$ SELECT j.job_id FROM awa.jobs j WHERE j.queue NOT IN ('b', 'n', 'o') AND (j.tags, j.metadata) IS DISTINCT FROM ('{t}'::text[], '{"m": 1}'::jsonb) $$,
    'nor tags and metadata');

SELECT results_eq($$ SELECT sum(c.scheduled), sum(c.available), sum(c.running), sum(c.completed), sum(c.retryable), sum(c.failed), sum(c.cancelled), sum(c.waiting_external), sum(c.dead_lettered)
                     FROM (SELECT DISTINCT j.queue FROM awa.jobs j) q, LATERAL awa.queue_counts(q.queue) c $$,
    $$ SELECT count(*) FILTER (WHERE state = 'scheduled')::numeric, count(*) FILTER (WHERE state = 'available')::numeric, count(*) FILTER (WHERE state = 'running')::numeric,
              count(*) FILTER (WHERE state = 'completed')::numeric, count(*) FILTER (WHERE state = 'retryable')::numeric, count(*) FILTER (WHERE state = 'failed' AND title <> 'dead letter')::numeric,
              count(*) FILTER (WHERE state = 'cancelled')::numeric, 0::numeric, count(*) FILTER (WHERE title = 'dead letter')::numeric FROM test.expected $$,
                  'queue_counts agrees with the states');
SELECT results_eq($$ SELECT i.instance_id, i.is_live FROM awa.instances i $$, $$ VALUES (test.worker(1), false) $$,
    'instances shows the worker, which never beat');

SELECT * FROM finish();
