from __future__ import annotations

import importlib
import logging
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from paceline.program.serialize import graph_from_json, graph_to_json
from paceline.runtime.program_cache import ProgramCache, default_directory

KEY = "a1" * 32
OTHER = "b2" * 32


def file_of(cache: ProgramCache, key: str = KEY) -> Path:
    assert cache.directory is not None
    return cache.directory / f"{key}.safetensors"


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "programs")


def test_an_entry_comes_back_exactly(cache: ProgramCache) -> None:
    base = torch.arange(6.0)
    constants = {
        "transposed": base.view(2, 3).t(),
        "shared": base,
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.int64),
    }
    data = {"nodes": [1, 2.5, None, "x"], "nested": {"a": []}}
    assert cache.load(KEY) is None
    assert cache.store(KEY, data, constants)
    entry = cache.load(KEY)
    assert entry is not None
    assert entry.data == data
    assert entry.constants.keys() == constants.keys()
    for name, expected in constants.items():
        found = entry.constants[name]
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert cache.load(OTHER) is None


def test_a_stored_graph_runs(cache: ProgramCache) -> None:
    graph = Graph()
    total = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), graph.get_attr("table")))
    graph.output(total)
    cache.store(KEY, {"graph": graph_to_json(graph)}, {"table": torch.ones(2)})
    entry = cache.load(KEY)
    assert entry is not None
    loaded = GraphModule(entry.constants, graph_from_json(entry.data["graph"], constants=entry.constants))
    assert loaded(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_large_program_is_compressed(cache: ProgramCache) -> None:
    data = {"nodes": ["aten.mm.default"] * 200_000}
    assert cache.store(KEY, data)
    assert file_of(cache).stat().st_size < 200_000
    entry = cache.load(KEY)
    assert entry is not None and entry.data == data


def test_files_are_private_and_no_leftovers_stay(cache: ProgramCache) -> None:
    cache.store(KEY, {})
    assert cache.directory is not None
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(p.stat().st_mode) for p in cache.directory.iterdir()] == [0o600]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign"])
def test_a_damaged_entry_is_removed_with_a_warning(
    cache: ProgramCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store(KEY, {"x": "y" * 100}, {"c": torch.zeros(100)})
    path = file_of(cache)
    content = bytearray(path.read_bytes())
    for_kind = {"truncated": content[:-10], "empty": b"", "foreign": b"PK\x03\x04 not ours at all"}
    content[-3] ^= 1
    path.write_bytes(for_kind.get(damage, content))
    assert cache.load(KEY) is None
    assert not path.exists()
    assert "damaged" in caplog.text
    assert cache.store(KEY, {})
    assert cache.load(KEY) is not None


@pytest.mark.skipif(os.name == "nt", reason="permission bits")
def test_what_others_may_write_is_not_read(cache: ProgramCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.store(KEY, {})
    path = file_of(cache)
    path.chmod(0o620)
    assert cache.load(KEY) is None
    assert "only you may write" in caplog.text
    path.chmod(0o600)
    assert cache.load(KEY) is not None
    path.parent.chmod(0o777)
    assert cache.load(KEY) is None
    assert not cache.store(OTHER, {})


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_read(cache: ProgramCache) -> None:
    cache.store(KEY, {})
    os.chown(file_of(cache), 12345, 12345)
    assert cache.load(KEY) is None


@pytest.mark.skipif(os.name == "nt", reason="symbolic links")
def test_links_are_not_followed(cache: ProgramCache, tmp_path: Path) -> None:
    cache.store(KEY, {})
    moved = file_of(cache).rename(tmp_path / "elsewhere")
    file_of(cache).symlink_to(moved)
    assert cache.load(KEY) is None


def test_an_entry_is_dropped_when_a_source_changed(
    cache: ProgramCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "imported_by_forward.py"
    source.write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(source.stem)
    cache.store(KEY, {})
    del sys.modules[source.stem]
    assert cache.load(KEY) is not None
    source.write_text("x = 2")
    assert cache.load(KEY) is None
    assert not file_of(cache).exists()


def test_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = ProgramCache(tmp_path, size_limit=2_500_000)
    keys = [digit * 64 for digit in "123"]
    for age, key in zip((30, 20), keys, strict=False):
        cache.store(key, {}, {"c": torch.zeros(250_000)})
        os.utime(file_of(cache, key), (time.time() - age, time.time() - age))
    assert cache.load(keys[0]) is not None
    abandoned, fresh = tmp_path / "old.tmp", tmp_path / "new.tmp"
    for path in (abandoned, fresh):
        path.write_bytes(b"")
    os.utime(abandoned, (0, 0))
    cache.store(keys[2], {}, {"c": torch.zeros(250_000)})
    assert [file_of(cache, key).exists() for key in keys] == [True, False, True]
    assert (abandoned.exists(), fresh.exists()) == (False, True)
    assert not cache.store(OTHER, {}, {"c": torch.zeros(1_000_000)})


@pytest.mark.parametrize(
    ("data", "constants"),
    [
        ({"x": object()}, {}),
        ({"x": float("nan")}, {}),
        ({}, {"c": torch.zeros(2, device="meta")}),
        ({}, {"c": torch.zeros(1).expand(3)}),
    ],
)
def test_what_cannot_be_stored_is_said_and_not_raised(
    cache: ProgramCache, data: Any, constants: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        assert not cache.store(KEY, data, constants)
    assert "not cached" in caplog.text
    assert cache.load(KEY) is None


def test_a_disk_that_refuses_does_not_stop_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not ProgramCache(tmp_path / "file").store(KEY, {})
    assert ProgramCache(tmp_path / "file" / "below").load(KEY) is None
    assert "not cached" in caplog.text


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("PACELINE_CACHE")
    assert default_directory() == Path.home() / ".cache" / "paceline" / "programs"
    monkeypatch.setenv("PACELINE_CACHE", "off")
    assert default_directory() is None
    off = ProgramCache(default_directory())
    assert not off.store(KEY, {})
    assert off.load(KEY) is None


def test_keys_are_not_paths(cache: ProgramCache) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        cache.load("../../etc/passwd")


def test_two_writers_never_show_a_half_entry(cache: ProgramCache, caplog: pytest.LogCaptureFixture) -> None:
    def store_often(number: int) -> None:
        for turn in range(20):
            cache.store(KEY, {"writer": number, "turn": turn}, {"c": torch.full((5000,), float(number))})

    cache.store(KEY, {"writer": 0}, {"c": torch.zeros(5000)})
    writers = [threading.Thread(target=store_often, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        entry = cache.load(KEY)
        assert entry is not None
        assert entry.constants["c"].unique().tolist() == [float(entry.data["writer"])]
    assert caplog.text == ""
