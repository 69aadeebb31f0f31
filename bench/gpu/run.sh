#!/usr/bin/env bash
# Takes all figures on the machine at hand: run.sh [OUTPUT_FOLDER] [--quick] [--max-gib N]. The
# folder is gpu_results if none is named, options are those of kvm_gpu_check. Six minutes by
# estimate, and never more than KVM_SECONDS (570): what would take longer is cut off, and what comes
# then is left out.
#
# Writes caps.jsonl, verify.jsonl and so on, and every line into all.jsonl as it comes: a run that
# is broken off leaves what it had. Goes on when a part fails, and without the tools that are not
# there. Exit status: 77 without a GPU, 1 where a bar was missed or something failed, 2 for wrong
# usage.
set -uo pipefail
SECONDS=0

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
usage() { sed -n '2,/^set /{/^#/s/^# \?//p}' "${BASH_SOURCE[0]}"; }
for argument in "$@"; do
  if [[ "$argument" == --help || "$argument" == -h ]]; then
    usage
    exit 0
  fi
done
out=gpu_results
if (($# > 0)) && [[ "$1" != -* ]]; then
  out="$1"
  shift
fi
for ((i = 1; i <= $#; i++)); do
  [[ "${!i}" != --quick ]] || continue
  [[ "${!i}" == --max-gib && i -lt $# ]] || {
    echo "run.sh: unknown option ${!i}; --help lists them" >&2
    exit 2
  }
  i=$((i + 1))
done
check="$here/kvm_gpu_check"
budget="${KVM_SECONDS:-570}"
status=0
mkdir -p "$out" && : >"$out/all.jsonl" || exit 1

# take FILE NAME SECONDS COMMAND...: its lines go to NAME.jsonl and to FILE as well, the others to
# NAME.log. It has so many seconds, or what is left; 124 where that was too little.
take() {
  local also="$1" name="$2" most="$3" left=$((budget - SECONDS)) code
  shift 3
  most=$((most < left ? most : left))
  if ((most < 2)); then
    echo "$name: left out, for $budget seconds are over" | tee "$out/$name.log"
    return 124
  fi
  timeout -k 5 "$most" "$@" 2>"$out/$name.log" | tee "$out/$name.jsonl" >>"$also"
  code=${PIPESTATUS[0]}
  ((code != 124 && code != 137)) || echo "$name: cut off after $most seconds" >>"$out/$name.log"
  cat "$out/$name.log"
  echo "$name: status $code, $SECONDS seconds in all"
  return "$code"
}

take "$out/all.jsonl" caps 60 "$check" caps "$@"
code=$?
if ((code == 77)); then
  echo 'no GPU that CUDA can use on this machine: nothing was measured, exit status 77'
  exit 77
fi
((code == 0)) || status=1
for part in verify:120 engine:150 bench:200 gather:90 rows:30 copies:90 ipc:120 server:90 \
  sweep:90; do
  take "$out/all.jsonl" "${part%:*}" "${part#*:}" "$check" "${part%:*}" "$@" || status=1
done
if command -v compute-sanitizer >/dev/null; then
  # By how much they are likely to find.
  for tool in memcheck racecheck synccheck initcheck; do
    take /dev/null "sanitizer-$tool" 120 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$check" verify --small
    code=$?
    pass=true
    ((code == 0)) || pass=false status=1
    printf '{"bar":"compute-sanitizer","case":"%s","unit":"exit status","measured":%d,' \
      "$tool" "$code" >>"$out/all.jsonl"
    printf '"ceiling":null,"limit":0,"pass":%s}\n' "$pass" >>"$out/all.jsonl"
  done
else
  echo 'no compute-sanitizer here'
fi
has_torch='import sys, torch; sys.exit(not torch.cuda.is_available())'
if ((budget - SECONDS > 60)) && timeout 60 python3 -c "$has_torch" 2>/dev/null; then
  take "$out/all.jsonl" sdpa 240 python3 "$here/sdpa_peer.py" "$out/bench.jsonl" || status=1
else
  echo 'no time, or no torch with CUDA: not compared with scaled_dot_product_attention'
fi
echo "bars met: $(grep -c '"pass": *true' "$out/all.jsonl")"
echo "bars missed: $(grep -c '"pass": *false' "$out/all.jsonl")"
grep '"pass": *false' "$out/all.jsonl"
exit "$status"
