# SPDX-License-Identifier: Apache-2.0
"""Generated long-context tasks for the house model, at any length from 256 tokens.

Words of a task are single tokens of the tokenizer (a space and at least four letters). Formats:

  fact         "[ quiet river stone]"          query   "? quiet river stone."
  assignment   "[ stone lamp]"                 query   "?> stone lamp chair."
  stream       " lamp lamp river lamp ..."     query   "?# lamp river stone." (most frequent first)
                                               query   "?* river lamp ..." (common ones, any order)
  passage      "< stone lamp ... river>"       query   "?< stone lamp ... river>"
  statement    " The name of river is stone."  query   "? The name of river is stone."

Training and evaluation are disjoint by construction. The haystack of an evaluation is held-out
text. Every fact, assignment, statement, answer list and passage opening has a class, `split_class`
of its words: class 0 of 8 appears in evaluation samples only (as their distractors, too), the
others only in training samples.
"""
import dataclasses
import re
import zlib

import numpy as np

import data
from tokenizer import DOCUMENT_START

CLASSES = 8
FREQUENT, COMMON, PASSAGE = 3, 5, 32
RELATIONS = ("name", "house", "work", "place", "word", "land", "city", "king", "time", "file")
FEWEST_WORDS = 24       # of phrases, at the start of training
_STREAM_START = 160     # words of a stream before its first query: until then counts are close


@dataclasses.dataclass
class Sample:
    """tokens int32 [n]. answer_begin: where the last answer begins; it ends the sample, except in
    training samples. answers: [(begin, end)] of all answers. text: bool [n], whether a token is
    of real text."""
    name: str
    tokens: np.ndarray
    answer_begin: int
    answers: list
    text: np.ndarray
    unordered: bool = False   # an answer is right in any order
    depth: float = 0.0        # where the last answer's fact stands: 0 at the start, 1 at the end


