/*
 * The doorbell: workers that find nothing say so in a flag and sleep; producers notify only while the flag lies ahead.
 *
 * What is modelled. The flag and the lane's sequence are read and written past all snapshots, in the order of the SQL;
 * a notification goes out with the commit of its transaction, to those who listen then, and arrives some time later.
 * Producers commit, roll back, vanish, or stay open for as long as they like, and so may the one that makes the lane,
 * which nobody else sees before its commit. Workers sleep until the bell, or the end of the time that they were told;
 * one may be killed at any point. The server may crash: transactions and flag are gone, connections closed. Time is a
 * counter: a sleep takes LENGTH or, for the first worker, LENGTH + 2 ticks (a setting that was changed), and an answer
 * reaches the worker within MARGIN (0.5 s in the engine).
 * A claim is one step, as claim_ledger.pml shows that it may be taken for: it takes all that is visible, and what its
 * lane's lock would make it miss is left out.
 *
 * Bounds: one flag, one lane, two workers, two producers, each one job, one killed worker, one crash.
 *
 * invariant NO_LOST_WAKEUP: never does a committed job wait while all workers that live are asleep, hear, have no
 *     notification on its way and do not wake by themselves yet.
 * invariant WORK_IS_DONE: where nobody wakes by himself and no flag expires, each committed job is claimed at last.
 * invariant NO_DEADLOCK: producers end, workers sleep or go on.
 *
 * check: -DPRODUCERS=2 -DABORTS=1 -DNEW_LANE=1 -DCRASHES=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -DTICKS=3 -DKILLS=1 -m100000 -DCOLLAPSE
 * check: -DPRODUCERS=2 -a -f -m1000000 -DNFAIR=3 -DCOLLAPSE
 * short: -DPRODUCERS=1 -DTICKS=4 -DKILLS=1 -m100000
 * short: -DPRODUCERS=2 -DNEW_LANE=1 -m100000
 * short: -DPRODUCERS=1 -DNEW_LANE=1 -DABORTS=1 -DCRASHES=1 -m100000
 *
 * mutant FLAG_BEFORE_POSITION: a producer reads the flag before it takes its position; refuted by NO_LOST_WAKEUP
 * mutant LOOK_BEFORE_ARM: a worker looks at the lane, then raises the flag; refuted by NO_LOST_WAKEUP
 * mutant ARM_SHORTENS: a worker that raises the flag overwrites a later time; refuted by NO_LOST_WAKEUP
 * mutant FLAG_LOWERED: a worker that wakes lowers the flag; refuted by NO_LOST_WAKEUP
 * mutant GAPS_ARE_IDLE: a worker sleeps although producers are in flight; refuted by NO_LOST_WAKEUP
 * mutant LISTEN_AFTER_LOOK: a worker looks, listens, and sleeps without another look; refuted by NO_LOST_WAKEUP
 * mutant BELL_CLEARED_AFTER_LOOK: a worker forgets what it heard while it looked; refuted by NO_LOST_WAKEUP
 * mutant NEW_LANE_IS_SILENT: who makes a lane asks the flag like others; refuted by NO_LOST_WAKEUP
 * mutant RECONNECT_IS_SILENT: after an outage a worker listens and does not look; refuted by NO_LOST_WAKEUP
 * mutant SLEEPS_LONGER: a worker sleeps longer than it was told; refuted by NO_LOST_WAKEUP
 */
#include "invariant.inc"

#ifndef PRODUCERS
#define PRODUCERS 2
#endif
#ifndef TICKS /* the clock goes so far; 0: it stands, and who sleeps is woken by the bell alone */
#define TICKS 0
#endif
#ifndef ABORTS /* so many producers roll back or vanish */
#define ABORTS 0
#endif
#ifndef KILLS /* so many workers are killed */
#define KILLS 0
#endif
#ifndef CRASHES /* the server crashes so often */
#define CRASHES 0
#endif
#ifndef NEW_LANE /* the first producer makes the lane */
#define NEW_LANE 0
#endif
#define WORKERS 2
#define LENGTH 1
#define MARGIN 1

#define BIT(n) (1 << (n))
#define UPTO(n) ((2 << (n)) - 1)

