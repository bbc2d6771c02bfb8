// Calls of a group in their order, run by its thread, or by a thread that waits for one of them.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "waiting.hpp"

namespace paceline {

class Queue {
 public:
  // A call learns how long it may stay awake: a thread in the background must not take a core.
  using Task = std::function<void(const Patience&)>;

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
  void loop();

  Patience patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace paceline
