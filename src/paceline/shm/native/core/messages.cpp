#include "messages.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>

namespace paceline {

namespace {

constexpr size_t kSharedBytes = 16 << 10;  // below this a copy through the ring is cheaper than waiting for the reader

}  // namespace

std::exception_ptr error_of(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

Messages::Messages(Members& members, Patience patience)
    : members_(members),
      patience_(patience),
      sends_(members.size()),
      kept_(members.size()),
      incoming_(members.size()),
      numbers_(members.size()) {}

Messages::~Messages() {
  stop();
}

void Messages::stop() {
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) {
      return;
    }
    stopped_ = true;
    fail_all(done, error_of("shared memory: this group was shut down while messages were under way"));
  }
  finish(done);
  idle_.notify_all();
  members_.own().front().doorbell.ring();
  if (thread_.joinable()) {
    thread_.join();
  }
}

std::string Messages::title(const Message& message, bool sending) const {
  const std::string whom = message.peer == kAnySource ? "any rank" : members_.name(message.peer);
  return c10::str(sending ? "send to " : "receive from ", whom, " with tag ", message.tag);
}

void Messages::send(const std::shared_ptr<Message>& message) {
  start(message, true);
}

void Messages::receive(const std::shared_ptr<Message>& message) {
  start(message, false);
}

void Messages::start(const std::shared_ptr<Message>& message, bool sending) {
  message->deadline = Clock::now() + message->timeout;
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    members_.check_usable();
    ++under_way_;
    if (sending) {
      const auto offset = members_.arena().offset(message->data, message->bytes);
      message->shared = offset.has_value() && message->bytes >= kSharedBytes;
      message->number = ++numbers_[message->peer];
      sends_[message->peer].push_back(message);
      drive_sends(message->peer, done);
    } else if (!claim_kept(message, done)) {
      receives_.push_back(message);
      drive(done);
    }
    if (under_way_ > 0 && !thread_.joinable()) {
      thread_ = std::thread([this] { loop(); });
    }
  }
  finish(done);
  idle_.notify_one();
}

// Move whatever can be moved; return whether anything was.
bool Messages::drive(Done& done) {
  if (under_way_ == 0) {
    return false;
  }
  bool moved = false;
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank != members_.rank()) {
      moved = drive_sends(rank, done) || moved;
      moved = drive_channel(rank, done) || moved;
    }
  }
  return moved;
}

bool Messages::drive_sends(int to, Done& done) {
  Channel& channel = members_.own().channel(to);
  bool moved = false;
  bool pouring = false;
  for (auto& message : sends_[to]) {
    if (!message->announced) {
      if (channel.posted - channel.taken.load(std::memory_order_acquire) == kEnvelopes) {
        break;
      }
      Envelope& envelope = channel.envelopes[channel.posted % kEnvelopes];
      envelope = {message->tag, message->bytes, 0, message->shared};
      if (message->shared) {
        envelope.offset = *members_.arena().offset(message->data, message->bytes);
      }
      channel.posted.fetch_add(1);
      members_.window(to).front().doorbell.ring();
      message->announced = true;
      moved = true;
    }
    if (message->shared) {
      message->done = channel.taken.load(std::memory_order_acquire) >= message->number;
    } else if (!pouring) {
      moved = pour(to, *message) || moved;
      message->done = message->moved == message->bytes;
      pouring = !message->done;  // bytes enter the ring in the order of messages
    }
    if (message->done) {
      moved = true;
      --under_way_;
      done.push_back(message);
    }
  }
  auto& sends = sends_[to];
  sends.erase(std::remove_if(sends.begin(), sends.end(), [](const auto& message) { return message->done; }), sends.end());
  return moved;
}

bool Messages::pour(int to, Message& message) {
  Channel& channel = members_.own().channel(to);
  char* ring = members_.own().ring(to);
  bool moved = false;
  while (message.moved < message.bytes) {
    const uint64_t written = channel.written.load(std::memory_order_relaxed);
    const size_t space = kRingBytes - (written - channel.read.load(std::memory_order_acquire));
    const size_t at = written % kRingBytes;
    const size_t count = std::min({space, kRingBytes - at, kRingBytes / 4, message.bytes - message.moved});
    if (count == 0) {
      break;
    }
    std::memcpy(ring + at, message.data + message.moved, count);
    message.moved += count;
    channel.written.store(written + count, std::memory_order_release);
    members_.window(to).front().doorbell.ring();
    moved = true;
  }
  return moved;
}

