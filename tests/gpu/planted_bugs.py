#!/usr/bin/env python3
"""Plants mistakes into the GPU kernels, one at a time, and counts how many the suite finds.

Usage: planted_bugs.py --cxx g++ [--each-file] [--jobs N] [--require PERCENT] [--work FOLDER]

Each mistake is a replacement in a copy of one source file; its text must occur exactly once, so a
kernel that has moved on makes the command fail, not the mistake vanish. The suite is compiled with
the copy and run, part by part, until one fails: one must. First it is run without any, and must
pass (with --each-file that is left to gpu_emulator_suite). Prints a line for each mistake; exits 1
when fewer than REQUIRE percent are found. Python standard library only.
"""

import argparse
import concurrent.futures
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CUDA = "attention/cuda/"
(DECODE, PREFILL, MLA, TILES, ROWS, CODES, LOGITS, SHAPES, MERGE, APPEND, PAGES, PLAN, TABLE,
 LENGTHS, STRETCH, READ, STATES, TAIL) = (
    CUDA + name for name in
    ("decode_kernel.h", "prefill_kernel.h", "mla_kernel.h", "tiles.h", "warp_rows.h",
     "code_rows.h", "logits.h", "shapes.h", "merge_kernel.h", "append_kernel.h", "pages.h",
     "plan.cc", "table_kernel.h", "lengths_kernel.h", "stretch.h", "read_kernel.h",
     "states_kernel.h", "tail.h"))

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
     "    copy_async_commit();\n    task.next = look_up",
     "    task.next = look_up"),
    ("stages", DECODE, "task.next, free, work.end", "task.next, full, work.end"),
    ("stages", DECODE, "    free = full;\n", ""),
    ("stages", DECODE, "task.stages + Shape::kRingBytes ? task.stages : full;",
     "task.stages + Shape::kRingBytes ? task.stages + Shape::kStageBytes : full;"),
    ("swizzle", TILES, "(chunk ^ (row / Shape::kLineRows % Shape::kGroupChunks)) * 16",
     "chunk * 16"),
    ("swizzle", TILES, "8 + lane_id() % 8, lane_id() / 8 % 2);",
     "8 + lane_id() % 8, lane_id() / 8 % 2 ^ 1);"),
    ("swizzle", ROWS, "moved<Shape>(at, k * 16, n * 2)",
     "at + k * 16 * Shape::kRowBytes + n * 32"),
    ("swizzle", TILES, "((chunks ^ rows / Shape::kLineRows) & kInGroup)", "(chunks & kInGroup)"),
    ("swizzle", TILES, "((chunks ^ rows / Shape::kLineRows) & kInGroup)",
     "(rows / Shape::kLineRows & kInGroup)"),
    ("swizzle", TILES, "(chunks & ~kInGroup) * 16", "(chunks & ~7u) * 16"),
    ("swizzle", TILES, "kGroupChunks = power_in(kRowChunks, 8)",
     "kGroupChunks = kRowChunks > 4 ? 8 : 4"),
    ("tail mask", DECODE, "bool sees = token < limit;", "bool sees = token <= limit;"),
    ("tail mask", DECODE, "if (token_first + Shape::kTile > limit_least) {",
     "if (token_first + Shape::kTile > limit_least + 1) {"),
    ("tail mask", TILES, "const bool valid = rows + row[part] < n_tokens;",
     "const bool valid = rows + row[part] <= n_tokens;"),
    ("tail mask", TILES, "  place.entry = 0;\n  if (token < work.end) {",
     "  place.entry = 0;\n  if (token < work.end + kTokens) {"),
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
    ("soft cap", ROWS, "(capped ? soft_cap(p, score) : score) + weight;",
     "capped ? soft_cap(p, score) : score + weight;"),
    ("soft cap", ROWS, "(capped ? soft_cap(p, score) : score) + weight;",
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
    ("rescale", ROWS, "o[row_tile][n][2] *= factor[1];", "o[row_tile][n][2] *= factor[0];"),
    ("rescale", ROWS, "decay.of_sum(l[row_tile][half]) + sum;", "l[row_tile][half] + sum;"),
    ("rescale", ROWS, "kNarrow ? sum * root * root : sum * whole", "sum * whole"),
    ("rescale", ROWS, "factor[half] = decay.whole;",
     "factor[half] = 0.98f * decay.whole;"),
    ("rescale", ROWS, "if (any_lane(grew)) {", "if (any_lane(grew && lane_id() < 16)) {"),
    ("rescale", ROWS, "    top = fmaxf(top, shuffle_xor(top, 2));\n", ""),
    ("rescale", ROWS, "const float base = top == minus_infinity() ? 0.0f : top;\n    const Decay",
     "const float base = top;\n    const Decay"),
    ("byte order", ROWS, "a[t][1] = pack<Shape::kOperand>(s[t][2 * k][2], s[t][2 * k][3]);",
     "a[t][1] = pack<Shape::kOperand>(s[t][2 * k][3], s[t][2 * k][2]);"),
    ("byte order", PAGES, "pack<Element::kF16>(value.x, value.y)",
     "pack<Element::kF16>(value.y, value.x)"),
    ("byte order", APPEND, "pack<kElement>(x[2], x[3])", "pack<kElement>(x[3], x[2])"),
    ("byte order", ROWS, "(s[t][2 * n + 1], q[t][0].words, b[2], b[3]);",
     "(s[t][2 * n + 1], q[t][0].words, b[3], b[2]);"),
    ("page lookup", PAGES, "request.second + (token - request.n_first)",
     "request.second + (token - request.n_first) + 1"),
    ("page lookup", PAGES, "pool.segments[entry >> kEntrySlotBits]",
     "pool.segments[(entry >> kEntrySlotBits) % 2]"),
    ("page lookup", TILES, "const uint32_t row = at - page * p.pool.page_tokens.divisor;",
     "const uint32_t row = at % 64;"),
    ("page lookup", TILES, "place.row = work.head * p.pool", "place.row = work.kv_head * p.pool"),
    # The entry of the tile behind the one that is copied.
    ("page lookup", DECODE, "    const Place place = task.next;\n"
     "    const uint32_t coming = token_first + i * kStride;\n"
     "    task.next = look_up<Shape::kTile>(p, work, coming + kStride);\n",
     "    const uint32_t coming = token_first + i * kStride;\n"
     "    task.next = look_up<Shape::kTile>(p, work, coming + kStride);\n"
     "    const Place place = task.next;\n"),
    ("page lookup", DECODE,
     "    task.next = look_up<Shape::kTile>(p, work, coming + kStride);\n    task.evaluate_tile",
     "    task.next = look_up<Shape::kTile>(p, work, coming);\n    task.evaluate_tile"),
    ("page lookup", DECODE,
     "    task.next = look_up<Shape::kTile>(p, work, coming + kStride);\n    task.evaluate_tile",
     "    task.evaluate_tile"),
    # Tiles that are taken for stretches of a page, and are none.
    ("page edge", TILES, "any_lane(row < lane || token_first",
     "any_lane(token_first"),
    ("page edge", TILES, "any_lane(row < lane || token_first",
     "any_lane(row + 1 < lane || token_first"),
    ("page edge", TILES, "row < lane || token_first + kTokens > run_end", "row < lane"),
    ("page edge", TILES, "token_first + kTokens > run_end",
     "token_first + kTokens > work.end"),
    ("page edge", TILES, "lane_id() - lane_id() % kTokens * kChunks",
     "lane_id() - lane_id() * kChunks"),
    ("page edge", TILES, "part * 512 + rows * Shape::kRowBytes", "part * 512 + rows * 512"),
    ("page edge", TILES, "part * 512 + rows * Shape::kRowBytes", "rows * Shape::kRowBytes"),
    ("page edge", TILES, "row[part] = (part * 32 + lane_id()) / kChunks",
     "row[part] = lane_id() / kChunks"),
    ("page edge", TILES, "shuffle(own, rows + row[part])", "shuffle(own, row[part])"),
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
    ("swizzle", TILES, "(chunk ^ (row / Shape::kLineRows %", "(chunk ^ (row %"),
    ("byte order", ROWS, "permute_bytes<0x7531>(low, high)", "permute_bytes<0x5713>(low, high)"),
    ("byte order", ROWS, "permute_bytes<0x6420>", "permute_bytes<0x3210>"),
    ("byte order", ROWS, "q[t][i % 2].words, wide[0]", "q[t][i / 2].words, wide[0]"),
    ("byte order", ROWS, "q[k].words[half + 2] = four.y;", "q[k].words[half + 2] = four.x;"),
    ("byte order", APPEND, "words[i / 4] |= byte << (i % 4 * 8);",
     "words[i / 4] |= byte << (24 - i % 4 * 8);"),
    ("byte order", ROWS, "Float4{even[2 * half] * factor, odd[2 * half] * factor,",
     "Float4{odd[2 * half] * factor, even[2 * half] * factor,"),
    ("scales", ROWS, "columns.key(n, i % 2) * q_scale[t][i / 2]",
     "columns.key(n, i % 2) * q_scale[t][0]"),
    ("scales", ROWS, "columns.key(n, i % 2) * q_scale[t][i / 2]",
     "columns.key(n, i / 2) * q_scale[t][i / 2]"),
    # A wrong slot, the slot of another stage, the wrong half, of another tile.
    ("scales", DECODE, "scales + lane_id() % Shape::kTile * 4;",
     "scales + lane_id() % Shape::kTile / 2 * 4;"),
    ("scales", DECODE, "spread(own_scales(of, scales))",
     "spread(own_scales(of, stages + 2 * Shape::kPlaneBytes))"),
    ("scales", DECODE, "spread(own_scales(of, scales))", "spread(own_scales(of, (stage == stages ? "
     "scales + Shape::kRingBytes : scales) - Shape::kStageBytes))"),
    ("scales", DECODE, "    task.upper >>= 1;\n", ""),
    ("scales", DECODE, "(is_upper(of_k)) << ahead;", "(is_upper(of_k)) << (ahead - 1);"),
    ("scales", TILES, "k_upper != is_upper(of.v_scales_offset_bytes)", "k_upper"),
    ("scales", DECODE, "lane_id() < Shape::kTile ? of_k : of_v", "of_k"),
    ("scales", DECODE, "word_of(of_v), valid);", "word_of(of_k), valid);"),
    ("scales", TILES, "(address & ~uint64_t{3});", "(address);"),
    ("scales", DECODE, "return score + log[n][i]; }\n  // The scale",
     "return score; }\n  // The scale"),
    ("scales", DECODE, "product_or_zero(weight, float_from_bits(both[n][i] & 0xffff0000u))",
     "weight * float_from_bits(both[n][i] & 0xffff0000u)"),
    ("scales", DECODE, "product_or_zero(weight, float_from_bits(both[n][i] & 0xffff0000u))",
     "product_or_zero(weight, float_from_bits(both[n][0] & 0xffff0000u))"),
    ("scales", APPEND, "for (uint32_t mask = 1; mask < lanes; mask *= 2) {",
     "for (uint32_t mask = 1; mask < 8; mask *= 2) {"),
    ("scales", APPEND, "top <= kRoundsToZero || top >= kInfinity", "top <= kRoundsToZero"),
    ("rounding", APPEND, "(size >> 20 & 1)) >> 20)", "1) >> 20)"),
    ("rounding", APPEND, "round_to_int(steps)", "static_cast<int>(steps)"),
    # Rows of 5 chunks of bytes.
    ("odd chunk", ROWS, "q[t] = queries.get(t, kLast);", "q[t] = queries.get(t, 0);"),
    ("odd chunk", ROWS, "add_bytes(a, last[k % 2 * 2], last[k % 2 * 2 + 1], kLast);",
     "add_bytes(a, last[0], last[1], kLast);"),
    ("odd chunk", ROWS, "last, values + tile_offset<Shape>(k * 16 + lane_id(), kLast)",
     "last, values + tile_offset<Shape>(k * 16 + lane_id() % 16, kLast)"),
    ("scales", APPEND, "row_chunks <= 16 ? 16 : 32", "row_chunks <= 16 ? row_chunks : 32"),
    # Rows of 4 bits.
    ("steps", CODES, "to[1] = codes & 0x00f000f0u;", "to[1] = codes >> 4 & 0x000f000fu;"),
    ("steps", CODES, "kUpperCodeUnit = 0x1p-20f", "kUpperCodeUnit = 0x1p-24f"),
    ("steps", CODES, "x[j + 4] * unit)", "x[j + 1] * unit)"),
    ("steps", CODES, "sums[c / 2] += x[i];", "sums[c % 2] += x[i];"),
    ("steps", CODES, "first | second << 16", "first"),
    ("steps", CODES, "lane_id() % 4 == g ? sum * kCodeUnit",
     "lane_id() / 4 == g ? sum * kCodeUnit"),
    ("steps", CODES, "own.scale(h, i % 2, group)", "own.scale(h, i / 2, group)"),
    ("steps", CODES, "own.begin_group(g);\n        Fragment",
     "own.begin_group(0);\n        Fragment"),
    ("steps", CODES, "own.begin_group(g);\n        add_group",
     "own.begin_group(0);\n        add_group"),
    ("steps", CODES, "queries.get(t, 4 * group + step)", "queries.get(t, step)"),
    ("steps", CODES, "permute_bytes<0x3232>(word, 0)", "permute_bytes<0x1010>(word, 0)"),
    ("steps", CODES, "fmaxf(top, fmaxf(scale, zero))", "fmaxf(top, scale)"),
    ("steps", ROWS, "z[row_tile][1][g] *= factor[1];", "z[row_tile][1][g] *= factor[0];"),
    ("steps", CODES, "z[t][i % 2][g] += weight[1] * own.zero(i / 2, 1, g);", ""),
    ("steps", CODES, "s[t][n][2 * half + i] != 0.0f) {", "true) {"),
    ("steps", CODES, "*broken = sum != sum;", "*broken = false;"),
    ("steps", DECODE, "lane_id() < Shape::kTile ? k : v, valid);", "k, valid);"),
    ("steps", DECODE, "static_cast<uint64_t>(row) * kBytes", "static_cast<uint64_t>(row) * 4"),
    ("steps", CODES, "    zeros += shuffle_xor(zeros, 2);\n", ""),
    ("steps", CODES, "lane_id() % 4 * 8 + i * 4) * 4,", "lane_id() % 4 * 8 + (1 - i) * 4) * 4,"),
    ("steps", CODES, "  sync_warp();\n#pragma unroll\n", "#pragma unroll\n"),
    ("steps", APPEND, "top > kLargest", "top > 0x7f800000u"),
    ("steps", APPEND, "(wanted & 0xffffu) != 0 ? 1 : 0", "0"),
    ("steps", APPEND, "(cut_up ? 1 : 0)", "0"),
    ("steps", APPEND, "groups + chunk / 8) * 4", "groups) * 4"),
    ("steps", APPEND, "const float other_least = shuffle_xor(least, mask),",
     "const float other_least = shuffle_xor(least, mask % 4),"),
    ("early merge", MERGE, "  wait_for_kernel_before();\n", ""),
    ("early merge", SHAPES, "if (p.merge_follows) {", "if (!p.merge_follows) {"),
    # The prefill kernel.
    ("wait count", PREFILL, "copy_async_wait<kAhead - 1>();", "copy_async_wait<kAhead>();"),
    ("wait count", PREFILL, "    copy_async_commit();\n    task.next = look_up",
     "    task.next = look_up"),
    ("stages", PREFILL, "task.next, free, coming, kAhead", "task.next, full, coming, kAhead"),
    ("stages", PREFILL, "    free = full;\n", ""),
    ("stages", PREFILL, "stages + Shape::kRingBytes ? stages : full;",
     "stages + Shape::kRingBytes ? stages + Shape::kStageBytes : full;"),
    ("barrier", PREFILL, "    sync_block();\n    // The stage of the tile before",
     "    sync_warp();\n    // The stage of the tile before"),
    ("barrier", PREFILL, "  sync_block();  // results go", "  // results go"),
    ("barrier", PREFILL, "    sync_block();  // before the next piece", "    // before the next"),
    ("barrier", PREFILL, "      sync_warp();\n      for (uint32_t index",
     "      for (uint32_t index"),
    ("barrier", PREFILL, "      sync_warp();  // before the next eight rows\n", ""),
    ("swizzle", TILES, "to + tile_offset<Shape>(first + row[part]",
     "to + first * Shape::kRowBytes + tile_offset<Shape>(row[part]"),
    ("swizzle", PREFILL, "const uint32_t first = first_of_slice(warp);",
     "const uint32_t first = 0;"),
    ("tail mask", PREFILL, "if (token >= work.end || !sees(", "if (!sees("),
    ("tail mask", PREFILL, "token < work.end ? work.end - token : 0;", "work.end - token;"),
    ("tail mask", PREFILL, "token_end > plain.end;", "token_first > plain.end;"),
    ("causal mask", PREFILL, "request.n_query + 1 + rows.query_first;",
     "request.n_query + 1 + rows.query_last;"),
    ("causal mask", PREFILL, "request.n_query + 1 + rows.query_last &&",
     "request.n_query + rows.query_last &&"),
    ("causal mask", PREFILL, "query_list_token(work.request, row / p.tensors.group);",
     "query_list_token(work.request, row % p.tensors.group);"),
    ("causal mask", PREFILL, "rows.first / p.tensors.group;",
     "(rows.first + p.tensors.group - 1) / p.tensors.group;"),
    ("causal mask", PREFILL, "rows.query_last = (rows.end - 1)", "rows.query_last = rows.first"),
    ("causal mask", PREFILL, "first + t * 16 + half * 8 + lane_id() / 4;\n      own",
     "work.row_first + t * 16 + half * 8 + lane_id() / 4;\n      own"),
    ("causal mask", PAGES, "return end - request.n_query + query;",
     "return request.n_tokens - request.n_query + query;"),
    ("causal mask", PAGES, "return list <= own &&", "return"),
    ("window mask", PAGES, "own - list < sight.window", "own - list <= sight.window"),
    ("window mask", PAGES, "list < sight.n_sinks ||", ""),
    ("window mask", PAGES, "list < sight.n_sinks ||", "list <= sight.n_sinks ||"),
    ("window mask", PAGES, "own - list < sight.n_recent", "own - list <= sight.n_recent"),
    ("window mask", PREFILL, "own - reach + 1;", "own - reach;"),
    ("window mask", PREFILL, "own - reach + 1;", "own - reach + 2;"),
    ("window mask", PREFILL, "sight.window < sight.n_recent ? sight.window : sight.n_recent",
     "sight.n_recent"),
    ("window mask", PREFILL, "query_list_token(request, rows.query_last))",
     "query_list_token(request, rows.query_first))"),
    ("window mask", PREFILL, "const uint32_t begin = two ? request.n_first : 0;",
     "const uint32_t begin = 0;"),
    ("window mask", PREFILL, "(begin < sinks_end || end > low)", "end > low"),
    ("window mask", PREFILL, "token_first < plain.begin ||", ""),
    ("rescale", PREFILL, "decay.whole * inverse,", "inverse,"),
    ("rescale", PREFILL, "decay.of_sum(rows.sum_of(t, half))", "rows.sum_of(t, half)"),
    ("rescale", ROWS, "  sum += shuffle_xor(sum, 2);\n", ""),
    ("merge weights", PREFILL, "p.partial_lse + slot_row + (own - work.row_first)",
     "p.partial_lse + slot_row + own"),
    ("merge weights", PREFILL, "(slot_row + (row - work.row_first)) * Shape::kDim",
     "(slot_row + row) * Shape::kDim"),
    ("merge weights", PREFILL, "(top + log2_fast(sum)) * kLn2", "top * kLn2 + log2_fast(sum)"),
    ("sinks", PREFILL, "work.slot < 0 && own < n_rows ? sink_of", "own < n_rows ? sink_of"),
    ("sinks", PREFILL, " + exp2_fast(sink - base);", ";"),
    ("queries", PREFILL, "row < n_rows, t, half, p, q);", "row < n_rows, 0, half, p, q);"),
    ("queries", PREFILL, "Shape::kWarpQueryBytes + lane_id() * 16;",
     "Shape::kWarpQueryBytes + lane_id() / 2 * 32;"),
    ("queries", PREFILL, "(row_tile * Shape::kSharedSteps + step - Shape::kHeldSteps) * 512",
     "(step - Shape::kHeldSteps) * 512"),
    ("queries", PREFILL, "return held[row_tile][step];", "return held[0][step];"),
    ("queries", PREFILL, "queries.place(stages + Shape::kRingBytes)", "queries.place(stages)"),
    ("page lookup", PREFILL, "look_up<Shape::kSlice>(p, work, coming + Shape::kTile + slice);\n"
     "    task.evaluate", "look_up<Shape::kSlice>(p, work, coming + slice);\n    task.evaluate"),
    ("page lookup", PREFILL, "log_weight_at(p, work, token + lane_id())",
     "log_weight_at(p, work, token)"),
    ("page lookup", PREFILL, "token + lane_id()), valid);", "token + lane_id()), true);"),
    ("scales", PREFILL, "    task.upper >>= 1;\n", ""),
    ("scales", PREFILL, "(is_upper(of_first)) << ahead;",
     "(is_upper(of_first)) << (ahead - 1);"),
    ("scales", PREFILL, "task.unpack_scales(of, full);", "task.unpack_scales(of, free);"),
    ("scales", PREFILL, "first_of_slice(thread_id() / 32) + lane_id();",
     "first_of_slice(thread_id() / 32);"),
    ("scales", PREFILL, "bounded_log_scale(float_from_bits(both & 0xffff0000u))",
     "bounded_log_scale(float_from_bits(both << 16))"),
    ("scales", PREFILL, "word_of(of_first + of.v_scales_offset_bytes)", "word_of(of_first)"),
    ("scales", PREFILL, "both(n, i) & 0xffff0000u", "both(n, 0) & 0xffff0000u"),
    ("scales", PREFILL, "Shape::kColumnsAt + lane_id() % 4 * 16)",
     "Shape::kColumnsAt + lane_id() % 4 * 8)"),
    # Warps that copy one plane.
    ("planes", PREFILL, "warp % Shape::kSlicesOfPlane) * Shape::kSlice", "warp) * Shape::kSlice"),
    ("planes", PREFILL, "of_v ? to + Shape::kPlaneBytes : to", "to"),
    ("planes", PREFILL, "of_v ? page + of.v_offset_bytes : page", "page"),
    ("planes", PREFILL, "&& !of_v && lane_id()", "&& lane_id()"),
    ("planes", PREFILL, "(first + lane_id() + (of_v ? Shape::kTile : 0)) * 4",
     "(first + lane_id()) * 4"),
    ("planes", PREFILL, "(upper & 1) != 0 ? word & 0xffff0000u : word << 16", "word << 16"),
    ("planes", PREFILL, "place.row) * 2 +\n                                                     "
     "(of_v ? of.v_scales_offset_bytes", "place.row) * 2 +\n (of_v ? 0"),
    ("planes", PREFILL, "bounded_log_scale(scale)", "0.0f"),
    ("planes", PREFILL, "return score + load(2, n, i);", "return score;"),
    ("planes", PREFILL, "product_or_zero(weight, load(1, n, i))", "weight * load(1, n, i)"),
    ("planes", PREFILL, "return load(0, n, i);", "return load(1, n, i);"),
    # Rows of 4 bits in it.
    ("steps", PREFILL, "Shape::kTile + thread_id() / 32 * Shape::kSlice +", "Shape::kTile +"),
    ("steps", PREFILL, "group = lane_id() / Shape::kSlice % Shape::kGroups", "group = 0"),
    ("steps", PREFILL, "group) * 4 +\n                              "
     "(of_v ? of.v_scales_offset_bytes", "group) * 4 +\n (of_v ? 0"),
    ("steps", PREFILL, "broken = of_v && sum != sum;", "broken = false;"),
    ("steps", PREFILL, "broken = of_v && sum != sum;", "broken = sum != sum;"),
    ("steps", PREFILL, "mask < Shape::kLanesOfPlane; mask *= 2", "mask < 0; mask *= 2"),
    ("steps", PREFILL, "Shape::kPlaneSteps * 4, bounded_log_scale(top));",
     "Shape::kPlaneSteps * 4, 0.0f);"),
    ("steps", PREFILL, "Shape::kBrokenAt + thread_id() / 32 * 4", "Shape::kBrokenAt"),
    ("steps", PREFILL, "Shape::kBrokenAt + lane_id() % Shape::kWarps * 4", "Shape::kBrokenAt"),
    ("steps", PREFILL, "Shape::kWordsAt + Shape::kPlaneSteps * 4;", "Shape::kWordsAt;"),
    ("steps", PREFILL, "return words + (group * Shape::kTile + token) * 4;",
     "return words + token * 4;"),
    ("steps", PREFILL, "        rows.gather_zeros(t, half);\n", ""),
    ("steps", PREFILL, "(lane_id() % Shape::kGroups * Shape::kTile + lane_id() / 4) * 4",
     "lane_id() / 4 * 4"),
    ("steps", PREFILL, "lane_id() % 4 * 8 + sixteen * 64", "lane_id() % 4 * 8 + sixteen * 32"),
    ("steps", PREFILL, "group * Shape::kTile * 4 + tile * 32", "tile * 32"),
    ("steps", PREFILL, "column == 0 ? zeros[tile].x : zeros[tile].y", "zeros[tile].x"),
    ("steps", PREFILL, "task.unpack_steps(full);", "task.unpack_steps(free);"),
    ("steps", PREFILL, "Shape::kColumnsAt + Shape::kPlaneSteps * 4}", "Shape::kColumnsAt}"),
    ("steps", PREFILL, "shared - lane_id() * 16 + Shape::kFragmentBytes",
     "shared - lane_id() * 16"),
    ("steps", PREFILL, "shared + Shape::kFragmentBytes + Shape::kSumBytes",
     "shared + Shape::kFragmentBytes"),
    ("steps", PREFILL, "load_shared<Float4>(queries.aside() + i * 128)",
     "load_shared<Float4>(queries.aside())"),
    ("steps", PREFILL, "    put_aside();\n  }\n  has_rows", "  }\n  has_rows"),
    ("steps", PREFILL, "    put_aside();\n  } else {", "  } else {"),
    ("plan", PLAN, "tokens_behind(row_first, whole.n_query,",
     "tokens_behind(row_first, whole.n_query + 1,"),
    ("plan", PLAN, "row_first / options.group + 1;", "row_first / options.group + 2;"),
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
    ("lengths", LENGTHS, "entry / p.max_pages % p.max_items", "entry / p.max_pages"),
    ("lengths", LENGTHS, "length < most ? most - length : 0", "most - length"),
    ("lengths", LENGTHS, "return missing < unsure ? missing : unsure;", "return missing;"),
    ("lengths", LENGTHS, "load_global<uint32_t>(&p.items[item].n_append) -",
     "load_global<uint32_t>(&p.items[item].n_query) -"),
    ("lengths", LENGTHS, "request.q_token - query_row +", "0 * query_row +"),
    ("lengths", LENGTHS, "(prefill ? work->row_first / kind.group : 0)", "0"),
    ("lengths", LENGTHS, "request.n_query == n_query || request.tree_first != kNoTree",
     "request.n_query == n_query"),
    ("lengths", LENGTHS, "request.n_query == n_query || request.tree_first != kNoTree",
     "request.tree_first != kNoTree"),
    ("lengths", LENGTHS, "kind.sights[request.page_class]", "kind.sights[0]"),
    ("lengths", LENGTHS, "set_stretch(&request, seen, tree_list);",
     "set_stretch(&request, seen, request.tree_list);"),
    ("lengths", LENGTHS, "if (work.begin == 0 && work.end >= n_tokens) {",
     "if (work.begin == 0 && work.end > n_tokens) {"),
    ("lengths", LENGTHS, "if (work.begin == 0 && work.end >= n_tokens) {",
     "if (work.end >= n_tokens) {"),
    ("lengths", LENGTHS, "work.end = work.end < n_tokens ? work.end : n_tokens;", ""),
    ("lengths", LENGTHS, "if (first.end >= bring_request(p, kind, &first)) {",
     "if (first.end > bring_request(p, kind, &first)) {"),
    ("lengths", LENGTHS, "merge.n_query = merge.row_first = 0;", "merge.n_query = 0;"),
    ("lengths", LENGTHS, "kind.planned_work[merge.work]", "kind.planned_work[0]"),
    ("lengths", LENGTHS, "position / p.page_tokens - page", "position / p.page_tokens"),
    ("lengths", LENGTHS, "token.row = position % p.page_tokens;", ""),
    ("counts", LENGTHS, "i < n_tokens; i += step", "i < n_tokens + 1; i += step"),
    ("counts", LENGTHS, "block_id() * kLengthsThreads + thread_id()", "thread_id()"),
    ("stretch", STRETCH, "sight.window < sight.n_recent ? sight.window : sight.n_recent",
     "sight.n_recent"),
    ("stretch", STRETCH, "sinks < sight.n_sinks && sight.n_sinks < rest", "sight.n_sinks < rest"),
    ("stretch", STRETCH, "sinks < sight.n_sinks && sight.n_sinks < rest", "false"),
    ("stretch", STRETCH, "in_first < seen.n_first ? in_first : seen.n_first", "seen.n_first"),
    ("stretch", STRETCH, "list > seen.second ? list - seen.second : 0",
     "list > seen.first ? list - seen.first : 0"),
    ("stretch", STRETCH, "n_query - 1 - (end - 1) / group", "n_query - 1 - end / group"),
    ("plan", PLAN, "n_before <= full ? 0 :", "true ? 0 :"),
    ("plan", PLAN, "counts.n_slots, n_pieces, first}", "counts.n_slots, n_pieces, first + 1}"),
    ("plan", PLAN, "begin += take;", "begin += take + (begin == 0 ? kCutTokens : 0);"),
    # The tail of a launch: who counts, what becomes of the count, who learns it.
    ("tail", TAIL, "(&p.tail->first) + asked", "(&p.tail->first) + asked + 1"),
    ("tail", TAIL, "n + block_count() - 1", "n + block_count()"),
    ("tail", TAIL, "n + block_count() - 1", "n + block_count() - 2"),
    ("tail", TAIL, "n + block_count() - 1", "~0u"),
    ("tail", TAIL, "return asked < load_global", "return asked + 1 < load_global"),
    ("tail", TAIL, "return asked < load_global", "return asked <= load_global"),
    ("tail", TAIL, "return asked < load_global", "return asked % 5 != 4 && asked < load_global"),
    ("tail", TAIL, "if (work.next != 0 || p.tail == nullptr) {", "if (p.tail == nullptr) {"),
    ("tail", DECODE, "asked = thread_id() == 0 ? ask_for_piece",
     "asked = lane_id() == 0 ? ask_for_piece"),
    ("tail", DECODE, "asked = thread_id() == 0 ? ask_for_piece(p, p.work[piece]) : kNotAsked;",
     "asked = kNotAsked;"),
    ("tail", DECODE, "piece_behind(p, p.work[piece], asked));",
     "piece_behind(p, p.work[piece], ask_for_piece(p, p.work[piece])));"),
    ("tail", DECODE, "    piece = load_shared<uint32_t>(shared_start() + Shape::kNextAt);\n",
     "    piece = piece_behind(p, p.work[piece], asked);\n"),
    ("tail", DECODE, "kNextAt = kStateBytes;", "kNextAt = kStateBytes - 4;"),
    ("barrier", DECODE, "    sync_block();\n    piece = load_shared", "    piece = load_shared"),
    ("tail", PLAN, "counts.n_slots + n_pieces - 1 - i)",
     "counts.n_slots + n_pieces - 1)"),
    ("tail", PLAN, "whole.slot = n_pieces == 1 ? -1 :", "whole.slot ="),
    ("tail", PLAN, "return begin == 0 && kept != n_tokens ? kept : begin;", "return begin;"),
    ("tail", PLAN, "      from.n_kept = begin;\n", ""),
    ("tail", PLAN, "giver->n_kept != 0 ? giver->n : 0", "0"),
    ("tail", PLAN, "subspan(of.pieces_first, of.n_pieces)", "subspan(0, of.n_pieces)"),
    ("tail", PLAN, "    n_pieces += n_given;\n", ""),
    # Rows read back, and states from elsewhere.
    ("page lookup", READ, "p.page_table + p.tables[c] + page", "p.page_table + p.tables[0] + page"),
    ("page lookup", READ, "const uint32_t list = p.first + token;", "const uint32_t list = token;"),
    ("page lookup", READ, "list - page * p.pool.page_tokens.divisor;", "list % 64;"),
    ("page lookup", READ, " + (is_v ? of.v_offset_bytes : 0);", ";"),
    ("page lookup", READ, "static_cast<uint64_t>(head) * of.head_stride_bytes",
     "static_cast<uint64_t>(kv_head) * of.head_stride_bytes"),
    ("counts", READ, "token += block_count()", "token += p.n_tokens"),
    ("counts", READ, "const uint32_t row_chunks = tensor.dim / 8;",
     "const uint32_t row_chunks = p.dim / 8;"),
    ("scales", READ, "(is_v ? of.v_scales_offset_bytes : 0) + row", "row"),
    ("scales", READ, "head * p.pool.page_tokens.divisor * params_bytes", "head * params_bytes"),
    ("steps", READ, "params + chunk / 8 * 4", "params"),
    ("steps", READ, "* scale + zero;", "* scale;"),
    ("steps", READ, "float_from_bits(steps << 16)", "float_from_bits(steps & 0xffff0000u)"),
    ("byte order", READ, "halves[i / 4][i / 2 % 2]", "halves[i / 4][i % 2]"),
    ("byte order", READ, "pack<Element::kF16>(x[2 * i], x[2 * i + 1])",
     "pack<Element::kF16>(x[2 * i + 1], x[2 * i])"),
    ("rounding", READ, "tensor.dtype == (kElement == Element::kBf16 ? Dtype::kBf16 : Dtype::kF16)",
     "tensor.dtype != Dtype::kF32"),
    ("merge weights", STATES, "(lse_i - top) * kLog2E", "(lse_i - top)"),
    ("merge weights", STATES, "if (lse_i == minus_infinity()) {", "if (false) {"),
    ("merge weights", STATES, "log2_fast(total) * kLn2", "log2_fast(total)"),
    ("merge weights", STATES, "total != 0.0f ? 1.0f / total : 0.0f", "1.0f / total"),
    ("merge weights", STATES, "    total = 0.0f;\n", ""),
    ("merge weights", STATES, "lane_id() < p.n_states", "lane_id() < 2"),
    ("counts", STATES, "i += step)", "i += block_count())"),
    ("counts", STATES, "first += 128", "first += 256"),
    ("counts", STATES, "if (channel < p.dim) {\n        const", "{\n        const"),
    ("byte order", STATES, "unpack<Element::kF16>(raw.x, 0), unpack<Element::kF16>(raw.x, 1)",
     "unpack<Element::kF16>(raw.x, 1), unpack<Element::kF16>(raw.x, 0)"),
    ("queries", STATES, "return row * tensor.stride_token + head * tensor.stride_head;",
     "return head * tensor.stride_token + row * tensor.stride_head;"),
]