def split_class(words):
    """The class, 0 to CLASSES - 1, of a sequence of tokens; arrays give an array."""
    mixed = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for word in words:
            mixed = (mixed ^ np.asarray(word).astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = mixed ^ (mixed >> np.uint64(29))
    return (mixed % np.uint64(CLASSES)).astype(np.int64)


class Lexicon:
    """The words of the tasks, and the marks around them."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        found = [token for token, text in enumerate(tokenizer.bytes_of)
                 if re.fullmatch(rb" [a-z]{4,}", text) and tokenizer.encode(text) == [token]]
        self.words = np.asarray(found, np.int32)
        self.shuffled = np.random.default_rng(1).permutation(self.words)
        # Text may be cut before such a token.
        self.opens = np.asarray([text[:1] in b" \n" for text in tokenizer.bytes_of])
        known = {tokenizer.bytes_of[token] for token in found}
        names = [name for name in RELATIONS if b" " + name.encode() in known]
        self.relations = np.asarray([self.one(" " + name) for name in names], np.int32)
        self.the, self.of, self.is_ = (self.one(word) for word in (" The", " of", " is"))

    def one(self, text):
        (token,) = self.tokenizer.encode(text)
        return token


class Haystack:
    """Tokens of text from which stretches are taken."""

    def __init__(self, tokens):
        self.tokens = np.asarray(tokens, np.int32)

    def take(self, rng, n):
        begin = int(rng.integers(0, max(1, len(self.tokens) - n)))
        return np.resize(self.tokens[begin:begin + n], n)


class Maker:
    """Makes samples of one split. haystack: a Haystack."""

    def __init__(self, lexicon, haystack, evaluation):
        self.lexicon, self.haystack, self.evaluation = lexicon, haystack, evaluation

    def make(self, name, n_tokens, rng, queries=0, **options):
        """queries = 0: one query, whose answer ends the sample. Otherwise up to that many, spread
        behind what they ask for. Raises ValueError for unknown names and lengths too small."""
        if name not in TASKS:
            raise ValueError(f"no task {name}; there are {', '.join(TASKS)}")
        if n_tokens < 256:
            raise ValueError("tasks have at least 256 tokens")
        builder, fixed = TASKS[name]
        sample = builder(self, n_tokens, rng, queries, **{**fixed, **options})
        sample.name = name
        return sample

    # ---- Words and their classes ----

    def allowed(self, words):
        classes = split_class(words)
        return classes == 0 if self.evaluation else classes != 0

    def complete(self, rng, *columns):
        """For each row of the columns of words, one more word so that the class is allowed."""
        words = self.lexicon.words
        draws = rng.choice(words, (len(columns[0]), 24))
        good = self.allowed([column[:, None] for column in columns] + [draws])
        chosen = draws[np.arange(len(draws)), good.argmax(1)]
        for row in np.flatnonzero(~good.any(1)):
            every = self.allowed([np.full(len(words), column[row]) for column in columns] + [words])
            chosen[row] = rng.choice(words[every])
        return chosen

    def keys(self, rng, count):
        """Different pairs of words [count, 2] that share their words with one another."""
        side = min(len(self.lexicon.words), int(np.ceil(np.sqrt(2 * count))) + 1)
        first, second = (rng.choice(self.lexicon.words, side, replace=False) for _ in range(2))
        cells = rng.choice(side * side, count, replace=False)
        return np.stack([first[cells // side], second[cells % side]], 1)

    # ---- Composition ----

    def filler(self, rng, n, noise):
        if noise:
            return rng.choice(self.lexicon.words, n), np.zeros(n, bool)
        return self.haystack.take(rng, n), np.ones(n, bool)

    def weave(self, rng, n_tokens, inserts, noise=False):
        """Puts inserts [(fraction, tokens, answer offsets or None)] into text or noise."""
        n_filler = n_tokens - 1 - sum(len(tokens) for _, tokens, _ in inserts)
        if n_filler < 0:
            raise ValueError(f"{n_tokens} tokens are too few for this task")
        filler, is_text = self.filler(rng, n_filler, noise)
        opens = np.flatnonzero(self.lexicon.opens[filler])
        parts, text, answers = [[DOCUMENT_START]], [[False]], []
        at, length = 0, 1

        def add(tokens, mask):
            nonlocal length
            parts.append(tokens)
            text.append(mask)
            length += len(tokens)

        for fraction, tokens, answer in sorted(inserts, key=lambda insert: insert[0]):
            cut = int(fraction * n_filler)
            if fraction < 1.0:
                later = np.searchsorted(opens, cut)
                cut = opens[later] if later < len(opens) else n_filler
            if cut > at:
                add(filler[at:cut], is_text[at:cut])
                at = cut
            if answer is not None:
                answers.append((length + answer[0], length + answer[1]))
            add(tokens, np.zeros(len(tokens), bool))
        add(filler[at:], is_text[at:])
        return Sample("", np.concatenate(parts).astype(np.int32), answers[-1][0], answers,
                      np.concatenate(text).astype(bool))

    # ---- Tasks ----

    def facts(self, n_tokens, rng, queries, per_fact=0, count=1, words=2, noise=None, depth=None):
        """Facts in text. per_fact: tokens of the sample for each fact; 0: `count` facts."""
        one, ask = self.lexicon.one, max(1, queries)
        room = n_tokens - 1 - ask * (words + 3)
        n_facts = min(room // (words + 3), max(count, n_tokens // per_fact if per_fact else 0))
        if words == 2:
            keys = self.keys(rng, n_facts)
        else:
            n_facts = min(n_facts, len(self.lexicon.words))
            keys = rng.choice(self.lexicon.words, (n_facts, 1), replace=False)
        values = self.complete(rng, *keys.T)
        where = rng.random(n_facts)
        asked = [int(rng.integers(n_facts))] if not queries else rng.integers(0, n_facts, queries)
        if depth is not None:
            where[asked[0]] = depth
        inserts = [(where[i], [one("["), *keys[i], values[i], one("]")], None)
                   for i in range(n_facts)]
        for fact in asked:
            fraction = 1.0 if not queries else where[fact] + (1 - where[fact]) * rng.random() ** 0.7
            tokens = [one("?"), *keys[fact], values[fact]]
            inserts.append((fraction, tokens + ([one(".")] if queries else []),
                            (words + 1, words + 2)))
        noise = bool(noise) if noise is not None else False
        sample = self.weave(rng, n_tokens, inserts, noise)
        sample.depth = float(where[asked[-1]])
        return sample

    def trace(self, n_tokens, rng, queries, hops=2, chains=4, noise=False):
        one = self.lexicon.one
        chain = np.empty((chains, hops + 1), np.int32)
        chain[:, 0] = rng.choice(self.lexicon.words, chains, replace=False)
        for hop in range(1, hops + 1):      # every word is assigned at most once
            while True:
                chain[:, hop] = self.complete(rng, chain[:, hop - 1])
                if len(np.unique(chain[:, :hop + 1])) == chains * (hop + 1):
                    break
        where = np.sort(rng.random((chains, hops)), axis=1)
        inserts = [(where[c, h], [one("["), chain[c, h], chain[c, h + 1], one("]")], None)
                   for c in range(chains) for h in range(hops)]
        for c in [int(rng.integers(chains))] if not queries else rng.integers(0, chains, queries):
            tokens = [one("?"), one(">"), *chain[c]]
            last = where[c, -1]
            fraction = 1.0 if not queries else last + (1 - last) * rng.random()
            inserts.append((fraction, tokens + ([one(".")] if queries else []),
                            (3, 3 + hops)))
        return self.weave(rng, n_tokens, inserts, noise)

    def stream(self, n_tokens, rng, queries, common=False, power=2.0, share=0.05, n_words=None):
        """A stream of words; queries ask for what came before them. n_words: so many different
        ones, of which common ones have at least three times their part; None: all."""
        one, n_answer = self.lexicon.one, COMMON if common else FREQUENT
        mark = one("*") if common else one("#")
        words = rng.permutation(self.lexicon.words)[:n_words]
        if n_words is not None:
            share = max(share, 3 / len(words))
        ask = max(1, queries)
        n_body = n_tokens - 1 - ask * (n_answer + 3)
        if not queries:
            n_body += 1                     # the answer ends the sample
            words = self._allowed_first(rng, words, n_answer, common)
        if common:
            odds = np.full(len(words), (1 - COMMON * share) / (len(words) - COMMON))
            odds[:COMMON] = share
        else:
            odds = np.arange(1, min(len(words), 256) + 1.0) ** -power
        body = self._drawn(rng, words[:len(odds)], odds / odds.sum(), n_body, n_answer)
        cuts = [n_body] if not queries else np.sort(rng.integers(
            min(_STREAM_START, n_body // 2), n_body + 1, queries))
        parts, answers, at, length = [[DOCUMENT_START]], [], 0, 1
        for cut in cuts:
            found, counts = np.unique(body[:cut], return_counts=True)
            order = np.lexsort((found, -counts))
            best = found[order[:n_answer]].astype(np.int32)
            clear = counts[order[n_answer - 1]] > 1.3 * counts[order[n_answer]] + 1
            if common:
                best = rng.permutation(best)
            key = np.sort(best) if common else best
            parts.append(body[at:cut])
            length += cut - at
            at = cut
            tokens = [one("?"), mark, *best] + ([one(".")] if queries else [])
            if queries and not (clear and self.allowed(key)):
                tokens = rng.choice(self.lexicon.words, len(tokens))  # instead: more of the stream
            else:
                answers.append((length + 2, length + 2 + n_answer))
            parts.append(tokens)
            length += len(tokens)
        parts.append(body[at:])
        tokens = np.concatenate(parts).astype(np.int32)
        begin = answers[-1][0] if answers else n_tokens
        return Sample("", tokens, begin, answers, np.zeros(n_tokens, bool), unordered=common)

    def _allowed_first(self, rng, words, n_answer, common):
        while not self.allowed(np.sort(words[:n_answer]) if common else words[:n_answer]):
            words = rng.permutation(words)
        return words

    def _drawn(self, rng, words, odds, n_body, n_answer):
        """n_body words in the proportions `odds`; the first n_answer words keep their ranks."""
        while True:
            index = rng.choice(len(words), n_body, p=odds)
            counts = np.bincount(index, minlength=len(words))
            ranked = np.sort(counts[:n_answer])[::-1]
            if not self.evaluation or (counts[n_answer:].max() < ranked[-1] and (
                    odds[0] == odds[1] or (np.diff(counts[:n_answer]) < 0).all())):
                return words[index]

    def copy(self, n_tokens, rng, queries, length=PASSAGE, noise=False):
        one = self.lexicon.one
        count = 1 if not queries else max(1, min(queries, n_tokens // (4 * length)))
        inserts = []
        for _ in range(count):
            passage = rng.choice(self.lexicon.words, length)
            passage[1:2] = self.complete(rng, passage[:1])
            where = rng.random()
            inserts.append((where, [one("<"), *passage, one(">")], None))
            fraction = 1.0 if not queries else where + (1 - where) * rng.random()
            inserts.append((fraction, [one("?"), one("<"), *passage]
                            + ([one(">")] if queries else []), (4, 2 + length)))
        return self.weave(rng, n_tokens, inserts, noise)

    def question(self, n_tokens, rng, queries, statements=8, noise=False):
        """A passage of statements somewhere in the text, and a question about one of them."""
        one, lexicon = self.lexicon.one, self.lexicon
        names = rng.choice(lexicon.words, max(2, statements // 2), replace=False)
        cells = rng.choice(len(names) * len(lexicon.relations), statements, replace=False)
        relations = lexicon.relations[cells % len(lexicon.relations)]
        names = names[cells // len(lexicon.relations)]
        values = self.complete(rng, relations, names)
        said = [[lexicon.the, relation, lexicon.of, name, lexicon.is_, value, one(".")]
                for relation, name, value in zip(relations, names, values)]
        where = rng.random()
        inserts = [(where, sum(said, []), None)]
        asked = [rng.integers(statements)] if not queries else rng.integers(0, statements, queries)
        for i in asked:
            fraction = 1.0 if not queries else where + (1 - where) * rng.random()
            inserts.append((fraction, [one("?")] + (said[i] if queries else said[i][:-1]), (6, 7)))
        return self.weave(rng, n_tokens, inserts, noise)


TASKS = {
    "needle_single": (Maker.facts, {}),
    "needle_multikey": (Maker.facts, {"per_fact": 64, "count": 8}),
    "key_value": (Maker.facts, {"per_fact": 1, "noise": True}),
    "trace_1": (Maker.trace, {"hops": 1}),
    "trace_2": (Maker.trace, {"hops": 2}),
    "trace_3": (Maker.trace, {"hops": 3}),
    "trace_4": (Maker.trace, {"hops": 4}),
    "frequent_words": (Maker.stream, {}),
    "common_words": (Maker.stream, {"common": True}),
    "copy": (Maker.copy, {}),
    "question": (Maker.question, {}),
}

_makers = {}


def maker(tokenizer, evaluation=True, haystack=None):
    """The maker of a split; the haystack is the split's text unless another is given."""
    key = (id(tokenizer), evaluation)
    if haystack is not None:
        return Maker(Lexicon(tokenizer), haystack, evaluation)
    if key not in _makers:
        texts = data.held_out_text() if evaluation else data.training_text()
        stack = Haystack(data.tokens_of(texts, tokenizer, data.BUILD))
        _makers[key] = (tokenizer, Maker(Lexicon(tokenizer), stack, evaluation))
    return _makers[key][1]


def make(name, n_tokens, seed, tokenizer, **options):
    """The evaluation sample of this name, length and seed: Sample of exactly n_tokens tokens, the
    last of which are the answer. The same arguments give the same sample."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), n_tokens, seed])
    return maker(tokenizer).make(name, n_tokens, rng, **options)


def phrases(maker_, n_tokens, rng, n_words):
    """Training only: a few phrases of words, over and over in random order. All words of a phrase
    but its first can be known once it has appeared: the densest lesson in looking back. Samples
    of few words come often: a guess among four is learned from sooner than one among fifty.
    n_words: of the lexicon, in an order of its own, from which the words are; half the time from
    fewer."""
    count, length = int(2 ** rng.uniform(1, 3.5)), int(2 ** rng.uniform(0, 3.2))
    if rng.random() < 0.5:
        n_words = int(FEWEST_WORDS * (n_words / FEWEST_WORDS) ** rng.random())
    table = rng.choice(maker_.lexicon.shuffled[:n_words], (count, length + 1))
    order = rng.integers(0, count, n_tokens // (length + 1) + 1)
    tokens = np.concatenate([[DOCUMENT_START], table[order].ravel()])[:n_tokens].astype(np.int32)
    seen, answers = set(), []
    for at, phrase in enumerate(order):
        begin = 1 + at * (length + 1)
        if phrase in seen and begin + 1 < n_tokens:
            answers.append((begin + 1, min(n_tokens, begin + length + 1)))
        seen.add(phrase)
    return Sample("phrases", tokens, n_tokens, answers, np.zeros(n_tokens, bool))


# What training draws from: (weight, name, tokens for each query, options drawn by the rng). Streams
# have one query: a later one would be answered by copying the answer to the first.
_EARLY_MIX = (
    (0.30, "text", 0, {}),
    (0.70, "phrases", 0, {}),
)
_MIX = (
    (0.25, "text", 0, {}),
    (0.05, "phrases", 0, {}),
    (0.16, "key_value", 14, {"words": (1, 2)}),
    (0.20, "needle_multikey", 22, {"per_fact": (16, 64), "words": (1, 2)}),
    (0.04, "needle_single", 200, {}),
    (0.03, "trace_1", 40, {"chains": (2, 6)}),
    (0.04, "trace_2", 40, {"chains": (2, 6)}),
    (0.03, "trace_3", 50, {"chains": (2, 4)}),
    (0.03, "trace_4", 60, {"chains": (2, 4)}),
    (0.05, "frequent_words", 0, {"power": (1.6, 2.4)}),
    (0.05, "common_words", 0, {"share": (0.04, 0.15)}),
    (0.03, "copy", 128, {"length": (8, 33)}),
    (0.04, "question", 40, {"statements": (4, 10)}),
)
# Keys of one word are known by then, and counting is what takes longest.
_LATE_MIX = (
    (0.20, "text", 0, {}),
    (0.08, "key_value", 14, {"words": (2, 2)}),
    (0.14, "needle_multikey", 22, {"per_fact": (16, 64), "words": (2, 2)}),
    (0.03, "needle_single", 100, {}),
    (0.02, "trace_2", 40, {"chains": (2, 6)}),
    (0.02, "trace_4", 60, {"chains": (2, 4)}),
    (0.22, "frequent_words", 0, {"power": (1.6, 2.4)}),
    (0.22, "common_words", 0, {"share": (0.04, 0.15)}),
    (0.03, "copy", 128, {"length": (8, 33)}),
    (0.04, "question", 40, {"statements": (4, 10)}),
)
LATE_SHARE = 0.45       # of the plan, from which on training draws from _LATE_MIX
# And from here on, half of the steps are counting alone, in short streams of few to all words: a
# stream has one answer, so that a step of long rows of every kind teaches counting a few tokens.
COUNTING_SHARE = 0.72
COUNTING_LENGTHS = (256, 512)


def counting_sample(maker_, n_tokens, rng):
    """A stream of 24 words up to all of them, for training."""
    every = len(maker_.lexicon.words)
    n_words = int(FEWEST_WORDS * (every / FEWEST_WORDS) ** rng.random())
    if rng.random() < 0.5:
        return maker_.make("common_words", n_tokens, rng, queries=1, n_words=n_words,
                           share=rng.uniform(0.04, 0.15))
    return maker_.make("frequent_words", n_tokens, rng, queries=1, n_words=n_words,
                       power=rng.uniform(1.6, 2.4))


def training_sample(maker_, n_tokens, rng, early_words=0, share=0.0):
    """A sample of the training mix: text, or a task with many queries. early_words: text, and
    phrases of so many words, of any length; 0: the whole mix, at `share` of the plan."""
    mix = _EARLY_MIX if early_words else _MIX if share < LATE_SHARE else _LATE_MIX
    weights = np.asarray([row[0] for row in mix])
    _, name, spacing, ranges = mix[rng.choice(len(mix), p=weights / weights.sum())]
    if name == "phrases":
        return phrases(maker_, n_tokens, rng, early_words or len(maker_.lexicon.words))
    if name == "text":
        tokens = maker_.haystack.take(rng, n_tokens)
        return Sample("text", tokens, n_tokens, [], np.ones(n_tokens, bool))
    options = {key: (rng.uniform(low, high) if isinstance(low, float)
                     else int(rng.integers(low, high + 1))) for key, (low, high) in ranges.items()}
    if name not in ("key_value", "frequent_words", "common_words"):
        options["noise"] = bool(rng.random() < 0.2)
    queries = max(1, min(256, n_tokens // spacing)) if spacing else 1
    return maker_.make(name, n_tokens, rng, queries=queries, **options)
