"""Whole runs on real processes: what `paceline train` does once the command line has been read."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline import shm
from paceline.errors import CheckpointError, NonFiniteError, RecipeError
from paceline.plan import Plan
from paceline.program.factory import load_factory
from paceline.runtime.job.launch import launch
from paceline.train.callbacks import Callback
from paceline.train.metrics import read_metrics
from paceline.train.recipe import load_recipe
from paceline.train.run import train
from tests.ranks import ranks
from tests.train.on_ranks import train_on

GPT = Path(__file__).parents[2] / "recipes" / "gpt.py"


class StopsTheJob(Callback):
    """Sends SIGTERM to whoever launched the ranks, after the third step, unless the run was resumed."""

    def __init__(self, out):
        self.armed = False

    def on_start(self, report):
        self.armed = report.step == 0 and os.environ.get("RANK") == "1"

    def on_step(self, report):
        if self.armed and report.step == 3:
            came, usual = threading.Event(), signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: (usual(number, frame), came.set()))
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGTERM)
            while not came.is_set():  # until it comes back here; the other rank waits in its next collective
                time.sleep(0.01)


@pytest.fixture
def recipe(tmp_path):
    """A recipe file of a tiny GPT with dropout; keyword arguments replace sections."""

    def write(**sections) -> Path:
        text = tmp_path / "text.txt"
        text.write_text("def add(first, second):\n    return first + second\n\n" * 40)
        values = {
            "name": "tiny",
            "model": {
                "factory": f"{GPT}:build",
                "args": {"width": 16, "layers": 1, "heads": 2, "context": 16, "dropout": 0.2},
            },
            "data": {"source": "text", "files": str(text), "sequence": 16, "keys": ["tokens", "targets"]},
            "mesh": "serial",
            "train": {"steps": 6, "batch": 4, "validate": {"every": 3, "batches": 1}},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "schedule": {"name": "cosine", "warmup": 2},
            "seed": 5,
            **sections,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def curve(out: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(out / "metrics.jsonl")]


def test_a_run_directory_holds_all_that_the_run_was(recipe, tmp_path, capsys):
    path = recipe(sample={"factory": f"{GPT}:sample", "prompt": "def ", "length": 20})
    out = tmp_path / "run"
    report = train(load_recipe(path), out)
    assert (report.step, report.signal) == (6, None)
    assert load_recipe(out / "config.yaml") == load_recipe(path)
    plan = yaml.safe_load((out / "plan.yaml").read_text())
    assert Plan.from_dict(plan["plan"]) == load_recipe(path).plan()
    assert plan["placements"]["head.weight"] == "[256, 16]"
    assert plan["between_ranks"] == "none: one process"
    assert [row[0] for row in curve(out)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl", "validation")] == [3, 6]
    assert "validation loss" in (out / "logs" / "rank-0.log").read_text()
    assert (out / "sample.txt").read_text().startswith("def ")
    assert list((out / "checkpoints").glob("step-00000006/*"))
    user_module, _ = load_factory(f"{GPT}:build", tmp_path)(**load_recipe(path).model.args)
    user_module.load_state_dict(load_file(out / "model.safetensors"))
    said = capsys.readouterr().out
    for phrase in ("data", "capture and placement", "first step", "What next", "paceline verify", "--resume"):
        assert phrase in said


def assert_says(out: Path, start: str, capfd) -> None:
    """Check that a run on two ranks tells everywhere what is between them."""
    words = yaml.safe_load((out / "plan.yaml").read_text())["between_ranks"]
    assert words.startswith(start)
    assert f"between ranks: {words}" in capfd.readouterr().out
    for rank in range(2):
        assert f"between ranks: {words}" in (out / "logs" / f"rank-{rank}.log").read_text()


def test_stopped_and_resumed_on_two_processes_it_is_the_uninterrupted_run_bit_for_bit(recipe, tmp_path, capfd):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train_on(2, recipe(mesh="dp=2"), straight)
    assert_says(straight, "gloo" if shm.unavailable() is not None else "shared memory", capfd)
    path = recipe(mesh="dp=2", callbacks=[f"{__file__}:StopsTheJob"])
    arguments = {"recipe": str(path), "overrides": [], "run_dir": str(stopped), "resume": False}
    with pytest.raises(SystemExit) as end:
        launch("paceline.cli.train:train_rank", arguments, 2, loaded=["paceline.train.run"], log_dir=stopped / "logs")
    assert end.value.code == 143
    done = curve(stopped)
    assert 3 <= len(done) < 6 and not (stopped / "model.safetensors").exists()
    train_on(2, path, stopped, resume=True)
    assert curve(stopped) == curve(straight)
    ours, theirs = load_file(stopped / "model.safetensors"), load_file(straight / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_on_gloo_says_so(recipe, tmp_path, capfd):
    train_on(2, recipe(mesh="dp=2", train={"steps": 2, "batch": 4}), tmp_path, "backend=gloo")
    assert_says(tmp_path, "gloo", capfd)


def test_a_run_goes_on_at_another_mesh(recipe, tmp_path):
    out = tmp_path / "run"
    path = recipe(model={"factory": f"{GPT}:build", "args": {"width": 16, "layers": 1, "heads": 2, "context": 16}})
    train(load_recipe(path), out)
    train_on(2, path, out, "mesh=fsdp=2", "train.steps=8", "schedule.name=constant", resume=True)
    assert [row[0] for row in curve(out)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_all_ranks_in_one_process_train_the_same(recipe, tmp_path):
    path = recipe()
    train(load_recipe(path), tmp_path / "serial")
    train(load_recipe(path, ["mesh=dp=2,fsdp=2", "launch=inprocess"]), tmp_path / "inprocess")
    assert curve(tmp_path / "inprocess") == [pytest.approx(row, rel=1e-4) for row in curve(tmp_path / "serial")]


def test_bfloat16_computes_near_what_float32_does(recipe, tmp_path):
    for precision in ("float32", "bfloat16", "float64"):
        train(load_recipe(recipe(), [f"precision={precision}", "train.steps=2"]), tmp_path / precision)
    single, half, double = (curve(tmp_path / name)[1] for name in ("float32", "bfloat16", "float64"))
    assert half[1] == pytest.approx(single[1], rel=2e-2) and half[1] != single[1]
    assert double[1] == pytest.approx(single[1], rel=1e-5) and double[1] != single[1]


def test_a_learning_rate_that_blows_up_is_an_error_on_every_mesh(recipe, tmp_path):
    path = recipe(optimizer={"name": "SGD", "lr": 1e30}, schedule={"name": "constant"}, checkpoint={"every": 1})
    ranks(2, joined=False)(_blows_up)(path=path, out=tmp_path / "run")


def _blows_up(path, out):
    with pytest.raises(NonFiniteError, match=r"step \d.*first parameter"):
        train(load_recipe(path, ["mesh=fsdp=2"]), out)


def test_validation_without_data_for_it_is_refused(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.validation is 0"):
        train(load_recipe(recipe(), ["data.validation=0"]), tmp_path / "run")


def test_there_must_be_a_checkpoint_to_resume_from(recipe, tmp_path):
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        train(load_recipe(recipe()), tmp_path / "run", resume=True)


def test_epochs_are_counted_in_steps_the_last_of_which_may_be_smaller(recipe, tmp_path):
    path = recipe(train={"epochs": 2, "batch": 64})
    train(load_recipe(path), tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) % 2 == 0 and len({row["tokens"] for row in rows}) == 2


def test_a_factory_that_fails_shows_the_line(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"failed with the arguments.*\n.*gpt.py:\d+"):
        train(load_recipe(recipe(), ["model.args.width=-1"]), tmp_path / "run")
