/*
 * Where a job lies: buckets of deferred jobs, slots of the queue ring, and what moves jobs between them or empties
 * them, against inserts that come late, with an old view of the ring, and against dumps.
 *
 * What is modelled. A job is a bit. Its rows become visible with the commit of the transaction that wrote them, and
 * every leaf has the locks that PostgreSQL gives it: writers, readers, SHARE, EXCLUSIVE, and TRUNCATE, which waits for
 * nobody and empties a leaf for every snapshot. Insert, promote and evacuate read the ring's cursor and write some time
 * later; the ring may have turned meanwhile, more than once. The bucket of a deferred job is any: no correctness
 * depends on it. Every tick's step may be rolled back. Claims are exact here (their ledger is in claim_ledger.pml): what
 * a committed transaction claimed is known to all, and a claim reads leaf after leaf. A running job has a receipt that
 * points to its body until it ends.
 * A dump takes its snapshot, and its locks within dump_lock_seconds, which is one tick of the clock; then it finds what
 * the snapshot shows, in leaves that nobody truncated in between. Time stands still unless a dump is modelled.
 *
 * Bounds: up to three jobs, three slots, three buckets of which the last is the far one, one process for each step.
 *
 * invariant ONE_PLACE: a committed job is in one bucket, or waits by one living row, or was claimed, or was cancelled:
 *     in one of these, never in two and never in none.
 * invariant ONE_LIVING_ROW: no two slots hold a living row of one job.
 * invariant RUNNING_HAS_ITS_BODY: the slot that a receipt points to holds the living body until the attempt ends.
 * invariant NO_WAITING_JOB_TRUNCATED: no slot is truncated while a job waits in it.
 * invariant NO_DEFERRED_JOB_TRUNCATED: no bucket is truncated while a job is in it.
 * invariant DUMP_MISSES_NOTHING: a dump finds every job that waited, ran or was deferred when it took its snapshot.
 * invariant NO_DEADLOCK: nobody waits for ever.
 *
 * check: -DINSERTS=1 -DWAITING=1 -DEVACUATE=1 -DCLAIM=1 -DGENERATIONS=3 -DUNDONE=1 -m100000 -DCOLLAPSE
 * check: -DINSERTS=1 -DWAITING=1 -DEVACUATE=1 -DCLAIM=1 -DCANCEL=1 -DGENERATIONS=2 -m100000 -DCOLLAPSE
 * check: -DDEFERS=2 -DBUCKETS=1 -DCANCEL=1 -DUNDONE=1 -m100000 -DCOLLAPSE
 * check: -DDEFERS=1 -DWAITING=1 -DBUCKETS=1 -DCLAIM=1 -DGENERATIONS=3 -m100000 -DCOLLAPSE
 * check: -DDEFERS=1 -DBUCKETS=1 -DCANCEL=1 -DDUMP=1 -m100000 -DCOLLAPSE
 * check: -DINSERTS=1 -DWAITING=1 -DEVACUATE=1 -DCLAIM=1 -DGENERATIONS=1 -DDUMP=1 -m100000 -DCOLLAPSE
 * short: -DWAITING=1 -DEVACUATE=1 -DCLAIM=1 -DCANCEL=1 -DGENERATIONS=3 -DUNDONE=1 -m100000
 * short: -DINSERTS=1 -DCLAIM=1 -DGENERATIONS=2 -DUNDONE=1 -m100000
 * short: -DDEFERS=1 -DBUCKETS=1 -DCANCEL=1 -DUNDONE=1 -m100000
 * short: -DDEFERS=1 -DBUCKETS=1 -DDUMP=1 -m100000
 * short: -DINSERTS=1 -DWAITING=1 -DEVACUATE=1 -DGENERATIONS=1 -DDUMP=1 -m100000
 *
 * mutant EVACUATE_WITHOUT_LOCKS: evacuation takes neither the lane's nor the mutation lock; refuted by RUNNING_HAS_ITS_BODY
 * mutant EVACUATE_WITHOUT_TOMBSTONE: evacuation leaves the old row alive; refuted by ONE_LIVING_ROW
 * mutant EVACUATE_IN_TWO_STEPS: the old row dies in a transaction before that of the copy; refuted by ONE_PLACE
 * mutant CANCEL_LOOKS_ONCE: a cancel of a waiting job does not look again under its locks; refuted by ONE_PLACE
 * mutant PRUNE_WITHOUT_RECHECK: prune trusts the look before its lock; refuted by NO_WAITING_JOB_TRUNCATED
 * mutant PRUNE_IGNORES_RECEIPTS: prune does not ask for running jobs of the slot; refuted by RUNNING_HAS_ITS_BODY
 * mutant PROMOTE_WITHOUT_LOCK: promotion does not lock the rows that it reads; refuted by ONE_PLACE
 * mutant PROMOTE_IN_TWO_STEPS: promotion deletes in a transaction of its own; refuted by ONE_PLACE
 * mutant MOVE_LEAVES_OLD_ROW: a move between buckets does not delete; refuted by ONE_PLACE
 * mutant TAKE_TRUSTS_THE_LOOK: a cancel takes the deferred job that it saw before the lock; refuted by ONE_PLACE
 * mutant BUCKET_WITHOUT_RECHECK: prune of a bucket does not look again; refuted by NO_DEFERRED_JOB_TRUNCATED
 * mutant BUCKET_LETS_WRITERS_IN: prune of a bucket does not keep writers out; refuted by NO_DEFERRED_JOB_TRUNCATED
 * mutant BUCKET_WITHOUT_PAUSE: a bucket is emptied as soon as it is empty; refuted by DUMP_MISSES_NOTHING
 * mutant TAKE_NOT_NOTED: who takes a job out of a bucket does not note it; refuted by DUMP_MISSES_NOTHING
 * mutant TAKE_IDLES: who has noted it idles before the commit; refuted by DUMP_MISSES_NOTHING
 * mutant SLOT_WITHOUT_PAUSE: a slot is emptied as soon as nothing waits there; refuted by DUMP_MISSES_NOTHING
 * mutant MOVE_NOT_NOTED: evacuation does not take the release of a slot back; refuted by DUMP_MISSES_NOTHING
 */
