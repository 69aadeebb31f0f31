#!/usr/bin/env bash
# Fetches nvcc 12.4 and what it takes to compile kvm's GPU part into FOLDER, as NVIDIA lays out a
# toolkit: FOLDER/bin/nvcc. With it, code is made for drivers from 12.0 on (docs/gpu.md). For a
# machine whose own nvcc is of CUDA 13; where there is an nvcc 12, nothing of this is needed.
#
#   scripts/cuda12_toolkit.sh [FOLDER]      default: build/cuda12
#
# They come from packages of Debian 13 (non-free, under NVIDIA's licence), whose signatures apt
# checks. Nothing is installed. 1 GB is fetched, 200 MB stay.
# Needs a Debian system, 4 GB of disk; exit status 77 where the packages cannot be had.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="$(realpath -m -- "${1:-$root/build/cuda12}")"
packages=(nvidia-cuda-toolkit nvidia-cuda-dev libcudart12)

if [[ -x "$folder/bin/nvcc" ]] && "$folder/bin/nvcc" --version >/dev/null; then
  echo "cuda12_toolkit: $folder is there"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo 'cuda12_toolkit: not a Debian system: take CUDA 12 from NVIDIA, and give its nvcc as CUDACXX'
  exit 77
fi

scratch="$folder.scratch"
rm -rf "$scratch"
mkdir -p "$scratch"/{state/lists/partial,cache/archives/partial,files}
trap 'rm -rf "$scratch"' EXIT

# An apt of its own: the machine's lists and sources stay as they are.
echo 'deb http://deb.debian.org/debian trixie non-free' >"$scratch/sources.list"
private_apt() {
  apt-get -qq -o "Dir::State=$scratch/state" -o "Dir::Cache=$scratch/cache" \
    -o "Dir::Etc::sourcelist=$scratch/sources.list" -o Dir::Etc::sourceparts=- \
    -o APT::Sandbox::User=root "$@"
}
echo "cuda12_toolkit: fetching ${packages[*]} of Debian 13"
if ! private_apt update || ! (cd "$scratch" && private_apt download "${packages[@]}"); then
  echo 'cuda12_toolkit: the packages cannot be had'
  exit 77
fi
# Each of them lacks some of this, which tar takes for a failure; the copies below miss nothing.
for package in "${packages[@]}"; do
  dpkg-deb --fsys-tarfile "$scratch/$package"_*.deb | tar -x -C "$scratch/files" --wildcards \
    './usr/include/*' './usr/bin/*' './usr/lib/nvidia-cuda-toolkit/*' \
    './usr/lib/*/libcudart*' './usr/lib/*/libcudadevrt.a' 2>/dev/null || true
done

own="$scratch/files/usr/lib/nvidia-cuda-toolkit"
made="$scratch/made"
mkdir -p "$made"/{bin,include,lib64,nvvm/bin,nvvm/libdevice}
cp "$own"/bin/nvcc "$made/bin/"
cp -r "$own"/bin/crt "$made/bin/"
cp "$scratch"/files/usr/bin/{bin2c,cudafe++,cuobjdump,fatbinary,nvdisasm,nvlink,ptxas} "$made/bin/"
cp "$own"/bin/cicc "$made/nvvm/bin/"
cp "$own"/libdevice/libdevice.10.bc "$made/nvvm/libdevice/"
cp -r "$scratch"/files/usr/include/. "$made/include/"
cp -P "$scratch"/files/usr/lib/*/libcud{art*,adevrt.a} "$made/lib64/"
# Debian's profile has the folders of an installed package.
cat >"$made/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
rm -rf "$folder"
mv "$made" "$folder"
"$folder/bin/nvcc" --version | sed -n 's/.*release \([^,]*\),.*/cuda12_toolkit: nvcc \1/p'
