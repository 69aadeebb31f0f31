# SPDX-License-Identifier: Apache-2.0
"""The house model in PyTorch, and its weight files.

Llama architecture: RMSNorm, rotary embedding (rotate-half layout), grouped-query attention, SwiGLU,
no biases, embedding tied to the output. The weight file is safetensors as examples/llama reads it:
BF16 tensors under the names usual for Llama checkpoints, `tokenizer.merges` I32 [n, 2], and the
configuration as strings in `__metadata__`. README.md documents the shards.

  model, tokenizer = load(path)
  logits = model(tokens, positions, capture)
"""
import contextlib
import dataclasses
import glob
import json
import math
import os
import struct

import torch
import torch.nn.functional as F
from torch import nn

from tokenizer import Tokenizer

SHARD_BYTES = 12 << 20


@dataclasses.dataclass
class Config:
    vocabulary: int = 2048
    d_model: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    d_ff: int = 512
    context: int = 32768
    rope_theta: float = 1e7
    norm_eps: float = 1e-5


PRESETS = {
    "cpu": Config(),
    "gpu": Config(vocabulary=4096, d_model=320, layers=10, heads=8, kv_heads=2, d_ff=608),
}


def inverse_frequencies(config):
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    return config.rope_theta ** -exponent


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Cache:
    """Keys (rotated) and values of all layers; grows by what each forward call appends."""

    def __init__(self, layers):
        self.k = [None] * layers
        self.v = [None] * layers

    @property
    def length(self):
        return 0 if self.k[0] is None else self.k[0].shape[2]

    def append(self, layer, k, v):
        """Returns all keys and values of the layer."""
        if self.k[layer] is not None:
            k = torch.cat((self.k[layer], k), dim=2)
            v = torch.cat((self.v[layer], v), dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        q_width, kv_width = (heads * config.head_dim for heads in (config.heads, config.kv_heads))
        self.q_proj = nn.Linear(config.d_model, q_width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=False)

    def forward(self, x, cos, sin, layer, capture, cache):
        batch, length, _ = x.shape

        def heads(projection):
            return projection(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)

        q_pre, k_pre, v = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        q, k = rotate(q_pre, cos, sin), rotate(k_pre, cos, sin)
        if capture is not None:
            for name, tensor in (("q_pre", q_pre), ("q", q), ("k_pre", k_pre), ("k", k), ("v", v)):
                capture(layer, name, tensor)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        out = attend(q, k, v, past=k.shape[2] - length)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def attend(q, k, v, past):
    """Causal attention; q [batch, heads, n, dim] follows `past` of the k, v [batch, kv, past+n]."""
    batch, heads, length, dim = q.shape
    group = heads // k.shape[1]

    def spread(x):
        return x[:, :, None].expand(-1, -1, group, -1, -1).reshape(batch, heads, -1, dim)

    if past == 0 and q.device.type == "cpu" and torch.is_grad_enabled():
        return attend_in_chunks(q, k, v)
    if past == 0:
        return F.scaled_dot_product_attention(q, spread(k), spread(v), is_causal=True)
    if length == 1:
        return F.scaled_dot_product_attention(q, spread(k), spread(v))
    mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past)
    return F.scaled_dot_product_attention(q, spread(k), spread(v), attn_mask=mask)


def attend_in_chunks(q, k, v, chunk=256):
    """Causal attention with the matrix products of bf16 CPUs: the fused CPU kernel of PyTorch 2.13
    does not use them, and takes two to three times as long to train with."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    q = (q * dim ** -0.5).view(batch, kv_heads, heads // kv_heads, length, dim)
    found = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        rows = q[:, :, :, begin:end].reshape(batch, kv_heads, -1, dim)
        scores = (rows @ k[:, :, :end].mT).view(batch, heads, end - begin, end)
        future = torch.full((end - begin, end - begin), -torch.inf, dtype=q.dtype).triu(1)
        scores = torch.cat((scores[..., :begin], scores[..., begin:] + future), dim=-1)
        weights = scores.softmax(-1).view(batch, kv_heads, -1, end)
        found.append((weights @ v[:, :, :end]).view(batch, heads, end - begin, dim))
    return torch.cat(found, dim=2)


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def compute_dtype(x):
    """Of the matrix products of what x flows into."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class RmsNorm(nn.Module):
    """In fp32; the result has the type that the matrix products use."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps).to(compute_dtype(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RmsNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config)
        self.mlp = Mlp(config)

    def forward(self, x, cos, sin, layer, capture, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, capture, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """forward: int64 tokens [batch, length] -> fp32 logits [batch, length, vocabulary].

    positions: int64 [length] or [batch, length], ascending; None: from the cache's length on.
    capture(layer, name, tensor [batch, heads, length, head_dim]): called in each layer with the
    names q_pre, q, k_pre, k, v; q and k are rotated, q_pre and k_pre are not.
    cache: attends to what it holds as well, and appends to it.
    select: bool [batch, length]: logits of these tokens only, [n, vocabulary].
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config)
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)     # each layer begins as the identity
            elif parameter.dim() == 2:
                std = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens, positions=None, capture=None, cache=None, select=None):
        if positions is None:
            past = cache.length if cache is not None else 0
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        angles = positions.to(tokens.device)[..., None] * self.frequencies
        if positions.dim() == 2:
            angles = angles[:, None]
        x = self.embed_tokens(tokens)
        kind = compute_dtype(x)
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, index, capture, cache)
        if select is not None:
            x = x[select]
        return F.linear(self.norm(x), self.embed_tokens.weight).float()

    def generate(self, tokens, count):
        """Greedy continuation by `count` tokens of a list of tokens, one by one over a cache."""
        cache, device = Cache(self.config.layers), self.embed_tokens.weight.device
        select = torch.zeros(1, len(tokens), dtype=torch.bool, device=device)
        select[0, -1] = True
        found, step = [], torch.tensor([tokens], device=device)
        with torch.inference_mode():
            for _ in range(count):
                logits = self(step, cache=cache, select=select)
                found.append(int(logits[-1].argmax()))
                step = torch.tensor([found[-1:]], device=device)
                select = torch.ones(1, 1, dtype=torch.bool, device=device)
        return found