hidden byte NO_LOST_WAKEUP;

byte now = 1, flag;
/* The lane: its sequence, positions of open transactions, committed rows. */
bool lane_is_visible = !NEW_LANE, lane_is_made;
byte tail, open, rows;
/* What claims have done: positions taken, cursor and gaps of the newest emission. */
byte taken, upto, gaps;
byte boot, aborts = ABORTS, kills = KILLS, crashes = CRASHES, producers_left = PRODUCERS;

bool alive[WORKERS], asleep[WORKERS], hears[WORKERS], rung[WORKERS], on_its_way[WORKERS], has_listened[WORKERS];
byte until[WORKERS], armed_at[WORKERS];

#define WAITS (lane_is_visible && (rows & ~taken) != 0)
#define IS_DEAF(w) (asleep[w] && hears[w] && !rung[w] && !on_its_way[w] && (TICKS == 0 || now < until[w]))
#define IS_FORGOTTEN (WAITS && (alive[0] || alive[1]) && (!alive[0] || IS_DEAF(0)) && (!alive[1] || IS_DEAF(1)))

ltl WORK_IS_DONE { [] (WAITS -> <> !WAITS) }

/* _claim_lane, with the gaps of claim_ledger.pml: an owner that has ended leaves none. */
inline claim_all(found) {
    d_step {
        found = lane_is_visible && (rows & ~taken) != 0;
        if
        :: lane_is_visible ->
            taken = taken | rows;
            upto = tail;
            gaps = open & ~taken
        :: else
        fi
    }
}

/* _arm_doorbell: past the end of the sleep, and never to an earlier time than another one's. */
inline arm(w, length) {
    d_step {
        armed_at[w] = now;
#ifdef ARM_SHORTENS
        flag = now + length + MARGIN
#else
        flag = (flag < now + length + MARGIN -> now + length + MARGIN : flag)
#endif
    }
}

/* What a transaction notified goes out with its commit. */
inline notify() {
    on_its_way[0] = on_its_way[0] || hears[0];
    on_its_way[1] = on_its_way[1] || hears[1]
}

/* _append_ready_one; _create_lane where the lane is missing. */
proctype producer() {
    byte position, my_boot;
    bool rings, makes_lane;

    atomic {
        my_boot = boot;
        if
        :: lane_is_visible
        :: !lane_is_visible && !lane_is_made -> lane_is_made = true; makes_lane = true; rings = true
        :: !lane_is_visible && lane_is_made -> goto gone /* the job is deferred */
        fi;
#if NEW_LANE && defined(NEW_LANE_IS_SILENT)
        rings = false
#endif
    }
#ifdef FLAG_BEFORE_POSITION
    rings = rings || flag >= now;
#endif
    atomic {
        if
        :: boot != my_boot -> goto gone
        :: else
        fi;
        tail++;
        position = tail;
        open = open | BIT(position)
    }
#ifndef FLAG_BEFORE_POSITION
    /* _someone_sleeps in RETURNING, and again in _ring_doorbell. */
    if
    :: flag >= now -> rings = rings || flag >= now
    :: else
    fi;
#endif
    atomic {
        if
        :: boot != my_boot
        :: boot == my_boot && aborts > 0 ->
            aborts--;
            open = open & ~BIT(position);
            if
            :: makes_lane -> lane_is_made = false; tail = 0
            :: else
            fi
        :: boot == my_boot ->
            open = open & ~BIT(position);
            rows = rows | BIT(position);
            if
            :: makes_lane -> lane_is_visible = true
            :: else
            fi;
            if
            :: rings -> notify()
            :: else
            fi
        fi
    }
gone:
    atomic { rings = false; makes_lane = false; position = 0; my_boot = 0; producers_left-- }
}

/* _claim_status, after the flag was raised: whether the worker may sleep. Two statements: positions, then emissions. */
inline look(is_idle) {
    seen_tail = (lane_is_visible -> tail : 0);
    d_step {
#ifdef GAPS_ARE_IDLE
        is_idle = seen_tail <= upto;
#else
        is_idle = seen_tail <= upto && gaps == 0;
#endif
        seen_tail = 0
    }
}

