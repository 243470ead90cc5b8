"""Tickets on disk, and training under them."""

import json

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import sparsecomp
from sparsecomp import (
    FixedMasks,
    Layerwise,
    Magnitude,
    MaskStore,
    OneShot,
    Pruning,
    Rewind,
    Selection,
    load_ticket,
    save_ticket,
)
from sparsecomp import prune as prune_once
from sparsecomp.tickets import read_header, unused_path


def saved(folder, module=None, **options):
    """A ticket of a pruned network with batch norm; returns path, network and masks."""
    module = module or mlp(norm=True)
    store = prune_once(module, Magnitude(), 0.6)
    return save_ticket(folder / "some" / "t.safetensors", store, module.state_dict(), **options), module, store


def tampered(path, change):
    """The same file after `change(tensors, header)`."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        header = json.loads(file.metadata()["sparsecomp"])
    change(tensors, header)
    target = path.with_name("tampered.safetensors")
    save_file(tensors, target, metadata={"sparsecomp": json.dumps(header)})
    return target


def test_round_trip(tmp_path):
    path, module, store = saved(tmp_path)
    other = mlp(seed=1, norm=True)
    loaded = load_ticket(path, other)
    assert_same(clone(other.state_dict()), clone(module.state_dict()))
    assert_same(dict(loaded.masks), dict(store.masks))
    assert loaded.sparsity == 0.6
    # It is attached, as long as it lives.
    other.load_state_dict({name: torch.ones_like(t) for name, t in other.state_dict().items()})
    assert loaded.revived() == []


def test_header(tmp_path):
    path, _, store = saved(tmp_path, kind="ticket", provenance={"seed": 3})
    assert read_header(path) == {
        "version": 1,
        "kind": "ticket",
        "shapes": {"0.weight": [32, 16], "3.weight": [4, 32]},
        "sparsity": store.sparsity,
        "provenance": {"sparsecomp": sparsecomp.__version__, "torch": str(torch.__version__), "seed": 3},
    }
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"mask.0.weight", "mask.3.weight"} | {
            f"weight.{name}" for name in mlp(norm=True).state_dict()
        }
        assert file.get_tensor("mask.0.weight").dtype is torch.bool


def test_provenance_of_a_run(tmp_path):
    pruner = Pruning(Magnitude(), OneShot(0.5, at=1), rewind=Rewind(at=2))
    trainer(pruner, max_epochs=2, default_root_dir=tmp_path).fit(Lit(mlp()), loader())
    header = read_header(pruner.ticket_files["ticket"])
    assert (header["kind"], header["sparsity"]) == ("ticket", 0.5)
    assert read_header(pruner.ticket_files["trained"])["kind"] == "trained"
    assert header["provenance"] | {"seed": None, "torch": None, "sparsecomp": None} == {
        "pruner": "Pruning",
        "criterion": "Magnitude()",
        "schedule": repr(OneShot(0.5, at=1)),
        "allocation": "Global(granularity='weight', min_keep=None)",
        "rewind": repr(Rewind(at=2)),
        "last_event": 1,
        "unit": "epoch",
        "seed": None,
        "torch": None,
        "sparsecomp": None,
    }


def test_weights_under_the_masks_are_zero_in_the_file_and_untouched_in_memory(tmp_path):
    module = mlp()
    store = prune_once(module, Magnitude(), 0.6)
    dense = {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}
    before = clone(dense)
    path = save_ticket(tmp_path / "t.safetensors", store, dense)
    assert_same(dense, before)
    other = mlp(seed=1)
    load_ticket(path, other)
    assert torch.equal(other[0].weight.detach(), store.masks["0.weight"].float())


def test_tied_weights_and_unit_masks_with_biases(tmp_path):
    def tied():
        module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        module[2].weight = module[0].weight
        return module

    module = tied()
    store = prune_once(module, Magnitude(), 0.5, allocation=Layerwise("unit"))
    path = save_ticket(tmp_path / "t.safetensors", store, module.state_dict())
    other = tied()
    loaded = load_ticket(path, other)
    assert_same(clone(other.state_dict()), clone(module.state_dict()))
    assert set(loaded.masks) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert other[2].weight is other[0].weight


def test_a_narrower_selection(tmp_path):
    module, selection = mlp(), Selection(exclude=["2"])
    store = prune_once(module, Magnitude(), 0.6, selection=selection)
    path = save_ticket(tmp_path / "t.safetensors", store, module.state_dict())
    assert list(load_ticket(path, mlp(), selection).masks) == ["0.weight"]
    with pytest.raises(
        ValueError, match=r"has no mask for 2\.weight; pass the `selection` that its masks were made with"
    ):
        load_ticket(path, mlp())


def test_nothing_is_overwritten(tmp_path):
    path, module, store = saved(tmp_path)
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"`path` is where the ticket is written and must not exist yet; .*does"):
        save_ticket(path, store, module.state_dict())
    assert path.read_bytes() == content
    assert [unused_path(path.parent, stem).name for stem in ("t", "u")] == ["t-v1.safetensors", "u.safetensors"]
    (path.parent / "t-v1.safetensors").touch()
    assert unused_path(path.parent, "t").name == "t-v2.safetensors"


def test_what_cannot_be_saved(tmp_path):
    module = mlp()
    store = MaskStore(module)
    with pytest.raises(ValueError, match=r"`weights` must hold every masked parameter; missing are 2\.weight"):
        save_ticket(tmp_path / "a", store, {"0.weight": module[0].weight})
    with pytest.raises(ValueError, match=r"mask of '2\.weight' has shape \(4, 32\) and the parameter \(4, 20\)"):
        save_ticket(tmp_path / "a", store, module.state_dict() | {"2.weight": torch.ones(4, 20)})
    with pytest.raises(
        ValueError, match="`kind` is what the weights are and must be one of 'ticket', 'trained'; got 'x'"
    ):
        save_ticket(tmp_path / "a", store, module.state_dict(), kind="x")
    assert list(tmp_path.iterdir()) == []


def drop(name):
    return lambda tensors, header: tensors.pop(name)


def wider():
    return nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 4))


def truncated(path):
    target = path.with_name("cut.safetensors")
    target.write_bytes(path.read_bytes()[:-100])
    return target


def text(path):
    target = path.with_name("text.safetensors")
    target.write_text("these are not the weights you are looking for")
    return target


def empty(path):
    target = path.with_name("empty.safetensors")
    target.touch()
    return target


def foreign(metadata):
    def make(path):
        save_file({"weight": torch.ones(2)}, path.with_name("foreign.safetensors"), metadata=metadata)
        return path.with_name("foreign.safetensors")

    return make


def int_mask(tensors, header):
    tensors["mask.3.weight"] = tensors["mask.3.weight"].to(torch.int8)


def short_mask(tensors, header):
    tensors["mask.3.weight"] = tensors["mask.3.weight"][:, :20].contiguous()


def foreign_mask(tensors, header):
    tensors["mask.9.weight"] = torch.ones(2) > 0


BROKEN = {
    "truncated": (
        truncated,
        ValueError,
        r"cut\.safetensors cannot be read as a safetensors file \(truncated or foreign\)",
    ),
    "text": (text, ValueError, r"text\.safetensors cannot be read as a safetensors file"),
    "empty": (empty, ValueError, r"empty\.safetensors cannot be read as a safetensors file"),
    "no_metadata": (foreign(None), ValueError, "is a safetensors file without a sparsecomp header, no ticket"),
    "other_metadata": (foreign({"format": "pt"}), ValueError, "is a safetensors file without a sparsecomp header"),
    "no_json": (foreign({"sparsecomp": "yes"}), ValueError, "is a safetensors file without a sparsecomp header"),
    "no_object": (foreign({"sparsecomp": "[1]"}), ValueError, "is a safetensors file without a sparsecomp header"),
    "odd_version": (
        lambda path: tampered(path, lambda t, header: header.update(version="one")),
        ValueError,
        "tampered.safetensors",
    ),
    "newer": (
        lambda path: tampered(path, lambda t, header: header.update(version=2)),
        ValueError,
        "has ticket format 2, and this sparsecomp reads up to 1; use a newer one",
    ),
    "no_file": (
        lambda path: path.with_name("none"),
        FileNotFoundError,
        "`path` is a ticket file.*there is none at .*none",
    ),
    "folder": (lambda path: path.parent, FileNotFoundError, "`path` is a ticket file"),
    "mask_missing": (lambda path: tampered(path, drop("mask.3.weight")), ValueError, r"has no mask for 3\.weight"),
    "weight_missing": (
        lambda path: tampered(path, drop("weight.3.bias")),
        ValueError,
        r"has no weights for 3\.bias of Sequential",
    ),
    "int_mask": (lambda path: tampered(path, int_mask), TypeError, r"the mask of '3\.weight' .* must be a bool tensor"),
    "short_mask": (
        lambda path: tampered(path, short_mask),
        ValueError,
        r"mask of '3\.weight' has shape \(4, 20\) and the parameter \(4, 32\)",
    ),
    "foreign_mask": (lambda path: tampered(path, foreign_mask), ValueError, r"no mask can be set for '9\.weight'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_change_nothing(case, tmp_path):
    make, error, message = BROKEN[case]
    path = make(saved(tmp_path)[0])
    module = mlp(seed=1, norm=True)
    before = clone(module.state_dict())
    with pytest.raises(error, match=message):
        load_ticket(path, module)
    assert_same(clone(module.state_dict()), before)
    lit = Lit(module)
    with pytest.raises((ValueError, TypeError, FileNotFoundError)):
        trainer(FixedMasks(path)).fit(lit, loader())
    assert_same(clone(module.state_dict()), before)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            wider,
            r"holds '0\.bias' of shape \(32,\), in Sequential it is of shape \(48,\); load .* parameters 0\.weight, 3\.",
        ),
        (lambda: Lit(mlp(norm=True)), r"holds '0\.bias' of shape \(32,\), in Lit it is missing"),
        (
            lambda: nn.Sequential(*mlp(norm=True), nn.Linear(4, 4)),
            r"has no weights for 4\.weight, 4\.bias of Sequential",
        ),
    ],
)
def test_other_networks_are_refused_and_unchanged(other, message, tmp_path):
    path, module = saved(tmp_path)[0], other()
    before = clone(module.state_dict())
    with pytest.raises(ValueError, match=message):
        load_ticket(path, module)
    assert_same(clone(module.state_dict()), before)


# Training under fixed masks


def run_with_ticket(folder, epochs=5):
    pruner = Pruning(Magnitude(), OneShot(0.7, at=2), rewind=Rewind(at=3))
    lit, states = Lit(mlp()), []
    look = Watch(on_train_batch_end=lambda _, m: states.append(clone(m.state_dict())))
    trainer(pruner, look, max_epochs=epochs, default_root_dir=folder).fit(lit, loader())
    return pruner, lit, states


def test_fixed_masks_train_the_ticket_from_its_rewind_point(tmp_path):
    """The third step's state, masked; then the same course as a training that starts there."""
    pruner, _, states = run_with_ticket(tmp_path)
    fixed, lit, seen = FixedMasks(pruner.ticket_files["ticket"]), Lit(mlp(seed=9)), []
    look = Watch(on_train_batch_start=lambda _, m: seen.append(clone(m.state_dict())))
    trainer(fixed, look, max_epochs=2).fit(lit, loader())
    assert_same(dict(fixed.masks), dict(pruner.masks))
    assert_same(seen[0], {name: tensor * fixed.masks.get(name, 1) for name, tensor in states[2].items()})
    assert masked_values(lit, fixed.masks).count_nonzero() == 0
    assert not torch.equal(lit.net[0].weight, seen[0]["net.0.weight"])
    assert (fixed.sparsity, fixed.events) == (0.7, [])


