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

-- A statement with the name of a leaf in it is planned at each call, which costs more than to run it. The hot ones are
-- written out at install, so that a session keeps their plans: what a definition has between two marks is there once
-- for each slot, in a tree of comparisons, because each comparison is prepared anew in every transaction. White space
-- becomes one blank there.
CREATE OR REPLACE FUNCTION @extschema@._for_each_slot(
    p_statement text, p_choice text, p_first integer, p_last integer)
RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_middle integer := (p_first + p_last) / 2;
BEGIN
    IF p_first = p_last THEN
        RETURN replace(p_statement, '{slot}', p_first::text);
    END IF;
    RETURN format('IF %s <= %s THEN %s ELSE %s END IF;', p_choice, v_middle,
        @extschema@._for_each_slot(p_statement, p_choice, p_first, v_middle),
        @extschema@._for_each_slot(p_statement, p_choice, v_middle + 1, p_last));
END
$function$;
COMMENT ON FUNCTION @extschema@._for_each_slot(text, text, integer, integer) IS
    'Internal: a statement once for each slot, chosen by an expression.';

CREATE OR REPLACE FUNCTION @extschema@._create_for_slots(p_ring text, p_definition text)
RETURNS void
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_parts text[] := regexp_match(p_definition, '^(.*)-- for each slot, by ([^:]+):(.*)-- end of slots(.*)$');
BEGIN
    EXECUTE v_parts[1]
        || @extschema@._for_each_slot(trim(regexp_replace(v_parts[3], '[[:space:]]+', ' ', 'g')), v_parts[2],
               0, @extschema@._slot_count(p_ring) - 1)
        || v_parts[4];
END
$function$;
COMMENT ON FUNCTION @extschema@._create_for_slots(text, text) IS
    'Internal: makes a function that has its marked statement once for each slot of a ring.';
