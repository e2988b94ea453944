/*
 * One unique key: inserts in READ COMMITTED and in older snapshots, the transitions of its jobs, sweep and prune.
 *
 * What is modelled. job_unique_claims has at most one row for the key: the job, its mask of states, when it was taken,
 * and, once the job is known to have ended, state and expiry. A row of a transaction that has not committed makes an
 * INSERT of the same key wait, and so does one that it changes or deletes; a row that is only locked does not. UPDATE
 * and DELETE wait for either and then look at the row again. Statements of one call read at different moments. Jobs
 * have the states of the engine and masks of their own. Transitions of one job follow each other (its batch, position
 * or row is locked); those that touch no key are one step: claim and plain completion. Time is a counter of retentions.
 * A producer may stand still for ever with a key in hand; who waits without bound for a key may then wait for ever,
 * and nobody else.
 *
 * Bounds: JOBS jobs of one key, SESSIONS at a time, BUDGET transactions, three masks, with a period or without.
 *
 * invariant ONE_HOLDER: a living job in a state of its mask, unless it still waits for its key, is the one that the
 *     row names, and the row has no end. So no two such jobs are there at any time.
 * invariant END_HOLDS: who ended in a state of its mask while the row named it keeps the key until it expires there;
 *     only one who saw it live, outside its mask, may still take the key from it.
 * invariant END_IS_TRUE: a row says that its job ended in a state only if it did, and not while it lives.
 * invariant TOLD_TRUE: an insert that is answered "duplicate", and a job that is cancelled because another one holds
 *     its key, are told of another job that was committed.
 * invariant SNAPSHOT_IS_TRUE: an insert in an older snapshot that is told of a living job is told of one that holds
 *     the key when the insert asks for it.
 * invariant NO_DEADLOCK: moves of the engine (finish, retry, promotion, sweep, prune) come to their end, also while a
 *     producer stands still.
 *
 * check: -DSESSIONS=2 -DBUDGET=3 -DJOBS=3 -DPERIOD=2 -m10000 -DCOLLAPSE
 * short: -DSESSIONS=2 -DBUDGET=3 -DJOBS=2 -DPERIOD=0 -m10000
 *
 * mutant TAKEOVER_LOOKS_ONCE: a takeover does not look whether the row is still the one that was judged; refuted by
 *     END_HOLDS
 * mutant RETRY_TAKES_NO_KEY: a job that ended and is retried does not take its key; refuted by ONE_HOLDER
 * mutant MOVE_KEEPS_KEY: a job that comes back into its mask from running believes that it still has its key; refuted
 *     by ONE_HOLDER
 * mutant PROMOTED_WITHOUT_KEY: a job that waits for its key is made available without it; refuted by ONE_HOLDER
 * mutant SWEEP_TRUSTS_LOOK: the sweep deletes a row that it judged before it had it locked; refuted by ONE_HOLDER
 * mutant END_STAYS: a retried job leaves the end of its former life in the row; refuted by END_IS_TRUE
 * mutant END_NOT_KEPT: prune forgets a job and does not write its end into the row; refuted by END_HOLDS
 * mutant RETAKE_KEEPS_TIME: a job that takes its key again does not renew when it was taken; refuted by ONE_HOLDER
 * mutant SNAPSHOT_TRUSTED: an older snapshot is believed about the state of the holder; refuted by SNAPSHOT_IS_TRUE
 * mutant PROMOTION_WAITS: promotion waits for a busy key; refuted by NO_DEADLOCK
 * mutant END_WAITS: the end of a job waits for whoever has the row; refuted by NO_DEADLOCK
 */
#include "invariant.inc"

#ifndef SESSIONS
#define SESSIONS 2
#endif
#ifndef BUDGET
#define BUDGET 4
#endif
#ifndef JOBS
#define JOBS 2
#endif
#ifndef PERIOD /* 0: the key has none, 1: it has one, 2: either */
#define PERIOD 0
#endif

/* states of jobs, as bits of masks */
#define SCHEDULED 1
#define AVAILABLE 2
#define RUNNING 4
#define COMPLETED 8
#define RETRYABLE 16
#define FAILED 32
#define UNBORN 0
#define FORGOTTEN 64 /* history was pruned */
#define LIVING (SCHEDULED | AVAILABLE | RUNNING | RETRYABLE)
#define ENDED (COMPLETED | FAILED)
#define DEFAULT_MASK 31

