"""Every schedule starts and ends exactly where it says, and the log says what is measured.

https://github.com/intel/neural-compressor/pull/89, https://github.com/intel/neural-compressor/issues/1088 and
https://github.com/neuralmagic/sparseml/pull/1283
"""

import csv
import itertools
from dataclasses import dataclass

import pytest
import torch
from helpers import Lit, Watch, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger

from sparsecomp import Cosine, Geometric, Levels, Linear, Magnitude, OneShot, Polynomial, Pruning, Schedule

START, END, INITIAL, FINAL = 1, 4, 0.05, 0.8
EPOCHS, STEPS = 6, 4  # steps an epoch


@dataclass(frozen=True)
class Root(Schedule):
    """A user's own schedule."""

    final_sparsity: float
    begin: float
    end: float
    initial_sparsity: float = 0.0
    every: float = 1
    unit: str = "epoch"

    def _positions(self):
        count = round((self.end - self.begin) / self.every) + 1
        return [self.begin + i * self.every for i in range(count)]

    def _sparsity_of(self, index):
        share = index / max(1, len(self.positions) - 1)
        return self.initial_sparsity + (self.final_sparsity - self.initial_sparsity) * share**0.5


def levels(final_sparsity, begin, end, every, initial_sparsity, unit):
    count = round((end - begin) / every)
    middle = [initial_sparsity + (final_sparsity - initial_sparsity) * i / count for i in range(count)] if count else []
    return Levels((*middle, final_sparsity), begin=begin, every=every, unit=unit)


RAMPS = {
    "linear": Linear,
    "cubic": Polynomial,
    "quadratic": lambda **kwargs: Polynomial(**kwargs, power=2),
    "root": lambda **kwargs: Polynomial(**kwargs, power=0.5),
    "cosine": Cosine,
    "levels": levels,
    "own": Root,
}
UNITS = {"epoch": (1, 4, 1), "step": (4, 16, 3), "fraction": (0.1, 0.7, 0.1)}


def ramp(kind, unit, final=FINAL, initial=INITIAL):
    begin, end, every = UNITS[unit]
    return RAMPS[kind](final_sparsity=final, begin=begin, end=end, every=every, initial_sparsity=initial, unit=unit)


def around(unit):
    return 1 if unit != "fraction" else 0.01


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", RAMPS)
@pytest.mark.parametrize(("initial", "final"), [(0.05, 0.8), (0.0, 0.9), (0.1, 0.7), (0.0, 0.1 + 0.2), (0.3, 0.3)])
def test_ramps_begin_and_end_exactly(kind, unit, initial, final):
    schedule, (begin, end, _) = ramp(kind, unit, final, initial), UNITS[unit]
    assert schedule.positions[0] == begin
    assert schedule.positions[-1] == end
    assert schedule.sparsity(begin - around(unit)) == 0.0
    assert schedule.sparsity(begin) == initial
    assert schedule.sparsity(end) == schedule.final_sparsity == final
    assert schedule.sparsity(1.0 if unit == "fraction" else end + 100) == final
    values = [schedule.sparsity(position) for position in schedule.positions]
    assert all(a <= b for a, b in itertools.pairwise(values))
    assert schedule.is_monotone
    assert all(initial <= value <= final for value in values)


@pytest.mark.parametrize(
    ("make", "value_at_the_middle"),
    [
        (Linear, 0.45),
        (Polynomial, 0.8 - 0.7 * 0.125),
        (lambda **k: Polynomial(**k, power=2), 0.8 - 0.7 * 0.25),
        (Cosine, 0.45),
    ],
)
def test_the_interpolation_is_the_one_asked_for(make, value_at_the_middle):
    schedule = make(final_sparsity=0.8, initial_sparsity=0.1, begin=2, end=6)
    assert schedule.sparsity(4) == pytest.approx(value_at_the_middle, abs=1e-12)
    cosine = Cosine(0.8, initial_sparsity=0.1, begin=2, end=6)
    assert cosine.sparsity(3) == pytest.approx(0.1 + 0.7 * (1 - 0.5**0.5) / 2, abs=1e-12)


