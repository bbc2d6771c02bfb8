"""Bus bandwidths that others measured with NCCL, against what described clusters expect."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from paceline.bench.collectives.main import main
from paceline.bench.collectives.published import MIB, Published, mean_error, read
from paceline.errors import RecipeError

DATA = Path(__file__).parents[4] / "shared" / "data" / "measured_collectives.csv"
HEAD = "source,hardware,nodes,gpus,collective,bytes,algbw_gbps,busbw_gbps,latency_us,notes\n"

# Cluster, a word of the source, and the largest mean error in per cent: below 16 MiB, to 256 MiB, above. Sources differ
# as much from each other: the same eight A100 took 50, 93 and 102 us for 1 MiB.
BANDS = [
    ("dgx-a100", "vTrain", 20, 6, 3),
    ("dgx-a100", "ND_A100_v4", 10, 20, 3),
    ("dgx-a100", "ml-engineering", 25, 15, 5),
    ("v100-25gbe", "vTrain", 12, 5, 3),
    ("dgx-h100", "dgxc-benchmarking", 60, 10, 5),
    ("dgx-h100", "ND_H100_v5", 20, 10, 5),
    ("h200", "ND_H200_v5", 20, 10, 5),
    ("h200", "ml-engineering", 30, 15, 5),
]

published = pytest.mark.skipif(not DATA.is_file(), reason=f"the published measurements are not at {DATA}")


@lru_cache
def held_out() -> list[Published]:
    return [row for row in read(DATA)[0] if not row.fitted]


@published
@pytest.mark.parametrize(("name", "source", "small", "middle", "large"), BANDS)
def test_one_host(name: str, source: str, small: float, middle: float, large: float) -> None:
    rows = [row for row in held_out() if row.cluster.name == name and source in row.source and row.ranks <= 8]
    assert len(rows) >= 10
    for band, low, high in ((small, 0.0, 16 * MIB), (middle, 16 * MIB, 256 * MIB), (large, 256 * MIB, 1e18)):
        error = mean_error(rows, low, high)
        assert error is not None and error * 100 <= band


@published
def test_groups_of_sizes_that_were_not_fitted() -> None:
    rows = [row for row in held_out() if row.cluster.name == "dgx-a100" and row.ranks in (3, 5, 6, 7)]
    errors = [abs(row.error) for row in rows if row.nbytes >= 16 * MIB]
    assert len(errors) > 40 and max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.035


@published
def test_sums_in_switches_by_number_of_members() -> None:
    """H200, none of which was fitted: with NVLink SHARP allowed and forbidden."""
    rows = [row for row in held_out() if row.hardware == "H200-SXM NVLink4"]
    assert len(rows) == 10
    assert all(abs(row.error) < 0.05 for row in rows)
    assert sum(row.cluster.levels[0].in_switch is None for row in rows) == 5


@published
@pytest.mark.parametrize(("name", "ranks", "band"), [("vtrain-a100", 16, 0.06), ("h200", 32, 0.05), ("b200", 32, 0.12)])
def test_several_hosts(name: str, ranks: int, band: float) -> None:
    rows = [row for row in held_out() if row.cluster.name == name and row.ranks == ranks]
    large = [row for row in rows if row.nbytes >= 512 * MIB]
    assert large and all(abs(row.error) < band for row in large)


def test_what_cannot_be_judged_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        "here,A100 x8,1,8,all_reduce,1073741824,,200,,",
        "here,A100 x8,1,8,all_reduce,1073741824,,20,,reported as LOW",
        "here,A100 x8,1,8,ib_write_bw,1073741824,,20,,",
        "here,abacus,1,8,all_reduce,1073741824,,20,,",
        "here,A100 x8,1,,all_reduce,1073741824,,20,,",
        "VIA-Research/vTrain,A100,1,8,all_reduce,1048576,,20,,",
    ]
    (tmp_path / "data.csv").write_text(HEAD + "\n".join(rows))
    found = main({"data": str(tmp_path / "data.csv")})
    (group,) = found["groups"]
    assert (group["cluster"], group["rows"]) == ("dgx-a100", 1)
    assert group["mean_error"]["above"] == pytest.approx(abs(group["worst"]))
    assert found["fitted_lines"] == [7] and sum(found["left_out"].values()) == 4
    assert "1 rows judged, 1 fitted, 4 left out" in " ".join(capsys.readouterr().out.split())


def test_a_table_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("source,bytes\nhere,1\n")
    with pytest.raises(RecipeError, match="it has no column busbw_gbps, collective, gpus"):
        read(tmp_path / "data.csv")
    with pytest.raises(RecipeError, match="cannot be read"):
        read(tmp_path / "other.csv")