#define NOBODY 15
/* what a transaction that has not ended does to the row */
#define LOCKED 1
#define CHANGED 2
#define INSERTED 3

/* ---- what is committed */
byte state[JOBS];
byte mask[JOBS];
bool waiting[JOBS];    /* deferred without its key */
byte finalized[JOBS];  /* when it ended */
byte row_job = NOBODY; /* NOBODY: there is no row */
byte row_mask, row_taken, row_ended, row_expires;
byte row_version;      /* one more with each change */

byte clock;
bool has_period;       /* of the key; it ends at 1 */

/* ---- locks */
byte row_owner, row_how;
byte job_owner[JOBS];

/* ---- for the invariants */
bool keeps[JOBS];      /* it ended in its mask, and the row named it */
byte born;
byte budget = BUDGET;
bool stalled;

hidden byte ONE_HOLDER, END_HOLDS, END_IS_TRUE, TOLD_TRUE, SNAPSHOT_IS_TRUE;
hidden byte i;

#define EXPIRY_AT(at) (has_period + (1 - has_period) * (at + 1))
#define EXPIRY(j) EXPIRY_AT(finalized[j])
#define ROW_IS_FREE (row_owner == 0 || row_owner == me)

inline look() {
    INVARIANT(END_IS_TRUE, row_ended == 0 || state[row_job] == row_ended || state[row_job] == FORGOTTEN);
    i = 0;
    do
    :: i < JOBS ->
        INVARIANT(ONE_HOLDER, !(state[i] & LIVING & mask[i]) || waiting[i] || (row_job == i && row_ended == 0));
        i++
    :: else -> break
    od;
    i = 0
}

/* ---- the end of a transaction */

/* An update of the row by a take of the key: new_job and so on are in the session. */
inline commit() {
    d_step {
        if
        :: writes_row && new_job != NOBODY && new_job != row_job && row_job != NOBODY ->
            INVARIANT(END_HOLDS, !keeps[row_job] || EXPIRY(row_job) <= judged_at || (seen & LIVING))
        :: else
        fi;
        if
        :: writes_row ->
            row_job = new_job;
            row_mask = new_mask;
            row_taken = new_taken;
            row_ended = new_ended;
            row_expires = new_expires;
            row_version++
        :: else
        fi;
        if
        :: new_state != UNBORN ->
            if
            :: (new_state & ENDED) && (state[j] & LIVING) ->
                finalized[j] = clock;
                keeps[j] = ((new_state & mask[j]) && row_job == j)
            :: new_state & LIVING -> keeps[j] = false
            :: else
            fi;
            state[j] = new_state;
            waiting[j] = new_waits
        :: else
        fi
    }
}

inline unlock() {
    if
    :: row_owner == me -> row_owner = 0; row_how = 0
    :: else
    fi;
    if
    :: j < JOBS && job_owner[j] == me -> job_owner[j] = 0
    :: else
    fi
}

/* ---- the row */

inline read_row() {
    d_step {
        old_job = row_job;
        old_mask = row_mask;
        old_taken = row_taken;
        old_ended = row_ended;
        old_expires = row_expires
    }
}

/* _key_holder: whether the job of the row that was read holds the key */
inline judge() {
    d_step {
        judged_at = clock;
        if
        :: old_ended != 0 -> seen = old_ended; held = ((old_mask & old_ended) && old_expires > clock)
        :: else ->
            seen = (in_snapshot -> snap_state[old_job] : state[old_job]);
            if
            :: seen & LIVING -> held = (old_mask & seen) != 0
            :: seen & ENDED -> held = ((old_mask & seen) && EXPIRY(old_job) > clock)
            :: else -> /* it completed and was pruned */
                held = ((old_mask & COMPLETED) && has_period && 1 > clock) /* unreached: in some callers, with so few steps */
            fi
        fi
    }
}

/* What a take writes. */
inline write_take(how) {
    row_owner = me;
    row_how = how;
    writes_row = true;
    new_job = j;
    new_mask = mask_of_j;
#ifdef RETAKE_KEEPS_TIME
    new_taken = (row_job == j -> row_taken : row_taken + 1);
#else
    new_taken = row_taken + 1;
#endif
#ifdef END_STAYS
    new_ended = (row_job == j -> row_ended : 0);
    new_expires = (row_job == j -> row_expires : 0);
#else
    new_ended = 0;
    new_expires = 0;
#endif
    took = true
}

