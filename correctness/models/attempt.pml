/*
 * All that may race for the attempts of one job: finish, complete_job, rescue, cancel, evacuation, retry, promotion,
 * claim and prune.
 *
 * What is modelled. One job and the sessions that act on it, each in transactions of its own. finish_jobs and
 * complete_jobs are one operation here: both try the batch's lock and decide on what they read under it. complete_job
 * comes in READ COMMITTED and in a REPEATABLE READ transaction with a snapshot of any age. Evacuation makes a lease of an
 * attempt that runs for long. Prune empties the claim slot of an attempt that is closed, and the queue slot of a
 * terminal record, in its two transactions: one copies a failed job, a later one truncates. A session may stop between
 * any two statements, commits or is rolled back; what it wrote is seen from its commit on. Locks (lane, mutation, position,
 * batch, rows) are kept until the end of the transaction, and locks of leaves keep prune out.
 *
 * Abstraction. A position is emitted once, so one number names a position, the batch that has it, and an attempt. The
 * first closure of a batch has the number 1, and whoever does not see it takes the same number. The gates and the
 * rings of prune are another model: here any slot may be emptied that this job does not need. Clocks and retention are
 * left out. Failed jobs are always copied.
 *
 * Bounds: SESSIONS at a time, BUDGET transactions in all, POSITIONS lives in the ready ring.
 *
 * invariant ONE_PLACE: the job waits, runs under an open receipt, runs under an open lease, is deferred, is a dead
 *     letter, or has ended: exactly one of them.
 * invariant ONE_CLOSURE: an attempt (job, lease) ends at most once, whoever ends it and wherever it lives by then.
 * invariant MOVED_CLOSED: an attempt that has a lease has no open receipt.
 * invariant LEASE_MONOTONE: each claim has a higher lease than all before it.
 * invariant NO_RESURRECTION: a job that has ended neither waits nor runs until a retry takes its end back.
 * invariant COUNTS_ONCE: terminal records less what retries took back, with what prune has folded, are 1 while the job
 *     has ended (and is no dead letter), else 0.
 * invariant BODY_THERE: a retry that takes a job out of history has its body.
 * invariant NO_DEADLOCK: every transaction comes to its end.
 *
 * check: -DSESSIONS=3 -DBUDGET=4 -DPOSITIONS=2 -m10000 -DCOLLAPSE
 * check: -DSESSIONS=2 -DBUDGET=5 -DPOSITIONS=3 -m10000 -DCOLLAPSE
 * short: -DSESSIONS=2 -DBUDGET=4 -DPOSITIONS=2 -m10000
 *
 * mutant FINISH_TRUSTS_TOKEN: finish does not look at the closures of the batch; refuted by ONE_CLOSURE
 * mutant LEASE_WITHOUT_LOCK: the end of a moved attempt does not need the batch's lock; refuted by ONE_CLOSURE
 * mutant CANCEL_LEASE_LOOKS_ONCE: cancel of a moved attempt does not look again under the lock; refuted by ONE_CLOSURE
 * mutant MOVED_STAYS_OPEN: evacuation copies the attempt and leaves its receipt open; refuted by MOVED_CLOSED
 * mutant SNAPSHOT_TRUSTED: closures have no number, so an old snapshot is believed; refuted by ONE_CLOSURE
 * mutant RETRY_WITHOUT_LOCK: two retries of an ended job do not follow each other; refuted by ONE_PLACE
 * mutant UNDO_LOOKS_ONCE: retry does not look again under a lock that keeps prune out; refuted by BODY_THERE
 * mutant COPY_OUTLIVES_UNDO: retry leaves the copy of a failed job that prune has made; refuted by ONE_PLACE
 * mutant RETRY_RESETS_LEASE: a retried job starts with lease 0 again; refuted by LEASE_MONOTONE
 * mutant UNDO_NOT_COUNTED: the row that takes an end back counts nothing; refuted by COUNTS_ONCE
 * mutant CLAIM_IGNORES_TOMBSTONE: a claim that got a position's lock reads no tombstone; refuted by ONE_PLACE
 * mutant CANCEL_LOOKS_ONCE: cancel of a waiting job does not look again under its locks; refuted by ONE_PLACE
 */