// After a nap without a signal: whom we wait for may be gone, or late.
void Messages::look_up(Done& done) {
  const auto now = Clock::now();
  try {
    members_.check_usable();
    for (int rank = 0; rank < members_.size(); ++rank) {
      for (const auto& message : sends_[rank]) {
        members_.check([&](int other) { return other == rank; }, title(*message, true));
        if (now > message->deadline) {
          members_.throw_late(rank, title(*message, true), message->timeout);
        }
      }
      const Incoming& incoming = incoming_[rank];
      if (incoming.open && incoming.wanted != nullptr) {
        members_.check([&](int other) { return other == rank; }, title(*incoming.wanted, false));
        if (now > incoming.wanted->deadline) {
          members_.throw_late(rank, title(*incoming.wanted, false), incoming.wanted->timeout);
        }
      }
      for (const auto& kept : kept_[rank]) {
        if (kept->claimed != nullptr) {
          members_.check([&](int other) { return other == rank; }, title(*kept->claimed, false));
          if (now > kept->claimed->deadline) {
            members_.throw_late(rank, title(*kept->claimed, false), kept->claimed->timeout);
          }
        }
      }
    }
    for (const auto& message : receives_) {
      const bool any = message->peer == kAnySource;
      const auto owes = [&](int other) {
        return any ? members_.presence(other) != Presence::kLeft : other == message->peer;
      };
      members_.check(owes, title(*message, false));
      if (now > message->deadline) {
        if (any) {
          C10_THROW_ERROR(
              DistBackendError,
              c10::str("shared memory: ", title(*message, false), ": nothing came within the timeout of the group"));
        }
        members_.throw_late(message->peer, title(*message, false), message->timeout);
      }
    }
  } catch (const std::exception& error) {
    members_.fail(reason_of(error));
    fail_all(done, std::current_exception());
  }
}

void Messages::fail_all(Done& done, const std::exception_ptr& error) {
  const auto fail = [&](const std::shared_ptr<Message>& message) {
    if (message != nullptr && !message->done) {
      message->done = true;
      message->error = error;
      done.push_back(message);
    }
  };
  for (int rank = 0; rank < members_.size(); ++rank) {
    std::for_each(sends_[rank].begin(), sends_[rank].end(), fail);
    sends_[rank].clear();
    fail(incoming_[rank].wanted);
    incoming_[rank].wanted = nullptr;
    for (const auto& kept : kept_[rank]) {
      fail(kept->claimed);
    }
    kept_[rank].clear();
  }
  std::for_each(receives_.begin(), receives_.end(), fail);
  receives_.clear();
  under_way_ = 0;
}

void Messages::finish(Done& done) {
  if (done.empty()) {
    return;
  }
  for (const auto& message : done) {
    message->finish(message->error);
  }
  done.clear();
  members_.own().front().doorbell.ring();  // another thread of ours may be waiting for one of them
}

void Messages::wait(const std::shared_ptr<Message>& message) {
  Signal& doorbell = members_.own().front().doorbell;
  Done done;
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  while (!message->done) {
    const uint32_t seen = doorbell.value.load();
    const bool moved = drive(done);
    lock.unlock();
    finish(done);
    if (!moved) {
      bool slept = false;
      paceline::wait(
          doorbell,
          patience_,
          [&](uint32_t value) { return slept || value != seen; },
          [&] { slept = true; });
      if (slept) {
        lock.lock();
        if (!drive(done)) {
          look_up(done);
        }
        lock.unlock();
        finish(done);
      }
    }
    lock.lock();
  }
  --waiting_;
  lock.unlock();
  idle_.notify_one();
}

// Runs while messages are under way and nobody waits for one.
void Messages::loop() {
  pthread_setname_np(pthread_self(), "paceline-msg");
  const sched_param priority{};
  sched_setscheduler(0, SCHED_BATCH, &priority);  // does not interrupt the thread that computes
  Signal& doorbell = members_.own().front().doorbell;
  Done done;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_) {
    if (!done.empty()) {
      lock.unlock();
      finish(done);
      lock.lock();
      continue;
    }
    if (under_way_ == 0 || waiting_ > 0) {
      idle_.wait(lock);
      continue;
    }
    const uint32_t seen = doorbell.value.load();
    if (drive(done)) {
      continue;
    }
    lock.unlock();
    doorbell.sleep(seen, kNap);
    lock.lock();
    if (doorbell.value.load() == seen && !drive(done)) {
      look_up(done);
    }
  }
  lock.unlock();
  finish(done);
}

}  // namespace paceline
