"""Each schedule by hand; what all of them promise is in test_contracts.py."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomp import Cosine, Geometric, Levels, Linear, OneShot, Polynomial

modest = settings(deadline=None, derandomize=True, max_examples=100, database=None)
sparsities = st.integers(0, 9999).map(lambda i: i / 10000)
RAMPS = [Linear, Polynomial, Cosine]


def values(schedule, positions):
    return [schedule.sparsity(position) for position in positions]


def test_one_shot():
    schedule = OneShot(0.9, at=3, unit="step")
    assert values(schedule, range(6)) == [0.0, 0.0, 0.0, 0.9, 0.9, 0.9]
    assert schedule.positions == (3,)
    assert [schedule.is_event(step) for step in range(5)] == [False, False, False, True, False]
    assert OneShot(0.8, at=0).sparsity(0) == 0.8
    assert OneShot(0.0, at=1).sparsity(5) == 0.0
    assert (OneShot(0.5, at=1).unit, OneShot(0.5, at=1).final_sparsity) == ("epoch", 0.5)


def test_linear():
    schedule = Linear(0.8, begin=2, end=6, every=2, initial_sparsity=0.2)
    assert values(schedule, range(9)) == pytest.approx([0, 0, 0.2, 0.2, 0.5, 0.5, 0.8, 0.8, 0.8])
    assert schedule.positions == (2, 4, 6)


def test_polynomial_is_the_formula_of_zhu_and_gupta():
    schedule = Polynomial(0.9, begin=10, end=50, every=10, initial_sparsity=0.1, unit="step")
    # s_f + (s_i - s_f) (1 - k/4)**3, k = 0 ... 4
    assert values(schedule, (9, 10, 20, 30, 40, 50)) == pytest.approx(
        [0, 0.1, 0.9 - 0.8 * 27 / 64, 0.9 - 0.8 / 8, 0.9 - 0.8 / 64, 0.9]
    )
    assert values(Polynomial(0.8, begin=0, end=4, power=1), range(5)) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert Polynomial(0.8, begin=0, end=4, power=0.5).sparsity(3) == pytest.approx(0.4)


def test_cosine():
    schedule = Cosine(0.8, begin=0, end=6, every=2, initial_sparsity=0.2)
    # A third of the way is cos(60 degrees): a quarter of the rise.
    assert values(schedule, (0, 2, 4, 6)) == pytest.approx([0.2, 0.35, 0.65, 0.8])
    assert Cosine(0.8, begin=0, end=2).sparsity(1) == pytest.approx(0.4)


def test_geometric_removes_the_same_share_of_what_remains():
    schedule = Geometric(0.9, rounds=3, begin=2, every=5)
    kept = [1 - s for s in values(schedule, (1, 2, 7, 12, 100))]
    assert kept[0] == 1.0
    assert [b / a for a, b in itertools.pairwise(kept[:-1])] == pytest.approx([0.1 ** (1 / 3)] * 3)
    assert schedule.rate == pytest.approx(1 - 0.1 ** (1 / 3))
    assert kept[-1] == 1 - 0.9
    assert schedule.positions == (2, 7, 12)
    assert Geometric(0.9, rounds=1, begin=4).sparsity(4) == 0.9


def test_levels():
    schedule = Levels([0.5, 0.5, 0.9], begin=1, every=3)
    assert schedule.sparsities == (0.5, 0.5, 0.9)
    assert values(schedule, (0, 1, 4, 6, 7, 8)) == [0.0, 0.5, 0.5, 0.5, 0.9, 0.9]
    assert schedule.positions == (1, 4, 7)
    assert Levels((0.5, 0.3), begin=0, monotone=False).is_monotone is False
    assert schedule.with_final_sparsity(0.45).sparsities == (0.25, 0.25, 0.45)


@pytest.mark.parametrize("class_", RAMPS)
def test_ramps_end_at_end_also_where_the_distance_does_not_fit(class_):
    schedule = class_(0.8, begin=1, end=6, every=2)
    assert schedule.positions == (1, 3, 5, 6)
    assert schedule.sparsity(5) < 0.8 == schedule.sparsity(6)


@pytest.mark.parametrize("class_", RAMPS)
def test_ramps_of_no_length_prune_once_to_the_end(class_):
    schedule = class_(0.8, begin=3, end=3, initial_sparsity=0.5)
    assert (schedule.positions, values(schedule, (2, 3, 4))) == ((3,), [0.0, 0.8, 0.8])


def test_fractions_that_floats_add_up_badly():
    """.1 + .1 + .1 is not .3 in floats, but the same place in the training."""
    schedule = Linear(0.6, begin=0.0, end=0.6, every=0.1, unit="fraction")
    assert schedule.positions == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert schedule.is_event(0.1 + 0.1 + 0.1)
    assert schedule.is_event(0.3)
    assert schedule.sparsity(0.1 + 0.2) == schedule.sparsity(0.3) == pytest.approx(0.3)
    thirds = Geometric(0.9, rounds=3, begin=1 / 3, every=1 / 3, unit="fraction")
    assert [thirds.is_event(p) for p in (1 / 3, 2 / 3, 1.0, 0.5)] == [True, True, True, False]


@modest
@given(
    class_=st.sampled_from(RAMPS),
    ends=st.lists(st.integers(0, 200), min_size=2, max_size=2).map(sorted),
    every=st.integers(1, 50),
    levels=st.lists(sparsities, min_size=2, max_size=2).map(sorted),
    unit=st.sampled_from(["step", "epoch"]),
)
def test_any_ramp_is_exact_at_both_ends_monotone_and_in_range(class_, ends, every, levels, unit):
    (begin, end), (initial, final) = ends, levels
    schedule = class_(final, begin=begin, end=end, every=every, initial_sparsity=initial, unit=unit)
    assert schedule.positions[0] == begin
    assert schedule.positions[-1] == end
    assert len(schedule.positions) == len(set(schedule.positions)) == 1 + math.ceil((end - begin) / every)
    assert schedule.sparsity(end) == final
    assert schedule.sparsity(begin) == (final if begin == end else initial)
    reached = values(schedule, range(begin, end + 1))
    assert reached == sorted(reached)
    assert initial <= reached[0] <= reached[-1] <= final
    assert schedule.is_monotone


@modest
@given(
    final=sparsities,
    initial_share=st.integers(0, 100),
    power=st.sampled_from([0.1, 0.5, 1, 2, 3, 7.5, 20, 60]),
    events=st.integers(2, 60),
)
def test_any_power_never_exceeds_the_final_sparsity(final, initial_share, power, events):
    initial = final * initial_share / 100
    schedule = Polynomial(final, begin=0, end=events, power=power, initial_sparsity=initial)
    assert schedule.is_monotone
    assert all(initial <= s <= final for s in values(schedule, range(events + 3)))


@modest
@given(final=sparsities, rounds=st.integers(1, 40), begin=st.integers(0, 20), every=st.integers(1, 9))
def test_any_geometric_is_exact_monotone_and_keeps_one_rate(final, rounds, begin, every):
    schedule = Geometric(final, rounds=rounds, begin=begin, every=every)
    assert len(schedule.positions) == rounds
    assert schedule.sparsity(schedule.positions[-1]) == final
    assert schedule.is_monotone
    for index, position in enumerate(schedule.positions):
        assert schedule.sparsity(position) == pytest.approx(1 - (1 - schedule.rate) ** (index + 1), abs=1e-9)


def test_rounding_does_not_lift_an_event_above_the_last_one():
    """In floats .06 + (.88 - .06) > .88, and .796 * (.423 / .796) > .423."""
    assert Levels((0.796, 0.796), begin=0).with_final_sparsity(0.423).sparsities == (0.423, 0.423)
    assert Polynomial(0.88, begin=0, end=8, power=20, initial_sparsity=0.06).is_monotone


@modest
@given(
    levels=st.lists(sparsities.filter(bool), min_size=1, max_size=6).map(sorted),
    repeat=st.integers(1, 3),
    other=sparsities,
)
def test_any_levels_scale_to_another_final_sparsity(levels, repeat, other):
    schedule = Levels([level for level in levels for _ in range(repeat)], begin=0)
    scaled = schedule.with_final_sparsity(other)
    assert scaled.final_sparsity == other
    assert scaled.is_monotone
    assert scaled.sparsities == pytest.approx([s * other / schedule.final_sparsity for s in schedule.sparsities])


@modest
@given(
    class_=st.sampled_from(RAMPS),
    ends=st.lists(st.integers(0, 1000), min_size=2, max_size=2, unique=True).map(sorted),
    every=st.integers(1, 1000),
)
def test_any_fractions_have_rising_positions_in_range(class_, ends, every):
    begin, end = (value / 1000 for value in ends)
    schedule = class_(0.9, begin=begin, end=end, every=every / 1000, unit="fraction")
    assert list(schedule.positions) == sorted(set(schedule.positions))
    assert (schedule.positions[0], schedule.positions[-1]) == (begin, end)
    assert len(schedule.positions) == 1 + math.ceil((ends[1] - ends[0]) / every)


# Errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: OneShot(1.0, at=1), ValueError, r"`final_sparsity` is .* must be in \[0, 1\); got 1\.0"),
        (lambda: OneShot(90, at=1), ValueError, r"got 90\. For 90% write 0\.9\."),
        (lambda: OneShot(0.5, at=1.5), TypeError, r"`at` is a number of completed epochs .* integer >= 0; got 1\.5"),
        (
            lambda: OneShot(0.5, at=5, unit="fraction"),
            ValueError,
            r"`at` .* \[0, 1\]; got 5\. For epochs use unit='epoch'",
        ),
        (lambda: Linear(0.5, begin=3, end=1), ValueError, r"`end` is .* must be >= `begin`=3; got 1"),
        (
            lambda: Linear(0.5, 0, 1, initial_sparsity=0.6),
            ValueError,
            r"`initial_sparsity` .* `final_sparsity`=0\.5; got 0\.6",
        ),
        (lambda: Linear(0.5, 0, 1, initial_sparsity=-0.1), ValueError, r"`initial_sparsity` is .* got -0\.1"),
        (lambda: Linear(0.5, 0, 4, every=0), ValueError, r"`every` is the number of epochs .* >= 1; got 0"),
        (lambda: Linear(0.5, 0, 4, every=0.5), TypeError, r"`every` is the number of epochs .* >= 1; got 0\.5"),
        (lambda: Cosine(0.5, 0, 1, every=2, unit="fraction"), ValueError, r"`every` is the share .* \(0, 1\]; got 2"),
        (
            lambda: Polynomial(0.5, 0, 1, power=0),
            ValueError,
            r"`power` is the exponent of the rise and must be > 0; got 0",
        ),
        (lambda: Polynomial(0.5, 0, 1, power="3"), TypeError, r"`power` is the exponent .* got '3' of type str"),
        (lambda: Polynomial(0.5, 0, 1, power=float("inf")), ValueError, r"`power` is the exponent .* got inf"),
        (lambda: Geometric(0.5, rounds=0, begin=1), ValueError, r"`rounds` is .* integer >= 1; got 0"),
        (lambda: Geometric(0.5, rounds=2.0, begin=1), TypeError, r"`rounds` is .* got 2\.0 of type float"),
        (
            lambda: Geometric(0.5, rounds=5, begin=0.5, every=0.2, unit="fraction"),
            ValueError,
            r"`rounds`=5 events from `begin`=0\.5, `every`=0\.2, end at 1\.3 of the training, beyond its end at 1",
        ),
        (lambda: Levels((), begin=0), ValueError, r"`sparsities` .* non-empty list .* got \(\)"),
        (lambda: Levels("0.5", begin=0), ValueError, r"`sparsities` .* non-empty list .* got '0\.5'"),
        (lambda: Levels(0.5, begin=0), ValueError, r"`sparsities` .* non-empty list .* got 0\.5"),
        (lambda: Levels((0.5, 1.0), begin=0), ValueError, r"`sparsities` is .* in \[0, 1\); got 1\.0"),
        (lambda: Levels((0.5, None), begin=0), TypeError, r"`sparsities` is .* got None of type NoneType"),
        (
            lambda: Levels((0.5, 0.4), begin=0),
            ValueError,
            r"must not fall unless `monotone` is false; got \[0\.5, 0\.4\]",
        ),
        (lambda: Levels((0.0,), begin=0).with_final_sparsity(0.5), ValueError, r"`sparsities` ends at 0"),
        (
            lambda: Levels((0.1, 0.2, 0.3), begin=0.5, every=0.4, unit="fraction"),
            ValueError,
            r"must be in \[0, 1\]; got 1\.3",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
