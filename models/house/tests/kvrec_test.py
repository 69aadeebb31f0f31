# SPDX-License-Identifier: Apache-2.0
"""Records survive the way through a file; damaged ones are refused with a reason."""
import json
import os
import struct
import sys
import tempfile
import unittest
import zlib

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, ".."))
import kvrec  # noqa: E402
import synthetic  # noqa: E402

TINY = os.path.join(HERE, "tiny.kvrec")  # bench/recorded's test reads it too


def tiny_record(path):
    """The committed tiny.kvrec: values that a reader in any language can recompute."""
    n, m, g, d = 8, 3, 2, 4
    grid = np.arange(n * d).reshape(n, d)
    arrays = {
        "positions": ("i32", np.arange(n) * 10), "tokens": ("i32", np.arange(n) + 100),
        "query_steps": ("i32", [3, 5, 7]),
        "q0": ("bf16", np.arange(m * g * d).reshape(m, g, d) / 8 - 1),
        "kp0": ("bf16", -grid / 4), "k0": ("bf16", grid / 4), "v0": ("bf16", 1 - grid / 16),
        "q1": ("fp16", np.arange(m * g * d).reshape(m, g, d) / 32),
        "k1": ("fp16", grid / 32 - 0.5), "v1": ("fp16", grid / 2),
    }
    meta = {"n_tokens": n, "n_queries": m, "head_dim": d, "softmax_scale": 0.5,
            "model": {"name": "tiny", "layers": 2, "q_heads": 4, "kv_heads": 2,
                      "rope_theta": 10000.0, "rope_layout": "rotate_half"},
            "prompt": {"name": "counting", "kind": "synthetic", "seed": 0, "answers": []},
            "groups": [{"layer": 0, "kv_head": 0, "q_heads": [0, 1], "q": "q0", "k_pre": "kp0",
                        "k": "k0", "v": "v0"},
                       {"layer": 1, "kv_head": 1, "q_heads": [2, 3], "q": "q1", "k": "k1",
                        "v": "v1"}]}
    kvrec.write(path, meta, arrays)


def with_metadata(data, change):
    """The file with its metadata changed by change(dict), lengths and checksum made to fit."""
    json_bytes, data_offset = struct.unpack_from("<QQ", data, 16)
    meta = json.loads(data[64:64 + json_bytes])
    change(meta)
    text = json.dumps(meta, separators=(",", ":")).encode()
    assert 64 + len(text) <= data_offset, "the changed text must fit"
    head = bytearray(data[:64])
    struct.pack_into("<Q", head, 16, len(text))
    struct.pack_into("<I", head, 40, zlib.crc32(text))
    return bytes(head) + text.ljust(data_offset - 64, b"\0") + data[data_offset:]


class RecordTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "r.kvrec")
        tiny_record(self.path)
        with open(self.path, "rb") as file:
            self.data = file.read()

    def tearDown(self):
        self.folder.cleanup()

    def refuse(self, data, reason, verify=False):
        with open(self.path, "wb") as file:
            file.write(data)
        with self.assertRaisesRegex(kvrec.RecordError, reason):
            with kvrec.Reader(self.path) as record:
                if verify:
                    record.verify()

    def test_round_trip(self):
        with kvrec.Reader(self.path) as record:
            record.verify()
            self.assertEqual(record.meta["prompt"]["name"], "counting")
            np.testing.assert_array_equal(record.array("query_steps"), [3, 5, 7])
            for name, entry in record.meta["arrays"].items():
                self.assertEqual(entry["offset"] % 64, 0, name)
            grid = np.arange(32).reshape(8, 4)
            for group, k in zip(record.groups, (grid / 4, grid / 32 - 0.5)):
                np.testing.assert_array_equal(record.array(group["k"]), k.astype(np.float32))

    def test_committed_file_is_what_this_writer_writes(self):
        with open(TINY, "rb") as file:
            self.assertEqual(file.read(), self.data)

    def test_bf16_rounds_to_nearest_even(self):
        one = 1.0 + 2.0**-8              # halfway between 1 and 1 + 2^-7: to even, down
        three = 1.0 + 3 * 2.0**-8        # halfway, to even: up
        got = kvrec.from_bf16(kvrec.to_bf16([one, three, -2.5, 1.0 + 2.0**-8 + 2.0**-20]))
        np.testing.assert_array_equal(got, np.float32([1.0, 1.0 + 2.0**-6, -2.5, 1.0 + 2.0**-7]))

    def test_not_finite_is_refused(self):
        for dtype, value in (("bf16", np.nan), ("bf16", np.inf), ("fp16", 1e6)):
            with self.assertRaises(ValueError):
                kvrec.encode(np.array([value]), dtype)

    def test_damaged_header(self):
        data = self.data
        self.refuse(b"", "empty")
        self.refuse(data[:40], "too few")
        self.refuse(b"PK" + data[2:], "magic")
        self.refuse(data[:8] + b"\2" + data[9:], "version 2")
        self.refuse(data[:-1], "cut")
        self.refuse(data + b"\0", "tail")
        self.refuse(data[:64] + b"[" + data[65:], "checksum of the metadata")
        self.refuse(data[:16] + struct.pack("<Q", 2**63) + data[24:], "does not fit")

    def test_damaged_metadata(self):
        def edit(reason, change):
            self.refuse(with_metadata(self.data, change), reason)

        edit("'n_tokens'", lambda m: m.update(n_tokens=0))
        edit("'softmax_scale'", lambda m: m.update(softmax_scale=-1))
        edit("'groups' is empty", lambda m: m.update(groups=[]))
        edit("twice", lambda m: m["groups"][1].update(layer=0, kv_head=0))
        edit("missing", lambda m: m["groups"][0].update(k="zz"))
        edit("shape", lambda m: m["groups"][0].update(k="q0"))
        edit("dtype", lambda m: m["arrays"]["k0"].update(dtype="i8"))
        edit("its shape needs", lambda m: m["arrays"]["k0"].update(bytes=1))
        edit("multiple of 64", lambda m: m["arrays"]["k0"].update(offset=1))
        edit("beyond", lambda m: m["arrays"]["v1"].update(offset=64 * 1000))
        edit("needs", lambda m: m["arrays"]["k0"].update(shape=[2**40, 2**40]))

    def test_damaged_arrays(self):
        offset = json.loads(self.data[64:64 + struct.unpack_from("<Q", self.data, 16)[0]])[
            "arrays"]["v0"]["offset"]
        flipped = bytearray(self.data)
        flipped[offset] ^= 1
        self.refuse(bytes(flipped), "checksum of array 'v0'", verify=True)

    def test_every_cut_is_noticed(self):
        for length in range(1, len(self.data), 37):
            self.refuse(self.data[:length], "few|cut")


class SyntheticTest(unittest.TestCase):
    def test_same_arguments_same_bytes_and_the_promised_spread(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("a", "b")]
            for path in paths:
                synthetic.write_record(path, n_tokens=4096, n_queries=16, types=["soft", "needle"])
            contents = []
            for path in paths:
                with open(path, "rb") as file:
                    contents.append(file.read())
            self.assertEqual(*contents)
            with kvrec.Reader(paths[0]) as record:
                group = record.groups[0]
                q, k = record.array(group["q"]), record.array(group["k"])
                logits = record.meta["softmax_scale"] * np.einsum("mgd,nd->mgn", q, k)
                self.assertAlmostEqual(logits[:, :, 1:].std(axis=2).mean(), 1.8, delta=0.15)
                mass = np.exp(logits - logits.max(axis=2, keepdims=True))
                sink = (mass[..., 0] / mass.sum(axis=2)).mean()
                self.assertTrue(0.3 < sink < 0.6, sink)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write-tiny"]:
        tiny_record(TINY)
    else:
        unittest.main()
