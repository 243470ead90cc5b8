"""Each criterion by hand; what all of them promise is in test_contracts.py."""

import pytest
import torch
from torch import nn

from sparsecomp import Magnitude, MaskStore, Random, ScoreContext
from sparsecomp.models import MLP, SmallConvNet


def scores(criterion, weights, seed=0):
    return criterion.score(ScoreContext(nn.Linear(1, 1), weights, {}, seed))


def test_magnitude_by_hand():
    weights = {"a": torch.tensor([[-3.0, 0.5], [0.0, -0.0]]), "b": torch.tensor([2.0, -1e-40])}
    result = scores(Magnitude(), weights)
    assert result["a"].tolist() == [[3.0, 0.5], [0.0, 0.0]]
    assert torch.equal(result["b"], torch.tensor([2.0, 1e-40]))


def test_magnitude_does_not_know_signs():
    weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scores(Magnitude(), {"a": weight})["a"], scores(Magnitude(), {"a": -weight})["a"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_magnitude_keeps_the_dtype(dtype):
    weight = torch.tensor([-1.5, 2.0], dtype=dtype)
    assert scores(Magnitude(), {"a": weight})["a"].tolist() == [1.5, 2.0]


WEIGHTS = {"a": torch.zeros(300, 20), "b": torch.ones(50)}


def test_random_is_uniform_and_independent_of_the_weights():
    result = scores(Random(seed=3), WEIGHTS)
    joined = torch.cat([score.flatten() for score in result.values()])
    assert 0.0 <= float(joined.min()) < 0.01 < 0.99 < float(joined.max()) < 1.0
    # The mean of 6,050 uniform numbers is within 5 standard deviations, .0186, of one half.
    assert abs(float(joined.mean()) - 0.5) < 0.0186
    other = scores(Random(seed=3), {name: 9 - weight for name, weight in WEIGHTS.items()})
    assert all(torch.equal(result[name], other[name]) for name in result)


def test_random_follows_the_run_or_its_own_seed():
    def same(first, second):
        return all(torch.equal(first[name], second[name]) for name in first)

    assert same(scores(Random(), WEIGHTS, seed=1), scores(Random(), WEIGHTS, seed=1))
    assert not same(scores(Random(), WEIGHTS, seed=1), scores(Random(), WEIGHTS, seed=2))
    assert same(scores(Random(seed=5), WEIGHTS, seed=1), scores(Random(seed=5), WEIGHTS, seed=2))
    assert same(scores(Random(seed=5), WEIGHTS), scores(Random(), WEIGHTS, seed=5))
    assert not same(scores(Random(seed=5), WEIGHTS), scores(Random(seed=6), WEIGHTS))


def test_random_layers_differ():
    result = scores(Random(seed=0), {"a": torch.zeros(10), "b": torch.zeros(10)})
    assert not torch.equal(result["a"], result["b"])


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError)])
def test_random_refuses_what_is_no_seed(seed, error):
    with pytest.raises(error, match="`seed` is the start of the random numbers and must be an integer >= 0; got"):
        Random(seed=seed)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("criterion", [Random(), Random(seed=3)])
def test_random_scores_are_not_the_initial_weights_of_the_same_seed(kind, criterion):
    torch.manual_seed(3)
    net = MLP(64, 10) if kind == "mlp" else SmallConvNet(1, 10, image_size=8)
    store = MaskStore(net)
    scores = criterion.score(ScoreContext(net, store.weights, store.masks, seed=3))
    for name, score in scores.items():
        both = torch.stack([score.flatten().double(), store.weights[name].flatten().double()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 4 / score.numel() ** 0.5
