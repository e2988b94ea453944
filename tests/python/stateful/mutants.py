"""Ways to break the engine that a play must find."""

from __future__ import annotations

from correctness.mutants import MUTANTS as BY_HAND
from interleaver.mutants import MUTANTS as RACES
from tools.edits import Edit

MUTANTS: dict[str, tuple[Edit, ...]] = {
    "a lease does not grow": (
        Edit("_next_attempt", "run_lease := v_job.run_lease + 1", "run_lease := v_job.run_lease"),
    ),
    "a claimed job stays claimable": (
        Edit(
            "_next_emission",
            "greatest(p_emission.cursor, upper(p_taken) - 1)",
            "p_emission.cursor",
        ),
    ),
    "a completed attempt stays open": BY_HAND["complete without its closure"],
    "a paused queue is claimed": BY_HAND["a paused queue is claimed"],
    "a job that failed keeps its key": (
        Edit(
            "_end_key",
            "ELSIF @extschema@._key_counts_in(p_job.ext -> 'unique', p_state) THEN",
            "ELSIF true THEN",
        ),
        Edit("_end_key", "_write_end(v_key, p_state,", "_write_end(v_key, 'completed',"),
    ),
    "a job keeps its key in all states": (
        Edit(
            "_key_holder",
            "p_claim.states & @extschema@._state_bit(state) <> 0 AND (is_alive",
            "(is_alive",
        ),
    ),
    "who has not beaten yet is dead": (
        Edit(
            "_rescuable",
            "WHEN p_claimed_at NOT BETWEEN p_now - p_stale AND p_now + p_stale",
            "WHEN true",
        ),
    ),
    "who is dead stays suspect": (
        Edit("_detect_dead_instances", "i.suspect_at <= p_now - v_beat", "false"),
    ),
    "a promotion does not look at the time": (
        Edit(
            "_due_jobs",
            "d.slot < 16 AND d.run_at <= p_now",
            "d.slot < 16 AND d.run_at < 'infinity'",
        ),
    ),
    "a job comes back without asking for its key": (
        Edit("_keep_key", "IF v_state IS NULL OR", "IF true OR"),
    ),
    "a fresh life goes on counting attempts": (
        Edit("_take_ended", "    v_job.attempt := 0;\n", ""),
    ),
    "prune folds no counts": RACES["prune folds no counts"],
    "evacuation leaves the old row alive": RACES["evacuation leaves the old row alive"],
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
