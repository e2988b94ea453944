-- Re-runnable: run again at each update. The order is the direction of dependencies.

-- foundation: what all planes use
\ir foundation/ring_partitions.sql
\ir foundation/error_codes.sql
\ir foundation/settings.sql
\ir foundation/positions.sql
\ir foundation/locks.sql
\ir foundation/backoff.sql
\ir foundation/validation.sql
\ir foundation/blake3.sql
\ir foundation/canonical_json.sql

-- control: small coordination rows
\ir control/identity.sql
\ir control/ring_cursor.sql
\ir control/released_slots.sql
\ir control/queues.sql
\ir control/doorbell.sql
\ir control/lanes.sql
\ir control/unique_keys.sql
\ir control/sql_handlers.sql
\ir control/instances.sql

-- queue: append-only job bodies and terminal history
\ir queue/emission.sql
\ir queue/append_ready.sql
\ir queue/find_ready.sql
\ir queue/append_done.sql
\ir queue/terminal_history.sql
\ir queue/pressure.sql

-- deferred: jobs that may not run yet, and dead letters
\ir deferred/defer.sql
\ir deferred/promote_due.sql
\ir deferred/refill_buckets.sql
\ir deferred/dead_letters.sql
\ir deferred/unique_waiters.sql

-- execution: attempts
\ir execution/receipts.sql
\ir execution/choose_lanes.sql
\ir execution/claim_ready.sql
\ir execution/move_attempt.sql
\ir execution/attempt_state.sql
\ir execution/complete_attempts.sql
\ir execution/finish_attempts.sql
\ir execution/leases.sql
\ir execution/cancel_job.sql
\ir execution/job_info.sql
\ir execution/unique_jobs.sql
\ir execution/change_job.sql
\ir execution/drain_queue.sql
\ir execution/explain_job.sql

-- maintenance: bounded steps, each under its own try-lock
\ir maintenance/ring_slots.sql
\ir maintenance/rotate_ring.sql
\ir maintenance/prune_ring.sql
\ir maintenance/prune_deferred.sql
\ir maintenance/evacuate_slot.sql
\ir maintenance/rescue_attempts.sql
\ir maintenance/expire.sql
\ir maintenance/verify.sql
\ir maintenance/tick.sql
\ir maintenance/status.sql

-- api: the only functions and views that applications use
\ir api/producer.sql
\ir api/job_inbox.sql
\ir api/unique_jobs.sql
\ir api/keys.sql
\ir api/worker.sql
\ir api/sql_worker.sql
\ir api/operator.sql
\ir api/views.sql
\ir roles/grants.sql
