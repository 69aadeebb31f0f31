#!/usr/bin/env python3
"""The scripts of this folder find what they look for. Python standard library only."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bundle_test  # noqa: E402
import planted_bugs  # noqa: E402
import sass  # noqa: E402

LOG = """
ptxas info    : Compiling entry function '_ZN42_GLOBAL__N__b5_9_launch_cu_x3kvm9attention3gpu\
13decode_kernelINS1_11DecodeShapeILNS1_7ElementE1ELj128ELj16ELj3ELj4ELj2EEEEEvNS1_12DecodeParamsE'\
 for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function '_ZN42_GLOBAL__N__b5_9_launch_cu_x3kvm9attention3gpu\
14prefill_kernelINS1_12PrefillShapeILNS1_7ElementE3ELj256ELj32ELj3ELj8ELj1ELj8EEEEEvNS1_12Decode\
ParamsE' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 251 registers, used 1 barriers
ptxas info    : Compiling entry function '_ZN3kvm12merge_kernelILj64EEEvNS0_11MergeParamsE' for \
'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function '_Z12empty_kernelv' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 2 registers, used 0 barriers
"""
FP16 = ("sm_90a", "decode_fp16_d128_rows32")
PREFILL = ("sm_90a", "prefill_fp8_d256_rows128")
MERGE = ("sm_80", "merge_d64")


class Budget(unittest.TestCase):
    def setUp(self):
        self.found = bundle_test.parse_log(LOG)
        self.shapes = bundle_test.parse_shapes(
            "decode fp16 d128 rows32 threads 128 shared 98304 on sm_80 65536 on sm_120 98000\n"
            "other\n"
            "prefill fp8 d256 rows128 threads 256 shared 90000 on sm_80 90000 on sm_120 90000\n")
        self.budget = {FP16: (255, 98304, 50.0, 0), MERGE: (40, 128, None, 0),
                       PREFILL: (251, 90000, 6.5, 0)}
        self.loops = {FP16: 50.0, PREFILL: 6.5}

    def judge(self):
        return bundle_test.judge(self.found, self.shapes, self.budget, self.loops)

    def test_reads_logs(self):
        self.assertEqual(self.found, {FP16: (255, 0, 16), MERGE: (40, 128, 0),
                                      PREFILL: (251, 0, 0)})
        self.assertEqual(self.shapes, {
            "decode_fp16_d128_rows32": {"sm_90a": 98304, "sm_80": 65536, "sm_120": 98000},
            PREFILL[1]: {"sm_90a": 90000, "sm_80": 90000, "sm_120": 90000}})
        on_sm_80 = ("sm_80", FP16[1])
        self.assertEqual(bundle_test.dynamic_shared(self.shapes, FP16), 98304)
        self.assertEqual(bundle_test.dynamic_shared(self.shapes, on_sm_80), 65536)
        self.assertEqual(bundle_test.dynamic_shared(self.shapes, MERGE), 0)

    def test_spills(self):
        self.assertEqual(self.judge(),
                         ["sm_90a decode_fp16_d128_rows32: spills 16 bytes; at most 0"])
        self.budget[FP16] = (255, 98304, 50.0, 16)
        self.assertEqual(self.judge(), [])

    def test_over_budget_unknown_and_missing(self):
        self.found[FP16] = (255, 0, 0)
        self.assertEqual(self.judge(), [])
        self.budget[FP16] = (254, 98303, 49.9, 0)
        self.assertEqual(len(self.judge()), 3)
        del self.budget[FP16]
        self.budget["sm_80", "append_bf16"] = (40, 0, None, 0)
        self.assertEqual(len(self.judge()), 2)

    def test_loops_that_are_not_found_or_have_no_budget(self):
        self.found[FP16] = (255, 0, 0)
        self.loops[FP16] = None
        self.assertEqual(self.judge(), ["sm_90a decode_fp16_d128_rows32: no loop over tiles found "
                                        "in its instructions"])
        self.loops = {PREFILL: 6.5}
        self.assertEqual(len(self.judge()), 1)
        self.loops = {FP16: 50.0, PREFILL: 6.5}
        self.budget[FP16] = (255, 98304, None, 0)
        self.assertEqual(len(self.judge()), 1)
        self.loops = None  # there was no tool
        self.assertEqual(self.judge(), [])

    def test_writes_what_it_reads(self):
        text = bundle_test.budget_text(self.found, self.shapes, self.loops, "13.0.88")
        # FP16 spills in the log.
        self.budget[FP16] = (255, 98304, 50.0, 16)
        self.assertEqual(bundle_test.parse_budget(text), self.budget)


# A loop over tiles of 64 bytes, so to speak: two copies, one product. It can go by a longer way to
# the copies, or without them; and a longer loop is around it.
LISTING = """
\tcode for sm_90a
\t\tFunction : _Z6kernelv
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   MOV R1, c[0x0][0x28] ;           /* 0x00000a0000017a02 */
        /*0010*/               @P0 BRA 0x50 ;                       /* 0x00000a0000017a02 */
                                                                    /* 0x000fe20000000f00 */
        /*0020*/              @!P1 BRA 0x80 ;                       /* 0x00000a0000017a02 */
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR4][R4.64] ;
        /*0040*/                   BRA 0x60 ;                       /* 0x00000a0000017a02 */
        /*0050*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR4][R4.64], !P2 ;
        /*0060*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3+0x200], desc[UR4][R6.64] ;
        /*0070*/                   LDGSTS.E [R8], desc[UR4][R6.64] ;
        /*0080*/                   LDGDEPBAR ;                      /* 0x00000a0000017a02 */
        /*0090*/                   HMMA.16816.F32 R8, R12, R14, R8 ;
        /*00a0*/              @!P2 BRA 0xc0 ;
        /*00b0*/                   FMUL R8, R8, R9 ;
        /*00c0*/                   BRA P3, 0x10 ;
        /*00d0*/               @P4 BRA 0x0 ;
        /*00e0*/                   EXIT ;
