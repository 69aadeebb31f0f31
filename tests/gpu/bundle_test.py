#!/usr/bin/env python3
"""Makes the GPU bundle and holds what the compiler made of the kernels to the budget.

Usage: bundle_test.py BUILD_FOLDER [--update]

budget_cuda13.txt, and budget_cuda12.txt for an nvcc of CUDA 12, have a line per architecture and
kernel: registers at most, bytes of shared memory, and the instructions of the loop over tiles: of
decode kernels for each KiB of K and V, of prefill kernels for each product of the matrix unit. With
KVM_GPU_ARCHITECTURES (CMake's names, as for gpu_bundle.sh) only their lines count. A kernel may
spill only where its line says how many bytes at most, with spills=N. A kernel without a line, or a
line without a kernel, is a failure; --update writes the file as it should be, to show in review.
Also runs the program: without a GPU it has to say so, with status 77. Exit status 77 where there is
no nvcc. Python standard library only.

Instructions are counted in the object file, as cuobjdump prints it: the shortest way round the loop
that copies a tile and evaluates one (sass.py has the rules). cuobjdump, and nvdisasm which it runs,
are those of the PATH or of packages/python.txt in build/venv. Where there are none this part is
left out, and the last line says so.
"""

import glob
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sass  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
DECODE = re.compile(r"decode_kernel\S*ElementE(\d)ELj(\d+)ELj(\d+)ELj(\d+)ELj(\d+)ELj(\d+)E")
PREFILL = re.compile(r"prefill_kernel\S*ElementE(\d)ELj(\d+)ELj(\d+)ELj\d+ELj(\d+)ELj(\d+)ELj\d+E")
MLA = re.compile(r"decode_kernel\S*MlaShape\S*ElementE(\d)ELj(\d+)ELj(\d+)ELj(\d+)E")
MERGE = re.compile(r"merge_kernelILj(\d+)E")
APPEND = re.compile(r"append_kernelIL\S*ElementE(\d)E")
READ = re.compile(r"read_kernelIL\S*ElementE(\d)E")
ELEMENT = {"0": "bf16", "1": "fp16", "2": "int8", "3": "fp8", "4": "int4"}
ELEMENT_BITS = {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8, "int4": 4}


def kernel_name(symbol):
    """A short name for a mangled one; None for kernels that are not shipped."""
    if match := DECODE.search(symbol):
        element, dim, _, _, _, row_tiles = match.groups()
        return f"decode_{ELEMENT[element]}_d{dim}_rows{16 * int(row_tiles)}"
    if match := PREFILL.search(symbol):
        return f"prefill_{ELEMENT[match.group(1)]}_d{match.group(2)}_rows128"
    if match := MLA.search(symbol):
        element, _, _, row_tiles = match.groups()
        return f"decode_{ELEMENT[element]}_d{sass.MLA_DIM}_rows{16 * int(row_tiles)}"
    if match := MERGE.search(symbol):
        return f"merge_d{match.group(1)}"
    for name in ("lengths", "scatter", "move", "merge_states"):
        if f"{name}_kernel" in symbol:
            return name
    if match := APPEND.search(symbol):
        return f"append_{ELEMENT[match.group(1)]}"
    if match := READ.search(symbol):
        return f"read_{ELEMENT[match.group(1)]}"
    return None


def parse_log(text):
    """{(architecture, kernel): (registers, static shared bytes, spilled bytes)}"""
    found = {}
    current, spilled = None, 0
    for line in text.splitlines():
        if match := ENTRY.search(line):
            name = kernel_name(match.group(1))
            current, spilled = ((match.group(2), name) if name else None), 0
        elif match := SPILLS.search(line):
            spilled = sum(int(n) for n in match.groups())
        elif (match := USED.search(line)) and current:
            found[current] = (int(match.group(1)), int(match.group(2) or 0), spilled)
            current = None
    return found


