"""Two artefacts, both named: the ticket has the rewound weights, `trained` the final ones, and so has the model in memory.

https://github.com/microsoft/nni/pull/2559, https://github.com/microsoft/nni/issues/2313 and
https://github.com/VainF/Torch-Pruning/issues/95
"""

import json
from pathlib import Path

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open

from sparsecomp import Geometric, Levels, LotteryTicketPruning, Magnitude, Pruning, Rewind, load_ticket


def read(path):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["sparsecomp"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fit(folder, pruner, norm=True, epochs=6, look=lambda *_: None, **options):
    module, at_step = Lit(mlp(norm=norm)), {}
    at_step[0] = clone(dict(module.state_dict()))

    def remember(trainer, module):
        at_step.setdefault(trainer.global_step, clone(dict(module.state_dict())))
        look(trainer, module)

    t = trainer(pruner, Watch(on_train_batch_end=remember), max_epochs=epochs, default_root_dir=folder, **options)
    t.fit(module, loader(), loader())
    return module, at_step, t


@pytest.mark.parametrize("at", [0, 2])
def test_both_files_hold_what_they_are_named_for(tmp_path, at):
    pruner = LotteryTicketPruning(Geometric(0.8, rounds=3, begin=1), rewind=Rewind(at=at))
    module, at_step, _ = fit(tmp_path, pruner)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ticket.safetensors", "trained.safetensors"]
    assert {kind: Path(path).name for kind, path in pruner.ticket_files.items()} == {
        "ticket": "ticket.safetensors",
        "trained": "trained.safetensors",
    }
    final = dict(module.state_dict())
    for kind, expected in (("ticket", at_step[at]), ("trained", final)):
        header, tensors = read(tmp_path / f"{kind}.safetensors")
        assert header["kind"] == kind
        assert header["sparsity"] == 0.8
        masks = {name.removeprefix("mask."): t for name, t in tensors.items() if name.startswith("mask.")}
        assert_same(dict(sorted(masks.items())), dict(sorted(pruner.masks.items())))
        weights = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
        assert {name for name, _ in module.named_parameters()} <= weights.keys()
        for name, value in weights.items():  # with biases and norms
            assert_same(value, expected[name] * masks.get(name, torch.tensor(1)).to(value.dtype), name)
    ticket, trained = (read(tmp_path / f"{kind}.safetensors")[1] for kind in ("ticket", "trained"))
    kept = pruner.masks["net.3.weight"]  # of the first layer some feed nothing any more and do not train
    assert (ticket["weight.net.3.weight"] != trained["weight.net.3.weight"])[kept].all()


@pytest.mark.parametrize("schedule", [Levels((0.5, 0.8), begin=1), Levels((0.5, 0.8), begin=3, every=3)])
def test_the_model_in_memory_is_the_trained_one(tmp_path, schedule):
    """Also where the last event falls on the very end of the training, which prunes and does not reset."""
    pruner = LotteryTicketPruning(schedule)
    module, at_step, _ = fit(tmp_path, pruner)
    rewound = {name: value * pruner.masks.get(name, torch.tensor(1)) for name, value in at_step[0].items()}
    kept = pruner.masks["net.3.weight"]  # of the first layer some feed nothing any more and do not train
    assert (module.state_dict()["net.3.weight"] != rewound["net.3.weight"])[kept].all()
    assert pruner.sparsity == 0.8
    assert_same(module.state_dict(), at_step[24])


def test_an_event_at_the_end_prunes_without_a_rewind(tmp_path):
    pruner = LotteryTicketPruning(Levels((0.5, 0.8), begin=3, every=3))
    _, at_step, _ = fit(tmp_path, pruner)
    assert [(e.position, e.rewound) for e in pruner.events] == [(3, True), (6, False)]
    # Kept weights are where the last step left them: one step from those before it, not back at the start.
    kept = pruner.masks["net.0.weight"]
    step = (at_step[24]["net.0.weight"] - at_step[23]["net.0.weight"])[kept].abs().mean()
    way = (at_step[24]["net.0.weight"] - at_step[0]["net.0.weight"])[kept].abs().mean()
    assert step < way / 3


def test_a_training_stopped_right_after_a_rewind_says_what_is_left_in_memory(tmp_path):
    pruner = LotteryTicketPruning(Levels((0.5,), begin=2))

    def stop(trainer, module):
        trainer.should_stop = trainer.global_step >= 8

    with pytest.warns(UserWarning, match="the network in memory is the rewound, untrained one"):
        fit(tmp_path, pruner, epochs=6, look=stop)


def test_the_reset_network_is_there_for_who_asks(tmp_path):
    pruner = LotteryTicketPruning(Geometric(0.8, rounds=2, begin=1))
    module, at_step, _ = fit(tmp_path, pruner, norm=False)
    for kind, expected in (("ticket", at_step[0]), ("trained", module.state_dict())):
        fresh = Lit(mlp(seed=9))
        store = load_ticket(pruner.ticket_files[kind], fresh)
        assert_same(dict(sorted(store.masks.items())), dict(sorted(pruner.masks.items())))
        assert_same(
            clone(fresh.state_dict()), {n: v * pruner.masks.get(n, torch.tensor(True)) for n, v in expected.items()}
        )


def test_files_are_never_overwritten(tmp_path):
    for name in ("ticket.safetensors", "ticket-v1.safetensors", "ticket-v2.safetensors"):
        pruner = LotteryTicketPruning(Levels((0.5,), begin=1))
        fit(tmp_path, pruner, epochs=2)
        assert pruner.ticket_files["ticket"] == str(tmp_path / name)
        assert Path(pruner.ticket_files["ticket"]).is_file()


def test_files_lie_with_the_log(tmp_path):
    pruner = LotteryTicketPruning(Levels((0.5,), begin=1))
    _, _, t = fit(tmp_path, pruner, epochs=2, logger=CSVLogger(tmp_path, version=0))
    assert {kind: Path(path) for kind, path in pruner.ticket_files.items()} == {
        kind: Path(t.log_dir) / f"{kind}.safetensors" for kind in ("ticket", "trained")
    }


def test_without_rewinding_there_is_no_ticket(tmp_path):
    pruner = Pruning(Magnitude(), Levels((0.5,), begin=1))
    fit(tmp_path, pruner, epochs=2)
    assert list(tmp_path.iterdir()) == []
    assert pruner.ticket_files == {}
