"""Figures of this machine: measured by all ranks together, once, and then the same for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.placement.costs import Costs
from paceline.placement.machine import Machine
from paceline.placement.redistribute import Collective
from paceline.plan import Mesh, Plan
from paceline.runtime import figures
from paceline.runtime.figures import Figures, costs_of, known_costs
from paceline.runtime.peers import connect, in_process
from paceline.runtime.timing import measured_machine
from tests.ranks import ranks

CPU = torch.device("cpu")


@ranks(2)
def test_ranks_measure_together_and_only_once(rank: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.parse("dp=1,fsdp=2")
    peers = connect(mesh, CPU, compile=False)
    calls: list[str] = []
    measured_links = figures.measured_links
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "measured_links", lambda *given: calls.append("links") or measured_links(*given))
        patch.setattr(figures, "measured_machine", lambda device: calls.append("machine") or _few(device))
        first = costs_of(peers, Plan(mesh), tmp_path)
        assert calls == (["machine", "links"] if rank == 0 else ["links"])
        second = costs_of(peers, Plan(mesh), tmp_path)
        assert calls == (["machine", "links"] if rank == 0 else ["links"])
        without = costs_of(peers, Plan(mesh), None)
    assert without == Costs.default()
    if rank == 0:
        assert first == second
        assert known_costs(CPU, tmp_path) == first
        links = first.machine.links[2]
        assert set(links) == set(Collective)
        for link in links.values():
            assert 0 < link.latency < 1 and 0 < link.per_byte < 1e-6
            assert float(f"{link.latency:.1e}") == link.latency


def _few(device: torch.device) -> Machine:
    return Machine(per_call=1e-6)


def test_what_is_stored_is_read_back_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    kept = Figures(tmp_path)
    assert kept.machine(CPU) is None and kept.links(CPU, "gloo") == {}
    kept.store(CPU, Machine(per_call=2e-6), "gloo", {})
    assert Figures(tmp_path).machine(CPU) == Machine(per_call=2e-6)
    assert known_costs(CPU, tmp_path) == Costs.of_machine(Machine(per_call=2e-6))
    assert known_costs(CPU, None) == Costs.default()
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    (name,) = content["machines"]
    for damage in ({"per_call": -1}, {"products": []}, {"touching": [[1, 2], [0, 1]]}, {"products": "fast"}):
        broken = {"machines": {name: content["machines"][name] | damage}, "links": {}}
        file.write_text(json.dumps(broken))
        assert kept.machine(CPU) is None, damage
    file.write_text(json.dumps({"machines": content["machines"], "links": {f"{name}, shm": {"2": {"all_reduce": 1}}}}))
    assert kept.links(CPU, "shm") == {} and known_costs(CPU, tmp_path).machine == Machine(per_call=2e-6)
    file.write_text("{")
    assert kept.machine(CPU) is None
    kept.store(CPU, Machine(), "shm", {})
    assert kept.machine(CPU) == Machine()


def test_rates_have_two_digits_and_grow_sizes() -> None:
    torch.set_num_threads(1)
    machine = measured_machine(CPU)
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    for curve in (machine.products, machine.half_products, machine.touching):
        sizes = [size for size, _ in curve.points]
        assert sizes == sorted(sizes)
        assert all(float(f"{rate:.1e}") == rate > 0 for _, rate in curve.points)


def test_ranks_of_one_process_have_nothing_to_measure(tmp_path: Path) -> None:
    mesh = Mesh.parse("dp=2")
    assert costs_of(in_process(mesh, [CPU]), Plan(mesh), tmp_path) == Costs.default()
    assert not list(tmp_path.iterdir())
