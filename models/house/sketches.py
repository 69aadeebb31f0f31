# SPDX-License-Identifier: Apache-2.0
"""Low-bit codes of keys that estimate q.k without reading the key: the reference of the C++ ones.

A key k is centred with the mean c of the keys it is coded with, and written in an orthogonal or
balanced basis: q.k = q.c + (A^T q).(B^T (k - c)), because A B^T = I. Its first `lead` coordinates
are kept in int8, the rest is rotated at random and coded with 1 or 2 bits for each coordinate after
RaBitQ (Gao and Long, arXiv 2405.12497; several bits: 2409.09913):

    x = rotated rest,   y = its codeword (x_j > 0: +.5 or +1.5, else the negatives),
    f = |x|^2 / <y, x>,   <x, q'> is estimated by f <y, q'>.

f makes the estimate exact for q' parallel to x, and unbiased over the random rotation.

What is stored for each key: the code, f and |v| as bf16 (|v| serves the proposal), and the lead.
Head dim 128: "1b" 20 bytes, "8i8+1b" 28, "2b" 36; head dim 64: 12, 20, 20.
Queries are not quantised here: what a kernel adds by that is its own affair and small.
"""
import dataclasses

import numpy as np

from kvrec import from_bf16, to_bf16

MIX_ADD, MIX_SEED = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)
LEAD_RANGE_SD = 16.0   # wide: a late sink lies many standard deviations out
SHRINK = 0.3           # how far C_q is pulled to the identity in the balanced basis
BLOCK_KEYS = 64
LEAST_OF_TYPICAL = 0.5   # of the block's typical |v|, that a key counts at least
KINDS = {"1b": (0, 1), "8i8+1b": (8, 1), "2b": (0, 2)}   # (coordinates in int8, bits of the rest)


def splitmix64(state):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), elementwise on uint64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permanent_random(seed, count, first=0):
    """uint64 seed -> [count] doubles in [0, 1), one for each id first, first + 1, ...

    A hash in words of 32 bits, cheap where many ids are hashed at once, modulo 2^32 inside:

        key = splitmix64(seed * MIX_SEED + ((id >> 32) + 1) * MIX_ADD)    modulo 2^64
        x = id * 0x9E3779B1 + key;  x = (x ^ x >> 16) * 0x21F0AAAD;  x ^= key >> 32
        x = (x ^ x >> 15) * 0x735A2D97;  u = (x >> 8) * 2^-24

    The multipliers are from Chris Wellons' search for 32-bit hashes with little bias. The same
    function is hash_index/sketch/random.h; the tests of both pin the same values. u is the same for
    all heads of a group and all budgets: samples of growing budgets are nested.
    """
    with np.errstate(over="ignore"):
        ids = np.arange(first, first + count, dtype=np.uint64)
        upper = (ids >> np.uint64(32)) + np.uint64(1)
        key = splitmix64(np.uint64(seed % 2**64) * MIX_SEED + upper * MIX_ADD)
        x = ids.astype(np.uint32) * np.uint32(0x9E3779B1) + key.astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
        x ^= (key >> np.uint64(32)).astype(np.uint32)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return (x >> np.uint32(8)).astype(np.float64) * 2.0**-24


def hadamard(x):
    """x [..., d] times the orthonormal Walsh-Hadamard matrix; d a power of two."""
    dim = x.shape[-1]
    if dim & (dim - 1):
        raise ValueError(f"dim {dim} is no power of two")
    half = 1
    while half < dim:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]],
                     axis=-2).reshape(x.shape)
        half *= 2
    return x / np.sqrt(dim)


def rotate(x, seed):
    """An orthogonal map that looks random: three rounds of random signs and Hadamard."""
    dim = x.shape[-1]
    for turn in range(3):
        signs = np.where(permanent_random(seed, dim, first=turn * dim) < 0.5, -1.0, 1.0)
        x = hadamard(x * signs)
    return x


def pca_basis(keys):
    """(A, B), equal and orthogonal: principal axes of the centred keys, largest first."""
    values, vectors = np.linalg.eigh(keys.T @ keys / len(keys))
    axes = vectors[:, np.argsort(-values)]
    return axes, axes


def root(matrix, power):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-12 * values.max()) ** power) @ vectors.T


def balanced_basis(keys, queries, shrink=SHRINK):
    """(A, B) in which the second moments of A^T q and B^T k are the same diagonal S, largest first.

    C_q^(1/2) C_k^(1/2) = U S V^T, A = C_q^(-1/2) U S^(1/2), B = C_q^(1/2) U S^(-1/2), with C_q
    shrunk towards a multiple of the identity: its inverse root must not blow up directions which
    the queries at hand happen to miss.
    """
    dim = keys.shape[1]
    c_k = keys.T @ keys / len(keys)
    c_q = queries.T @ queries / len(queries)
    c_q = (1 - shrink) * c_q + shrink * np.trace(c_q) / dim * np.eye(dim)
    u, s, _ = np.linalg.svd(root(c_q, 0.5) @ root(c_k, 0.5))
    s = np.maximum(s, 1e-9 * s[0])
    return root(c_q, -0.5) @ u * np.sqrt(s), root(c_q, 0.5) @ u / np.sqrt(s)


