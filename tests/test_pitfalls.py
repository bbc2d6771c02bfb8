"""One test for each mistake that distributed training invites: most are silent, all were once made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from paceline.errors import CaptureError, PlanError
from paceline.placement.pieces import take
from paceline.placement.place import place
from paceline.placement.placements import PARTIAL, REPLICATE, Shard
from paceline.placement.redistribute import is_redistribution, redistribute, redistribution_of
from paceline.placement.rules import has_rule
from paceline.placement.windows import window, window_sum
from paceline.plan import Mesh, Plan
from paceline.program.capture import capture
from paceline.program.program import Program
from paceline.runtime import collectives
from paceline.runtime.binding import AxisGroup
from paceline.runtime.executor import ProcessExecutor
from paceline.runtime.job.world import World
from paceline.runtime.module import PlacedModule, parallelize
from paceline.runtime.passes.communicate import communicate
from paceline.runtime.step import schedule
from tests.placement.captured import Gpt, _ids
from tests.ranks import ranks

aten = torch.ops.aten


@cache
def _gpt() -> Program:
    return capture(Gpt(), (_ids(),))


def gpt() -> Program:
    """The program of a small language model, captured once, to be placed and scheduled."""
    return _gpt().copy()


class Model(nn.Module):
    """Parameters of a few linear layers, and any forward pass over them."""

    def __init__(self, run: Callable[..., Tensor], width: int = 4, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.run = run

    def forward(self, *args: Any) -> Tensor:
        return self.run(self, *args)


def x(batch: int = 6, width: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, width, dtype=dtype, generator=torch.Generator().manual_seed(1))


def assert_equals_serial(module: nn.Module, batch: Any, mesh: str, tolerance: float = 1e-10) -> PlacedModule:
    """One step, the same draws; every gradient."""
    parallel = parallelize(copy.deepcopy(module), batch, Plan(Mesh.parse(mesh)), devices=["cpu"])
    parallel.seed(3)
    torch.manual_seed(3)
    loss, expected = parallel(*batch), module(*batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for placed in parallel.shards():
        if placed.is_parameter:
            gradient = module.get_parameter(placed.name).grad
            if gradient is None:
                assert placed.tensor.grad is None
                continue
            for patch in placed.patches:
                mine, theirs = placed.tensor.grad[patch.local.index], gradient[patch.whole.index]
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    return parallel


def test_a_batch_that_is_whole_everywhere_is_not_secretly_sliced() -> None:
    program = place(gpt(), Mesh.parse("dp=2"), split_batch=False).program
    assert not [node for node in program.graph.nodes if is_redistribution(node)]


def test_pieces_are_contiguous_for_kernels_that_assume_it() -> None:
    whole = x(6, 8)
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = whole
    piece = graph.call_function(collectives.take_piece, (node, Shard(1, 2), "dp", 2))
    piece.meta["val"] = take(whole, Shard(1, 2), 2, 1)
    graph.output((piece,))
    executor = ProcessExecutor(1, {"dp": AxisGroup("unused", 1)}, mesh=Mesh.parse("dp=2"))
    (found,) = executor.prepare(graph, {})([[whole]])[0]
    assert found.is_contiguous()
    assert torch.equal(found, take(whole, Shard(1, 2), 2, 1))


def test_views_of_pieces_do_not_depend_on_the_strides_of_the_whole() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        y = m.a(x).view(2, 3, 2, 2).transpose(0, 1).contiguous().view(3, 8)
        return (m.norm(y.t().reshape(-1, 4)).view(-1) * 2).square().mean()

    program = place(capture(Model(run), (x(),)), Mesh.parse("fsdp=2")).program
    assert not [n for n in program.graph.nodes if n.target in (aten.view.default, aten._unsafe_view.default)]
    assert_equals_serial(Model(run), (x(),), "fsdp=2")


@ranks(2)
def test_only_rank_0_plans(world: World) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        assert dist.get_rank() == 0, "another rank captures, and may plan differently"
        return m.a(x).square().mean()

    parallelize(Model(run), (x(),), Plan(Mesh.parse("dp=2")))(x()).backward()


def test_tied_parameters_are_one_with_the_sum_of_their_gradients() -> None:
    module = Model(lambda m, x: (m.b(torch.tanh(m.a(x)))).square().mean())
    module.b.weight = module.a.weight
    parallel = assert_equals_serial(module, (x(),), "dp=3,fsdp=2")
    names = [shard.name for shard in parallel.shards() if shard.rank == 0]
    assert "a.weight" in names and "b.weight" not in names
    assert parallel.rank0.b.weight is parallel.rank0.a.weight


@pytest.mark.parametrize("fails", [False, True])
def test_no_fake_tensor_outlives_a_capture(fails: bool) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        if fails and x.sum() > 0:
            return m.b(x).mean()
        return (m.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).mean()

    module = Model(run)
    if fails:
        with pytest.raises(CaptureError):
            capture(module, (x(),))
    else:
        constants = capture(module, (x(),)).constants.values()
        assert constants and not any(isinstance(value, FakeTensor) for value in constants)
    assert not isinstance(torch.ones(2) + 1, FakeTensor)
    assert not any(isinstance(tensor, FakeTensor) for tensor in module.state_dict().values())


def test_no_collective_is_started_in_one_pass_and_awaited_in_the_other() -> None:
    step = schedule(place(gpt(), Mesh.parse("dp=2,fsdp=2")), Plan(Mesh.parse("dp=2,fsdp=2")))
    assert step.backward is not None
    for graph in (step.forward, step.backward):
        (output,) = graph.find_nodes(op="output")
        assert not [value for value in output.args[0] if value.target in collectives.STARTS]
        for wait in graph.find_nodes(op="call_function", target=collectives.wait):
            assert wait.args[0].target in collectives.STARTS


def test_views_and_casts_of_parameters_do_not_break_buckets() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        for layer in (m.a, m.b):
            x = torch.tanh(x.bfloat16() @ layer.weight.t().bfloat16() + layer.bias.view(1, -1).bfloat16()).float()
        return m.norm(x).square().mean()

    module = Model(run, dtype=torch.float32)
    plan = Plan(Mesh.parse("fsdp=2"), bucket_bytes=1 << 20)
    step = schedule(place(capture(module, (x(dtype=torch.float32),)), plan.mesh), plan)
    gathers = step.forward.find_nodes(op="call_function", target=collectives.all_gather)
    assert len(gathers) <= 2, "one for each type"
    assert_equals_serial(module, (x(dtype=torch.float32),), "fsdp=2", tolerance=1e-2)


def test_booleans_are_never_sums_and_a_bias_is_added_once() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        y = m.a(x).sum(0)  # a partial sum
        return torch.where(y > 0, y, 0.1 * y).add(m.b.bias).square().mean()

    graph = place(capture(Model(run), (x(),)), Mesh.parse("dp=2")).program.graph
    for node in graph.nodes:
        if is_redistribution(node):
            tensor, *ends, _, _ = redistribution_of(node)
            assert tensor.meta["val"].dtype != torch.bool or PARTIAL not in ends
    assert not take(torch.ones(3), PARTIAL, 2, 1).any()
    assert_equals_serial(Model(run), (x(),), "dp=3")


def test_tangents_have_the_type_of_the_loss() -> None:
    module = Model(lambda m, x: m.a(x).square().mean(), dtype=torch.bfloat16)
    given = x(dtype=torch.bfloat16)
    parallel = parallelize(copy.deepcopy(module), (given,), Plan(Mesh.parse("dp=2")), devices=["cpu"])
    loss = parallel(given)
    assert loss.dtype == torch.bfloat16
    (loss.float() * 2).backward()
    (module(given).float() * 2).backward()
    torch.testing.assert_close(parallel.rank1.a.weight.grad, module.a.weight.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("mesh", ["dp=3", "fsdp=2"])
def test_dropout_draws_the_mask_of_the_serial_module(mesh: str) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        y = F.dropout(m.a(x), 0.5)
        q = y.view(x.shape[0], 2, 2, 1)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return (m.b(attended.reshape(x.shape)) + torch.rand_like(x)).square().mean()

    assert_equals_serial(Model(run), (x(),), mesh)


def test_concatenation_with_nothing_and_assertions_are_harmless() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        torch._assert_async((x.abs() < 1e9).all())
        return torch.cat([m.a(torch.cat([x[:0], x], 0)), m.b(x)[:, :0]], 1).square().mean()

    assert_equals_serial(Model(run), (x(),), "dp=2")


def test_hugging_face_models_do_not_call_item_while_they_are_captured() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    ids = torch.arange(32).view(4, 8) % 32
    module = transformers.LlamaForCausalLM(config).train()
    capture(module, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    parallel = parallelize(module, {"input_ids": ids, "labels": ids}, Plan(Mesh.parse("dp=2")), devices=["cpu"])
    expected = module(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(parallel(input_ids=ids, labels=ids), expected, rtol=1e-5, atol=1e-5)
    assert parallel.last_weight == 4 * 7


def test_training_evaluation_and_every_shape_have_programs_of_their_own() -> None:
    module = Model(lambda m, x: F.dropout(m.a(x), 0.5, m.training).square().mean() * x.shape[0])
    parallel = parallelize(module, (x(),), Plan(Mesh.parse("dp=2")), devices=["cpu"]).eval()
    for batch in (x(6), x(4), x(2)):
        torch.testing.assert_close(parallel(batch), module.eval()(batch).detach())


def test_whether_parameters_are_gathered_again_is_said_and_not_guessed() -> None:
    with pytest.raises(PlanError, match="zero_stage is 1; it is 2"):
        Plan(zero_stage=1)
    counts = []
    for stage in (2, 3):
        plan = Plan(Mesh.parse("fsdp=2"), zero_stage=stage)
        step = schedule(place(gpt(), plan.mesh), plan)
        assert step.backward is not None
        counts.append(len(step.backward.find_nodes(op="call_function", target=collectives.all_gather)))
    assert counts[0] == 0 < counts[1]


def test_gradients_that_are_one_tensor_are_not_scaled_twice() -> None:
    """Two parameters may receive the very same gradient, and members of a bucket share memory."""
    module = Model(lambda m, x: (x @ (m.a.weight + m.b.weight)).square().mean())
    parallel = parallelize(copy.deepcopy(module), (x(),), Plan(Mesh.parse("dp=2")), devices=["cpu"])
    for _ in range(2):
        parallel(x()).backward()
        module(x()).backward()
    parallel.clip_grad_norm_(1e-3)
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    for tree in (parallel.rank0, parallel.rank1):
        torch.testing.assert_close(tree.a.weight.grad, module.a.weight.grad)
        torch.testing.assert_close(tree.b.weight.grad, module.b.weight.grad)


def test_unequal_numbers_of_valid_tokens_weigh_by_their_number() -> None:
    def run(m: Model, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.a(x), y)

    y = torch.tensor([0, -100, -100, -100, 2, 3])  # one rank has one valid token, the other two
    module = Model(run)
    assert_equals_serial(module, (x(), y), "dp=2")
    parallel = parallelize(copy.deepcopy(module), (x(), y), Plan(Mesh.parse("dp=2")), devices=["cpu"])
    total = 0.0
    for part in (slice(0, 2), slice(2, 6)):
        (parallel(x()[part], y[part]) * parallel.last_weight).backward()
        total += parallel.last_weight
    assert total == 3
    torch.testing.assert_close(parallel.rank0.a.weight.grad / total, module.a.weight.grad)


def test_checkpointed_regions_are_recomputed_and_not_only_accepted() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(m.a(x)).square(), x, use_reentrant=False).mean()

    plan = Plan(Mesh.parse("dp=2"))
    step = schedule(place(capture(Model(run), (x(),)), plan.mesh), plan)
    assert step.backward is not None
    assert step.backward.find_nodes(op="call_function", target=aten.tanh.default)
    assert_equals_serial(Model(run), (x(),), "dp=2")


def test_a_custom_backward_is_never_differentiated_again() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.sign(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 3

    assert_equals_serial(Model(lambda m, x: Straight.apply(m.a(x)).add(m.b(x)).square().mean()), (x(),), "fsdp=2")


def test_views_of_a_parameter_that_only_the_backward_pass_reads_whole_belong_to_it() -> None:
    class Weighted(torch.autograd.Function):
        """Forward can be split; backward reads a view of the parameter by an operator that cannot."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, turned := weight.t())
            return x @ turned

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, turned = ctx.saved_tensors
            return gradient @ turned.t(), gradient.t() @ x * (1 + torch.linalg.det(turned))

    module = Model(lambda m, x: Weighted.apply(x, m.a.weight).square().mean(), width=64)
    assert_equals_serial(module, (x(2000, 64),), "tp=2")