def parse_shapes(text):
    """{kernel: {architecture: dynamic shared bytes}} as the program lists them."""
    shapes = {}
    for line in text.splitlines():
        match = re.match(r"(decode|prefill) (\w+) (d\d+) (rows\d+) threads \d+ shared (\d+) on "
                         r"sm_80 (\d+) on sm_120 (\d+)$", line)
        if match:
            shapes["_".join(match.group(1, 2, 3, 4))] = {
                "sm_90a": int(match.group(5)), "sm_80": int(match.group(6)),
                "sm_120": int(match.group(7))}
    return shapes


def dynamic_shared(shapes, key):
    architecture, kernel = key
    return shapes.get(kernel, {}).get(architecture, 0)


def find_cuobjdump():
    """A cuobjdump that finds its nvdisasm, or None."""
    pattern = os.path.join(ROOT, "build", "venv", "lib", "python3*", "site-packages", "nvidia",
                           "*", "bin")
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *sorted(glob.glob(pattern))]:
        tools = [shutil.which(name, path=folder) for name in ("cuobjdump", "nvdisasm")]
        if folder and all(tools):
            return tools[0]
    return None


def loop_lengths(text):
    """{(architecture, kernel): instructions} of the decode kernels that are printed, for each KiB,
    and of the prefill kernels, for each product; None where the loop over tiles is not found."""
    lengths = {}
    for (architecture, symbol), code in sass.parse(text).items():
        if match := DECODE.search(symbol):
            element, dim, tile, _, _, row_tiles = map(int, match.groups())
            lengths[architecture, kernel_name(symbol)] = sass.per_kib(
                code, ELEMENT_BITS[ELEMENT[str(element)]], dim, tile, row_tiles)
        elif match := PREFILL.search(symbol):
            element, dim, tile, warps, row_tiles = map(int, match.groups())
            lengths[architecture, kernel_name(symbol)] = sass.per_product(
                code, ELEMENT_BITS[ELEMENT[str(element)]], dim, tile, warps, row_tiles)
        elif match := MLA.search(symbol):
            _, _, _, row_tiles = map(int, match.groups())
            # Code for other architectures has tiles of its own (shapes.h).
            tile = 32 if row_tiles == 4 and architecture == "sm_90a" else 16
            lengths[architecture, kernel_name(symbol)] = sass.mla_per_kib(code, tile, row_tiles)
    return lengths


def read_loops(folder):
    """The same of the object file that was made in `folder`; None where no tool reads it."""
    tool = find_cuobjdump()
    if not tool:
        return None
    [made] = glob.glob(os.path.join(folder, "**", "launch.cu.o"), recursive=True)
    environment = dict(os.environ, NVDISASM_PATH=os.path.dirname(tool))
    return loop_lengths(subprocess.run([tool, "-sass", made], check=True, capture_output=True,
                                       text=True, env=environment).stdout)


def nvcc_version(folder):
    """The nvcc that made what is in `folder`, as CMake wrote it down: "13.0.88"."""
    [path] = glob.glob(os.path.join(folder, "CMakeFiles", "*", "CMakeCUDACompiler.cmake"))
    with open(path, encoding="utf-8") as file:
        return re.search(r'CMAKE_CUDA_COMPILER_VERSION "([\d.]+)"', file.read()).group(1)


def parse_budget(text):
    budget = {}
    for line in text.splitlines():
        words = line.split("#", 1)[0].split()
        if words:
            architecture, kernel, registers, shared, loop = words[:5]
            spills = int(words[5].removeprefix("spills=")) if len(words) > 5 else 0
            budget[architecture, kernel] = (int(registers), int(shared),
                                            None if loop == "-" else float(loop), spills)
    return budget


def judge_loop(where, most, length):
    if length is None:
        return [f"{where}: no loop over tiles found in its instructions"]
    if most is None:
        return [f"{where}: no budget for the instructions of its loop ({length})"]
    if length > most:
        return [f"{where}: {length} instructions for each KiB or product; at most {most}"]
    return []


