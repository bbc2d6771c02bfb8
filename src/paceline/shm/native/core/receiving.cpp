// How messages are received: what is asked for, and what comes before it is.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "messages.hpp"

namespace paceline {

// A message that came before may be the one; it may also be coming in just now.
bool Messages::claim_kept(const std::shared_ptr<Message>& message, Done& done) {
  for (int from = 0; from < members_.size(); ++from) {
    if (message->peer != kAnySource && message->peer != from) {
      continue;
    }
    auto& list = kept_[from];
    const auto found = std::find_if(list.begin(), list.end(), [&](const auto& kept) {
      return kept->tag == message->tag && kept->claimed == nullptr;
    });
    if (found == list.end()) {
      continue;
    }
    message->peer = from;
    const auto kept = *found;
    kept->claimed = message;
    if (kept->complete) {
      list.erase(found);
      if (kept->bytes.size() == message->bytes) {
        std::memcpy(message->data, kept->bytes.data(), kept->bytes.size());
      } else {
        message->error = error_of(c10::str(
            "shared memory: ", title(*message, false), " expects ", message->bytes, " bytes and got ", kept->bytes.size()));
      }
      message->done = true;
      --under_way_;
      done.push_back(message);
    }
    return true;
  }
  return false;
}

bool Messages::drive_channel(int from, Done& done) {
  Channel& channel = members_.window(from).channel(members_.rank());
  Incoming& incoming = incoming_[from];
  bool moved = false;
  for (;;) {
    if (!incoming.open) {
      if (incoming.count == channel.posted.load(std::memory_order_acquire)) {
        return moved;
      }
      open(from, incoming);
    }
    moved = draw(from, incoming) || moved;
    if (incoming.moved < incoming.envelope.bytes) {
      return moved;
    }
    close(from, incoming, done);
    moved = true;
  }
}

void Messages::open(int from, Incoming& incoming) {
  const Channel& channel = members_.window(from).channel(members_.rank());
  incoming.envelope = channel.envelopes[incoming.count % kEnvelopes];
  incoming.moved = 0;
  incoming.open = true;
  const auto wanted = std::find_if(receives_.begin(), receives_.end(), [&](const auto& message) {
    return message->tag == incoming.envelope.tag && (message->peer == from || message->peer == kAnySource);
  });
  if (wanted != receives_.end()) {
    incoming.wanted = *wanted;
    incoming.wanted->peer = from;
    receives_.erase(wanted);
    if (incoming.wanted->bytes == incoming.envelope.bytes) {
      return;
    }
    incoming.wanted->error = error_of(c10::str(
        "shared memory: ", title(*incoming.wanted, false), " expects ", incoming.wanted->bytes, " bytes and got ",
        incoming.envelope.bytes));
  }
  incoming.kept = std::make_shared<Kept>();
  incoming.kept->tag = incoming.envelope.tag;
  incoming.kept->bytes.resize(incoming.envelope.bytes);
  if (incoming.wanted == nullptr) {
    kept_[from].push_back(incoming.kept);
  }
}

bool Messages::draw(int from, Incoming& incoming) {
  Channel& channel = members_.window(from).channel(members_.rank());
  char* target = incoming.kept != nullptr ? incoming.kept->bytes.data() : incoming.wanted->data;
  const size_t bytes = incoming.envelope.bytes;
  if (incoming.envelope.shared) {
    std::memcpy(target, members_.arena_of(from) + incoming.envelope.offset, bytes);
    incoming.moved = bytes;
    return true;
  }
  const char* ring = members_.window(from).ring(members_.rank());
  bool moved = false;
  while (incoming.moved < bytes) {
    const uint64_t read = channel.read.load(std::memory_order_relaxed);
    const size_t there = channel.written.load(std::memory_order_acquire) - read;
    const size_t at = read % kRingBytes;
    const size_t count = std::min({there, kRingBytes - at, bytes - incoming.moved});
    if (count == 0) {
      break;
    }
    std::memcpy(target + incoming.moved, ring + at, count);
    incoming.moved += count;
    channel.read.store(read + count, std::memory_order_release);
    members_.window(from).front().doorbell.ring();
    moved = true;
  }
  return moved;
}

void Messages::close(int from, Incoming& incoming, Done& done) {
  Channel& channel = members_.window(from).channel(members_.rank());
  channel.taken.fetch_add(1);
  members_.window(from).front().doorbell.ring();
  ++incoming.count;
  auto message = incoming.wanted;
  if (incoming.kept != nullptr) {
    incoming.kept->complete = true;
    if (incoming.kept->claimed != nullptr) {
      message = incoming.kept->claimed;
      if (incoming.kept->bytes.size() == message->bytes) {
        std::memcpy(message->data, incoming.kept->bytes.data(), message->bytes);
      } else {
        message->error = error_of(c10::str(
            "shared memory: ", title(*message, false), " expects ", message->bytes, " bytes and got ",
            incoming.kept->bytes.size()));
      }
      kept_[from].remove(incoming.kept);
    }
  }
  if (message != nullptr) {
    message->done = true;
    --under_way_;
    done.push_back(message);
  }
  incoming.wanted = nullptr;
  incoming.kept = nullptr;
  incoming.open = false;
}

}  // namespace paceline
