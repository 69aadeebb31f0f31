# SPDX-License-Identifier: Apache-2.0
"""The network: decoding over a cache equals one pass, both ways of attending agree, weights survive
their files, training continues where it stopped. Skipped (exit 77) where there is no torch."""
import argparse
import os
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
try:
    import torch
except ImportError:
    print("skipped: no torch")
    sys.exit(77)

import evaluate  # noqa: E402
import export  # noqa: E402
import model as house  # noqa: E402
import muon  # noqa: E402
import tasks  # noqa: E402
import train  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

SMALL = house.Config(vocabulary=300, d_model=64, layers=3, heads=8, kv_heads=2, head_dim=16,
                     d_ff=96, context=512)


def small_model(seed=1):
    torch.manual_seed(seed)
    model = house.Llama(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():     # layers begin as the identity: move them
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tokenizer():
    return Tokenizer([(97 + i % 26, 97 + i // 26) for i in range(SMALL.vocabulary - 256)])


class ForwardTest(unittest.TestCase):
    def setUp(self):
        self.model = small_model()
        self.tokens = torch.randint(0, 300, (2, 70), generator=torch.Generator().manual_seed(2))

    def test_cached_decode_equals_one_pass(self):
        with torch.no_grad():
            whole = self.model(self.tokens)
            for cuts in ((70,), (1,) * 70, (32, 1, 1, 20, 16)):
                cache, found, at = house.Cache(SMALL.layers), [], 0
                for size in cuts:
                    found.append(self.model(self.tokens[:, at:at + size], cache=cache))
                    at += size
                torch.testing.assert_close(torch.cat(found, 1), whole, atol=2e-5, rtol=1e-4)
                self.assertEqual(cache.length, 70)

    def test_greedy_decode_follows_the_whole_pass(self):
        prompt = self.tokens[0, :20].tolist()
        found = self.model.generate(prompt, 8)
        for _ in range(8):
            with torch.no_grad():
                prompt.append(int(self.model(torch.tensor([prompt]))[0, -1].argmax()))
        self.assertEqual(found, prompt[20:])

    def test_chunks_equal_the_fused_kernel(self):
        generator = torch.Generator().manual_seed(3)
        for length in (1, 255, 256, 300, 600):
            q, k, v = (torch.randn(2, heads, length, 16, generator=generator)
                       for heads in (8, 2, 2))
            with torch.no_grad():
                fused = house.attend(q, k, v, 0)
            torch.testing.assert_close(house.attend_in_chunks(q, k, v), fused, atol=1e-5, rtol=1e-4)

    def test_only_distances_matter(self):
        with torch.no_grad():
            moved = self.model(self.tokens, torch.arange(70) + 1000)
            gaps = torch.arange(70) + 50 * (torch.arange(70) > 30)
            torch.testing.assert_close(moved, self.model(self.tokens), atol=1e-4, rtol=1e-3)
            self.assertGreater((self.model(self.tokens, gaps) - moved)[:, 35:].abs().max(), 0.01)
            rows = torch.stack((torch.arange(70), gaps))
            both = self.model(self.tokens, rows)
            torch.testing.assert_close(both[1:], self.model(self.tokens[1:], gaps),
                                       atol=1e-4, rtol=1e-3)

    def test_the_future_is_not_seen(self):
        changed = self.tokens.clone()
        changed[:, 40:] = (changed[:, 40:] + 1) % 300
        with torch.no_grad():
            before, after = self.model(self.tokens), self.model(changed)
        torch.testing.assert_close(before[:, :40], after[:, :40])
        self.assertGreater((before[:, 40:] - after[:, 40:]).abs().max(), 0.01)

    def test_capture(self):
        kept = {}
        with torch.no_grad():
            self.model(self.tokens, torch.arange(70) + 5,
                       capture=lambda layer, name, x: kept.__setitem__((layer, name), x))
        self.assertEqual(set(kept), {(layer, name) for layer in range(3)
                                     for name in ("q_pre", "q", "k_pre", "k", "v")})
        self.assertEqual(kept[1, "q"].shape, (2, 8, 70, 16))
        self.assertEqual(kept[1, "v"].shape, (2, 2, 70, 16))
        # Rotating by complex numbers: dims j and j + 8 are the parts of one.
        k_pre, frequencies = kept[2, "k_pre"].double(), house.inverse_frequencies(SMALL)
        turned = torch.complex(k_pre[..., :8], k_pre[..., 8:]) * torch.exp(
            1j * (torch.arange(70) + 5.0)[:, None] * frequencies)
        torch.testing.assert_close(torch.cat((turned.real, turned.imag), -1),
                                   kept[2, "k"].double(), atol=1e-4, rtol=1e-4)

    def test_select(self):
        chosen = torch.rand(2, 70, generator=torch.Generator().manual_seed(4)) < 0.3
        with torch.no_grad():
            torch.testing.assert_close(self.model(self.tokens, select=chosen),
                                       self.model(self.tokens)[chosen])


class FileTest(unittest.TestCase):
    def test_parameters_and_limits_of_the_presets(self):
        for config in house.PRESETS.values():
            self.assertEqual(sum(p.numel() for p in house.Llama(config).parameters()),
                             house.count_parameters(config))
            self.assertLess(2 * house.count_parameters(config) + (1 << 17), export.TOTAL_LIMIT)
            self.assertEqual(config.heads, 4 * config.kv_heads)

    def test_round_trip(self):
        model, directory = small_model(), tempfile.mkdtemp()
        for limit, n_files in ((12 << 20, 1), (400 << 10, 2)):
            house.SHARD_BYTES, kept = limit, house.SHARD_BYTES
            paths = house.save(os.path.join(directory, f"m{n_files}.safetensors"), model,
                               tokenizer(), {"license": "x"})
            house.SHARD_BYTES = kept
            self.assertEqual(len(paths), n_files)
            loaded, words = house.load(paths[0])
            self.assertEqual(loaded.config, SMALL)
            self.assertEqual(words.merges, tokenizer().merges)
            for (name, mine), (other, theirs) in zip(model.state_dict().items(),
                                                     loaded.state_dict().items()):
                self.assertEqual(name, other)
                torch.testing.assert_close(mine.bfloat16().float(), theirs, atol=0, rtol=0)


class MuonTest(unittest.TestCase):
    def test_orthogonalise(self):
        for shape in ((3, 40, 24), (2, 24, 40)):
            g = torch.randn(shape, generator=torch.Generator().manual_seed(5))
            values = torch.linalg.svdvals(muon.orthogonalise(g))
            self.assertTrue(((values > 0.5) & (values < 1.4)).all(), values)
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            inside = torch.einsum("nji,njk,nik->ni", u, muon.orthogonalise(g), vh)
            self.assertTrue((inside > 0.5).all())   # along the singular vectors of g


class ScheduleTest(unittest.TestCase):
    def test_positions(self):
        rng = np.random.default_rng(7)
        for _ in range(200):
            positions = train.skipped_positions(rng, 256, 32768)
            self.assertTrue((np.diff(positions) >= 1).all())
            self.assertTrue(0 <= positions[0] and positions[-1] < 32768)

    def test_rates_and_lengths(self):
        for recipe in (train.RECIPES["cpu"], train.RECIPES["gpu"]):
            factors = [train.schedule(recipe, share, 10**6)[0] for share in (0, 0.5, 0.99, 2)]
            self.assertEqual(factors[:2], [1, 1])
            self.assertEqual(factors[-1], 0.05)
            self.assertLess(train.schedule(recipe, 0.5, 0)[0], 0.1)
            shortest = max(train.schedule(recipe, 0, 0)[1])
            self.assertLess(shortest, max(train.schedule(recipe, 1, 0)[1]))

    def test_wilson(self):
        low, high = evaluate.wilson(95, 100)      # the textbook's example: 0.888 to 0.978
        self.assertAlmostEqual(low, 0.8882, places=3)
        self.assertAlmostEqual(high, 0.9785, places=3)
        self.assertEqual(evaluate.wilson(0, 10)[0], 0.0)
        self.assertAlmostEqual(evaluate.wilson(10, 10)[1], 1.0)


class ResumeTest(unittest.TestCase):
    """Four steps in one go, and two and two with a checkpoint between them, end alike."""

    def trainer(self, directory):
        arguments = argparse.Namespace(preset="small", out=directory, seed=3, device="cpu",
                                       plan_minutes=1e6)
        return train.Trainer(arguments)

    def test_checkpoint(self):
        words = tokenizer()
        pool = tasks.Haystack(np.arange(256, 300).repeat(40))
        house.PRESETS["small"] = SMALL
        train.RECIPES["small"] = train.Recipe(1024, 0.01, 0.001, ((1.0, {256: 1.0}),), 1024, 512)
        self.addCleanup(house.PRESETS.pop, "small")
        self.addCleanup(train.RECIPES.pop, "small")
        kept = train.Trainer._merges, tasks.maker, tasks.training_sample
        train.Trainer._merges = lambda self: words.merges
        tasks.maker = lambda *_, **__: argparse.Namespace(haystack=pool)

        def sample(maker, n_tokens, rng, early_words, share):
            tokens = maker.haystack.take(rng, n_tokens)
            return tasks.Sample("text", tokens, n_tokens, [(9, 12)], np.arange(n_tokens) > 20)
        tasks.training_sample = sample
        try:
            straight = self.trainer(tempfile.mkdtemp())
            for _ in range(4):
                straight.step()
            directory = tempfile.mkdtemp()
            first = self.trainer(directory)
            for _ in range(2):
                first.step()
            first.save()
            second = self.trainer(directory)
            self.assertEqual(second.state, first.state)
            for _ in range(2):
                second.step()
        finally:
            train.Trainer._merges, tasks.maker, tasks.training_sample = kept
        self.assertEqual(second.state["step"], 4)
        for mine, theirs in zip(straight.model.parameters(), second.model.parameters()):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        self.assertTrue(self.moved(straight))
        export.export(os.path.join(directory, "checkpoint.pt"),
                      os.path.join(directory, "out.safetensors"))
        loaded, _ = house.load(os.path.join(directory, "out.safetensors"))
        for mine, theirs in zip(first.model.parameters(), loaded.parameters()):
            torch.testing.assert_close(mine.detach().bfloat16().float(), theirs.detach(),
                                       atol=0, rtol=0)

    def moved(self, trainer):
        """Training moved the weights at all."""
        torch.manual_seed(3)
        start = house.Llama(SMALL)
        return any((mine - theirs).abs().max() > 1e-5 for mine, theirs in
                   zip(start.parameters(), trainer.model.parameters()))


if __name__ == "__main__":
    unittest.main()
