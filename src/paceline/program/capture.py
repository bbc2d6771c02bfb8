"""Capture: a user's module and an example batch become a pure `Program`.

The only file that touches the private tracing interfaces of PyTorch. Forward and backward are traced together and never
differentiated again, so custom `autograd.Function`s and gradients taken inside the forward pass stay what they are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._decomp.decompositions as torch_decompositions
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx import Node

from paceline.errors import CaptureError
from paceline.program import decompositions
from paceline.program.cross_entropy import rewrite_cross_entropies
from paceline.program.fake import fake_mode_for
from paceline.program.loss import add_weight
from paceline.program.program import Input, InputRole, Output, OutputRole, Program
from paceline.program.rematerialize import MARK, forward_calls, mark
from paceline.program.resizing import whole
from paceline.program.side_effects import contained
from paceline.program.tidy import merge_tied_inputs, tidy

Batch = tuple[Any, ...] | Mapping[str, Any]
_MODULE = "module"
_RECOMPUTE = "rematerialize"  # torch reads a key `recompute` of its own
_log = logging.getLogger(__name__)


class LossOf(nn.Module):
    """The user's module, called so that it returns its scalar loss."""

    def __init__(self, module: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self.autocast = autocast

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call the module and take its loss."""
        if self.autocast is None:
            return loss_of(self.module(*args, **kwargs))
        device = next(self.module.parameters()).device.type
        with torch.autocast(device, self.autocast):
            return loss_of(self.module(*args, **kwargs))


class _Traced(LossOf):
    """The same while it is traced; see `program.side_effects`."""

    def __init__(self, module: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__(module, autocast)
        self.numbers: dict[str, tuple[object, object]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with contained(self.module, self.numbers):
            return super().forward(*args, **kwargs)


def loss_of(result: Any) -> Tensor:
    """Return the scalar loss from what a module returned.

    Raises:
        CaptureError: there is no loss, or it is not a floating-point scalar.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.numel() != 1:
        got = (
            f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}"
            if isinstance(loss, Tensor)
            else type(result).__name__
        )
        raise CaptureError(
            f"the module returned {got}; its call must return a scalar floating-point loss, or an object with .loss. "
            "Wrap it in a small nn.Module whose forward(batch) computes the loss (Hugging Face models: pass labels=)."
        )
    return loss.reshape(())


def as_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a batch."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def capture(module: nn.Module, batch: Batch, *, autocast: torch.dtype | None = None) -> Program:
    """Capture the training step of `module` (or its forward pass, in `eval()` mode) on batches shaped like `batch`.

    Args:
        module: called as `module(*batch)` or `module(**batch)`; returns a scalar loss or an object with `.loss`.
        batch: an example of a global batch, a tuple or a dictionary; only shapes, dtypes and non-tensor values matter.
            A tensor may require a gradient, for the forward pass to take; the program returns none for it.
        autocast: run the forward pass under autocast to this dtype.

    Raises:
        CaptureError: the module cannot be traced; the message shows the user's own line.
    """
    args, kwargs = as_call(batch)
    if not module.training:
        args, kwargs = _without_grad(args), _without_grad(kwargs)
    wrapper = _Traced(module, autocast)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_mode_for([*module.parameters(), *batch_leaves(batch).values()]))
            for context in _tracing_contexts(module):
                stack.enter_context(context)
            joint = aot_export_joint_with_descriptors(
                stack, wrapper, args, kwargs, decompositions=decompositions.table()
            )
    except CaptureError:
        raise
    except Exception as error:  # anything may fail inside a user's forward pass: it becomes one error that teaches
        raise CaptureError(_explain(error)) from error
    for name, (before, after) in wrapper.numbers.items():
        _log.warning("the forward pass sets %s from %s to %s: programs keep %s for ever", name, before, after, before)
    return _read(joint.graph_module, module, tuple(batch_leaves(batch)))


def rehearse(
    module: nn.Module, batch: Batch, watching: contextlib.AbstractContextManager[Any], autocast: torch.dtype | None
) -> None:
    """Run the forward pass on tensors without data as `capture` does, to be watched by what is entered last.

    Raises:
        CaptureError: the forward pass fails; the message shows the user's own line.
    """
    wrapper = _Traced(module, autocast)
    try:
        with contextlib.ExitStack() as stack:
            mode = stack.enter_context(fake_mode_for([*module.parameters(), *batch_leaves(batch).values()]))
            for context in _tracing_contexts(module):
                stack.enter_context(context)
            args, kwargs = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, as_call(batch))
            stack.enter_context(watching)
            wrapper(*args, **kwargs)
    except CaptureError:
        raise
    except Exception as error:  # see `capture`
        raise CaptureError(_explain(error)) from error


