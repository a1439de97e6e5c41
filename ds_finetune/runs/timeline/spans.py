"""Sets of times as sorted, disjoint spans (begin, end) in nanoseconds."""

from collections.abc import Iterable

Span = tuple[int, int]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """The times in any of `spans`, which may overlap and have any order; empty ones are left out."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def intersection(one: Spans, other: Spans) -> Spans:
    """The times in both."""
    common: Spans = []
    first = second = 0
    while first < len(one) and second < len(other):
        begin, end = max(one[first][0], other[second][0]), min(one[first][1], other[second][1])
        if begin < end:
            common.append((begin, end))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return common


def difference(one: Spans, other: Spans) -> Spans:
    """The times in `one` and not in `other`."""
    left: Spans = []
    at = 0
    for span in one:
        begin, end = span
        while at < len(other) and other[at][1] <= begin:
            at += 1
        number = at
        while number < len(other) and other[number][0] < end:
            if begin < other[number][0]:
                left.append((begin, other[number][0]))
            begin = max(begin, other[number][1])
            number += 1
        if begin < end:
            left.append((begin, end))
    return left


def seconds_in(spans: Spans) -> float:
    """Their length together."""
    return sum(end - begin for begin, end in spans) / 1e9
