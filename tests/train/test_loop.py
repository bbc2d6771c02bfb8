import copy
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.errors import DataError, NonFiniteError
from paceline.train.callbacks import Callback
from paceline.train.data.loader import Loader, MicroBatch
from paceline.train.data.source import ArraySource
from paceline.train.loop import FitSettings, Trainer, derived_seed
from paceline.train.optim import build_optimizer, build_schedule
from tests.train.serial import Serial

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


def model(dropout: float = 0.0) -> Tagger:
    torch.manual_seed(3)
    return Tagger(dropout).double()


class Losses(Callback):
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


class Store:
    """Keeps every checkpoint in memory."""

    directory = None

    def __init__(self, module, optimizer):
        self.module, self.optimizer, self.saved = module, optimizer, {}

    def save(self, step, extra):
        self.saved[step] = copy.deepcopy((extra, self.module.state_dict(), self.optimizer.state_dict()))

    def wait(self):
        pass


def trainer(data, steps, *, module=None, dropout=0.0, batch=8, micro_batches=1, lr=0.1, **settings) -> Trainer:
    parallel = Serial(module or model(dropout))
    optimizer = build_optimizer(parallel, "AdamW", {"lr": lr})
    callbacks = settings.pop("callbacks", [Losses()])
    validation = settings.pop("validation", None)
    return Trainer(
        parallel,
        optimizer,
        loader(data, batch, micro_batches),
        FitSettings(steps=steps, seed=11, **settings),
        schedule=build_schedule(optimizer, "cosine", steps=6, warmup=2),
        validation=validation,
        checkpoints=Store(parallel, optimizer),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_unequal_micro_batches_give_the_gradient_of_the_full_batch(micro_batches):
    data = tokens(8, masked=0.4)
    valid = (data["y"] != -100).sum(1)
    assert valid[0] > valid[-1] > 0  # else the test shows nothing
    serial = model()
    expected = serial(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
    expected.backward()

    it = trainer(data, 1, micro_batches=micro_batches)
    step = next(iter(loader(data, 8, micro_batches, shuffle=False)))
    loss, weight = it._accumulate(step.micro_batches)
    assert weight == valid.sum()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for (name, mine), (_, theirs) in zip(it.module.user.named_parameters(), serial.named_parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12), name


def test_equal_weights_average_the_micro_batches_as_they_are():
    data = tokens(8, masked=0.4)
    it = trainer(data, 1, micro_batches=2, equal_weights=True)
    step = next(iter(loader(data, 8, 2, shuffle=False)))
    loss, _ = it._accumulate(step.micro_batches)
    halves = [float(model()(**part.batch)) for part in step.micro_batches]
    assert loss == pytest.approx(sum(halves) / 2, rel=1e-12)


def test_a_micro_batch_without_a_valid_token_counts_for_nothing():
    data = tokens(8)
    data["y"][4:] = -100
    it = trainer(data, 1, micro_batches=2)
    step = next(iter(loader(data, 8, 2, shuffle=False)))
    loss, weight = it._accumulate(step.micro_batches)
    assert weight == 4 * TIME
    assert loss == pytest.approx(float(model()(**step.micro_batches[0].batch)), rel=1e-12)


def test_a_step_without_any_valid_token_is_an_error_that_says_so():
    data = tokens(8)
    data["y"][:] = -100
    with pytest.raises(NonFiniteError, match="step 1 is nan: no micro-batch of this step holds a single valid token"):
        trainer(data, 1, micro_batches=2).fit()


def test_whole_batches_are_computed_whole():
    seen = []

    class Recording(Serial):
        def whole(self, **batch):
            seen.append(len(batch["y"]))
            return super().local(**batch)

    it = trainer(tokens(8), 1)
    it.module = Recording(model())
    batch = {key: torch.from_numpy(value) for key, value in tokens(3).items()}
    it.train_step([MicroBatch(batch, whole=True, samples=3)])
    assert seen == [3]


def test_training_lowers_the_loss_validates_and_checkpoints_when_due():
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
        validation=lambda: (part for step in held_out.epoch() for part in step.micro_batches),
    )
    end = it.fit()
    (seen,) = it.callbacks
    assert [report.step for report in seen.steps] == [1, 2, 3, 4, 5, 6]
    assert seen.steps[-1].loss < 0.5 * seen.steps[0].loss
    assert seen.steps[0].weight == 8 * TIME and seen.steps[0].learning_rate == pytest.approx(0.15)
    assert [report.step for report in seen.validations] == [2, 4, 6]
    assert all(report.weight == 16 * TIME for report in seen.validations)
    assert seen.checkpoints == [3, 6] == list(it.checkpoints.saved)
    assert end.signal is None and end.step == 6 and seen.closed == 1
    assert it.module.training


def test_validation_is_in_eval_mode_and_weighted_by_tokens():
    data = tokens(8, masked=0.4)
    parts = next(iter(loader(data, 8, 4, shuffle=False).epoch())).micro_batches
    it = trainer(data, 1, dropout=0.9, validation=lambda: parts)
    whole = {key: torch.from_numpy(value) for key, value in data.items()}
    expected = float(it.module.user.eval()(**whole))
    it.module.train()
    assert it.validate().loss == pytest.approx(expected, rel=1e-12)
    assert all(p.grad is None for p in it.module.parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_resumed_run_repeats_the_loss_curve_bit_for_bit_with_dropout(micro_batches):
    data = tokens(24)
    straight = trainer(data, 6, dropout=0.5, micro_batches=micro_batches, checkpoint_every=2)
    straight.fit()
    extra, module, optimizer = straight.checkpoints.saved[4]

    resumed = trainer(data, 6, dropout=0.5, micro_batches=micro_batches)
    resumed.module.load_state_dict(module)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.load_state_dict(extra)
    resumed.fit()
    before = [(r.step, r.loss, r.grad_norm, r.learning_rate) for r in straight.callbacks[0].steps]
    after = [(r.step, r.loss, r.grad_norm, r.learning_rate) for r in resumed.callbacks[0].steps]
    assert after == before[4:]
    for mine, theirs in zip(resumed.module.parameters(), straight.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_dropout_differs_from_step_to_step_and_from_micro_batch_to_micro_batch():
    seeds = {derived_seed(seed, step, part) for seed in range(3) for step in range(5) for part in range(4)}
    assert len(seeds) == 60 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nan_names_the_step_and_the_first_parameter(what):
    class Breaks(Tagger):
        calls = 0

        def forward(self, x, y):
            self.calls += 1
            loss = super().forward(x, y)
            if self.calls < 3:
                return loss
            if what == "loss":
                return loss * float("nan")
            # The root of zero has no finite slope; the loss itself stays as it is.
            return loss + torch.sqrt(self.head.bias * 0).sum()

    torch.manual_seed(0)
    module = Breaks().double()
    it = trainer(tokens(16), 6, module=module, checkpoint_every=1)
    first = "embed.weight" if what == "loss" else "head.bias"
    says = "loss of step 3 is nan" if what == "loss" else "loss of step 3 is finite"
    with pytest.raises(NonFiniteError, match=f"{says}; the first parameter .* '{first}'.*up to step 2"):
        it.fit()
    assert sorted(it.checkpoints.saved) == [1, 2]
    saved = it.checkpoints.saved[2][1]
    assert all(torch.equal(saved[name], value) for name, value in it.module.state_dict().items())
    assert it.callbacks[0].closed == 1 and it.callbacks[0].ends == []


class Interrupts(Callback):
    """Sends this process a signal during a step, as a terminal would."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step(self, report):
        if report.step == self.step:
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(number):
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    losses = Losses()
    it = trainer(tokens(16), 6, callbacks=[Interrupts(2, number), losses])
    end = it.fit()
    assert (end.signal, end.step) == (number, len(losses.steps))
    assert list(it.checkpoints.saved) == [end.step] and end.step in (2, 3)
    assert signal.getsignal(number) == before


def test_a_second_ctrl_c_stops_at_once():
    losses = Losses()
    it = trainer(tokens(16), 6, callbacks=[losses, Interrupts(1, signal.SIGINT), Interrupts(1, signal.SIGINT)])
    with pytest.raises(KeyboardInterrupt):
        it.fit()
    assert len(losses.steps) == 1 and losses.closed == 1


def test_data_that_ends_is_an_error():
    it = trainer(tokens(16), 6)

    class Ends:
        def __iter__(self):
            return iter(list(loader(tokens(16)).epoch()))

        def close(self):
            pass

    it.loader = Ends()
    with pytest.raises(DataError, match="ended after step 2 of 6"):
        it.fit()