def batch_leaves(batch: Batch) -> dict[str, Any]:
    """Return the leaves of a batch by name: `0`, `labels`, `inputs.pixels`. Programs name their batch inputs so."""
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(as_call(batch))
    names = []
    for path, _leaf in leaves:
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path[1:]]
        names.append(".".join(keys))
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def _without_grad(values: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, torch.Tensor.detach, values)


def _tracing_contexts(module: nn.Module) -> Iterator[contextlib.AbstractContextManager[Any]]:
    yield warnings.catch_warnings()
    yield _quiet()
    yield fx_traceback.preserve_node_meta()
    # Eager users call backward() outside of autocast; Hugging Face models ask this flag before they call .item().
    yield functorch_config.patch(backward_pass_autocast="off")
    yield mock.patch.object(torch.compiler, "_is_compiling_flag", True)
    marked = _MarkedRegions()
    yield mock.patch.object(torch_checkpoint, "_checkpoint_without_reentrant_generator", marked)
    yield mock.patch.object(torch_checkpoint, "CheckpointFunction", marked)
    of_torch = torch_decompositions._rnn_helper
    yield mock.patch.object(torch_decompositions, "_rnn_helper", partial(decompositions.recurrent_layers, of_torch))
    yield whole()
    yield _module_paths(module)
    if not module.training:
        yield torch.no_grad()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    warnings.simplefilter("ignore")
    yield


class _MarkedRegions:
    """Stands for checkpointing: its operators get the number of their region, and the runtime recomputes them.

    Called, it is the non-reentrant variant; `apply` is the reentrant one, which tracing would turn into a program
    without gradients.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, *_: Any, **__: Any) -> Generator[None]:
        with self._region():
            yield

    def apply(self, function: Any, _preserve_rng_state: bool, *args: Any) -> Any:
        with self._region():
            return function(*args)

    def _region(self) -> contextlib.AbstractContextManager[None]:
        """Mark what is called inside; a region inside of another is a part of it."""
        outer = fx_traceback.current_meta.get("custom", {}).get(_RECOMPUTE)
        return fx_traceback.annotate({_RECOMPUTE: next(self._numbers) if outer is None else outer})


@contextlib.contextmanager
def _module_paths(root: nn.Module) -> Iterator[None]:
    """Mark every operator with the path of the module that calls it."""
    open_contexts: dict[nn.Module, list[contextlib.AbstractContextManager[Any]]] = {}
    handles = []
    for path, module in root.named_modules():
        if path and not isinstance(module, torch.jit.ScriptModule):

            def enter(module: nn.Module, _args: Any, path: str = path) -> None:
                context = fx_traceback.annotate({_MODULE: path})
                context.__enter__()
                open_contexts.setdefault(module, []).append(context)

            def leave(module: nn.Module, _args: Any, _result: Any) -> None:
                open_contexts[module].pop().__exit__(None, None, None)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # Those that an exception left open: hooks that are always called are not, while compiling.
        for context in (context for contexts in reversed(open_contexts.values()) for context in reversed(contexts)):
            context.__exit__(None, None, None)


def _explain(error: Exception) -> str:
    """Say which line of the user's code could not be captured, and what to do."""
    torch_root = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent.parent)
    theirs = [f for f in frames if not f.filename.startswith((torch_root, ours, "<")) and "unittest" not in f.filename]
    where = (
        f"\n  {theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name}\n    {theirs[-1].line}" if theirs else ""
    )
    reason = str(error).strip().splitlines()
    if reason and "entirely functional graph" in reason[0]:
        return (
            "the forward pass changes a tensor in place that the module does not hold as a buffer: the change would be "
            f"lost. Register it with register_buffer. ({reason[0]})"
        )
    return (
        f"the module could not be captured as a program: {type(error).__name__}: {reason[0] if reason else ''}{where}\n"
        "Capture needs a forward pass whose control flow does not depend on tensor values (no .item(), .tolist(), "
        "`if tensor:`). Rewrite that line (torch.where, masks), or run this module without a plan by asking for "
        "module-level wrapping: fallback='ddp' or 'fsdp2' (--set fallback=ddp)."
    )


