"""The selection of the k smallest, against a stable sort of everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomp.allocation import smallest
from sparsecomp.allocation.smallest import keep_all_but_smallest

many = settings(deadline=None, derandomize=True, max_examples=150, database=None)
values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, float("inf"), -float("inf")]),
    st.floats(width=32, allow_nan=False),
    st.integers(-3, 3).map(float),
)
tensors = st.lists(st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=30), min_size=1, max_size=4)
DTYPES = [torch.float32, torch.float64]


def naive(scores, k, alive):
    """Sort all scores that are alive, stably, and drop the first k."""
    flat, living = torch.cat([s.flatten() for s in scores]), torch.cat([a.flatten() for a in alive])
    places = living.nonzero().flatten()
    order = sorted(
        places.tolist(), key=lambda place: flat[place].item()
    )  # -0.0 and 0.0 are equal, and sorted() is stable
    kept = living.clone()
    kept[order[:k]] = False
    return [part.reshape(s.shape) for part, s in zip(kept.split([s.numel() for s in scores]), scores, strict=True)]


def check(scores, k, alive):
    before = [tensor.clone() for tensor in (*scores, *alive)]
    kept = keep_all_but_smallest(scores, k, alive)
    expected = naive(scores, k, alive)
    assert [mask.tolist() for mask in kept] == [mask.tolist() for mask in expected]
    assert [tensor.tolist() for tensor in (*scores, *alive)] == [tensor.tolist() for tensor in before]


@many
@given(drawn=tensors, share=st.floats(0, 1), dtype=st.sampled_from(DTYPES))
@pytest.mark.parametrize("sample", [1 << 16, 1, 2, 7])
@pytest.mark.parametrize("width", [6.0, 0.0])
def test_equals_a_stable_sort(sample, width, drawn, share, dtype):
    """Also where a layer has but one place in the sample."""
    scores = [torch.tensor([value for value, _ in part], dtype=dtype) for part in drawn]
    alive = [torch.tensor([living for _, living in part]) for part in drawn]
    k = round(share * sum(int(mask.sum()) for mask in alive))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smallest, "_SAMPLE", sample)
        patch.setattr(smallest, "_WIDTH", width)
        check(scores, k, alive)


@many
@given(drawn=tensors, share=st.floats(0, 1), bracket=st.lists(values, min_size=2, max_size=2).map(sorted))
def test_any_bracket_gives_the_same(drawn, share, bracket):
    """One that is too low, too high or empty costs time, and nothing else."""
    scores = [torch.tensor([value for value, _ in part]) for part in drawn]
    alive = [torch.tensor([living for _, living in part]) for part in drawn]
    k = round(share * sum(int(mask.sum()) for mask in alive))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smallest, "_bracket", lambda *_: tuple(torch.tensor(bracket)))
        check(scores, k, alive)


@pytest.mark.parametrize("levels", [2, 3, 50, 1 << 20])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("sample", [1 << 16, 40])
def test_equals_a_stable_sort_when_the_sample_is_a_part(levels, share, sample, monkeypatch):
    """Several layers of different scales and shapes, one of them dead."""
    monkeypatch.setattr(smallest, "_SAMPLE", sample)
    generator = torch.Generator().manual_seed(levels)
    shapes = [(40, 50), (30, 10, 3, 3), (7,), (20, 5)]
    scores = [torch.randint(-levels, levels, shape, generator=generator) / (i + 1) for i, shape in enumerate(shapes)]
    alive = [torch.rand(shape, generator=generator) < 0.7 for shape in shapes]
    alive[3].zero_()
    check(scores, round(share * sum(int(mask.sum()) for mask in alive)), alive)


@pytest.mark.parametrize("sample", [400, 2000])
def test_a_bracket_that_misses_changes_nothing(sample, monkeypatch):
    """With a bracket this narrow a third or more of the calls miss it."""
    monkeypatch.setattr(smallest, "_SAMPLE", sample)
    monkeypatch.setattr(smallest, "_WIDTH", 0.0)
    misses = []
    kth = torch.Tensor.kthvalue
    monkeypatch.setattr(torch.Tensor, "kthvalue", lambda t, *a: misses.append(t.numel()) or kth(t, *a))
    for seed in range(30):
        scores = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)) ** 5]
        alive = [torch.ones(5000, dtype=torch.bool)]
        kept = keep_all_but_smallest(scores, 4000, alive)
        assert torch.equal(kept[0].nonzero().flatten(), scores[0].argsort(stable=True)[4000:].sort().values)
    assert 5000 in misses  # the whole was searched at least once
    assert min(misses) < 5000  # and a part at least once


def test_zeros_of_both_signs_are_ties_in_order_of_position():
    scores = [torch.tensor([0.0, -0.0, 0.0]), torch.tensor([-0.0, 1.0, 0.0])]
    alive = [torch.ones(3, dtype=torch.bool)] * 2
    assert [mask.tolist() for mask in keep_all_but_smallest(scores, 2, alive)] == [[False, False, True], [True] * 3]
    assert [mask.tolist() for mask in keep_all_but_smallest(scores, 4, alive)] == [[False] * 3, [False, True, True]]


def test_all_equal():
    scores, alive = [torch.full((4, 25), 7.0)], [torch.ones(4, 25, dtype=torch.bool)]
    kept = keep_all_but_smallest(scores, 30, alive)[0]
    assert kept.flatten().tolist() == [False] * 30 + [True] * 70


def test_none_and_all():
    scores, alive = [torch.arange(3.0)], [torch.tensor([True, False, True])]
    nothing = keep_all_but_smallest(scores, 0, alive)
    assert nothing[0].tolist() == [True, False, True]
    assert nothing[0] is not alive[0]
    assert keep_all_but_smallest(scores, 2, alive)[0].tolist() == [False, False, False]


@pytest.mark.parametrize("k", [-1, 3])
def test_more_than_there_are(k):
    with pytest.raises(ValueError, match=rf"`k` is the number of scores to drop and must be in \[0, 2\].*got {k}"):
        keep_all_but_smallest([torch.arange(3.0)], k, [torch.tensor([True, False, True])])


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [1, -1])
def test_scores_of_different_dtypes_are_compared_exactly(low, order):
    """1.0001 is 1 in half precision: a threshold rounded to it would drop too few or too many."""
    scores = [torch.tensor([1.0, 5.0, 5.0, 5.0], dtype=low), torch.tensor([1.0001, 0.9999, 6.0, 6.0])][::order]
    alive = [torch.ones(4, dtype=torch.bool)] * 2
    for k in range(9):
        check(scores, k, alive)
