"""A stage that dies in the middle of a step ends all others within seconds, and is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import RankFailed
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.job.launch import launch
from paceline.runtime.job.rendezvous import join
from paceline.runtime.module import parallelize
from paceline.runtime.pipeline.module import PipelinedModule
from paceline.runtime.pipeline.walk import Walk
from paceline.schedule import Action, Op
from tests.runtime.pipeline.towers import batch, tower

_PATIENCE_S = 30.0  # far below every time limit of a backend, far above what it takes


def die_on_a_stage(arguments: dict[str, Any]) -> None:
    """Train; the rank of stage 1 is killed before its second backward pass, while others wait for it."""
    torch.set_num_threads(1)
    with join(backend=arguments["backend"]):
        given = batch(6)
        plan = Plan(Mesh.parse("pp=3"), pipeline=PipelinePlan("1f1b", 6))
        found = parallelize(tower(layers=3), given, plan)
        assert isinstance(found, PipelinedModule)

        def watch(walk: Walk, action: Action, began: float, ended: float) -> None:
            if action == Action(Op.BACKWARD, 1, 1):
                Path(arguments["when"]).write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        found.observe = watch
        for _ in range(3):
            found(*given).backward()


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_it_is_named_and_all_others_end(backend: str, tmp_path: Path) -> None:
    arguments = {"backend": backend, "when": str(tmp_path / "when")}
    words = r"rank 1 of 3 \(stage 1 of the pipeline\) was ended by SIGKILL"
    with pytest.raises(RankFailed, match=words):
        launch(f"{__name__}:die_on_a_stage", arguments, 3, log_dir=tmp_path, timeout_s=120)
    assert time.time() - float((tmp_path / "when").read_text()) < _PATIENCE_S
