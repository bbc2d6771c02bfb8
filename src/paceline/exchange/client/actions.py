"""What a worker was dealt, read and pushed, in a file: with it and the servers' logs a run can be done again.

A line of JSON for each action, written at once, so that what a killed worker did is there to its last action:

    {"worker": 3}                                  the first line
    {"deal": "task", "number": 7, "alone": true}   as `interface.Deal`; waits with nothing between them are one line
    {"back": [["task", 8]]}                        was dealt and not begun: the worker leaves
    {"pull": 12, "at": [[0, 831], [4, 829]]}       read number 12: the position of each shard that was asked
    {"interrupted": 13}                            read number 13 gave way to a task whose worker was gone
    {"push": 5, "tasks": [7]}                      written before the push is sent: who knows what comes of it

Reads are numbered as they begin, from 1: those that run beside the computation end in any order. A job that was
restored numbers its workers anew: a further first line in a file begins a further life, and the last one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.durable import settle
from paceline.errors import ExchangeError
from paceline.exchange.interface import Deal, Dealer, Order


class ActionLog:
    """Writes a worker's actions. Several threads may.

    Args:
        path: of the file.
        worker: whose they are.
        durable: whether a push that is sent is written for good, also after a loss of power.
    """

    def __init__(self, path: Path, worker: int, *, durable: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._durable = durable
        self._waits = False
        self._write({"worker": worker})
        if durable:
            settle(path.parent)

    def dealt(self, deal: Deal) -> None:
        """Write an order."""
        waits = deal.order is Order.WAIT
        if not (waits and self._waits):
            self._write({"deal": deal.order.value, "number": deal.number, "alone": deal.alone})
        self._waits = waits

    def put_back(self, deals: Sequence[Deal]) -> None:
        """Write that tasks or evaluations are given up."""
        self._write({"back": [[deal.order.value, deal.number] for deal in deals]})

    def pulled(self, number: int, positions: Mapping[int, int]) -> None:
        """Write a read. positions: of each shard that was asked."""
        self._write({"pull": number, "at": sorted(positions.items())})

    def interrupted(self, number: int) -> None:
        """Write that a read gave way."""
        self._write({"interrupted": number})

    def pushes(self, sequence: int, tasks: Sequence[int]) -> None:
        """Write a push that is about to be sent."""
        self._write({"push": sequence, "tasks": list(tasks)})
        if self._durable:
            os.fdatasync(self._file)

    def close(self) -> None:
        """Write no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, action: Mapping[str, Any]) -> None:
        self._waits = False
        line = json.dumps(action, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, line)
        if written < len(line):  # a full disk; the rest would not help a reader
            raise ExchangeError("a worker's actions cannot be written whole: the disk of the run's directory is full.")


class LoggedDealer:
    """A dealer whose deals are written down."""

    def __init__(self, dealer: Dealer, log: ActionLog) -> None:
        self._dealer, self._log = dealer, log

    def next_task(self) -> Deal:
        """See `Dealer`."""
        deal = self._dealer.next_task()
        self._log.dealt(deal)
        return deal

    def done(self, deals: Sequence[Deal]) -> None:
        """See `Dealer`."""
        self._dealer.done(deals)

    def put_back(self, deals: Sequence[Deal]) -> None:
        """See `Dealer`."""
        self._log.put_back(deals)
        self._dealer.put_back(deals)


@dataclass
class Actions:
    """What a worker did.

    Attributes:
        worker: its id.
        deals: in order, without those that were put back.
        pulls: by number, positions by shard; None for a read that gave way.
        pushes: tasks by sequence.
    """

    worker: int
    deals: list[Deal] = field(default_factory=list)
    pulls: dict[int, Mapping[int, int] | None] = field(default_factory=dict)
    pushes: dict[int, tuple[int, ...]] = field(default_factory=dict)


def read_actions(path: Path) -> Actions:
    """Read what `ActionLog` wrote; a last line that was cut off is left out.

    Raises:
        ExchangeError: it cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
        first = json.loads(lines[0])
        actions = Actions(int(first["worker"]))
    except (OSError, IndexError, ValueError, KeyError, TypeError) as error:
        raise ExchangeError(f"cannot read the actions of a worker in {path}: {error or 'it is empty'}") from error
    for number, line in enumerate(lines[1:], start=2):
        try:
            action = json.loads(line)
            if "worker" in action:
                actions = Actions(int(action["worker"]))
            else:
                _take(actions, action)
        except (ValueError, KeyError, TypeError) as error:
            raise ExchangeError(f"{path}, line {number}: {line[:120]!r} is no action of a worker ({error}).") from error
    return actions


def _take(actions: Actions, line: Mapping[str, Any]) -> None:
    if "deal" in line:
        actions.deals.append(Deal(Order(line["deal"]), int(line["number"]), bool(line["alone"])))
    elif "back" in line:
        back = {(Order(order), int(number)) for order, number in line["back"]}
        actions.deals = [deal for deal in actions.deals if (deal.order, deal.number) not in back]
    elif "pull" in line:
        actions.pulls[int(line["pull"])] = {int(shard): int(position) for shard, position in line["at"]}
    elif "interrupted" in line:
        actions.pulls[int(line["interrupted"])] = None
    else:
        actions.pushes[int(line["push"])] = tuple(map(int, line["tasks"]))
