#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an engine does with a prompt before it computes it, and with a conversation that pauses:
prefixes (docs/prefixes.md), priorities and snapshots (docs/disk.md).

It starts a kvmd with a disk in a temporary folder, ends it, and starts it again over the same disk.
One that runs already, which KVM_SOCKET may name, is left alone.
The exit status says whether the conversations shared what they should, and had the bits that they
have where nothing is shared and nothing was saved.

It needs the package kvm, which brings kvmd along, and NumPy. From the root of kvm's source:

    ./dev wheel                                       # makes build/wheel/kvm-*.whl (docs/python.md)
    python3 -m venv /tmp/kvm-venv
    /tmp/kvm-venv/bin/pip install build/wheel/kvm-*.whl numpy
    /tmp/kvm-venv/bin/python examples/pause_and_share/pause_and_share.py
"""

import os
import sys
import tempfile
import time

import numpy

import kvm

N_LAYERS, N_Q_HEADS, N_KV_HEADS, DIM = 2, 4, 2, 64
TEN_MINUTES = 600
PREFILL_RATE = 1000  # tokens a second that this engine computes
NAME = "chat/4711"

# The text is the engine's to keep: kvm has keys and values.
SYSTEM = [17 * i % 1009 for i in range(4 * kvm.PREFIX_TOKENS)]
QUESTIONS = [[1000 * user + i for i in range(100)] for user in (1, 2, 3)]
ANSWER = [7 * i for i in range(30)]


class Engine:
    def __init__(self, socket):
        # A save answers when it is durable, and a drive may take longer than the default of 5 s.
        self.client = kvm.connect(socket, timeout=60)
        self.register()

    def register(self):
        self.space = self.client.register_space(
            "pause_and_share", n_layers=N_LAYERS, n_q_heads=N_Q_HEADS, n_kv_heads=N_KV_HEADS,
            head_dim=DIM,
            # Of the weights: else prefixes and snapshots of two models with this geometry are
            # mixed up.
            fingerprint=b"the digest of the model's weight")

    def reconnect(self):
        """After kvmd was restarted. Sequences and spaces are gone, and queues must be closed."""
        self.client.reconnect()
        self.register()

    # --- The model --------------------------------------------------------------------------------

    def compute(self, seq, tokens):
        """Appends what of the text is not in the sequence yet. Keys and values stand for a model's:
        they depend on the token and its position, so equal texts have equal ones."""
        begin = len(seq)
        for layer in range(N_LAYERS):
            kv = numpy.stack([
                numpy.random.default_rng((layer, at, token)).random((2, N_KV_HEADS, DIM), "float32")
                for at, token in enumerate(tokens) if at >= begin], axis=1)
            # The position that we believe: where kvm has more tokens or fewer, it says so (HOLE).
            item = kvm.Item(seq, append=len(tokens) - begin, append_position=begin)
            self.client.step(self.space, layer, [item], k=kv[0], v=kv[1])

    def attend(self, seq):
        """What attention says of the last token, in each layer."""
        q = numpy.random.default_rng(7).random((1, N_Q_HEADS, DIM), "float32")
        return [self.client.step(self.space, layer, [kvm.Item(seq, query=1)], q=q).o
                for layer in range(N_LAYERS)]

    def is_as_computed(self, seq, tokens):
        """Whether it has the bits that it has over a sequence that is computed anew."""
        with self.space.create_sequence() as anew:
            self.compute(anew, tokens)
            return all(a.tobytes() == b.tobytes()
                       for a, b in zip(self.attend(seq), self.attend(anew), strict=True))

    # --- What the engine asks of kvm --------------------------------------------------------------

    def begin_chat(self, prompt, salt):
        """The sequence of a chat that is all prompt, and how many tokens were not computed."""
        # Customers have salts of their own, so that none learns from the time of an answer what
        # others have asked.
        hashes = self.space.prefix_hashes(prompt, salt=salt)
        # The last token is computed in any case: the engine needs its logits. What is sooner
        # computed than read from the disk is not taken.
        chat, n_found = self.space.fork_prefix(hashes.up_to(len(prompt) - 1),
                                               prefill_rate=PREFILL_RATE)
        self.compute(chat, prompt)
        # Before the fork, which has the priorities too: a page that two sequences share leaves
        # memory as soon as one of them lets it.
        set_priorities(chat)
        try:
            # A fork: what is published never changes, and the chat goes on.
            chat.fork().publish_prefix(hashes, keep=TEN_MINUTES)  # since somebody forked it last
        except kvm.InvalidError as error:
            if error.status != kvm.Status.EXISTS:  # somebody was faster: nothing is lost
                raise
        return chat, n_found

    def finds_nothing(self, prompt, salt):
        return self.space.find_prefix(self.space.prefix_hashes(prompt, salt=salt)) is None

    def has_saved_a_prefix(self):
        return any(snapshot.name.startswith(".prefix/") for snapshot in self.client.snapshots())


def set_priorities(chat):
    """What of a chat is worth keeping in memory, from 0 to 100, where there is not room for all."""
    # Every conversation needs it, but only while there are conversations: worth 50 after that.
    chat.set_priority(90, end=len(SYSTEM), keep=TEN_MINUTES)
    # What one user alone needs makes way, and so does what the chat grows by.
    chat.set_priority(30, begin=len(SYSTEM))


def wait_for(condition):
    """An engine does not: a prefix that is not there is computed. This one wants to show it."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def check(holds, what):
    print(f"  {what}: {'yes' if holds else 'NO'}")
    return holds


