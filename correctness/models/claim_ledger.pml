/*
 * Claims of one lane with the gap ledger, against producers that commit, abort, stall and roll back to savepoints,
 * against cancels, and against plan, publish and prune of the queue ring.
 *
 * What is modelled. A transaction id is a number from a counter; a snapshot's xmin is the oldest id that runs, or one
 * more than the newest that has ended. A producer takes its id, reads the ring, takes a position from the lane's
 * sequence (which nobody can take back), inserts, and ends; between any two steps it may stand still for ever or
 * longer than all others. What it inserted is visible from its commit on, and its locks go with it. A claim is the
 * sequence of statements of _claim_lane: tail, lane lock, ring, lock of the leaf, newest emission (a statement per
 * leaf), snapshot, the proof by locks, a read per leaf, and one emission row, which others see when it commits. A
 * claim may run in a transaction that has an id already, may be the second in its transaction, and may be rolled
 * back. Every read of one statement is one step and sees what is committed at that moment, as READ COMMITTED does.
 * Stalling needs no step of its own: every order of steps is searched.
 *
 * Bounds: one lane, at most 7 positions, one or two slots of the queue ring (a slot comes round again with two), the
 * smallest limit of a claim (1, so that claims are cut off as often as possible). Claims are not counted: claimers go
 * on for ever, and the ledger has finitely many states.
 *
 * invariant NO_LOST_JOB: a committed job that nobody has claimed or cancelled is beyond the cursor of the newest
 *     committed emission, or in its gaps, or held; so every later claim looks for it.
 * invariant AT_MOST_ONCE: no position is claimed by two transactions that commit.
 * invariant NO_CANCELLED_JOB_CLAIMED: no job is claimed and cancelled.
 * invariant NO_WAITING_JOB_TRUNCATED: a slot is truncated only when every living row in it is claimed by a committed
 *     transaction.
 * invariant NEWEST_EMISSION_FOUND: a claim that has the lane's lock starts from the newest committed emission,
 *     whatever rotation and prune do meanwhile.
 * invariant HINT_BEHIND_LEDGER: the hint does not lead the cursor of the newest committed emission.
 * invariant LEDGER_LEADS_CURSOR: the ring's cursor names a generation that is in the committed ledger of rotations.
 * invariant NO_STRANDED_JOB: when all producers and cancels have ended and a claim gets the lane, or passes it over
 *     for its hint, takes nothing, and changes nothing, then nothing waits.
 * invariant GAPS_END: when no transaction runs and no producer is left, a claim that changes nothing has no gap left.
 * invariant NO_DEADLOCK: nobody waits for ever: claimers and the ring can always go on, the others end.
 *
 * check: -DPRODUCERS=3 -DCLAIMERS=2 -DABORTS=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=3 -DCLAIMERS=1 -DSAVEPOINTS=1 -DABORTS=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -DCLAIMERS=2 -DEARLY=1 -DSECOND=1 -DUNDONE=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -DCLAIMERS=1 -DCANCELS=2 -DABORTS=1 -DUNDONE=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -DCLAIMERS=2 -DCANCELS=1 -DUNDONE=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -DCLAIMERS=1 -DSLOTS=2 -DGENERATIONS=3 -DABORTS=1 -m100000 -DCOLLAPSE
 * short: -DPRODUCERS=2 -DCLAIMERS=1 -DSAVEPOINTS=1 -DABORTS=1 -DEARLY=1 -m100000
 * short: -DPRODUCERS=1 -DCLAIMERS=2 -DSECOND=1 -DUNDONE=1 -m100000
 * short: -DPRODUCERS=2 -DCLAIMERS=1 -DCANCELS=1 -DUNDONE=1 -m100000
 * short: -DPRODUCERS=1 -DCLAIMERS=1 -DCANCELS=1 -DSLOTS=2 -DGENERATIONS=2 -DUNDONE=1 -m100000
 * mutants: -DPRODUCERS=1 -DCLAIMERS=2 -DSLOTS=2 -DGENERATIONS=1 -DUNDONE=1 -m100000
 * mutants: -DPRODUCERS=2 -DCLAIMERS=1 -DSLOTS=2 -DGENERATIONS=2 -m100000
 *
 * mutant ID_AFTER_POSITION: a producer takes its transaction id after its position; refuted by NO_LOST_JOB
 * mutant HORIZON_FROM_XMAX: the horizon is the xmax of the snapshot, not a new id; refuted by NO_LOST_JOB
 * mutant HORIZON_OF_AN_EARLIER_ID: the horizon is an id that the transaction had before it read; refuted by NO_LOST_JOB
 * mutant HORIZON_ABOVE_XMAX_IS_FOREIGN: a horizon above xmax is taken for another cluster's; refuted by NO_LOST_JOB
 * mutant SNAPSHOT_AFTER_PROBE: xmin is taken after the rows were read; refuted by NO_LOST_JOB
 * mutant QUIET_WITHOUT_LOOKING: the proof by locks does not look at the locks; refuted by NO_LOST_JOB
 * mutant QUIET_AFTER_PROBE: the proof by locks is taken after the rows were read; refuted by NO_LOST_JOB
 * mutant GAPS_FORGOTTEN: the cursor passes positions that were not seen; refuted by NO_LOST_JOB
 * mutant GAPS_NOT_PROBED: claims do not look for gaps; refuted by NO_LOST_JOB
 * mutant GAPS_DROPPED_TOGETHER: the horizon of the old gaps settles the new ones too; refuted by NO_LOST_JOB
 * mutant PROBE_LIMIT_IGNORED: gaps are dropped though the probe stopped at its limit; refuted by NO_LOST_JOB
 * mutant LOCKED_BECOMES_GAP: a position that was seen and not taken is kept as nothing; refuted by NO_LOST_JOB
 * mutant GAP_STAYS: a gap that is claimed stays in the gaps; refuted by AT_MOST_ONCE
 * mutant HELD_STAYS: a held position that is claimed stays held; refuted by AT_MOST_ONCE
 * mutant TOMBSTONE_NOT_READ: a claim does not read the tombstone after the lock; refuted by NO_CANCELLED_JOB_CLAIMED
 * mutant MUTATION_LOCK_IGNORED: a claim believes to be alone; refuted by NO_CANCELLED_JOB_CLAIMED
 * mutant CANCEL_LOOKS_ONCE: a cancel does not look again under its locks; refuted by NO_CANCELLED_JOB_CLAIMED
 * mutant HINT_FROM_UNCOMMITTED: the hint is set from the own uncommitted emission; refuted by HINT_BEHIND_LEDGER
 * mutant LANE_LOCK_ENDS_EARLY: the lane's lock ends before the transaction does; refuted by AT_MOST_ONCE
 * mutant PRUNE_WITHOUT_RECHECK: prune trusts the look before its lock; refuted by NO_WAITING_JOB_TRUNCATED
 * mutant PRUNE_WITHOUT_LOCK: prune does not keep writers out; refuted by NO_WAITING_JOB_TRUNCATED
 * mutant PRUNE_IGNORES_GAPS: prune counts what is in gaps as done; refuted by NO_WAITING_JOB_TRUNCATED
 * mutant PRUNE_IGNORES_HELD: prune counts what is held as done; refuted by NO_WAITING_JOB_TRUNCATED
 * mutant PRUNE_WITHOUT_CHECKPOINT: prune does not keep the newest emission; refuted by NEWEST_EMISSION_FOUND
 * mutant NEWEST_IN_ONE_SNAPSHOT: the newest emission is looked for in one snapshot; refuted by NEWEST_EMISSION_FOUND
 * mutant CLAIM_WITHOUT_LEAF_LOCK: a claim does not lock the leaf it will write to; refuted by NEWEST_EMISSION_FOUND
 * mutant PLAN_AND_PUBLISH_TOGETHER: one transaction plans and publishes; refuted by LEDGER_LEADS_CURSOR
 */
