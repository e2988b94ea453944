"""Known ways to break the SQL, written by hand, over all planes. The kill suite must notice each.

Races that only a chosen schedule finds are broken by the mutants of the interleaver; these are for
the suite that everybody runs. A mutant that survives is explained in SURVIVORS.md.
"""

from __future__ import annotations

from tools.edits import Edit

MUTANTS: dict[str, tuple[Edit, ...]] = {
    # ---- foundation: validation, settings, positions, backoff
    "names of 201 characters": (
        Edit("_check_name", "length(p_name) > 200", "length(p_name) > 201"),
        Edit("_is_plain_name", "length(p_name) <= 200", "length(p_name) <= 201"),
    ),
    "names with control characters": (
        Edit("_check_name", "p_name ~ '[[:cntrl:]]'", "false"),
        Edit("_is_plain_name", "'^[^[:cntrl:]]+$'", "'.'"),
    ),
    "payloads of any size": (
        Edit("_check_payload", "IF octet_length(p_value::text) > coalesce(", "IF 0 > coalesce("),
    ),
    "payloads of any depth": (
        Edit("_check_payload", "IF @extschema@._is_too_deep(p_value) THEN", "IF false THEN"),
    ),
    "priority 5": (
        Edit("_check_job", "p_priority NOT BETWEEN 1 AND 4", "p_priority NOT BETWEEN 1 AND 5"),
        Edit("_is_plain_job", "p_priority BETWEEN 1 AND 4", "p_priority BETWEEN 1 AND 5"),
    ),
    "unknown options pass": (
        Edit("_check_options", "IF p_options - p_known = '{}' THEN", "IF true THEN"),
    ),
    "backoff above its cap": (
        Edit(
            "_backoff_seconds",
            "least(v_delay * (1 + v_jitter * p_random), v_cap)",
            "v_delay * (1 + v_jitter * p_random)",
        ),
    ),
    "errors are kept for ever": (
        Edit(
            "_append_error",
            "jsonb_array_length(v_errors) > v_max_count OR octet_length(v_errors::text)",
            "false AND octet_length(v_errors::text)",
        ),
    ),
    "a gap in a sorted list is no gap": (
        Edit(
            "_sorted_to_set",
            "p_positions[cardinality(p_positions)] - p_positions[1] = cardinality(p_positions) - 1",
            "p_positions[1] IS NOT NULL",
        ),
    ),
    # ---- control: lanes, rings, doorbell, instances, unique keys
    "doorbell without a flag": (
        Edit("_ring_doorbell", "@extschema@._someone_sleeps(p_queue) AND ", "true AND "),
    ),
    "doorbell that never rings": (
        Edit("_ring_doorbell", "@extschema@._someone_sleeps(p_queue) AND ", "false AND "),
    ),
    "flag of a sleeper is shortened": (
        Edit("_arm_doorbell", "v_ahead NOT BETWEEN -c_longest AND 16000", "v_ahead <> 0"),
    ),
    "a queue cannot turn notifications off": (
        Edit("_notify_workers", "NOT (@extschema@._queue_options(p_queue)).notify", "false"),
    ),
    "one silent interval is death": (
        Edit("_detect_dead_instances", "i.suspect_at <= p_now - v_beat", "i.suspect_at <= p_now"),
    ),
    "every ordering key has shard 0": (
        Edit(
            "_pick_shard",
            "RETURN mod(@extschema@._ordering_hash(p_ordering_key), p_shards);",
            "RETURN 0;",
        ),
    ),
    "key of a job without its queue": (
        Edit("_unique_key", "IF p_queue IS NOT NULL THEN", "IF false THEN"),
    ),
    "period of a key in the wrong byte order": (
        Edit("_unique_key", "ORDER BY i DESC", "ORDER BY i"),
    ),
    "an ended job keeps no key": (
        Edit(
            "_end_key",
            "ELSIF @extschema@._key_counts_in(p_job.ext -> 'unique', p_state) THEN",
            "ELSIF false THEN",
        ),
    ),
    "keys never expire": (Edit("_expire_keys", "c.expires_at <= p_now", "c.expires_at IS NULL"),),
    # ---- queue: append, emission, backpressure
    "jobs of a batch in reverse": (
        Edit("_append_ready", "ORDER BY x.o) j", "ORDER BY x.o DESC) j"),
    ),
    "strict lanes without their lock": (
        Edit(
            "_shard_lane",
            "PERFORM pg_advisory_xact_lock(@extschema@._lock_key('fifo', v_lane.lane_id));",
            "PERFORM 1;",
        ),
    ),
    "the oldest emission counts": (
        Edit("_newest_emission", "ORDER BY e.claim_no DESC LIMIT 1", "ORDER BY e.claim_no LIMIT 1"),
    ),
    "a moved row leaves no tombstone": (
        Edit(
            "_move_ready",
            "SELECT p, p_from FROM unnest(p_positions) p",
            "SELECT p, p_from FROM unnest(p_positions) p WHERE false",
        ),
    ),
    "refused one job too late": (
        Edit("_refuse_pressure", "IF v_depth >= p_limit THEN", "IF v_depth > p_limit THEN"),
    ),
    "depth of all priorities": (Edit("_queue_depth", " AND l.priority = p_priority", ""),),
    # ---- deferred: buckets, promotion, dead letters
    "promotion before the time": (
        Edit(
            "_due_jobs",
            "d.slot < 16 AND d.run_at <= p_now",
            "d.slot < 16 AND d.run_at <= p_now + interval '1 hour'",
        ),
    ),
    "one bad job stops promotion": (Edit("_promote", "IF v_half > 0 THEN", "IF false THEN"),),
    "a far job in a near bucket": (
        Edit("_deferred_slot", "interval '10 minutes'", "interval '30 minutes'"),
    ),
    "refill stops at its first portion": (
        Edit("_refill_buckets", "p_now + interval '10 minutes', p_limit", "p_now, p_limit"),
    ),
    "a dead letter keeps its attempts": (
        Edit("_take_dead_letter", "p_now, 0, d.run_lease", "p_now, d.attempt, d.run_lease"),
    ),
    "a dead letter starts its leases anew": (
        Edit("_take_dead_letter", "p_now, 0, d.run_lease", "p_now, 0, 0"),
    ),
    # ---- execution: claim, finish, cancel, retry, leases
    "a paused queue is claimed": (
        Edit("_claim_ready", "IF v_meta.paused_at IS NOT NULL THEN", "IF false THEN"),
    ),
    "a claim in an old snapshot": (
        Edit("_claim_ready", "    PERFORM @extschema@._require_read_committed();\n", ""),
    ),
    "a claim without the lane's lock": (
        Edit("_claim_lane", "IF NOT is_locked THEN", "IF false THEN"),
    ),
    "a claim above its bytes": (Edit("_count_fitting", "(bytes > 0 OR i > 1)", "false"),),
    "a claim sees dead rows": (
        Edit(
            "_see_leaf",
            "p_alone AND NOT @extschema@._leaf_in_use('ready_tombstones', p_slot);",
            "true;",
        ),
    ),
    "priorities upside down": (
        Edit("_choose_lanes", "ELSE u.priority END, u.head", "ELSE -u.priority END, u.head"),
    ),
    "anybody completes": (Edit("_complete_attempts", " OR v_batch.owner <> p_instance", ""),),
    "a stale token completes": (
        Edit("_complete_job", " OR v_job.run_lease + 1 IS DISTINCT FROM p_run_lease", ""),
    ),
    "a closed attempt completes again": (
        Edit("_complete_job", " OR v_batch.closed @> p_position\n", "\n"),
    ),
    "complete without its closure": (
        Edit(
            "_complete_attempts",
            "PERFORM @extschema@._append_closure("
            "p_slot, p_batch, v_batch.next_no, 'completed', v_ok, NULL, p_now);",
            "PERFORM 1;",
        ),
    ),
    "finish without the lock of the batch": (
        Edit(
            "_finish_attempts",
            " OR NOT pg_try_advisory_xact_lock(@extschema@._lock_key('batch', v_group.batch_id))",
            "",
        ),
    ),
    "one attempt too many": (
        Edit(
            "_move_attempt",
            "v_job.attempt >= coalesce((v_job.ext ->> 'max_attempts')::integer, 25)",
            "v_job.attempt > coalesce((v_job.ext ->> 'max_attempts')::integer, 25)",
        ),
    ),
    "a snooze costs an attempt": (
        Edit(
            "_move_attempt",
            "    WHEN 'snoozed' THEN\n        v_job.attempt := v_job.attempt - 1;\n",
            "    WHEN 'snoozed' THEN\n",
        ),
    ),
    "cancel of a running job tells nobody": (
        Edit(
            "_cancel_running",
            "PERFORM @extschema@._notify_workers(v_job.queue, 'cancel');",
            "PERFORM 1;",
        ),
    ),
    "cancel leaves no history": (
        Edit(
            "_cancel_job",
            "PERFORM @extschema@._append_done("
            "v_job, 'cancelled', NULL, NULL, NULL, p_now, p_reason, NULL);",
            "PERFORM 1;",
        ),
    ),
    "retry of a completed job": (
        Edit(
            "_take_ended",
            " OR v_done.state = 'completed'",
            "",
        ),
        Edit("_retry_job", "IN ('failed', 'cancelled')", "IN ('failed', 'cancelled', 'completed')"),
    ),
    "an update forgets its checks": (
        Edit(
            "_changed_job",
            "    PERFORM @extschema@._check_job("
            "v_job.kind, v_job.args, v_queue, v_priority, v_max_attempts, p_run_at);\n",
            "",
        ),
    ),
    "drain stops with the lanes": (
        Edit("_drain_queue", "IF v_drained < p_limit THEN", "IF false THEN"),
    ),
    "progress of a closed attempt": (
        Edit("_set_progress", " AND NOT v_batch.closed @> p_position", ""),
    ),
    "a lease that ended ends again": (
        Edit("_finish_lease", "ELSIF v_lease.outcome IS NOT NULL THEN", "ELSIF false THEN"),
    ),
    # ---- maintenance: rescue, evacuation, prune, rotation, verify, tick
    "deadlines are ignored": (
        Edit("_rescuable", "IF p_deadline_at < p_now THEN", "IF false THEN"),
    ),
    "held attempts are lost": (
        Edit("_rescuable", "p_open - v_instance.held - v_instance.held_before", "p_open"),
    ),
    "evacuation of what it cannot hold": (
        Edit("_too_much_waits", "v_waiting.row_count > v_most", "false"),
    ),
    "young attempts are moved": (
        Edit("_evacuate_attempts", "o.claimed_at <= v_before OR", "true OR"),
    ),
    "prune of what waits": (
        Edit("_slot_blocker", "IF v_lane IS NOT NULL THEN", "IF false THEN"),
        Edit("_slot_blocker", "IF v_open.batch_id IS NOT NULL THEN", "IF false THEN"),
    ),
    "prune without retention": (
        Edit("_slot_is_retained", "coalesce(v_newest > v_before, false)", "false"),
        Edit("_slot_is_retained", "> v_before THEN", "IS NULL AND false THEN"),
    ),
    "prune does not wait for dumps": (
        Edit("_prune_slot", "@extschema@._setting('dump_lock_seconds') > 0", "false"),
    ),
    "rotation into a slot in use": (
        Edit("_plan_ring", " AND @extschema@._slot_is_empty(p_ring, s)", ""),
    ),
    "publish of an own plan": (
        Edit(
            "_publish_ring", "IF pg_current_xact_id_if_assigned() IS NOT NULL THEN", "IF false THEN"
        ),
    ),
    "verify leaves sequences behind": (Edit("_raise_sequence", "p_seen <= v_last", "true"),),
    "verify forgets horizons": (
        Edit("_verify_lanes", "IF v_emission.horizon IS NOT NULL THEN", "IF false THEN"),
    ),
    "a failed step stops tick": (Edit("_tick", "WHEN OTHERS THEN", "WHEN division_by_zero THEN"),),
    "instances with attempts are forgotten": (
        Edit(
            "_forget_instances",
            "EXCEPT\n            SELECT o.owner FROM @extschema@._open_batches(v_slot) o",
            "",
        ),
    ),
    # ---- api and rights
    "a worker may cancel": (
        Edit(
            "_capabilities", "'attempt_status,set_progress,work,", "'cancel_job,set_progress,work,"
        ),
    ),
    "a reader may claim": (
        Edit(
            "_capabilities",
            "'{job,explain_job,queue_counts,queue_depths,ring_status,api,version,"
            "schema_version,error_codes}'::text[])\n        ) c",
            "'{job,explain_job,queue_counts,queue_depths,ring_status,api,version,"
            "schema_version,error_codes,claim_ready_runtime}'::text[])\n        ) c",
        ),
    ),
    "claims of 1001 jobs": (
        Edit("claim_ready_runtime", "max_batch NOT BETWEEN 1 AND 1000", "max_batch < 1"),
    ),
    "a worker without a name": (
        Edit("_check_instance", "IF p_instance IS NULL THEN", "IF false THEN"),
    ),
    "unknown steps pass": (
        Edit("tick", "ELSIF NOT budget -> 'steps' <@ to_jsonb(v_steps) THEN", "ELSIF false THEN"),
    ),
}
