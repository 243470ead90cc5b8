"""What every criterion, schedule and allocation promises. A new one is found here by itself."""

import copy
import dataclasses
import inspect
import itertools
import math
import pickle

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, loader, masked_values, mlp, trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsecomp.allocation
import sparsecomp.criteria
import sparsecomp.schedules
from sparsecomp import Allocation, Criterion, MaskStore, OneShot, Pruning, Schedule, ScoreContext, Selection, prune
from sparsecomp._discovery import concrete_subclasses


def members(base):
    """The package's own concrete classes; tests may define more."""
    return [class_ for class_ in concrete_subclasses(base) if class_.__module__.startswith("sparsecomp.")]


CRITERIA, SCHEDULES, ALLOCATIONS = members(Criterion), members(Schedule), members(Allocation)
UNITS = ("step", "epoch", "fraction")

# Values of required arguments by their name. A class with another required argument adds it here.
ARGUMENTS = {"final_sparsity": 0.8, "at": 2, "begin": 1, "end": 5, "rounds": 3, "sparsities": (0.2, 0.5, 0.8)}
FRACTIONS = {"at": 0.4, "begin": 0.1, "end": 0.9, "every": 0.2}
NO_SPARSITY = [1.0, 1.5, 90, -0.1, float("nan"), float("inf"), "0.5", True, None]


def build(class_, **overrides):
    """An instance with `ARGUMENTS` for what is required."""
    required = [name for name, p in inspect.signature(class_).parameters.items() if p.default is p.empty]
    return class_(**{name: ARGUMENTS[name] for name in required} | overrides)


def build_schedule(class_, unit, **overrides):
    accepted = inspect.signature(class_).parameters
    fractions = {name: value for name, value in FRACTIONS.items() if name in accepted} if unit == "fraction" else {}
    return build(class_, **fractions | {"unit": unit} | overrides)


def grid(unit):
    """Positions from the start to well after the last event."""
    return [i / 100 for i in range(101)] if unit == "fraction" else list(range(12))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.Linear(8, 4)
    )


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 2, 4, 4, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(2)
    ]


def loss(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x), y)


def context(module, seed=0):
    store = MaskStore(module)
    return ScoreContext(module, store.weights, store.masks, seed, batches(), loss, store.selected)


def test_members_are_found():
    assert {c.__name__ for c in CRITERIA} >= {"Magnitude", "Random"}
    assert {c.__name__ for c in SCHEDULES} >= {"Cosine", "Geometric", "Levels", "Linear", "OneShot", "Polynomial"}
    assert {c.__name__ for c in ALLOCATIONS} >= {"ERK", "Global", "Layerwise"}


@pytest.mark.parametrize("package", [sparsecomp.criteria, sparsecomp.schedules, sparsecomp.allocation])
def test_unknown_member_lists_known_ones(package):
    with pytest.raises(AttributeError, match=f"has no .* 'Wrong'; there are .*{package.MEMBERS[0]}"):
        _ = package.Wrong


# Criteria