#include "invariant.inc"

#ifndef SESSIONS
#define SESSIONS 2
#endif
#ifndef BUDGET
#define BUDGET 5
#endif
#ifndef POSITIONS
#define POSITIONS 2
#endif
#define ENDS (SESSIONS + 2)

/* states of a ready row */
#define NONE 0
#define LIVE 1
#define DEAD 2
/* outcomes of an attempt; 0: open */
#define OPEN 0
#define COMPLETED 1
#define RETRIED 2
#define RELEASED 3
#define FAILED 4
#define LETTER 5        /* failed, to the dead letters */
#define CANCELLED 6
#define RESCUED 7
#define MOVED 8
/* lease rows */
#define NO_LEASE 0
#define LEASED 1
#define LEASE_ENDED 2
/* what a transaction writes */
#define CLOSES 1
#define ENDS_LEASE 2
#define LEASES 3
#define CLAIMS 4
#define PROMOTES 5
#define CANCELS_DEFERRED 6
#define CANCELS_WAITING 7
#define RETRIES_DEFERRED 8
#define RETRIES_LETTER 9
#define RETRIES_COPY 10
#define RETRIES_END 11
/* where a terminal record lies */
#define IN_SLOT 1
#define PRUNED 2

/* ---- what is committed */
byte row[POSITIONS];            /* ready_entries with ready_tombstones */
byte before[POSITIONS];         /* run_lease in the row; the token of its attempt is one more */
bool emitted[POSITIONS];        /* the claim */
byte closure[POSITIONS];        /* lease_claim_closures */
bool emptied[POSITIONS];        /* the claim slot of the receipt was pruned */
byte lease[POSITIONS];          /* leases */
byte tail;                      /* next position of the lane */
bool deferred;                  /* deferred_jobs */
byte deferred_lease;
bool letter;                    /* dlq_entries */
byte letter_lease;
byte ends;                      /* terminal records: done_entries and receipt_completion_batches */
byte end_state[ENDS];
byte end_lease[ENDS];
byte end_at[ENDS];
bool undone[ENDS];              /* taken back by a row is_undo */
bool copied[ENDS];              /* failed_entries */
short counted;                  /* what queue_counts answers for terminal jobs */

/* ---- locks; 0 is free, else a session */
byte lane_lock, mutation_lock;
byte mutation_shared;
byte position_lock[POSITIONS];
byte batch_lock[POSITIONS];
byte deferred_row, letter_row;
byte copy_row[ENDS];
byte claim_readers[POSITIONS];  /* transactions that have read the claim slot: they keep TRUNCATE out */
byte end_readers[ENDS];         /* the same for the queue slot of a terminal record */

/* ---- ghosts */
byte closed[POSITIONS];         /* ends of the attempt */
byte last_lease;
bool over;                      /* has ended, and nobody took that back */
byte budget = BUDGET;

hidden byte ONE_PLACE, ONE_CLOSURE, MOVED_CLOSED, LEASE_MONOTONE, NO_RESURRECTION, COUNTS_ONCE, BODY_THERE;
hidden byte i, places, alive;

inline look() {
    i = 0;
    alive = deferred;
    do
    :: i < POSITIONS ->
        alive = alive + (row[i] == LIVE && !emitted[i]) + (emitted[i] && !emptied[i] && closure[i] == OPEN) +
            (lease[i] == LEASED);
        INVARIANT(ONE_CLOSURE, closed[i] <= 1);
        INVARIANT(MOVED_CLOSED, lease[i] == NO_LEASE || closure[i] == MOVED);
        i++
    :: else -> break
    od;
    i = 0;
    places = 0;
    do
    :: i < ends ->
        places = places + (!undone[i] || (copied[i] && end_at[i] == PRUNED));
        i++
    :: else -> break
    od;
    INVARIANT(ONE_PLACE, alive + letter + places == 1);
    INVARIANT(NO_RESURRECTION, !over || alive == 0);
    INVARIANT(COUNTS_ONCE, counted == places);
    i = 0;
    places = 0;
    alive = 0
}