#include "invariant.inc"

#ifndef INSERTS /* so many producers insert a job that may run at once */
#define INSERTS 0
#endif
#ifndef DEFERS /* so many producers insert a job for later */
#define DEFERS 0
#endif
#ifndef WAITING /* so many jobs wait in slot 0 at the start */
#define WAITING 0
#endif
#ifndef GENERATIONS /* the ring turns so often */
#define GENERATIONS 0
#endif
#ifndef UNDONE /* so many transactions are rolled back */
#define UNDONE 0
#endif
#ifndef BUCKETS /* whether jobs are promoted and moved, and buckets emptied */
#define BUCKETS 0
#endif
#ifndef EVACUATE
#define EVACUATE 0
#endif
#ifndef CLAIM
#define CLAIM 0
#endif
#ifndef CANCEL /* whether the first job is cancelled */
#define CANCEL 0
#endif
#ifndef DUMP
#define DUMP 0
#endif
#ifndef TICKS /* of the clock, for dumps */
#define TICKS 3
#endif
#define SLOTS 3
#define BINS 3 /* of deferred jobs; the last is the far one, which promotion does not read */
#define JOBS (WAITING + INSERTS + DEFERS)
#define NOBODY 255
#define NEVER 255

#define BIT(n) (1 << (n))

hidden byte ONE_PLACE, ONE_LIVING_ROW, RUNNING_HAS_ITS_BODY, NO_WAITING_JOB_TRUNCATED, NO_DEFERRED_JOB_TRUNCATED,
    DUMP_MISSES_NOTHING;

/* Slots: rows and tombstones, locks, whether the leaves hold blocks. */
byte rows[SLOTS], tombs[SLOTS], writers[SLOTS], readers[SLOTS];
bool shut[SLOTS], used[SLOTS];
byte ring_generation, ring_slot, ledger, slot_generation[SLOTS];

/* Buckets: rows, locks (FOR UPDATE is taken in all buckets that are read), whether the leaf holds blocks. */
byte bin[BINS], bin_writers[BINS], bin_sharers[BINS];
bool bin_shut[BINS], bin_used[BINS];
byte locked_rows;

