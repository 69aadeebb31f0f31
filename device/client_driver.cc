// SPDX-License-Identifier: Apache-2.0
#include "device/client_driver.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/assert.h"
#include "base/kill_point.h"

namespace kvm::device {

using wire::Command;
using wire::CommandKind;
using wire::FrameKind;
using wire::Order;
using wire::OrderKind;

namespace {

// A piece of a copy takes some 40 us, and eight of them may be under way.
constexpr auto kPollEvery = std::chrono::microseconds(100);
// Of a client that waits for its call: mapping memory, and waiting for its device.
constexpr uint64_t kOrderTimeoutNs = 60'000'000'000;
// LIMIT: of what a client says of a failure, so much is passed on.
constexpr size_t kMaxSentence = 256;

}  // namespace

// What an event was recorded behind.
struct ClientDriver::ClientEvent {
  Event real = nullptr;  // of streams of this process
  bool of_client = false;
  uint32_t word = 0;  // of this process's stream; kServerWords: never recorded
  uint64_t value = 0;
  std::vector<Command> waits;  // of_client
};

ClientDriver::ClientDriver(SharingDriver* device, ipc::FrameChannel* channel, wire::Words* words,
                           Budget* memory)
    : device_(device), channel_(channel), words_(words), memory_(memory) {}

ClientDriver::~ClientDriver() { KVM_ASSERT(ranges_.empty()); }

void ClientDriver::begin_call(uint64_t marker) {
  marker_ = marker;
  commands_.clear();
}

bool ClientDriver::has_reached(const wire::Words::Word& word, uint64_t value) const {
  // SYNC: acquire. Whoever wrote the word had done before what it counts.
  const uint64_t is =
      std::atomic_ref<uint64_t>(const_cast<uint64_t&>(word.value)).load(std::memory_order_acquire);
  return static_cast<int64_t>(is - value) >= 0;
}

void ClientDriver::let_go() {
  is_gone_.store(true, std::memory_order_relaxed);
  const auto poison = [](wire::Words::Word* word) {
    // SYNC: release, which nobody needs: who waits for it is a stream, and what it then does is of
    // no interest to anyone. What the client's device still writes may come behind it: await_event
    // writes it again.
    std::atomic_ref<uint64_t>(word->value).store(wire::kPoison, std::memory_order_release);
  };
  poison(&words_->client);
  // Streams of this process wait for these as well, and the client may have written anything there.
  std::for_each(std::begin(words_->server), std::end(words_->server),
                [&](wire::Words::Word& word) { poison(&word); });
}

// --- Memory -------------------------------------------------------------------------------------

Status ClientDriver::order(const Order& order, int fd) {
  if (is_gone()) {
    return Status(KVM_ERR_DISCONNECTED, "the client has gone");
  }
  writer_.clear();
  writer_.put(order);
  Status status = channel_->send(static_cast<uint32_t>(FrameKind::kOrder), writer_.bytes(), fd);
  if (status.is_ok()) {
    status = channel_->receive(kOrderTimeoutNs, &answer_, wire::kMaxDoneBytes);
  }
  if (status.is_ok()) {
    ipc::FrameReader reader(answer_.bytes);
    const Status done = reader.get_status();
    if (answer_.kind == static_cast<uint32_t>(FrameKind::kDone) && reader.is_whole()) {
      if (done.is_ok()) {
        return done;
      }
      std::string why = "in the client: ";
      why.append(done.message(), 0, kMaxSentence);
      return Status(done.code() == KVM_ERR_NO_SPACE ? KVM_ERR_NO_SPACE : KVM_ERR_DEVICE,
                    std::move(why));
    }
    status = Status(KVM_ERR_PROTOCOL, "the client has answered an order with something else");
  }
  // Whether it has done it is not known, and an answer that comes late must not count as a call.
  let_go();
  channel_->shut_down();
  return status;
}

Result<uint8_t*> ClientDriver::reserve(uint64_t size_bytes) {
  KVM_TRY_ASSIGN(uint8_t* const base, device_->reserve(size_bytes));
  const uint32_t range = ++last_range_;
  const Status ordered = order({OrderKind::kReserve, range, 0, size_bytes});
  if (!ordered.is_ok()) {
    device_->release(base, size_bytes);
    return ordered;
  }
  ranges_[range] = {base, size_bytes};
  return base;
}

uint32_t ClientDriver::range_at(const uint8_t* base) const { return place_of(base).range; }

ClientDriver::Place ClientDriver::place_of(const void* at) const {
  for (const auto& [number, range] : ranges_) {
    const auto* const address = static_cast<const uint8_t*>(at);
    if (address >= range.base && address < range.base + range.size_bytes) {
      return {number, static_cast<uint64_t>(address - range.base)};
    }
  }
  KVM_ASSERT(false);
  return {};
}

void ClientDriver::release(uint8_t* range, uint64_t size_bytes) {
  const uint32_t number = range_at(range);
  (void)order({OrderKind::kRelease, number, 0, size_bytes});
  device_->release(range, size_bytes);
  ranges_.erase(number);
}

Status ClientDriver::map(uint8_t* at, uint64_t size_bytes) {
  if (!memory_->take(size_bytes)) {
    return Status(KVM_ERR_NO_SPACE, "all clients together have " + std::to_string(memory_->used()) +
                                        " of " + std::to_string(memory_->capacity()) +
                                        " bytes of the device; needed are " +
                                        std::to_string(size_bytes));
  }
  Result<ipc::Fd> mapped = device_->map_shared(at, size_bytes);
  if (!mapped.is_ok()) {
    memory_->give_back(size_bytes);
    return mapped.status();
  }
  const Place place = place_of(at);
  KVM_KILL_POINT("device/mapped");
  const Status ordered =
      order({OrderKind::kMap, place.range, place.offset, size_bytes}, mapped.value().get());
  if (!ordered.is_ok()) {
    device_->unmap(at, size_bytes);
    memory_->give_back(size_bytes);
  }
  return ordered;
}

void ClientDriver::unmap(uint8_t* at, uint64_t size_bytes) {
  const Place place = place_of(at);
  (void)order({OrderKind::kUnmap, place.range, place.offset, size_bytes});
  device_->unmap(at, size_bytes);
  memory_->give_back(size_bytes);
}

Status ClientDriver::copy(void* to, const void* from, uint64_t size_bytes, Stream stream) {
  if (stream != kClientStream) {
    return device_->copy(to, from, size_bytes, stream);
  }
  const Place to_place = place_of(to), from_place = place_of(from);
  Command command;
  command.kind = CommandKind::kCopy;
  command.to_range = to_place.range;
  command.to = to_place.offset;
  command.from_range = from_place.range;
  command.from = from_place.offset;
  command.n_bytes = size_bytes;
  commands_.push_back(command);
  return Status::ok();
}

// --- Streams and events -------------------------------------------------------------------------

Result<Stream> ClientDriver::create_stream() {
  const std::lock_guard lock(streams_mutex_);
  Stream* const free = std::find(std::begin(streams_), std::end(streams_), nullptr);
  KVM_ASSERT(free != std::end(streams_));
  KVM_TRY_ASSIGN(*free, device_->create_stream());
  return *free;
}

void ClientDriver::destroy_stream(Stream stream) {
  device_->destroy_stream(stream);
  const std::lock_guard lock(streams_mutex_);
  std::replace(std::begin(streams_), std::end(streams_), stream, Stream{});
}

uint32_t ClientDriver::index_of(Stream stream) {
  const auto* const found = std::find(std::begin(streams_), std::end(streams_), stream);
  KVM_ASSERT(found != std::end(streams_));
  return static_cast<uint32_t>(found - std::begin(streams_));
}

Result<Event> ClientDriver::create_event() {
  auto event = std::make_unique<ClientEvent>();
  event->word = wire::kServerWords;
  KVM_TRY_ASSIGN(event->real, device_->create_event());
  return static_cast<Event>(event.release());
}

void ClientDriver::destroy_event(Event event) {
  const std::unique_ptr<ClientEvent> of(static_cast<ClientEvent*>(event));
  device_->destroy_event(of->real);
}

Status ClientDriver::record(Event event, Stream stream) {
  auto* const of = static_cast<ClientEvent*>(event);
  of->waits.clear();
  of->of_client = stream == kClientStream;
  if (of->of_client) {
    KVM_ASSERT(std::all_of(commands_.begin(), commands_.end(), [](const Command& command) {
      return command.kind == CommandKind::kWait;
    }));
    of->value = marker_;
    of->waits = commands_;
    return Status::ok();
  }
  uint64_t value = 0;
  {
    const std::lock_guard lock(streams_mutex_);
    of->word = index_of(stream);
    value = ++written_[of->word];
  }
  of->value = value;
  KVM_TRY(device_->record(of->real, stream));
  return device_->write_word(&words_->server[of->word].value, value, stream);
}

Status ClientDriver::wait(Stream stream, Event event) {
  const auto* const of = static_cast<const ClientEvent*>(event);
  if (stream == kClientStream) {
    if (!of->of_client && of->word != wire::kServerWords &&
        !has_reached(words_->server[of->word], of->value)) {
      Command command;
      command.word = of->word;
      command.value = of->value;
      commands_.push_back(command);
    }
    return Status::ok();
  }
  if (!of->of_client) {
    return device_->wait(stream, of->real);
  }
  for (const Command& wait : of->waits) {
    KVM_TRY(device_->wait_word(&words_->server[wait.word].value, wait.value, stream));
  }
  return has_reached(words_->client, of->value)
             ? Status::ok()
             : device_->wait_word(&words_->client.value, of->value, stream);
}

Result<bool> ClientDriver::is_done(Event event) {
  const auto* const of = static_cast<const ClientEvent*>(event);
  if (!of->of_client) {
    return device_->is_done(of->real);
  }
  return has_reached(words_->client, of->value) &&
         std::all_of(of->waits.begin(), of->waits.end(), [this](const Command& wait) {
           return has_reached(words_->server[wait.word], wait.value);
         });
}

Status ClientDriver::await_event(Event event, bool of_device) {
  for (;;) {
    KVM_TRY_ASSIGN(const bool done, of_device ? device_->is_done(event) : is_done(event));
    if (done) {
      return Status::ok();
    }
    if (is_gone()) {
      let_go();
    }
    std::this_thread::sleep_for(kPollEvery);
  }
}

Status ClientDriver::synchronize(Event event) { return await_event(event, false); }

Status ClientDriver::synchronize_stream(Stream stream) {
  // Whoever asks is about to give pages to others: where there is no event to look at, the driver
  // waits. Should the client go meanwhile, what lets it go lets the stream go.
  return poll_stream(stream).is_ok() ? Status::ok() : device_->synchronize_stream(stream);
}

Status ClientDriver::poll_stream(Stream stream) {
  KVM_TRY_ASSIGN(const Event event, device_->create_event());
  Status status = device_->record(event, stream);
  if (status.is_ok()) {
    status = await_event(event, true);
  }
  device_->destroy_event(event);
  return status;
}

Status ClientDriver::synchronize_device() {
  // Without memory it has enqueued nothing that anybody waits for; and before it has been told that
  // it is served, it takes no orders.
  if (!is_gone() && !ranges_.empty()) {
    KVM_TRY(order({OrderKind::kSynchronize, 0, 0, 0}));
  }
  std::vector<Stream> streams;
  {
    const std::lock_guard lock(streams_mutex_);
    std::copy_if(std::begin(streams_), std::end(streams_), std::back_inserter(streams),
                 [](Stream stream) { return stream != nullptr; });
  }
  for (const Stream stream : streams) {
    KVM_TRY(synchronize_stream(stream));
  }
  return Status::ok();
}

}  // namespace kvm::device
