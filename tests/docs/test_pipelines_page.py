"""docs/pipelines.md: its drawings are what its own commands make, and its figures those of the validator."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.schedule import Edges, Kind, communicate, make, validate
from paceline.schedule.files import from_text, to_text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
DRAWINGS = re.findall(r"^paceline (schedule .*) -o (docs/images/schedules/.*\.svg)$", PAGE, re.M)


@pytest.mark.parametrize(("command", "image"), [pytest.param(*pair, id=Path(pair[1]).stem) for pair in DRAWINGS])
def test_drawings_are_made_by_the_command_below_them(command: str, image: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*shlex.split(command), "-o", str(tmp_path / "new.svg")])
    assert result.exit_code == 0, result.output
    assert (ROOT / image).read_text(encoding="utf-8") == (tmp_path / "new.svg").read_text(encoding="utf-8")
    assert f"({image.removeprefix('docs/')})" in PAGE


def test_every_kind_has_its_section_and_drawing() -> None:
    kinds = [kind.value for kind in Kind]
    assert [Path(image).stem for _, image in DRAWINGS] == kinds
    assert sorted(path.stem for path in (ROOT / "docs/images/schedules").iterdir()) == sorted(kinds)
    assert [title for title in re.findall(r"^## (.*)$", PAGE, re.M) if title in kinds] == kinds


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.value)
def test_the_table_says_what_the_validator_does(kind: Kind) -> None:
    chunks = 2 if kind is Kind.INTERLEAVED else 1
    schedule = make(kind.value, 4, 8, chunks=chunks, batches=10 if kind.is_asynchronous else 1)
    edges = Edges.chain(schedule.stages)
    account = validate(communicate(schedule, edges), edges)
    per_rank = schedule.stages // schedule.ranks
    cells = [
        f"{account.bubble:.1%}",
        ", ".join(f"{peak / per_rank:g}" for peak in account.rank_peaks),
        ", ".join(str(account.stage_versions[stage]) for stage in range(4)),
        str(account.messages),
    ]
    (row,) = re.findall(rf"^\| \[`{re.escape(kind.value)}`\].* \|$", PAGE, re.M)
    assert row.strip("| ").split(" | ")[2:] == cells


def test_the_file_on_the_page_is_1f1b() -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)
    assert from_text(text) == make("1f1b", 2, 2) and text == to_text(make("1f1b", 2, 2))
