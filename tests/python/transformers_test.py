# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with their KV in kvm give what they give by themselves.

Tiny models with random weights, from their public classes, float32: the logits of every step agree
with those of the eager implementation, and so do the tokens of greedy and of beam search. Needs
PyTorch and transformers; skipped (77) without."""

import copy
import os
import subprocess
import sys
import tempfile
import time
import unittest

try:
    import torch
    import transformers as tf
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

import kvm
from kvm.integrations import transformers as integration
from kvm.integrations.transformers import KvmCache, NotSupportedError, use_kvm
from models import LIMIT, Reference, eager, through_kvm

SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=199, max_position_embeddings=512, head_dim=16,
             bos_token_id=1, eos_token_id=None, pad_token_id=0)
FAMILIES = {  # the classes NAMEConfig (or as it says) and NAMEForCausalLM
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", {"sliding_window": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {"sliding_window": 16}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "gpt-oss": ("GptOss", {"sliding_window": 16, "num_local_experts": 2,
                           "num_experts_per_tok": 1}),
    "olmo": ("Olmo", {}),
}
OTHERS = {"cohere": ("Cohere", {}),  # rotates neighbouring channels
          "smollm3": ("SmolLM3", {})}
N_GENERATED = int(os.environ.get("KVM_GENERATED", "12"))  # ./dev nightly models: 500


def make_model(family, seed=0, **more):
    torch.manual_seed(seed)
    name, extra = {**FAMILIES, **OTHERS}[family]
    model = getattr(tf, f"{name}ForCausalLM", None)
    config = getattr(tf, f"{name}TextConfig", None) or getattr(tf, f"{name}Config", None)
    if model is None:
        raise unittest.SkipTest(f"transformers {tf.__version__} has no {name}")
    made = model(config(**{**SHAPE, **extra, **more})).eval().float()
    for name, parameter in made.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
        elif parameter.ndim == 2:
            parameter.data *= 3  # attention that is not flat
    return made


def prompts(n=2, length=40, left=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 199, (n, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.client = kvm.open_embedded(n_threads=2, capacity=1 << 30)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()

    def cache(self, model, **settings):
        cache = KvmCache(model, self.client, **{"codec": "float32", **settings})
        self.addCleanup(cache.close)
        return cache


class Families(Case):
    def check(self, family):
        model = make_model(family)
        inputs = prompts()

        def beams(extra):
            return model.generate(**inputs, **extra, max_new_tokens=6, num_beams=3,
                                  do_sample=False)

        reference = Reference(model, inputs, N_GENERATED)
        cache = self.cache(model)
        reference.check(self, cache)
        reference.check(self, self.cache(model, codec="bfloat16"), is_rounded=True)
        cache.reset()
        expected = eager(model, beams)
        self.assertTrue(torch.equal(expected, through_kvm(model, cache, beams)))
        self.check_chunks(model)
        self.check_assistant(model, make_model("llama", seed=5))
        self.assertEqual(cache.stats.n_approximate_rows, 0)

    def test_many_query_heads_for_a_kv_head(self):
        for family in ("llama", "gpt-oss"):
            with self.subTest(family):
                self.check_chunks(make_model(family, num_attention_heads=32,
                                             num_key_value_heads=1))

    def check_chunks(self, model):
        """A prompt in chunks, one row padded on the right, and tokens behind it."""
        inputs = prompts(left=0)
        inputs["attention_mask"][0, 31:] = 0
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        cache = self.cache(model)

        def chunks(extra):
            logits = [model(part, attention_mask=mask[:, :end], **extra).logits
                      for part, end in zip(ids.split(9, dim=1), (9, 18, 27, 36, 40), strict=True)]
            return torch.cat(logits, 1)

        expected = eager(model, lambda _: model(**inputs, use_cache=False).logits)
        got = through_kvm(model, cache, chunks)
        self.assertLess((expected - got)[mask.bool()].abs().max().item(), LIMIT)
        self.assertEqual([len(seq) for seq in cache.sequences], [31, 40])

    def check_assistant(self, model, draft):
        """Assisted generation: what the model rejects is rolled back."""
        ids = prompts(n=1, left=0)["input_ids"]
        cache = self.cache(model)
        crops = []
        crop = cache.crop
        cache.crop = lambda n: (crops.append(n), crop(n))

        def generate(extra):
            return model.generate(ids, **extra, max_new_tokens=20, do_sample=False)


        expected = eager(model, generate)
        got = through_kvm(model, cache, lambda extra: generate(
            {**extra, "assistant_model": draft}))
        self.assertTrue(torch.equal(expected, got))
        self.assertGreater(len(crops), 0)


for _family in FAMILIES:
    setattr(Families, f"test_{_family.replace('-', '_')}",
            lambda self, family=_family: self.check(family))


class Generation(Case):
    def test_what_is_not_padding_is_stored_and_freed(self):
        model = make_model("llama")
        cache = self.cache(model)
        through_kvm(model, cache, lambda extra: model.generate(
            **prompts(), **extra, max_new_tokens=5, do_sample=False))
        self.assertEqual([len(seq) for seq in cache.sequences], [37, 44])
        ids = [seq.id for seq in cache.sequences]
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        left = {info.seq for info in self.client.sequences()}
        self.assertFalse(left & set(ids))

    def test_more_query_heads_than_a_request_takes(self):
        """32 in two parts, and 17 in two of which one has a head too many; 1 and 2 kv heads."""
        for n_q_heads, n_kv_heads in ((32, 1), (34, 2)):
            model = make_model("llama", hidden_size=2 * n_q_heads, num_attention_heads=n_q_heads,
                               num_key_value_heads=n_kv_heads)
            cache = self.cache(model)
            cache._max_rows = 16
            Reference(model, prompts(), N_GENERATED).check(self, cache)
            self.assertEqual([len(seq) for seq in cache.sequences],
                             [33 + N_GENERATED - 1, 40 + N_GENERATED - 1])

    def test_right_padding(self):
        model = make_model("qwen3")
        inputs = prompts(left=0)
        inputs["attention_mask"][0, 30:] = 0

        def forward(extra):
            return model(**inputs, **extra, use_cache=bool(extra)).logits

        expected, got = eager(model, forward), None
        cache = self.cache(model)
        got = through_kvm(model, cache, forward)
        real = inputs["attention_mask"].bool()
        self.assertLess((expected - got)[real].abs().max().item(), LIMIT)
        self.assertEqual([len(seq) for seq in cache.sequences], [30, 40])

    def test_a_prefill_in_chunks(self):
        for family in ("llama", "gemma2"):
            model = make_model(family)
            ids = prompts(left=0)["input_ids"]
            expected = eager(model, lambda _: model(ids, use_cache=False).logits)
            cache = self.cache(model)

            def chunks(extra):
                return torch.cat([model(part, **extra).logits for part in ids.split(7, dim=1)], 1)

            self.assertLess((expected - through_kvm(model, cache, chunks)).abs().max(), LIMIT)

    def test_chunks_longer_than_a_request(self):
        model = make_model("llama")
        ids = prompts(left=3)
        cache = self.cache(model)
        cache._max_rows = 6
        expected = eager(model, lambda _: model(**ids, use_cache=False).logits)
        got = through_kvm(model, cache, lambda extra: model(**ids, **extra).logits)
        real = ids["attention_mask"].bool()
        self.assertLess((expected - got)[real].abs().max().item(), LIMIT)

    def test_assisted_generation_rolls_back(self):
        model, draft = make_model("llama"), make_model("llama", seed=5)
        ids = prompts(n=1, left=0)["input_ids"]

        def assisted(extra):
            return model.generate(ids, **extra, assistant_model=draft, max_new_tokens=30,
                                  do_sample=False)

        expected = eager(model, lambda _: model.generate(ids, max_new_tokens=30, do_sample=False))
        cache = self.cache(model)
        self.assertTrue(torch.equal(expected, through_kvm(model, cache, assisted)))
        self.assertLess(len(cache.sequences[0]), 40 + 30 + 1)

    def test_crop(self):
        model = make_model("llama")
        ids = prompts(left=4)
        cache = self.cache(model)
        tail = torch.full((2, 3), 9)

        def run(extra):
            model(**ids, **extra)
            model(tail, attention_mask=torch.cat([ids["attention_mask"], torch.ones(2, 3).long()],
                                                 1), **extra)
            cache.crop(-5)
            self.assertEqual(cache.get_seq_length(), 38)
            self.assertEqual([len(seq) for seq in cache.sequences], [34, 38])
            mask = torch.cat([ids["attention_mask"][:, :38], torch.ones(2, 1).long()], 1)
            return model(tail[:, :1], attention_mask=mask, **extra).logits[:, -1]

        got = through_kvm(model, cache, run)
        whole = torch.cat([ids["input_ids"][:, :38], tail[:, :1]], 1)
        mask = torch.cat([ids["attention_mask"][:, :38], torch.ones(2, 1).long()], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        expected = eager(model, lambda _: model(whole, attention_mask=mask, position_ids=places,
                                                use_cache=False).logits[:, -1])
        del places
        self.assertLess((expected[1] - got[1]).abs().max().item(), LIMIT)

    def test_a_copy_is_a_fork(self):
        model = make_model("llama")
        ids = prompts(left=0)["input_ids"]
        cache = self.cache(model)

        def run(extra):
            model(ids, **extra)
            other = copy.deepcopy(cache)
            self.addCleanup(other.close)
            a = model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=cache,
                               max_new_tokens=8, do_sample=False)
            b = model.generate(torch.cat([ids, ids[:, :1]], 1), past_key_values=other,
                               max_new_tokens=8, do_sample=False)
            return a, b

        a, b = through_kvm(model, cache, run)
        self.assertTrue(torch.equal(a, b))

    def test_entries_are_selected_and_repeated(self):
        model = make_model("llama")
        cache = self.cache(model)
        through_kvm(model, cache, lambda extra: model(**prompts(), **extra))
        cache.batch_repeat_interleave(2)
        self.assertEqual([len(seq) for seq in cache.sequences], [33, 33, 40, 40])
        cache.batch_select_indices(torch.tensor([3, 0]))
        self.assertEqual([len(seq) for seq in cache.sequences], [40, 33])
        self.assertRaises(IndexError, cache.reorder_cache, torch.tensor([2, 0]))

    def test_approximate_modes_say_what_they_read(self):
        model = make_model("llama")
        ids = prompts(n=1, length=420, left=0)["input_ids"]
        cache = self.cache(model, mode=kvm.Mode.SAMPLED, budget=32,
                           indexes=[kvm.Index(min_tokens=256, n_recent=16)])
        through_kvm(model, cache, lambda extra: model.generate(
            ids, **extra, max_new_tokens=10, do_sample=False))
        self.assertGreater(cache.stats.n_approximate_rows, 0)
        self.assertLess(cache.stats.keys_read, cache.stats.keys_present)

    def test_a_policy_keeps_sinks_and_recent_tokens(self):
        model = make_model("llama")
        cache = self.cache(model, policies=[kvm.Policy(kvm.Retention.SINKS_RECENT, n_sinks=4,
                                                       n_recent=64)])
        ids = prompts(n=1, length=300, left=0)["input_ids"]
        through_kvm(model, cache, lambda extra: model.generate(
            ids, **extra, max_new_tokens=5, do_sample=False))
        self.assertGreater(cache.sequences[0].info().n_entries_dropped, 0)

    def test_positions_in_the_cache(self):
        # Keys of a model's first layer do not know what stands before them: what is left of a
        # prompt can be read as a prompt of its own.
        for family in integration._ROTATED:
            with self.subTest(family):
                model = make_model(family, num_hidden_layers=1, sliding_window=None)
                for name, parameter in model.named_parameters():
                    if "norm" in name:  # such as may stand behind the rotation
                        torch.nn.init.uniform_(parameter, 0.2, 2)
                ids = prompts(n=1, length=300, left=0)["input_ids"]
                left = torch.cat((ids[:, :4], ids[:, -36:]), dim=1)
                expected = eager(model, lambda extra: model(left, **extra).logits[0, -1])
                cache = self.cache(model, policies=[kvm.Policy(
                    kvm.Retention.SINKS_RECENT, n_sinks=4, n_recent=36,
                    positions=kvm.Positions.IN_CACHE)])
                found = through_kvm(model, cache, lambda extra: [
                    model(part, **extra).logits[0, -1] for part in torch.split(ids, 50, dim=1)][-1])
                self.assertLess(float((found - expected).abs().max()), LIMIT)
                self.assertGreater(cache.sequences[0].info().n_entries_dropped, 0)

    def test_balanced_keys_are_shown_a_prompts_queries(self):
        model = make_model("llama")
        ids = prompts(n=1, length=300, left=0)["input_ids"]
        for codec, n_rows in (("int8", 0), ("int2_balanced", 32)):
            cache = self.cache(model, policies=[kvm.Policy(
                kvm.Retention.HEAVY, n_recent=64, n_heavy=64, merge=kvm.Merging.DEMOTED)],
                codecs=[kvm.Codec("bfloat16", "bfloat16", codec, "int2")])
            through_kvm(model, cache, lambda extra, cache=cache: [
                model(part, **extra) for part in torch.split(ids, 150, dim=1)])
            self.assertEqual(cache.sequences[0].info().n_rows_observed,
                             n_rows * model.config.num_hidden_layers)
            cache.close()
        cache = self.cache(model, codec="int4_balanced")
        through_kvm(model, cache, lambda extra: model(ids, **extra))
        self.assertGreater(cache.sequences[0].info().n_rows_observed, 0)

    def test_presets_have_spaces_of_their_own(self):
        model = make_model("llama", num_hidden_layers=4)
        ids = prompts(n=1, length=100, left=0)["input_ids"]
        for policy in (None, "minicache", "minicache:n_pairs=2", "streaming_llm", "alisa", "mikv",
                       "d2o"):
            cache = self.cache(model, codec="bfloat16", policy=policy)
            through_kvm(model, cache, lambda extra: model(ids, **extra))
            self.assertEqual(len(cache.sequences[0]), 100)
        self.assertGreaterEqual(len({space.name for space in self.client.spaces()}), 7)


class Daemon(unittest.TestCase):
    def test_kvmd(self):
        folder = tempfile.mkdtemp()
        socket = os.path.join(folder, "s")
        kvmd = subprocess.Popen([os.path.join(os.environ["KVM_BIN_DIR"], "kvmd"), "--socket",
                                 socket, "--host-capacity", "256MiB"], stderr=subprocess.DEVNULL)
        self.addCleanup(kvmd.wait)
        self.addCleanup(kvmd.terminate)
        deadline = time.monotonic() + 20
        while not os.path.exists(socket):
            self.assertLess(time.monotonic(), deadline, "kvmd does not listen")
            time.sleep(0.02)
        model = make_model("llama")

        def greedy(extra):
            return model.generate(**prompts(), **extra, max_new_tokens=20, do_sample=False)

        expected = eager(model, greedy)
        with kvm.connect(socket) as client, KvmCache(model, client, codec="float32") as cache:
            self.assertTrue(torch.equal(expected, through_kvm(model, cache, greedy)))


class Refusals(Case):
    def refuses(self, word, model, run, **settings):
        cache = self.cache(model, **settings)
        with self.assertRaisesRegex(NotSupportedError, word):
            through_kvm(model, cache, run)

    def test_what_is_not_computed_has_its_name(self):
        model = make_model("llama")
        ids = prompts()["input_ids"]
        self.refuses("output_attentions", model,
                     lambda extra: model(ids, **extra, output_attentions=True))
        self.refuses("4|shape", model, lambda extra: model(
            ids, **extra, attention_mask=torch.zeros(2, 1, 40, 40)))
        holes = torch.ones_like(ids)
        holes[0, 5] = 0
        self.refuses("padding between", model,
                     lambda extra: model(ids, **extra, attention_mask=holes))

        def changed(extra):
            model(ids, **extra)
            late = torch.ones(2, 41).long()
            late[0, 3] = 0
            model(ids[:, :1], **extra, attention_mask=late)
        self.refuses("a mask that changes|A mask that changes", model, changed)

    def test_more_query_heads_than_a_group_has(self):
        model = make_model("llama", hidden_size=1032, num_attention_heads=129,
                           num_key_value_heads=1)
        with self.assertRaisesRegex(NotSupportedError, "129 query heads for a kv head"):
            self.cache(model)

    def test_a_version_without_masks(self):
        """transformers 4.52 and older have no such module."""
        code = ("import sys, transformers; sys.modules['transformers.masking_utils'] = None; "
                "import kvm.integrations.transformers")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"transformers {tf.__version__} has no interface for masks", done.stderr)
        self.assertIn("4.53 and newer", done.stderr)

    def test_no_cache(self):
        model = make_model("llama")
        use_kvm(model)
        with torch.no_grad(), self.assertRaisesRegex(NotSupportedError, "past_key_values"):
            model(prompts()["input_ids"])

    def test_gradients_and_dropout(self):
        model = make_model("llama", attention_dropout=0.5)
        cache = self.cache(model)
        use_kvm(model)
        with self.assertRaisesRegex(NotSupportedError, "gradients"):
            model(prompts()["input_ids"], past_key_values=cache)
        model.train()
        with torch.no_grad(), self.assertRaisesRegex(NotSupportedError, "dropout"):
            model(prompts()["input_ids"], past_key_values=self.cache(model))

    def test_presets_that_are_for_other_models(self):
        model = make_model("llama", num_hidden_layers=8)
        for policy, why in (("yi_lightning", "computes its own"),
                            ("unified_layer_skipping", "runs all")):
            with self.assertRaisesRegex(NotSupportedError, why):
                self.cache(model, policy=policy)

    def test_frequencies_that_change_with_the_length(self):
        policies = [kvm.Policy(kvm.Retention.SINKS_RECENT, n_sinks=4, n_recent=36,
                               positions=kvm.Positions.IN_CACHE)]
        model = make_model("llama")
        model.model.rotary_emb.rope_type = "dynamic"
        with self.assertRaisesRegex(NotSupportedError, "change with the length"):
            self.cache(model, policies=policies)
        for family in ("gpt-oss", "gemma3", "smollm3"):  # the last rotates in some layers only
            with self.assertRaisesRegex(NotSupportedError, "a model of the type"):
                self.cache(make_model(family), policies=policies)

    def test_windows_and_presets_of_layers(self):
        model = make_model("mistral", num_hidden_layers=4, sliding_window=256)
        ids = prompts(n=1, length=200, left=0)["input_ids"]
        taken = []
        for policy in (None, "minicache:n_pairs=2"):
            cache = self.cache(model, codec="bfloat16", policy=policy)
            through_kvm(model, cache, lambda extra, cache=cache: model(ids, **extra))
            taken.append(cache.sequences[0].info().bytes)
        self.assertLess(taken[1], taken[0])

    def test_numbers_without_a_mode_that_heeds_them(self):
        model = make_model("llama")
        for name, value in {"eps": 0.1, "delta": 0.1, "budget": 9}.items():
            with self.assertRaisesRegex(kvm.InvalidError, f"{name} is {value}, and mode is EXACT"):
                self.cache(model, **{name: value})
        with self.assertRaisesRegex(TypeError, "mode is 'sampled'; it must be a kvm.Mode"):
            self.cache(model, mode="sampled")

    def test_a_cache_is_not_pickled(self):
        cache = self.cache(make_model("llama"))
        with self.assertRaisesRegex(TypeError, "pickled"):
            copy.copy(cache).__reduce__()

    def test_a_batch_of_another_size(self):
        model = make_model("llama")
        cache = self.cache(model)
        ids = prompts()["input_ids"]
        through_kvm(model, cache, lambda extra: model(ids, **extra))
        with self.assertRaisesRegex(ValueError, "3 entries"):
            through_kvm(model, cache, lambda extra: model(ids[[0, 1, 1]], **extra))


if __name__ == "__main__":
    torch.set_num_threads(1)  # another test runs beside
    unittest.main(verbosity=2)
