"""How pruners hold at high sparsity on real digits: python examples/digits_high_sparsity.py (--seeds 2 for a quick look).

Test accuracy at 80, 90, 95 and 98% effective sparsity of random, magnitude, |w| rms(input), Taylor, Fisher with refit and
similarity with gamma 0 and 2, on an MLP, a conv net and a transformer; each from the same dense network of a seed, in
the same rounds, with a fine-tune from each reported level. Dense is measured before the rounds, after fewer steps.
Settings: examples/digits_high_sparsity.yaml. Per-seed results go to docs/evidence/digits_high_sparsity.csv, the table to
the terminal.
"""

import copy
from pathlib import Path

import torch
import yaml
from _common import Row, Run, arguments_of, mean_and_deviation, paired, side_by_side, write
from torch import nn

from sparsecomp import Criterion, Fisher, Magnitude, Random, Similarity, Taylor, WeightTimesInput
from sparsecomp.connectivity import effective_sparsity
from sparsecomp.data import DigitsDataModule
from sparsecomp.models import MLP, RowTransformer, SmallConvNet

SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
METHODS: dict[str, Criterion] = {
    "random": Random(),
    "magnitude": Magnitude(),
    "weight x input": WeightTimesInput(),
    "Taylor": Taylor(),
    "Fisher + refit": Fisher(refit=True),
    "SP-C, gamma 0": Similarity(0),
    "SP-C, gamma 2": Similarity(2),
}
NETWORKS = {
    "MLP": lambda: MLP(64, 10, hidden=(128, 128)),
    "conv net": lambda: SmallConvNet(1, 10, image_size=8, channels=(16, 32)),
    "transformer": lambda: RowTransformer(8, 8, 10, width=32, heads=2, depth=2),
}


class DigitsRun(Run):
    """One network on digits."""

    def __init__(self, network: str, seed: int) -> None:
        data = DigitsDataModule(SETTINGS["batch_size"], validation=0, seed=seed)
        data.setup("fit")
        data.setup("test")
        x, y = data.train_dataloader().tensors
        self.x_test, self.y_test = data.test_dataloader().tensors
        torch.manual_seed(seed)
        super().__init__(NETWORKS[network](), x, y, nn.functional.cross_entropy, SETTINGS, seed)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the test pictures that are named rightly."""
        return float((self.network(self.x_test).argmax(1) == self.y_test).float().mean())


def branch(run: DigitsRun) -> DigitsRun:
    """The same network, masks and place in the data, to be trained apart."""
    other = DigitsRun.__new__(DigitsRun)
    other.__dict__ = run.__dict__ | {"network": copy.deepcopy(run.network)}
    other.store = type(run.store)(other.network)
    other.store.update_(run.store.masks)
    return other


def trials(network: str, seed: int) -> list[Row]:
    """All methods from one dense network."""
    dense = DigitsRun(network, seed)
    dense.train(SETTINGS["dense"]["steps"], SETTINGS["dense"]["rate"])
    fixed = {"network": network, "seed": seed}
    rows: list[Row] = [
        fixed | {"method": "dense", "level": 0.0, "accuracy": dense.accuracy(), "effective_sparsity": 0.0}
    ]
    for method, criterion in METHODS.items():
        run = branch(dense)
        for level in SETTINGS["levels"]:
            run.prune(criterion, level, len(run.x))
            if level in SETTINGS["reported"]:
                tuned = branch(run)
                tuned.train(SETTINGS["last"]["steps"], SETTINGS["last"]["rate"])
                effective = effective_sparsity(tuned.graph, tuned.store.masks)
                found = {"accuracy": tuned.accuracy(), "effective_sparsity": effective}
                rows.append(fixed | {"method": method, "level": level} | found)
            if level != SETTINGS["levels"][-1]:
                run.train(SETTINGS["round"]["steps"], SETTINGS["round"]["rate"])
    return rows


def main() -> None:
    """Run all trials, write the CSV, print means, deviations and paired differences."""
    arguments = arguments_of(__doc__, "digits_high_sparsity", seeds=5)
    calls = [(network, seed) for network in NETWORKS for seed in range(arguments.seeds)]
    rows = side_by_side(trials, calls, arguments.jobs)
    write(arguments.csv, rows)

    def accuracies(network: str, method: str, level: float) -> list[float]:
        key = (network, method, level)
        return [100 * r["accuracy"] for r in rows if (r["network"], r["method"], r["level"]) == key]

    for network in NETWORKS:
        print(f"{network}, dense: {mean_and_deviation(accuracies(network, 'dense', 0.0), 1)}")
        for method in METHODS:
            cells = [mean_and_deviation(accuracies(network, method, level), 1) for level in SETTINGS["reported"]]
            print(f"  {method:16} " + "  ".join(cells))
        ours = accuracies(network, "SP-C, gamma 0", 0.98)
        for other in ("magnitude", "Taylor", "Fisher + refit"):
            print(paired(f"  98%, gamma 0 - {other}", ours, accuracies(network, other, 0.98), 1))


if __name__ == "__main__":
    main()
