from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import FingerprintError
from paceline.program.fingerprint import fingerprint, fingerprint_or_raise
from paceline.program.sources import installed_distributions, own_sources_hash

SOURCE = Path(__file__).parents[2] / "src"
SCALE = 0.5
TABLE = {"a": [1.0, 2.0]}
UNUSED_CLOCK = 0.0


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    """Paceline's own files and what is installed are read once: no test here changes them."""
    with pytest.MonkeyPatch.context() as patch:
        for read in (own_sources_hash, installed_distributions):
            patch.setattr(f"paceline.program.fingerprint.{read.__name__}", cache(read))
        yield


def helper(x: Tensor) -> Tensor:
    return x * SCALE * TABLE["a"][0] + float(os.environ.get("MODEL_SHIFT", 0))


def other_helper(x: Tensor) -> Tensor:
    return x * SCALE


class Model(nn.Module):
    kind = "plain"

    def __init__(self, width: int = 4, p: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(p)
        self.constant = torch.arange(4.0)
        self.options = {"names": {"x", "y", "z"}, "nested": [(1, 2), {"k": None}]}
        self.activation: Callable[[Tensor], Tensor] = lambda x: F.gelu(x) * 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(helper(self.drop(self.activation(self.norm(self.layers(x))))) + self.constant, y)


def example(rows: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 4, dtype=dtype), torch.zeros(rows, 4)


def key(model: nn.Module | None = None, batch: Any = None, **extra: Any) -> str:
    found = fingerprint_or_raise(model or Model(), batch or example(), extra).ingredients
    return json.dumps(found | {"paceline": "may be edited while its tests run"})


def with_attribute(path: str, value: Any) -> Model:
    model = Model()
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)
    return model


def tied() -> Model:
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    return model


def aliased() -> Model:
    model = Model()
    model.layers[1].weight.data = model.layers[0].weight.data
    return model


def frozen() -> Model:
    model = Model()
    model.layers[0].bias.requires_grad_(False)
    return model


def hooked(count: int = 1) -> Model:
    model = Model()
    for _ in range(count):
        model.norm.register_forward_hook(lambda module, args, result: result * 1)
    return model


def closed_over(factor: float) -> Model:
    model = Model()
    model.activation = lambda x: x * factor
    return model


DIFFERENT: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Model(p=0.2),
    "width": lambda: Model(width=8),
    "layer more": lambda: Model(layers=3),
    "layer of another kind": lambda: with_attribute("norm", nn.LayerNorm(4)),
    "number": lambda: with_attribute("norm.eps", 1e-4),
    "text": lambda: with_attribute("drop.note", "new"),
    "value of a constant": lambda: with_attribute("constant", torch.arange(4.0) + 1),
    "dtype of a constant": lambda: with_attribute("constant", torch.arange(4)),
    "element of a set": lambda: with_attribute("options", {"names": {"x", "y"}, "nested": [(1, 2), {"k": None}]}),
    "tuple for list": lambda: with_attribute("options", {"names": {"x", "y", "z"}, "nested": [[1, 2], {"k": None}]}),
    "function": lambda: with_attribute("activation", torch.tanh),
    "lambda": lambda: with_attribute("activation", lambda x: F.gelu(x) * 3),
    "closure 1": lambda: closed_over(1.0),
    "closure 2": lambda: closed_over(2.0),
    "eval": lambda: Model().eval(),
    "eval of one layer": lambda: with_attribute("drop.training", False),
    "frozen": frozen,
    "tied": tied,
    "aliased": aliased,
    "double": lambda: Model().double(),
    "hook": hooked,
    "two hooks": lambda: hooked(2),
    "buffer more": lambda: with_attribute("drop.extra", nn.Buffer(torch.zeros(1))),
    "forward of the instance": lambda: with_attribute("norm.forward", lambda x: x),
}


def test_each_part_of_the_module_counts() -> None:
    keys = {name: key(make()) for name, make in DIFFERENT.items()} | {"plain": key()}
    assert len(set(keys.values())) == len(keys)


def test_values_of_parameters_buffers_and_batches_do_not_count() -> None:
    model = Model()
    before = key(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)
    assert key(model, (torch.ones(3, 4), torch.ones(3, 4))) == before == key(Model())
    assert key(hooked()) == key(hooked())  # hooks are numbered through the whole process


def test_each_part_of_the_batch_and_of_the_extra_counts() -> None:
    x, y = example()
    batches: list[Any] = [
        (x, y),
        example(4),
        example(dtype=torch.float64),
        (x.t().contiguous().t(), y),
        (x.clone().requires_grad_(), y),
        (x, x),
        (x, y, 1),
        (x, y, 1.0),
        (x, y, True),
        (x, (y,)),
        {"x": x, "y": y},
        {"x": x, "z": y},
    ]
    keys = [key(batch=batch) for batch in batches] + [key(plan="dp"), key(plan="fsdp"), key(rank=0)]
    assert len(set(keys)) == len(keys)