inline append_end(state, of_lease) {
    end_state[ends] = state;
    end_lease[ends] = of_lease;
    end_at[ends] = IN_SLOT;
    ends++;
    counted++;
    over = true
}

inline append_ready(of_lease) {
    row[tail] = LIVE;
    before[tail] = of_lease;
    tail++
}

inline defer(of_lease) {
    deferred = true;
    deferred_lease = of_lease
}

/* _move_attempt: where a job goes when its attempt ends; its token has the lease before[p] + 1 */
inline move_attempt() {
    closed[p]++;
    if
    :: wanted == COMPLETED || wanted == FAILED || wanted == CANCELLED -> append_end(wanted, before[p] + 1)
    :: wanted == LETTER -> letter = true; letter_lease = before[p] + 1; over = true
    :: wanted == RELEASED && tail < POSITIONS -> append_ready(before[p] + 1)
    :: else -> defer(before[p] + 1)
    fi
}

/* What a transaction writes shows when it commits. */
inline write() {
    if
    :: writes == CLOSES -> closure[p] = wanted; move_attempt()
    :: writes == ENDS_LEASE -> lease[p] = LEASE_ENDED; move_attempt()
    :: writes == LEASES ->
        lease[p] = LEASED;
#ifndef MOVED_STAYS_OPEN
        closure[p] = MOVED
#endif
    :: writes == CLAIMS ->
        emitted[p] = true;
        INVARIANT(LEASE_MONOTONE, before[p] + 1 > last_lease);
        last_lease = before[p] + 1
    :: writes == PROMOTES -> deferred = false; append_ready(deferred_lease); deferred_lease = 0
    :: writes == CANCELS_DEFERRED -> deferred = false; append_end(CANCELLED, deferred_lease); deferred_lease = 0
    :: writes == CANCELS_WAITING -> row[p] = DEAD; append_end(CANCELLED, before[p])
    :: writes >= RETRIES_DEFERRED ->
        if
        :: writes == RETRIES_DEFERRED -> held = deferred_lease; deferred = false; deferred_lease = 0
        :: writes == RETRIES_LETTER -> held = letter_lease; letter = false; letter_lease = 0
        :: writes == RETRIES_COPY -> held = end_lease[p]; copied[p] = false; undone[p] = true; counted--
        :: writes == RETRIES_END ->
            held = end_lease[p];
            INVARIANT(BODY_THERE, end_at[p] == IN_SLOT);
            undone[p] = true;
#ifndef UNDO_NOT_COUNTED
            counted--;
#endif
#ifndef COPY_OUTLIVES_UNDO
            copied[p] = false;
#endif
#ifdef RETRY_RESETS_LEASE
            held = 0
#endif
        fi;
        over = false;
        if
        :: tail < POSITIONS -> append_ready(held)
        :: else -> defer(held)
        fi
    fi
}

/* All locks of a transaction go with its end. */
inline unlock() {
    if
    :: lane_lock == me -> lane_lock = 0
    :: else
    fi;
    if
    :: mutation_lock == me -> mutation_lock = 0
    :: else
    fi;
    if
    :: shares -> shares = false; mutation_shared--
    :: else
    fi;
    if
    :: deferred_row == me -> deferred_row = 0
    :: else
    fi;
    if
    :: letter_row == me -> letter_row = 0
    :: else
    fi;
    i = 0;
    do
    :: i < POSITIONS ->
        if
        :: position_lock[i] == me -> position_lock[i] = 0
        :: else
        fi;
        if
        :: batch_lock[i] == me -> batch_lock[i] = 0
        :: else
        fi;
        if
        :: (reads >> i) & 1 -> claim_readers[i]--
        :: else
        fi;
        i++
    :: else -> break
    od;
    reads = 0;
    i = 0;
    do
    :: i < ENDS ->
        if
        :: copy_row[i] == me -> copy_row[i] = 0
        :: else
        fi;
        i++
    :: else -> break
    od;
    if
    :: leaf < ENDS -> end_readers[leaf]--; leaf = ENDS
    :: else
    fi;
    i = 0
}

