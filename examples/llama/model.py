# SPDX-License-Identifier: Apache-2.0
"""The example model in PyTorch, and its weight file.

Llama architecture: RMSNorm, rotary embedding (rotate-half layout), grouped-query attention,
SwiGLU, no biases, embedding tied to the output. Tensor names are those commonly used for Llama
checkpoints. The file is safetensors: u64 length, JSON header, raw tensors; weights BF16, merges
of the tokenizer I32 [n, 2] under the name "tokenizer.merges".
"""
import dataclasses
import json
import struct

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Config:
    vocabulary: int = 1024
    d_model: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 512
    context: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def inverse_frequencies(config):
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    return config.rope_theta ** -exponent


def rotary_tables(config, length):
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inverse_frequencies(config))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + swapped * sin


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        q_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, q_width, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.d_model, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        dim = self.config.head_dim

        def heads(projection):
            return projection(x).view(batch, length, -1, dim).transpose(1, 2)

        q = rotate(heads(self.q_proj), cos, sin)
        k = rotate(heads(self.k_proj), cos, sin)
        v = heads(self.v_proj)
        group = self.config.heads // self.config.kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RmsNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RmsNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config)
        self.mlp = Mlp(config)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """forward: int64 tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config)
        cos, sin = rotary_tables(config, config.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * config.layers) ** 0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def save(path, model, merges, notes):
    """Writes the weight file; notes: {str: str} added to the metadata."""
    metadata = {key: str(value) for key, value in dataclasses.asdict(model.config).items()}
    metadata.update(notes)
    header = {"__metadata__": metadata}
    blobs = []
    offset = 0

    def add(name, dtype, shape, blob):
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)

    for name, tensor in model.state_dict().items():
        blob = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        add("model." + name, "BF16", tensor.shape, blob)
    add("tokenizer.merges", "I32", (len(merges), 2),
        b"".join(struct.pack("<ii", *pair) for pair in merges))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # tensors start at a multiple of 64
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load(path):
    """Reads a weight file. Returns (model with fp32 parameters, merges)."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    metadata = header.pop("__metadata__")
    config = Config(**{field.name: field.type(metadata[field.name])
                       for field in dataclasses.fields(Config)})
    state = {}
    merges = []
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        dtype = torch.int32 if entry["dtype"] == "I32" else torch.bfloat16
        tensor = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).view(entry["shape"])
        if name == "tokenizer.merges":
            merges = [tuple(pair) for pair in tensor.tolist()]
        else:
            state[name.removeprefix("model.")] = tensor.float()
    model = Llama(config)
    model.load_state_dict(state)
    return model, merges
