"""Masks cost one byte a weight in a checkpoint and nothing in exported weights.

https://github.com/neuralmagic/sparseml/issues/633 and https://github.com/microsoft/nni/issues/3094
"""

import pytest
import torch
from helpers import Lit, assert_same, loader, trainer
from torch import nn

from sparsecomp import Layerwise, Levels, Magnitude, Pruning, Random, Selection, save_ticket

PRUNABLE = 16 * 512 + 512 * 4


def build():
    torch.manual_seed(0)
    return Lit(nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 4)))


def tensors_in(value):
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for entry in value for t in tensors_in(entry)] if isinstance(value, list | tuple) else []


def stored_bytes(value):
    """Bytes of all storages, each once: what a file holds, also of a view's hidden rest."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(value)}
    return sum(storages.values())


def run(folder, *pruners):
    module = build()
    t = trainer(*pruners, max_epochs=3)
    t.fit(module, loader(), loader())
    t.save_checkpoint(folder / "run.ckpt")
    torch.save(module.net.state_dict(), folder / "weights.pt")
    return module


@pytest.mark.parametrize(
    "pruner",
    [
        lambda: Pruning(Magnitude(), Levels((0.5, 0.9), begin=1)),
        lambda: Pruning(Random(), Levels((0.5,) * 12, begin=1, unit="step")),
        lambda: Pruning(Magnitude(), Levels((0.5, 0.9), begin=1), Layerwise("unit")),
        lambda: Pruning(Magnitude(), Levels((0.5,), begin=1), selection=Selection(include=["net.0", "*.bias"])),
    ],
)
def test_overhead_is_one_byte_a_prunable_weight(tmp_path, pruner):
    for name in ("dense", "sparse"):
        (tmp_path / name).mkdir()
    pruner = pruner()
    run(tmp_path / "dense")
    module = run(tmp_path / "sparse", pruner)
    dense = torch.load(tmp_path / "dense" / "run.ckpt", weights_only=True)
    sparse = torch.load(tmp_path / "sparse" / "run.ckpt", weights_only=True)
    masks = sparse["callbacks"]["sparsecomp.pruning"]["masks"]
    in_scope = sum(p.numel() for name, p in module.named_parameters() if name in masks)
    assert {mask.dtype for mask in masks.values()} == {torch.bool}
    assert stored_bytes(sparse) - stored_bytes(dense) == in_scope
    # The files: the rest is names and one record an event, none of which grows with the network.
    files = [(tmp_path / name / "run.ckpt").stat().st_size for name in ("sparse", "dense")]
    assert files[0] - files[1] <= in_scope + 1024 * (2 + len(pruner.events))


def test_exported_weights_are_as_large_as_dense_ones(tmp_path):
    for name in ("dense", "sparse"):
        (tmp_path / name).mkdir()
    run(tmp_path / "dense")
    module = run(tmp_path / "sparse", Pruning(Magnitude(), Levels((0.5, 0.9), begin=1)))
    dense, sparse = (torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("dense", "sparse"))
    assert list(sparse) == list(dense)
    assert stored_bytes(sparse) == stored_bytes(dense) == 4 * (PRUNABLE + 516)
    assert (tmp_path / "sparse" / "weights.pt").stat().st_size == (tmp_path / "dense" / "weights.pt").stat().st_size
    assert_same(sparse, module.net.state_dict())


def test_a_checkpoint_does_not_grow_from_fit_to_fit(tmp_path):
    module, pruner, sizes = build(), Pruning(Magnitude(), Levels((0.5, 0.9), begin=1)), []
    for _ in range(3):
        t = trainer(pruner, max_epochs=3)
        t.fit(module, loader())
        t.save_checkpoint(tmp_path / "run.ckpt")
        sizes.append(stored_bytes(torch.load(tmp_path / "run.ckpt", weights_only=True)))
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_ticket_file_is_weights_and_one_byte_a_mask(tmp_path):
    from sparsecomp import prune

    module = build()
    store = prune(module, Magnitude(), 0.9)
    path = save_ticket(tmp_path / "t.safetensors", store, module.state_dict())
    assert path.stat().st_size <= 4 * (PRUNABLE + 516) + PRUNABLE + 2048
