"""Momentum and moments from before an event do not move pruned weights.

https://github.com/ruihangdu/PyTorch-Deep-Compression/issues/2,
https://github.com/he-y/filter-pruning-geometric-median/issues/47, https://github.com/facebookresearch/open_lth/issues/6
and https://discuss.pytorch.org/t/how-to-prune-weights-in-pytorch/4636
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, loader, masked_values, mlp, trainer
from torch import nn, optim
from torch.func import functional_call

from sparsecomp import Levels, Magnitude, Pruning, Rewind

HOLD = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: optim.Adam(params, lr=0.05),
    "adam_l2": lambda params: optim.Adam(params, lr=0.05, weight_decay=0.1),
    "amsgrad": lambda params: optim.Adam(params, lr=0.05, amsgrad=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.05, weight_decay=0.1),
    "adamw_fused": lambda params: optim.AdamW(params, lr=0.05, fused=True),
    "adamax": lambda params: optim.Adamax(params, lr=0.05),
    "nadam": lambda params: optim.NAdam(params, lr=0.05),
    "radam": lambda params: optim.RAdam(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "adadelta": lambda params: optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: optim.ASGD(params, lr=0.05),
    "adafactor": lambda params: optim.Adafactor(params, lr=0.05),
}
# These move weights whose gradient is zero: seen after the first step, said, and masked after each step from then on.
MOVE = {
    "lbfgs": lambda params: optim.LBFGS(params, lr=0.1, max_iter=3),
    "muon": lambda params: optim.Muon([p for p in params if p.dim() == 2], lr=0.05),
}
ELEMENTWISE = [name for name in HOLD if name != "adafactor"]
STEPS = 20
EVENTS = Levels((0.5, 0.9), begin=6, every=5, unit="step")


def run(make_optimizer, rewind=None, folder=None, **options):
    module, seen = Lit(mlp(), make_optimizer), []

    def look(trainer, module):
        assert not masked_values(module, pruner.masks).any()
        seen.append((clone(pruner.masks), clone(dict(module.named_parameters()))))

    pruner = Pruning(Magnitude(), EVENTS, rewind=rewind)
    t = trainer(pruner, Watch(on_train_batch_end=look), max_epochs=5, default_root_dir=folder, **options)
    t.fit(module, loader())
    assert len(seen) == STEPS
    assert [sum(int((~m).sum()) for m in masks.values()) for masks, _ in seen] == [0] * 5 + [320] * 5 + [576] * 10
    return t, module, pruner, seen


def state_of_masked(t, module, masks):
    """All that the optimizer remembers of masked weights."""
    live = dict(module.named_parameters())
    states = [(t.optimizers[0].state.get(live[name], {}), mask) for name, mask in masks.items()]
    values = [
        v[~mask] for state, mask in states for v in state.values() if torch.is_tensor(v) and v.shape == mask.shape
    ]
    return torch.cat(values) if values else torch.zeros(1)


def test_all_optimizers_of_torch_are_here():
    made = {type(make(list(mlp().parameters()))).__name__ for make in (HOLD | MOVE).values()}
    known = {
        name for name, value in vars(optim).items() if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    # SparseAdam takes sparse gradients only and is refused.
    assert made == known - {"Optimizer", "SparseAdam"}


@pytest.mark.parametrize("optimizer", HOLD)
def test_pruned_weights_are_zero_after_every_step_with_a_rewind(tmp_path, optimizer):
    _, module, pruner, _ = run(HOLD[optimizer], Rewind(at=2), tmp_path)  # with no warning: nothing moved
    assert not masked_values(module, pruner.masks).any()


@pytest.mark.parametrize("optimizer", HOLD)
def test_pruned_weights_are_zero_after_every_step(optimizer):
    _, module, pruner, _ = run(HOLD[optimizer])  # with no warning: nothing moved
    assert not masked_values(module, pruner.masks).any()


@pytest.mark.parametrize("optimizer", MOVE)
def test_optimizers_that_move_all_the_same_are_held_too(optimizer):
    with pytest.warns(UserWarning, match=r"moved although their gradients are zero \((LBFGS|Muon)\)"):
        _, module, pruner, _ = run(MOVE[optimizer])
    assert not masked_values(module, pruner.masks).any()


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_saved_state_is_zero_under_the_mask_and_needs_no_more_masking(tmp_path, optimizer):
    t, module, pruner, _ = run(HOLD[optimizer])
    t.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    masks = saved["callbacks"]["sparsecomp.pruning"]["masks"]
    assert not any(saved["state_dict"][name][~mask].any() for name, mask in masks.items())
    assert not state_of_masked(t, module, masks).any()
    # Even a step without any pruner cannot revive them, as long as their gradients are zero.
    module.zero_grad()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    t.optimizers[0].step()
    assert not masked_values(module, pruner.masks).any()


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    [*((name, None) for name in ELEMENTWISE), *((name, 0.05) for name in ("momentum", "adam", "adamw"))],
)
def test_kept_weights_go_the_way_of_a_network_that_never_had_the_others(optimizer, clip):
    """Against a plain loop that keeps dense weights and multiplies them by the same masks in the forward pass."""
    _, _, _, seen = run(HOLD[optimizer], gradient_clip_val=clip)
    net = mlp()
    step = HOLD[optimizer](net.parameters())
    masks = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    batches = list(loader()) * 5
    for index, (x, y) in enumerate(batches):
        step.zero_grad()
        out = functional_call(net, {name: p * masks[name] for name, p in net.named_parameters()}, x)
        nn.functional.cross_entropy(out, y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        step.step()
        masks |= {name.removeprefix("net."): mask for name, mask in seen[index][0].items()}
        live = {f"net.{name}": p for name, p in net.named_parameters()}
        assert_same(kept_values(seen[index][1], seen[index][0]), kept_values(live, seen[index][0]))
        assert_same(seen[index][1]["net.0.bias"], live["net.0.bias"].detach())


def test_the_danger_is_real():
    """Masks on weights alone, once, as in the reports: momentum revives them at the next step."""
    net, (x, y) = mlp(), next(iter(loader()))
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    with torch.no_grad():
        net[0].weight[:16] = 0
    net[0].weight.grad[:16] = 0
    optimizer.step()
    assert net[0].weight[:16].any()
