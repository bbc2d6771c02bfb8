import ast
from pathlib import Path

import pytest
import torch

from paceline.program.factory import load_factory
from paceline.train.model import build_module
from paceline.train.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
build = load_factory("gpt.py:build", RECIPES)
sample = load_factory("gpt.py:sample", RECIPES)


def small(**settings):
    torch.manual_seed(0)
    return build(width=32, layers=2, heads=2, context=16, batch=3, **settings)


def test_the_demo_has_four_to_six_million_parameters():
    recipe = load_recipe(RECIPES / "gpt-stdlib.yaml")
    module = build_module(recipe)
    assert 4e6 <= sum(p.numel() for p in module.parameters()) <= 6e6
    assert recipe.data.sequence == module.context
    again = build_module(recipe)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_a_position_sees_itself_and_what_is_before_it():
    module, batch = small()
    before = module.logits(batch["tokens"])
    batch["tokens"][:, 9] += 1
    changed = (module.logits(batch["tokens"] % 256) - before).abs().amax(dim=(0, 2)) > 0
    assert changed.tolist() == [False] * 9 + [True] * 7


@pytest.mark.parametrize("tied", [False, True])
def test_the_untrained_loss_is_that_of_a_uniform_guess(tied):
    module, batch = small(tied=tied)
    assert module(**batch).item() == pytest.approx(5.545, abs=0.15)  # ln 256
    assert (module.head.weight is module.token.weight) == tied


def test_masked_targets_count_for_nothing():
    module, batch = small()
    half = {key: value[:, :8] for key, value in batch.items()}
    batch["targets"][:, 8:] = -100
    assert torch.allclose(module(**batch), module(**half), atol=1e-6)


def test_a_sample_goes_on_from_its_prompt_the_same_for_the_same_seed():
    module, _ = small(dropout=0.5)
    text = sample(module, prompt="def f(", length=40, seed=3)
    assert text.startswith("def f(")
    assert text == sample(module, prompt="def f(", length=40, seed=3) != sample(module, prompt="def f(", length=40)
    greedy = sample(module, prompt="x", length=5, temperature=0)
    assert greedy == sample(module, prompt="x", length=5, temperature=0, seed=9)
    assert module.training and sample(module, prompt="", length=1)


def test_recipes_need_nothing_but_pytorch():
    for path in RECIPES.glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        roots = {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        assert roots <= {"__future__", "torch"}, path
