"""Optimizers and learning-rate schedules by name, from `torch.optim`.

Works on any module's parameters, whole or local shards, and knows nothing of meshes: every optimizer here must update
each element by itself, which is what makes it exact on shards.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import RecipeError, nearest

# These look at a whole matrix, or call the loss again; on a shard they would compute something else.
_NOT_ELEMENTWISE = {
    "LBFGS": "it evaluates the loss several times a step and needs all parameters in one place",
    "Muon": "it orthogonalises whole matrices, which a shard is not",
    "Adafactor": "it factors whole matrices, which a shard is not",
    "SparseAdam": "it needs sparse gradients",
}
_SCHEDULES = ("constant", "linear", "cosine")


def build_optimizer(
    module: nn.Module, name: str, options: Mapping[str, Any] | None = None, *, decay_vectors: bool = False
) -> Optimizer:
    """Return the `torch.optim` class `name` over the parameters of `module` that require a gradient.

    Weight decay is left off parameters of at most one dimension (biases, norms) unless `decay_vectors`. The fused
    implementation is used where there is one, if `options` chooses none.

    Raises:
        RecipeError: there is no such optimizer, it cannot work on shards, or an option is unknown or refused.
    """
    options = dict(options or {})
    factory = _optimizer_class(name)
    allowed = [parameter for parameter in inspect.signature(factory).parameters if parameter not in ("self", "params")]
    _check_options(name, options, allowed)
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise RecipeError(f"there is nothing for {name} to train: no parameter of the module requires a gradient.")

    groups: list[dict[str, Any]] = [{"params": parameters}]
    if "weight_decay" in allowed and not decay_vectors:
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups = [{"params": matrices}] if matrices else []
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    if "fused" in allowed and "foreach" not in options and "fused" not in options:
        options["fused"] = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    try:
        return factory(groups, **options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"torch.optim.{name} refuses its options {options}: {error}.") from error


def states_per_element(name: str, options: Mapping[str, Any] | None = None) -> int:
    """Return how many numbers an optimizer keeps for each element of a parameter: 2 for Adam, found by a step.

    Raises:
        RecipeError: see `build_optimizer`.
    """
    trifle = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(trifle, name, options)
    trifle.weight.grad = torch.ones_like(trifle.weight)
    optimizer.step()
    kept = optimizer.state[trifle.weight].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == trifle.weight.shape for value in kept)


def _optimizer_class(name: str) -> Callable[..., Optimizer]:
    known = sorted(
        key
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    )
    usable = [key for key in known if key not in _NOT_ELEMENTWISE]
    if name in _NOT_ELEMENTWISE:
        raise RecipeError(
            f"optimizer '{name}' cannot be used: {_NOT_ELEMENTWISE[name]}. Choose one of {', '.join(usable)}."
        )
    if name not in known:
        raise RecipeError(
            f"there is no optimizer '{name}' in torch.optim; known: {', '.join(usable)}.{nearest(name, usable)}"
        )
    factory: Callable[..., Optimizer] = getattr(torch.optim, name)
    return factory


def build_schedule(
    optimizer: Optimizer,
    name: str,
    *,
    steps: int,
    warmup: int = 0,
    floor: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Return a learning-rate schedule that is stepped once after every optimizer step.

    Args:
        optimizer: its learning rates are the peak.
        name: `constant`, `linear` or `cosine`, or the name of a class in `torch.optim.lr_scheduler`.
        steps: length of the run in optimizer steps; `linear` and `cosine` end there.
        warmup: steps over which the rate first rises linearly from peak/warmup to the peak.
        floor: where `linear` and `cosine` end, as a fraction of the peak.
        options: arguments for a class of `torch.optim.lr_scheduler`; the three by name take none.

    Raises:
        RecipeError: there is no such schedule, or a setting is refused.
    """
    factor = own_schedule(name, steps=steps, warmup=warmup, floor=floor, options=options)
    if factor is not None:
        return lr_scheduler.LambdaLR(optimizer, factor)
    return _torch_schedule(optimizer, name, warmup, dict(options or {}))


