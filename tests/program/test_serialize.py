from __future__ import annotations

import contextlib
import json
import math
import operator
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.graph import CodeGen

from paceline.errors import SerializationError
from paceline.program import operators  # noqa: F401  (registers torch.ops.paceline)
from paceline.program.serialize import Codec, graph_from_json, graph_to_json
from paceline.program.tensor_meta import TensorMeta, fake_tensors

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # x: [B, T, D]
        q, k, v = (h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + self.mlp(x) * torch.tensor([1.5])


class SmallGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(8), Block(8))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((self.blocks(self.embed(ids)) @ self.embed.weight.T).flatten(0, 1), labels.flatten())


class LossOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Tensor:
        return self.inner(**batch).loss


def small_gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    return SmallGpt(), {"ids": torch.randint(11, (2, 6)), "labels": torch.randint(11, (2, 6))}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.randint(13, (2, 8))
    return LossOf(transformers.LlamaForCausalLM(config)), {"input_ids": ids, "labels": ids}


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])}
    return LossOf(transformers.ResNetForImageClassification(config)), batch


def joint_graph(module: nn.Module, batch: dict[str, Tensor]) -> GraphModule:
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        joint = aot_export_joint_with_descriptors(stack, module, (), batch).graph_module
    joint.graph.set_codegen(CodeGen())  # flat arguments
    joint.recompile()
    return joint


def through_text(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


def constants_of(joint: GraphModule) -> dict[str, Tensor]:
    return {str(n.target): getattr(joint, str(n.target)) for n in joint.graph.nodes if n.op == "get_attr"}


def described(value: Any) -> Any:
    if isinstance(value, Tensor | TensorMeta):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return type(value)(described(v) for v in value) if isinstance(value, list | tuple) else value


def random_inputs(graph: Graph) -> list[Tensor]:
    vals = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return [
        torch.rand(val.shape, dtype=val.dtype).as_strided(val.shape, val.stride())
        if val.dtype.is_floating_point
        else torch.randint(3, val.shape, dtype=val.dtype)
        for val in vals
    ]


@pytest.mark.parametrize("factory", [small_gpt, llama, resnet])
def test_joint_graphs_come_back_exactly(factory: Any) -> None:
    torch.manual_seed(0)
    joint = joint_graph(*factory())
    constants = constants_of(joint)
    data = through_text(graph_to_json(joint.graph, meta_keys=["partitioner_tag", "seq_nr"]))
    loaded = graph_from_json(data, constants=constants)
    loaded.lint()
    for old, new in zip(joint.graph.nodes, loaded.nodes, strict=True):
        assert (old.name, old.op, old.target) == (new.name, new.op, new.target)
        assert repr(old.args) == repr(new.args)
        assert repr(old.kwargs) == repr(new.kwargs)
        assert described(old.meta.get("val")) == described(new.meta.get("val"))
        assert old.meta.get("partitioner_tag") == new.meta.get("partitioner_tag")
    inputs = random_inputs(loaded)
    results = []
    for module in (joint, GraphModule(constants, loaded)):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(module(*[x.clone() for x in inputs]))
    pairs = [(a, b) for a, b in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True) if a is not None]
    assert len(pairs) > 10
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b)


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, True, None, "s"),
        [(1,), [2, ()]],
        -0.0,
        1e-300,
        math.inf,
        -math.inf,
        complex(1, math.inf),
        slice(None, 3, None),
        {"a": [1], "b": (2,)},
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.strided,
        torch.channels_last,
    ],
    ids=repr,
)
def test_arguments_come_back_exactly(value: Any) -> None:
    graph = Graph()
    node = graph.call_function(operator.getitem, (graph.placeholder("x"), value), {"k": value})
    node.meta["kept"] = value
    graph.output(node)
    loaded = list(graph_from_json(through_text(graph_to_json(graph, meta_keys=["kept"]))).nodes)[1]
    assert repr(loaded.args[1]) == repr(value)
    assert repr(loaded.kwargs["k"]) == repr(value)
    assert type(loaded.args[1]) is type(node.args[1])
    assert loaded.meta == {"kept": value}


def test_nan_argument_and_plain_vals() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.add.Tensor, (x, math.nan))
    node.meta["val"] = (torch.empty(2, 3).t(), [None, torch.empty(0)], 4, 2.5)
    graph.output([node, None])
    loaded = list(graph_from_json(through_text(graph_to_json(graph))).nodes)
    assert math.isnan(loaded[1].args[1])
    assert described(loaded[1].meta["val"]) == described(node.meta["val"])
    assert "val" not in loaded[0].meta
    assert loaded[2].args == ([loaded[1], None],)


@dataclass(frozen=True)
class Spot:
    dim: int
    sizes: tuple[int, ...]


