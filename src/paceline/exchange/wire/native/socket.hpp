// Bytes over a socket that blocks. What can be done at once is done with the interpreter held: to give it up and have it
// back takes longer than to copy what a small frame has, where other threads want it.
#pragma once

#include <Python.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <vector>

namespace paceline::wire {

// An error of the interpreter is set.
struct Raised {};

class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() { PyEval_RestoreThread(state_); }
  Released(const Released&) = delete;

 private:
  PyThreadState* state_;
};

// Whether to look again and again for what is to arrive, before the thread sleeps: to be woken takes longer than a small
// answer. Only where that helped the last time; after each time that it did not, it is left out twice as often.
class Patience {
 public:
  template <typename Call>
  ssize_t look(Call&& call) {
    if (left_out_ > 0) {
      --left_out_;
      return -1;
    }
    const auto until = Clock::now() + kLong;
    do {
      const ssize_t count = call(MSG_DONTWAIT);
      if (count >= 0) {
        misses_ = 0;
        return count;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return -1;
      }
    } while (Clock::now() < until);
    misses_ = std::min(misses_ + 1, kMostMisses);
    left_out_ = 1 << misses_;
    return -1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kLong{30};
  static constexpr int kMostMisses = 7;
  int misses_ = 0;
  int left_out_ = 0;
};

// Whether to ask for what may be there already, with the interpreter held: not where it never was of late.
class Habit {
 public:
  bool asks() {
    return misses_ < kFew || ++misses_ % kSeldom == 0;
  }
  void came(bool did) { misses_ = did ? 0 : misses_ + (misses_ < kFew ? 1 : 0); }

 private:
  static constexpr unsigned kFew = 8;
  static constexpr unsigned kSeldom = 16;
  unsigned misses_ = 0;
};

// Calls a system call with flags until it says something; returns what, 0 or more.
template <typename Call>
size_t insisted(Call&& call, bool at_once, Patience* patience = nullptr, Habit* habit = nullptr) {
  if (at_once && (habit == nullptr || habit->asks())) {
    const ssize_t count = call(MSG_DONTWAIT);
    if (habit != nullptr) {
      habit->came(count >= 0);
    }
    if (count >= 0) {
      return static_cast<size_t>(count);
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      PyErr_SetFromErrno(PyExc_OSError);
      throw Raised();
    }
  }
  for (;;) {
    ssize_t count = -1;
    int error = 0;
    {
      const Released released;
      if (patience != nullptr) {
        count = patience->look(call);
      }
      if (count < 0) {
        count = call(0);
        error = errno;
      }
    }
    if (count >= 0) {
      return static_cast<size_t>(count);
    }
    if (error != EINTR) {
      errno = error;
      PyErr_SetFromErrno(PyExc_OSError);
      throw Raised();
    }
    if (PyErr_CheckSignals() != 0) {
      throw Raised();
    }
  }
}

constexpr size_t kAtOnceBytes = size_t{256} << 10;
constexpr size_t kMostPieces = 1024;  // IOV_MAX of Linux

// Pieces of memory, from the first that is not done yet.
class Pieces {
 public:
  void clear() {
    pieces_.clear();
    at_ = 0;
    left_ = 0;
  }
  void add(void* data, size_t bytes) {
    if (bytes > 0) {
      pieces_.push_back({data, bytes});
      left_ += bytes;
    }
  }
  // Sets what comes before all others, for which a place of one byte was kept.
  void first(void* data, size_t bytes) {
    pieces_[0] = {data, bytes};
    left_ += bytes - 1;
  }
  // Adds memory whose first bytes are there already.
  void add_rest(void* data, size_t bytes, size_t there) {
    if (bytes > there) {
      add(static_cast<char*>(data) + there, bytes - there);
    }
  }
  size_t left() const { return left_; }
  iovec* begin() { return pieces_.data() + at_; }
  size_t count() const { return std::min(pieces_.size() - at_, kMostPieces); }
  void done(size_t bytes) {
    left_ -= bytes;
    while (bytes > 0) {
      iovec& piece = pieces_[at_];
      const size_t part = std::min(bytes, piece.iov_len);
      piece.iov_base = static_cast<char*>(piece.iov_base) + part;
      piece.iov_len -= part;
      bytes -= part;
      at_ += piece.iov_len == 0 ? 1 : 0;
    }
  }

 private:
  std::vector<iovec> pieces_;
  size_t at_ = 0;
  size_t left_ = 0;
};

inline void send_all(int socket, Pieces& pieces) {
  while (pieces.left() > 0) {
    msghdr message{};
    message.msg_iov = pieces.begin();
    message.msg_iovlen = pieces.count();
    const auto call = [&](int flags) { return sendmsg(socket, &message, flags | MSG_NOSIGNAL); };
    pieces.done(insisted(call, pieces.left() <= kAtOnceBytes));
  }
}

// Fills pieces; returns false where the peer is gone before they are full. patience: for what comes in several parts.
inline bool receive_all(int socket, Pieces& pieces, Patience& patience) {
  while (pieces.left() > 0) {
    msghdr message{};
    message.msg_iov = pieces.begin();
    message.msg_iovlen = pieces.count();
    const auto call = [&](int flags) {
      return recvmsg(socket, &message, flags | (flags == 0 ? MSG_WAITALL : 0) | MSG_CMSG_CLOEXEC);
    };
    const bool at_once = pieces.left() <= kAtOnceBytes;
    const size_t count = insisted(call, at_once, at_once ? &patience : nullptr);
    if (count == 0) {
      return false;
    }
    pieces.done(count);
  }
  return true;
}

}  // namespace paceline::wire
