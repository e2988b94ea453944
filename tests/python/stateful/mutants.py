"""Ways to break the engine that a play must find."""

from __future__ import annotations

from interleaver.script import Edit

MUTANTS: dict[str, tuple[Edit, ...]] = {
    "a promotion does not look at the time": (
        Edit("_promote_due", "d.run_at <= p_now", "d.run_at < 'infinity'"),
    ),
    "a job comes back without asking for its key": (
        Edit("_keep_key", "IF v_state IS NULL OR", "IF true OR"),
    ),
    "a fresh life goes on counting attempts": (
        Edit("_take_ended", "    v_job.attempt := 0;\n", ""),
    ),
    "prune folds no counts": (
        Edit(
            "_prune_slot", "PERFORM @extschema@._fold_terminal_counts(p_slot, p_now);", "PERFORM 1;"
        ),
    ),
    "evacuation leaves the old row alive": (
        Edit(
            "_move_ready",
            "SELECT p, p_from FROM unnest(p_positions) p",
            "SELECT 0, p_from WHERE false",
        ),
    ),
    "history goes before its time": (
        Edit(
            "_slot_is_retained",
            "RETURN coalesce(v_newest > v_before, false);",
            "RETURN false;",
        ),
        Edit("_slot_is_retained", "        RETURN true;\n", "        RETURN false;\n"),
    ),
    "a rescue forgets progress": (
        Edit("_rescue_positions", 'v_progress -> v_body."position"::text', "NULL"),
    ),
    "lanes do not age": (
        Edit("_choose_lanes", "WHEN v_aging > 0 AND u.head < p_now", "WHEN false"),
    ),
}
