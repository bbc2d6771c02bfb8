"""Click logs of 40 columns: keys of 64 bits, numbers, and what is missing."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.train.data import DataConfig, open_source
from paceline.train.data.keys import hashed


def opened(base_dir, **section):
    return open_source(TypeAdapter(DataConfig).validate_python({"source": "criteo", **section}), base_dir)


def row(label="0", integers=(), categories=()):
    columns = [str(label), *map(str, integers), *[""] * (13 - len(integers))]
    return "\t".join([*columns, *categories, *[""] * (26 - len(categories))])


@pytest.fixture
def folder(tmp_path):
    lines = [
        row(1, [1, "", -2, 0], ["68fd1e64", "", "a", "longer than sixteen bytes"]),
        row(0, [5, 7, 1000000, 3], ["68fd1e64", "68fd1e64", "b"]),
        row(0, ["", "", "", 3], ["05db9164"]),
    ]
    (tmp_path / "day").write_text("\r\n".join(lines) + "\n")
    return tmp_path


def test_numbers_and_keys(folder):
    source, validation = opened(folder, files="day", validation=0)
    batch = source.batch(np.array([1, 0, 2]))
    assert validation is None and set(batch) == {"keys", "numbers", "labels"}
    assert batch["labels"].tolist() == [0, 1, 0] and batch["labels"].dtype == torch.float32
    expected = torch.tensor([[5.0, 7, 1e6, 3], [1, 0, 0, 0], [0, 0, 0, 3]]).log1p()
    assert torch.allclose(batch["numbers"][:, :4], expected) and not batch["numbers"][:, 4:].any()
    keys = batch["keys"]
    assert keys.shape == (3, 26) and keys.dtype == torch.int64
    assert keys[0, 0] == keys[1, 0] != keys[2, 0]  # one value of one column
    assert keys[0, 0] != keys[0, 1] != keys[1, 1]  # one value of two columns; a missing one
    assert keys[1, 1] == keys[2, 1] and keys[1, 2] != keys[0, 2]
    assert all(torch.equal(keys[0, 4:], keys[i, 4:]) for i in (1, 2))
    assert len(keys[0, 4:].unique()) == 22 and not (keys == 0).any() and keys.min() < -(2**60) < 2**60 < keys.max()


def by_hand(word, field):
    """The same in Python's own numbers."""

    def mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    state = mixed(field + 0x9E3779B97F4A7C15)
    for at in range(0, len(word), 8):
        state = mixed(state ^ int.from_bytes(word[at : at + 8], "little"))
    key = mixed(state ^ len(word))
    return key - 2**64 if key >= 2**63 else key


def test_keys_are_fixed_for_ever():
    # Tables are kept by these: a change of them makes trained models useless.
    words = [b"", b"a", b"68fd1e64", b"123456789", b"0123456789abcdef", b"0123456789abcdef0"]
    ends = np.cumsum([len(word) for word in words])
    starts = np.concatenate([[0], ends[:-1]])
    keys = hashed(b"".join(words), starts, ends, np.arange(6) % 2)
    assert keys.tolist() == [by_hand(word, index % 2) for index, word in enumerate(words)]
    assert keys[:3].tolist() == [5197578548964807871, 6758684021144569868, -3343736901006273136]


def test_many_values_do_not_collide():
    words = [f"{number:08x}".encode() for number in range(200_000)]
    starts = np.arange(200_000) * 8
    keys = hashed(b"".join(words), starts, starts + 8, np.zeros(200_000, dtype=np.int64))
    assert len(np.unique(keys)) == 200_000
    counts = np.bincount((keys.view(np.uint64) >> np.uint64(60)).astype(int), minlength=16)
    assert counts.min() > 0.95 * 200_000 / 16


def test_integers_as_keys(folder):
    source, _ = opened(folder, files="day", validation=0, integers="keys")
    batch = source.batch(np.arange(3))
    assert set(batch) == {"keys", "labels"} and batch["keys"].shape == (3, 39)
    keys = batch["keys"]
    assert keys[1, 3] == keys[2, 3] != keys[0, 3] and keys[0, 1] == keys[2, 1] != keys[1, 1]
    same = [[row(0, [a]), row(0, [b])] for a, b in [(1000, 1001), (2, 3), (-1, -2), ("", 0)]]
    (folder / "pairs").write_text("\n".join(line for pair in same for line in pair))
    pairs, _ = opened(folder, files="pairs", validation=0, integers="keys")
    first = pairs.batch(np.arange(8))["keys"][:, 0].reshape(4, 2)
    assert (first[:, 0] == first[:, 1]).tolist() == [True, False, False, False]


def test_buckets(folder):
    source, _ = opened(folder, files="day", validation=0, integers="keys", buckets=50)
    keys = source.batch(np.arange(3))["keys"]
    assert keys.min() >= 1 and keys.max() <= 49 and len(keys.unique()) > 10


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row().partition("\t")[2], "it has 39 columns between tabs, not 40.*no label, as in Criteo's own test set"),
        ("0 1 2", "it has 1 columns between tabs, not 40"),
        (row() + "\t", "it has 41 columns"),
        (row("2"), "the label is '2'; it is 1"),
        (row(""), "the label is ''; it is 1"),
        (row(0, [1, "1.5"]), r"column 3 is '1\.5', not a whole number or nothing"),
    ],
)
def test_faults_name_the_line(tmp_path, line, message):
    (tmp_path / "day").write_text("\n".join([row(), line, row(1)]))
    source, _ = opened(tmp_path, files="day", validation=0)
    with pytest.raises(DataError, match=rf"day, line 2: {message}"):
        source.batch(np.array([2, 1]))
    assert source.batch(np.array([2, 0]))["labels"].tolist() == [1, 0]
