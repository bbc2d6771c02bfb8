// What each of c10d's collectives means in levels.
#include "arguments.hpp"
#include "hierarchy.hpp"

namespace paceline {

using hosts::Levels;
using hosts::Combining;

namespace {

using c10d::OpType;

void exchange(
    Levels& levels,
    at::Tensor output,
    at::Tensor input,
    std::vector<int64_t> output_bytes,
    std::vector<int64_t> input_bytes,
    c10d::AllToAllOptions options) {
  levels.flat([&](c10d::Backend& all, std::chrono::milliseconds timeout) {
    options.timeout = timeout;
    return all.alltoall_base(output, input, output_bytes, input_bytes, options);
  });
}

}  // namespace

Hierarchy::WorkPointer Hierarchy::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto tensor = hosts::only(tensors, "broadcast");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "broadcast from ", options.rootRank, ": no such rank");
  return start(
      {OpType::BROADCAST, "shm:broadcast", tensors, {tensors}, options.timeout, options.asyncOp},
      [this, tensor, root = options.rootRank](Levels& levels) {
        if (rank_ == root) {
          levels.broadcast(hosts::packed({tensor}), root);
          return;
        }
        const Landing landing(tensor);
        levels.broadcast(hosts::as_bytes(landing.flat()), root);
        landing.settle();
      });
}

Hierarchy::WorkPointer Hierarchy::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors.front().layout() != at::kStrided) {
    return allreduce_sparse(tensors, options);
  }
  const auto tensor = hosts::only(tensors, "all_reduce");
  const Combining reduction(options.reduceOp, tensor.scalar_type(), size_);
  return start(
      {OpType::ALLREDUCE, "shm:all_reduce", tensors, {tensors}, options.timeout, options.asyncOp},
      [tensor, reduction](Levels& levels) {
        const auto numbers = reduction.numbers(tensor);
        levels.all_reduce(numbers, reduction.part_operator());
        reduction.average(numbers);
        reduction.deliver(numbers, tensor);
      });
}

Hierarchy::WorkPointer Hierarchy::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return start(
      {OpType::_ALLREDUCE_SPARSE, "shm:all_reduce_sparse", tensors, {tensors}, options.timeout, options.asyncOp},
      [tensors, call = options](Levels& levels) mutable {
        levels.flat([&](c10d::Backend& all, std::chrono::milliseconds timeout) {
          call.timeout = timeout;
          return all.allreduce(tensors, call);
        });
      });
}

Hierarchy::WorkPointer Hierarchy::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK(!tensors.empty(), "all_reduce_coalesced takes at least one tensor");
  for (const auto& tensor : tensors) {
    hosts::check_plain(tensor, "all_reduce_coalesced");
    TORCH_CHECK(
        tensor.scalar_type() == tensors.front().scalar_type(),
        "all_reduce_coalesced takes tensors of one type, and got ",
        tensors.front().scalar_type(),
        " and ",
        tensor.scalar_type());
  }
  const Combining reduction(options.reduceOp, tensors.front().scalar_type(), size_);
  return start(
      {OpType::ALLREDUCE_COALESCED, "shm:all_reduce", tensors, {tensors}, options.timeout, options.asyncOp},
      [tensors, reduction](Levels& levels) {
        Tensors pieces;
        for (const auto& tensor : tensors) {
          pieces.push_back(reduction.numbers(tensor));
        }
        const auto numbers = pieces.size() == 1 ? pieces.front() : at::cat(pieces);
        levels.all_reduce(numbers, reduction.part_operator());
        reduction.average(numbers);
        int64_t offset = 0;
        for (size_t i = 0; i < tensors.size(); ++i) {
          reduction.deliver(numbers.narrow(0, offset, pieces[i].numel()), tensors[i]);
          offset += pieces[i].numel();
        }
      });
}

Hierarchy::WorkPointer Hierarchy::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto tensor = hosts::only(tensors, "reduce");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < size_, "reduce to ", options.rootRank, ": no such rank");
  const Combining reduction(options.reduceOp, tensor.scalar_type(), size_);
  return start(
      {OpType::REDUCE, "shm:reduce", tensors, {tensors}, options.timeout, options.asyncOp},
      [this, tensor, reduction, root = options.rootRank](Levels& levels) {
        const auto numbers = reduction.numbers(tensor);
        levels.reduce(numbers, reduction.part_operator(), root);
        if (rank_ == root) {
          reduction.average(numbers);
          reduction.deliver(numbers, tensor);
        }
      });
}

// `rows[rank]` are the tensors that take the inputs of that rank.
Hierarchy::WorkPointer Hierarchy::gather_rows(Plan plan, std::vector<Tensors> rows) {
  const auto inputs = plan.inputs;
  return start(std::move(plan), [inputs, rows = std::move(rows)](Levels& levels) {
    const auto gathered = levels.all_gather(hosts::packed(inputs));
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      hosts::unpack(gathered[static_cast<int64_t>(rank)], rows[rank]);
    }
  });
}

