"""How numbers and names read."""

from __future__ import annotations

import pytest

from paceline.planner import words


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (5_242_880, "5.24 MB")],
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert words.size(count) == text


def test_alike_things_are_counted() -> None:
    assert words.sizes([2048]) == "2.05 kB"
    assert words.sizes([2048] * 3) == "3 x 2.05 kB"


def test_long_names_are_broken_behind_dots_and_never_inside_of_braces() -> None:
    name = "model.layers.{0..11}.self_attn.q_proj.weight (mm) grad"
    assert words.broken(name, 24) == "model.layers.{0..11}.\n  self_attn.q_proj.\n  weight (mm) grad"
    assert words.broken("short", 24) == "short"
    assert words.broken("a.b", 1) == "a.\n  b"


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("native_layer_norm", "layer_norm"),
        ("batch_norm_apply", "batch_norm"),
        ("_log_softmax", "log_softmax"),
        ("nll_loss_forward", "nll_loss"),
        ("max_pool2d_with_indices", "max_pool2d"),
        ("addmm", "addmm"),
    ],
)
def test_operators_go_by_the_names_that_users_know(operator: str, text: str) -> None:
    assert words.operator(operator) == text


def test_times_and_rates() -> None:
    assert (words.time(0.00123), words.time(1.5)) == ("1.23 ms", "1.5 s")
    assert (words.rate(2, 0.5), words.rate(4321, 0.5), words.rate(1, 0.0)) == ("4", "8642", "inf")
