# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values with the geometry that is published for real models, from a seed.

For tests and benches of approximate attention where no recorded tensors are at hand. What is built
in, and nothing else: spectra of keys and queries that fall as powers of the index on common axes;
token types with Zipf frequencies and topics that last a few hundred tokens, in keys and values; a
common mean of all keys with a few huge channels, queries leaning away from it; a chosen spread of
the logits (nats); an attention sink at token 0 with a tiny value; needles. Recent tokens are not
favoured.

    python3 synthetic.py OUT.kvrec [--tokens 8192] [--head-dim 64] [--seed 1] [--steep 1.3,0.7]

writes one record with a group for each head type of TYPES: the sd of the logits of ordinary keys,
and "needle": medium spread with eight keys far above. The same arguments give the same bytes.
"""
import argparse

import numpy as np

import kvrec

TYPES = {"flat": 1.0, "soft": 1.8, "medium": 2.4, "steep": 3.0, "sharp": 3.8, "needle": 2.2}
TOKEN_TYPES, TOPICS = 3000, 64
TOPIC_RUN = 512          # mean length of a run of one topic, tokens
N_NEEDLES, NEEDLE_NATS = 8, 9.0
SINK_MASS = 0.45


def token_stream(rng, n_tokens):
    """(type, topic) of each token: Zipf with offset 2.7, and topics in geometric runs."""
    weights = 1.0 / (np.arange(TOKEN_TYPES) + 2.7)
    types = rng.choice(TOKEN_TYPES, size=n_tokens, p=weights / weights.sum())
    changes = rng.random(n_tokens) < 1.0 / TOPIC_RUN
    topics = rng.integers(TOPICS, size=n_tokens)[np.maximum.accumulate(
        np.where(changes, np.arange(n_tokens), 0))]
    return types, topics


def make_keys(rng, types, topics, dim, power):
    """Centred keys [n, dim] with variance ~ j^-power along coordinate j, and their spectrum."""
    spectrum = np.arange(1, dim + 1) ** -power
    spectrum *= dim / spectrum.sum()
    noise_share = 0.25
    direction = (np.sqrt(0.58 * (1 - noise_share)) * rng.standard_normal((TOKEN_TYPES, dim))[types]
                 + np.sqrt(0.42 * (1 - noise_share)) * rng.standard_normal((TOPICS, dim))[topics]
                 + np.sqrt(noise_share) * rng.standard_normal((len(types), dim)))
    radius = np.exp(0.15 * rng.standard_normal((len(types), 1)))
    return radius * np.sqrt(spectrum) * direction, spectrum


def make_values(rng, types, topics, dim):
    parts = ((0.2, rng.standard_normal(dim)), (0.2, rng.standard_normal((TOKEN_TYPES, dim))[types]),
             (0.15, rng.standard_normal((TOPICS, dim))[topics]),
             (0.45, rng.standard_normal((len(types), dim))))
    return sum(np.sqrt(share) * part for share, part in parts)


def make_queries(rng, keys, spectrum, n_queries, group, power):
    """Unscaled queries [n_queries, group, dim]: noise on the queries' axes plus a pull to a key."""
    dim = keys.shape[1]
    axes = np.arange(1, dim + 1) ** (-power / 2)
    noise = rng.standard_normal((n_queries, group, dim))
    pull = keys[rng.integers(len(keys), size=(n_queries, group))] / np.sqrt(spectrum)
    return axes * (np.sqrt(0.6) * noise + np.sqrt(0.4) * pull)


