-- What every test database starts with: the extension, owned by a plain role that cannot log in.
CREATE EXTENSION awa;
DO $block$
BEGIN
    IF to_regrole('awa_owner') IS NULL THEN
        CREATE ROLE awa_owner NOLOGIN;
    END IF;
    PERFORM awa.set_owner('awa_owner');
END
$block$;
