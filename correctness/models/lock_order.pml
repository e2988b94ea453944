/*
 * The locks of every call, in the order in which it takes them, and no deadlock among calls.
 *
 * What is modelled. Each branch `op == NAME` of a session is the list of locks that one call takes, in order:
 *     W(lock, mode)    waits without bound
 *     TM(lock, mode)   waits for a bounded time (lock_timeout)
 *     T(lock, mode)    by try, NOWAIT or SKIP LOCKED
 *     N(lock, mode)    takes what nobody ever waits for: the others try it too, or have it in modes that do not conflict
 *     SEE(lock)        waits until nobody else has it, and takes nothing: a duplicate key, a row that is gone then
 * and got[me] says whether the last one was had. A call keeps its locks until it ends, then it commits. Every pair of
 * calls is played, in every order of their steps and with every choice. tests/python/test_lock_order.py reads the lists
 * out of this file and compares them with the locks that the calls take on a server.
 *
 * Locks: advisory ones by class (X exclusive, S shared); rows, X when changed, deleted, locked, or inserted under a
 * unique key; slots and tables by mode (AS access share, RE row exclusive, S share, E exclusive, AE access exclusive),
 * a slot as a whole, since prune takes its leaves all at once or not at all. Each of two jobs has a lane, a queue and
 * a unique key of its own; key 0 sorts before key 1. POSITION_1 is where a job waited first, and its id, POSITION_2
 * where it waits after a retry; both jobs ran in BATCH_1, and after that in BATCH_2. QUEUE_SLOT is the current slot,
 * OLD_SLOT one that prune empties. Left out: parents of partitions, doorbells and other sequences, which are never
 * locked in conflicting modes; and verify(), which is for a database without workers.
 *
 * invariant NO_DEADLOCK: every call comes to its end.
 *
 * check: -m10000 -DCOLLAPSE
 *
 * mutant FIFO_UNSORTED: insert_jobs takes strict_fifo lanes in the order of its jobs; refuted by NO_DEADLOCK
 * mutant KEYS_UNSORTED: an insert takes unique keys in the order of its jobs; refuted by NO_DEADLOCK
 * mutant KEYS_FIRST: an insert takes its unique keys before its strict_fifo lanes; refuted by NO_DEADLOCK
 * mutant FINISH_WAITS: finish_jobs waits for batches, in the order of its items; refuted by NO_DEADLOCK
 * mutant CLAIM_WAITS: a claim that holds a lane waits for another one; refuted by NO_DEADLOCK
 * mutant CANCEL_LOCKS_CLAIMED: a cancel that has locked a job where it waits finds it left, and locks the position
 *     where it ran before; refuted by NO_DEADLOCK
 * mutant PRUNE_WAITS: prune has EXCLUSIVE and waits for ACCESS EXCLUSIVE; refuted by NO_DEADLOCK
 * mutant RETRY_KEY_FIRST: retry and update take the unique key before they lock the job; refuted by NO_DEADLOCK
 * mutant TWO_CALLS: no error of the engine, and what 40P01 is for: one transaction cancels two jobs, another one the same
 *     in the opposite order; refuted by NO_DEADLOCK
 */

#define CALLS 2

/* modes, as bits */
#define AS 1
#define RE 2
#define S 4
#define E 8
#define AE 16
#define X 16

/* locks; + job where each job has one */
#define FIFO 0
#define LANE 2
#define MUTATION 4
#define POSITION_1 6
#define POSITION_2 8
#define KEY 10
#define DEFERRED 12
#define LETTER 14
#define COPY 16
#define BATCH_1 18
#define BATCH_2 19
#define INSTANCE 20
#define INSTANCE_ROW 21
#define META 22
#define RING 23
#define CLAIM_RING 24
#define NEW_LANE 25
#define QUEUE_SLOT 26
#define OLD_SLOT 27
#define CLAIM_SLOT 28
#define DEFERRED_SLOT 29
#define LEASES 30
#define PROGRESS 31
#define LANE_SEQUENCE 32
#define LOCKS 33
#define FREE 255