def gather(x: Tensor, spot: Spot) -> Tensor:
    return x


def test_registered_functions_and_classes() -> None:
    graph = Graph()
    node = graph.call_function(gather, (graph.placeholder("x"), Spot(1, (2, 3))))
    graph.output(node)
    codecs = {"spot": Codec(Spot, lambda spot: (spot.dim, spot.sizes), lambda values: Spot(*values))}
    data = through_text(graph_to_json(graph, {"gather": gather}, codecs=codecs))
    loaded = list(graph_from_json(data, {"gather": gather}, codecs=codecs).nodes)[1]
    assert loaded.target is gather
    assert loaded.args[1] == Spot(1, (2, 3))
    with pytest.raises(SerializationError, match="function:gather"):
        graph_from_json(data, {}, codecs=codecs)
    with pytest.raises(SerializationError, match="malformed"):
        graph_from_json(data, {"gather": gather})


def test_our_operators_and_collectives() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sums = graph.call_function(torch.ops.paceline.batch_norm_sums.default, (x, x))
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (sums, "sum", "0"))
    graph.output(graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,)))
    loaded = graph_from_json(through_text(graph_to_json(graph)))
    assert [n.target for n in loaded.nodes] == [n.target for n in graph.nodes]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.relu, ()),
        (torch.ops.prims.sin.default, ()),
        (eval, ("1",)),
        (aten.add.Tensor, (torch.ones(1),)),
        (aten.add.Tensor, (object(),)),
    ],
)
def test_what_cannot_be_written_is_refused_by_node(target: Any, args: tuple[Any, ...]) -> None:
    graph = Graph()
    node = graph.create_node("call_function", target, args, name="culprit")
    graph.output(node)
    with pytest.raises(SerializationError, match="culprit"):
        graph_to_json(graph)


def one_call(target: str) -> dict[str, Any]:
    rows = [["placeholder", "x", "x", [], {}, [], {}], ["call_function", "y", 0, [{"n": 0}], {}, [], {}]]
    return {"format": 1, "targets": [target], "tensors": [], "nodes": rows}


@pytest.mark.parametrize(
    "target",
    [
        "builtins.eval",
        "os.system",
        "aten.nope.default",
        "aten.relu",
        "aten.relu.nope",
        "prims.sin.default",
        "aten.__class__.default",
        "aten.relu.__class__",
        "aten.relu.default.__call__",
        "function:gather",
        "",
    ],
)
def test_stored_targets_outside_of_the_allowed_are_refused(target: str) -> None:
    with pytest.raises(SerializationError, match="allowed are operators"):
        graph_from_json(one_call(target))


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"nodes": [["placeholder", "x"]]},
        {"nodes": [["call_function", "x", 7, [], {}, [], {}]]},
        {"nodes": [["call_function", "x", 0, [{"n": 5}], {}, [], {}]]},
        {"nodes": [["call_function", "x", 0, [{"dtype": "save"}], {}, [], {}]]},
        {"nodes": [["call_function", "x", 0, [{"?": 1}], {}, [], {}]]},
        {"nodes": [["placeholder", "def", "x", [], {}, [], {}]]},
        {"nodes": [["placeholder", "x", "x", [], {}, 3, {}]]},
        {"tensors": [[[2], [1], "float31", "cpu"]]},
        {"nodes": None},
    ],
)
def test_damaged_data_is_one_kind_of_error(damage: dict[str, Any]) -> None:
    with pytest.raises(SerializationError):
        graph_from_json(one_call("aten.relu.default") | damage)


def test_values_can_be_fake_tensors_and_be_written_again() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, dtype=torch.bfloat16).t()
    graph.output(x)
    data = graph_to_json(graph)
    mode = FakeTensorMode()
    loaded = graph_from_json(data, values=fake_tensors(mode))
    fake = next(iter(loaded.nodes)).meta["val"]
    assert isinstance(fake, FakeTensor)
    with mode:
        assert (fake + 1).device.type == "cpu"
    light = next(iter(graph_from_json(data).nodes)).meta["val"]
    for value in (fake, light):
        assert described(value) == described(x.meta["val"])
        assert (value.numel(), value.dim(), value.element_size(), value.nbytes) == (12, 2, 2, 24)
        assert value.is_floating_point()
    assert graph_to_json(loaded) == graph_to_json(graph_from_json(data)) == data


def test_constants_are_checked() -> None:
    joint = joint_graph(*small_gpt())
    data = graph_to_json(joint.graph)
    constants = constants_of(joint)
    assert constants
    with pytest.raises(SerializationError, match="did not come with it"):
        graph_from_json(data)
    name = next(iter(constants))
    with pytest.raises(SerializationError, match=r"float64\[7\]"):
        graph_from_json(data, constants=constants | {name: torch.zeros(7, dtype=torch.float64)})
