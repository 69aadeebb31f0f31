# SPDX-License-Identifier: Apache-2.0
"""Attention of one decode step over N stored keys, exact and estimated: the reference in float64.

Written to be read; the kernels are tested against it. One problem is the G queries of a kv head:

    s_i = scale q.k_i,   w_i = exp(s_i),   D = sum w_i,   o = (1/D) sum w_i v_i,   lse = ln D.

The keys fall into an exact set F (sinks, recent tokens), always read, and the rest R, of which an
estimator reads some rows. Every estimator returns the state of F and R together.

Sources: Horvitz and Thompson (1952) for the weights 1/p and their variance; Saerndal, Swensson and
Wretman, "Model Assisted Survey Sampling" (1992), for Poisson sampling (chapter 3), the variance of
a ratio by linearisation (5) and the difference form (6); Chen et al., MagicPIG (arXiv 2410.16179)
for the LSH estimator; Desai et al., vAttention (2510.05688) for top-k with a uniform residual.
"""
import dataclasses
import functools

import numpy as np

from sketches import permanent_random

P_FLOOR = 2.0**-20      # strictly unbiased needs p > 0 for every key; random numbers have 24 bits
KAPPA = 1.45            # standard deviations of a bar that knows nothing else, for RISK
RISK = 0.01
NORMAL = 2.326348       # the one-sided normal quantile of that risk
NOISE_ALLOWANCE = 0.81  # variance of the sketch, nats^2, from which on kappa grows
BAR_FLOOR = 2e-3        # relative; below it arithmetic in bf16 is the error, not sampling
MOST_TOLD = 96          # terms that tell the shape of an error
MOST_OWN = 0.99         # of D, that a key's share is believed to be


@dataclasses.dataclass
class Problem:
    q: np.ndarray        # [G, d]
    k: np.ndarray        # [N, d]
    v: np.ndarray        # [N, d_v]
    scale: float
    in_exact: np.ndarray  # bool [N]: the set F

    @functools.cached_property
    def logits(self):
        return self.scale * (self.q.astype(np.float64) @ self.k.T.astype(np.float64))

    @functools.cached_property
    def value_rms(self):
        """Root mean square norm of the values: a scale that stays when |o| vanishes."""
        return np.sqrt((self.v.astype(np.float64)**2).sum(axis=1).mean())

    @functools.cached_property
    def rest(self):
        """Ids of R, ascending."""
        return np.flatnonzero(~self.in_exact)


@dataclasses.dataclass
class Estimate:
    """What an estimator returns for the G heads. NaN where it has no error bar."""
    o: np.ndarray            # [G, d_v]
    lse: np.ndarray          # [G]
    rows: np.ndarray         # [G]: rows of R that the head used
    unique: int              # rows of R that memory saw
    sigma_o: np.ndarray      # [G]: estimated root of E|o_hat - o|^2
    sigma_lse: np.ndarray    # [G]
    bar: np.ndarray          # [G]: what a caller is told, an upper bound of |o_hat - o|
    noise: np.ndarray        # [G]: sd of s - s_hat in nats, as the drawn rows show it


def state(logits, values, log_weights=0.0):
    """(o, lse) of a set of keys with log-weights: logits [n], values [n, d_v]; n may be 0."""
    if len(logits) == 0:
        return np.zeros(values.shape[1]), -np.inf
    total = logits + log_weights
    top = total.max()
    weights = np.exp(total - top)
    mass = weights.sum()
    return weights @ values / mass, top + np.log(mass)


def collect(parts, rows, unique):
    """Estimate of the heads' (o, lse, sigma_o, sigma_lse, bar, noise); missing ones are NaN."""
    padded = [tuple(part) + (np.nan,) * (6 - len(part)) for part in parts]
    columns = [np.array(column) for column in zip(*padded)]
    return Estimate(columns[0], columns[1], np.asarray(rows), int(unique), *columns[2:])


def exact(problem):
    heads = len(problem.q)
    values = problem.v.astype(np.float64)
    parts = [state(problem.logits[head], values) for head in range(heads)]
    return collect(parts, [len(problem.rest)] * heads, len(problem.rest))


