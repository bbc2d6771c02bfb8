"""A process in which what it heard was lost is a member no more: else it waits, and others for what it was dealt."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.errors import ConnectionLost
from paceline.exchange.job import DenseTable, Job
from paceline.exchange.membership import Fenced, Member, Role
from paceline.exchange.membership.link import Link
from paceline.exchange.membership.protocol import Message, packed
from paceline.exchange.terms import Charter, Terms
from paceline.exchange.view import Address, View

NOBODY = Address(unix="/nobody")


def fails(_: object) -> None:
    raise KeyError("a fault of ours")


def test_who_could_not_be_told_of_a_view_is_fenced() -> None:
    """A worker would go on waiting for servers that have left."""
    member = Member(Charter(Job((DenseTable("w", (4,)),), shards=1), Terms(tasks=4), NOBODY), b"secret", Role.WORKER)
    fenced, why = threading.Event(), []
    member.on_view(fails)
    member.on_fenced(lambda said: (why.append(said), fenced.set()))
    member._hear({"view": View(1).to_dict()})
    threading.Thread(target=member._call, daemon=True).start()
    assert fenced.wait(60)
    assert "a fault of ours" in why[0] and not member.trusted
    with pytest.raises(Fenced, match="a fault of ours"):
        member.next_task()
    member.close()


def test_a_fault_in_fencing_is_no_reason_to_fence_again() -> None:
    member = Member(Charter(Job((DenseTable("w", (4,)),), shards=1), Terms(tasks=4), NOBODY), b"secret", Role.WORKER)
    calls: list[str] = []
    member.on_fenced(calls.append)
    member.on_fenced(fails)
    member._hear({"fenced": "it was not heard of"})
    member._calls.put(None)
    member._call()
    assert calls == ["it was not heard of"] and member._calls.empty()


def test_who_cannot_take_what_the_coordinator_says_gets_no_answer_but_hears_of_it() -> None:
    ours, coordinators = socket.socketpair()
    lost: list[str] = []
    link = Link(NOBODY, b"secret", dict, fails, lost.append)
    link._sock = ours

    def asks() -> None:
        with pytest.raises(ConnectionLost, match="a fault of ours"):
            link.ask({"say": "next"})
        refused.set()

    refused = threading.Event()
    threading.Thread(target=asks, daemon=True).start()
    question: Message = {"answer": 1}
    coordinators.sendall(packed(question))
    link._run()
    assert refused.wait(60)
    assert len(lost) == 1 and "a fault of ours" in lost[0]
    coordinators.close()