/* calls */
#define INSERT_JOBS 1
#define INSERT_UNIQUE 2
#define COMPLETE_JOB 3
#define CANCEL 4
#define RETRY 5
#define UPDATE 6
#define RETRY_DLQ 7
#define PURGE_DLQ 8
#define DRAIN 9
#define SET_PROGRESS 10
#define INSERT 11
#define CLAIM 12
#define FINISH 13
#define HEARTBEAT 14
#define REGISTER 15
#define DECLARE 16
#define RESCUE 17
#define PROMOTE 18
#define REFILL 19
#define EXPIRE 20
#define UNIQUE_KEYS 21
#define INSTANCES 22
#define EVACUATE 23
#define PRUNE_QUEUE 24
#define PRUNE_CLAIM 25
#define PRUNE_DEFERRED 26
#define PRUNE_ATTEMPTS 27
#define ROTATE 28
#define LAST_CALL ROTATE

byte held[LOCKS * CALLS]; /* modes that a call has */
bool got[CALLS];

#define HAS held[lock * CALLS + me]
#define IS_FREE (!(held[lock * CALLS + 1 - me] & conflicts))

/* ---- the lock manager, one for each session: a session asks, and can ask again when it has got what it asked for */
#define WAIT 0
#define TRY 1
#define LOOK 2
#define END_OF_CALL 3

chan ask[CALLS] = [0] of { byte, byte, byte };

proctype manager(byte me) {
    byte kind, lock, mode, conflicts;
end:
    do
    :: atomic {
           ask[me] ? kind, lock, mode;
           if
           :: mode == AS -> conflicts = AE
           :: mode == RE -> conflicts = S | E | AE
           :: mode == S -> conflicts = RE | E | AE
           :: mode == E -> conflicts = RE | S | E | AE
           :: mode == AE -> conflicts = AS | RE | S | E | AE
           :: else
           fi;
           if
           :: kind == WAIT -> IS_FREE; HAS = HAS | mode; got[me] = true
           :: kind == TRY && IS_FREE -> HAS = HAS | mode; got[me] = true
           :: kind == TRY && !IS_FREE -> got[me] = false
           :: kind == LOOK -> IS_FREE
           :: kind == END_OF_CALL ->
               lock = 0;
               do
               :: lock < LOCKS -> HAS = 0; lock++
               :: else -> break
               od
           fi;
           kind = 0;
           lock = 0;
           mode = 0;
           conflicts = 0
       }
    od
}

#define W(name, how) ask[me] ! WAIT, name, how
#define SEE(name) ask[me] ! LOOK, name, X
#define T(name, how) ask[me] ! TRY, name, how
/* A bounded wait can be given up at any moment, so it comes to the same as a try. */
#define TM(name, how) ask[me] ! TRY, name, how
/* Nobody waits for it, so it does not matter who has it: the lists say it for the test. */
#define N(name, how) true

/* a step of tick that fails gives its locks back */
#define STEP_OR_END if :: got[me] :: else -> goto end_of_call fi

/* _place_job: to a lane by try, else deferred; then its key */
inline place() {
    N(NEW_LANE, X);
    T(FIFO + j, X);
    if
    :: got[me] -> N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE)
    :: W(DEFERRED_SLOT, RE)
    fi;
#ifndef RETRY_KEY_FIRST
    W(KEY + j, X)
#else
    skip
#endif
}

/* _lock_ready: a job that has moved on before it was locked is locked where it waits now */
inline lock_ready() {
    if
    :: W(MUTATION + j, S); W(POSITION_1 + j, X)
    :: skip
    fi;
    if
    :: W(MUTATION + j, S); W(POSITION_2 + j, X)
    :: skip
    fi
}

/* on_conflict: replace */
inline replace() {
    SEE(KEY + j);
    if
    :: W(DEFERRED + j, X)
    :: SEE(DEFERRED + j);
        if
        :: W(MUTATION + j, S); W(POSITION_1 + j, X); W(DEFERRED + j, X)
        :: lock_ready(); W(OLD_SLOT, RE); T(FIFO + j, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE)
        fi
    :: skip
    fi
}

/* a row of history, and the end of the key */
inline append_done() {
    W(OLD_SLOT, RE);
    N(QUEUE_SLOT, RE);
    T(KEY + j, X)
}