def top_ids(scores, count):
    """Ids of the `count` largest scores [n]."""
    count = min(count, len(scores))
    return np.argpartition(-scores, count - 1)[:count] if count else np.zeros(0, int)


def top_k(problem, count, scores=None):
    """F and the `count` keys of R with the largest scores [G, N]; None: the logits (oracle)."""
    scores = problem.logits if scores is None else scores
    fixed = np.flatnonzero(problem.in_exact)
    parts, chosen = [], []
    for head, logits in enumerate(problem.logits):
        chosen.append(problem.rest[top_ids(scores[head][problem.rest], count)])
        ids = np.concatenate([fixed, chosen[-1]])
        parts.append(state(logits[ids], problem.v[ids].astype(np.float64)))
    return collect(parts, [len(ids) for ids in chosen], len(np.unique(np.concatenate(chosen))))


def uniform_residual(problem, count, seed, scores=None):
    """Half of the budget as top-k, half as a uniform sample of what remains, weighted by its share.

    After vAttention. The sample is simple random without replacement (the smallest permanent
    random numbers), n_s of n; its variance is n^2 (1 - n_s/n) / n_s times the sample's own.
    """
    scores = problem.logits if scores is None else scores
    values = problem.v.astype(np.float64)
    fixed = np.flatnonzero(problem.in_exact)
    draw = permanent_random(seed, len(problem.k))
    parts, chosen = [], []
    for head, logits in enumerate(problem.logits):
        top = problem.rest[top_ids(scores[head][problem.rest], count // 2)]
        pool = np.setdiff1d(problem.rest, top)
        sample = pool[top_ids(-draw[pool], count - count // 2)]
        ids = np.concatenate([fixed, top, sample])
        log_weights = np.zeros(len(ids))
        sigma_o = sigma_lse = 0.0
        if len(sample):
            share = len(sample) / len(pool)
            log_weights[len(fixed) + len(top):] = -np.log(share)
        o, lse = state(logits[ids], values[ids], log_weights)
        if len(sample) > 1:
            w = np.exp(logits[sample] - lse)
            spread = len(pool)**2 * (1 - share) / len(sample)
            sigma_o = np.sqrt(spread * np.var(w[:, None] * (values[sample] - o), axis=0,
                                              ddof=1).sum())
            sigma_lse = np.sqrt(spread * np.var(w, ddof=1))
        parts.append((o, lse, sigma_o, sigma_lse, KAPPA * sigma_o))
        chosen.append(ids[len(fixed):])
    return collect(parts, [len(ids) for ids in chosen], len(np.unique(np.concatenate(chosen))))


# --- MagicPIG ------------------------------------------------------------------------------------

def collision_probability(cosine, bits):
    """That one table of `bits` sign projections agrees: (1 - theta/pi)^K (2410.16179, 4.2)."""
    return (1.0 - np.arccos(np.clip(cosine, -1.0, 1.0)) / np.pi) ** bits


def inclusion_probability(cosine, bits, tables):
    """That two tables or more agree: u = 1 - (1-c)^L - L c (1-c)^(L-1) (2410.16179)."""
    c = collision_probability(cosine, bits)
    return 1.0 - (1.0 - c) ** tables - tables * c * (1.0 - c) ** (tables - 1)


class Lsh:
    """K sign projections x L tables. Keys are hashed minus `center`, queries as they are."""

    def __init__(self, bits, tables, dim, seed):
        self.bits, self.tables = bits, tables
        planes = np.random.default_rng([0x15A, seed]).standard_normal((dim, bits * tables))
        self.planes = planes.astype(np.float32)

    def hash(self, x):
        """x [n, d] -> codes uint16 [n, L]: bit b of table l is the sign at plane l * K + b."""
        codes = np.empty((len(x), self.tables), np.uint16)
        place = (1 << np.arange(self.bits)).astype(np.float32)   # sums stay exact below 2^16
        for begin in range(0, len(x), 4096):                     # the products need not fit memory
            positive = (np.asarray(x[begin:begin + 4096], np.float32) @ self.planes) > 0
            positive = positive.reshape(-1, self.tables, self.bits).astype(np.float32)
            codes[begin:begin + 4096] = positive @ place
        return codes


def cosines(queries, keys):
    norms = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(keys, axis=1)
    return np.divide(queries @ keys.T, norms, out=np.zeros_like(norms), where=norms > 0)


def lsh_sampled(problem, lsh, center, key_codes):
    """MagicPIG's estimator: keys that meet the query in two tables or more, with weights w/u.

    o = sum (w/u) v / sum (w/u) over the sample, F with u = 1 (2410.16179); that is a softmax over
    s - ln u. center [d]: subtracted from the keys before hashing. key_codes [N, L].
    Returns (Estimate, ids read from the tables, all heads together).
    """
    values = problem.v.astype(np.float64)
    fixed = np.flatnonzero(problem.in_exact)
    keys = problem.k[problem.rest].astype(np.float64) - center
    u = inclusion_probability(cosines(problem.q.astype(np.float64), keys), lsh.bits, lsh.tables)
    parts, chosen, ids_read = [], [], 0
    for head, code in enumerate(lsh.hash(problem.q)):
        meetings = (key_codes[problem.rest] == code).sum(axis=1)
        ids_read += int(meetings.sum())
        hits = np.flatnonzero(meetings >= 2)
        chosen.append(problem.rest[hits])
        ids = np.concatenate([fixed, chosen[-1]])
        log_weights = np.concatenate([np.zeros(len(fixed)), -np.log(u[head, hits])])
        parts.append(state(problem.logits[head][ids], values[ids], log_weights))
    estimate = collect(parts, [len(c) for c in chosen], len(np.unique(np.concatenate(chosen))))
    return estimate, ids_read


# --- Horvitz-Thompson with a sketch as proposal --------------------------------------------------

def threshold(sizes, wanted):
    """c with sum min(1, c sizes_i) = wanted; infinity where every key is wanted. sizes [n] >= 0."""
    positive = np.sort(sizes[sizes > 0])[::-1]
    if wanted >= len(positive):
        return np.inf
    # With the j largest at 1 the rest share wanted - j; the first j that saturates no more is it.
    tail = np.cumsum(positive[::-1])[::-1]
    c = (wanted - np.arange(len(positive))) / tail
    fits = np.flatnonzero(c * positive <= 1.0)
    return c[fits[0]]


def inclusion(scores, value_norm, wanted):
    """p [G, n] ~ exp(scores) |v|, at most 1, with sum over a head = wanted (the expected rows).

    Poisson sampling with p proportional to w |v| is near the best for o: the variance of the ratio
    asks for w |v - o| (Saerndal et al., chapters 3 and 5), of which |v| is what an index can store.
    scores [G, n]: estimated logits. value_norm [n]; a key with none, or with a score that
    underflows, keeps the floor: strictly unbiased needs p > 0 everywhere.
    """
    p = np.empty_like(scores)
    for head, row in enumerate(scores):
        sizes = np.exp(row - row.max(initial=-np.inf)) * value_norm
        c = threshold(sizes, wanted)
        p[head] = np.where(sizes > 0, np.minimum(1.0, c * sizes), 0.0) if np.isfinite(c) else 1.0
    return np.maximum(p, P_FLOOR)


@dataclasses.dataclass
class BlockMeans:
    """Means of the values of runs of `size` tokens, int8 with one scale: a control for N."""
    means: np.ndarray      # [blocks, d_v]
    size: int

    @staticmethod
    def build(values, size=32):
        edges = np.arange(0, len(values), size)
        sums = np.add.reduceat(values.astype(np.float64), edges, axis=0)
        means = sums / np.diff(np.append(edges, len(values)))[:, None]
        step = np.maximum(np.abs(means).max(axis=1, keepdims=True), 1e-20) / 127
        return BlockMeans(np.rint(means / step) * step, size)

    def bytes_per_key(self):
        return (self.means.shape[1] + 2) / self.size


def sampled(problem, scores, value_norm, wanted, seed, control="none", shared=True, blocks=None):
    """Poisson sampling of R with p ~ exp(s_hat) |v| and weights 1/p (Horvitz-Thompson).

        D_hat = D_F + sum_S w_i / p_i    N_hat = N_F + sum_S (w_i / p_i) v_i    o = N_hat / D_hat

    scores [G, N]: s_hat, in nats. wanted: expected rows for each head. seed: fixes u_i; i is in S
    where u_i < p_i. shared: all heads use all rows, with the common p = max over heads; otherwise
    a head uses its own rows only.
    control:
      "none"    lse = ln D_hat.
      "scalar"  the same o; lse from the ratio estimator D_F + D_1 + a sum_R' w_hat, with
                a = sum_S' (w/p) / sum_S' (w_hat/p): the scan knows w_hat of every key.
                (R': keys with p < 1; D_1: those with p = 1, which are summed exactly.)
      "block"   the difference form: N gets a control too, a w_hat times the block's mean value.
    """
    rest = problem.rest
    p = inclusion(scores[:, rest], value_norm[rest], wanted)
    if shared:
        p = np.broadcast_to(p.max(axis=0), p.shape)
    return draw(problem, scores, p, seed, control, blocks)


def draw(problem, scores, p, seed, control="none", blocks=None):
    """`sampled` with given inclusion probabilities p [G, |R|]."""
    drawn = permanent_random(seed, len(problem.k))[problem.rest] < p
    parts = [sampled_head(problem, head, scores[head], p[head], drawn[head], control, blocks)
             for head in range(len(problem.q))]
    return collect(parts, drawn.sum(axis=1), drawn.any(axis=0).sum())


def sampled_head(problem, head, scores, p, drawn, control, blocks, told=None):
    """(o, lse, sigma_o, sigma_lse, bar, noise) of one head. p, drawn [|R|]; scores [N].

    told: the drawn ids that tell the error's shape; None: every so many-th.
    """
    rest, fixed = problem.rest, np.flatnonzero(problem.in_exact)
    logits, values = problem.logits[head], problem.v
    ids, p_drawn = rest[drawn], p[drawn]
    top = max(logits[fixed].max(initial=-np.inf), logits[ids].max(initial=-np.inf))
    if top == -np.inf:
        return (np.zeros(values.shape[1]), -np.inf) + (np.nan,) * 4
    w = np.exp(logits[ids] - top)
    v = values[ids].astype(np.float64)
    w_hat_all = np.exp(np.minimum(scores[rest] - top, 700.0))
    w_hat = w_hat_all[drawn]
    open_all = p < 1.0                       # R': what is left to chance
    open_drawn = p_drawn < 1.0

    w_fixed = np.exp(logits[fixed] - top)
    d_hat = w_fixed.sum() + (w / p_drawn).sum()
    n_hat = w_fixed @ values[fixed].astype(np.float64) + (w / p_drawn) @ v
    calibration = ((w / p_drawn)[open_drawn].sum()
                   / max((w_hat / p_drawn)[open_drawn].sum(), 1e-300))
    predicted = np.zeros_like(w)             # a w_hat of the drawn, where a control is used
    predicted_v = np.zeros_like(v)
    d_lse = d_hat
    if control != "none":
        predicted = np.where(open_drawn, calibration * w_hat, 0.0)
        missing = calibration * w_hat_all[open_all].sum() - (predicted / p_drawn).sum()
        d_lse = d_hat + missing
    if control == "block":
        mean_of = blocks.means[ids // blocks.size]
        predicted_v = predicted[:, None] * mean_of
        at = rest[open_all] // blocks.size
        mass = np.bincount(at, weights=calibration * w_hat_all[open_all],
                           minlength=len(blocks.means))
        n_hat = n_hat + mass @ blocks.means - (predicted / p_drawn) @ mean_of
        o = n_hat / d_lse
        residual = w[:, None] * (v - o) - (predicted_v - predicted[:, None] * o)
    else:
        # The scalar control adds missing * o to N as well: o stays the plain ratio.
        o = n_hat / d_hat
        residual = w[:, None] * (v - o)

    # Poisson: V of sum e_i / p_i is estimated by sum_S (1-p)/p^2 |e_i|^2.
    chance = (1.0 - p_drawn) / p_drawn**2
    sigma_o = np.sqrt(chance @ (residual**2).sum(axis=1)) / d_hat
    sigma_lse = np.sqrt(chance @ (w - predicted)**2) / d_lse
    noise = sample_noise(w, p_drawn, logits[ids] - scores[ids], open_drawn)
    terms = (np.sqrt(chance)[:, None] * residual)[open_drawn]
    at = slice(None, None, -(-len(terms) // MOST_TOLD) or 1)
    if told is not None:
        at = np.isin(ids[open_drawn], told)
    shape = error_shape(terms[at], o, len(terms) / max(len(terms[at]), 1))
    # No smaller than what the mean of all terms says.
    c = (chance * w**2)[open_drawn]
    mean = c @ (v - o)[open_drawn]
    shape.largest = max(shape.largest, mean @ mean / max(c.sum() * (terms**2).sum(), 1e-300))
    shape.squares = max(shape.squares, shape.largest**2)
    bar = error_bar(sigma_o, noise, calibration, w_hat_all, p, w / p_drawn, v, o, d_hat,
                    effective_draws((w / p_drawn)[open_drawn], p_drawn[open_drawn]), shape,
                    (w / p_drawn)[open_drawn].sum() / d_hat,
                    own_share((w / p_drawn)[open_drawn], p_drawn[open_drawn], d_hat))
    return o, top + np.log(d_lse), sigma_o, sigma_lse, bar, noise


def sample_noise(w, p, residual, open_drawn):
    """sd of s - s_hat over the keys left to chance, each counted with its estimated mass w/p."""
    if not open_drawn.any():
        return 0.0
    mass, residual = (w / p)[open_drawn], residual[open_drawn]
    mean = mass @ residual / mass.sum()
    return float(np.sqrt(mass @ (residual - mean)**2 / mass.sum()))


def effective_draws(weights, p):
    """How many draws of equal weight say as much as these, w/p: at most their number."""
    return min(weights.sum()**2 / max((1.0 - p) @ weights**2, 1e-300), len(weights))


def own_share(weights, p, d_hat):
    """A drawn key's own share of D, the mean over keys, each counted w/p: at most MOST_OWN."""
    return min((1.0 - p) @ weights**2 / max(weights.sum() * d_hat, 1e-300), MOST_OWN)


@dataclasses.dataclass
class ErrorShape:
    """What the covariance S of an error says of its length; eigenvalues relative to tr S."""
    largest: float = 1.0    # eigenvalue
    squares: float = 1.0    # their sum: tr S^2 / (tr S)^2
    along_o: float = 1.0    # share of tr S along o
    heaviest: float = 0.0   # largest share of tr S that one term has
    terms: float = np.inf   # how many equal terms would tell tr S as well
    skewness2: float = 0.0  # squared skewness along the first eigenvector, relative to tr S


def error_shape(told, o, step=1.0):
    """Shape of S = sum t t^T, from some of its terms, told [n, d_v], of each `step` one.

    The squares of single terms are taken out of tr S^2 and of the largest eigenvalue: terms are
    independent, and pairs alone have the expectation of the true S.
    """
    lengths = (told**2).sum(axis=1)
    trace = lengths.sum()
    if not trace > 0:
        return ErrorShape()
    products = told @ told.T / trace
    single = (lengths**2).sum() / trace**2
    along = ((told @ o)**2).sum() / (trace * (o @ o))
    shape = ErrorShape(along_o=min(along, 1.0), heaviest=lengths.max() / (trace * step),
                       terms=step / single)
    if single < 1:
        pairs = ((products**2).sum() - single) / (1 - single)
        shape.squares = max(min(pairs, 1.0), 0.5 * single)
        u = np.zeros(len(told))
        u[lengths.argmax()] = 1.0
        for _ in range(3):
            u = products @ u
            grown = np.linalg.norm(u)
            u = u / grown
        shape.largest = np.clip((grown - u**2 @ np.diag(products)) / (1 - single),
                                shape.squares, 1.0)
        shape.skewness2 = shape.largest**3 * (u**3).sum()**2 / step
    return shape


def chi_square(n):
    """Quantile of the chi-square over its n degrees, at the risk of NORMAL: Wilson and Hilferty."""
    return (1 - 2 / (9 * n) + NORMAL * np.sqrt(2 / (9 * n)))**3


def fisher(n, m):
    """The same of Fisher's distribution: cube roots of two chi-squares."""
    mean_n, mean_m = 1 - 2 / (9 * n), 1 - 2 / (9 * m)
    square = mean_m**2 - NORMAL**2 * 2 / (9 * m)
    rest = mean_n**2 - NORMAL**2 * 2 / (9 * n)
    both = mean_n * mean_m
    if square <= 0:
        return np.inf
    return ((both + np.sqrt(max(both**2 - square * rest, 0.0))) / square)**3


def kappa_of(shape, draws):
    """How many standard deviations make a bar for the risk of NORMAL.

    A sum of chi-squares weighted with the eigenvalues, by the chi-square of its mean, variance and
    skewness (Hall 1983; Buckley and Eagleson 1988), the sum of cubes put at largest * squares; and
    wider as Fisher's quantile is beside the chi-square's where few draws tell the variance, and
    where the error is skewed, for then the variance comes out small when the error is large (Hall
    1992).
    """
    m = max(5.0, min(draws, shape.terms)) - 1
    skew = max(1.0, shape.squares / shape.largest**2)
    known = 1 + np.sqrt(shape.squares * skew) * (chi_square(skew) - 1)
    n = 1 / shape.squares
    x2 = chi_square(1)
    skewed = 1 + shape.skewness2 * (x2**2 + 2 * x2 - 3) / 18
    return skewed * np.sqrt((1 + 0.025 / skew) * known * fisher(n, m) / chi_square(n))


def error_bar(sigma_o, noise, calibration, w_hat_all, p, weights, v, o, d_hat, draws, shape,
              open_share, own=0.0):
    """kappa times the larger of the plug-in sigma and one from a model of the sketch's noise.

    A key that the sketch puts far too low shows in the plug-in variance only when it is drawn. With
    ln(w / (a w_hat)) normal of variance `noise`^2 and mean -noise^2/2, E w^2 = a^2 w_hat^2
    e^(noise^2), so V = a^2 e^(noise^2) sum w_hat^2 (1-p)/p R^2 / D^2, R^2 the mean of |v - o|^2;
    and kappa grows with the noise beyond NOISE_ALLOWANCE. kappa follows from the error's shape and
    from how many draws (`draws`, effective_draws of the open keys) tell the variance, one more of
    the heaviest term included. Both sigmas see |v - o| too short by the share `own` (own_share) by
    which o follows v. Values unlike all that was drawn may hide behind a share of the mass that is
    missed with the risk. The true o may be shorter than the estimate by what of the error lies
    along it, so the bar is that of the error over the shorter o, times |o|.
    """
    norm = np.linalg.norm(o)
    least = BAR_FLOOR * norm
    if not (p < 1.0).any():
        return least
    spread = w_hat_all**2 @ ((1.0 - p) / p)
    r_square = weights @ ((v - o)**2).sum(axis=1) / max(weights.sum(), 1e-300)
    model = calibration * np.sqrt(np.exp(noise**2) * spread * r_square) / d_hat
    growth = max(1.0, np.exp(noise**2 - NOISE_ALLOWANCE)) * np.sqrt(1 + shape.heaviest)
    length = np.sqrt(weights @ (v**2).sum(axis=1) / max(weights.sum(), 1e-300))
    unseen = -np.expm1(np.log(RISK) / max(1.0, draws)) * 2 * open_share * (norm + length)
    bar = max(kappa_of(shape, draws) * growth * max(sigma_o, model) / (1.0 - own), unseen, least)
    shorter = np.sqrt(shape.along_o) * bar if bar > least else 0.0
    return bar * norm / (norm - shorter) if shorter < norm else np.inf
