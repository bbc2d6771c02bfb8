// The torch.distributed backend of a group that spans hosts: c10d's calls in terms of parts, which are backends
// themselves: one among the ranks of this host, one between hosts, and one among all ranks for what gains nothing by
// levels. Messages between two ranks always go through the last, also on one host: a receiver from any source has one
// place to look.
//
// A part that fails ends the others, so that ranks that wait in those fail too, and what happened first is told to all
// ranks through the store. A Gloo group ends when nothing refers to it any more; hand parts over and keep none.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "../core/queue.hpp"
#include "levels.hpp"
#include "work.hpp"

namespace paceline {

class Hierarchy final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  // `global_ranks` names the ranks of this group in messages; `store` may be null, then causes are not told to others.
  Hierarchy(
      hosts::Seating seating,
      hosts::Parts parts,
      c10::intrusive_ptr<c10d::Store> store,
      std::vector<int64_t> global_ranks,
      std::chrono::milliseconds timeout);
  ~Hierarchy() override;

  const std::string getBackendName() const override {
    return "shm+gloo";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer send(Tensors& tensors, int to, int tag) override;
  WorkPointer recv(Tensors& tensors, int from, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;

  void abort() override;
  void shutdown() override;

 private:
  using Body = std::function<void(hosts::Levels&)>;

  // What a call is, beside what it does.
  struct Plan {
    c10d::OpType kind;
    const char* title;
    Tensors inputs;
    std::vector<Tensors> outputs;
    std::chrono::milliseconds timeout;
    bool asynchronous;
  };

  WorkPointer start(Plan plan, Body body);
  WorkPointer start_message(c10d::OpType kind, const char* title, Tensors& tensors, int peer, int tag);
  WorkPointer gather_rows(Plan plan, std::vector<Tensors> rows);
  void run(const char* title, std::chrono::milliseconds timeout, const Body& body);
  hosts::Parts parts(const char* title);
  // End the parts for good; the first reason stays.
  void end(const std::string& reason);
  std::string explain(const std::string& own, bool remote);
  std::string names(const std::vector<int64_t>& ranks) const;
  std::string place(hosts::Level level) const;

  hosts::Seating seating_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int64_t> global_ranks_;
  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> sequence_{0};
  std::mutex mutex_;  // of the two below
  hosts::Parts parts_;
  std::string ended_;
  Queue queue_{Patience::none()};
};

void bind_hierarchy(pybind11::module& module);

}  // namespace paceline
