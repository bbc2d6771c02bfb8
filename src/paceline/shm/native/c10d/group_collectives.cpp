// The collectives of a group; how they are started is in group.cpp.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "given.hpp"
#include "group.hpp"
#include "layout.hpp"

namespace paceline {

using c10d::OpType;

WorkPointer Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const at::Tensor tensor = only(tensors);
  Plan plan = this->plan(OpType::BROADCAST, Kind::kBroadcast, {tensor}, {tensor}, options);
  plan.root = static_cast<int>(options.rootRank);
  return start(plan, [tensor](Collectives& collectives, Call call) {
    const Landing landing(tensor, /*filled=*/true);
    call.bytes = tensor.nbytes();
    collectives.broadcast(call, bytes_of(landing.flat()));
    landing.settle();
  });
}

WorkPointer Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor tensor = only(tensors);
  if (tensor.is_sparse()) {
    return sum_sparse(tensor, options);
  }
  Plan plan = this->plan(OpType::ALLREDUCE, Kind::kAllReduce, {tensor}, {tensor}, options);
  const auto [reduction, factor] = parse(options.reduceOp);
  plan.reduction = reduction;
  return start(plan, [tensor, factor = factor](Collectives& collectives, Call call) {
    if (factor) {
      tensor.mul_(*factor);
    }
    const Landing landing(tensor, /*filled=*/true);
    call.bytes = tensor.nbytes();
    collectives.all_reduce(call, bytes_of(landing.flat()));
    landing.settle();
  });
}

WorkPointer Group::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  Plan plan = this->plan(OpType::ALLREDUCE_COALESCED, Kind::kAllReduce, tensors, tensors, options);
  const auto [reduction, factor] = parse(options.reduceOp);
  plan.reduction = reduction;
  return start(plan, [tensors, factor = factor](Collectives& collectives, Call call) {
    if (tensors.empty()) {
      return;
    }
    Tensors flats;
    for (const at::Tensor& tensor : tensors) {
      flats.push_back(plain(tensor).reshape({-1}));
    }
    at::Tensor all = at::cat(flats);
    if (factor) {
      all.mul_(*factor);
    }
    call.bytes = all.nbytes();
    collectives.all_reduce(call, bytes_of(all));
    int64_t begin = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(all.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  });
}

WorkPointer Group::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return sum_sparse(only(tensors), options);
}

// Ranks may hold different numbers of entries: they gather all of them, and each adds up.
WorkPointer Group::sum_sparse(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(
      tensor.is_sparse() && options.reduceOp.op_ == c10d::ReduceOp::SUM,
      "shared memory: of sparse tensors only the sum is defined, of COO ones; call to_dense() for others");
  Plan plan = this->plan(OpType::_ALLREDUCE_SPARSE, Kind::kAllGather, options);
  plan.outputs = {{tensor}};
  return start(plan, [tensor, size = size_](Collectives& collectives, Call call) {
    const at::Tensor given = tensor.coalesce();
    const auto gather = [&](const at::Tensor& part, const Tensors& parts) {
      call.bytes = sum_of_bytes(parts);
      call.dtype = part.scalar_type();
      collectives.all_gather(call, bytes_of(part), bytes_of(parts));
    };
    const at::Tensor indices = given._indices().contiguous();
    const at::Tensor values = given._values().contiguous();
    Tensors counts;
    for (int rank = 0; rank < size; ++rank) {
      counts.push_back(at::empty({1}, at::kLong));
    }
    gather(at::full({1}, given._nnz(), at::kLong), counts);
    Tensors all_indices;
    Tensors all_values;
    for (const at::Tensor& count : counts) {
      std::vector<int64_t> shape = values.sizes().vec();
      shape[0] = count.item<int64_t>();
      all_indices.push_back(at::empty({indices.size(0), shape[0]}, indices.options()));
      all_values.push_back(at::empty(shape, values.options()));
    }
    gather(indices, all_indices);
    gather(values, all_values);
    const auto sum = at::sparse_coo_tensor(at::cat(all_indices, 1), at::cat(all_values, 0), given.sizes(), given.options());
    tensor.copy_(sum.coalesce());
  });
}

WorkPointer Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor tensor = only(tensors);
  Plan plan = this->plan(OpType::REDUCE, Kind::kReduce, {tensor}, {tensor}, options);
  const auto [reduction, factor] = parse(options.reduceOp);
  plan.reduction = reduction;
  plan.root = static_cast<int>(options.rootRank);
  return start(plan, [tensor, factor = factor](Collectives& collectives, Call call) {
    if (factor) {
      tensor.mul_(*factor);
    }
    const Landing landing(tensor, /*filled=*/true);
    call.bytes = tensor.nbytes();
    collectives.reduce(call, bytes_of(landing.flat()));
    landing.settle();
  });
}