inline write_end(ended, expires) {
    writes_row = true;
    new_job = (ended -> row_job : NOBODY);
    new_mask = row_mask;
    new_taken = row_taken;
    new_ended = ended;
    new_expires = expires
}

/* FOR UPDATE SKIP LOCKED, if the row is still the one that was read */
inline try_lock_row() {
    d_step {
        if
        :: row_owner == 0 && old_job != NOBODY && row_job == old_job && row_taken == old_taken ->
            row_owner = me;
            row_how = LOCKED;
            locked = true
        :: else -> locked = false
        fi
    }
}

#define IS_TOLD(job) INVARIANT(TOLD_TRUE, job != j && job < JOBS && state[job] != UNBORN)

#define HOLDS_NOW (row_ended != 0 && row_expires > clock || (row_mask & state[row_job] & LIVING) || \
    ((row_mask & state[row_job] & ENDED) || keeps[row_job]) && EXPIRY(row_job) > clock)

/* _take_key: who is timed gives up a wait, and the key is busy then */
inline take_key(timed) {
    took = false;
    held = false;
    busy = false;
    do
    :: took || held || busy -> break
    :: else ->
        /* INSERT ... ON CONFLICT DO NOTHING */
        if
        :: row_owner != 0 && row_owner != me && row_how != LOCKED ->
            if
            :: timed -> busy = true /* unreached: by producers and operators */
            :: !timed ->
end_waits_for_insert:
                row_owner == 0 || row_how == LOCKED /* unreached: by moves of the engine */
            fi
        :: atomic { ROW_IS_FREE && row_job == NOBODY -> write_take(INSERTED) }
        :: atomic {
               (row_owner == 0 || row_owner == me || row_how == LOCKED) && row_job != NOBODY ->
               busy = (in_snapshot && row_version != snap_version); /* 40001 */
               is_true = (in_snapshot && HOLDS_NOW);
               read_row()
           };
            if
            :: in_snapshot
            :: else -> read_row() /* a statement of its own */
            fi;
            if
            :: !busy && old_job != NOBODY && old_job != j -> judge()
            :: else
            fi;
            if
            :: held || busy || old_job == NOBODY
            :: else ->
                /* UPDATE of the row that was judged */
                if
                :: !ROW_IS_FREE && timed -> busy = true /* unreached: by producers and operators */
                :: !ROW_IS_FREE && !timed ->
end_waits_for_update:
                    ROW_IS_FREE /* unreached: by moves of the engine */
                :: atomic {
                       ROW_IS_FREE ->
                       if
#ifdef TAKEOVER_LOOKS_ONCE
                       :: row_job != NOBODY -> write_take(CHANGED)
#else
                       :: row_job == old_job && row_taken == old_taken && row_expires == old_expires ->
                           write_take(CHANGED)
#endif
                       :: else -> busy = in_snapshot
                       fi
                   }
                fi
            fi
        fi
    od
}

/* ---- insert */

inline insert() {
    /* the look without a lock, which an older snapshot leaves out */
    if
    :: mask_of_j & new_state ->
        if
        :: !in_snapshot ->
            read_row();
            if
            :: old_job != NOBODY -> judge()
            :: else
            fi
        :: else
        fi;
        if
        :: held
        :: else -> take_key(false)
        fi;
        if
        :: held ->
            d_step {
                IS_TOLD(old_job);
                if
                :: in_snapshot && (seen & LIVING) ->
                    /* _still_holds */
#ifndef SNAPSHOT_TRUSTED
                    if
                    :: (old_mask & DEFAULT_MASK) == DEFAULT_MASK && clock < EXPIRY_AT(snap_clock) ->
#endif
                        INVARIANT(SNAPSHOT_IS_TRUE, is_true)
#ifndef SNAPSHOT_TRUSTED
                    :: else /* 40001 */
                    fi
#endif
                :: else
                fi;
                new_state = UNBORN
            }
        :: busy -> new_state = UNBORN
        :: else
        fi
    :: else -> new_waits = ((mask_of_j & AVAILABLE) != 0)
    fi
}

