#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package over PyTorch: bfloat16, every order that views make, tensors that it must
refuse, memory of the client."""

import gc
import itertools
import unittest

import numpy

try:
    import torch
except ImportError:
    raise unittest.SkipTest("PyTorch is not installed") from None

import kvm
from rig import Rig, attention, over_both

INVALID = kvm.Status.INVALID
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def views(shape, dtype=torch.float32):
    """Tensors [item, head, token, channel] that lie in memory in every order of the axes, alone and
    as slices of more."""
    for order in itertools.permutations(range(3)):
        packed = torch.zeros([shape[i] for i in order] + [shape[3]], dtype=dtype)
        yield f"order {order}", packed.permute(*(order.index(i) for i in range(3)), 3)
    for axis in range(4):
        larger = list(shape)
        larger[axis] += 8
        yield f"narrow {axis}", torch.zeros(larger, dtype=dtype).narrow(axis, 8, shape[axis])
    b, h, t, d = shape
    yield "step of 2", torch.zeros((b, h, 2 * t, d), dtype=dtype)[:, :, ::2]
    yield "fused", torch.zeros((b, t, 3 * h * d), dtype=dtype)[..., :h * d].view(
        b, t, h, d).transpose(1, 2)


@over_both
class Torch:
    def batch(self, space, n_items, n_tokens, dtype=torch.float32, **arrays):
        """A prefill in the layout "heads" against the oracle."""
        seqs = [space.create_sequence() for _ in range(n_items)]
        for name, n_heads in (("k", 2), ("v", 2), ("q", 4)):
            data = torch.from_numpy(self.normal(n_items, n_heads, n_tokens, 16)).to(dtype)
            arrays[name] = arrays[name].copy_(data) if name in arrays else data
        items = [kvm.Item(seq, append=n_tokens, query=n_tokens) for seq in seqs]
        result = self.client.step(space, 0, items, lse=True, layout="heads", **arrays)
        self.assertEqual(result.o.dtype, dtype)
        self.assertEqual(result.lse.dtype, torch.float32)
        k, v, q, o = (x.to(torch.float64).numpy().swapaxes(1, 2)
                      for x in (arrays["k"], arrays["v"], arrays["q"], result.o))
        for i in range(n_items):
            wanted, lse = attention(q[i], k[i], v[i], range(n_tokens))
            self.assert_close(o[i], wanted, TOLERANCE[dtype])
            self.assert_close(result.lse[i].numpy().swapaxes(0, 1), lse, 1e-4)

    def test_types_of_elements(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            with self.subTest(dtype):
                self.batch(self.space(), 2, 9, dtype)
                space = self.space(codec=dtype)
                self.assertGreater(space.id, 0)

    def test_queries_in_every_order(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 5), (3, 1), (1, 1), (5, 3)):
            for name, q in views((n_items, 4, n_tokens, 16)):
                with self.subTest(name, n_items=n_items, n_tokens=n_tokens):
                    self.batch(space, n_items, n_tokens, q=q)

    def test_keys_in_every_order(self):
        space = self.space()
        n_refused = 0
        for n_items, n_tokens in ((1, 5), (3, 1), (3, 5)):
            shape = (n_items, 2, n_tokens, 16)
            for (name, k), (_, v) in zip(views(shape), views(shape)):
                with self.subTest(name, n_items=n_items, n_tokens=n_tokens):
                    try:
                        self.batch(space, n_items, n_tokens, k=k, v=v)
                    except kvm.InvalidError as error:
                        self.assertRegex(str(error), "one must be a multiple of the other")
                        self.assertNotEqual(k.stride(0) % k.stride(2), 0)
                        n_refused += 1
        self.assertEqual(n_refused, 0 if all(
            k.stride(0) % k.stride(2) == 0 for _, k in views((3, 2, 5, 16))) else n_refused)

    def test_outputs_in_every_order_where_a_token_is_all(self):
        space = self.space()
        for n_items, n_tokens in ((1, 5), (3, 1)):
            for name, o in views((n_items, 4, n_tokens, 16)):
                with self.subTest(name):
                    self.batch(space, n_items, n_tokens, o=o)

    def test_expanded_tensors(self):
        space = self.space()
        one = torch.randn(1, 2, 4, 16)
        seqs = [space.create_sequence() for _ in range(3)]
        items = [kvm.Item(seq, append=4) for seq in seqs]
        shared = one.expand(3, 2, 4, 16)
        self.client.step(space, 0, items, k=shared, v=shared, layout="heads")
        got = torch.empty(4, 2, 16)
        with self.client.create_queue() as queue:
            for seq in seqs:
                queue.read(seq, 0, 0, 4, k=got)
                self.assertTrue(torch.equal(got.transpose(0, 1), one[0]))
        heads = torch.randn(3, 1, 4, 16).expand(3, 2, 4, 16)
        with self.assert_refused(INVALID, kvm.InvalidError, "k has a stride of 0"):
            self.client.step(space, 0, items, k=heads, v=heads, layout="heads")
        with self.assert_refused(INVALID, kvm.InvalidError, "o has a stride of 0", "upon each"):
            self.client.step(space, 0, [kvm.Item(seqs[0], query=2)], q=torch.randn(2, 4, 16),
                             o=torch.empty(1, 4, 16).expand(2, 4, 16))

    def test_nothing_at_all(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        for shape, layout in (((0, 4, 16), "rows"), ((1, 4, 0, 16), "heads")):
            q = torch.empty(shape)
            o = self.client.step(space, 0, [kvm.Item(seq)], q=q, layout=layout).o
            self.assertEqual(tuple(o.shape), shape)

    def refused(self, q, *words, o=None):
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        with self.assert_refused(INVALID, kvm.InvalidError, *words):
            self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q,
                             o=torch.empty(1, 4, 16) if o is None else o)

    def test_tensors_that_need_a_gradient(self):
        q = torch.randn(1, 4, 16, requires_grad=True)
        self.refused(q, "q requires a gradient", "q.detach()")
        self.refused(torch.randn(1, 4, 16), "o requires a gradient", "o.detach()", o=q)
        self.refused(torch.nn.Parameter(q.detach()), "q requires a gradient")
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        o = self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q.detach()).o
        self.assertFalse(o.requires_grad)

    def test_tensors_that_are_not_in_host_memory(self):
        q = torch.empty(1, 4, 16, device="meta")
        self.refused(q, "q is a torch.Tensor", "host memory", "meta")

    def test_tensors_that_are_no_plain_memory(self):
        self.refused(torch.randn(1, 4, 16).to_sparse(), "q is a torch.Tensor", "strided")
        self.refused(torch.randn(1, 4, 16, dtype=torch.complex64),
                     "q has elements of complex64")
        self.refused(torch.randn(1, 4, 16, dtype=torch.float64),
                     "q has elements of float64")
        self.refused(torch.zeros(1, 4, 16, dtype=torch.int32), "q has elements of int32")
        self.refused(torch.zeros(1, 4, 16).to(torch.float8_e4m3fn), "q")

    def test_memory_of_the_client(self):
        space = self.space()
        seq, k, v = self.prompt(space, 6)
        for dtype in ("float32", "float16", "bfloat16", torch.bfloat16):
            q = self.client.empty((2, 4, 16), dtype, framework="torch")
            o = torch.empty_like(q) if self.kind == "embedded" else self.client.empty(
                (2, 4, 16), dtype, framework="torch")
            q.copy_(torch.randn(2, 4, 16))
            before = self.client.n_copied_bytes
            self.client.step(space, 0, [kvm.Item(seq, query=2)], q=q, o=o)
            self.assertEqual(self.client.n_copied_bytes, before)
            wanted = attention(q.to(torch.float64), k, v, [4, 5])[0]
            self.assert_close(o.to(torch.float64), wanted, TOLERANCE[q.dtype])
        self.assertEqual(tuple(self.client.empty((3, 0), framework="torch").shape), (3, 0))
        view = self.client.empty((50, 4, 16), framework="torch")[7:9].transpose(0, 1)
        gc.collect()
        view.fill_(2.0)
        self.client.close()
        self.assertIn(view.sum().item(), (0, 256))
        view.zero_()

    def test_merge_of_tensors(self):
        space = self.space()
        seq, k, v = self.prompt(space, 30)
        q = torch.from_numpy(self.normal(2, 4, 16))
        parts = [self.client.step(space, 0, [kvm.Item(seq, query=2, ranges=[r])], q=q, lse=True)
                 for r in ((0, 11), (11, 30))]
        o, lse = kvm.merge((part.o, part.lse) for part in parts)
        self.assertIsInstance(o, torch.Tensor)
        wanted = attention(q, k, v, [28, 29])
        self.assert_close(o, wanted[0])
        self.assert_close(lse, wanted[1])

    def test_tensors_and_arrays_together(self):
        space = self.space()
        seq, k, v = self.prompt(space, 5)
        q = torch.randn(1, 4, 16)
        o = numpy.empty((1, 4, 16), "float32")
        self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q, o=o)
        self.assert_close(o, attention(q, k, v, [4])[0])


if __name__ == "__main__":
    unittest.main()
