-- One text per JSON value, so that equal arguments give equal keys whoever wrote them down: no white space; the keys of
-- an object in the order of their code points; characters as they are, but for the quote, the backslash and the control
-- characters below U+0020 (backslash with b, t, n, f or r, otherwise u and four hex digits in lower case); a number is
-- its exact decimal value with neither exponent nor needless zeros, so 1.0 and 1e0 are 1, and nothing is rounded.

CREATE OR REPLACE FUNCTION @extschema@._canonical_scalar(p_value jsonb)
RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN jsonb_typeof(p_value) = 'number' THEN trim_scale(p_value::numeric)::text ELSE p_value::text END;
COMMENT ON FUNCTION @extschema@._canonical_scalar(jsonb) IS
    'Internal: canonical text of a JSON value that is neither object nor array.';

CREATE OR REPLACE FUNCTION @extschema@._canonical_json(p_value jsonb)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    CASE jsonb_typeof(p_value)
    WHEN 'object' THEN
        RETURN (
            SELECT '{' || coalesce(string_agg(to_json(e.key)::text || ':'
                       || CASE WHEN jsonb_typeof(e.value) IN ('object', 'array')
                               THEN @extschema@._canonical_json(e.value)
                               ELSE @extschema@._canonical_scalar(e.value) END,
                       ',' ORDER BY convert_to(e.key, 'UTF8')), '') || '}'
            FROM jsonb_each(p_value) e);
    WHEN 'array' THEN
        RETURN (
            SELECT '[' || coalesce(string_agg(
                       CASE WHEN jsonb_typeof(e.value) IN ('object', 'array')
                            THEN @extschema@._canonical_json(e.value)
                            ELSE @extschema@._canonical_scalar(e.value) END,
                       ',' ORDER BY e.o), '') || ']'
            FROM jsonb_array_elements(p_value) WITH ORDINALITY e (value, o));
    ELSE
        RETURN @extschema@._canonical_scalar(p_value);
    END CASE;
END
$function$;
COMMENT ON FUNCTION @extschema@._canonical_json(jsonb) IS 'Internal: the canonical text of a JSON value.';
