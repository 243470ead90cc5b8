"""Pruners on tree functions whose true connections are known: python examples/tree_pruners.py.

Held-out R^2, alignment and purity at 90% effective sparsity of random, magnitude, lottery ticket and similarity pruning
with gamma 0 and 2, the same dense network and data order for all methods of a seed. Settings: examples/tree_pruners.yaml.
Per-seed results go to docs/evidence/tree_pruners.csv, the table to the terminal.
"""

import argparse
import csv
import math
import statistics
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from sparsecomp import Criterion, Magnitude, MaskStore, Random, ScoreContext, Similarity
from sparsecomp.allocation import resolve_allocation
from sparsecomp.connectivity import ConnectivityGraph, effective_sparsity
from sparsecomp.data import TensorBatches
from sparsecomp.functions import Tree
from sparsecomp.metrics.functional import node_alignment, pure_units, purity
from sparsecomp.metrics.functional.supports import reaching_outputs, unit_supports
from sparsecomp.models import CPPN
from sparsecomp.planning import make_plan
from sparsecomp.probe import Probe
from sparsecomp.rewinding import Rewind, Snapshot

ROOT = Path(__file__).parent.parent
SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
METHODS: dict[str, Criterion] = {
    "random": Random(),
    "magnitude": Magnitude(),
    "lottery ticket": Magnitude(),
    "SP-C, gamma 0": Similarity(0),
    "SP-C, gamma 2": Similarity(2),
}


