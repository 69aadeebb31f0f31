# SPDX-License-Identifier: Apache-2.0
"""Runs the estimators over recorded tensors: error against rows and bytes, and whether bars hold.

    python3 measure.py FILE.kvrec... [--out build/house/measure] [--queries 16] [--draws 3]

prints a table for each record and one line for each query head, and writes estimators.json and
error_<record>.svg into --out. All draws are seeded: a second run prints the same figures.

Each query attends to the tokens up to its own; the first SINKS and the last LOCAL of them are
always read and never sampled. A budget f means f * (number of the other keys) rows for each query
head. Relative error: |o_hat - o| / |o| for each query head, in fp64 over the stored values. Bytes:
the codes of all keys that may be sampled, ids read from hash tables, and the rows that memory sees,
each counted once for the group; K and V of a row are 2 * 2 * d bytes.

Methods: `top-k` by the true logits, `top-k 8i8+1b` by a sketch, `uniform` (half top-k by the
sketch, half uniform), `lsh K,L` (MagicPIG), `ht CODE` (sketch-proposed Horvitz-Thompson, each head
its own rows, lse with the scalar control), `ht true w` (the same, proposed by the true weights:
what no code can beat), `ht group` (all heads use all rows), `ht-diff` (difference form with block
means of V).

`of |v|`: the error over the root mean square norm of the values, which does not explode where they
cancel in o. Last columns of a table, in %: how often the error is within 1.25 plug-in sigma, how
often within the bar that a caller would be told, how often the lse is within 1.96 of its sigma
(nominal: 95).
"""
import argparse
import collections
import json
import os

import numpy as np

import estimators
import kvrec
import sketches
import svg

SINKS, LOCAL = 4, 64
FRACTIONS = (0.0025, 0.005, 0.01, 0.02, 0.05, 0.1)
LSH_SETTINGS = ((10, 150), (8, 75))
KILL_FRACTION, KILL_ERROR, KILL_NOISE = 0.01, 0.06, 0.7
MAIN = "ht 8i8+1b"


class Group:
    """The tensors of one kv head, and every index over its keys."""

    def __init__(self, record, group):
        self.layer, self.kv_head, self.q_heads = (group[key] for key in
                                                  ("layer", "kv_head", "q_heads"))
        self.q, self.k, self.v = (record.array(group[key]) for key in ("q", "k", "v"))
        self.scale = record.meta["softmax_scale"]
        self.sketches = {kind: sketches.build(kind, self.k, self.v) for kind in sketches.KINDS}
        self.blocks = estimators.BlockMeans.build(self.v)
        self.center = sketches.round_bf16(self.k[SINKS:].mean(axis=0))
        self.lsh = []
        for bits, tables in LSH_SETTINGS:
            lsh = estimators.Lsh(bits, tables, self.k.shape[1], seed=1)
            self.lsh.append((f"lsh {bits},{tables}", lsh, lsh.hash(self.k - self.center)))

    def problem(self, query, step):
        in_exact = np.zeros(step + 1, bool)
        in_exact[:SINKS] = True
        in_exact[max(0, step + 1 - LOCAL):] = True
        return estimators.Problem(self.q[query], self.k[:step + 1], self.v[:step + 1], self.scale,
                                  in_exact)

    def seed(self, step, draw):
        return ((self.layer * 1024 + self.kv_head) * 2**24 + step) * 1024 + draw


