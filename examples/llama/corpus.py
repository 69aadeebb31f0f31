# SPDX-License-Identifier: Apache-2.0
"""The text the example model is trained on, and its split.

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
_REFERENCE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")


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
