# SPDX-License-Identifier: Apache-2.0
"""Head files: what is refused, and that `kvm-eval heads` finds the heads of a model that was built
by hand, in which it is known what each head does.

Needs PyTorch and transformers; skipped (77) without."""

import contextlib
import dataclasses
import io
import json
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
from kvm.eval import _heads, _real
from kvm.eval.__main__ import main
from kvm.integrations.transformers import KvmCache, model_fingerprint
from rig import ROOT

N_LAYERS, N_KV_HEADS, GROUP, DIM = 2, 4, 2, 64
WORDS = 512
ECHO, PREVIOUS, INDUCTION = (0, 1), (0, 0), (1, 2)  # layer, kv head


def planted():
    """A Llama whose channels are: who a token is (32), who the one before it was (32), a constant.

    PREVIOUS writes the second part; INDUCTION looks for the tokens whose predecessor was this one,
    and says what they are, so that text that was there before is foretold; ECHO looks for earlier
    copies of its token and says nothing; all others look at nothing in particular."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=72, intermediate_size=8, num_hidden_layers=N_LAYERS,
        num_attention_heads=N_KV_HEADS * GROUP, num_key_value_heads=N_KV_HEADS, vocab_size=WORDS,
        head_dim=DIM, bos_token_id=0, eos_token_id=0, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8}, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).eval()
    who, before = torch.eye(72)[:32], torch.eye(72)[32:64]
    # Pairs of channels (i, i + 32) turn by 1e8^(-i / 32): those from 16 on hardly at all.
    slow = [*range(16, 32), *range(48, 64)]
    turn = 1e8 ** (-torch.arange(16) / 32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.02)
        identity = torch.randint(0, 2, (WORDS, 32)) * 2.0 - 1
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, :32] = identity
        model.model.embed_tokens.weight[:, 64] = 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :32] = identity
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()

        def rows(layer, name, head):
            weight = getattr(model.model.layers[layer].self_attn, name).weight
            return weight[head * DIM:(head + 1) * DIM]

        def say(place, source, target, strength):
            """The head's first q head writes what `source` shows of the tokens that it sees."""
            layer, head = place
            rows(layer, "v_proj", head).zero_()
            rows(layer, "v_proj", head)[:32] = source
            out = model.model.layers[layer].self_attn.o_proj.weight
            begin = head * GROUP * DIM
            out[:, begin:begin + 32] = strength * target.T

        def seek(place, asked, strength=2.0):
            """The head's first q head looks for keys whose `asked` is who the token is."""
            layer, head = place
            for name, shown, number in (("q_proj", who, head * GROUP), ("k_proj", asked, head)):
                rows(layer, name, number).zero_()
                rows(layer, name, number)[slow] = strength * shown

        layer, head = PREVIOUS
        q, k = rows(layer, "q_proj", head * GROUP), rows(layer, "k_proj", head)
        q.zero_()
        k.zero_()
        # The logit is the sum of cos(turn * (distance - 1)).
        k[:16, 64] = 12
        q[:16, 64] = 12 * turn.cos()
        q[32:48, 64] = -12 * turn.sin()
        say(PREVIOUS, who, before, 1.0)
        seek(ECHO, who)
        seek(INDUCTION, before)
        say(INDUCTION, who, who, 4.0)
    return model


def streaming_but(*places):
    return tuple(tuple(head for head in range(N_KV_HEADS) if (layer, head) not in places)
                 for layer in range(N_LAYERS))


def run(*arguments):
    """The exit status of kvm-eval, what it printed, and its complaint."""
    out, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(complaint):
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), complaint.getvalue()


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "model.heads")

    def written(self, **fields):
        """A file of 3 layers of 70 kv heads, whose JSON then has other fields."""
        kvm.HeadFile(((0, 69), (), (3, 64)), 70, "probe", "some-model", b"\x07" * 32,
                     {"period": 40}, {"echo": ((None,) * 70, (0.5,) * 70, (0.25,) * 70)}
                     ).write(self.path)
        found = json.loads(self.path.read_text())
        for key, value in fields.items():
            if isinstance(value, dict):
                found[key].update(value)
            else:
                found[key] = value
        self.path.write_text(json.dumps(found))
        return self.path


