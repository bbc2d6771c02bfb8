// Who uses a socket: its number is not given back to the system meanwhile. With the interpreter held, always; the same
// as `guarded.Users`.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace paceline::wire {

class Users {
 public:
  // Returns whether the socket may be used; not once it is ended.
  bool enter() {
    count_ += ended_ ? 0 : 1;
    return !ended_;
  }
  // Returns whether the socket is to be closed now.
  bool leave() { return --count_ == 0 && ended_; }
  // Returns whether this is the first time, and whether nobody uses the socket.
  std::pair<bool, bool> end() { return {!std::exchange(ended_, true), count_ == 0}; }

 private:
  int count_ = 0;
  bool ended_ = false;
};

}  // namespace paceline::wire
