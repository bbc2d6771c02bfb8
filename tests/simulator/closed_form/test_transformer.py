"""A described Transformer has the parameters, operations and kept bytes that its papers give."""

import numpy as np
import pytest

from paceline.simulator.closed_form.transformer import transformer
from paceline.simulator.layouts import Layouts
from paceline.simulator.workload import Recompute, Workload

GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "sequence": 2048, "vocabulary": 50257, "positions": 2048}
LLAMA_405B = {
    "layers": 126,
    "hidden": 16384,
    "heads": 128,
    "kv_heads": 8,
    "ffn": 53248,
    "sequence": 8192,
    "vocabulary": 128256,
    "gated": True,
    "biases": False,
    "tied": False,
}


def parameters(workload: Workload, **layout: int) -> float:
    layouts = Layouts.of(**layout)
    pieces = [block.count * amount.on(layouts) for block in workload.blocks for amount in block.parameters]
    return float(sum(pieces).item())


def flops(workload: Workload) -> float:
    layouts = Layouts.of()
    return float(sum(np.sum(block.count * work.flops(layouts)) for block in workload.blocks for work in block.work))


def kept(workload: Workload, policy: Recompute, **layout: int) -> float:
    return float(sum(amount.on(Layouts.of(**layout)).item() for amount in workload.blocks[1].kept[policy]))


def test_gpt3_has_175_billion_parameters() -> None:
    h, layers = 12288, 96
    exact = layers * (12 * h**2 + 13 * h) + 50257 * h + 2048 * h + 2 * h
    assert parameters(transformer(**GPT3)) == exact


def test_llama_has_405_billion_parameters() -> None:
    assert parameters(transformer(**LLAMA_405B)) == 405_853_388_800


def test_a_step_of_gpt_costs_what_megatron_counts() -> None:
    # 72 B s l h^2 (1 + s / 6h + V / 12lh), arXiv 2104.04473 without its recomputation
    h, layers, s, vocabulary = 12288, 96, 2048, 50257
    exact = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (12 * layers * h))
    assert flops(transformer(**GPT3, fused=False)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("tp", "regions"), [(1, False), (8, False), (8, True)])
def test_a_layer_keeps_what_korthikanti_counts(tp: int, regions: bool) -> None:
    workload = transformer(**GPT3, fused=False, dropout=True)
    sbh, scores = 4 * 2048 * 12288, 5 * 96 * 2048 / 12288
    layout = {"tp": tp, "regions": regions, "micro_batch": 4}
    region = 10 / tp if regions else 10
    assert kept(workload, Recompute.NONE, **layout) == pytest.approx(sbh * (region + 24 / tp + scores / tp))
    assert kept(workload, Recompute.SELECTIVE, **layout) == pytest.approx(sbh * (region + 24 / tp))
    assert kept(workload, Recompute.FULL, **layout) == pytest.approx(2 * sbh / (tp if regions else 1))


def test_arrays_describe_many_models_at_once() -> None:
    many = transformer(layers=[12, 24], hidden=[1024, 2048], heads=16, sequence=[512, 1024], vocabulary=50000)
    layouts = Layouts.of(micro_batch=[2, 4])
    one = transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50000)
    for block, alone in zip(many.blocks, one.blocks, strict=True):
        for work, single in zip(block.work, alone.work, strict=True):
            expected = single.flops(Layouts.of(micro_batch=4))
            assert np.broadcast_to(work.flops(layouts), 2)[1] == pytest.approx(expected.item())
