"""The `data` section of a recipe, one model per source. Checks what can be checked without touching the data.

Validated with a context `{"folder": Path}`, relative paths become absolute, so that the written-out recipe works from
anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)


def _absolute(text: str, info: ValidationInfo) -> str:
    """Put the recipe's folder before a relative path."""
    folder = (info.context or {}).get("folder")
    return text if folder is None else str(Path(folder) / Path(text).expanduser())


def _absolute_if_there(text: str, info: ValidationInfo) -> str:
    """Do the same with what may also be a name on the Hugging Face hub, which is not a path."""
    path = _absolute(text, info)
    return path if Path(path).exists() or text.endswith(".json") else text


def _absolute_factory(text: str, info: ValidationInfo) -> str:
    place, colon, name = text.rpartition(":")
    return f"{_absolute(place, info)}:{name}" if colon and place.endswith(".py") else text


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _arrays(value: Any, info: ValidationInfo) -> str | dict[str, str]:
    """Check and complete here, because a union of types would answer a mistake with one message for each."""
    if isinstance(value, str) and value:
        return _absolute(value, info)
    if isinstance(value, dict) and value and all(isinstance(text, str) for pair in value.items() for text in pair):
        return {key: _absolute(place, info) for key, place in value.items()}
    raise ValueError(
        f"it is {value!r}; write a file ('data.npz') or a mapping from arguments of the module to 'file.npy' or "
        "'file.npz:name'."
    )


def _columns(value: Any) -> list[str] | dict[str, str] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return value
    if isinstance(value, dict) and value and all(isinstance(text, str) for pair in value.items() for text in pair):
        return value
    raise ValueError(f"it is {value!r}; write a list of columns, or a mapping from arguments of the module to columns.")


