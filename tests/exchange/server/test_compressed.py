"""What was pushed compressed is decoded by each replica, and what was left out comes with the next push."""

from __future__ import annotations

import pytest
import torch

from paceline.exchange.client.client import ServerExchange
from paceline.exchange.compress.feedback import Compression
from paceline.exchange.interface import Rows
from tests.exchange.server.test_serving import begun_weight, job
from tests.exchange.server.town import SECRET, WORKERS, Citizen, town


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "one_bit", "top_k(0.1)", "power_sgd(2)"])
def test_compressed_pushes(tmp_path, codec):
    of = job(replication=2)
    keys = torch.arange(50)
    with town(of, tmp_path, 3) as place:
        compression = Compression.of(of, codec)
        worker = ServerExchange(place.charter, Citizen(place, WORKERS + 1), SECRET, compression=compression)
        begun = torch.empty(50, 3, dtype=torch.float64)
        worker.pull_rows(1, keys, begun, 0)
        gradient = torch.randn(120, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        row_gradient = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        off = []
        for task in range(12):
            first = task == 0
            worker.push([task], {0: gradient if first else gradient * 0}, {1: Rows(keys, row_gradient * first)})
            worker.flush()
            weight, rows = torch.empty(120, 100, dtype=torch.float64), torch.empty(50, 3, dtype=torch.float64)
            worker.pull([0], [weight], task + 1)
            worker.pull_rows(1, keys, rows, task + 1)
            off.append(float((weight - begun_weight(of) + gradient).norm()))
        worker.close()
        torch.testing.assert_close(rows, begun - row_gradient, rtol=0, atol=1e-3)
        assert 0 < off[0] < gradient.norm() and off[-1] < 0.9 * off[0]
        for shard in range(of.shards):
            states = [
                server.keeper.replicas[shard].shard.state().tensors
                for server in place.servers.values()
                if shard in server.keeper.held
            ]
            assert len(states) == 2 and states[0].keys() == states[1].keys()
            assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    assert compression.figures.ratio > 2
