-- Buckets of deferred jobs: which one a job gets, promotion over all of them, refill from the far leaf, and prune.
\ir ../support.psql
SELECT * FROM no_plan();

CREATE FUNCTION test.promote_at(p_now timestamptz, p_limit integer DEFAULT 4096) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT awa._promote_due(p_limit, p_now) $$;
CREATE FUNCTION test.refill_at(p_now timestamptz, p_limit integer DEFAULT 4096) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS $$ SELECT awa._refill_buckets(p_limit, p_now) $$;
CREATE FUNCTION test.prune_at(p_now timestamptz) RETURNS text LANGUAGE sql SECURITY DEFINER AS $$ SELECT p.outcome || coalesce(' ' || p.moved, '') || coalesce(' slot ' || (p.detail ->> 'slot'), '') FROM awa._prune_deferred(p_now) p $$;
SELECT format('ALTER FUNCTION %s OWNER TO awa_owner', f) FROM unnest('{test.promote_at,test.refill_at,test.prune_at}'::regproc[]) f \gexec
CREATE FUNCTION test.slot_of(p_job_id bigint) RETURNS integer LANGUAGE sql AS $$ SELECT d.slot::integer FROM awa.deferred_jobs d WHERE d.job_id = p_job_id $$;
CREATE FUNCTION test.bucket(p_at timestamptz) RETURNS integer LANGUAGE sql AS $$ SELECT awa._deferred_slot(p_at, p_at)::integer $$;

-- The choice.
SELECT results_eq(
    $$ SELECT awa._deferred_slot(t.run_at, '2026-01-01 00:05:30Z')::integer
       FROM unnest('{2026-01-01 00:05:30Z,2026-01-01 00:05:59.999999Z,2026-01-01 00:06:00Z,2026-01-01 00:15:29.999999Z,2026-01-01 00:15:30Z,2999-01-01Z,infinity}'::timestamptz[]) WITH ORDINALITY t (run_at, o) ORDER BY t.o $$,
    $$ VALUES (5), (5), (6), (15), (16), (16), (16) $$, 'a time has the bucket of its minute, and from ten minutes ahead on it is far');
SELECT results_eq($$ SELECT awa._deferred_slot(t, '2026-01-01 00:05:30Z')::integer FROM unnest('{2026-01-01 00:05:29Z,2026-01-01 00:03:00Z,2020-01-01Z,1960-01-01Z,-infinity}'::timestamptz[]) t $$,
    $$ VALUES (5), (5), (5), (5), (5) $$, 'what is past belongs to this minute');
SELECT results_eq($$ SELECT awa._deferred_slot(t, t)::integer FROM unnest('{2026-01-01 00:15:59Z,2026-01-01 00:16:00Z,2026-01-01 02:00:01Z}'::timestamptz[]) t $$,
    $$ VALUES (15), (0), (8) $$, 'sixteen minutes share sixteen buckets');
SELECT is_empty($$ SELECT m FROM generate_series(-70, 40) m WHERE awa._deferred_slot('1970-01-01 00:00Z'::timestamptz + make_interval(mins => m), '1960-01-01Z') <> 16 $$, 'far also before 1970');
SELECT ok((SELECT bool_and(awa._deferred_slot(t, t) BETWEEN 0 AND 15) FROM generate_series('2026-01-01 23:30Z'::timestamptz, '2026-01-02 00:30Z', interval '7 s') t), 'no time has a bucket that is not there');

-- Where a job goes, and that look-ups and cancels find it there.
SELECT (awa.insert_job('k', queue => 'q', opts => '{"delay_seconds": 30}')).job_id AS near,
       (awa.insert_job('k', queue => 'q', run_at => now() + interval '9 min')).job_id AS middle,
       (awa.insert_job('k', queue => 'q', run_at => now() + interval '11 min')).job_id AS far \gset
SELECT ok(test.slot_of(:near) < 16 AND test.slot_of(:middle) < 16 AND test.slot_of(:near) <> test.slot_of(:middle), 'jobs within ten minutes have the bucket of their minute');
SELECT is(test.slot_of(:far), 16, 'one beyond is far');
SELECT results_eq(format('SELECT test.state(j) FROM unnest(ARRAY[%s,%s,%s]) j', :near, :middle, :far), $$ VALUES ('scheduled'), ('scheduled'), ('scheduled') $$, 'job() finds each');
SELECT is((awa.queue_counts('q')).scheduled, 3::bigint, 'they are counted');
SELECT is((SELECT count(*) FROM awa.jobs j WHERE j.state = 'scheduled' AND j.kind = 'k' AND j.queue = 'q'), 3::bigint, 'and listed');
SELECT results_eq($$ SELECT r.row_count, r.blocked_by, r.detail ->> 'queue' FROM awa.ring_status() r WHERE r.ring = 'deferred' AND r.slot = 16 $$,
    $$ VALUES (1::bigint, 'deferred', 'q') $$, 'ring_status shows what a slot holds');
