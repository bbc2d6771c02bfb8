"""Drawings: all of a schedule is in them, and nothing twice."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from paceline.errors import ScheduleError
from paceline.schedule import Account, Edges, Op, Schedule, communicate, make, validate
from paceline.schedule.draw import save_picture, staves, svg
from paceline.schedule.draw.boxes import boxes


def drawn(name: str, ranks: int, micro_batches: int, **options: int) -> tuple[Schedule, Account]:
    plain = make(name, ranks, micro_batches, **options)
    edges = Edges.chain(plain.stages)
    complete = communicate(plain, edges)
    return complete, validate(complete, edges)


def test_the_terminal_shows_a_line_for_each_rank() -> None:
    assert staves(*drawn("1f1b", 3, 3), width=80).plain.splitlines() == [
        "rank 0 F0 F1 F2             B0───    B1───    B2───",
        "rank 1    F0 F1       B0─── F2 B1───    B2───",
        "rank 2       F0 B0─── F1 B1─── F2 B2───",
        "",
        " F forward   B backward  ",
    ]


@pytest.mark.parametrize("name", ["naive", "gpipe", "interleaved", "zb-h1", "zb-v", "pipedream"])
@pytest.mark.parametrize("width", [20, 47, 200])
def test_narrow_terminals_get_all_of_it_in_pieces(name: str, width: int) -> None:
    schedule, account = drawn(name, 3, 12, **({"chunks": 2} if name == "interleaved" else {}))
    text = staves(schedule, account, width)
    *pieces, _ = text.plain.split("\n\n")
    assert all(len(line) <= width for piece in pieces for line in piece.splitlines())
    for rank in range(3):
        line = " ".join(piece.splitlines()[rank].removeprefix(f"rank {rank}") for piece in pieces)
        words = [word.rstrip("─") for word in line.split()]
        assert [word for word in words if word] == [
            b.op.value + b.label for b in boxes(schedule, account) if b.rank == rank
        ]


def test_what_is_too_long_for_a_terminal_is_not_drawn() -> None:
    schedule, account = drawn("naive", 2, 1000)
    assert "too long to draw here: 6000 units of time" in staves(schedule, account, 80).plain


def test_stages_of_a_rank_have_letters() -> None:
    labels = [box.label for box in boxes(*drawn("interleaved", 2, 2, chunks=3)) if box.rank == 0]
    assert labels[:6] == ["0a", "1a", "0b", "1b", "0c", "1c"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "pipedream-2bw"])
def test_an_svg_has_a_box_and_a_tip_for_each_computation(name: str) -> None:
    schedule, account = drawn(name, 3, 5)
    root = ElementTree.fromstring(svg(schedule, account))
    space = {"": "http://www.w3.org/2000/svg"}
    tips = [group.findtext("title", namespaces=space) for group in root.findall("g", space)]
    assert tips == [str(action) for actions in schedule.actions for action in actions if action.op.is_compute]
    updates = sum(action.op is Op.UPDATE for action in schedule.everything())
    assert len(root.findall("path", space)) == updates + 1  # and the legend's
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{{{space['']}}}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x + float(rect.attrib["width"]) <= width and y + float(rect.attrib["height"]) <= height


def test_a_schedule_of_no_time_is_drawn(tmp_path: Path) -> None:
    schedule, _ = drawn("1f1b", 2, 2)
    account = validate(schedule, Edges.chain(2), {(op, stage): 0.0 for op in Op for stage in range(2)})
    for name in ("none.svg", "none.png"):
        save_picture(schedule, account, tmp_path / name)
    assert "rank 1" in staves(schedule, account, 80).plain


def test_pictures_are_written_in_the_form_of_their_suffix(tmp_path: Path) -> None:
    schedule = drawn("zb-v", 2, 4)
    save_picture(*schedule, tmp_path / "new" / "a.svg")
    save_picture(*schedule, tmp_path / "new" / "a.png")
    assert (tmp_path / "new" / "a.svg").read_text() == svg(*schedule)
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ScheduleError, match=r"a.gif is no picture; a schedule is drawn as .svg or .png"):
        save_picture(*schedule, tmp_path / "a.gif")
    with pytest.raises(ScheduleError, match="cannot be written"):
        save_picture(*schedule, tmp_path / "new" / "a.svg" / "b.svg")


def test_without_matplotlib_only_pngs_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    schedule = drawn("1f1b", 2, 2)
    save_picture(*schedule, tmp_path / "a.svg")
    with pytest.raises(ScheduleError, match=r"pip install paceline\[viz\]"):
        save_picture(*schedule, tmp_path / "a.png")
