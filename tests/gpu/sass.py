"""Counts instructions of the loops over tiles in what `cuobjdump -sass` prints.

What is counted: the shortest way round the loop that copies one tile and evaluates one. The graph
of a kernel's basic blocks is searched from a block with matrix instructions back to itself, for the
way of fewest instructions that issues as many 16-byte asynchronous copies as a tile has; it must
then also have a tile's matrix instructions, or the loop has not been found. So a tile is counted
that lies in one page, has no soft cap, weights or masks, and moves no maximum: all others take
branches. The warps of an MLA kernel share a tile (attention/cuda/mla_kernel.h): counted is what
all of them issue, as warps that own no rows where there are such. Every instruction counts as one,
also those whose predicate is false. Python standard library only.
"""

import heapq
import re

CODE_FOR = re.compile(r"\tcode for (sm_\w+)")
FUNCTION = re.compile(r"\t\tFunction : (\S+)")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
PARTS = re.compile(r"(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
ADDRESS = re.compile(r"0x([0-9a-f]+)")
BARRIER = re.compile(r"B\d+")
LANES = 32
MLA_DIM, MLA_VALUE_DIM = 576, 512


def parse(text):
    """{(architecture, symbol): [(address, instruction)]}"""
    functions = {}
    architecture, current = None, None
    for line in text.splitlines():
        if match := CODE_FOR.match(line):
            architecture = match.group(1)
        elif match := FUNCTION.match(line):
            current = functions.setdefault((architecture, match.group(1)), [])
        elif current is not None and (match := INSTRUCTION.match(line)):
            current.append((int(match.group(1), 16), match.group(2)))
    return functions


def successors(code):
    """Of each instruction, by index: where control may go."""
    index = {address: i for i, (address, _) in enumerate(code)}

    def target(text):
        return index[int(ADDRESS.search(text).group(1), 16)]

    parts = [PARTS.match(text).groups() for _, text in code]
    joins = {}  # of convergence barriers
    for _, name, operands in parts:
        if name.startswith("BSSY"):
            joins.setdefault(BARRIER.search(operands).group(), []).append(target(operands))
    result = []
    for i, (predicate, name, operands) in enumerate(parts):
        further = [i + 1] if i + 1 < len(code) else []
        name = name.split(".")[0]
        if name == "BRA":
            # A condition is a predicate, or an operand before the target.
            always = not predicate and "," not in operands
            result.append([target(operands)] + ([] if always else further))
        elif name == "BSYNC":
            behind = joins[BARRIER.search(operands).group()]
            result.append(further if i + 1 in behind else behind + (further if predicate else []))
        elif name in ("EXIT", "RET", "BRX", "KILL"):
            result.append(further if predicate else [])
        else:
            result.append(further)
    return result


def is_copy(text):
    return "LDGSTS" in text and ".128" in text


def round_of_loop(code, n_copies, n_products):
    """The instructions of the shortest way round the loop, or None if there is no such loop."""
    after = successors(code)
    starts = {0}
    for i, follows in enumerate(after):
        if follows != [i + 1]:
            starts.update(follows)
            starts.add(i + 1)
    starts = sorted(i for i in starts if i < len(code))
    blocks = {first: code[first:end] for first, end in zip(starts, starts[1:] + [len(code)])}
    leads_to = {first: after[first + len(block) - 1] for first, block in blocks.items()}
    copies = {first: sum(is_copy(text) for _, text in block) for first, block in blocks.items()}

    def way_round(begin):
        came_from = {}
        queue = [(len(blocks[begin]), begin, copies[begin], None)]
        while queue:
            length, block, copied, before = heapq.heappop(queue)
            if (block, copied) in came_from:
                continue
            came_from[block, copied] = before
            for follower in leads_to[block]:
                if follower == begin and copied == n_copies:
                    way, state = [], (block, copied)
                    while state is not None:
                        way.append(state[0])
                        state = came_from[state]
                    return [text for first in reversed(way) for _, text in blocks[first]]
                state = (follower, copied + copies[follower])
                if state[1] <= n_copies and state not in came_from:
                    heapq.heappush(queue, (length + len(blocks[follower]), *state, (block, copied)))
        return None

    for begin, block in blocks.items():
        if any("HMMA" in text for _, text in block):
            way = way_round(begin)
            if way and sum("HMMA" in text for text in way) == n_products:
                return way
    return None


def per_product(code, element_bits, dim, tile, warps, row_tiles):
    """Instructions for each matrix product of the prefill kernel, whose warps share the copies of a
    tile, to a hundredth; None if the loop has not been found. Of rows of 4 bits the products that
    zeros take are instructions like others."""
    n_copies = 2 * tile * dim * element_bits // (8 * warps * 16 * LANES)
    n_products = 2 * row_tiles * (tile // 8) * (dim // 16)
    n_of_zeros = row_tiles * (tile // 8) if element_bits == 4 else 0
    way = round_of_loop(code, n_copies, n_products + n_of_zeros)
    return round(len(way) / n_products, 2) if way else None


def per_kib(code, element_bits, dim, tile, row_tiles):
    """Instructions for each KiB of K and V, to a tenth; None if the loop has not been found."""
    tile_bytes = 2 * tile * dim * element_bits // 8
    n_copies = tile_bytes // (16 * LANES)
    # A product takes 16 channels to 8 tokens, or 16 tokens to 8 channels, with 16 rows.
    n_products = 2 * row_tiles * (tile // 8) * (dim // 16)
    if element_bits == 4:
        # Zeros make scores in one product each. The steps of 256 channels are 16 bytes a token.
        n_products += row_tiles * (tile // 8)
        n_copies += 2 * tile // LANES if dim == 256 else 0
    way = round_of_loop(code, n_copies, n_products)
    return round(len(way) / (tile_bytes / 1024), 1) if way else None


def mla_per_kib(code, tile, row_tiles):
    """The same of an MLA kernel, for each KiB of rows, of which there are no others."""
    warps = 8 if row_tiles == 4 else 4
    tile_bytes = tile * MLA_DIM * 2
    copying = min(warps, tile // 4)
    # Of a warp: a quarter of the channels for two tiles of rows at most; all rows for its values.
    n_products = (MLA_DIM // 64 * (tile // 8) * min(row_tiles, 2) +
                  MLA_VALUE_DIM // warps // 8 * (tile // 16) * row_tiles)
    way = round_of_loop(code, tile_bytes // (16 * LANES * copying), n_products)
    return round(len(way) * warps / (tile_bytes / 1024), 1) if way else None
