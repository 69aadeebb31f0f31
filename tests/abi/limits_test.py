"""Every limit that kvm.h tells is the one that base/limits.h states, wherever kvm.h tells it.

Usage: limits_test.py KVM_H LIMITS_H"""

import re
import sys

# The constant, and every place of kvm.h that has its number, as @; spaces match any spaces.
PLACES = [
    ("kMaxTokens", "lie below 2^@"),
    ("kMaxTokens", "Tokens to expect, at most 2^@; 0: unknown"),
    ("kMaxItems", "uint32_t n_items; /* 1 to @ */"),
    ("kMaxRanges", "n_ranges; /* 0: no restriction; at most @ over all items */"),
    ("kMaxRanges", "ranges; /* [n_ranges], at most @ */"),
    ("kMaxTreeWords", "n_tree_words; /* at most @ */"),
    ("kMaxTreeRows", "An item with TREE has at most @ rows"),
    ("kMaxOutstanding", "requests in flight; 0: @; rounded up to a power of two, at most 256"),
    ("kMaxOutstanding", "requests in flight; 0: 256; rounded up to a power of two, at most @"),
    ("kMaxMergedStates", "uint32_t n_states; /* 1 to @ */"),
    ("kMaxObservedRows", "(the newest @ query rows"),
    ("kMaxNameBytes", "calls this client; at most @ bytes"),
    ("kMaxNameBytes", "1 to @ bytes of [A-Za-z0-9._/-]; required"),
    ("kMaxSnapshotNameBytes", "Names are 1 to @ bytes of [A-Za-z0-9._/-]."),
    ("kMaxSaltBytes", "salt_bytes bytes, at most @; may be null for 0."),
    ("kMaxPrefixPages", "INVALID (n_hashes is 0 or above @,"),
    ("kMaxPrefixKeepNs", "keep_ns is above 2^@);"),
    ("kMaxPriorityKeepNs", "for so long, at most 2^@, and the default after that"),
    ("kMaxPriorityRanges", "LIMIT (the sequence has @ parts of"),
    ("kMaxLayers", "n_layers; /* 1 to @; required */"),
    ("kMaxQHeads", "n_q_heads; /* 1 to @, of this shard; required */"),
    ("kMaxKvHeads", "n_kv_heads; /* 1 to @; divides n_q_heads"),
    ("kMaxGroup", "divides n_q_heads into groups of 1 to @;"),
    ("kMaxGroup", "must divide n_q_heads into groups of 1 to @ */"),
    ("kMaxGroup", "n_kv_heads must divide it into groups of 1 to @ */"),
    ("kMinHeadDim", "multiple of @, 8 to 576; required"),
    ("kMinHeadDim", "multiple of 8, @ to 576; required"),
    ("kMaxHeadDim", "multiple of 8, 8 to @; required"),
    ("kMaxHeadDim", "multiple of 8, 8 to @; 0: as the space"),
    ("kMaxIndexedDim", "an index of heads with dims above @,"),
    ("kMaxSlope", "Magnitudes up to @;"),
    ("kMaxHeadDim", "uint32_t head_dim; /* 1 to @ */"),
    ("kMaxOverrides", "n_layer_params; /* each at most @ */"),
    ("kMinSoftcap", "tanh(logit / cap); @ to 10000;"),
    ("kMaxSoftcap", "tanh(logit / cap); 0.001 to @;"),
    ("kMaxHeavy", "HEAVY only, 1 to @ */"),
    ("kMaxAlwaysRead", "first tokens that are always read; 0: 4; at most @ */"),
    ("kMaxAlwaysRead", "last tokens that are always read; 0: 64; at most @ */"),
    ("kMinIndexTokens", "look like: @ to 8192; 0: 4096"),
    ("kMaxIndexTokens", "look like: 256 to @; 0: 4096"),
    ("kMaxLshBits", "LSH only, as the next: 1 to @; 0: 10"),
    ("kMinLshTables", "lsh_tables; /* @ to 512; 0: 150"),
    ("kMaxLshTables", "lsh_tables; /* 2 to @; 0: 150"),
    ("kMaxHashBits", "lsh_bits * lsh_tables is at most @ */"),
    ("kMaxSocketPathBytes", "/run/kvm/kvmd.sock. At most @ bytes."),
]
# What kvm.h leaves to kvm_client_info, or does not tell in numbers.
UNTOLD = {"kPageTokens", "kMaxQueryRows", "kMaxRopePairs", "kItemFlags", "kStepFlags", "kSeqFlags"}


def constants(text):
    """The numbers of base/limits.h by name; None where it is no plain number."""
    found = {}
    for name, value in re.findall(r"constexpr \w+ (k\w+)\s*=\s*([^;]+);", text):
        shift = re.fullmatch(r"uint64_t\{1\} << (\d+)", value)
        if shift:
            found[name] = float(shift[1])  # kvm.h has it as a power of two
            continue
        try:
            found[name] = float(value.rstrip("f"))
        except ValueError:
            found[name] = None
    return found


def pattern(place):
    words = [re.escape(word).replace("@", r"([\d.]*\d)") for word in place.split()]
    return r"\s+".join(words)


def main(header_path, limits_path):
    with open(header_path, encoding="utf-8") as file:
        # A comment that goes on in the next line has a star there.
        header = re.sub(r"\n\s*\* ", " ", file.read())
    with open(limits_path, encoding="utf-8") as file:
        limits = constants(file.read())
    findings = []
    for name, place in PLACES:
        told = re.findall(pattern(place), header)
        if name not in limits:
            findings.append(f"base/limits.h has no {name}")
        elif len(told) != 1:
            findings.append(f"{name}: kvm.h says '{place}' {len(told)} times; once was expected")
        elif float(told[0]) != limits[name]:
            findings.append(f"{name} is {limits[name]:g}; kvm.h says {told[0]}: '{place}'")
    for name in sorted(set(limits) - {name for name, _ in PLACES} - UNTOLD):
        findings.append(f"{name}: say where kvm.h tells it, or that it does not (UNTOLD)")
    print("\n".join(findings) if findings else f"{len(PLACES)} places of kvm.h as in limits.h")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