SELECT results_eq(format('SELECT awa.cancel_job(j) FROM unnest(ARRAY[%s,%s,%s]) j', :near, :middle, :far), $$ VALUES ('cancelled'), ('cancelled'), ('cancelled') $$, 'each can be cancelled');
SELECT is((SELECT count(*) FROM awa.deferred_jobs), 0::bigint, 'and is gone');

-- Promotion merges all buckets, whatever they hold.
SELECT awa.insert_job('k', to_jsonb(i), 'order', run_at => now() + make_interval(secs => i * 20)) FROM generate_series(27, 1, -1) i \g /dev/null
SELECT cmp_ok((SELECT count(DISTINCT d.slot) FROM awa.deferred_jobs d), '>=', 9::bigint, 'jobs lie in many buckets');
UPDATE awa.deferred_jobs SET slot = (args::text::integer * 7) % 16 WHERE args::text::integer % 3 = 0;
SELECT is(test.promote_at(now() + interval '8 min', 10), 10::bigint, 'a promotion takes so many');
SELECT is(test.promote_at(now() + interval '8 min'), 14::bigint, 'another one all that is due');
SELECT results_eq($$ SELECT c.args::text::integer FROM test.claim('order') c $$, $$ SELECT generate_series(1, 24) $$, 'in the order in which they were due, also where a job lies in a foreign bucket');
SELECT is(test.promote_at(now() + interval '1 hour'), 3::bigint, 'the rest later');

-- Refill.
SELECT date_trunc('minute', now()) + interval '1 hour' AS hour \gset
SELECT awa.insert_job('k', to_jsonb(i), 'far', run_at => :'hour'::timestamptz + make_interval(mins => i)) FROM generate_series(1, 20) i \g /dev/null
SELECT is(test.promote_at('2999-01-01Z'), 0::bigint, 'promotion does not look into the far leaf');
SELECT is(test.refill_at(:'hour'), 9::bigint, 'a refill moves what is due within ten minutes');
SELECT is((SELECT count(*) FROM awa.deferred_jobs d WHERE d.slot = awa._deferred_slot(d.run_at, d.run_at) AND d.queue = 'far'), 9::bigint, 'to the bucket of its minute');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '14 s'), 0::bigint, 'the next one has to wait');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '15 s'), 1::bigint, 'for 15 seconds');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '6 min', 4), 4::bigint, 'when there are more than a call may move');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '6 min', 4), 1::bigint, 'the rest comes at once');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '6 min', 4), 0::bigint, 'until nothing is left');
SELECT is(test.promote_at(:'hour'::timestamptz + interval '15 min 1 s'), 15::bigint, 'then promotion finds them');
SELECT results_eq($$ SELECT c.args::text::integer FROM test.claim('far') c $$, $$ SELECT generate_series(1, 15) $$, 'in their order');
SELECT is((awa.queue_counts('far'))::text, '(far,5,0,15,0,0,0,0,0,0)', 'each is in one place');

-- What was committed behind the mark of refill: as a transaction that was open for long does.
SELECT setval('awa.deferred_full_look', extract(epoch FROM :'hour'::timestamptz + interval '8 min')::bigint) \g /dev/null
SELECT (awa.insert_job('k', '"late"', 'late', run_at => :'hour'::timestamptz + interval '13 min')).job_id AS late,
       (awa.insert_job('k', '"on time"', 'late', run_at => :'hour'::timestamptz + interval '15 min 30 s')).job_id AS on_time \gset
SELECT is(test.refill_at(:'hour'::timestamptz + interval '7 min'), 2::bigint, 'a refill goes on where it was a minute before');
SELECT is(test.slot_of(:on_time), test.bucket(:'hour'::timestamptz + interval '15 min'), 'so that it finds what came a little late');
SELECT is(test.slot_of(:late), 16, 'and does not walk over all that is dead before');
SELECT is(test.refill_at(:'hour'::timestamptz + interval '8 min'), 2::bigint, 'a look from the start comes when its time has come');
SELECT is(test.slot_of(:late), test.bucket(:'hour'::timestamptz + interval '13 min'), 'and finds what was committed much later');
SELECT cmp_ok((SELECT last_value FROM awa.deferred_full_look), '<', extract(epoch FROM :'hour'::timestamptz + interval '9 min')::bigint, 'while it is quick, each one is from the start');
SELECT (awa.insert_job('k', queue => 'late', run_at => now() + interval '11 min')).job_id AS other \gset
SELECT setval('awa.deferred_refill', 99999999999), setval('awa.deferred_full_look', 99999999999) \g /dev/null
SELECT is(test.refill_at(now() + interval '2 min'), 1::bigint, 'a clock that was wrong does not stop it');
SELECT setval('awa.deferred_refill', 5), setval('awa.deferred_full_look', 5) \g /dev/null
SELECT count(*) FROM awa.verify() \g /dev/null
SELECT results_eq('SELECT r.last_value, f.last_value FROM awa.deferred_refill r, awa.deferred_full_look f', 'VALUES (0::bigint, 0::bigint)', 'verify lets it begin anew');

