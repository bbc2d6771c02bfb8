"""The batch is followed through the program, and nothing else is taken for it."""

import torch
from torch import nn

from paceline.placement.place import place
from paceline.placement.placements import Partial, Replicate, Shard
from paceline.placement.redistribute import is_redistribution, redistribution_of
from paceline.plan import Mesh
from paceline.program.capture import capture


class Flattened(nn.Module):
    """Flattens batch and time and unflattens them again, as language models do."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.position = nn.Embedding(4, 8)
        self.mix = nn.Linear(8, 16)

    def forward(self, x, y):
        h = self.token(x) + self.position(torch.arange(x.shape[1]))
        logits = self.mix(h.view(-1, 8)).view(*x.shape, 16)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def _moves(module, batch, mesh, **options):
    program = place(capture(module, batch, **options), Mesh.parse(mesh)).program
    return [(n, *redistribution_of(n)[1:3]) for n in program.graph.nodes if is_redistribution(n)]


def test_data_parallelism_only_sums_gradients_and_the_loss():
    batch = (torch.randint(16, (4, 4)), torch.randint(16, (4, 4)))
    moves = _moves(Flattened(), batch, "dp=2")
    assert moves and all((source, target) == (Partial(), Replicate()) for _, source, target in moves)


def test_gradients_are_summed_in_float32_under_autocast():
    batch = (torch.randint(16, (4, 4)), torch.randint(16, (4, 4)))
    for mesh in ("dp=2", "fsdp=2"):
        for node, source, _ in _moves(Flattened(), batch, mesh, autocast=torch.bfloat16):
            if isinstance(source, Partial):
                assert node.meta["val"].dtype in (torch.float32, torch.int64)


def test_hybrid_sharding_reduces_the_shard_over_the_outer_axis():
    batch = (torch.randint(16, (8, 4)), torch.randint(16, (8, 4)))
    program = place(capture(Flattened(), batch), Mesh.parse("dp=2,fsdp=2")).program
    over_dp = [n for n in program.graph.nodes if is_redistribution(n) and redistribution_of(n)[3] == "dp"]
    scattered = [n for n in over_dp if is_redistribution(n.args[0])]
    assert len(scattered) >= 4  # every parameter's gradient: scattered within the inner group, then summed between them
    assert all(isinstance(redistribution_of(n.args[0])[2], Shard | Replicate) for n in scattered)