class Files(Folder):
    def test_round_trip(self):
        found = kvm.read_heads(self.written())
        self.assertEqual((found.heads, found.n_layers, found.n_kv_heads, found.source),
                         (((0, 69), (), (3, 64)), 3, 70, "probe"))
        self.assertEqual((found.model, found.fingerprint, found.settings["period"]),
                         ("some-model", b"\x07" * 32, 40))
        self.assertEqual(found.scores["echo"][0][0], None)
        self.assertEqual(found.scores["echo"][2][69], 0.25)
        # The words are those of kvm_preset_params.kv_head_masks.
        self.assertEqual(json.loads(self.path.read_text())["kv_head_masks"],
                         [["0x0000000000000001", "0x0000000000000020"],
                          ["0x0000000000000000", "0x0000000000000000"],
                          ["0x0000000000000008", "0x0000000000000001"]])
        again = Path(f"{self.path}.again")
        found.write(again)
        self.assertEqual(kvm.read_heads(again), found)
        self.assertEqual(kvm.read_heads(again).scores, found.scores)
        self.assertEqual(again.read_text(), found.to_json())

    def test_what_is_no_head_file(self):
        def refused(sentence, text=None, **fields):
            self.written(**fields)
            if text is not None:
                self.path.write_text(text)
            with self.assertRaisesRegex(kvm.InvalidError, sentence) as raised:
                kvm.read_heads(self.path)
            self.assertIn(str(self.path), str(raised.exception))

        refused("it is not JSON", "0.5\t0.25\n")
        refused('does not say "format": "kvm-heads"', "[1, 2]")
        refused("does not say", format="kvm-head")
        refused("version 2; this kvm reads version 1", version=2)
        refused("version None", version=None)
        refused("source is 'guess'; it is one of probe, published, measured", source="guess")
        refused("2 masks for 3 layers", kv_head_masks=[["0x0"] * 2] * 2)
        none = ["0x0", "0x0"]
        refused("names kv head 70; there are 70", kv_head_masks=[["0x0", "0x40"], none, none])
        for mask in (["0x1"], "0x1", ["0x1", 0], ["0x1", "1"], ["-0x1", "0x0"], ["0x1", "0x_1"],
                     ["0x" + "0" * 17, "0x0"], ["0x1", "0x"]):
            refused("of layer 1 is no mask", kv_head_masks=[none, mask, none])
        refused("n_kv_heads is 129", model={"n_kv_heads": 129})
        refused("fingerprint has 2 bytes", model={"fingerprint": "abcd"})
        refused("damaged head file", model={"fingerprint": "abcg" * 16})
        refused("it lacks 'source'", '{"format": "kvm-heads", "version": 1, "model": {"n_layers": '
                '0, "n_kv_heads": 1}, "kv_head_masks": []}')
        with self.assertRaises(FileNotFoundError):
            kvm.read_heads("/nowhere/model.heads")

    def test_a_space_takes_one(self):
        geometry = {"n_layers": 3, "n_q_heads": 70, "head_dim": 16}
        with kvm.open_embedded(n_threads=1, capacity=1 << 26) as client:
            path = self.written()
            made = client.register_space("file", **geometry, policy="duo_attention",
                                         head_file=path)
            same = client.register_space(
                "file", **geometry, policies=[
                    kvm.Policy(kvm.Retention.SINKS_RECENT, n_sinks=64, n_recent=256, begin=layer,
                               n_layers=1, heads=heads) for layer, heads in ((0, (0, 69)),
                                                                             (2, (3, 64)))])
            self.assertEqual(made.id, same.id)
            with self.assertRaises(kvm.InvalidError):  # the name is another mask's
                client.register_space("file", **geometry, policy="duo_attention",
                                      head_file=self.written(kv_head_masks=[["0x1", "0x0"]] * 3))
            path = self.written()
            for changed, sentence in (
                    ({"n_layers": 4}, "3 layers and 70 kv heads, some-model; this one has 4 and"),
                    ({"n_q_heads": 35}, "this one has 3 and 35"),
                    ({"fingerprint": b"\x08" * 32}, "07070707.., this model's is 08080808")):
                with self.assertRaisesRegex(kvm.InvalidError, sentence):
                    client.register_space("other", **{**geometry, **changed},
                                          policy="razor_attention", head_file=path)
            client.register_space("right", **geometry, fingerprint=b"\x07" * 32,
                                  policy="razor_attention", head_file=kvm.read_heads(path))
            with self.assertRaisesRegex(kvm.InvalidError, "h2o has no use for it"):
                client.register_space("other", **geometry, policy="h2o", head_file=path)
            with self.assertRaisesRegex(ValueError, "without policy"):
                client.register_space("other", **geometry, head_file=path)
            with self.assertRaisesRegex(ValueError, "there is one table"):
                client.register_space("other", **geometry, head_file=path,
                                      policy=kvm.Preset("duo_attention", heads=[[0]] * 3))


