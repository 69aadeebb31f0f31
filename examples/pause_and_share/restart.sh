#!/usr/bin/env bash
# Runs both halves of the example over one disk, each with a kvmd of its own:
#   restart.sh WITH_KVMD PROGRAM
set -euo pipefail

with_kvmd="$1" program="$2"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
export KVMD_ARGS="--disk-directories $folder --disk-capacity 256MiB --host-capacity 256MiB"

"$with_kvmd" "$program" pause
"$with_kvmd" "$program" resume