/* ---- transitions of a job */

/* _end_key: skips a row that somebody has */
inline end_key() {
    d_step {
        old_job = row_job;
        old_taken = row_taken
    };
    if
    :: old_job == j ->
#ifdef END_WAITS
        ROW_IS_FREE;
#endif
        try_lock_row();
        if
        :: locked && row_ended == 0 ->
            write_end((mask[j] & new_state), ((mask[j] & new_state) != 0) * EXPIRY_AT(clock))
        :: else
        fi
    :: else
    fi
}

/* _keep_key and _deferred_ext: from running back to a state in which it waits */
inline come_back() {
    if
    :: !(mask[j] & RUNNING) && (mask[j] & new_state) ->
#ifndef MOVE_KEEPS_KEY
        /* _try_take_key */
        read_row();
        if
        :: old_job != NOBODY && old_job != j -> judge()
        :: else
        fi;
        if
        :: held
        :: else ->
            try_lock_row();
            take_key(true)
        fi;
        if
        :: held -> IS_TOLD(old_job); new_state = FAILED /* ends cancelled */
        :: busy -> new_waits = true
        :: else
        fi
#else
        skip
#endif
    :: !(mask[j] & new_state) && (mask[j] & AVAILABLE) -> new_waits = true
    :: else
    fi;
    if
    :: new_waits && new_state == AVAILABLE -> new_state = SCHEDULED
    :: else
    fi
}

inline promote() {
    new_state = AVAILABLE;
    if
    :: waiting[j] && (mask[j] & AVAILABLE) ->
#ifndef PROMOTED_WITHOUT_KEY
#ifdef PROMOTION_WAITS
        if
        :: ROW_IS_FREE
        fi;
#endif
        take_key(true);
        if
        :: held -> IS_TOLD(old_job); new_state = FAILED
        :: busy -> new_state = UNBORN /* the next round */
        :: else
        fi
#else
        skip
#endif
    :: else
    fi
}

/* retry_job, retry_dlq, update_job */
inline place() {
    if
    :: new_state = AVAILABLE
    :: new_state = SCHEDULED
    fi;
    if
    :: mask[j] & new_state ->
#ifndef RETRY_TAKES_NO_KEY
        take_key(false);
        if
        :: held -> IS_TOLD(old_job); new_state = UNBORN /* 23505 */
        :: else
        fi
#else
        skip
#endif
    :: else ->
        /* _drop_key */
        if
        :: row_job == j ->
end_waits_for_delete:
            atomic {
                ROW_IS_FREE;
                if
                :: row_job == j -> row_owner = me; row_how = CHANGED; write_end(0, 0)
                :: else
                fi
            }
        :: else
        fi;
        new_waits = (new_state == SCHEDULED && (mask[j] & AVAILABLE))
    fi
}

/* ---- sweep, and prune of the history of a job */

inline sweep() {
    read_row();
    if
    :: old_job != NOBODY ->
        judge();
        if
        :: (old_ended == 0 && (seen & LIVING)) || (old_ended != 0 && held)
        :: else ->
#ifdef SWEEP_TRUSTS_LOOK
            d_step {
                if
                :: row_owner == 0 && row_job != NOBODY -> row_owner = me; row_how = LOCKED; locked = true
                :: else
                fi
            };
#else
            try_lock_row();
#endif
            if
            :: locked && held -> write_end(seen, EXPIRY(old_job))
            :: locked && !held -> write_end(0, 0)
            :: !locked
            fi
        fi
    :: else
    fi
}

inline forget() {
    new_state = FORGOTTEN;
#ifndef END_NOT_KEPT
    d_step {
        if
        :: row_job == j && row_ended == 0 && row_owner == 0 ->
            row_owner = me;
            row_how = LOCKED;
            if
            :: (row_mask & state[j]) && EXPIRY(j) > clock -> write_end(state[j], EXPIRY(j))
            :: else -> write_end(0, 0)
            fi
        :: row_job == j && row_ended == 0 && row_owner != 0 -> keeps[j] = false /* found locked both times */
        :: else
        fi
    }
#else
    skip
#endif
}

