-- Kinds that are bound to a function of the database. The function is stored by name: pg_upgrade refuses columns of
-- type regprocedure, and a function that is dropped and made again stays bound.

CREATE OR REPLACE FUNCTION @extschema@._bind_sql_handler(p_kind text, p_handler text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF p_handler IS NULL THEN
        DELETE FROM @extschema@.sql_handlers h WHERE h.kind = p_kind;
    ELSE
        INSERT INTO @extschema@.sql_handlers AS h (kind, handler) VALUES (p_kind, p_handler)
        ON CONFLICT (kind) DO UPDATE SET handler = excluded.handler;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._bind_sql_handler(text, text) IS
    'Internal: binds a kind to a function by its full name, or unbinds it (NULL).';

CREATE OR REPLACE FUNCTION @extschema@._has_sql_handler(p_kind text)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN EXISTS (SELECT FROM @extschema@.sql_handlers h WHERE h.kind = p_kind);
COMMENT ON FUNCTION @extschema@._has_sql_handler(text) IS 'Internal: whether a kind is bound to a function.';
