import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import CheckpointError, DataError, NonFiniteError
from paceline.plan import Mesh, Plan
from paceline.runtime.module import parallelize
from paceline.train.callbacks import Callback
from paceline.train.checkpoint import Checkpointer
from paceline.train.data.loader import Loader, MicroBatch
from paceline.train.data.source import ArraySource
from paceline.train.loop import FitSettings, Trainer, derived_seed
from paceline.train.optim import build_optimizer, build_schedule

VOCABULARY, TIME = 7, 5


class Tagger(nn.Module):
    """Two layers over embedded tokens; the loss is the mean over valid targets."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x, y):
        h = self.drop(torch.tanh(self.hidden(self.embed(x))))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def tokens(samples: int, masked: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.integers(0, VOCABULARY, (samples, TIME))
    y = draw.integers(0, VOCABULARY, (samples, TIME))
    # Masks grow along the samples, so that micro-batches differ as much as they can.
    y[draw.random((samples, TIME)) < masked * np.linspace(0, 2, samples)[:, None]] = -100
    return {"x": x, "y": y}


def loader(data, batch=8, micro_batches=1, **settings) -> Loader:
    return Loader(ArraySource(data, "test data"), batch, micro_batches, **settings)


def tagger(dropout: float = 0.0) -> Tagger:
    torch.manual_seed(3)
    return Tagger(dropout).double()


def tensors(data) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in data.items()}


class Noted(Callback):
    def __init__(self):
        self.steps, self.validations, self.checkpoints, self.ends = [], [], [], []
        self.closed = 0

    def on_step(self, report):
        self.steps.append(report)

    def on_validate(self, report):
        self.validations.append(report)

    def on_checkpoint(self, report):
        self.checkpoints.append(report.step)

    def on_end(self, report):
        self.ends.append(report)

    def close(self):
        self.closed += 1


def trainer(
    data,
    steps,
    *,
    module=None,
    mesh="serial",
    batch=8,
    micro_batches=1,
    lr=0.1,
    shuffle=True,
    directory=None,
    validation=None,
    callbacks=(),
    **settings,
) -> Trainer:
    mesh = Mesh.parse(mesh)
    steps_of = loader(data, batch, micro_batches, shuffle=shuffle, divisor=mesh.batch_parts)
    parallel = parallelize(module or tagger(), steps_of.example(), Plan(mesh), devices=["cpu"])
    optimizer = build_optimizer(parallel, "AdamW", {"lr": lr})
    return Trainer(
        parallel,
        optimizer,
        steps_of,
        FitSettings(steps=steps, seed=11, **settings),
        schedule=build_schedule(optimizer, "cosine", steps=6, warmup=2),
        validation=validation,
        checkpoints=Checkpointer(directory, parallel, optimizer, keep=10) if directory else None,
        callbacks=[*callbacks, Noted()],
    )


def saved_steps(directory) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


@pytest.mark.parametrize("mesh", ["serial", "dp=2"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_unequal_micro_batches_give_the_gradient_of_the_full_batch(micro_batches, mesh):
    data = tokens(8, masked=0.4)
    valid = (data["y"] != -100).sum(1)
    assert valid[0] > valid[-1] > 0  # else the test shows nothing
    serial = tagger()
    expected = serial(**tensors(data))
    expected.backward()

    it = trainer(data, 1, micro_batches=micro_batches, mesh=mesh, shuffle=False)
    loss, weight = it._accumulate(next(iter(it.loader)).micro_batches)
    assert weight == valid.sum()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    mine = {shard.name: shard.tensor.grad for shard in it.module.shards() if shard.rank == 0}
    for name, parameter in serial.named_parameters():
        assert torch.allclose(mine[name], parameter.grad, rtol=1e-9, atol=1e-12), name


def test_equal_weights_average_the_micro_batches_as_they_are():
    data = tokens(8, masked=0.4)
    it = trainer(data, 1, micro_batches=2, equal_weights=True, shuffle=False)
    parts = next(iter(it.loader)).micro_batches
    loss, _ = it._accumulate(parts)
    halves = [tagger()(**part.batch).item() for part in parts]
    assert loss == pytest.approx(sum(halves) / 2, rel=1e-12)


def test_a_micro_batch_without_a_valid_token_counts_for_nothing():
    data = tokens(8)
    data["y"][4:] = -100
    it = trainer(data, 1, micro_batches=2, shuffle=False)
    parts = next(iter(it.loader)).micro_batches
    loss, weight = it._accumulate(parts)
    assert weight == 4 * TIME
    assert loss == pytest.approx(tagger()(**parts[0].batch).item(), rel=1e-12)


def test_a_step_without_any_valid_token_is_an_error_that_says_so():
    data = tokens(8)
    data["y"][:] = -100
    with pytest.raises(NonFiniteError, match="step 1 is nan: no micro-batch of this step holds a single valid token"):
        trainer(data, 1, micro_batches=2).fit()


def test_a_batch_that_does_not_divide_is_computed_whole():
    it = trainer(tokens(8), 1, mesh="dp=2")
    odd = tensors(tokens(3))
    loss, _, weight, _ = it.train_step([MicroBatch(odd, whole=True, samples=3)])
    assert weight == 3 * TIME
    assert loss == pytest.approx(tagger()(**odd).item(), rel=1e-12)


def test_training_lowers_the_loss_validates_and_checkpoints_when_due(tmp_path):
    data = tokens(16)
    data["y"] = data["x"]
    held_out = loader(data, 8)
    it = trainer(
        data,
        6,
        lr=0.3,
        validate_every=2,
        checkpoint_every=3,
        clip=1.0,
        directory=tmp_path,
        validation=lambda: (part for step in held_out.epoch() for part in step.micro_batches),
    )
    end = it.fit()
    (seen,) = it.callbacks
    assert [report.step for report in seen.steps] == [1, 2, 3, 4, 5, 6]
    assert seen.steps[-1].loss < 0.5 * seen.steps[0].loss
    assert seen.steps[0].weight == 8 * TIME and seen.steps[0].learning_rate == pytest.approx(0.15)
    assert [report.step for report in seen.validations] == [2, 4, 6]
    assert all(report.weight == 16 * TIME for report in seen.validations)
    assert seen.checkpoints == [3, 6] == saved_steps(tmp_path)
    assert end.signal is None and end.step == 6 and seen.closed == 1
    assert it.module.training


def test_validation_is_in_eval_mode_and_weighted_by_tokens():
    data = tokens(8, masked=0.4)
    parts = next(iter(loader(data, 8, 4, shuffle=False))).micro_batches
    it = trainer(data, 1, module=tagger(dropout=0.9), validation=lambda: parts)
    expected = tagger(dropout=0.9).eval()(**tensors(data)).item()
    assert it.validate().loss == pytest.approx(expected, rel=1e-12)
    assert all(p.grad is None for p in it.module.parameters())


@pytest.mark.parametrize("mesh", ["serial", "fsdp=2"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_resumed_run_repeats_the_loss_curve_bit_for_bit_with_dropout(micro_batches, mesh, tmp_path):
    data = tokens(24)
    made = {"module": tagger(dropout=0.5), "micro_batches": micro_batches, "mesh": mesh, "directory": tmp_path}
    straight = trainer(data, 6, checkpoint_every=2, **made)
    straight.fit()

    torch.manual_seed(99)  # the global generator does not matter
    resumed = trainer(data, 6, **made)
    resumed.load_state_dict(resumed.checkpoints.restore(tmp_path / "step-00000002"))
    resumed.fit()
    before = [(r.step, r.loss, r.grad_norm, r.learning_rate) for r in straight.callbacks[-1].steps]
    after = [(r.step, r.loss, r.grad_norm, r.learning_rate) for r in resumed.callbacks[-1].steps]
    assert after == before[2:]
    for mine, theirs in zip(resumed.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_checkpoints_there_is_nothing_to_resume():
    with pytest.raises(CheckpointError, match="no checkpoints to resume from"):
        trainer(tokens(8), 1).resume()


def test_seeds_depend_on_run_step_and_micro_batch():
    seeds = {derived_seed(seed, step, part) for seed in range(3) for step in range(5) for part in range(4)}
    assert len(seeds) == 60 and all(0 <= seed < 2**63 for seed in seeds)


class Breaks(Tagger):
    """Breaks on a batch that holds the last token: in its loss, or in the slope of one term alone."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def forward(self, x, y):
        sound = 1 - (x == VOCABULARY - 1).any().double()
        loss = super().forward(x, y)
        if self.what == "loss":
            return loss + torch.log(sound) * self.hidden.bias.sum()
        return loss + torch.sqrt(self.head.bias * 0 + sound).sum()


