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
  perform(lock, task, patience_);
}

void Queue::perform(std::unique_lock<std::mutex>& lock, const Task& task, const Patience& patience) {
  busy_ = true;
  lock.unlock();
  const auto then = task(patience);
  lock.lock();
  busy_ = false;
  lock.unlock();
  changed_.notify_all();  // other threads may wait for their turn, the group's or the user's
  then();
  lock.lock();
}

void Queue::push(Task task) {
  std::unique_lock<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  while (threads_.size() < 2) {
    threads_.emplace_back([this] { loop(); });
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
  perform(lock, task, patience);
  changed_.notify_all();  // who waits for this very call may look again
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
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
}

}  // namespace paceline
