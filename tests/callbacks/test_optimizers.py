"""Nothing revives: zeros hold exactly after every step, for every optimizer in torch."""

import inspect
import itertools
import warnings

import pytest
import torch
from helpers import Lit, Watch, clone, loader, masked_values, mlp, trainer
from torch import nn

from sparsecomp import Levels, Magnitude, OneShot, Pruning, Rewind, Selection

FOREACH = ({"foreach": False}, {"foreach": True})

# Settings that change what an optimizer remembers or computes, for each that takes dense gradients.
VARIANTS = {
    "ASGD": (*FOREACH, {"maximize": True}, {"weight_decay": 0.1}, {"t0": 2.0}),
    "Adadelta": (*FOREACH, {"maximize": True}, {"weight_decay": 0.1}),
    "Adafactor": (*FOREACH, {"maximize": True}, {"weight_decay": 0.1}),
    "Adagrad": (
        *FOREACH,
        {"fused": True},
        {"maximize": True},
        {"weight_decay": 0.1, "lr_decay": 0.1},
        {"initial_accumulator_value": 0.5},
    ),
    "Adam": (
        *FOREACH,
        {"fused": True},
        {"fused": True, "amsgrad": True},
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "AdamW": (*FOREACH, {"fused": True}, {"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.5}),
    "Adamax": (*FOREACH, {"maximize": True}, {"weight_decay": 0.1}),
    "NAdam": (
        *FOREACH,
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RAdam": (
        *FOREACH,
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RMSprop": (
        *FOREACH,
        {"momentum": 0.9},
        {"centered": True},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "foreach": True},
        {"maximize": True},
    ),
    "Rprop": (*FOREACH, {"maximize": True}),
    "SGD": (
        *FOREACH,
        {"fused": True, "momentum": 0.9},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.1, "foreach": True},
    ),
}
# These move weights whose gradient and state are zero, and are held by masking after each step.
MOVERS = {"LBFGS": ({}, {"line_search_fn": "strong_wolfe"}), "Muon": ({}, {"nesterov": False}, {"weight_decay": 0.0})}
REFUSED = {"SparseAdam"}

CASES = [
    pytest.param(name, options, id=f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}")
    for name, variants in VARIANTS.items()
    for options in variants
]


class Half(Lit):
    """Only matrices for Muon, all parameters for the others."""

    def configure_optimizers(self):
        return self.make_optimizer([p for p in self.parameters() if p.dim() == 2])


def train(lit, rewind):
    """50 and then 90%; returns the pruner and, after each batch, (step, sparsity, nonzero masked weights, the weights)."""
    pruner = Pruning(Magnitude(), Levels((0.5, 0.9), begin=5, every=5, unit="step"), rewind=rewind)
    seen = []

    def look(trainer, module):
        # The parameters as the optimizer's last step left them: this runs before the pruner.
        masked = masked_values(module, pruner.masks)
        seen.append((trainer.global_step, pruner.sparsity, int(masked.count_nonzero()), clone(module.net[0].weight)))

    trainer(Watch(on_train_batch_end=look), pruner, max_steps=16, max_epochs=-1).fit(lit, loader())
    return pruner, seen


@pytest.mark.parametrize("rewind", [None, Rewind(at=2)], ids=["plain", "rewind"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_zeros_hold_after_every_step(name, options, rewind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lit = Lit(mlp(), lambda parameters: getattr(torch.optim, name)(parameters, **options))
    pruner, seen = train(lit, rewind)
    assert [event.after for event in pruner.events] == [0.5, 0.9]
    assert [event.rewound for event in pruner.events] == [rewind is not None] * 2
    assert [nonzero for *_, nonzero, _ in seen] == [0] * 16
    assert [sparsity for _, sparsity, *_ in seen] == [0.0] * 5 + [0.5] * 5 + [0.9] * 6
    # And training went on: kept weights moved at every step.
    assert all(not torch.equal(a[-1], b[-1]) for a, b in itertools.pairwise(seen))
    assert pruner._handles == []


@pytest.mark.parametrize("rewind", [None, Rewind(at=2)], ids=["plain", "rewind"])
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(name, options, id=f"{name}-{options}") for name, variants in MOVERS.items() for options in variants],
)
def test_optimizers_that_move_masked_weights_are_held_with_one_warning(name, options, rewind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lit = Half(mlp(), lambda parameters: getattr(torch.optim, name)(parameters, lr=0.1, **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner, seen = train(lit, rewind)
    said = [str(w.message) for w in caught if "from now on they are zeroed after each optimizer step" in str(w.message)]
    assert len(said) == 1
    assert "net.0.weight" in said[0]
    assert f"({name})" in said[0]
    assert pruner.sparsity == 0.9
    nonzero = {step: count for step, _, count, _ in seen}
    # The first step after the first event shows it; from the next one on zeros hold within the step itself.
    assert nonzero[6] > 0
    assert [count for step, count in nonzero.items() if step > 6] == [0] * 10


def test_a_mover_is_masked_before_the_next_batch_sees_it():
    lit = Half(mlp(), lambda parameters: torch.optim.Muon(parameters, lr=0.1))
    pruner, seen = Pruning(Magnitude(), OneShot(0.9, at=2, unit="step")), []
    look = Watch(on_train_batch_start=lambda t, m: seen.append(int(masked_values(m, pruner.masks).count_nonzero())))
    with pytest.warns(UserWarning, match="Masked weights of net.0.weight"):
        trainer(pruner, look, max_epochs=2).fit(lit, loader())
    assert seen == [0] * 8


class Embedded(Lit):
    def __init__(self, optimizer):
        super().__init__(nn.Sequential(nn.EmbeddingBag(16, 8, sparse=True), nn.Linear(8, 4)), optimizer)


def test_sparse_adam_is_refused_by_name():
    lit = Lit(mlp(), torch.optim.SparseAdam)
    before = clone(lit.state_dict())
    with pytest.raises(
        TypeError, match=r"SparseAdam takes sparse gradients only.* it has net\.0\.weight, net\.2\.weight"
    ):
        trainer(Pruning(Magnitude(), OneShot(0.5, at=1))).fit(lit, loader())
    assert all(torch.equal(before[name], tensor) for name, tensor in lit.state_dict().items())


class Both(Lit):
    """SparseAdam for a sparse embedding, SGD for the rest, by hand."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.EmbeddingBag(16, 8, sparse=True), nn.Linear(8, 4)))
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.SparseAdam(list(self.net[0].parameters())),
            torch.optim.SGD(self.net[1].parameters(), lr=0.1, momentum=0.9),
        ]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(((batch[0] > 0).long(), batch[1]), batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


def test_sparse_adam_beside_the_selection_is_fine():
    lit, pruner = Both(), Pruning(Magnitude(), OneShot(0.75, at=1))
    trainer(pruner, max_epochs=2).fit(lit, loader())
    assert pruner.sparsity == 0.75
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


def test_a_sparse_embedding_in_the_selection_is_refused():
    with pytest.raises(TypeError, match=r"'net\.0\.weight' belongs to an embedding with sparse=True"):
        trainer(Pruning(Magnitude(), OneShot(0.5, at=1), selection=Selection(include=["net.0.weight"]))).fit(
            Both(), loader()
        )


def test_every_optimizer_of_torch_is_covered():
    exported = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert exported == VARIANTS.keys() | MOVERS.keys() | REFUSED


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_variants_cover_every_switch_a_cpu_has(name):
    """A new option of an optimizer, as amsgrad once was, is seen here."""
    numbers = {"params", "lr", "betas", "eps", "alpha", "rho", "lambd", "d", "beta2_decay", "etas", "step_sizes"}
    no_cpu = {"capturable", "differentiable"}  # CUDA graphs; a graph through the step, which no Trainer builds
    covered = {option for options in VARIANTS[name] for option in options}
    switches = set(inspect.signature(getattr(torch.optim, name)).parameters) - numbers - no_cpu
    assert switches - covered <= {"momentum_decay"}
