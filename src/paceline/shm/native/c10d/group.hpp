// The torch.distributed backend of the ranks of one host: c10d's calls in terms of collectives and messages.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../core/collectives.hpp"
#include "../core/exchange.hpp"
#include "../core/members.hpp"
#include "../core/messages.hpp"
#include "../core/queue.hpp"
#include "work.hpp"

namespace paceline {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class Group : public c10d::Backend {
 public:
  Group(
      int rank,
      std::vector<Peer> peers,
      std::shared_ptr<Arena> arena,
      std::chrono::milliseconds timeout);
  ~Group() override;

  const std::string getBackendName() const override {
    return "shm";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
  }

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

  // Tensors that peers read where they lie.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override {
    return true;
  }

  void abort() override;
  void shutdown() override;

  Exchange& exchange() {
    return exchange_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  const Members& members() const {
    return members_;
  }
  Arena& arena() const {
    return members_.arena();
  }
  // Do something whose error ends the group.
  template <typename Action>
  void failing(Action action) {
    try {
      action();
    } catch (const std::exception& error) {
      members_.fail(reason_of(error));
      throw;
    }
  }

 private:
  // The calls of one piece of work.
  using Calls = std::function<void(Collectives&, const Call&)>;
  struct Plan {
    c10d::OpType type;
    Kind kind;
    std::chrono::milliseconds timeout;
    bool asynchronous;
    Tensors inputs;
    std::vector<Tensors> outputs;
    at::ScalarType dtype = at::kByte;
    Reduction reduction = Reduction::UNUSED;
    int root = -1;
  };

  template <typename Given>
  Plan plan(c10d::OpType type, Kind kind, const Given& options) const;
  // The same, of dense tensors of one type.
  template <typename Given>
  Plan plan(c10d::OpType type, Kind kind, Tensors inputs, Tensors outputs, const Given& options) const;
  WorkPointer start(const Plan& plan, Calls calls);
  WorkPointer start_message(bool sending, Tensors& tensors, int peer, int tag, c10d::OpType type);
  WorkPointer sum_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  void check_room(const at::Tensor& parts, const at::Tensor& part, const char* what) const;

  Members members_;
  Collectives collectives_;
  Messages messages_;
  Exchange exchange_;
  Queue queue_;
  std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace paceline
