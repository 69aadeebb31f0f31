#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package over NumPy, with an engine in the process and with kvmd: answers against an
oracle, arrays and layouts, errors, lifetimes."""

import array
import contextlib
import copy
import gc
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import numpy

import kvm
from kvm import _native
from rig import PACKAGE, ROOT, Daemon, Rig, attention, open_client, over_both

INVALID = kvm.Status.INVALID


def hashes_of(space, tokens, salt=b""):
    """The hashes of the full pages, as kvm.h says."""
    info = space.info()
    last = hashlib.blake2b(b"kvm prefix 1\n" + info.layout_digest + info.policy_digest
                           + info.fingerprint + salt, digest_size=32).digest()
    hashes = []
    for at in range(0, len(tokens) // 64 * 64, 64):
        page = b"".join(int(token).to_bytes(4, "little") for token in tokens[at:at + 64])
        last = hashlib.blake2b(last + page, digest_size=32).digest()
        hashes.append(last)
    return hashes


@over_both
class Prefixes:
    def setUp(self):
        super().setUp()
        self.fingerprint = os.urandom(32)  # no prefix of an earlier test is found
        self.model = self.space(fingerprint=self.fingerprint)
        self.ids = self.tokens(200)

    def tokens(self, n):
        return self.random.integers(0, 2**32, n, "uint32")

    @contextlib.contextmanager
    def second_client(self):
        """Another one of the same service; an engine in the process has but one."""
        if self.kind == "embedded":
            yield self.client
        else:
            with open_client(self.kind) as client:
                yield client

    def prefix(self, space, tokens, **arguments):
        """The id of a published sequence of these tokens, and what it was given."""
        seq, k, v = self.prompt(space, len(tokens))
        hashes = space.prefix_hashes(tokens, **arguments)
        id = seq.publish_prefix(hashes)
        self.addCleanup(self.free, id)
        return id, k, v

    def free(self, id):
        with contextlib.suppress(kvm.NotFoundError):
            kvm.Sequence(self.model, id).free()

    def n_sequences(self):
        return len(self.client.sequences(self.model))

    def test_hashes_are_those_of_the_header(self):
        space, tokens = self.model, self.ids
        for salt in (b"", b"of an end user", bytes(64)):
            wanted = hashes_of(space, tokens, salt)
            for given in (tokens, tokens.tolist(), tuple(tokens), iter(tokens.tolist()),
                          tokens.astype("int64"), numpy.repeat(tokens, 2)[::2],
                          array.array("I", tokens)):
                hashes = space.prefix_hashes(given, salt=salt)
                self.assertEqual(list(hashes), wanted)
            self.assertEqual((len(hashes), hashes.n_tokens), (3, 200))
            self.assertEqual((hashes[-1], bytes(hashes)), (wanted[2], b"".join(wanted)))
        self.assertEqual(len(space.prefix_hashes([])), 0)
        with self.assertRaises(IndexError):
            hashes[3]
        for salt in (bytes(65), bytes(1 << 20)):
            with self.assertRaises(kvm.InvalidError):
                space.prefix_hashes(tokens, salt=salt)

    def test_hashes_grow_with_the_conversation(self):
        space, tokens = self.model, self.ids
        wanted = hashes_of(space, tokens)
        hashes = space.prefix_hashes(tokens[:70])
        other = copy.copy(hashes)
        hashes.extend(tokens[70:75])
        for token in tokens[75:].tolist():
            hashes.extend([token])
        self.assertEqual(list(hashes), wanted)
        self.assertEqual((list(other), other.n_tokens), (wanted[:1], 70))
        for n_tokens, n in ((0, 0), (63, 0), (64, 1), (191, 2), (10**9, 3)):
            self.assertEqual(list(hashes.up_to(n_tokens)), wanted[:n])
        part = hashes.up_to(128)
        part.extend(tokens[128:])
        self.assertEqual(list(part), wanted)

    def test_what_is_no_token_is_refused(self):
        space, tokens = self.model, self.ids
        hashes = space.prefix_hashes(tokens)
        before = bytes(hashes), hashes.n_tokens
        for wrong in ([-1], [5, 2**32], numpy.array([-1]), numpy.array([2**32]), [2**64],
                      numpy.zeros((2, 64), "int32")):
            with self.assertRaises(ValueError):
                hashes.extend(wrong)
        for wrong in (5, None, "text", [1.5], [[1, 2]], numpy.zeros(64)):
            with self.assertRaises(TypeError):
                hashes.extend(wrong)
        self.assertEqual((bytes(hashes), hashes.n_tokens), before)
        with self.assert_refused(INVALID, kvm.InvalidError, "33 bytes"):
            space.find_prefix(bytes(33))

    def test_what_was_published_is_found_by_its_tokens(self):
        space, tokens = self.model, self.ids
        self.assertIsNone(space.find_prefix(space.prefix_hashes(tokens)))
        id, k, v = self.prefix(space, tokens)
        other = numpy.concatenate([tokens[:150], self.tokens(100)])
        with self.second_client() as client:
            space = client.register_space(space.name, n_layers=1, n_q_heads=4, n_kv_heads=2,
                                          head_dim=16, codec="float32",
                                          fingerprint=self.fingerprint)
            for given, n_tokens in ((tokens, 192), (other, 128), (tokens[:100], 64)):
                hashes = space.prefix_hashes(given)
                self.assertEqual(space.find_prefix(hashes), (id, n_tokens))
                self.assertEqual(space.find_prefix(bytes(hashes)), (id, n_tokens))
                seq, n_found = space.fork_prefix(hashes)
                self.assertEqual((n_found, len(seq)), (n_tokens, n_tokens))
                self.assertFalse(seq.info().flags & kvm.SequenceFlag.PUBLISHED)
                q = self.normal(1, 4, 16)
                got = client.step(space, 0, [kvm.Item(seq, query=1)], q=q).o
                self.assert_close(got, attention(q, k[:n_tokens], v[:n_tokens], [n_tokens - 1])[0])
                # All of it is in memory, so nobody computes it sooner.
                self.assertEqual(space.find_prefix(hashes, prefill_rate=1e12), (id, n_tokens))
                self.assertEqual(space.fork_prefix(hashes, prefill_rate=1e12)[1], n_tokens)
            for rate in (-1, float("nan"), float("inf")):
                with self.assert_refused(INVALID, kvm.InvalidError, "prefill_rate is"):
                    space.find_prefix(hashes, prefill_rate=rate)
            # The last token is computed in any case: an engine needs what it says.
            hashes = space.prefix_hashes(tokens[:192])
            self.assertEqual(space.fork_prefix(hashes.up_to(191))[1], 128)
            for hashes in (space.prefix_hashes(tokens[:63]), space.prefix_hashes(tokens[1:]),
                           space.prefix_hashes(tokens, salt=b"of another")):
                self.assertIsNone(space.find_prefix(hashes))
                seq, n_found = space.fork_prefix(hashes)
                self.assertEqual((n_found, len(seq)), (0, 0))
        self.free(id)
        space = self.model
        hashes = space.prefix_hashes(tokens)
        self.assertIsNone(space.find_prefix(hashes))
        self.assertEqual(space.fork_prefix(hashes)[1], 0)

    def test_a_salt_keeps_prefixes_apart(self):
        space, tokens = self.model, self.ids
        ids = {salt: self.prefix(space, tokens, salt=salt)[0] for salt in (b"", b"one", b"two")}
        for salt, id in ids.items():
            hashes = space.prefix_hashes(tokens, salt=salt)
            self.assertEqual(space.find_prefix(hashes), (id, 192))

    def test_what_was_found_and_is_gone_is_a_miss(self):
        space, tokens = self.model, self.ids
        hashes = space.prefix_hashes(tokens)
        id, _, _ = self.prefix(space, tokens)
        gone = space.create_sequence()
        gone.free()
        with unittest.mock.patch.object(kvm.Space, "find_prefix", return_value=(gone.id, 64)):
            seq, n_found = space.fork_prefix(hashes)
        self.assertEqual((n_found, len(seq), seq.info().space), (0, 0, space.id))
        self.assertEqual(space.find_prefix(hashes), (id, 192))

    def test_a_space_that_means_the_same_has_prefixes_of_its_own(self):
        space, tokens = self.model, self.ids
        self.prefix(space, tokens)
        twin = self.space(fingerprint=self.fingerprint)
        hashes = twin.prefix_hashes(tokens)
        self.assertEqual(bytes(hashes), bytes(space.prefix_hashes(tokens)))
        self.assertIsNone(twin.find_prefix(hashes))

    def test_a_prefix_is_published_once(self):
        space, tokens = self.model, self.ids
        hashes = space.prefix_hashes(tokens)
        self.prefix(space, tokens)
        seq, _, _ = self.prompt(space, 200)
        with self.assert_refused(kvm.Status.EXISTS, kvm.InvalidError, "192 tokens"):
            seq.publish_prefix(hashes, keep=60)
        seq.truncate(100)  # it is the client's
        with self.assert_refused(INVALID, kvm.InvalidError, "192", "100"):
            seq.publish_prefix(hashes)
        for wrong in (0, -1, float("nan"), float("inf"), "a minute"):
            with self.assertRaises(ValueError):
                seq.publish_prefix(hashes, keep=wrong)
        for wrong in (hashes.up_to(0), bytes(32 * 65537)):
            with self.assertRaises(kvm.InvalidError):
                seq.publish_prefix(wrong)
        heavy = self.space(policies=[kvm.Policy(kvm.Retention.HEAVY, n_recent=64, n_heavy=8)])
        seq, _, _ = self.prompt(heavy, 64)
        with self.assertRaises(kvm.UnsupportedError):
            seq.publish_prefix(heavy.prefix_hashes(tokens[:64]))

    def test_requests_publish_too(self):
        space, tokens = self.model, self.ids
        hashes = space.prefix_hashes(tokens)
        with self.client.create_queue() as queue:
            seq, _, _ = self.prompt(space, 200)
            id = queue.publish_prefix_async(seq, hashes, keep=60).result()
            self.addCleanup(self.free, id)
            self.assertEqual(id, seq.id)
            self.assertEqual(space.find_prefix(hashes), (id, 192))
            fork = queue.fork_async(self.client.sequence(space, id), 192).result()
            self.assertEqual(len(fork), 192)
            # One that fails gives back what it was given, whether it is asked or not.
            q = self.normal(1, 4, 16)
            n_before = self.n_sequences()
            for asks in (True, False):
                seq, _, _ = self.prompt(space, 200)
                request = queue.publish_prefix_async(seq, hashes)
                if asks:
                    with self.assertRaises(kvm.InvalidError):
                        request.result()
                    self.assertEqual(request.status(), kvm.Status.EXISTS)
                del request
                self.assertEqual(self.n_sequences(), n_before + 1)
                queue.step(space, 0, [kvm.Item(seq, append=1)], k=q[:, :2], v=q[:, :2])
                self.assertEqual(len(seq), 201)
                del seq
                gc.collect()
                deadline = time.monotonic() + 20
                while self.n_sequences() != n_before and time.monotonic() < deadline:
                    queue.step(space, 0, [kvm.Item(fork, query=1)], q=q)
                self.assertEqual(self.n_sequences(), n_before)


@over_both
class Answers:
    def check(self, space, n_tokens=50, n_rows=7, tolerance=2e-5, layer=0, oracle=None,
              n_kv_heads=2, **item):
        oracle = oracle or {}
        seq, k, v = self.prompt(space, n_tokens, layer, n_kv_heads)
        q = self.normal(n_rows, 4, 16)
        items = [kvm.Item(seq, query=n_rows, **item)]
        result = self.client.step(space, layer, items, q=q, lse=True)
        o, lse = attention(q, k, v, range(n_tokens - n_rows, n_tokens), **oracle)
        self.assert_close(result.o, o, tolerance)
        self.assert_close(result.lse, lse, tolerance)
        return result

    def test_causal_rows_of_shared_kv_heads(self):
        result = self.check(self.space())
        self.assertEqual(result.stats.mode, kvm.Mode.EXACT)
        self.assertEqual(result.stats.keys_present, 2 * 50)

    def test_every_position(self):
        self.check(self.space(), causal=False, oracle={"causal": False})

    def test_ranges(self):
        sees = numpy.zeros((7, 50), bool)
        sees[:, 3:9] = sees[:, 44:49] = True
        ranges = [(3, 9), (44, 49)]
        self.check(self.space(), ranges=ranges, oracle={"sees": sees})
        self.check(self.space(), ranges=ranges, exclude_ranges=True, oracle={"sees": ~sees})

    def test_tree(self):
        parents = [-1, 0, 0, 1, 1, 2, 5]
        words = []
        for row, parent in enumerate(parents):
            words.append((1 << row) | (words[parent] if parent >= 0 else 0))
        sees = numpy.ones((7, 50), bool)
        for row, word in enumerate(words):
            sees[row, 43:] = [(word >> i) & 1 for i in range(7)]
        self.check(self.space(), tree=words, oracle={"sees": sees})

    def test_window_of_a_layer(self):
        space = self.space(n_layers=2, layers=[kvm.Layer(1, window=10)])
        self.check(space)
        self.check(space, layer=1, oracle={"window": 10})

    def test_soft_cap_and_scale(self):
        self.check(self.space(logit_softcap=2.0, softmax_scale=0.7),
                   oracle={"softcap": 2.0, "scale": 0.7})

    def test_sink_logits(self):
        sinks = [0.5, -1.0, 2.0, float("-inf")]
        self.check(self.space(sink_logits=sinks), oracle={"sinks": numpy.array(sinks)})

    def test_alibi_slopes(self):
        slopes = [0.5, 0.125, -0.25, 0.0]
        self.check(self.space(alibi_slopes=slopes), oracle={"slopes": slopes})
        self.check(self.space(n_kv_heads=1, alibi_slopes=numpy.float32(slopes)),
                   oracle={"slopes": slopes}, n_kv_heads=1)
        for wrong in ([0.5] * 3, [0.5, 1, 2, float("nan")], [0.5, 1, 2, 1e6]):
            with self.assertRaisesRegex(kvm.InvalidError, "alibi_slopes"):
                self.space(alibi_slopes=wrong)
        with self.assertRaisesRegex(kvm.UnsupportedError, "alibi_slopes"):
            self.space(alibi_slopes=slopes, indexes=[kvm.Index()])

    def test_values_in_keys(self):
        space = self.space(n_kv_heads=1, head_dim=24, head_dim_v=16, values_in_keys=True)
        self.assertEqual(space.info().flags, kvm.SpaceFlag.V_IN_K)
        self.assertEqual(space.info().bytes_per_token, 24 * 4)
        seq = space.create_sequence()
        k, q = self.normal(70, 1, 24), self.normal(3, 4, 24)
        result = self.client.step(space, 0, [kvm.Item(seq, append=70, query=3)], k=k, q=q, lse=True)
        o, lse = attention(q, k, k[:, :, :16], range(67, 70))
        self.assert_close(result.o, o)
        self.assert_close(result.lse, lse)
        got_k, got_v = numpy.zeros((9, 1, 24), "float32"), numpy.zeros((9, 1, 16), "float32")
        with self.client.create_queue() as queue:
            queue.read(seq, 0, 60, 9, k=got_k, v=got_v)
        numpy.testing.assert_array_equal(got_k, k[60:69])
        numpy.testing.assert_array_equal(got_v, k[60:69, :, :16])
        found = self.client.find_space(space.name)
        self.client.step(found, 0, [kvm.Item(seq, append=1)], k=k[:1])
        got = self.client.step(found, 0, [kvm.Item(seq, query=1)], q=q[:1]).o
        k = numpy.concatenate([k, k[:1]])
        self.assert_close(got, attention(q[:1], k, k[:, :, :16], [70])[0])
        with self.assertRaisesRegex(kvm.InvalidError, "KVM_SPACE_V_IN_K"):
            self.client.step(space, 0, [kvm.Item(seq, append=1)], k=k[:1],
                             v=numpy.ascontiguousarray(k[:1, :, :16]))
        with self.assertRaisesRegex(kvm.UnsupportedError, "KVM_SPACE_V_IN_K"):
            self.space(values_in_keys=True, indexes=[kvm.Index()])

    def test_dims_of_layers(self):
        space = self.space(n_layers=4, layers=[
            kvm.Layer(1, head_dim=32, head_dim_v=40), kvm.Layer(2, head_dim_v=8),
            kvm.Layer(3, kind=kvm.LayerKind.ALIAS, target=1)])
        seq = space.create_sequence()
        stored = {}
        for layer, dim_k, dim_v in ((0, 16, 16), (1, 32, 40), (2, 16, 8), (3, 32, 40)):
            q = self.normal(2, 4, dim_k)
            if layer != 3:
                stored[layer] = self.normal(20, 2, dim_k), self.normal(20, 2, dim_v)
                k, v = stored[layer]
                result = self.client.step(space, layer, [kvm.Item(seq, append=20, query=2)],
                                          k=k, v=v, q=q)
            else:
                k, v = stored[1]
                result = self.client.step(space, layer, [kvm.Item(seq, query=2)], q=q)
            self.assertEqual(result.o.shape, (2, 4, dim_v))
            self.assert_close(result.o, attention(q, k, v, range(18, 20))[0])
            with self.client.create_queue() as queue:
                queue.observe(seq, layer, q=q)
            with self.assert_refused(INVALID, kvm.InvalidError, f"[rows, 4, {dim_k}]"):
                self.client.step(space, layer, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 64))
        got = numpy.zeros((20, 2, 40), "float32")
        with self.client.create_queue() as queue:
            queue.read(seq, 1, 0, 20, v=got)
        numpy.testing.assert_array_equal(got, stored[1][1])

    def test_a_large_group(self):
        space = self.space(n_q_heads=71, n_kv_heads=1, head_dim=64)
        seq = space.create_sequence()
        k, v, q = self.normal(40, 1, 64), self.normal(40, 1, 64), self.normal(2, 71, 64)
        result = self.client.step(space, 0, [kvm.Item(seq, append=40, query=2)], k=k, v=v, q=q)
        self.assert_close(result.o, attention(q, k, v, range(38, 40))[0])

    def test_stored_and_asked_in_half_precision(self):
        space = self.space(codec="float16")
        seq = space.create_sequence()
        k, v, q = (self.normal(9, n, 16, dtype="float16") for n in (2, 2, 4))
        result = self.client.step(space, 0, [kvm.Item(seq, append=9, query=9)], k=k, v=v, q=q,
                                  o=numpy.empty((9, 4, 16), "float32"), lse=True)
        o, lse = attention(q, k, v, range(9))
        self.assert_close(result.o, o)
        self.assert_close(result.lse, lse)
        self.assertEqual(self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q[:1]).o.dtype,
                         numpy.float16)

    def test_values_of_another_width(self):
        space = self.space(head_dim_v=24)
        seq = space.create_sequence()
        k, v, q = self.normal(5, 2, 16), self.normal(5, 2, 24), self.normal(5, 4, 16)
        result = self.client.step(space, 0, [kvm.Item(seq, append=5, query=5)], k=k, v=v, q=q)
        self.assertEqual(result.o.shape, (5, 4, 24))
        self.assert_close(result.o, attention(q, k, v, range(5))[0])

    def test_several_sequences_in_a_step(self):
        space = self.space()
        seqs = [self.prompt(space, n) for n in (3, 8, 20)]
        q = self.normal(6, 4, 16)
        items = [kvm.Item(seq, query=n) for (seq, _, _), n in zip(seqs, (1, 2, 3))]
        result = self.client.step(space, 0, items, q=q)
        row = 0
        for (_, k, v), n in zip(seqs, (1, 2, 3)):
            wanted = attention(q[row:row + n], k, v, range(len(k) - n, len(k)))[0]
            self.assert_close(result.o[row:row + n], wanted)
            row += n

    def test_read_gives_back_what_was_appended(self):
        space = self.space()
        seq, k, v = self.prompt(space, 12)
        got_k, got_v = numpy.zeros((5, 2, 16), "float32"), numpy.zeros((5, 2, 16), "float32")
        with self.client.create_queue() as queue:
            queue.read(seq, 0, 4, 5, k=got_k, v=got_v)
        numpy.testing.assert_array_equal(got_k, k[4:9])
        numpy.testing.assert_array_equal(got_v, v[4:9])

    def test_append_to_all_layers_at_once(self):
        space = self.space(n_layers=3)
        seq = space.create_sequence()
        k, v = self.normal(3, 4, 2, 16), self.normal(3, 4, 2, 16)
        self.client.step(space, 0, [kvm.Item(seq, append=4)], k=k, v=v)
        got = numpy.empty((4, 2, 16), "float32")
        with self.client.create_queue() as queue:
            for layer in range(3):
                queue.read(seq, layer, 0, 4, v=got)
                numpy.testing.assert_array_equal(got, v[layer])

    def test_forks_and_truncation(self):
        space = self.space()
        seq, k, v = self.prompt(space, 10)
        fork = seq.fork(6)
        self.assertEqual((len(seq), len(fork)), (10, 6))
        seq.truncate(4)
        q = self.normal(1, 4, 16)
        got = self.client.step(space, 0, [kvm.Item(fork, query=1)], q=q).o
        self.assert_close(got, attention(q, k[:6], v[:6], [5])[0])

    def test_what_is_published_is_forked_and_taken(self):
        space = self.space()
        seq, k, v = self.prompt(space, 10)
        prompt = seq.publish()
        with self.assertRaises(kvm.RefusedError):
            seq.truncate(3)
        fork = space.fork_published(prompt, 6)
        q = self.normal(1, 4, 16)
        got = self.client.step(space, 0, [kvm.Item(fork, query=1)], q=q).o
        self.assert_close(got, attention(q, k[:6], v[:6], [5])[0])
        seq = space.take_sequence(prompt)
        seq.truncate(3)
        self.assertEqual((len(seq), len(fork)), (3, 6))
        with self.client.create_queue() as queue:
            queue.publish_async(seq).wait()
            for info in self.client.sequences(space):
                self.assertEqual(bool(info.flags & kvm.SequenceFlag.PUBLISHED), info.seq == prompt)
            queue.take_sequence_async(prompt).wait()
        kvm.Sequence(space, prompt).free()

    def test_nothing_is_saved_without_a_disk(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 10)
        with self.client.create_queue() as queue:
            for call in (lambda: seq.save("one"), lambda: space.load("one"), seq.prefetch,
                         self.client.snapshots, lambda: self.client.delete_snapshot("one"),
                         lambda: queue.save_async(seq, "one").result(),
                         lambda: queue.load_async(space, "one").result(),
                         lambda: queue.prefetch_async(seq).result(),
                         lambda: queue.delete_snapshot_async("one").result()):
                with self.assertRaises(kvm.UnsupportedError):
                    call()

    def test_observe_and_approximate_modes(self):
        space = self.space(indexes=[kvm.Index(min_tokens=256)])
        seq, k, v = self.prompt(space, 1500)
        with self.client.create_queue() as queue:
            queue.observe(seq, 0, q=self.normal(8, 4, 16), query_position=1492)
            queue.observe(seq, 0, column_sums=numpy.ones((1500, 2), "float32"))
            q = self.normal(1, 4, 16)
            result = queue.step(space, 0, [kvm.Item(seq, query=1)], q=q, err=True,
                                mode=kvm.Mode.SAMPLED, budget=200)
        self.assertEqual(result.err.shape, (1, 4, 2))
        self.assertEqual(seq.info().n_rows_observed, 8)
        error = numpy.linalg.norm(result.o - attention(q, k, v, [1499])[0], axis=-1)
        self.assertLess(error.max(), 0.5)

    def test_merge(self):
        space = self.space()
        seq, k, v = self.prompt(space, 30)
        q = self.normal(2, 4, 16)
        parts = [self.client.step(space, 0, [kvm.Item(seq, query=2, ranges=[r])], q=q, lse=True)
                 for r in ((0, 11), (11, 30))]
        o, lse = kvm.merge([(part.o, part.lse) for part in parts])
        wanted = attention(q, k, v, [28, 29])
        self.assert_close(o, wanted[0])
        self.assert_close(lse, wanted[1])
        with self.assert_refused(INVALID, kvm.InvalidError, "lse has 1 rows"):
            kvm.merge([(parts[0].o, parts[0].lse[:1])])

    def test_presets(self):
        names = kvm.preset_names()
        self.assertIn("unified_layer_skipping", names)
        system = kvm.Preset.parse("h2o:n_tokens=10000,share=0.5").resolve(32)
        self.assertEqual(system.policies, [kvm.Policy(kvm.Retention.HEAVY, n_recent=2500,
                                                      n_heavy=2500)])
        self.assertIn("2500 with most attention", str(system))
        skips = kvm.Preset("unified_layer_skipping", speed_up=2).resolve(6)
        self.assertEqual([(p.begin, p.n_layers) for p in skips.policies], [(1, 2), (4, 1)])
        table = kvm.Preset("duo_attention", heads=[[0, 100], [], [3]]).resolve(3)
        self.assertEqual([(p.begin, p.heads) for p in table.policies], [(0, (0, 100)), (2, (3,))])
        yi = kvm.Preset("yi_lightning", window=256).resolve(8)
        self.assertEqual(yi.layers, [kvm.Layer(7, kind=kvm.LayerKind.ALIAS, target=3)])
        kivi = kvm.Preset("kivi").resolve(4)
        self.assertEqual(kivi.codecs, [kvm.Codec(kvm.CodecId.I2_CHANNEL, kvm.CodecId.I2)])
        alisa = kvm.Preset("alisa", n_tokens=10000).resolve(4)
        self.assertEqual(alisa.indexes, [kvm.Index(n_recent=1000, min_tokens=2000)])
        self.assertEqual((alisa.default_mode, alisa.default_budget), (kvm.Mode.SAMPLED, 1000))
        for wrong, reason in (("h20", "the nearest is h2o"), ("snapkv", "not there yet"),
                              ("duo_attention", "kv_head_masks is NULL")):
            with self.assertRaisesRegex(kvm.Error, reason):
                kvm.Preset(wrong).resolve(4)
        for wrong, reason in (("h2o:shar=1", "shar"), ("h2o:share=x", "no number")):
            with self.assertRaisesRegex(ValueError, reason):
                kvm.Preset.parse(wrong)

    def test_dropped_tokens_come_back(self):
        space = self.client.register_space("drop", n_layers=1, n_q_heads=2, head_dim=16,
                                           codec=kvm.CodecId.F32)
        seq = space.create_sequence()
        rows = self.normal(256, 2, 16)
        with self.client.create_queue() as queue:
            queue.step(space, 0, [kvm.Item(seq, append=256)], k=rows, v=rows)
            seq.drop_tokens(64, 192)
            queue.drop_tokens_async(seq, 0, 1).result()  # no whole page
            self.assertEqual(seq.info().n_entries_dropped, 128)
            with self.assertRaisesRegex(kvm.PartialError, r"sees tokens \[64, 192\)"):
                queue.step(space, 0, [kvm.Item(seq, query=1)], q=rows[:1])
            queue.step(space, 0, [kvm.Item(seq, query=1, ranges=[(64, 192)], exclude_ranges=True)],
                      q=rows[:1])
            queue.step(space, 0, [kvm.Item(seq, append=128, append_position=64, restore=True)],
                      k=rows[64:192], v=rows[64:192])
            back = numpy.zeros((256, 2, 16), "float32")
            queue.read(seq, 0, 0, 256, k=back)
            numpy.testing.assert_array_equal(back, rows)
            for bad in ((-1, 64), (0, 257), (65, 64)):
                with self.assertRaises(kvm.InvalidError):
                    seq.drop_tokens(*bad)
            seq.drop_tokens()
            self.assertEqual(seq.info().n_entries_dropped, 256)

    def test_a_space_takes_a_preset(self):
        space = self.client.register_space("preset", n_layers=2, n_q_heads=2, head_dim=16,
                                           policy="h2o:n_tokens=640,share=0.2")
        same = self.client.register_space(
            "preset", n_layers=2, n_q_heads=2, head_dim=16,
            policies=[kvm.Policy(kvm.Retention.HEAVY, n_recent=64, n_heavy=64)])
        self.assertEqual(same.id, space.id)
        geometry = {"n_layers": 1, "n_q_heads": 2, "head_dim": 8, "policy": "streaming_llm"}
        with self.assert_refused(INVALID, kvm.InvalidError, "no rope_layout",
                                 "pass rope=kvm.Rope."):
            self.client.register_space("streams", **geometry)
        self.client.register_space("streams", rope=kvm.Rope.HALF, rope_inv_freq=[1.0, 0.01],
                                   **geometry)
        other = self.client.register_space(
            "preset-full", n_layers=2, n_q_heads=2, head_dim=16, policy="h2o",
            policies=[kvm.Policy()])
        self.assertEqual(other.info().n_head_classes, 2)  # later entries win

    def test_probe_heads(self):
        period = self.normal(40, 1, 16)
        q = numpy.concatenate([period] * 3) * 8
        echo, induction = kvm.probe_heads(q, q, period=40)
        self.assertGreater(echo[0], 0.5)
        self.assertLess(induction[0], 0.1)


def orders(shape, dtype="float32"):
    """Arrays of a shape [item, head, token, channel] that lie in memory in every order that keeps
    channels together."""
    b, h, t, d = shape
    yield "packed", numpy.zeros(shape, dtype)
    yield "tokens first", numpy.zeros((b, t, h, d), dtype).swapaxes(1, 2)
    yield "slice of tokens", numpy.zeros((b, h, t + 3, d), dtype)[:, :, 1:t + 1]
    yield "slice of channels", numpy.zeros((b, h, t, d + 8), dtype)[..., :d]
    yield "slice of heads", numpy.zeros((b, h + 2, t, d), dtype)[:, 1:h + 1]
    yield "every second item", numpy.zeros((2 * b, h, t, d), dtype)[::2]
    yield "fused", numpy.zeros((b, t, 3 * h * d), dtype)[..., h * d:2 * h * d].reshape(
        b, t, h, d).swapaxes(1, 2)
    yield "heads outermost", numpy.zeros((h, b, t, d), dtype).swapaxes(0, 1)


@over_both
class Layouts:
    def run_heads(self, space, orders_of, n_items, n_tokens):
        """Prefills a batch whose arrays lie as `orders_of` says; all must agree with the oracle."""
        seqs = [space.create_sequence() for _ in range(n_items)]
        k, v, q = (self.normal(n_items, n, n_tokens, 16) for n in (2, 2, 4))
        arrays = {"k": k, "v": v, "q": q}
        for name, made in orders_of.items():
            made[...] = arrays.get(name, 0)
            arrays[name] = made
        items = [kvm.Item(seq, append=n_tokens, query=n_tokens) for seq in seqs]
        result = self.client.step(space, 0, items, **arrays, lse=True, layout="heads")
        self.assertEqual(result.o.shape, q.shape)
        self.assertEqual(result.lse.shape, q.shape[:3])
        for i in range(n_items):
            o, lse = attention(q[i].swapaxes(0, 1), k[i].swapaxes(0, 1), v[i].swapaxes(0, 1),
                               range(n_tokens))
            self.assert_close(result.o[i], o.swapaxes(0, 1))
            self.assert_close(result.lse[i], lse.swapaxes(0, 1))

    def test_queries_in_every_order(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 5), (3, 1), (1, 1)):
            for name, q in orders((n_items, 4, n_tokens, 16)):
                with self.subTest(name, n_items=n_items, n_tokens=n_tokens):
                    self.run_heads(space, {"q": q}, n_items, n_tokens)

    def test_keys_and_values_in_the_same_order(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 5), (3, 1)):
            shape = (n_items, 2, n_tokens, 16)
            for (name, k), (_, v) in zip(orders(shape), orders(shape)):
                with self.subTest(name, n_items=n_items, n_tokens=n_tokens):
                    self.run_heads(space, {"k": k, "v": v}, n_items, n_tokens)

    def test_outputs_that_lie_as_the_queries(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 5), (3, 1)):
            shape = (n_items, 4, n_tokens, 16)
            for (name, q), (_, o) in list(zip(orders(shape), orders(shape)))[:2]:
                with self.subTest(name, n_items=n_items, n_tokens=n_tokens):
                    self.run_heads(space, {"q": q, "o": o}, n_items, n_tokens)

    def test_one_item_or_one_token_may_lie_in_different_orders(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 1)):
            for name, o in orders((n_items, 4, n_tokens, 16)):
                with self.subTest(name):
                    self.run_heads(space, {"o": o}, n_items, n_tokens)

    def test_an_output_in_another_order_is_refused(self):
        space = self.space()
        o = numpy.zeros((3, 5, 4, 16), "float32").swapaxes(1, 2)
        with self.assert_refused(INVALID, kvm.InvalidError, "the items of o lie 5 of its tokens",
                                 "20", "contiguous"):
            self.run_heads(space, {"o": o}, 3, 5)

    def test_items_that_append_different_counts(self):
        space = self.space()
        seqs = [space.create_sequence() for _ in range(3)]
        k, v, q = self.normal(3, 2, 6, 16), self.normal(3, 2, 6, 16), self.normal(3, 4, 6, 16)
        counts = (2, 6, 0)
        items = [kvm.Item(seq, append=n, query=n) for seq, n in zip(seqs, counts)]
        result = self.client.step(space, 0, items, k=k, v=v, q=q, layout="heads",
                                  o=numpy.full((3, 4, 6, 16), 7, "float32"))
        for i, n in enumerate(counts):
            wanted = attention(q[i, :, :n].swapaxes(0, 1), k[i, :, :n].swapaxes(0, 1),
                               v[i, :, :n].swapaxes(0, 1), range(n))[0]
            self.assert_close(result.o[i, :, :n], wanted.swapaxes(0, 1))
            numpy.testing.assert_array_equal(result.o[i, :, n:], 7)
        self.assertEqual([len(seq) for seq in seqs], list(counts))
        items = [kvm.Item(seqs[0], append=2, append_row=4), kvm.Item(seqs[1], append=1)]
        self.client.step(space, 0, items, k=k, v=v, layout="heads")
        got = numpy.empty((2, 2, 16), "float32")
        with self.client.create_queue() as queue:
            queue.read(seqs[0], 0, 2, 2, k=got)
        numpy.testing.assert_array_equal(got, k[0, :, 4:].swapaxes(0, 1))

    def test_keys_that_all_items_share(self):
        space = self.space()
        seqs = [space.create_sequence() for _ in range(3)]
        for n_tokens in (5, 1):
            one = self.normal(1, 2, n_tokens, 16)
            shared = numpy.broadcast_to(one, (3, 2, n_tokens, 16))
            self.client.step(space, 0, [kvm.Item(seq, append=n_tokens) for seq in seqs], k=shared,
                             v=shared, layout="heads")
            got = numpy.empty((n_tokens, 2, 16), "float32")
            with self.client.create_queue() as queue:
                for seq in seqs:
                    queue.read(seq, 0, len(seq) - n_tokens, n_tokens, k=got)
                    numpy.testing.assert_array_equal(got, one[0].swapaxes(0, 1))

    def test_items_that_lie_no_whole_count_of_tokens_apart_are_refused(self):
        space = self.space()
        memory = numpy.zeros(1000, "float32")
        q = numpy.lib.stride_tricks.as_strided(memory, (2, 4, 3, 16), (4 * 200, 4 * 48, 4 * 16, 4))
        items = [kvm.Item(self.prompt(space, 3)[0], query=3) for _ in range(2)]
        with self.assert_refused(INVALID, kvm.InvalidError, "200", "16", "q"):
            kvm.Step(space, 0, items, q=q, o=numpy.zeros((2, 4, 3, 16), "float32"), layout="heads")
        self.client.step(space, 0, items, q=q, layout="heads")  # new outputs: q is copied

    def test_rows_in_every_order(self):
        space = self.space()
        seq, k, v = self.prompt(space, 20)
        q = self.normal(5, 4, 16)
        wanted = attention(q, k, v, range(15, 20))[0]
        for shape, cut in (((5, 4, 16), ...), ((4, 5, 16), "T"), ((10, 4, 16), numpy.s_[::2]),
                           ((5, 12, 16), numpy.s_[:, 4:8]), ((5, 4, 40), numpy.s_[..., 16:32])):
            arrays = [numpy.zeros(shape, "float32") for _ in range(2)]
            mine, o = (a.swapaxes(0, 1) if cut == "T" else a[cut] for a in arrays)
            mine[...] = q
            with self.subTest(shape=shape):
                self.client.step(space, 0, [kvm.Item(seq, query=5)], q=mine, o=o)
                self.assert_close(o, wanted)

    def test_nothing_at_all(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        none = numpy.zeros((0, 4, 16), "float32")
        self.assertEqual(self.client.step(space, 0, [kvm.Item(seq)], q=none).o.shape, (0, 4, 16))
        empty = numpy.zeros((2, 4, 0, 16), "float32")
        items = [kvm.Item(seq), kvm.Item(seq)]
        self.assertEqual(self.client.step(space, 0, items, q=empty, layout="heads").o.shape,
                         (2, 4, 0, 16))

    def test_read_only_arrays_and_buffers_are_read(self):
        space = self.space()
        seq, k, v = self.prompt(space, 3)
        q = self.normal(1, 4, 16)
        q.flags.writeable = False
        got = self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q).o
        self.assert_close(got, attention(q, k, v, [2])[0])
        plain = memoryview(array.array("f", q.ravel())).cast("B").cast("f", (1, 4, 16))
        o = numpy.empty_like(q)
        kvm_step = kvm.Step(space, 0, [kvm.Item(seq, query=1)], q=plain, o=o)
        with self.client.create_queue() as queue:
            queue.run(kvm_step)
        numpy.testing.assert_array_equal(o, got)


class OfDevice:
    """An array that says it lies on a device."""

    shape = (1, 4, 16)

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        raise BufferError("its bytes are on the device")


@over_both
class Errors:
    def refused(self, *words, cls=kvm.InvalidError, status=INVALID, layout="rows", **arrays):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        o = arrays.pop("o", numpy.empty((1, 4, 16), "float32"))
        item = arrays.pop("item", None) or kvm.Item(seq, query=1)
        with self.assert_refused(status, cls, *words):
            self.client.step(space, 0, [item], o=o, layout=layout, **arrays)
        self.assertEqual(len(seq), 3)

    def test_shapes(self):
        self.refused("q has the shape [1, 3, 16]", "[rows, 4, 16]", q=self.normal(1, 3, 16))
        self.refused("q has the shape [4, 16]", "[rows, 4, 16]", q=self.normal(4, 16))
        self.refused("q has the shape [1, 4, 8]", q=self.normal(1, 4, 8))
        self.refused("q has the shape [1, 4, 16]", "[items, 4, tokens, 16]",
                     q=self.normal(1, 4, 16), layout="heads")
        self.refused("o has 2 rows", q=self.normal(1, 4, 16), o=numpy.empty((2, 4, 16), "float32"))
        self.refused("lse has the shape [1, 4, 1]", "[rows, 4]", q=self.normal(1, 4, 16),
                     lse=numpy.empty((1, 4, 1), "float32"))
        self.refused("k has the shape [3, 4, 16]", "[rows, 2, 16]", k=self.normal(3, 4, 16),
                     v=self.normal(3, 2, 16), q=self.normal(1, 4, 16))

    def test_types_of_elements(self):
        for dtype in ("float64", "int32", "uint8", "complex64"):
            with self.subTest(dtype):
                self.refused(f"q has elements of {dtype}; they must be float32, float16 or",
                             q=self.normal(1, 4, 16).astype(dtype))
        self.refused("q", q=self.normal(1, 4, 16).astype(">f4"))
        self.refused("lse has elements of float16; they must be float32", q=self.normal(1, 4, 16),
                     lse=numpy.empty((1, 4), "float16"))

    def test_strides(self):
        self.refused("the channels of q lie 4 elements apart",
                     q=self.normal(1, 16, 4).swapaxes(1, 2))
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        with self.assert_refused(INVALID, kvm.InvalidError, "negative stride"):
            self.client.step(space, 0, [kvm.Item(seq, query=3)], q=self.normal(3, 4, 16)[::-1])
        with self.assert_refused(INVALID, kvm.InvalidError, "stride of 0"):
            self.client.step(space, 0, [kvm.Item(seq, query=3)], q=numpy.broadcast_to(
                self.normal(1, 4, 16), (3, 4, 16)))

    def test_outputs_that_cannot_be_written(self):
        o = numpy.empty((1, 4, 16), "float32")
        o.flags.writeable = False
        self.refused("o is a ndarray; it must be a writable array", "read", o=o,
                     q=self.normal(1, 4, 16))

    def test_objects_that_are_no_arrays(self):
        for value in ([[1.0]], "q", 7, object()):
            self.refused("q is a ", "it must be an array", q=value)
            self.refused("k is a ", "it must be an array", k=value, q=self.normal(1, 4, 16))
        self.refused("q is a ", "not in host memory", "(2, 0)", q=OfDevice())

    def test_objects_that_are_no_spaces_items_or_sequences(self):
        space = self.space()
        seq, item = space.create_sequence(), kvm.Item(space.create_sequence(), query=1)
        q = self.normal(1, 4, 16)
        for where, items, sentence in (
                ("demo", [item], "space is 'demo'; it must be a kvm.Space"),
                (space, item, "items is of the type Item; it must be a list of kvm.Item"),
                (space, [seq], r"items has <kvm.Sequence .*; it must have a kvm.Item for each")):
            for arrays in ({"q": q}, {"k": self.normal(1, 2, 16), "v": self.normal(1, 2, 16)}):
                with self.assertRaisesRegex(TypeError, sentence):
                    self.client.step(where, 0, items, **arrays)
                with self.assertRaisesRegex(TypeError, sentence):
                    kvm.Step(where, 0, items, **arrays)
        with self.assertRaisesRegex(TypeError, "space is 'demo'; it must be a kvm.Space"):
            self.client.create_queue().step_async("demo", 0, [item], q=q)
        with self.assertRaisesRegex(TypeError, "seq is 'demo'; it must be a kvm.Sequence"):
            kvm.Item("demo", query=1)
        self.assertEqual(len(seq), 0)

    def test_rows_that_are_not_there(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        q = self.normal(2, 4, 16)
        with self.assert_refused(INVALID, kvm.InvalidError, "item 1 has rows 1 to 3 of q", "2"):
            self.client.step(space, 0, [kvm.Item(seq, query=1), kvm.Item(seq, query=2)], q=q)
        with self.assert_refused(INVALID, kvm.InvalidError, "item 0 has 1 rows of q", "not given"):
            self.client.step(space, 0, [kvm.Item(seq, query=1)])
        with self.assert_refused(INVALID, kvm.InvalidError, "item 0 has 2 rows of k or v"):
            self.client.step(space, 0, [kvm.Item(seq, append=2, query=1)], q=q)
        with self.assert_refused(INVALID, kvm.InvalidError, "item 2 has rows 0 to 1"):
            self.client.step(space, 0, [kvm.Item(seq, query=1)] * 3, layout="heads",
                             q=self.normal(2, 4, 1, 16))
        with self.assert_refused(INVALID, kvm.InvalidError):
            self.client.step(space, 0, [])

    def test_numbers_out_of_range(self):
        space = self.space()
        seq = space.create_sequence()
        for arguments, sentence in (
                ({"append": -1}, "append is -1; it must be a whole number from 0 to 2**32 - 1"),
                ({"query": 2**32}, "query is 4294967296"),
                ({"append_position": -3}, "append_position is -3"),
                ({"query_row": -1}, "query_row is -1"),
                ({"tree": [-1], "query": 1}, "tree is -1"),
                ({"ranges": [(0, -1)]}, "ranges is -1"),
                ({"tree": [1]}, "tree has 1 words; the item has 0 query rows")):
            with self.assert_refused(INVALID, kvm.InvalidError, sentence):
                kvm.Item(seq, **arguments)
        with self.assertRaisesRegex(TypeError, "append is 'x'; it must be a whole number"):
            kvm.Item(seq, append="x")
        with self.assert_refused(INVALID, kvm.InvalidError, "layer is -1"):
            self.client.step(space, -1, [kvm.Item(seq)], q=self.normal(1, 4, 16))
        with self.assert_refused(INVALID, kvm.InvalidError, "7"):
            self.client.step(space, 7, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 16))
        with self.assertRaisesRegex(ValueError, "layout is 'columns'"):
            self.client.step(space, 0, [kvm.Item(seq)], q=self.normal(1, 4, 16), layout="columns")
        for arguments, sentence in (
                ({"mode": "sampled"}, "mode is 'sampled'; it must be a kvm.Mode, such as"),
                ({"proposal": "lsh"}, "proposal is 'lsh'; it must be a kvm.Proposal, such as"),
                ({"eps": "0.1"}, "eps is '0.1'; it must be a number"),
                ({"delta": None}, "delta is None; it must be a number"),
                ({"budget": 1.5}, "budget is 1.5; it must be a whole number")):
            with self.assertRaisesRegex(TypeError, sentence):
                self.client.step(space, 0, [kvm.Item(seq)], q=self.normal(1, 4, 16), **arguments)
            with self.assertRaisesRegex(TypeError, sentence):
                kvm.Step(space, 0, [kvm.Item(seq)], q=self.normal(1, 4, 16),
                         o=self.normal(1, 4, 16), **arguments)
        with self.assertRaisesRegex(TypeError, "default_mode is 'auto'; it must be a kvm.Mode"):
            self.client.register_space("none", n_layers=1, n_q_heads=1, head_dim=16,
                                       default_mode="auto")
        with self.assertRaisesRegex(ValueError, "timeout is '1'; it must be a number of seconds"):
            self.client.create_queue().nop_async().result(timeout="1")
        self.assertEqual(len(seq), 0)
        item = kvm.Item(seq, append=numpy.int64(1))
        self.client.step(space, 0, [item], k=self.normal(1, 2, 16), v=self.normal(1, 2, 16))

    def refused_calls(self, *calls):
        """Of a call, the class of its exception and a sentence."""
        for call, cls, sentence in calls:
            with self.subTest(sentence), self.assert_refused(INVALID, cls, sentence):
                call()

    def test_arguments_of_prefixes_snapshots_and_priorities(self):
        space = self.space()
        seq, hashes = space.create_sequence(), space.prefix_hashes(range(128))
        whole, name = "it must be a whole number", "name is 7; it must be a str"
        percent, of_64 = f"{whole} from 0 to 100", f"{whole} from 0 to 2**64 - 1"
        of_hashes = "hashes is a list; it must be a kvm.PrefixHashes"
        with self.client.create_queue() as queue:
            self.refused_calls(
                (lambda: seq.set_priority(-1), kvm.InvalidError, f"priority is -1; {percent}"),
                (lambda: seq.set_priority(101), kvm.InvalidError, f"priority is 101; {percent}"),
                (lambda: seq.set_priority("90"), TypeError, f"priority is '90'; {whole}"),
                (lambda: seq.set_priority(1, begin=-1), kvm.InvalidError, f"begin is -1; {of_64}"),
                (lambda: seq.set_priority(1, end=1.5), TypeError, f"end is 1.5; {whole}"),
                (lambda: queue.set_priority_async(seq, 2**40), kvm.InvalidError,
                 f"priority is {2**40}; {percent}"),
                (lambda: space.prefix_hashes([1], salt="user"), TypeError,
                 "salt is a str; it must be bytes, at most 64 of them"),
                (lambda: space.prefix_hashes([1], salt=bytearray(b"user")), TypeError,
                 "salt is a bytearray; it must be bytes"),
                (lambda: hashes.up_to(-1), kvm.InvalidError, f"n_tokens is -1; {of_64}"),
                (lambda: space.fork_prefix([1, 2]), TypeError, of_hashes),
                (lambda: space.find_prefix([hashes]), TypeError, of_hashes),
                (lambda: seq.publish_prefix([1, 2]), TypeError, of_hashes),
                (lambda: queue.publish_prefix_async(seq, [1, 2]), TypeError, of_hashes),
                (lambda: space.find_prefix(hashes, prefill_rate="12000"), TypeError,
                 "prefill_rate is '12000'; it must be a number"),
                (lambda: seq.save(7), TypeError, name),
                (lambda: space.load(7), TypeError, name),
                (lambda: self.client.delete_snapshot(7), TypeError, name),
                (lambda: queue.save_async(seq, 7), TypeError, name),
                (lambda: queue.load_async(space, 7), TypeError, name),
                (lambda: queue.delete_snapshot_async(7), TypeError, name))
            self.assertEqual(queue.n_outstanding, 0)
        # Numbers of NumPy are as good.
        self.assertIsNone(space.find_prefix(hashes, prefill_rate=numpy.float32(12000)))
        self.assertEqual(len(hashes.up_to(numpy.int64(127))), 1)

    def test_arguments_of_sequences_and_requests(self):
        client, space = self.client, self.space()
        seq = space.create_sequence()
        whole = "it must be a whole number"
        of_32, of_64 = f"{whole} from 0 to 2**32 - 1", f"{whole} from 0 to 2**64 - 1"
        with client.create_queue() as queue:
            self.refused_calls(
                (lambda: seq.fork(-1), kvm.InvalidError, f"n_tokens is -1; {of_64}"),
                (lambda: queue.fork_async(seq, "all"), TypeError, f"n_tokens is 'all'; {whole}"),
                (lambda: seq.truncate(None), TypeError, f"n_tokens is None; {whole}"),
                (lambda: queue.truncate_async(seq, -1), kvm.InvalidError, "n_tokens is -1"),
                (lambda: seq.commit(1.5), TypeError, f"n_tokens is 1.5; {whole}"),
                (lambda: space.create_sequence(reserve=-1), kvm.InvalidError, "reserve is -1"),
                (lambda: queue.create_sequence_async(space, reserve=2**64), kvm.InvalidError,
                 f"reserve is {2**64}; {of_64}"),
                (lambda: space.fork_published(seq), TypeError, f"id is {seq!r}; {whole}"),
                (lambda: space.take_sequence("7"), TypeError, f"id is '7'; {whole}"),
                (lambda: queue.take_sequence_async(-1), kvm.InvalidError, "id is -1"),
                (lambda: queue.read(seq, "first", 0, 1), TypeError, f"layer is 'first'; {whole}"),
                (lambda: queue.read(seq, 0, -1, 1), kvm.InvalidError, "position is -1"),
                (lambda: queue.observe(seq, -1), kvm.InvalidError, f"layer is -1; {of_32}"),
                (lambda: queue.step(space, "first", []), TypeError, f"layer is 'first'; {whole}"),
                (lambda: client.find_space(7), TypeError, "name is 7; it must be a str"),
                (lambda: client.create_queue(n_entries=-1), kvm.InvalidError, "n_entries is -1"),
                (lambda: kvm.open_embedded(n_threads=-1), kvm.InvalidError, "n_threads is -1"),
                (lambda: client.evict("all", 1), TypeError,
                 "what is 'all'; it must be a kvm.Evict"),
                (lambda: client.set_quota("me", 1, bytes=1), TypeError,
                 "whose is 'me'; it must be a kvm.QuotaOf"))
            self.assertEqual(queue.n_outstanding, 0)
        self.assertEqual(len(client.sequences(space)), 1)
        seq.fork(numpy.int64(0)).truncate(numpy.int64(0))

    def test_what_the_service_refuses(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        k = self.normal(1, 2, 16)
        with self.assert_refused(kvm.Status.HOLE, kvm.InvalidError, "5", "3"):
            self.client.step(space, 0, [kvm.Item(seq, append=1, append_position=5)], k=k, v=k)
        with self.assert_refused(kvm.Status.NOT_FOUND, LookupError, "no-such-space"):
            self.client.find_space("no-such-space")
        with self.assert_refused(kvm.Status.EXISTS, ValueError, "head_dim"):
            self.client.register_space(space.name, n_layers=1, n_q_heads=4, n_kv_heads=2,
                                       head_dim=24, codec="float32")
        with self.assert_refused(kvm.Status.BUSY, kvm.Error):
            space.drop()
        id = seq.id
        seq.free()
        with self.assert_refused(kvm.Status.STALE, kvm.NotFoundError):
            self.client.sequence(space, id).info()
        with self.assert_refused(INVALID, kvm.InvalidError, "head_dim"):
            self.space(head_dim=3)
        with self.assertRaisesRegex(ValueError, "codec is 'f5'; it must be one of fp32, fp16"):
            self.space(codec="f5")
        with self.assert_refused(INVALID, kvm.InvalidError, "sink_logits has 1 numbers"):
            self.space(sink_logits=[0.0])

    def test_spaces_of_another_client(self):
        other = kvm.open_embedded(n_threads=1, capacity=64 << 20)
        space = self.space(other)
        with other, self.client.create_queue() as queue:
            seq = space.create_sequence()
            with self.assert_refused(INVALID, kvm.InvalidError, "another client"):
                queue.step(space, 0, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 16))

    def test_closed_clients_and_queues(self):
        space = self.space()
        seq = space.create_sequence()
        queue = self.client.create_queue()
        queue.close()
        queue.close()
        closed = kvm.Status.DISCONNECTED
        with self.assert_refused(closed, ConnectionError, "the queue is closed"):
            queue.nop_async()
        self.assertEqual(queue.fileno(), -1)
        queue = self.client.create_queue()
        with self.client:
            pass
        self.client.close()
        self.assertTrue(self.client.is_closed)
        for call in (self.client.ping, self.client.stats, space.info, seq.info, queue.nop_async,
                     space.create_sequence, self.client.create_queue,
                     lambda: self.client.empty(3),
                     lambda: self.client.step(space, 0, [kvm.Item(seq, query=1)],
                                              q=self.normal(1, 4, 16))):
            with self.assert_refused(closed, kvm.DisconnectedError, "closed"):
                call()
        seq.free()

    def test_every_status_has_a_class(self):
        for status in kvm.Status:
            error = kvm._errors.error_of(status, "why")
            self.assertEqual(error.status, status)
            self.assertEqual(str(error), f"why ({status.name})")
        self.assertIn("-77", str(kvm._errors.error_of(-77, "why")))
        self.assertIsNone(kvm._errors.Error(kvm.Status.IO, "x").__cause__)


@over_both
class Memory:
    def test_arrays_of_the_client_go_without_a_copy(self):
        space = self.space()
        seq, k, v = self.prompt(space, 5)
        whole = self.client.empty((9, 8, 16))
        q, o = whole[:2, :4], whole[4:6, 4:]
        lse = self.client.empty((2, 4))
        q[...] = self.normal(2, 4, 16)
        before = self.client.n_copied_bytes
        self.client.step(space, 0, [kvm.Item(seq, query=2)], q=q, o=o, lse=lse)
        self.assertEqual(self.client.n_copied_bytes, before)
        self.assert_close(o, attention(q, k, v, [3, 4])[0])
        plain = q.copy()
        self.client.step(space, 0, [kvm.Item(seq, query=2)], q=plain, o=o)
        copied = self.client.n_copied_bytes - before
        self.assertEqual(copied, 0 if self.kind == "embedded" else plain.nbytes)

    def test_memory_comes_back_with_the_last_view(self):
        def used():
            return self.client.clients()[-1].used.arena_bytes if self.kind == "daemon" else 0
        self.client.empty(1)
        before = used()
        big = self.client.empty((100, 1 << 18))
        view = big[3:5, ::2]
        del big
        gc.collect()
        view[...] = 1.0
        huge = self.client.empty(20 << 20)
        if self.kind == "daemon":
            self.assertGreaterEqual(used(), before + (80 << 20))
        del view, huge
        gc.collect()
        self.assertEqual(used(), before)
        pieces = [self.client.empty(1 << 18) for _ in range(40)]
        del pieces
        for _ in range(200):  # the room is used again
            self.client.empty(1 << 20)
        self.assertEqual(used(), before)

    def test_they_can_be_read_when_the_client_is_closed(self):
        array = self.client.empty((100, 100))
        array[...] = 3
        self.client.close()
        gc.collect()
        self.assertIn(array.sum(), (0, 30000))  # kvmd may have cleared it
        array[5] = 4
        self.assertEqual(array[5].sum(), 400)

    def test_sizes(self):
        self.assertEqual(self.client.empty(0).shape, (0,))
        self.assertEqual(self.client.empty((3, 0, 2), "float16").dtype, numpy.float16)
        self.assertEqual(self.client.empty(()).shape, ())
        for shape in (2**61, 2**62 - 1, (2**31, 2**30)):
            with self.assertRaises(kvm.FullError):
                self.client.empty(shape)
        with self.assertRaisesRegex(ValueError, "must not be negative"):
            self.client.empty((3, -1))
        with self.assertRaisesRegex(ValueError, "bfloat16"):
            self.client.empty(3, "bfloat16")
        with self.assertRaisesRegex(ValueError, "framework is 'jax'"):
            self.client.empty(3, framework="jax")
        with self.assertRaisesRegex(ValueError, "dtype is 'int8'"):
            self.client.empty(3, "int8")

    def test_buffers_live_as_long_as_their_request(self):
        space = self.space()
        seq, k, v = self.prompt(space, 700)
        queue = self.client.create_queue()
        wanted, requests = [], []
        for _ in range(60):
            q = self.normal(1, 4, 16)
            wanted.append(attention(q, k, v, [699])[0])
            requests.append(queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=q))
            del q
        gc.collect()
        garbage = [numpy.full((1, 4, 16), 9e9, "float32") for _ in range(1000)]
        for request, o in zip(requests, wanted):
            self.assert_close(request.result().o, o)
        del garbage

    def test_buffers_stay_where_they_are_until_their_request_is_done(self):
        space = self.space()
        seq, k, v = self.prompt(space, 50)
        q = self.normal(3, 4, 16)
        item = kvm.Item(seq, query=3)
        wanted = attention(q, k, v, [47, 48, 49])[0]
        with self.client.create_queue() as queue:
            def check(start, end):
                memory = bytearray(q.nbytes)
                view = memoryview(memory).cast("f", q.shape)
                held = start(view)
                with self.assertRaises(BufferError):
                    view.release()
                with self.assertRaises(BufferError):
                    memory.clear()
                held = end(held)
                self.assert_close(numpy.frombuffer(bytes(memory), "float32").reshape(q.shape),
                                  wanted)
                view.release()
                memory.clear()  # although the request is there
                return held

            def end(request):
                request.result(timeout=10)
                return request

            def end_step(step):
                for _ in range(2):
                    queue.run(step)
            check(lambda o: queue.step_async(space, 0, [item], q=q, o=o), end)
            check(lambda o: queue.start(kvm.Step(space, 0, [item], q=q, o=o)), end)
            check(lambda o: kvm.Step(space, 0, [item], q=q, o=o), end_step)

    def test_buffers_of_calls_that_are_over_can_be_released(self):
        space = self.space()
        seq, k, v = self.prompt(space, 5)
        q = self.normal(1, 4, 16)
        for n_rows in (1, 2):
            memory = bytearray(n_rows * q.nbytes)
            with memoryview(memory).cast("f", (n_rows, 4, 16)) as o:
                if n_rows == 1:
                    self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q, o=o)
                    self.assert_close(numpy.array(o), attention(q, k, v, [4])[0])
                else:
                    with self.assert_refused(INVALID, kvm.InvalidError, "o has 2 rows"):
                        self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q, o=o)
            memory.clear()

    def test_requests_that_nobody_keeps(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 700)
        queue = self.client.create_queue()
        for _ in range(300):
            queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 16))
        del queue
        gc.collect()
        self.assertGreater(self.client.ping(), 0)

    def test_prepared_steps(self):
        space = self.space()
        seq = space.create_sequence()
        k, v, q, o, lse = (numpy.zeros(shape, "float32")
                           for shape in [(1, 2, 16)] * 2 + [(1, 4, 16)] * 2 + [(1, 4)])
        step = kvm.Step(space, 0, [kvm.Item(seq, append=1, query=1)], k=k, v=v, q=q, o=o, lse=lse)
        keys, values = [], []
        with self.client.create_queue() as queue:
            for i in range(20):
                k[...], v[...], q[...] = (self.normal(*a.shape) for a in (k, v, q))
                keys.append(k[0].copy())
                values.append(v[0].copy())
                result = queue.run(step) if i % 2 else queue.start(step).result()
                self.assertIs(result.o, o)
                wanted = attention(q, numpy.array(keys), numpy.array(values), [i])
                self.assert_close(o, wanted[0])
                self.assert_close(lse, wanted[1])
        with self.assertRaises(AttributeError):
            step.k = None

    def test_an_item_keeps_its_sequence(self):
        space = self.space()
        k = self.normal(2, 2, 16)
        item = kvm.Item(space.create_sequence(), append=2)
        gc.collect()
        self.client.step(space, 0, [item], k=k, v=k)
        step = kvm.Step(space, 0, [kvm.Item(space.create_sequence(), append=2)], k=k, v=k)
        gc.collect()
        with self.client.create_queue() as queue:
            queue.run(step)
            queue.run(step)
        self.assertEqual(sorted(info.n_tokens_max for info in self.client.sequences(space)), [2, 4])

    def test_no_step_leaks(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 8)
        q = self.normal(1, 4, 16)
        queue = self.client.create_queue()

        def work(n):
            for _ in range(n):
                queue.step(space, 0, [kvm.Item(seq, query=1, ranges=[(0, 5)])], q=q, lse=True)
                queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=q).result()
                try:
                    queue.step(space, 0, [kvm.Item(seq, query=2)], q=q)
                except kvm.InvalidError:
                    pass
        work(500)
        references, objects, before = sys.getrefcount(q), len(gc.get_objects()), resident_bytes()
        work(3000)
        gc.collect()
        self.assertEqual(sys.getrefcount(q), references)
        self.assertLess(len(gc.get_objects()), objects + 100)
        if "asan" not in os.environ.get("LD_PRELOAD", ""):  # which keeps what is freed
            self.assertLess(resident_bytes() - before, 2 << 20)


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@over_both
class Lifetimes:
    def n_sequences(self, space):
        for _ in range(200):
            n = len(self.client.sequences(space))
            if n == 0:
                break
        return n

    def test_sequences_go_with_their_last_reference(self):
        space = self.space()
        seqs = [space.create_sequence() for _ in range(5)]
        seqs += [seqs[0].fork() for _ in range(3)]
        self.assertEqual(len(self.client.sequences(space)), 8)
        del seqs
        self.assertEqual(self.n_sequences(space), 0)

    def test_sequences_in_cycles(self):
        space = self.space()
        cycle = [space.create_sequence()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        self.assertEqual(self.n_sequences(space), 0)

    def test_more_than_a_queue_has_room_for(self):
        space = self.space()
        seqs = [space.create_sequence() for _ in range(600)]
        del seqs
        self.assertEqual(self.n_sequences(space), 0)

    def test_with_blocks_free_and_detach(self):
        space = self.space()
        with space.create_sequence() as seq:
            self.assertEqual(len(self.client.sequences(space)), 1)
        self.assertEqual(self.n_sequences(space), 0)
        seq.free()
        id = space.create_sequence().detach()
        handle = self.client.sequence(space, id)
        del handle
        self.assertEqual(len(self.client.sequences(space)), 1)

    def test_sequences_of_requests_that_nobody_asks(self):
        space = self.space()
        queue = self.client.create_queue()
        for _ in range(5):
            queue.create_sequence_async(space)
        request = queue.create_sequence_async(space)
        seq = request.result()
        self.assertIs(request.result(), seq)
        del request
        fork = queue.fork_async(seq).result()
        queue.poll()
        queue.create_sequence_async(space)
        queue.nop_async().result()
        self.assertEqual(seq.info().n_tokens_max, 0)
        del seq, fork
        self.assertEqual(self.n_sequences(space), 0)

    def test_such_sequences_are_freed_by_whoever_takes_completions(self):
        space = self.space()
        k = self.normal(1, 2, 16)
        seq = space.create_sequence()
        item = kvm.Item(seq, append=1)
        step = kvm.Step(space, 0, [item], k=k, v=k)
        with self.client.create_queue() as queue:
            for name, look in {"poll": queue.poll,
                               "result": lambda: queue.nop_async().result(),
                               "step": lambda: queue.step(space, 0, [item], k=k, v=k),
                               "run": lambda: queue.run(step)}.items():
                with self.subTest(look=name):
                    queue.fileno()  # then requests get on without a wait
                    queue.create_sequence_async(space)
                    queue.fork_async(seq)
                    deadline = time.monotonic() + 10
                    while queue.n_outstanding != 0:
                        self.assertLess(time.monotonic(), deadline)
                        look()
                    self.assertFalse(self.client._orphans)
                    while len(self.client.sequences(space)) != 1:
                        self.assertLess(time.monotonic(), deadline)

    def test_a_client_goes_with_its_last_reference(self):
        gc.collect()
        gc.disable()
        try:
            client = kvm.open_embedded(n_threads=1, capacity=64 << 20)
            space = self.space(client)
            space.create_sequence()
            client.step(space, 0, [kvm.Item(space.create_sequence(), append=1)],
                        k=self.normal(1, 2, 16), v=self.normal(1, 2, 16))
            import weakref
            gone = weakref.ref(client)
            del client, space
            self.assertIsNone(gone())
        finally:
            gc.enable()

    def test_facts(self):
        info = self.client.info()
        self.assertEqual(bool(info.features & kvm.Feature.EMBEDDED), self.kind == "embedded")
        self.assertEqual(self.client.is_embedded, self.kind == "embedded")
        self.assertEqual(info.server_version, kvm.__version__)
        space = self.space()
        self.assertEqual(self.client.find_space(space.name).id, space.id)
        self.assertIn(space.name, [s.name for s in self.client.spaces()])
        self.assertEqual(space.info().head_dim_v, 16)
        self.assertIn("kvm_", self.client.stats_text())
        self.assertGreaterEqual(self.client.stats().n_sequences, 0)
        me = [c for c in self.client.clients() if c.client_id == info.client_id]
        self.assertEqual(me[0].pid, os.getpid())
        self.assertEqual(self.client.users()[0].n_clients >= 1, True)
        self.client.set_quota(kvm.QuotaOf.CLIENT, info.client_id, sequences=2)
        kept = [space.create_sequence() for _ in range(2)]
        with self.assert_refused(kvm.Status.QUOTA, kvm.FullError):
            space.create_sequence()
        result = self.client.evict(kvm.Evict.SEQ, kept[0].id)
        self.assertEqual(result.n_sequences, 1)
        with self.assertRaisesRegex(TypeError, "tokens is no limit"):
            self.client.set_quota(kvm.QuotaOf.CLIENT, info.client_id, tokens=2)
        if self.kind == "daemon":
            self.assertIn("options", self.client.config_text())

    def test_codecs_by_name(self):
        # Pages of 64 tokens that are committed are int8; the last two tokens are bfloat16 still.
        space = self.space(codec="int8_channel")
        self.assertEqual(space.info().codec, kvm.CodecId.I8_CHANNEL)
        self.assertEqual(self.space(codec=numpy.float16).info().codec, kvm.CodecId.F16)
        self.assertEqual(self.space(codec=kvm.CodecId.I8).info().codec, kvm.CodecId.I8)
        seq, k, v = self.prompt(space, 130)
        got_k, got_v = numpy.zeros((130, 2, 16), "float32"), numpy.zeros((130, 2, 16), "float32")
        with self.client.create_queue() as queue:
            queue.read(seq, 0, 0, 130, k=got_k, v=got_v)
        for got, given in ((got_k, k), (got_v, v)):
            step = numpy.abs(given[:128].reshape(2, 64, 2, 16)).max(axis=1, keepdims=True) / 127
            off = numpy.abs(got[:128] - given[:128]).reshape(2, 64, 2, 16)
            self.assertTrue((off <= 0.51 * step + 2**-8 * numpy.abs(
                given[:128].reshape(2, 64, 2, 16))).all())
            self.assertGreater(off.max(), 0)
            numpy.testing.assert_allclose(got[128:], given[128:], rtol=2**-8)

    def test_policies_codecs_and_their_errors(self):
        space = self.space(
            n_layers=2, policies=[kvm.Policy(kvm.Retention.SINKS_RECENT, n_sinks=4, n_recent=64)],
            codecs=[kvm.Codec("int8", "fp8", heads=[1])])
        self.assertEqual(space.info().n_head_classes, 4)
        with self.assert_refused(INVALID, kvm.InvalidError, "n_recent"):
            self.space(policies=[kvm.Policy(kvm.Retention.SINKS_RECENT)])
        heavy = {"retention": kvm.Retention.HEAVY, "n_recent": 64, "n_heavy": 8}
        merged = self.space(policies=[kvm.Policy(**heavy, merge=kvm.Merging.COUNTED)])
        dropped = self.space(policies=[kvm.Policy(**heavy)])
        self.assertNotEqual(merged.info().policy_digest, dropped.info().policy_digest)
        answers = []
        k, v, q = self.normal(300, 2, 16), self.normal(300, 2, 16), self.normal(1, 4, 16)
        for space in (merged, dropped):
            seq = space.create_sequence()
            self.client.step(space, 0, [kvm.Item(seq, append=300)], k=k, v=v)
            answers.append(self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q, lse=True))
        # 232 tokens of a head went: those that joined another count beside it.
        self.assertTrue((answers[0].lse > answers[1].lse + 0.1).all())
        shared = self.space(n_layers=2, policies=[
            kvm.Policy(**heavy, budgets=kvm.Budgets.BY_DENSITY)])
        seq = shared.create_sequence()
        for layer in range(2):
            self.client.step(shared, layer, [kvm.Item(seq, append=300)], k=k, v=v)
        before = seq.info().bytes
        for layer in range(2):
            self.client.step(shared, layer, [kvm.Item(seq, append=1, prompt_end=True)],
                             k=k[:1], v=v[:1])
        self.assertLess(seq.info().bytes, before)  # the prompt's end alone lets tokens go
        with self.assert_refused(INVALID, kvm.InvalidError, "budgets is 1"):
            self.space(policies=[kvm.Policy(budgets=kvm.Budgets.BY_DENSITY)])
        with self.assert_refused(INVALID, kvm.InvalidError, "merge is 1"):
            self.space(policies=[kvm.Policy(merge=kvm.Merging.WEIGHTED)])
        with self.assertRaisesRegex(ValueError, "kv head 200"):
            self.space(policies=[kvm.Policy(heads=[200])])
        with self.assertRaisesRegex(ValueError, "heads is empty"):
            self.space(codecs=[kvm.Codec("int8", heads=[])])


# Functions of kvm.h that the module does not call, and why.
UNUSED = {
    "kvm_append": "requests are made *_async and waited for, so that signals are seen",
    "kvm_attend": "as kvm_append",
    "kvm_step": "as kvm_append",
    "kvm_read": "as kvm_append",
    "kvm_observe": "as kvm_append",
    "kvm_version": "kvm_version_string has it",
}


class Names(unittest.TestCase):
    def test_every_function_of_the_header_is_called(self):
        spec = importlib.util.spec_from_file_location("generate_rust", os.path.join(
            ROOT, "bindings/rust/generate.py"))
        generate = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(generate)
        with open(os.path.join(ROOT, "include/kvm.h"), encoding="utf-8") as file:
            header = generate.Header(file.read())
        code = ""
        folder = os.path.join(ROOT, "bindings/python/src")
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                code += generate.bare_code(file.read())
        called = set(re.findall(r"\bkvm_\w+", code))
        declared = {function[0] for function in header.functions}
        self.assertEqual(declared - called - set(UNUSED), set(), "wrap them, or say why not")
        self.assertEqual(set(UNUSED) & called, set())
        self.assertEqual(set(UNUSED) - declared, set())

    def test_the_stub_names_what_the_module_has(self):
        with open(os.path.join(ROOT, "bindings/python/kvm/_native.pyi"), encoding="utf-8") as file:
            stub = file.read()
        wanted = set()
        cls = None
        for line in stub.splitlines():
            found = re.match(r"( *)(?:def|class) (\w+)|( +)([A-Z_]+) = \d+", line)
            if not found:
                continue
            if line.startswith("class "):
                cls = found.group(2)
                wanted.add(cls)
            elif line.startswith("def "):
                wanted.add(found.group(2))
            elif found.group(2) != "__init__":
                wanted.add(f"{cls}.{found.group(2) or found.group(4)}")
        got = set()
        for name, value in vars(_native).items():
            if name.startswith("__"):
                continue
            got.add(name)
            if isinstance(value, type):
                got |= {f"{name}.{member}" for member in vars(value)
                        if not member.startswith(("_", "@"))}
        self.assertEqual(got, wanted)

    def test_generated_files_are_those_of_the_header(self):
        folder = os.path.join(ROOT, "bindings/python")
        done = subprocess.run(
            [sys.executable, os.path.join(folder, "generate.py"),
             os.path.join(ROOT, "include/kvm.h"), folder, "--check"],
            capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))

    def test_a_package_without_its_module_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "kvm"))
            for name in os.listdir(PACKAGE):
                if name.endswith(".py"):
                    os.symlink(os.path.join(PACKAGE, name), os.path.join(folder, "kvm", name))
            done = subprocess.run([sys.executable, "-c", "import kvm"], capture_output=True,
                                  text=True, check=False, env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"{folder}/kvm has no module _native for Python 3.", done.stderr)
        self.assertIn("--target kvm_python", done.stderr)
        self.assertNotIn("circular", done.stderr)

    def test_all_is_what_is_there(self):
        for name in kvm.__all__:
            self.assertTrue(hasattr(kvm, name), name)
        public = {name for name in vars(kvm) if not name.startswith("_")}
        self.assertEqual(public, set(kvm.__all__))

    @unittest.skipUnless(importlib.util.find_spec("mypy"), "mypy is not installed")
    def test_types(self):
        sample = os.path.join(ROOT, "tests/python/typed_sample.py")
        # Not the folders in it: they are over PyTorch, whose types are another matter.
        modules = [os.path.join(PACKAGE, name) for name in sorted(os.listdir(PACKAGE))
                   if name.endswith(".py")]
        without_torch = [] if importlib.util.find_spec("torch") else [
            "--disable-error-code", "import-not-found"]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", *without_torch, "--cache-dir", os.path.join(
                os.environ.get("TMPDIR", "/tmp"), f"kvm-mypy-{os.getuid()}"), *modules, sample],
            capture_output=True, text=True, check=False,
            env={**os.environ, "MYPYPATH": os.path.dirname(PACKAGE)})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Snapshots(unittest.TestCase):
    def test_what_was_saved_is_there_after_kvmd_was_killed(self):
        random = numpy.random.default_rng(7)
        k, v, q = (random.standard_normal(shape).astype("float32")
                   for shape in ((100, 2, 16), (100, 2, 16), (1, 4, 16)))
        geometry = {"n_layers": 1, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 16,
                    "codec": "float32"}

        def ask(client, seq):
            return client.step(seq.space, 0, [kvm.Item(seq, query=1)], q=q).o

        with tempfile.TemporaryDirectory() as disk, \
             Daemon("--disk-directories", disk, "--disk-capacity", "256MiB") as daemon:
            with kvm.connect(daemon.socket) as client:
                space = client.register_space("saved", **geometry)
                seq = space.create_sequence()
                client.step(space, 0, [kvm.Item(seq, append=100)], k=k, v=v)
                expected = ask(client, seq)
                self.assertEqual(client.snapshots(), [])
                seq.save("chat/1")
                with self.assertRaises(kvm.Error) as caught:
                    seq.save("chat/1")
                self.assertEqual(caught.exception.status, kvm.Status.EXISTS)
                seq.save("chat/1", replace=True)
                with client.create_queue() as queue:
                    queue.save_async(seq, "chat/2").result()
                    with self.assertRaises(kvm.NotFoundError):
                        queue.delete_snapshot_async("nothing").result()
                for name in ("", "a b", "n" * 128):
                    with self.assertRaises(kvm.InvalidError):
                        seq.save(name)
            daemon.kill()
            daemon.start()
            with kvm.connect(daemon.socket) as client, client.create_queue() as queue:
                space = client.register_space("by.another.name", **geometry)
                first, second = client.snapshots()
                self.assertEqual((first.name, second.name), ("chat/1", "chat/2"))
                self.assertEqual((first.space_name, first.n_tokens, first.uid, first.flags),
                                 ("saved", 100, os.getuid(), 0))
                self.assertEqual(client.snapshots(all_users=True), [first, second])
                seq = space.load("chat/1")
                numpy.testing.assert_array_equal(ask(client, seq), expected)
                seq.prefetch()
                queue.prefetch_async(seq).result()
                for i in range(16):
                    seq.set_priority(51 + i, begin=128 * i, end=128 * i + 64)
                with self.assertRaises(kvm.Error) as caught:
                    seq.set_priority(90, begin=4096, end=4160)
                self.assertEqual(caught.exception.status, kvm.Status.LIMIT)
                queue.set_priority_async(seq, kvm.PRIORITY_MAX, keep=60).result()
                seq.set_priority(90, begin=4096)
                for bad in ({"priority": kvm.PRIORITY_MAX + 1}, {"priority": 1, "end": 0}):
                    with self.assertRaises(kvm.InvalidError):
                        seq.set_priority(**bad)
                with self.assertRaises(ValueError):
                    seq.set_priority(1, keep=0)
                loaded = queue.load_async(space, "chat/2").result()
                numpy.testing.assert_array_equal(ask(client, loaded), expected)
                client.delete_snapshot("chat/1")
                with self.assertRaises(kvm.NotFoundError):
                    space.load("chat/1")
                numpy.testing.assert_array_equal(ask(client, seq), expected)


class Log(unittest.TestCase):
    def test_messages_reach_the_listener(self):
        code = """
import gc, sys, kvm
from rig import Daemon
heard = []
def listen(level, message):
    heard.append((level, message))
    gc.collect()            # frees sequences: calls kvm
    client.stats_text() if not client.is_closed and len(heard) > 3 else None
    raise ValueError("of the listener")
sys.unraisablehook = lambda info: heard.append(info.exc_value)
with Daemon() as daemon:
    client = kvm.connect(daemon.socket)
    kvm.set_log(listen)
    queue = client.create_queue()
    queue.nop_async().result()
    daemon.kill()
    try:
        queue.nop_async().result()
    except kvm.DisconnectedError:
        pass
assert any(isinstance(what, tuple) and isinstance(what[0], kvm.LogLevel) for what in heard), heard
assert any(isinstance(what, ValueError) for what in heard), heard
print("heard")
"""
        done = run_python(code)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "heard\n", ""))


def run_python(code, timeout=30):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=timeout, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(
                              [os.path.dirname(PACKAGE), os.path.dirname(__file__)])})


if __name__ == "__main__":
    unittest.main()