def _read(graph_module: torch.fx.GraphModule, module: nn.Module, batch_names: tuple[str, ...]) -> Program:
    graph = graph_module.graph
    for node in list(graph.nodes):  # values that are no tensors were traced as constants
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
            graph.erase_node(node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    inputs = [_input(node.meta["desc"], batch_names) for node in placeholders]
    outputs, values = [], []
    for value, description in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(value, Node) and not _is_gradient_of_batch(description):
            outputs.append(_output(description))
            values.append(value)
    order = sorted(range(len(outputs)), key=lambda i: outputs[i].role is not OutputRole.LOSS)
    output.args = (tuple(values[i] for i in order),)
    constants = {
        str(node.target): getattr(graph_module, str(node.target)) for node in graph.nodes if node.op == "get_attr"
    }
    _check_unregistered(constants)
    for node in graph.nodes:
        _keep_our_meta(node)
    program = Program(
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs[i] for i in order),
        constants={name: value.detach() for name, value in constants.items()},
        training=any(item.role is InputRole.TANGENT for item in inputs),
    )
    if module.training and not program.training:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient: there is nothing to train. Call "
            "module.requires_grad_(True), or module.eval() for a program without a backward pass."
        )
    tidy(program.graph)
    merge_tied_inputs(program, module)
    add_weight(program)
    rewrite_cross_entropies(program.graph)
    mark({node: node.meta[MARK] for node in forward_calls(program.graph) if node.meta.get(MARK)})
    return program


def _check_unregistered(constants: Mapping[str, Tensor]) -> None:
    """Refuse what would be a parameter if the module knew of it."""
    for value in constants.values():
        if value.requires_grad:
            raise CaptureError(
                f"the forward pass reads a tensor of shape {tuple(value.shape)} that requires a gradient and is no "
                "parameter of the module: it would not be trained. Register it (nn.Parameter as an attribute, "
                "nn.ParameterList), or detach it."
            )


def _strip(name: str) -> str:
    return name.removeprefix("module.")


def _input(description: Any, batch_names: tuple[str, ...]) -> Input:
    match description:
        case aot.ParamAOTInput():
            return Input(InputRole.PARAMETER, _strip(description.target))
        case aot.BufferAOTInput():
            return Input(InputRole.BUFFER, _strip(description.target))
        case aot.PlainAOTInput():
            return Input(InputRole.BATCH, batch_names[description.idx])
        case aot.TangentAOTInput():
            return Input(InputRole.TANGENT, "loss")
    raise CaptureError(f"the module has an input of a kind that programs do not know: {description}")


def _is_gradient_of_batch(description: Any) -> bool:
    return isinstance(description, aot.GradAOTOutput) and isinstance(description.grad_of, aot.PlainAOTInput)


def _output(description: Any) -> Output:
    match description:
        case aot.GradAOTOutput(grad_of=aot.ParamAOTInput(target=name)):
            return Output(OutputRole.GRADIENT, _strip(name))
        case aot.InputMutationAOTOutput(mutated_input=aot.BufferAOTInput(target=name)):
            return Output(OutputRole.BUFFER, _strip(name))
        case aot.PlainAOTOutput():
            return Output(OutputRole.LOSS, "loss")
        case aot.InputMutationAOTOutput(mutated_input=aot.ParamAOTInput(target=name)):
            raise CaptureError(
                f"the forward pass changes the parameter '{_strip(name)}' in place; only buffers may change."
            )
        case aot.InputMutationAOTOutput():
            raise CaptureError("the forward pass changes its batch in place; clone the tensor before changing it.")
    raise CaptureError(f"the module has an output of a kind that programs do not know: {description}")


def _keep_our_meta(node: Node) -> None:
    custom = node.meta.get("custom") or {}
    kept: dict[str, Any] = {
        "backward": node.meta.get("partitioner_tag") == "is_backward",
        "module": custom.get(_MODULE, ""),
        # The number of its region, until all is rewritten that is.
        MARK: node.meta.get("partitioner_tag") != "is_backward" and custom.get(_RECOMPUTE, False),
        # Sums of gradients carry the number of the call that came last, which they are no part of.
        "sequence": None if node.meta.get("is_gradient_acc") else node.meta.get("seq_nr"),
    }
    if "val" in node.meta:
        kept["val"] = node.meta["val"]
    node.meta = kept


__all__ = ["Batch", "LossOf", "as_call", "batch_leaves", "capture", "loss_of", "rehearse"]
