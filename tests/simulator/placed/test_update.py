"""The optimizer's update as a graph: what it calls, what it keeps, what it needs for a while."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.simulator.placed.lifetimes import recorded_lifetimes
from paceline.simulator.placed.memory import Held, Memory, Storage
from paceline.simulator.placed.update import update_of

PIECES = [torch.empty(8, 4), torch.empty(16)]
BYTES = 4 * (8 * 4 + 16)


def adamw(**options: bool) -> Callable[[nn.Module], Optimizer]:
    return lambda module: AdamW(module.parameters(), **options)


def momentum(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), momentum=0.9, fused=True)


@pytest.mark.parametrize(("make", "states", "counts"), [(adamw(fused=True), 2, 2), (momentum, 1, 0)])
def test_state_is_what_the_optimizer_keeps(make: Callable[[nn.Module], Optimizer], states: int, counts: int) -> None:
    assert update_of(PIECES, make).state_bytes == states * BYTES + 4 * counts


def calls(make: Callable[[nn.Module], Optimizer]) -> list[str]:
    graph = update_of(PIECES, make).step
    return [str(node.target).split(".")[1] for node in graph.nodes if node.op == "call_function"]


def test_the_fused_update_is_one_call() -> None:
    assert calls(adamw(fused=True)).count("_fused_adamw_") == 1


def test_the_plain_update_needs_room_for_the_largest_parameter() -> None:
    update = update_of(PIECES, adamw(foreach=False))
    memory, lifetimes = Memory(), recorded_lifetimes(update.step)
    inputs = [memory.hold(Storage(0, Held.GRADIENTS)) for _ in lifetimes.given]
    memory.run(lifetimes, inputs, "update")
    real = 2 * 4 * 8 * 4  # the square root, and what it is divided by
    assert memory.peak.bytes == real
    assert memory.live == 0


def test_nothing_is_trained_by_a_rank_without_parameters() -> None:
    assert update_of([], adamw()).state_bytes == 0
