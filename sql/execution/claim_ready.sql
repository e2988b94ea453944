-- Claim: one short transaction under the lane lock. Nothing is updated: one emission row moves the cursor, one batch
-- row per ready slot, deadline and separate job is the receipt. Lock order: lane, mutation, position (all by try).

-- Waiting rows of one leaf among the wanted positions, lowest first. Only nested loops over the position index can
-- answer this, so the plan is the same on an empty, a truncated and a full leaf. A size is about that of the text that
-- the claim returns; -1 where only decompressing the args would tell it.
SELECT @extschema@._create_for_slots('queue', $create$
CREATE OR REPLACE FUNCTION @extschema@._see_leaf(
    p_slot integer, p_wanted int8multirange, p_limit integer, p_alone boolean,
    OUT positions bigint[], OUT sizes integer[], OUT is_plain boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_sort = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    -- With the mutation lock no tombstone can come, and a leaf without blocks has none: that saves two buffers a row.
    v_all_live boolean := p_alone AND NOT @extschema@._leaf_in_use('ready_tombstones', p_slot);
BEGIN
    -- for each slot, by p_slot:
    SELECT array_agg(r."position"), array_agg(r.bytes), bool_and(r.is_plain) INTO positions, sizes, is_plain
    FROM (SELECT x.*
          FROM unnest(p_wanted) g (g), LATERAL (
              SELECT e."position",
                     CASE WHEN pg_column_compression(e.args) IS NULL THEN pg_column_size(e.args) ELSE -1 END AS bytes,
                     e.job_id IS NULL AND e.ext IS NULL AS is_plain
              FROM @extschema@.ready_entries_{slot} e
              WHERE e."position" >= lower(g.g) AND e."position" < upper(g.g)
                AND (v_all_live OR (SELECT t."position" FROM @extschema@.ready_tombstones_{slot} t
                                    WHERE t."position" = e."position") IS NULL)
              ORDER BY e."position" LIMIT p_limit) x
          LIMIT p_limit) r;
    -- end of slots
END
$function$
$create$);
COMMENT ON FUNCTION @extschema@._see_leaf(integer, int8multirange, integer, boolean) IS
    'Internal: waiting rows of one leaf among the wanted positions; alone: the caller holds the mutation lock.';

-- What a claim looks at: positions behind the cursor (gaps and held) in every leaf, then those beyond
-- it from the oldest leaf that can matter.
CREATE OR REPLACE FUNCTION @extschema@._leaves_to_see(
    p_emission @extschema@.queue_claim_heads, p_ring bigint, p_limit integer)
RETURNS TABLE (slot integer, generation bigint, is_beyond boolean, wanted int8multirange, max_rows integer)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_behind int8multirange := p_emission.gaps_old + p_emission.gaps_new + p_emission.held;
    v_beyond int8multirange := int8multirange(
        int8range(p_emission.cursor, @extschema@._lane_base(p_emission.lane_id + 1), '()'));
BEGIN
    IF NOT isempty(v_behind) THEN
        RETURN QUERY
        SELECT s, NULL::bigint, false, v_behind, p_limit + @extschema@._cardinality(p_emission.held)::integer
        FROM generate_series(0, @extschema@._slot_count('queue') - 1) s
        WHERE @extschema@._leaf_in_use('ready_entries', s);
    END IF;
    IF p_emission.low >= p_ring / 64 THEN
        RETURN QUERY SELECT (p_ring % 64)::integer, p_ring / 64, true, v_beyond, p_limit;
    ELSE
        RETURN QUERY
        SELECT s.slot, s.generation, true, v_beyond, p_limit
        FROM @extschema@._queue_slots_since(p_emission.low) s
        ORDER BY s.generation;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._leaves_to_see(@extschema@.queue_claim_heads, bigint, integer) IS
    'Internal: the reads of a claim, in order.';

CREATE OR REPLACE FUNCTION @extschema@._see_rows(
    p_emission @extschema@.queue_claim_heads, p_ring bigint, p_limit integer, p_alone boolean)
RETURNS @extschema@._seen_rows
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_seen @extschema@._seen_rows := ROW('{}', '{}', '{}', NULL, false, false, p_emission.low, true);
    v_reads integer := 0;
    v_at_low boolean := true;
    v_is_bounded boolean;
    v_leaf record;
    v_more record;
BEGIN
    FOR v_leaf IN SELECT l.* FROM @extschema@._leaves_to_see(p_emission, p_ring, p_limit) l LOOP
        -- Nothing beyond the frontier will be kept, so a backlog over many leaves
        -- costs little more than one in a single leaf.
        v_is_bounded := v_seen.frontier IS NOT NULL;
        IF v_is_bounded THEN
            v_leaf.wanted := v_leaf.wanted * int8multirange(int8range(NULL, v_seen.frontier, '(]'));
        END IF;
        v_more := @extschema@._see_leaf(v_leaf.slot, v_leaf.wanted, v_leaf.max_rows, p_alone);
        -- pause point: leaf
        IF v_more.positions IS NOT NULL THEN
            v_reads := v_reads + 1;
            v_seen.positions := v_seen.positions || v_more.positions;
            v_seen.sizes := v_seen.sizes || v_more.sizes;
            v_seen.leaves := v_seen.leaves || array_fill(v_leaf.slot, ARRAY[cardinality(v_more.positions)]);
            v_seen.is_plain := v_seen.is_plain AND v_more.is_plain;
            IF cardinality(v_more.positions) >= v_leaf.max_rows THEN
                -- This leaf may have more: beyond its last row other leaves are ahead of it.
                v_seen.frontier := least(v_seen.frontier, v_more.positions[v_leaf.max_rows]);
                v_seen.scan_full := v_seen.scan_full OR v_leaf.is_beyond;
                v_seen.probe_full := v_seen.probe_full OR NOT v_leaf.is_beyond;
            END IF;
        END IF;
        IF v_leaf.is_beyond THEN
            -- Never past the current or the previous generation; a row that still
            -- arrives in an older leaf is found as a gap.
            v_at_low := v_at_low AND v_more.positions IS NULL AND NOT v_is_bounded
                AND v_leaf.generation < p_ring / 64 - 1;
            IF v_at_low THEN
                v_seen.low := v_leaf.generation + 1;
            END IF;
        END IF;
    END LOOP;
    IF v_reads > 1 THEN
        SELECT coalesce(array_agg(d."position" ORDER BY d."position"), '{}'),
               coalesce(array_agg(d.leaf ORDER BY d."position"), '{}'),
               coalesce(array_agg(d.bytes ORDER BY d."position"), '{}')
        INTO v_seen.positions, v_seen.leaves, v_seen.sizes
        FROM (SELECT DISTINCT ON (u."position") u.*
              FROM unnest(v_seen.positions, v_seen.leaves, v_seen.sizes) u ("position", leaf, bytes)
              WHERE v_seen.frontier IS NULL OR u."position" <= v_seen.frontier
              ORDER BY u."position") d;
    END IF;
    RETURN v_seen;
END
$function$;
COMMENT ON FUNCTION @extschema@._see_rows(@extschema@.queue_claim_heads, bigint, integer, boolean) IS
    'Internal: candidates of a claim, in lane order.';

-- Then every position seen so far is settled.
CREATE OR REPLACE FUNCTION @extschema@._lane_is_quiet(p_lane integer)
RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL UNSAFE
RETURN @extschema@._sequence_is_quiet(('@extschema@.lane_' || p_lane)::regclass);
COMMENT ON FUNCTION @extschema@._lane_is_quiet(integer) IS 'Internal: proof that no producer of the lane is in flight.';

-- Candidates that no cancel or update holds, up to the limit: their lock is had, and no tombstone came before it.
CREATE OR REPLACE FUNCTION @extschema@._take_unlocked(
    p_seen @extschema@._seen_rows, p_limit integer,
    OUT taken int8multirange, OUT dead int8multirange)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $function$
DECLARE
    v_is_dead boolean;
    v_one int8multirange;
    v_count integer := 0;
BEGIN
    taken := '{}';
    dead := '{}';
    FOR i IN 1 .. cardinality(p_seen.positions) LOOP
        EXIT WHEN v_count >= p_limit;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('position', p_seen.positions[i]));
        EXECUTE format('SELECT EXISTS (
                            SELECT FROM @extschema@.ready_tombstones_%s t
                            WHERE t."position" = $1)', p_seen.leaves[i])
            INTO v_is_dead USING p_seen.positions[i];
        v_one := int8multirange(int8range(p_seen.positions[i], p_seen.positions[i], '[]'));
        IF v_is_dead THEN
            dead := dead + v_one;
        ELSE
            taken := taken + v_one;
            v_count := v_count + 1;
        END IF;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._take_unlocked(@extschema@._seen_rows, integer) IS
    'Internal: takes candidates one by one while application transactions change jobs of the lane.';