/* _read_batch, under the lock of the batch; the leaf stays locked */
inline read_batch() {
    atomic {
        seen = closure[p];
        gone = emptied[p];
        if
        :: (reads >> p) & 1
        :: else -> reads = reads | (1 << p); claim_readers[p]++
        fi
    }
}

#define LOCK(lock) atomic { lock == 0 || lock == me -> lock = me }
#define IS_FREE(lock) (lock == 0 || lock == me)
#define IS_OPEN(n) (emitted[n] && !emptied[n] && closure[n] == OPEN)

/* ---- those who try the batch's lock, and then decide on what they read under it */

inline finish() {
    read_batch();
#ifdef FINISH_TRUSTS_TOKEN
    if
    :: !gone && seen != MOVED -> seen = OPEN
    :: else
    fi;
#endif
    if
    :: !gone && seen == OPEN -> writes = CLOSES
    :: (gone || seen == MOVED) && lease[p] == LEASED -> writes = ENDS_LEASE
    :: else /* already_done or stale */
    fi
}

inline rescue() {
    if
    :: wanted = RESCUED
    :: wanted = FAILED /* its last attempt */
    fi;
    if
    :: was_leased ->
        if
        :: lease[p] == LEASED -> writes = ENDS_LEASE
        :: else
        fi
    :: else ->
        read_batch();
        if
        :: !gone && seen == OPEN -> writes = CLOSES
        :: else
        fi
    fi
}

inline evacuate() {
    read_batch();
    if
    :: !gone && seen == OPEN -> writes = LEASES
    :: else
    fi
}

/* ---- complete_job waits for the batch's lock */

inline complete() {
    wanted = COMPLETED;
    LOCK(batch_lock[p]);
    finish()
}

/* In an older snapshot: seen, held and gone are what it shows. */
inline complete_in_snapshot() {
    wanted = COMPLETED;
    atomic {
        seen = closure[p];
        held = lease[p];
        gone = !emitted[p]
    };
    if
    :: gone /* it cannot see the claim: 40001 */
    :: else ->
        LOCK(batch_lock[p]);
        atomic {
            /* TRUNCATE does not ask snapshots */
            gone = emptied[p];
            reads = 1 << p;
            claim_readers[p]++
        };
        if
#ifdef SNAPSHOT_TRUSTED
        :: !gone && seen == OPEN -> writes = CLOSES
#else
        /* else the number of the closure is taken: 40001 */
        :: !gone && seen == OPEN && closure[p] == OPEN -> writes = CLOSES
#endif
        /* else the row has changed since: 40001 */
        :: (gone || seen == MOVED) && held == LEASED && lease[p] == LEASED -> writes = ENDS_LEASE
        :: else
        fi
    fi
}

/* ---- claim: lane and mutation lock by try */

inline claim() {
    if
    :: atomic { mutation_lock == 0 && mutation_shared == 0 -> mutation_lock = me }
    :: mutation_lock != 0 || mutation_shared > 0
    fi;
    atomic {
        p = 0;
        do
        :: p < POSITIONS && !(row[p] == LIVE && !emitted[p]) -> p++
        :: else -> break
        od
    };
    if
    :: p == POSITIONS
    :: p < POSITIONS && mutation_lock == me -> writes = CLAIMS
    :: p < POSITIONS && mutation_lock != me ->
        if
        :: atomic { IS_FREE(position_lock[p]) -> position_lock[p] = me };
            if
#ifdef CLAIM_IGNORES_TOMBSTONE
            :: true -> writes = CLAIMS
#else
            :: row[p] == LIVE -> writes = CLAIMS
            :: else
#endif
            fi
        :: !IS_FREE(position_lock[p]) /* held */
        fi
    fi
}

