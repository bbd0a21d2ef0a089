#!/usr/bin/env bash
# Prints the memory of `topw serve` once the model is open and under load, and its CPU time under load: eight clients,
# each of which sends ten streams of 300 tokens one after the other. The cores in use need an otherwise idle machine; the
# cores that it could use are all threads' CPU time divided by that of the busiest thread.
# Usage: deploy/measure.sh OUT [OPTIONS OF topw serve]. Set TOPW to the command if it is not on PATH. Needs Linux and curl.
set -euo pipefail
place="$(mktemp -d)"
socket="$place/socket"
"${TOPW:-topw}" serve "$@" --uds "$socket" 2> "$place/log" &
server=$!
trap 'kill "$server" 2> /dev/null || true; rm -rf "$place"' EXIT
until curl --silent --fail --unix-socket "$socket" http://server/health > /dev/null; do
  kill -0 "$server" 2> /dev/null || { cat "$place/log"; exit 1; }
  sleep 0.2
done
peak() { awk '/VmHWM/ { printf "%s: %.0f MB\n", name, $2 * 1024 / 1e6 }' name="$1" "/proc/$server/status"; }
peak "opened"
spent() {  # seconds of each thread: utime + stime
  awk -v ticks="$(getconf CLK_TCK)" '{ id = $1; sub(/.*\) /, ""); print id, ($12 + $13) / ticks }' "/proc/$server/task/"*/stat
}
client() {
  local body="{\"prompt\": \"def f$1(\", \"max_tokens\": 300, \"ignore_eos\": true, \"preset\": \"lively\", \"stream\": true}"
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    curl --silent --fail --unix-socket "$socket" http://server/v1/completions -d "$body" > /dev/null
  done
}
clients=()
before="$(spent)" started="$EPOCHREALTIME"
for number in 1 2 3 4 5 6 7 8; do
  client "$number" &
  clients+=($!)
done
for each in "${clients[@]}"; do wait "$each"; done
ended="$EPOCHREALTIME" after="$(spent)"
peak "eight streams"
awk -v started="$started" -v ended="$ended" '
  NR == FNR { before[$1] = $2; next }
  { used = $2 - before[$1]; total += used; if (used > most) most = used }
  END {
    printf "eight streams: %.1f s of CPU in %.1f s, %.2f cores; %.0f us for each of 24,000 tokens\n",
      total, ended - started, total / (ended - started), total / 24000 * 1e6
    printf "eight streams: %.2f cores if the busiest thread never waits\n", total / most
  }' <(echo "$before") <(echo "$after")
