#include "members.hpp"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <utility>

namespace paceline {

namespace {

// A peer's arena is mapped once however many groups it is met in.
std::shared_ptr<Mapping> map_arena(int fd) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> known;
  struct stat status {};
  TORCH_CHECK(fstat(fd, &status) == 0, "shared memory: ", std::strerror(errno));
  std::lock_guard<std::mutex> lock(mutex);
  auto& entry = known[{status.st_dev, status.st_ino}];
  auto mapping = entry.lock();
  if (mapping == nullptr) {
    mapping = std::make_shared<Mapping>(fd, status.st_size, false);
    entry = mapping;
  }
  return mapping;
}

}  // namespace

std::string reason_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours == nullptr ? error.what() : ours->what_without_backtrace();
}

Members::Members(int rank, std::vector<Peer> peers, std::shared_ptr<Arena> arena)
    : rank_(rank), peers_(std::move(peers)), arena_(std::move(arena)) {
  for (const Peer& peer : peers_) {
    windows_.push_back(std::make_unique<Window>(peer.window, size()));
    arenas_.push_back(map_arena(peer.arena));
    close(peer.window);
    close(peer.arena);
  }
}

Members::~Members() {
  for (const Peer& peer : peers_) {
    close(peer.process);
  }
}

std::string Members::name(int rank) const {
  return c10::str("rank ", peers_[rank].global_rank, " (process ", peers_[rank].pid, ")");
}

bool Members::is_alive(int rank) const {
  pollfd process{peers_[rank].process, POLLIN, 0};
  return poll(&process, 1, 0) == 0;
}

Presence Members::presence(int rank) const {
  return static_cast<Presence>(window(rank).front().presence.load());
}

void Members::check_usable() const {
  if (usable_) {
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  C10_THROW_ERROR(
      DistBackendError,
      failure_.empty() ? std::string("shared memory: this group has been shut down")
                       : "shared memory: this group ended with an error before: " + failure_);
}

void Members::fail(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!usable_) {
      return;
    }
    failure_ = reason;
    std::strncpy(own().front().failure, reason.c_str(), kTextBytes - 1);
    usable_ = false;
  }
  announce(Presence::kFailed);
}

void Members::leave() {
  if (usable_.exchange(false)) {
    announce(Presence::kLeft);
  }
}

void Members::announce(Presence presence) {
  own().front().presence.store(static_cast<uint32_t>(presence));
  own().front().step.wake();
  own().front().doorbell.ring();
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_) {
      window(rank).front().doorbell.ring();
    }
  }
}

void Members::throw_gone(int rank, const std::string& what) const {
  std::string how;
  switch (presence(rank)) {
    case Presence::kHere:
      how = " died";
      break;
    case Presence::kLeft:
      how = " left the group";
      break;
    case Presence::kFailed:
      how = c10::str(" gave up (", window(rank).front().failure, ")");
      break;
  }
  C10_THROW_ERROR(DistBackendError, c10::str("shared memory: ", name(rank), how, "; ", what, " waited for it"));
}

void Members::throw_late(int rank, const std::string& what, std::chrono::milliseconds timeout) const {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "shared memory: ", name(rank), " did not arrive at ", what, " within ", timeout.count() / 1000.0,
          " s. It is alive: it computes for longer than the timeout of the group, hangs, or makes other calls"));
}

}  // namespace paceline
