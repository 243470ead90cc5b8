"""Ranks with different seeds hold equal masks, weights and rewind values.

https://github.com/neuralmagic/sparseml/issues/429 and https://github.com/microsoft/nni/issues/5205
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same

WORLD = 2
# What each of the two processes runs; it leaves what it saw in a file of its own.
SCRIPT = '''
import sys
from pathlib import Path

import lightning as L
import torch

torch.set_num_threads(1)
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
sys.path.insert(0, sys.argv[3])
from helpers import Lit, Watch, clone, loader, mlp

from sparsecomp import Criterion, Geometric, Layerwise, Levels, LotteryTicketPruning, Magnitude, Pruning, Random, Rewind


class OwnNoise(Criterion):
    """As a criterion of each rank's own gradients: scores and refitted biases differ from rank to rank."""

    def score(self, context):
        return {name: torch.rand_like(weight) for name, weight in context.weights.items()}

    def refit(self, context, masks):
        return {"net.0.bias": torch.randn(32)}


PRUNERS = {
    "random": Pruning(Random(), Levels((0.3, 0.6, 0.8), begin=1)),
    "random_at_init": Pruning(Random(), Levels((0.5, 0.8), begin=0, every=2)),
    "magnitude": Pruning(Magnitude(), Levels((0.3, 0.6, 0.8), begin=1)),
    "units": Pruning(Random(), Levels((0.25, 0.5), begin=1), Layerwise("unit")),
    "rewind": LotteryTicketPruning(Geometric(0.8, rounds=3, begin=1)),
    "rewind_late": Pruning(Random(), Levels((0.3, 0.6, 0.8), begin=1), rewind=Rewind(at=2)),
    "own_noise": Pruning(OwnNoise(), Levels((0.3, 0.6, 0.8), begin=1)),
}


def run(name, pruner):
    torch.manual_seed(1000 + rank)
    seen = {"seed": torch.initial_seed(), "steps": []}
    module = Lit(mlp(seed=1000 + rank))
    seen["own_init"] = clone(dict(module.named_parameters()))

    def look(trainer, module):
        seen["steps"].append(clone({"masks": pruner.masks, "weights": dict(module.named_parameters())}))

    def started(trainer, module):
        seen["agreed_init"] = clone(dict(module.named_parameters()))

    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder / name,
        callbacks=[Watch(on_fit_start=started), pruner, Watch(on_train_start=look, on_train_batch_end=look)],
    )
    trainer.fit(module, loader())
    assert (trainer.world_size, trainer.global_rank) == (2, rank)
    state = pruner.state_dict()
    seen["snapshot"] = {} if state["snapshot"] is None else clone(state["snapshot"]["tensors"])
    seen["events"] = [(event.position, event.after, event.rewound) for event in pruner.events]
    seen["files"] = dict(pruner.ticket_files)
    seen["final"] = clone(dict(module.named_parameters()))
    return seen


torch.save({name: run(name, pruner) for name, pruner in PRUNERS.items()}, folder / f"rank{rank}.pt")
torch.distributed.destroy_process_group()
'''
KINDS = ["random", "random_at_init", "magnitude", "units", "rewind", "rewind_late", "own_noise"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saw, with every pruner."""
    folder = tmp_path_factory.mktemp("ddp")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tests = str(Path(__file__).parents[1])
    # Of a seed_everything in an earlier test; Lightning would seed both ranks with it.
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank), tests],
            env=environment
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD), "NODE_RANK": "0"}
            | {"LOCAL_RANK": str(rank), "PL_TORCH_DISTRIBUTED_BACKEND": "gloo"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_really_differ_at_the_start(ranks, kind):
    zero, one = (rank[kind] for rank in ranks)
    assert zero["seed"] != one["seed"]
    assert not torch.equal(zero["own_init"]["net.0.weight"], one["own_init"]["net.0.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_weights_are_equal_on_both_ranks_at_every_step(ranks, kind):
    zero, one = (rank[kind] for rank in ranks)
    assert len(zero["steps"]) == 1 + 4 * 2  # 4 batches an epoch, two to each rank
    assert_same(zero["steps"], one["steps"])
    assert_same(zero["final"], one["final"])
    assert zero["events"] == one["events"]
    for step in zero["steps"]:
        assert not any(step["weights"][name][~mask].any() for name, mask in step["masks"].items())


@pytest.mark.parametrize("kind", ["random", "magnitude", "rewind", "rewind_late", "own_noise"])
def test_every_event_happened_once(ranks, kind):
    pruned = [sum(int((~m).sum()) for m in step["masks"].values()) for step in ranks[1][kind]["steps"]]
    per_epoch = {"rewind": [round(640 * (1 - 0.2 ** (r / 3))) for r in (1, 2, 3)]}.get(kind, [192, 384, 512])
    assert pruned == [0, 0, per_epoch[0], per_epoch[0], per_epoch[1], per_epoch[1], *per_epoch[2:] * 3]


@pytest.mark.parametrize(("kind", "at"), [("rewind", 0), ("rewind_late", 2)])
def test_both_ranks_rewind_to_the_values_of_rank_zero(ranks, kind, at):
    zero, one = (rank[kind] for rank in ranks)
    assert len(zero["snapshot"]) == 4
    assert_same(zero["snapshot"], one["snapshot"])
    if_init = {"rewind": zero["own_init"], "rewind_late": zero["snapshot"]}[kind]
    assert_same(zero["snapshot"], if_init)
    rewound = [index for index, event in zip((2, 4, 6), zero["events"], strict=True) if event[2]]
    assert rewound == [2, 4, 6]
    for rank in (zero, one):
        for index in rewound:
            masks, weights = rank["steps"][index]["masks"], rank["steps"][index]["weights"]
            expected = {name: value * masks.get(name, torch.tensor(True)) for name, value in zero["snapshot"].items()}
            assert_same(weights, expected)


def test_random_masks_are_those_of_rank_zeros_seed(ranks):
    """Not merely equal: the criterion ran with one seed on both ranks."""
    from sparsecomp import Global, Random, ScoreContext

    zero = ranks[0]["random_at_init"]
    assert zero["seed"] == 1000
    weights = {name: zero["own_init"][name] for name in ("net.0.weight", "net.2.weight")}
    scores = Random().score(ScoreContext(torch.nn.Module(), weights, {}, seed=1000))
    for rank in ranks:
        assert_same(dict(rank["random_at_init"]["steps"][0]["masks"]), Global()(scores, 0.5))


def test_only_rank_zero_writes_tickets(ranks):
    assert sorted(ranks[0]["rewind"]["files"]) == ["ticket", "trained"]
    assert ranks[1]["rewind"]["files"] == {}
    assert sorted(path.name for path in Path(ranks[0]["rewind"]["files"]["ticket"]).parent.iterdir()) == [
        "ticket.safetensors",
        "trained.safetensors",
    ]
