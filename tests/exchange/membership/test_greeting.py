"""What a member says that it holds, to a coordinator that comes in the place of another at any moment."""

from __future__ import annotations

import threading
from typing import Any

from paceline.exchange.interface import Deal, Order
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership import Member, Role
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address


def test_what_was_put_back_is_not_held_though_a_coordinator_comes_in_that_moment(monkeypatch) -> None:
    """It would be dealt to nobody else: who says that it holds a task that nobody has gets it."""
    charter = Charter(Job((DenseTable("w", (4,)),), shards=1), Terms(tasks=4), Address(unix="/nobody"))
    member = Member(charter, b"secret", Role.WORKER)
    member._held = {(Order.TASK, 3): None}
    held: list[Any] = []
    greets = threading.Thread(target=lambda: held.append(member._greeting()["holding"]))
    say = member._link.say

    def said_and_confirmed(message: dict[str, Any]) -> int:
        number = say(message)
        member._link._unconfirmed.clear()
        greets.start()
        greets.join(0.05)
        return number

    monkeypatch.setattr(member._link, "say", said_and_confirmed)
    member.put_back([Deal(Order.TASK, 3)])
    greets.join()
    assert held == [[]]