-- Prune.
SELECT test.promote_at(now() + interval '1 day') \g /dev/null
DELETE FROM awa.deferred_jobs;
SELECT date_trunc('minute', now()) + interval '3 min' AS due \gset
SELECT test.bucket(:'due') AS slot, (test.bucket(:'due') + 1) % 16 AS next_slot \gset
SELECT is(test.prune_at(now() + interval '1 day'), 'nothing', 'small slots are left alone');
CREATE PROCEDURE test.fill(p_at timestamptz, p_count integer) LANGUAGE sql AS $$
    SELECT awa.insert_many('k', array_fill('{"text": "some text, so that a few hundred jobs are enough"}'::jsonb, ARRAY[p_count]), 'q', run_at => p_at)
$$;
CALL test.fill(:'due', 2000);
SELECT is(test.prune_at(:'due'::timestamptz - interval '1 s'), 'nothing', 'a slot with jobs is kept');
SELECT is(test.promote_at(:'due'), 2000::bigint, 'when they are promoted');
SELECT is(test.prune_at(:'due'::timestamptz + interval '59 s'), 'nothing', 'it is kept for a minute, for a dump that has its snapshot and not yet its locks');
SELECT is((SELECT count(*) FROM awa.ring_status() r WHERE r.ring = 'deferred' AND r.slot = :slot AND r.bytes > 0 AND r.row_count = 0), 1::bigint, 'as ring_status shows');
BEGIN;
SELECT is(test.prune_at(:'due'::timestamptz + interval '61 s'), format('pruned slot %s', :slot), 'then it is emptied');
ROLLBACK;
SELECT isnt(pg_relation_size(format('awa.deferred_jobs_%s', :slot)), 0::bigint, 'unless that rolls back');
CALL test.fill(:'due'::timestamptz + interval '1 min', 1);
SELECT is(test.prune_at(:'due'::timestamptz + interval '61 s'), format('pruned slot %s', :slot), 'it is emptied, whatever other slots hold');
SELECT is(pg_relation_size(format('awa.deferred_jobs_%s', :slot)), 0::bigint, 'for good');
SELECT is(test.prune_at(:'due'::timestamptz + interval '61 s'), 'nothing', 'once');

-- Stragglers: a few overdue jobs that nobody could promote.
CALL test.fill(:'due', 2000);
SELECT is(test.promote_at(:'due', 1990), 1990::bigint, 'all but a few are promoted');
SELECT is(test.prune_at(:'due'::timestamptz + interval '119 s'), 'nothing', 'a slot with jobs that are just overdue is kept');
SELECT is(test.prune_at(:'due'::timestamptz + interval '121 s'), format('moved 10 slot %s', :slot), 'later they move');
SELECT is((SELECT array_agg(DISTINCT d.slot::integer) FROM awa.deferred_jobs d WHERE d.run_at = :'due'), ARRAY[test.bucket(:'due'::timestamptz + interval '121 s')], 'to the bucket of this minute');
SELECT is(test.prune_at(:'due'::timestamptz + interval '180 s'), 'nothing', 'it is not emptied at once');
SELECT is(test.prune_at(:'due'::timestamptz + interval '182 s'), format('pruned slot %s', :slot), 'but a minute later');
SELECT is(test.promote_at(:'due'::timestamptz + interval '182 s'), 11::bigint, 'they are promoted when they can be');
CALL test.fill(:'due', 3000);
SELECT is(test.promote_at(:'due', 1990), 1990::bigint, 'where many are overdue');
SELECT is(test.prune_at(:'due'::timestamptz + interval '10 min'), 'nothing', 'promotion will come to them, and nothing moves');
SELECT is(test.promote_at(:'due'::timestamptz + interval '10 min'), 1010::bigint, 'as it does');

-- The far leaf. The minute that its jobs are due in belongs to another slot than the one emptied last.
SELECT t AS far, t + interval '1 year' AS further
FROM generate_series(timestamptz '2990-01-01Z', '2990-01-01 00:01Z', '1 min') t
WHERE test.bucket(t) <> :slot ORDER BY t LIMIT 1 \gset
CALL test.fill(:'far', 2000);
SELECT is(test.refill_at(:'far'), 2000::bigint, 'the far leaf has given all away');
SELECT is(test.prune_at(:'far'::timestamptz + interval '59 s'), format('pruned slot %s', :slot), 'another slot goes first');
SELECT is(test.prune_at(:'far'::timestamptz + interval '59 s'), 'nothing', 'the far leaf is kept for a minute');
CALL test.fill(:'further', 1);
SELECT is(test.prune_at(:'far'::timestamptz + interval '61 s'), 'nothing', 'with a job it stays');
SELECT is(test.refill_at(:'further'), 1::bigint, 'without one');
SELECT is(test.prune_at(:'further'::timestamptz + interval '61 s'), 'pruned slot 16', 'it is emptied too');

SELECT * FROM finish();
