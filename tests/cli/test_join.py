"""`paceline join`: what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "worker"], "nowhere is no run with servers"),
        ([".", "worker", "--bind", "10.0.0.2"], "--bind is for servers: a worker listens on no interface"),
    ],
)
def test_what_cannot_join_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exchange").mkdir()
    result = CliRunner().invoke(app, ["join", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())