PathText = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]
HubText = Annotated[str, Field(min_length=1), AfterValidator(_absolute_if_there)]
FactoryText = Annotated[str, AfterValidator(_absolute_factory)]
Paths = Annotated[tuple[PathText, ...], BeforeValidator(_one_or_more)]
ArraysText = Annotated[str | dict[str, str], PlainValidator(_arrays)]
ColumnsText = Annotated[list[str] | dict[str, str] | None, PlainValidator(_columns)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class _Data(BaseModel):
    """What all sources share.

    Attributes:
        validation: part of the data set apart to validate on, from 0 (none) to below 1; the same part in every run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    validation: Fraction = 0.05


class WindowKeys(_Data):
    """How a row of tokens becomes samples.

    Attributes:
        sequence: tokens of a sample.
        keys: names under which the module takes inputs and labels.
        shift: whether labels are one token ahead of the inputs. Causal language models of Hugging Face shift labels by
            themselves; shifting twice would train them, silently, to predict the token after the next. So it has
            to be said when `keys` are theirs, and otherwise is true when left out.
    """

    sequence: Annotated[int, Field(ge=1, strict=True)] = 128
    keys: tuple[str, str] = ("x", "y")
    shift: Flag | None = None

    @property
    def labels_are_ahead(self) -> bool:
        """Whether labels are one token ahead of the inputs."""
        return self.shift is not False

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.keys[0] == self.keys[1]:
            raise ValueError(f"keys names '{self.keys[0]}' twice; it names the inputs and the labels of the module.")
        if self.shift is None and self.keys == ("input_ids", "labels"):
            raise ValueError(
                "with the keys input_ids and labels, 'shift' must be given: false for causal language models of "
                "Hugging Face, which shift the labels by themselves; true for a module that compares output i with "
                "label i."
            )
        return self


class StdlibData(WindowKeys):
    """The text of Python's own standard library, byte by byte; `tests` includes its tests, more than half of it."""

    source: Literal["stdlib"]
    tests: Flag = True


class TextData(WindowKeys):
    """Text files.

    Attributes:
        files: paths and globs (`*`, `**`).
        validation_files: more of them, to validate on; otherwise the last part of the text serves.
        tokenizer: a `tokenizers` JSON file, or a folder or hub name of a `transformers` tokenizer; bytes when absent.
        separator: token put behind every document, when it is not the tokenizer's own end of text.
    """

    source: Literal["text"]
    files: Annotated[Paths, Field(min_length=1)]
    validation_files: Paths = ()
    tokenizer: HubText | None = None
    separator: str | None = None

    @model_validator(mode="after")
    def _check_separator(self) -> Self:
        if self.separator is not None and self.tokenizer is None:
            raise ValueError(
                "'separator' is a token of a 'tokenizer', and none is given; bytes are separated by a zero."
            )
        return self


class NumpyData(_Data):
    """NumPy files.

    Attributes:
        arrays: an .npz file, whose arrays keep their names; an .npy file, named for the file; or a mapping from
            arguments of the module to `file.npy` or `file.npz:name`.
        validation_arrays: the same, to validate on; otherwise a random part of the samples serves.
    """

    source: Literal["numpy"]
    arrays: ArraysText
    validation_arrays: ArraysText | None = None


class DigitsData(_Data):
    """Scikit-learn's digits. `image` gives them the shape [1, 8, 8] instead of [64]; `keys` names images and labels."""

    source: Literal["digits"]
    keys: tuple[str, str] = ("x", "y")
    image: Flag = False


class HfData(WindowKeys):
    """A dataset of Hugging Face `datasets`.

    Attributes:
        path: a folder written by `save_to_disk`, a folder or name that `load_dataset` takes, or a format (`json`,
            `csv`, `parquet`, `text`) with `data_files`.
        name: configuration of the dataset.
        data_files: paths and globs.
        split: split to train on; slices such as `train[:10%]` work where `load_dataset` is used.
        validation_split: split to validate on; otherwise a part of the rows serves.
        columns: columns to use, or a mapping from arguments of the module to columns; all when absent.
        tokenizer: makes windows of `sequence` tokens of the column `text_column`; see `text`.
        separator: token put behind every document, when it is not the tokenizer's own end of text.
    """

    source: Literal["hf"]
    path: HubText
    name: str | None = None
    data_files: Paths = ()
    split: str = "train"
    validation_split: str | None = None
    columns: ColumnsText = None
    tokenizer: HubText | None = None
    text_column: str = "text"
    separator: str | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.tokenizer is not None and self.columns is not None:
            raise ValueError(
                "'columns' and 'tokenizer' exclude each other: rows of columns, or windows of one column's text."
            )
        windows = {"sequence", "keys", "shift", "text_column", "separator"} & self.model_fields_set
        if (
            self.tokenizer is None
            and windows
            and any(getattr(self, key) != type(self).model_fields[key].default for key in windows)
        ):
            raise ValueError(
                "without a 'tokenizer', rows are taken as they are, and these keys mean nothing: "
                f"{', '.join(sorted(windows))}."
            )
        return self


class _LinesData(_Data):
    """Text files of any size, a sample in each line.

    Attributes:
        files: paths and globs.
        validation_files: more of them, to validate on; otherwise some of every 1,000 lines serve.
        buckets: keys are hashed to 1, 2, ... below this many, the rows of a table that is kept whole; when absent they
            have 64 bits, for tables on servers.
    """

    files: Annotated[Paths, Field(min_length=1)]
    validation_files: Paths = ()
    buckets: Annotated[int, Field(ge=2, strict=True)] | None = None


class LibsvmData(_LinesData):
    """Lines of `label index:value index:value ...`.

    Attributes:
        keys: names under which the module takes the keys and values of features, and labels.
        features: places for features in each sample; as many as the longest line has when absent.
        longer: what is done with lines of more: `refuse`, or `cut` off the last ones.
        binary: labels are 0 and 1, or -1 and 1, which become 0 and 1; when false any numbers, as they are.
        zero_based: indices count from 0, and their keys are one more: 0 is the key of no feature.
    """

    source: Literal["libsvm"]
    keys: tuple[str, str, str] = ("keys", "values", "labels")
    features: Annotated[int, Field(ge=1, strict=True)] | None = None
    longer: Literal["refuse", "cut"] = "refuse"
    binary: Flag = True
    zero_based: Flag = False


class CriteoData(_LinesData):
    """Click logs in Criteo's format.

    Attributes:
        keys: names under which the module takes keys, numbers and labels.
        integers: what becomes of the 13 columns of whole numbers: `numbers`, log(1 + x), 0 where missing or negative;
            or `keys`, one more key each, by classes that widen.
    """

    source: Literal["criteo"]
    keys: tuple[str, str, str] = ("keys", "numbers", "labels")
    integers: Literal["numbers", "keys"] = "numbers"


class FactoryData(_Data):
    """A dataset of the user's own: map-style, or a mapping of arrays or tensors by argument of the module.

    Attributes:
        dataset: FACTORY, `package.module:callable` or `path/to/file.py:callable`, that returns a dataset, or a pair of
            one to train on and one to validate on.
        args: keyword arguments of the callable.
    """

    source: Literal["factory"]
    dataset: FactoryText
    args: dict[str, Any] = {}


DataConfig: TypeAlias = Annotated[
    StdlibData | TextData | NumpyData | DigitsData | HfData | LibsvmData | CriteoData | FactoryData,
    Field(discriminator="source"),
]
