"""Which rank's error is told when several end."""

from pathlib import Path

import pytest
import torch

from paceline.errors import CheckpointError, PacelineError
from paceline.runtime.job.failures import Failure, first_cause, read_failures


def failure(rank: int, error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:
        return Failure.of(rank, raised)


GLOO = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9066.")

SHM = torch.distributed.DistBackendError("rank 1 (process 4711) has ended during all_reduce")


def hidden(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("victim", [GLOO, ConnectionResetError(), hidden(KeyError("x"), GLOO), SHM])
def test_broken_connections_are_victims(victim: BaseException):
    earlier, later = failure(0, victim), failure(1, ValueError("the cause"))
    assert earlier.at <= later.at
    assert first_cause([earlier, later]) is later


def test_an_end_without_a_word_comes_before_what_others_saw_of_it():
    seen = failure(0, SHM)
    ended = Failure(1, seen.at + 0.02, "", "was ended by SIGTERM", "", 1, is_ours=False, is_victim=True)
    assert first_cause([seen, ended]) is ended
    assert first_cause([seen, failure(2, GLOO)]) is seen


def test_the_earliest_is_the_cause():
    failures = [failure(rank, ValueError(str(rank))) for rank in (2, 0, 1)]
    assert first_cause(failures[::-1]).rank == 2


def test_errors_of_ours_are_no_victims_and_come_back(tmp_path: Path):
    failure(1, hidden(CheckpointError("shard 3 is truncated."), GLOO)).write(tmp_path)
    read = read_failures(tmp_path, 4)
    assert list(read) == [1]
    assert not read[1].is_victim
    error = read[1].error()
    assert type(error) is CheckpointError
    assert (str(error), error.exit_code) == ("shard 3 is truncated.", 2)


class _Picky(PacelineError):
    exit_code = 5

    def __init__(self, step: int, name: str) -> None:
        super().__init__(f"{name} at {step}")


def test_an_error_of_an_unknown_class_keeps_message_and_exit_code():
    error = failure(0, _Picky(3, "loss")).error()
    assert type(error) is PacelineError
    assert (str(error), error.exit_code) == ("loss at 3", 5)