/* The lane. */
byte lane_owner = NOBODY, mutation_owner = NOBODY, mutation_shares, locked_positions;

/* What happened to the jobs. */
byte jobs, claimed, ended, cancelled;
byte body_slot[3];
byte undone = UNDONE;

/* Dumps: when a slot was released, whether an attempt ended there since, when a job was taken out of a bucket. */
byte now = 2, released[SLOTS], taken_at[BINS], takers;
bool ended_since[SLOTS];
bool dumps, dump_has_locks;
byte dump_at, dump_wants, dump_rows, dump_found_rows[SLOTS], dump_found_bins[BINS];

#define ALIVE(s) (rows[s] & ~tombs[s])
#define UNCLAIMED (255 & ~claimed)

/* ONE_PLACE and the others, at every commit. */
inline check_jobs() {
    d_step {
        k = 0;
        do
        :: k == JOBS -> break
        :: k < JOBS && (jobs & BIT(k)) == 0 -> k++
        :: else ->
            places = ((claimed >> k) & 1) + ((cancelled >> k) & 1) + ((bin[0] >> k) & 1) + ((bin[1] >> k) & 1) +
                ((bin[2] >> k) & 1);
            living = ((ALIVE(0) >> k) & 1) + ((ALIVE(1) >> k) & 1) + ((ALIVE(2) >> k) & 1);
            INVARIANT(ONE_LIVING_ROW, living <= 1);
            INVARIANT(ONE_PLACE, places + ((claimed & BIT(k)) != 0 -> 0 : living) == 1);
            INVARIANT(RUNNING_HAS_ITS_BODY, (claimed & ~ended & BIT(k)) == 0 || (ALIVE(body_slot[k]) & BIT(k)) != 0);
            k++
        od;
        k = 0;
        places = 0;
        living = 0
    }
}

inline lock_leaf(s) {
    if
    :: (own_slots & BIT(s)) == 0 -> own_slots = own_slots | BIT(s); writers[s]++
    :: else
    fi;
    used[s] = true
}

inline read_leaf(s) {
    if
    :: (reading & BIT(s)) == 0 -> reading = reading | BIT(s); readers[s]++
    :: else
    fi
}

inline unlock_leaves() {
    writers[0] = writers[0] - (own_slots & 1);
    writers[1] = writers[1] - ((own_slots >> 1) & 1);
    writers[2] = writers[2] - ((own_slots >> 2) & 1);
    own_slots = 0
}

inline leave_leaves() {
    readers[0] = readers[0] - (reading & 1);
    readers[1] = readers[1] - ((reading >> 1) & 1);
    readers[2] = readers[2] - ((reading >> 2) & 1);
    reading = 0
}

/* _note_taken, before the commit. */
inline note_taken(b) {
#ifndef TAKE_NOT_NOTED
    taken_at[b] = now;
#endif
    takers++
}

#if INSERTS > 0
/* _append_ready_one */
proctype inserter(byte job) {
    byte slot, own_slots, k, places, living;

    slot = ring_slot;
    atomic { !shut[slot] -> lock_leaf(slot) }
    atomic {
        if
        :: undone > 0 -> undone--
        :: true -> rows[slot] = rows[slot] | BIT(job); jobs = jobs | BIT(job)
        fi;
        unlock_leaves();
        slot = 0;
        check_jobs()
    }
}
#endif

#if BUCKETS
/* _defer: the bucket is that of the time when the insert began. */
proctype deferrer(byte job) {
    byte b, k, places, living;

    if
    :: b = 0
    :: b = 1
    :: b = 2
    fi;
    atomic { !bin_shut[b] -> bin_writers[b]++; bin_used[b] = true }
    atomic {
        if
        :: undone > 0 -> undone--
        :: true -> bin[b] = bin[b] | BIT(job); jobs = jobs | BIT(job)
        fi;
        bin_writers[b]--;
        check_jobs()
    }
}

