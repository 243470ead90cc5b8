"""Which pruners find the connections of a tree function: python examples/tree_recovery.py (--seeds 3 for a quick look).

Held-out R^2, alignment, purity and decodability at 90% effective sparsity of dense networks, random, lottery ticket,
magnitude, Fisher with refit, similarity with gamma 0 and 2, and of SP-H beside masks of the true tree (oracle) and of a
wrong one. All methods take the same number of optimizer steps: those that lay out masks train dense, rewind to an early
step, train under the layout and then prune; the others train dense for as long as both phases together. Settings:
examples/tree_recovery.yaml. Per-seed results go to docs/evidence/tree_recovery.csv, the table to the terminal.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from _common import Row, Run, arguments_of, mean_and_deviation, paired, side_by_side, write
from torch import Tensor, nn

from sparsecomp import Criterion, Fisher, Magnitude, Probe, Random, Similarity
from sparsecomp.connectivity import effective_sparsity
from sparsecomp.functional.hierarchy import Level, infer_levels, layout_mask
from sparsecomp.functions import Tree
from sparsecomp.input_derivatives import input_derivatives
from sparsecomp.metrics.functional import correlation, decodability, node_alignment, pure_units, purity, unit_sums
from sparsecomp.metrics.functional.ground_truth import Subtrees
from sparsecomp.metrics.functional.purity import supported_inside
from sparsecomp.metrics.functional.supports import reaching_outputs, unit_supports
from sparsecomp.models import CPPN
from sparsecomp.rewinding import Rewind, Snapshot

SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CRITERIA: dict[str, Criterion | None] = {
    "dense": None,
    "random": Random(),
    "lottery ticket": Magnitude(),
    "magnitude": Magnitude(),
    "Fisher + refit": Fisher(refit=True),
    "SP-C, gamma 0": Similarity(0),
    "SP-C, gamma 2": Similarity(2),
}
LAYOUTS = ("SP-H", "oracle", "wrong tree")
METHODS = (*CRITERIA, *LAYOUTS)
MEASURES = ("r2", "alignment", "purity", "decodability")


class TreeRun(Run):
    """One network on one tree."""

    def __init__(self, seed: int) -> None:
        self.tree = Tree(seed=seed)
        generator = torch.Generator().manual_seed(10_000 + seed)
        x = self.tree.sample_inputs(SETTINGS["samples"]["training"], generator)
        self.x_test = self.tree.sample_inputs(SETTINGS["samples"]["test"], generator)
        self.y_test = self.tree(self.x_test)
        torch.manual_seed(seed)
        network = CPPN(8, 1, SETTINGS["activations"], depth=SETTINGS["hidden_layers"])
        super().__init__(network, x, self.tree(x), nn.functional.mse_loss, SETTINGS, seed)

    def rewind(self, to: Snapshot) -> None:
        """Kept weights, biases included, to the early step."""
        to.restore(Rewind(optimizer_state=False, lr_schedule=False), self.network, self.store.masks)
        self.store.apply_()

    def lay_out(self, levels: Sequence[Level]) -> None:
        """Connect units along a tree only."""
        layers = [layer.activations for layer in self.network if hasattr(layer, "activations")]
        masks = layout_mask(levels, 8, layers, 1)
        self.store.update_(dict(zip(self.store.masks, masks, strict=True)))

    def inferred(self) -> Sequence[Level]:
        """The levels that the network's input derivatives show."""
        found = input_derivatives(self.network, [(self.x, self.y)], Probe(), SETTINGS["samples"]["derivatives"])
        return infer_levels(found.sums, found.relevant()).levels

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        """On the held-out points, over the live hidden units of all layers."""
        error = (self.network(self.x_test) - self.y_test).square().mean()
        nodes = Subtrees.of(self.tree)
        supports, live = (self._hidden(of(self.graph, self.store.masks)) for of in (unit_supports, reaching_outputs))
        rows = SETTINGS["samples"]["test"]
        fit, held_out = (
            unit_sums([*self._activations(x), self.tree.node_values(x)[:, nodes.columns]])
            for x in (self.x[:rows], self.x_test)
        )
        units = sum(len(part) for part in supports)
        related = correlation(held_out)
        supports, live = torch.cat(supports), torch.cat(live)
        live = live & supports.any(1) & (related.diagonal()[:units] > 0)
        layers = torch.arange(1, SETTINGS["hidden_layers"] + 1).repeat_interleave(units // SETTINGS["hidden_layers"])
        inside = supported_inside(supports, nodes.leaves) & live
        return {
            "r2": 1.0 - float(error / self.y_test.var(correction=0)),
            "alignment": node_alignment(related[units:, :units][:, live]),
            "purity": purity(pure_units(supports, layers, nodes.leaves, nodes.levels), live),
            "decodability": float(decodability(fit, held_out, inside).mean()),
            "effective_sparsity": effective_sparsity(self.graph, self.store.masks),
        }

    def _hidden(self, of_spaces: Sequence[Tensor]) -> list[Tensor]:
        return [of_spaces[self.graph.uses[entry.name][0].source] for entry in self.store.selected[1:]]

    def _activations(self, x: Tensor) -> list[Tensor]:
        """What the layers after the first read."""
        found: list[Tensor] = []
        layers = [layer for layer in self.network if isinstance(layer, nn.Linear)][1:]
        handles = [layer.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0])) for layer in layers]
        self.network(x)
        for handle in handles:
            handle.remove()
        return found


