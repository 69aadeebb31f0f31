# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of shares, and of the difference of two shares of the same trials."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959964  # of two-sided intervals at 95 %


def wilson(right: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of the share right / n."""
    share, scale = right / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def tango(won: float, lost: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Tango's score interval of the difference (won - lost) / n of two paired shares.

    won, lost: trials in which only the first, only the second was right. (T. Tango, Equivalence
    test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17, 1998.) It holds its level with few such trials, and with none.
    """
    estimate = (won - lost) / n

    def deviation(difference: float) -> float:
        """How many standard errors the estimate lies above this difference."""
        b = -won - lost + (2 * n - won + lost) * difference
        c = -lost * difference * (1 - difference)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * q + difference * (1 - difference))
        distance = won - lost - n * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    def end(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            if abs(deviation(middle)) <= z:
                inside = middle
            else:
                outside = middle
        return inside

    return end(estimate, -1.0), end(estimate, 1.0)


def design_effect(differences: Sequence[Sequence[float]]) -> float:
    """By how much trials of one group resemble each other: the variance of the mean over that of as
    many independent trials, and at least 1. differences: of the trials of each group."""
    n = sum(len(group) for group in differences)
    groups = len(differences)
    mean = sum(sum(group) for group in differences) / n
    square = sum((x - mean) ** 2 for group in differences for x in group)
    if groups < 2 or n < 3 or square == 0:
        return 1.0
    between = sum((sum(group) - len(group) * mean) ** 2 for group in differences)
    return max(1.0, between * groups / (groups - 1) / (square * n / (n - 1)))
