"""One runs at a time, in turn; what they wait for comes, or they end."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.exchange.replay.baton import Ended, Runner, run


def test_runners_take_turns_and_keep_their_random_numbers() -> None:
    said: list[tuple[str, float]] = []
    reached = {"one": 0, "two": 0}

    def counts(runner: Runner) -> None:
        other = "two" if runner.name == "one" else "one"
        torch.manual_seed(len(runner.name + other))
        for turn in range(3):
            said.append((runner.name, float(torch.rand(()))))
            reached[runner.name] = turn + 1
            runner.wait(lambda: reached[other] > turn)  # noqa: B023

    runners = [Runner("one", counts), Runner("two", counts)]
    run(runners, lambda: False)
    assert [name for name, _ in said] == ["one", "two", "two", "one", "one", "two"]
    torch.manual_seed(6)
    wanted = [float(torch.rand(())) for _ in range(3)]
    assert [number for name, number in said if name == "one"] == wanted
    assert [number for name, number in said if name == "two"] == wanted
    assert all(runner.ended for runner in runners)


def test_who_waits_in_vain_ends() -> None:
    unwound: list[str] = []

    def waits(runner: Runner) -> None:
        try:
            try:
                runner.wait(lambda: False)
            except Exception:  # a loop's own handling must not take the end for a fault
                unwound.append("swallowed")
        finally:
            with pytest.raises(Ended):
                runner.wait(lambda: True)
            unwound.append("ended")

    run([Runner("one", waits), Runner("two", waits)], lambda: False)
    assert unwound == ["ended", "ended"]


def test_a_fault_ends_all() -> None:
    def fails(runner: Runner) -> None:
        raise ValueError("of a model")

    def waits(runner: Runner) -> None:
        runner.wait(lambda: False)

    runners = [Runner("worker 1", waits), Runner("worker 2", fails)]
    with pytest.raises(ExchangeError, match="worker 2 failed in the replay: of a model"):
        run(runners, lambda: False)
    assert all(runner.ended for runner in runners)
