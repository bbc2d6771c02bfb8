"""`local`: each process is given its part of the batch."""

import torch
from torch import nn

from paceline.plan import Mesh, Plan
from paceline.runtime.module import parallelize
from tests.ranks import ranks


class Masked(nn.Module):
    """Takes a tensor without a batch dimension beside the batch."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, x, mask, scale):
        return (self.mix(x) @ mask * scale).square().mean()


@ranks(mesh="dp=2")
def test_tensors_without_a_batch_dimension_are_not_cut(world, mesh):
    torch.manual_seed(0)
    module = Masked().double()
    x, mask, scale = torch.randn(8, 5).double(), torch.randn(5, 5).double(), torch.tensor(2.0).double()
    expected = module(x, mask, scale)
    parallel = parallelize(module, (x, mask, scale), Plan(Mesh.parse("dp=2")))
    mine = x.chunk(2)[world.rank].contiguous()
    torch.testing.assert_close(parallel.local(mine, mask, scale), expected, rtol=1e-12, atol=0)
    assert len(parallel.startups) == 1
    smaller = x[:4]
    torch.testing.assert_close(
        parallel.local(smaller.chunk(2)[world.rank].contiguous(), mask, scale),
        module(smaller, mask, scale),
        rtol=1e-12,
        atol=0,
    )
