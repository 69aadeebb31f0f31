# SPDX-License-Identifier: Apache-2.0
"""Reader and writer of .kvrec files: recorded queries, keys and values. FORMAT.md has the layout.

    with kvrec.Reader("text.kvrec") as record:
        for group in record.groups:
            q = record.array(group["q"])        # float32 [M, G, d]
            k = record.array(group["k"])        # float32 [N, d]

    python3 kvrec.py FILE...                    # what is inside; verifies the checksums

A damaged file raises RecordError, whose text names the file, the field and what was expected.
"""
import json
import mmap
import struct
import sys
import zlib

import numpy as np

MAGIC = b"\x89KVREC\r\n"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQI20s")
ALIGNMENT = 64
STORED = {"bf16": np.dtype("<u2"), "fp16": np.dtype("<f2"), "i32": np.dtype("<i4")}
TOP_ARRAYS = ("positions", "tokens", "query_steps")


class RecordError(Exception):
    """The file is no record, is damaged, or contradicts itself."""


def to_bf16(values):
    """float array -> uint16 bit patterns, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits):
    """uint16 bit patterns -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def align(offset):
    return -(-offset // ALIGNMENT) * ALIGNMENT


def encode(values, dtype):
    """Values as they are stored: an array of STORED[dtype]. Refuses what is not finite."""
    values = np.asarray(values)
    if dtype == "i32":
        if values.size and (values.min() < -2**31 or values.max() >= 2**31):
            raise ValueError("a value does not fit into 32 bits")
        return np.ascontiguousarray(values, dtype=STORED[dtype])
    with np.errstate(over="ignore"):
        encoded = to_bf16(values) if dtype == "bf16" else values.astype(np.float16)
    decoded = from_bf16(encoded) if dtype == "bf16" else encoded
    if not np.isfinite(decoded.astype(np.float32)).all():
        raise ValueError(f"a value is not finite as {dtype}")
    return np.ascontiguousarray(encoded.astype(STORED[dtype], copy=False))


def write(path, metadata, arrays):
    """Writes a record.

    metadata: everything of FORMAT.md except "arrays".
    arrays: {name: (dtype, values)}; values in any numeric type, given in the order of the file.
    """
    stored = {name: (dtype, encode(values, dtype)) for name, (dtype, values) in arrays.items()}
    entries = {}
    offset = 0  # from the start of the arrays, until the length of the JSON text is known
    for name, (dtype, values) in stored.items():
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "offset": offset,
                         "bytes": values.nbytes, "crc32": zlib.crc32(values.tobytes())}
        offset = align(offset + values.nbytes)

    # The offsets in the text are absolute and so change its length: repeat until it stays.
    data_offset = HEADER.size
    while True:
        placed = {name: dict(entry, offset=entry["offset"] + data_offset)
                  for name, entry in entries.items()}
        text = json.dumps(dict(metadata, arrays=placed), sort_keys=True).encode()
        if align(HEADER.size + len(text)) <= data_offset:
            break
        data_offset = align(HEADER.size + len(text))
    validate(json.loads(text), data_offset + offset, data_offset)

    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, HEADER.size, len(text), data_offset,
                               data_offset + offset, zlib.crc32(text), bytes(20)))
        file.write(text + bytes(data_offset - HEADER.size - len(text)))
        for _, values in stored.values():
            file.write(values.tobytes() + bytes(align(values.nbytes) - values.nbytes))


def need(condition, message):
    if not condition:
        raise RecordError(message)


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def validate_entry(name, entry, file_bytes, data_offset):
    need(isinstance(entry, dict), f"array '{name}' is not described by an object")
    dtype, shape = entry.get("dtype"), entry.get("shape")
    need(dtype in STORED, f"array '{name}': dtype {dtype!r}; known are {', '.join(STORED)}")
    need(isinstance(shape, list) and 1 <= len(shape) <= 3 and all(map(is_count, shape)),
         f"array '{name}': shape {shape!r}; wanted 1 to 3 sizes")
    size = STORED[dtype].itemsize
    for extent in shape:
        size *= extent
    offset = entry.get("offset")
    need(entry.get("bytes") == size,
         f"array '{name}': {entry.get('bytes')!r} bytes, but its shape needs {size}")
    need(is_count(offset) and offset >= data_offset and offset % ALIGNMENT == 0,
         f"array '{name}': offset {offset!r} is not a multiple of {ALIGNMENT} in the data")
    need(offset + size <= file_bytes,
         f"array '{name}' ends at {offset + size}, beyond the {file_bytes} bytes of the file")
    need(is_count(entry.get("crc32")), f"array '{name}' has no crc32")


def validate_array(arrays, name, dtypes, shape):
    need(isinstance(name, str) and name in arrays, f"array {name!r} is missing")
    entry = arrays[name]
    need(entry["dtype"] in dtypes,
         f"array '{name}': dtype {entry['dtype']}; wanted {' or '.join(dtypes)}")
    need(entry["shape"] == shape, f"array '{name}': shape {entry['shape']}; wanted {shape}")