/* _promote_due, _promote, _append_ready and _delete_deferred, of one bucket at a time. */
proctype promoter() {
    byte b, taken, slot, own_slots, k, places, living;

end:
    do
    :: atomic {
            if
            :: (bin[0] & ~locked_rows) != 0 -> b = 0
            :: (bin[1] & ~locked_rows) != 0 -> b = 1
            fi;
            taken = bin[b] & ~locked_rows;
#ifndef PROMOTE_WITHOUT_LOCK
            locked_rows = locked_rows | taken;
#endif
            bin_sharers[0]++;
            bin_sharers[1]++
        }
        slot = ring_slot;
        atomic { !shut[slot] -> lock_leaf(slot) }
#ifdef PROMOTE_IN_TWO_STEPS
        atomic { rows[slot] = rows[slot] | taken; check_jobs() }
#endif
        atomic { !bin_shut[b] -> bin_writers[b]++; note_taken(b) }
        atomic {
            if
            :: undone > 0 -> undone--
            :: true ->
                bin[b] = bin[b] & ~taken;
                rows[slot] = rows[slot] | taken
            fi;
            bin_writers[b]--;
            bin_sharers[0]--;
            bin_sharers[1]--;
            takers--;
            locked_rows = locked_rows & ~taken;
            unlock_leaves();
            taken = 0;
            b = 0;
            slot = 0;
            check_jobs()
        }
    od
}

/* _move_deferred, for _refill_buckets from the far leaf, and for _move_stragglers from a bucket that must go. */
proctype mover() {
    byte from, to, taken, k, places, living;

end:
    do
    :: atomic {
            if
            :: (bin[2] & ~locked_rows) != 0 -> from = 2
            :: (bin[0] & ~locked_rows) != 0 -> from = 0
            fi;
            if
            :: from == 2 -> to = 0
            :: true -> to = 1
            fi;
            !bin_shut[from] && !bin_shut[to] ->
            taken = bin[from] & ~locked_rows;
            locked_rows = locked_rows | taken;
            bin_writers[from]++;
            bin_writers[to]++;
            bin_used[to] = true;
            note_taken(from)
        }
        atomic {
            if
            :: undone > 0 -> undone--
            :: true ->
#ifndef MOVE_LEAVES_OLD_ROW
                bin[from] = bin[from] & ~taken;
#endif
                bin[to] = bin[to] | taken
            fi;
            bin_writers[from]--;
            bin_writers[to]--;
            takers--;
            locked_rows = locked_rows & ~taken;
            taken = 0;
            from = 0;
            to = 0;
            check_jobs()
        }
    od
}

inline is_calm(b, answer) {
#ifdef BUCKET_WITHOUT_PAUSE
    answer = true
#else
    answer = !dumps || now > taken_at[b] + 1
#endif
}

/* _prune_deferred and _prune_bucket. */
proctype bin_pruner() {
    byte b;
    bool calm;

end:
    do
    :: atomic {
            if
            :: bin_used[0] -> b = 0
            :: bin_used[1] -> b = 1
            :: bin_used[2] -> b = 2
            fi;
            is_calm(b, calm);
            if
            :: !calm || bin[b] != 0 -> goto kept
            :: else
            fi
        }
#ifndef BUCKET_LETS_WRITERS_IN
        atomic {
            if
            :: bin_writers[b] > 0 -> goto kept
            :: bin_writers[b] == 0 -> bin_shut[b] = true
            fi
        }
#endif
#ifndef BUCKET_WITHOUT_RECHECK
        atomic {
            is_calm(b, calm);
            if
            :: !calm || bin[b] != 0 -> goto kept
            :: else
            fi
        }
#endif
        atomic {
            if
            :: bin_writers[b] == 0 && bin_sharers[b] == 0 ->
                INVARIANT(NO_DEFERRED_JOB_TRUNCATED, bin[b] == 0);
                bin[b] = 0;
                bin_used[b] = false;
                dump_found_bins[b] = (dump_has_locks -> dump_found_bins[b] : 0)
            :: else
            fi
        }
kept:
        atomic { bin_shut[b] = false; calm = false; b = 0 }
    od
}
#endif

