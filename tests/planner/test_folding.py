"""Names of repeated blocks: nothing is lost, nothing is told twice, and a full grid is one name."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.planner.folding import boxes, fold
from paceline.program.rematerialize import block_of

INDICES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30)


def names_in(folded: str) -> set[str]:
    """All names that a folded one stands for."""
    choices = []
    for part in re.findall(r"\{[^}]*\}|[^.]+", folded):
        runs = [run.split("..") for run in part.strip("{}").split(",")] if part.startswith("{") else []
        choices.append([str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)] or [part])
    return {".".join(parts) for parts in itertools.product(*choices)}


def test_blocks_are_told_once() -> None:
    names = [f"h.{i}.{part}.weight" for i in range(12) for part in ("qkv", "out")]
    folded = fold(["wte.weight", *names, "norm.weight"], name=str)
    assert [group.name for group in folded] == [
        "wte.weight",
        "h.{0..11}.qkv.weight",
        "h.{0..11}.out.weight",
        "norm.weight",
    ]
    assert folded[1].items == tuple(names[::2])


def test_blocks_that_differ_are_told_apart() -> None:
    sizes = {"h.0": 1, "h.1": 2, "h.2": 2, "h.3": 1, "h.4": 2}
    assert [group.name for group in fold(sizes, name=str, alike=sizes.get)] == ["h.{0,3}", "h.{1,2,4}"]


def test_several_of_one_name_are_counted() -> None:
    folded = fold(["h.0", "h.0", "h.1", "h.1", "h.2"], name=str)
    assert [(group.name, len(group.items)) for group in folded] == [("h.{0,1}", 4), ("h.2", 1)]


def test_what_has_no_number_or_no_name_stays() -> None:
    assert [group.name for group in fold(["", "layer1.x", "layer2.x", "a.01"], name=str)] == [
        "",
        "layer1.x",
        "layer2.x",
        "a.01",
    ]


@given(INDICES)
def test_groups_are_the_items_once_each(points: list[tuple[int, int, int]]) -> None:
    names = [f"a.{i}.b.{j}.{k}" for i, j, k in points]
    folded = fold(names, name=str)
    assert sorted(item for group in folded for item in group.items) == sorted(names)
    for group in folded:
        assert names_in(group.name) == set(group.items)
        assert len(group.items) % len(set(group.items)) == 0
    firsts = [names.index(group.first) for group in folded]
    assert firsts == sorted(firsts)


@given(st.tuples(*(st.sets(st.integers(0, 9), min_size=1, max_size=4) for _ in range(3))))
def test_a_grid_is_one_box(sets: tuple[set[int], ...]) -> None:
    assert boxes(list(itertools.product(*sets))) == [tuple(map(frozenset, sets))]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blocks.3.attention.qkv.weight", "blocks.3"),
        ("model.layers.10.experts.4.up", "model.layers.10"),
        ("head.weight", None),
        ("0.weight", None),
        ("", None),
    ],
)
def test_the_outermost_numbered_part_is_the_block(name: str, block: str | None) -> None:
    assert block_of(name) == block