class Cell:
    """What one method did at one budget, over queries, draws and heads."""

    def __init__(self):
        self.values = collections.defaultdict(list)   # name -> list of [G]

    def add(self, estimate, truth, problem, index_bytes, fixed_bytes=0.0):
        heads = len(truth.lse)
        row_bytes = 4 * problem.k.shape[1]
        error = np.linalg.norm(estimate.o - truth.o, axis=1)
        norm = np.linalg.norm(truth.o, axis=1)
        visible = len(problem.k)
        n_fixed = visible - len(problem.rest)
        size = (index_bytes * len(problem.rest) + fixed_bytes
                + row_bytes * (estimate.unique + n_fixed))
        new = {"error": error / norm, "lse_error": np.abs(estimate.lse - truth.lse),
               "absolute": error / problem.value_rms,
               "rows": estimate.rows / len(problem.rest),
               "unique": np.full(heads, estimate.unique / len(problem.rest)),
               "bytes": np.full(heads, size / visible),
               "bytes_share": np.full(heads, size / (visible * row_bytes))}
        if np.isfinite(estimate.bar).all():
            with np.errstate(divide="ignore", invalid="ignore"):
                z = np.abs(estimate.lse - truth.lse) / estimate.sigma_lse
            floor = estimators.BAR_FLOOR * norm
            plain = np.maximum(estimators.KAPPA * estimate.sigma_o, floor)
            new.update(covered_plain=error <= plain, covered=error <= estimate.bar,
                       lse_z=np.where(estimate.sigma_lse > 0, z, 0.0), bar=estimate.bar / norm)
        for name, value in new.items():
            self.values[name].append(np.asarray(value, float))

    def head_mean(self, name):
        return np.mean(self.values[name], axis=0)

    def summary(self):
        flat = {name: np.concatenate(values) for name, values in self.values.items()}
        row = {name: float(flat[name].mean()) for name in
               ("error", "absolute", "lse_error", "rows", "unique", "bytes", "bytes_share")}
        for percent in (50, 95, 99):
            row[f"error_p{percent}"] = float(np.percentile(flat["error"], percent))
        if "bar" in flat:
            row.update({name: float(flat[name].mean()) for name in ("covered_plain", "covered")})
            row["bar_median"] = float(np.median(flat["bar"]))
            row["lse_within_1.96"] = float((flat["lse_z"] < 1.96).mean())
        row["trials"] = len(flat["error"])
        for name in ("error", "absolute"):
            row[f"{name}_by_head"] = [float(e) for e in self.head_mean(name)]
        return row


def run_sampled(cells, group, problem, truth, step, fraction, draws, scores):
    rest, wanted = problem.rest, fraction * len(problem.rest)
    plans = [(f"ht {kind}", kind, False, "scalar") for kind in sketches.KINDS]
    plans += [("ht true w", None, False, "scalar"), ("ht group", "8i8+1b", True, "scalar"),
              ("ht-diff", "8i8+1b", False, "block")]
    for name, kind, shared, control in plans:
        sketch = group.sketches[kind or "8i8+1b"]
        guess = scores[kind] if kind else problem.logits
        p = estimators.inclusion(guess[:, rest], sketch.value_norm[rest], wanted)
        if shared:
            p = np.broadcast_to(p.max(axis=0), p.shape)
        index_bytes = sketch.bytes_per_key if kind else 0.0
        if control == "block":
            index_bytes += group.blocks.bytes_per_key()
        for draw in range(draws):
            estimate = estimators.draw(problem, guess, p, group.seed(step, draw), control,
                                       group.blocks)
            cells[name, fraction].add(estimate, truth, problem, index_bytes)


def run_step(cells, noise, group, query, step, fractions, draws):
    problem = group.problem(query, step)
    truth = estimators.exact(problem)
    rest = problem.rest
    scores = {kind: problem.scale * sketch.scores(problem.q)[:, :step + 1]
              for kind, sketch in group.sketches.items()}
    mass = np.exp(problem.logits[:, rest] - truth.lse[:, None])
    for kind, guess in scores.items():
        residual = problem.logits[:, rest] - guess[:, rest]
        noise[kind, "plain"].append(residual.std(axis=1))
        mean = (mass * residual).sum(axis=1) / mass.sum(axis=1)
        noise[kind, "mass"].append(np.sqrt((mass * (residual - mean[:, None])**2).sum(axis=1)
                                           / mass.sum(axis=1)))
    for name, lsh, codes in group.lsh:
        estimate, ids_read = estimators.lsh_sampled(problem, lsh, group.center, codes[:step + 1])
        cells[name, 0.0].add(estimate, truth, problem, 0.0, fixed_bytes=4.0 * ids_read)
    code_bytes = group.sketches["8i8+1b"].bytes_per_key
    for fraction in fractions:
        count = max(2, round(fraction * len(rest)))
        cells["top-k", fraction].add(estimators.top_k(problem, count), truth, problem, 0.0)
        cells["top-k 8i8+1b", fraction].add(
            estimators.top_k(problem, count, scores["8i8+1b"]), truth, problem, code_bytes)
        for draw in range(draws):
            cells["uniform", fraction].add(
                estimators.uniform_residual(problem, count, group.seed(step, draw),
                                            scores["8i8+1b"]), truth, problem, code_bytes)
        run_sampled(cells, group, problem, truth, step, fraction, draws, scores)


