// SPDX-License-Identifier: Apache-2.0
#include "engine/index_build.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "codecs/convert.h"
#include "hash_index/sketch/frame.h"

namespace kvm::engine {

using hash_index::SketchKind;
using tiers::kNoPage;
using tiers::PageRef;

namespace {

constexpr uint64_t kFrameTokens = uint64_t{kFrameBlocks} * kPageTokens;
constexpr uint64_t kMinFrameKeys = 64;
// Tables that one task builds: several tasks share a run.
constexpr uint32_t kTablesPerTask = 16;
// Blocks to wait for before memory that was refused is asked for again.
constexpr uint64_t kRetryBlocks = kIndexPageBlocks;
constexpr size_t kTableAlign = 64;

// The kind of a configuration; null: as the keys suit.
const SketchKind* sketch_kind(uint32_t kind) {
  static constexpr SketchKind kKinds[] = {SketchKind::kBits1, SketchKind::kLead8Bits1,
                                          SketchKind::kBits2};
  return kind == KVM_INDEX_SKETCH ? nullptr : &kKinds[kind - KVM_INDEX_SKETCH_1BIT];
}

// The part of a run from position `begin` on.
KvRun cut_front(KvRun run, uint64_t begin, const Space& space) {
  if (begin <= run.position) {
    return run;
  }
  const auto n = static_cast<uint32_t>(begin - run.position);
  run.k = static_cast<const std::byte*>(run.k) +
          uint64_t{n} * space.head_dim_k * dtype_size_bytes(run.dtype_k);
  run.v = static_cast<const std::byte*>(run.v) +
          uint64_t{n} * space.head_dim_v * dtype_size_bytes(run.dtype_v);
  run.log_weight = run.log_weight == nullptr ? nullptr : run.log_weight + n;
  run.k_scale = run.k_scale == nullptr ? nullptr : run.k_scale + n;
  run.v_scale = run.v_scale == nullptr ? nullptr : run.v_scale + n;
  run.position = begin;
  run.n_tokens = static_cast<uint16_t>(run.n_tokens - n);
  return run;
}

// The stored tokens of [begin, end), end being a multiple of kPageTokens.
std::vector<KvRun> runs_between(KvRuns runs, uint64_t begin, uint64_t end, const Space& space) {
  std::vector<KvRun> found;
  const auto first = std::partition_point(runs.begin(), runs.end(), [begin](const KvRun& run) {
    return run.position + run.n_tokens <= begin;
  });
  for (auto it = first; it != runs.end() && it->position < end; ++it) {
    found.push_back(cut_front(*it, begin, space));
  }
  return found;
}

uint64_t count_tokens(KvRuns runs) {
  uint64_t n = 0;
  for (const KvRun& run : runs) {
    n += run.n_tokens;
  }
  return n;
}

// Where what a head's index is made from begins: sinks look like no other keys.
uint64_t first_typical(const IndexConfig& config) {
  return std::min(config.n_sinks, config.min_tokens / 2);
}

uint64_t n_frames_for(uint64_t n_blocks) { return (n_blocks + kFrameBlocks - 1) / kFrameBlocks; }

bool head_is_needed(const IndexRef& ref, uint32_t head, const IndexConfig& config,
                    uint64_t n_blocks) {
  if (config.kind == KVM_INDEX_NONE || n_blocks * kPageTokens < config.min_tokens) {
    return false;
  }
  const bool waits = ref.data != nullptr && n_blocks < ref.data->heads[head].retry_at;
  return !waits && blocks_dealt_with(ref, head, config) < n_blocks;
}

}  // namespace

// --- Planning -----------------------------------------------------------------------------------

bool IndexBuild::is_needed(const Space& space, uint32_t layer, const IndexRef& ref,
                           uint64_t n_blocks) {
  const std::vector<IndexConfig>& configs = space.layers[layer].indexes;
  for (uint32_t head = 0; head < configs.size(); ++head) {
    if (head_is_needed(ref, head, configs[head], n_blocks)) {
      return true;
    }
  }
  return false;
}

IndexBuild::IndexBuild(Sequence* seq, const Space& space, uint32_t layer,
                       std::vector<std::vector<KvRun>> class_runs, SeenQueries seen,
                       const IndexRef& ref, uint64_t n_blocks)
    : seq_(seq), space_(&space), layer_(layer), class_runs_(std::move(class_runs)), seen_(seen) {
  const std::vector<IndexConfig>& configs = space.layers[layer].indexes;
  for (uint32_t i = 0; i < configs.size(); ++i) {
    if (!head_is_needed(ref, i, configs[i], n_blocks)) {
      continue;
    }
    Head& head = heads_.emplace_back();
    const HeadPlace place = space.place(layer, i);
    head.kv_head = i;
    head.class_index = place.class_index;
    head.page_head = place.head;
    head.config = configs[i];
    head.block_begin = blocks_dealt_with(ref, i, configs[i]);
    head.block_end = n_blocks;
    if (configs[i].kind == KVM_INDEX_LSH) {
      plan_tables(ref, &head);
    } else {
      plan_frames(ref, &head);
    }
  }
}

void IndexBuild::plan_frames(const IndexRef& ref, Head* head) const {
  head->first_frame = n_frames_for(head->block_begin);
  head->n_frames = n_frames_for(head->block_end) - head->first_frame;
  // The last that there is, as in a build of all runs at once.
  for (uint64_t i = head->first_frame; i > 0 && head->previous == nullptr; --i) {
    const IndexFramePtr& frame = ref.data->heads[head->kv_head].frames[i - 1];
    head->previous = frame == nullptr ? nullptr : frame->frame;
  }
}

void IndexBuild::plan_tables(const IndexRef& ref, Head* head) const {
  const auto is_there = [&](const HashRun& run) {
    // Those beyond the blocks that hold are of tokens that a fork or a truncate left behind.
    if (ref.data == nullptr || run.end() > head->block_begin * kPageTokens) {
      return false;
    }
    const std::vector<IndexTablesPtr>& tables = ref.data->heads[head->kv_head].tables;
    return std::any_of(tables.begin(), tables.end(),
                       [&run](const IndexTablesPtr& t) { return t->run == run; });
  };
  for (const HashRun& run : hash_runs(head->block_end * kPageTokens, head->config.min_tokens)) {
    // Tables hold every key of their run.
    if (!is_there(run) && count_tokens(runs_between(runs_of(*head), run.position, run.end(),
                                                    *space_)) == run.n_keys) {
      head->tables.emplace_back().run = run;
    }
  }
}

uint64_t IndexBuild::n_pages() const {
  uint64_t n = 0;
  for (const std::vector<KvRun>& runs : class_runs_) {
    n += runs.size();
  }
  return n;
}

// --- Frames -------------------------------------------------------------------------------------

void IndexBuild::make_frames(uint32_t index) {
  Head& head = heads_[index];
  try {
    if (head.config.kind != KVM_INDEX_LSH) {
      make_sketch_frames(&head);
    }
    for (NewTables& tables : head.tables) {
      make_center(head, &tables);
    }
  } catch (const std::bad_alloc&) {
    // What is not there is not used.
  }
}

void IndexBuild::make_sketch_frames(Head* head) const {
  const uint32_t group = space_->layers[layer_].group();
  const uint32_t dim = space_->head_dim_k;
  std::vector<float> queries;
  const uint64_t row_floats = uint64_t{space_->layers[layer_].n_q_heads} * dim;
  for (uint32_t row = 0; row < seen_.n_rows; ++row) {
    const float* first = seen_.q + row * row_floats + uint64_t{head->kv_head} * group * dim;
    queries.insert(queries.end(), first, first + uint64_t{group} * dim);
  }
  hash_index::FramePtr previous = head->previous;
  for (uint64_t i = 0; i < head->n_frames; ++i) {
    const uint64_t run = head->first_frame + i;
    const uint64_t begin = run == 0 ? 0 : (run - 1) * kFrameTokens;
    const uint64_t end =
        run == 0 ? head->config.min_tokens / kPageTokens * kPageTokens : run * kFrameTokens;
    const std::vector<KvRun> runs =
        runs_between(runs_of(*head), std::max(begin, first_typical(head->config)), end, *space_);
    hash_index::FramePtr frame;
    if (count_tokens(runs) >= kMinFrameKeys) {
      frame = hash_index::make_frame(
          {.runs = runs,
           .head = head->page_head,
           .dim_k = dim,
           .queries = queries,
           .seed = mix_seed(mix_seed(head->config.seed, layer_, head->kv_head), run, 0),
           .previous = previous.get()},
          sketch_kind(head->config.kind));
    }
    previous = frame != nullptr ? frame : previous;
    head->frames.push_back(std::move(frame));
  }
}

// The mean of the keys.
void IndexBuild::make_center(const Head& head, NewTables* tables) const {
  const uint32_t dim = space_->head_dim_k;
  const HashRun& hash_run = tables->run;
  std::vector<double> sums(dim);
  std::vector<float> rows(uint64_t{kPageTokens} * dim);
  const uint64_t begin = std::max(hash_run.position, first_typical(head.config));
  const std::vector<KvRun> runs = runs_between(runs_of(head), begin, hash_run.end(), *space_);
  const auto page_head = static_cast<uint16_t>(head.page_head);
  for (const KvRun& run : runs) {
    const uint64_t row_bytes = uint64_t{dim} * dtype_size_bytes(run.dtype_k);
    codecs::convert_rows({.data = run.k,
                          .dtype = run.dtype_k,
                          .row_stride_bytes = row_bytes,
                          .head_stride_bytes = kPageTokens * row_bytes,
                          .heads = &page_head,
                          .scales = run.k_scale},
                         {.data = rows.data(),
                          .dtype = Dtype::kF32,
                          .row_stride_bytes = dim * sizeof(float),
                          .head_stride_bytes = dim * sizeof(float)},
                         run.n_tokens, 1, dim);
    for (uint64_t i = 0; i < uint64_t{run.n_tokens} * dim; ++i) {
      sums[i % dim] += double{rows[i]};
    }
  }
  const double n = std::max<double>(1.0, static_cast<double>(count_tokens(runs)));
  for (const double sum : sums) {
    tables->center.push_back(static_cast<float>(sum / n));
  }
}

// --- Memory -------------------------------------------------------------------------------------

namespace {

// Page `number` of an index, there and the index's own, for writing; null where memory was refused.
std::byte* open_page(uint64_t number, uint64_t page_bytes, HeadIndex* index,
                     const IndexBank& bank) {
  IndexPage& page = index->pages[number];
  // Another size: left behind by a build that found no memory, before other queries were seen.
  const bool fits = page.page != kNoPage && bank.pool().page_bytes(page.page) == page_bytes;
  if (fits && bank.pool().n_refs(page.page) == 1) {
    return bank.pool().data(page.page);
  }
  const PageRef fresh = bank.allocate(page_bytes);
  if (fresh == kNoPage) {
    return nullptr;
  }
  if (fits) {
    std::memcpy(bank.pool().data(fresh), bank.pool().data(page.page), page_bytes);
  }
  if (page.page != kNoPage) {
    bank.release(page.page);
  }
  page.page = fresh;
  return bank.pool().data(fresh);
}

// Whether a whole page of tokens is stored in [begin, end).
bool has_whole_block(KvRuns runs, uint64_t begin, uint64_t end) {
  auto run = std::partition_point(runs.begin(), runs.end(),
                                  [begin](const KvRun& r) { return r.position < begin; });
  while (run != runs.end() && run->position < end && run->n_tokens != kPageTokens) {
    ++run;
  }
  return run != runs.end() && run->position < end;
}

}  // namespace

namespace {

// What a frame takes beside the one before it, whose basis it may share.
uint64_t added_bytes(const hash_index::Frame& frame, const IndexFrame* previous) {
  if (previous != nullptr && previous->frame->basis == frame.basis) {
    return sizeof(frame) + frame.center.size() * sizeof(float);
  }
  return hash_index::frame_bytes(frame);
}

}  // namespace

void IndexBuild::open(IndexRef* ref, const IndexBank& bank) {
  LayerIndex* index = own_index(ref, space_->layers[layer_].indexes, bank);
  for (uint32_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    if (head.config.kind == KVM_INDEX_LSH) {
      open_tables(i, &index->heads[head.kv_head], bank);
      continue;
    }
    HeadIndex& of_head = index->heads[head.kv_head];
    const uint64_t end = open_sketches(i, &of_head, bank);
    if (end < head.block_end) {
      bank.totals().n_refused += head.block_end - end;
      of_head.retry_at = head.block_end + kRetryBlocks;
      head.block_end = end;
    }
    of_head.frames.resize(std::min<uint64_t>(of_head.frames.size(), n_frames_for(end)));
  }
}

// Returns the block where memory was refused, or the end.
uint64_t IndexBuild::open_sketches(uint32_t head_index, HeadIndex* index, const IndexBank& bank) {
  Head& head = heads_[head_index];
  const uint32_t dim = space_->head_dim_k;
  index->frames.resize(head.first_frame);
  for (uint64_t block = head.block_begin; block < head.block_end;) {
    const uint64_t number = block / kIndexPageBlocks;
    const uint64_t run = block / kFrameBlocks;
    const uint64_t end = std::min((number + 1) * kIndexPageBlocks, head.block_end);
    if (run == index->frames.size()) {
      const uint64_t i = run - head.first_frame;
      if (i >= head.frames.size()) {
        return block;  // the machine had no memory for it
      }
      IndexFramePtr made;
      if (head.frames[i] != nullptr) {
        const uint64_t size_bytes = added_bytes(
            *head.frames[i], index->frames.empty() ? nullptr : index->frames.back().get());
        if (!bank.charge(size_bytes)) {
          return block;
        }
        // An allocation that throws would leave the charge without an owner.
        const IndexFrame* owner =
            new (std::nothrow) IndexFrame{head.frames[i], ChargedMemory(bank, size_bytes)};
        if (owner == nullptr) {
          bank.uncharge(size_bytes);
          return block;
        }
        made.reset(owner);
      }
      index->frames.push_back(std::move(made));
    }
    index->pages.resize(std::max<uint64_t>(index->pages.size(), number + 1));
    const IndexFramePtr& frame = index->frames[run];
    if (frame != nullptr &&
        has_whole_block(runs_of(head), block * kPageTokens, end * kPageTokens)) {
      const uint64_t size = hash_index::block_bytes(hash_index::frame_kind(*frame->frame), dim);
      std::byte* codes = open_page(number, kIndexPageBlocks * size, index, bank);
      if (codes == nullptr) {
        return block;
      }
      pieces_.push_back({.head = head_index,
                         .block_begin = block,
                         .block_end = end,
                         .frame = frame->frame.get(),
                         .codes = codes + (block % kIndexPageBlocks) * size});
    }
    block = end;
  }
  return head.block_end;
}

void IndexBuild::open_tables(uint32_t head_index, HeadIndex* index, const IndexBank& bank) {
  Head& head = heads_[head_index];
  const auto refuse = [&](NewTables* made) {
    made->tables = nullptr;
    bank.totals().n_refused += made->run.n_keys / kPageTokens;
    index->retry_at = head.block_end + kRetryBlocks;
  };
  const hash_index::LshParams& lsh = space_->lsh;
  for (uint32_t i = 0; i < head.tables.size(); ++i) {
    NewTables& made = head.tables[i];
    const uint64_t table_bytes = hash_index::table_run_bytes(lsh, made.run.n_keys);
    const uint64_t size_bytes = table_bytes + made.center.size() * sizeof(float);
    if (made.center.empty() || !bank.charge(size_bytes)) {
      refuse(&made);
      continue;
    }
    auto* owner = new (std::nothrow) IndexTables{.run = made.run,
                                                 .center = std::move(made.center),
                                                 .tables = nullptr,
                                                 .memory = ChargedMemory(bank, size_bytes)};
    if (owner == nullptr) {
      bank.uncharge(size_bytes);
      refuse(&made);
      continue;
    }
    made.tables.reset(owner);
    made.tables->tables.reset(static_cast<std::byte*>(std::aligned_alloc(
        kTableAlign, (table_bytes + kTableAlign - 1) / kTableAlign * kTableAlign)));
    if (made.tables->tables == nullptr) {
      refuse(&made);
      continue;
    }
    for (uint32_t begin = 0; begin < lsh.n_tables; begin += kTablesPerTask) {
      table_pieces_.push_back({.head = head_index,
                               .run = i,
                               .table_begin = begin,
                               .table_end = std::min(begin + kTablesPerTask, lsh.n_tables)});
    }
  }
}

// --- Codes --------------------------------------------------------------------------------------

void IndexBuild::encode(uint32_t index) {
  Piece& piece = pieces_[index];
  const Head& head = heads_[piece.head];
  const size_t size =
      hash_index::block_bytes(hash_index::frame_kind(*piece.frame), space_->head_dim_k);
  const KvRuns runs = runs_of(head);
  const uint64_t begin = piece.block_begin * kPageTokens;
  auto run = std::partition_point(runs.begin(), runs.end(),
                                  [begin](const KvRun& r) { return r.position < begin; });
  for (; run != runs.end() && run->position < piece.block_end * kPageTokens; ++run) {
    if (run->n_tokens == kPageTokens) {
      const uint64_t at = run->position / kPageTokens - piece.block_begin;
      hash_index::encode_block(*piece.frame, *run, head.page_head, space_->head_dim_v,
                               piece.codes + at * size);
      piece.encoded |= uint32_t{1} << at;
    }
  }
}

void IndexBuild::hash(uint32_t index, ThreadWorkspace& workspace) {
  TablePiece& piece = table_pieces_[index];
  const Head& head = heads_[piece.head];
  const IndexTables& tables = *head.tables[piece.run].tables;
  const HashRun& run = tables.run;
  std::byte* scratch =
      workspace.scratch.reserve(hash_index::build_scratch_bytes(*space_->planes, run.n_keys));
  if (scratch == nullptr) {
    return;
  }
  const KvRuns all = runs_of(head);
  const auto first = std::partition_point(
      all.begin(), all.end(), [&run](const KvRun& r) { return r.position < run.position; });
  const KvRuns runs(first, run.n_keys / kPageTokens);
  hash_index::build_tables(*space_->planes, runs, head.page_head, tables.center.data(),
                           run.position, run.n_keys, piece.table_begin, piece.table_end, scratch,
                           tables.tables.get());
  piece.is_built = true;
}

// --- The end ------------------------------------------------------------------------------------

namespace {

// Pages before the last, from that of block_begin - 1 on, without a block: they were emptied while
// they were the last, to be filled further.
void release_empty_pages(uint64_t block_begin, HeadIndex* index, const IndexBank& bank) {
  const uint64_t first = (block_begin - std::min<uint64_t>(block_begin, 1)) / kIndexPageBlocks;
  for (uint64_t i = first; i + 1 < index->pages.size(); ++i) {
    IndexPage& page = index->pages[i];
    if (page.blocks == 0 && page.page != kNoPage) {
      bank.release(page.page);
      page.page = kNoPage;
    }
  }
}

}  // namespace

void IndexBuild::close(IndexRef* ref, const IndexBank& bank) {
  LayerIndex* index = ref->data.get();
  for (const Piece& piece : pieces_) {
    const Head& head = heads_[piece.head];
    IndexPage& page = index->heads[head.kv_head].pages[piece.block_begin / kIndexPageBlocks];
    page.blocks |= piece.encoded << (piece.block_begin % kIndexPageBlocks);
    bank.totals().n_blocks += static_cast<uint64_t>(std::popcount(piece.encoded));
  }
  for (const TablePiece& piece : table_pieces_) {
    if (!piece.is_built) {
      heads_[piece.head].tables[piece.run].tables = nullptr;
    }
  }
  for (Head& head : heads_) {
    HeadIndex& of_head = index->heads[head.kv_head];
    of_head.n_blocks = head.block_end;
    release_empty_pages(head.block_begin, &of_head, bank);
    for (NewTables& made : head.tables) {
      if (made.tables != nullptr) {
        const HashRun run = made.run;
        bank.totals().n_blocks += run.n_keys / kPageTokens;
        std::erase_if(of_head.tables, [&run](const IndexTablesPtr& old) {
          return old->run.position < run.end() && old->run.end() > run.position;
        });
        of_head.tables.push_back(std::move(made.tables));
      }
    }
    std::sort(of_head.tables.begin(), of_head.tables.end(),
              [](const IndexTablesPtr& a, const IndexTablesPtr& b) {
                return a->run.position < b->run.position;
              });
  }
}

}  // namespace kvm::engine