@pytest.mark.parametrize("class_", CRITERIA)
class TestCriterion:
    def test_scores_have_names_and_shapes_of_weights(self, class_):
        module = network()
        scores = build(class_).score(context(module))
        assert {n: s.shape for n, s in scores.items()} == {
            n: w.shape for n, w in module.named_parameters() if n in ("0.weight", "4.weight", "5.weight")
        }
        assert all(bool(score.isfinite().all()) for score in scores.values())

    def test_same_seed_same_scores(self, class_):
        criterion = build(class_)
        assert_same(criterion.score(context(network(), 7)), criterion.score(context(network(), 7)))

    def test_global_random_state_is_left_alone(self, class_):
        seen = context(network())
        before = torch.get_rng_state()
        build(class_).score(seen)
        assert_same(torch.get_rng_state(), before)

    def test_network_is_not_touched(self, class_):
        module = network().train()
        module[5].eval()
        module[0].weight.requires_grad_(False)
        seen = _seen(module)
        before = clone([module.state_dict(), seen.weights, seen.masks])
        criterion = build(class_)
        settings_before = copy.deepcopy(vars(criterion))
        criterion.refit(seen, {name: mask.clone() for name, mask in seen.masks.items()})
        criterion.score(seen)
        assert_same(clone([module.state_dict(), seen.weights, seen.masks]), before)
        assert vars(criterion) == settings_before
        assert (module[0].training, module[5].training) == (True, False)
        assert not module[0].weight.requires_grad
        assert [p.grad for p in module.parameters()] == [None] * 8

    @pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy])
    def test_copy_scores_alike(self, class_, copied):
        criterion = build(class_)
        twin = copied(criterion)
        assert_same(twin.score(context(network())), criterion.score(context(network())))
        assert repr(twin) == repr(criterion)

    def test_repr_builds_it_again(self, class_):
        criterion = build(class_)
        twin = eval(repr(criterion), vars(sparsecomp.criteria))
        assert_same(twin.score(context(network())), criterion.score(context(network())))

    @pytest.mark.parametrize("allocation", ["global", "layerwise", "erk"])
    def test_exact_count_through_prune(self, class_, allocation):
        module = network()
        store = prune(module, build(class_), 0.777, batches(), loss, allocation=allocation)
        assert sum(int((~mask).sum()) for mask in store.masks.values()) == round(0.777 * (108 + 768 + 32))
        assert masked_values(module, store.masks).count_nonzero() == 0

    def test_seeded_runs_prune_alike_and_nested(self, class_):
        def run():
            pruner = Pruning(build(class_), build_schedule(sparsecomp.schedules.Levels, "epoch"))
            seen = []
            lit = Lit(mlp())
            torch.manual_seed(5)
            trainer(pruner, Watch(on_train_epoch_end=lambda *_: seen.append(clone(pruner.masks)))).fit(lit, loader())
            assert [event.after for event in pruner.events] == [round(s * 640) / 640 for s in (0.2, 0.5, 0.8)]
            return seen

        first, second = run(), run()
        assert_same(first, second)
        for earlier, later in itertools.pairwise(first):
            assert all(bool((later[name] <= earlier[name]).all()) for name in later)


def _seen(module):
    store = MaskStore(module, Selection(include=["0.weight", "4.weight", "5.weight"]))
    return ScoreContext(module, store.weights, store.masks, 0, batches(), loss, store.selected)


class Poisoned(Criterion):
    """Scores of one layer that are not finite."""

    def __init__(self, value, name):
        self.value, self.name = value, name

    def score(self, context):
        scores = {name: weight.abs() for name, weight in context.weights.items()}
        scores[self.name].view(-1)[3] = self.value
        return scores


class PoisonedRefit(Poisoned):
    """Good scores, but a refit that is not finite."""

    def score(self, context):
        return {name: weight.abs() for name, weight in context.weights.items()}

    def refit(self, context, masks):
        good, bad = (dict(context.module.named_parameters())[name].clone() for name in ("net.0.weight", self.name))
        return {"net.0.weight": good + 1, self.name: bad.fill_(self.value)}


BAD = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", BAD)
def test_scores_that_are_not_finite_change_nothing_through_prune(value):
    module = network()
    before = clone(module.state_dict())
    with pytest.raises(ValueError, match=r"the scores of '4\.weight' must be finite; got .* of 768"):
        prune(module, Poisoned(value, "4.weight"), 0.5)
    assert_same(clone(module.state_dict()), before)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("class_", "message"),
    [
        (Poisoned, r"the scores of 'net\.2\.weight' must be finite"),
        (PoisonedRefit, r"PoisonedRefit\.refit returned values for 'net\.2\.weight' that are not finite"),
    ],
)
def test_failing_event_changes_nothing_through_fit(value, class_, message):
    """The second event fails: weights, masks and optimizer state are what they were before it."""
    schedule = sparsecomp.schedules.Levels((0.3, 0.6), begin=2, every=2, unit="step")
    pruner = Pruning(sparsecomp.criteria.Magnitude(), schedule)
    before = []

    def remember(trainer, module):
        if trainer.global_step == 4:
            pruner.criterion = class_(value, "net.2.weight")
            optimizer = trainer.optimizers[0].state_dict()["state"]
            before.append(clone([module.state_dict(), pruner.masks, optimizer]))
            before.append(pruner.events)

    lit = Lit(mlp())
    running = trainer(Watch(on_train_batch_end=remember), pruner)
    with pytest.raises(ValueError, match=message):
        running.fit(lit, loader())
    assert running.global_step == 4
    after = clone([lit.state_dict(), pruner.masks, running.optimizers[0].state_dict()["state"]])
    assert_same(after, before[0])
    assert pruner.events == before[1]
    assert len(pruner.events) == 1
    assert pruner.sparsity == 0.3


