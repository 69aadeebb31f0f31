#!/usr/bin/env bash
# Makes the bundle that checks and measures the GPU kernels on a machine with nothing but a driver:
# build/gpu_bundle/ and build/gpu_bundle.tar.gz, one folder with kvm_gpu_check, run.sh and
# sdpa_peer.py. Needs nvcc, g++ and CMake, no GPU.
#
#   scripts/gpu_bundle.sh [BUILD_FOLDER]        default: build/gpu_check
#
# nvcc is the one of $CUDACXX, of the PATH, or of packages/python.txt in build/venv. Exit status 77
# where there is none; 1 where the bundle would need more than libc, or is larger than 24 MiB.
# With KVM_GPU_ARCHITECTURES=A;B (as CMake has them) it is for those only, and lies in BUILD_FOLDER.
# BUILD_FOLDER/compile.log holds what ptxas said of the shipped kernels.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-$root/build/gpu_check}"
bundle="$root/build/gpu_bundle"
architectures=()
if [[ -n "${KVM_GPU_ARCHITECTURES:-}" ]]; then
  bundle="$folder/gpu_bundle"
  architectures=(-DKVM_GPU_ARCHITECTURES="$KVM_GPU_ARCHITECTURES")
fi
max_bytes=$((24 << 20))

fail() {
  printf 'gpu_bundle: %s\n' "$*" >&2
  exit 1
}

# The wheels have lib/ where nvcc looks for lib64/.
find_nvcc() {
  local candidate toolkit
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" \
    "$root"/build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
    [[ -n "$candidate" && -x "$candidate" ]] || continue
    toolkit="$(dirname "$(dirname "$candidate")")"
    [[ "$candidate" != */site-packages/* || -e "$toolkit/lib64" ]] || ln -s lib "$toolkit/lib64"
    printf '%s\n' "$candidate"
    return
  done
  return 1
}

nvcc="$(find_nvcc)" || {
  echo 'gpu_bundle: no nvcc (CUDACXX, PATH, or pip install of the cuda set of packages/python.txt)'
  exit 77
}
echo "gpu_bundle: $nvcc, $("$nvcc" --version | sed -n 's/.*release \([^,]*\),.*/\1/p')"

launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
mkdir -p "$folder"
cmake -S "$root/bench/gpu" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CUDA_COMPILER="$nvcc" "${launcher[@]}" "${architectures[@]}" \
  >"$folder/configure.log" 2>&1 || {
  cat "$folder/configure.log"
  fail 'CMake could not configure bench/gpu'
}
# compile.log is of the last build that compiled the shipped kernels, which others need not do.
forget_kernels() { find "$folder" -name 'launch.cu.o' -delete; }
[[ -s "$folder/compile.log" ]] || forget_kernels
cmake --build "$folder" -j "${KVM_JOBS:-2}" >"$folder/build.log" 2>&1 || {
  forget_kernels
  tail -n 40 "$folder/build.log"
  fail 'the build failed'
}
if grep -q 'Compiling entry function .*decode_kernel' "$folder/build.log"; then
  cp "$folder/build.log" "$folder/compile.log"
fi

rm -rf "$bundle"
mkdir -p "$bundle"
cp "$folder/kvm_gpu_check" "$root/bench/gpu/run.sh" "$root/bench/gpu/sdpa_peer.py" "$bundle/"
strip "$bundle/kvm_gpu_check"

# libm and the loader are parts of glibc.
foreign="$(readelf -d "$bundle/kvm_gpu_check" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' |
  grep -vE '^(libc|libm|ld-linux-x86-64)\.so\.' || true)"
[[ -z "$foreign" ]] || fail "kvm_gpu_check needs more than libc: $foreign"
bytes="$(du -sb "$bundle" | cut -f1)"
((bytes <= max_bytes)) || fail "the bundle has $bytes bytes; at most $max_bytes"
tar -C "${bundle%/*}" -czf "$bundle.tar.gz" gpu_bundle
echo "gpu_bundle: ${bundle#"$root/"}, $bytes bytes, needs libc only"
