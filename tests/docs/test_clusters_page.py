"""docs/clusters.md against the code: every key and default, the clusters that come along, and the example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from paceline.bench.collectives.published import MIB, mean_error, read, short
from paceline.cluster import described
from paceline.cluster.files import load, names

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
DATA = Path(__file__).parents[3] / "shared" / "data" / "measured_collectives.csv"
ROW = re.compile(r"^\| (.*?) \| (.*?) \| .* \|$", re.M)
SECTIONS = {
    "top level": described.ClusterSection,
    "`device`": described.DeviceSection,
    "`groups`": described.GroupSection,
    "`slow`": described.SlowSection,
    "`levels`": described.LevelSection,
    "`measured`": described.MeasuredSection,
}


def section(heading: str, marks: str) -> str:
    (found,) = re.findall(rf"^{marks} {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
    return str(found)


def defaults(model: type[BaseModel]) -> dict[str, str]:
    found = {}
    for name, item in model.model_fields.items():
        value = item.default
        if item.is_required():
            found[name] = "required"
        elif value is None:
            found[name] = "none"
        else:
            found[name] = "section" if isinstance(value, BaseModel) else f"`{json.dumps(value)}`"
    return found


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented_with_its_default(heading: str) -> None:
    rows = {key.strip("`"): value for key, value in ROW.findall(section(heading, "###")) if key.startswith("`")}
    assert rows == defaults(SECTIONS[heading])


def test_the_table_of_clusters_is_that_of_the_files() -> None:
    rows = re.findall(
        r"^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) ?\|$", section("What comes with the package", "##"), re.M
    )
    assert [row[0] for row in rows] == names()
    for name, devices, memory, levels, price in rows:
        cluster = load(name)
        device = cluster.groups[0].device
        assert devices == f"{cluster.devices} x {device.name}"
        assert memory == f"{device.memory_bytes / 1e9:.3g} GB"
        assert levels == "; ".join(
            f"{level.name} ({level.fabric.value}, {level.devices or 'all'}): {level.bandwidth / 1e9:.3g} GB/s"
            + (f", 1:{level.oversubscription:.3g}" if level.oversubscription > 1 else "")
            for level in cluster.levels
        )
        assert price == ("" if cluster.price_per_device_hour is None else f"{cluster.price_per_device_hour:.2f}")


@pytest.mark.skipif(not DATA.is_file(), reason=f"the published measurements are not at {DATA}")
def test_the_table_of_errors_is_what_the_command_finds() -> None:
    heading = "How well that fits what others measured"
    rows = re.findall(
        r"^\| `(.*?)` \| (.*?) \| (.*?) \| (\d+) \| (.*?) ?\| (.*?) ?\| (.*?) ?\|$", section(heading, "##"), re.M
    )
    found, left_out = read(DATA)
    judged = [row for row in found if not row.fitted]
    figures = f"{len(found) + left_out.total()} published rows, of which {len(found) - len(judged)} were fitted, "
    assert f"{figures}{len(judged)} are judged" in " ".join(PAGE.split())
    assert sum(int(row[3]) for row in rows) == len(judged)
    for name, source, hosts, count, *errors in rows:
        several = hosts == "several hosts"
        mine = [it for it in judged if (it.cluster.name, short(it.source), it.ranks > 8) == (name, source, several)]
        assert len(mine) == int(count)
        means = [mean_error(mine, *band) for band in ((0, 16 * MIB), (16 * MIB, 256 * MIB), (256 * MIB, 1e18))]
        assert errors == ["" if mean is None else f"{mean * 100:.1f}" for mean in means]


def test_the_example_is_a_cluster(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / "example.yaml").write_text(text)
    cluster = load(tmp_path / "example.yaml")
    assert [group.devices for group in cluster.groups] == [5, 1, 26, 16]
    assert cluster.groups[1].slowdown == 1.3 and cluster.groups[3].link_slowdown == 1.5
    assert cluster.levels[2].alone == 50e9 and cluster.levels[2].bandwidth == 25e9