/* _keep_key, _move_attempt */
inline move_attempt() {
    if
    :: TM(KEY + j, X)
    :: T(KEY + j, X)
    fi;
    if
    :: W(DEFERRED_SLOT, RE)
    :: T(FIFO + j, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE)
    :: W(OLD_SLOT, RE)
    :: N(QUEUE_SLOT, RE)
    fi
}

proctype session(byte me; byte op) {
    byte j, round;

    if
    :: j = 0
    :: j = 1
    fi;
    if
    :: op == INSERT ->
        if
        :: N(NEW_LANE, X)
        :: skip
        fi;
        if
        :: W(FIFO + j, X)
        :: skip
        fi;
        if
        :: N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE)
        :: W(DEFERRED_SLOT, RE)
        fi

    :: op == INSERT_JOBS ->
        N(NEW_LANE, X);
#ifdef FIFO_UNSORTED
        W(FIFO + j, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE);
        W(FIFO + 1 - j, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE);
#else
        W(FIFO, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE);
        W(FIFO + 1, X); N(LANE_SEQUENCE, RE); N(QUEUE_SLOT, RE);
#endif
        W(DEFERRED_SLOT, RE)

    :: op == INSERT_UNIQUE ->
        /* two keys, each taken or a duplicate */
        round = j;
        N(NEW_LANE, X);
#ifndef KEYS_FIRST
        if
        :: W(FIFO, X); W(FIFO + 1, X)
        :: true
        fi;
        N(LANE_SEQUENCE, RE);
#endif
#ifndef KEYS_UNSORTED
        round = 0;
#endif
        j = round;
        if
        :: W(KEY + j, X)
        :: replace()
        fi;
        j = 1 - j;
        if
        :: W(KEY + j, X)
        :: replace()
        fi;
#ifdef KEYS_FIRST
        W(FIFO, X); W(FIFO + 1, X); N(LANE_SEQUENCE, RE);
#endif
        N(QUEUE_SLOT, RE);
        W(DEFERRED_SLOT, RE)

    :: op == CLAIM ->
        /* lanes in any order, each by try; one that has none waits 50 ms for a lane */
        T(LANE + j, X);
        if
        :: got[me] -> round = 1
        :: else
        fi;
        if
        :: round == 1 ->
            T(MUTATION + j, X);
            N(QUEUE_SLOT, RE); W(OLD_SLOT, AS);
            if
            :: got[me]
            :: T(POSITION_1 + j, X)
            fi;
            W(CLAIM_SLOT, RE)
        :: else
        fi;
        j = 1 - j;
#ifdef CLAIM_WAITS
        W(LANE + j, X);
#else
        T(LANE + j, X);
#endif
        if
        :: got[me] -> round = 1; T(MUTATION + j, X); N(QUEUE_SLOT, RE); W(OLD_SLOT, AS); W(CLAIM_SLOT, RE)
        :: else
        fi;
        if
        :: round == 0 -> TM(LANE + j, X)
        :: else
        fi;
        T(INSTANCE, X);
        if
        :: got[me] -> W(INSTANCE_ROW, X)
        :: else
        fi

    :: op == FINISH ->
        /* complete_jobs: one batch; finish_jobs: ascending */
#ifdef FINISH_WAITS
        if
        :: W(BATCH_1, X); W(CLAIM_SLOT, RE); W(BATCH_2, X)
        :: W(BATCH_2, X); W(CLAIM_SLOT, RE); W(BATCH_1, X)
        fi;
