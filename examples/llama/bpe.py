# SPDX-License-Identifier: Apache-2.0
"""Byte-pair tokenizer of the models that kvm-llama runs; tokenizer.c splits by the same rule.

Tokens 0 to 255 are the bytes, token 256 + i is the concatenation of the pair merges[i]. Byte 0
opens a document. Any text can be encoded, and decoding gives its bytes back.
"""
import re

DOCUMENT_START = 0
# A piece is a run of letters with at most one space before it; any other byte is its own piece.
_PIECE = re.compile(rb" ?[A-Za-z]+|[^A-Za-z]", re.DOTALL)


def train_merges(texts, vocabulary_size):
    """Byte-pair merges, most frequent pair first; depends on the texts alone."""
    counts = {}
    for text in texts:
        for piece in _PIECE.findall(text.encode()):
            counts[piece] = counts.get(piece, 0) + 1
    words = [(list(piece), count) for piece, count in counts.items() if len(piece) > 1]
    pair_counts, pair_words = {}, {}

    def tally(index, sign):
        tokens, count = words[index]
        for pair in zip(tokens, tokens[1:]):
            pair_counts[pair] = pair_counts.get(pair, 0) + sign * count
            if sign > 0:
                pair_words.setdefault(pair, set()).add(index)

    for index in range(len(words)):
        tally(index, 1)
    merges = []
    for token in range(256, vocabulary_size):
        # Ties go to the smaller pair.
        best = max(pair_counts, key=lambda pair: (pair_counts[pair], (-pair[0], -pair[1])))
        merges.append(best)
        for index in pair_words.pop(best):
            tally(index, -1)
            words[index] = (_merge(words[index][0], best, token), words[index][1])
            tally(index, 1)
        pair_counts.pop(best, None)
    return merges


def _merge(tokens, pair, token):
    merged = []
    at = 0
    while at < len(tokens):
        if at + 1 < len(tokens) and (tokens[at], tokens[at + 1]) == pair:
            merged.append(token)
            at += 2
        else:
            merged.append(tokens[at])
            at += 1
    return merged


class Tokenizer:
    """merges: list of pairs. Encodes piece by piece, the lowest-numbered merge first."""

    def __init__(self, merges):
        self.merges = [tuple(pair) for pair in merges]
        self.ranks = {pair: 256 + rank for rank, pair in enumerate(self.merges)}
        self.bytes_of = [bytes([value]) for value in range(256)]
        for left, right in self.merges:
            self.bytes_of.append(self.bytes_of[left] + self.bytes_of[right])
        self._cache = {}

    @property
    def size(self):
        return len(self.bytes_of)

    def encode(self, text):
        """str or bytes -> list of token ids."""
        tokens = []
        for piece in _PIECE.findall(text.encode() if isinstance(text, str) else bytes(text)):
            if piece not in self._cache:
                self._cache[piece] = self._encode_piece(piece)
            tokens.extend(self._cache[piece])
        return tokens

    def decode(self, tokens):
        """Token ids -> bytes."""
        return b"".join(self.bytes_of[token] for token in tokens)

    def _encode_piece(self, piece):
        tokens = list(piece)
        while len(tokens) > 1:
            known = [pair for pair in zip(tokens, tokens[1:]) if pair in self.ranks]
            if not known:
                break
            best = min(known, key=self.ranks.get)
            tokens = _merge(tokens, best, self.ranks[best])
        return tokens
