"""Numbers in text, against Python's own."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.data.numerals import NotANumber, read_floats, read_integers


def read(kind, words):
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    starts = ends - [len(word) for word in words]
    return kind(" ".join(words).encode(), starts.astype(np.int64), ends.astype(np.int64)).tolist()


decimals = st.from_regex(r"[+-]?([0-9]{1,20}(\.[0-9]{0,12})?|\.[0-9]{1,17})(e[+-]?[0-9]{1,2})?", fullmatch=True)


@given(st.lists(decimals | st.floats(allow_nan=False, allow_infinity=False).map(repr), max_size=8))
def test_floats_are_those_of_python(words):
    assert read(read_floats, words) == [float(word) for word in words]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_integers_of_64_bits(numbers):
    assert read(read_integers, list(map(str, numbers))) == numbers


@pytest.mark.parametrize(
    "word", ["", "-", ".", "+.", "1_0", "1..2", "1.2.3", "x", "0x1f", "1e", "nan", "-inf", "1e999"]
)
def test_what_is_no_number(word):
    with pytest.raises(NotANumber) as fault:
        read(read_floats, ["1", word, word])
    assert fault.value.which == 1 and not (word == "1e999" and math.isfinite(float(word)))


@pytest.mark.parametrize("word", ["", "-", "1.", "1.0", "1e3", "1_0", str(2**63), "f"])
def test_what_is_no_integer(word):
    with pytest.raises(NotANumber):
        read(read_integers, ["-1", word])
