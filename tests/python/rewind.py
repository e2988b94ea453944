"""The way back to where a play began, without a new database and new sessions.

Tables and sequences of the engine get what they held, and sequences that were made since go. Nobody
else may have a transaction open.
"""

from __future__ import annotations

import psycopg

SCRIPT = """
CREATE SCHEMA rewind;
CREATE TABLE rewind.sequences (name regclass, value bigint, is_called boolean);
CREATE TABLE rewind.tables (name regclass, copy regclass);
CREATE FUNCTION rewind.filled() RETURNS SETOF regclass LANGUAGE sql AS $$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'r' AND pg_relation_size(c.oid) > 0
$$;
CREATE FUNCTION rewind.sequences() RETURNS SETOF regclass LANGUAGE sql AS $$
    SELECT c.oid::regclass FROM pg_class c
    WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'S'
$$;
CREATE FUNCTION rewind.save() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_name regclass;
BEGIN
    FOR v_name IN SELECT f FROM rewind.filled() f LOOP
        EXECUTE format('CREATE TABLE rewind.copy_%s AS TABLE %s', v_name::oid, v_name);
        INSERT INTO rewind.tables VALUES (v_name, format('rewind.copy_%s', v_name::oid)::regclass);
    END LOOP;
    FOR v_name IN SELECT s FROM rewind.sequences() s LOOP
        EXECUTE format('INSERT INTO rewind.sequences SELECT %L, last_value, is_called FROM %s',
                       v_name, v_name);
    END LOOP;
END
$$;
CREATE FUNCTION rewind.reset() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_filled text := (SELECT string_agg(f::text, ', ') FROM rewind.filled() f);
    v_row record;
BEGIN
    EXECUTE coalesce('TRUNCATE ' || v_filled, 'SELECT');
    FOR v_row IN SELECT * FROM rewind.tables LOOP
        EXECUTE format('INSERT INTO %s TABLE %s', v_row.name, v_row.copy);
    END LOOP;
    FOR v_row IN SELECT n, s.* FROM rewind.sequences() n LEFT JOIN rewind.sequences s ON s.name = n
    LOOP
        IF v_row.name IS NULL THEN
            EXECUTE format('DROP SEQUENCE %s', v_row.n);
        ELSE
            PERFORM setval(v_row.name, v_row.value, v_row.is_called);
        END IF;
    END LOOP;
END
$$;
"""


def remember(conn: psycopg.Connection) -> None:
    """Note what schema awa holds now."""
    conn.execute(SCRIPT.encode())
    conn.execute("SELECT rewind.save()")


def go_back(conn: psycopg.Connection) -> None:
    """Let schema awa hold what was noted."""
    conn.execute("SELECT rewind.reset()")