def test_batch_statistics_are_those_of_the_global_batch() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor) -> Tensor:
            return (self.norm(x) * torch.arange(4)).tanh().mean()

    assert_equals_serial(Normed(), (x() * 5 + 2,), "dp=6")


def test_what_is_moved_to_the_front_stays_in_order() -> None:
    graph = Graph()
    whole = graph.placeholder("x")
    whole.meta = {"val": x(), "backward": False, "module": "", "rematerialize": False}
    chain = whole
    for target, arguments in ((torch.ops.aten.cumsum.default, (0,)), (torch.ops.aten.slice.Tensor, (0, 2, 3))):
        made = graph.call_function(target, (chain, *arguments))
        made.meta = {**whole.meta, "val": target(chain.meta["val"], *arguments)}
        chain = made
    gathered = graph.call_function(redistribute, (chain, Shard(0), REPLICATE, "tp", 2))
    gathered.meta = {**whole.meta, "val": x(batch=2)}
    graph.output((gathered,))
    communicate(graph, 0)
    order = [node.target for node in graph.nodes]
    assert order.index(torch.ops.aten.cumsum.default) < order.index(torch.ops.aten.slice.Tensor)


def test_torch_forgets_to_say_that_a_choice_against_a_number_is_pointwise() -> None:
    for target in (torch.ops.aten.where.ScalarOther, torch.ops.aten.where.ScalarSelf, torch.ops.aten.where.Scalar):
        assert torch.Tag.pointwise not in target.tags
        assert has_rule(target)


def test_what_the_backward_pass_reads_of_neighbours_is_not_all_asked_for_at_its_start() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(12)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    placed = place(capture(Deep(), (torch.randn(2, 2, 8, 8),)), Mesh.parse("hw=2"))
    backward = schedule(placed, Plan(Mesh.parse("hw=2"))).backward
    assert backward is not None
    under_way, most, started = 0, 0, 0
    for node in backward.nodes:
        if node.target in (window, window_sum):
            started, under_way = started + 1, under_way + 1
        elif node.target is collectives.wait and node.args[0].target in (window, window_sum):
            under_way -= 1
        most = max(most, under_way)
    assert started >= 2 * 11 and 2 <= most <= 4


def test_tracing_takes_resizing_apart_unless_it_is_told_not_to() -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        return F.interpolate(m.a(x).view(2, 3, 2, 2), scale_factor=2, mode="bilinear").square().mean()

    targets = {str(node.target) for node in capture(Model(run), (x(),)).graph.nodes}
    assert "aten.upsample_bilinear2d.default" in targets and "aten._unsafe_index.Tensor" not in targets