"""


class Sass(unittest.TestCase):
    def setUp(self):
        [(self.key, self.code)] = sass.parse(LISTING).items()

    def test_reads_listings(self):
        self.assertEqual(self.key, ("sm_90a", "_Z6kernelv"))
        self.assertEqual(len(self.code), 15)
        self.assertEqual(self.code[1], (0x10, "@P0 BRA 0x50"))

    def test_takes_the_shortest_way_with_all_copies(self):
        way = sass.round_of_loop(self.code, n_copies=2, n_products=1)
        self.assertEqual([sass.is_copy(text) for text in way].count(True), 2)
        # Over 0x10, 0x50: the copies by 0x30 take two instructions more.
        self.assertEqual(len(way), 8)

    def test_finds_no_loop_of_another_size(self):
        self.assertIsNone(sass.round_of_loop(self.code, n_copies=3, n_products=1))
        self.assertIsNone(sass.round_of_loop(self.code, n_copies=2, n_products=2))
        straight = [line for line in self.code if "BRA" not in line[1]]
        self.assertIsNone(sass.round_of_loop(straight, n_copies=2, n_products=1))

    def test_without_a_tool_nothing_is_read(self):
        with tempfile.TemporaryDirectory() as empty:
            root, path = bundle_test.ROOT, os.environ["PATH"]
            try:
                bundle_test.ROOT = os.environ["PATH"] = empty
                self.assertIsNone(bundle_test.find_cuobjdump())
                self.assertIsNone(bundle_test.read_loops(empty))
            finally:
                bundle_test.ROOT, os.environ["PATH"] = root, path


class PlantedBugs(unittest.TestCase):
    def test_every_bug_has_its_place(self):
        self.assertEqual(planted_bugs.check_texts(planted_bugs.BUGS), [])
        self.assertGreaterEqual(len(planted_bugs.BUGS), 20)

    def test_a_place_that_is_gone(self):
        gone = [("mask", planted_bugs.DECODE, "no such line", "")]
        self.assertEqual(len(planted_bugs.check_texts(gone)), 1)

    def test_classes_have_two_each(self):
        kinds = [kind for kind, *_ in planted_bugs.BUGS if kind not in ("stages", "plan")]
        self.assertEqual([k for k in set(kinds) if kinds.count(k) < 2], [])


class Bundle(unittest.TestCase):
    def test_without_a_compiler_it_is_skipped(self):
        script = os.path.join(bundle_test.ROOT, "scripts", "gpu_bundle.sh")
        with tempfile.TemporaryDirectory() as empty:
            for name in ("bash", "dirname", "env"):
                os.symlink(f"/usr/bin/{name}", os.path.join(empty, name))
            copy = os.path.join(empty, "scripts")  # no build/venv beside it
            os.mkdir(copy)
            with open(script, "rb") as source, open(os.path.join(copy, "b.sh"), "wb") as target:
                target.write(source.read())
            result = subprocess.run(["/usr/bin/bash", os.path.join(copy, "b.sh")],
                                    env={"PATH": empty}, capture_output=True, text=True)
            self.assertEqual(result.returncode, 77, result.stdout + result.stderr)


# Instead of kvm_gpu_check: a line of JSON each, one part that hangs, one that fails.
PROGRAM = """#!/bin/bash
[[ ! -e "$0.nogpu" ]] || exit 77
echo "{\\"bar\\":\\"$1\\",\\"case\\":\\"$*\\",\\"pass\\":true}"
echo "log of $1" >&2
[[ "$1" != copies ]] || sleep 60
[[ "$1" != bench ]] || exit 2
"""


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = lambda *names: os.path.join(self.folder.name, *names)
        with open(os.path.join(bundle_test.ROOT, "bench", "gpu", "run.sh"),
                  encoding="utf-8") as file:
            script = file.read()
        for name, text in (("run.sh", script), ("kvm_gpu_check", PROGRAM),
                           ("python3", "#!/bin/bash\nexit 1\n")):
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(self.path(name), 0o755)

    def run_all(self, *arguments, seconds="6"):
        environment = dict(os.environ, KVM_SECONDS=seconds,
                           PATH=self.folder.name + ":/usr/bin:/bin")
        return subprocess.run([self.path("run.sh"), *arguments], env=environment,
                              cwd=self.folder.name, capture_output=True, text=True)

    def parts(self, folder):
        with open(self.path(folder, "all.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def test_options_need_no_folder(self):
        result = self.run_all("--quick")
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        lines = self.parts("gpu_results")
        self.assertEqual(lines[0]["case"], "caps --quick")

    def test_a_part_that_hangs_or_fails_costs_the_others_nothing_but_time(self):
        result = self.run_all("out", seconds="4")
        self.assertEqual(result.returncode, 1)
        names = [line["bar"] for line in self.parts("out")]
        self.assertEqual(names, ["caps", "verify", "engine", "bench", "gather", "rows",
                                 "copies"])
        self.assertIn("copies: cut off", result.stdout)
        self.assertIn("ipc: left out", result.stdout)
        self.assertIn("bench: status 2", result.stdout)
        self.assertIn("bars met: 7", result.stdout)

    def test_without_a_gpu(self):
        with open(self.path("kvm_gpu_check.nogpu"), "w", encoding="utf-8"):
            pass
        result = self.run_all("out")
        self.assertEqual(result.returncode, 77)
        self.assertIn("nothing was measured", result.stdout.splitlines()[-1])

    def test_help_and_wrong_usage_measure_nothing(self):
        for arguments, status in ((["--help"], 0), (["out", "-h"], 0), (["--fast"], 2),
                                  (["out", "more"], 2), (["--max-gib"], 2)):
            result = self.run_all(*arguments)
            self.assertEqual(result.returncode, status, arguments)
            self.assertNotIn("caps: status", result.stdout)
            self.assertFalse(os.path.exists(self.path("gpu_results")))
            self.assertFalse(os.path.exists(self.path("out")))
        self.assertEqual(self.run_all("out", "--max-gib", "8", "--quick").returncode, 1)


if __name__ == "__main__":
    unittest.main()
