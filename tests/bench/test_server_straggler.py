"""What a slow worker costs is measured and shown; who is slow is agreed on."""

import time

import pytest
import yaml
from rich.console import Console

from paceline.bench.server import straggler
from paceline.bench.server.straggler import MODES, Settings
from paceline.bench.server.straggler_model import Naps, build
from paceline.errors import RecipeError
from paceline.train.recipe import load_recipe


def test_everybody_has_a_turn_and_is_shown(monkeypatch):
    turns = []
    monkeypatch.setattr(straggler, "_turn", lambda mode, slow, settings: turns.append((mode, slow)) or 100.0 / slow)
    found = straggler.run({"straggler_rounds": "2", "straggler_workers": "4"})
    assert sorted(turns) == sorted([(mode, slow) for mode in MODES for slow in (1.0, 3.0)] * 2)
    assert found["straggler"]["best"] == pytest.approx(10 / 12)
    shares = [mode["of_even"]["median"] for mode in found["straggler"]["modes"].values()]
    assert shares == [pytest.approx(1 / 3)] * len(MODES)
    console = Console(width=120, record=True)
    straggler.show(console, found)
    assert "ssp(4)" in (text := console.export_text()) and "at best 0.83" in text
    with pytest.raises(RecipeError, match="Did you mean 'straggler_steps'"):
        straggler.run({"straggler_step": "3"})


@pytest.mark.parametrize("mode", MODES)
def test_its_recipes_are_recipes(tmp_path, mode):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(straggler._recipe(mode, 3.0, Settings(), str(tmp_path))))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert str(recipe.server.dense_consistency) == MODES[mode][0] and recipe.server.tasks_of_a_step % 3 == 0
    module, batch = build()
    assert module(**batch).item() == 0


def test_the_first_to_read_is_slow_and_nobody_else(tmp_path, monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    first, second = (Naps(9, 0.5, 3.0, str(tmp_path)) for _ in range(2))
    for dataset in (first, second, first, second):
        assert len(dataset.__getitems__([1, 2])) == 2
    assert naps == [3.0, 1.0, 3.0, 1.0] and first[4]["x"].shape == (64,) and len(second) == 9
