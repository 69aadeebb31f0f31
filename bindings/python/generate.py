# SPDX-License-Identifier: Apache-2.0
"""Writes what the Python binding takes from include/kvm.h word for word.

Usage: generate.py HEADER FOLDER [--check]
FOLDER/kvm/_constants.py gets the enumerations, FOLDER/kvm/_records.py a class for each structure
that the service fills, FOLDER/src/fields.inc the fields of these and of the parameters. --check
writes nothing and fails when the files are not what the header asks for. Python standard library
only."""

import difflib
import importlib.util
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# Class, prefix in the header, kind, what it is.
ENUMS = [
    ("Status", "KVM_ERR_", "IntEnum", "What became of a call. Negative ones are failures."),
    ("LogLevel", "KVM_LOG_", "IntEnum", "Of a message for `set_log`."),
    ("Feature", "KVM_FEATURE_", "IntFlag", "What a service offers (`ClientInfo.features`)."),
    ("BufferKind", "KVM_BUFFER_", "IntEnum", "Where the bytes of a tensor lie."),
    ("Dtype", "KVM_DTYPE_", "IntEnum", "Types of the elements of tensors."),
    ("CodecId", "KVM_CODEC_", "IntEnum", "How K and V are stored."),
    ("Rope", "KVM_ROPE_", "IntEnum", "Which channels a rotation pairs."),
    ("SpaceFlag", "KVM_SPACE_", "IntFlag", "How a space stores values (`SpaceInfo.flags`)."),
    ("LayerKind", "KVM_LAYER_", "IntEnum", "What a layer stores."),
    ("Retention", "KVM_RETAIN_", "IntEnum", "Which tokens a kv head keeps."),
    ("Merging", "KVM_MERGE_", "IntEnum", "What a head makes of the tokens that it gives up."),
    ("Budgets", "KVM_BUDGETS_", "IntEnum", "How what heads may keep is shared out among layers."),
    ("Positions", "KVM_POSITIONS_", "IntEnum", "What a query's position means to a head's keys."),
    ("IndexKind", "KVM_INDEX_", "IntEnum", "What is kept beside keys to find those that count."),
    ("SequenceFlag", "KVM_SEQ_", "IntFlag", "Of `Space.create_sequence` and `SequenceInfo`."),
    ("ListFlag", "KVM_LIST_", "IntFlag", "Of `Client.sequences`."),
    ("ItemFlag", "KVM_ITEM_", "IntFlag", "Of an `Item`."),
    ("Mode", "KVM_MODE_", "IntEnum", "How attention is computed."),
    ("Proposal", "KVM_PROPOSAL_", "IntEnum", "What an approximate mode chooses keys by."),
    ("StepFlag", "KVM_STEP_", "IntFlag", "Of a `Step`."),
    ("Evict", "KVM_EVICT_", "IntEnum", "What `Client.evict` frees."),
    ("QuotaOf", "KVM_QUOTA_", "IntEnum", "Whose limits `Client.set_quota` sets."),
    ("SaveFlag", "KVM_SAVE_", "IntFlag", "Of a save (`Sequence.save`)."),
    ("SnapshotFlag", "KVM_SNAPSHOT_", "IntFlag", "Of a `SnapshotInfo`."),
]
# Names that an IntEnum cannot have, or that would say nothing alone.
MEMBERS = {"KVM_OK": ("Status", "OK"), "KVM_EVICT_DISCONNECT": None}
NUMBERS = {"KVM_NO_LIMIT": "NO_LIMIT", "KVM_POSITION_END": "POSITION_END",
           "KVM_EVICT_DISCONNECT": "EVICT_DISCONNECT", "KVM_PREFIX_TOKENS": "PREFIX_TOKENS",
           "KVM_PRIORITY_DEFAULT": "PRIORITY_DEFAULT", "KVM_PRIORITY_MAX": "PRIORITY_MAX",
           "KVM_VERSION_MAJOR": None, "KVM_VERSION_MINOR": None, "KVM_VERSION_PATCH": None}
# Structure, class (None: fields only), what it is.
RECORDS = [
    ("kvm_client_info", "ClientInfo", "Facts about a connection, and its limits."),
    ("kvm_space_info", "SpaceInfo", "A space as it is registered."),
    ("kvm_seq_info", "SequenceInfo", "What a sequence holds."),
    ("kvm_snapshot_info", "SnapshotInfo", "A sequence that was saved."),
    ("kvm_stats", "Stats", "Counters of the whole service."),
    ("kvm_amounts", "Amounts", "How much of each resource; NO_LIMIT: any."),
    ("kvm_client_entry", "ClientEntry", "A connected client, as an operator sees it."),
    ("kvm_user_entry", "UserEntry", "All clients of a user together."),
    ("kvm_evict_result", "EvictResult", "What `Client.evict` has freed."),
    ("kvm_layer_params", None, ""),
    ("kvm_policy_params", None, ""),
    ("kvm_codec_params", None, ""),
    ("kvm_index_params", None, ""),
    ("kvm_space_params", None, ""),
    ("kvm_preset_params", None, ""),
    ("kvm_evict_params", None, ""),
    ("kvm_quota_params", None, ""),
]
PYTHON_TYPES = {"u32": "int", "u64": "int", "i32": "int", "f32": "float", "f64": "float",
                "kvm_status": "int", "kvm_space_id": "int", "kvm_seq_id": "int",
                "kvm_amounts": "Amounts"}
