"""Published runs as they are written: any column may be missing, and no row is dropped without a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.predictions.configurations import configuration_of
from paceline.bench.predictions.identity import identity_of
from paceline.bench.predictions.measured import flops, measured
from paceline.bench.predictions.notes import notes_of
from paceline.bench.predictions.readings import Quantity, reading_of
from paceline.bench.predictions.rows import Row, Unusable, read_rows
from paceline.bench.predictions.samples import samples_of
from paceline.cluster.files import load
from paceline.errors import DataError
from paceline.simulator.workload import Recompute

GPT = {
    "source": "a paper",
    "model": "GPT-1B",
    "n_layers": "24",
    "hidden": "2048",
    "heads": "16",
    "seq_len": "1024",
    "vocab": "51200",
    "gpus": "8",
    "gpu_type": "A100-SXM-80GB",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "micro_batch": "4",
    "global_batch": "64",
    "precision": "bf16",
    "metric": "iteration_time_s",
    "value": "1.5",
    "unit": "s",
}


def row(line: int = 2, **changed: str) -> Row:
    return Row(line, {key: value for key, value in (GPT | changed).items() if value})


def written(folder: Path, text: str) -> Path:
    file = folder / "runs.csv"
    file.write_text(text, encoding="utf-8")
    return file


# Files.


def test_columns_come_in_any_order_and_unknown_ones_are_told(tmp_path: Path) -> None:
    table = read_rows(written(tmp_path, "value,weather,metric\n1,fine,mfu\n,,\n2,,mfu\n"))
    assert [(each.line, each.text("value")) for each in table.rows] == [(2, "1"), (4, "2")]
    assert table.unknown == ("weather",)


def test_lines_are_those_of_the_file_where_a_cell_has_several(tmp_path: Path) -> None:
    table = read_rows(written(tmp_path, 'metric,value,notes\nmfu,1,"one\ntwo"\nmfu,2,\n'))
    assert [each.line for each in table.rows] == [2, 4]


def test_words_for_nothing_are_empty_cells(tmp_path: Path) -> None:
    (found,) = read_rows(written(tmp_path, "metric,value,vpp,ep,tp,recompute\nmfu,1,None,0,0,none\n")).rows
    assert dict(found.values) == {"metric": "mfu", "value": "1", "tp": "0", "recompute": "none"}


def test_a_cell_that_is_no_number_is_a_reason_wherever_it_stands() -> None:
    found = samples_of(
        [row(2, pp="1", gpus="", vpp="many"), row(3, heads="abc"), row(4, global_batch="-3"), row(5, ep="x")]
    )
    assert [one.row.line for one in found.usable] == [2]
    assert sorted(found.left_out) == ["ep is no number", "global_batch is not above zero", "heads is no number"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        ("metric,value\n", "no rows"),
        ("metric,metric,value\nmfu,mfu,1\n", "metric twice"),
        ("metrics,value\nmfu,1\n", "no column 'metric'"),
        ("metric\nmfu\n", "no column 'value'"),
    ],
)
def test_a_file_that_tells_nothing_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_rows(written(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path / "nothing.csv")
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match="UTF-8"):
        read_rows(tmp_path / "picture.csv")


# Metrics and units.


@pytest.mark.parametrize(
    ("metric", "unit", "value", "quantity", "expected"),
    [
        ("iteration_time_ms", "ms", "250", Quantity.STEP, 0.25),
        ("iteration_time_ms", "", "250", Quantity.STEP, 0.25),
        ("step_time", "s", "2", Quantity.STEP, 2.0),
        ("step_time", "", "2", Quantity.STEP, 2.0),
        ("Step Time", "min", "2", Quantity.STEP, 120.0),
        ("tokens_per_s_total", "token/s", "1,000", Quantity.TOKENS, 1000.0),
        ("tokens_per_s", "ktokens/s/GPU", "2", Quantity.TOKENS_EACH, 2000.0),
        ("tokens_per_s_per_gpu", "", "5", Quantity.TOKENS_EACH, 5.0),
        ("samples_per_s_per_gpu", "samples/s/GPU", "3", Quantity.SAMPLES_EACH, 3.0),
        ("tflops_per_gpu", "TFLOP/s", "150", Quantity.FLOPS_EACH, 150e12),
        ("model_tflops_per_gpu", "TFLOP/s/GPU (BF16)", "400", Quantity.FLOPS_EACH, 400e12),
        ("tflops_per_gpu", "", "150", Quantity.FLOPS_EACH, 150e12),
        ("aggregate_pflops", "PFLOP/s", "4", Quantity.FLOPS, 4e15),
        ("mfu_pct", "%", "40", Quantity.MODEL_SHARE, 0.4),
        ("mfu", "", "0.4", Quantity.MODEL_SHARE, 0.4),
        ("peak_memory", "GiB", "2", Quantity.PEAK, 2 * 2**30),
        ("peak_memory", "GB/GPU", "2", Quantity.PEAK, 2e9),
        ("peak_allocated_memory_bytes", "B", "7", Quantity.PEAK, 7.0),
        ("allocated_memory_bytes", "", "7", Quantity.STATE, 7.0),
    ],
)
def test_metrics_are_read_in_si_units(metric: str, unit: str, value: str, quantity: Quantity, expected: float) -> None:
    found = reading_of(row(metric=metric, unit=unit, value=value))
    assert found.quantity is quantity
    assert found.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"metric": "top1_error"}, "'top1_error' is not predicted"),
        ({"metric": ""}, "no metric"),
        ({"unit": "fortnights"}, "the unit 'fortnights' of iteration_time_s is not known"),
        ({"metric": "peak_memory", "unit": ""}, "peak_memory has no unit"),
        ({"value": "fast"}, "value is no number"),
        ({"value": "0"}, "value is not above zero"),
        ({"value": "nan"}, "value is not above zero"),
        ({"value": ""}, "there is no value"),
    ],
)
def test_what_is_no_figure_has_a_reason(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        reading_of(row(**changed))


# Configurations.


def test_a_full_row_is_a_configuration() -> None:
    found = configuration_of(row(recompute="selective+SP"))
    assert (found.cluster, found.precision, found.recompute) == ("dgx-a100", "bfloat16", Recompute.SELECTIVE)
    assert (found.split.micro_batches, found.split.batch, found.split.schedule) == (8, 64, "1f1b")
    assert (found.model.kv_heads, found.model.ffn, found.regions) == (16, 8192, True)
    assert found.assumed == ("ffn", "vpp")


def test_what_others_fix_is_filled() -> None:
    found = configuration_of(row(dp="", cp="2", pp="1", gpus="16"))
    assert (found.split.dp, found.split.cp, found.split.gpus) == (4, 2, 16)
    assert configuration_of(row(gpus="")).split.gpus == 8


def test_a_named_model_has_its_published_dimensions() -> None:
    bare = {"n_layers": "", "hidden": "", "heads": "", "vocab": ""}
    found = configuration_of(row(model="Llama-3.1-8B", **bare)).model
    assert (found.layers, found.hidden, found.kv_heads, found.ffn) == (32, 4096, 8, 14336)
    assert found.gated
    assert not found.tied
    with pytest.raises(Unusable, match="no layers"):
        configuration_of(row(model="Llama-9-8B", **bare))


def test_flags_in_notes_go_before_a_practice() -> None:
    flags = (
        "flags: swiglu=true; untie-embeddings-and-output-weights=true; sequence-parallel=true; disable-bias-linear=true"
    )
    found = configuration_of(row(source="tests/functional_tests/x", notes=flags))
    assert found.model.gated
    assert not found.model.tied
    assert not found.model.biases
    assert found.regions
    plain = configuration_of(row(source="tests/functional_tests/x"))
    assert not plain.model.gated
    assert plain.model.tied
    assert plain.model.biases
    assert not plain.regions


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ep": "8"}, "mixture of experts"),
        ({"model": "Mixtral 8x7B"}, "mixture of experts"),
        ({"model": "T5-3B"}, "encoder and decoder"),
        ({"model": "Llama-2-7B LoRA"}, "only a part"),
        ({"n_layers": ""}, "no layers"),
        ({"seq_len": ""}, "no sequence length"),
        ({"gpu_type": ""}, "no kind of GPU"),
        ({"gpu_type": "Tesla P40"}, "no cluster is described for 'Tesla P40'"),
        ({"tp": ""}, "no tp"),
        ({"pp": ""}, "no pp"),
        ({"dp": "", "gpus": ""}, "neither gpus nor dp"),
        ({"gpus": "9"}, "do not multiply to gpus"),
        ({"global_batch": ""}, "no global_batch"),
        ({"global_batch": "63"}, "do not divide global_batch"),
        ({"hidden": "2000", "heads": "3"}, "heads do not divide"),
        ({"precision": "int3"}, "the precision 'int3' is not known"),
        ({"recompute": "sometimes"}, "the recomputation 'sometimes' is not known"),
        ({"tp": "two"}, "tp is no number"),
        ({"tp": "1.5"}, "tp is no whole number"),
        ({"notes": "schedule ZB-2p; microbatches 24"}, "no closed form for the schedule zb-2p"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        configuration_of(row(**changed))


# Runs.


def test_a_run_told_in_several_ways_counts_once_by_its_seconds() -> None:
    rows = [
        row(2, metric="mfu_pct", value="40", unit="%"),
        row(3, metric="tokens_per_s_total", value="60000", unit="token/s"),
        row(4),
        row(5, metric="peak_memory", value="40", unit="GB"),
    ]
    found = samples_of(rows)
    assert [(one.row.line, one.lines, one.is_memory) for one in found.usable] == [
        (4, (2, 3, 4), False),
        (5, (5,), True),
    ]
    assert found.left_out == {}


def test_the_same_metric_again_is_another_run() -> None:
    assert len(samples_of([row(2), row(3, value="1.6")]).usable) == 2


def test_each_row_is_in_a_sample_or_left_out() -> None:
    rows = [row(2), row(3, tp="3"), row(4, metric="loss"), row(5, tp="4", gpus="", dp="2"), row(6, pp="")]
    found = samples_of(rows)
    lines = [line for one in found.usable for line in one.lines] + [
        line for each in found.left_out.values() for line in each
    ]
    assert sorted(lines) == [2, 3, 4, 5, 6]


def test_a_run_is_known_again_by_its_configuration_alone() -> None:
    def name(one: Row) -> str:
        return identity_of(one, notes_of(one))

    assert name(row(2)) == name(row(9, value="7", metric="mfu", unit="%", tp="2.0"))
    assert name(row(2)) != name(row(2, tp="4"))
    assert name(row(2)) != name(row(2, source="another paper"))


# Measured figures.


def test_throughput_is_turned_into_the_seconds_of_a_step() -> None:
    cluster = load("dgx-a100")
    told = {
        ("tokens_per_s_total", "token/s"): 64 * 1024 / 1.5,
        ("tokens_per_s_per_gpu", "token/s/GPU"): 64 * 1024 / 1.5 / 8,
        ("samples_per_s_total", "samples/s"): 64 / 1.5,
        ("samples_per_s_per_gpu", "samples/s/GPU"): 64 / 1.5 / 8,
    }
    for (metric, unit), value in told.items():
        (sample,) = samples_of([row(metric=metric, unit=unit, value=repr(value))]).usable
        assert measured(sample, cluster) == pytest.approx(1.5)


def test_operations_are_those_of_narayanan_et_al() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h) with everything computed again; a quarter less of the layers without."""
    batch, s, layers, h, words = 64, 1024, 24, 2048, 51200
    formula = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + words / (16 * layers * h))
    configuration = configuration_of(row(recompute="full"))
    assert flops(configuration, hardware=True) == pytest.approx(formula)
    assert flops(configuration) == pytest.approx(formula - 24 * batch * s * layers * h**2 * (1 + s / (6 * h)))


def test_a_share_of_the_peak_is_of_half_precision() -> None:
    cluster = load("dgx-h100")
    one = row(gpu_type="H100", metric="mfu_pct", unit="%", value="50", precision="fp8")
    (sample,) = samples_of([one]).usable
    assert measured(sample, cluster) == pytest.approx(flops(sample.configuration) / 8 / (0.5 * 989e12))