Hierarchy::WorkPointer Hierarchy::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto input = hosts::only(inputs, "all_gather");
  TORCH_CHECK(outputs.size() == 1, "all_gather takes one list of outputs, and got ", outputs.size());
  hosts::check_rows(outputs.front(), input, size_, "all_gather");
  std::vector<Tensors> rows;
  for (const auto& output : outputs.front()) {
    rows.push_back({output});
  }
  return gather_rows({OpType::ALLGATHER, "shm:all_gather", inputs, outputs, options.timeout, options.asyncOp}, rows);
}

Hierarchy::WorkPointer Hierarchy::allgather_coalesced(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK(!inputs.empty(), "all_gather_coalesced takes at least one tensor");
  TORCH_CHECK(
      outputs.size() == static_cast<size_t>(size_), "all_gather_coalesced takes a list of outputs for each rank");
  for (const auto& row : outputs) {
    TORCH_CHECK(row.size() == inputs.size(), "all_gather_coalesced takes as many outputs of each rank as inputs");
    for (size_t i = 0; i < inputs.size(); ++i) {
      hosts::check_plain(inputs[i], "all_gather_coalesced");
      hosts::check_alike(inputs[i], row[i], "all_gather_coalesced");
    }
  }
  return gather_rows(
      {OpType::ALLGATHER_COALESCED, "shm:all_gather", inputs, outputs, options.timeout, options.asyncOp}, outputs);
}

Hierarchy::WorkPointer Hierarchy::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  hosts::only(inputs, "all_gather_into_tensor");
  hosts::check_whole(output, input, size_, "all_gather_into_tensor");
  return start(
      {OpType::_ALLGATHER_BASE, "shm:_all_gather_base", inputs, {outputs}, options.timeout, options.asyncOp},
      [this, output, input](Levels& levels) {
        const Landing landing(output);
        const auto bytes = hosts::packed({input});
        levels.all_gather(bytes, hosts::as_bytes(landing.flat()).view({size_, bytes.numel()}));
        landing.settle();
      });
}

Hierarchy::WorkPointer Hierarchy::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto* title = "all_gather_into_tensor_coalesced";
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(), title, " takes as many outputs as inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    hosts::check_plain(inputs[i], title);
    hosts::check_whole(outputs[i], inputs[i], size_, title);
  }
  return start(
      {OpType::COALESCED, "shm:all_gather", inputs, {outputs}, options.timeout, options.asyncOp},
      [this, outputs, inputs](Levels& levels) {
        const auto gathered = levels.all_gather(hosts::packed(inputs));
        int64_t offset = 0;
        for (const auto& output : outputs) {
          const Landing landing(output);
          const int64_t bytes = hosts::as_bytes(landing.flat()).numel() / size_;
          hosts::as_bytes(landing.flat()).view({size_, bytes}).copy_(gathered.narrow(1, offset, bytes));
          landing.settle();
          offset += bytes;
        }
      });
}

Hierarchy::WorkPointer Hierarchy::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const auto output = hosts::only(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1, "reduce_scatter takes one list of inputs, and got ", inputs.size());
  hosts::check_rows(inputs.front(), output, size_, "reduce_scatter");
  const Combining reduction(options.reduceOp, output.scalar_type(), size_);
  return start(
      {OpType::REDUCE_SCATTER, "shm:reduce_scatter", inputs.front(), {outputs}, options.timeout, options.asyncOp},
      [output, rows = inputs.front(), reduction](Levels& levels) {
        Tensors numbers;
        for (const auto& row : rows) {
          numbers.push_back(reduction.numbers(row));
        }
        const auto sums = levels.reduce_scatter(at::stack(numbers), reduction.part_operator());
        reduction.average(sums);
        reduction.deliver(sums, output);
      });
}

Hierarchy::WorkPointer Hierarchy::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

Hierarchy::WorkPointer Hierarchy::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  const auto* title = "reduce_scatter_tensor";
  TORCH_CHECK(!inputs.empty() && inputs.size() == outputs.size(), title, " takes as many outputs as inputs");
  std::vector<Combining> reductions;
  for (size_t i = 0; i < inputs.size(); ++i) {
    hosts::check_plain(outputs[i], title);
    hosts::check_whole(inputs[i], outputs[i], size_, title);
    reductions.emplace_back(options.reduceOp, outputs[i].scalar_type(), size_);
  }
  return start(
      {OpType::_REDUCE_SCATTER_BASE, "shm:_reduce_scatter_base", inputs, {outputs}, options.timeout, options.asyncOp},
      [this, outputs, inputs, reductions](Levels& levels) {
        for (size_t i = 0; i < inputs.size(); ++i) {
          const auto numbers = reductions[i].numbers(inputs[i]);
          const auto sums =
              levels.reduce_scatter(numbers.view({size_, numbers.numel() / size_}), reductions[i].part_operator());
          reductions[i].average(sums);
          reductions[i].deliver(sums, outputs[i]);
        }
      });
}

