-- Retention: how long history stays, and who is in the way when it does not go.
\ir ../support.psql
SELECT * FROM no_plan();

-- The ring is left in time for its history to go.
SELECT is(round(awa._rotate_seconds('queue')), 6646::numeric, 'a day of history is cut into thirteen slots, of sixteen');
SELECT awa.set_setting('terminal_retention_seconds', '604800') \g /dev/null
SELECT is(round(awa._rotate_seconds('queue')), 46523::numeric, 'and so is a week, or the ring were full after a day');
SELECT awa.set_setting('terminal_retention_seconds', '30') \g /dev/null
SELECT is(awa._rotate_seconds('queue'), 30::numeric, 'thirty seconds of history need a turn every thirty seconds');
SELECT awa.set_setting('terminal_retention_seconds', '0') \g /dev/null
SELECT is(awa._rotate_seconds('queue'), 15::numeric, 'but the catalog pays for each');
SELECT is(awa._rotate_seconds('claim'), 120::numeric, 'ten minutes of receipts are cut into five slots, of eight');
SELECT awa.set_setting('attempt_evidence_seconds', '30') \g /dev/null
SELECT is(awa._rotate_seconds('claim'), 60::numeric, 'short ones need not be left more often than by default');
SELECT awa.set_setting('attempt_evidence_seconds', NULL), awa.set_setting('claim_rotate_seconds', '60') \g /dev/null
SELECT is(awa._rotate_seconds('claim'), 60::numeric, 'who says how often has it so');
SELECT awa.set_setting('queue_rotate_seconds', '0.05'), awa.set_setting('terminal_retention_seconds', '60') \g /dev/null
SELECT is(awa._rotate_seconds('queue'), 0.05, 'in either ring');

-- Failed jobs outlive their slot.
SELECT test.start('q', '{"tags": ["a"]}') AS failed, test.start('q') AS done \gset
SELECT test.finish(:'failed'::jsonb, 'fail', '{"error": "no", "reason": "why"}'), test.finish(:'done'::jsonb, 'completed')
\g /dev/null
CREATE TABLE test.before AS SELECT j.* FROM awa.job((:'failed'::jsonb ->> 'job_id')::bigint) j;
CREATE TABLE test.counts AS SELECT c.* FROM awa.queue_counts('q') c;
SELECT pg_sleep(0.06) \g /dev/null
SELECT awa._plan_ring('queue', clock_timestamp()) \g /dev/null
SELECT is(awa._publish_ring('queue'), 'published', 'their slot is left');
SELECT is((awa._prune_ring('queue', now() - interval '1 second')).detail ->> 'reason', 'retention', 'kept for its time');
SELECT is((awa._prune_ring('queue', now() + interval '59 seconds')).outcome, 'released',
    'shortly before it ends, what must outlive the slot is copied');
SELECT is((SELECT count(*) FROM awa.failed_entries), 1::bigint, 'the failed job is');
SELECT results_eq($$ SELECT j.* FROM test.before t, LATERAL awa.job(t.job_id) j $$, $$ SELECT b.* FROM test.before b $$,
    'it is known as before');
SELECT results_eq($$ SELECT j.state, count(*) FROM awa.jobs j GROUP BY 1 ORDER BY 1 $$,
    $$ VALUES ('completed', 1::bigint), ('failed', 1) $$, 'and listed once');
SELECT results_eq($$ SELECT c.* FROM awa.queue_counts('q') c $$, $$ SELECT c.* FROM test.counts c $$, 'and counted once');
SELECT is((awa._prune_ring('queue', now() + interval '118 seconds')).detail ->> 'reason', 'recent',
    'the slot stays for a minute, for a dump that has its snapshot and not yet its locks');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM awa.done_entries_0 \g /dev/null
SELECT pg_backend_pid() AS pid \gset
COMMIT;
SELECT is((awa._prune_ring('queue', now() + interval '120 seconds')).outcome, 'pruned', 'and pruned then');
SELECT results_eq($$ SELECT j.* FROM test.before t, LATERAL awa.job(t.job_id) j $$, $$ SELECT b.* FROM test.before b $$,
    'a failed job is still there, with everything');
SELECT is(test.state(:'done'::jsonb), 'pruned', 'a completed one is not');
SELECT results_eq($$ SELECT c.* FROM awa.queue_counts('q') c $$, $$ SELECT c.* FROM test.counts c $$, 'both are counted once');
SELECT results_eq($$ SELECT j.state FROM awa.jobs j $$, $$ VALUES ('failed') $$, 'and it is listed');
SELECT results_eq($$ SELECT j.* FROM awa.terminal_jobs j $$, $$ SELECT b.* FROM test.before b $$, 'as history');
SELECT is(awa.cancel_job((:'failed'::jsonb ->> 'job_id')::bigint), 'already_failed', 'cancel knows it');
SELECT is(awa._expire_failed(10, now() + interval '71 hours'), 0::bigint, 'it stays');
SELECT is(awa._expire_failed(10, now() + interval '73 hours'), 1::bigint, 'for three days');
SELECT is(test.state(:'failed'::jsonb), 'pruned', 'and is pruned then');
SELECT results_eq($$ SELECT c.* FROM awa.queue_counts('q') c $$, $$ SELECT c.* FROM test.counts c $$, 'but counted');

-- A slot may be full of failed jobs, so they are copied in one go, and once.
SELECT test.finish(test.start('many', jsonb_build_object('tags', jsonb_build_array(g::text))), 'fail', '{"error": "no"}') FROM generate_series(1, 5) g \g /dev/null
SELECT s.last_value % 64 AS slot FROM awa.queue_ring s \gset
SET track_functions = 'all';
BEGIN;
SELECT is(awa._keep_failed(:slot, now()), 5::bigint, 'failed jobs are copied');
SELECT is((SELECT f.calls FROM pg_stat_xact_user_functions f WHERE f.funcname = '_read_ready'), 1::bigint, 'their bodies with one look');
SELECT is((SELECT count(DISTINCT f.body -> 'ext' -> 'tags') FROM awa.failed_entries f), 5::bigint, 'each with its own');
SELECT is(awa._keep_failed(:slot, now()), 0::bigint, 'and not again');
SELECT is((SELECT f.calls FROM pg_stat_xact_user_functions f WHERE f.funcname = '_done_body'), 5::bigint, 'nor is any body made again');
COMMIT;

SELECT * FROM finish();
