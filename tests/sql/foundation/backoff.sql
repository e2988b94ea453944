-- Delay before a retry: within [0, cap] at every attempt, never an error.
SELECT * FROM no_plan();

SELECT is(awa._backoff_seconds(1, NULL, 0), 2::double precision, 'the first retry waits 2 s');
SELECT is(awa._backoff_seconds(5, NULL, 0), 32::double precision, 'the delay is 2^attempt seconds');
SELECT is(awa._backoff_seconds(5, NULL, 1), 40::double precision, 'jitter adds at most a quarter');
SELECT is(awa._backoff_seconds(17, NULL, 1), 86400::double precision, 'the cap of a day holds after jitter');

SELECT is_empty($$
    SELECT a, r FROM unnest('{-1,0,1,20,31,62,100,305,1000,32766,2147483647}'::integer[]) a, unnest('{0,0.5,1}'::float8[]) r
    WHERE awa._backoff_seconds(a, NULL, r) NOT BETWEEN 0 AND 86400
$$, 'every attempt has a delay from 0 to a day');

SELECT is_empty($$
    SELECT a FROM generate_series(1, 1000) a WHERE awa._backoff_seconds(a + 1, NULL, 0.5) < awa._backoff_seconds(a, NULL, 0.5)
$$, 'the mean delay never decreases');

SELECT is(awa._backoff_seconds(0, NULL, 0), awa._backoff_seconds(1, NULL, 0), 'an attempt below 1 counts as the first');
SELECT is(awa._backoff_seconds(NULL, NULL, 0), 2::double precision, 'an unknown attempt counts as the first');

SELECT results_eq(
    $$ SELECT awa._backoff_seconds(a, '{"delays": [1, 5, 0.5]}', 1) FROM generate_series(1, 5) a $$,
    $$ VALUES (1::float8), (5), (0.5), (0.5), (0.5) $$,
    'a list of delays is followed, and its last one repeats');

SELECT is(awa._backoff_seconds(3, '{"base_seconds": 10, "factor": 3, "jitter": 0}', 1), 270::double precision,
    'base and factor are the job''s own');
SELECT is(awa._backoff_seconds(9, '{"cap_seconds": 60}', 1), 60::double precision, 'a cap of the job holds after jitter');
SELECT is(awa._backoff_seconds(500, '{"base_seconds": 0}', 1), 0::double precision, 'a base of 0 retries at once for ever');
SELECT is(awa._backoff_seconds(500, '{"factor": 1, "base_seconds": 7, "jitter": 0}', 1), 7::double precision,
    'a factor of 1 is a constant delay');
SELECT is(awa._backoff_seconds(32766, '{"factor": 100, "base_seconds": 86400, "jitter": 1}', 1), 86400::double precision,
    'the largest policy ends at the cap');
SELECT is(awa._backoff_seconds(1, '{"base_seconds": 1e-400, "jitter": 1e-400}', 1), 0::double precision,
    'a number too small for a float is none');
SELECT is(awa._backoff_seconds(2, '{"delays": [1e-400]}', 1), 0::double precision,
    'a listed delay too small for a float is none');

SELECT results_eq(
    $$ SELECT r.e ->> 'error', r.e ->> 'attempt' FROM jsonb_array_elements(awa._append_error(NULL, '"boom"', 3, now())) r (e) $$,
    $$ VALUES ('boom', '3') $$,
    'an error is kept with its attempt');
SELECT ok(awa._append_error(NULL, '{"error": "x", "traceback": "t"}', 1, now()) -> 0 @> '{"error": "x", "traceback": "t", "attempt": 1}',
    'an error object keeps its fields');

CREATE FUNCTION pg_temp.history(p_count integer, p_error jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_errors jsonb;
BEGIN
    FOR i IN 1 .. p_count LOOP
        v_errors := awa._append_error(v_errors, p_error, i, now());
    END LOOP;
    RETURN v_errors;
END $$;

SELECT is(jsonb_array_length(pg_temp.history(50, '"e"')), 20, 'the history is bounded in count');
SELECT is(pg_temp.history(50, '"e"') -> -1 ->> 'attempt', '50', 'the newest error is kept');
SELECT is(pg_temp.history(50, '"e"') -> 0 ->> 'attempt', '31', 'the oldest errors go first');
SELECT cmp_ok(octet_length(pg_temp.history(50, to_jsonb(repeat('x', 5000)))::text), '<=', 16384,
    'the history is bounded in bytes');
SELECT cmp_ok(octet_length(awa._append_error(NULL, to_jsonb(repeat(U&'\6F22', 100000)), 1, now())::text), '<=', 16384,
    'one huge error is cut to size');
SELECT is(awa._append_error(NULL, to_jsonb(repeat('x', 100000)), 1, now()) -> 0 ->> 'truncated', 'true', 'a cut error says so');

SELECT * FROM finish();
