-- Transitions of jobs with a unique key, and the sweep of claims.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.insert(p_name text, p_states text DEFAULT NULL, p_queue text DEFAULT 'q', p_more jsonb DEFAULT '{}')
RETURNS awa.insert_result
LANGUAGE sql AS $$
    SELECT awa.insert_job('k', to_jsonb(p_name), p_queue,
        opts => p_more || jsonb_build_object('unique', jsonb_build_object('states', to_jsonb(string_to_array(p_states, ',')))))
$$;
CREATE FUNCTION test.holder(p_name text) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$
    SELECT c.job_id FROM awa.job_unique_claims c WHERE c.key = awa._unique_key('k', NULL, to_jsonb(p_name), NULL) $$;
CREATE FUNCTION test.claims() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT count(*) FROM awa.job_unique_claims $$;
CREATE FUNCTION test.due(p_queue text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    UPDATE awa.deferred_jobs SET run_at = clock_timestamp() WHERE queue = p_queue;
    RETURN (SELECT t.outcome || ' ' || t.rows FROM awa.tick('{"steps": ["promote"]}') t);
END $$;
ALTER FUNCTION test.holder(text) OWNER TO awa_owner;
ALTER FUNCTION test.claims() OWNER TO awa_owner;
ALTER FUNCTION test.due(text) OWNER TO awa_owner;
\set narrow 'scheduled,available,completed'

-- With the default states a job keeps its key through its whole life.
SELECT (test.insert('keeps')).job_id AS id \gset
SELECT test.claim_one('q') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 60}'), 'done', 'a retried job');
SELECT is((test.insert('keeps')).state::text, 'retryable', 'holds its key');
SELECT is(test.due('q'), 'done 1', 'is promoted');
SELECT is((test.insert('keeps')).state::text, 'available', 'and still does');
SELECT test.claim_one('q') AS job \gset
SELECT is(test.finish(:'job', 'released'), 'done', 'is released');
SELECT is((test.insert('keeps')).job_id, :id::bigint, 'and still does');
SELECT test.claim_one('q') AS job \gset
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 60}'), 'done', 'is snoozed');
SELECT is((test.insert('keeps')).state::text, 'scheduled', 'and still does');
SELECT is(awa.cancel_job(:id), 'cancelled', 'until it is cancelled');
SELECT is(test.holder('keeps'), NULL, 'which ends its claim');

-- Case b07: states without running and retryable. A newer job takes the key; the older one loses it for good.
SELECT (test.insert('loser', :'narrow', 'b07')).job_id AS loser \gset
SELECT test.claim_one('b07') AS job \gset
SELECT is((test.insert('loser', :'narrow', 'b07')).duplicate, false, 'a running job does not hold the key');
SELECT test.holder('loser') AS winner \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 60}'), 'done', 'the older one is retried');
SELECT is(test.state(:'loser'::bigint), 'retryable', 'outside its states it needs no key');
SELECT awa.insert_job('k', queue => 'b07x', opts => '{"delay_seconds": 60}') FROM generate_series(1, 20) \g /dev/null
UPDATE awa.deferred_jobs SET run_at = clock_timestamp() WHERE queue = 'b07x';
SELECT is(test.due('b07'), 'done 21', 'promotion settles it together with twenty others');
SELECT is((test.info(:'job')).state || ': ' || (test.info(:'job')).reason, format('cancelled: unique key held by job %s', :winner),
    'it ends cancelled, with the reason');
SELECT is(test.due('b07'), 'done 0', 'nothing is left for the next round');
SELECT is(test.holder('loser'), :winner::bigint, 'the winner keeps the key');
SELECT is((SELECT count(*) FROM test.claim('b07x')), 20::bigint, 'the others run');

-- Alone it does not conflict with itself.
SELECT (test.insert('alone', :'narrow', 'alone')).job_id AS id \gset
SELECT test.claim_one('alone') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 60}'), 'done', 'a job that left its states');
SELECT is(test.due('alone'), 'done 1', 'comes back to them');
SELECT is((test.insert('alone', :'narrow', 'alone')).job_id, :id::bigint, 'and holds its key again');

-- Two retryable jobs of one key: one goes on.
SELECT test.insert('two', :'narrow', 'two') \g /dev/null
SELECT test.claim_one('two') AS job \gset
SELECT test.insert('two', :'narrow', 'two') \g /dev/null
SELECT test.claim_one('two') AS other \gset
SELECT test.finish(:'job', 'retry', '{"delay_seconds": 60}') \g /dev/null
SELECT test.finish(:'other', 'retry', '{"delay_seconds": 60}') \g /dev/null
SELECT is(test.due('two'), 'done 2', 'both are settled');
SELECT is((SELECT array_agg(s ORDER BY s) FROM unnest(ARRAY[test.state(:'job'::jsonb), test.state(:'other'::jsonb)]) s), '{available,cancelled}',
    'one is available, one has lost');

