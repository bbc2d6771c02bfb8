"""Lines of `label index:value ...` as batches of one width."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.train.data import DataConfig, Loader, open_source
from paceline.train.data.config import LibsvmData
from paceline.train.data.libsvm import parse_libsvm

A9A = Path(__file__).parents[4] / "shared/data/a9a"


def opened(base_dir, **section):
    return open_source(TypeAdapter(DataConfig).validate_python({"source": "libsvm", **section}), base_dir)


def whole(source):
    return source.batch(np.arange(len(source)))


ONE = "+1 3:1.5 7:-2e-1 # a remark: with colons\n\n-1\t2:4 \r\n0 \n1 9223372036854775806:1"


def test_lines_get_places_for_the_longest(tmp_path):
    (tmp_path / "a.svm").write_text(ONE)
    source, validation = opened(tmp_path, files="a.svm", validation=0)
    batch = whole(source)
    assert validation is None and list(batch) == ["keys", "values", "labels"]
    assert batch["keys"].dtype == torch.int64 and batch["values"].dtype == batch["labels"].dtype == torch.float32
    assert batch["keys"].tolist() == [[3, 7, 0], [2, 0, 0], [0, 0, 0], [2**63 - 2, 0, 0]]
    assert torch.equal(batch["values"], torch.tensor([[1.5, -0.2, 0], [4, 0, 0], [0, 0, 0], [1, 0, 0]]))
    assert batch["labels"].tolist() == [1, 0, 0, 1]


@st.composite
def rows(draw):
    numbers = st.floats(-1e6, 1e6, width=32)
    return [
        (draw(st.sampled_from([0, 1])), draw(st.dictionaries(st.integers(1, 10**12), numbers, max_size=4)))
        for _ in range(draw(st.integers(1, 6)))
    ]


@given(rows())
def test_what_is_written_is_read(given):
    lines = [" ".join([str(y), *(f"{k}:{v!r}" for k, v in found.items())]).encode() for y, found in given]
    batch = parse_libsvm(lines, LibsvmData(source="libsvm", files=["x"]), features=5)
    assert batch["labels"].tolist() == [y for y, _ in given]
    for keys, values, (_, found) in zip(batch["keys"].tolist(), batch["values"].tolist(), given, strict=True):
        assert dict(zip(keys[: len(found)], values[: len(found)], strict=True)) == found
        assert set(keys[len(found) :]) == set(values[len(found) :]) == {0}


def test_options(tmp_path):
    (tmp_path / "a.svm").write_text("3.5 0:1 4:2 5:3\n-1 4:1\n")
    source, _ = opened(tmp_path, files="a.svm", validation=0, zero_based=True, binary=False, features=2, longer="cut")
    batch = whole(source)
    assert batch["keys"].tolist() == [[1, 5], [5, 0]] and batch["labels"].tolist() == [3.5, -1]
    hashed, _ = opened(
        tmp_path, files="a.svm", validation=0, zero_based=True, binary=False, buckets=100, keys=["k", "v", "y"]
    )
    keys = whole(hashed)["k"]
    # These numbers are what tables are trained by: a change of them makes trained models useless.
    assert keys.tolist() == [[14, 58, 65], [58, 0, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 3", "a feature is '3', not index:value"),
        ("1 3:1:5", "a feature is '3:1:5', not index:value"),
        ("1 qid:7 3:1", "the index is 'qid', not a whole number"),
        ("3:1", "the label is '3:1', not index:value"),
        ("1 3: 1", "a feature is '1', not index:value"),
        ("1 3:", "the value is '', not a finite number"),
        ("1 3:nan", "the value is 'nan', not a finite number"),
        ("spam 3:1", "the label is 'spam', not a number"),
        ("2 3:1", "the label is 2; labels of two classes are 0 and 1.*set 'binary: false'"),
        ("1 0:1", "the index is 0; indices count from 1.*'zero_based: true'"),
        ("1 1:1 2:1 3:1", "it has 3 features, and 'features' leaves room for 2.*'longer: cut'"),
        ("# nothing", "it has no label"),
    ],
)
def test_faults_name_the_line(tmp_path, line, message):
    (tmp_path / "a.svm").write_text(f"1 1:1\n\n{line}\n0 2:1 3:2\n")
    source, _ = opened(tmp_path, files="a.svm", validation=0, features=2)
    with pytest.raises(DataError, match=rf"a\.svm, line 3: {message}"):
        source.batch(np.array([2, 1, 0]))
    assert len(source.batch(np.array([2, 0]))["labels"]) == 2


@settings(max_examples=30)
@given(st.integers(2, 3500), st.floats(0.001, 0.9))
def test_of_every_thousand_lines_the_same_are_held_out(tmp_path_factory, count, fraction):
    folder = tmp_path_factory.mktemp("held")
    (folder / "a.svm").write_text("".join(f"0 1:{number}\n" for number in range(count)))
    try:
        train, validation = opened(folder, files="a.svm", validation=fraction)
    except DataError as error:
        assert "too few to set" in str(error) and min(count * fraction, count - count * fraction) < 200
        return
    seen = [whole(source)["values"][:, 0].long() for source in (train, validation)]
    assert sorted(torch.cat(seen).tolist()) == list(range(count))
    if count >= 1000:
        assert len(validation) / count == pytest.approx(fraction, abs=0.06)


def test_a9a(tmp_path):
    if not A9A.exists():
        pytest.skip("../shared/data/a9a is not here")
    train, test = opened(A9A.parent, files="a9a", validation_files="a9a.t")
    assert (len(train), len(test)) == (32_560, 16_281)
    batch = whole(train)
    assert batch["keys"].shape == (32_560, 14) and float(batch["labels"].sum()) == 7_841
    assert int((batch["keys"] > 0).sum()) == A9A.read_text().count(":") == int(batch["values"].sum())
    seen = torch.cat([step.micro_batches[0].batch["labels"] for step in Loader(train, 1000).epoch()])
    assert len(seen) == 32_560 and float(seen.sum()) == 7_841