#include "invariant.inc"

#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef GENERATIONS /* the ring turns so often */
#define GENERATIONS 0
#endif
#ifndef CANCELS
#define CANCELS 0
#endif
#ifndef SAVEPOINTS /* so many inserts are rolled back to a savepoint, and another one follows */
#define SAVEPOINTS 0
#endif
#ifndef ABORTS /* so many producers abort */
#define ABORTS 0
#endif
#ifndef EARLY /* so many claims run in a transaction that has an id */
#define EARLY 0
#endif
#ifndef SECOND /* so many claims are followed by a second one in their transaction */
#define SECOND 0
#endif
#ifndef UNDONE /* so many transactions of claims, cancels and plans are rolled back */
#define UNDONE 0
#endif
#define LIMIT 1
#define LAST 7
#define NOBODY 255
#define NEVER 255

#define BIT(n) (1 << (n))
#define UPTO(n) ((2 << (n)) - 1)

hidden byte NO_LOST_JOB, AT_MOST_ONCE, NO_CANCELLED_JOB_CLAIMED, NO_WAITING_JOB_TRUNCATED, NEWEST_EMISSION_FOUND,
    HINT_BEHIND_LEDGER, LEDGER_LEADS_CURSOR, NO_STRANDED_JOB, GAPS_END;

