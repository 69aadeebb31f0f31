// SPDX-License-Identifier: Apache-2.0
#include "engine/index/index_build.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "base/assert.h"
#include "base/round.h"
#include "codecs/convert.h"
#include "engine/store/sequence.h"
#include "hash_index/sketch/frame.h"

namespace kvm::engine {

using hash_index::SketchKind;
using tiers::kNoPage;
using tiers::PageRef;

namespace {

constexpr uint64_t kFrameTokens = uint64_t{kFrameBlocks} * kPageTokens;
constexpr uint64_t kMinFrameKeys = 64;
constexpr uint64_t kHashRunBlocks = hash_index::kMaxRunKeys / kPageTokens;
// Tables that one task builds: several tasks share a run.
constexpr uint32_t kTablesPerTask = 16;
// Keys that one task sums up.
constexpr uint32_t kSumKeys = 8192;
// Blocks to wait for before memory that was refused is asked for again.
constexpr uint64_t kRetryBlocks = kIndexPageBlocks;
// In blocks to be coded: making a frame with a basis of its own, one that keeps that of the frame
// before it, as most do, and hashing a block's keys for kTablesPerTask tables.
constexpr uint64_t kBasisCost = 400;
constexpr uint64_t kFrameCost = 50;
constexpr uint64_t kHashCost = 1;

// The kind of a configuration; null: as the keys suit.
const SketchKind* sketch_kind(uint32_t kind) {
  static constexpr SketchKind kKinds[] = {SketchKind::kBits1, SketchKind::kLead8Bits1,
                                          SketchKind::kBits2};
  return kind == KVM_INDEX_SKETCH ? nullptr : &kKinds[kind - KVM_INDEX_SKETCH_1BIT];
}

// The part of a run from position `begin` on.
KvRun cut_front(KvRun run, uint64_t begin) {
  if (begin > run.position) {
    skip_tokens(&run, begin - run.position);
  }
  return run;
}

// The stored tokens of [begin, end), end being a multiple of kPageTokens.
std::vector<KvRun> runs_between(KvRuns runs, uint64_t begin, uint64_t end) {
  std::vector<KvRun> found;
  const auto first = std::partition_point(runs.begin(), runs.end(), [begin](const KvRun& run) {
    return run.position + run.n_tokens <= begin;
  });
  for (auto it = first; it != runs.end() && it->position < end; ++it) {
    found.push_back(cut_front(*it, begin));
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

// Returns where what a head's index is made from begins: sinks look like no other keys.
uint64_t first_typical(const IndexConfig& config) {
  // Some of the first frame and of the first tables are behind it.
  static_assert(kMaxIndexTokens / 2 < hash_index::kMaxRunKeys && kMaxIndexTokens <= kFrameTokens);
  return std::min(config.n_sinks, config.min_tokens / 2);
}

uint64_t n_frames_for(uint64_t n_blocks) { return div_up(n_blocks, kFrameBlocks); }

bool head_is_needed(const IndexRef& ref, uint32_t head, const IndexConfig& config,
                    uint64_t n_blocks) {
  if (config.kind == KVM_INDEX_NONE || n_blocks * kPageTokens < config.min_tokens) {
    return false;
  }
  const bool waits = ref.data != nullptr && n_blocks < ref.data->heads[head].retry_at &&
                     !ref.data->has_room_again();
  return !waits && blocks_dealt_with(ref, head, config) < n_blocks;
}

bool overlap(const HashRun& a, const HashRun& b) {
  return a.position < b.end() && b.position < a.end();
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

uint64_t IndexBuild::blocks_to_plan(const Space& space, uint32_t layer, const IndexRef& ref,
                                    uint64_t n_blocks) {
  const bool is_shared = ref.data != nullptr && ref.data.use_count() > 1;
  return is_shared && ref.limit < n_blocks && is_needed(space, layer, ref, ref.limit) ? ref.limit
                                                                                      : n_blocks;
}

IndexBuild::IndexBuild(Sequence* seq, const Space& space, uint32_t layer, const IndexRef& ref,
                       uint64_t n_blocks, uint64_t max_cost)
    : seq_(seq),
      space_(&space),
      layer_(layer),
      n_blocks_(n_blocks),
      pin_(ref.data.get()),
      claim_(ref.data.get()) {
  const std::vector<IndexConfig>& configs = space.layers[layer].indexes;
  for (uint32_t i = 0; i < configs.size() && (cost_ < max_cost || heads_.empty()); ++i) {
    if (!head_is_needed(ref, i, configs[i], n_blocks)) {
      continue;
    }
    Head& head = heads_.emplace_back();
    const HeadPlace place = space.place(layer, i);
    const bool is_hashed = configs[i].kind == KVM_INDEX_LSH;
    const uint64_t slice = is_hashed ? kHashRunBlocks : kFrameBlocks;
    head.kv_head = i;
    head.class_index = place.class_index;
    head.page_head = place.head;
    head.config = configs[i];
    head.block_begin = blocks_dealt_with(ref, i, configs[i]);
    head.block_end = std::min(n_blocks, (head.block_begin / slice + 1) * slice);
    KVM_ASSERT(head.block_begin < head.block_end);
    if (is_hashed) {
      plan_tables(ref, &head);
    } else {
      plan_frame(ref, &head);
    }
    cost_ += cost_of(head);
  }
  is_added_ = fits_shared(ref);
}

// What others read stays: nothing is cut, and no page or table is replaced. A page that a copy of
// the index has too would be copied for writing, and go where the copy goes.
bool IndexBuild::fits_shared(const IndexRef& ref) const {
  if (ref.data == nullptr) {
    return false;
  }
  // Nobody's limit is used up by what another client builds, but for the library's.
  const Account* payer = ref.data->bank.account();
  if (payer != seq_->account && (!payer->is_library || ref.data.use_count() == 1)) {
    return false;
  }
  return std::all_of(heads_.begin(), heads_.end(), [&ref](const Head& head) {
    const HeadIndex& index = ref.data->heads[head.kv_head];
    if (index.n_blocks != head.block_begin || head.block_end > ref.limit) {
      return false;
    }
    const uint64_t page = head.block_begin / kIndexPageBlocks;
    const bool is_own_page = page >= index.pages.size() || index.pages[page].page == kNoPage ||
                             ref.data->bank.pages().n_refs(index.pages[page].page) == 1;
    return is_own_page &&
           std::none_of(head.tables.begin(), head.tables.end(), [&index](const NewTables& made) {
             return std::any_of(
                 index.tables.begin(), index.tables.end(),
                 [&made](const IndexTablesPtr& old) { return overlap(old->run, made.run); });
           });
  });
}

void IndexBuild::plan_frame(const IndexRef& ref, Head* head) const {
  head->needs_frame = head->block_begin % kFrameBlocks == 0;
  KVM_ASSERT(head->block_begin < kFrameBlocks ||
             head->block_begin / kFrameBlocks <= ref.data->heads[head->kv_head].frames.size());
  // The last that there is, as in a build of all runs at once.
  for (uint64_t i = head->block_begin / kFrameBlocks; i > 0 && head->previous == nullptr; --i) {
    head->previous = ref.data->heads[head->kv_head].frames[i - 1];
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
    if (!is_there(run)) {
      head->tables.emplace_back().run = run;
    }
  }
}

uint64_t IndexBuild::cost_of(const Head& head) const {
  if (head.config.kind != KVM_INDEX_LSH) {
    const uint64_t of_frame = head.previous == nullptr ? kBasisCost : kFrameCost;
    return head.block_end - head.block_begin + (head.needs_frame ? of_frame : 0);
  }
  uint64_t n_keys = 0;
  for (const NewTables& tables : head.tables) {
    n_keys += tables.run.n_keys;
  }
  return n_keys / kPageTokens * kHashCost * div_up(space_->lsh.n_tables, kTablesPerTask);
}

PositionRange IndexBuild::frame_tokens(const Head& head) const {
  const uint64_t run = head.block_begin / kFrameBlocks;
  const uint64_t begin = run == 0 ? 0 : (run - 1) * kFrameTokens;
  const uint64_t end =
      run == 0 ? head.config.min_tokens / kPageTokens * kPageTokens : run * kFrameTokens;
  return {std::max(begin, first_typical(head.config)), end};
}

uint64_t IndexBuild::position_begin() const {
  uint64_t begin = UINT64_MAX;
  for (const Head& head : heads_) {
    if (head.config.kind != KVM_INDEX_LSH) {
      begin = std::min(begin, head.block_begin * kPageTokens);
    }
    if (head.needs_frame) {
      begin = std::min(begin, frame_tokens(head).begin);
    }
    for (const NewTables& tables : head.tables) {
      begin = std::min(begin, tables.run.position);
    }
  }
  return begin;
}

uint64_t IndexBuild::position_end() const {
  uint64_t end = 0;
  for (const Head& head : heads_) {
    end = std::max(end, head.block_end * kPageTokens);
    end = std::max(end, head.needs_frame ? frame_tokens(head).end : 0);
  }
  return end;
}

void IndexBuild::start(std::vector<std::vector<KvRun>> class_runs, std::vector<SeenQueries> seen,
                       const IndexBank& bank) {
  class_runs_ = std::move(class_runs);
  seen_ = std::move(seen);
  for (uint32_t i = 0; i < heads_.size(); ++i) {
    if (heads_[i].config.kind == KVM_INDEX_LSH) {
      start_tables(i);
    } else {
      start_frame(&heads_[i], bank);
    }
  }
}

// Charges the most that the frame may take, before a task makes it.
void IndexBuild::start_frame(Head* head, const IndexBank& bank) const {
  const bool is_whole_run = head->block_end - head->block_begin == kFrameBlocks;
  if (!head->needs_frame ||
      (is_whole_run && !has_whole_block(runs_of(*head), head->block_begin * kPageTokens,
                                        head->block_end * kPageTokens))) {
    return;
  }
  const bool has_queries = std::any_of(seen_.begin(), seen_.end(),
                                       [](const SeenQueries& seen) { return seen.n_rows != 0; });
  const uint64_t most = hash_index::max_frame_bytes(sketch_kind(head->config.kind),
                                                    space_->layers[layer_].dim_k, has_queries);
  if (!bank.charge(most)) {
    head->frame_failed = true;
    return;
  }
  // An allocation that throws would leave the charge without an owner.
  auto* owner = new (std::nothrow) IndexFrame{nullptr, ChargedMemory(bank, most)};
  if (owner == nullptr) {
    bank.uncharge(most);
    head->frame_failed = true;
    return;
  }
  head->frame.reset(owner);
}

void IndexBuild::start_tables(uint32_t index) {
  Head& head = heads_[index];
  // Tables hold every key of their run.
  std::erase_if(head.tables, [&](const NewTables& tables) {
    const HashRun& run = tables.run;
    return count_tokens(runs_between(runs_of(head), run.position, run.end())) != run.n_keys;
  });
  for (uint32_t i = 0; i < head.tables.size(); ++i) {
    const auto n_parts = static_cast<uint32_t>(div_up(head.tables[i].run.n_keys, kSumKeys));
    head.tables[i].sums.resize(n_parts);
    for (uint32_t part = 0; part < n_parts; ++part) {
      sum_pieces_.push_back({.head = index, .run = i, .part = part});
    }
  }
}

// --- Frames -------------------------------------------------------------------------------------

void IndexBuild::make_frame(uint32_t index) {
  Head& head = heads_[index];
  try {
    head.frame->frame = fit_frame(head);
  } catch (const std::bad_alloc&) {
    head.frame_failed = true;
  }
}

hash_index::FramePtr IndexBuild::fit_frame(const Head& head) const {
  const PositionRange tokens = frame_tokens(head);
  const std::vector<KvRun> runs = runs_between(runs_of(head), tokens.begin, tokens.end);
  if (count_tokens(runs) < kMinFrameKeys) {
    return nullptr;
  }
  const uint64_t dim = space_->layers[layer_].dim_k;
  const uint64_t group_floats = space_->layers[layer_].group() * dim;
  const uint64_t row_floats = space_->layers[layer_].n_q_heads * dim;
  std::vector<float> queries;
  for (const SeenQueries& seen : seen_) {
    for (uint32_t row = 0; row < seen.n_rows; ++row) {
      const float* first = seen.q + row * row_floats + head.kv_head * group_floats;
      queries.insert(queries.end(), first, first + group_floats);
    }
  }
  const uint64_t run = head.block_begin / kFrameBlocks;
  return hash_index::make_frame(
      {.runs = runs,
       .head = head.page_head,
       .dim_k = space_->layers[layer_].dim_k,
       .queries = queries,
       .seed = mix_seed(mix_seed(head.config.seed, layer_, head.kv_head), run, 0),
       .previous = head.previous == nullptr ? nullptr : head.previous->frame.get()},
      sketch_kind(head.config.kind));
}

void IndexBuild::sum_keys(uint32_t piece) {
  KVM_ASSERT(piece < sum_pieces_.size());
  const SumPiece& p = sum_pieces_[piece];
  NewTables& tables = heads_[p.head].tables[p.run];
  try {
    space_->planes.make(space_->lsh, space_->layers[layer_].dim_k);
    std::vector<double> sums(space_->layers[layer_].dim_k);
    add_keys(heads_[p.head], tables.run, p.part, sums.data());
    tables.sums[p.part] = std::move(sums);
  } catch (const std::bad_alloc&) {
    // A part that is missing says so.
  }
}

// Parts are cut by position, so that the sum does not depend on who adds up what.
void IndexBuild::add_keys(const Head& head, const HashRun& hash_run, uint32_t part,
                          double* sums) const {
  const uint32_t dim = space_->layers[layer_].dim_k;
  std::vector<float> rows(uint64_t{kPageTokens} * dim);
  const uint64_t first = hash_run.position + uint64_t{part} * kSumKeys;
  const uint64_t begin = std::max(first, first_typical(head.config));
  const uint64_t end = std::min(hash_run.end(), first + kSumKeys);
  const auto page_head = static_cast<uint16_t>(head.page_head);
  for (const KvRun& run : runs_between(runs_of(head), begin, end)) {
    codecs::SourceRows source = codecs::rows_of(run.k, dim, run.slot);
    source.heads = &page_head;
    codecs::convert_rows(source,
                         {.data = rows.data(),
                          .codec = CodecId::kF32,
                          .row_stride_bytes = dim * sizeof(float),
                          .head_stride_bytes = dim * sizeof(float)},
                         run.n_tokens, 1, dim);
    for (uint32_t token = 0; token < run.n_tokens; ++token) {
      const float* row = rows.data() + uint64_t{token} * dim;
      for (uint32_t i = 0; i < dim; ++i) {
        sums[i] += double{row[i]};
      }
    }
  }
}

// The mean of the keys; empty where a part of the sums found no memory.
std::vector<float> IndexBuild::center_of(const Head& head, const NewTables& tables) const {
  std::vector<double> all(space_->layers[layer_].dim_k);
  for (const std::vector<double>& sums : tables.sums) {
    if (sums.empty()) {
      return {};
    }
    std::transform(all.begin(), all.end(), sums.begin(), all.begin(), std::plus<>());
  }
  const uint64_t begin = std::max(tables.run.position, first_typical(head.config));
  KVM_ASSERT(begin < tables.run.end());
  const auto n = static_cast<double>(tables.run.end() - begin);
  std::vector<float> center;
  for (const double sum : all) {
    center.push_back(static_cast<float>(sum / n));
  }
  return center;
}

// --- Memory -------------------------------------------------------------------------------------

namespace {

// Page `number` of an index, there and the index's own, for writing; null where memory was refused.
std::byte* open_page(uint64_t number, uint64_t page_bytes, HeadIndex* index,
                     const IndexBank& bank) {
  IndexPage& page = index->pages[number];
  // Another size: left behind by a build that found no memory, before other queries were seen.
  const bool fits = page.page != kNoPage && bank.pages().page_bytes(page.page) == page_bytes;
  if (fits && bank.pages().n_refs(page.page) == 1) {
    return bank.pages().data(page.page);
  }
  const PageRef fresh = bank.allocate(page_bytes);
  if (fresh == kNoPage) {
    return nullptr;
  }
  if (fits) {
    std::memcpy(bank.pages().data(fresh), bank.pages().data(page.page), page_bytes);
  }
  if (page.page != kNoPage) {
    bank.release(page.page);
  }
  page.page = fresh;
  return bank.pages().data(fresh);
}

// Returns what a frame takes beside the one before it, whose basis it may share.
uint64_t added_bytes(const hash_index::Frame& frame, const IndexFrame* previous) {
  if (previous != nullptr && previous->frame->basis == frame.basis) {
    return sizeof(frame) + frame.center.size() * sizeof(float);
  }
  return hash_index::frame_bytes(frame);
}

}  // namespace

void IndexBuild::open(IndexRef* ref, const IndexBank& of_client) {
  LayerIndex* index = ref->data.get();
  if (!is_added_) {
    pin_ = IndexPin();  // of what may go with the reference
    claim_ = BuildClaim();
    index = own_index(ref, space_->layers[layer_].indexes, of_client);
    pin_ = IndexPin(index);
    claim_ = BuildClaim(index);
  }
  const IndexBank bank = index->bank;
  if (index->gone_bytes != 0) {
    index->gone_bytes = 0;
    for (HeadIndex& head : index->heads) {
      head.retry_at = 0;
    }
  }
  for (uint32_t i = 0; i < heads_.size(); ++i) {
    Head& head = heads_[i];
    HeadIndex& of_head = index->heads[head.kv_head];
    if (head.config.kind == KVM_INDEX_LSH) {
      open_tables(i, &of_head, bank);
      continue;
    }
    const uint64_t end = open_sketches(i, &of_head, bank);
    if (end < head.block_end) {
      refuse(head, end, n_blocks_, &of_head, bank);
      head.block_end = end;
    }
    of_head.frames.resize(std::min<uint64_t>(of_head.frames.size(), n_frames_for(end)));
  }
}

// Blocks found no memory: each is counted once, however often it is asked for.
void IndexBuild::refuse(const Head& head, uint64_t block_begin, uint64_t block_end,
                        HeadIndex* index, const IndexBank& bank) const {
  const uint64_t begin = std::max(block_begin, index->n_refused);
  bank.totals().n_refused += block_end - std::min(begin, block_end);
  index->n_refused = std::max(index->n_refused, block_end);
  index->retry_at = std::max(n_blocks_, head.block_end) + kRetryBlocks;
}

// False where memory was refused for the frame.
bool IndexBuild::install_frame(Head* head, HeadIndex* index) const {
  if (head->frame_failed) {
    return false;
  }
  if (head->frame == nullptr || head->frame->frame == nullptr) {
    index->frames.push_back(nullptr);
    return true;
  }
  head->frame->memory.shrink(added_bytes(*head->frame->frame, head->previous.get()));
  index->frames.push_back(head->frame);
  return true;
}

// Returns the block where memory was refused, or the end.
uint64_t IndexBuild::open_sketches(uint32_t head_index, HeadIndex* index, const IndexBank& bank) {
  Head& head = heads_[head_index];
  const uint32_t dim = space_->layers[layer_].dim_k;
  index->frames.resize(n_frames_for(head.block_begin));
  if (head.needs_frame && !install_frame(&head, index)) {
    return head.block_begin;
  }
  KVM_ASSERT(index->frames.size() == n_frames_for(head.block_end));
  const IndexFramePtr& frame = index->frames[head.block_begin / kFrameBlocks];
  for (uint64_t block = head.block_begin; block < head.block_end;) {
    const uint64_t number = block / kIndexPageBlocks;
    const uint64_t end = std::min((number + 1) * kIndexPageBlocks, head.block_end);
    index->pages.resize(std::max<uint64_t>(index->pages.size(), number + 1));
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

// Null where memory is refused.
std::shared_ptr<IndexTables> IndexBuild::make_tables(const Head& head, const NewTables& made,
                                                     const IndexBank& bank) const {
  std::vector<float> center = center_of(head, made);
  const uint64_t map_bytes = table_map_bytes(
      hash_index::table_run_bytes(space_->lsh, made.run.n_keys) + center.size() * sizeof(float));
  if (center.empty() || !bank.charge(map_bytes)) {
    return nullptr;
  }
  std::byte* data = map_tables(map_bytes);
  if (data == nullptr) {
    bank.uncharge(map_bytes);
    return nullptr;
  }
  auto* tables = new (std::nothrow) IndexTables{
      .run = made.run, .center = std::move(center), .tables = TableMemory(bank, data, map_bytes)};
  if (tables == nullptr) {
    bank.reclaim(data, map_bytes);
  }
  return std::shared_ptr<IndexTables>(tables);
}

void IndexBuild::open_tables(uint32_t head_index, HeadIndex* index, const IndexBank& bank) {
  Head& head = heads_[head_index];
  bool has_refused = false;
  for (uint32_t i = 0; i < head.tables.size(); ++i) {
    NewTables& made = head.tables[i];
    made.tables = make_tables(head, made, bank);
    if (made.tables == nullptr) {
      has_refused = true;
      refuse(head, made.run.position / kPageTokens, made.run.end() / kPageTokens, index, bank);
      continue;
    }
    for (uint32_t begin = 0; begin < space_->lsh.n_tables; begin += kTablesPerTask) {
      table_pieces_.push_back(
          {.head = head_index,
           .run = i,
           .table_begin = begin,
           .table_end = std::min(begin + kTablesPerTask, space_->lsh.n_tables)});
    }
  }
  if (has_refused) {
    refuse(head, head.block_end, n_blocks_, index, bank);
  }
}

// --- Codes --------------------------------------------------------------------------------------

void IndexBuild::encode(uint32_t index) {
  KVM_ASSERT(index < pieces_.size());
  Piece& piece = pieces_[index];
  KVM_ASSERT(piece.block_begin < piece.block_end &&
             piece.block_begin / kIndexPageBlocks == (piece.block_end - 1) / kIndexPageBlocks);
  const Head& head = heads_[piece.head];
  const size_t size =
      hash_index::block_bytes(hash_index::frame_kind(*piece.frame), space_->layers[layer_].dim_k);
  const KvRuns runs = runs_of(head);
  const uint64_t begin = piece.block_begin * kPageTokens;
  auto run = std::partition_point(runs.begin(), runs.end(),
                                  [begin](const KvRun& r) { return r.position < begin; });
  for (; run != runs.end() && run->position < piece.block_end * kPageTokens; ++run) {
    if (run->n_tokens == kPageTokens) {
      const uint64_t at = run->position / kPageTokens - piece.block_begin;
      hash_index::encode_block(*piece.frame, *run, head.page_head, space_->layers[layer_].dim_v,
                               piece.codes + at * size);
      if (hash_index::is_within_range(*piece.frame, piece.codes + at * size)) {
        piece.encoded |= uint32_t{1} << at;
      }
    }
  }
}

void IndexBuild::hash(uint32_t index, ThreadWorkspace& workspace) {
  KVM_ASSERT(index < table_pieces_.size());
  TablePiece& piece = table_pieces_[index];
  const Head& head = heads_[piece.head];
  const IndexTables& tables = *head.tables[piece.run].tables;
  const HashRun& run = tables.run;
  const hash_index::Planes& planes = *space_->planes.get();
  std::byte* scratch =
      workspace.scratch.reserve(hash_index::build_scratch_bytes(planes, run.n_keys));
  if (scratch == nullptr) {
    return;
  }
  const KvRuns all = runs_of(head);
  const auto first = std::partition_point(
      all.begin(), all.end(), [&run](const KvRun& r) { return r.position < run.position; });
  KVM_ASSERT(run.n_keys / kPageTokens <= static_cast<uint64_t>(all.end() - first));
  const KvRuns runs(first, run.n_keys / kPageTokens);
  hash_index::build_tables(planes, runs, head.page_head, tables.center.data(), run.position,
                           run.n_keys, piece.table_begin, piece.table_end, scratch,
                           tables.tables.data());
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
  pin_ = IndexPin();
  claim_ = BuildClaim();
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
        std::erase_if(of_head.tables,
                      [&run](const IndexTablesPtr& old) { return overlap(old->run, run); });
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
