"""`paceline bench predictions` from file to figures: errors, regret, fits, what is left out, and the page."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.predictions.fitted import chosen_lines, profiles
from paceline.bench.predictions.main import main
from paceline.bench.predictions.profiles import shipped_identities, with_rates_written
from paceline.bench.predictions.rows import read_rows
from paceline.bench.predictions.samples import samples_of
from paceline.bench.sections import write_section
from paceline.cli.main import app
from paceline.cluster.files import load
from paceline.cluster.rates import Rates
from paceline.errors import DataError, RecipeError

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "measured_runs.csv"
BASE = {
    "source": "a paper",
    "model": "GPT-1B",
    "n_layers": "24",
    "hidden": "2048",
    "heads": "16",
    "seq_len": "1024",
    "vocab": "51200",
    "gpus": "8",
    "gpu_type": "A100-SXM-80GB",
    "global_batch": "64",
    "micro_batch": "2",
    "precision": "bf16",
    "metric": "iteration_time_s",
    "unit": "s",
}
LAYOUTS = [{"tp": tp, "pp": pp} for tp, pp in (("1", "1"), ("2", "1"), ("4", "1"), ("1", "2"))]


def published(folder: Path, rows: list[dict[str, str]]) -> Path:
    file = folder / "runs.csv"
    columns = sorted({name for each in rows for name in each})
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns)
        writer.writeheader()
        writer.writerows(rows)
    return file


def predicted(file: Path, **options: str) -> dict[str, Any]:
    return main({"data": str(file), "rows": "yes", **options})


def told_as_predicted(folder: Path, factors: list[float]) -> Path:
    """A file whose times are what is predicted for each layout, so many times over."""
    unknown = published(folder, [BASE | layout | {"value": "1"} for layout in LAYOUTS])
    seconds = [row["predicted"] for row in predicted(unknown)["rows"]]
    return published(
        folder,
        [
            BASE | layout | {"value": repr(factor * each)}
            for layout, each, factor in zip(LAYOUTS, seconds, factors, strict=True)
        ],
    )


def test_errors_are_shares_of_what_was_measured(tmp_path: Path) -> None:
    found = predicted(told_as_predicted(tmp_path, [1.0, 1.25, 0.8, 1.0]))
    assert found["all"]["rows"] == 4
    assert found["all"]["mape"] == pytest.approx((0 + 0.2 + 0.25 + 0) / 4)
    assert found["all"]["median"] == pytest.approx(0.1)
    assert found["all"]["worst"] == pytest.approx(0.25)
    assert found["by_source"] == {"a paper, dgx-a100": found["all"]}
    assert found["fitted_rows"] == []


def test_regret_is_what_the_pick_costs(tmp_path: Path) -> None:
    same = predicted(told_as_predicted(tmp_path, [1.0] * 4))["regret"]
    assert same["worst"] == pytest.approx(0.0)
    assert [group["rows"] for group in same["groups"].values()] == [4]
    rows = predicted(told_as_predicted(tmp_path, [1.0] * 4))["rows"]
    best = min(range(4), key=lambda index: rows[index]["predicted"])
    slower = [5.0 if index == best else 1.0 for index in range(4)]
    found = predicted(told_as_predicted(tmp_path, slower))["regret"]
    others = sorted(row["predicted"] for row in rows)
    assert found["worst"] == pytest.approx(5 * others[0] / others[1] - 1)


def test_memory_is_told_apart_from_times(tmp_path: Path) -> None:
    rows = [
        BASE | LAYOUTS[0] | {"value": "3"},
        BASE | LAYOUTS[0] | {"metric": "peak_memory", "unit": "GB", "value": "60"},
    ]
    found = predicted(published(tmp_path, rows))
    assert found["all"]["rows"] == 1
    assert found["memory"]["all"]["rows"] == 1


def test_rows_are_predicted_or_counted_by_reason(tmp_path: Path) -> None:
    rows = [BASE | LAYOUTS[0] | {"value": "3"}, BASE | LAYOUTS[0] | {"ep": "4", "value": "3"}, BASE | {"value": "3"}]
    found = predicted(published(tmp_path, rows))
    assert found["read"] == {"rows": 3, "predicted": 1, "unknown_columns": []}
    assert found["left_out"] == {
        "mixture of experts": {"rows": 1, "lines": [3]},
        "no tp": {"rows": 1, "lines": [4]},
    }


def test_a_file_of_which_nothing_can_be_predicted_says_why(tmp_path: Path) -> None:
    found = predicted(published(tmp_path, [BASE | {"value": "3"}]))
    assert found["all"] == {"rows": 0, "mape": None, "median": None, "worst": None}
    assert found["left_out"] == {"no tp": {"rows": 1, "lines": [2]}}


def test_doubtful_rows_count_in_no_figure(tmp_path: Path) -> None:
    rows = [BASE | LAYOUTS[0] | {"value": "3"}, BASE | LAYOUTS[1] | {"value": "3", "notes": "ANOMALY: two jobs"}]
    found = predicted(published(tmp_path, rows))
    assert found["all"]["rows"] == 1
    assert found["doubtful"]["rows"] == 1


def test_fitted_rows_count_in_no_figure_and_others_come_closer(tmp_path: Path) -> None:
    file = told_as_predicted(tmp_path, [1.5] * 4)
    before = predicted(file)
    found = predicted(file, fit_rows="2,4")
    assert found["fitted_rows"] == [2, 4]
    assert found["all"]["rows"] == 2
    assert found["all"]["mape"] < before["all"]["mape"]
    assert set(found["fits"]) == {"a100-sxm-80gb"}


def test_without_fitted_rows_rates_are_those_that_are_expected_before_any(tmp_path: Path) -> None:
    file = told_as_predicted(tmp_path, [1.0] * 4)
    found = predicted(file, fit_rows="none")
    assert found["fitted_rows"] == []
    assert found["all"]["mape"] > 0.001


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published runs are not beside the repository")
def test_a_device_that_is_not_fitted_anew_keeps_its_profile_and_its_fitted_rows() -> None:
    samples = samples_of(read_rows(PUBLISHED).rows).usable
    clusters = {name: load(name) for name in {one.configuration.cluster for one in samples}}
    assert shipped_identities() <= {one.identity for one in samples}
    shipped = profiles(samples, clusters, None).lines
    again = profiles(samples, clusters, frozenset({2672}))
    on_h100 = {
        line
        for one in samples
        if one.configuration.cluster == "dgx-h100" and set(one.lines) & shipped
        for line in one.lines
    }
    assert on_h100
    assert again.lines - {2672, 2673, 2674} == shipped - on_h100
    assert again.clusters["dgx-a100"] == clusters["dgx-a100"]


def test_rows_to_fit_are_lines_ranges_or_a_file(tmp_path: Path) -> None:
    samples = samples_of(read_rows(told_as_predicted(tmp_path, [1.0] * 4)).rows).usable
    assert chosen_lines(None, samples) is None
    assert chosen_lines("none", samples) == frozenset()
    assert chosen_lines("2,4-9", samples) == {2, 4, 5}
    listed = tmp_path / "rows.txt"
    listed.write_text(f"# what is fitted\n2, 3\n{samples[3].identity}  line 99: of another file\n", encoding="utf-8")
    assert chosen_lines(str(listed), samples) == {2, 3, 5}


@pytest.mark.parametrize(
    ("given", "said"), [("99", "no row there"), ("2;3", "no file that can be read"), ("-", "it takes lines")]
)
def test_rows_that_cannot_be_fitted_are_refused(tmp_path: Path, given: str, said: str) -> None:
    samples = samples_of(read_rows(told_as_predicted(tmp_path, [1.0] * 4)).rows).usable
    with pytest.raises(DataError, match=said):
        chosen_lines(given, samples)


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--data"):
        main({})
    with pytest.raises(RecipeError, match=r"unknown setting 'dta'.*Did you mean 'data'"):
        main({"dta": "x"})
    with pytest.raises(DataError, match=r"no a100-sxm-80gb\.yaml"):
        predicted(told_as_predicted(tmp_path, [1.0] * 4), fit_rows="2-5", profiles=str(tmp_path))


def test_the_command_takes_flags_and_writes_one_object(tmp_path: Path) -> None:
    file = told_as_predicted(tmp_path, [1.0] * 4)
    out = tmp_path / "found.json"
    arguments = ["bench", "predictions", "--data", str(file), "--fit-rows", "2", "--json", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert {"all", "by_source", "regret", "fitted_rows"} <= set(written)
    assert written["fitted_rows"] == [2]


def test_rates_replace_those_in_a_device_s_file_and_comments_stay() -> None:
    text = "# a device\npeak: {x: 1}\nrates:\n  matmul: 0.1\n  residuals:\n  - [1.0]\nmemory: 1 GB\n"
    found = with_rates_written(text, Rates(matmul=0.123456))
    assert found == "# a device\npeak: {x: 1}\nmemory: 1 GB\nrates: {matmul: 0.1235}\n"


def test_a_part_of_a_page_is_written_anew_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nBefore.\n", encoding="utf-8")
    write_section(page, "first", ["one"])
    write_section(page, "second", ["two"])
    page.write_text(page.read_text(encoding="utf-8") + "\nAfter.\n", encoding="utf-8")
    write_section(page, "first", ["three"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\nBefore.\n")
    assert text.endswith("\nAfter.\n")
    assert [text.count(word) for word in ("one", "two", "three")] == [0, 1, 1]
    page.write_text(text.replace("<!-- first: end -->", ""), encoding="utf-8")
    with pytest.raises(RecipeError, match="without the other"):
        write_section(page, "first", ["four"])


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published runs are not beside the repository")
def test_published_runs_are_as_near_as_the_documentation_says(tmp_path: Path) -> None:
    page = tmp_path / "accuracy.md"
    found = main({"data": str(PUBLISHED), "markdown": str(page)})
    kinds = [name for name in found["by_source"] if name.endswith("dgx-h100")]
    hosts = {name: found["by_source"][name] for name in kinds if name.startswith(("DGXC", "NeMo", "Megatron-Core"))}
    rows = sum(each["rows"] for each in hosts.values())
    assert rows >= 140
    assert sum(each["rows"] * each["mape"] for each in hosts.values()) / rows < 0.06
    memory = found["memory"]["by_source"]
    assert memory["Korthikanti 2022, dgx-a100"]["mape"] < 0.02
    assert memory["Megatron-LM CI, dgx-a100"]["mape"] < 0.10
    assert memory["Megatron-LM CI, dgx-h100"]["mape"] < 0.10
    left = sum(each["rows"] for each in found["left_out"].values())
    assert left + found["read"]["predicted"] == found["read"]["rows"]
    assert "DGXC, dgx-h100" in page.read_text(encoding="utf-8")
