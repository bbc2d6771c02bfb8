import builtins
import json
import logging

import pytest
from rich.console import Console

from paceline.train.callbacks import CheckpointReport, EndReport, StartReport, StepReport, ValidationReport
from paceline.train.metrics import LogLines, MetricsFile, TensorBoard, read_metrics
from paceline.train.progress import ProgressBar, ProgressLines, Speed, progress


def step(number: int, loss: float = 1.5) -> StepReport:
    return StepReport(number, 4, loss, 1e-3, 2.0, weight=100.0, seconds=0.5, peak_memory=2048)


def run(callback, first=0, last=4):
    callback.on_start(StartReport(first, 4, 10))
    for number in range(first + 1, last + 1):
        callback.on_step(step(number, loss=1 / number))
    callback.on_validate(ValidationReport(last, 0.25, 50.0, 0.1))
    callback.close()


def test_metrics_are_lines_of_json_in_si_units(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["step"] * 4 + ["validation"]
    assert lines[1] == {
        "event": "step",
        "step": 2,
        "loss": 0.5,
        "lr": 1e-3,
        "grad_norm": 2.0,
        "tokens": 100.0,
        "tokens_per_s": 200.0,
        "step_s": 0.5,
        "peak_memory_bytes": 2048,
    }
    assert read_metrics(path, "validation") == [
        {"event": "validation", "step": 4, "loss": 0.25, "tokens": 50.0, "seconds": 0.1}
    ]


def test_metrics_are_on_disk_as_soon_as_they_are_known(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_start(StartReport(0, 4, 10))
    metrics.on_step(step(1))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    metrics.close()


def test_a_resumed_run_holds_each_step_once_even_after_a_line_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path), last=3)
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    run(MetricsFile(path), first=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(MetricsFile(path))
    run(MetricsFile(path), last=1)
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra 'viz' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(tmp_path, logging.getLogger("test")))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert events.Scalars("validation/loss")[0].value == 0.25


def test_without_tensorboard_the_run_goes_on_and_says_how_to_get_it(tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with caplog.at_level(logging.INFO):
        run(TensorBoard(tmp_path, logging.getLogger("test")))
    assert "paceline[viz]" in caplog.text


def test_the_log_has_every_nth_step_and_all_that_is_rare(caplog):
    lines = LogLines(logging.getLogger("test"), every=2)
    with caplog.at_level(logging.INFO):
        run(lines)
        lines.on_checkpoint(CheckpointReport(4, None, 0.01))
        lines.on_end(EndReport(3, 4, 15, 9.0))
    text = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in text if line.startswith("step") and "gradient" in line] == ["2", "4"]
    assert any("validation loss 0.25" in line for line in text)
    assert text[-1] == "ended after step 3 of 4, 9.0 s, stopped by signal 15"


def test_without_a_terminal_progress_is_plain_lines(capsys):
    console = Console(force_terminal=False, width=100)
    shown = progress(console)
    assert isinstance(shown, ProgressLines)
    run(shown)
    lines = capsys.readouterr().out.splitlines()
    # The first and the last step; those between came within the interval.
    assert [line.split()[1] for line in lines] == ["1/4", "4/4", "4"]
    assert "loss 0.2500  200 tokens/s  0:00 left" in lines[1]
    assert lines[2] == "step 4  validation loss 0.2500"


def test_speed_is_that_of_the_last_seconds_of_steps() -> None:
    speed = Speed(over_s=2.0)
    steps = [(10.0, 1.0), (20.0, 1.0), (30.0, 1.0), (1.0, 0.5), (7.0, 9.0)]
    said = [speed.after(StepReport(1, 9, 0.0, 0.1, None, *step, 0, unit="samples")) for step in steps]
    assert said == [f"{rate} samples/s" for rate in (10, 15, 25, 20, 1)]
    assert Speed().after(StepReport(1, 9, 0.0, 0.1, None, 5.0, 0.0, 0)) == "inf tokens/s"


def test_on_a_terminal_progress_is_a_bar(capsys):
    shown = progress(Console(force_terminal=True, width=100))
    assert isinstance(shown, ProgressBar)
    run(shown)
    text = capsys.readouterr().out
    assert "4/4" in text and "200 tokens/s" in text and "validation loss 0.2500" in text
