// SPDX-License-Identifier: Apache-2.0
// An AttendPlan says how the attention of one request is computed: one attention problem per
// (item, kv head), cut into tasks.
//
//   AttendPlanner   (attend_planner.h) finds what the rows of each item see, and makes the problems
//   cut_into_tasks  (attend_cut.h) cuts them so that all threads finish together
//   AttendExecutor  (attend_executor.h) carries the tasks out and reports
//
// A problem that is solved exactly is cut into
//   units   rows of a problem; blocked problems have several. Or several heads of the same pages
//           with few rows, which are then read page by page
//   tasks   consecutive whole units, each evaluated and merged by one thread in its own memory,
//           or a stretch of the chunks of one large unit, whose states lie in shared memory and
//           are merged up the tree by whoever completes a node
// One that is approximated (attention/sampled/approx.h) is prepared once, has a task for each of
// its shards, and is finished by whoever evaluates the last. Where that finds that it has to be
// answered exactly, it is left to a second plan (plan_left), in which such problems are cut and
// ganged like any other.
//
// Where pages of a view are away, in the slow tier, its units are cut by windows: chunk by chunk,
// the tasks of all its heads, so that a page is read once for all of them (PageStream). Views of
// one item and head class, which see the same pages by other rules, have their windows together.
//
// Where all heads of such views are sampled, and draw by the index alone, their shards are looked
// at twice. The first time, among the other tasks, each says which pages it will read. Then another
// job evaluates them, shard by shard of positions, with those pages (DrawnStream). Or, where these
// are too many, their problems are left, and streamed.
//
// The bits of the results do not depend on the cut: attention/attention.h fixes them by chunk.
//
// Once it is cut a plan does not change, but for the addresses of what comes window by window. It
// names places in the memory that tasks share, and counters, by their numbers; both belong to the
// executor.
#ifndef KVM_ENGINE_ATTEND_ATTEND_PLAN_H_
#define KVM_ENGINE_ATTEND_ATTEND_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "attention/sampled/approx.h"
#include "base/assert.h"
#include "base/kv_view.h"
#include "base/status.h"
#include "engine/space/validate.h"
#include "engine/store/store_types.h"
#include "engine/stream/page_stream.h"

namespace kvm::engine {

// A TaskCrew is the threads that run a request's tasks.
struct TaskCrew {
  uint32_t n_threads = 1;
  // Whether other clients may ask meanwhile: tasks are shorter then.
  bool is_shared = false;
};

// A Part is a stretch of a list that may still grow and move.
template <typename T>
struct Part {
  size_t begin = 0;
  size_t n = 0;

  bool is_empty() const { return n == 0; }
  std::span<T> in(std::vector<T>& list) const {
    KVM_ASSERT(begin <= list.size() && n <= list.size() - begin);
    return std::span(list).subspan(begin, n);
  }
  std::span<const T> in(const std::vector<T>& list) const {
    KVM_ASSERT(begin <= list.size() && n <= list.size() - begin);
    return std::span(list).subspan(begin, n);
  }
};

// A MemoryAt is where something begins in the memory that tasks share.
struct MemoryAt {
  size_t offset = SIZE_MAX;  // bytes

  bool is_set() const { return offset != SIZE_MAX; }
};

// A CounterAt is the number of a counter, or of the first of several.
struct CounterAt {
  size_t index = SIZE_MAX;
};

// Empties a list that is kept for the next request, unless it takes too much memory.
template <typename T>
void empty(std::vector<T>* list) {
  constexpr size_t kKeepListBytes = 4 << 20;
  list->clear();
  if (list->capacity() * sizeof(T) > kKeepListBytes) {
    list->shrink_to_fit();
  }
}

struct AttendPlan {
  // A Head is a problem that is solved exactly.
  struct Head {
    attention::Problem problem;  // `lse` and `column_sums` missing where they lie in shared memory
    attention::Plan plan;
    uint64_t cost = 0;
    uint32_t view = 0;    // heads of one view see the same keys of the same pages
    uint32_t row = 0;     // of the tensors, of query token 0
    uint32_t q_head = 0;  // of the layer, of q head 0 of the group
    uint32_t sums = kNoSums;
    uint32_t away = kNoAway;  // where pages of some of its chunks are
    MemoryAt prepared_at;     // not set: whoever evaluates it prepares its queries
    // Once it is cut: so many states of its chunks are there at a time, and where each has its own;
    // empty: in their order.
    uint32_t n_states = 0;
    Part<uint16_t> state_slots;
  };
  static constexpr uint32_t kNoSums = UINT32_MAX;
  static constexpr uint32_t kNoAway = UINT32_MAX;

