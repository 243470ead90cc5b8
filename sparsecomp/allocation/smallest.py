"""The k smallest of many scores, exactly and without sorting or joining them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_SAMPLE = 1 << 16
# Half the width of the bracket in standard deviations of a sample quantile: missed about once in 10^9 calls.
_WIDTH = 6.0


def keep_all_but_smallest(scores: Sequence[Tensor], k: int, alive: Sequence[Tensor]) -> list[Tensor]:
    """Masks that drop the k smallest of all alive scores together, ties in order of position.

    The same as a stable ascending argsort of the joined alive scores, of which the first k go, but in three passes:
    a sample brackets the k-th smallest, the scores inside the bracket are partitioned, and a comparison makes the
    masks. `benchmarks/` compares it with its peers.

    Args:
        scores: Tensors of any shapes, without NaN.
        k: How many alive scores to drop, 0 <= k <= number alive.
        alive: Bool masks of the same shapes; what is not alive stays dropped and is not counted in k.

    Returns:
        One bool mask per tensor, True = kept.

    >>> keep_all_but_smallest([torch.tensor([3.0, 1.0]), torch.tensor([1.0])], 1, [torch.ones(2) > 0, torch.ones(1) > 0])
    [tensor([ True, False]), tensor([True])]
    """
    if k == 0:
        return [mask.clone() for mask in alive]
    count = sum(int(mask.count_nonzero()) for mask in alive)
    if not 0 < k <= count:
        raise ValueError(f"`k` is the number of scores to drop and must be in [0, {count}], the number alive; got {k}.")
    dtype = functools.reduce(torch.promote_types, (score.dtype for score in scores), torch.float16)
    scores = [score.to(dtype) for score in scores]  # compared in one precision; no copy where it is theirs
    threshold, ties = _kth_smallest(scores, k, alive, count)
    return _cut(scores, alive, threshold, ties)


def _kth_smallest(scores: Sequence[Tensor], k: int, alive: Sequence[Tensor], count: int) -> tuple[Tensor, int]:
    """The k-th smallest alive score, and how many scores equal to it are among the k smallest."""
    low, high = _bracket(scores, k, alive, count)
    below = 0
    candidates = []
    for score, mask in zip(scores, alive, strict=True):
        not_under = (score >= low) & mask
        below += int(mask.count_nonzero()) - int(not_under.count_nonzero())
        candidates.append(_pick(score, not_under & (score <= high)))
    pool = torch.cat([candidate.to(candidates[0].device) for candidate in candidates])
    if not below < k <= below + pool.numel():  # the sample was unlucky; without a bracket every score is a candidate
        below, pool = (
            0,
            torch.cat([_pick(score, mask).to(low.device) for score, mask in zip(scores, alive, strict=True)]),
        )
    threshold = pool.kthvalue(k - below).values
    return threshold, k - below - int((pool < threshold).count_nonzero())


def _bracket(scores: Sequence[Tensor], k: int, alive: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Two scores that the k-th smallest alive one very likely lies between."""
    total = sum(score.numel() for score in scores)
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for score, mask in zip(scores, alive, strict=True):
        size = max(1, round(_SAMPLE * score.numel() / total))
        if size >= score.numel():
            drawn.append(_pick(score, mask))
            continue
        places = torch.randint(score.numel(), (size,), generator=generator).to(score.device)
        drawn.append(score.flatten()[places][mask.flatten()[places]])
    sample = torch.cat([part.to(drawn[0].device) for part in drawn]).sort().values
    n = sample.numel()
    if n == 0:
        infinite = torch.tensor(float("inf"), dtype=scores[0].dtype, device=scores[0].device)
        return -infinite, infinite
    share = k / count
    margin = int(_WIDTH * (n * share * (1 - share)) ** 0.5) + 8
    centre = int(share * n)
    infinite = sample.new_tensor(float("inf"))
    low = sample[centre - margin] if centre - margin >= 0 else -infinite
    high = sample[centre + margin] if centre + margin < n else infinite
    return low, high


def _pick(score: Tensor, mask: Tensor) -> Tensor:
    """The scores under the mask; numpy is three times faster at this on a CPU, but knows no bfloat16."""
    if score.device.type == "cpu" and score.dtype is not torch.bfloat16:
        return torch.from_numpy(score.detach().numpy()[mask.numpy()])
    return score[mask]


def _cut(scores: Sequence[Tensor], alive: Sequence[Tensor], threshold: Tensor, ties: int) -> list[Tensor]:
    """Keep what is above the threshold, and what equals it after the first `ties` places."""
    masks = []
    for score, mask in zip(scores, alive, strict=True):
        kept = (score >= threshold.to(score.device)) & mask
        if ties > 0:
            equal = ((score == threshold.to(score.device)) & kept).flatten().nonzero().flatten()[:ties]
            kept.view(-1)[equal] = False
            ties -= equal.numel()
        masks.append(kept)
    return masks
