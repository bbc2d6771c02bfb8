"""What a worker did comes back from its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import ExchangeError
from paceline.exchange.client.actions import ActionLog, LoggedDealer, read_actions
from paceline.exchange.interface import Deal, Order


class _Script:
    def __init__(self, deals: list[Deal]) -> None:
        self.deals = deals
        self.given: list[tuple[str, Sequence[Deal]]] = []

    def next_task(self) -> Deal:
        return self.deals.pop(0)

    def done(self, deals: Sequence[Deal]) -> None:
        self.given.append(("done", deals))

    def put_back(self, deals: Sequence[Deal]) -> None:
        self.given.append(("put back", deals))


def test_actions_come_back(tmp_path: Path) -> None:
    path = tmp_path / "actions" / "worker-3.jsonl"
    log = ActionLog(path, 3)
    deals = [Deal(Order.TASK, 7), Deal(Order.WAIT), Deal(Order.WAIT), Deal(Order.TASK, 2, alone=True), Deal(Order.END)]
    script = _Script(list(deals))
    dealer = LoggedDealer(script, log)
    assert [dealer.next_task() for _ in deals] == deals
    dealer.done(deals[:1])
    log.dealt(Deal(Order.WAIT))
    log.interrupted(3)
    log.dealt(Deal(Order.WAIT))  # after something else: who replays this waits twice
    dealer.put_back(deals[3:4])
    log.pulled(2, {4: 10, 0: 3})
    log.interrupted(1)
    log.pushes(1, [7, 8])
    log.close()
    log.close()

    actions = read_actions(path)
    assert actions.worker == 3
    assert actions.deals == [deals[0], deals[1], deals[4], deals[1], deals[1]]  # without what was put back
    assert actions.pulls == {2: {0: 3, 4: 10}, 1: None, 3: None}
    assert actions.pushes == {1: (7, 8)}
    assert script.given == [("done", deals[:1]), ("put back", deals[3:4])]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.jsonl"
    log = ActionLog(path, 1)
    log.pushes(1, [0])
    log.pushes(2, [1])
    log.close()
    path.write_bytes(path.read_bytes()[:-4])
    assert read_actions(path).pushes == {1: (0,)}


def test_a_worker_of_a_restored_job_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "worker-1.jsonl"
    for tasks in ([3], [5]):
        log = ActionLog(path, 1)
        log.pushes(tasks[0], tasks)
        log.close()
    assert read_actions(path).pushes == {5: (5,)}


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "empty|index"), ('{"worker": 1}\nnonsense\n', "line 2"), ('{"worker": 1}\n{"deal": "dance"}\n', "line 2")],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "worker-1.jsonl"
    path.write_text(text)
    with pytest.raises(ExchangeError, match=word):
        read_actions(path)
    with pytest.raises(ExchangeError, match="nowhere"):
        read_actions(tmp_path / "nowhere")
