#include "work.hpp"

namespace paceline {

SharedWork::SharedWork(
    int rank,
    c10d::OpType kind,
    const char* title,
    const std::vector<at::Tensor>& inputs,
    std::vector<std::vector<at::Tensor>> outputs,
    uint64_t sequence)
    : Work(rank, kind, title, inputs),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          outputs_.size() > 1 ? c10::ListType::create(c10::ListType::create(c10::TensorType::get()))
                              : c10::ListType::create(c10::TensorType::get()))),
      sequence_(sequence) {}

bool SharedWork::wait(std::chrono::milliseconds timeout) {
  // Who helps cannot stop in the middle; who has little time leaves it to the thread of the group.
  if (help_ && timeout == kNoTimeout && !isCompleted()) {
    help_();
  }
  return Work::wait(timeout);
}

c10::intrusive_ptr<c10::ivalue::Future> SharedWork::getFuture() {
  return future_;
}

void SharedWork::complete(std::exception_ptr error) {
  finish(error);
  if (error) {
    future_->setError(error);
  } else if (outputs_.size() > 1) {
    future_->markCompleted(c10::IValue(outputs_));
  } else {
    future_->markCompleted(c10::IValue(result()));
  }
}

}  // namespace paceline