/* Transactions. */
byte next_xid = 1, newest_ended;
short running;

/* The lane. Sets of positions are bits. */
byte tail, sequence_holders, hint;
byte lane_owner = NOBODY;
byte mutation_owner = NOBODY, mutation_shares;
byte locked_positions;

/* The newest committed emission of the lane. */
byte no, upto, horizon, gaps_old, gaps_new, held;

/* Leaves of the queue ring: committed rows and tombstones, numbers of the newest emission, locks, and whether anything
   was ever written there since the last truncate. */
byte rows[SLOTS], tombs[SLOTS], emission[SLOTS], writers[SLOTS], readers[SLOTS];
bool used[SLOTS];
bool shut[SLOTS];
byte head; /* number of the emission in queue_claim_heads */

/* The ring: cursor, and its ledger: newest generation of each slot. */
byte ring_generation, ring_slot, ledger;
byte slot_generation[2];

/* What really happened, for the invariants. */
byte jobs, claimed, cancelled, producers_ended, cancels_ended;
byte aborts = ABORTS, savepoints = SAVEPOINTS, early = EARLY, second = SECOND, undone = UNDONE;

#define UNCLAIMED (gaps_old | gaps_new | held | (255 & ~UPTO(upto)))
#if SLOTS == 2
#define ALIVE ((rows[0] & ~tombs[0]) | (rows[1] & ~tombs[1]))
#define DEAD (tombs[0] | tombs[1])
#define IS_SHUT (shut[0] || shut[1])
#else
#define ALIVE (rows[0] & ~tombs[0])
#define DEAD tombs[0]
#define IS_SHUT false
#endif
#define WAITING (jobs & ~claimed & ~cancelled)

inline check_jobs() {
    INVARIANT(NO_LOST_JOB, (WAITING & ~UNCLAIMED) == 0)
}

inline take_id(id) {
    d_step {
        id = next_xid;
        running = running | BIT(id);
        next_xid++;
        assert(next_xid < 16)
    }
}

inline end_id(id) {
    if
    :: id > 0 ->
        running = running & ~BIT(id);
        if
        :: id > newest_ended -> newest_ended = id
        :: else
        fi;
        id = 0
    :: else
    fi
}

/* pg_snapshot_xmin */
inline read_xmin(to) {
    d_step {
        to = 1;
        do
        :: to <= newest_ended && (running & BIT(to)) == 0 -> to++
        :: else -> break
        od
    }
}

inline lock_leaf(mask, s) {
    if
    :: (mask & BIT(s)) == 0 -> mask = mask | BIT(s); writers[s]++
    :: else
    fi
}

inline unlock_leaves(mask) {
    writers[0] = writers[0] - (mask & 1);
#if SLOTS == 2
    writers[1] = writers[1] - ((mask >> 1) & 1);
#endif
    mask = 0
}

/* The end of a producer's transaction: what it inserted last becomes visible, if that was not rolled back. */
inline end_producer() {
    d_step {
        rows[slot] = rows[slot] | own;
        jobs = jobs | own;
        used[slot] = true;
        own = 0;
        position = 0;
        slot = 0;
        in_sequence = false;
        end_id(xid);
        unlock_leaves(own_slots);
        sequence_holders--;
        producers_ended++;
        check_jobs()
    }
}

