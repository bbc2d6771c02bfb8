"""A stage that dies in the middle of a step is named, and all others end, by no time limit of any backend."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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

_PATIENCE_S = 600.0  # far below every time limit of a backend, far above what the busiest machine needs


def die_on_a_stage(backend: str) -> None:
    """Train; the rank of stage 1 is killed before its second backward pass, while others wait for it."""
    torch.set_num_threads(1)
    with join(backend=backend):
        given = batch(6)
        plan = Plan(Mesh.parse("pp=3"), pipeline=PipelinePlan("1f1b", 6))
        found = parallelize(tower(layers=3), given, plan)
        assert isinstance(found, PipelinedModule)

        def watch(walk: Walk, action: Action, began: float, ended: float) -> None:
            if action == Action(Op.BACKWARD, 1, 1):
                os.kill(os.getpid(), signal.SIGKILL)

        found.observe = watch
        for _ in range(3):
            found(*given).backward()


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_it_is_named_and_all_others_end(backend: str, tmp_path: Path) -> None:
    words = r"rank 1 of 3 \(stage 1 of the pipeline\) was ended by SIGKILL"
    with pytest.raises(RankFailed, match=words):
        launch(f"{__name__}:die_on_a_stage", backend, 3, log_dir=tmp_path, timeout_s=_PATIENCE_S)
