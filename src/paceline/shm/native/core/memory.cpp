#include "memory.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace paceline {

namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

size_t entries_at() {
  return round_up(sizeof(Front), kLine);
}

size_t stages_at(int size) {
  return round_up(entries_at() + 2 * size * sizeof(Entry), kPage);
}

size_t channels_at(int size) {
  return stages_at(size) + 2 * kStageBytes;
}

size_t rings_at(int size) {
  return round_up(channels_at(size) + size * sizeof(Channel), kPage);
}

}  // namespace

Mapping::Mapping(int fd, size_t bytes, bool reserve) : bytes_(bytes) {
  const int flags = MAP_SHARED | (reserve ? 0 : MAP_NORESERVE);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  TORCH_CHECK_WITH(
      DistBackendError,
      data != MAP_FAILED,
      "shared memory: cannot map ", bytes, " bytes (", std::strerror(errno),
      "). Raise the limit on addresses (ulimit -v), or choose the backend gloo.");
  data_ = static_cast<char*>(data);
}

Mapping::~Mapping() {
  munmap(data_, bytes_);
}

size_t Window::bytes(int size) {
  return rings_at(size) + size * kRingBytes;
}

Entry* Window::entries(uint32_t step) const {
  return reinterpret_cast<Entry*>(mapping_.data() + entries_at()) + (step & 1) * size_;
}

char* Window::stage(uint32_t step) const {
  return mapping_.data() + stages_at(size_) + (step & 1) * kStageBytes;
}

Channel& Window::channel(int to) const {
  return reinterpret_cast<Channel*>(mapping_.data() + channels_at(size_))[to];
}

char* Window::ring(int to) const {
  return mapping_.data() + rings_at(size_) + to * kRingBytes;
}

Arena::Arena(int fd, size_t bytes) : mapping_(fd, bytes, false), fd_(fd), owner_(getpid()) {
  madvise(mapping_.data(), bytes, MADV_HUGEPAGE);  // where the system lets shared memory have them
  free_[0] = bytes;
}

std::shared_ptr<void> Arena::allocate(size_t bytes) {
  TORCH_CHECK(getpid() == owner_, "shared memory: a forked process cannot allocate from its parent's arena");
  const size_t offset = take(std::max(bytes, kLine));
  return {mapping_.data() + offset, [arena = shared_from_this(), offset](void*) { arena->give_back(offset); }};
}

std::shared_ptr<void> Arena::allocate_for_all(size_t bytes, uint32_t users) {
  TORCH_CHECK(getpid() == owner_, "shared memory: a forked process cannot allocate from its parent's arena");
  const size_t offset = take(bytes + sizeof(Tally));
  auto* tally = reinterpret_cast<Tally*>(mapping_.data() + offset);
  tally->users.store(users);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    used_by_all_.push_back(offset);
  }
  return {tally + 1, [arena = shared_from_this()](void* data) { let_go(data); }};
}

bool Arena::is_for_all(const void* data) const {
  if (!mapping_.contains(data, 0)) {
    return false;
  }
  const size_t offset = static_cast<const char*>(data) - mapping_.data() - sizeof(Tally);
  std::lock_guard<std::mutex> lock(mutex_);
  return std::find(used_by_all_.begin(), used_by_all_.end(), offset) != used_by_all_.end();
}

std::optional<uint64_t> Arena::offset(const void* data, size_t bytes) const {
  if (!mapping_.contains(data, bytes)) {
    return std::nullopt;
  }
  return static_cast<const char*>(data) - mapping_.data();
}

size_t Arena::bytes_in_use() {
  sweep();
  std::lock_guard<std::mutex> lock(mutex_);
  size_t sum = 0;
  for (const auto& [offset, bytes] : in_use_) {
    sum += bytes;
  }
  return sum;
}

size_t Arena::take(size_t bytes) {
  bytes = round_up(bytes, bytes >= kPage ? kPage : kLine);
  sweep();
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second >= bytes && (best == free_.end() || block->second < best->second)) {
      best = block;
    }
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      best != free_.end(),
      "shared memory: no ", bytes, " bytes in one piece are left of the ", mapping_.bytes(), " of this process");
  const auto [offset, available] = *best;
  reach(offset + bytes);
  free_.erase(best);
  if (available > bytes) {
    free_[offset + bytes] = available - bytes;
  }
  in_use_[offset] = bytes;
  return offset;
}

void Arena::sweep() {
  std::vector<size_t> unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto is_used = [this](size_t offset) {
      return reinterpret_cast<Tally*>(mapping_.data() + offset)->users.load() > 0;
    };
    const auto first = std::partition(used_by_all_.begin(), used_by_all_.end(), is_used);
    unused.assign(first, used_by_all_.end());
    used_by_all_.erase(first, used_by_all_.end());
  }
  for (const size_t offset : unused) {
    give_back(offset);
  }
}

// Asked for here, missing memory is an error; met at the first write it would be a signal that ends the process.
void Arena::reach(size_t end) {
  if (end <= reached_) {
    return;
  }
  const int code = posix_fallocate(fd_, reached_, end - reached_);
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      code == 0,
      "shared memory: this process needs ", end, " bytes of it and the system does not give them (", std::strerror(code),
      "). Use a smaller model or batch, raise the memory limit of the container, or choose the backend gloo.");
  reached_ = end;
}

void Arena::give_back(size_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t bytes = in_use_.at(offset);
  in_use_.erase(offset);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace paceline