/* _append_ready_one, and _append_ready_many in a savepoint: the same order. */
proctype producer() {
    byte xid, slot, position, own, own_slots;
    bool in_sequence;

insert:
#ifndef ID_AFTER_POSITION
    if
    :: xid == 0 -> take_id(xid)
    :: else
    fi;
#endif
#if SLOTS == 2
    slot = ring_slot;
#endif
    atomic {
        tail++;
        position = tail;
        if
        :: !in_sequence -> in_sequence = true; sequence_holders++
        :: else
        fi
    }
#ifdef ID_AFTER_POSITION
    if
    :: xid == 0 -> take_id(xid)
    :: else
    fi;
#endif
#if SLOTS == 2
    atomic {
        !shut[slot] ->
        lock_leaf(own_slots, slot);
        used[slot] = true
    }
#endif
    if
    :: atomic { savepoints > 0 -> savepoints--; goto insert }
    :: atomic { aborts > 0 -> aborts--; end_producer() }
    :: d_step { true -> own = BIT(position); end_producer() }
    fi
}

/* The k lowest of a set, and the last of them, or 0 where there are fewer. */
inline lowest(set, k, to, last_one) {
    part = 0;
    last_one = 0;
    count = 0;
    i = 1;
    do
    :: i > LAST || count == k -> break
    :: else ->
        if
        :: (set & BIT(i)) != 0 ->
            part = part | BIT(i);
            count++;
            last_one = (count == k -> i : 0)
        :: else
        fi;
        i++
    od;
    to = part;
    part = 0;
    i = 0;
    count = 0
}

inline highest(set, to) {
    to = LAST;
    do
    :: to > 0 && (set & BIT(to)) == 0 -> to--
    :: else -> break
    od
}

inline cardinality(set, to) {
    to = 0;
    i = 1;
    do
    :: i > LAST -> break
    :: else -> to = to + ((set >> i) & 1); i++
    od;
    i = 0
}

inline read_leaf(s) {
    if
    :: (reading & BIT(s)) == 0 -> reading = reading | BIT(s); readers[s]++
    :: else
    fi
}

inline leave_leaves() {
    readers[0] = readers[0] - (reading & 1);
#if SLOTS == 2
    readers[1] = readers[1] - ((reading >> 1) & 1);
#endif
    reading = 0
}

#if SLOTS == 2
/* The leaf that the emission will go to is locked, and the ring read again. */
inline lock_own_leaf() {
#ifdef CLAIM_WITHOUT_LEAF_LOCK
    skip
#else
    do
    :: atomic {
            !shut[r_slot] ->
            lock_leaf(own_slots, r_slot);
            if
            :: ring_generation == r_generation -> break
            :: else -> r_generation = ring_generation; r_slot = ring_slot
            fi
        }
    od
#endif
}

/* _newest_emission: reads of the current leaf, of the ledger, of the other leaf, of the checkpoint. The own emission
   of a transaction is the newest one for it. */
inline newest_emission() {
    current = ring_slot;
#ifdef NEWEST_IN_ONE_SNAPSHOT
    d_step { found_head = head; other_known = slot_generation[1 - current] != NEVER }
#endif
    d_step {
        if
        :: emission[current] > 0 -> read_leaf(current); found = emission[current]
        :: else
        fi
    }
    if
    :: found == 0 ->
#ifndef NEWEST_IN_ONE_SNAPSHOT
        other_known = slot_generation[1 - current] != NEVER;
#endif
        d_step {
            if
            :: other_known && emission[1 - current] > 0 ->
                read_leaf(1 - current);
                found = emission[1 - current]
            :: else
            fi
        }
    :: else
    fi;
#ifndef NEWEST_IN_ONE_SNAPSHOT
    found_head = head;
#endif
    d_step {
        if
        :: found < found_head -> found = found_head
        :: else
        fi;
        INVARIANT(NEWEST_EMISSION_FOUND, found == no);
        found = 0;
        found_head = 0;
        current = 0;
        other_known = false
    }
}
#endif

inline read_emission() {
    if
    :: !wrote ->
        e_no = no; e_upto = upto; e_horizon = horizon;
        e_old = gaps_old; e_new = gaps_new; e_held = held
    :: else
    fi
}

/* In a transaction that had no id, what was read is committed. */
inline raise_hint() {
    if
#ifdef HINT_FROM_UNCOMMITTED
    :: true ->
#else
    :: fresh ->
#endif
        hint = e_upto;
        INVARIANT(HINT_BEHIND_LEDGER, hint <= upto)
    :: else
    fi
}

