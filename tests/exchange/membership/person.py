"""A member in a process of its own, with arguments DIRECTORY server|worker HOLDS PAUSE_S; says what happens to it.

A server finishes every copy at once and writes empty snapshots; a worker does its tasks and says which, the first
`holds` of them never.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from pathlib import Path

from paceline.errors import ExchangeError
from paceline.exchange.directory import Directory
from paceline.exchange.interface import Order
from paceline.exchange.membership import Member, Role, SnapshotRequest
from paceline.exchange.view import Address, View


def say(*what: object) -> None:
    print(*what, flush=True)


def serve(member: Member, leave: threading.Event) -> None:
    def adopt(view: View) -> None:
        for move in view.moves:
            if move.source == member.id:
                member.synced(move)

    def write(request: SnapshotRequest) -> None:
        for shard in request.shards:
            member.snapshot_written(request.number, shard, f"shard-{shard}.json")

    member.on_view(adopt)
    member.on_snapshot(write)
    while not leave.wait(0.01):
        if member.fenced:
            say("fenced")
            return
    member.leave()
    say("left")


def work(member: Member, leave: threading.Event, holds: int, pause_s: float) -> None:
    while not leave.is_set():
        deal = member.next_task()
        if deal.order is Order.END:
            say("end")
            return
        if deal.order is Order.WAIT:
            continue
        say(deal.order.value, deal.number, "alone" if deal.alone else "")
        if holds:
            holds -= 1
            continue
        time.sleep(pause_s)
        member.done([deal])
    member.leave()
    say("left")


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(60, exit=True)
    leave = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leave.set())
    directory, role = Directory(Path(sys.argv[1])), Role(sys.argv[2])
    holds, pause_s = int(sys.argv[3]), float(sys.argv[4])
    member = Member.join(directory.read(), directory.read_secret(), role, Address("127.0.0.1", 1))
    say("joined", member.id)
    try:
        if role is Role.SERVER:
            serve(member, leave)
        else:
            work(member, leave, holds, pause_s)
    except ExchangeError as error:
        say(type(error).__name__, error)
