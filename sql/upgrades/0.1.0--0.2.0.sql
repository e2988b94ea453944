\ir begin.sql

-- state
CREATE TABLE @extschema@.database_identity (
    system_identifier bigint NOT NULL,
    database_oid      oid NOT NULL,
    since             timestamptz NOT NULL,
    CONSTRAINT database_identity_pkey PRIMARY KEY (system_identifier, database_oid)
);
COMMENT ON TABLE @extschema@.database_identity IS
    'The database whose rows these are, once verify() has seen it. A dump or logical copy brings that of the old one.';
DO $block$
BEGIN
    PERFORM @extschema@._mark_for_dump('@extschema@.database_identity');
END
$block$;

-- code
\ir ../code.sql

-- rows: they are where they always were, or verify() was called by hand, as the last version wanted
DO $block$
BEGIN
    PERFORM @extschema@._settle(clock_timestamp());
END
$block$;

-- what producers use: the locks last from here to the end, and wait for transactions that have enqueued or deferred
DO $block$
DECLARE
    v_name text;
BEGIN
    -- All but the hints of lanes, which claims can do without.
    FOR v_name IN
        SELECT c.relname FROM pg_class c
        WHERE c.relnamespace = '@extschema@'::regnamespace AND c.relkind = 'S' AND c.relpersistence = 'u'
          AND c.relname NOT LIKE 'lane%'
    LOOP
        EXECUTE format('ALTER SEQUENCE @extschema@.%I SET LOGGED', v_name);
        IF v_name LIKE 'doorbell%' THEN
            EXECUTE format('ALTER SEQUENCE @extschema@.%I INCREMENT 500', v_name);
        END IF;
    END LOOP;
    FOR v_slot IN 0 .. @extschema@._slot_count('deferred') - 1 LOOP
        EXECUTE format('ALTER TABLE @extschema@.deferred_jobs_%s
                        REPLICA IDENTITY USING INDEX deferred_jobs_%1$s_job_id_key', v_slot);
    END LOOP;
END
$block$;

-- what is gone
DROP FUNCTION @extschema@._close_types();
DROP FUNCTION @extschema@._cancel_running(bigint, integer, text, timestamptz);
DROP FUNCTION @extschema@._slot_holder(text, integer, timestamptz);
DROP FUNCTION @extschema@._deferred_status(timestamptz);
DROP FUNCTION @extschema@._count_waiting(integer, integer, bigint);
DROP FUNCTION @extschema@._unclaimed_lane(integer);

\ir end.sql