-- Sizes of some candidates once more, now with those of one leaf decompressed.
CREATE OR REPLACE FUNCTION @extschema@._measure_args(p_leaf integer, p_positions bigint[], p_sizes integer[])
RETURNS integer[]
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $function$
DECLARE
    v_sizes integer[];
BEGIN
    EXECUTE format('SELECT array_agg(coalesce(octet_length(r.args::text), u.bytes) ORDER BY u.o)
                    FROM unnest($1, $2) WITH ORDINALITY u (pos, bytes, o)
                    LEFT JOIN @extschema@.ready_entries_%s r ON r."position" = u.pos', p_leaf)
        INTO v_sizes USING p_positions, p_sizes;
    RETURN v_sizes;
END
$function$;
COMMENT ON FUNCTION @extschema@._measure_args(integer, bigint[], integer[]) IS
    'Internal: text sizes of args in one leaf; those of other leaves are passed through.';

-- How many of the first p_limit candidates fit into claim_max_bytes beside what the claim has from other lanes; at
-- least one job of all. What is compressed is measured in portions and only until the bound is reached: the
-- claim decompresses little that it does not return.
CREATE OR REPLACE FUNCTION @extschema@._count_fitting(
    p_seen @extschema@._seen_rows, p_limit integer, p_bytes bigint,
    OUT fitting integer, OUT bytes bigint)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    c_portion constant integer := 32;
    c_row constant integer := 100;
    v_sizes integer[] := p_seen.sizes;
    v_most integer := least(p_limit, cardinality(p_seen.sizes));
    v_last integer;
    v_max bigint;
BEGIN
    fitting := p_limit;
    bytes := p_bytes + coalesce((SELECT sum(s + c_row) FROM unnest(v_sizes) s), 0);
    -- The setting cannot be smaller, so most claims need not read it.
    IF bytes <= 65536 AND -1 <> ALL (v_sizes) THEN
        RETURN;
    END IF;
    v_max := @extschema@._setting('claim_max_bytes');
    IF bytes <= v_max AND -1 <> ALL (v_sizes) THEN
        RETURN;
    END IF;
    bytes := p_bytes;
    FOR i IN 1 .. v_most LOOP
        IF v_sizes[i] < 0 THEN
            v_last := least(i + c_portion - 1, v_most);
            v_sizes[i:v_last] := @extschema@._measure_args(
                p_seen.leaves[i], p_seen.positions[i:v_last], v_sizes[i:v_last]);
        END IF;
        IF bytes + v_sizes[i] + c_row > v_max AND (bytes > 0 OR i > 1) THEN
            fitting := i - 1;
            RETURN;
        END IF;
        bytes := bytes + v_sizes[i] + c_row;
    END LOOP;
END
$function$;
COMMENT ON FUNCTION @extschema@._count_fitting(@extschema@._seen_rows, integer, bigint) IS
    'Internal: size of a claim bounded by claim_max_bytes.';

-- The emission after this claim. Behind its cursor a position is emitted, dead, held
-- (seen, not taken) or a gap (never seen).
CREATE OR REPLACE FUNCTION @extschema@._next_emission(
    p_emission @extschema@.queue_claim_heads, p_seen @extschema@._seen_rows, p_taken int8multirange,
    p_dead int8multirange, p_tail bigint, p_snapshot pg_snapshot, p_quiet boolean)
RETURNS @extschema@.queue_claim_heads
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_next @extschema@.queue_claim_heads := p_emission;
    v_seen int8multirange := @extschema@._sorted_to_set(p_seen.positions);
BEGIN
    v_next.low := p_seen.low;
    IF NOT isempty(p_taken) THEN
        v_next.cursor := greatest(p_emission.cursor, upper(p_taken) - 1);
    ELSIF p_seen.scan_full OR p_seen.probe_full THEN
        v_next.cursor := greatest(p_emission.cursor, upper(v_seen) - 1);
    ELSE
        v_next.cursor := greatest(p_emission.cursor, p_tail);
    END IF;
    v_seen := v_seen * int8multirange(int8range(NULL, v_next.cursor, '(]'));
    v_next.held := v_seen - p_taken - p_dead;
    v_next.gaps_old := p_emission.gaps_old - v_seen;
    v_next.gaps_new := p_emission.gaps_new - v_seen;
    IF p_seen.probe_full THEN
        -- Not everything was looked at, so nothing is dropped.
        v_next.held := v_next.held + (p_emission.held - p_taken - p_dead);
    ELSIF p_quiet THEN
        v_next.gaps_old := '{}';
        v_next.gaps_new := '{}';
    ELSIF coalesce(p_emission.horizon <= pg_snapshot_xmin(p_snapshot), false) THEN
        -- Every owner of gaps_old had an id below the horizon and has ended: what was not seen was rolled back.
        v_next.gaps_old := v_next.gaps_new;
        v_next.gaps_new := '{}';
        v_next.horizon := NULL;
    END IF;
    v_next.gaps_new := v_next.gaps_new + (int8multirange(int8range(p_emission.cursor, v_next.cursor, '(]')) - v_seen);
    IF isempty(v_next.gaps_old) OR v_next.horizon IS NULL THEN
        v_next.gaps_old := v_next.gaps_old + v_next.gaps_new;
        v_next.gaps_new := '{}';
        v_next.horizon := NULL;
    END IF;
    -- An id assigned now lies above those of all owners of positions seen before; one assigned earlier proves nothing.
    IF v_next.horizon IS NULL AND NOT isempty(v_next.gaps_old) AND pg_current_xact_id_if_assigned() IS NULL THEN
        v_next.horizon := pg_current_xact_id();
    END IF;
    RETURN v_next;
END
$function$;
COMMENT ON FUNCTION @extschema@._next_emission(
    @extschema@.queue_claim_heads, @extschema@._seen_rows, int8multirange, int8multirange, bigint,
    pg_snapshot, boolean) IS
    'Internal: cursor, gaps, held and horizon after a claim.';

-- A claim ends within milliseconds. Whoever comes meanwhile waits for it rather than going away empty-handed and coming
-- back later, but not for long: the holder may be a stalled client.
CREATE OR REPLACE FUNCTION @extschema@._wait_for_lane(p_lane integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '50ms'
AS $function$
BEGIN
    PERFORM pg_advisory_xact_lock(@extschema@._lock_key('lane', p_lane));
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$function$;
COMMENT ON FUNCTION @extschema@._wait_for_lane(integer) IS
    'Internal: locks a lane that another claim works on; false when that takes longer than 50 ms.';

-- positions and leaves are the candidates, of which those in taken are claimed: NULL when none is. bytes is p_bytes
-- and what the claimed args add to it.
SELECT @extschema@._create_for_slots('queue', $create$
CREATE OR REPLACE FUNCTION @extschema@._claim_lane(
    p_lane integer, p_tail bigint, p_limit integer, p_bytes bigint, p_fresh boolean,
    OUT positions bigint[], OUT leaves integer[], OUT is_plain boolean, OUT taken int8multirange, OUT bytes bigint,
    OUT is_locked boolean)
RETURNS record
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_ring bigint;
    v_alone boolean;
    v_emission @extschema@.queue_claim_heads;
    v_next @extschema@.queue_claim_heads;
    v_snapshot pg_snapshot;
    v_gaps int8multirange;
    v_seen @extschema@._seen_rows;
    v_fit record;
    v_limit integer;
    v_taken int8multirange := '{}'::int8multirange;
    v_dead int8multirange := '{}'::int8multirange;
    v_quiet boolean := false;
BEGIN
    bytes := p_bytes;
    is_locked := pg_try_advisory_xact_lock(@extschema@._lock_key('lane', p_lane));
    IF NOT is_locked THEN
        RETURN;
    END IF;
    v_alone := pg_try_advisory_xact_lock(@extschema@._lock_key('mutation', p_lane));
    -- The lock keeps this slot from being pruned and planned again before our emission lies in it: in a slot that comes
    -- round once more it would hide later ones of the lane.
    LOOP
        v_ring := @extschema@._ring_cursor('queue');
        -- for each slot, by v_ring % 64:
        LOCK TABLE @extschema@.ready_claim_attempt_batches_{slot} IN ROW EXCLUSIVE MODE;
        -- end of slots
        EXIT WHEN v_ring = @extschema@._ring_cursor('queue');
    END LOOP;
    v_emission := @extschema@._newest_emission(p_lane);
    v_gaps := v_emission.gaps_old + v_emission.gaps_new;
    IF p_tail <= v_emission.cursor AND isempty(v_gaps) AND isempty(v_emission.held) THEN
        IF p_fresh THEN
            -- Without an id at entry, what was read is committed: the hint cannot lead the ledger.
            PERFORM @extschema@._set_hint(p_lane, v_emission.cursor);
        END IF;
        RETURN;
    END IF;
    v_snapshot := pg_current_snapshot();
    -- The proof by locks costs more than the horizon, so it is for many gaps, or for a lane that is otherwise idle.
    IF NOT isempty(v_gaps) AND NOT coalesce(v_emission.horizon <= pg_snapshot_xmin(v_snapshot), false)
       AND (p_tail <= v_emission.cursor OR (SELECT count(*) FROM unnest(v_gaps)) > 16) THEN
        v_quiet := @extschema@._lane_is_quiet(p_lane);
    END IF;
    -- pause point: probe
    v_seen := @extschema@._see_rows(v_emission, v_ring, p_limit, v_alone);
    v_fit := @extschema@._count_fitting(v_seen, p_limit, p_bytes);
    v_limit := v_fit.fitting;
    bytes := v_fit.bytes;
    IF v_limit = 0 THEN
        RETURN;
    ELSIF v_alone THEN
        v_taken := @extschema@._sorted_to_set(v_seen.positions[:v_limit]);
    ELSE
        SELECT t.taken, t.dead INTO v_taken, v_dead FROM @extschema@._take_unlocked(v_seen, v_limit) t;
    END IF;
    -- pause point: write
    v_next := @extschema@._next_emission(v_emission, v_seen, v_taken, v_dead, p_tail, v_snapshot, v_quiet);
    IF v_next IS NOT DISTINCT FROM v_emission THEN
        RETURN;
    END IF;
    v_next.claim_no := v_emission.claim_no + 1;
    PERFORM @extschema@._append_emission((v_ring % 64)::integer, v_next);
    taken := nullif(v_taken, '{}');
    positions := v_seen.positions;
    leaves := v_seen.leaves;
    is_plain := v_seen.is_plain;
END
$function$
$create$);
COMMENT ON FUNCTION @extschema@._claim_lane(integer, bigint, integer, bigint, boolean) IS
    'Internal: takes up to so many jobs of one lane; nothing when another claim holds the lane.';

-- Claimed positions of a leaf in groups that share a receipt: one per deadline, and one per job of the kinds in
-- p_separate, so that jobs which complete in transactions of their own never wait for one another's batch lock.
CREATE OR REPLACE FUNCTION @extschema@._receipt_groups(
    p_leaf integer, p_positions bigint[], p_is_plain boolean, p_deadline_seconds numeric, p_separate text[])
RETURNS TABLE (positions bigint[], seconds numeric, is_plain boolean)
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
AS $function$
BEGIN
    IF p_is_plain AND p_separate = '{}' THEN
        RETURN QUERY SELECT p_positions, p_deadline_seconds, true WHERE p_positions <> '{}';
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format($query$
        SELECT array_agg(g."position" ORDER BY g."position"), g.seconds, bool_and(g.is_plain)
        FROM (SELECT r."position", r.job_id IS NULL AND r.ext IS NULL AS is_plain,
                     coalesce((r.ext ->> 'deadline_seconds')::numeric, $2) AS seconds,
                     CASE WHEN r.kind = ANY ($3) THEN r."position" END AS separate
              FROM unnest($1) s (s), @extschema@.ready_entries_%s r
              WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s)) g
        GROUP BY g.seconds, g.separate ORDER BY min(g."position")
        $query$, p_leaf) USING @extschema@._sorted_to_set(p_positions), p_deadline_seconds, p_separate;
END
$function$;
COMMENT ON FUNCTION @extschema@._receipt_groups(integer, bigint[], boolean, numeric, text[]) IS
    'Internal: positions of a leaf that share a receipt.';

SELECT @extschema@._create_for_slots('queue', $create$
CREATE OR REPLACE FUNCTION @extschema@._issue_receipts(
    p_leaf integer, p_queue text, p_priority integer, p_positions bigint[], p_is_plain boolean, p_owner uuid,
    p_deadline_seconds numeric, p_separate text[], p_now timestamptz)
RETURNS SETOF @extschema@.claimed_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $function$
DECLARE
    v_slot integer := @extschema@._ring_cursor('claim') % 64;
    v_group record;
    v_batch bigint;
    v_deadline timestamptz;
    v_positions int8multirange;
BEGIN
    -- pause point: receipt
    FOR v_group IN
        SELECT g.*
        FROM @extschema@._receipt_groups(p_leaf, p_positions, p_is_plain, p_deadline_seconds, p_separate) g
    LOOP
        v_batch := nextval('@extschema@.claim_batch_ids');
        v_deadline := p_now + make_interval(secs => v_group.seconds::double precision);
        v_positions := @extschema@._sorted_to_set(v_group.positions);
        INSERT INTO @extschema@.lease_claim_batches
            (batch_id, claimed_at, deadline_at, owner, slot, ready_slot, is_plain, positions)
        VALUES (v_batch, p_now, v_deadline, p_owner, v_slot, p_leaf, v_group.is_plain, v_positions);
        -- Most are first attempts of jobs without options, which need no look into ext. By ranges: a list of positions
        -- costs a descent of the index for each before PostgreSQL 17.
        -- for each slot, by p_leaf:
        IF v_group.is_plain THEN
            RETURN QUERY
            SELECT r."position", r.kind, p_queue, r.args, p_priority, 1, 25, r.run_at, r.run_at,
                   NULL::text[], NULL::jsonb, NULL::jsonb, NULL::text, v_deadline, 1::bigint, v_slot, v_batch,
                   r."position"
            FROM unnest(v_positions) s (s), @extschema@.ready_entries_{slot} r
            WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s);
        ELSE
            RETURN QUERY
            SELECT coalesce(r.job_id, r."position"), r.kind, p_queue, r.args, p_priority,
                   coalesce((r.ext ->> 'attempt')::integer, 0) + 1, coalesce((r.ext ->> 'max_attempts')::integer, 25),
                   r.run_at, coalesce((r.ext ->> 'created_at')::timestamptz, r.run_at),
                   CASE WHEN r.ext ? 'tags' THEN ARRAY(SELECT jsonb_array_elements_text(r.ext -> 'tags')) END,
                   r.ext -> 'metadata', r.ext -> 'progress', r.ext ->> 'trace', v_deadline,
                   coalesce((r.ext ->> 'run_lease')::bigint, 0) + 1, v_slot, v_batch, r."position"
            FROM unnest(v_positions) s (s), @extschema@.ready_entries_{slot} r
            WHERE r."position" >= lower(s.s) AND r."position" < upper(s.s);
        END IF;
        -- end of slots
    END LOOP;
END
$function$
$create$);
COMMENT ON FUNCTION @extschema@._issue_receipts(
    integer, text, integer, bigint[], boolean, uuid, numeric, text[], timestamptz) IS
    'Internal: writes the receipts of claimed positions of one leaf and returns the jobs.';

