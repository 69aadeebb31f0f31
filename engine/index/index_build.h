// SPDX-License-Identifier: Apache-2.0
// An IndexBuild makes a slice of what the index of one (sequence, layer) lacks, in stages:
//
//   plan       (driver)  which blocks, frames and tables; what memory frames take at most
//   frames     (tasks)   make_frame, sum_keys: frames of new runs, sums for the centres of tables
//   open       (driver)  memory for codes and tables; what is refused is left out
//   codes      (tasks)   encode, hash: pieces of a head, in any order
//   close      (driver)  the new blocks and tables become part of the index
//
// LIMIT: of a sketched head a slice has the blocks up to the end of a frame's run (8,192 tokens),
// and at most one frame; of a hashed one those up to the end of the longest run of tables (65,536).
// A task is one frame, or a page of codes, or 8,192 keys of a sum, or 16 tables. On a core of
// Zen 5, at 128 channels: 2 ms (6 to 9 where queries were observed; .3 and .6 where the frame keeps
// the basis of the one before), 0.2, 1 and 7 ms; at 256 channels: 20 ms (50), 0.4, 2 and 18 ms. No
// task is longer, but the first sum of a space, which makes its planes (4 to 21 ms more).
//
// Between plan and close the sequence is not changed by anything else, and its index stays.
#ifndef KVM_ENGINE_INDEX_INDEX_BUILD_H_
#define KVM_ENGINE_INDEX_INDEX_BUILD_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/space/space.h"
#include "engine/store/layer_index.h"
#include "engine/tasks/workspace.h"

namespace kvm::engine {

struct Sequence;

// SeenQueries are queries that were seen in a layer, as engine/store/store.h's ObservedView has
// them.
struct SeenQueries {
  const float* q = nullptr;  // [n_rows][n_q_heads][dim_k]
  uint32_t n_rows = 0;
};

class IndexBuild {
 public:
  // A Piece is the blocks [begin, end) of a head, all in one page.
  struct Piece {
    uint32_t head = 0;  // in heads_
    uint64_t block_begin = 0;
    uint64_t block_end = 0;
    const hash_index::Frame* frame = nullptr;
    std::byte* codes = nullptr;  // of block_begin
    // Bit b: block_begin + b was there and is encoded; not one whose keys its frame cannot code.
    uint32_t encoded = 0;
  };
  // A TablePiece is some tables of a hash run.
  struct TablePiece {
    uint32_t head = 0;  // in heads_
    uint32_t run = 0;   // in Head::tables
    uint32_t table_begin = 0;
    uint32_t table_end = 0;
    bool is_built = false;  // false afterwards: the machine refused memory
  };
  // A SumPiece is some keys of the sum for the centre of a hash run.
  struct SumPiece {
    uint32_t head = 0;
    uint32_t run = 0;
    uint32_t part = 0;
  };

  // REQUIRES: the index of `ref` is not claimed; it is until it is the sequence's own, or closed.
  // The index of the OWN layer shall cover n_blocks blocks: the next slice of heads that lack some,
  // as many as fit max_cost, but at least one.
  IndexBuild(Sequence* seq, const Space& space, uint32_t layer, const IndexRef& ref,
             uint64_t n_blocks, uint64_t max_cost);
  // REQUIRES: n_heads() != 0. The positions whose tokens it reads.
  uint64_t position_begin() const;
  uint64_t position_end() const;
  // Ends the planning. class_runs: the published tokens of each class at these positions. seen: of
  // the layer and of those that alias it. What a build refers to stays alive and unchanged until
  // close().
  void start(std::vector<std::vector<KvRun>> class_runs, std::vector<SeenQueries> seen,
             const IndexBank& bank);
  Sequence* seq() const { return seq_; }
  uint32_t layer() const { return layer_; }
  // Returns that of all tasks together, in the time that coding a block takes (some 6 us at 128
  // channels).
  uint64_t cost() const { return cost_; }

