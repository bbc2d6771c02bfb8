"""Hugging Face datasets, all local."""

import json

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.train.data import DataConfig, open_source

datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")


def opened(base_dir, **section):
    return open_source(TypeAdapter(DataConfig).validate_python({"source": "hf", **section}), base_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    rows = {
        "image": [[float(i)] * 3 for i in range(20)],
        "label": list(range(20)),
        "ragged": [[0] * (i % 3) for i in range(20)],
        "text": ["to be or not to be"] * 20,
    }
    table = datasets.Dataset.from_dict(rows)
    table.save_to_disk(folder / "alone")
    datasets.DatasetDict(train=table, test=table.select(range(5))).save_to_disk(folder / "splits")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"a": i, "b": i * 0.5}) + "\n" for i in range(10)))
    words = {word: number for number, word in enumerate(["[UNK]", "[END]", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tok.json"))
    return folder


def test_columns_as_tensors(folder):
    train, validation = opened(folder, path="splits", validation_split="test", columns={"x": "image", "y": "label"})
    assert len(train) == 20 and len(validation) == 5
    batch = train.batch(np.array([7, 2]))
    assert batch["x"].tolist() == [[7.0] * 3, [2.0] * 3] and batch["x"].dtype == torch.float32
    assert batch["y"].tolist() == [7, 2] and batch["y"].dtype == torch.int64


def test_a_dataset_saved_alone_is_divided(folder):
    train, validation = opened(folder, path="alone", columns=["label"], validation=0.25)
    seen = [int(source[i]["label"]) for source in (train, validation) for i in range(len(source))]
    assert len(validation) == 5 and sorted(seen) == list(range(20))
    with pytest.raises(DataError, match="saved as a single dataset; it has no split 'test'"):
        opened(folder, path="alone", validation_split="test")


def test_files_of_a_known_format(folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    train, _ = opened(folder, path="json", data_files="*.jsonl", validation=0)
    assert len(train) == 10 and train[4]["a"] == 4 and train[4]["b"] == 2.0


def test_text_is_packed_into_windows(folder):
    section = {"path": "splits", "tokenizer": "tok.json", "separator": "[END]", "sequence": 10}
    train, validation = opened(folder, **section, validation_split="test")
    assert len(train) == (20 * 7 - 1) // 10 and len(validation) == 3
    assert train[0]["x"].tolist() == [2, 3, 4, 5, 2, 3, 1, 2, 3, 4] and train[0]["y"].tolist()[-1] == 5
    _, part = opened(folder, **section, validation=0.2)
    assert len(part) == 2
    with pytest.raises(DataError, match="column 'label' does not hold texts"):
        opened(folder, **section, text_column="label")
    with pytest.raises(DataError, match=r"has no column 'txt'.*Did you mean 'text'"):
        opened(folder, **section, text_column="txt")


def test_what_cannot_be_used_is_named(folder):
    with pytest.raises(DataError, match=r"has no column 'labl'; .*Did you mean 'label'"):
        opened(folder, path="alone", columns=["labl"])
    with pytest.raises(DataError, match=r"splits has no split 'tset'; it has: train, test\. Did you mean 'test'"):
        opened(folder, path="splits", validation_split="tset")
    for column in ("ragged", "text"):
        train, _ = opened(folder, path="alone", columns=[column])
        with pytest.raises(DataError, match=f"column '{column}' holds texts, or rows of different lengths"):
            train.batch(np.arange(4))
    (folder / "nothing").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=r"dataset '.*nothing' cannot be loaded"):
        opened(folder, path="nothing")