def judge(found, shapes, budget, loops):
    """Complaints about kernels that are over budget, unknown or missing. loops: None = not read."""
    complaints = []
    for key, (registers, shared, spilled) in sorted(found.items()):
        shared += dynamic_shared(shapes, key)
        where = " ".join(key)
        if key not in budget:
            complaints.append(f"{where}: not in the budget ({registers} registers, "
                              f"{spilled} bytes spilled)")
            continue
        most_registers, most_shared, most_loop, most_spilled = budget[key]
        if spilled > most_spilled:
            complaints.append(f"{where}: spills {spilled} bytes; at most {most_spilled}")
        if registers > most_registers:
            complaints.append(f"{where}: {registers} registers; at most {most_registers}")
        if shared > most_shared:
            complaints.append(f"{where}: {shared} bytes of shared memory; at most {most_shared}")
        if loops is not None and key[1].startswith(("decode_", "prefill_")):
            complaints += judge_loop(where, most_loop, loops.get(key))
    complaints += [f"{' '.join(key)}: in the budget, but not compiled"
                   for key in sorted(budget.keys() - found.keys())]
    return complaints


def budget_text(found, shapes, loops, version):
    lines = [f"# What nvcc {version} makes of the shipped kernels: architecture, kernel,",
             "# registers, bytes of shared memory, instructions of the loop over tiles (decode:",
             "# for each KiB of K and V; prefill: for each product), each at most. None may",
             "# spill, but where a line says so. --update writes this file."]
    for key, (registers, shared, spilled) in sorted(found.items()):
        architecture, kernel = key
        loop = loops.get(key)
        lines.append(f"{architecture:7} {kernel:24} {registers:4} "
                     f"{shared + dynamic_shared(shapes, key):7} {'-' if loop is None else loop:>6}"
                     f"{f' spills={spilled}' if spilled else ''}")
    return "\n".join(lines) + "\n"


def main():
    folder = sys.argv[1]
    made = subprocess.run([os.path.join(ROOT, "scripts", "gpu_bundle.sh"), folder])
    if made.returncode != 0:
        return made.returncode
    chosen = {"sm_" + name.removesuffix("-real")
              for name in os.environ.get("KVM_GPU_ARCHITECTURES", "").split(";") if name}
    program = os.path.join(folder if chosen else os.path.join(ROOT, "build"), "gpu_bundle",
                           "kvm_gpu_check")
    with open(os.path.join(folder, "compile.log"), encoding="utf-8", errors="replace") as file:
        found = parse_log(file.read())
    version = nvcc_version(folder)
    budget_path = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                               f"budget_cuda{version.split('.')[0]}.txt")
    shapes = parse_shapes(subprocess.run([program, "kernels"], check=True, capture_output=True,
                                         text=True).stdout)
    loops = read_loops(folder)
    if "--update" in sys.argv:
        if loops is None:
            sys.exit("--update takes a cuobjdump (set sass of packages/python.txt)")
        with open(budget_path, "w", encoding="utf-8") as file:
            file.write(budget_text(found, shapes, loops, version))
    if not os.path.exists(budget_path):
        sys.exit(f"there is no {budget_path}: --update writes it")
    with open(budget_path, encoding="utf-8") as file:
        text = file.read()
    if f"nvcc {version} " not in text:
        print(f"this is nvcc {version}; {text.splitlines()[0].lstrip('# ')}")
    budget = parse_budget(text)
    complaints = judge(found, shapes, {key: most for key, most in budget.items()
                                       if not chosen or key[0] in chosen}, loops)
    # Without a GPU the program has to say so; hidden from it here, where there is one.
    hidden = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    for command in ("caps", "verify", "bench", "sweep", "copies", "gather", "ipc", "engine", "all"):
        status = subprocess.run([program, command], env=hidden, capture_output=True).returncode
        if status != 77:
            complaints.append(f"kvm_gpu_check {command}: status {status} without a GPU, not 77")
    print("\n".join(complaints))
    read = ("instructions not counted: no cuobjdump with nvdisasm (PATH, or the sass set of "
            "packages/python.txt)" if loops is None else f"{len(loops)} loops counted")
    print(f"{len(found)} kernels, {len(complaints)} complaints; {read}")
    return 1 if complaints or not found else 0


if __name__ == "__main__":
    sys.exit(main())