/* One read of _see_rows: living rows of a leaf among those wanted, the lowest ones. */
inline see_leaf(s, wanted, limit, is_cut) {
    d_step {
        read_leaf(s);
        found = rows[s] & ~tombs[s] & (wanted);
        if
        :: frontier > 0 -> found = found & UPTO(frontier)
        :: else
        fi;
        lowest(found, limit, found, last);
        seen = seen | found;
        if
        :: last > 0 -> frontier = last; is_cut = true
        :: else
        fi;
        found = 0;
        last = 0
    }
}

/* _leaves_to_see */
inline list_leaves() {
    behind = e_old | e_new | e_held;
#ifdef GAPS_NOT_PROBED
    behind = e_held;
#endif
    cardinality(e_held, most);
    most = most + LIMIT;
    beyond = 255 & ~UPTO(e_upto);
#if SLOTS == 2
    g0 = slot_generation[0];
    g1 = slot_generation[1]
#endif
}

inline see_behind() {
    if
    :: behind != 0 && used[0] -> see_leaf(0, behind, most, probe_full)
    :: else
    fi;
#if SLOTS == 2
    if
    :: behind != 0 && used[1] -> see_leaf(1, behind, most, probe_full)
    :: else
    fi
#endif
}

#if SLOTS == 2
inline see_slot(s, g) {
    if
    :: see_leaf(s, beyond, LIMIT, scan_full)
    :: g < r_generation
    fi
}

/* By generation. Leaves older than the current one are read from low on; here they are read or not. */
inline see_beyond() {
    if
    :: g0 != NEVER && (g1 == NEVER || g0 < g1) -> see_slot(0, g0)
    :: else
    fi;
    if
    :: g1 != NEVER -> see_slot(1, g1)
    :: else
    fi;
    if
    :: g0 != NEVER && g1 != NEVER && g0 > g1 -> see_slot(0, g0)
    :: else
    fi
}
#endif

/* What lies beyond the last row of a leaf that was cut off is not kept. */
inline merge_leaves() {
    if
    :: frontier > 0 -> seen = seen & UPTO(frontier)
    :: else
    fi;
    frontier = 0;
    behind = 0;
    beyond = 0;
    most = 0;
#if SLOTS == 2
    g0 = 0;
    g1 = 0
#endif
}

/* _take_unlocked where an application changes jobs of the lane. */
inline take_rows() {
#if CANCELS > 0
    if
    :: alone -> d_step { lowest(seen, LIMIT, taken, last); last = 0 }
    :: else ->
        j = 1;
        do
        :: j > LAST || taken != 0 -> break
        :: else ->
            d_step {
                if
                :: (seen & BIT(j)) != 0 && (locked_positions & BIT(j)) == 0 ->
                    locked_positions = locked_positions | BIT(j);
                    own_positions = own_positions | BIT(j);
                    if
#ifndef TOMBSTONE_NOT_READ
                    :: (DEAD & BIT(j)) != 0 -> dead = dead | BIT(j)
#endif
                    :: else -> taken = taken | BIT(j)
                    fi
                :: else
                fi;
                j++
            }
        od;
        j = 0
    fi
#else
    d_step { lowest(seen, LIMIT, taken, last); last = 0 }
#endif
}

/* Drawn after the rows were read, and only where the transaction has no id yet. */
inline draw_horizon() {
    if
#ifdef HORIZON_FROM_XMAX
    :: e_horizon == 0 && e_old != 0 -> e_horizon = newest_ended + 1; changed = true
#else
#ifdef HORIZON_OF_AN_EARLIER_ID
    :: e_horizon == 0 && e_old != 0 && xid > 0 -> e_horizon = xid; changed = true
#endif
    :: e_horizon == 0 && e_old != 0 && xid == 0 -> take_id(xid); e_horizon = xid; changed = true
#endif
    :: else
    fi
}

/* _append_emission and the receipts */
inline append_emission() {
    if
    :: xid == 0 -> take_id(xid)
    :: else
    fi;
    e_no++;
    wrote = true;
    own = own | taken;
#ifdef CLAIM_WITHOUT_LEAF_LOCK
    /* INSERT takes that lock all the same. */
    !shut[r_slot] -> lock_leaf(own_slots, r_slot);
#endif
    used[r_slot] = true
}

inline unlock_lane() {
    if
    :: lane_owner == _pid -> lane_owner = NOBODY
    :: else
    fi
}