@pytest.mark.parametrize("kind", RAMPS)
@pytest.mark.parametrize(
    ("unit", "at"), [("epoch", 3), ("epoch", 0), ("step", 7), ("fraction", 0.5), ("fraction", 0.0)]
)
def test_start_equal_to_end_is_one_shot(kind, unit, at):
    schedule = RAMPS[kind](
        final_sparsity=FINAL, begin=at, end=at, every=around(unit), initial_sparsity=INITIAL, unit=unit
    )
    if kind == "own":
        schedule = Root(FINAL, at, at, FINAL, around(unit), unit)
    assert schedule.positions == (at,)
    assert schedule.sparsity(at) == FINAL == schedule.final_sparsity
    assert schedule.is_event(at)
    assert not schedule.is_event(at + around(unit))


@pytest.mark.parametrize("rounds", [1, 2, 3, 7])
@pytest.mark.parametrize("final", [0.8, 0.9, 0.95, 0.1 + 0.2])
def test_exponential(rounds, final):
    schedule = Geometric(final, rounds=rounds, begin=START)
    assert schedule.sparsity(START - 1) == 0.0
    assert schedule.sparsity(START + rounds - 1) == final
    remaining = [1.0] + [1 - schedule.sparsity(START + r) for r in range(rounds)]
    assert [b / a for a, b in itertools.pairwise(remaining)] == pytest.approx([(1 - final) ** (1 / rounds)] * rounds)


def test_constant():
    schedule = OneShot(FINAL, at=START)
    assert [schedule.sparsity(p) for p in range(4)] == [0.0, FINAL, FINAL, FINAL]


@pytest.mark.parametrize("every", [2, 5, 100])
def test_an_end_that_is_no_multiple_is_still_reached(every):
    schedule = Linear(FINAL, begin=1, end=4, every=every, initial_sparsity=INITIAL)
    assert schedule.positions[-1] == 4
    assert schedule.sparsity(1) == INITIAL
    assert schedule.sparsity(4) == FINAL


RUN = {f"{kind}_{unit}": ramp(kind, unit) for kind in RAMPS for unit in UNITS}
RUN |= {f"geometric_{u}": Geometric(FINAL, rounds=3, begin=b, every=e, unit=u) for u, (b, _, e) in UNITS.items()}
RUN |= {f"constant_{u}": OneShot(FINAL, at=b, unit=u) for u, (b, _, _) in UNITS.items()}


@pytest.mark.parametrize("kind", RUN)
def test_the_log_is_what_is_measured(tmp_path, kind):
    schedule, measured = RUN[kind], []
    pruner = Pruning(Magnitude(), schedule)

    def look(trainer, module):
        live = dict(module.named_parameters())
        zeros = sum(int((live[name] == 0).sum()) for name in pruner.masks)
        assert pruner.sparsity == zeros / 640
        step = trainer.global_step
        position = {"step": step, "epoch": step // STEPS, "fraction": step / (EPOCHS * STEPS)}[schedule.unit]
        assert zeros == int(schedule.sparsity(position) * 640 + 0.5)
        measured.append(zeros / 640)

    logger = CSVLogger(tmp_path, version=0)
    t = trainer(pruner, Watch(on_train_batch_end=look), logger=logger, max_epochs=EPOCHS)
    t.fit(Lit(mlp()), loader(), loader())
    assert len(measured) == EPOCHS * STEPS
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        logged = [float(row["pruning/sparsity"]) for row in csv.DictReader(file) if row["pruning/sparsity"]]
    assert logged == [float(torch.tensor(value)) for value in measured[STEPS - 1 :: STEPS]]
    assert logged[-1] == float(torch.tensor(FINAL))
    assert pruner.sparsity == measured[-1] == FINAL
    assert [e.target for e in pruner.events] == [schedule.sparsity(p) for p in schedule.positions]
    assert pruner.events[-1].after == FINAL


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_an_end_on_the_last_step_of_the_training_is_reached(unit):
    last = {"epoch": EPOCHS, "step": EPOCHS * STEPS}[unit]
    pruner = Pruning(Magnitude(), Linear(FINAL, begin=1, end=last, every=1, unit=unit))
    trainer(pruner, max_epochs=EPOCHS).fit(Lit(mlp()), loader())
    assert pruner.sparsity == FINAL
    pruner = Pruning(Magnitude(), Linear(FINAL, begin=0.0, end=1.0, every=0.25, unit="fraction"))
    trainer(pruner, max_epochs=EPOCHS).fit(Lit(mlp()), loader())
    assert pruner.sparsity == FINAL
