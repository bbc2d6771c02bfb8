"""Serial references: the unmodified module under eager autograd, and the captured program node by node."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

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


def run_eager(module: nn.Module, batches: Iterable[Batch], precision: Precision) -> Trajectory:
    """Train the unmodified module; it is changed.

    Raises:
        CaptureError: it fails in this type; the message shows the user's line.
        NonFiniteError: its loss or a gradient is NaN or infinite, so nothing could be compared.
    """

    def differentiate(batch: Batch, seed: int) -> float:
        torch.manual_seed(seed)
        args, kwargs = as_call(batch)
        autocast = torch.autocast("cpu", precision.autocast) if precision.autocast else contextlib.nullcontext()
        try:
            with autocast:
                loss = loss_of(module(*args, **kwargs))
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


def run_program(program: Program, module: nn.Module, batches: Iterable[Batch], rate: float) -> Trajectory:
    """Train copies of a module's tensors by a captured program, interpreted serially; the module is not changed."""
    tensors = _copies(module)
    interpreter = Interpreter(GraphModule(program.constants, program.graph))
    interpreter.extra_traceback = False

    def differentiate(batch: Batch, seed: int) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            inputs = program_inputs(program, tensors, batch_leaves(batch))
            results = interpreter.run(*inputs, enable_io_processing=False)
        loss = float("nan")
        for output, result in zip(program.outputs, results, strict=True):
            match output.role:
                case OutputRole.LOSS:
                    loss = result.item()
                case OutputRole.GRADIENT:
                    tensors[output.name].grad = result.clone()
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
