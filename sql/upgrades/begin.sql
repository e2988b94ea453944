-- What each upgrade begins with. One installation or upgrade of a database at a time; whoever waits behind it for a
-- table or view waits for a moment only; no step of maintenance is half done when its code changes.
DO $block$
DECLARE
    v_milliseconds constant integer := 500;
BEGIN
    PERFORM set_config('lock_timeout', v_milliseconds::text, true)
    FROM pg_settings s
    WHERE s.name = 'lock_timeout' AND s.setting::integer NOT BETWEEN 1 AND v_milliseconds;
    PERFORM pg_advisory_xact_lock(hashtextextended('awa install', 0));
    IF @extschema@.version() <> '@from_version@' THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = format('version %s is here, and this upgrade is for @from_version@', @extschema@.version()),
            HINT = 'Somebody else has upgraded it meanwhile, or another script is needed.';
    END IF;
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('step/' || s.step, 0))
    FROM unnest(@extschema@._tick_steps()) s (step);
END
$block$;