def codewords(x, bits):
    """x [n, d] -> y [n, d] of +-.5 (bits = 1), or +-.5 and +-1.5 with the largest cosine (2)."""
    magnitude = np.full(x.shape, 0.5)
    if bits == 2:
        # With the k largest |x_j| at 1.5: <y,x> = .5 sum|x| + sum_{k largest}|x|, |y|^2 = d/4 + 2k.
        order = np.argsort(-np.abs(x), axis=1)
        largest = np.cumsum(np.take_along_axis(np.abs(x), order, axis=1), axis=1)
        dot = 0.5 * largest[:, -1:] + np.concatenate([np.zeros((len(x), 1)), largest], axis=1)
        norm = np.sqrt(x.shape[1] / 4 + 2.0 * np.arange(x.shape[1] + 1))
        best = np.argmax(dot / norm, axis=1)
        rank = np.argsort(order, axis=1)
        magnitude[rank < best[:, None]] = 1.5
    elif bits != 1:
        raise ValueError(f"{bits} bits; 1 and 2 are known")
    return np.where(x >= 0, magnitude, -magnitude)


def round_bf16(values):
    return from_bf16(to_bf16(values)).astype(np.float64)


@dataclasses.dataclass
class Sketch:
    """The codes of N keys. Everything that `scores` uses is what would be stored."""
    kind: str
    center: np.ndarray       # [d]
    basis: tuple             # A, B [d, d]
    lead: np.ndarray         # int8 [N, lead]
    lead_scale: np.ndarray   # [lead]
    code: np.ndarray         # [N, d]: the codewords y
    factor: np.ndarray       # [N]: f as bf16
    value_norm: np.ndarray   # [N]: |v| as bf16, raised by `raise_norms`
    rest_norm: np.ndarray    # [N]: |x|; for `alignment`, not stored
    seed: int
    bytes_per_key: float

    def scores(self, queries):
        """Estimates of q.k, not scaled: queries [G, d] -> [G, N]."""
        turned = (queries @ self.basis[0]).astype(np.float64)
        lead = self.lead.shape[1]
        rest = turned.copy()
        rest[:, :lead] = 0.0
        estimate = (rotate(rest, self.seed) @ self.code.T) * self.factor
        estimate += (turned[:, :lead] * self.lead_scale) @ self.lead.T.astype(np.float64)
        return estimate + (queries @ self.center)[:, None]

    def alignment(self):
        """Mean cosine of a key's rotated rest with its codeword: .798 at 1 bit for Gaussian data.

        f = |x|^2 / <y, x> gives the cosine |x| / (f |y|), up to the rounding of f.
        """
        return float(np.mean(self.rest_norm / (self.factor * np.linalg.norm(self.code, axis=1))))


def raise_norms(norms):
    """|v| [N], at least half of what is typical of the block: (mean of the roots)^2.

    A key's part in the variance of o goes with |v - o|: with v = 0 it still belongs to the
    denominator. The mean of roots is hardly moved by one huge value.
    """
    edges = np.arange(0, len(norms), BLOCK_KEYS)
    mean = np.add.reduceat(np.sqrt(norms), edges) / np.diff(np.append(edges, len(norms)))
    return np.maximum(norms, LEAST_OF_TYPICAL * np.repeat(mean**2, BLOCK_KEYS)[:len(norms)])


def build(kind, keys, values, queries=None, seed=1):
    """Sketch of keys [N, d] with values [N, d_v].

    queries: None takes the principal axes of the keys; queries [M, d] the balanced basis.
    """
    lead, bits = KINDS[kind]
    keys = np.asarray(keys, dtype=np.float64)
    dim = keys.shape[1]
    center = round_bf16(keys.mean(axis=0))
    centred = keys - center
    if not lead:
        basis = (np.eye(dim), np.eye(dim))
    elif queries is None:
        basis = pca_basis(centred)
    else:
        basis = balanced_basis(centred, np.asarray(queries, dtype=np.float64))
    turned = centred @ basis[1]
    # The rounding of the centre moves all keys by less than `least`.
    least = np.linalg.norm(center) * np.linalg.norm(basis[1][:, :lead], axis=0) / 256
    scale = np.maximum(LEAD_RANGE_SD * turned[:, :lead].std(axis=0), np.maximum(least, 1e-20)) / 127
    stored = np.clip(np.rint(turned[:, :lead] / scale), -127, 127).astype(np.int8)
    rest = turned.copy()
    rest[:, :lead] = 0.0
    rest = rotate(rest, seed)
    code = codewords(rest, bits)
    dot = np.einsum("nd,nd->n", code, rest)
    square = np.einsum("nd,nd->n", rest, rest)
    factor = np.divide(square, dot, out=np.zeros_like(dot), where=dot > 0)
    value_norm = round_bf16(raise_norms(np.linalg.norm(np.asarray(values, np.float64), axis=1)))
    return Sketch(kind, center, basis, stored, scale, code, round_bf16(factor), value_norm,
                  np.sqrt(square), seed, lead + bits * dim / 8 + 4)