class Planted(Folder):
    @classmethod
    def setUpClass(cls):
        cls.model = planted()
        cls.subject = _heads.Subject(cls.model, "planted", list(range(1, WORDS)), [0])

    def test_the_model_is_what_it_is_said_to_be(self):
        random = np.random.default_rng(5)
        tokens = [int(x) for x in random.permutation(WORDS - 1)[:200] + 1]
        with torch.no_grad():
            logits = planted()(torch.tensor([[0, *tokens, *tokens]])).logits[0]
        foretold = (logits[201:-1].argmax(-1) == torch.tensor(tokens[1:])).float().mean()
        self.assertGreater(foretold, 0.95)

    def test_the_probe_marks_planted_heads_and_no_others(self):
        for n_rows, seed in ((256, 0), (40, 1)):
            found = _heads.probe(self.subject, period=60, n_rows=n_rows, seed=seed)
            self.assertEqual(found.heads, streaming_but(ECHO, INDUCTION))
            self.assertEqual((found.source, found.n_kv_heads), ("probe", N_KV_HEADS))
            self.assertEqual(found.settings, {
                "n_prefix": 1, "period": 60, "n_copies": 4, "n_rows": n_rows, "seed": seed,
                "echo_share": 0.01, "induction_share": 0.14})
            for name, place in (("echo", ECHO), ("induction", INDUCTION)):
                for layer, row in enumerate(found.scores[name]):
                    for head, score in enumerate(row):
                        if (layer, head) == place:
                            self.assertGreater(score, 0.4)
                        else:
                            self.assertLess(score, 0.1, (name, layer, head))
        # By one score alone the other head is not there.
        only = _heads.probe(self.subject, period=60, echo_share=0)
        self.assertEqual(only.heads, streaming_but(INDUCTION))

    def test_measured_losses_mark_the_head_that_foretells(self):
        found = _heads.measure(self.subject, None, n_tokens=400, n_prompts=2, n_needle=16,
                               n_sinks=4, n_recent=64, sparsity=0.875)
        self.assertEqual((found.heads, found.source), (streaming_but(INDUCTION), "measured"))
        increase = found.scores["loss_increase"]
        self.assertGreater(increase[INDUCTION[0]][INDUCTION[1]], 1.0)
        self.assertLess(max(x for layer, row in enumerate(increase) for head, x in enumerate(row)
                            if (layer, head) != INDUCTION), 0.05)
        self.assertLess(found.settings["loss"], 1.0)
        with self.assertRaisesRegex(ValueError, "it has at least"):
            _heads.measure(self.subject, None, n_tokens=100)

    def test_published_tables(self):
        table = Path(f"{self.path}.tsv")
        random = np.random.default_rng(2)
        numbers = random.random((N_LAYERS, N_KV_HEADS))
        numbers[0, 0], numbers[1, 3] = -2e-4, 1.5  # trained gates are a little beyond 0 and 1
        np.savetxt(table, numbers, delimiter="\t")
        clipped = numbers.clip(0, 1)
        for sparsity in (0, 0.125, 0.3, 0.5, 0.75, 0.9, 1):
            found = _heads.published(self.subject, table, sparsity=sparsity)
            # duo_attn's sparsify_attention_heads.
            threshold = {0: -1, 1: 2}.get(sparsity, np.quantile(clipped, sparsity))
            self.assertEqual(found.heads, tuple(
                tuple(int(head) for head in np.flatnonzero(row < threshold)) for row in clipped))
            self.assertEqual(found.source, "published")
            self.assertEqual(found.settings, {"table": table.name, "sparsity": sparsity})
        self.assertEqual(_heads.published(self.subject, table).settings["sparsity"], 0.5)
        found = _heads.published(self.subject, table, threshold=0.5)
        self.assertEqual(sum(map(len, found)), int((clipped < 0.5).sum()))
        # Trained gates are often 1: what is equal is taken in the order of layers.
        np.savetxt(table, np.ones((N_LAYERS, N_KV_HEADS)), delimiter="\t")
        self.assertEqual(_heads.published(self.subject, table, sparsity=0.5).heads,
                         ((0, 1, 2, 3), ()))
        for text, sentence in (("1 2\n1 2\n", "2 rows of 2 numbers; the model has 2 layers of 4"),
                               ("1 2 3 4\n", "1 rows of 4"), ("1 2 3 4\n1 2 3\n", "is no table"),
                               ("", "is no table"), ("1 x 3 4\n", "line 1"),
                               ("1 2 3 4\n1 nan 3 4\n", "line 2 has a number that is not finite")):
            table.write_text(text)
            with self.assertRaisesRegex(ValueError, sentence):
                _heads.published(self.subject, table)

    def test_windows_keep_what_they_keep(self):
        config = transformers.MistralConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=50, head_dim=16, sliding_window=64)
        model = transformers.MistralForCausalLM(config).eval()
        subject = _heads.Subject(model, "windows", list(range(50)), [])
        with self.assertRaisesRegex(ValueError, "all layers have windows"):
            _heads.probe(subject, period=20)

    def test_the_mask_keeps_what_the_model_needs(self):
        random = np.random.default_rng(9)
        tokens = [int(x) for x in random.permutation(WORDS - 1)[:450] + 1]
        ids = [0, *tokens, *tokens[:100]]
        kl = {}
        with kvm.open_embedded(n_threads=1, capacity=1 << 28) as client:
            for name, places in (("right", (ECHO, INDUCTION)), ("wrong", (ECHO,))):
                dataclasses.replace(_heads.probe(self.subject, period=60),
                                    heads=streaming_but(*places)).write(self.path)
                settings = _real.of_presets(["duo_attention", "h2o:share=0.9"], self.path)
                _real.check_heads(settings, self.model)
                self.assertIsNone(settings[1].preset.heads)
                rows = list(_real.evaluate(self.model, client, "copy", ids, 100, 40, settings[:1],
                                           lambda text: None))
                kl[name] = rows[0].kl
        self.assertLess(kl["right"], 0.01)
        self.assertGreater(kl["wrong"], 1.0)

    def test_other_models_are_refused(self):
        _heads.probe(self.subject, period=60).write(self.path)
        settings = _real.of_presets(["razor_attention"], self.path)
        _real.check_heads(settings, self.model)
        half = planted().to(torch.bfloat16)
        twin = planted().to(torch.bfloat16).to(torch.float16)
        self.assertEqual(model_fingerprint(half), model_fingerprint(twin))
        # Positions scaled for longer texts are the same model.
        stretched = planted()
        stretched.config.rope_parameters["rope_theta"] = 2e8
        _real.check_heads(settings, stretched)
        other = planted()
        with torch.no_grad():
            other.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
        with kvm.open_embedded(n_threads=1, capacity=1 << 26) as client:
            sentence = "for other weights, planted: their fingerprint is"
            with self.assertRaisesRegex(kvm.InvalidError, sentence):
                KvmCache(other, client, policy="razor_attention", head_file=self.path)
            with self.assertRaisesRegex(kvm.InvalidError, sentence):
                _real.check_heads(settings, other)
            KvmCache(self.model, client, policy="razor_attention", head_file=self.path).close()


