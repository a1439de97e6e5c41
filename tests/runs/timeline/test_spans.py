"""Sets of times, compared with sets of the points in them."""

import itertools
import random

from ds_finetune.runs.timeline.clock import Spans, difference, intersection, seconds_in, union


def _points(spans: Spans) -> set[int]:
    return {point for begin, end in spans for point in range(begin, end)}


def test_sets_of_times_are_those_of_their_points() -> None:
    rng = random.Random(0)

    def draw() -> Spans:
        begins = [rng.randrange(40) for _ in range(rng.randrange(7))]
        return [(begin, begin + rng.randrange(-1, 9)) for begin in begins]

    for _ in range(300):
        given, other = draw(), draw()
        one, two = union(given), union(other)
        assert _points(one) == _points(given)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(one))
        assert _points(intersection(one, two)) == _points(one) & _points(two)
        assert _points(difference(one, two)) == _points(one) - _points(two)
        assert round(seconds_in(one) * 1e9) == len(_points(one))
