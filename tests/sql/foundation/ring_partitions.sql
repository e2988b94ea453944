-- Functions that have a statement for each slot.
SELECT * FROM no_plan();

SELECT is(awa._for_each_slot('a := {slot}; b[{slot}] := 0;', 's', 0, 2),
    'IF s <= 1 THEN IF s <= 0 THEN a := 0; b[0] := 0; ELSE a := 1; b[1] := 0; END IF; ELSE a := 2; b[2] := 0; END IF;',
    'a statement is written out for each slot');

SELECT awa._create_for_slots('queue', $create$
CREATE FUNCTION awa._leaf_of_slot(p_slot integer)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    FOR i IN 1 .. 2 LOOP
        -- for each slot, by p_slot - 1 + i:
        RETURN   'awa.ready_entries_{slot}'::regclass::text;
        -- end of slots
    END LOOP;
END
$function$
$create$);
SELECT is(awa._leaf_of_slot(s), 'awa.ready_entries_' || s, format('slot %s has its own statement', s))
FROM generate_series(0, awa._slot_count('queue') - 1) s;

SELECT throws_ok($$SELECT awa._create_for_slots('queue', 'CREATE FUNCTION awa.f() RETURNS void LANGUAGE sql RETURN NULL')$$,
    '22004', NULL, 'a definition without marks is refused');

-- Each of the hot functions names each leaf of its ring, and no other.
CREATE TEMP VIEW named AS
SELECT p.proname::text AS name, m[1] AS family, m[2]::integer AS slot
FROM pg_proc p, regexp_matches(p.prosrc, 'awa\.([a-z_]+)_(\d+)\M', 'g') m
WHERE p.pronamespace = 'awa'::regnamespace AND p.proname <> '_leaf_of_slot' AND m[1] <> 'doorbell';
SELECT set_eq(
    'SELECT name, family, count(DISTINCT slot)::integer, max(slot) FROM named GROUP BY 1, 2',
    $$VALUES ('_newest_emission', 'ready_claim_attempt_batches', 16, 15), ('_claim_lane', 'ready_claim_attempt_batches', 16, 15),
             ('_see_leaf', 'ready_entries', 16, 15), ('_see_leaf', 'ready_tombstones', 16, 15),
             ('_issue_receipts', 'ready_entries', 16, 15),
             ('_read_batch', 'lease_claim_batches', 8, 7), ('_read_batch', 'lease_claim_closures', 8, 7)$$,
    'hot statements are there for each leaf');

SELECT * FROM finish();