/* _wait_for_bell, after the answer of claim_status said how long at most. */
inline sleep(length) {
    atomic {
#ifdef SLEEPS_LONGER
        until[w] = now + length + MARGIN + 1;
#else
        until[w] = now + length;
#endif
        armed_at[w] = 0;
        asleep[w] = true;
        is_idle = false
    }
end_asleep:
    if
    :: atomic {
            rung[w] || (TICKS > 0 && now >= until[w]) ->
            asleep[w] = false;
            until[w] = 0;
#ifdef FLAG_LOWERED
            flag = 0
#endif
        }
    :: atomic { kills > 0 -> goto killed }
    fi
}

/* The worker's loop: claim, else _sleep_until_work. */
proctype worker(byte w) {
    byte seen_tail, my_boot;
    bool found, is_idle;

end:
    do
    :: claim_all(found);
        if
        :: found -> found = false
        :: !found && kills > 0 -> goto killed
        :: !found ->
again:
#ifndef BELL_CLEARED_AFTER_LOOK
            rung[w] = false;
#endif
            my_boot = boot;
#ifndef LOOK_BEFORE_ARM
            arm(w, LENGTH + 2 - 2 * w);
#endif
            look(is_idle);
#ifdef LOOK_BEFORE_ARM
            arm(w, LENGTH + 2 - 2 * w);
#endif
#ifdef BELL_CLEARED_AFTER_LOOK
            rung[w] = false;
#endif
            atomic {
                if
                :: boot != my_boot -> is_idle = false
                :: else
                fi;
                my_boot = 0;
                if
                :: is_idle && !has_listened[w] ->
                    /* What was rung before is lost: listen first and look again. */
                    has_listened[w] = true;
                    hears[w] = true;
#ifndef LISTEN_AFTER_LOOK
                    is_idle = false;
                    goto again
#endif
                :: else
                fi
            }
            if
            :: is_idle -> sleep(LENGTH + 2 - 2 * w)
            :: else -> armed_at[w] = 0
            fi
        fi
    od;
killed:
    atomic {
        kills--;
        alive[w] = false;
        hears[w] = false;
        on_its_way[w] = false;
        asleep[w] = false;
        rung[w] = false;
        until[w] = 0;
        armed_at[w] = 0
    }
}

/* The worker's connection for notifications. What is lost is made anew, and then the worker looks. */
proctype listener(byte w) {
end:
    do
    :: d_step { on_its_way[w] -> on_its_way[w] = false; rung[w] = true }
#if CRASHES > 0
    :: d_step {
            alive[w] && has_listened[w] && !hears[w] ->
            hears[w] = true;
#ifndef RECONNECT_IS_SILENT
            rung[w] = true
#endif
        }
#endif
    od
}

#if TICKS > 0
/* An answer takes no longer than MARGIN. */
proctype clock() {
end:
    do
    :: d_step {
            now < TICKS && (armed_at[0] == 0 || armed_at[0] == now) && (armed_at[1] == 0 || armed_at[1] == now) ->
            now++
        }
    od
}
#endif

#if CRASHES > 0
/* UNLOGGED sequences start anew, and so does a lane that was not committed. */
proctype server() {
end:
    do
    :: d_step {
            crashes > 0 ->
            crashes--;
            boot++;
            flag = 0;
            open = 0;
            lane_is_made = lane_is_visible;
            tail = (lane_is_visible -> tail : 0);
            hears[0] = false;
            hears[1] = false;
            on_its_way[0] = false;
            on_its_way[1] = false
        }
    od
}
#endif

proctype monitor() {
end:
    IS_FORGOTTEN ->
    INVARIANT(NO_LOST_WAKEUP, false) /* unreached: it is what must not be */
}

init {
    byte n;
    atomic {
        alive[0] = true;
        alive[1] = true;
        run worker(0);
        run worker(1);
        run listener(0);
        run listener(1);
        n = 0;
        do
        :: n < PRODUCERS -> run producer(); n++
        :: else -> break
        od;
#if TICKS > 0
        run clock();
#endif
#if CRASHES > 0
        run server();
#endif
        run monitor()
    }
}