def compute_type(device):
    """A context in which matrix products run in bf16 (device: "cpu" or "cuda"), or in fp32 where
    the machine gains nothing by it."""
    if device == "cuda" or torch.cpu._is_avx512_bf16_supported():
        return torch.autocast(device, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def count_parameters(config):
    per_layer = (2 * config.d_model * (config.heads + config.kv_heads) * config.head_dim
                 + 3 * config.d_model * config.d_ff + 2 * config.d_model)
    return config.layers * per_layer + (config.vocabulary + 1) * config.d_model


def save(path, model, tokenizer, notes):
    """Writes the weight file, in shards when it is larger than SHARD_BYTES; returns their paths.

    notes: {str: str} added to the metadata. `path` ends in .safetensors; shards are named
    NAME-00001-of-00002.safetensors, and each carries all of the metadata.
    """
    entries = [("model." + name, "BF16", tensor.shape, _bytes(tensor))
               for name, tensor in model.state_dict().items()]
    merges = b"".join(struct.pack("<ii", *pair) for pair in tokenizer.merges)
    entries.append(("tokenizer.merges", "I32", (len(tokenizer.merges), 2), merges))
    metadata = {key: str(value) for key, value in dataclasses.asdict(model.config).items()}
    metadata.update(notes)
    total = sum(len(blob) for *_, blob in entries)
    count = math.ceil(total / (SHARD_BYTES - (256 << 10)))   # room for headers and uneven cuts
    if count <= 1:
        _write_file(path, metadata, entries)
        return [path]
    stem, paths, at = path.removesuffix(".safetensors"), [], 0
    for shard in range(count):
        part, size = [], 0
        while at < len(entries) and (shard == count - 1
                                     or size + len(entries[at][3]) <= total / count + (128 << 10)):
            part.append(entries[at])
            size += len(entries[at][3])
            at += 1
        paths.append(f"{stem}-{shard + 1:05}-of-{count:05}.safetensors")
        _write_file(paths[-1], metadata, part)
    return paths


def load(path):
    """Returns (model with fp32 parameters in evaluation mode, tokenizer).

    path: a weight file, or the first shard; the others are found by their names.
    """
    metadata, state, merges = {}, {}, []
    for part in shard_paths(path):
        metadata, tensors = _read_file(part)
        for name, tensor in tensors.items():
            if name == "tokenizer.merges":
                merges = [tuple(pair) for pair in tensor.tolist()]
            else:
                state[name.removeprefix("model.")] = tensor.float()
    config = Config(**{field.name: field.type(metadata[field.name])
                       for field in dataclasses.fields(Config)})
    model = Llama(config)
    model.load_state_dict(state)
    return model.eval(), Tokenizer(merges)


def default_weights():
    """The weights beside this file: one file, or the first shard."""
    here = os.path.dirname(os.path.abspath(__file__))
    shards = sorted(glob.glob(os.path.join(here, "model-00001-of-*.safetensors")))
    return shards[0] if shards else os.path.join(here, "model.safetensors")


def shard_paths(path):
    stem, mark, rest = path.removesuffix(".safetensors").rpartition("-00001-of-")
    if not mark:
        return [path]
    return [f"{stem}-{shard + 1:05}-of-{rest}.safetensors" for shard in range(int(rest))]


def _bytes(tensor):
    tensor = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    return tensor.view(torch.int16).numpy().tobytes()


def _write_file(path, metadata, entries):
    header, offset = {"__metadata__": metadata}, 0
    for name, dtype, shape, blob in entries:
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)   # tensors start at a multiple of 64
    with open(path + ".new", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blob for *_, blob in entries))
    os.replace(path + ".new", path)


def _read_file(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    metadata, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        dtype = torch.int32 if entry["dtype"] == "I32" else torch.bfloat16
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).view(
            entry["shape"])
    return metadata, tensors