class Command(Folder):
    def test_the_house_model(self):
        house = Path(ROOT, "models/house")
        done = run("heads", house, "--period", 100, "--rows", 32, "--threads", 1, "--out",
                   self.path)
        self.assertEqual((done[0], done[2]), (0, ""))
        found = kvm.read_heads(self.path)
        n = sum(map(len, found))
        self.assertEqual(done[1], f"{self.path}: {found.n_layers * found.n_kv_heads - n} of "
                         f"{found.n_layers * found.n_kv_heads} kv heads retrieve (probe)\n")
        self.assertGreater(n, 0)
        tasks = ("tasks", "--house", house, "--lengths", 512, "--prompts", 2, "--facts", 2,
                 "--threads", 1)
        done = run(*tasks, "--policy", "razor_attention", "--head-file", self.path)
        self.assertEqual((done[0], done[2]), (0, ""))
        self.assertIn("razor_attention", done[1])
        for arguments, sentence in (
                (("--policy", "h2o", "--head-file", self.path), "--head-file is given, and no"),
                (("--policy", "duo_attention"), "kv_head_masks is NULL"),
                (("--policy", "duo_attention", "--head-file", "/nowhere/x"), "/nowhere/x")):
            status, _, said = run(*tasks, *arguments)
            self.assertEqual(status, 1)
            self.assertIn(sentence, said)
        dataclasses.replace(found, fingerprint=b"\x01" * 32).write(self.path)
        status, _, said = run(*tasks, "--policy", "duo_attention", "--head-file", self.path)
        self.assertEqual(status, 1)
        self.assertIn("is for other weights, house", said)

    def test_a_folder_of_transformers(self):
        folder = self.path.parent / "planted"
        planted().save_pretrained(folder)
        status, out, said = run("heads", folder, "--period", 60, "--threads", 1)
        self.assertEqual(status, 0, said)
        self.path.write_text(out)
        self.assertEqual(kvm.read_heads(self.path).heads, streaming_but(ECHO, INDUCTION))
        status, out, said = run("heads", folder, "--measure", "--tokens", 300, "--prompts", 1,
                                "--sinks", 4, "--recent", 64, "--sparsity", 0.875, "--threads", 1)
        self.assertEqual(status, 0, said)
        self.path.write_text(out)
        self.assertEqual(kvm.read_heads(self.path).heads, streaming_but(INDUCTION))

    def test_what_is_refused(self):
        house = Path(ROOT, "models/house")
        for arguments, sentence in (
                (("--echo", "2"), "--echo is 2.0; it is a share"),
                (("--copies", "1"), "there are at least 2, 1 and 1"),
                (("--threshold", "0.5"), "for the numbers of a table"),
                (("--published", "x", "--threshold", ".5", "--sparsity", ".5"), "one of them"),
                (("--published", "/nowhere/x.tsv"), "/nowhere/x.tsv"),
                (("--period", "1"), "--period is 1;"),
                (("--period", "90000"), "--period is 90000;")):
            status, _, said = run("heads", house, *arguments)
            self.assertEqual(status, 1)
            self.assertIn(sentence, said)


if __name__ == "__main__":
    torch.set_num_threads(1)  # another test runs beside
    unittest.main(verbosity=2)