#if EVACUATE
/* _evacuate, _evacuate_lanes, _evacuate_lane and _move_ready. */
proctype evacuator() {
    byte s, target, taken, own_slots, reading, k, places, living;
    bool has_locks;

end:
    do
    :: atomic {
            if
            :: slot_generation[0] < ring_generation && (ALIVE(0) & UNCLAIMED) != 0 -> s = 0
            :: slot_generation[1] < ring_generation && (ALIVE(1) & UNCLAIMED) != 0 -> s = 1
            :: slot_generation[2] < ring_generation && (ALIVE(2) & UNCLAIMED) != 0 -> s = 2
            fi;
            read_leaf(s)
        }
#ifndef EVACUATE_WITHOUT_LOCKS
        atomic {
            if
            :: lane_owner == NOBODY && mutation_owner == NOBODY && mutation_shares == 0 ->
                lane_owner = _pid;
                mutation_owner = _pid;
                has_locks = true
            :: else -> goto over
            fi
        }
#endif
        target = ring_slot;
        taken = ALIVE(s) & UNCLAIMED;
        atomic { !shut[target] -> lock_leaf(target) }
        atomic {
            !shut[s] ->
            lock_leaf(s);
#ifndef MOVE_NOT_NOTED
            released[s] = NEVER
#endif
        }
#ifdef EVACUATE_IN_TWO_STEPS
        atomic { tombs[s] = tombs[s] | taken; check_jobs() }
#endif
        atomic {
            if
            :: undone > 0 -> undone--
            :: true ->
                rows[target] = rows[target] | taken;
#ifndef EVACUATE_WITHOUT_TOMBSTONE
                tombs[s] = tombs[s] | taken
#endif
            fi;
            check_jobs()
        }
over:
        atomic {
            unlock_leaves();
            leave_leaves();
            if
            :: has_locks -> lane_owner = NOBODY; mutation_owner = NOBODY; has_locks = false
            :: else
            fi;
            s = 0;
            target = 0;
            taken = 0
        }
    od
}
#endif

#if CLAIM
/* The lowest of what was seen that can be had: _take_unlocked, with the lock and the tombstone of its leaf. */
inline take(s, set) {
    j = 0;
    do
    :: j == JOBS || taken != 0 -> break
    :: else ->
        if
        :: (set & BIT(j)) != 0 && (alone || ((locked_positions | tombs[s]) & BIT(j)) == 0) ->
            taken = BIT(j);
            leaf = s;
            job = j
        :: else
        fi;
        j++
    od;
    j = 0
}

/* _claim_lane, one job at a time, and the end of its attempt. */
proctype claimer() {
    byte seen0, seen1, seen2, taken, leaf, job, j, reading, k, places, living;
    bool alone;

end:
    do
    :: atomic {
            lane_owner == NOBODY ->
            lane_owner = _pid;
            if
            :: mutation_shares == 0 && mutation_owner == NOBODY -> mutation_owner = _pid; alone = true
            :: else
            fi
        }
        d_step { read_leaf(0); seen0 = ALIVE(0) & UNCLAIMED }
        d_step { read_leaf(1); seen1 = ALIVE(1) & UNCLAIMED }
        d_step { read_leaf(2); seen2 = ALIVE(2) & UNCLAIMED }
        d_step {
            take(0, seen0);
            take(1, seen1);
            take(2, seen2);
            locked_positions = locked_positions | taken;
            seen0 = 0;
            seen1 = 0;
            seen2 = 0
        }
        d_step {
            if
            :: taken != 0 -> claimed = claimed | taken; body_slot[job] = leaf
            :: else
            fi;
            locked_positions = locked_positions & ~taken;
            lane_owner = NOBODY;
            if
            :: alone -> mutation_owner = NOBODY; alone = false
            :: else
            fi;
            leave_leaves();
            leaf = 0;
            check_jobs()
        }
        if
        :: taken == 0
        :: taken != 0 ->
            /* _finish: the receipt is closed. */
            d_step {
                ended_since[body_slot[job]] = true;
                ended = ended | taken;
                body_slot[job] = 0;
                job = 0;
                taken = 0
            }
        fi
    od
}
#endif