def pause(engine):
    first, n_found = engine.begin_chat(SYSTEM + QUESTIONS[0], b"customer 1")
    print(f"first chat: {n_found} of {len(first)} tokens were found")
    second, n_found = engine.begin_chat(SYSTEM + QUESTIONS[1], b"customer 1")
    print(f"second chat: {n_found} of {len(second)} tokens were found")
    checks = [
        check(n_found == len(SYSTEM), "it has the system prompt of the first"),
        check(engine.is_as_computed(second, SYSTEM + QUESTIONS[1]),
              "its attention is as computed anew, bit by bit"),
        check(engine.finds_nothing(SYSTEM + QUESTIONS[1], b"customer 2"),
              "another customer finds nothing")]

    engine.compute(first, SYSTEM + QUESTIONS[0] + ANSWER)
    # Durable when this returns. After each turn it costs what the turn added.
    first.save(NAME, replace=True)
    print(f"{NAME}: {len(first)} tokens are saved")
    first.free()
    # kvmd saves prefixes soon after they are published, and is about to end.
    wait_for(engine.has_saved_a_prefix)
    return checks


def resume(engine):
    text = SYSTEM + QUESTIONS[0] + ANSWER
    chat = engine.space.load(NAME)
    # Attention would read from the disk what it needs; this brings all of it back meanwhile.
    chat.prefetch()
    set_priorities(chat)  # A snapshot has none.
    print(f"{NAME}: {len(chat)} tokens are loaded")
    checks = [check(engine.is_as_computed(chat, text),
                    "its attention is as computed anew, bit by bit")]
    text = text + ANSWER
    engine.compute(chat, text)
    checks.append(check(engine.is_as_computed(chat, text), "and so it is some tokens later"))

    # Behind a restart prefixes are found again some milliseconds after their space is registered.
    prompt = SYSTEM + QUESTIONS[2]
    wait_for(lambda: not engine.finds_nothing(prompt, b"customer 1"))
    third, n_found = engine.begin_chat(prompt, b"customer 1")
    print(f"third chat: {n_found} of {len(third)} tokens were found")
    checks += [check(n_found == len(SYSTEM), "it has the system prompt of those before"),
               check(engine.is_as_computed(third, prompt),
                     "its attention is as computed anew, bit by bit")]
    return checks


def main():
    if len(sys.argv) > 1:
        print(f"pause_and_share.py has no use for '{sys.argv[1]}': it starts a kvmd of its own and "
              "takes no arguments", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        socket, disk = os.path.join(folder, "kvmd.sock"), os.path.join(folder, "disk")
        os.mkdir(disk)
        options = {"capacity": "256MiB", "disk_directories": disk, "disk_capacity": "256MiB"}
        daemon = kvm.start_daemon(socket, **options)
        engine = Engine(socket)
        checks = pause(engine)
        daemon.stop()
        daemon = kvm.start_daemon(socket, **options)
        print("kvmd was restarted")
        engine.reconnect()
        checks += resume(engine)
        engine.client.close()
        daemon.stop()
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