  // Whether a reference lacks anything that it should have.
  static bool is_needed(const Space& space, uint32_t layer, const IndexRef& ref, uint64_t n_blocks);
  // REQUIRES: is_needed(). How many of n_blocks to plan for now: of an index that is shared, first
  // what all have that share it.
  static uint64_t blocks_to_plan(const Space& space, uint32_t layer, const IndexRef& ref,
                                 uint64_t n_blocks);

  // Threads: any, each once. They do not fail: a frame that finds no memory is not there.
  // Whether it adds to what others share, rather than to an index of the sequence's own.
  bool is_added() const { return is_added_; }
  uint32_t n_heads() const { return static_cast<uint32_t>(heads_.size()); }
  bool has_frame(uint32_t head) const { return heads_[head].frame != nullptr; }
  uint32_t n_sum_pieces() const { return static_cast<uint32_t>(sum_pieces_.size()); }
  void make_frame(uint32_t head);
  void sum_keys(uint32_t piece);

  void open(IndexRef* ref, const IndexBank& of_client);

  // Threads: any, each once.
  uint32_t n_pieces() const { return static_cast<uint32_t>(pieces_.size()); }
  uint32_t n_table_pieces() const { return static_cast<uint32_t>(table_pieces_.size()); }
  void encode(uint32_t piece);
  void hash(uint32_t piece, ThreadWorkspace& workspace);

  void close(IndexRef* ref, const IndexBank& bank);

 private:
  struct NewTables {
    HashRun run;
    std::vector<std::vector<double>> sums;  // [part][dim_k]; empty: the machine had no memory
    std::shared_ptr<IndexTables> tables;
  };
  struct Head {
    uint32_t kv_head = 0;
    uint32_t class_index = 0;  // of the layer
    uint32_t page_head = 0;    // within the pages of the class
    IndexConfig config;
    uint64_t block_begin = 0;
    uint64_t block_end = 0;
    // The frame to be made, of run block_begin / kFrameBlocks; `previous` is the last before it.
    bool needs_frame = false;
    std::shared_ptr<IndexFrame> frame;  // null: not needed, or no memory
    IndexFramePtr previous;
    bool frame_failed = false;
    std::deque<NewTables> tables;
  };

  KvRuns runs_of(const Head& head) const { return class_runs_[head.class_index]; }
  // Whether the slice may be added to the shared index of `ref` itself.
  bool fits_shared(const IndexRef& ref) const;
  void plan_frame(const IndexRef& ref, Head* head) const;
  void plan_tables(const IndexRef& ref, Head* head) const;
  uint64_t cost_of(const Head& head) const;
  // Returns where the tokens lie that a head's frame is made from.
  PositionRange frame_tokens(const Head& head) const;
  void start_frame(Head* head, const IndexBank& bank) const;
  void start_tables(uint32_t head);
  hash_index::FramePtr fit_frame(const Head& head) const;
  void add_keys(const Head& head, const HashRun& run, uint32_t part, double* sums) const;
  std::vector<float> center_of(const Head& head, const NewTables& tables) const;
  void refuse(const Head& head, uint64_t block_begin, uint64_t block_end, HeadIndex* index,
              const IndexBank& bank) const;
  uint64_t open_sketches(uint32_t head, HeadIndex* index, const IndexBank& bank);
  bool install_frame(Head* head, HeadIndex* index) const;
  void open_tables(uint32_t head, HeadIndex* index, const IndexBank& bank);
  std::shared_ptr<IndexTables> make_tables(const Head& head, const NewTables& made,
                                           const IndexBank& bank) const;

  Sequence* seq_;
  const Space* space_;
  uint32_t layer_;
  uint64_t n_blocks_;  // that the index shall cover in the end
  uint64_t cost_ = 0;
  IndexPin pin_;
  BuildClaim claim_;
  bool is_added_ = false;  // to the index as others share it; else to one of the sequence's own
  std::vector<std::vector<KvRun>> class_runs_;
  std::vector<SeenQueries> seen_;
  std::vector<Head> heads_;
  std::vector<SumPiece> sum_pieces_;
  std::vector<Piece> pieces_;
  std::vector<TablePiece> table_pieces_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_INDEX_INDEX_BUILD_H_
