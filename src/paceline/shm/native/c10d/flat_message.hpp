// A message that another backend carries, with what that backend's works may lack: any memory layout, completion that
// can be asked for, futures, and errors that say who talked to whom.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "operand.hpp"

namespace paceline::hosts {

class FlatMessage final : public c10d::Work {
 public:
  FlatMessage(int rank, c10d::OpType kind, std::string what, at::Tensor tensor)
      : Work(rank, kind),
        what_(std::move(what)),
        tensor_(std::move(tensor)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  // What `wait` is to wait for, and where it puts what arrives.
  void start(c10::intrusive_ptr<c10d::Work> inner, std::optional<Landing> landing) {
    inner_ = std::move(inner);
    landing_ = std::move(landing);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(starting_);
    if (!watched_ && !Work::isCompleted()) {
      watched_ = true;
      lock.unlock();
      see_to_it(timeout);
    } else {
      lock.unlock();
    }
    return Work::wait(timeout);
  }

  bool isCompleted() override {
    watch();
    return Work::isCompleted();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    watch();
    return future_;
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return {tensor_};
  }
  void abort() override {
    inner_->abort();
  }

 private:
  // Who asks without waiting needs somebody who waits.
  void watch() {
    const std::lock_guard<std::mutex> lock(starting_);
    if (!watched_ && !Work::isCompleted()) {
      watched_ = true;
      auto self = c10::intrusive_ptr<FlatMessage>::unsafe_reclaim_from_nonowning(this);
      std::thread([self = std::move(self)] { self->see_to_it(kNoTimeout); }).detach();
    }
  }

  void see_to_it(std::chrono::milliseconds timeout) noexcept {
    std::exception_ptr failed;
    try {
      inner_->wait(timeout);
      if (landing_) {
        const at::AutoDispatchBelowADInplaceOrView below;
        landing_->settle();
      }
    } catch (const std::exception& error) {
      const auto text = c10::str(what_, " failed: ", reason_of(error));
      failed = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
    }
    if (failed) {
      future_->setError(failed);
    } else {
      future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
    }
    finish(failed);
  }

  std::string what_;
  at::Tensor tensor_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<c10d::Work> inner_;
  std::optional<Landing> landing_;
  std::mutex starting_;
  bool watched_ = false;
};

}  // namespace paceline::hosts
