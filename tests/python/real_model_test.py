# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M with its KV in kvm writes what it writes by itself: in the process and over kvmd.

Needs PyTorch, transformers, and the model, which ./dev fetches into build/model (KVM_MODEL names
another place); skipped (77) without. KVM_GENERATED tokens are generated: 12; ./dev nightly models:
500."""

import os
import sys
import unittest
from pathlib import Path

try:
    import torch
    import transformers  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import kvm
from kvm.eval import _smollm, _texts
from kvm.integrations.transformers import KvmCache
from models import Reference
from rig import Daemon

N_GENERATED = int(os.environ.get("KVM_GENERATED", "12"))
N_PROMPT = 64 if N_GENERATED < 100 else 512
MODEL = Path(os.environ.get("KVM_MODEL") or Path(os.environ.get("KVM_SOURCE_DIR", ".")) /
             "build" / "model" / Path(_smollm.MEMBER).name)


class RealModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, tokenizer = _smollm.load(MODEL)
        cls.model.generation_config.eos_token_id = None
        ids = tokenizer.encode(_texts.read("reference-s")).ids[:N_PROMPT - 1]
        cls.ids = torch.tensor([[cls.model.config.bos_token_id, *ids]])
        cls.reference = Reference(cls.model, {
            "input_ids": cls.ids, "attention_mask": torch.ones_like(cls.ids)}, N_GENERATED)

    def check(self, client, codec):
        with KvmCache(self.model, client, codec=codec) as cache:
            print(f"\n{self.reference.check(self, cache, codec == 'bfloat16')}")
            self.assertEqual([len(seq) for seq in cache.sequences], [N_PROMPT + N_GENERATED - 1])

    def test_in_the_process(self):
        with kvm.open_embedded(n_threads=2, capacity=1 << 30) as client:
            self.check(client, "float32")
            self.check(client, "bfloat16")

    def test_kvmd(self):
        with Daemon() as daemon, kvm.connect(daemon.socket) as client:
            self.check(client, "float32")
            if N_GENERATED >= 100:
                self.check(client, "bfloat16")


if __name__ == "__main__":
    if not MODEL.exists():
        print(f"skipped: there is no {MODEL}; ./dev test fetches it from a Python index")
        sys.exit(77)
    torch.set_num_threads(1)  # another test runs beside
    unittest.main(verbosity=2)
