"""The Pareto front of points, where more is better in both coordinates."""

from collections.abc import Iterable


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point matches or beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]
