// What a call returns: done or to come, to be waited for or asked for as a future.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <vector>

namespace paceline {

class SharedWork : public c10d::Work {
 public:
  // `outputs`: a list, or several of them; the value of the future.
  SharedWork(
      int rank,
      c10d::OpType kind,
      const char* title,
      const std::vector<at::Tensor>& inputs,
      std::vector<std::vector<at::Tensor>> outputs,
      uint64_t sequence);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override {
    return outputs_.empty() ? std::vector<at::Tensor>{} : outputs_.front();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override {
    return sequence_;
  }
  int sourceRank() const override {
    return source_;
  }

  // `help`: lets the waiting thread do what is left to do, until `isCompleted`.
  void help_by(std::function<void()> help) {
    help_ = std::move(help);
  }
  void set_source(int rank) {
    source_ = rank;
  }
  // Complete it, on whatever thread; callbacks of the future run here.
  void complete(std::exception_ptr error);

 private:
  std::vector<std::vector<at::Tensor>> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::function<void()> help_;
  uint64_t sequence_;
  int source_ = -1;
};

}  // namespace paceline
