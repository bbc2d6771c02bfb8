"""NumPy files and the digits."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.train.data import DataConfig, open_source


def opened(base_dir, **section):
    return open_source(TypeAdapter(DataConfig).validate_python({"source": "numpy", **section}), base_dir)


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float64).reshape(20, 2))
    np.save(tmp_path / "y.npy", np.arange(20, dtype=np.uint16))
    np.savez(tmp_path / "both.npz", x=np.arange(20), y=np.ones(20, dtype=bool))
    np.savez_compressed(tmp_path / "one.npz", only=np.arange(20))
    return tmp_path


def test_files_by_argument(folder):
    train, validation = opened(folder, arrays={"images": "x.npy", "labels": "both.npz:x", "rest": "one.npz"})
    assert len(train) == 19 and len(validation) == 1
    batch = train.batch(np.array([3, 0]))
    assert batch["images"].dtype == torch.float32 and batch["images"].shape == (2, 2)
    assert torch.equal(batch["images"][:, 0].long(), 2 * batch["labels"]) and torch.equal(
        batch["rest"], batch["labels"]
    )
    seen = [int(source[i]["labels"]) for source in (train, validation) for i in range(len(source))]
    assert sorted(seen) == list(range(20))


def test_archives_and_single_arrays_keep_their_names(folder):
    train, validation = opened(folder, arrays="both.npz", validation_arrays="both.npz")
    assert len(train) == len(validation) == 20 and set(train[0]) == {"x", "y"}
    train, validation = opened(folder, arrays="y.npy", validation=0)
    assert validation is None and train[19]["y"] == 19 and train[19]["y"].dtype == torch.int64


def objects(path):
    np.save(path, np.array([[1], [1, 2]], dtype=object), allow_pickle=True)


def objects_in_archive(path):
    with path.open("wb") as file:
        np.savez(file, a=np.array([[1], [1, 2]], dtype=object), allow_pickle=True)


def cut_off(path):
    np.save(path, np.zeros(1000))
    path.write_bytes(path.read_bytes()[:900])


def cut_off_archive(path):
    with path.open("wb") as file:
        np.savez_compressed(file, a=np.random.default_rng(0).random(1000))
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, r"no file .*bad\.npy"),
        (lambda path: path.touch(), r"bad\.npy is empty"),
        (lambda path: path.write_text("1,2,3\n" * 50), r"bad\.npy cannot be used: it is not a NumPy array"),
        (lambda path: path.write_bytes(b"\x80\x04\x95" + bytes(100)), "it is not a NumPy array"),
        (objects, "array of Python objects.*refused"),
        (objects_in_archive, "array of Python objects.*refused"),
        (cut_off, r"bad\.npy cannot be used: it is cut off"),
        (cut_off_archive, r"bad\.npy cannot be used: it is cut off or damaged"),
        (lambda path: np.save(path, np.array(["a", "b"])), r"array 'bad' has type <U1; numbers"),
        (lambda path: np.save(path, np.float32(3)), "is a single value"),
        (lambda path: np.save(path, np.zeros((0, 3))), "is empty: its arrays have no samples"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, write, message):
    write(tmp_path / "bad.npy")
    with pytest.raises(DataError, match=message):
        opened(tmp_path, arrays="bad.npy")


def test_arrays_that_do_not_belong_together(folder):
    np.save(folder / "short.npy", np.zeros(3))
    with pytest.raises(DataError, match="different numbers of samples: 'x' 20, 'y' 3"):
        opened(folder, arrays={"x": "x.npy", "y": "short.npy"})
    with pytest.raises(DataError, match=r"holds no array 'xx'\. It holds: x, y\. Did you mean 'x'"):
        opened(folder, arrays={"x": "both.npz:xx"})
    with pytest.raises(DataError, match=r"holds 2 arrays; choose one as 'both\.npz:name'"):
        opened(folder, arrays={"x": "both.npz"})


def test_digits():
    pytest.importorskip("sklearn", reason="the data extra is not installed")
    config = TypeAdapter(DataConfig).validate_python({"source": "digits", "image": True, "keys": ["images", "labels"]})
    train, validation = open_source(config)
    assert len(train) + len(validation) == 1797 and len(validation) == 90
    batch = validation.batch(np.arange(90))
    assert batch["images"].shape == (90, 1, 8, 8) and batch["images"].dtype == torch.float32
    assert float(batch["images"].max()) == 1.0 and set(batch["labels"].tolist()) == set(range(10))


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"'digits' needs the package 'sklearn'.*pip install 'paceline\[data\]'"):
        open_source(TypeAdapter(DataConfig).validate_python({"source": "digits"}))
