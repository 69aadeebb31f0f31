# SPDX-License-Identifier: Apache-2.0
"""How queries, keys, values and attention of a model lie: statistics of recorded tensors.

    python3 geometry.py FILE.kvrec... [--out build/house/geometry] [--queries 96]

prints tables by kv head and by query head, the class of each head, medians by class and how the
columns vary over the heads, and writes geometry.json, mass_<record>.svg and spectra_<record>.svg
into --out. docs/geometry.md explains every column and compares with what is published. Records of
several prompts of one model are compared as well.

A query attends to the tokens up to its own: SINKS first tokens, the LOCAL last, and between them
the far keys. Means over queries and heads are of the ratio, not ratios of means.
"""
import argparse
import collections
import json
import os

import numpy as np

import kvrec
import sketches
import svg

SINKS, LOCAL = 4, 64
TOP_FRACTIONS = (0.01, 0.05, 0.20)
BLOCKS = (8, 16, 32, 64)
CURVE = np.logspace(-4, 0, 33)
FEW = 16                    # "sharp": so many far keys hold half of all mass

# A head belongs to a class where a statistic reaches its limit and the rest holds as well.
SINK_LIMIT = 0.5            # mean mass of the sinks
LOCAL_LIMIT = 0.5           # mean mass of the last LOCAL tokens
INDUCTION_LIMIT = 0.2       # mean mass behind earlier copies of this token,
INDUCTION_LIFT = 10.0       # and so many times the mass that uniform attention puts there
SHARP_LIMIT = 0.25          # share of the (answer) queries that are sharp
FLAT_FAR, FLAT_TOP20 = 0.4, 0.85   # far mass at least, share of it on the top 20 % at most


# --- Keys and values -----------------------------------------------------------------------------

def cosine(a, b):
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))


def spectrum(x):
    """Eigenvalues of the second moment of x [n, d], largest first."""
    return np.maximum(np.linalg.eigvalsh(x.T @ x / len(x))[::-1], 0.0)