CREATE OR REPLACE FUNCTION @extschema@._claim_ready(
    p_queue text, p_limit integer, p_owner uuid, p_deadline_seconds numeric, p_separate text[],
    p_wake_others boolean)
RETURNS SETOF @extschema@.claimed_job
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_fresh boolean := pg_current_xact_id_if_assigned() IS NULL;
    v_now timestamptz := clock_timestamp();
    v_meta @extschema@.queue_meta;
    v_lane record;
    v_got record;
    v_rows bigint;
    v_bytes bigint := 0;
    v_left integer := p_limit;
    v_contended integer;
    v_is_holder boolean := false;
BEGIN
    PERFORM @extschema@._require_read_committed();
    v_meta := @extschema@._queue_options(p_queue);
    IF v_meta.paused_at IS NOT NULL THEN
        RETURN;
    END IF;
    -- A client that vanishes inside this transaction must not hold the lane for long.
    PERFORM set_config('idle_in_transaction_session_timeout', '10s', true);
    FOR v_round IN 1 .. 2 LOOP
        FOR v_lane IN SELECT l.* FROM @extschema@._choose_lanes(p_queue, v_meta.aging_seconds, v_now) l LOOP
            v_got := @extschema@._claim_lane(v_lane.lane_id, v_lane.tail, v_left, v_bytes, v_fresh);
            v_bytes := v_got.bytes;
            IF v_got.is_locked THEN
                v_is_holder := true;
            ELSE
                v_contended := coalesce(v_contended, v_lane.lane_id);
            END IF;
            CONTINUE WHEN v_got.taken IS NULL;
            -- A late row lies in another leaf than its neighbours, but is handed out in its place.
            RETURN QUERY
            SELECT c.*
            FROM (SELECT u.leaf, array_agg(u."position" ORDER BY u."position") AS positions
                  FROM unnest(v_got.positions, v_got.leaves) u ("position", leaf)
                  WHERE v_got.taken @> u."position"
                  GROUP BY u.leaf) l,
                 LATERAL @extschema@._issue_receipts(
                     l.leaf, p_queue, v_lane.priority, l.positions, v_got.is_plain, p_owner,
                     coalesce(p_deadline_seconds, v_meta.deadline_seconds), p_separate, v_now) c
            ORDER BY c."position";
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            v_left := v_left - v_rows;
            EXIT WHEN v_left <= 0;
        END LOOP;
        -- Who holds a lane does not wait for another one: two claims could wait for each other.
        EXIT WHEN v_round = 2 OR v_contended IS NULL OR v_is_holder OR NOT @extschema@._wait_for_lane(v_contended);
    END LOOP;
    IF v_left < p_limit THEN
        PERFORM @extschema@._note_owner(p_owner, v_now);
        IF v_left <= 0 AND p_wake_others THEN
            PERFORM @extschema@._ring_doorbell(p_queue);
        END IF;
    END IF;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_ready(text, integer, uuid, numeric, text[], boolean) IS
    'Internal: claims jobs of a queue, lane after lane, best first.';

