# SPDX-License-Identifier: Apache-2.0
"""The text the example model is trained on, its split, and its byte-pair tokenizer.

The text is the King James Bible of the Debian packages bible-kjv-text (the text, compressed) and
bible-kjv (the reader that prints it). A document is one of its 66 books. Verse references are
removed: a verse is a line, an empty line stands between chapters.
"""
import os
import re
import subprocess

PACKAGES = ("bible-kjv-text", "bible-kjv")
# Held out whole, never trained on, and never seen by the tokenizer's training either.
HELD_OUT_BOOKS = ("Ruth", "Est", "Eze", "Hab", "Acts", "2Th", "1Jn")
# The byte that opens a document; it occurs nowhere in the text.
DOCUMENT_START = 0
_REFERENCE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")
# A piece is a run of letters with at most one space before it; any other byte is its own piece.
# tokenizer.c splits by the same rule.
_PIECE = re.compile(rb" ?[A-Za-z]+|[^A-Za-z]", re.DOTALL)


def load_books(build_dir):
    """Returns {book: text}. Downloads and unpacks the packages into build_dir when missing."""
    root = os.path.join(build_dir, "packages")
    reader = os.path.join(root, "usr/bin/bible")
    data_dir = os.path.join(root, "usr/lib")
    if not (os.path.exists(reader) and os.path.exists(os.path.join(data_dir, "bible.data"))):
        os.makedirs(root, exist_ok=True)
        print("downloading", ", ".join(PACKAGES), flush=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, check=True)
        for name in sorted(os.listdir(root)):
            if name.endswith(".deb"):
                subprocess.run(["dpkg", "-x", name, "."], cwd=root, check=True)
    # The reader looks for its data in the current directory first.
    printed = subprocess.run(
        [os.path.abspath(reader), "-f", "gen1:1-rev22:21"],
        cwd=data_dir, check=True, capture_output=True, text=True).stdout
    books = {}
    last = (None, None)
    for line in printed.splitlines():
        match = _REFERENCE.match(line)
        if match is None:
            raise ValueError("unexpected line from the reader: " + line)
        book, chapter, _, verse = match.groups()
        lines = books.setdefault(book, [])
        if last[0] == book and last[1] != chapter:
            lines.append("")
        last = (book, chapter)
        lines.append(verse.strip())
    return {book: "\n".join(lines) + "\n" for book, lines in books.items()}


def split(books):
    """Returns (training texts, held-out texts): disjoint lists of whole books."""
    missing = set(HELD_OUT_BOOKS) - set(books)
    if missing:
        raise ValueError("held-out books not in the text: " + ", ".join(sorted(missing)))
    train = [text for book, text in books.items() if book not in HELD_OUT_BOOKS]
    held_out = [text for book, text in books.items() if book in HELD_OUT_BOOKS]
    return train, held_out


def train_merges(texts, vocabulary_size):
    """Byte-pair merges, most frequent pair first; token 256 + i is the pair merges[i]."""
    counts = {}
    for text in texts:
        for piece in _PIECE.findall(text.encode()):
            counts[piece] = counts.get(piece, 0) + 1
    words = [(list(piece), count) for piece, count in counts.items()]
    pair_counts = {}
    pair_words = {}

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
        # Ties go to the smaller pair, so that the result depends on the text alone.
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
    """Encodes by the lowest-ranked merge first, piece by piece."""

    def __init__(self, merges):
        self.ranks = {tuple(pair): 256 + rank for rank, pair in enumerate(merges)}
        self.bytes_of = [bytes([value]) for value in range(256)]
        for left, right in merges:
            self.bytes_of.append(self.bytes_of[left] + self.bytes_of[right])
        self._cache = {}

    def encode(self, text):
        tokens = []
        for piece in _PIECE.findall(text.encode()):
            if piece not in self._cache:
                self._cache[piece] = self._encode_piece(piece)
            tokens.extend(self._cache[piece])
        return tokens

    def _encode_piece(self, piece):
        tokens = list(piece)
        while len(tokens) > 1:
            known = [p for p in zip(tokens, tokens[1:]) if p in self.ranks]
            if not known:
                break
            best = min(known, key=self.ranks.get)
            tokens = _merge(tokens, best, self.ranks[best])
        return tokens

    def decode(self, tokens):
        return b"".join(self.bytes_of[token] for token in tokens)