#if CANCEL
inline find_living(n) {
    d_step {
        s = NOBODY;
        if
        :: (ALIVE(0) & BIT(n)) != 0 -> s = 0
        :: (ALIVE(1) & BIT(n)) != 0 -> s = 1
        :: (ALIVE(2) & BIT(n)) != 0 -> s = 2
        :: else
        fi
    }
}
/* _cancel_job: _take_deferred, then _lock_ready, round after round while the job is on its way. */
proctype canceller(byte job) {
    byte b, s, own_slots, k, places, living;
    bool found;

end:
    (jobs & BIT(job)) != 0 ->
again:
    /* _find_deferred */
    atomic {
        b = NOBODY;
        if
        :: (bin[0] & BIT(job)) != 0 -> b = 0
        :: (bin[1] & BIT(job)) != 0 -> b = 1
        :: (bin[2] & BIT(job)) != 0 -> b = 2
        :: else
        fi
    }
    if
    :: b != NOBODY ->
        /* _take_from_slot: DELETE waits for the row's lock, and finds what is there then. */
#ifdef TAKE_TRUSTS_THE_LOOK
        atomic { !bin_shut[b] -> found = true; bin_writers[b]++; note_taken(b) }
#else
        atomic {
            !bin_shut[b] && (locked_rows & BIT(job)) == 0 ->
            found = (bin[b] & BIT(job)) != 0;
            if
            :: found -> locked_rows = locked_rows | BIT(job)
            :: else
            fi;
            bin_writers[b]++;
            note_taken(b)
        }
#endif
        atomic {
            if
            :: found && undone > 0 -> undone--
            :: found ->
                bin[b] = bin[b] & ~BIT(job);
                cancelled = cancelled | BIT(job)
            :: !found
            fi;
#ifndef TAKE_TRUSTS_THE_LOOK
            if
            :: found -> locked_rows = locked_rows & ~BIT(job)
            :: else
            fi;
#endif
            bin_writers[b]--;
            takers--;
            check_jobs();
            b = 0;
            if
            :: found -> found = false; goto done
            :: else
            fi
        }
    :: else
    fi;
    b = 0;
    /* _lock_ready: look, lock, look again. */
    find_living(job);
    if
    :: s == NOBODY && (claimed & BIT(job)) == 0 -> s = 0; goto again
    :: s == NOBODY && (claimed & BIT(job)) != 0 -> goto done
    :: s != NOBODY
    fi;
    atomic { mutation_owner == NOBODY -> mutation_shares++ }
    atomic { (locked_positions & BIT(job)) == 0 -> locked_positions = locked_positions | BIT(job) }
#ifdef CANCEL_LOOKS_ONCE
    found = true;
#else
    find_living(job);
    found = s != NOBODY && (claimed & BIT(job)) == 0;
#endif
    if
    :: found ->
        /* _append_tombstone */
        atomic { !shut[s] -> lock_leaf(s); released[s] = NEVER }
        atomic {
            if
            :: undone > 0 -> undone--
            :: true -> tombs[s] = tombs[s] | BIT(job); cancelled = cancelled | BIT(job)
            fi
        }
    :: else
    fi;
    atomic {
        found = false;
        unlock_leaves();
        mutation_shares--;
        locked_positions = locked_positions & ~BIT(job);
        check_jobs()
    }
done:
    s = 0
}

#endif

#if GENERATIONS > 0
/* _slot_blocker */
inline look_for_use(s) {
    d_step {
        is_needed = (ALIVE(s) & UNCLAIMED) != 0;
#ifndef PRUNE_IGNORES_RECEIPTS
        k = 0;
        do
        :: k == JOBS -> break
        :: else ->
            is_needed = is_needed || ((claimed & ~ended & BIT(k)) != 0 && body_slot[k] == s);
            k++
        od;
        k = 0
#endif
    }
}

