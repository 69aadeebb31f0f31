#!/usr/bin/env bash
# Takes all figures on the machine at hand: run.sh [OUTPUT_FOLDER] [--quick]. Nine minutes by
# estimate. Writes caps.jsonl, verify.jsonl and so on, and all.jsonl with everything. Goes on when a
# part fails, and without the tools that are not there. Exit status: 77 without a GPU, 1 where a bar
# was missed or something failed.
set -uo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-gpu_results}"
shift || true
check="$here/kvm_gpu_check"
mkdir -p "$out"
status=0

"$check" caps "$@" >"$out/caps.jsonl" 2>"$out/caps.log"
code=$?
if ((code == 77)); then
  cat "$out/caps.log"
  exit 77
fi
((code == 0)) || status=1
for part in verify engine bench sweep copies gather ipc; do
  timeout 300 "$check" "$part" "$@" >"$out/$part.jsonl" 2>"$out/$part.log" || status=1
  cat "$out/$part.log"
done
if python3 -c 'import torch' 2>/dev/null; then
  timeout 240 python3 "$here/sdpa_peer.py" "$out/bench.jsonl" \
    >"$out/sdpa.jsonl" 2>"$out/sdpa.log" || status=1
else
  echo 'no torch here: not compared with scaled_dot_product_attention'
fi
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    timeout 200 compute-sanitizer --tool "$tool" --error-exitcode 9 "$check" verify --small \
      >"$out/sanitizer-$tool.log" 2>&1
    code=$?
    pass=true
    ((code == 0)) || pass=false status=1
    printf '{"bar":"compute-sanitizer","case":"%s","unit":"exit status","measured":%d,' \
      "$tool" "$code" >>"$out/sanitizer.jsonl"
    printf '"ceiling":null,"limit":0,"pass":%s}\n' "$pass" >>"$out/sanitizer.jsonl"
  done
else
  echo 'no compute-sanitizer here'
fi
cat "$out"/{caps,verify,engine,bench,sweep,copies,gather,ipc,sdpa,sanitizer}.jsonl \
  >"$out/all.jsonl" 2>/dev/null
grep -c '"pass":true' "$out/all.jsonl" | sed 's/^/bars met: /'
echo "bars missed: $(grep -c '"pass":false' "$out/all.jsonl")"
grep '"pass":false' "$out/all.jsonl"
exit "$status"
