"""Codecs: text to tokens and back. Bytes by default; a tokenizer of Hugging Face with the `hf` extra."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.train.data.files import optional, read_bytes

Tokens = NDArray[Any]


class Codec(ABC):
    """Text to tokens and back.

    Attributes:
        vocabulary: one more than the largest token; a model's embedding needs at least this many rows.
        separator: token that ends a document, if there is one.
    """

    vocabulary: int
    separator: int | None

    @abstractmethod
    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each document: [n_i].

        Raises:
            UnicodeDecodeError: a document is not UTF-8, and the codec needs text.
        """

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every token."""
        return np.min_scalar_type(self.vocabulary - 1)


class ByteCodec(Codec):
    """Every byte is a token, and a zero byte ends a document."""

    vocabulary = 256
    separator = 0

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """See `Codec.encode`."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec.decode`; bytes that are not UTF-8 become question marks in a box."""
        return bytes(tokens).decode("utf-8", errors="replace")


class FileCodec(Codec):
    """A `tokenizers` JSON file. It says nothing of what ends a document, so `separator` names that token."""

    def __init__(self, path: Path, separator: str | None) -> None:
        tokenizers = optional("tokenizers", "hf", "a tokenizer")
        text = read_bytes(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path} is not a tokenizer of the 'tokenizers' library: {error}") from error
        self.vocabulary = max(self._tokenizer.get_vocab().values(), default=0) + 1
        self.separator = _separator(self._tokenizer.token_to_id, separator, path) if separator is not None else None

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """See `Codec.encode`."""
        texts = [document.decode() for document in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec.decode`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


class PretrainedCodec(Codec):
    """A tokenizer of `transformers`: a local folder, or a name on the Hugging Face hub."""

    def __init__(self, name: str, separator: str | None) -> None:
        transformers = optional("transformers", "hf", "a tokenizer")
        try:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as error:  # folders, networks and formats fail in many ways, and the library says how
            raise DataError(f"the tokenizer '{name}' cannot be loaded: {error}") from error
        known = self._tokenizer.get_vocab()
        self.vocabulary = max(known.values(), default=0) + 1
        end = self._tokenizer.eos_token_id
        self.separator = end if separator is None else _separator(known.get, separator, name)

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """See `Codec.encode`."""
        texts = [document.decode() for document in documents]
        if not texts:
            return []
        ids = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=self.dtype) for row in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Codec.decode`."""
        return str(self._tokenizer.decode(list(tokens)))


def open_codec(tokenizer: str | None, separator: str | None, base_dir: Path) -> Codec:
    """Return the codec that `tokenizer` names: bytes when None, a JSON file, a folder, or a name on the hub.

    Raises:
        DataError: it does not exist or cannot be loaded, the extra is missing, or the separator is no token of it.
    """
    if tokenizer is None:
        return ByteCodec()
    path = base_dir / Path(tokenizer).expanduser()
    if path.suffix == ".json" or path.is_file():
        return FileCodec(path, separator)
    return PretrainedCodec(str(path) if path.is_dir() else tokenizer, separator)


def pack(documents: Iterable[bytes], codec: Codec) -> Tokens:
    """Return all documents that are not empty as one row of tokens, each ended by the separator: [n]."""
    pieces = codec.encode([document for document in documents if document])
    if codec.separator is not None:
        end = np.array([codec.separator], dtype=codec.dtype)
        pieces = [part for piece in pieces for part in (piece, end)]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=codec.dtype)


def _separator(find: Any, separator: str, name: object) -> int:
    token: int | None = find(separator)
    if token is None:
        raise DataError(f"the separator '{separator}' is not a token of {name}; name one that is, or leave it out.")
    return token