# What the suite consists of; each file is compiled again only where a mistake is in its reach.
SUITE = ["tests/gpu/emulated_attention.cc", "tests/gpu/emulator_suite.cc"]
OTHERS = [CUDA + "emulator.cc", "base/fiber.cc", PLAN, "tests/gpu/cases.cc",
          "tests/gpu/row_cases.cc", "base/assert.cc", "codecs/float8.cc", "codecs/int8.cc",
          "codecs/low_bits.cc", "base/cpu_features.cc"]
if platform.machine() == "x86_64":
    OTHERS.append("codecs/low_bits_avx2.cc")
TIMEOUT_S = 120

# The suite's parts (KVM_SUITE_PARTS), those first that find a mistake of a kind or in a file. Of
# one that has kernels of several head dimensions, first those of USUAL_DIM alone (KVM_SUITE_DIM):
# they are compiled in two thirds of the time, run in less, and find most.
WIDE, NARROW, PREFILLS, MLAS, NO_ATTENTION = PARTS = (1, 2, 4, 8, 16)
USUAL_DIM, ALL_DIMS = 128, 0
FIRST_FOR_KIND = {"steps": NARROW, "scales": NARROW}
FIRST_FOR_FILE = {CODES: NARROW, ROWS: NARROW, LOGITS: PREFILLS, PREFILL: PREFILLS, MLA: MLAS,
                  APPEND: NO_ATTENTION, TABLE: NO_ATTENTION, MERGE: NO_ATTENTION,
                  LENGTHS: NO_ATTENTION, READ: NO_ATTENTION, STATES: NO_ATTENTION}


