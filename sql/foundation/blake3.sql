-- BLAKE3 with 32 bytes of output, no key: byte for byte what every other implementation gives. A 32-bit word is a
-- bigint below 2^32: sums cannot overflow, and a mask drops what a word cannot hold.

-- The quarter rounds are written out, and the state is in scalars: an array would cost a copy or a look-up per step.
CREATE OR REPLACE FUNCTION @extschema@._blake3_compress(
    p_chain bigint[], p_words bigint[], p_counter bigint, p_length integer, p_flags integer)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_32 constant bigint := 4294967295;
    m bigint[] := p_words;
    v0 bigint := p_chain[1]; v1 bigint := p_chain[2]; v2 bigint := p_chain[3]; v3 bigint := p_chain[4];
    v4 bigint := p_chain[5]; v5 bigint := p_chain[6]; v6 bigint := p_chain[7]; v7 bigint := p_chain[8];
    v8 bigint := 1779033703; v9 bigint := 3144134277; v10 bigint := 1013904242; v11 bigint := 2773480762;
    v12 bigint := p_counter & c_32; v13 bigint := p_counter >> 32; v14 bigint := p_length; v15 bigint := p_flags;
BEGIN
    FOR v_round IN 1 .. 7 LOOP
        v0 := (v0 + v4 + m[1]) & c_32; v12 := (((v12 # v0) >> 16) | ((v12 # v0) << 16)) & c_32;
        v8 := (v8 + v12) & c_32; v4 := (((v4 # v8) >> 12) | ((v4 # v8) << 20)) & c_32;
        v0 := (v0 + v4 + m[2]) & c_32; v12 := (((v12 # v0) >> 8) | ((v12 # v0) << 24)) & c_32;
        v8 := (v8 + v12) & c_32; v4 := (((v4 # v8) >> 7) | ((v4 # v8) << 25)) & c_32;
        v1 := (v1 + v5 + m[3]) & c_32; v13 := (((v13 # v1) >> 16) | ((v13 # v1) << 16)) & c_32;
        v9 := (v9 + v13) & c_32; v5 := (((v5 # v9) >> 12) | ((v5 # v9) << 20)) & c_32;
        v1 := (v1 + v5 + m[4]) & c_32; v13 := (((v13 # v1) >> 8) | ((v13 # v1) << 24)) & c_32;
        v9 := (v9 + v13) & c_32; v5 := (((v5 # v9) >> 7) | ((v5 # v9) << 25)) & c_32;
        v2 := (v2 + v6 + m[5]) & c_32; v14 := (((v14 # v2) >> 16) | ((v14 # v2) << 16)) & c_32;
        v10 := (v10 + v14) & c_32; v6 := (((v6 # v10) >> 12) | ((v6 # v10) << 20)) & c_32;
        v2 := (v2 + v6 + m[6]) & c_32; v14 := (((v14 # v2) >> 8) | ((v14 # v2) << 24)) & c_32;
        v10 := (v10 + v14) & c_32; v6 := (((v6 # v10) >> 7) | ((v6 # v10) << 25)) & c_32;
        v3 := (v3 + v7 + m[7]) & c_32; v15 := (((v15 # v3) >> 16) | ((v15 # v3) << 16)) & c_32;
        v11 := (v11 + v15) & c_32; v7 := (((v7 # v11) >> 12) | ((v7 # v11) << 20)) & c_32;
        v3 := (v3 + v7 + m[8]) & c_32; v15 := (((v15 # v3) >> 8) | ((v15 # v3) << 24)) & c_32;
        v11 := (v11 + v15) & c_32; v7 := (((v7 # v11) >> 7) | ((v7 # v11) << 25)) & c_32;
        v0 := (v0 + v5 + m[9]) & c_32; v15 := (((v15 # v0) >> 16) | ((v15 # v0) << 16)) & c_32;
        v10 := (v10 + v15) & c_32; v5 := (((v5 # v10) >> 12) | ((v5 # v10) << 20)) & c_32;
        v0 := (v0 + v5 + m[10]) & c_32; v15 := (((v15 # v0) >> 8) | ((v15 # v0) << 24)) & c_32;
        v10 := (v10 + v15) & c_32; v5 := (((v5 # v10) >> 7) | ((v5 # v10) << 25)) & c_32;
        v1 := (v1 + v6 + m[11]) & c_32; v12 := (((v12 # v1) >> 16) | ((v12 # v1) << 16)) & c_32;
        v11 := (v11 + v12) & c_32; v6 := (((v6 # v11) >> 12) | ((v6 # v11) << 20)) & c_32;
        v1 := (v1 + v6 + m[12]) & c_32; v12 := (((v12 # v1) >> 8) | ((v12 # v1) << 24)) & c_32;
        v11 := (v11 + v12) & c_32; v6 := (((v6 # v11) >> 7) | ((v6 # v11) << 25)) & c_32;
        v2 := (v2 + v7 + m[13]) & c_32; v13 := (((v13 # v2) >> 16) | ((v13 # v2) << 16)) & c_32;
        v8 := (v8 + v13) & c_32; v7 := (((v7 # v8) >> 12) | ((v7 # v8) << 20)) & c_32;
        v2 := (v2 + v7 + m[14]) & c_32; v13 := (((v13 # v2) >> 8) | ((v13 # v2) << 24)) & c_32;
        v8 := (v8 + v13) & c_32; v7 := (((v7 # v8) >> 7) | ((v7 # v8) << 25)) & c_32;
        v3 := (v3 + v4 + m[15]) & c_32; v14 := (((v14 # v3) >> 16) | ((v14 # v3) << 16)) & c_32;
        v9 := (v9 + v14) & c_32; v4 := (((v4 # v9) >> 12) | ((v4 # v9) << 20)) & c_32;
        v3 := (v3 + v4 + m[16]) & c_32; v14 := (((v14 # v3) >> 8) | ((v14 # v3) << 24)) & c_32;
        v9 := (v9 + v14) & c_32; v4 := (((v4 # v9) >> 7) | ((v4 # v9) << 25)) & c_32;
        m := ARRAY[m[3], m[7], m[4], m[11], m[8], m[1],
                   m[5], m[14], m[2], m[12], m[13], m[6], m[10], m[15], m[16], m[9]];
    END LOOP;
    RETURN ARRAY[v0 # v8, v1 # v9, v2 # v10, v3 # v11, v4 # v12, v5 # v13, v6 # v14, v7 # v15];
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_compress(bigint[], bigint[], bigint, integer, integer) IS
    'Internal: BLAKE3 compression of one block.';

CREATE OR REPLACE FUNCTION @extschema@._blake3_words(p_block bytea)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    b bytea := p_block;
    w bigint[] := '{}'::bigint[];
BEGIN
    IF length(b) < 64 THEN
        b := b || decode(repeat('00', 64 - length(b)), 'hex');
    END IF;
    FOR i IN 0 .. 60 BY 4 LOOP
        w := w || (get_byte(b, i) | (get_byte(b, i + 1) << 8) | (get_byte(b, i + 2) << 16)
                   | (get_byte(b, i + 3)::bigint << 24));
    END LOOP;
    RETURN w;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_words(bytea) IS
    'Internal: up to 64 bytes as 16 little-endian words, padded with zeros.';

-- Flags: 1 the first block of a chunk, 2 its last, 4 a parent, 8 the root of the tree.
CREATE OR REPLACE FUNCTION @extschema@._blake3_chunk(p_chunk bytea, p_counter bigint, p_root_flag integer)
RETURNS bigint[]
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_start constant bigint[] := '{1779033703,3144134277,1013904242,2773480762,'
        '1359893119,2600822924,528734635,1541459225}'::bigint[];
    v_length integer := length(p_chunk);
    v_chain bigint[] := c_start;
    v_last integer := greatest(v_length - 1, 0) / 64;
BEGIN
    FOR v_block IN 0 .. v_last LOOP
        v_chain := @extschema@._blake3_compress(
            v_chain, @extschema@._blake3_words(substring(p_chunk FROM v_block * 64 + 1 FOR 64)), p_counter,
            least(v_length - v_block * 64, 64),
            CASE v_block WHEN 0 THEN 1 ELSE 0 END | CASE v_block WHEN v_last THEN 2 | p_root_flag ELSE 0 END);
    END LOOP;
    RETURN v_chain;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3_chunk(bytea, bigint, integer) IS
    'Internal: BLAKE3 chaining value of one chunk of up to 1024 bytes.';

CREATE OR REPLACE FUNCTION @extschema@._blake3_parent(p_left bigint[], p_right bigint[], p_root_flag integer)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN @extschema@._blake3_compress(
    '{1779033703,3144134277,1013904242,2773480762,1359893119,2600822924,528734635,1541459225}'::bigint[],
    p_left || p_right, 0, 64, 4 | p_root_flag);
COMMENT ON FUNCTION @extschema@._blake3_parent(bigint[], bigint[], integer) IS
    'Internal: BLAKE3 chaining value of a node of the tree.';

-- Chunks are the leaves of a binary tree whose left subtrees are full. v_stack holds the roots of the subtrees that
-- are complete, eight words each, the largest first.
CREATE OR REPLACE FUNCTION @extschema@._blake3(p_data bytea)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_last integer := greatest(length(p_data) - 1, 0) / 1024;
    v_stack bigint[] := '{}'::bigint[];
    v_top integer := 0;
    v_node bigint[];
    v_chunks integer;
    v_digest bytea := ''::bytea;
BEGIN
    FOR v_chunk IN 0 .. v_last LOOP
        v_node := @extschema@._blake3_chunk(
            substring(p_data FROM v_chunk * 1024 + 1 FOR 1024), v_chunk, CASE v_last WHEN 0 THEN 8 ELSE 0 END);
        EXIT WHEN v_chunk = v_last;
        v_chunks := v_chunk + 1;
        WHILE v_chunks % 2 = 0 LOOP
            v_node := @extschema@._blake3_parent(v_stack[v_top - 7:v_top], v_node, 0);
            v_top := v_top - 8;
            v_chunks := v_chunks / 2;
        END LOOP;
        v_stack := v_stack[:v_top] || v_node;
        v_top := v_top + 8;
    END LOOP;
    WHILE v_top > 0 LOOP
        v_node := @extschema@._blake3_parent(v_stack[v_top - 7:v_top], v_node, CASE v_top WHEN 8 THEN 8 ELSE 0 END);
        v_top := v_top - 8;
    END LOOP;
    FOR i IN 1 .. 8 LOOP
        -- The lowest byte first.
        v_digest := v_digest || substring(int8send(
            ((v_node[i] & 255) << 24) | ((v_node[i] & 65280) << 8)
            | ((v_node[i] >> 8) & 65280) | (v_node[i] >> 24)) FROM 5);
    END LOOP;
    RETURN v_digest;
END
$function$;
COMMENT ON FUNCTION @extschema@._blake3(bytea) IS 'Internal: BLAKE3 of any bytes, 32 bytes.';