  struct DrawnWindow;
  struct ApproxHead;

  // An Away is the pages of an item and a head class that are away.
  struct Away {
    Part<AwayPage> pages;
    // The views that see them, in the order of their heads: the runs of each, and the first of its
    // heads.
    struct View {
      Part<KvRun> runs;
      uint32_t first_head = 0;
      uint32_t view = 0;  // as in Head
    };
    Part<View> views;
    // Whether its views are sampled, or exact; which, the first of their heads decides.
    enum class Choice : uint8_t { kNone, kStreamed, kDrawn };
    Choice choice = Choice::kNone;
    // Of those that are sampled: the runs, each once.
    Part<Part<KvRun>> drawn_runs;
    Part<DrawnWindow> drawn;
    Part<ApproxHead> drawn_heads;  // their heads, and such as read nothing that is away
  };
  // A Window is a chunk of an Away: what is there of its pages at a time.
  struct Window {
    uint32_t away = 0;
    Part<AwayPage> pages;
    uint32_t tasks_end = 0;  // behind the last task of it, among `tasks`
  };

  // Sums is the attention mass of tokens of a head that chooses by it.
  struct Sums {
    uint32_t head = 0;
    uint32_t item = 0;
    uint32_t class_index = 0;
    bool is_packed = false;  // positions are counted as Store::collect_runs does with is_packed
    // Summed by tasks of their own after all others, where that is too much to do for whoever
    // evaluates the last unit of the head.
    bool is_later = false;
    uint32_t n_units = 0;  // of the head
    uint64_t n_positions = 0;
    PositionRange unwanted;  // whole pages whose mass nobody asks for; nothing is written of them
    MemoryAt sums_at;        // [n_positions] floats
    MemoryAt lse_at;         // [rows] floats, where nobody else wants them
    CounterAt n_evaluated;   // units
  };

  struct Unit {
    uint32_t head = 0;
    uint32_t n_heads = 1;  // from `head` on; more than one are a gang
    attention::RowRange rows;
    uint32_t n_pieces = 1;  // 1: whole; kInWindows: a chunk each
    MemoryAt states_at;     // where n_pieces != 1: [n_heads][n_states] states
    // Where n_pieces != 1: [n_chunks], for each chunk how many of the two nodes are complete that
    // the merge from its state needs. Whoever completes the second merges.
    CounterAt n_complete;
    uint64_t cost = 0;
  };
  static constexpr uint32_t kInWindows = 0;

  // An ApproxHead is a problem that is solved approximately. Without shards it is left at once.
  struct ApproxHead {
    attention::Problem problem;
    attention::ApproxInput input;  // refers to `problem` once the plan is cut
    attention::ApproxPlan plan;
    uint64_t exact_cost = 0;  // Head::cost of the problem, where it is left
    uint32_t mode = 0;        // KVM_MODE_*, not AUTO
    uint32_t view = 0;
    uint32_t item = 0;
    uint32_t class_index = 0;
    uint32_t row = 0;  // as in Head
    uint32_t q_head = 0;
    uint32_t away = kNoAway;  // where pages are that it reads
    MemoryAt prepared_at;
    MemoryAt states_at;     // [n_shards]
    CounterAt n_evaluated;  // shards
  };

  struct Task {
    uint32_t unit = 0;
    uint32_t n_units = 0;      // whole units, or 0: a stretch of the chunks of `unit`
    uint32_t first_chunk = 0;  // counted from the plan's first
    uint32_t n_chunks = 0;
    bool is_approx = false;  // shard `first_chunk` of approx[unit]
    uint32_t window = kNoWindow;
  };

  // A DrawnWindow is a shard of positions of an Away: of its pages those are there at a time that
  // its tasks read.
  struct DrawnWindow {
    uint32_t away = 0;
    uint64_t number = 0;   // of the shard (attention::shard_number)
    Part<AwayPage> pages;  // in the shard
    Part<Task> tasks;      // of drawn_tasks
    CounterAt n_found;     // of these, that have said what they will read
  };
  static constexpr uint64_t kShardBlocks = attention::kShardTokens / kPageTokens;

