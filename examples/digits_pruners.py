"""Test accuracy of the shipped digits experiments over seeds: python examples/digits_pruners.py.

Each trial is `sparsecomp fit --config configs/experiment/digits_NAME.yaml --seed_everything SEED`. The per-seed results
go to docs/evidence/digits_pruners.csv, the table to the terminal.
"""

import argparse
import csv
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from sparsecomp.cli import main as sparsecomp
from sparsecomp.reporting import read_curves

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ("dense", "magnitude", "similarity", "lottery_ticket", "random")


def trial(experiment: str, seed: int) -> dict[str, float]:
    """Test accuracy and final sparsity of one run."""
    config = ROOT / "configs" / "experiment" / f"digits_{experiment}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--trainer.enable_progress_bar=false", f"--trainer.logger.init_args.save_dir={folder}"]
        sparsecomp(["fit", f"--config={config}", f"--seed_everything={seed}", *quiet])
        curves = read_curves(next(Path(folder).rglob("metrics.csv")))
    last = {name: list(curve.values())[-1] for name, curve in curves.items()}
    return {"test_accuracy": last["test/accuracy"], "sparsity": last.get("pruning/sparsity", 0.0)}


def main() -> None:
    """Run all trials, write the CSV, print mean and spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "evidence" / "digits_pruners.csv")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # LightningCLI warns of arguments that are not its own
    torch.set_num_threads(1)
    results = [
        {"experiment": experiment, "seed": seed} | trial(experiment, seed)
        for experiment in EXPERIMENTS
        for seed in range(arguments.seeds)
    ]
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    for experiment in EXPERIMENTS:
        chosen = [row for row in results if row["experiment"] == experiment]
        accuracy = [100 * float(row["test_accuracy"]) for row in chosen]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else float("nan")
        sparsity = chosen[0]["sparsity"]
        print(
            f"{experiment:16} sparsity {sparsity:.2f}  test accuracy {statistics.mean(accuracy):.1f} ± {spread:.1f} %"
        )


if __name__ == "__main__":
    main()