WRITTEN = "SPDX-License-Identifier: Apache-2.0\n{0} Written by bindings/python/generate.py from " \
          "include/kvm.h.\n"


def read_header(path):
    """The header as the generator of the Rust bindings reads it."""
    spec = importlib.util.spec_from_file_location("generate_rust",
                                                  os.path.join(HERE, "..", "rust", "generate.py"))
    rust = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rust)
    with open(path, encoding="utf-8") as file:
        return rust.Header(file.read())


def is_hidden(field):
    return field == "struct_size" or re.fullmatch(r"reserved\d*", field) is not None


def number(value):
    return {"UINT64_MAX": "2**64 - 1"}.get(value, re.sub(r"\b(\d+)u\b", r"\1", value))


def member_of(name):
    """(class, member) of a constant, None for one without a class."""
    if name in MEMBERS:
        return MEMBERS[name]
    for cls, prefix, _, _ in ENUMS:
        if name.startswith(prefix):
            member = name[len(prefix):]
            return cls, "BIT_" + member if member[0].isdigit() else member
    return None


def constants(header):
    members = {cls: [] for cls, *_ in ENUMS}
    numbers = []
    for name, value in header.constants:
        place = member_of(name)
        if place is not None:
            members[place[0]].append((place[1], number(value)))
        elif NUMBERS[name] is not None:
            numbers.append((NUMBERS[name], number(value)))
    lines = ["# " + WRITTEN.format("#") + '"""The constants of include/kvm.h."""', "",
             "import enum"]
    for cls, prefix, kind, what in ENUMS:
        lines += ["", "", f"class {cls}(enum.{kind}):", f'    """{what} KVM_* constants: '
                  f'{prefix}*."""', ""]
        lines += [f"    {member} = {value}" for member, value in members[cls]]
    lines += ["", ""] + [f"{name} = {value}" for name, value in numbers]
    return "\n".join(lines + [""])


def python_type(kind):
    array = re.fullmatch(r"\[(.*); (\d+)\]", kind)
    if array:
        element = array.group(1)
        return {"c_char": "str", "u8": "bytes"}.get(
            element, f"tuple[{PYTHON_TYPES.get(element, 'int')}, ...]")
    return PYTHON_TYPES[kind]


def records(header):
    structs = dict(header.structs)
    lines = ["# " + WRITTEN.format("#") + '"""What the service says about itself: a class for each '
             'structure that it fills."""', "", "import dataclasses"]
    with_class = [record for record in RECORDS if record[1]]
    for struct, cls, what in sorted(with_class, key=lambda record: record[0] != "kvm_amounts"):
        lines += ["", "", "@dataclasses.dataclass(frozen=True)", f"class {cls}:",
                  f'    """{what} Fields as in {struct} (kvm.h)."""', ""]
        lines += [f"    {field}: {python_type(kind)}" for field, kind in structs[struct]
                  if not is_hidden(field)]
    return "\n".join(lines + [""])


def fields(header):
    structs = dict(header.structs)
    lines = ["// " + WRITTEN.format("//")
             + "// KVM_STRUCT(name, its fields as FIELD(...)), without pointers and `reserved`."]
    for struct, _, _ in RECORDS:
        names = [field for field, kind in structs[struct]
                 if not is_hidden(field) and not kind.startswith("*")]
        lines.append(f"KVM_STRUCT({struct},")
        lines += [f"           FIELD({name})" for name in names]
        lines[-1] += ")"
    return "\n".join(lines + [""])


def main(header_path, folder, mode=""):
    header = read_header(header_path)
    status = 0
    for path, text in ((os.path.join(folder, "kvm", "_constants.py"), constants(header)),
                       (os.path.join(folder, "kvm", "_records.py"), records(header)),
                       (os.path.join(folder, "src", "fields.inc"), fields(header))):
        if mode != "--check":
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            continue
        with open(path, encoding="utf-8") as file:
            written = file.read()
        diff = list(difflib.unified_diff(written.splitlines(), text.splitlines(), path,
                                         "what kvm.h asks for", lineterm=""))
        if diff:
            print("\n".join(diff))
            status = 1
    if status:
        print("run bindings/python/generate.py (docs/python.md)")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
