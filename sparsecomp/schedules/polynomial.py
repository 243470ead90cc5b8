"""The gradual schedule of Zhu and Gupta."""

from dataclasses import dataclass

from sparsecomp._checks import check_number
from sparsecomp.schedules.base import Unit
from sparsecomp.schedules.ramp import Ramp


@dataclass(frozen=True)
class Polynomial(Ramp):
    """Rise fast at first and slower towards the end.

    s(t) = s_f + (s_i - s_f) (1 - (t - begin) / (end - begin)) ** power, at begin, begin + every, ..., end.

    Args:
        final_sparsity: s_f, fraction of weights removed at `end`, in [0, 1).
        begin: Position of the first event, in `unit`.
        end: Position of the last event; equal to `begin` it prunes once.
        every: Distance between events, in `unit`.
        power: Exponent > 0; 3 is the gradual schedule of the paper.
        initial_sparsity: s_i, fraction removed at `begin`, in [0, final_sparsity].
        unit: What positions count: completed "step"s or "epoch"s, or the "fraction" of the training in [0, 1].

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has the wrong type.

    Reference:
        M. Zhu, S. Gupta: To prune, or not to prune, arXiv 1710.01878, equation 1.

    >>> schedule = Polynomial(0.8, begin=0, end=4)
    >>> [round(schedule.sparsity(epoch), 4) for epoch in range(6)]
    [0.0, 0.4625, 0.7, 0.7875, 0.8, 0.8]
    """

    final_sparsity: float
    begin: int | float
    end: int | float
    every: int | float = 1
    power: float = 3
    initial_sparsity: float = 0.0
    unit: Unit = "epoch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_number("power", self.power, "the exponent of the rise", "a number > 0") <= 0:
            raise ValueError(f"`power` is the exponent of the rise and must be > 0; got {self.power!r}.")

    def _risen(self, u: float) -> float:
        return 1.0 - float((1.0 - u) ** self.power)