#endif
        T(BATCH_1, X);
        if
        :: got[me] -> W(CLAIM_SLOT, RE); W(PROGRESS, X); move_attempt()
        :: got[me] -> W(LEASES, RE); move_attempt()
        :: !got[me]
        fi;
        T(BATCH_2, X);
        if
        :: got[me] -> W(CLAIM_SLOT, RE); W(PROGRESS, X); move_attempt()
        :: got[me] -> W(LEASES, RE); move_attempt()
        :: !got[me]
        fi

    :: op == COMPLETE_JOB ->
        if
        :: W(BATCH_1, X)
        :: W(BATCH_2, X)
        fi;
        if
        :: W(CLAIM_SLOT, RE)
        :: W(LEASES, RE)
        fi;
        W(PROGRESS, X);
        append_done()

    :: op == CANCEL ->
        /* rounds: a job may have moved on between look and lock; what was locked stays so. A job goes forward in time:
           position, batch, deferred, the next position, the next batch. */
        if
        :: W(MUTATION + j, S); W(POSITION_1 + j, X); if :: append_done(); goto end_of_cancel :: skip fi
        :: skip
        fi;
        if
        :: W(BATCH_1, X);
            if
            :: W(CLAIM_SLOT, RE); W(PROGRESS, X); append_done(); goto end_of_cancel
            :: W(LEASES, RE); append_done(); goto end_of_cancel
            :: skip
            fi
        :: skip
        fi;
        if
        :: W(DEFERRED + j, X); W(DEFERRED_SLOT, RE); append_done(); goto end_of_cancel
        :: SEE(DEFERRED + j)
        fi;
        if
        :: W(MUTATION + j, S); W(POSITION_2 + j, X)
        :: skip
        fi;
#ifdef CANCEL_LOCKS_CLAIMED
        if
        :: W(POSITION_1 + j, X)
        :: skip
        fi;
#endif
        if
        :: append_done(); goto end_of_cancel
        :: skip
        fi;
        if
        :: W(BATCH_2, X); W(CLAIM_SLOT, RE); W(PROGRESS, X); append_done()
        :: skip
        fi;
end_of_cancel: skip
#ifdef TWO_CALLS
        ;
        j = 1 - j;
        W(MUTATION + j, S);
        W(POSITION_1 + j, X);
        append_done()
#endif

    :: op == RETRY ->
#ifdef RETRY_KEY_FIRST
        W(KEY + j, X);
#endif
        if
        :: W(DEFERRED + j, X); W(DEFERRED_SLOT, RE)
        :: SEE(DEFERRED + j); W(LETTER + j, X)
        :: W(LETTER + j, X)
        :: SEE(LETTER + j); W(POSITION_1 + j, X);
            if
            :: W(COPY + j, X); N(QUEUE_SLOT, RE)
            :: W(OLD_SLOT, AS); W(OLD_SLOT, RE); W(COPY + j, X)
            :: SEE(COPY + j); W(DEFERRED + j, X); W(DEFERRED_SLOT, RE)
            :: SEE(COPY + j); W(LETTER + j, X)
            fi
        fi;
        place()

    :: op == RETRY_DLQ ->
        W(LETTER + j, X);
        place()

    :: op == PURGE_DLQ ->
        W(LETTER + j, X);
        W(KEY + j, X)

    :: op == UPDATE ->
#ifdef RETRY_KEY_FIRST
        W(KEY + j, X);
