"""`paceline bench steps`: predictions are composed of times that were given, and the section of the page is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.bench.steps import foreign
from paceline.bench.steps.jobs import undisturbed
from paceline.bench.steps.main import Settings, row_of, summary, tensor_peak
from paceline.bench.steps.table import BEGIN, END, section, write_section
from paceline.bench.steps.workloads import Model, workload_of
from paceline.bench.workloads import Scale
from paceline.errors import PlanError, RecipeError
from paceline.placement.costs import Costs
from paceline.plan import Mesh, PipelinePlan, Plan
from paceline.runtime.link_times import MeasuredCollectives
from paceline.runtime.module import ParallelModule, parallelize
from paceline.runtime.operator_calls import is_timed, key_of
from paceline.simulator.placed.measured import graphs_of, simulated, times_here
from paceline.simulator.placed.memory import Held, Memory, Storage
from paceline.simulator.placed.step import Circumstances

CPU = [torch.device("cpu")]
SECOND = 1.0


def placed(mesh: str) -> tuple[ParallelModule, dict[str, Any]]:
    module, batch = workload_of(Model.GPT, Scale.TINY).build()
    plan = Plan(Mesh.parse(mesh), pipeline=PipelinePlan(micro_batches=2))
    return parallelize(module, batch, plan, devices=CPU), batch


def turn(step: float, others: float = 0.0) -> dict[str, float]:
    return {"step": step, "forward": 0.4 * step, "backward": 0.5 * step, "update": 0.1 * step, "others": others}


def predicted(step: float) -> dict[str, Any]:
    phases = {"forward": 0.5 * step, "backward": 0.4 * step, "norm": 0.04 * step, "update": 0.06 * step}
    return {"step_s": step, "phases": phases, "exposed_s": {}, "peak_bytes": 90 << 20, "peak_at": "backward blocks.1"}


def test_a_step_takes_what_its_calls_take() -> None:
    module, batch = placed("serial")
    graphs = graphs_of(module, batch, Circumstances())
    timed = {key_of(node): SECOND for graph in graphs for node in graph.nodes if is_timed(node)}
    times = times_here(timed, MeasuredCollectives({}), Costs.default(), module.peers)
    found = simulated(module, batch, times, Circumstances())
    forward, backward = graphs[:2]
    for name, graph in (("forward", forward), ("backward", backward)):
        assert found.phases[name] == pytest.approx(sum(is_timed(node) for node in graph.nodes) * SECOND)
    assert not times.operators.missing
    assert found.peak.bytes > 0


def test_collectives_and_messages_are_those_that_were_given() -> None:
    for mesh, axis in (("dp=2", "dp"), ("pp=2", "pp")):
        module, batch = placed(mesh)
        points = {kind: ((1.0, 7.0), (2.0, 7.0)) for kind in ("all_reduce", "send")}
        times = times_here({}, MeasuredCollectives({axis: points}), Costs.default(), module.peers)
        free = times_here(
            {},
            MeasuredCollectives({axis: {kind: ((1.0, 0.0), (2.0, 0.0)) for kind in points}}),
            Costs.default(),
            module.peers,
        )
        slow, quick = (simulated(module, batch, each, Circumstances()).step_s for each in (times, free))
        assert slow - quick >= 7.0


def test_a_module_without_a_program_is_refused() -> None:
    with pytest.raises(PlanError, match="fallback"):
        graphs_of(nn.Linear(2, 2), {}, Circumstances())


def test_turns_in_which_others_ran_are_left_out() -> None:
    rounds = [turn(1.0), turn(9.0, 0.9), turn(1.2), turn(1.1)]
    assert [each["step"] for each in undisturbed(rounds, 0.1, 3)] == [1.0, 1.2, 1.1]
    noisy = [turn(float(number), 0.2 * number) for number in range(5)]
    assert [each["step"] for each in undisturbed(noisy, 0.1, 2)] == [0.0, 1.0]


def test_errors_are_of_the_prediction_over_the_measurement() -> None:
    rows = [
        row_of(Model.GPT, "serial", [turn(1.0), turn(1.0)], predicted(1.1), 100 << 20),
        row_of(Model.GPT, "dp=2", [turn(1.0)], predicted(0.8), None),
    ]
    assert [row["step_error"] for row in rows] == pytest.approx([0.1, -0.2])
    assert rows[0]["memory_error"] == pytest.approx(-0.1) and rows[1]["memory_error"] is None
    assert rows[0]["parts"]["update"] == pytest.approx({"measured_s": 0.1, "predicted_s": 0.11})
    found = summary(rows)
    assert found["step"]["all"] == pytest.approx({"mape": 0.15, "median": 0.15, "worst": -0.2, "rows": 2})
    assert found["memory"]["dp=2"] == {} and found["memory"]["all"]["rows"] == 1


def result() -> dict[str, Any]:
    rows = [row_of(Model.GPT, "serial", [turn(0.1)], predicted(0.11), 100 << 20)]
    machine = {"cores": 2, "processor": "x", "torch": "2", "backend": {"1": "-", "2": "shared memory"}}
    return {
        "rows": rows,
        "settings": {"rounds": 1, "steps": 1, "micro_batches": 4},
        "machine": machine,
        **summary(rows),
    }


def test_the_section_of_a_page_is_written_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_section(page, result())
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| gpt | `serial` | 100.0 | 110.0 | +10.0% | 100 | 90 | -10.0% | backward blocks.1 |" in text
    assert len(list(section(result()))) == 13
    page.write_text("no markers")
    with pytest.raises(RecipeError, match="begin: paceline bench steps"):
        write_section(page, result())


def test_memory_is_that_of_tensors_without_what_a_process_holds_beside() -> None:
    assert tensor_peak(100, {"step_bytes": 170, "held_private_bytes": 120, "start_bytes": 0, "held_bytes": 130}) == 150


def test_room_that_ranks_share_stays_with_them() -> None:
    memory = Memory()
    room, kept = memory.hold(Storage(50, Held.GRADIENTS)), memory.hold(Storage(10, Held.PARAMETERS))
    memory.drop(room)
    memory.hold(Storage(60, Held.ACTIVATIONS))
    assert memory.peak.bytes == 70 and memory.peak.resident == 120
    memory.drop(kept)
    assert memory.peak.most == {Held.GRADIENTS: 50, Held.PARAMETERS: 10, Held.ACTIVATIONS: 60}


def test_settings_are_read_and_meshes_are_put_together_by_size() -> None:
    settings = Settings.read({"models": "gpt,bert", "meshes": "dp=2;serial;tp=2", "rounds": "2", "memory": "no"})
    assert settings.models == (Model.GPT, Model.BERT) and not settings.memory
    assert settings.by_ranks() == {1: ("serial",), 2: ("dp=2", "tp=2")}
    with pytest.raises(RecipeError, match="unknown setting 'mesh'"):
        Settings.read({"mesh": "dp=2"})


def test_who_else_is_at_work_is_told() -> None:
    began = foreign.now()
    assert foreign.others_since(began) >= 0.0
