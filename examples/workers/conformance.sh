# Handlers of the kinds that `awa conformance` enqueues, for worker.sh.
handle_conformance_succeed() { :; }
handle_conformance_echo() { echo "{\"outcome\": \"completed\", \"result\": $1}"; }
handle_conformance_raise() { echo "no luck" >&2; return 1; }
handle_conformance_retry() { echo '{"outcome": "retry", "delay_seconds": 0, "error": "not yet"}'; }
handle_conformance_snooze() { echo '{"outcome": "snooze", "delay_seconds": 600}'; }
handle_conformance_cancel() { echo '{"outcome": "cancel", "reason": "not needed"}'; }
handle_conformance_fail() { echo '{"outcome": "fail", "reason": "hopeless"}'; }
handle_conformance_sleep() {
    local seconds=${1#*\"seconds\": }
    sleep "${seconds%\}}"
}