def test_fixed_masks_go_on_from_the_trained_weights(tmp_path):
    pruner, trained, _ = run_with_ticket(tmp_path)
    fixed, lit, seen = FixedMasks(pruner.ticket_files["trained"]), Lit(mlp(seed=9)), []
    look = Watch(on_train_batch_start=lambda _, m: seen.append(clone(m.state_dict())))
    trainer(fixed, look, max_epochs=1).fit(lit, loader())
    assert_same(seen[0], clone(trained.state_dict()))
    assert masked_values(lit, fixed.masks).count_nonzero() == 0


def test_a_second_fit_does_not_put_the_ticket_on_again(tmp_path):
    fixed, lit, seen = FixedMasks(run_with_ticket(tmp_path)[0].ticket_files["ticket"]), Lit(mlp(seed=9)), []
    trainer(fixed, max_epochs=1).fit(lit, loader())
    trained = clone(lit.state_dict())
    look = Watch(on_train_batch_start=lambda _, m: seen.append(clone(m.state_dict())))
    trainer(fixed, look, max_epochs=1).fit(lit, loader())
    assert_same(seen[0], trained)
    other = Lit(mlp(seed=4))
    trainer(fixed, look, max_epochs=1).fit(other, loader())
    assert_same(kept_values(seen[4], fixed.masks), kept_values(ticket_state(fixed.ticket), fixed.masks))


