"""What a pipeline cannot do is said before anything runs, and with what could be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import PacelineError, PlanError, ScheduleError
from paceline.schedule import make
from paceline.schedule.files import save
from tests.runtime.pipeline.towers import WIDTH, batch, pipelined, tower


@pytest.mark.parametrize(
    ("mesh", "flow", "kind", "message"),
    [
        ("pp=4", {"schedule": "interleaved", "chunks": 40}, PlanError, r"160 stages.*at most \d+"),
        ("pp=2", {"schedule": "1f2b"}, ScheduleError, r"1f2b.*Did you mean '1f1b'"),
        ("pp=2", {"schedule": "interleaved", "chunks": 1}, ScheduleError, r"chunks"),
        ("pp=2", {"boundaries": ("layers.44",)}, PlanError, r"no operator.*'layers\.44'.*Did you mean 'layers\.4'"),
        ("pp=2", {"boundaries": ("layers.1", "layers.3")}, PlanError, r"2 stages have 1 boundaries, and 2 were given"),
        ("pp=2", {"recompute": (2,)}, PlanError, r"recompute names the stages \[2\], but there are 2: 0 to 1"),
        ("pp=2", {"wire": "int4"}, PlanError, r"wire is 'int4'; choose one of exact, bfloat16, int8"),
        ("pp=2", {"micro_batches": 0}, PlanError, r"micro_batches is 0"),
    ],
)
def test_what_does_not_fit(mesh: str, flow: dict[str, Any], kind: type[PacelineError], message: str) -> None:
    with pytest.raises(kind, match=rf"(?s){message}"):
        pipelined(tower(), batch(), mesh, **flow)


def written(file: Path, ranks: int, micro_batches: int) -> str:
    save(make("1f1b", ranks, micro_batches), file)
    return str(file)


def test_a_schedule_in_a_file_runs_where_it_fits(tmp_path: Path) -> None:
    module, given = tower(), batch(7)
    file = written(tmp_path / "own.json", 2, 3)
    found = pipelined(module, given, "pp=2", schedule=file, micro_batches=3)
    assert found(*given).item() == pytest.approx(module(*given).item(), rel=1e-12)
    with pytest.raises(PlanError, match=r"is for 2 pipeline ranks, but the mesh has pp=4; choose pp=2"):
        pipelined(module, given, "pp=4", schedule=file, micro_batches=3)
    other = pipelined(module, given, "pp=2", schedule=file, micro_batches=4)
    with pytest.raises(ScheduleError, match=r"own\.json is for 3 micro-batches, not 4"):
        other(*given)


def test_a_broken_schedule_in_a_file_names_the_action(tmp_path: Path) -> None:
    file = Path(written(tmp_path / "own.json", 2, 2))
    values = json.loads(file.read_text())
    values["actions"][1].remove("B 1 1")
    file.write_text(json.dumps(values))
    with pytest.raises(ScheduleError, match="rank 1 lacks the action B stage 1 micro-batch 1"):
        found = pipelined(tower(), batch(), "pp=2", schedule=str(file), micro_batches=2)
        found(*batch())


def test_a_batch_smaller_than_its_micro_batches_flows_in_fewer() -> None:
    module = tower()
    found = pipelined(module, batch(), "pp=2", micro_batches=6)
    small = batch(2, ignored=())
    assert len(found.steps(*small)) == 2
    assert found(*small).item() == pytest.approx(module(*small).item(), rel=1e-12)


class Unreadable(nn.Module):
    """Its loss is no mean: nobody can say what its micro-batches weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))).square().sum().sqrt()


def test_a_loss_that_is_no_mean_takes_one_micro_batch() -> None:
    given = (torch.randn(4, WIDTH, dtype=torch.float64),)
    module = Unreadable().double()
    found = pipelined(module, given, "pp=2", micro_batches=2)
    with pytest.raises(PlanError, match=r"not a mean that Paceline can read.*one micro-batch.*loss_weight: equal"):
        found(*given)
    alone = pipelined(module, given, "pp=2", micro_batches=1)
    assert alone(*given).item() == pytest.approx(module(*given).item(), rel=1e-12)
    with pytest.raises(PlanError, match="not a mean"):
        _ = alone.last_weight


def test_samples_that_no_part_would_take_are_refused() -> None:
    given = batch(6)
    found = pipelined(tower(), given, "dp=2,pp=2")
    with pytest.raises(PlanError, match=r"a batch of 7 does not divide over 2 ranks .*Use a batch of 6 or 8"):
        found(*batch(7))
    with pytest.raises(PlanError, match="a batch of 1 does not divide"):
        pipelined(tower(), batch(1, ignored=()), "dp=2,pp=2")
