// Operations of a group that spans hosts, one at a time in the order of their calls.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline::hosts {

using Tensors = std::vector<at::Tensor>;

// One operation and, for its caller, the work to wait for.
class Task final : public c10d::Work {
 public:
  Task(
      int rank,
      c10d::OpType kind,
      const char* title,
      const Tensors& inputs,
      std::vector<Tensors> outputs,
      uint64_t sequence,
      std::function<void()> body)
      : Work(rank, kind, title, inputs),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            outputs_.size() > 1 ? c10::ListType::create(c10::ListType::create(c10::TensorType::get()))
                                : c10::ListType::create(c10::TensorType::get()))),
        sequence_(sequence),
        body_(std::move(body)) {}

  void run() noexcept {
    // Tensors are written as other backends write them: no graph, no version counters, also under inference mode.
    const at::AutoDispatchBelowADInplaceOrView below;
    try {
      body_();
    } catch (...) {
      failed_ = std::current_exception();
    }
    body_ = nullptr;
  }

  // Tell those who wait. Callbacks of the future run here and may wait for later operations.
  void announce() {
    if (failed_) {
      future_->setError(failed_);
    } else if (outputs_.size() > 1) {
      future_->markCompleted(c10::IValue(outputs_));
    } else {
      future_->markCompleted(c10::IValue(outputs_.empty() ? Tensors{} : outputs_.front()));
    }
    finish(failed_);
  }

  Tensors result() override {
    return outputs_.empty() ? Tensors{} : outputs_.front();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  uint64_t getSequencenumber() const override {
    return sequence_;
  }

 private:
  std::vector<Tensors> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  uint64_t sequence_;
  std::function<void()> body_;
  std::exception_ptr failed_;
};

// Whoever holds the turn runs the next task. There are two threads, so that while callbacks of one task wait for a
// later one on the first, the second runs that.
class Order {
 public:
  Order() = default;
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;
  ~Order() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) {
      thread.join();
    }
  }

  // On this thread if nothing is before it; returns when it is done, failed or not.
  void run_now(const c10::intrusive_ptr<Task>& task) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (taken_ || !waiting_.empty()) {
      lock.unlock();
      run_later(task);
      try {
        task->wait();
      } catch (...) {  // the caller's own wait throws it
      }
      return;
    }
    run_in_turn(lock, task);
    task->announce();
  }

  void run_later(c10::intrusive_ptr<Task> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(task));
      while (threads_.size() < 2) {
        threads_.emplace_back([this] { loop(); });
      }
    }
    changed_.notify_all();
  }

  // Wait until nothing is left to run.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return !taken_ && waiting_.empty(); });
  }

 private:
  void run_in_turn(std::unique_lock<std::mutex>& lock, const c10::intrusive_ptr<Task>& task) {
    taken_ = true;
    lock.unlock();
    task->run();
    lock.lock();
    taken_ = false;
    lock.unlock();
    changed_.notify_all();
  }

  void loop() {
    pthread_setname_np(pthread_self(), "paceline-hosts");
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !taken_ && (stopped_ || !waiting_.empty()); });
      if (waiting_.empty()) {
        return;
      }
      const auto task = std::move(waiting_.front());
      waiting_.pop_front();
      run_in_turn(lock, task);
      task->announce();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<Task>> waiting_;
  std::vector<std::thread> threads_;
  bool taken_ = false;
  bool stopped_ = false;
};

}  // namespace paceline::hosts
