"""A peer to be killed, with arguments ADDRESS TRANSPORT ...: over each it sends without end, and is sent to, deaf."""

from __future__ import annotations

import json
import sys
import threading

import torch

from paceline.exchange.view import Address
from paceline.exchange.wire.frame import Frame
from tests.exchange.wire.pairs import reach


def run(transport: str, doing: str) -> None:
    connection = reach(Address(**json.loads(sys.argv[1])), transport)
    connection.send(Frame(1, text=f"{transport} {doing}"))
    while doing == "sending":
        connection.send(Frame(1, tensors=[torch.zeros(2 << 20)]))
    threading.Event().wait()


def main() -> None:
    threads = [
        threading.Thread(target=run, args=(transport, doing))
        for transport in sys.argv[2:]
        for doing in ("sending", "deaf")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
