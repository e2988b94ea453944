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

-- what is gone
DROP FUNCTION @extschema@._close_types();

\ir end.sql
