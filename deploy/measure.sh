#!/usr/bin/env bash
# Prints the memory of `topw serve` once the model is open, and with eight concurrent streams.
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
peak() { awk '/VmHWM/ { printf "%s: %.0f MiB\n", name, $2 / 1024 }' name="$1" "/proc/$server/status"; }
peak "opened"
streams=()
for number in 1 2 3 4 5 6 7 8; do
  body="{\"prompt\": \"def f$number(\", \"max_tokens\": 300, \"ignore_eos\": true, \"preset\": \"lively\", \"stream\": true}"
  curl --silent --fail --unix-socket "$socket" http://server/v1/completions -d "$body" > /dev/null &
  streams+=($!)
done
wait "${streams[@]}"
peak "eight streams"
