# SPDX-License-Identifier: Apache-2.0
"""Generated tasks: lengths, answers that the text before them settles, splits that never meet."""
import itertools
import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import tasks  # noqa: E402
import tokenizer as house_tokenizer  # noqa: E402

WORDS = [*tasks.RELATIONS, *("".join(letters) for letters in itertools.islice(
    itertools.product("bdgklmnprst", "aeiou", "bdgklmnprst", "aeo"), 0, None, 6))]


def make_tokenizer():
    """One whose vocabulary holds every word of WORDS, and little else."""
    text = "".join(f" {word}." * (5 + at % 7) for at, word in enumerate(
        [*WORDS, "The", "of", "is"]))
    return house_tokenizer.Tokenizer(house_tokenizer.train_merges([text], 256 + 560))


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tokenizer = make_tokenizer()
        cls.lexicon = tasks.Lexicon(cls.tokenizer)
        text = "".join(f" {word}{mark}" for word in WORDS for mark in ",\n") * 200
        cls.haystack = tasks.Haystack(cls.tokenizer.encode(text))

    def maker(self, evaluation):
        return tasks.Maker(self.lexicon, self.haystack, evaluation)

    def words_of(self, tokens):
        return [self.tokenizer.decode([token]).decode() for token in tokens]


class TokenizerTest(Case):
    def test_round_trip(self):
        for text in ("", "a", "Thine  house\n\n\t[ x: y]", "caf\u00e9 \u2500"):
            self.assertEqual(self.tokenizer.decode(self.tokenizer.encode(text)), text.encode())
        every = bytes(range(256)) * 2
        self.assertEqual(self.tokenizer.decode(self.tokenizer.encode(every)), every)

    def test_words_are_single_tokens(self):
        for word in WORDS:
            self.assertEqual(len(self.tokenizer.encode(" " + word)), 1, word)

    def test_merges_depend_on_the_text_alone(self):
        self.assertEqual(make_tokenizer().merges, self.tokenizer.merges)


class SampleTest(Case):
    def test_length_and_answer(self):
        for name in tasks.TASKS:
            for n in (256, 777, 2048):
                sample = self.maker(True).make(name, n, np.random.default_rng(5))
                self.assertEqual(len(sample.tokens), n, name)
                self.assertEqual(sample.answers, [(sample.answer_begin, n)], name)
                self.assertFalse(sample.text[sample.answer_begin:].any(), name)

    def test_training_samples_have_their_length(self):
        rng = np.random.default_rng(6)
        for early_words, share in ((0, 0.0), (0, 0.9), (24, 0.0), (100, 0.0)):
            for _ in range(60):
                sample = tasks.training_sample(self.maker(False), 512, rng, early_words, share)
                self.assertEqual(len(sample.tokens), 512, sample.name)
                self.assertEqual(len(sample.text), 512, sample.name)
                for begin, end in sample.answers:
                    self.assertTrue(0 < begin < end <= 512, sample.name)

    def test_long_samples(self):
        for name in tasks.TASKS:
            self.assertEqual(len(self.maker(True).make(name, 32768,
                                                       np.random.default_rng(7)).tokens), 32768)

    def test_the_same_seed_gives_the_same_sample(self):
        for name in tasks.TASKS:
            first, again, other = (self.maker(True).make(name, 512, np.random.default_rng(seed))
                                   for seed in (8, 8, 9))
            np.testing.assert_array_equal(first.tokens, again.tokens)
            self.assertFalse(np.array_equal(first.tokens, other.tokens), name)

    def test_refusals(self):
        with self.assertRaises(ValueError):
            self.maker(True).make("nothing", 512, np.random.default_rng(1))
        with self.assertRaises(ValueError):
            self.maker(True).make("copy", 255, np.random.default_rng(1))


