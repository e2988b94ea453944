-- Which database the rows belong to. Sequences, hints and transaction ids fit the database that they come from; a dump
-- or a logical copy brings the rows to another one. A physical copy has all of them, and so it keeps its identity: a
-- standby that is promoted, a base backup, a clone of the disk.

CREATE OR REPLACE FUNCTION @extschema@._system_identifier()
RETURNS bigint
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF has_function_privilege('pg_control_system()', 'EXECUTE') THEN
        RETURN (SELECT c.system_identifier FROM pg_control_system() c);
    END IF;
    -- A host may keep it to itself. Then databases are told apart within their cluster.
    RETURN 0;
END
$function$;
COMMENT ON FUNCTION @extschema@._system_identifier() IS
    'Internal: what initdb gave the cluster; 0 where we may not know it.';

CREATE OR REPLACE FUNCTION @extschema@._is_at_home()
RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    RETURN (
        SELECT count(*) = 1
               AND bool_and(i.system_identifier = @extschema@._system_identifier() AND i.database_oid = d.oid)
        FROM @extschema@.database_identity i, pg_database d
        WHERE d.datname = current_database());
END
$function$;
COMMENT ON FUNCTION @extschema@._is_at_home() IS 'Internal: whether verify() has seen the rows in this very database.';

CREATE OR REPLACE FUNCTION @extschema@._settle(p_now timestamptz)
RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF @extschema@._is_at_home() THEN
        RETURN 0;
    END IF;
    DELETE FROM @extschema@.database_identity;
    INSERT INTO @extschema@.database_identity (system_identifier, database_oid, since)
    SELECT @extschema@._system_identifier(), d.oid, p_now FROM pg_database d WHERE d.datname = current_database();
    RETURN 1;
END
$function$;
COMMENT ON FUNCTION @extschema@._settle(timestamptz) IS
    'Internal: notes that the rows belong to this database; 1 if that is new, else 0.';