/* ---- cancel_job and retry_job: a job may move on between look and lock, so both look again, some times */

/* _take_deferred waits for whoever has the row */
inline take_deferred() {
    held = 0;
    if
    :: deferred ->
        atomic {
            IS_FREE(deferred_row) || !deferred;
            if
            :: deferred -> deferred_row = me; held = 1
            :: else
            fi
        }
    :: else
    fi
}

/* _lock_ready: the live row of the highest lease. One that was claimed stays so, and is not locked. */
inline lock_ready() {
    held = POSITIONS;
    do
    :: atomic {
           p = POSITIONS;
           do
           :: p > 0 && row[p - 1] != LIVE -> p--
           :: else -> break
           od
       };
        gone = (p > 0 && emitted[p - 1]);
        if
        :: p == 0 || gone || p - 1 == held -> break
        :: else
        fi;
        held = p - 1;
        if
        :: shares
        :: else -> atomic { mutation_lock == 0 -> mutation_shared++; shares = true }
        fi;
        LOCK(position_lock[held]);
#ifdef CANCEL_LOOKS_ONCE
        break
#endif
    od
}

inline cancel() {
    wanted = CANCELLED;
    do
    :: round < 3 && writes == 0 ->
        round++;
        take_deferred();
        if
        :: held -> writes = CANCELS_DEFERRED; break
        :: else
        fi;
        /* _cancel_lease */
        atomic {
            p = 0;
            do
            :: p < POSITIONS && lease[p] != LEASED -> p++
            :: else -> break
            od
        };
        if
        :: p < POSITIONS ->
            LOCK(batch_lock[p]);
            if
#ifdef CANCEL_LEASE_LOOKS_ONCE
            :: true -> writes = ENDS_LEASE; break
#else
            :: lease[p] == LEASED -> writes = ENDS_LEASE; break
            :: else
#endif
            fi
        :: else
        fi;
        lock_ready();
        if
        :: p > 0 && !gone -> p--; writes = CANCELS_WAITING
        :: p > 0 && gone && IS_OPEN(p - 1) ->
            /* _cancel_running */
            p--;
            LOCK(batch_lock[p]);
            read_batch();
            if
            :: !gone && seen == OPEN -> writes = CLOSES
            :: else
            fi
        :: else
        fi
    :: else -> break /* or it has ended, or moves about: 40001 */
    od
}

/* _take_ended, where no dead letter is: history, else the copy of prune. Two retries follow each other by the lock of
   the job's id, which is its first position. */
inline take_ended() {
#ifndef RETRY_WITHOUT_LOCK
    LOCK(position_lock[0]);
#endif
    atomic {
        p = 0;
        do
        :: p < ENDS && (end_at[p] != IN_SLOT || undone[p]) -> p++
        :: else -> break
        od;
        gone = (p == ENDS);
        if
        :: gone ->
            p = 0;
            do
            :: p < ENDS && !copied[p] -> p++
            :: else -> break
            od
        :: else
        fi
    };
    if
    :: p == ENDS
    :: p < ENDS && end_state[p] == COMPLETED
    :: p < ENDS && end_state[p] != COMPLETED && gone ->
        atomic {
            IS_FREE(copy_row[p]) || !copied[p];
            if
            :: copied[p] -> copy_row[p] = me; writes = RETRIES_COPY
            :: else
            fi
        }
    :: p < ENDS && end_state[p] != COMPLETED && !gone ->
        /* _undo_done: the second look keeps the leaf from being truncated */
        atomic {
#ifdef UNDO_LOOKS_ONCE
            held = 1;
#else
            held = (end_at[p] == IN_SLOT && !undone[p]);
            leaf = p;
            end_readers[p]++
#endif
        };
        if
        :: held ->
            /* the row that takes the end back; then the copy is deleted, if there is one now */
            atomic {
                IS_FREE(copy_row[p]) || !copied[p];
                if
                :: copied[p] -> copy_row[p] = me
                :: else
                fi;
                writes = RETRIES_END
            }
        :: else
        fi
    fi
}

