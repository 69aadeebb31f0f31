// SPDX-License-Identifier: Apache-2.0
// Places at which a crash test ends the process, as a SIGKILL from outside would. Compiled in with
// KVM_KILL_POINTS only (preset dev); otherwise nothing of this is in the code.
//
//   KVM_KILL_POINT("daemon/welcomed")   ends it where $KVM_KILL_POINT is this name; the list below
//                                       has all names, and `kvmd --list-kill-points` prints them
//   KVM_SHARED_STORE()                  before each store to memory shared with the daemon: ends it
//                                       at the store whose number is $KVM_KILL_AT_STORE, from 1 on
//
// Threads: any.
#ifndef KVM_BASE_KILL_POINT_H_
#define KVM_BASE_KILL_POINT_H_

#include <array>
#include <string_view>

namespace kvm {

// In the order in which a client's life passes them.
inline constexpr std::array<std::string_view, 37> kKillPoints = {
    "daemon/accepted",           // a connection, of which nothing is known yet
    "daemon/hello_read",         // before anything is made for the client
    "daemon/welcomed",           // the client may know it already
    "daemon/queue_made",         // before the reply
    "daemon/arena_asked",        // before its memory is allocated
    "daemon/arena_made",         // before the reply
    "daemon/space_registered",   // before the reply
    "daemon/entries_taken",      // out of the ring, and not looked at
    "daemon/request_validated",  // before the engine has it
    "daemon/request_finished",   // before its completion is written
    "daemon/completion_staged",  // written, and not published
    "daemon/completion_published",
    "daemon/sleeping",        // with all flags raised
    "daemon/session_doomed",  // before the engine hears that a client is gone
    "daemon/session_let_go",  // before its memory goes to the reaper
    "daemon/stopping",        // asked to end, with clients connected
    // In the life of device memory that kvmd owns for a client:
    "device/admitted",   // before the reply
    "device/opened",     // before the client is told
    "device/call_read",  // and nothing is done
    "device/noted",      // what became of the last step, and cuts and forks since
    "device/growing",    // pages are taken, and the client has not got them
    "device/mapped",     // memory is mapped here, and not in the client
    "device/asked",      // all is done, and not said
    "device/answered",
    // And in the client:
    "device_client/opened",    // it knows that kvmd can serve
    "device_client/marked",    // a move's marker is enqueued, and kvmd not asked
    "device_client/sent",      // a call, before its answer
    "device_client/obeying",   // before it does what it is ordered
    "device_client/obeyed",    // before it says so
    "device_client/answered",  // before what it has to enqueue
    // In the life of an object of the disk tier:
    "disk/file_begun",        // under another name, and without room
    "disk/object_written",    // its chunks, and nothing is synced
    "disk/objects_synced",    // all but the list of objects
    "disk/directory_joined",  // a directory has a mark, and the set is not larger yet
    "disk/directory_marked",  // one of them says how many there are
    "disk/manifest_written",  // the list, and it is not synced
    "disk/manifest_synced",   // before whoever put it hears of it
};

constexpr bool is_kill_point(std::string_view name) {
  for (const std::string_view point : kKillPoints) {
    if (point == name) {
      return true;
    }
  }
  return false;
}

void reach_kill_point(std::string_view name);
void count_shared_store();

}  // namespace kvm

#if defined(KVM_KILL_POINTS) && KVM_KILL_POINTS
#define KVM_KILL_POINT(name)                                                   \
  do {                                                                         \
    static_assert(::kvm::is_kill_point(name), "name it in base/kill_point.h"); \
    ::kvm::reach_kill_point(name);                                             \
  } while (false)
#define KVM_SHARED_STORE() ::kvm::count_shared_store()
#else
#define KVM_KILL_POINT(name) \
  do {                       \
  } while (false)
#define KVM_SHARED_STORE() \
  do {                     \
  } while (false)
#endif

#endif  // KVM_BASE_KILL_POINT_H_
