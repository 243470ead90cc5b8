"""By default only weights of linear and convolutional layers are pruned, and the list is printed.

No public thread has just this; see https://github.com/pytorch/tutorials/issues/1054 and
https://github.com/Lam1360/YOLOv3-model-pruning/issues/23
"""

import logging

import pytest
import torch
from helpers import Lit, assert_same, clone, loader, trainer
from torch import nn

from sparsecomp import Magnitude, OneShot, Pruning, Selection, prune


class Free(nn.Module):
    """Parameters of no layer: a scale, a positional table, a gate."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 1e-4))
        self.table = nn.Parameter(torch.full((4, 16), 1e-4))
        self.gate = nn.Parameter(torch.tensor(1e-4))

    def forward(self, x):
        return x * self.scale


LEFT_ALONE = {
    "layer_norm": lambda: nn.LayerNorm(8),
    "layer_norm_2d": lambda: nn.LayerNorm((4, 8)),
    "batch_norm": lambda: nn.BatchNorm1d(8),
    "batch_norm_2d": lambda: nn.BatchNorm2d(8),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "instance_norm": lambda: nn.InstanceNorm1d(8, affine=True),
    "rms_norm": lambda: nn.RMSNorm((4, 8)),
    "embedding": lambda: nn.Embedding(10, 8),
    "embedding_bag": lambda: nn.EmbeddingBag(10, 8),
    "prelu": lambda: nn.PReLU(8),
    "free": Free,
    "bilinear": lambda: nn.Bilinear(4, 4, 2),
}
PRUNED = {
    "linear": (lambda: nn.Linear(8, 8), ["weight"]),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3), ["weight"]),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3), ["weight"]),
    "conv3d": (lambda: nn.Conv3d(4, 4, 3), ["weight"]),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3), ["weight"]),
    "attention": (lambda: nn.MultiheadAttention(8, 2), ["in_proj_weight", "out_proj.weight"]),
    "lstm": (lambda: nn.LSTM(4, 4), ["weight_ih_l0", "weight_hh_l0"]),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


@pytest.mark.parametrize("odd", LEFT_ALONE)
def test_left_alone_by_default(odd):
    torch.manual_seed(0)
    net = nn.ModuleDict({"odd": LEFT_ALONE[odd](), "fc": nn.Linear(16, 16)})
    with torch.no_grad():
        for parameter in net["odd"].parameters():
            parameter.mul_(1e-6)  # what a global threshold would take first
    before = clone(net["odd"].state_dict())
    store = prune(net, Magnitude(), 0.9)
    assert list(store.masks) == ["fc.weight"]
    assert_same(clone(net["odd"].state_dict()), before)


@pytest.mark.parametrize("kind", PRUNED)
def test_pruned_by_default_without_biases(kind):
    make, names = PRUNED[kind]
    net = make()
    assert [entry.name for entry in Selection().resolve(net)] == names


def test_only_on_request():
    net = build()
    assert [e.name for e in Selection().resolve(net)] == ["0.weight", "3.weight"]
    assert [e.name for e in Selection(include=["1.weight"]).resolve(net)] == ["1.weight"]
    assert [e.name for e in Selection(include=[nn.LayerNorm]).resolve(net)] == ["1.weight", "1.bias"]
    assert [e.name for e in Selection(include=["*.bias"]).resolve(net)] == ["0.bias", "1.bias", "3.bias"]
    store = prune(net, Magnitude(), 0.5, selection=Selection(include=["1.weight", "0.weight"]))
    assert list(store.masks) == ["0.weight", "1.weight"]
    embedding = nn.ModuleDict({"emb": nn.Embedding(10, 8), "fc": nn.Linear(8, 2)})
    assert [e.name for e in Selection(include=["emb"]).resolve(embedding)] == ["emb.weight"]
    assert [e.name for e in Selection(include=[nn.Embedding, "fc"]).resolve(embedding)] == ["emb.weight", "fc.weight"]


def test_frozen_parameters_only_on_request():
    net = build()
    net[0].requires_grad_(False)
    assert [e.name for e in Selection().resolve(net)] == ["3.weight"]
    assert [e.name for e in Selection(include=["0.weight"]).resolve(net)] == ["0.weight"]


@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_norms_and_biases_have_no_zero_after_a_training(sparsity):
    module = Lit(build())
    pruner = Pruning(Magnitude(), OneShot(sparsity, at=1))
    trainer(pruner, max_epochs=3).fit(module, loader(), loader())
    assert list(pruner.masks) == ["net.0.weight", "net.3.weight"]
    assert pruner.sparsity == sparsity
    for name in ("0.bias", "1.weight", "1.bias", "3.bias"):
        assert (dict(module.net.named_parameters())[name] != 0).all()


def test_the_list_is_printed_at_the_start(caplog):
    module, at_event = Lit(build()), []
    pruner = Pruning(Magnitude(), OneShot(0.5, at=0), selection=Selection(exclude=["net.3"]))
    with caplog.at_level(logging.INFO):
        trainer(pruner, max_epochs=1).fit(module, loader())
    messages = [record.getMessage() for record in caplog.records]
    (table,) = [index for index, message in enumerate(messages) if "Parameters to prune" in message]
    at_event = [index for index, message in enumerate(messages) if message.startswith("Pruning at")]
    assert table < at_event[0]
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in messages[table].splitlines() if "│" in line]
    assert lines[0] == ["net.0.weight", "Linear", "32 x 16", "512"]
    total = sum(p.numel() for p in module.parameters())
    assert lines[1:] == [["in all", "", f"{512 / total:.1%} of all {total}", "512"]]
