# SPDX-License-Identifier: Apache-2.0
"""What published systems cost in quality, at equal bytes: ./dev bench policies --quality.

The house model answers questions about facts in a text, with each system and with exact attention
over float32 rows, of the same prompts; a real model predicts the ends of texts. Prints tables and
appends JSON lines {"bench":"policies","case":"quality","system":...}. --plot draws such lines."""

import argparse
import collections
import json
import sys
from pathlib import Path

import torch

import kvm
from kvm.eval import _house, _progress, _real, _smollm, _tasks, _texts

SHARES = (0.2, 0.3, 0.5)  # of the bytes of bfloat16 rows
CLAIMED = {("mikv", 0.3), ("mikv3", 0.3), ("gear2", None), ("gear3", None)}
MIKV_BITS = {"mikv": 2, "mikv3": 3, "mikv4": 4}


def mikv_share(bits, share, config, n_tokens):
    """The share of tokens in full at which all bytes are `share`."""
    row = 4 * config.head_dim  # K and V in bfloat16
    # 32 query rows in fp32, which balance keys.
    share -= 32 * config.num_attention_heads / config.num_key_value_heads / n_tokens
    demoted = (bits + 0.75 + bits + 0.5) / 32
    per_full = 1 + 0.5 * 16 / row  # half of them heavy, with 16 bytes of where they were
    mass = 4 / row
    return (share - mass - demoted) / (per_full - demoted)


