# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: a kvmd, clients over both libraries, an oracle."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy

import kvm

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = os.path.dirname(os.path.abspath(kvm.__file__))


class Daemon:
    """A kvmd with a socket in a folder of its own."""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.folder = tempfile.mkdtemp(prefix="kvmd-")
        self.socket = os.path.join(self.folder, "kvmd.sock")
        self.process = None

    def start(self):
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self.process = subprocess.Popen(
                [os.path.join(os.environ["KVM_BIN_DIR"], "kvmd"), "--socket", self.socket,
                 "--host-capacity", "256MiB", *self.arguments], stderr=log)
        deadline = time.monotonic() + 20
        while True:
            try:
                kvm.connect(self.socket).close()
                return
            except kvm.DisconnectedError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait()

    def remove(self):
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.remove()


_daemon = None


def daemon():
    """The one kvmd of the file, started when it is first needed."""
    global _daemon
    if _daemon is None:
        _daemon = Daemon()
        _daemon.start()
        atexit.register(_remove_daemon, os.getpid())
    return _daemon


def _remove_daemon(pid):
    if pid == os.getpid():
        _daemon.remove()


def open_client(kind, **arguments):
    """A client of one of KINDS."""
    if kind == "embedded":
        return kvm.open_embedded(n_threads=2, capacity=256 << 20)
    return kvm.connect(daemon().socket, **arguments)


KINDS = ("embedded", "daemon")


def over_both(test):
    """Makes two classes of a class of tests: over an engine in the process, and over kvmd. `client`
    is one that lives as long as a test."""
    module = sys.modules[test.__module__]
    for kind in KINDS:
        name = f"{test.__name__}{kind.capitalize()}"
        made = type(name, (test, Rig), {"kind": kind, "__module__": test.__module__})
        setattr(module, name, made)
    return None


class Rig(unittest.TestCase):
    kind = ""
    n_spaces = 0

    def setUp(self):
        self.client = open_client(self.kind)
        self.spaces = []
        self.addCleanup(self.drop_spaces)
        self.addCleanup(self.client.close)
        self.random = numpy.random.default_rng(7)

    def space(self, client=None, **arguments):
        Rig.n_spaces += 1
        geometry = {"n_layers": 1, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 16,
                    "codec": "float32", **arguments}
        name = f"test.{self.kind}.{os.getpid()}.{Rig.n_spaces}"
        if client is None:
            self.spaces.append(name)
        return (client or self.client).register_space(name, **geometry)

    def drop_spaces(self):
        """There is room for 64."""
        if self.kind == "daemon" and daemon().process.poll() is None:
            with open_client(self.kind) as client:
                for name in self.spaces:
                    with contextlib.suppress(kvm.NotFoundError):
                        client.find_space(name).drop()

    def normal(self, *shape, dtype="float32"):
        return self.random.standard_normal(shape).astype(dtype)

    def prompt(self, space, n_tokens, layer=0, n_kv_heads=2, dim=16):
        """A sequence with random tokens, and what was appended."""
        seq = space.create_sequence()
        k, v = self.normal(n_tokens, n_kv_heads, dim), self.normal(n_tokens, n_kv_heads, dim)
        self.client.step(space, layer, [kvm.Item(seq, append=n_tokens)], k=k, v=v)
        return seq, k, v

    def assert_close(self, got, wanted, tolerance=2e-5, what=""):
        got, wanted = numpy.asarray(got, "float64"), numpy.asarray(wanted, "float64")
        self.assertEqual(got.shape, wanted.shape, what)
        finite = numpy.isfinite(wanted)
        numpy.testing.assert_array_equal(numpy.isfinite(got), finite, what)
        error = numpy.abs(got - wanted)[finite]
        self.assertLessEqual(error.max(initial=0.0), tolerance, what)

    def assert_refused(self, status, cls, *words):
        """As assertRaises; the sentence has all words."""
        return _Refused(self, status, cls, words)


class _Refused:
    def __init__(self, test, status, cls, words):
        self.test, self.status, self.cls, self.words = test, status, cls, words

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.test.assertIsNotNone(kind, f"nothing was raised; wanted {self.cls.__name__}")
        if not isinstance(error, self.cls):
            return False
        self.error = error
        if isinstance(error, kvm.Error):
            self.test.assertEqual(error.status, self.status, error)
        for word in self.words:
            self.test.assertIn(str(word), str(error))
        return True


def attention(q, k, v, positions, *, scale=None, window=0, softcap=0.0, sinks=None, slopes=None,
              sees=None, causal=True):
    """o and lse in float64. q: [row, q head, channel] at `positions`; k, v: [token, head, channel];
    slopes: [q head]; sees: [row, token] of booleans that hold besides."""
    q, k, v = (numpy.asarray(x, "float64") for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    logits = numpy.einsum("rhd,thd->rht", q, k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        logits = softcap * numpy.tanh(logits / softcap)
    rows, tokens = numpy.asarray(positions)[:, None], numpy.arange(k.shape[0])[None]
    if slopes is not None:
        logits = logits + numpy.asarray(slopes)[None, :, None] * (tokens - rows)[:, None]
    visible = numpy.ones((q.shape[0], k.shape[0]), bool)
    if causal:
        visible &= tokens <= rows
    if window:
        visible &= tokens > rows - window
    if sees is not None:
        visible &= sees
    logits = numpy.where(visible[:, None], logits, -numpy.inf)
    with numpy.errstate(divide="ignore"):
        weights = numpy.exp(logits)
        total = weights.sum(-1)
        if sinks is not None:
            total = total + numpy.exp(sinks)[None]
        o = numpy.einsum("rht,thd->rhd", weights, v) / numpy.maximum(total, 1e-300)[..., None]
        return o, numpy.log(total)
