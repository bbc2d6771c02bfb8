// Calls of a group in their order, one at a time, run by its threads or by a thread that waits for one of them.
//
// What follows a call, callbacks of futures, runs when the next call may already run, and on one of two threads: a
// callback may wait for a later call.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace paceline {

class Queue {
 public:
  // A call learns how long it may stay awake: a thread in the background must not take a core. Returns what follows.
  using Task = std::function<std::function<void()>(const Patience&)>;

  explicit Queue(Patience patience) : patience_(patience) {}
  ~Queue() {
    stop();
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // Run it on this thread, after what was queued before.
  void run(const Task& task);
  // Run it some time, on some thread.
  void push(Task task);
  // Run what is queued on this thread until `done()`.
  template <typename Done>
  void help(Done done) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done()) {
      if (!step(lock, patience_)) {
        changed_.wait(lock);
      }
    }
  }
  // Wait for what runs and what is queued; in a group that has ended it fails at once.
  void stop();

 private:
  bool step(std::unique_lock<std::mutex>& lock, const Patience& patience);
  void perform(std::unique_lock<std::mutex>& lock, const Task& task, const Patience& patience);
  void loop();

  Patience patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace paceline
