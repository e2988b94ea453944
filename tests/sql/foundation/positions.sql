-- Positions and sets of them.
SELECT * FROM no_plan();

SELECT is(awa._lane_base(1), 4398046511104::bigint, 'a lane is 2^42 positions wide');
SELECT is_empty($$
    SELECT l FROM unnest('{1,2,1000,2097150}'::integer[]) l
    WHERE awa._lane_of(awa._lane_base(l) + 1) <> l OR awa._lane_of(awa._lane_base(l) + (2::bigint ^ 42)::bigint - 1) <> l
       OR lower(awa._lane_range(l)) <> awa._lane_base(l)
$$, 'first and last position name their lane, up to the last lane');
SELECT is((SELECT s.seqmax FROM pg_sequence s WHERE s.seqrelid = 'awa.lane_ids'::regclass), 2097150::bigint,
    'the last lane is the last whose bounds fit a bigint');
SELECT is((SELECT s.seqmax FROM pg_sequence s WHERE s.seqrelid = 'awa.job_ids'::regclass), awa._lane_base(1) - 1,
    'ids of deferred jobs never meet those of lanes');

SELECT is(awa._to_set('{3,1,2,7,NULL,2}'), '{[1,4),[7,8)}'::int8multirange, 'a list becomes a set');
SELECT is(awa._to_list('{[1,4),[7,8)}'), '{1,2,3,7}'::bigint[], 'a set becomes a list');
SELECT is(awa._to_set('{}'), '{}'::int8multirange, 'no positions are the empty set');
SELECT is(awa._to_list('{}'), '{}'::bigint[], 'and back');
SELECT is(awa._cardinality('{[1,4),[7,8)}'), 4::bigint, 'a set has a size');
SELECT is(awa._cardinality('{}'), 0::bigint, 'the empty set has none');

SELECT isnt(awa._lock_key('lane', 1), awa._lock_key('batch', 1), 'classes of locks do not meet');
SELECT isnt(awa._lock_key('lane', 1), awa._lock_key('lane', 2), 'nor do locks of a class');
SELECT is(awa._lock_key('lane', 1), hashtextextended('awa/lane', 1),
    'keys are derived from the schema, and the same in every version');

SELECT * FROM finish();
