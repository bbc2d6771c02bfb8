"""Lines of files by number: the same as Python's, whatever the pieces they are read in, and in little memory."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.train.data import lines as module
from paceline.train.data.lines import Lines


@given(
    st.lists(st.sampled_from(["a:1", "b:1:2 c:3", "", "\r", "d\r", "longer than a chunk"]), min_size=1), st.booleans()
)
def test_lines_are_those_of_the_file(tmp_path_factory, rows, ended):
    path = tmp_path_factory.mktemp("lines") / "file.txt"
    path.write_bytes("\n".join(rows).encode() + b"\n" * ended)
    expected = [row.rstrip("\r").encode() for row in rows if row.rstrip("\r")]
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "_CHUNK", 7)
    with patch.context():
        if not expected:
            with pytest.raises(DataError, match="is empty"):
                Lines([path])
            return
        lines = Lines([path, path], b":")
        assert Lines([path]).most == 0
        assert lines.most == max(row.count(b":") for row in expected)
        order = np.random.default_rng(len(rows)).permutation(len(lines))
        assert len(lines) == 2 * len(expected)
        assert lines.read(order) == [(expected * 2)[index] for index in order]
        assert lines.read(np.arange(len(lines))) == expected * 2 and lines.read(order[:0]) == []
        numbers = [number for number, row in enumerate(rows, 1) if row.rstrip("\r")]
        assert [lines.where(i) for i in range(len(lines))] == [f"{path}, line {number}" for number in numbers * 2]


@pytest.mark.parametrize("cache", ["on", "off"])
def test_the_index_of_a_large_file_is_kept_until_the_file_changes(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("PACELINE_CACHE", "off" if cache == "off" else str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SMALL", 10)
    path = tmp_path / "file.txt"
    path.write_text("1 2:3\n0 4:5 6:7\n" * 5)
    first = Lines([path], b":")
    kept = list((tmp_path / "cache/lines").glob("*[!k]")) if cache == "on" else []
    assert len(first) == 10 and first.most == 2 and len(kept) == (cache == "on")
    passes = []
    monkeypatch.setattr(module, "_pieces", lambda *given: passes.append(given) or iter(()))
    if cache == "on":
        assert Lines([path], b":").read(np.array([9, 0])) == [b"0 4:5 6:7", b"1 2:3"] and not passes
    path.write_text("1 2:3\n")
    with pytest.raises(DataError, match="has become shorter since it was opened"):
        first.read(np.array([9]))
    monkeypatch.undo()
    assert len(Lines([path])) == 1


def test_a_mark_of_byte_order_is_not_of_the_first_line(tmp_path):
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf1 5:1\r\n0 6:1\r\n")
    lines = Lines([tmp_path / "marked"])
    assert lines.read(np.arange(2)) == [b"1 5:1", b"0 6:1"]
    assert lines.where(1).endswith("marked, line 2")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf\n")
    with pytest.raises(DataError, match="is empty"):
        Lines([tmp_path / "marked"])


def test_what_is_no_text_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 1 << 20)
    monkeypatch.setattr(module, "_LONGEST", 3 << 20)
    (tmp_path / "array").write_bytes(b"0 1:1\n" + bytes(5 << 20))
    with pytest.raises(DataError, match=r"array has a line of more than 3 MB, at byte 6: it is no text"):
        Lines([tmp_path / "array"])
    (tmp_path / "wide").write_text("0 1:1\n", encoding="utf-16")
    with pytest.raises(DataError, match=r"wide is text in UTF-16; convert it: iconv"):
        Lines([tmp_path / "wide"])


def test_the_place_of_a_line_tells_what_may_be_wrong_with_it(tmp_path):
    (tmp_path / "a").write_text("label\n\n0 1:1\n0 2:1\n")
    (tmp_path / "b").write_text("\n0 1:1\n0 2:1\n0 3:")
    lines = Lines([tmp_path / "a", tmp_path / "b"])
    header, cut = f"If this is a header, remove it: tail -n +2 {tmp_path}", "it may have been cut off."
    assert header in lines.hint(0) and header in lines.hint(3) and cut in lines.hint(5)
    assert [lines.hint(line) for line in (1, 2, 4)] == ["", "", ""]


def test_compressed_and_missing_files(tmp_path):
    (tmp_path / "day_0.gz").write_bytes(b"\x1f\x8b\x08" + bytes(50))
    with pytest.raises(DataError, match=r"day_0.gz is compressed \(gzip\).*unpack it first: gunzip -k .*day_0.gz"):
        Lines([tmp_path / "day_0.gz"])
    with pytest.raises(DataError, match=r"no file .*day_1.* Did you mean 'day_0.gz'"):
        Lines([tmp_path / "day_1.gz"])


def test_a_file_larger_than_the_memory_that_is_there_streams(tmp_path):
    """100 MB of it, in a process that may take 48 MB more than it has after its imports."""
    row = "1 " + " ".join(f"{index}:0.5" for index in range(1, 60)) + "\n"
    with (tmp_path / "large.txt").open("w") as file:
        for _ in range(100):
            file.write(row * (1_000_000 // len(row)))
    script = f"""
        import resource
        import numpy as np
        from pydantic import TypeAdapter
        from paceline.train.data import DataConfig, Loader, open_source
        held = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (held + 3 * 2**24,) * 2)
        given = {{"source": "libsvm", "files": {str(tmp_path / "large.txt")!r}, "buckets": 1000}}
        source, validation = open_source(TypeAdapter(DataConfig).validate_python(given))
        loader = Loader(source, 512)
        steps = iter(loader)
        for _ in range(20):
            batch = next(steps).micro_batches[0].batch
        last = validation.batch(np.arange(len(validation) - 5, len(validation)))
        assert batch["keys"].shape == (512, 59) and float(last["values"].sum()) == 5 * 59 / 2
        print(len(source) + len(validation))
        loader.close()
        try:
            bytearray(100_000_000)
        except MemoryError:
            print("no room for the file")
    """
    environment = {"PACELINE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [str(100 * (1_000_000 // len(row))), "no room for the file"]
