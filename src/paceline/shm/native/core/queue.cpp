#include "queue.hpp"

#include <pthread.h>
#include <sched.h>

namespace paceline {

void Queue::run(const Task& task) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (busy_ || !tasks_.empty()) {
    if (!step(lock, patience_)) {
      changed_.wait(lock);
    }
  }
  busy_ = true;
  lock.unlock();
  task(patience_);
  lock.lock();
  busy_ = false;
  if (thread_.joinable()) {
    changed_.notify_all();
  }
}

void Queue::push(Task task) {
  std::unique_lock<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { loop(); });
  }
  lock.unlock();
  changed_.notify_all();
}

// Run the first task, if nothing runs; return whether one was run.
bool Queue::step(std::unique_lock<std::mutex>& lock, const Patience& patience) {
  if (busy_ || tasks_.empty()) {
    return false;
  }
  const Task task = std::move(tasks_.front());
  tasks_.pop_front();
  busy_ = true;
  lock.unlock();
  task(patience);
  lock.lock();
  busy_ = false;
  changed_.notify_all();
  return true;
}

void Queue::loop() {
  pthread_setname_np(pthread_self(), "paceline-shm");
  const sched_param priority{};
  sched_setscheduler(0, SCHED_BATCH, &priority);  // does not interrupt the thread that computes
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopped_ || !tasks_.empty()) {
    if (!step(lock, Patience::none())) {
      changed_.wait(lock);
    }
  }
}

void Queue::stop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_ && tasks_.empty(); });
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace paceline
