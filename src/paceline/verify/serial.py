"""Serial references: the unmodified module under eager autograd, and the captured program node by node."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import CaptureError, NonFiniteError
from paceline.program.capture import Batch, as_call, batch_leaves, loss_of
from paceline.program.factory import user_line
from paceline.program.program import InputRole, OutputRole, Program
from paceline.verify.precision import Precision
from paceline.verify.steps import run_steps
from paceline.verify.subject import dense_copy, named_tensors


@dataclass(frozen=True)
class Trajectory:
    """What a serial run leaves to be compared. Tied tensors appear once, under their first name.

    Attributes:
        losses: one per step.
        gradients: of the first step; a parameter without one has none here.
        parameters, buffers: after the last step.
        rate: the learning rate.
    """

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    rate: float

    def save(self, file: Path) -> None:
        """Write the tensors, as `gradient/NAME`, `parameter/NAME` and `buffer/NAME`."""
        kinds = {"gradient": self.gradients, "parameter": self.parameters, "buffer": self.buffers}
        tensors = {f"{kind}/{name}": tensor for kind, found in kinds.items() for name, tensor in found.items()}
        save_file({name: dense_copy(tensor) for name, tensor in tensors.items()}, file)


class Piece(NamedTuple):
    """A part of a batch that is computed by itself: its samples, its seed, and its share of the mean loss."""

    batch: Batch
    seed: int
    share: float


Division = Callable[[Batch, int], list[Piece]]
"""Divides a batch whose random operators have a seed."""


def undivided(batch: Batch, seed: int) -> list[Piece]:
    """Return the batch as it is."""
    return [Piece(batch, seed, 1.0)]


def run_eager(
    module: nn.Module, batches: Iterable[Batch], precision: Precision, divide: Division = undivided
) -> Trajectory:
    """Train the unmodified module; it is changed.

    Args:
        module: in training.
        batches: one per step.
        precision: what it computes in.
        divide: pieces whose gradients are accumulated, as serial training does with micro-batches.

    Raises:
        CaptureError: it fails in this type; the message shows the user's line.
        NonFiniteError: its loss or a gradient is NaN or infinite, so nothing could be compared.
    """

    def differentiate(batch: Batch, seed: int) -> float:
        return sum(differentiate_piece(piece) for piece in divide(batch, seed))

    def differentiate_piece(piece: Piece) -> float:
        torch.manual_seed(piece.seed)
        args, kwargs = as_call(piece.batch)
        autocast = torch.autocast("cpu", precision.autocast) if precision.autocast else contextlib.nullcontext()
        try:
            with autocast:
                loss = loss_of(module(*args, **kwargs)) * piece.share
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        except CaptureError:
            raise
        except Exception as error:  # anything may fail inside a user's forward pass: it becomes one error that teaches
            raise CaptureError(
                f"the unmodified module fails when run serially in {precision.value}: {type(error).__name__}: {error}\n"
                f"  {user_line(error)}\n"
                "If it casts to a type of its own, verify it in that: --dtype float32."
            ) from error
        return loss.item()

    return _trajectory(named_tensors(module), differentiate, batches)


def run_program(
    program_of: Callable[[Batch], Program],
    module: nn.Module,
    batches: Iterable[Batch],
    rate: float,
    divide: Division = undivided,
) -> Trajectory:
    """Train copies of a module's tensors by captured programs, interpreted serially; the module is not changed.

    Args:
        program_of: gives the program for a piece of a batch.
        module: whose tensors are copied.
        batches: one per step.
        rate: learning rate.
        divide: as for `run_eager`.
    """
    tensors = _copies(module)

    def differentiate(batch: Batch, seed: int) -> float:
        return sum(differentiate_piece(piece) for piece in divide(batch, seed))

    def differentiate_piece(piece: Piece) -> float:
        program = program_of(piece.batch)
        interpreter = program.interpreter()
        torch.manual_seed(piece.seed)
        with torch.no_grad():
            inputs = program_inputs(program, tensors, batch_leaves(piece.batch))
            results = interpreter.run(*inputs, enable_io_processing=False)
        loss = float("nan")
        for output, result in zip(program.outputs, results, strict=True):
            match output.role:
                case OutputRole.LOSS:
                    loss = result.item() * piece.share
                case OutputRole.GRADIENT:
                    held = tensors[output.name]
                    term = result * piece.share
                    held.grad = term if held.grad is None else held.grad + term
                case OutputRole.BUFFER:
                    tensors[output.name].copy_(result)
        return loss

    return _trajectory(tensors, differentiate, batches, rate)


def program_inputs(program: Program, tensors: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what the program reads, in its order: tensors of the module, leaves of the batch, and a tangent of one."""
    dtype = next(node.meta["val"].dtype for node in program.results)
    values: list[Tensor] = []
    for item in program.inputs:
        match item.role:
            case InputRole.TANGENT:
                values.append(torch.ones((), dtype=dtype))
            case InputRole.BATCH:
                values.append(leaves[item.name])
            case _:
                values.append(tensors[item.name].detach())
    return values


def _copies(module: nn.Module) -> dict[str, Tensor]:
    def copy(tensor: Tensor) -> Tensor:
        value = tensor.detach().clone()
        return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value

    return {name: copy(tensor) for name, tensor in named_tensors(module).items()}


def _trajectory(
    tensors: dict[str, Tensor],
    differentiate: Callable[[Batch, int], float],
    batches: Iterable[Batch],
    rate: float | None = None,
) -> Trajectory:
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    gradients: dict[str, Tensor] = {}

    def keep_gradients() -> None:
        gradients.update((name, p.grad.clone()) for name, p in parameters.items() if p.grad is not None)

    losses, used = run_steps(differentiate, parameters.values(), batches, rate=rate, after_first=keep_gradients)
    _check_finite(losses, gradients)
    return Trajectory(
        tuple(losses),
        gradients,
        {name: parameter.detach() for name, parameter in parameters.items()},
        {name: tensor for name, tensor in tensors.items() if name not in parameters},
        used,
    )


def _check_finite(losses: list[float], gradients: dict[str, Tensor]) -> None:
    found = {"loss of step 1": losses[0]}
    found |= {f"gradient of '{name}'": float(gradient.abs().sum()) for name, gradient in gradients.items()}
    found |= {f"loss of step {number}": loss for number, loss in enumerate(losses[1:], start=2)}
    for name, value in found.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"the serial {name} is not finite: there is nothing to compare with.")
