"""Replay: what an asynchronous pipeline computed, computed again serially from its log alone.

The log says which version of its weights each stage read for each micro-batch, and whose gradients made each version.
Micro-batch after micro-batch, the whole program is run once with the weights of each stage in the version that it read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.program.capture import batch_leaves
from paceline.program.program import InputRole, OutputRole, Program
from paceline.runtime.pipeline.asynchronous import Log
from paceline.verify.serial import Piece, Trajectory


@dataclass
class _Stage:
    """A stage during a replay: its parameters as they are, their versions, and the gradients that are not used yet."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    versions: list[dict[str, Tensor]]
    gradients: dict[int, dict[str, Tensor]]


class Replay:
    """A serial run that follows a log.

    Args:
        program_of: gives the program for a micro-batch.
        module: whose tensors the run starts from; not changed.
        stages: for each stage, the names of the parameters that it updates.
        log: of all ranks.
        optimizer: makes the optimizer of a stage, as each rank had one.
    """

    def __init__(
        self,
        program_of: Callable[[Piece], Program],
        module: nn.Module,
        stages: Sequence[Sequence[str]],
        log: Log,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._program_of = program_of
        tensors = dict(module.named_parameters())
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._frozen = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._stages = [_begin({name: tensors[name] for name in names}, optimizer) for names in stages]
        self._stage_of = {name: number for number, names in enumerate(stages) for name in names}
        self._read = {(made.stage, micro_batch): version for made in log for micro_batch, version in made.read}
        self._made: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for made in sorted(log, key=lambda made: made.rank):
            micro_batches = tuple(micro_batch for micro_batch, _ in made.read)
            self._made.setdefault((made.stage, made.version), []).append(micro_batches)

    def run(self, pieces: Sequence[Piece]) -> Trajectory:
        """Return the loss of each micro-batch, and the parameters and buffers after the last update.

        Raises:
            PlanError: the log reads a version that the micro-batches before could not make.
        """
        losses = []
        for number, piece in enumerate(pieces):
            losses.append(self._differentiate(number, piece))
            for stage_number in range(len(self._stages)):
                while self._update(stage_number, pieces):
                    pass
        parameters = {name: p.detach() for stage in self._stages for name, p in stage.parameters.items()}
        return Trajectory(tuple(losses), {}, parameters, self._buffers, 0.0)

    def _differentiate(self, number: int, piece: Piece) -> float:
        program = self._program_of(piece)
        leaves = batch_leaves(piece.batch)
        dtype = program.results[0].meta["val"].dtype
        inputs = []
        for item in program.inputs:
            match item.role:
                case InputRole.PARAMETER:
                    inputs.append(self._weight(item.name, number))
                case InputRole.BUFFER:
                    inputs.append(self._buffers[item.name])
                case InputRole.BATCH:
                    inputs.append(leaves[item.name])
                case InputRole.TANGENT:
                    inputs.append(torch.tensor(piece.share, dtype=dtype))
        interpreter = program.interpreter()
        torch.manual_seed(piece.seed)
        with torch.no_grad():
            results = interpreter.run(*inputs, enable_io_processing=False)
        loss = float("nan")
        for stage in self._stages:
            stage.gradients[number] = {}
        for output, result in zip(program.outputs, results, strict=True):
            match output.role:
                case OutputRole.LOSS:
                    loss = result.item()
                case OutputRole.BUFFER:
                    self._buffers[output.name] = result
                case OutputRole.GRADIENT if piece.share:  # a mean over nothing has none, whatever 0/0 makes of it
                    stage = self._stages[self._stage_of[output.name]]
                    stage.gradients[number][output.name] = result
        return loss

    def _weight(self, name: str, micro_batch: int) -> Tensor:
        """A parameter in the version that its stage read for a micro-batch."""
        number = self._stage_of.get(name)
        if number is None:
            return self._frozen[name]
        version, versions = self._read[number, micro_batch], self._stages[number].versions
        if version >= len(versions):
            raise PlanError(
                f"the log says that stage {number} read version {version} of its weights for micro-batch "
                f"{micro_batch}, but the micro-batches before it made no more than {len(versions) - 1}."
            )
        return versions[version][name]

    def _update(self, number: int, pieces: Sequence[Piece]) -> bool:
        """Make the next version of a stage, if the gradients for it are there."""
        stage = self._stages[number]
        by_rank = self._made.get((number, len(stage.versions)))
        if by_rank is None or any(index not in stage.gradients for found in by_rank for index in found):
            return False
        sums = [_sum([stage.gradients.pop(index) for index in found]) for found in by_rank]
        total = _sum(sums)
        weight = 0.0
        for found in by_rank:
            weight_of_rank = 0.0
            for index in found:
                weight_of_rank += pieces[index].share
            weight += weight_of_rank
        for name, parameter in stage.parameters.items():
            gradient = total.get(name)
            parameter.grad = gradient if gradient is None or weight == 1.0 else gradient / weight
        stage.optimizer.step()
        stage.optimizer.zero_grad()
        stage.versions.append({name: parameter.detach().clone() for name, parameter in stage.parameters.items()})
        return True


def _begin(
    tensors: Mapping[str, Tensor], optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> _Stage:
    parameters = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in tensors.items()}
    first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return _Stage(parameters, optimizer(parameters.values()), [first], {})


def _sum(terms: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add up term after term, in the order in which they are given."""
    total = dict(terms[0])
    for term in terms[1:]:
        for name, gradient in term.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
