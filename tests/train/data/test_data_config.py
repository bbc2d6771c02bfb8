"""The `data` section: what is refused before any data is touched."""

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline.train.data import DataConfig

ADAPTER = TypeAdapter(DataConfig)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "stdlb"}, "stdlb"),
        ({"source": "stdlib", "sequenc": 3}, "sequenc"),
        ({"source": "stdlib", "sequence": 0}, "greater than or equal to 1"),
        ({"source": "stdlib", "sequence": True}, "valid integer"),
        ({"source": "stdlib", "validation": 1.0}, "less than 1"),
        ({"source": "stdlib", "keys": ["x", "x"]}, "names 'x' twice"),
        ({"source": "stdlib", "keys": ["input_ids", "labels"]}, "'shift' must be given: false for causal"),
        ({"source": "text"}, "files"),
        ({"source": "text", "files": []}, "at least 1"),
        ({"source": "text", "files": "a", "separator": "<end>"}, "'separator' is a token of a 'tokenizer'"),
        ({"source": "numpy", "arrays": 3}, r"it is 3; write a file \('data\.npz'\) or a mapping"),
        ({"source": "numpy", "arrays": {"x": 1}}, "it is {'x': 1}; write a file"),
        ({"source": "hf", "path": "a", "columns": "b"}, "it is 'b'; write a list of columns, or a mapping"),
        ({"source": "hf", "path": "a", "tokenizer": "t", "columns": ["b"]}, "exclude each other"),
        ({"source": "hf", "path": "a", "sequence": 64, "shift": True}, "keys mean nothing: sequence, shift"),
    ],
)
def test_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python(section)


def test_paths_are_made_absolute_in_the_folder_of_the_recipe(tmp_path):
    (tmp_path / "tok").mkdir()

    def read(**section):
        return ADAPTER.validate_python(section, context={"folder": tmp_path})

    text = read(source="text", files=["a/*.txt", "/b.txt"], validation_files="v.txt", tokenizer="tok")
    assert text.files == (f"{tmp_path}/a/*.txt", "/b.txt") and text.validation_files == (f"{tmp_path}/v.txt",)
    assert text.tokenizer == f"{tmp_path}/tok"
    assert read(source="text", files="a", tokenizer="gpt2").tokenizer == "gpt2"
    assert read(source="numpy", arrays={"x": "a.npz:x"}).arrays == {"x": f"{tmp_path}/a.npz:x"}
    assert read(source="factory", dataset="d/m.py:make").dataset == f"{tmp_path}/d/m.py:make"
    assert read(source="factory", dataset="pkg.mod:make").dataset == "pkg.mod:make"


@pytest.mark.parametrize(
    "section",
    [
        {"source": "stdlib"},
        {"source": "text", "files": "a.txt"},
        {"source": "numpy", "arrays": "a.npz", "validation_arrays": {"x": "b.npy"}},
        {"source": "hf", "path": "a", "columns": ["x", "y"]},
        {"source": "digits", "image": True},
        {"source": "hf", "path": "a", "columns": {"x": "y"}},
        {"source": "hf", "path": "a", "tokenizer": "t", "sequence": 64},
        {"source": "factory", "dataset": "a:b", "args": {"n": 1}},
    ],
)
def test_written_out_and_read_again(section):
    config = ADAPTER.validate_python(section)
    assert ADAPTER.validate_python(config.model_dump(mode="json")) == config