-- States with retryable: the retry itself decides.
SELECT test.insert('at once', 'available,scheduled,retryable', 'once') \g /dev/null
SELECT test.claim_one('once') AS job \gset
SELECT is((test.insert('at once', 'available,scheduled,retryable', 'once')).duplicate, false, 'a newer job');
SELECT is(test.finish(:'job', 'retry'), 'done', 'makes a retry');
SELECT is(test.state(:'job'::jsonb), 'cancelled', 'the end of the older one');
SELECT is(test.status(:'job'), 'cancelled', 'also for whoever asks for the attempt');
SELECT is(test.finish(:'job', 'retry'), 'already_done', 'the same retry again is already done');
SELECT is(test.finish(:'job', 'completed'), 'stale', 'another outcome is stale');
SELECT test.insert('rescued', 'available,retryable', 'once') \g /dev/null
SELECT count(*) FROM test.claim('once') \g /dev/null
SELECT is((test.insert('rescued', 'available,retryable', 'once')).duplicate, false, 'the same');
SELECT is(test.rescue('10 min') >= 1, true, 'when a rescue');
SELECT is((SELECT count(*) FROM awa.terminal_jobs j WHERE j.queue = 'once' AND j.state = 'cancelled' AND j.args = '"rescued"'), 1::bigint, 'ends it');
SELECT test.insert('released', 'available', 'once') \g /dev/null
SELECT test.claim_one('once') AS skip \gset
SELECT test.claim_one('once') AS job \gset
SELECT is((test.insert('released', 'available', 'once')).duplicate, false, 'and the same');
SELECT is(test.finish(:'job', 'released'), 'done', 'when it is released');
SELECT is(test.state(:'job'::jsonb), 'cancelled', 'into a lane where another one waits');
SELECT is(test.finish(:'job', 'released'), 'already_done', 'once');
SELECT test.insert('snoozed', 'scheduled', 'lease', '{"delay_seconds": 60}') \g /dev/null
SELECT is(test.due('lease'), 'done 1', 'and under a lease');
SELECT test.claim_one('lease') AS job \gset
SELECT is(awa._lease_receipts(((:'job')::jsonb ->> 'claim_slot')::integer, ((:'job')::jsonb ->> 'batch_id')::bigint, 1, now()), 1::bigint,
    'that a running attempt has');
SELECT is((test.insert('snoozed', 'scheduled', 'lease', '{"delay_seconds": 60}')).duplicate, false, 'a newer job');
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 60}'), 'done', 'makes a snooze');
SELECT is(test.state(:'job'::jsonb), 'cancelled', 'the end of the older one');
SELECT is(test.finish(:'job', 'snooze', '{"delay_seconds": 60}'), 'already_done', 'once as well');
SELECT test.insert('told', 'available,retryable', 'once') \g /dev/null
SELECT test.claim_one('once') AS skip \gset
SELECT test.claim_one('once') AS job \gset
SELECT awa.cancel_job((:'job'::jsonb ->> 'job_id')::bigint, 'no key') \g /dev/null
SELECT is(test.finish(:'job', 'retry'), 'stale', 'one that somebody cancelled was not ended by its worker');
SELECT test.insert('last', 'available,retryable', 'last') \g /dev/null
SELECT test.claim_one('last') AS job \gset
SELECT is(test.finish(:'job', 'retry', '{"delay_seconds": 60}'), 'done', 'without a newer one');
SELECT is((test.insert('last', 'available,retryable', 'last')).state::text, 'retryable', 'a retry takes the key back');

-- Scheduled outside the states: the key is taken when the job becomes available.
SELECT is((test.insert('later', 'available', 'later', '{"delay_seconds": 60}')).duplicate, false, 'two jobs');
SELECT is((test.insert('later', 'available', 'later', '{"delay_seconds": 60}')).duplicate, false, 'may be scheduled');
SELECT is(test.due('later'), 'done 2', 'but when they are due');
SELECT is((SELECT count(*) FROM test.claim('later')), 1::bigint, 'one runs');