def own_schedule(
    name: str, *, steps: int, warmup: int = 0, floor: float = 0.0, options: Mapping[str, Any] | None = None
) -> Callable[[int], float] | None:
    """Return what gives the factor on the peak rate for a step (from 0) of `constant`, `linear` or `cosine`.

    See `build_schedule`; None: it is a class of `torch.optim.lr_scheduler`.

    Raises:
        RecipeError: a setting is refused.
    """
    if not 0 <= warmup <= steps:
        raise RecipeError(f"warmup is {warmup} steps in a run of {steps}; it is from 0 to the length of the run.")
    if not 0 <= floor <= 1:
        raise RecipeError(f"the floor of the learning rate is {floor}; it is a fraction of the peak, from 0 to 1.")
    if name not in _SCHEDULES:
        return None
    if options:
        raise RecipeError(f"schedule '{name}' takes warmup and floor only, not {', '.join(options)}.")
    decay = {"constant": lambda _: 1.0, "linear": lambda t: 1 - (1 - floor) * t, "cosine": _cosine(floor)}[name]
    return lambda step: warmed_up(step, steps, warmup, decay)


def rates_of(optimizer: Optimizer, schedule: LRScheduler, steps: int) -> list[float]:
    """Return the learning rate of the first parameter group in each of `steps` steps; both objects are used up.

    Raises:
        RecipeError: the schedule changes more than the learning rate.
    """
    (group, *_) = optimizer.param_groups
    others = {key: group[key] for key in ("momentum", "betas") if key in group}
    found = []
    for _ in range(steps):
        changed = [key for key, value in others.items() if group[key] != value]
        if changed:
            raise RecipeError(
                f"the schedule {type(schedule).__name__} changes {changed[0]} too, and only the learning rate can "
                "change here: add cycle_momentum: false."
            )
        found.append(float(group["lr"]))
        optimizer.step()
        schedule.step()
    return found


def warmed_up(step: int, steps: int, warmup: int, decay: Callable[[float], float]) -> float:
    """Return the factor on the peak rate for `step` (from 0): a linear rise, then `decay` of the part that is past."""
    if step < warmup:
        return (step + 1) / warmup
    return decay(min(1.0, (step - warmup) / max(1, steps - warmup)))


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """Return what changes in a schedule, as plain values that JSON gives back just as they were.

    What plain values cannot hold (functions, tables by number) is set by the recipe, and does not change.
    """
    state: dict[str, Any] = _plain_part(schedule.state_dict())
    return state


def load_schedule_state(schedule: LRScheduler, state: dict[str, Any]) -> None:
    """Go on from what `schedule_state` returned, with the learning rate of that moment."""
    schedule.load_state_dict(copy.deepcopy(state))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _plain_part(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_part(item) for key, item in value.items() if isinstance(key, str) and _is_plain(item)}
    return [_plain_part(item) for item in value] if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _cosine(floor: float) -> Callable[[float], float]:
    return lambda t: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * t))


def _torch_schedule(optimizer: Optimizer, name: str, warmup: int, options: dict[str, Any]) -> LRScheduler:
    known = sorted(_torch_schedules())
    if name not in known:
        names = [*_SCHEDULES, *known]
        raise RecipeError(f"there is no schedule '{name}'; known: {', '.join(names)}.{nearest(name, names)}")
    factory: Callable[..., LRScheduler] = getattr(lr_scheduler, name)
    allowed = [key for key in inspect.signature(factory).parameters if key not in ("self", "optimizer")]
    _check_options(name, options, allowed)
    try:
        schedule = factory(optimizer, **options)
        if warmup == 0:
            return schedule
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(1, warmup - 1))
        return lr_scheduler.SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
    except (TypeError, ValueError) as error:
        raise RecipeError(f"torch.optim.lr_scheduler.{name} refuses its options {options}: {error}.") from error


def _torch_schedules() -> Iterator[str]:
    """Classes that need no measurement, no function and no other schedule as an argument."""
    for key, value in vars(lr_scheduler).items():
        composed = ("ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
        if (
            isinstance(value, type)
            and issubclass(value, LRScheduler)
            and not key.startswith("_")
            and key not in composed
            and value is not LRScheduler
        ):
            yield key


def _check_options(name: str, options: Mapping[str, Any], allowed: list[str]) -> None:
    for key in options:
        if key not in allowed:
            raise RecipeError(f"{name} has no option '{key}'; it has {', '.join(allowed)}.{nearest(key, allowed)}")