def wrong_levels(right: Sequence[Level], seed: int) -> Sequence[Level]:
    """The levels with the inputs shuffled until no pair is left together."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(8, generator=generator).tolist()
        wrong = [tuple(tuple(sorted(order[a] for a in cluster)) for cluster in level) for level in right]
        if not set(wrong[0]) & set(right[0]):
            return wrong


def trial(seed: int, method: str) -> Row:
    """Dense phase, layout or longer dense phase, rounds and last phase."""
    run = TreeRun(seed)
    dense, retrain = SETTINGS["dense"], SETTINGS["retrain"]
    true = [((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)), (tuple(range(8)),)]
    groups = float("nan")
    if method in LAYOUTS:
        early = run.train(dense["steps"], dense["rate"], SETTINGS["rewind_step"])
        levels = {"SP-H": run.inferred, "oracle": lambda: true, "wrong tree": lambda: wrong_levels(true, seed)}[
            method
        ]()
        found = {cluster for level in levels[:-1] for cluster in level}
        groups = len(found & {cluster for level in true[:-1] for cluster in level}) / 6
        run.lay_out(levels)
        run.rewind(early)
        run.train(retrain["steps"], retrain["rate"])
    else:
        early = run.train(dense["steps"] + retrain["steps"], dense["rate"], SETTINGS["rewind_step"])
    criterion = CRITERIA.get(method, Similarity(0))
    for level in SETTINGS["levels"]:
        if criterion is not None:
            run.prune(criterion, level, SETTINGS["samples"]["scores"])
        if method == "lottery ticket":
            run.rewind(early)
        phase = SETTINGS["last" if level == SETTINGS["levels"][-1] else "round"]
        run.train(phase["steps"], SETTINGS["rewound_rate"] if method == "lottery ticket" else phase["rate"])
    return {"method": method, "seed": seed} | run.measures() | {"true_groups": groups, "steps": run.steps}


def trials(seed: int) -> list[Row]:
    """All methods on one tree."""
    return [trial(seed, method) for method in METHODS]


def main() -> None:
    """Run all trials, write the CSV, print means, deviations and paired differences."""
    arguments = arguments_of(__doc__, "tree_recovery", seeds=13)
    rows = side_by_side(trials, [(seed,) for seed in range(arguments.seeds)], arguments.jobs)
    write(arguments.csv, rows)
    of = {
        (method, measure): [r[measure] for r in rows if r["method"] == method]
        for method in METHODS
        for measure in rows[0]
    }
    for method in METHODS:
        cells = [f"{measure} {mean_and_deviation(of[method, measure])}" for measure in MEASURES]
        print(f"{method:16} " + "  ".join(cells))
    print(f"true groups that SP-H found: {mean_and_deviation(of['SP-H', 'true_groups'])}")
    for measure in ("r2", "alignment"):
        for other in ("magnitude", "oracle", "SP-C, gamma 0"):
            print(paired(f"{measure}, SP-H - {other}", of["SP-H", measure], of[other, measure]))
    print(paired("purity, gamma 2 - magnitude", of["SP-C, gamma 2", "purity"], of["magnitude", "purity"]))


if __name__ == "__main__":
    main()
