"""A worker in a process of its own, with arguments WHAT PATH ...: says `ready`, begins once there is PATH.go."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from paceline.exchange.hogwild.exchange import HogwildExchange
from paceline.exchange.hogwild.memory import Memory
from paceline.exchange.interface import Rows
from paceline.exchange.job import Job
from tests.exchange.hogwild.logistic import gradient, read_a9a


def _attach(path: str) -> HogwildExchange:
    job = Job.from_dict(json.loads(Path(f"{path}.json").read_text()))
    exchange = HogwildExchange(Memory.attach(Path(path), job))
    print("ready", flush=True)
    while not Path(f"{path}.go").exists():
        time.sleep(0.001)
    return exchange


def add_ones(path: str, start: str, stop: str, rounds: str) -> None:
    """Under SGD with a rate of 1: subtract 1 from rows `start` to `stop`, again and again, in changing order."""
    exchange = _attach(path)
    for turn in range(int(rounds)):
        keys = np.random.default_rng([turn, int(start)]).permutation(np.arange(int(start), int(stop)))
        for part in np.array_split(keys, 4):
            exchange.push([turn], {}, {0: Rows(torch.from_numpy(part), torch.ones(len(part), 2))})
    print(json.dumps(exchange.figures()))


def make_forever(path: str) -> None:
    """Make rows until killed."""
    exchange = _attach(path)
    for turn in range(10**9):
        keys = torch.arange(500 * turn, 500 * turn + 500)
        exchange.push([turn], {}, {0: Rows(keys, torch.ones(500, 2))})
        if not turn % 8:
            time.sleep(0.001)


def learn(path: str, data: str, first: str, workers: str) -> None:
    """Logistic regression on this worker's share of a9a, batches of 16."""
    samples = read_a9a(Path(data))
    exchange = _attach(path)
    bias = torch.empty(1)
    order = np.random.default_rng(0).permutation(len(samples.labels))[int(first) :: int(workers)]
    for task, chosen in enumerate(np.array_split(order, len(order) // 16)):
        batch = samples.of(chosen)
        rows = torch.empty(len(batch.keys), 1)
        exchange.pull([0], [bias], 0)
        exchange.pull_rows(1, batch.keys, rows, 0)
        of_bias, of_rows = gradient(batch, bias, rows)
        exchange.push([task], {0: of_bias}, {1: Rows(batch.keys, of_rows)})
    print(json.dumps(exchange.figures()))


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    torch.set_num_threads(1)
    {"add": add_ones, "make": make_forever, "learn": learn}[sys.argv[1]](*sys.argv[2:])
