"""The stationary distribution against closed forms and against a simulated slot."""

import random
from itertools import accumulate

import pytest

from replayssm_jit.traffic import acceptance_histogram, steady


@pytest.mark.parametrize(("buffer_len", "tokens"), [(1, 1), (16, 1), (16, 4), (16, 5), (64, 16), (7, 3)])
def test_full_acceptance_is_a_cycle(buffer_len, tokens):
    """The history takes the values T, 2T, ... kT with k = floor(L / T), one step each."""
    result = steady(buffer_len, tokens, [0.0] * tokens + [1.0])
    cycle = buffer_len // tokens
    expected = [1 / cycle if h and h % tokens == 0 and h <= cycle * tokens else 0.0 for h in range(buffer_len + 1)]
    assert result.histories == pytest.approx(expected, abs=1e-12)
    assert result.flush_share == pytest.approx(1 / cycle)
    assert result.mean_history == pytest.approx(tokens * (cycle + 1) / 2)


@pytest.mark.parametrize(("buffer_len", "tokens", "rate"), [(16, 4, 0.7), (5, 5, 0.5), (32, 8, 0.9)])
def test_agrees_with_a_simulated_slot(buffer_len, tokens, rate):
    acceptance = acceptance_histogram(tokens, rate)
    result = steady(buffer_len, tokens, acceptance)
    rng, h, steps = random.Random(0), 0, 100_000
    total = flushes = 0
    cumulative = list(accumulate(acceptance))
    for _ in range(steps):
        flush = h + tokens > buffer_len
        total, flushes = total + h, flushes + flush
        a = rng.choices(range(tokens + 1), cum_weights=cumulative)[0]
        h = a if flush else h + a
        assert h <= buffer_len
    assert result.mean_history == pytest.approx(total / steps, rel=0.02)
    assert result.flush_share == pytest.approx(flushes / steps, rel=0.05)


def test_nothing_accepted_stays_empty():
    result = steady(8, 3, [1.0, 0.0, 0.0, 0.0])
    assert (result.mean_history, result.flush_share) == (0, 0)
    assert result.phases(4) == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 256])
def test_phases_follow_the_distribution(rows):
    result = steady(16, 4, acceptance_histogram(4, 0.7))
    phases = result.phases(rows)
    assert len(phases) == rows
    for h, share in enumerate(result.histories):
        assert abs(phases.count(h) / rows - share) <= 1 / rows + 1e-12


def test_acceptance_histogram():
    assert acceptance_histogram(1, 0.3) == [0.0, 1.0]
    assert acceptance_histogram(4, 1.0) == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert acceptance_histogram(3, 0.5) == pytest.approx([0.0, 0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: steady(4, 5, [0.2] * 6 + [0]), "tokens must be from 1 to buffer_len=4"),
        (lambda: steady(4, 2, [0.5, 0.5]), "acceptance must be 3 probabilities"),
        (lambda: steady(4, 1, [0.5, 0.6]), "sum to 1"),
        (lambda: steady(4, 1, [-0.5, 1.5]), "acceptance must be"),
        (lambda: steady(4, 1, [0, 1]).phases(0), "rows must be at least 1"),
        (lambda: acceptance_histogram(0, 0.5), "tokens must be at least 1"),
        (lambda: acceptance_histogram(2, 1.5), "rate must be from 0 to 1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