  // A SumTask is positions of one head whose mass is summed up.
  struct SumTask {
    uint32_t sums = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  // Forgets the last request; keeps memory for the next one, up to a size.
  void clear();
  // Fails: LIMIT, where a request needs more memory for what it computes than one may take.
  Status check_size(size_t size_bytes) const;
  // What lists of approximate problems take, and the scratch of n_threads.
  size_t approx_bytes(uint32_t n_threads) const;
  size_t unit_state_bytes(const Unit& unit) const;
  // The pages of an Away that lie in absolute chunks [begin, end).
  Part<AwayPage> pages_of(uint32_t away, uint64_t begin, uint64_t end, uint32_t chunk_tokens) const;
  // Where the state of a chunk, counted from the plan's first, lies among those of its head.
  uint32_t state_slot(const Head& head, uint32_t chunk) const {
    return head.state_slots.is_empty() ? chunk : head.state_slots.in(state_slots)[chunk];
  }
  // The positions that are summed up for a head, in whole pages: before what is unwanted, and
  // behind it.
  std::array<PositionRange, 2> summed(const Sums& part) const;
  // Whether pages of an Away, or of none, lie in chunks that a plan has.
  bool sees_away(const attention::Plan& cut, uint32_t away) const;
  uint32_t n_prepare_tasks() const { return static_cast<uint32_t>(prepare.size() + approx.size()); }

  // Says whether each row of each head belongs to one unit, each chunk and shard to one task, each
  // position that is summed later to one task, and nothing in shared memory or among the counters
  // to two. Looks at everything: for checked builds and tests. REQUIRES: cut.
  bool is_valid() const;

  uint32_t mode = KVM_MODE_EXACT;  // of the request, not DEFAULT
  uint32_t layer = 0;
  Tensor err;

  // What problems refer to. A run of a page that is away has its address once its window is there.
  std::vector<KvRun> runs;
  std::vector<PositionRange> ranges;
  // For queries that are turned for the sinks the identity, then a rotation for each query token,
  // whose numbers lie in `rotations`, cosines before sines.
  std::vector<QueryTransform> transforms;
  std::vector<float> rotations;
  std::vector<attention::SketchedRun> sketches;
  std::vector<attention::HashedRun> hashes;

  std::vector<Head> heads;
  std::vector<Sums> sums;
  std::vector<ApproxHead> approx;
  std::vector<AwayPage> away_pages;
  std::vector<Away::View> away_views;
  std::vector<Away> aways;
  std::vector<Part<KvRun>> drawn_runs;

  // The cut. Tasks come in this order: one for each of `prepare`, one for each of `approx`; then
  // `tasks`, those of windows last; then `sum_tasks`.
  std::vector<uint16_t> state_slots;
  std::vector<Unit> units;
  std::vector<uint32_t> prepare;  // heads whose queries are prepared in shared memory
  std::vector<Task> tasks;
  uint32_t n_tasks_there = 0;  // before those of windows
  std::vector<Window> windows;
  StreamShape stream_shape;  // of `windows`
  // Of another job: shards of `approx`, each in `tasks` as well.
  std::vector<Task> drawn_tasks;
  std::vector<DrawnWindow> drawn_windows;  // of each Away together, by number
  std::vector<SumTask> sum_tasks;
  size_t shared_bytes = 0;
  size_t n_counters = 0;

  uint64_t cost = 0;           // bytes of K and V read, computation converted to bytes of that time
  uint64_t prepare_bytes = 0;  // likewise, before `tasks`
  size_t scratch_bytes = 0;    // the most of a task of an approximate problem
  uint64_t n_shards = 0;       // likewise, of all
  uint64_t n_rows = 0;
  uint64_t n_keys = 0;  // visible
  // Of what is solved exactly: keys, bytes, and (row, q head)s.
  uint64_t n_exact_keys = 0;
  uint64_t n_exact_bytes = 0;
  uint64_t n_exact_rows = 0;

 private:
  bool covers_all_rows() const;
  bool covers_all_chunks() const;
  bool keeps_states_apart() const;
  bool covers_all_sums() const;
  bool is_laid_out_apart() const;
  bool counts_apart() const;
  bool covers_all_draws() const;
};

}  // namespace kvm::engine

#endif  // KVM_ENGINE_ATTEND_ATTEND_PLAN_H_
