// SPDX-License-Identifier: Apache-2.0
// RetentionSlice: what policies do with the tokens of one sequence once its commit point has moved,
// a slice at a time. What queries see of a sequence changes here, and nowhere else but by its own
// requests.
//
//   plan_retention()    driver   shows lists to their policies (a view each)
//   decide(group)       tasks    the policies choose
//   open_retention()    driver   gives pages up; cuts actions that read rows into pieces
//   run(piece)          tasks    encodes pages, adds rows up, or copies rows that stay
//   next_phase()        driver   where tokens are merged: more pieces, to be run as well
//   close_retention()   driver   puts new pages, sums and rows in the place of the old pages
//
// LIMIT: a slice looks at kSlicePages pages and one list, and reads kSliceBytes and one action's
// share of kActionPages pages. Where it ends depends on the lists alone, so what comes of it does
// not depend on threads.
//
// Threads: decide() and run() on any thread, each index once, all of a stage before the driver goes
// on; the rest on the driver. Between plan and close nothing else changes the sequence. Tasks read
// pages and masses, and write sums of their own and rows of KeptTokens that nobody reads meanwhile;
// what the driver may look at in the meantime (lengths, bytes, tokens kept) changes on the driver
// only.
// Errors: what the machine refuses memory for is left as it is; the policy sees that in the next
// view.
#ifndef KVM_ENGINE_RETENTION_RETENTION_SLICE_H_
#define KVM_ENGINE_RETENTION_RETENTION_SLICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/retention/recodings.h"
#include "engine/store/kept_tokens.h"
#include "engine/store/mean_entry.h"
#include "engine/store/token_merge.h"
#include "engine/tasks/workspace.h"
#include "policies/policy.h"

namespace kvm::engine {

struct Sequence;

// A RetentionCursor says how far the retention of a sequence is. It begins with zeros.
struct RetentionCursor {
  uint32_t event = 0;  // value of policies::Event
  size_t governed = 0;
  uint32_t member = 0;
  uint32_t n_rounds = 0;              // in which a policy asked for more
  uint64_t next_commit = UINT64_MAX;  // of the lists before `member`
  // At the prompt's end, of members: of their tokens before `end`.
  struct Measure {
    policies::Moments moments;
    uint64_t end = 0;
  };
  std::vector<Measure> measures;
};

class RetentionSlice {
 public:
  // Some 0.3 ms of two threads: whose request is a job of its own waits for as much.
  static constexpr uint64_t kSlicePages = 512;
  static constexpr uint64_t kSliceBytes = 8 << 20;
  static constexpr uint64_t kActionPages = 64;
  // A byte that is encoded, or added up or copied, takes as long as so many that attention reads,
  // and counts so: others get their share of the threads by it.
  static constexpr uint64_t kEncodeWeight = 16;
  static constexpr uint64_t kCopyWeight = 4;
  static constexpr size_t kMaxGroups = 64;

  // A Group is the lists that one decision is about.
  struct Group {
    uint32_t first_member = 0;
    std::vector<std::vector<policies::StoredRange>> stored;
    std::vector<std::vector<policies::KeptToken>> kept;
    std::vector<policies::ListView> lists;
    policies::ActionList actions;
    bool is_decided = false;
    bool is_cut = false;  // not all actions have been taken up
  };
  // A Work is an action that reads rows.
  struct Work {
    policies::Action action;  // its part that is carried out now
    uint32_t list = 0;        // of the sequence
    std::vector<KvRun> runs;
    bool has_failed = false;  // one of its pieces
    bool is_unfit = false;    // for what its tokens hold: no memory would help
    // kDemote.
    Recodings recodings;
    // kFold: sums of pieces, in position order.
    std::vector<RowSums> sums;
    // kKeep.
    KeptTokens* kept = nullptr;
    std::shared_ptr<KeptTokens> new_kept;  // which is to take the place of what is there, if any
    const KeptTokens* clones = nullptr;    // whose rows it begins with; null: there are none
    const Masses* masses = nullptr;
    std::span<const uint64_t> positions;  // of the group's actions: what stays
    bool merges = false;
    // From the piece that chooses:
    KeptTokens::Choice choice;
    std::vector<float> kept_masses;
    std::unique_ptr<TokenMerge> merge;  // null: what is not kept is dropped, or demoted:
    std::vector<KvRun> kept_runs;       // what was kept before
    // recodings: pages of what is not kept, in the places of the last pages of the range.
  };
  // A kDemote encodes planes of its pages, and a kFold sums runs up. A kKeep chooses rows by what
  // stays, while it clones pages of rows that others share, and then copies rows; before that
  // it encodes planes of demoted tokens, or its TokenMerge does what it does in a phase.
  enum class Step : uint8_t { kEncode, kSum, kChoose, kClone, kMerge, kCopy };
  struct Piece {
    uint32_t work = 0;
    Step step = Step::kEncode;
    uint32_t begin = 0;
    uint32_t end = 0;
    uint32_t sums = 0;  // kSum: which of the work's
  };

