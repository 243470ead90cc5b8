"""The control: connections at random."""

import torch
from torch import Tensor

from sparsecomp._checks import check_int
from sparsecomp.criteria.base import Criterion, ScoreContext

# Of Knuth's linear congruential generator. Torch's stream of the seed itself is the one that a network built after
# `seed_everything(seed)` has drawn its weights from: the scores would be the initial weights.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class Random(Criterion):
    """Scores a weight by a uniform random number in [0, 1), independent of its value.

    Args:
        seed: Where given, the scores depend on it alone; else on the run's seed, so that `seed_everything` varies them.

    Raises:
        ValueError: If `seed` is negative.
        TypeError: If `seed` is no integer.

    >>> import torch
    >>> context = ScoreContext(torch.nn.Linear(2, 1), {"weight": torch.zeros(1, 2)}, masks={})
    >>> bool((Random(seed=1).score(context)["weight"] == Random(seed=1).score(context)["weight"]).all())
    True
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None:
            check_int("seed", seed, "the start of the random numbers")
        self.seed = seed

    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Return random numbers, drawn on the CPU so that every device gets the same."""
        seed = context.seed if self.seed is None else self.seed
        generator = torch.Generator().manual_seed((seed * _MULTIPLIER + _INCREMENT) % 2**63)
        return {
            name: torch.rand(weight.shape, generator=generator).to(weight.device)
            for name, weight in context.weights.items()
        }

    def __repr__(self) -> str:
        return f"Random(seed={self.seed})"
