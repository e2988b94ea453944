-- Leaves of ring tables, and the marks that make pg_dump keep the rows of extension members.

CREATE OR REPLACE FUNCTION @extschema@._mark_for_dump(p_relation regclass)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    -- As plain SQL the relation is an ordinary one and dumped anyway.
    IF EXISTS (SELECT FROM pg_extension e
               WHERE e.extname = 'awa' AND e.extnamespace = '@extschema@'::regnamespace) THEN
        PERFORM pg_extension_config_dump(p_relation, '');
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._mark_for_dump(regclass) IS
    'Internal: registers a table or sequence whose rows pg_dump must keep.';

CREATE OR REPLACE FUNCTION @extschema@._slot_count(p_ring text)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN CASE p_ring WHEN 'queue' THEN 16 WHEN 'claim' THEN 8 WHEN 'deferred' THEN 17 END;
COMMENT ON FUNCTION @extschema@._slot_count(text) IS 'Internal: number of slots of a ring, fixed at install.';

-- p_indexes: index definitions by suffix, created on every leaf, because a
-- partitioned unique index would need the slot.
CREATE OR REPLACE FUNCTION @extschema@._create_leaves(p_ring text, p_table text, p_indexes jsonb)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_leaf text;
    v_index record;
BEGIN
    FOR v_slot IN 0 .. @extschema@._slot_count(p_ring) - 1 LOOP
        v_leaf := p_table || '_' || v_slot;
        -- Leaves are emptied by TRUNCATE; a vacuum there would only hold locks that prune must not wait for.
        EXECUTE format('CREATE TABLE @extschema@.%I PARTITION OF @extschema@.%I FOR VALUES IN (%s)
                        WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_leaf, p_table, v_slot);
        EXECUTE format('COMMENT ON TABLE @extschema@.%I IS %L', v_leaf, format('Slot %s of %s.', v_slot, p_table));
        FOR v_index IN SELECT i.key AS suffix, i.value AS definition FROM jsonb_each_text(p_indexes) i LOOP
            EXECUTE format('CREATE %s', format(v_index.definition,
                quote_ident(v_leaf || '_' || v_index.suffix), '@extschema@.' || quote_ident(v_leaf)));
        END LOOP;
        PERFORM @extschema@._mark_for_dump(format('@extschema@.%I', v_leaf)::regclass);
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._create_leaves(text, text, jsonb) IS
    'Internal: makes the leaves of a ring table at install.';