-- Dead letters.
SELECT awa.declare_queue('dead', '{"dlq": true}') \g /dev/null
SELECT (test.insert('dead', NULL, 'dead')).job_id AS dead \gset
SELECT test.claim_one('dead') AS job \gset
SELECT is(test.finish(:'job', 'fail'), 'done', 'a dead letter');
SELECT is(test.holder('dead'), NULL, 'does not hold its key');
SELECT is((awa.retry_dlq(:dead)).job_id, :dead::bigint, 'until it is retried');
SELECT is((test.insert('dead', NULL, 'dead')).job_id, :dead::bigint, 'then it does');
SELECT test.claim_one('dead') AS job \gset
SELECT is(test.finish(:'job', 'fail'), 'done', 'it fails again');
SELECT is((test.insert('dead', NULL, 'dead')).duplicate, false, 'and another job takes the key');
SELECT test.refuses(format('SELECT awa.retry_dlq(%s)', :dead), '23505', 'job % holds the unique key', 'a retry is then refused');
SELECT is((SELECT count(*) FROM awa.dlq d WHERE d.job_id = :dead), 1::bigint, 'and the dead letter stays');
SELECT (test.insert('held', 'available,failed', 'dead')).job_id AS dead \gset
SELECT test.claim_one('dead') AS skip \gset
SELECT test.claim_one('dead') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((test.insert('held', 'available,failed', 'dead')).state::text, 'failed', 'a dead letter whose states have failed holds its key');
SELECT is(awa.purge_dlq(:dead), true, 'until it is purged');
SELECT is((test.insert('held', 'available,failed', 'dead')).duplicate, false, 'for good');

-- Another life in a state outside the mask ends what the end of the former one held.
SELECT (test.insert('lives', 'available,failed', 'lives')).job_id AS id \gset
SELECT test.claim_one('lives') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((test.insert('lives', 'available,failed', 'lives')).state::text, 'failed', 'a job that failed within its mask');
SELECT is((awa.retry_job(:id, '{"delay_seconds": 60}')).state::text, 'scheduled', 'is scheduled again, outside of it');
SELECT is(test.holder('lives'), NULL, 'and gives its key up');
SELECT is((test.insert('lives', 'available,failed', 'lives')).duplicate, false, 'another job takes it');
SELECT test.holder('lives') AS other \gset
SELECT is(test.due('lives'), 'done 1', 'and the first one');
SELECT is((SELECT j.reason FROM awa.job(:id) j), format('unique key held by job %s', :other), 'loses to it when it is due');
SELECT (test.insert('moved', 'available', 'lives')).job_id AS id \gset
SELECT awa.update_job(:id, jsonb_build_object('run_at', to_jsonb(now() + interval '1 hour'))) \g /dev/null
SELECT is(test.holder('moved'), NULL, 'an update that takes a job out of its mask does the same');
SELECT awa.declare_queue('lives dead', '{"dlq": true}') \g /dev/null
SELECT (test.insert('dead lives', 'available,failed', 'lives dead')).job_id AS id \gset
SELECT test.claim_one('lives dead') AS job \gset
SELECT test.finish(:'job', 'fail') \g /dev/null
SELECT is((test.insert('dead lives', 'available,failed', 'lives dead')).job_id, :id::bigint, 'a dead letter that holds its key');
SELECT is((awa.retry_dlq(:id, '{"delay_seconds": 60}')).state::text, 'scheduled', 'is retried out of its mask');
SELECT is((test.insert('dead lives', 'available,failed', 'lives dead')).duplicate, false, 'and gives its key up as well');

-- Results that are kept.
SELECT (test.insert('kept', NULL, 'kept', '{"keep_result": true}')).job_id AS kept \gset
SELECT test.claim_one('kept') AS job \gset
SELECT is(test.finish(:'job', 'completed', '{"result": 1}'), 'done', 'a job with a result');
SELECT is((test.insert('kept', NULL, 'kept')).job_id, :kept::bigint, 'holds its key when it has completed');

-- The sweep.
SELECT is(test.step('unique_keys'), 'done', 'the sweep runs');
SELECT test.claims() AS before \gset
SELECT test.insert('gone ' || i, 'available', 'sweep') FROM generate_series(1, 10) i \g /dev/null
SELECT count(*) FROM test.claim('sweep') c, LATERAL awa.complete_jobs(test.worker(1), c.claim_slot, c.batch_id, ARRAY[c.position]) \g /dev/null
SELECT is(test.claims(), :before::bigint + 10, 'a plain completion leaves its claim');
CREATE FUNCTION test.sweep(p_more text) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    -- A round looks at a random sample.
    FOR i IN 1 .. 1000 LOOP
        PERFORM awa._sweep_keys(1000, clock_timestamp() + p_more::interval);
        EXIT WHEN NOT EXISTS (SELECT FROM generate_series(1, 10) n WHERE test.holder('gone ' || n) IS NOT NULL);
    END LOOP;
    RETURN test.claims();
END $$;
ALTER FUNCTION test.sweep(text) OWNER TO awa_owner;
SELECT is(test.sweep('0 s') <= :before::bigint, true, 'the sweep finds what nobody holds');
SELECT is(test.holder('last') IS NOT NULL AND test.holder('kept') IS NOT NULL, true, 'and leaves what is held');
SELECT test.sweep('2 d') \g /dev/null
SELECT is(test.holder('last') IS NOT NULL AND test.holder('kept') IS NULL, true, 'expired claims go');

SELECT * FROM finish();
