#!/usr/bin/env bash
# A worker in bash and psql: one job at a time, polling.
#
#   AWA_DSN=postgresql:///app AWA_QUEUE=default ./worker.sh HANDLERS.sh
#
# HANDLERS.sh defines a function handle_KIND for each kind. It gets the args as JSON, and may print
# an outcome, such as {"outcome": "snooze", "delay_seconds": 5}. Without one, exit status 0 means
# completed and any other one means retry, with what it wrote to stderr as the error.
set -uo pipefail
source "$1"
queue=${AWA_QUEUE:-default}
schema_version=2  # the one this worker was written for; a later one will do
me=$(cat /proc/sys/kernel/random/uuid)
errors=$(mktemp)
stopping=
trap 'stopping=1' TERM INT
trap 'kill "$beating" 2>/dev/null; rm -f "$errors"' EXIT

# Runs stdin; further arguments are -v NAME=VALUE. Repeats until the database answers; fails if it refuses.
sql() {
    local statement status
    statement=$(cat)
    until psql "$AWA_DSN" -XAtq -v ON_ERROR_STOP=1 -v me="$me" -v queue="$queue" "$@" <<<"$statement"
    do
        status=$?
        sleep 1
        if [ "$status" = 3 ]; then return 1; fi
    done
}

# Heartbeats and housekeeping go on while a handler runs, and end when this process does.
beat() {
    trap - TERM INT EXIT
    while kill -0 $$ 2>/dev/null; do
        sql <<<"SELECT FROM awa.heartbeat(:'me')"
        sql <<<"SELECT FROM awa.tick()"
        sleep 1
    done
}

# The outcome of a job as JSON.
run() {
    local kind=$1 args=$2 outcome
    if ! declare -F "handle_$kind" >/dev/null; then
        echo '{"outcome": "released", "reason": "unknown_kind"}'
    elif outcome=$("handle_$kind" "$args" 2>"$errors"); then
        echo "${outcome:-"{\"outcome\": \"completed\"}"}"
    else
        sql -v error="$(tail -c 2000 "$errors")" \
            <<<"SELECT jsonb_build_object('outcome', 'retry', 'error', :'error'::text)"
    fi
}

if [ "$(sql <<<"SELECT awa.schema_version() < $schema_version")" = t ]; then
    echo 'JQ006: the database has an older awa: run `awa upgrade`' >&2
    exit 1
fi
sql <<<"SELECT awa.register_instance(:'me', '{\"client\": \"bash\"}')" >/dev/null
beat &
beating=$!
while [ -z "$stopping" ]; do
    IFS=$'\t' read -r kind args token < <(sql -F $'\t' <<'SQL'
        SELECT kind, args, jsonb_build_object('job_id', job_id, 'run_lease', run_lease,
            'claim_slot', claim_slot, 'batch_id', batch_id, 'position', "position")
        FROM awa.claim_ready_runtime(:'queue', 1, :'me')
SQL
    ) || { sleep 0.5 & wait $!; continue; }
    outcome=$(run "$kind" "$args")
    while true; do
        answer=$(sql -v token="$token" -v outcome="$outcome" <<'SQL'
            SELECT result
            FROM awa.finish_jobs(:'me', jsonb_build_array(:'token'::jsonb || :'outcome'::jsonb))
SQL
        )
        case $answer in
            busy) sleep 0.1 ;; # the same call again
            invalid | '') outcome='{"outcome": "retry", "error": "the outcome was refused"}' ;;
            *) break ;; # also stale: another worker has the job by now, or it was cancelled
        esac
    done
done
