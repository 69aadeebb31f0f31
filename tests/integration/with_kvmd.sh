#!/usr/bin/env bash
# Runs a command with a daemon of its own:  with_kvmd.sh COMMAND [ARGUMENT ...]
# The daemon is $KVM_BIN_DIR/kvmd; it listens on a socket in a fresh folder, which COMMAND finds in
# KVM_SOCKET. KVMD_ARGS, split at spaces, are further arguments of the daemon.
# Exit status: COMMAND's; where that is 0, the daemon's after SIGTERM.
set -euo pipefail

folder="$(mktemp -d)"
export KVM_SOCKET="$folder/kvmd.sock"
read -ra extra <<<"${KVMD_ARGS:-}"
"$KVM_BIN_DIR/kvmd" --socket "$KVM_SOCKET" "${extra[@]}" >"$folder/log" 2>&1 &
kvmd=$!

# shellcheck disable=SC2317 # Called by the trap.
stop() {
  kill -KILL "$kvmd" 2>/dev/null || true
  rm -rf "$folder"
}
trap stop EXIT

give_up() {
  printf 'with_kvmd.sh: %s; its log:\n' "$1" >&2
  cat "$folder/log" >&2
  exit 1
}

# A folder of its own for the socket: nobody else can have made it.
for ((tenths = 0; ; ++tenths)); do
  [[ -S "$KVM_SOCKET" ]] && break
  kill -0 "$kvmd" 2>/dev/null || give_up "kvmd has ended"
  ((tenths < 200)) || give_up "kvmd has made no socket in 20 s"
  sleep 0.1
done

status=0
"$@" || status=$?
kill -TERM "$kvmd" 2>/dev/null || true
kvmd_status=0
wait "$kvmd" || kvmd_status=$?
if ((kvmd_status != 0)); then
  printf 'with_kvmd.sh: kvmd ended with status %d; its log:\n' "$kvmd_status" >&2
  cat "$folder/log" >&2
fi
exit $((status != 0 ? status : kvmd_status))