/* _plan_ring, _publish_ring and _prune_ring, which follow each other under the ring's lock. */
proctype ring() {
    byte s, k, places, living;
    bool is_needed;

end:
    do
    :: d_step {
            ledger == ring_generation && ring_generation < GENERATIONS && used[ring_slot] &&
                (!used[0] || !used[1] || !used[2]) ->
            s = (ring_slot + 1) % SLOTS;
            do
            :: used[s] -> s = (s + 1) % SLOTS
            :: else -> break
            od;
            ledger = ring_generation + 1;
            slot_generation[s] = ledger;
            s = 0
        }
    :: d_step {
            ledger > ring_generation ->
            ring_generation++;
            do
            :: slot_generation[s] != ring_generation -> s++
            :: else -> break
            od;
            ring_slot = s;
            s = 0
        }
    :: atomic {
            if
            :: used[0] && ring_slot != 0 && slot_generation[0] <= ring_generation -> s = 0
            :: used[1] && ring_slot != 1 && slot_generation[1] <= ring_generation -> s = 1
            :: used[2] && ring_slot != 2 && slot_generation[2] <= ring_generation -> s = 2
            fi;
            if
            :: dumps && released[s] != NEVER && now <= released[s] + 1 -> goto kept
            :: else
            fi;
            look_for_use(s);
            if
            :: is_needed -> released[s] = NEVER; goto kept
            :: else
            fi
        }
        atomic {
            if
            :: writers[s] > 0 -> goto kept
            :: writers[s] == 0 -> shut[s] = true
            fi;
#ifndef PRUNE_WITHOUT_RECHECK
            look_for_use(s);
#endif
            if
            :: is_needed -> goto kept
            :: else
            fi;
#ifndef SLOT_WITHOUT_PAUSE
            if
            :: dumps && (released[s] == NEVER || ended_since[s]) ->
                released[s] = now;
                ended_since[s] = false;
                goto kept
            :: else
            fi
#endif
        }
        atomic {
            if
            :: readers[s] == 0 ->
                INVARIANT(NO_WAITING_JOB_TRUNCATED, (ALIVE(s) & UNCLAIMED) == 0);
                rows[s] = 0;
                tombs[s] = 0;
                used[s] = false;
                released[s] = NEVER;
                ended_since[s] = false;
                dump_found_rows[s] = (dump_has_locks -> dump_found_rows[s] : 0);
                check_jobs()
            :: else
            fi
        }
kept:
        atomic { shut[s] = false; is_needed = false; s = 0 }
    od
}
#endif

#if DUMP
/* pg_dump: a snapshot, then the locks of all tables, then what the snapshot shows. */
proctype dump() {
    d_step {
        dump_at = now;
        dump_wants = jobs & ~ended & ~cancelled;
        dump_found_rows[0] = rows[0];
        dump_found_rows[1] = rows[1];
        dump_found_rows[2] = rows[2];
        dump_found_bins[0] = bin[0];
        dump_found_bins[1] = bin[1];
        dump_found_bins[2] = bin[2]
    }
    d_step {
        dump_has_locks = true;
        dump_rows = dump_found_rows[0] | dump_found_rows[1] | dump_found_rows[2];
        dump_rows = dump_rows | dump_found_bins[0] | dump_found_bins[1] | dump_found_bins[2];
        INVARIANT(DUMP_MISSES_NOTHING, (dump_wants & ~dump_rows) == 0);
        dump_rows = 0;
        dump_wants = 0;
        dump_at = 0
    }
}

/* A dump has its locks within a tick; who takes a job out of a bucket commits in the tick in which he notes it. */
proctype clock() {
end:
    do
    :: d_step {
#ifdef TAKE_IDLES
            now < 2 + TICKS && (dump_at == 0 || now == dump_at) ->
#else
            now < 2 + TICKS && (dump_at == 0 || now == dump_at) && takers == 0 ->
#endif
            now++
        }
    od
}
#endif

init {
    byte n;
    atomic {
        slot_generation[1] = NEVER;
        slot_generation[2] = NEVER;
        released[0] = NEVER;
        released[1] = NEVER;
        released[2] = NEVER;
        n = 0;
        do
        :: n == JOBS -> break
        :: n < WAITING -> rows[0] = rows[0] | BIT(n); jobs = jobs | BIT(n); used[0] = true; n++
#if INSERTS > 0
        :: n >= WAITING && n < WAITING + INSERTS -> run inserter(n); n++
#endif
#if BUCKETS
        :: n >= WAITING + INSERTS && n < JOBS -> run deferrer(n); n++
#endif
        od;
#if BUCKETS
        run promoter();
        run mover();
        run bin_pruner();
#endif
#if EVACUATE
        run evacuator();
#endif
#if CLAIM
        run claimer();
#endif
#if CANCEL
        run canceller(0);
#endif
#if GENERATIONS > 0
        run ring();
#endif
#if DUMP
        dumps = true;
        run dump();
        run clock();
#endif
        n = 0
    }
}