Hierarchy::WorkPointer Hierarchy::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto input = hosts::only(inputs, "gather");
  Tensors rows;
  if (rank_ == options.rootRank) {
    TORCH_CHECK(outputs.size() == 1, "gather takes one list of outputs on the root, and got ", outputs.size());
    rows = outputs.front();
    hosts::check_rows(rows, input, size_, "gather");
  } else {
    TORCH_CHECK(outputs.empty() || outputs.front().empty(), "gather takes outputs on the root only");
  }
  return start(
      {OpType::GATHER, "shm:gather", inputs, outputs, options.timeout, options.asyncOp},
      [input, rows, call = options](Levels& levels) mutable {
        Tensors given{hosts::packed({input})};
        std::vector<Tensors> landed;
        std::vector<Landing> landings(rows.begin(), rows.end());
        if (!rows.empty()) {
          landed.emplace_back();
          for (const auto& landing : landings) {
            landed.front().push_back(hosts::as_bytes(landing.flat()));
          }
        }
        levels.flat([&](c10d::Backend& all, std::chrono::milliseconds timeout) {
          call.timeout = timeout;
          return all.gather(landed, given, call);
        });
        for (const auto& landing : landings) {
          landing.settle();
        }
      });
}

Hierarchy::WorkPointer Hierarchy::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const auto output = hosts::only(outputs, "scatter");
  Tensors rows;
  if (rank_ == options.rootRank) {
    TORCH_CHECK(inputs.size() == 1, "scatter takes one list of inputs on the root, and got ", inputs.size());
    rows = inputs.front();
    hosts::check_rows(rows, output, size_, "scatter");
  } else {
    TORCH_CHECK(inputs.empty() || inputs.front().empty(), "scatter takes inputs on the root only");
  }
  return start(
      {OpType::SCATTER, "shm:scatter", rows, {outputs}, options.timeout, options.asyncOp},
      [output, rows, call = options](Levels& levels) mutable {
        const Landing landing(output);
        Tensors landed{hosts::as_bytes(landing.flat())};
        std::vector<Tensors> given;
        if (!rows.empty()) {
          given.emplace_back();
          for (const auto& row : rows) {
            given.front().push_back(hosts::packed({row}));
          }
        }
        levels.flat([&](c10d::Backend& all, std::chrono::milliseconds timeout) {
          call.timeout = timeout;
          return all.scatter(landed, given, call);
        });
        landing.settle();
      });
}

Hierarchy::WorkPointer Hierarchy::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  const auto* title = "all_to_all_single";
  hosts::check_plain(output, title);
  hosts::check_plain(input, title);
  TORCH_CHECK(output.dim() > 0 && input.dim() > 0, title, " takes tensors of at least one dimension");
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), title, " takes an output of the type of its input");
  return start(
      {OpType::ALLTOALL_BASE, "shm:all_to_all", {input}, {{output}}, options.timeout, options.asyncOp},
      [output,
       input,
       options,
       output_bytes = hosts::byte_sizes(output_sizes, output, size_),
       input_bytes = hosts::byte_sizes(input_sizes, input, size_)](Levels& levels) {
        const Landing landing(output);
        exchange(levels, hosts::as_bytes(landing.flat()), hosts::packed({input}), output_bytes, input_bytes, options);
        landing.settle();
      });
}

Hierarchy::WorkPointer Hierarchy::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto* title = "all_to_all";
  TORCH_CHECK(
      inputs.size() == static_cast<size_t>(size_) && outputs.size() == inputs.size(),
      title,
      " takes an input and an output for each of ",
      size_,
      " ranks, and got ",
      inputs.size(),
      " and ",
      outputs.size());
  for (int rank = 0; rank < size_; ++rank) {
    hosts::check_plain(inputs[rank], title);
    hosts::check_plain(outputs[rank], title);
  }
  return start(
      {OpType::ALLTOALL, "shm:all_to_all", inputs, {outputs}, options.timeout, options.asyncOp},
      [outputs, inputs, options](Levels& levels) {
        const auto output_bytes = hosts::byte_sizes(outputs);
        const auto landed = at::empty({c10::sum_integers(output_bytes)}, at::kByte);
        exchange(levels, landed, hosts::packed(inputs), output_bytes, hosts::byte_sizes(inputs), options);
        hosts::unpack(landed, outputs);
      });
}

Hierarchy::WorkPointer Hierarchy::barrier(const c10d::BarrierOptions& options) {
  return start(
      {OpType::BARRIER, "shm:barrier", {}, {}, options.timeout, options.asyncOp},
      [](Levels& levels) { levels.barrier(); });
}

void Hierarchy::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto work = start(
      {OpType::BARRIER, "shm:monitored_barrier", {}, {}, options.timeout, false},
      [call = options, wait_all_ranks](Levels& levels) mutable {
        levels.flat([&](c10d::Backend& all, std::chrono::milliseconds timeout) {
          call.timeout = timeout;
          all.monitoredBarrier(call, wait_all_ranks);
          return Hierarchy::WorkPointer();
        });
      });
  work->wait();
}

}  // namespace paceline
