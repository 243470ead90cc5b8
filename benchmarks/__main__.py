"""python -m benchmarks: print every ratio beside its limit."""

import argparse
import logging

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import connectivity, masked_step, moments, monitor, scoring_event, selection


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="interleaved rounds of each step (default 60)")
    rounds = parser.parse_args().rounds
    logging.getLogger("sparsecomp").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a busy neighbour makes two threads crawl

    table = Table(title=f"Ratios of medians, interleaved, one thread, torch {torch.__version__}", title_justify="left")
    for heading in ("what", "sparsecomp", "aim", "peer"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, ratio, limit, hooks in masked_step.rows(rounds):
        table.add_row(what, f"{ratio:.3f} of dense", f"<= {limit:.2f}", f"hooks {hooks:.3f}")
    for what, ratio, least, seconds in selection.rows(max(3, rounds // 8)):
        table.add_row(f"{what}: torch's time / ours", f"{ratio:.1f} ({seconds:.3f} s)", f">= {least:.0f}", "1.0")
    for what, ratio, limit, peer in moments.rows(max(3, rounds // 4)):
        table.add_row(what, f"{ratio:.2f} of forward", f"<= {limit:.2f}", f"plain {peer:.2f}")
    for what, ratio, limit in connectivity.rows(max(3, rounds // 2)):
        table.add_row(what, f"{ratio:.2f} of forward", f"<= {limit:.2f}", "")
    for what, share, limit, each in monitor.rows(max(5, rounds // 3)):
        table.add_row(what, f"{share:.1%} of an epoch", f"<= {limit:.0%}", f"each epoch {each:.0%}")
    for what, ratio, least in scoring_event.rows(max(3, rounds // 20)):
        table.add_row(f"{what}: exact elimination's time / forward selection's", f"{ratio:.1f}", f">= {least:.0f}", "")
    ours, theirs = selection.peak_mebibytes("ours"), selection.peak_mebibytes("torch")
    table.add_row("the same: memory on top of the scores", f"{ours:.0f} MiB", "less", f"{theirs:.0f} MiB")
    console = Console(width=150)
    console.print(table)

    event = Table(title="An event of Similarity(), as a share of a training epoch of the network", title_justify="left")
    event.add_column("network")
    for heading in ("epoch, s", *scoring_event.PARTS, "in all"):
        event.add_column(heading, justify="right")
    for what, epoch, seconds in scoring_event.events(max(3, rounds // 10)):
        shares = [f"{seconds[part] / epoch:.1%}" for part in scoring_event.PARTS]
        event.add_row(what, f"{epoch:.3f}", *shares, f"{sum(seconds.values()) / epoch:.1%}")
    console.print(event)


main()