-- Why a claim found nothing. With p_arm the flag is written before the positions are read, so that a producer
-- which takes its position later sees the flag.
CREATE OR REPLACE FUNCTION @extschema@._claim_status(p_queue text, p_arm boolean)
RETURNS @extschema@.claim_status
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    v_meta @extschema@.queue_meta := @extschema@._queue_options(p_queue);
    v_sleep_ms integer := @extschema@._setting('idle_poll_ms');
    v_channel text := CASE WHEN v_meta.notify THEN @extschema@._channel(p_queue) END;
    v_lane record;
    v_emission @extschema@.queue_claim_heads;
    v_is_free boolean;
    v_reason text := 'idle';
BEGIN
    IF v_meta.paused_at IS NOT NULL THEN
        RETURN ROW('paused', v_channel, v_sleep_ms)::@extschema@.claim_status;
    END IF;
    IF p_arm AND v_meta.notify THEN
        PERFORM @extschema@._arm_doorbell(
            p_queue, clock_timestamp() + make_interval(secs => v_sleep_ms / 1000.0 + 0.5));
    END IF;
    FOR v_lane IN SELECT w.lane_id, w.tail FROM @extschema@._waiting_lanes(p_queue) w LOOP
        v_emission := @extschema@._newest_emission(v_lane.lane_id);
        IF v_lane.tail > v_emission.cursor THEN
            -- Positions that no claim has looked at, unless one does so just now.
            -- The block ends by an exception, so that the lock vanishes and the caller's transaction stops no claim.
            BEGIN
                v_is_free := pg_try_advisory_xact_lock_shared(@extschema@._lock_key('lane', v_lane.lane_id));
                RAISE EXCEPTION USING ERRCODE = 'JQ000';
            EXCEPTION WHEN SQLSTATE 'JQ000' THEN
                NULL;
            END;
            IF v_is_free THEN
                RETURN ROW('ready', v_channel, 0)::@extschema@.claim_status;
            END IF;
            v_reason := 'contended';
        ELSIF v_reason = 'idle'
              AND NOT isempty(v_emission.gaps_old + v_emission.gaps_new + v_emission.held) THEN
            v_reason := 'in_flight';
        END IF;
    END LOOP;
    RETURN ROW(v_reason, v_channel, CASE v_reason WHEN 'idle' THEN v_sleep_ms ELSE 5 END)::@extschema@.claim_status;
END
$function$;
COMMENT ON FUNCTION @extschema@._claim_status(text, boolean) IS
    'Internal: why a claim found nothing, and how long to sleep.';
