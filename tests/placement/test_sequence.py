"""The axis `sp`: what it splits, in how many stripes, and what then travels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.placement.place import PlacedProgram, place
from paceline.placement.redistribute import Collective, collective_of, is_redistribution, redistribution_of
from paceline.placement.windows import window
from paceline.plan import Mesh, Plan
from paceline.program.capture import capture
from paceline.program.program import Input, InputRole, Program
from paceline.runtime.module import parallelize, place_in_process
from tests.ranks import ranks

ours = torch.ops.paceline
LITTLE = 1 << 20


class Block(nn.Module):
    """Queries, keys and values of one projection; queries may be grouped."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.sizes = [width, width * groups // heads, width * groups // heads]
        self.qkv, self.o = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads, self.groups = heads, groups

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        def split(t: Tensor, heads: int) -> Tensor:
            return t.unflatten(-1, (heads, -1)).transpose(1, 2)

        q, k, v = self.qkv(self.norm(x)).split(self.sizes, -1)
        q, k, v = split(q, self.heads), split(k, self.groups), split(v, self.groups)
        grouped = self.heads != self.groups
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A language model; with a mask of tokens, attention gets a mask [B, 1, T, T], else it is causal."""

    def __init__(self, blocks: int = 1, groups: int = 4, dropout: float = 0.0, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4, groups) for _ in range(blocks))
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 32, bias=False)

    def forward(self, ids: Tensor, labels: Tensor, tokens: Tensor | None = None) -> Tensor:
        x, mask = self.dropout(self.embedding(ids)), None
        if tokens is not None:
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            mask = causal & tokens[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def ids(time: int = 64) -> Tensor:
    return torch.randint(32, (4, time), generator=torch.Generator().manual_seed(time))


def causal(time: int = 64, **options: Any) -> tuple[nn.Module, Any]:
    return Decoder(**options), {"ids": ids(time), "labels": ids(time).roll(-1, 1)}


def masked(time: int = 64, **options: Any) -> tuple[nn.Module, Any]:
    tokens = torch.ones_like(ids(time))
    tokens[::2, -5:] = 0
    return Decoder(**options), {"ids": ids(time), "labels": ids(time).roll(-1, 1), "tokens": tokens}


@cache
def program(built: Callable[..., tuple[nn.Module, Any]], *, double: bool = False, **options: Any) -> Program:
    """What is captured of such a model, once for all meshes."""
    module, batch = built(**options)
    return capture(module.double() if double else module, batch)


def placed(found: Program, mesh: str, memory_bytes: int | None = None) -> PlacedProgram:
    return place(found.copy(), Plan(Mesh.parse(mesh), memory_bytes=memory_bytes))


def collectives(found: PlacedProgram, module: str) -> list[tuple[str, bool]]:
    """What travels in a module between operators, and whether in the backward pass; gradients of parameters apart."""
    moves = [n for n in found.program.graph.nodes if is_redistribution(n) and n.meta["module"].startswith(module)]
    kinds = [(collective_of(*redistribution_of(n)[1:3]), n) for n in moves]
    return [(k.value, n.meta["backward"]) for k, n in kinds if k not in (None, Collective.ALL_REDUCE)]


def test_keys_and_values_are_gathered_and_their_gradients_scattered() -> None:
    found = placed(program(causal, time=256, blocks=2, width=64), "sp=2")
    for block in ("blocks.0", "blocks.1"):
        assert sorted(collectives(found, block)) == [("all_gather", False)] * 2 + [("reduce_scatter", True)] * 2
    assert {n.target for n in found.program.graph.nodes} >= {
        ours.causal_rows.default,
        ours.causal_rows_backward.default,
    }


@pytest.mark.parametrize(
    ("time", "ranks", "blocks"),
    [(64, 2, 2), (128, 2, 4), (256, 2, 8), (512, 2, 8), (128, 4, 2), (64, 4, 1), (96, 2, 2), (32, 2, 1)],
)
def test_causal_attention_is_split_in_stripes(time: int, ranks: int, blocks: int) -> None:
    found = placed(program(causal, time=time), f"sp={ranks}")
    assert str(found.placements[Input(InputRole.BATCH, "ids")][0]) == (f"S1/{blocks}" if blocks > 1 else "S1")


def test_a_mask_of_tokens_makes_rows_of_a_mask_and_nothing_of_it_travels() -> None:
    found = placed(program(masked, time=256, width=64), "sp=2")
    assert str(found.placements[Input(InputRole.BATCH, "ids")][0]) == "S1", "all rows see as much: no stripes"
    assert str(found.placements[Input(InputRole.BATCH, "tokens")][0]) == "R"
    assert sorted(collectives(found, "blocks.0")) == [("all_gather", False)] * 2 + [("reduce_scatter", True)] * 2
    others = [
        n for n in found.program.graph.nodes if is_redistribution(n) and not n.meta["module"].startswith("blocks")
    ]
    for node in others:
        x, source, target, *_ = redistribution_of(node)
        assert collective_of(source, target) in (None, Collective.ALL_REDUCE), (x, source, target)
    masks = [n for n in found.program.graph.nodes if tuple(getattr(n.meta.get("val"), "shape", ())) == (4, 1, 256, 256)]
    assert not masks, "a rank makes the rows of the mask that it needs"


def test_where_memory_is_limited_keys_and_values_go_round_a_ring() -> None:
    found = placed(program(causal, groups=2), "sp=4", LITTLE)
    assert not collectives(found, "blocks.0"), "nothing is gathered"
    called = [n.target for n in found.program.graph.nodes]
    assert called.count(ours.ring_rows.default) == called.count(ours.ring_rows_backward.default) == 4
    assert called.count(window) == 3 + 3 + 4, "keys and values go round twice, their gradients home"
    sizes = {n.meta["val"].shape[2] for n in found.program.graph.nodes if n.target is window}
    assert sizes == {16}, "a quarter of the sequence"
    assert window not in {n.target for n in placed(program(causal, groups=2), "sp=4").program.graph.nodes}


def assert_equals_serial(
    built: Callable[..., tuple[nn.Module, Any]],
    mesh: str,
    tolerance: float,
    memory_bytes: int | None = None,
    *,
    in_processes: bool = False,
    double: bool = True,
    **options: Any,
) -> None:
    """One step with the same draws: the loss and every gradient."""
    module, batch = built(**options)
    module = module.double() if double else module
    plan = Plan(Mesh.parse(mesh), memory_bytes=memory_bytes)
    if in_processes:
        parallel = parallelize(copy.deepcopy(module), batch, plan)
    else:
        captured = program(built, double=double, **options)
        parallel = place_in_process(captured, copy.deepcopy(module), batch, plan)
    parallel.seed(3)
    torch.manual_seed(3)
    loss, expected = parallel(**batch), module(**batch)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for placed in parallel.shards():
        if placed.is_parameter:
            whole = module.get_parameter(placed.name).grad
            for patch in placed.patches:
                mine, theirs = placed.tensor.grad[patch.local.index], whole[patch.whole.index]
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mesh", ["sp=4", "sp=2,tp=2", "tp=2,sp=2", "fsdp=2,sp=2"])
def test_causal_attention_equals_serial(mesh: str) -> None:
    assert_equals_serial(causal, mesh, 1e-12, groups=2, dropout=0.1)


def test_it_equals_serial_in_float32_too() -> None:
    assert_equals_serial(causal, "sp=2", 1e-5, double=False, groups=2)


def test_masked_attention_equals_serial() -> None:
    assert_equals_serial(masked, "sp=2,tp=2", 1e-12)


@pytest.mark.parametrize("mesh", ["sp=4", "sp=2,tp=2"])
def test_the_ring_equals_serial(mesh: str) -> None:
    assert_equals_serial(causal, mesh, 1e-12, LITTLE, groups=2)


@ranks(3)
def test_the_ring_equals_serial_between_processes(rank: int) -> None:
    assert_equals_serial(causal, "sp=3", 1e-12, LITTLE, in_processes=True, time=96, groups=2)
