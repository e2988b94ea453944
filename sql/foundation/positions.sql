-- A position is lane_id * 2^42 + n, and sets of positions are multiranges. Not STRICT where that would keep the
-- planner from inlining: a call costs ten times the expression.
-- The largest bigint would overflow as the end of a range; like its neighbour, which stands for it, it is no position.

CREATE OR REPLACE FUNCTION @extschema@._lane_base(p_lane integer)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN p_lane::bigint << 42;
COMMENT ON FUNCTION @extschema@._lane_base(integer) IS 'Internal: number below the first position of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._lane_of(p_position bigint)
RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN (p_position >> 42)::integer;
COMMENT ON FUNCTION @extschema@._lane_of(bigint) IS 'Internal: lane of a position.';

CREATE OR REPLACE FUNCTION @extschema@._lane_range(p_lane integer)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE STRICT
RETURN int8multirange(int8range(p_lane::bigint << 42, (p_lane + 1)::bigint << 42));
COMMENT ON FUNCTION @extschema@._lane_range(integer) IS 'Internal: all positions of a lane.';

CREATE OR REPLACE FUNCTION @extschema@._cardinality(p_set int8multirange)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM unnest(p_set) r);
COMMENT ON FUNCTION @extschema@._cardinality(int8multirange) IS 'Internal: number of positions in a bounded set.';

-- Not in SQL: with a subquery inside it is not inlined, and before PostgreSQL 18 planned at each call.
CREATE OR REPLACE FUNCTION @extschema@._to_set(p_positions bigint[])
RETURNS int8multirange
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_first bigint := least(p_positions[1], 9223372036854775806);
BEGIN
    IF cardinality(p_positions) = 1 AND p_positions[1] IS NOT NULL THEN
        RETURN int8multirange(int8range(v_first, v_first, '[]'));
    END IF;
    RETURN (SELECT coalesce(range_agg(int8range(p, p, '[]')), '{}')
            FROM (SELECT least(u, 9223372036854775806) FROM unnest(p_positions) u WHERE u IS NOT NULL) x (p));
END
$function$;
COMMENT ON FUNCTION @extschema@._to_set(bigint[]) IS 'Internal: a list of positions as a set.';

-- Ascending and distinct positions are one range when their ends lie as far apart as their number says.
CREATE OR REPLACE FUNCTION @extschema@._sorted_to_set(p_positions bigint[])
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN p_positions[cardinality(p_positions)] - p_positions[1] = cardinality(p_positions) - 1
    THEN int8multirange(int8range(p_positions[1], p_positions[cardinality(p_positions)], '[]'))
    ELSE @extschema@._to_set(p_positions) END;
COMMENT ON FUNCTION @extschema@._sorted_to_set(bigint[]) IS
    'Internal: an ascending list of distinct positions as a set, fast.';

CREATE OR REPLACE FUNCTION @extschema@._to_list(p_set int8multirange)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (SELECT coalesce(array_agg(p ORDER BY p), '{}') FROM unnest(p_set) r, generate_series(lower(r), upper(r) - 1) p);
COMMENT ON FUNCTION @extschema@._to_list(int8multirange) IS 'Internal: a bounded set of positions as a sorted list.';