def choose_steps(steps, n_queries):
    """Indices of at most n_queries recorded steps, evenly among those past half of the tokens."""
    late = np.flatnonzero(steps >= steps[-1] // 2)
    late = late[steps[late] > 4 * (SINKS + LOCAL)]
    if not len(late):
        raise ValueError("no recorded query has enough context")
    return late[np.unique(np.linspace(0, len(late) - 1, n_queries).astype(int))]


def measure_group(record, entry, fractions, n_queries, draws):
    group = Group(record, entry)
    cells, noise = collections.defaultdict(Cell), collections.defaultdict(list)
    steps = record.array("query_steps")
    for query in choose_steps(steps, n_queries):
        run_step(cells, noise, group, query, int(steps[query]), fractions, draws)
    return {"layer": group.layer, "kv_head": group.kv_head, "q_heads": group.q_heads,
            "notes": entry.get("notes", {}),
            "noise": {f"{kind} {how}": [float(x) for x in np.mean(values, axis=0)]
                      for (kind, how), values in noise.items()},
            "results": [dict(method=method, fraction=fraction, **cell.summary())
                        for (method, fraction), cell in cells.items()]}


# --- What it says --------------------------------------------------------------------------------

def find(group, method, fraction):
    for row in group["results"]:
        if row["method"] == method and row["fraction"] == fraction:
            return row
    raise KeyError((method, fraction))


def findings(group):
    """One entry for each query head: is it within the limits, and what would repair it?"""
    entries = []
    fractions = sorted({row["fraction"] for row in group["results"] if row["fraction"]})
    for index, head in enumerate(group["q_heads"]):
        def error(method, fraction=KILL_FRACTION):
            return find(group, method, fraction)["error_by_head"][index]

        entry = {"layer": group["layer"], "kv_head": group["kv_head"], "q_head": head,
                 "error": error(MAIN),
                 "absolute": find(group, MAIN, KILL_FRACTION)["absolute_by_head"][index],
                 "error_diff": error("ht-diff"), "error_2b": error("ht 2b"),
                 "error_true_w": error("ht true w"), "error_top_k": error("top-k"),
                 "error_group": error("ht group"),
                 "noise": {kind: group["noise"][f"{kind} plain"][index] for kind in sketches.KINDS},
                 "noise_by_mass": {kind: group["noise"][f"{kind} mass"][index]
                                   for kind in sketches.KINDS}}
        entry["over_error"] = entry["error"] > KILL_ERROR
        entry["over_noise"] = entry["noise"]["8i8+1b"] > KILL_NOISE
        entry["repair"] = repair(entry, [(f, error(MAIN, f)) for f in fractions])
        entries.append(entry)
    return entries


def repair(entry, errors):
    """In words: the cheapest thing that was measured to bring the head within the limits."""
    if not entry["over_error"] and not entry["over_noise"]:
        return ""
    if entry["error_group"] <= KILL_ERROR and not entry["over_noise"]:
        return "the rows of the whole group"
    if entry["error_2b"] <= KILL_ERROR and entry["noise"]["2b"] <= KILL_NOISE:
        return "2b"
    enough = [f for f, error in errors if error <= KILL_ERROR]
    if entry["over_error"] and enough:
        return f"{100 * enough[0]:g} % of the rows"
    if entry["over_error"]:
        why = "too flat: true weights miss too" if entry["error_true_w"] > KILL_ERROR else "code"
        return f"over {100 * errors[-1][0]:g} % of the rows ({why})"
    return "more bits, for the bar only"


def pooled(groups):
    """Means over the groups of a record, by (method, fraction)."""
    table = collections.defaultdict(list)
    for group in groups:
        for row in group["results"]:
            table[row["method"], row["fraction"]].append(row)
    keys = ("error", "error_p95", "lse_error", "rows", "unique", "bytes", "bytes_share",
            "covered_plain", "covered", "lse_within_1.96")
    return {place: {key: float(np.mean([row[key] for row in rows])) for key in keys
                    if key in rows[0]} for place, rows in table.items()}


def print_tables(name, groups, heads):
    print(f"\n{name}: means over {len(groups)} groups; error %, rows % (all heads %), bytes/token")
    print(f"{'method':14s}{'f %':>6s}{'error':>8s}{'p95':>8s}{'lse':>9s}{'rows':>8s}{'unique':>8s}"
          f"{'bytes':>8s}{'of all':>8s}{'1.25 s':>8s}{'bar':>8s}{'lse z':>8s}")
    for (method, fraction), row in sorted(pooled(groups).items()):
        covered = "".join(f"{100 * row[key]:8.1f}" if key in row else f"{'-':>8s}"
                          for key in ("covered_plain", "covered", "lse_within_1.96"))
        print(f"{method:14s}{100 * fraction:6.2f}{100 * row['error']:8.2f}"
              f"{100 * row['error_p95']:8.2f}{row['lse_error']:9.4f}{100 * row['rows']:8.2f}"
              f"{100 * row['unique']:8.2f}{row['bytes']:8.1f}{100 * row['bytes_share']:7.1f}%"
              + covered)
    print(f"\n{name}: at {100 * KILL_FRACTION:g} % of the rows; limits {100 * KILL_ERROR:g} % and "
          f"{KILL_NOISE} nats (of {MAIN})")
    print(f"{'head':>12s}{MAIN:>10s}{'of |v|':>8s}{'diff':>7s}{'2b':>7s}{'true w':>8s}{'top-k':>7s}"
          f"{'nats 1b':>9s}{'8i8+1b':>8s}{'2b':>6s}  beyond; repair")
    for head in heads:
        beyond = " ".join(word for word, flag in (("error", head["over_error"]),
                                                  ("noise", head["over_noise"])) if flag)
        noise = head["noise"]
        print(f"{head['layer']:4d}.{head['kv_head']}.{head['q_head']:<5d}"
              f"{100 * head['error']:10.2f}{100 * head['absolute']:8.2f}"
              f"{100 * head['error_diff']:7.2f}"
              f"{100 * head['error_2b']:7.2f}{100 * head['error_true_w']:8.2f}"
              f"{100 * head['error_top_k']:7.1f}{noise['1b']:9.2f}{noise['8i8+1b']:8.2f}"
              f"{noise['2b']:6.2f}  " + (f"{beyond}; {head['repair']}" if beyond else "-"))


def plot(path, name, groups):
    lines = collections.defaultdict(list)
    for (method, _), row in sorted(pooled(groups).items()):
        lines[method].append((100 * row["bytes_share"], 100 * row["error"]))
    svg.line_plot(path, f"Error of attention outputs: {name}", "bytes touched, % of exact",
                  "mean relative error, %", sorted(lines.items()), log_x=True, log_y=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", default="build/house/measure")
    parser.add_argument("--queries", type=int, default=16)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)))
    options = parser.parse_args()
    fractions = sorted({float(f) for f in options.fractions.split(",")} | {KILL_FRACTION})
    os.makedirs(options.out, exist_ok=True)
    report, everything = [], []
    for path in options.files:
        with kvrec.Reader(path) as record:
            name = os.path.splitext(os.path.basename(path))[0]
            groups = [measure_group(record, entry, fractions, options.queries, options.draws)
                      for entry in record.groups]
            heads = [head for group in groups for head in findings(group)]
            print_tables(name, groups, heads)
            plot(os.path.join(options.out, f"error_{name}.svg"), name, groups)
            everything += heads
            report.append({"record": name, "prompt": record.meta["prompt"],
                           "n_tokens": record.meta["n_tokens"], "groups": groups,
                           "heads": heads})
    errors = np.array([head["error"] for head in everything])
    noisy = np.mean([head["over_noise"] for head in everything])
    print(f"\nall records: mean error of {MAIN} at 1 % {100 * errors.mean():.2f} % (limit 6 %), "
          f"{int((errors > KILL_ERROR).sum())} of {len(errors)} heads above; sketch noise above "
          f"{KILL_NOISE} nats on {100 * noisy:.0f} % of heads (limit 20 %)")
    with open(os.path.join(options.out, "estimators.json"), "w", encoding="utf-8") as file:
        json.dump({"sinks": SINKS, "local": LOCAL, "kappa": estimators.KAPPA,
                   "records": report}, file, indent=1, sort_keys=True)
        file.write("\n")


if __name__ == "__main__":
    main()
