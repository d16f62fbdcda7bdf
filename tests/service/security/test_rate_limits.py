"""Token buckets with a manual clock."""

from __future__ import annotations

import random

from service.security.rate_limits import Buckets, Limit, Standing


def test_a_burst_and_then_the_rate() -> None:
    buckets, limit = Buckets(), Limit(rate=2.0, burst=3)
    assert [buckets.take("a", limit, 100.0).remaining for _ in range(3)] == [2, 1, 0]
    assert buckets.take("a", limit, 100.0) == Standing(False, 0, 2, 1)
    assert not buckets.take("a", limit, 100.49).passes
    assert buckets.take("a", limit, 100.5).passes
    assert buckets.take("b", limit, 100.5).passes
    assert buckets.take("a", limit, 1000.0) == Standing(True, 2, 1, 0)
    assert (limit.window_s, Limit(0.01, 1).window_s) == (2, 100)


def test_requests_never_exceed_burst_and_rate() -> None:
    chance, limit = random.Random(3), Limit(rate=5.0, burst=7)
    buckets, now, passed = Buckets(), 0.0, list[float]()
    for _ in range(5000):
        now += chance.expovariate(12.0)
        if buckets.take("a", limit, now).passes:
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, min(first + 60, len(passed))):
            assert last - first + 1 <= limit.burst + limit.rate * (passed[last] - passed[first]) + 1e-6
    assert len(passed) > 0.95 * limit.rate * now


def test_refused_requests_cost_nothing_and_the_wait_is_exact() -> None:
    buckets, limit = Buckets(), Limit(rate=0.2, burst=1)
    assert buckets.wait_s("a", limit, 0.0) == 0
    assert buckets.take("a", limit, 0.0).next_s == 5
    assert [buckets.take("a", limit, 1.0).passes for _ in range(100)] == [False] * 100
    wait = buckets.wait_s("a", limit, 1.0)
    assert not buckets.take("a", limit, 1.0 + wait - 1).passes
    assert buckets.take("a", limit, 1.0 + wait).passes


def test_memory_is_bounded_and_a_clock_set_back_adds_no_tokens() -> None:
    buckets, limit = Buckets(most=100), Limit(1.0, 1)
    for i in range(10_000):
        buckets.take(str(i), limit, 0.0)
    assert len(buckets) == 100
    assert not buckets.take("9999", limit, -50.0).passes