WorkPointer Group::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const at::Tensor input = only(inputs);
  const Tensors parts = only(outputs);
  TORCH_CHECK_VALUE(
      static_cast<int>(parts.size()) == size_,
      "shared memory: all_gather among ", size_, " ranks fills ", size_, " tensors, not ", parts.size());
  TORCH_CHECK_VALUE(
      parts[rank_].nbytes() == input.nbytes(),
      "shared memory: all_gather of ", input.numel(), " elements into a tensor of ", parts[rank_].numel());
  const Plan plan = this->plan(OpType::ALLGATHER, Kind::kAllGather, {input}, parts, options);
  return start(plan, [input, parts](Collectives& collectives, Call call) {
    const at::Tensor given = plain(input);
    const auto taken = landings(parts);
    call.bytes = sum_of_bytes(parts);
    collectives.all_gather(call, bytes_of(given), bytes_of(taken));
    settle(taken);
  });
}

WorkPointer Group::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPointer Group::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shared memory: as many outputs as inputs");
  for (const auto index : c10::irange(inputs.size())) {
    check_room(outputs[index], inputs[index], "all_gather");
    check_tensors({outputs[index]}, inputs[index].scalar_type());
  }
  Plan plan = this->plan(OpType::_ALLGATHER_BASE, Kind::kAllGather, options);
  plan.outputs = {outputs};
  return start(plan, [inputs, outputs, size = size_](Collectives& collectives, Call call) {
    for (const auto index : c10::irange(inputs.size())) {
      const at::Tensor given = plain(inputs[index]);
      const Landing taken(outputs[index]);
      call.bytes = outputs[index].nbytes();
      call.dtype = outputs[index].scalar_type();
      collectives.all_gather(call, bytes_of(given), rows_of(taken.flat(), size));
      taken.settle();
    }
  });
}

WorkPointer Group::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == size_,
      "shared memory: all_gather among ", size_, " ranks fills ", size_, " lists, not ", outputs.size());
  for (const Tensors& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "shared memory: as many outputs of each rank as inputs");
    for (const auto index : c10::irange(inputs.size())) {
      check_tensors({inputs[index], list[index]}, inputs[index].scalar_type());
    }
  }
  Plan plan = this->plan(OpType::ALLGATHER_COALESCED, Kind::kAllGather, options);
  plan.outputs = outputs;
  return start(plan, [inputs, outputs](Collectives& collectives, Call call) {
    for (const auto index : c10::irange(inputs.size())) {
      Tensors parts;
      for (const Tensors& list : outputs) {
        parts.push_back(list[index]);
      }
      const at::Tensor given = plain(inputs[index]);
      const auto taken = landings(parts);
      call.bytes = sum_of_bytes(parts);
      call.dtype = given.scalar_type();
      collectives.all_gather(call, bytes_of(given), bytes_of(taken));
      settle(taken);
    }
  });
}

WorkPointer Group::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const at::Tensor input = only(inputs);
  const bool root = rank_ == options.rootRank;
  const Tensors parts = root ? only(outputs) : Tensors{};
  TORCH_CHECK_VALUE(
      !root || static_cast<int>(parts.size()) == size_,
      "shared memory: gather among ", size_, " ranks fills ", size_, " tensors, not ", parts.size());
  Plan plan = this->plan(OpType::GATHER, Kind::kGather, {input}, parts, options);
  plan.root = static_cast<int>(options.rootRank);
  return start(plan, [input, parts](Collectives& collectives, Call call) {
    const at::Tensor given = plain(input);
    const auto taken = landings(parts);
    call.bytes = input.nbytes();
    collectives.gather(call, bytes_of(given), bytes_of(taken));
    settle(taken);
  });
}

WorkPointer Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const at::Tensor output = only(outputs);
  const bool root = rank_ == options.rootRank;
  const Tensors parts = root ? only(inputs) : Tensors{};
  TORCH_CHECK_VALUE(
      !root || static_cast<int>(parts.size()) == size_,
      "shared memory: scatter among ", size_, " ranks needs ", size_, " tensors, not ", parts.size());
  Plan plan = this->plan(OpType::SCATTER, Kind::kScatter, parts, {output}, options);
  plan.root = static_cast<int>(options.rootRank);
  return start(plan, [output, parts](Collectives& collectives, Call call) {
    Tensors given;
    for (const at::Tensor& part : parts) {
      given.push_back(plain(part));
    }
    const Landing taken(output);
    call.bytes = output.nbytes();
    collectives.scatter(call, bytes_of(given), bytes_of(taken.flat()));
    taken.settle();
  });
}

