# SPDX-License-Identifier: Apache-2.0
"""Real text of several kinds for the house model: where it comes from, and its split.

The texts are those of Debian packages, downloaded with apt-get and unpacked (never installed) under
build/house/packages. Nothing of them is in this tree. README.md names versions and licences.
A document is a book of the Bible, a chapter, a page, or a section of at least 48 KB where a text
has no chapters. Held out are whole documents: neither the model nor the tokenizer has seen them.
"""
import dataclasses
import glob
import gzip
import hashlib
import os
import re
import subprocess
import zlib

import numpy as np

import tokenizer as house_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.join(ROOT, "build", "house")
# Their texts are in the public domain first: held_out_text() begins with these.
PACKAGES = ("bible-kjv-text", "bible-kjv", "jargon-text", "debian-policy", "debian-reference-en",
            "perl-doc", "python3.11-doc")
HELD_OUT_BOOKS = ("Ruth", "Est", "Eze", "Hab", "Acts", "2Th", "1Jn")
_REFERENCE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")
# Changes of each release, tables of contents, of symbols, and of characters: hardly text.
_PERL_LISTS = ("delta", "perlapi", "perlintern", "perltoc", "perluniprops")
_PYTHON_PARTS = ("extending", "faq", "howto", "reference", "tutorial")
_SECTION_BYTES = 48 << 10
_SMALLEST_DOCUMENT = 2 << 10


@dataclasses.dataclass(frozen=True)
class Document:
    title: str     # package/name
    text: str


def documents(build_dir=BUILD):
    """All documents, in a fixed order. Downloads and unpacks the packages that are missing."""
    root = os.path.join(build_dir, "packages")
    _fetch(root)
    share = os.path.join(root, "usr/share")
    found = _bible(root)
    found += _sections("jargon-text/jargon", _read(share + "/doc/jargon-text/jargon.txt.gz"))
    for path in sorted(glob.glob(share + "/doc/debian-policy/*.txt.gz")):
        found += _sections("debian-policy/" + _stem(path), _read(path))
    found += _chapters("debian-reference-en/", _read(
        share + "/debian-reference/debian-reference.en.txt.gz"))
    for path in sorted(glob.glob(share + "/perl/*/pod/perl*.pod")):
        if not _stem(path).endswith(_PERL_LISTS):
            found.append(Document("perl-doc/" + _stem(path), _read(path)))
    sources = share + "/doc/python3.11/html/_sources/"
    for part in _PYTHON_PARTS:
        for path in sorted(glob.glob(f"{sources}{part}/*.txt")):
            title = f"python3.11-doc/{part}/{_stem(path)}"
            found.append(Document(title, _read(path)))
    found = [Document(each.title, normalise(each.text)) for each in found]
    return [each for each in found if len(each.text) >= _SMALLEST_DOCUMENT]


def is_held_out(title):
    """About a tenth of the documents, chosen by name, so that a new one never moves another."""
    package, name = title.split("/", 1)
    if package == "bible-kjv-text":
        return name in HELD_OUT_BOOKS
    return zlib.crc32(title.encode()) % 12 == 10


def training_text(build_dir=BUILD):
    """[(title, text)] to train on."""
    return [(each.title, each.text) for each in documents(build_dir) if not is_held_out(each.title)]


def held_out_text(build_dir=BUILD):
    """[(title, text)] never trained on; the texts in the public domain come first."""
    return [(each.title, each.text) for each in documents(build_dir) if is_held_out(each.title)]


def normalise(text):
    """Trims lines and runs of spaces, drops lines of box drawing, keeps single empty lines."""
    text = re.sub(r"[\u2500-\u259f]+", " ", text)
    text = re.sub(r"[ \t\xa0]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def tokens_of(texts, tokenizer, cache_dir=None):
    """int32 tokens of [(title, text)], each opened by a document start; kept in cache_dir."""
    digest = hashlib.sha256(repr(tokenizer.merges).encode())
    for title, text in texts:
        digest.update(f"{title} {zlib.crc32(text.encode())}".encode())
    path = cache_dir and os.path.join(cache_dir, f"tokens-{digest.hexdigest()[:16]}.npy")
    if path and os.path.exists(path):
        return np.load(path)
    stream = []
    for _, text in texts:
        stream.append(house_tokenizer.DOCUMENT_START)
        stream += tokenizer.encode(text)
    tokens = np.asarray(stream, np.int32)
    if path:
        np.save(path + ".new.npy", tokens)
        os.replace(path + ".new.npy", path)
    return tokens


def _fetch(root):
    marker = os.path.join(root, "unpacked-" + hashlib.sha256(
        " ".join(PACKAGES).encode()).hexdigest()[:8])
    if os.path.exists(marker):
        return
    os.makedirs(root, exist_ok=True)
    print("downloading", ", ".join(PACKAGES), flush=True)
    subprocess.run(["apt-get", "-qq", "download", *PACKAGES], cwd=root, check=True)
    for path in sorted(glob.glob(os.path.join(root, "*.deb"))):
        subprocess.run(["dpkg", "-x", path, root], check=True)
    with open(marker, "w", encoding="utf-8"):
        pass


def _bible(root):
    # The reader looks for its data in the current directory first.
    reader = os.path.abspath(os.path.join(root, "usr/bin/bible"))
    printed = subprocess.run([reader, "-f", "gen1:1-rev22:21"], cwd=os.path.join(root, "usr/lib"),
                             check=True, capture_output=True, text=True).stdout
    books, last = {}, None
    for line in printed.splitlines():
        book, chapter, _, verse = _REFERENCE.match(line).groups()
        lines = books.setdefault(book, [])
        if lines and last != chapter:
            lines.append("")
        last = chapter
        lines.append(verse.strip())
    return [Document("bible-kjv-text/" + book, "\n".join(lines)) for book, lines in books.items()]


def _sections(title, text):
    """Cuts at empty lines into sections of about _SECTION_BYTES."""
    found, lines, size = [], [], 0
    for line in text.split("\n"):
        if size >= _SECTION_BYTES and not line.strip():
            found.append("\n".join(lines))
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    found.append("\n".join(lines))
    return [Document(f"{title}-{number:02}", part) for number, part in enumerate(found)]


def _chapters(prefix, text):
    parts = re.split(r"^(?=Chapter\s\d+\.)", text, flags=re.MULTILINE)
    return [Document(f"{prefix}chapter-{number:02}", part) for number, part in enumerate(parts)]


def _stem(path):
    return os.path.basename(path).split(".")[0]


def _read(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
        return file.read().decode(errors="replace")