def validate(meta, file_bytes, data_offset):
    """Raises RecordError unless the metadata is complete and its arrays lie inside the file."""
    need(isinstance(meta, dict), "the metadata is not a JSON object")
    for key in ("n_tokens", "n_queries", "head_dim"):
        need(is_count(meta.get(key)) and meta[key] > 0, f"'{key}' is {meta.get(key)!r}")
    scale = meta.get("softmax_scale")
    need(isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < 1e6,
         f"'softmax_scale' is {scale!r}")
    for key, kind in (("model", dict), ("prompt", dict), ("groups", list), ("arrays", dict)):
        need(isinstance(meta.get(key), kind), f"'{key}' is missing or of the wrong kind")
    for name, entry in meta["arrays"].items():
        validate_entry(name, entry, file_bytes, data_offset)

    n_tokens, n_queries, dim = meta["n_tokens"], meta["n_queries"], meta["head_dim"]
    arrays, floats = meta["arrays"], ("bf16", "fp16")
    for name in TOP_ARRAYS:
        validate_array(arrays, name, ("i32",),
                       [n_queries if name == "query_steps" else n_tokens])
    need(meta["groups"], "'groups' is empty")
    seen = set()
    for group in meta["groups"]:
        need(isinstance(group, dict) and is_count(group.get("layer"))
             and is_count(group.get("kv_head")), "a group lacks its layer or kv_head")
        place = (group["layer"], group["kv_head"])
        need(place not in seen, f"layer {place[0]} kv head {place[1]} appears twice")
        seen.add(place)
        heads = group.get("q_heads")
        need(isinstance(heads, list) and heads and all(map(is_count, heads)),
             f"layer {place[0]} kv head {place[1]}: 'q_heads' is {heads!r}")
        validate_array(arrays, group.get("q"), floats, [n_queries, len(heads), dim])
        for key in ("k", "v") + (("k_pre",) if "k_pre" in group else ()):
            validate_array(arrays, group.get(key), floats, [n_tokens, dim])


class Reader:
    """A mapped record. `meta` is the metadata, `groups` its list of groups."""

    def __init__(self, path):
        self.path = str(path)
        with open(path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise RecordError(f"{self.path}: the file is empty") from None
        try:
            self.meta = self._read_metadata()
            self._check_steps()
        except RecordError as error:
            self.close()
            raise RecordError(f"{self.path}: {error}") from None
        self.groups = self.meta["groups"]

    def _read_metadata(self):
        size = len(self._map)
        need(size >= HEADER.size, f"{size} bytes are too few for a header")
        magic, version, header_bytes, json_bytes, data_offset, file_bytes, crc, _ = (
            HEADER.unpack_from(self._map))
        need(magic == MAGIC, "not a record: the magic number differs")
        need(version == VERSION, f"version {version}; this reader knows {VERSION}")
        need(header_bytes == HEADER.size, f"header of {header_bytes} bytes; wanted {HEADER.size}")
        need(file_bytes == size, f"{size} bytes of {file_bytes}: the file is cut or has a tail")
        need(HEADER.size + json_bytes <= data_offset <= size and data_offset % ALIGNMENT == 0,
             f"metadata of {json_bytes} bytes does not fit before the data at {data_offset}")
        text = self._map[HEADER.size:HEADER.size + json_bytes]
        need(zlib.crc32(text) == crc, "the checksum of the metadata differs")
        try:
            meta = json.loads(text)
        except ValueError as error:
            raise RecordError(f"the metadata is not JSON: {error}") from None
        validate(meta, size, data_offset)
        return meta

    def _check_steps(self):
        steps = self.raw("query_steps")
        need((steps >= 0).all() and (steps < self.meta["n_tokens"]).all()
             and (np.diff(steps) > 0).all(), "'query_steps' does not ascend within the tokens")

    def raw(self, name):
        """The array as stored, a view of the map: i32, fp16, or the bit patterns of bf16."""
        entry = self.meta["arrays"][name]
        count = entry["bytes"] // STORED[entry["dtype"]].itemsize
        flat = np.frombuffer(self._map, STORED[entry["dtype"]], count, entry["offset"])
        return flat.reshape(entry["shape"])

    def array(self, name):
        """The array as int32 or float32, a copy."""
        raw = self.raw(name)
        if self.meta["arrays"][name]["dtype"] == "bf16":
            return from_bf16(raw)
        return raw.astype(np.int32 if raw.dtype.kind == "i" else np.float32)

    def verify(self):
        """Reads everything; raises RecordError where a checksum differs."""
        for name, entry in self.meta["arrays"].items():
            if zlib.crc32(self.raw(name).tobytes()) != entry["crc32"]:
                raise RecordError(f"{self.path}: the checksum of array '{name}' differs")

    def close(self):
        try:
            self._map.close()
        except BufferError:
            pass  # A view is still in use; the map goes with it.

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def describe(path):
    with Reader(path) as record:
        record.verify()
        meta = record.meta
        print(f"{path}: {meta['n_tokens']} tokens, {meta['n_queries']} queries, "
              f"head dim {meta['head_dim']}, model {meta['model'].get('name')!r}, "
              f"prompt {meta['prompt'].get('name')!r}")
        for group in record.groups:
            dtype = meta["arrays"][group["k"]]["dtype"]
            print(f"  layer {group['layer']} kv head {group['kv_head']}: q heads "
                  f"{group['q_heads']}, {dtype}{', k_pre' if 'k_pre' in group else ''}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: kvrec.py FILE...")
    for argument in sys.argv[1:]:
        try:
            describe(argument)
        except (RecordError, OSError) as failure:
            sys.exit(f"kvrec: {failure}")