def ticket_state(path):
    lit = Lit(mlp(seed=11))
    load_ticket(path, lit)
    return clone(lit.state_dict())


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_resume_of_fixed_masks_equals_the_uninterrupted_run(tmp_path):
    path = run_with_ticket(tmp_path)[0].ticket_files["ticket"]

    def run(folder, seed, ckpt_path=None):
        fixed, lit = FixedMasks(path), Lit(mlp(seed=seed), lambda p: torch.optim.Adam(p, lr=0.01))
        saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=-1)
        running = trainer(fixed, saver, enable_checkpointing=True, gradient_clip_val=0.1)
        running.fit(lit, loader(), loader(n=8), ckpt_path=ckpt_path)
        return clone([lit.state_dict(), running.optimizers[0].state_dict(), fixed.state_dict()])

    expected = run(tmp_path / "whole", 0)
    assert_same(run(tmp_path / "resumed", 1, tmp_path / "whole" / "epoch=1.ckpt"), expected)


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_fixed_masks_take_the_masks_of_a_pruning_checkpoint(tmp_path):
    """Any pruner's state is any other's, so that a sparse training can be gone on with."""
    saver = ModelCheckpoint(tmp_path / "whole", "{epoch}", save_top_k=-1)
    pruner, seen = Pruning(Magnitude(), OneShot(0.5, at=1)), []
    trainer(pruner, saver, enable_checkpointing=True, max_epochs=2).fit(Lit(mlp()), loader())
    fixed, lit = FixedMasks(run_with_ticket(tmp_path)[0].ticket_files["ticket"]), Lit(mlp(seed=9))
    look = Watch(on_train_batch_start=lambda *_: seen.append(fixed.sparsity))
    saver = ModelCheckpoint(tmp_path / "resumed", "{epoch}", save_top_k=-1)
    running = trainer(fixed, look, saver, enable_checkpointing=True, max_epochs=3)
    running.fit(lit, loader(), ckpt_path=tmp_path / "whole" / "epoch=1.ckpt")
    assert seen == [0.5] * 4
    assert_same(dict(fixed.masks), dict(pruner.masks))
    assert masked_values(lit, fixed.masks).count_nonzero() == 0
