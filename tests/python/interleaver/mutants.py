"""Known ways to break the engine. Played with one of them, the test must fail."""

from __future__ import annotations

from tools.edits import Edit

MUTANTS: dict[str, tuple[Edit, ...]] = {
    # ---- gaps and their horizon
    "horizon from xmax": (
        Edit(
            "_next_emission",
            "v_next.horizon := pg_current_xact_id();",
            "v_next.horizon := pg_snapshot_xmax(pg_current_snapshot());",
        ),
    ),
    "id after position": tuple(
        Edit(function, "    PERFORM pg_current_xact_id();\n", "")
        for function in ("_append_ready_one", "_append_ready_many", "_append_ready")
    ),
    "horizon from an id of before": (
        Edit(
            "_next_emission",
            " AND pg_current_xact_id_if_assigned() IS NULL THEN",
            " THEN",
        ),
    ),
    "horizon above xmax taken for foreign": (
        Edit(
            "_next_emission",
            "coalesce(p_emission.horizon <= pg_snapshot_xmin(p_snapshot), false)",
            "coalesce(p_emission.horizon <= pg_snapshot_xmin(p_snapshot)"
            " OR p_emission.horizon > pg_snapshot_xmax(p_snapshot), false)",
        ),
    ),
    "snapshot after the probe": (
        Edit(
            "_claim_lane",
            "p_tail, v_snapshot, v_quiet)",
            "p_tail, pg_current_snapshot(), v_quiet)",
        ),
    ),
    "proof by locks without looking": (Edit("_lane_is_quiet", "RETURN ", "RETURN true OR "),),
    "probe limit ignored": (Edit("_next_emission", "IF p_seen.probe_full THEN", "IF false THEN"),),
    "gaps not probed": (Edit("_leaves_to_see", "IF NOT isempty(v_behind) THEN", "IF false THEN"),),
    # ---- claim and cancel
    "locked position becomes a gap": (
        Edit(
            "_next_emission",
            "v_next.held := v_seen - p_taken - p_dead;",
            "v_seen := p_taken + p_dead;",
        ),
    ),
    "tombstone not read after the lock": (
        Edit("_take_unlocked", "IF v_is_dead THEN", "IF false THEN"),
    ),
    "claim ignores mutation locks": (Edit("_claim_lane", "IF v_alone THEN", "IF true THEN"),),
    "cancel in an old snapshot": (
        Edit("_cancel_job", "    PERFORM @extschema@._require_read_committed();\n", ""),
    ),
    "cancel does not look again": (
        Edit(
            "_lock_ready",
            "        -- pause point: cancel\n    END LOOP;",
            "        -- pause point: cancel\n        EXIT;\n    END LOOP;",
        ),
    ),
    "cancel goes on where it has no lock": (
        Edit("_lock_ready", '"position" = v_locked', "v_locked IS NOT NULL"),
    ),
    "hint from uncommitted rows": (Edit("_claim_lane", "IF p_fresh THEN", "IF true THEN"),),
    # ---- finish
    "closed positions close again": (
        Edit(
            "_complete_attempts",
            "v_set * v_batch.positions - v_batch.closed;",
            "v_set * v_batch.positions;",
        ),
    ),
    "complete_job trusts an old snapshot": (
        Edit(
            "_complete_job",
            "IF v_batch.positions IS NULL AND NOT @extschema@._is_read_committed()",
            "IF false",
        ),
    ),
    # ---- rings
    "cursor read in one snapshot": (
        Edit("_newest_emission", "VOLATILE PARALLEL UNSAFE", "STABLE PARALLEL SAFE"),
    ),
    "prune does not recheck": (
        Edit(
            "_prune_slot",
            "IF @extschema@._slot_blocker(p_ring, p_slot) IS NOT NULL THEN",
            "IF false THEN",
        ),
    ),
    "prune ignores held positions": (Edit("_unclaimed_set", " + (p_emission).held", ""),),
    "prune ignores gaps": (
        Edit("_unclaimed_set", "(p_emission).gaps_old + (p_emission).gaps_new + ", ""),
    ),
    "prune ignores attempts of other slots": (
        Edit("_slot_blocker", "CASE p_ring WHEN 'queue' THEN p_slot END", "-1"),
    ),
    "prune keeps no checkpoint": (
        Edit("_prune_slot", " + @extschema@._checkpoint_claim_heads(p_slot);", ";"),
    ),
    "prune folds no counts": (
        Edit(
            "_prune_slot", "PERFORM @extschema@._fold_terminal_counts(p_slot, p_now);", "PERFORM 1;"
        ),
    ),
    "plan and publish in one transaction": (
        Edit(
            "_plan_ring",
            "p_now);\n    RETURN 'planned';",
            "p_now);\n"
            "    PERFORM @extschema@._set_ring_cursor(p_ring, v_cursor / 64 + 1, v_next);\n"
            "    RETURN 'planned';",
        ),
    ),
    # ---- evacuation
    "evacuation without the lane's locks": (
        Edit(
            "_evacuate_lanes",
            "CONTINUE WHEN NOT pg_try_advisory_xact_lock(@extschema@._lock_key('lane', v_lane))\n"
            "            OR NOT pg_try_advisory_xact_lock("
            "@extschema@._lock_key('mutation', v_lane));",
            "",
        ),
    ),
    "evacuation leaves the old row alive": (
        Edit(
            "_move_ready",
            "SELECT p, p_from FROM unnest(p_positions) p",
            "SELECT 0, p_from WHERE false",
        ),
    ),
    # ---- leases
    "a moved receipt stays open": (
        Edit(
            "_lease_receipts",
            "PERFORM @extschema@._append_closure(\n"
            "        p_slot, p_batch, v_batch.next_no, 'moved', "
            "@extschema@._sorted_to_set(v_moved), NULL, p_now);",
            "PERFORM 1;",
        ),
    ),
    "a moved body is not copied": (Edit("_lease_receipts", "(r.job).args,", "NULL,"),),
    "cancel of a lease does not look again": (
        Edit(
            "_cancel_lease",
            'v_lease := @extschema@._find_lease(v_lease.batch_id, v_lease."position");',
            "PERFORM 1;",
        ),
    ),
    "rescue of a lease does not look again": (
        Edit("_rescue_lease", "v_lease.outcome IS NOT NULL", "false"),
    ),
    "claim ring forgets leases": (
        Edit("_finish_lease", "v_lease.owner IS DISTINCT FROM p_instance", "true"),
    ),
    # ---- deferred jobs
    "prune of a bucket does not look again": (
        Edit(
            "_prune_bucket",
            "IF (@extschema@._last_deferred(p_slot)).run_at IS NOT NULL\n           OR NOT",
            "IF NOT",
        ),
    ),
    "prune of a bucket lets writers in": (
        Edit("_prune_bucket", "'SHARE', 1", "'ACCESS SHARE', 1"),
    ),
    "move between buckets leaves the old row": (
        Edit(
            "_move_deferred",
            "DELETE FROM @extschema@.deferred_jobs_%1$s d",
            "SELECT d.* FROM @extschema@.deferred_jobs_%1$s d",
        ),
        Edit(
            "_move_deferred",
            "(ARRAY(SELECT u.job_id FROM due u WHERE u.ahead <= $5))\n            RETURNING d.*",
            "(ARRAY(SELECT u.job_id FROM due u WHERE u.ahead <= $5))",
        ),
    ),
    # ---- unique keys
    "takeover of a key does not look again": (
        Edit(
            "_replace_key_claim",
            " AND c.job_id = p_old.job_id AND c.taken_at = p_old.taken_at\n"
            "          AND c.expires_at IS NOT DISTINCT FROM p_old.expires_at",
            "",
        ),
    ),
    "retry does not take its key": (
        Edit("_place_job", "PERFORM @extschema@._retake_key(v_job, p_now);", "NULL;"),
    ),
    "a claim on a key is deleted while its job lives": (
        Edit("_sweep_keys", "IF v_found.is_alive OR NOT", "IF NOT"),
        Edit("_sweep_keys", "ELSIF v_found.holds THEN", "ELSIF false THEN"),
    ),
    "holder in an old snapshot": (
        Edit("_look_for_holders", " AND @extschema@._is_read_committed()\n", "\n"),
        Edit("_key_holder", "NOT @extschema@._still_holds(p_claim, p_now)", "false"),
    ),
}