proctype session(byte me) {
    byte j = JOBS, mask_of_j;
    byte old_job, old_mask, old_taken, old_ended, old_expires;
    byte new_job, new_mask, new_taken, new_ended, new_expires;
    byte new_state, seen, judged_at;
    byte snap_state[JOBS];
    byte snap_version, snap_clock;
    bool in_snapshot, is_true, writes_row, new_waits, took, held, busy, locked;

    do
    :: atomic { budget > 0 -> budget-- };
        if
        :: atomic {
               born < JOBS ->
               j = born;
               born++;
               if
               :: mask_of_j = DEFAULT_MASK
               :: mask_of_j = AVAILABLE | COMPLETED
               :: mask_of_j = SCHEDULED | RETRYABLE | FAILED
               fi;
               mask[j] = mask_of_j;
               if
               :: new_state = AVAILABLE
               :: new_state = SCHEDULED
               fi;
               if
               :: true
               :: in_snapshot = true;
                   snap_version = row_version;
                   snap_clock = clock;
                   snap_state[0] = state[0];
                   snap_state[1] = state[1];
#if JOBS > 2
                   snap_state[2] = state[2];
#endif
               fi
           };
            insert();
            if
            :: true
            :: new_state != UNBORN && !stalled ->
                stalled = true;
end_stands_still:
                false
            fi
        :: else ->
            if
            :: j = 0
            :: born > 1 -> j = 1
#if JOBS > 2
            :: born > 2 -> j = 2
#endif
            fi;
            mask_of_j = mask[j];
            if
            :: atomic { state[j] == AVAILABLE && job_owner[j] == 0 -> job_owner[j] = me }; new_state = RUNNING
            :: atomic { state[j] == RUNNING && job_owner[j] == 0 -> job_owner[j] = me };
                if
                :: new_state = COMPLETED
                :: new_state = FAILED; end_key()
                ::
                    if
                    :: new_state = RETRYABLE
                    :: new_state = SCHEDULED
                    :: new_state = AVAILABLE
                    fi;
                    come_back()
                fi
            :: atomic { (state[j] & (SCHEDULED | RETRYABLE)) && job_owner[j] == 0 -> job_owner[j] = me };
                if
                :: promote()
                :: place()
                :: new_state = FAILED; end_key()
                fi
            :: atomic { state[j] == FAILED && job_owner[j] == 0 -> job_owner[j] = me }; place()
            :: atomic { (state[j] & ENDED) && job_owner[j] == 0 -> job_owner[j] = me }; forget()
            :: sweep()
            :: clock < 1 -> clock++
            :: else
            fi
        fi;
        if
        :: true
        :: writes_row || new_state != UNBORN -> writes_row = false; new_state = UNBORN /* rolled back */
        fi;
        commit();
        d_step {
            unlock();
            look();
            j = JOBS;
            mask_of_j = 0;
            old_job = 0; old_mask = 0; old_taken = 0; old_ended = 0; old_expires = 0;
            new_job = 0; new_mask = 0; new_taken = 0; new_ended = 0; new_expires = 0;
            new_state = UNBORN; seen = 0; judged_at = 0;
            snap_state[0] = 0; snap_state[1] = 0; snap_version = 0; snap_clock = 0;
            in_snapshot = false; is_true = false; writes_row = false; new_waits = false; took = false; held = false; busy = false;
            locked = false
        }
    :: break
    od
}

init {
    byte n = 1;
    atomic {
        if
#if PERIOD != 0
        :: has_period = true
#endif
#if PERIOD != 1
        :: true
#endif
        fi;
        /* the first job has taken the key */
        born = 1;
        row_job = 0;
        if
        :: mask[0] = DEFAULT_MASK
        :: mask[0] = AVAILABLE | COMPLETED
        :: mask[0] = SCHEDULED | RETRYABLE | FAILED
        fi;
        row_mask = mask[0];
        if
        :: mask[0] & AVAILABLE -> state[0] = AVAILABLE
        :: mask[0] & SCHEDULED -> state[0] = SCHEDULED
        :: state[0] = RUNNING
        :: state[0] = COMPLETED; keeps[0] = ((mask[0] & COMPLETED) != 0)
        :: mask[0] & FAILED ->
            state[0] = FAILED;
            keeps[0] = true;
            row_ended = FAILED;
            row_expires = 1
        fi;
        do
        :: n <= SESSIONS -> run session(n); n++
        :: else -> break
        od
    }
}
