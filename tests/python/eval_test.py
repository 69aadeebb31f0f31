# SPDX-License-Identifier: Apache-2.0
"""kvm-eval: its reader of GGUF against files made here, and its measures on a tiny model.

Needs PyTorch and transformers; skipped (77) without."""

import contextlib
import importlib.util
import io
import json
import math
import struct
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
import numpy as np

import kvm
from kvm.eval import _intervals, _kvrec, _real, recorder
from kvm.eval.__main__ import main
from kvm.eval._gguf import Gguf, GgufError
from rig import ROOT


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def make_gguf(metadata, tensors):
    """tensors: name, shape as NumPy counts, type, bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, kind, value in metadata:
        head += string(key) + struct.pack("<I", kind) + value
    offset, body = 0, b""
    for name, shape, kind, data in tensors:
        head += string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        padded = data + bytes(-len(data) % 32)
        offset += len(padded)
        body += padded
    return head + bytes(-len(head) % 32) + body


class Reader(unittest.TestCase):
    def read(self, data):
        file = tempfile.NamedTemporaryFile(suffix=".gguf")
        self.addCleanup(file.close)
        file.write(data)
        file.flush()
        return Gguf(Path(file.name))

    def test_all_types(self):
        random = np.random.default_rng(1)
        f32 = random.standard_normal((3, 5)).astype("<f4")
        f16 = random.standard_normal((2, 4)).astype("<f2")
        scale, least = np.float16(0.25), np.float16(-1.5)
        levels = random.integers(0, 16, 32)
        q4 = scale.tobytes() + least.tobytes() + bytes(
            int(low) | int(high) << 4 for low, high in zip(levels[:16], levels[16:]))
        steps = random.integers(-128, 128, 64).astype(np.int8)
        q8 = b"".join(np.float16(s).tobytes() + steps[i * 32:i * 32 + 32].tobytes()
                      for i, s in enumerate((0.5, 2.0)))
        file = self.read(make_gguf(
            [("a.number", 4, struct.pack("<I", 7)), ("a.text", 8, string("grüße")),
             ("a.list", 9, struct.pack("<IQ", 8, 2) + string("x") + string("y"))],
            [("f32", (3, 5), 0, f32.tobytes()), ("f16", (2, 4), 1, f16.tobytes()),
             ("q4", (1, 32), 3, q4), ("q8", (2, 32), 8, q8), ("odd", (32,), 2, bytes(18))]))
        self.assertEqual(file.metadata, {"a.number": 7, "a.text": "grüße", "a.list": ["x", "y"]})
        self.assertEqual(list(file), ["f32", "f16", "q4", "q8", "odd"])
        np.testing.assert_array_equal(file.tensor("f32"), f32)
        np.testing.assert_array_equal(file.tensor("f16"), f16.astype(np.float32))
        np.testing.assert_array_equal(file.tensor("q4")[0], levels * 0.25 - 1.5)
        np.testing.assert_array_equal(
            file.tensor("q8"), steps.reshape(2, 32).astype(np.float32) * [[0.5], [2.0]])
        self.assertRaisesRegex(GgufError, "type 2", file.tensor, "odd")

    def test_what_is_no_gguf(self):
        self.assertRaisesRegex(GgufError, "GGUF", self.read, b"PK\x03\x04" + bytes(60))
        self.assertRaisesRegex(GgufError, "version 9", self.read,
                               b"GGUF" + struct.pack("<IQQ", 9, 0, 0) + bytes(40))
        whole = make_gguf([("a", 8, string("b"))], [("t", (64,), 0, bytes(256))])
        for n in range(4, 60, 7):
            self.assertRaises(GgufError, self.read, whole[:n])
        self.assertRaisesRegex(GgufError, "end of the file",
                               self.read(whole[:-32]).tensor, "t")


class Measures(unittest.TestCase):
    def test_a_tiny_model(self):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=97, head_dim=16)).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data *= 3
        ids = torch.randint(0, 97, (600,)).tolist()
        names = {("exact", "bfloat16"), ("exact", "int8"), ("sampled", "100"),
                 ("sampled", "512"), ("verified", "(0.1, 0.1)"), ("streaming", "4 + 1532")}
        chosen = [s for s in _real.SETTINGS if (s.mode, s.setting) in names]
        presets = {("preset", "h2o:share=0.2"), ("preset", "h2o:share=0.8")}
        names |= presets
        chosen += _real.of_presets(sorted(word for _, word in presets))
        with kvm.open_embedded(n_threads=2, capacity=1 << 28) as client:
            rows = {(r.mode, r.setting): r for r in _real.evaluate(
                model, client, "random", ids, 40, 20, chosen, lambda text: None)}
        self.assertEqual(set(rows), names)
        exact = rows["exact", "bfloat16"]
        self.assertAlmostEqual(exact.keys_fraction, 1, places=2)
        self.assertLess(exact.kl, 1e-3)
        self.assertAlmostEqual(exact.bits_per_byte, exact.dense_bits_per_byte, delta=0.05)
        self.assertAlmostEqual(rows["exact", "int8"].bytes_fraction, 18 / 32, places=2)
        # Pages of 64 tokens.
        self.assertAlmostEqual(exact.stored_fraction, 640 / 599, places=3)
        self.assertAlmostEqual(rows["exact", "int8"].stored_fraction, 640 / 599 * 18 / 32, places=3)
        few, many = rows["sampled", "100"], rows["sampled", "512"]
        self.assertLess(few.keys_fraction, 1)
        self.assertGreaterEqual(few.kl, many.kl)
        self.assertGreater(rows["preset", "h2o:share=0.2"].kl, rows["preset", "h2o:share=0.8"].kl)
        for unknown in ("h20", "duo_attention"):
            with self.assertRaises(kvm.Error):
                _real.of_presets([unknown])
        # The window is longer than the text.
        self.assertLess(rows["streaming", "4 + 1532"].kl, 1e-3)


def run(*arguments):
    """The exit status of kvm-eval, what it printed, and its complaint."""
    out, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(complaint):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), complaint.getvalue()


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class Intervals(unittest.TestCase):
    def test_wilson(self):
        low, high = _intervals.wilson(0, 50)
        self.assertEqual(low, 0)
        self.assertAlmostEqual(high, 1.959964**2 / (50 + 1.959964**2))
        self.assertAlmostEqual(_intervals.wilson(40, 50)[0], 0.6696, places=4)

    def test_tango_against_its_definition(self):
        # An end is where the estimate lies z standard errors away, over the likeliest probabilities
        # that have this difference: found here by trying them.
        z = _intervals.Z95
        for won, lost, n in ((0, 1, 44), (2, 9, 60), (9, 2, 60), (1, 3, 1000)):
            ends = _intervals.tango(won, lost, n)
            self.assertLess(ends[0], (won - lost) / n)
            self.assertGreater(ends[1], (won - lost) / n)
            for end, sign in zip(ends, (1, -1)):
                p = np.linspace(max(0, -end), (1 - end) / 2, 2_000_001)[1:-1]  # only the second
                likely = (won * np.log(p + end) + lost * np.log(p)
                          + (n - won - lost) * np.log1p(-2 * p - end))
                best = p[np.nanargmax(likely)]
                error = math.sqrt(n * (2 * best + end - end * end))
                self.assertAlmostEqual((won - lost - n * end) / error, sign * z, places=3)
        low, high = _intervals.tango(0, 0, 1000)
        self.assertAlmostEqual(low, -z * z / (1000 + z * z), places=9)
        self.assertAlmostEqual(high, -low, places=9)
        np.testing.assert_allclose(_intervals.tango(3, 8, 90),
                                   np.negative(_intervals.tango(8, 3, 90))[::-1])

    def test_trials_that_resemble_each_other(self):
        self.assertEqual(_intervals.design_effect([[0, 0], [0, 0]]), 1)
        self.assertEqual(_intervals.design_effect([[-1, 0, 1, 0], [0, 1, 0, -1]]), 1)
        # As if every text had one question only.
        alike = [[x] * 5 for x in (0, -1) * 50]
        self.assertAlmostEqual(_intervals.design_effect(alike), 5, delta=0.1)


class Tasks(unittest.TestCase):
    def test_facts_and_chains(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tasks.jsonl")
            done = run("tasks", "--house", Path(ROOT, "models/house"), "--lengths", "512",
                       "--prompts", 7, "--facts", 4, "--task", "single_facts", "--task", "trace_1",
                       "--only", "sampled", "--only", "streaming", "--threads", 1, "--json", path)
            self.assertEqual((done[0], done[2]), (0, ""))
            rows = read_lines(path)
        self.assertEqual({row["task"] for row in rows}, {"single_facts", "trace_1"})
        for row in rows:
            is_facts = row["task"] == "single_facts"
            self.assertEqual((row["prompts"], row["texts"]), (8, 2) if is_facts else (7, 7))
            self.assertGreaterEqual(row["dense"], 0.9)
            self.assertAlmostEqual(row["difference"], (row["won"] - row["lost"]) / row["prompts"])
            self.assertLessEqual(row["difference_low"], row["difference"])
            self.assertFalse(row["claim"])  # so few prompts show nothing
            if row["mode"] == "streaming":  # its window is longer than the text
                self.assertEqual((row["won"], row["lost"], row["keys_fraction"]), (0, 0, 1))
            if row["setting"] == "100":
                self.assertLess(row["keys_fraction"], 0.9)

    def test_what_is_refused(self):
        house = ("--house", Path(ROOT, "models/house"))
        for arguments, complaint in (
                (("--house", "/nowhere"), "/nowhere has no tasks.py"),
                ((*house, "--task", "poetry"), "no task poetry"),
                ((*house, "--only", "best"), "no mode best"),
                ((*house, "--lengths", "100"), "256 to 32768"),
                ((*house, "--facts", "0"), "1 to 64 facts")):
            status, _, said = run("tasks", *arguments)
            self.assertEqual(status, 1)
            self.assertIn(complaint, said)


class Records(unittest.TestCase):
    """A recorder, its file as the house's reader finds it, and the tensors through kvm."""

    @classmethod
    def setUpClass(cls):
        torch.manual_seed(1)
        cls.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=97, head_dim=32)).eval()
        for parameter in cls.model.parameters():
            if parameter.ndim == 2:
                parameter.data *= 6
        cls.ids = torch.randint(0, 97, (3000,)).tolist()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.path = Path(cls.folder.name, "tiny.kvrec")
        before = cls.model.config._attn_implementation
        recorder.record(cls.model, cls.ids, cls.path, pairs=4, answers=[(2990, 2992)])
        assert cls.model.config._attn_implementation == before

    def test_the_house_reads_it(self):
        spec = importlib.util.spec_from_file_location("house_kvrec",
                                                      Path(ROOT, "models/house/kvrec.py"))
        house = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(house)
        kept = {}
        layer = self.model.model.layers[0].self_attn
        hook = layer.k_proj.register_forward_hook(lambda *of: kept.update(k=of[2].detach()))
        with torch.no_grad():
            self.model(torch.tensor([self.ids]))
        hook.remove()
        ours = _kvrec.Reader(self.path)
        with house.Reader(self.path) as record:
            record.verify()
            self.assertEqual(record.meta["model"]["q_heads"], 4)
            self.assertIn(2989, record.array("query_steps"))
            self.assertEqual([(g["layer"], g["kv_head"], g["q_heads"]) for g in record.groups],
                             [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0, 1]), (1, 1, [2, 3])])
            for group, mine in zip(record.groups, ours.groups):
                for key, name in mine.arrays.items():
                    np.testing.assert_array_equal(record.array(group[key]), ours.array(name))
            before, after = (record.array(record.groups[1][key]) for key in ("k_pre", "k"))
        np.testing.assert_allclose(before, kept["k"][0, :, 32:].numpy(), rtol=0.01, atol=1e-4)
        # A rotation turns and keeps the norm of each pair of channels.
        self.assertGreater(np.abs(before - after)[1:].max(), 0.1)
        pairs = [np.hypot(k[:, :16], k[:, 16:]) for k in (before, after)]
        np.testing.assert_allclose(*pairs, rtol=0.02, atol=1e-3)

    def test_attention_of_the_record_is_the_model_s(self):
        record = _kvrec.Reader(self.path)
        group = record.groups[0]
        q, k, v = (record.array(group.arrays[key]) for key in "qkv")
        heads = {}
        hook = self.model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda module, inputs: heads.update(o=inputs[0].detach()[0].numpy()))
        with torch.no_grad():
            self.model(torch.tensor([self.ids]))
        hook.remove()
        for i, step in enumerate(record.steps):
            logits = record.scale * q[i] @ k[:step + 1].T
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            o = p @ v[:step + 1] / p.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(o.ravel(), heads["o"][step, :64], rtol=0.1, atol=0.05)

    def test_tensors(self):
        lines = Path(self.folder.name, "tensors.jsonl")
        classes = Path(self.folder.name, "classes.jsonl")
        classes.write_text("\n".join(json.dumps(
            {"eval": "geometry", "layer": 0, "kv_head": 1, "q_head": head, "classes": names})
            for head, names in ((2, ["local"]), (3, []))))
        done = run("tensors", self.path, "--queries", 6, "--heads", "--only", "exact", "--only",
                   "sampled", "--only", "topk", "--only", "h2o", "--threads", 1, "--json", lines,
                   "--classes", classes)
        self.assertEqual((done[0], done[2]), (0, ""))
        rows = read_lines(lines)
        of = {(row["mode"], row["setting"]): row for row in rows if row["eval"] == "tensors"}
        self.assertEqual({mode for mode, _ in of}, {"exact", "sampled", "topk"})
        exact, few, many = (of[key] for key in (("exact", "bfloat16"), ("sampled", "100"),
                                                ("sampled", "512")))
        self.assertEqual(exact["rows"], 6 * 8)
        self.assertLess(exact["error_p99"], 5e-3)
        self.assertEqual((exact["keys_fraction"], exact["bytes_fraction"], exact["bar"]),
                         (1, 1, None))
        self.assertLess(many["error"], few["error"])
        self.assertLess(few["keys_fraction"], many["keys_fraction"])
        self.assertEqual(few["exact_fraction"], 0)
        # delta is .1, and the rows are few.
        self.assertGreater(few["coverage"], 0.75)
        self.assertGreater(few["bar"], few["error_p50"])
        self.assertIsNone(of["topk", "256"]["coverage"])
        heads = [row for row in rows if row["eval"] == "tensors-head"
                 and (row["mode"], row["setting"]) == ("sampled", "100")]
        self.assertEqual(len(heads), 8)
        self.assertAlmostEqual(sum(row["error"] for row in heads) / 8, few["error"], places=6)
        of_class = {row["head_class"]: row for row in rows if row["eval"] == "tensors-class"
                    and (row["mode"], row["setting"]) == ("sampled", "100")}
        head = {row["q_head"]: row for row in heads if row["layer"] == 0}
        self.assertEqual({name: (row["rows"], row["error"]) for name, row in of_class.items()},
                         {"local": (6, head[2]["error"]), "none": (6, head[3]["error"])})

    def test_other_sketches(self):
        lines = Path(self.folder.name, "sketches.jsonl")
        for sketch in ((), ("--sketch", "2bit", "--recent", 512)):
            done = run("tensors", self.path, "--queries", 4, "--only", "topk", "--only", "magicpig",
                       "--threads", 1, "--json", lines, *sketch)
            self.assertEqual((done[0], done[2]), (0, ""))
        rows = {row["setting"]: row for row in read_lines(lines)}
        self.assertEqual(set(rows), {"64", "100", "256", "(10, 150)", "64, 2bit, 4 + 512",
                                     "100, 2bit, 4 + 512",
                                     "256, 2bit, 4 + 512"})
        self.assertGreater(rows["100, 2bit, 4 + 512"]["keys_fraction"],
                           rows["100"]["keys_fraction"] + 0.05)

    def test_what_cannot_be_recorded(self):
        tiny = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=50,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        windowed = transformers.MistralForCausalLM(
            transformers.MistralConfig(**tiny, sliding_window=16))
        capped = transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**tiny, layer_types=["full_attention"]))
        out = Path(self.folder.name, "none.kvrec")
        for model, complaint in ((windowed, "windows of less than 40"), (capped, "softcap")):
            self.assertRaisesRegex(ValueError, complaint, recorder.record, model, range(40), out)
        self.assertFalse(out.exists())
        with self.assertRaisesRegex(_kvrec.RecordError, "not finite"):
            _kvrec.write(out, {}, {"x": ("fp16", np.array([1e6]))})

    def test_damage_is_noticed(self):
        whole = self.path.read_bytes()
        damaged = Path(self.folder.name, "damaged.kvrec")
        for at, complaint in ((0, "no record"), (100, "checksum of the metadata"),
                              (None, "bytes; ")):
            data = bytearray(whole)
            if at is None:
                del data[-1]
            else:
                data[at] ^= 1
            damaged.write_bytes(data)
            status, _, said = run("tensors", damaged)
            self.assertEqual(status, 1)
            self.assertIn(complaint, said)
        data = bytearray(whole)
        data[-1] ^= 1
        damaged.write_bytes(data)
        record = _kvrec.Reader(damaged)
        last = record.groups[-1].arrays["k_pre"]
        self.assertRaisesRegex(_kvrec.RecordError, "checksum of", record.array, last)


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "matplotlib is not installed")
class Plots(unittest.TestCase):
    def test_panels_and_means(self):
        def line(mode, setting, text, kl, share, **more):
            return json.dumps({"eval": "real", "mode": mode, "setting": setting, "text": text,
                               "tokens": 8192, "kl": kl, "bytes_fraction": share, **more})
        with tempfile.TemporaryDirectory() as folder:
            lines, out = Path(folder, "real.jsonl"), Path(folder, "quality.svg")
            lines.write_text("\n".join([
                json.dumps({"eval": "host", "cpu": "any"}),
                line("sampled", "100", "one", 0.02, 0.1), line("sampled", "256", "one", 0.004, 0.2),
                line("topk", "100", "one", 0.05, 0.15), line("topk", "100", "two", 0.03, 0.15),
                line("sampled", "100", "two", 0.01, 0.1), line("h2o", "9 + 7", "two", 0.1, 0.1),
                line("sampled", "100 int8", "one", 0.01, 0.05)]))
            self.assertEqual(run("plot", lines, "-o", out)[1], f"{out}: 7 points\n")
            drawn = out.read_text()
            for text in ("one, 8,192 tokens", "two, 8,192 tokens", "sampled", "topk", "256",
                         "sampled, int8", "h2o", "9 + 7"):
                self.assertIn(f">{text}</text>", drawn)
            self.assertEqual(run("plot", lines, "-o", out, "--mean")[1], f"{out}: 2 points\n")
            self.assertNotIn(">256</text>", out.read_text())
            # An eps behind a budget is of the same curve; a dtype and a chunk make others.
            lines.write_text("\n".join([
                line("balanced", "128, 0.05", "one", 0.02, 0.1),
                line("balanced", "256, 0.015", "one", 0.01, 0.2),
                line("balanced", "128, 0.05", "one", 0.04, 0.3, chunk=4),
                line("balanced", "256, 0.025 int8", "one", 0.02, 0.1),
                line("verified", "(0.1, 0.1) int8", "one", 0.02, 0.1)]))
            self.assertEqual(run("plot", lines, "-o", out)[1], f"{out}: 5 points\n")
            drawn = out.read_text()
            for text in ("balanced", "128, 0.05", "balanced, 4 tokens a step", "balanced, int8",
                         "256, 0.025", "verified, int8"):
                self.assertIn(f">{text}</text>", drawn)
            self.assertNotIn("balanced, 0.05", drawn)
            lines.write_text(json.dumps({"eval": "tasks"}))
            status, _, said = run("plot", lines, "-o", out)
            self.assertEqual(status, 1)
            self.assertIn("have no lines of `kvm-eval real`", said)


if __name__ == "__main__":
    torch.set_num_threads(1)  # another test runs beside
    unittest.main(verbosity=2)
