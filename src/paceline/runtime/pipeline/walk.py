"""Walking a schedule: a pipeline rank performs its actions, one after the other, on the micro-batches of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.program.program import Input, InputRole, Output, OutputRole
from paceline.program.stages import Part, Stage
from paceline.runtime.pipeline.channels import Message
from paceline.runtime.pipeline.generator import START, drawing_from
from paceline.runtime.pipeline.replicas import Replicas
from paceline.runtime.pipeline.retire import message_of, retirements
from paceline.runtime.pipeline.shares import Shares
from paceline.runtime.pipeline.stage_rank import Pieces, StageRank
from paceline.runtime.pipeline.step import GENERATOR, SHARE, PipelineStep
from paceline.runtime.pipeline.sums import Sums, add_up
from paceline.schedule import Action, Op, Payload, Schedule

Observe = Callable[["Walk", Action, float, float], None]
"""Told of an action that was performed: by whom, and when it began and ended, in seconds of `time.perf_counter`."""

_AHEAD = 2
"""So many computations before it is needed, a message is expected."""


@dataclass
class MicroBatch:
    """What one micro-batch needs.

    Attributes:
        step: the stages for its shape.
        pieces: of its tensors, for each rank of the inner mesh here, by name.
        seed: of its random operators.
    """

    step: PipelineStep
    pieces: list[dict[str, Tensor]]
    seed: int


@dataclass
class Walk:
    """One rank's way through a schedule.

    Args:
        rank: whose actions are performed.
        schedule: with its messages in it.
        micro_batches: as many as the schedule has.
        shares: what each micro-batch's loss counts by.
        recompute: stages that compute their forward pass again before the backward pass.
        parameter: gives the pieces of a parameter (stage, version, name).
        update: called for UPDATE, with its stage and version; the sums of a stage begin anew after it.
        observe: called after each action.
        losses, weights, found_shares: of each micro-batch, on the rank of the last stage.
        sums: by stage, what was not given to `update`.
    """

    rank: StageRank
    schedule: Schedule
    micro_batches: Sequence[MicroBatch]
    shares: Shares
    recompute: frozenset[int] = frozenset()
    parameter: Callable[[int, int, str], Pieces] | None = None
    update: Callable[[int, int, Sums], None] | None = None
    observe: Observe | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, float | None] = field(default_factory=dict)
    found_shares: dict[int, float] = field(default_factory=dict)
    sums: dict[int, Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._actions = self.schedule.actions[self.rank.number]
        self._values: dict[tuple[int, int], dict[str, Pieces]] = {}
        self._unsent: dict[tuple[int, int], dict[Message, tuple[str, ...]]] = {}
        self._retired = retirements(self.schedule, self.rank.number)
        self._sent: list[Message] = []
        self.position = 0
        self._expected = 0
        self._replicas = Replicas(self.rank, self.schedule)

    @property
    def is_over(self) -> bool:
        """Whether every action was performed."""
        return self.position == len(self._actions)

    def can_go_on(self) -> bool:
        """Whether the next action need not wait for a rank of this same process."""
        self._expect_messages()
        action = self._actions[self.position]
        match action.op:
            case Op.RECEIVE:
                return self.rank.channel.has(message_of(action))
            case Op.UPDATE:
                return self._replicas.are_there(action.stage)
        return True

    def go_on(self) -> None:
        """Perform the next action."""
        began = time.perf_counter()
        self._expect_messages()
        action = self._actions[self.position]
        self._perform(action)
        for message in self._retired.get(self.position, ()):
            self.rank.channel.release(message)
            self._sent.remove(message)
        self.position += 1
        if self.observe is not None:
            self.observe(self, action, began, time.perf_counter())

    def held(self, stage: int) -> Iterator[Tensor]:
        """Yield what micro-batches keep on a stage now: for its later computations, or until it is sent."""
        for (of_stage, _), values in self._values.items():
            if of_stage == stage:
                for pieces in values.values():
                    yield from pieces

    def _perform(self, action: Action) -> None:
        match action.op:
            case Op.FORWARD:
                self._forward(action)
            case Op.BACKWARD | Op.BACKWARD_INPUT | Op.BACKWARD_WEIGHT:
                self._backward(action)
            case Op.SEND:
                self._send(action)
            case Op.RECEIVE:
                names = self._names(message_of(action))
                received = self.rank.channel.receive(message_of(action))
                self._of(action).update(zip(names, received, strict=True))
            case Op.REDUCE:
                self._replicas.give(action.stage, self._step(0), self.sums.setdefault(action.stage, Sums()))
            case Op.UPDATE:
                sums = self._replicas.added_up(action.stage, self._step(0), self.sums.pop(action.stage))
                if self.update is not None:
                    self.update(action.stage, action.version, sums)
                else:  # of a synchronous schedule: whoever called does it
                    self.sums[action.stage] = sums

    def finish(self) -> None:
        """Let go of what no later message told of."""
        for message in self._sent:
            self.rank.channel.release(message)
        self._sent.clear()

    def _of(self, action: Action) -> dict[str, Pieces]:
        """The values of a micro-batch on a stage: made there, or received."""
        return self._values.setdefault((action.stage, action.micro_batch), {})

    def _step(self, micro_batch: int) -> PipelineStep:
        return self.micro_batches[micro_batch].step

    def _names(self, message: Message) -> tuple[str, ...]:
        """The values that a message carries: none where only micro-batches of another shape have some."""
        pipeline = self._step(message.micro_batch).pipeline
        edges = pipeline.forward_edges if message.payload is Payload.ACTIVATION else pipeline.backward_edges
        return edges.get((message.source, message.target), ())

    def _expect_messages(self) -> None:
        """Make room for the messages of the next few computations, so that their senders need not wait."""
        ahead, position = 0, self.position
        while position < len(self._actions) and ahead <= _AHEAD:
            action = self._actions[position]
            ahead += action.op.is_compute
            if position >= self._expected:
                if action.op is Op.RECEIVE:
                    message = message_of(action)
                    sent = self._step(message.micro_batch).sent
                    source = self.schedule.rank_of(message.source, message.micro_batch)
                    self.rank.channel.expect(message, source, [sent[name] for name in self._names(message)])
                self._expected = position + 1
            position += 1

    def _send(self, action: Action) -> None:
        message, values = message_of(action), self._of(action)
        target = self.schedule.rank_of(message.target, message.micro_batch)
        self.rank.channel.send(message, target, [values[name] for name in self._names(message)])
        self._sent.append(message)
        unsent = self._unsent[action.stage, action.micro_batch]
        gone = unsent.pop(message, ())
        wanted = {name for names in unsent.values() for name in names} | self._read_later(action)
        for name in gone:
            if name not in wanted:
                values.pop(name, None)

    def _forward(self, action: Action) -> None:
        step, values = self._step(action.micro_batch), self._of(action)
        stage = step.pipeline.stages[action.stage]
        for name, buffer in self._changed_and_read_again(step, stage).items():
            values[name] = [pieces[buffer].clone() for pieces in self.rank.state.pieces]
        if action.stage in self.recompute and GENERATOR in values:
            values[START] = values[GENERATOR]
        made = self._run_forward(action, step, stage, values)
        for output, name in stage.outputs.items():
            self._keep_output(action.micro_batch, output, made[name])
        if any(output.role is OutputRole.LOSS for output in stage.outputs):
            made[SHARE] = self._share_found(action.micro_batch, stage, made)
        values.update(made)
        self._hand_on(action, Payload.ACTIVATION)

    def _run_forward(
        self, action: Action, step: PipelineStep, stage: Stage, values: dict[str, Pieces]
    ) -> dict[str, Pieces]:
        columns = self._columns(action, step, stage.forward, values)
        if not step.draws:
            return self.rank.run(step, stage.forward, columns)
        given = values.get(START, values.get(GENERATOR))
        start = given[0] if given is not None else self.micro_batches[action.micro_batch].seed
        with drawing_from(start, self.rank.devices[0]) as after:
            made = self.rank.run(step, stage.forward, columns)
        return {**made, GENERATOR: after * len(self.rank.devices)}

    def _share_found(self, micro_batch: int, stage: Stage, made: Mapping[str, Pieces]) -> Pieces:
        """What the loss of a micro-batch counts by, now that it is there."""
        names = [name for output, name in stage.outputs.items() if output.role is OutputRole.WEIGHT]
        count = float(made[names[0]][0]) if names else None
        self.weights[micro_batch] = self.shares.weight(micro_batch, count)
        share = self.found_shares[micro_batch] = self.shares.of(micro_batch, count)
        return [torch.tensor(share, dtype=torch.float64, device=device) for device in self.rank.devices]

    def _keep_output(self, micro_batch: int, output: Output, value: Pieces) -> None:
        match output.role:
            case OutputRole.LOSS:
                self.losses[micro_batch] = value[0].detach()
            case OutputRole.BUFFER:
                for pieces, changed in zip(self.rank.state.pieces, value, strict=True):
                    pieces[output.name].copy_(changed)

    def _backward(self, action: Action) -> None:
        step, values = self._step(action.micro_batch), self._of(action)
        stage = step.pipeline.stages[action.stage]
        if action.stage in self.recompute and action.op is not Op.BACKWARD_WEIGHT:
            again = self._run_forward(action, step, stage, values)
            values.update((name, again[name]) for name in stage.saved if name in again)
        share = float(values[SHARE][0]) if SHARE in values else self.shares.of(action.micro_batch, None)
        part = _part(stage, action.op)
        if share:
            made = self.rank.run(step, part, self._columns(action, step, part, values, share))
        else:  # a mean over nothing: its gradient is zero, whatever the program would make of 0/0
            made = {name: self._zeros(step, name) for name in part.outputs if name in step.sent}
        if action.op.makes_gradients:
            sums = self.sums.setdefault(action.stage, Sums())
            sums.read.append((action.micro_batch, action.version))
            add_up(sums, stage, made, share)
        values.update(made)
        self._hand_on(action, Payload.GRADIENT)

    def _zeros(self, step: PipelineStep, name: str) -> Pieces:
        sent = step.sent[name]
        return [torch.zeros(sent.shape, dtype=sent.dtype, device=device) for device in self.rank.devices]

    def _columns(
        self,
        action: Action,
        step: PipelineStep,
        part: Part,
        values: Mapping[str, Pieces],
        share: float = 1.0,
    ) -> list[Pieces]:
        """The inputs of a part, in its order."""
        found = []
        for name in part.inputs:
            item = step.pipeline.inputs.get(name)
            found.append(values[name] if item is None or name in values else self._input(action, item, share))
        return found

    def _input(self, action: Action, item: Input, share: float) -> Pieces:
        match item.role:
            case InputRole.PARAMETER if self.parameter is not None:
                return self.parameter(action.stage, action.version, item.name)
            case InputRole.PARAMETER | InputRole.BUFFER:
                return [pieces[item.name].detach() for pieces in self.rank.state.pieces]
            case InputRole.BATCH:
                return [pieces[item.name] for pieces in self.micro_batches[action.micro_batch].pieces]
            case InputRole.TANGENT:
                dtype = self._step(action.micro_batch).loss_dtype
                return [torch.tensor(share, dtype=dtype, device=device) for device in self.rank.devices]

    def _changed_and_read_again(self, step: PipelineStep, stage: Stage) -> dict[str, str]:
        """Buffers that the forward pass changes and the backward pass reads as they were: value and name."""
        changed = {output.name for output in stage.outputs if output.role is OutputRole.BUFFER}
        if not changed or stage.backward is None:
            return {}
        read = step.reads(stage.index, InputRole.BUFFER)
        return {value: name for value, name in read.items() if name in changed and value in _later_inputs(stage)}

    def _hand_on(self, action: Action, payload: Payload) -> None:
        """Give what was made to stages on this rank, note what must be sent, and drop the rest."""
        step = self._step(action.micro_batch)
        values = self._of(action)
        edges = step.pipeline.forward_edges if payload is Payload.ACTIVATION else step.pipeline.backward_edges
        unsent = self._unsent.setdefault((action.stage, action.micro_batch), {})
        for (source, target), names in edges.items() if action.op is not Op.BACKWARD_WEIGHT else ():
            if source != action.stage:
                continue
            if self.schedule.rank_of(target, action.micro_batch) == self.rank.number:
                there = self._values.setdefault((target, action.micro_batch), {})
                there.update((name, values[name]) for name in names)
            else:
                unsent[Message(payload, source, target, action.micro_batch)] = names
        wanted = {name for names in unsent.values() for name in names} | self._read_later(action)
        for name in list(values):
            if name not in wanted:
                del values[name]

    def _read_later(self, action: Action) -> set[str]:
        """The values of a micro-batch that its stage still reads after an action."""
        step = self._step(action.micro_batch)
        stage = step.pipeline.stages[action.stage]
        last = action.op if action.op is not Op.SEND else _producer(action, self.schedule)
        match last:
            case Op.FORWARD if stage.backward is None:
                return set()
            case Op.FORWARD:
                names = set(stage.forward.inputs) if action.stage in self.recompute else set(stage.saved)
                return names | self._changed_and_read_again(step, stage).keys() | {SHARE, START}
            case Op.BACKWARD_INPUT:
                assert stage.backward_weight is not None
                return {*stage.backward_weight.inputs, SHARE}
        return set()


def _producer(action: Action, schedule: Schedule) -> Op:
    """The computation whose results a SEND carries."""
    if action.payload is Payload.ACTIVATION:
        return Op.FORWARD
    return Op.BACKWARD_INPUT if schedule.splits_backward else Op.BACKWARD


def _part(stage: Stage, op: Op) -> Part:
    part = {
        Op.BACKWARD: stage.backward,
        Op.BACKWARD_INPUT: stage.backward_input,
        Op.BACKWARD_WEIGHT: stage.backward_weight,
    }[op]
    assert part is not None, "the step was made for this schedule"
    return part


def _later_inputs(stage: Stage) -> set[str]:
    parts = (stage.backward, stage.backward_input, stage.backward_weight)
    return {name for part in parts if part is not None for name in part.inputs}
