"""Optimizers of a recipe as rules of servers: the names and options of `torch.optim`, and two that it lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import ExchangeError, RecipeError, nearest
from paceline.exchange.job import Rule
from paceline.exchange.table.rules import rule_of as update_rule

_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "SGD": ("lr", "momentum", "nesterov", "weight_decay"),
    "Adagrad": ("lr", "eps", "initial_accumulator_value", "weight_decay"),
    "RowwiseAdagrad": ("lr", "eps", "initial_accumulator_value"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "FTRL": ("lr", "beta", "l1", "l2"),
}
ONLY_HERE: Final = ("FTRL", "RowwiseAdagrad")
"""Names that `torch.optim` does not have."""
_OTHERWISE: Final[Mapping[str, str]] = {"RowwiseAdagrad": "rowwise_adagrad", "AdamW": "adam"}


def rule_of(name: str, options: Mapping[str, Any], *, decays: bool = True) -> Rule:
    """Return the rule of an optimizer.

    Args:
        name: of a class of `torch.optim`, or one of `ONLY_HERE`.
        options: its arguments.
        decays: whether weight decay applies to the parameter.

    Raises:
        RecipeError: servers have no such rule, it has no such option, or a number is out of its range.
    """
    if name not in _OPTIONS:
        raise RecipeError(
            f"servers have no rule '{name}'; optimizer.name is one of {', '.join(_OPTIONS)} where parameters are on "
            f"servers.{nearest(name, _OPTIONS)}"
        )
    allowed = _OPTIONS[name]
    given: dict[str, float] = {"weight_decay": 0.01, "decoupled_weight_decay": 1.0} if name == "AdamW" else {}
    for key, value in options.items():
        if key not in allowed:
            raise RecipeError(
                f"{name} on servers has no option '{key}'; it has {', '.join(allowed)}.{nearest(key, allowed)}"
            )
        given |= _numbers(name, key, value)
    if not decays:
        given.pop("weight_decay", None)
    rule = Rule(_OTHERWISE.get(name, name.lower()), given)
    if name == "SGD":
        rule = Rule("momentum", given) if given.get("momentum") else Rule("sgd", _without_momentum(given))
    try:
        update_rule(rule)
    except ExchangeError as error:
        raise RecipeError(f"{name} on servers: {error}") from error
    return rule


def _without_momentum(options: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in options.items() if key in ("lr", "weight_decay")}


def _numbers(name: str, key: str, value: Any) -> dict[str, float]:
    """Return what an option of `torch.optim` is for a rule."""
    values = value if isinstance(value, list | tuple) else [value]
    are_numbers = all(isinstance(item, bool | int | float) and math.isfinite(item) for item in values)
    if not are_numbers or len(values) != (2 if key == "betas" else 1):
        wanted = "two numbers" if key == "betas" else "a number"
        raise RecipeError(f"{name} on servers: the option '{key}' is {value!r}; it is {wanted}.")
    if key == "betas":
        return {"beta1": float(values[0]), "beta2": float(values[1])}
    return {key: float(values[0])}
