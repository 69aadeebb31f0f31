// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/src/status.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace kvm::python {
namespace {

// LIMIT: messages that wait for a listener; more are of threads that make no call.
constexpr size_t kMaxMessages = 1000;

// Messages that the listener has not heard yet. Never destroyed: one may come at any time.
struct Log {
  std::mutex mutex;
  std::deque<std::pair<int, std::string>> messages;
};

Log* log_of_process = new Log;  // a child of fork() has its own: the lock may have been held
std::atomic<bool> has_messages{false};
thread_local bool is_unlocked = false;
nb::object* const listener = new nb::object;

void keep_message(int level, const char* message, void* /*user*/) {
  const std::lock_guard lock(log_of_process->mutex);
  if (log_of_process->messages.size() < kMaxMessages) {
    log_of_process->messages.emplace_back(level, message);
    has_messages.store(true, std::memory_order_release);
  }
}

// REQUIRES: the GIL, and no lock.
void tell_messages() {
  std::deque<std::pair<int, std::string>> messages;
  {
    const std::lock_guard lock(log_of_process->mutex);
    has_messages.store(false, std::memory_order_relaxed);
    messages.swap(log_of_process->messages);
  }
  const nb::error_scope on_its_way;  // an exception of the caller is not the listener's
  for (const auto& [level, message] : messages) {
    const nb::object called = *listener;
    if (!called.is_valid()) {
      break;
    }
    try {
      called(level, message);
    } catch (nb::python_error& failed) {
      failed.discard_as_unraisable("kvm.set_log");
    }
  }
}

void set_log(nb::object callback) {
  if (callback.is_none()) {
    kvm_set_log_callback(nullptr, nullptr);
    *listener = nb::object();
    return;
  }
  *listener = std::move(callback);
  kvm_set_log_callback(keep_message, nullptr);
}

bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#elif !defined(Py_LIMITED_API)
  return _Py_IsFinalizing() != 0;
#else
  return false;
#endif
}

}  // namespace

Unlocked::Unlocked() : was_ending_(is_python_ending()), state_(PyEval_SaveThread()) {
  is_unlocked = true;
}

bool Unlocked::is_here() { return is_unlocked; }

Unlocked::~Unlocked() {
  while (!was_ending_ && is_python_ending()) {
    pause();
  }
  // Python ends a thread that comes too late by unwinding it (abi::__forced_unwind, and nothing
  // else is thrown here), which C++ above this must not see.
  try {
    PyEval_RestoreThread(state_);
    is_unlocked = false;
  } catch (...) {
    for (;;) {
      pause();
    }
  }
  if (has_messages.load(std::memory_order_acquire) && !was_ending_) {
    tell_messages();
  }
}

void check(kvm_status status) {
  if (status != KVM_OK) {
    throw StatusError{status, kvm_last_error()};
  }
}

void refuse(std::string message) { throw StatusError{KVM_ERR_INVALID, std::move(message)}; }

void register_status(nb::module_& module) {
  nb::register_exception_translator(
      [](const std::exception_ptr& thrown, void* /*payload*/) {
        try {
          std::rethrow_exception(thrown);
        } catch (const StatusError& error) {
          try {
            const nb::object made =
                nb::module_::import_("kvm._errors").attr("error_of")(error.status, error.message);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
          } catch (nb::python_error& failed) {
            failed.restore();
          }
        }
      },
      nullptr);
  module.def(
      "status_name", [](int32_t status) { return kvm_status_name(status); }, nb::arg("status"));
  module.def(
      "codec_name", [](uint32_t codec) { return kvm_codec_name(codec); }, nb::arg("codec"));
  module.def(
      "codec_find", [](const char* name) { return kvm_codec_find(name); }, nb::arg("name"));
  module.def(
      "preset_name", [](uint32_t index) { return kvm_preset_name(index); }, nb::arg("index"));
  module.def("set_log", set_log, nb::arg("callback").none());
  pthread_atfork(nullptr, nullptr, [] { log_of_process = new Log; });
  module.def("version", [] { return kvm_version_string(); });
}

}  // namespace kvm::python