# Allocations

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(1, 6), st.integers(1, 6)),
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=4,
)
sparsities = st.integers(0, 999).map(lambda i: i / 1000)
tie_levels = st.sampled_from([1, 2, 5, 1000])
modest = settings(deadline=None, derandomize=True, max_examples=60, database=None)


def scores_of(shapes, levels, seed):
    """Random scores of few different values, so of many ties."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer{i}.weight": torch.randint(0, levels, shape, generator=generator).float()
        for i, shape in enumerate(shapes)
    }


def removed(masks):
    return sum(int((~mask).sum()) for mask in masks.values())


def numel(scores):
    return sum(score.numel() for score in scores.values())


def half_up(x):
    return math.floor(x + 0.5)


@pytest.mark.parametrize("class_", ALLOCATIONS)
class TestAllocation:
    @modest
    @given(shapes=shapes, sparsity=sparsities, levels=tie_levels, seed=st.integers(0, 99))
    def test_exact_count(self, class_, shapes, sparsity, levels, seed):
        scores = scores_of(shapes, levels, seed)
        masks = class_(min_keep=0)(scores, sparsity)
        assert removed(masks) == half_up(sparsity * numel(scores))
        assert {n: (m.dtype, m.shape) for n, m in masks.items()} == {
            n: (torch.bool, s.shape) for n, s in scores.items()
        }

    @modest
    @given(sparsity=sparsities, levels=tie_levels, seed=st.integers(0, 99))
    def test_exact_count_with_the_default_min_keep(self, class_, sparsity, levels, seed):
        sparsity = min(sparsity, 0.99)  # beyond, one weight a layer is more than what is left
        scores = scores_of([(16, 20), (10, 16), (4, 10)], levels, seed)
        assert removed(class_()(scores, sparsity)) == half_up(sparsity * 520)

    @modest
    @given(shapes=shapes, rise=st.lists(sparsities, min_size=2, max_size=4), levels=tie_levels, seed=st.integers(0, 99))
    @pytest.mark.parametrize("granularity", ["weight", "unit"])
    def test_masks_of_rising_sparsity_are_nested(self, class_, granularity, shapes, rise, levels, seed):
        allocation, masks = class_(granularity, min_keep=0), None
        for event, sparsity in enumerate(sorted(rise)):
            scores = scores_of(shapes, levels, seed + event)  # other scores at each event, as in a training
            later = allocation(scores, sparsity, masks)
            assert masks is None or all(bool((later[name] <= masks[name]).all()) for name in later)
            assert granularity == "unit" or removed(later) == half_up(sparsity * numel(scores))
            masks = later

    @modest
    @given(shapes=shapes, sparsity=sparsities, levels=tie_levels, seed=st.integers(0, 99))
    @pytest.mark.parametrize("min_keep", [None, 0, 2])
    def test_same_sparsity_twice_changes_nothing(self, class_, min_keep, shapes, sparsity, levels, seed):
        allocation = class_(min_keep=min_keep)
        once = allocation(scores_of(shapes, levels, seed), sparsity)
        assert_same(allocation(scores_of(shapes, levels, seed), sparsity, once), once)
        if removed(once) == half_up(sparsity * numel(once)):
            assert_same(allocation(scores_of(shapes, levels, seed + 1), sparsity, once), once)

    @modest
    @given(shapes=shapes, sparsity=sparsities, min_keep=st.integers(1, 3), seed=st.integers(0, 99))
    @pytest.mark.parametrize("granularity", ["weight", "unit"])
    def test_min_keep_holds(self, class_, granularity, shapes, sparsity, min_keep, seed):
        masks = class_(granularity, min_keep)(scores_of(shapes, 5, seed), sparsity)
        for mask in masks.values():
            kept = mask if granularity == "weight" else mask.flatten(1).any(1) if mask.dim() > 1 else mask
            assert int(kept.sum()) >= min(min_keep, kept.numel())

    @pytest.mark.parametrize("dim", [0, 1])
    def test_units_go_whole(self, class_, dim):
        scores = scores_of([(6, 5, 3), (8, 10)], 1000, 0)
        masks = class_("unit")(scores, 0.5, unit_dims=dict.fromkeys(scores, dim))
        for mask in masks.values():
            by_unit = mask.movedim(dim, 0).flatten(1)
            assert torch.equal(by_unit.all(1), by_unit.any(1))
            assert 0 < int(by_unit.all(1).sum()) < len(by_unit)

    def test_inputs_and_random_state_are_left_alone(self, class_):
        scores = scores_of([(6, 5), (4, 6)], 5, 0)
        masks = class_()(scores, 0.2)
        before, state = clone([scores, masks]), torch.get_rng_state()
        result = class_()(scores, 0.6, masks)
        same = class_()(scores, 0.2, masks)
        assert_same(torch.get_rng_state(), state)
        result["layer0.weight"].zero_()
        same["layer0.weight"].zero_()
        assert_same(clone([scores, masks]), before)

    @pytest.mark.parametrize("copied", [lambda a: pickle.loads(pickle.dumps(a)), copy.deepcopy])
    @pytest.mark.parametrize("granularity", ["weight", "unit"])
    def test_copy_and_repr_allocate_alike(self, class_, copied, granularity):
        allocation = class_(granularity, min_keep=2)
        scores = scores_of([(6, 5), (4, 6)], 1000, 0)
        assert repr(copied(allocation)) == repr(allocation)
        assert_same(copied(allocation)(scores, 0.6), allocation(scores, 0.6))
        assert_same(eval(repr(allocation), vars(sparsecomp.allocation))(scores, 0.6), allocation(scores, 0.6))

    @pytest.mark.parametrize("sparsity", NO_SPARSITY)
    def test_sparsity_out_of_range(self, class_, sparsity):
        with pytest.raises((ValueError, TypeError), match=r"`sparsity` is .* must be in \[0, 1\); got"):
            class_()(scores_of([(6, 5)], 5, 0), sparsity)

    def test_no_scores(self, class_):
        with pytest.raises(ValueError, match=r"`scores` .* must not be empty"):
            class_()({}, 0.5)

    @pytest.mark.parametrize("value", BAD)
    def test_scores_that_are_not_finite(self, class_, value):
        scores = scores_of([(6, 5), (4, 6)], 5, 0)
        scores["layer1.weight"][2, 3] = value
        with pytest.raises(
            ValueError, match=r"the scores of 'layer1\.weight' must be finite; got . NaN and . infinite"
        ):
            class_()(scores, 0.5)

    def test_large_finite_scores_are_fine(self, class_):
        scores = {"a": torch.tensor([1e38, 3e38, 3e38, 2e38]), "b": torch.tensor([1e308, 1.7e308], dtype=torch.float64)}
        assert removed(class_(min_keep=0)(scores, 0.5)) == 3

    def test_wrong_settings(self, class_):
        with pytest.raises(ValueError, match=r"`granularity` is .* one of 'weight', 'unit'; got 'row'"):
            class_("row")
        with pytest.raises(ValueError, match=r"`min_keep` is .* integer >= 0; got -1"):
            class_(min_keep=-1)
        with pytest.raises(TypeError, match=r"`min_keep` is .* integer >= 0; got True of type bool"):
            class_(min_keep=True)


def test_every_allocation_has_a_name_of_its_own():
    assert len({class_.name for class_ in ALLOCATIONS}) == len(ALLOCATIONS)
    for class_ in ALLOCATIONS:
        assert type(sparsecomp.allocation.resolve_allocation(class_.name)) is class_


# Schedules


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("class_", SCHEDULES)
class TestSchedule:
    def test_exact_at_both_ends(self, class_, unit):
        schedule = build_schedule(class_, unit)
        first, last = schedule.positions[0], schedule.positions[-1]
        assert schedule.final_sparsity == 0.8
        assert schedule.sparsity(last) == 0.8
        assert schedule.sparsity(grid(unit)[-1]) == 0.8
        before = [schedule.sparsity(position) for position in grid(unit) if position < first]
        assert before
        assert set(before) == {0.0}

    def test_monotone_and_in_range(self, class_, unit):
        schedule = build_schedule(class_, unit)
        values = [schedule.sparsity(position) for position in grid(unit)]
        assert schedule.is_monotone
        assert values == sorted(values)
        assert all(0.0 <= value < 1.0 for value in values)

    def test_events_positions_and_sparsity_agree(self, class_, unit):
        schedule = build_schedule(class_, unit)
        assert list(schedule.positions) == sorted(set(schedule.positions))
        assert set(schedule.positions) <= set(grid(unit))
        for position in grid(unit):
            past = [p for p in schedule.positions if p <= position]
            assert schedule.last_event(position) == (past[-1] if past else None)
            assert schedule.is_event(position) == (position in schedule.positions)
            assert schedule.sparsity(position) == (schedule.sparsity(past[-1]) if past else 0.0)

    def test_with_final_sparsity(self, class_, unit):
        schedule = build_schedule(class_, unit)
        other = schedule.with_final_sparsity(0.6)
        assert type(other) is class_
        assert (other.final_sparsity, other.sparsity(other.positions[-1])) == (0.6, 0.6)
        assert (other.positions, other.unit) == (schedule.positions, unit)
        assert other.is_monotone
        assert schedule.final_sparsity == 0.8

    @pytest.mark.parametrize("sparsity", NO_SPARSITY)
    def test_sparsity_out_of_range(self, class_, unit, sparsity):
        with pytest.raises((ValueError, TypeError), match=r"`final_sparsity` is .* must be in \[0, 1\); got"):
            build_schedule(class_, unit).with_final_sparsity(sparsity)

    @pytest.mark.parametrize("value", [-1, -0.5, float("nan"), True, "1", None])
    def test_wrong_positions(self, class_, unit, value):
        names = [name for name in ("at", "begin", "end") if name in inspect.signature(class_).parameters]
        assert names
        for name in names:
            with pytest.raises((ValueError, TypeError), match=f"`{name}` is .* must be .*; got {value!r}"):
                build_schedule(class_, unit, **{name: value})
        with pytest.raises((ValueError, TypeError), match=f"`position` is .* must be .*; got {value!r}"):
            build_schedule(class_, unit).sparsity(value)

    @pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
    def test_copy_and_repr_are_equal(self, class_, unit, copied):
        schedule = build_schedule(class_, unit)
        for twin in (copied(schedule), eval(repr(schedule), vars(sparsecomp.schedules))):
            assert twin == schedule
            assert hash(twin) == hash(schedule)
            assert [twin.sparsity(p) for p in grid(unit)] == [schedule.sparsity(p) for p in grid(unit)]

    def test_frozen(self, class_, unit):
        schedule = build_schedule(class_, unit)
        with pytest.raises(dataclasses.FrozenInstanceError):
            schedule.unit = "step"


@pytest.mark.parametrize("class_", SCHEDULES)
class TestScheduleArguments:
    def test_wrong_unit(self, class_):
        with pytest.raises(ValueError, match=r"`unit` is .* one of 'step', 'epoch', 'fraction'; got 'hours'"):
            build(class_, unit="hours")

    @pytest.mark.parametrize("unit", ["step", "epoch"])
    def test_fractional_position_of_a_counting_unit(self, class_, unit):
        with pytest.raises(TypeError, match=r"`position` is a number of completed .* must be an integer >= 0; got 1.5"):
            build(class_, unit=unit).is_event(1.5)

    def test_fraction_beyond_the_end(self, class_):
        with pytest.raises(ValueError, match=r"`position` is .* must be in \[0, 1\]; got 3"):
            build_schedule(class_, "fraction").last_event(3)

    @modest
    @given(value=st.integers(-5, 0) | st.floats(max_value=0) | st.sampled_from([float("nan"), "1", True, None]))
    def test_wrong_distance(self, class_, value):
        # OneShot has none: then there is nothing to refuse, and nothing is passed.
        for unit in UNITS * ("every" in inspect.signature(class_).parameters):
            with pytest.raises((ValueError, TypeError), match=r"`every` is .* must be"):
                build_schedule(class_, unit, every=value)

    @modest
    @given(sparsity=sparsities)
    def test_with_any_final_sparsity(self, class_, sparsity):
        schedule = build(class_).with_final_sparsity(sparsity)
        assert schedule.sparsity(11) == sparsity
        assert schedule.is_monotone


# Selection and masks, which every pruner shares


def test_empty_selection_is_refused_by_prune_and_fit():
    nothing = Selection(exclude=["*"])
    with pytest.raises(ValueError, match=r"leaves nothing to prune in Sequential; its parameters are: 0\.weight"):
        prune(mlp(), sparsecomp.criteria.Magnitude(), 0.5, selection=nothing)
    with pytest.raises(ValueError, match=r"leaves nothing to prune in Lit; its parameters are: net\.0\.weight"):
        trainer(Pruning(sparsecomp.criteria.Magnitude(), OneShot(0.5, at=1), selection=nothing)).fit(
            Lit(mlp()), loader()
        )


def test_twice_the_same_event_changes_nothing():
    module = network()
    store = prune(module, sparsecomp.criteria.Magnitude(), 0.5)
    before = kept_values(dict(module.named_parameters()), store.masks)
    assert_same(dict(prune(module, sparsecomp.criteria.Magnitude(), 0.5).masks), dict(store.masks))
    assert_same(kept_values(dict(module.named_parameters()), store.masks), before)
