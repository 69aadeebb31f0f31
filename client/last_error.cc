// SPDX-License-Identifier: Apache-2.0
#include "client/last_error.h"

#include <algorithm>
#include <mutex>

namespace kvm::client {

namespace {

// Plain memory: usable while the process runs out of heap, and without destructors at thread exit.
thread_local char t_sentence[512] = "";

std::mutex g_log_mutex;
LogCallback g_log_callback = nullptr;
void* g_log_user = nullptr;

}  // namespace

void set_last_error(std::string_view sentence) {
  const size_t n = std::min(sentence.size(), sizeof(t_sentence) - 1);
  sentence.copy(t_sentence, n);
  t_sentence[n] = '\0';
}

const char* last_error() { return t_sentence; }

void set_log_callback(LogCallback callback, void* user) {
  const std::lock_guard lock(g_log_mutex);
  g_log_callback = callback;
  g_log_user = user;
}

void log_message(int level, const char* message) {
  LogCallback callback = nullptr;
  void* user = nullptr;
  {
    const std::lock_guard lock(g_log_mutex);
    callback = g_log_callback;
    user = g_log_user;
  }
  if (callback != nullptr) {
    callback(level, message, user);
  }
}

}  // namespace kvm::client
