-- What each upgrade ends with: what is new belongs to whom the rest belongs to.
DO $block$
BEGIN
    PERFORM @extschema@._give_objects(
        (SELECT c.relowner::regrole FROM pg_class c WHERE c.oid = '@extschema@.queue_meta'::regclass));
END
$block$;