def parts_for(bug):
    """Pairs of a part and a head dimension, in the order in which they are tried."""
    kind, path, _, _ = bug
    first = FIRST_FOR_FILE.get(path, FIRST_FOR_KIND.get(kind, WIDE))
    parts = [(part, ALL_DIMS) for part in sorted(PARTS, key=lambda part: (part != first, part))]
    return [(first, USUAL_DIM)] * (first in (WIDE, NARROW, PREFILLS)) + parts


class Builder:
    def __init__(self, cxx, work):
        self.cxx = cxx
        self.work = work
        self.flags = ["-std=c++20", "-w"]
        self.lock = threading.Lock()
        self.clean_parts = {}

    def compile(self, source, to, overlay=None, options=("-O1",)):
        include = ([f"-I{overlay}"] if overlay else []) + [f"-I{ROOT}", f"-I{ROOT}/include"]
        isa = ["-mavx2"] if source.endswith("_avx2.cc") else []
        subprocess.run([*self.cxx, *self.flags, *isa, *options, *include, "-c", source, "-o", to],
                       check=True)
        return to

    def compile_part(self, part, to, overlay=None):
        """The suite in one go: most of either file is the headers that they share."""
        source = f"{to}.cc"
        with open(source, "w", encoding="utf-8") as file:
            file.writelines(f'#include "{path}"\n' for path in SUITE)
        # To optimise it, which is compiled for each mistake, takes longer than that saves.
        options = [f"-DKVM_SUITE_PARTS={part[0]}", f"-DKVM_SUITE_DIM={part[1]}", "-O0"]
        return self.compile(source, to, overlay, options)

    def prepare(self):
        self.objects = {
            path: self.compile(os.path.join(ROOT, path),
                               os.path.join(self.work, path.replace("/", "_") + ".o"))
            for path in OTHERS}

    def clean_part(self, part):
        """The object of a part without mistakes."""
        with self.lock:
            if part not in self.clean_parts:
                name = f"part{part[0]}_{part[1]}.o"
                self.clean_parts[part] = self.compile_part(part, os.path.join(self.work, name))
            return self.clean_parts[part]

    def run_part(self, folder, suite, objects):
        """The exit status of a program of these objects, and what it says."""
        program = os.path.join(folder, "suite")
        subprocess.run([*self.cxx, suite, *objects.values(), "-o", program], check=True)
        try:
            result = subprocess.run([program, "--quiet", "--first"], capture_output=True, text=True,
                                    errors="replace", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return -1, f"no end after {TIMEOUT_S} s"
        return result.returncode, result.stdout + result.stderr

    def run_clean(self):
        """Whether the suite passes without a mistake; says what fails."""
        for part in PARTS:
            suite = self.clean_part((part, ALL_DIMS))
            status, said = self.run_part(self.work, suite, self.objects)
            if status != 0:
                print(said)
                return False
        return True

    def finds(self, name, bug):
        """Whether a part fails with `bug` planted, and its last words."""
        folder = os.path.join(self.work, name)
        objects = dict(self.objects)
        _, path, before, after = bug
        copy = os.path.join(folder, path)
        os.makedirs(os.path.dirname(copy))
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        with open(copy, "w", encoding="utf-8") as file:
            file.write(text.replace(before, after))
        if path in objects:
            objects[path] = self.compile(copy, os.path.join(folder, "planted.o"))
        found, words = False, ""
        for part in parts_for(bug):
            suite = self.clean_part(part) if path in objects else self.compile_part(
                part, os.path.join(folder, "suite.o"), folder)
            status, said = self.run_part(folder, suite, objects)
            found, words = status != 0, ([*filter(str.strip, said.splitlines())] or [status])[-1]
            if found:
                break
        shutil.rmtree(folder)
        return found, words


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
    parser.add_argument("--each-file", action="store_true", help="plant one into each file only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--require", type=float, default=90.0, help="percent to be found")
    parser.add_argument("--work", help="folder for what is built; default: a temporary one")
    arguments = parser.parse_args()

    complaints = check_texts(BUGS)
    if complaints:
        print("\n".join(complaints))
        return 1
    bugs = BUGS
    if arguments.each_file:  # the first, which many configurations find: the suite ends soon
        bugs = list({bug[1]: bug for bug in reversed(BUGS)}.values())
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        builder = Builder(arguments.cxx.split(), work)
        builder.prepare()
        if not arguments.each_file and not builder.run_clean():
            print("the suite fails without any bug")
            return 1
        n_found = 0
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            results = pool.map(lambda pair: builder.finds(f"bug{pair[0]}", pair[1]),
                               enumerate(bugs))
            for (kind, path, before, _), (found, words) in zip(bugs, results):
                n_found += found
                print(f"{'found ' if found else 'MISSED'}  {kind:14} {os.path.basename(path):16} "
                      f"{before.strip().splitlines()[0][:60]:60}  {words}", flush=True)
    percent = 100.0 * n_found / len(bugs)
    print(f"{n_found} of {len(bugs)} planted bugs found ({percent:.0f} %)")
    return 0 if percent >= arguments.require else 1


if __name__ == "__main__":
    sys.exit(main())