class Run:
    """One network on one tree, with masks and a fixed order of data."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tree = Tree(seed=seed)
        generator = torch.Generator().manual_seed(10_000 + seed)
        self.x = self.tree.sample_inputs(SETTINGS["samples"]["training"], generator)
        self.x_test = self.tree.sample_inputs(SETTINGS["samples"]["test"], generator)
        self.y, self.y_test = self.tree(self.x), self.tree(self.x_test)
        torch.manual_seed(seed)
        self.network = CPPN(8, 1, SETTINGS["activations"], depth=SETTINGS["hidden_layers"])
        self.store = MaskStore(self.network)
        self.graph = ConnectivityGraph.trace(self.network)
        self.epoch = 0

    def train(self, steps: int, rate: float, snapshot_at: int | None = None) -> Snapshot | None:
        """Adam with warm-up, then cosine; returns the snapshot after `snapshot_at` steps."""
        optimizer = torch.optim.Adam(self.network.parameters(), lr=rate, fused=True)

        def factor(step: int) -> float:
            last = SETTINGS["schedule"]["last"]
            cosine = last + (1 - last) * (1 + math.cos(math.pi * step / steps)) / 2
            return min(1.0, (step + 1) / SETTINGS["schedule"]["warm_up"]) * cosine

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        batches = TensorBatches(self.x, self.y, batch_size=SETTINGS["batch_size"], shuffle=True, seed=self.seed)
        done, taken = 0, None
        while done < steps:
            batches.set_epoch(self.epoch)
            self.epoch += 1
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.mse_loss(self.network(x), y).backward()
                self.store.mask_grads_()
                optimizer.step()
                schedule.step()
                done += 1
                if done == snapshot_at:
                    taken = Snapshot.take(self.network)
                if done == steps:
                    break
        return taken

    def prune(self, criterion: Criterion, sparsity: float) -> None:
        """To an effective sparsity."""
        points = SETTINGS["samples"]["scores"]
        data = [(self.x[:points], self.y[:points])]
        context = ScoreContext(
            self.network, self.store.weights, self.store.masks, self.seed, data, None, self.store.selected, Probe(1)
        )
        plan = make_plan(criterion, resolve_allocation("global"), sparsity, context, self.store, self.graph)
        plan.commit(self.network, self.store)

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        """On the held-out points, over the live hidden units of all layers."""
        error = (self.network(self.x_test) - self.y_test).square().mean()
        units, supports, layers = self._units()
        nodes = [i for i, name in enumerate(self.tree.node_names) if name not in self.tree.output_names]
        values = self.tree.node_values(self.x_test)[:, nodes].double()
        correlation = _correlation(values, units)
        names = [self.tree.node_names[i] for i in nodes]
        inputs = self.tree.input_names
        leaves = torch.tensor([[name in self.tree.graph.nodes[node]["leaves"] for name in inputs] for node in names])
        levels = torch.tensor([self.tree.graph.nodes[node]["level"] for node in names])
        pure = pure_units(supports, layers, leaves, levels)
        return {
            "r2": 1.0 - float(error / self.y_test.var(correction=0)),
            "alignment": node_alignment(correlation),
            "purity": purity(pure, torch.ones(len(pure), dtype=torch.bool)),
            "effective_sparsity": effective_sparsity(self.graph, self.store.masks),
        }

    def _units(self) -> tuple[Tensor, Tensor, Tensor]:
        """Activations, supports and layers of the live hidden units."""
        supports, reaching = unit_supports(self.graph, self.store.masks), reaching_outputs(self.graph, self.store.masks)
        activations: list[Tensor] = []
        linear = [layer for layer in self.network.modules() if isinstance(layer, nn.Linear)]
        handles = [
            layer.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0])) for layer in linear[1:]
        ]
        self.network(self.x_test)
        for handle in handles:
            handle.remove()
        spaces = [self.graph.uses[entry.name][0].source for entry in self.store.selected[1:]]
        kept, found, layers = [], [], []
        for depth, (space, values) in enumerate(zip(spaces, activations, strict=True), start=1):
            live = reaching[space] & supports[space].any(1) & (values.var(0) > 1e-7 * values.square().mean(0))
            kept.append(values[:, live].double())
            found.append(supports[space][live])
            layers.append(torch.full((int(live.sum()),), depth))
        return torch.cat(kept, 1), torch.cat(found), torch.cat(layers)


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    a, b = a - a.mean(0), b - b.mean(0)
    return (a.T @ b) / (a.norm(dim=0)[:, None] * b.norm(dim=0)).clamp(min=1e-30)


def trial(seed: int, method: str, dense_state: dict[str, Tensor], snapshot: Snapshot, epoch: int) -> dict[str, float]:
    """Rounds, with a rewind in each for the lottery ticket, and a last fine-tune."""
    run = Run(seed)
    run.network.load_state_dict(dense_state)
    run.epoch = epoch
    rewound = method == "lottery ticket"
    for level in SETTINGS["levels"]:
        run.prune(METHODS[method], level)
        if rewound:
            snapshot.restore(Rewind(optimizer_state=False, lr_schedule=False), run.network, run.store.masks)
            run.store.apply_()
        phase = SETTINGS["last" if level == SETTINGS["levels"][-1] else "round"]
        run.train(phase["steps"], SETTINGS["rewound_rate"] if rewound else phase["rate"])
    return run.measures()


def main() -> None:
    """Run all trials, write the CSV, print mean and spread and the paired difference in purity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "evidence" / "tree_pruners.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for seed in range(arguments.seeds):
        dense = Run(seed)
        snapshot = dense.train(SETTINGS["dense"]["steps"], SETTINGS["dense"]["rate"], SETTINGS["rewind_step"])
        state = {name: tensor.clone() for name, tensor in dense.network.state_dict().items()}
        for method in METHODS:
            row = {"method": method, "seed": seed} | trial(seed, method, state, snapshot, dense.epoch)
            results.append(row)
            print(row, flush=True)
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    for method in METHODS:
        rows = [row for row in results if row["method"] == method]
        cells = []
        for name in ("r2", "alignment", "purity"):
            values = [float(row[name]) for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            cells.append(f"{name} {statistics.mean(values):.2f} ± {spread:.2f}")
        print(f"{method:16} " + "  ".join(cells))
    of = {(row["method"], row["seed"]): float(row["purity"]) for row in results}
    gains = [of["SP-C, gamma 2", seed] - of["magnitude", seed] for seed in range(arguments.seeds)]
    print(f"purity, gamma 2 - magnitude: {', '.join(f'{gain:+.2f}' for gain in gains)}")


if __name__ == "__main__":
    main()