@contextlib.contextmanager
def swapped(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    old = get()
    put(value)
    try:
        yield
    finally:
        put(old)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to half": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": lambda: swapped(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "default dtype": lambda: swapped(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "precision": lambda: swapped(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "device": lambda: torch.device("meta"),
}


def test_the_state_of_torch_counts() -> None:
    model, batch = Model(), example()
    keys = [key(model, batch)]
    for state in STATES.values():
        with state():
            keys.append(key(model, batch))
    assert len(set(keys)) == len(keys)
    assert key(model, batch) == keys[0]


def library_patch(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 3


def test_what_is_replaced_while_running_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    keys = [key()]
    for owner, name, value in [
        (here, "helper", other_helper),
        (here, "SCALE", 0.25),
        (here, "TABLE", {"a": [3.0]}),
        (Model, "forward", lambda self, x, y: x.sum() + y.sum()),
        (Model, "kind", "other"),
        (F, "mse_loss", library_patch),
        (nn.BatchNorm1d, "forward", lambda self, x: x),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(key())
    for name in ("MODEL_SHIFT", "TORCH_SOMETHING"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.setattr(here, "UNUSED_CLOCK", 1.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    assert key() == keys[0]


class Knot:
    def __init__(self) -> None:
        self.me = self


def test_values_that_hold_themselves_are_fine() -> None:
    assert key(with_attribute("drop.knot", Knot())) == key(with_attribute("drop.knot", Knot()))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (threading.Lock(), "Dropout.odd: a _thread.lock cannot be hashed"),
        ({object()}, "its order differs"),
        (torch.zeros(2, device="meta"), "has no values"),
        (torch.eye(2).to_sparse(), "layout"),
        ((x for x in "ab"), "generator"),
    ],
    ids=["lock", "set", "meta", "sparse", "generator"],
)
def test_no_key_where_a_value_has_no_stable_hash(value: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    model = with_attribute("drop.odd", value)
    with pytest.raises(FingerprintError, match=says):
        fingerprint_or_raise(model, example(), {})
    with caplog.at_level(logging.INFO, "paceline"):
        assert fingerprint(model, example(), {}) is None
    assert "not cached" in caplog.text


LAYERS = """
import torch
from torch import nn
WIDTH_FACTOR = {factor}
FRUITS = {{"apple", "pear", "plum", "fig"}}

class Odd:
    pass

def scaled(x):
    if getattr(x, "never", None):
        import lazily
    return x * {scale} + (1 if "fig" in {{"apple", "pear", "plum", "fig"}} else 0)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4 * WIDTH_FACTOR // WIDTH_FACTOR)
        self.things = [Odd(), FRUITS, frozenset(FRUITS), {{1: Odd}}, "fig" * 2]
    def forward(self, x):
        return scaled(self.inner(x)).sum() * WIDTH_FACTOR
"""
MAIN = """
import json, os, pathlib, sys
import torch
from paceline.errors import FingerprintError
from paceline.program.fingerprint import fingerprint_or_raise
from paceline.program.sources import source_hashes, still_current

def result():
    from layers import Layer
    try:
        return fingerprint_or_raise(Layer(), (torch.zeros(2, 4),), {"plan": "dp=2"}).ingredients
    except FingerprintError as error:
        return str(error)

def results(folder):
    found = [result()]
    if folder.name == "edited":
        import lazily
        hashes = source_hashes()
        found += [sorted(pathlib.Path(p).name for p in hashes), still_current(hashes)]
        (folder / "lazily.py").write_text("x = 2")
        found.append(pathlib.Path(still_current(hashes)).name)
        path = folder / "layers.py"
        path.write_text(path.read_text().replace("sum()", "mean()"))
        found.append(result())
    return found

for name in sys.argv[1:]:  # each as a process that has loaded PyTorch, and no layers yet
    if os.fork() == 0:
        sys.path.insert(0, name)
        folder = pathlib.Path(name)
        (folder / "found.json").write_text(json.dumps(results(folder)))
        os._exit(0)
    assert os.wait()[1] == 0
"""


def run_projects(folder: Path, seed: int, projects: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What a program finds in each project: layers with such numbers, in a folder of their own."""
    for name, numbers in projects.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "layers.py").write_text(LAYERS.format(**{"scale": 2.0, "factor": 1, **numbers}))
        (folder / name / "lazily.py").write_text("x = 1")
    (folder / "main.py").write_text(MAIN)
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": str(seed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, folder / "main.py", *(folder / name for name in projects)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / name / "found.json").read_text()) for name in projects}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    projects = {"plain": {}, "changed": {"scale": 3.0, "factor": 2}, "edited": {}}
    return run_projects(tmp_path_factory.mktemp("first") / "one", 1, projects)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    names = {name for name in one if one[name] != other[name]}
    return names - {"paceline"}  # which may be edited while its tests run


def test_same_in_every_process_and_folder(first_run: dict[str, Any], tmp_path: Path) -> None:
    second = run_projects(tmp_path / "two", 2, {"plain": {}})
    assert differing(*first_run["plain"], *second["plain"]) == set()


def test_an_edit_of_a_helper_or_a_global_counts(first_run: dict[str, Any]) -> None:
    assert differing(*first_run["plain"], *first_run["changed"]) == {"module", "sources", "globals"}


def test_files_imported_later_and_files_edited_meanwhile(first_run: dict[str, Any]) -> None:
    before, names, unchanged, changed, after = first_run["edited"]
    assert isinstance(before, dict)
    assert names == ["layers.py", "lazily.py", "main.py"]
    assert unchanged is None
    assert changed == "lazily.py"
    assert "layers.py was changed after it was loaded" in after


def test_an_interactive_program_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(FingerprintError, match="the main program is interactive"):
        fingerprint_or_raise(nn.Linear(1, 1), (), {})


class ReadsTheLaunch(nn.Module):
    """Libraries look for the launcher's variables in code that a forward pass reaches."""

    def forward(self, x: Tensor) -> Tensor:
        distributed = "MASTER_PORT" in os.environ and "MASTER_ADDR" in os.environ
        return x.sum() if distributed else x.mean()


def test_the_meeting_point_of_a_launch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for port in ("29500", "31234"):
        monkeypatch.setenv("MASTER_PORT", port)
        keys.add(key(ReadsTheLaunch(), (torch.zeros(3),)))
    assert len(keys) == 1