def make_group(seed, n_tokens, steps, dim=64, group=4, sigma=2.4, needles=0, powers=(1.3, 0.7)):
    """(q [M, G, d], k [N, d], v [N, d]) as float32. steps: [M] ascending, each below n_tokens.

    sigma: sd over ordinary keys of scale * q.k, in nats, with scale = 1/sqrt(dim).
    needles: so many keys, far from both ends, lie NEEDLE_NATS above the mean for every query.
    """
    rng = np.random.default_rng([0x5EED, seed])
    scale = 1.0 / np.sqrt(dim)
    types, topics = token_stream(rng, n_tokens)
    keys, spectrum = make_keys(rng, types, topics, dim, powers[0])
    values = make_values(rng, types, topics, dim)
    mean = rng.standard_normal(dim)
    mean[rng.choice(dim - 1, size=3, replace=False)] *= 6.0
    mean[-1] = 0.0
    mean /= np.linalg.norm(mean)
    raw = make_queries(rng, keys, spectrum, len(steps), group, powers[1])
    # The common mean: softmax does not see it, codes and hashes do.
    raw -= 0.5 * np.linalg.norm(raw, axis=-1, keepdims=True) * mean

    # One direction, in which ordinary keys do not vary, carries the sink and the needles.
    special = np.zeros(dim)
    special[-1] = 1.0
    keys[:, -1] = 0.0
    spread = scale * np.sqrt(np.einsum("mgi,ij,mgj->mg", raw, np.cov(keys, rowvar=False), raw))
    queries = sigma * raw / spread[..., None]
    level = 4.0
    queries[..., -1] = level
    nat = 1.0 / (scale * level)                   # along `special`: adds one nat to every logit
    at = np.linspace(0.1, 0.8, needles) * n_tokens
    keys[at.astype(int)] += NEEDLE_NATS * nat * special
    ordinary = np.log(n_tokens) + 0.5 * sigma**2  # ln of the sum of exp over Gaussian logits
    keys[0] = (ordinary + np.log(SINK_MASS / (1 - SINK_MASS))) * nat * special
    values[0] *= 0.05

    keys += 1.5 * np.sqrt(spectrum.sum()) * mean
    return tuple(part.astype(np.float32) for part in (queries, keys, values))


def default_steps(n_tokens, n_queries):
    """Pairs of adjacent steps, spread over the last eighth of the tokens."""
    first = np.linspace(n_tokens * 7 // 8, n_tokens - 2, n_queries // 2).astype(int)
    return np.unique(np.concatenate([first, first + 1]))


def write_record(path, n_tokens=8192, dim=64, seed=1, n_queries=32, powers=(1.3, 0.7), types=None):
    steps = default_steps(n_tokens, n_queries)
    arrays = {"positions": ("i32", np.arange(n_tokens)),
              "tokens": ("i32", np.full(n_tokens, -1)), "query_steps": ("i32", steps)}
    groups = []
    for layer, name in enumerate(types or TYPES):
        parts = make_group(100 * seed + layer, n_tokens, steps, dim=dim, sigma=TYPES[name],
                           needles=N_NEEDLES if name == "needle" else 0, powers=powers)
        entry = {"layer": layer, "kv_head": 0, "q_heads": [0, 1, 2, 3], "notes": {"type": name}}
        for key, values in zip(("q", "k", "v"), parts):
            entry[key] = f"{layer}.0.{key}"
            arrays[entry[key]] = ("bf16", values)
        groups.append(entry)
    meta = {"n_tokens": n_tokens, "n_queries": len(steps), "head_dim": dim,
            "softmax_scale": 1.0 / np.sqrt(dim), "groups": groups,
            "model": {"name": "synthetic", "layers": len(groups), "q_heads": 4, "kv_heads": 1,
                      "rope_theta": 0.0, "rope_layout": "none", "powers": list(powers)},
            "prompt": {"name": f"synthetic-{seed}", "kind": "synthetic", "seed": seed,
                       "answers": []}}
    kvrec.write(path, meta, arrays)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steep", default="1.3,0.7", help="powers of the spectra of keys, queries")
    options = parser.parse_args()
    powers = tuple(float(part) for part in options.steep.split(","))
    write_record(options.out, options.tokens, options.head_dim, options.seed, options.queries,
                 powers)


if __name__ == "__main__":
    main()
