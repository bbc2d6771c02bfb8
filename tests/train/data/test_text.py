"""Text sources: the standard library, files and globs, tokenizers."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from paceline.errors import DataError
from paceline.train.data import DataConfig, Loader, open_source

SHAKESPEARE = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare.txt"


def opened(base_dir=Path(), **section):
    return open_source(TypeAdapter(DataConfig).validate_python(section), base_dir)


def text_of(source):
    """All inputs of a byte source as text."""
    batch = source.batch(np.arange(len(source)))
    return bytes(next(iter(batch.values())).flatten().tolist())


@pytest.fixture(scope="module")
def stdlib():
    return opened(source="stdlib", sequence=256)


def test_stdlib_is_real_text_of_megabytes_divided_by_file(stdlib):
    train, validation = stdlib
    assert len(train) * 256 > 5e6 and 0.01 < len(validation) / len(train) < 0.2
    batch = train.batch(np.array([5, 0]))
    assert batch["x"].shape == batch["y"].shape == (2, 256) and batch["x"].dtype == torch.int64
    assert torch.equal(batch["x"][:, 1:], batch["y"][:, :-1])
    assert batch["x"].is_contiguous() and batch["y"].is_contiguous()
    assert int(batch["x"].min()) >= 0 and int(batch["x"].max()) < 256
    whole = text_of(train)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    inside = text[1000:3000] in whole
    assert inside != (text[1000:3000] in text_of(validation))


def test_stdlib_is_the_same_every_time_and_smaller_without_tests(stdlib):
    train, validation = opened(source="stdlib", sequence=256, tests=False)
    again, _ = opened(source="stdlib", sequence=256, tests=False)
    assert len(train) <= len(stdlib[0]) and len(validation) <= len(stdlib[1])
    picks = np.arange(0, len(train), 997)
    assert torch.equal(train.batch(picks)["x"], again.batch(picks)["x"])


def test_stdlib_trains_on_everything_when_asked():
    train, validation = opened(source="stdlib", tests=False, validation=0.0)
    assert validation is None and len(train) > 0


def test_windows_tile_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(65, 91)))
    train, validation = opened(tmp_path, source="text", files="a.txt", sequence=5, validation=0)
    assert validation is None and len(train) == 5
    assert text_of(train) == b"ABCDEFGHIJKLMNOPQRSTUVWXY"
    assert bytes(train[1]["y"].tolist()) == b"GHIJK"
    with pytest.raises(IndexError):
        train[5]


def test_labels_of_hugging_face_models_are_not_shifted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ABCDEFGH")
    keys = {"keys": ["input_ids", "labels"], "shift": False}
    train, _ = opened(tmp_path, source="text", files="a.txt", sequence=4, validation=0, **keys)
    batch = train.batch(np.array([1]))
    assert torch.equal(batch["input_ids"], batch["labels"]) and bytes(batch["labels"][0].tolist()) == b"EFGH"
    batch["labels"][0, 0] = -100
    assert batch["input_ids"][0, 0] == ord("E")


def test_globs_are_sorted_and_files_separated(tmp_path):
    for name in ("b", "a", "deep/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(name[-1] * 2)
    train, _ = opened(tmp_path, source="text", files=["**/*.txt"], sequence=1, validation=0)
    assert text_of(train) == b"aa\0bb\0cc"


def test_validation_is_the_last_part_or_files_of_its_own(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 90 + b"b" * 10)
    (tmp_path / "v.txt").write_bytes(b"v" * 10)
    train, validation = opened(tmp_path, source="text", files="a.txt", sequence=3, validation=0.1)
    assert set(text_of(train)) == {ord("a")} and set(text_of(validation)) == {ord("b")}
    _, own = opened(tmp_path, source="text", files="a.txt", validation_files="v.txt", sequence=3)
    assert set(text_of(own)) == {ord("v")}


def test_text_that_is_missing_empty_or_short_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("0123456")
    with pytest.raises(DataError, match=r"no file .*/shrt\.txt\. Did you mean 'short\.txt'"):
        opened(tmp_path, source="text", files="shrt.txt")
    with pytest.raises(DataError, match=r"Its folder .*/none does not exist"):
        opened(tmp_path, source="text", files="none/a.txt")
    with pytest.raises(DataError, match=r"no file matches '.*/\*\.md'"):
        opened(tmp_path, source="text", files="*.md")
    with pytest.raises(DataError, match="is a folder"):
        opened(tmp_path.parent, source="text", files=tmp_path.name)
    with pytest.raises(
        DataError, match=r"short\.txt holds 8 tokens; one sample needs 9: a sequence of 8, and the label"
    ):
        opened(tmp_path, source="text", files="short.txt", sequence=8, validation=0)
    with pytest.raises(DataError, match=r"short\.txt \(validation\) is empty; .*another fraction in 'validation'"):
        opened(tmp_path, source="text", files="short.txt", sequence=2)


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        opened(tmp_path, source="text", files="empty.txt", sequence=8)


def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "locked.txt").write_text("secret")
    (tmp_path / "locked.txt").chmod(0)
    me = os.geteuid()
    if me == 0:  # root may read everything, so be nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(DataError, match=r"no permission to read .*locked"):
            opened(tmp_path, source="text", files="locked.txt")
    finally:
        os.seteuid(me)


def make_tokenizer(path):
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    words = {word: number for number, word in enumerate(["[UNK]", "[END]", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return tokenizer


def test_text_through_a_tokenizer_file(tmp_path):
    make_tokenizer(tmp_path / "tok.json")
    (tmp_path / "a.txt").write_text("to be or not to be")
    section = {"source": "text", "files": "a.txt", "sequence": 3, "validation": 0, "tokenizer": "tok.json"}
    train, _ = opened(tmp_path, **section)
    assert train.batch(np.arange(1))["x"].tolist() == [[2, 3, 4]] and train.codec.vocabulary == 6
    ended, _ = opened(tmp_path, **section, separator="[END]")
    assert ended.batch(np.arange(2))["y"].tolist() == [[3, 4, 5], [2, 3, 1]]
    assert ended.codec.decode([2, 3]) == "to be"
    with pytest.raises(DataError, match=r"separator '\[STOP\]' is not a token of"):
        opened(tmp_path, **section, separator="[STOP]")


def test_text_through_a_transformers_folder(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(tmp_path / "t.json"), unk_token="[UNK]", eos_token="[END]"
    )
    fast.save_pretrained(tmp_path / "folder")
    (tmp_path / "a.txt").write_text("to be or not")
    train, _ = opened(tmp_path, source="text", files="a.txt", sequence=4, validation=0, tokenizer="folder")
    assert train[0]["y"].tolist() == [3, 4, 5, 1]
    assert train.codec.decode([4, 5]).split() == ["or", "not"]


def test_what_a_tokenizer_cannot_read_is_named(tmp_path):
    make_tokenizer(tmp_path / "tok.json")
    (tmp_path / "a.txt").write_bytes(b"to be \xff")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text, .*: byte 6 is 0xff"):
        opened(tmp_path, source="text", files="a.txt", tokenizer="tok.json")
    with pytest.raises(DataError, match=r"bad\.json is not a tokenizer"):
        opened(tmp_path, source="text", files="a.txt", tokenizer="bad.json")
    with pytest.raises(DataError, match=r"no file .*tk\.json\. Did you mean 'tok\.json'"):
        opened(tmp_path, source="text", files="a.txt", tokenizer="tk.json")


@pytest.mark.skipif(not SHAKESPEARE.is_file(), reason="needs ../shared/data/tinyshakespeare.txt")
def test_an_epoch_of_shakespeare_on_three_ranks_is_shakespeare():
    train, validation = opened(source="text", files=str(SHAKESPEARE), sequence=128)
    text = SHAKESPEARE.read_bytes()
    border = len(text) + 1 - round((len(text) + 1) * 0.05)
    assert text_of(train) == text[: len(train) * 128]
    assert text_of(validation) == (text + b"\0")[border : border + len(validation) * 128]
    rows = []
    for rank in range(3):
        for step in Loader(train, 48, 2, (rank, 3), seed=1).epoch():
            for part in step.micro_batches:
                if rank == 0 or not part.whole:
                    rows.extend(bytes(row.tolist()) for row in part.batch["x"].to(torch.uint8))
    assert sorted(rows) == sorted(text[i * 128 : (i + 1) * 128] for i in range(len(train)))
