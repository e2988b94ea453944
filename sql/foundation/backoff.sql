-- Delay before the next attempt, in seconds, always within [0, 24 h]. The
-- exponent is clamped before the power is taken.
-- p_policy: NULL, {"delays": [...]} (the last one repeats), or base_seconds, factor, cap_seconds, jitter.
CREATE OR REPLACE FUNCTION @extschema@._backoff_seconds(p_attempt integer, p_policy jsonb, p_random double precision)
RETURNS double precision
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_cap constant double precision := 86400;
    v_base double precision := coalesce(round((p_policy ->> 'base_seconds')::numeric, 9)::double precision, 1);
    v_factor double precision := coalesce(round((p_policy ->> 'factor')::numeric, 9)::double precision, 2);
    v_cap double precision := least(
        coalesce(round((p_policy ->> 'cap_seconds')::numeric, 9)::double precision, c_cap), c_cap);
    v_jitter double precision := coalesce(round((p_policy ->> 'jitter')::numeric, 9)::double precision, 0.25);
    v_attempt integer := greatest(coalesce(p_attempt, 1), 1);
    v_delay double precision;
BEGIN
    IF p_policy ? 'delays' THEN
        v_delay := round((p_policy -> 'delays'
            ->> (least(v_attempt, jsonb_array_length(p_policy -> 'delays')) - 1))::numeric, 9)::double precision;
        RETURN least(v_delay, c_cap);
    END IF;
    -- 1.01^1000 and 2^20 both fit; a larger factor reaches the cap long before the clamp.
    v_delay := CASE WHEN v_base = 0 THEN 0
                    WHEN ln(v_base) + v_attempt * ln(v_factor) > ln(c_cap) THEN c_cap
                    ELSE v_base * power(v_factor, v_attempt) END;
    RETURN least(v_delay * (1 + v_jitter * p_random), v_cap);
END
$function$;
COMMENT ON FUNCTION @extschema@._backoff_seconds(integer, jsonb, double precision) IS
    'Internal: seconds to wait after a failed attempt: '
    'base * factor^attempt plus up to jitter of it, at most the cap (24 h).';

CREATE OR REPLACE FUNCTION @extschema@._append_error(
    p_errors jsonb, p_error jsonb, p_attempt integer, p_now timestamptz)
RETURNS jsonb
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_max_count integer := @extschema@._setting('errors_max_count');
    v_max_bytes integer := @extschema@._setting('errors_max_bytes');
    v_entry jsonb := CASE jsonb_typeof(p_error)
        WHEN 'object' THEN p_error ELSE jsonb_build_object('error', p_error) END;
    v_errors jsonb := coalesce(p_errors, '[]');
BEGIN
    IF octet_length(v_entry::text) > v_max_bytes / 2 OR @extschema@._is_too_deep(v_entry) THEN
        v_entry := jsonb_build_object(
            'error', left(coalesce(v_entry ->> 'error', v_entry::text), v_max_bytes / 16), 'truncated', true);
    END IF;
    v_errors := v_errors || (v_entry || jsonb_build_object('attempt', p_attempt, 'at', p_now));
    -- The newest entries are the ones that explain the job.
    WHILE jsonb_array_length(v_errors) > 1
          AND (jsonb_array_length(v_errors) > v_max_count OR octet_length(v_errors::text) > v_max_bytes) LOOP
        v_errors := v_errors - 0;
    END LOOP;
    RETURN v_errors;
END
$function$;
COMMENT ON FUNCTION @extschema@._append_error(jsonb, jsonb, integer, timestamptz) IS
    'Internal: error history with one more entry, bounded by errors_max_count and errors_max_bytes.';
