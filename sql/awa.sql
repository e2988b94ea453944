\ir state.sql
\ir code.sql

-- All goes to the owner of the schema: a dump restores the schema, with its owner, ahead of the extension.
DO $block$
DECLARE
    v_owner regrole := (SELECT n.nspowner FROM pg_namespace n WHERE n.oid = '@extschema@'::regnamespace);
BEGIN
    IF pg_has_role(v_owner, 'MEMBER') THEN
        PERFORM @extschema@._give_objects(v_owner);
    END IF;
END
$block$;