def systems(config, n_tokens):
    """(name, share, words of the preset); share: of the bytes, None where the codec says them."""
    for share in SHARES:
        for name in ("streaming_llm", "h2o", "d2o"):
            yield name, share, f"{name}:share={share}"
        for name, bits in MIKV_BITS.items():
            own = mikv_share(bits, share, config, n_tokens)
            if own > 0.03:
                yield name, share, f"{name}:share={own:.3f}"
        yield "alisa", None, f"alisa:share={share}"
    for name in ("duo_attention", "razor_attention"):
        yield name, None, name
    for name in ("kivi", "kivi3", "kivi4", "gear2", "gear3", "gear4"):
        yield name, None, name
    for part in (8, 4, 2):
        n_pairs = max(1, config.num_hidden_layers // part)
        yield "minicache", None, f"minicache:n_pairs={n_pairs}"


def chosen(options, model, n_tokens, head_file):
    for name, share, words in systems(model.config, n_tokens):
        if (options.only and name not in options.only) or name not in kvm.preset_names():
            continue
        if name in ("duo_attention", "razor_attention"):
            if head_file is None:
                continue
            yield name, share, _real.of_presets([words], head_file)[0]
        else:
            yield name, share, _real.of_presets([words])[0]


def line(name, share, model, task, row, **more):
    return {"bench": "policies", "case": "quality", "system": name, "share": share,
            "setting": row.setting, "model": model, "task": task, "tokens": row.tokens,
            "stored_fraction": row.stored_fraction, "read_fraction": row.bytes_fraction, **more}


def house_lines(options, client):
    house = _house.House(options.house)
    wanted = list(chosen(options, house.model, options.tokens, options.house_heads))
    for n_prompts in sorted({options.prompts, options.claimed_prompts}):
        mine = [(name, share, setting) for name, share, setting in wanted
                if n_prompts == (options.claimed_prompts if (name, share) in CLAIMED
                                 else options.prompts)]
        if not mine:
            continue
        settings = [setting for _, _, setting in mine]
        with _progress.bar(n_prompts, "prompt") as bar:
            rows = list(_tasks.evaluate(house, client, _house.SINGLE_FACTS, options.tokens,
                                        n_prompts, 8, settings, bar.update))
        for (name, share, _), row in zip(mine, rows, strict=True):
            yield line(name, share, "house", "needle", row, prompts=row.prompts,
                       accuracy=row.accuracy, dense_accuracy=row.dense,
                       difference_low=row.difference_low, difference_high=row.difference_high,
                       lost=row.lost, won=row.won, kl=None)


def real_lines(options, client):
    model, tokenizer = _smollm.load(options.model)
    wanted = list(chosen(options, model, options.real_tokens, options.real_heads))
    exact = [setting for setting in _real.SETTINGS if setting.mode == "exact"]
    settings = exact + [setting for _, _, setting in wanted]
    names = [(setting.setting, None) for setting in exact]
    names += [(name, share) for name, share, _ in wanted]
    for text in options.text or ("reference-a", "typing.py"):
        ids = [model.config.bos_token_id, *tokenizer.encode(_texts.read(text)).ids]
        ids = ids[:options.real_tokens]
        n_bytes = len(tokenizer.decode(ids[-options.scored:]).encode())
        rows = _real.evaluate(model, client, text, ids, n_bytes, options.scored, settings,
                              lambda words: print(f"... {words}", file=sys.stderr))
        found = {(row.mode, row.setting): row for row in rows}
        for (name, share), setting in zip(names, settings, strict=True):
            row = found[setting.mode, setting.setting]
            yield line(name, share, "smollm2-135m", text, row, scored=row.scored, accuracy=row.top1,
                       dense_accuracy=1.0, kl=row.kl)


def show(found):
    share = "" if found["share"] is None else f"{found['share']}"
    kl = "" if found["kl"] is None else f"{found['kl']:.5f}"
    interval = ("" if "difference_low" not in found else
                f"{100 * found['difference_low']:7.2f} {100 * found['difference_high']:6.2f}")
    print(f"{found['model']:12} {found['task']:12} {found['system']:16} {share:>5} "
          f"{100 * found['stored_fraction']:6.1f}% {100 * found['read_fraction']:6.1f}% "
          f"{100 * found['accuracy']:6.1f}% {100 * found['dense_accuracy']:6.1f}% "
          f"{interval:>14} {kl:>9}", flush=True)


def plot(files, out):
    """Bytes that are stored against what is lost: a panel for each model."""
    from kvm.eval import _plot

    points = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in files:
        for text in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            if row.get("case") != "quality":
                continue
            at = points[row["model"]][row["system"], row["setting"]]
            at.append((100 * row["stored_fraction"],
                       100 * row["accuracy"] if row["kl"] is None else row["kl"]))
    figure, axes = _plot.pyplot.subplots(1, 2, figsize=(10.6, 4.6), layout="constrained")
    panels = (("house", "facts found, %", "linear"),
              ("smollm2-135m", "KL to exact, nats a token", "log"))
    curves = sorted({system for of_model in points.values() for system, _ in of_model})
    for axis, (model, label, scale) in zip(axes, panels, strict=True):
        for number, curve in enumerate(curves):
            mine = sorted((sum(x for x, _ in values) / len(values),
                           sum(y for _, y in values) / len(values))
                          for (system, _), values in points[model].items() if system == curve)
            if mine:
                marker = _plot.MARKERS[number % len(_plot.MARKERS)]
                axis.plot(*zip(*mine), marker=marker, markersize=6, linewidth=0.8, label=curve,
                          color=f"C{number % 10}")
        axis.set(title=model, xlabel="bytes stored, % of bfloat16 rows", ylabel=label,
                 yscale=scale)
        axis.grid(True, linewidth=0.3)
    handles = {name: handle for axis in axes
               for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    _plot.save(figure, out)


def main():
    parser = argparse.ArgumentParser(prog="./dev bench policies --quality", description=__doc__)
    parser.add_argument("--json", type=Path, help="append the lines to this file")
    parser.add_argument("--only", action="append", metavar="SYSTEM", help="these systems [all]")
    parser.add_argument("--models", default="house,smollm2", help="[%(default)s]")
    parser.add_argument("--prompts", type=int, default=200, help="of the house model [%(default)s]")
    parser.add_argument("--claimed-prompts", type=int, default=1000,
                        help="for systems that shall lose less than a point [%(default)s]")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt [%(default)s]")
    parser.add_argument("--real-tokens", type=int, default=4096, help="of a text [%(default)s]")
    parser.add_argument("--scored", type=int, default=128, help="at its end [%(default)s]")
    parser.add_argument("--text", action="append", help="of the real model [reference-a, "
                        "typing.py]")
    parser.add_argument("--house", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="the real model; without, it is left out")
    parser.add_argument("--house-heads", type=Path, help="a head file (kvm-eval heads)")
    parser.add_argument("--real-heads", type=Path, help="likewise")
    parser.add_argument("--threads", type=int, default=0, help="[one per core]")
    parser.add_argument("--plot", type=Path, help="draw the lines of --json, and measure nothing")
    options = parser.parse_args()
    if options.plot is not None:
        plot([options.json], options.plot)
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    options.only = options.only and [name for part in options.only for name in part.split(",")]
    print(f"{'model':12} {'task':12} {'system':16} {'share':>5} {'stored':>7} {'read':>7} "
          f"{'right':>7} {'dense':>7} {'95 %, points':>14} {'KL':>9}")
    with kvm.open_embedded(n_threads=options.threads) as client:
        kinds = [house_lines] if "house" in options.models else []
        if "smollm2" in options.models and options.model is not None:
            kinds.append(real_lines)
        for lines in kinds:
            for found in lines(options, client):
                show(found)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
