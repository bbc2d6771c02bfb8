"""Keys of features: 64-bit numbers, spread by hashing. The key 0 is that of no feature.

The same on every machine and for ever: keys are what a trained table is kept by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.exchange.layout import mixed
from paceline.train.data.numerals import Places

Keys = NDArray[np.int64]


def hashed(text: bytes, starts: Places, ends: Places, fields: NDArray[np.int64]) -> Keys:
    """Return the keys of the words between some places of `text`, each a value of its field: [n].

    Eight bytes at a time are mixed into the field's number (`layout.mixed`), and the length at last; so an empty word,
    a missing value, has a key too. Two of n values share a key with a probability of n * n / 2**65.
    """
    # Eight bytes from any place on; what is behind the end of a word is cut off below.
    words = np.ndarray((len(text) + 1,), dtype="<u8", buffer=text + bytes(8), strides=(1,))
    lengths = ends - starts
    states = mixed(fields.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    for at in range(0, int(lengths.max(initial=0)), 8):
        left = lengths - at
        bits = np.clip(left * 8, 0, 64).astype(np.uint64)
        found = words[np.minimum(starts + at, len(text))]
        found = np.where(left >= 8, found, found & ((np.uint64(1) << (bits % np.uint64(64))) - np.uint64(1)))
        states = np.where(left > 0, mixed(states ^ found), states)
    keys = mixed(states ^ lengths.astype(np.uint64)).view(np.int64)
    return np.where(keys == 0, 1, keys)


def in_buckets(keys: Keys, buckets: int) -> Keys:
    """Return keys from 1 to below `buckets`, to which others collide: rows of a table that is kept whole."""
    return (mixed(keys) % np.uint64(buckets - 1)).view(np.int64) + 1