@pytest.mark.parametrize("mesh", ["serial", "fsdp=2"])
@pytest.mark.parametrize(
    ("what", "says", "first"),
    [("loss", "is (nan|-?inf)", "hidden.bias"), ("slope", "is finite", "head.bias")],
)
def test_nan_names_the_step_and_the_first_parameter(what, says, first, mesh, tmp_path):
    data = tokens(24)
    data["x"] %= VOCABULARY - 1
    data["x"][20, 3] = VOCABULARY - 1  # the third step
    module = Breaks(what).double()
    it = trainer(data, 6, module=module, mesh=mesh, shuffle=False, checkpoint_every=1, clip=1.0, directory=tmp_path)
    with pytest.raises(NonFiniteError, match=f"loss of step 3 {says}; the first parameter .* '{first}'.*up to step 2"):
        it.fit()
    it.checkpoints.wait()
    assert saved_steps(tmp_path) == [1, 2]
    kept = {name: tensor.clone() for name, tensor in it.module.state_dict().items()}
    it.checkpoints.restore()
    assert all(torch.equal(kept[name], tensor) for name, tensor in it.module.state_dict().items())
    assert it.callbacks[-1].closed == 1 and it.callbacks[-1].ends == []


class Interrupts(Callback):
    """Sends this process a signal during a step, as a terminal would."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step(self, report):
        if report.step == self.step:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number, tmp_path):
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    it = trainer(tokens(16), 6, callbacks=[Interrupts(2, number)], directory=tmp_path)
    end = it.fit()
    assert (end.signal, end.step) == (number, len(it.callbacks[-1].steps))
    assert saved_steps(tmp_path) == [end.step] and end.step in (2, 3)
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_stops_at_once():
    it = trainer(tokens(16), 6, callbacks=[Interrupts(1, signal.SIGINT), Interrupts(1, signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        it.fit()
    assert it.step == 1 and it.callbacks[-1].closed == 1


def test_data_that_ends_is_an_error():
    class Once(Loader):
        def __iter__(self):
            return self.epoch()

    it = trainer(tokens(16), 6)
    it.loader = Once(ArraySource(tokens(16), "test data"), 8)
    with pytest.raises(DataError, match="ended after step 2 of 6"):
        it.fit()
