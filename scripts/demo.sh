#!/usr/bin/env bash
# The demo: a language model whose only KV cache is kvmd writes text; then a decode over a long
# context at the geometry of Llama-3.1-8B, against the read ceiling of this machine's memory.
# `./dev demo` builds what this needs. Arguments go to `kvm-bench decode`.
set -euo pipefail

bin="${KVM_BIN_DIR:-build/release/bin}"
folder="$(mktemp -d)"
socket="$folder/kvmd.sock"
daemon=""
cleanup() {
  [[ -z "$daemon" ]] || kill "$daemon" 2>/dev/null || true
  [[ -z "$daemon" ]] || wait "$daemon" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT

printf '\n1. A language model, its own process, keeps its keys and values in kvmd.\n\n'
"$bin/kvmd" --socket "$socket" --log-level warning &
daemon=$!
for _ in $(seq 100); do
  "$bin/kvmctl" --socket "$socket" ping -c 1 >/dev/null 2>&1 && break
  kill -0 "$daemon" 2>/dev/null || { echo "demo: kvmd ended: see above" >&2; exit 1; }
  sleep 0.05
done
for prompt in "The king" "And it came to pass" "In the beginning"; do
  "$bin/kvm-llama" --socket "$socket" --tokens 120 --seed 7 "$prompt"
  printf '\n'
done
"$bin/kvmctl" --socket "$socket" status

kill "$daemon" && wait "$daemon" || true
daemon=""

printf '\n2. Decoding at Llama-3.1-8B geometry: 32 layers, 32 query and 8 KV heads of 128, bf16.\n'
printf '   One kvm_step per layer through the socket; every token reads the whole context.\n'
printf '   fraction: of the fastest read-only kernel over the same pages, in the same run.\n\n'
"$bin/kvm-bench" decode --repeats 7 "$@"