inline end_claim() {
    d_step {
#if SLOTS == 2
        /* The unique index of the leaf. */
        if
        :: wrote && emission[r_slot] == e_no -> wrote = false; own = 0 /* unreached: claims follow each other */
        :: else
        fi;
#endif
        if
        :: wrote ->
            no = e_no; upto = e_upto; horizon = e_horizon;
            gaps_old = e_old; gaps_new = e_new; held = e_held;
            emission[r_slot] = no;
            INVARIANT(AT_MOST_ONCE, (claimed & own) == 0);
            claimed = claimed | own;
            INVARIANT(NO_CANCELLED_JOB_CLAIMED, (claimed & cancelled) == 0);
            check_jobs()
        :: else
        fi;
        end_id(xid);
        unlock_leaves(own_slots);
        leave_leaves();
        locked_positions = locked_positions & ~own_positions;
        unlock_lane();
        if
        :: mutation_owner == _pid -> mutation_owner = NOBODY
        :: else
        fi;
        e_no = 0; e_upto = 0; e_horizon = 0; e_old = 0; e_new = 0; e_held = 0;
        own = 0; own_positions = 0; r_generation = 0; r_slot = 0;
        wrote = false; fresh = false; alone = false; contended = false; calm = false
    }
}

/* _next_emission, from e_* into e_*; changed says whether it differs. */
inline next_emission() {
    d_step {
        highest(taken, next_upto);
        if
        :: taken != 0
        :: taken == 0 && (scan_full || probe_full) -> highest(seen, next_upto)
        :: taken == 0 && !scan_full && !probe_full -> next_upto = seen_tail
        fi;
        if
        :: next_upto < e_upto -> next_upto = e_upto
        :: else
        fi;
        seen = seen & UPTO(next_upto);
#ifdef GAP_STAYS
        next_old = e_old;
        next_new = e_new;
#else
        next_old = e_old & ~seen;
        next_new = e_new & ~seen;
#endif
#ifdef HELD_STAYS
        next_held = (seen & ~taken & ~dead) | (e_held & taken);
#else
        next_held = seen & ~taken & ~dead;
#endif
#ifdef LOCKED_BECOMES_GAP
        next_held = 0;
#endif
        if
#ifndef PROBE_LIMIT_IGNORED
        :: probe_full -> next_held = next_held | (e_held & ~taken & ~dead)
#endif
#ifdef PROBE_LIMIT_IGNORED
        :: quiet -> next_old = 0; next_new = 0
        :: !quiet && settled ->
#else
        :: !probe_full && quiet -> next_old = 0; next_new = 0
        :: !probe_full && !quiet && settled ->
#endif
            next_old = next_new;
            next_new = 0;
            e_horizon = 0;
            changed = true
#ifdef GAPS_DROPPED_TOGETHER
            ; next_old = 0
#endif
        :: else
        fi;
#ifndef GAPS_FORGOTTEN
        next_new = next_new | (UPTO(next_upto) & ~UPTO(e_upto) & ~seen);
#endif
        if
        :: next_old == 0 || e_horizon == 0 ->
            next_old = next_old | next_new;
            next_new = 0;
            changed = changed || e_horizon != 0;
            e_horizon = 0
        :: else
        fi;
        changed = changed || next_upto != e_upto || next_old != e_old || next_new != e_new ||
            next_held != e_held || taken != 0;
        e_upto = next_upto;
        e_old = next_old;
        e_new = next_new;
        e_held = next_held;
        next_upto = 0; next_old = 0; next_new = 0; next_held = 0
    }
}

inline take_snapshot() {
    d_step {
        read_xmin(xmin);
        settled = e_horizon != 0 && e_horizon <= xmin;
#ifdef HORIZON_ABOVE_XMAX_IS_FOREIGN
        settled = settled || e_horizon > newest_ended + 1;
#endif
        still = producers_ended == PRODUCERS && running == 0 && xid == 0;
        xmin = 0
    }
}

/* _lane_is_quiet, asked or not, whatever the cost; that of a settled horizon stands for one that ended meanwhile. */
inline prove_by_locks() {
    if
    :: d_step {
        (e_old | e_new) != 0 ->
#ifdef QUIET_WITHOUT_LOOKING
        quiet = true
#else
        quiet = sequence_holders == 0
#endif
       }
    :: true
    fi
}

