"""A resumed training equals the uninterrupted one bit for bit."""

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import lr_scheduler

from sparsecomp import Geometric, Levels, Magnitude, OneShot, Polynomial, Pruning, Random, Rewind, Selection

# Lightning says that a resumed run keeps its checkpoints elsewhere, which is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")

EPOCHS = 6


def make(seed=0):
    """Adam, a schedule of its own and batch norm: much that a resume can forget."""
    return Lit(
        mlp(seed, norm=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
        lambda optimizer: {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"},
    )


def fit(pruner, folder, saver, seed=0, ckpt_path=None):
    """4 batches and 2 optimizer steps an epoch, with accumulation and clipping; every checkpoint is kept."""
    lit = make(seed)
    torch.manual_seed(seed + 100)
    steps = []
    running = trainer(
        pruner,
        Watch(on_train_batch_start=lambda t, _: steps.append(t.global_step)),
        saver(folder),
        max_epochs=EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        enable_checkpointing=True,
        default_root_dir=folder,
        num_sanity_val_steps=0,
    )
    running.fit(lit, loader(), loader(n=8), ckpt_path=ckpt_path)
    state = [
        lit.state_dict(),
        running.optimizers[0].state_dict(),
        running.lr_scheduler_configs[0].scheduler.state_dict(),
    ]
    return clone([*state, pruner.state_dict()]), steps


def monitored(folder):
    return ModelCheckpoint(folder, "{step}", monitor="val_loss", save_top_k=-1)


def stepwise(folder):
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)


PRUNERS = {
    "epoch": lambda: Pruning(Magnitude(), Levels((0.3, 0.5, 0.7), begin=1, every=2)),
    "step": lambda: Pruning(Magnitude(), Polynomial(0.9, begin=1, end=10, every=2, unit="step")),
    "fraction": lambda: Pruning(Magnitude(), Geometric(0.9, rounds=4, begin=0.0, every=0.25, unit="fraction")),
    "random": lambda: Pruning(Random(), Levels((0.3, 0.5, 0.7), begin=1, every=2), allocation="layerwise"),
    "units": lambda: Pruning(Magnitude(), Levels((0.3, 0.5, 0.7), begin=1, every=2), allocation=_units()),
    "rewind": lambda: Pruning(Magnitude(), Levels((0.3, 0.5, 0.7), begin=1, every=2), rewind=Rewind(at=1)),
}


def _units():
    from sparsecomp import Layerwise

    return Layerwise("unit")


@pytest.mark.parametrize("saver", [monitored, stepwise])
@pytest.mark.parametrize("kind", PRUNERS)
def test_resume_equals_the_uninterrupted_run(kind, saver, tmp_path):
    expected, steps = fit(PRUNERS[kind](), tmp_path / "whole", saver)
    assert steps == sorted([*range(12), *range(12)])
    assert len(expected[-1]["events"]) >= 3
    for step in (2, 4, 6, 10):
        pruner = PRUNERS[kind]()
        resumed, steps = fit(pruner, tmp_path / f"{step}", saver, 1, tmp_path / "whole" / f"step={step}.ckpt")
        assert steps == sorted([*range(step, 12), *range(step, 12)])
        assert_same(resumed, expected)


def test_a_different_seed_is_another_random_run(tmp_path):
    """Or the equality of random masks after a resume would say nothing."""
    (first, _), (second, _) = (fit(PRUNERS["random"](), tmp_path / str(s), stepwise, s) for s in (0, 1))
    assert not torch.equal(first[-1]["masks"]["net.0.weight"], second[-1]["masks"]["net.0.weight"])


def test_a_checkpoint_holds_its_event_and_is_read_without_pickled_classes(tmp_path):
    fit(PRUNERS["rewind"](), tmp_path, monitored)
    for epoch, sparsity in zip(range(1, 7), (0.3, 0.3, 0.5, 0.5, 0.7, 0.7), strict=True):
        saved = torch.load(tmp_path / f"step={2 * epoch}.ckpt", weights_only=True)
        state = saved["callbacks"]["sparsecomp.pruning"]
        dropped = sum(int((~mask).sum()) for mask in state["masks"].values())
        assert dropped == round(sparsity * 640)
        assert state["events"][-1]["after"] == sparsity
        assert set(state["snapshot"]["tensors"]) >= {"net.0.weight", "net.0.bias", "net.1.running_mean"}
        assert not any("mask" in name or "orig" in name for name in saved["state_dict"])


def test_masks_hold_from_the_first_resumed_batch_although_the_schedule_is_over(tmp_path):
    make_pruner = lambda: Pruning(Magnitude(), OneShot(0.8, at=1))  # noqa: E731
    fit(make_pruner(), tmp_path / "whole", monitored)
    pruner, seen = make_pruner(), []
    look = Watch(on_train_batch_start=lambda _, m: seen.append(int(masked_values(m, pruner.masks).count_nonzero())))
    saver = monitored(tmp_path / "resumed")
    running = trainer(pruner, look, saver, enable_checkpointing=True, max_epochs=EPOCHS, accumulate_grad_batches=2)
    running.fit(make(1), loader(), loader(n=8), ckpt_path=tmp_path / "whole" / "step=8.ckpt")
    assert seen == [0] * 8
    assert pruner.sparsity == 0.8
    assert len(pruner.events) == 1


def test_resuming_twice_in_one_process_with_the_same_pruner(tmp_path):
    """What a pruner knows of its last fit gives way to the checkpoint."""
    expected, _ = fit(PRUNERS["epoch"](), tmp_path / "whole", stepwise)
    pruner = PRUNERS["epoch"]()
    for folder in ("once", "twice"):
        resumed, _ = fit(pruner, tmp_path / folder, stepwise, 1, tmp_path / "whole" / "step=2.ckpt")
        assert_same(resumed, expected)


def test_another_unit_goes_on_with_the_masks_and_catches_up(tmp_path):
    fit(PRUNERS["epoch"](), tmp_path / "whole", stepwise)
    pruner = Pruning(Magnitude(), Levels((0.2, 0.6), begin=3, every=3, unit="step"))
    fit(pruner, tmp_path / "resumed", stepwise, 1, tmp_path / "whole" / "step=4.ckpt")
    assert [(e.position, e.unit, e.step, e.before, e.after) for e in pruner.events[1:]] == [
        (3, "step", 4, 0.3, 0.3),
        (6, "step", 6, 0.3, 0.6),
    ]


# Errors


def resume_tampered(tmp_path, change, pruner=None):
    fit(PRUNERS["epoch"](), tmp_path / "whole", stepwise)
    saved = torch.load(tmp_path / "whole" / "step=4.ckpt", weights_only=True)
    change(saved["callbacks"]["sparsecomp.pruning"])
    torch.save(saved, tmp_path / "tampered.ckpt")
    fit(pruner or PRUNERS["epoch"](), tmp_path / "resumed", stepwise, 1, tmp_path / "tampered.ckpt")


def test_masks_of_another_shape_are_named_with_both_shapes(tmp_path):
    def cut(state):
        state["masks"]["net.3.weight"] = state["masks"]["net.3.weight"][:, :20]

    with pytest.raises(ValueError, match=r"mask of 'net\.3\.weight' has shape \(4, 20\) and the parameter \(4, 32\)"):
        resume_tampered(tmp_path, cut)


def test_a_missing_mask_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the saved masks have none for net\.3\.weight; saved are net\.0\.weight"):
        resume_tampered(tmp_path, lambda state: state["masks"].pop("net.3.weight"))


def test_another_selection_is_refused_by_name(tmp_path):
    narrower = Pruning(Magnitude(), OneShot(0.5, at=1), selection=Selection(exclude=["net.3"]))
    with pytest.raises(ValueError, match=r"no mask can be set for 'net\.3\.weight'.* Selected are net\.0\.weight"):
        resume_tampered(tmp_path, lambda state: None, narrower)


def test_a_state_of_a_newer_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the pruning state of this checkpoint has version 9"):
        resume_tampered(tmp_path, lambda state: state.update(version=9))


@pytest.mark.parametrize(("unit", "at"), [("step", 1), ("epoch", 1)])
def test_a_rewind_point_that_is_over_without_a_snapshot(unit, at, tmp_path):
    late = Pruning(Magnitude(), OneShot(0.8, at=5), rewind=Rewind(at=at, unit=unit))
    message = rf"the rewind point, {unit} {at}, is over at {unit} \d and the checkpoint holds no snapshot of it"
    with pytest.raises(ValueError, match=message):
        resume_tampered(tmp_path, lambda state: None, late)


# Two processes

DDP = '''
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
folder = Path(sys.argv[2])
rank = int(sys.argv[3])

import torch
import torch.distributed as dist
from helpers import Lit, clone, loader, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sparsecomp import Criterion, Levels, MaskStore, Pruning, Random, Rewind

torch.set_num_threads(1)


class Disagreeing(Criterion):
    """Scores that every rank draws by itself."""

    def score(self, context):
        return {name: torch.rand(w.shape) for name, w in context.weights.items()}


def run(name, pruner, ckpt_path=None):
    lit = Lit(mlp(seed=10 * rank, norm=True), lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    torch.manual_seed(1000 * rank + len(name))  # each rank, and each run, has its own seed
    running = trainer(
        pruner,
        ModelCheckpoint(folder / name, "{epoch}", monitor="val_loss", save_top_k=-1),
        max_epochs=4,
        devices=2,
        strategy="ddp",
        gradient_clip_val=0.1,
        enable_checkpointing=True,
        default_root_dir=folder / name,
    )
    running.fit(lit, loader(n=64), loader(n=16), ckpt_path=ckpt_path)
    return clone([lit.state_dict(), running.optimizers[0].state_dict(), pruner.state_dict()])


def schedule():
    return Levels((0.3, 0.5, 0.7), begin=1, every=1)


result = {"whole": run("whole", Pruning(Random(), schedule(), rewind=Rewind(at=2)))}
result["resumed"] = run(
    "resumed", Pruning(Random(), schedule(), rewind=Rewind(at=2)), folder / "whole" / "epoch=1.ckpt"
)
result["disagreeing"] = run("disagreeing", Pruning(Disagreeing(), schedule()))
layer = torch.nn.Linear(4, 4)
store = MaskStore(layer)
store.update_({"weight": torch.full((4, 4), rank == 1)})
result["update"] = dict(store.masks)
torch.save(result, folder / f"rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
'''


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two real processes ended with."""
    folder = tmp_path_factory.mktemp("ddp")
    (folder / "script.py").write_text(DDP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
        }
        command = [sys.executable, "script.py", str(Path(__file__).parents[1]), str(folder), str(rank)]
        with (folder / f"log{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(2))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_ddp_resume_equals_the_uninterrupted_run(ranks):
    for rank in ranks:
        assert [event["after"] for event in rank["whole"][2]["events"]] == [0.3, 0.5, 0.7]
    assert_same(ranks[0]["resumed"], ranks[0]["whole"])
    assert_same(ranks[1]["resumed"], ranks[1]["whole"])


def test_ddp_ranks_have_the_same_masks_weights_and_snapshot(ranks):
    for run in ("whole", "resumed", "disagreeing"):
        assert_same(ranks[0][run], ranks[1][run])
    # In the middle of training each rank has batch norm statistics of its own; the snapshot has rank 0's.
    assert "net.1.running_mean" in ranks[0]["whole"][2]["snapshot"]["tensors"]


def test_ddp_masks_that_ranks_disagree_about_are_those_of_rank_zero(ranks):
    for rank in ranks:
        assert not bool(rank["update"]["weight"].any())
        masks = rank["disagreeing"][2]["masks"]
        assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.7 * 640)
        assert all(rank["disagreeing"][0][name][~mask].count_nonzero() == 0 for name, mask in masks.items())


def test_ddp_random_masks_differ_from_event_to_event_only_by_growing(ranks):
    sparsities = [event["after"] for event in ranks[0]["disagreeing"][2]["events"]]
    assert all(a < b for a, b in itertools.pairwise(sparsities))