class AnswerTest(Case):
    """The answer follows from the text: an independent reading of the decoded text agrees."""

    def facts(self, text):
        """{" key": " value"} of "[ key value]"."""
        found = {}
        for part in text.split("[")[1:]:
            key, space, value = part.split("]")[0].rpartition(" ")
            found.setdefault(key, space + value)
        return found

    def split(self, sample):
        return (self.tokenizer.decode(sample.tokens[:sample.answer_begin].tolist()).decode(),
                self.tokenizer.decode(sample.tokens[sample.answer_begin:].tolist()).decode())

    def test_facts(self):
        for name in ("needle_single", "needle_multikey", "key_value"):
            for seed in range(5):
                sample = self.maker(True).make(name, 512, np.random.default_rng(seed))
                before, answer = self.split(sample)
                key = before.rsplit("?", 1)[1]
                self.assertEqual(self.facts(before)[key], answer, name)

    def test_trace(self):
        for hops in (1, 2, 3, 4):
            sample = self.maker(True).make(f"trace_{hops}", 512, np.random.default_rng(hops))
            before, answer = self.split(sample)
            facts, key = self.facts(before), before.rsplit("?>", 1)[1]
            expected = []
            for _ in range(hops):
                key = facts[key]
                expected.append(key)
            self.assertNotIn(key, facts)
            self.assertEqual("".join(expected), answer)

    def test_streams(self):
        for name, n_answer in (("frequent_words", 3), ("common_words", 5)):
            for seed in range(3):
                sample = self.maker(True).make(name, 2048, np.random.default_rng(seed))
                body = sample.tokens[1:sample.answer_begin - 2].tolist()
                ranked = sorted(set(body), key=lambda word: -body.count(word))
                answer = sample.tokens[sample.answer_begin:].tolist()
                self.assertGreater(body.count(ranked[n_answer - 1]), body.count(ranked[n_answer]))
                if sample.unordered:
                    self.assertEqual(sorted(answer), sorted(ranked[:n_answer]))
                else:
                    self.assertEqual(answer, ranked[:n_answer])

    def test_streams_with_queries(self):
        rng = np.random.default_rng(11)
        sample = self.maker(False).make("frequent_words", 1024, rng, queries=8)
        self.assertTrue(sample.answers)
        hidden = np.ones(len(sample.tokens), bool)
        for begin, end in sample.answers:
            hidden[begin - 2:end + 1] = False
        for begin, end in sample.answers:
            body = sample.tokens[:begin][hidden[:begin]].tolist()
            best = max(set(body), key=body.count)
            self.assertEqual(sample.tokens[begin], best)

    def test_copy(self):
        before, answer = self.split(self.maker(True).make("copy", 512, np.random.default_rng(3)))
        opening = before.rsplit("?<", 1)[1]
        self.assertIn("<" + opening + answer + ">", before)

    def test_question(self):
        before, answer = self.split(self.maker(True).make("question", 512,
                                                          np.random.default_rng(3)))
        self.assertEqual(before.count(before.rsplit("?", 1)[1] + answer + "."), 1)

    def test_depth(self):
        for depth in (0.0, 0.5, 0.95):
            sample = self.maker(True).make("needle_single", 2048, np.random.default_rng(4),
                                           depth=depth)
            at = self.words_of(sample.tokens).index("[")
            self.assertAlmostEqual(at / 2048, depth, delta=0.05)


class SplitTest(Case):
    """What an evaluation asks never appears in training: by the class of its words."""

    def associations(self, sample):
        """The classed word sequences of a sample, read from its tokens."""
        words = self.words_of(sample.tokens)
        known = set(self.words_of(self.lexicon.words))
        for at in range(len(words) - 5):
            inside = words[at + 1:at + 5]
            if words[at] == "[" and inside[2] == "]":
                yield tuple(sample.tokens[at + 1:at + 3])
            elif words[at] == "[" and inside[3] == "]":
                yield tuple(sample.tokens[at + 1:at + 4])
            elif words[at] == "<" and set(inside[:2]) <= known:
                yield tuple(sample.tokens[[at + 1, at + 2]])
            elif words[at:at + 3:2] == [" The", " of"] and words[at + 4] == " is":
                yield tuple(sample.tokens[[at + 1, at + 3, at + 5]])
        for begin, end in sample.answers:
            if sample.name in ("frequent_words", "common_words"):
                answer = sample.tokens[begin:end]
                yield tuple(np.sort(answer) if sample.unordered else answer)

    def test_classes(self):
        seen = {True: set(), False: set()}
        for evaluation, found in seen.items():
            for name in tasks.TASKS:
                for seed in range(8):
                    for queries in (0,) if evaluation else (0, 4):
                        sample = self.maker(evaluation).make(
                            name, 640, np.random.default_rng([seed, 3]), queries=queries)
                        mine = list(self.associations(sample))
                        self.assertTrue(mine or queries, name)
                        for words in mine:
                            self.assertEqual(int(tasks.split_class(words)) == 0, evaluation,
                                             (name, words))
                        found.update(mine)
        self.assertGreater(min(len(each) for each in seen.values()), 200)
        self.assertFalse(seen[True] & seen[False])

    def test_every_class_occurs(self):
        words = self.lexicon.words
        classes = tasks.split_class([words[:, None], words[None, :]])
        counts = np.bincount(classes.ravel(), minlength=tasks.CLASSES)
        self.assertLess(counts.max(), 1.3 * counts.min())


if __name__ == "__main__":
    unittest.main()
