"""Errors that teach: every message says what was given, what is allowed, and what to do.

The command line turns any `PacelineError` into one readable message and its `exit_code`; everything else is a fault of
ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line ends with."""

    exit_code = 2


class PlanError(PacelineError):
    """A mesh or plan that cannot be, or that does not fit the model, the batch or the number of ranks."""


class CaptureError(PacelineError):
    """The module could not be captured as a pure program."""


class PlacementError(PacelineError):
    """No legal placement exists, or a placed program is inconsistent."""


class ScheduleError(PacelineError):
    """A schedule of a pipeline that does not fit its ranks and micro-batches, or that is wrong."""


class SerializationError(PacelineError):
    """A program that cannot be written to disk, or a stored one that cannot be read."""


class FingerprintError(PacelineError):
    """Something a program depends on has no hash that is the same in every process: the program is not cached."""


class RecipeError(PacelineError):
    """A recipe, an override or a factory that cannot be used."""


class ClusterError(PacelineError):
    """A description of a cluster that cannot be read, or devices that it does not have."""


class DataError(PacelineError):
    """Data that is missing, unreadable or too small."""


class CheckpointError(PacelineError):
    """A checkpoint that is truncated, foreign, or does not fit the module."""


class LaunchError(PacelineError):
    """Ranks that could not be started or did not find each other."""


class RankFailed(PacelineError):
    """A rank of a running job ended with an error; the message carries its traceback."""

    exit_code = 1


class ExchangeError(PacelineError):
    """Servers, workers or a coordinator that cannot do what they were asked, or what they sent is wrong."""


class ConnectionLost(ExchangeError):
    """The process at the other end is gone, or closed the connection; who has another way tries it."""

    exit_code = 1


class NonFiniteError(PacelineError):
    """A loss or gradient became NaN or infinite; the message names the step and the parameter."""

    exit_code = 1


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the allowed word closest to `given`, or nothing when none is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
