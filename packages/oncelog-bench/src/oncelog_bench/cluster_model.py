"""A linear model of the costs of a micro-batch, by tasks and partitions of each task. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """The shape of a micro-batch: `tasks`, each of which writes to `partitions_each` partitions."""

    tasks: float
    partitions_each: float


class Costs(NamedTuple):
    """The costs of a micro-batch in any unit: once, for each task, and for each partition of each task."""

    once: float
    per_task: float
    per_partition: float

    def of(self, shape: Shape) -> float:
        return self.once + shape.tasks * (self.per_task + shape.partitions_each * self.per_partition)


def fit(measured: Sequence[tuple[Shape, float]]) -> Costs:
    """Return the costs that give the measured figures with the least sum of squared relative errors.

    With absolute errors, the largest shapes would decide alone. Raises ValueError if the shapes do not
    determine the costs.
    """
    terms = np.array([[1.0, shape.tasks, shape.tasks * shape.partitions_each] for shape, _ in measured])
    figures = np.array([[figure] for _, figure in measured])
    solution, _, rank, _ = np.linalg.lstsq(terms / figures, np.ones(len(measured)), rcond=None)
    if rank < len(Costs._fields):
        raise ValueError("the measured shapes do not determine the costs")
    return Costs(*map(float, solution))
