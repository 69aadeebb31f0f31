# SPDX-License-Identifier: Apache-2.0
"""What tests over models of transformers share: a text by eager attention and through kvm."""

import torch
import transformers as tf

from kvm.integrations.transformers import use_kvm

LIMIT = 1e-3  # of logits, float32 rows


class Force(tf.LogitsProcessor):
    """Chooses the tokens of a text that is there already."""

    def __init__(self, text):
        self.text = text

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf"))
        forced.scatter_(1, self.text[:, input_ids.shape[1]:input_ids.shape[1] + 1], 0.0)
        return forced


class RoundedCache(tf.DynamicCache):
    """Rounds keys and values to bfloat16, as kvm stores them, and computes in float32."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), *args,
                              **kwargs)


def eager(model, run, **extra):
    """run(arguments of a forward pass) with the model's own attention."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    else:  # 4.53
        model.config._attn_implementation = "eager"
    with torch.no_grad():
        return run(extra)


def through_kvm(model, cache, run):
    use_kvm(model)
    with torch.no_grad():
        return run({"past_key_values": cache})


def greedy(model, inputs, n_tokens, forced=None):
    """A function for the above that generates n_tokens, and gives sequences and logits. The text is
    `forced` where one is given, so that two tokens that are equally likely part nothing."""
    processors = [] if forced is None else [Force(forced)]

    def run(extra):
        return model.generate(**inputs, **extra, max_new_tokens=n_tokens, min_new_tokens=n_tokens,
                              do_sample=False, return_dict_in_generate=True, output_logits=True,
                              logits_processor=tf.LogitsProcessorList(processors))
    return run


def deviation(expected, got):
    """The largest difference of two lists of logits."""
    assert len(expected) == len(got)
    return max((a - b).abs().max().item() for a, b in zip(expected, got, strict=True))


def tokens_told_apart(expected, got, margin):
    """How many tokens `expected` tells apart by more than `margin`, and in how many of these `got`
    chooses another."""
    n_told = n_other = 0
    for a, b in zip(expected, got, strict=True):
        best = a.topk(2).values
        tells = best[:, 0] - best[:, 1] > margin
        n_told += int(tells.sum())
        n_other += int((a.argmax(1) != b.argmax(1))[tells].sum())
    return n_told, n_other


class Reference:
    """What a model generates greedily by eager attention, and how far its logits move when keys and
    values are rounded to bfloat16."""

    def __init__(self, model, inputs, n_tokens):
        self.model = model
        self.expected = eager(model, greedy(model, inputs, n_tokens))
        self.forced = greedy(model, inputs, n_tokens, self.expected.sequences)
        rounded = eager(model, self.forced, past_key_values=RoundedCache())
        # kvm may round queries and weights besides, which moves them as much again.
        self.rounding = 2 * deviation(self.expected.logits, rounded.logits)
        assert len(self.expected.logits) == n_tokens

    def check(self, test, cache, is_rounded=False):
        """Logits through `cache` are eager's within LIMIT (bfloat16 rows: the rounding), and tokens
        are the same wherever eager's margin is twice that. Returns what was found."""
        got = through_kvm(self.model, cache, self.forced)
        limit = max(self.rounding, LIMIT) if is_rounded else LIMIT
        worst = deviation(self.expected.logits, got.logits)
        test.assertLess(worst, limit)
        n_told, n_other = tokens_told_apart(self.expected.logits, got.logits, 2 * limit)
        test.assertEqual(n_other, 0)
        if not is_rounded:
            test.assertGreater(n_told, len(got.logits) // 2, "margins too small to tell anything")
        return (f"{'bfloat16' if is_rounded else 'float32'} rows: logits within {worst:.1e} "
                f"(bound {limit:.1e}), {n_told} tokens told apart and the same")