inline retry() {
    do
    :: round < 2 && writes == 0 ->
        round++;
        if
        :: deferred ->
            take_deferred();
            if
            :: held -> writes = RETRIES_DEFERRED
            :: else
            fi
        :: !deferred && over ->
            atomic {
                IS_FREE(letter_row) || !letter;
                if
                :: letter -> letter_row = me; writes = RETRIES_LETTER
                :: else
                fi
            };
            if
            :: writes == 0 && leaf == ENDS -> take_ended()
            :: else
            fi
        :: else -> break /* it waits or runs: 55000 */
        fi
    :: else -> break
    od
}

/* ---- prune, each in one step: it locks what it looks at */

inline prune() {
    if
    :: d_step {
           emitted[p] && !emptied[p] && closure[p] != OPEN && claim_readers[p] == 0 ->
           emptied[p] = true;
           look()
       }
    :: d_step {
           end_at[p] == IN_SLOT && end_state[p] == FAILED && !undone[p] && !copied[p] && copy_row[p] == 0 ->
           copied[p] = true;
           look()
       }
    :: d_step {
           end_at[p] == IN_SLOT && end_readers[p] == 0 && copy_row[p] == 0 &&
           (end_state[p] != FAILED || undone[p] || copied[p]) ->
           end_at[p] = PRUNED;
           look()
       }
    :: else
    fi
}

proctype session(byte me) {
    byte p, seen, held, wanted, round, writes;
    byte reads;      /* claim slots that the transaction has locked, as bits */
    byte leaf = ENDS; /* the terminal record whose slot it has locked */
    bool gone, shares, was_leased;

    do
    :: atomic { budget > 0 && ends + SESSIONS <= ENDS -> budget-- };
        if
        :: p = 0
        :: tail > 1 -> p = 1
#if POSITIONS > 2
        :: tail > 2 -> p = 2
#endif
        fi;
        if
        :: emitted[p] ->
            if
            :: wanted = COMPLETED
            :: wanted = RETRIED
            :: wanted = RELEASED
            :: wanted = FAILED
            :: wanted = LETTER
            fi;
            if
            :: atomic { batch_lock[p] == 0 -> batch_lock[p] = me }; finish()
            :: batch_lock[p] != 0 /* busy */
            fi
        :: IS_OPEN(p) || lease[p] == LEASED ->
            was_leased = (lease[p] == LEASED);
            if
            :: atomic { batch_lock[p] == 0 -> batch_lock[p] = me }; rescue()
            :: batch_lock[p] != 0
            fi
        :: IS_OPEN(p) ->
            if
            :: atomic { batch_lock[p] == 0 -> batch_lock[p] = me }; evacuate()
            :: batch_lock[p] != 0
            fi
        :: emitted[p] -> complete()
        :: complete_in_snapshot()
        :: atomic { lane_lock == 0 -> lane_lock = me }; claim()
        :: atomic { deferred && deferred_row == 0 && tail < POSITIONS -> deferred_row = me }; writes = PROMOTES
        :: true -> cancel()
        :: true -> retry()
        :: true -> prune()
        fi;
#ifdef LEASE_WITHOUT_LOCK
        if
        :: writes == ENDS_LEASE -> batch_lock[p] = 0
        :: else
        fi;
#endif
        if
        :: true
        :: writes > 0 -> writes = 0 /* rolled back */
        fi;
        d_step {
            if
            :: writes > 0 -> write()
            :: else
            fi;
            unlock();
            look();
            p = 0;
            seen = 0;
            held = 0;
            wanted = 0;
            round = 0;
            writes = 0;
            gone = false;
            was_leased = false
        }
    :: break
    od
}

init {
    byte n = 1;
    atomic {
        row[0] = LIVE;
        tail = 1;
        if
        :: emitted[0] = true; last_lease = 1
        :: skip
        fi;
        do
        :: n <= SESSIONS -> run session(n); n++
        :: else -> break
        od
    }
}
