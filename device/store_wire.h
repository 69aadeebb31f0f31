// SPDX-License-Identifier: Apache-2.0
// What a RemoteStore and the StoreServer that keeps its books say to each other: frames over an
// ipc::FrameChannel, of the structures below.
//
//   client                                     server
//   ------                                     ------
//                                <-- Ready     once it can serve
//   Call: what became of the last
//     growth, notes, a question  -->
//                                <-- Order     any number: map this, unmap that, wait for your
//   Done: status                 -->             device. The client is waiting and can do it.
//                                <-- Reply     status, answer, commands: what the client has to
//                                              enqueue on its stream before it goes on
//
// Notes are changes that cannot be refused, because both sides know the books that they are made
// in; they wait for the next call. The server may know of fewer tokens of a sequence than it has,
// as long as it knows its pages; before a note or a call in which the others count, the client
// notes them (kExtend). Both sides are of one version: the control socket compares kStoreVersion.
//
// Threads: values.
#ifndef KVM_DEVICE_STORE_WIRE_H_
#define KVM_DEVICE_STORE_WIRE_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/limits.h"
#include "base/round.h"
#include "base/status.h"

namespace kvm::device::wire {

inline constexpr uint32_t kStoreVersion = 5;

// LIMITS, of one client.
inline constexpr uint64_t kMaxSpaces = 64;
inline constexpr uint64_t kMaxSequences = 65536;
inline constexpr uint64_t kMaxLists = 1024;       // of a space
inline constexpr uint64_t kMaxGrowths = 1024;     // of a step
inline constexpr uint64_t kMaxNotes = 65536;      // of a call
inline constexpr uint64_t kMaxEntries = 1 << 26;  // of all sequences: 256 MiB

// Entries that a sequence counts for, on both sides: one, of 4 bytes, for each page in each list,
// dropped ones too, and what a list takes that has none.
inline constexpr uint64_t kListEntries = 8;
constexpr uint64_t n_entries(uint64_t n_lists, uint64_t n_tokens) {
  return n_lists * (kListEntries + div_up(n_tokens, kPageTokens));
}
inline Status too_many_entries(uint64_t n_entries) {
  return Status(KVM_ERR_LIMIT, "the client's sequences count for " + std::to_string(n_entries) +
                                   " lists and pages, dropped ones too; allowed are " +
                                   std::to_string(kMaxEntries));
}

enum class FrameKind : uint32_t { kReady = 1, kCall, kOrder, kDone, kReply };

// --- Words --------------------------------------------------------------------------------------

// In memory that both sides have registered with their drivers. Words only grow, but for the end of
// a side: the other one then makes what that would have written kPoison larger, so that nothing
// waits for it any more.
inline constexpr uint32_t kServerWords = 8;
inline constexpr uint64_t kPoison = uint64_t{1} << 62;
inline constexpr uint64_t kPartBytes = 4096;

struct Words {
  struct alignas(64) Word {
    uint64_t value;
  };
  alignas(kPartBytes) Word client;                // the client's stream has come so far
  alignas(kPartBytes) Word server[kServerWords];  // streams of the server have
};
static_assert(sizeof(Words) == 2 * kPartBytes);

// --- Calls --------------------------------------------------------------------------------------

enum class Verdict : uint32_t { kNone, kFinish, kUndo };  // of the last growth

enum class NoteKind : uint32_t { kCreate, kFork, kExtend, kTruncate, kClear, kDropSpace };

// Clients number their spaces and sequences, from 1 on.
struct Note {
  NoteKind kind = NoteKind::kCreate;
  uint32_t reserved = 0;
  uint64_t id = 0;        // of the sequence, or of the space that is dropped
  uint64_t of = 0;        // kCreate: the space; kFork: the parent
  uint64_t n_tokens = 0;  // kFork, kTruncate: what is left; kExtend: what it has
};

enum class CallKind : uint32_t {
  kFlush,        // nothing but notes
  kPrepare,      // a Layout and its List[]               -> Slab[], one for each list
  kSettle,       // until `id` can be used                -> pages of each list: uint32_t[]
  kGrow,         // Grow[]                                -> Change[]
  kSpill,        // `id`, [begin, end), marker
  kFetch,        // likewise
  kIsMoving,     // uint64_t[]: any of these, also_spills -> uint32_t
  kFinishMoves,  //
  kUsage,        // `id`                                  -> SequenceStore::Usage
  kResidence,    // `id`                                  -> Residence
  kFigures,      //                                       -> SequenceStore::Figures
};

// Behind a Verdict and Note[].
struct Call {
  CallKind kind = CallKind::kFlush;
  uint32_t also_spills = 0;
  uint64_t id = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  // The client's stream writes it to Words::client behind what is enqueued so far. It grows.
  uint64_t marker = 0;
};

struct Layout {
  uint32_t codec = 0;
  uint32_t dim_k = 0;
  uint32_t dim_v = 0;
  uint32_t v_in_k = 0;  // 1: values are the first dim_v channels of keys, and are not stored
};
struct List {
  uint32_t n_heads = 0;
  uint32_t n_layers = 0;
  uint64_t n_sinks = 0;
  uint64_t n_recent = 0;
  uint64_t slack = 0;
};
struct Slab {
  uint32_t slab = 0;
  uint32_t range = 0;
  uint64_t page_bytes = 0;
  uint64_t n_slots = 0;
};
struct Grow {
  uint64_t id = 0;
  uint32_t n_append = 0;
  uint32_t n_query = 0;
  uint32_t n_unsure = 0;  // as Growth has them
  uint32_t max_unsure = 0;
};
// SequenceStore::Residence without gaps, which would hold bytes of the server's stack.
struct Residence {
  uint32_t on_host = 0;
  uint32_t leaves = 0;
  uint64_t n_pages = 0;
  uint64_t n_host_pages = 0;
  uint64_t n_waiting_pages = 0;
  int64_t failure = 0;
};
static_assert(std::has_unique_object_representations_v<Residence>);
struct Change {
  uint32_t growth = 0;  // of the call's
  uint32_t list = 0;
  uint32_t block = 0;
  uint32_t page = 0;
};

// LIMIT: bytes of a call, all of the longest parts together; of a Done.
inline constexpr uint32_t kMaxCallBytes = 4 << 20;
static_assert(kMaxNotes * sizeof(Note) + kMaxSequences * sizeof(uint64_t) +
                  kMaxLists * sizeof(List) + kMaxGrowths * sizeof(Grow) + 4096 <=
              kMaxCallBytes);
inline constexpr uint32_t kMaxDoneBytes = 64 << 10;

// --- Replies: status, sentence, the answer where the status is OK, Command[] ---------------------

enum class CommandKind : uint32_t { kWait, kCopy };

struct Command {
  CommandKind kind = CommandKind::kWait;
  uint32_t word = 0;  // kWait: of Words::server
  uint64_t value = 0;
  // kCopy: offsets in ranges.
  uint32_t to_range = 0;
  uint32_t from_range = 0;
  uint64_t to = 0;
  uint64_t from = 0;
  uint64_t n_bytes = 0;
};

// --- Orders, which Done answers with status and sentence -----------------------------------------

enum class OrderKind : uint32_t { kReserve, kRelease, kMap, kUnmap, kSynchronize };

// Ranges are of addresses for pages, numbered by the server; it and the client have them at
// addresses of their own. kMap comes with the descriptor.
struct Order {
  OrderKind kind = OrderKind::kReserve;
  uint32_t range = 0;
  uint64_t offset = 0;
  uint64_t n_bytes = 0;
};

}  // namespace kvm::device::wire

#endif  // KVM_DEVICE_STORE_WIRE_H_