#endif
        if
        :: W(DEFERRED + j, X); W(DEFERRED_SLOT, RE)
        :: SEE(DEFERRED + j); lock_ready(); W(OLD_SLOT, RE)
        :: W(MUTATION + j, S); W(POSITION_1 + j, X); W(DEFERRED + j, X); W(DEFERRED_SLOT, RE)
        fi;
        place()

    :: op == DRAIN ->
        do
        :: round < 2 ->
            T(LANE + j, X);
            if
            :: got[me] ->
                T(MUTATION + j, X);
                if
                :: got[me] -> append_done()
                :: else
                fi
            :: else
            fi;
            j = 1 - j;
            round++
        :: else -> break
        od;
        T(DEFERRED + j, X);
        if
        :: got[me] -> W(DEFERRED_SLOT, RE); append_done()
        :: else
        fi;
        W(META, X)

    :: op == SET_PROGRESS ->
        W(BATCH_1, S);
        W(PROGRESS, X)

    :: op == HEARTBEAT ->
        if
        :: W(INSTANCE_ROW, X)
        :: SEE(INSTANCE_ROW); W(INSTANCE, X); W(INSTANCE_ROW, X)
        fi

    :: op == REGISTER ->
        W(INSTANCE, X);
        W(INSTANCE_ROW, X)

    :: op == DECLARE ->
        W(META, X);
        N(NEW_LANE, X)

    /* ---- steps of tick: a wait that takes 100 ms fails the step */
    :: op == RESCUE ->
        T(INSTANCE_ROW, X);
        T(BATCH_1, X);
        if
        :: got[me] -> TM(CLAIM_SLOT, RE); STEP_OR_END; TM(PROGRESS, X); STEP_OR_END; TM(KEY + j, X);
            TM(DEFERRED_SLOT, RE); STEP_OR_END; TM(OLD_SLOT, RE); STEP_OR_END
        :: else
        fi;
        T(BATCH_2, X);
        if
        :: got[me] -> TM(LEASES, RE); STEP_OR_END; TM(KEY + 1 - j, X); TM(DEFERRED_SLOT, RE); STEP_OR_END;
            N(QUEUE_SLOT, RE)
        :: else
        fi

    :: op == PROMOTE ->
        T(DEFERRED + j, X);
        T(FIFO + j, X);
        T(DEFERRED + 1 - j, X);
        if
        :: got[me] -> TM(DEFERRED_SLOT, RE); STEP_OR_END; TM(KEY, X); TM(KEY + 1, X)
        :: skip
        fi;
        N(NEW_LANE, X);
        T(FIFO + 1 - j, X);
        N(LANE_SEQUENCE, RE);
        N(QUEUE_SLOT, RE)

    :: op == REFILL ->
        T(DEFERRED + j, X);
        TM(DEFERRED_SLOT, RE); STEP_OR_END

    :: op == EXPIRE ->
        T(LETTER + j, X);
        T(KEY + j, X);
        T(COPY + j, X);
        TM(LEASES, RE); STEP_OR_END

    :: op == UNIQUE_KEYS ->
        T(KEY + j, X);
        T(KEY + 1 - j, X)

    :: op == INSTANCES ->
        T(INSTANCE_ROW, X)

    :: op == EVACUATE ->
        do
        :: round < 2 ->
            T(LANE + j, X);
            if
            :: got[me] ->
                T(MUTATION + j, X);
                if
                :: got[me] -> N(QUEUE_SLOT, RE); TM(OLD_SLOT, RE); STEP_OR_END
                :: else
                fi
            :: else
            fi;
            j = 1 - j;
            round++
        :: else -> break
        od;
        T(BATCH_1, X);
        if
        :: got[me] -> TM(LEASES, RE); STEP_OR_END; TM(CLAIM_SLOT, RE); STEP_OR_END
        :: else
        fi;
        T(BATCH_2, X);
        if
        :: got[me] -> TM(LEASES, RE); STEP_OR_END; TM(CLAIM_SLOT, RE); STEP_OR_END
        :: else
        fi

    :: op == PRUNE_QUEUE ->
        N(RING, X);
        T(OLD_SLOT, E); STEP_OR_END;
        TM(CLAIM_SLOT, AS); STEP_OR_END;
        TM(COPY + j, X); STEP_OR_END;
        T(KEY + j, X);
#ifdef PRUNE_WAITS
        W(OLD_SLOT, AE)
#else
        T(OLD_SLOT, AE); STEP_OR_END
#endif

    :: op == PRUNE_CLAIM ->
        N(CLAIM_RING, X);
        T(CLAIM_SLOT, E); STEP_OR_END;
        T(CLAIM_SLOT, AE); STEP_OR_END

    :: op == PRUNE_DEFERRED ->
        T(DEFERRED_SLOT, S); STEP_OR_END;
        if
        :: T(DEFERRED_SLOT, AE); STEP_OR_END
        :: T(DEFERRED + j, X); TM(DEFERRED_SLOT, RE); STEP_OR_END
        fi

    :: op == PRUNE_ATTEMPTS ->
        T(LEASES, AE); STEP_OR_END

    :: op == ROTATE ->
        N(RING, X);
        N(CLAIM_RING, X)
    fi;
end_of_call:
    ask[me] ! END_OF_CALL, 0, 0;
    d_step { got[me] = false; j = 0; round = 0 }
}

init {
    byte first, second;
    atomic {
        /* the calls of clients first, where most mutants are */
        first = 1;
        do
        :: break
        :: first < LAST_CALL -> first++
        od;
        second = first;
        do
        :: break
        :: second < LAST_CALL -> second++
        od;
        run manager(0);
        run manager(1);
        run session(0, first);
        run session(1, second)
    }
}