/* _claim_ready and _claim_lane. What only this transaction can notice is one step with its neighbour. */
proctype claimer() {
    byte xid, seen_tail, r_generation, r_slot, reading, own_slots, own_positions;
    byte e_no, e_upto, e_horizon, e_old, e_new, e_held; /* the emission: as found, then the next one */
    byte xmin, seen, frontier, taken, dead, own; /* own: what this transaction has claimed */
    byte next_upto, next_old, next_new, next_held;
    byte i, j, count, part, last, found, most, behind, beyond;
    bool fresh, quiet, settled, alone, scan_full, probe_full, changed, wrote, contended, calm, still;
#if SLOTS == 2
    byte current, found_head, g0, g1;
    bool other_known;
#endif

end:
    do
    :: atomic {
            true ->
            if
            :: early > 0 -> early--; take_id(xid)
            :: true
            fi;
call:
            calm = producers_ended == PRODUCERS && cancels_ended == CANCELS && lane_owner == NOBODY;
            fresh = xid == 0;
            /* _waiting_lanes */
            seen_tail = tail;
            if
            :: seen_tail <= hint -> goto over
            :: else
            fi
        }
        atomic {
            if
            :: lane_owner == NOBODY || lane_owner == _pid -> lane_owner = _pid
            :: lane_owner != NOBODY && lane_owner != _pid -> contended = true; goto over
            fi;
#if CANCELS > 0
            if
            :: mutation_shares == 0 -> mutation_owner = _pid; alone = true
            :: else
            fi;
#ifdef MUTATION_LOCK_IGNORED
            alone = true
#endif
#endif
#if SLOTS == 2
            r_generation = ring_generation;
            r_slot = ring_slot
        }
        lock_own_leaf();
        newest_emission();
        atomic {
#endif
            read_emission();
            if
            :: seen_tail <= e_upto && (e_old | e_new | e_held) == 0 -> raise_hint(); goto over
            :: else
            fi;
#if CANCELS > 0
        }
        atomic {
#endif
#ifndef SNAPSHOT_AFTER_PROBE
            take_snapshot();
#endif
#ifndef QUIET_AFTER_PROBE
            prove_by_locks();
#endif
            list_leaves()
        }
        see_behind();
#if SLOTS == 1
        atomic {
            see_leaf(0, beyond, LIMIT, scan_full);
#else
        see_beyond();
        atomic {
#endif
#if defined(SNAPSHOT_AFTER_PROBE) || defined(QUIET_AFTER_PROBE)
            skip
        }
        atomic {
#ifdef SNAPSHOT_AFTER_PROBE
            take_snapshot();
#else
            prove_by_locks();
#endif
#endif
            merge_leaves();
            take_rows();
            next_emission()
        }
        atomic {
            draw_horizon();
            if
            :: changed -> append_emission()
            :: else -> INVARIANT(GAPS_END, !still || (e_old | e_new) == 0)
            fi
        }
over:
        atomic {
            INVARIANT(NO_STRANDED_JOB, !calm || contended || changed || own != 0 || WAITING == 0);
            seen = 0; taken = 0; dead = 0; seen_tail = 0;
            quiet = false; settled = false; scan_full = false; probe_full = false; changed = false; still = false;
            if
            :: second > 0 && lane_owner == _pid -> second--; goto call
            :: true
            fi;
#ifdef LANE_LOCK_ENDS_EARLY
            unlock_lane()
        }
        atomic {
#endif
            if
            :: undone > 0 && wrote -> undone--; wrote = false; own = 0
            :: true
            fi;
            end_claim()
        }
    od
}

#if CANCELS > 0
/* _cancel_job of a waiting job: _lock_ready, then _take_waiting. */
proctype canceller() {
    byte position;
    bool is_unclaimed;

    if
    :: d_step {
        ALIVE != 0 ->
        highest(ALIVE, position);
        if
        :: true
        :: (ALIVE & ~BIT(position)) != 0 -> highest((ALIVE & ~BIT(position)), position)
        fi;
        is_unclaimed = (UNCLAIMED & BIT(position)) != 0
       }
    :: atomic { cancels_ended++; goto ended }
    fi;
    atomic { mutation_owner == NOBODY -> mutation_shares++ }
    atomic { (locked_positions & BIT(position)) == 0 -> locked_positions = locked_positions | BIT(position) }
    atomic {
        !IS_SHUT ->
#ifndef CANCEL_LOOKS_ONCE
        is_unclaimed = (UNCLAIMED & ALIVE & BIT(position)) != 0;
#endif
        if
        :: undone > 0 && is_unclaimed -> undone--
        :: is_unclaimed ->
            if
            :: (rows[0] & BIT(position)) != 0 -> tombs[0] = tombs[0] | BIT(position)
#if SLOTS == 2
            :: (rows[1] & BIT(position)) != 0 -> tombs[1] = tombs[1] | BIT(position) /* unreached: takes two jobs */
#endif
            fi;
            cancelled = cancelled | BIT(position);
            INVARIANT(NO_CANCELLED_JOB_CLAIMED, (claimed & cancelled) == 0)
        :: !is_unclaimed
        fi;
        mutation_shares--;
        locked_positions = locked_positions & ~BIT(position);
        cancels_ended++;
        position = 0;
        is_unclaimed = false
    }
ended:
    skip
}
#endif

#if SLOTS == 2
/* What keeps a slot alive: _slot_blocker reads the emission, then the rows. */
inline look_for_waiting(s) {
#ifdef PRUNE_IGNORES_GAPS
    wanted = UNCLAIMED & ~(gaps_old | gaps_new);
#elif defined(PRUNE_IGNORES_HELD)
    wanted = UNCLAIMED & ~held;
#else
    wanted = UNCLAIMED;
#endif
    d_step {
        is_needed = (rows[s] & ~tombs[s] & wanted) != 0;
        wanted = 0
    }
}

/* _plan_ring, _publish_ring and _prune_ring follow each other under the ring's lock. */
proctype ring() {
    byte slot, wanted;
    bool is_needed;

end:
    do
    :: ledger == ring_generation && ring_generation < GENERATIONS && used[ring_slot] && !used[1 - ring_slot] ->
#ifdef PLAN_AND_PUBLISH_TOGETHER
        slot = 1 - ring_slot;
        d_step { ring_generation++; ring_slot = slot }
        if
        :: d_step { ledger = ring_generation; slot_generation[slot] = ledger }
        :: atomic { undone > 0 -> undone-- }
        fi;
        slot = 0;
        INVARIANT(LEDGER_LEADS_CURSOR, ring_generation <= ledger)
#else
        if
        :: d_step { ledger = ring_generation + 1; slot_generation[1 - ring_slot] = ledger }
        :: atomic { undone > 0 -> undone-- }
        fi
#endif
    :: d_step {
            ledger > ring_generation ->
            ring_generation++;
            ring_slot = 1 - ring_slot;
            INVARIANT(LEDGER_LEADS_CURSOR, ring_generation <= ledger)
        }
    :: ledger == ring_generation && used[1 - ring_slot] ->
        slot = 1 - ring_slot;
        look_for_waiting(slot);
        if
        :: is_needed -> goto kept
        :: else
        fi;
        if
#ifdef PRUNE_WITHOUT_LOCK
        :: true
#else
        :: atomic { writers[slot] == 0 -> shut[slot] = true }
        :: writers[slot] > 0 -> goto kept
#endif
        fi;
#ifndef PRUNE_WITHOUT_RECHECK
        look_for_waiting(slot);
#endif
        d_step {
            if
            :: !is_needed && readers[slot] == 0 ->
                INVARIANT(NO_WAITING_JOB_TRUNCATED, (rows[slot] & ~tombs[slot] & ~claimed) == 0);
#ifndef PRUNE_WITHOUT_CHECKPOINT
                if
                :: emission[slot] > head -> head = emission[slot]
                :: else
                fi;
#endif
                rows[slot] = 0; tombs[slot] = 0; emission[slot] = 0; used[slot] = false
            :: else
            fi;
            shut[slot] = false
        }
kept:
        atomic { is_needed = false; slot = 0 }
    od
}
#endif

init {
    byte n;
    atomic {
        slot_generation[1] = NEVER;
        n = 0;
        do
        :: n < PRODUCERS -> run producer(); n++
        :: else -> break
        od;
        n = 0;
        do
        :: n < CLAIMERS -> run claimer(); n++
        :: else -> break
        od;
#if CANCELS > 0
        n = 0;
        do
        :: n < CANCELS -> run canceller(); n++
        :: else -> break
        od;
#endif
#if SLOTS == 2
        run ring()
#endif
    }
}