  RetentionSlice(Sequence* seq, const policies::Policy* policy, policies::Event event,
                 uint64_t n_committed)
      : seq_(seq), policy_(policy), event_(event), n_committed_(n_committed) {}

  Sequence* seq() const { return seq_; }
  std::vector<Group>& groups() { return groups_; }
  uint32_t n_groups() const { return static_cast<uint32_t>(groups_.size()); }
  // Bytes that deciding looks at, about; and that pieces read, by their weight.
  uint64_t decide_bytes() const;
  uint64_t bytes() const { return bytes_; }
  void decide(uint32_t group);

  // Cuts an action into pieces. demote: of its planes; fold: of its runs; keep: of its choice.
  void add_demote(Work&& work, const tiers::SlabClass& slab_class);
  void add_fold(Work&& work, const tiers::SlabClass& slab_class);
  void add_keep(Work&& work, const tiers::SlabClass& slab_class);
  uint32_t n_pieces() const { return static_cast<uint32_t>(pieces_.size()); }
  // Bytes that the pieces read, about.
  uint64_t phase_bytes() const { return phase_bytes_; }
  void run(uint32_t piece, ThreadWorkspace& workspace);
  // After the last piece: makes those of the next phase, and returns whether there is one.
  // has_failed is set of works of which a piece found no memory.
  bool next_phase();
  std::vector<Work>& works() { return works_; }
  // Leaves the lists of a work that failed to the next commit; for what they hold, to the one that
  // the policy waits for.
  void give_up(const Work& work);
  // Pages that its lists have.
  uint64_t n_pages() const { return n_pages_; }
  void set_pages(uint64_t n_pages) { n_pages_ = n_pages; }

 private:
  // A kDemote and a kFold have the first phase alone, and so has the choice of a kKeep.
  // Merging: who is nearest to whom; the rows of those that are joined; these into their places.
  // Demoting: pages of those that go; then those that stay take their rows.
  enum class Phase : uint8_t { kFirst, kGo, kMix, kWrite };

  enum class Failed : uint8_t { kNo = 0, kMemory, kUnfit };

  void add_work(Work&& work, const tiers::SlabClass& slab_class);
  void add_piece(const Piece& piece, uint64_t n_bytes);
  void add_copies(uint32_t index, const Work& work, uint64_t token_bytes);
  void add_pages(uint32_t index, const Work& work);
  bool add_phase(uint32_t index, Work* work);
  void add_go(uint32_t index, const Work& work);
  static void choose(const tiers::SlabClass& slab_class, Work* work);
  void run_merge(const Piece& piece, Work* work, ThreadWorkspace& workspace, Failed* failed);

  Sequence* seq_;
  const policies::Policy* policy_;
  policies::Event event_;
  uint64_t n_committed_;
  std::vector<Group> groups_;
  std::vector<Work> works_;
  std::vector<tiers::SlabClass> classes_;  // of works_
  std::vector<Piece> pieces_;
  std::vector<Failed> failed_;  // pieces
  Phase phase_ = Phase::kFirst;
  uint64_t phase_bytes_ = 0;
  uint64_t n_pages_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_RETENTION_RETENTION_SLICE_H_