WorkPointer Group::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const at::Tensor output = only(outputs);
  const Tensors parts = only(inputs);
  TORCH_CHECK_VALUE(
      static_cast<int>(parts.size()) == size_,
      "shared memory: reduce_scatter among ", size_, " ranks needs ", size_, " tensors, not ", parts.size());
  Plan plan = this->plan(OpType::REDUCE_SCATTER, Kind::kReduceScatter, parts, {output}, options);
  const auto [reduction, factor] = parse(options.reduceOp);
  plan.reduction = reduction;
  return start(plan, [output, parts, factor = factor](Collectives& collectives, Call call) {
    Tensors given;
    for (const at::Tensor& part : parts) {
      given.push_back(plain(factor ? part.mul(*factor).to(part.scalar_type()) : part));
    }
    const Landing taken(output);
    call.bytes = sum_of_bytes(parts);
    collectives.reduce_scatter(call, bytes_of(given), bytes_of(taken.flat()));
    taken.settle();
  });
}

WorkPointer Group::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPointer Group::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "shared memory: as many outputs as inputs");
  const auto [reduction, factor] = parse(options.reduceOp);
  for (const auto index : c10::irange(inputs.size())) {
    check_room(inputs[index], outputs[index], "reduce_scatter");
    check_tensors({inputs[index]}, outputs[index].scalar_type());
    check_reduction(reduction, outputs[index].scalar_type());
  }
  Plan plan = this->plan(OpType::_REDUCE_SCATTER_BASE, Kind::kReduceScatter, options);
  plan.outputs = {outputs};
  return start(
      plan,
      [inputs, outputs, size = size_, reduction = reduction, factor = factor](Collectives& collectives, Call call) {
        for (const auto index : c10::irange(inputs.size())) {
          const at::Tensor& input = inputs[index];
          const at::Tensor given = plain(factor ? input.mul(*factor).to(input.scalar_type()) : input);
          const Landing taken(outputs[index]);
          call.bytes = given.nbytes();
          call.dtype = given.scalar_type();
          call.reduction = reduction;
          collectives.reduce_scatter(call, rows_of(given, size), bytes_of(taken.flat()));
          taken.settle();
        }
      });
}

WorkPointer Group::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  c10d::checkSplitSizes(input_sizes, input, size_);
  c10d::checkSplitSizes(output_sizes, output, size_);
  const Plan plan = this->plan(OpType::ALLTOALL_BASE, Kind::kAllToAll, {input}, {output}, options);
  return start(plan, [input, output, input_sizes, output_sizes, size = size_](Collectives& collectives, Call call) {
    const at::Tensor given = plain(input);
    const Landing taken(output);
    collectives.all_to_all(call, rows_of(given, input_sizes, size), rows_of(taken.flat(), output_sizes, size));
    taken.settle();
  });
}

WorkPointer Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == size_ && static_cast<int>(outputs.size()) == size_,
      "shared memory: all_to_all among ", size_, " ranks takes ", size_, " inputs and as many outputs, not ",
      inputs.size(), " and ", outputs.size());
  const Plan plan = this->plan(OpType::ALLTOALL, Kind::kAllToAll, inputs, outputs, options);
  return start(plan, [inputs, outputs](Collectives& collectives, Call call) {
    Tensors given;
    for (const at::Tensor& input : inputs) {
      given.push_back(plain(input));
    }
    const auto taken = landings(outputs);
    collectives.all_to_all(call, bytes_of(given), bytes_of(taken));
    settle(taken);
  });
}

WorkPointer Group::barrier(const c10d::BarrierOptions& options) {
  const Plan plan = this->plan(OpType::BARRIER, Kind::kBarrier, options);
  return start(plan, [](Collectives& collectives, const Call& call) { collectives.barrier(call); });
}

// The barrier names a missing rank anyway.
void Group::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  Plan plan = this->plan(OpType::BARRIER, Kind::kBarrier, options);
  plan.asynchronous = false;
  start(plan, [](Collectives& collectives, const Call& call) { collectives.barrier(call); })->wait();
}

}  // namespace paceline
