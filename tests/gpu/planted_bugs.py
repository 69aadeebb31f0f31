#!/usr/bin/env python3
"""Plants mistakes into the GPU kernels, one at a time, and counts how many the suite finds.

Usage: planted_bugs.py --cxx g++ [--each-class] [--jobs N] [--require PERCENT] [--work FOLDER]

Each mistake is a replacement in a copy of one source file; its text must occur exactly once, so a
kernel that has moved on makes the command fail, not the mistake vanish. The suite is compiled with
the copy and run: it must fail. First it is compiled and run without any, and must pass. Prints a
line for each mistake; exits 1 when fewer than REQUIRE percent are found. Python standard library
only.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CUDA = "attention/cuda/"
DECODE, MLA, LOGITS, MERGE, APPEND, PAGES, PLAN, TABLE = (
    CUDA + name for name in
    ("decode_kernel.h", "mla_kernel.h", "logits.h", "merge_kernel.h", "append_kernel.h", "pages.h",
     "plan.cc", "table_kernel.h"))

# Class, file, what is there, what is planted.
BUGS = [
    ("wait count", DECODE, "copy_async_wait<kAhead - 1>();", "copy_async_wait<kAhead>();"),
    ("page lookup", PAGES, " +\n         of.layer_offset_bytes;", ";"),
    ("counts", MERGE, "load_global<uint32_t>(p.n_merges) * p.rows",
     "load_global<uint32_t>(p.n_merges)"),
    ("counts", APPEND, "load_global<uint32_t>(p.n_tokens) : block_count()",
     "load_global<uint32_t>(p.n_tokens) + 1 : block_count()"),
    ("counts", APPEND, "i += block_count()", "i += n"),
    ("scatter", TABLE, "(run.to | run.from) % 4 == 0", "run.to % 4 == 0"),
    ("scatter", TABLE, "n_wide + thread_id(); i", "n_wide + thread_id() + 1; i"),
    ("wait count", DECODE,
     "    copy_async_commit();\n    task.look_up", "    task.look_up"),
    ("stages", DECODE, "task.next, free, work.end", "task.next, full, work.end"),
    ("stages", DECODE, "    free = full;\n", ""),
    ("stages", DECODE, "task.stages + Shape::kRingBytes ? task.stages : full;",
     "task.stages + Shape::kRingBytes ? task.stages + Shape::kStageBytes : full;"),
    ("swizzle", DECODE, "(chunk ^ (row / Shape::kLineRows % Shape::kGroupChunks)) * 16",
     "chunk * 16"),
    ("swizzle", DECODE, "8 + lane_id() % 8, lane_id() / 8 % 2);",
     "8 + lane_id() % 8, lane_id() / 8 % 2 ^ 1);"),
    ("swizzle", DECODE, "moved<Shape>(at, k * 16, n * 2)",
     "at + k * 16 * Shape::kRowBytes + n * 32"),
    ("swizzle", DECODE, "((chunks ^ rows / Shape::kLineRows) & kInGroup)", "(chunks & kInGroup)"),
    ("swizzle", DECODE, "((chunks ^ rows / Shape::kLineRows) & kInGroup)",
     "(rows / Shape::kLineRows & kInGroup)"),
    ("swizzle", DECODE, "(chunks & ~kInGroup) * 16", "(chunks & ~7u) * 16"),
    ("swizzle", DECODE, "kGroupChunks = power_in(kRowChunks, 8)",
     "kGroupChunks = kRowChunks > 4 ? 8 : 4"),
    ("tail mask", DECODE, "bool sees = token < limit;", "bool sees = token <= limit;"),
    ("tail mask", DECODE, "if (token_first + Shape::kTile > limit_least) {",
     "if (token_first + Shape::kTile > limit_least + 1) {"),
    ("tail mask", DECODE, "const bool valid = rows + row[part] < n_tokens;",
     "const bool valid = rows + row[part] <= n_tokens;"),
    ("tail mask", DECODE, "  next.entry = 0;\n  if (token < work.end) {",
     "  next.entry = 0;\n  if (token < work.end + Shape::kTile) {"),
    ("causal mask", DECODE, "const uint32_t n_before = request.n_tokens - request.n_query + 1;",
     "const uint32_t n_before = request.n_tokens - request.n_query + 2;"),
    ("causal mask", LOGITS, "const uint32_t n_before = request.n_tokens - request.n_query + 1;",
     "const uint32_t n_before = request.n_tokens - request.n_query + 2;"),
    ("causal mask", DECODE, "work.end ? work.end : n_before + query;",
     "work.end ? work.end : n_before + row % p.tensors.group;"),
    ("causal mask", LOGITS, "return least < work.end ? least : work.end;", "return work.end;"),
    ("tree mask", DECODE, "tree || n_before + query > work.end", "n_before + query > work.end"),
    ("tree mask", LOGITS,
     "least = n_before < request.tree_first ? n_before : request.tree_first;",
     "least = n_before;"),
    ("tree mask", DECODE, "p.tree_mask + request.q_token + query)",
     "p.tree_mask + request.q_token + row % p.tensors.group)"),
    ("tree mask", DECODE, "if (tree && token >= request.tree_first) {",
     "if (tree && token > request.tree_first) {"),
    ("tree mask", DECODE, "row = work.row_first + t * 16 + half * 8 + lane_id() / 4;\n"
     "      const uint32_t query", "row = t * 16 + half * 8 + lane_id() / 4;\n"
     "      const uint32_t query"),
    ("soft cap", LOGITS, "return score < 0.0f ? -size : size;", "return size;"),
    ("soft cap", LOGITS, "-fabsf(score * p.softcap_rate)", "-fabsf(score * p.scale_log2)"),
    ("soft cap", LOGITS, "reciprocal_fast(1.0f + decay)", "reciprocal_fast(2.0f)"),
    ("soft cap", DECODE, "(capped ? soft_cap(p, score) : score) + weight;",
     "capped ? soft_cap(p, score) : score + weight;"),
    ("soft cap", DECODE, "(capped ? soft_cap(p, score) : score) + weight;",
     "soft_cap(p, score) + weight;"),
    ("soft cap", DECODE, "if (weighted || p.softcap_log2 != 0.0f) {",
     "if (p.softcap_log2 != 0.0f) {"),
    ("soft cap", DECODE, "if (weighted || p.softcap_log2 != 0.0f) {", "if (weighted) {"),
    ("barrier", DECODE, "    sync_warp();\n    // The stage of the tile before",
     "    // The stage of the tile before"),
    ("barrier", DECODE, "    sync_block();\n    finish_piece", "    finish_piece"),
    ("barrier", DECODE, "    sync_block();  // before the next piece",
     "    // before the next piece"),
    ("barrier", DECODE, "  sync_warp();\n  task.store_state", "  task.store_state"),
    ("barrier", MERGE, "  sync_block();\n  float all", "  float all"),
    ("barrier", MERGE, "  sync_block();\n  if (thread_id() < kColumns)",
     "  if (thread_id() < kColumns)"),
    ("rescale", DECODE, "o[row_tile][n][2] *= factor[1];", "o[row_tile][n][2] *= factor[0];"),
    ("rescale", DECODE, "decay.of_sum(l[row_tile][half]) + sum;", "l[row_tile][half] + sum;"),
    ("rescale", DECODE, "kScaled ? sum * root * root : sum * whole", "sum * whole"),
    ("rescale", DECODE, "factor[half] = decay.whole;",
     "factor[half] = 0.98f * decay.whole;"),
    ("rescale", DECODE, "if (any_lane(grew)) {", "if (any_lane(grew && lane_id() < 16)) {"),
    ("rescale", DECODE, "    top = fmaxf(top, shuffle_xor(top, 2));\n", ""),
    ("rescale", DECODE, "const float base = top == minus_infinity() ? 0.0f : top;\n    const Decay",
     "const float base = top;\n    const Decay"),
    ("byte order", DECODE, "a[t][1] = pack<Shape::kOperand>(s[t][2 * k][2], s[t][2 * k][3]);",
     "a[t][1] = pack<Shape::kOperand>(s[t][2 * k][3], s[t][2 * k][2]);"),
    ("byte order", PAGES, "pack<Element::kF16>(value.x, value.y)",
     "pack<Element::kF16>(value.y, value.x)"),
    ("byte order", APPEND, "pack<kElement>(x[2], x[3])", "pack<kElement>(x[3], x[2])"),
    ("byte order", DECODE, "mma_16x8x16<Shape::kOperand>(s[t][2 * n + 1], q[t][k], b[2], b[3]);",
     "mma_16x8x16<Shape::kOperand>(s[t][2 * n + 1], q[t][k], b[3], b[2]);"),
    ("page lookup", PAGES, "request.second + (token - request.n_first)",
     "request.second + (token - request.n_first) + 1"),
    ("page lookup", PAGES, "pool.segments[entry >> kEntrySlotBits]",
     "pool.segments[(entry >> kEntrySlotBits) % 2]"),
    ("page lookup", DECODE, "const uint32_t row = at - page * p.pool.page_tokens.divisor;",
     "const uint32_t row = at % 64;"),
    ("page lookup", DECODE, "next.row = work.head * p.pool", "next.row = work.kv_head * p.pool"),
    # The entry of the tile behind the one that is copied.
    ("page lookup", DECODE, "    const Place place = task.next;\n"
     "    const uint32_t coming = token_first + i * kStride;\n"
     "    task.look_up(p, work, coming + kStride);\n",
     "    const uint32_t coming = token_first + i * kStride;\n"
     "    task.look_up(p, work, coming + kStride);\n"
     "    const Place place = task.next;\n"),
    ("page lookup", DECODE, "    task.look_up(p, work, coming + kStride);\n    task.evaluate_tile",
     "    task.look_up(p, work, coming);\n    task.evaluate_tile"),
    ("page lookup", DECODE, "    task.look_up(p, work, coming + kStride);\n    task.evaluate_tile",
     "    task.evaluate_tile"),
    # Tiles that are taken for stretches of a page, and are none.
    ("page edge", DECODE, "any_lane(row < lane || token_first",
     "any_lane(token_first"),
    ("page edge", DECODE, "any_lane(row < lane || token_first",
     "any_lane(row + 1 < lane || token_first"),
    ("page edge", DECODE, "row < lane || token_first + Shape::kTile > run_end", "row < lane"),
    ("page edge", DECODE, "token_first + Shape::kTile > run_end",
     "token_first + Shape::kTile > work.end"),
    ("page edge", DECODE, "lane_id() - lane_id() % Shape::kTile * kChunks",
     "lane_id() - lane_id() * kChunks"),
    ("page edge", DECODE, "part * 512 + rows * Shape::kRowBytes", "part * 512 + rows * 512"),
    ("page edge", DECODE, "part * 512 + rows * Shape::kRowBytes", "rows * Shape::kRowBytes"),
    ("page edge", DECODE, "row[part] = (part * 32 + lane_id()) / kChunks",
     "row[part] = lane_id() / kChunks"),
    ("page edge", DECODE, "shuffle(own, rows + row[part])", "shuffle(own, row[part])"),
    ("page lookup", LOGITS, "static_cast<int64_t>(work.kv_head) * request.log_weight_stride +",
     "static_cast<int64_t>(work.head) * request.log_weight_stride +"),
    ("merge weights", DECODE, "sum += decay.of_sum(load_shared<float>(state + l_at));",
     "sum += load_shared<float>(state + l_at);"),
    ("merge weights", DECODE, "const float lse = sum != 0.0f ?", "const float lse = sum > 0.0f ?"),
    ("merge weights", DECODE, "(top + log2_fast(sum)) * kLn2", "top * kLn2 + log2_fast(sum)"),
    ("merge weights", MERGE, "exp2_fast((lse[i] - base) * kLog2E)", "exp2_fast(lse[i] - base)"),
    ("merge weights", MERGE, "top + log2_fast(total) * kLn2", "top + log2_fast(total)"),
    ("merge weights", MERGE, "slot = first; slot < merge.n_slots",
     "slot = first; slot + 1 < merge.n_slots"),
    ("sinks", DECODE, "work.slot < 0 ? sink_of(p.tensors, at) * kLog2E : minus_infinity()",
     "sink_of(p.tensors, at) * kLog2E"),
    ("sinks", DECODE, "work.slot < 0 ? sink_of(p.tensors, at) * kLog2E : minus_infinity()",
     "minus_infinity()"),
    ("sinks", DECODE, "sink_of(p.tensors, at) * kLog2E", "sink_of(p.tensors, at)"),
    ("sinks", DECODE, "sum = exp2_fast(sink - base);", "sum = 0.0f;"),
    ("sinks", DECODE, "float top = sink;", "float top = minus_infinity();"),
    ("sinks", MERGE, "  total += exp2_fast((sink - base) * kLog2E);\n", ""),
    ("sinks", MERGE, "float top = sink;", "float top = minus_infinity();"),
    ("sinks", PAGES, "tensors.sink_logits + at.q_head", "tensors.sink_logits + at.token"),
    # Rows of bytes.
    ("swizzle", DECODE, "(chunk ^ (row / Shape::kLineRows %", "(chunk ^ (row %"),
    ("byte order", DECODE, "permute_bytes<0x7531>(low, high)", "permute_bytes<0x5713>(low, high)"),
    ("byte order", DECODE, "permute_bytes<0x6420>", "permute_bytes<0x3210>"),
    ("byte order", DECODE, "q[t][2 * k + i % 2], wide[0]", "q[t][2 * k + i / 2], wide[0]"),
    ("byte order", DECODE, "q[row_tile][k][half + 2] = four.y;",
     "q[row_tile][k][half + 2] = four.x;"),
    ("byte order", APPEND, "words[i / 4] |= byte << (i % 4 * 8);",
     "words[i / 4] |= byte << (24 - i % 4 * 8);"),
    ("byte order", DECODE, "Float4{even[2 * half], odd[2 * half], even[2 * half + 1]",
     "Float4{even[2 * half], even[2 * half + 1], odd[2 * half]"),
    ("scales", DECODE, "columns.key(n, i % 2) * q_scale[t][i / 2]",
     "columns.key(n, i % 2) * q_scale[t][0]"),
    ("scales", DECODE, "columns.key(n, i % 2) * q_scale[t][i / 2]",
     "columns.key(n, i / 2) * q_scale[t][i / 2]"),
    # A wrong slot, the slot of another stage, the wrong half, of another tile.
    ("scales", DECODE, "scales + lane_id() % Shape::kTile * 4;",
     "scales + lane_id() % Shape::kTile / 2 * 4;"),
    ("scales", DECODE, "own_scales(of, stage + 2", "own_scales(of, stages + 2"),
    ("scales", DECODE, "own_scales(of, stage + 2", "own_scales(of, (stage == stages ? stages + "
     "Shape::kRingBytes : stage) - Shape::kStageBytes + 2"),
    ("scales", DECODE, "    task.upper >>= 1;\n", ""),
    ("scales", DECODE, "(is_upper(of_k)) << ahead;", "(is_upper(of_k)) << (ahead - 1);"),
    ("scales", DECODE, "k_upper != is_upper(of.v_scales_offset_bytes)", "k_upper"),
    ("scales", DECODE, "lane_id() < Shape::kTile ? of_k : of_v", "of_k"),
    ("scales", DECODE, "word(of_v), valid);", "word(of_k), valid);"),
    ("scales", DECODE, "(scale & ~uint64_t{3});", "(scale);"),
    ("scales", DECODE, "return score + log[n][i];", "return score;"),
    ("scales", DECODE, "product_or_zero(weight, float_from_bits(both[n][i] & 0xffff0000u))",
     "weight * float_from_bits(both[n][i] & 0xffff0000u)"),
    ("scales", DECODE, "product_or_zero(weight, float_from_bits(both[n][i] & 0xffff0000u))",
     "product_or_zero(weight, float_from_bits(both[n][0] & 0xffff0000u))"),
    ("scales", APPEND, "for (uint32_t mask = 1; mask < lanes; mask *= 2) {",
     "for (uint32_t mask = 1; mask < 8; mask *= 2) {"),
    ("scales", APPEND, "top <= kRoundsToZero || top >= kInfinity", "top <= kRoundsToZero"),
    ("rounding", APPEND, "(size >> 20 & 1)) >> 20)", "1) >> 20)"),
    ("rounding", APPEND, "round_to_int(steps)", "static_cast<int>(steps)"),
    # Latent rows.
    ("wait count", MLA, "copy_async_wait<kAhead - 1>();", "copy_async_wait<kAhead>();"),
    ("wait count", MLA, "    copy_async_commit();\n    task.add_values", "    task.add_values"),
    ("stages", MLA, "(stage == task.shared ? stage + Shape::kRingBytes : stage) - "
     "Shape::kStageBytes", "stage"),
    ("stages", MLA, "stage = stage == task.shared + Shape::kRingBytes ? task.shared : stage;", ""),
    ("barrier", MLA, "    copy_async_wait<kAhead - 1>();\n    sync_block();\n",
     "    copy_async_wait<kAhead - 1>();\n"),
    ("barrier", MLA, "    task.scores(stage);\n    sync_block();\n", "    task.scores(stage);\n"),
    ("barrier", MLA, "    }\n    sync_block();\n    // Into", "    }\n    // Into"),
    ("barrier", MLA, "  sync_block();\n  task.store_results", "  task.store_results"),
    ("barrier", MLA, "    sync_block();  // before the next piece", "    // before the next piece"),
    ("barrier", MLA, "  sync_warp();\n  const uint32_t row", "  const uint32_t row"),
    ("swizzle", MLA, "((chunk ^ row % 8) * 16)", "(chunk * 16)"),
    ("swizzle", MLA, "((slice() * 2 + lane_id() / 8 % 2) ^ row % 8)",
     "((slice() * 2 + lane_id() / 8 % 2) ^ row % 4)"),
    ("swizzle", MLA, "(at ^ (n % 4 * 32))", "(at + n % 4 * 32)"),
    ("swizzle", MLA, "(chunk ^ (row / Shape::kLineRows % Shape::kWeightChunks))", "chunk"),
    ("swizzle", MLA, "(weights ^ (k * 32))", "weights"),
    ("tail mask", MLA, "const bool valid = token_first + row < work.end;",
     "const bool valid = token_first + row <= work.end;"),
    ("tail mask", MLA, "  next_entry[i] = 0;\n    if (token < work.end) {",
     "  next_entry[i] = 0;\n    {"),
    ("tail mask", MLA, "token_first + Shape::kTile > seen_by_all(work)",
     "token_first + Shape::kTile > seen_by_all(work) + 1"),
    ("tail mask", MLA, "bool sees = token < limit;", "bool sees = token <= limit;"),
    ("causal mask", MLA, "request.n_tokens - request.n_query + 1 + query;",
     "request.n_tokens - request.n_query + 2 + query;"),
    ("causal mask", MLA, "query = (work.row_first + own_row()) / p.tensors.group",
     "query = own_row() / p.tensors.group"),
    ("tree mask", MLA, "tree || visible > work.end", "visible > work.end"),
    ("tree mask", MLA, "if (tree && token >= request.tree_first) {",
     "if (tree && token > request.tree_first) {"),
    ("tree mask", MLA, "- request.tree_list) % 64 & 1", "- request.tree_first) % 64 & 1"),
    ("slices", MLA, "for (uint32_t part = 1; part < Shape::kSlices; ++part) {",
     "for (uint32_t part = 1; part < Shape::kSlices - 1; ++part) {"),
    ("slices", MLA, "k * Shape::kSlices * 16;", "k * 16;"),
    ("slices", MLA, "slice() * Shape::kPartBytes + lane_id() * 16",
     "(slice() ^ 1) % 2 * Shape::kPartBytes + lane_id() * 16"),
    ("soft cap", MLA, "if (p.softcap_log2 != 0.0f) {", "{"),
    ("rescale", MLA, "any_lane(low != 1.0f || high != 1.0f)", "any_lane(low != 1.0f)"),
    ("rescale", MLA, "o[t][n][2] *= high;", "o[t][n][2] *= low;"),
    ("rescale", MLA, "state.y * factor + sum", "state.y + sum"),
    ("rescale", MLA, "top > state.x ? exp2_fast(state.x - base) : 1.0f", "1.0f"),
    ("rescale", MLA, "  top = fmaxf(top, shuffle_xor(top, 2));\n", ""),
    ("rescale", MLA, "top == minus_infinity() ? 0.0f : top;\n  const float factor = top > state",
     "top;\n  const float factor = top > state"),
    ("byte order", MLA, "pack<Shape::kElement>(low, high)", "pack<Shape::kElement>(high, low)"),
    ("byte order", MLA, "shuffle_xor(odd ? low[0] : high[0], 1)",
     "shuffle_xor(odd ? high[0] : low[0], 1)"),
    ("page lookup", MLA, "static_cast<uint64_t>(work.head) * of.head_stride_bytes",
     "static_cast<uint64_t>(work.kv_head) * of.head_stride_bytes"),
    ("page lookup", MLA, "next_row[i] = at - page * p.pool.page_tokens.divisor;",
     "next_row[i] = at % 64;"),
    ("page lookup", MLA, "log_weight_at(p, work, token)", "log_weight_at(p, work, token_first)"),
    ("page lookup", MLA, "    task.look_up(p, work, coming);\n    if (task.is_owner()",
     "    task.look_up(p, work, token_first);\n    if (task.is_owner()"),
    ("merge weights", MLA, "const float lse = sum != 0.0f ?", "const float lse = sum > 1.0f ?"),
    ("merge weights", MLA, "inverse = sum != 0.0f ? factor / sum : 0.0f",
     "inverse = sum != 0.0f ? 1.0f / sum : 0.0f"),
    ("sinks", MLA, "work.slot < 0 && valid ? sink_of", "valid ? sink_of"),
    ("sinks", MLA, "sum * factor + exp2_fast(sink - base)", "sum * factor"),
    ("page lookup", APPEND, "if (of.v_offset_bytes != 0) {", "{"),
    ("plan", PLAN, "begin += take;", "begin += take + (begin == 0 ? kCutTokens : 0);"),
]

# What the suite consists of; each file is compiled again only where a mistake is in its reach.
SUITE = "tests/gpu/emulator_suite.cc"
OTHERS = [CUDA + "emulator.cc", "base/fiber.cc", PLAN, "tests/gpu/cases.cc", "base/assert.cc",
          "codecs/float8.cc", "codecs/int8.cc"]
TIMEOUT_S = 120


class Builder:
    def __init__(self, cxx, work):
        self.cxx = cxx
        self.work = work
        self.flags = ["-std=c++20", "-w"]

    def compile(self, source, to, overlay=None):
        include = ([f"-I{overlay}"] if overlay else []) + [f"-I{ROOT}", f"-I{ROOT}/include"]
        # To optimise the suite, which is compiled for each mistake, takes longer than that saves.
        level = "-O0" if source.endswith(SUITE) else "-O1"
        subprocess.run([*self.cxx, *self.flags, level, *include, "-c", source, "-o", to],
                       check=True)
        return to

    def prepare(self):
        self.objects = {
            path: self.compile(os.path.join(ROOT, path),
                               os.path.join(self.work, path.replace("/", "_") + ".o"))
            for path in OTHERS}

    def run_suite(self, name, bug=None):
        """The suite's exit status and last words, with `bug` planted."""
        folder = os.path.join(self.work, name)
        os.makedirs(folder)
        objects = dict(self.objects)
        suite_source = os.path.join(ROOT, SUITE)
        if bug:
            _, path, before, after = bug
            copy = os.path.join(folder, path)
            os.makedirs(os.path.dirname(copy))
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text = file.read()
            with open(copy, "w", encoding="utf-8") as file:
                file.write(text.replace(before, after))
            if path in objects:
                objects[path] = self.compile(copy, os.path.join(folder, "planted.o"))
        suite = self.compile(suite_source, os.path.join(folder, "suite.o"), overlay=folder)
        program = os.path.join(folder, "suite")
        subprocess.run([*self.cxx, suite, *objects.values(), "-o", program], check=True)
        try:
            result = subprocess.run([program, "--quiet", "--first"], capture_output=True, text=True,
                                    errors="replace", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return -1, f"no end after {TIMEOUT_S} s"
        words = [line for line in result.stdout.splitlines() if line.strip()]
        if not bug:
            return result.returncode, result.stdout + result.stderr
        shutil.rmtree(folder)
        return result.returncode, words[-1] if words else f"status {result.returncode}"


def check_texts(bugs):
    """Complaints about mistakes whose place is not, or not uniquely, in the sources."""
    complaints = []
    for kind, path, before, _ in bugs:
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            n = file.read().count(before)
        if n != 1:
            complaints.append(f"{path}: {n} places for the {kind} bug at {before!r}")
    return complaints


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cxx", default="g++", help="compiler; spaces separate arguments")
    parser.add_argument("--each-class", action="store_true", help="plant one of each class only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--require", type=float, default=90.0, help="percent to be found")
    parser.add_argument("--work", help="folder for what is built; default: a temporary one")
    arguments = parser.parse_args()

    complaints = check_texts(BUGS)
    if complaints:
        print("\n".join(complaints))
        return 1
    bugs = BUGS
    if arguments.each_class:  # of each the last, for the first ones are found in more ways
        bugs = list({bug[0]: bug for bug in BUGS}.values())
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        builder = Builder(arguments.cxx.split(), work)
        builder.prepare()
        status, output = builder.run_suite("clean")
        if status != 0:
            print(output)
            print("the suite fails without any bug")
            return 1
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(lambda pair: builder.run_suite(f"bug{pair[0]}", pair[1]),
                                    enumerate(bugs)))
    found = 0
    for (kind, path, before, _), (status, words) in zip(bugs, results):
        found += status != 0
        print(f"{'found ' if status != 0 else 'MISSED'}  {kind:14} {os.path.basename(path):16} "
              f"{before.strip().splitlines()[0][:60]:60}  {words}")
    percent = 100.0 * found / len(bugs)
    print(f"{found} of {len(bugs)} planted bugs found ({percent:.0f} %)")
    return 0 if percent >= arguments.require else 1


if __name__ == "__main__":
    sys.exit(main())
