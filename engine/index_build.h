// SPDX-License-Identifier: Apache-2.0
// What the index of one (sequence, layer) lacks, and how it is made, in stages:
//
//   plan       (driver)  which blocks, frames and tables
//   frames     (tasks)   make_frames of each head: frames of new runs, centres of hash runs
//   open       (driver)  memory for codes and tables; what is refused is left out
//   codes      (tasks)   encode, hash: pieces of a head, in any order
//   close      (driver)  the new blocks and tables become part of the index
//
// Between plan and close the sequence is not changed by anything else.
#ifndef KVM_ENGINE_INDEX_BUILD_H_
#define KVM_ENGINE_INDEX_BUILD_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "engine/index.h"
#include "engine/space.h"
#include "engine/workspace.h"

namespace kvm::engine {

struct Sequence;

// Queries that were seen, as engine/store.h's ObservedView has them.
struct SeenQueries {
  const float* q = nullptr;  // [n_rows][n_q_heads][dim_k]
  uint32_t n_rows = 0;
};

class IndexBuild {
 public:
  // The blocks [begin, end) of a head, all in one page.
  struct Piece {
    uint32_t head = 0;  // in heads_
    uint64_t block_begin = 0;
    uint64_t block_end = 0;
    const hash_index::Frame* frame = nullptr;
    std::byte* codes = nullptr;  // of block_begin
    uint32_t encoded = 0;        // bit b: block_begin + b was there and is encoded
  };
  // Some tables of a hash run.
  struct TablePiece {
    uint32_t head = 0;  // in heads_
    uint32_t run = 0;   // in Head::tables
    uint32_t table_begin = 0;
    uint32_t table_end = 0;
    bool is_built = false;  // false afterwards: the machine refused memory
  };

  // The index shall cover n_blocks blocks of the OWN layer. class_runs: all published tokens of
  // each class. What a build refers to stays alive and unchanged until close().
  IndexBuild(Sequence* seq, const Space& space, uint32_t layer,
             std::vector<std::vector<KvRun>> class_runs, SeenQueries seen, const IndexRef& ref,
             uint64_t n_blocks);
  Sequence* seq() const { return seq_; }
  uint32_t layer() const { return layer_; }
  uint64_t n_pages() const;  // listed in class_runs

  // Whether a reference lacks anything.
  static bool is_needed(const Space& space, uint32_t layer, const IndexRef& ref, uint64_t n_blocks);

  // Threads: any, each head once. Does not fail: a frame that finds no memory is not there.
  uint32_t n_heads() const { return static_cast<uint32_t>(heads_.size()); }
  void make_frames(uint32_t head);

  void open(IndexRef* ref, const IndexBank& bank);

  // Threads: any, each once.
  uint32_t n_pieces() const { return static_cast<uint32_t>(pieces_.size()); }
  uint32_t n_table_pieces() const { return static_cast<uint32_t>(table_pieces_.size()); }
  void encode(uint32_t piece);
  void hash(uint32_t piece, ThreadWorkspace& workspace);

  void close(IndexRef* ref, const IndexBank& bank);

 private:
  struct NewTables {
    HashRun run;
    std::vector<float> center;
    std::shared_ptr<IndexTables> tables;
  };
  struct Head {
    uint32_t kv_head = 0;
    uint32_t class_index = 0;  // of the layer
    uint32_t page_head = 0;    // within the pages of the class
    IndexConfig config;
    uint64_t block_begin = 0;
    uint64_t block_end = 0;
    // Frames of runs first_frame, ...; `previous` is that of the run before, if it has one.
    uint64_t first_frame = 0;
    size_t n_frames = 0;
    std::vector<hash_index::FramePtr> frames;
    hash_index::FramePtr previous;
    std::deque<NewTables> tables;
  };

  KvRuns runs_of(const Head& head) const { return class_runs_[head.class_index]; }
  void plan_frames(const IndexRef& ref, Head* head) const;
  void plan_tables(const IndexRef& ref, Head* head) const;
  void make_sketch_frames(Head* head) const;
  void make_center(const Head& head, NewTables* tables) const;
  uint64_t open_sketches(uint32_t head, HeadIndex* index, const IndexBank& bank);
  void open_tables(uint32_t head, HeadIndex* index, const IndexBank& bank);

  Sequence* seq_;
  const Space* space_;
  uint32_t layer_;
  std::vector<std::vector<KvRun>> class_runs_;
  SeenQueries seen_;
  std::vector<Head> heads_;
  std::vector<Piece> pieces_;
  std::vector<TablePiece> table_pieces_;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_INDEX_BUILD_H_