def spectrum_summary(values):
    share = values / max(values.sum(), 1e-300)
    half = np.arange(1, len(values) // 2 + 1)
    positive = np.log(np.maximum(values[:len(half)], 1e-300))
    return {"top1": float(share[0]), "top8": float(share[:8].sum()),
            "rank": float(1.0 / (share**2).sum()),
            "rank90": int(np.searchsorted(np.cumsum(share), 0.9) + 1),
            "power": float(-np.polyfit(np.log(half), positive, 1)[0])}


def alignment(queries, centred):
    """Where the variance of a query's logits over the keys comes from: E_q q^T C_k q, split.

    balanced8, pca8: the share of 8 coordinates in the balanced basis (sketches.balanced_basis: the
    singular values of M_q^(1/2) C_k^(1/2), squared) and along the keys' own first axes. excess: the
    variance over that of keys and queries without common axes, tr M_q tr C_k / d.
    """
    m_q = queries.T @ queries / len(queries)
    c_k = centred.T @ centred / len(centred)
    squares = np.linalg.svd(sketches.root(m_q, 0.5) @ sketches.root(c_k, 0.5),
                            compute_uv=False)**2
    values, axes = np.linalg.eigh(c_k)
    along = (values * np.einsum("dj,de,ej->j", axes, m_q, axes))[::-1]
    total = squares.sum()
    return {"balanced1": float(squares[0] / total), "balanced8": float(squares[:8].sum() / total),
            "pca8": float(along[:8].sum() / along.sum()),
            "excess": float(total * len(c_k) / (np.trace(m_q) * np.trace(c_k)))}


def explained_by_blocks(v):
    """Share of the variance of v [n, d] that means of blocks explain, by size; iid v: 1/size."""
    total = ((v - v.mean(axis=0))**2).sum()
    found = {}
    for size in BLOCKS:
        blocks = v[:len(v) // size * size].reshape(-1, size, v.shape[1])
        within = ((blocks - blocks.mean(axis=1, keepdims=True))**2).sum()
        found[str(size)] = float(1.0 - within / max(total * (blocks[..., 0].size / len(v)), 1e-300))
    return found


def key_statistics(q, k, v, k_pre=None):
    """Of one kv head. q [M, G, d], k, v, k_pre [N, d]."""
    q_all = q.reshape(-1, q.shape[-1]).astype(np.float64)
    k, v = k.astype(np.float64), v.astype(np.float64)
    rest = k[SINKS:]
    mean = rest.mean(axis=0)
    centred = rest - mean
    norms = np.linalg.norm(rest, axis=1)
    c_k = centred.T @ centred / len(centred)
    ridge = 1e-4 * np.trace(c_k) / len(c_k) * np.eye(len(c_k))
    inverse = np.linalg.inv(c_k + ridge)

    def mahalanobis(x):
        return float(np.sqrt(np.einsum("nd,de,ne->n", x - mean, inverse, x - mean).mean()))

    v_norms = np.linalg.norm(v[SINKS:], axis=1)
    products = q_all @ centred.T
    lengths = np.linalg.norm(q_all, axis=1)[:, None] * np.linalg.norm(centred, axis=1)
    stats = {
        "mean_norm": float(np.linalg.norm(mean)),
        "centred_rms": float(np.sqrt((centred**2).sum(axis=1).mean())),
        "key_norm": float(norms.mean()), "key_norm_sd": float(norms.std()),
        "query_norm": float(np.linalg.norm(q_all, axis=1).mean()),
        "value_norm": float(v_norms.mean()), "value_norm_sd": float(v_norms.std()),
        "sink_key_norm": float(np.linalg.norm(k[0]) / norms.mean()),
        "sink_value_norm": float(np.linalg.norm(v[0]) / v_norms.mean()),
        "cos_sink_mean": cosine(k[0], mean), "cos_query_mean": cosine(q_all.mean(axis=0), mean),
        "cos_query_sink": cosine(q_all.mean(axis=0), k[0]),
        "cos_rms": float(np.sqrt(np.mean((products / np.maximum(lengths, 1e-30))**2))),
        "norm_logit_correlation": float(np.corrcoef(norms, (q_all @ rest.T).mean(axis=0))[0, 1]),
        "mahalanobis_ratio": mahalanobis(q_all) / mahalanobis(rest),
        "keys": spectrum_summary(spectrum(centred)),
        "queries": spectrum_summary(spectrum(q_all - q_all.mean(axis=0))),
        "query_rank1": float(spectrum(q_all)[0] / (q_all**2).sum(axis=1).mean()),
        "alignment": alignment(q_all, centred),
        "explained_by_blocks": explained_by_blocks(v[SINKS:]),
        "code_alignment": sketches.build("1b", rest, v[SINKS:]).alignment(),
    }
    if k_pre is not None:
        before = k_pre[SINKS:].astype(np.float64)
        stats["keys_pre"] = spectrum_summary(spectrum(before - before.mean(axis=0)))
    return stats


# --- Attention -----------------------------------------------------------------------------------

def softmax(logits):
    w = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return w / w.sum(axis=-1, keepdims=True)


def top_set(weights, count):
    return set(np.argpartition(-weights, count - 1)[:count].tolist())


def token_masses(p, tokens, step):
    """Of one query, p [t + 1], over far keys: mass behind earlier copies of its token (induction)
    and on copies of the next one, and which share of the far keys these are. NaN: none such."""
    far = np.arange(SINKS, step + 1 - LOCAL)
    found = {}
    if tokens[step] < 0:
        return {name: np.nan for name in ("induction", "induction_chance", "copy", "copy_chance")}
    marks = {"induction": tokens[far - 1] == tokens[step]}
    marks["copy"] = (tokens[far] == tokens[step + 1] if step + 1 < len(tokens)
                     else np.zeros(len(far), bool))
    for name, mark in marks.items():
        some = mark.any()
        found[name] = p[far[mark]].sum() if some else np.nan
        found[name + "_chance"] = mark.mean() if some else np.nan
    return found


def head_statistics(logits, p, v, tokens, step):
    """Of one query of one head, with logits and probabilities over the tokens 0..step."""
    far = p[SINKS:step + 1 - LOCAL]
    ordered = np.sort(p)[::-1]
    cumulative = np.cumsum(ordered)
    far_cumulative = np.cumsum(np.sort(far)[::-1])
    far_mass = far_cumulative[-1]
    o = p @ v
    square = max(p @ (v**2).sum(axis=1) - o @ o, 0.0)
    stats = {"spread": logits[SINKS:step + 1 - LOCAL].std(), "sink": p[:SINKS].sum(),
             "local": p[step + 1 - LOCAL:].sum(), "far": far_mass, "previous": p[step - 1],
             "effective": 1.0 / (p**2).sum(), "far_effective": far_mass**2 / (far**2).sum(),
             "diversity": np.sqrt(square) / max(np.linalg.norm(o), 1e-30),
             "few": far_cumulative[FEW - 1]}
    for fraction in TOP_FRACTIONS:
        name = f"{100 * fraction:g}"
        stats["top" + name] = cumulative[max(1, round(fraction * len(p))) - 1]
        stats["far_top" + name] = (far_cumulative[max(1, round(fraction * len(far))) - 1]
                                   / far_mass)
    stats.update(token_masses(p, tokens, step))
    curve = cumulative[np.maximum(1, np.rint(CURVE * len(p)).astype(int)) - 1]
    return stats, curve


def overlap_statistics(weights, before):
    """Of the G heads of one step, far keys only: weights [G, n]; before: those of the step before.

    heads: mean pairwise share of common keys among the top 1 %; unique: keys in any top set over
    the sum of their sizes. steps, steps100: the same head's set one step earlier. kept: the mass
    which that older set has now. shared: sum min(r, r') of the normalised weights.
    """
    count = max(1, round(0.01 * weights.shape[1]))
    sets = [top_set(row, count) for row in weights]
    heads = len(sets)
    pairs = [len(sets[i] & sets[j]) / count for i in range(heads) for j in range(i)]
    found = {"heads": np.mean(pairs) if pairs else np.nan,
             "unique": len(set.union(*sets)) / (heads * count)}
    if before is not None:
        old = [top_set(row, count) for row in before]
        hundred = min(100, before.shape[1])
        now = weights[:, :before.shape[1]]
        found["steps"] = np.mean([len(a & b) / count for a, b in zip(sets, old)])
        found["steps100"] = np.mean([len(top_set(a, hundred) & top_set(b, hundred)) / hundred
                                     for a, b in zip(weights, before)])
        found["kept"] = np.mean([row[list(ids)].sum() / row.sum() for row, ids in zip(now, old)])
        found["shared"] = np.mean([np.minimum(a / a.sum(), b / b.sum()).sum()
                                   for a, b in zip(now, before)])
    return found


def mean_of(rows):
    """Mean of each entry of a list of dicts, NaN left out; NaN where nothing remains."""
    found = {}
    for name in sorted({name for row in rows for name in row}):
        values = np.array([row.get(name, np.nan) for row in rows], float)
        values = values[np.isfinite(values)]
        found[name] = float(values.mean()) if len(values) else float("nan")
    return found


def choose_steps(steps, n_queries, predicting):
    """Indices of recorded steps with enough context: n_queries spread evenly, neighbours kept
    together, and all that predict a token of an answer."""
    usable = np.flatnonzero(steps >= max(steps[-1] // 4, 4 * (SINKS + LOCAL)))
    if not len(usable):
        raise ValueError("no recorded query has enough context")
    if len(usable) <= n_queries:
        return usable
    firsts = usable[np.linspace(0, len(usable) - 2, n_queries // 2).astype(int)]
    wanted = usable[np.isin(steps[usable], list(predicting))]
    return np.unique(np.concatenate([firsts, firsts + 1, wanted]))


def attention_statistics(q, k, v, scale, steps, tokens, answers, n_queries):
    """([G] dicts of means, mean mass curves [G, len(CURVE)], overlaps of the group)."""
    k, v = k.astype(np.float64), v.astype(np.float64)
    heads = q.shape[1]
    rows, curves, overlaps = [[] for _ in range(heads)], [[] for _ in range(heads)], []
    before, before_step = None, -2
    predicting = {step for begin, end in answers for step in range(begin - 1, end - 1)}
    for index in choose_steps(steps, n_queries, predicting):
        step = int(steps[index])
        logits = scale * (q[index].astype(np.float64) @ k[:step + 1].T)
        p = softmax(logits)
        for head in range(heads):
            stats, curve = head_statistics(logits[head], p[head], v[:step + 1], tokens, step)
            stats["sharp"] = float(stats["few"] >= 0.5)
            stats["sharp_answer"] = stats["sharp"] if step in predicting else np.nan
            rows[head].append(stats)
            curves[head].append(curve)
        far = p[:, SINKS:step + 1 - LOCAL]
        overlaps.append(overlap_statistics(far, before if step == before_step + 1 else None))
        before, before_step = far, step
    return ([mean_of(r) for r in rows], np.mean(curves, axis=1), mean_of(overlaps))


# --- Classes -------------------------------------------------------------------------------------

def class_scores(stats):
    """{class: (score, limit, whether the other conditions hold)} of one query head."""
    induction = stats.get("induction", np.nan)
    chance = stats.get("induction_chance", np.nan)
    sharp = stats.get("sharp_answer", np.nan)
    sharp = stats["sharp"] if np.isnan(sharp) else sharp
    return {"sharp retrieval": (sharp, SHARP_LIMIT, True),
            "induction": (induction, INDUCTION_LIMIT,
                          induction >= INDUCTION_LIFT * chance),
            "local": (stats["local"], LOCAL_LIMIT, True),
            "flat aggregation": (1.0 - stats["far_top20"], 1.0 - FLAT_TOP20,
                                 stats["far"] >= FLAT_FAR),
            "sink-dominated": (stats["sink"], SINK_LIMIT, True)}


def classify(stats):
    """Names of the classes to which a head belongs; a head may belong to several, or to none."""
    return [name for name, (score, limit, other) in class_scores(stats).items()
            if other and score >= limit]


def average_heads(reports):
    """{(layer, kv_head, q_head): statistics averaged over the records}."""
    found = collections.defaultdict(list)
    for report in reports:
        for group in report["groups"]:
            for head in group["heads"]:
                found[group["layer"], group["kv_head"], head["q_head"]].append(head["stats"])
    return {place: mean_of(rows) for place, rows in found.items()}


def name_classes(heads):
    """{class: {"members": [...], "best": place, "score", "limit"}}.

    Where no head qualifies, best is the nearest."""
    found = {}
    for name in class_scores(next(iter(heads.values()))):
        scored = []
        for place, stats in heads.items():
            score, limit, other = class_scores(stats)[name]
            if np.isfinite(score):
                scored.append((other and score >= limit, score, place, limit))
        if not scored:
            found[name] = {"members": [], "best": None, "score": None, "limit": None}
            continue
        best = max(scored)
        found[name] = {"members": sorted(s[2] for s in scored if s[0]), "best": best[2],
                       "score": float(best[1]), "limit": best[3]}
    return found


# --- Over prompts --------------------------------------------------------------------------------

def across_prompts(means, sinks):
    """Mean pairwise cosines of a kv head's mean key and of its first key over the records."""
    def pairwise(vectors):
        return [cosine(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i)]
    return {f"{place[0]}.{place[1]}": {"mean_key": float(np.mean(pairwise(means[place]))),
                                       "sink_key": float(np.mean(pairwise(sinks[place])))}
            for place in means if len(means[place]) > 1}


def report_record(path, n_queries, out, means, sinks):
    with kvrec.Reader(path) as record:
        name = os.path.splitext(os.path.basename(path))[0]
        steps, tokens = record.array("query_steps"), record.array("tokens")
        answers = record.meta["prompt"].get("answers", [])
        groups, curves, spectra = [], [], []
        for entry in record.groups:
            q, k, v = (record.array(entry[key]) for key in ("q", "k", "v"))
            k_pre = record.array(entry["k_pre"]) if "k_pre" in entry else None
            heads, curve, overlaps = attention_statistics(
                q, k, v, record.meta["softmax_scale"], steps, tokens, answers, n_queries)
            place = (entry["layer"], entry["kv_head"])
            means[place].append(k[SINKS:].mean(axis=0))
            sinks[place].append(k[0])
            groups.append({"layer": place[0], "kv_head": place[1], "overlaps": overlaps,
                           "keys": key_statistics(q, k, v, k_pre),
                           "heads": [{"q_head": head, "stats": stats, "classes": classify(stats)}
                                     for head, stats in zip(entry["q_heads"], heads)]})
            curves += [(f"{place[0]}.{place[1]}.{head}", list(zip(CURVE, row)))
                       for head, row in zip(entry["q_heads"], curve)]
            values = spectrum(k[SINKS:].astype(np.float64) - means[place][-1])
            spectra.append((f"{place[0]}.{place[1]}",
                            list(zip(range(1, len(values) + 1), values / values.sum()))))
        svg.line_plot(os.path.join(out, f"mass_{name}.svg"), f"Attention mass: {name}",
                      "share of the keys, largest first", "mass", curves[:24], log_x=True)
        svg.line_plot(os.path.join(out, f"spectra_{name}.svg"), f"Spectra of the keys: {name}",
                      "axis", "share of the variance", spectra[:24], log_x=True, log_y=True)
        return {"record": name, "n_tokens": len(tokens), "prompt": record.meta["prompt"],
                "groups": groups}


def table(title, columns, rows):
    print(f"\n{title}")
    print(f"{'head':>10s}" + "".join(f" {name[:9]:>9s}" for name in columns))
    for place, values, note in rows:
        print(f"{place:>10s}" + "".join(f"{value:10.3g}" for value in values)
              + (f"  {note}" if note else ""))


def pre_rank(keys):
    return keys["keys_pre"]["rank90"] if "keys_pre" in keys else float("nan")


# Columns of docs/geometry.md, in its order: of a kv head, and of a query head.
KEY_COLUMNS = {
    "|mean|": lambda keys: keys["mean_norm"], "rms": lambda keys: keys["centred_rms"],
    "|k|": lambda keys: keys["key_norm"], "|k0|/|k|": lambda keys: keys["sink_key_norm"],
    "|v0|/|v|": lambda keys: keys["sink_value_norm"],
    "cos k0,mu": lambda keys: keys["cos_sink_mean"],
    "cos q,mu": lambda keys: keys["cos_query_mean"], "cos rms": lambda keys: keys["cos_rms"],
    "mahal.": lambda keys: keys["mahalanobis_ratio"],
    "|k|~logit": lambda keys: keys["norm_logit_correlation"]}
SPECTRUM_COLUMNS = {
    "A keys": lambda keys: keys["keys"]["power"], "B query": lambda keys: keys["queries"]["power"],
    "rank90": lambda keys: keys["keys"]["rank90"], "pre": pre_rank,
    "q rank1": lambda keys: keys["query_rank1"], "pca8": lambda keys: keys["alignment"]["pca8"],
    "bal8": lambda keys: keys["alignment"]["balanced8"],
    "excess": lambda keys: keys["alignment"]["excess"],
    "1bit cos": lambda keys: keys["code_alignment"],
    "V blk32": lambda keys: keys["explained_by_blocks"]["32"]}
ATTENTION_COLUMNS = ("spread", "sink", "local", "far", "top1", "top5", "top20", "effective",
                     "far_effective", "diversity", "sharp", "induction", "copy")
OVERLAP_COLUMNS = ("heads", "unique", "steps", "steps100", "kept", "shared")
CLASS_COLUMNS = ("spread", "sink", "local", "far", "top1", "top5", "effective", "far_effective",
                 "diversity", "rank90", "|v0|/|v|")


def print_record(report):
    name = f"{report['record']} ({report['n_tokens']} tokens)"

    def places(columns):
        return [(f"{group['layer']}.{group['kv_head']}",
                 [column(group["keys"]) for column in columns.values()], "")
                for group in report["groups"]]

    table(f"{name}: keys", KEY_COLUMNS, places(KEY_COLUMNS))
    table(f"{name}: spectra", SPECTRUM_COLUMNS, places(SPECTRUM_COLUMNS))
    table(f"{name}: attention of the query heads", ATTENTION_COLUMNS,
          [(f"{group['layer']}.{group['kv_head']}.{head['q_head']}",
            [head["stats"].get(column, float("nan")) for column in ATTENTION_COLUMNS],
            ", ".join(head["classes"])) for group in report["groups"] for head in group["heads"]])
    table(f"{name}: overlaps", OVERLAP_COLUMNS,
          [(f"{group['layer']}.{group['kv_head']}",
            [group["overlaps"].get(column, float("nan")) for column in OVERLAP_COLUMNS], "")
           for group in report["groups"]])


def every_column(reports):
    """{(layer, kv_head, q_head): every column}, means over the records; what belongs to a kv head
    stands at each of its query heads."""
    found = collections.defaultdict(list)
    for report in reports:
        for group in report["groups"]:
            columns = {name: of(group["keys"])
                       for name, of in (KEY_COLUMNS | SPECTRUM_COLUMNS).items()}
            columns |= {name: group["overlaps"].get(name, float("nan"))
                        for name in OVERLAP_COLUMNS}
            for head in group["heads"]:
                found[group["layer"], group["kv_head"], head["q_head"]].append(
                    columns | {name: head["stats"].get(name, float("nan"))
                               for name in ATTENTION_COLUMNS})
    return {place: mean_of(rows) for place, rows in found.items()}


def print_spread(heads):
    """How the columns vary over the heads."""
    shares = (0, 10, 50, 90, 100)
    print(f"\nover {len(heads)} heads (means over the records)\n{'column':>14s}"
          + "".join(f"{name:>10s}" for name in ("least", "10 %", "median", "90 %", "most")))
    for name in (*KEY_COLUMNS, *SPECTRUM_COLUMNS, *ATTENTION_COLUMNS, *OVERLAP_COLUMNS):
        values = np.array([columns[name] for columns in heads.values()])
        values = values[np.isfinite(values)]
        if len(values):
            print(f"{name:>14s}" + "".join(f"{x:10.3g}" for x in np.percentile(values, shares)))


def print_by_class(classes, heads):
    """Medians of the heads of each class, and of those of none."""
    members = {name: entry["members"] for name, entry in classes.items()}
    named = {place for places in members.values() for place in places}
    members["none"] = [place for place in heads if place not in named]
    print(f"\nmedians by class\n{'class':>18s}{'heads':>6s}"
          + "".join(f" {name[:9]:>9s}" for name in CLASS_COLUMNS))
    for name, places in members.items():
        if places:
            medians = [np.median([heads[place][column] for place in places])
                       for column in CLASS_COLUMNS]
            print(f"{name:>18s}{len(places):6d}" + "".join(f"{x:10.3g}" for x in medians))


def write_lines(path, reports, classes, heads):
    """A line of JSON for each query head: its classes and every column, to four digits."""
    names = [report["record"] for report in reports]
    with open(path, "w", encoding="utf-8") as file:
        for place, columns in sorted(heads.items()):
            line = {"eval": "geometry", "records": names, "layer": place[0], "kv_head": place[1],
                    "q_head": place[2], "classes": [name for name, entry in classes.items()
                                                    if place in entry["members"]]}
            line |= {name: float(f"{value:.4g}") for name, value in columns.items()}
            file.write(json.dumps(plain(line)) + "\n")


def print_classes(classes):
    print("\nclasses over all records (docs/geometry.md has the criteria)")
    for name, entry in classes.items():
        if entry["best"] is None:
            print(f"  {name}: the records have no tokens to tell")
            continue
        best = ".".join(map(str, entry["best"]))
        word = f"{len(entry['members'])} heads, best" if entry["members"] else "none; nearest"
        print(f"  {name}: {word} {best} with {entry['score']:.3g} (limit {entry['limit']:.3g})")


def plain(value):
    """For JSON: tuples as text, NaN as null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", default="build/house/geometry")
    parser.add_argument("--queries", type=int, default=96)
    parser.add_argument("--lines", help="a line of JSON for each query head goes to this file")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    means, sinks = collections.defaultdict(list), collections.defaultdict(list)
    reports = [report_record(path, options.queries, options.out, means, sinks)
               for path in options.files]
    for report in reports:
        print_record(report)
    prompts = across_prompts(means, sinks)
    if prompts:
        print("\ncosines over prompts: mean key, first key")
        for place, entry in prompts.items():
            print(f"  {place}: {entry['mean_key']:.3f} {entry['sink_key']:.3f}")
    classes = name_classes(average_heads(reports))
    print_classes(classes)
    heads = every_column(reports)
    print_by_class(classes, heads)
    print_spread(heads)
    if options.lines:
        write_lines(options.lines, reports, classes, heads)
    with open(os.path.join(options.out, "geometry.json"), "w", encoding="utf-8") as file:
        json.dump(plain({"records": reports, "across_prompts": prompts, "classes": classes}), file,
                  indent=1, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main()
