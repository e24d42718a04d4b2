"""The subjects: each module here that has a `SUBJECTS` is one file of them."""

from __future__ import annotations

import importlib
import pkgutil
from random import Random

from differential.sequence import Sequence, Subject


def all_subjects() -> dict[str, Subject]:
    """Every subject by its name."""
    subjects: dict[str, Subject] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for subject in getattr(importlib.import_module(f"{__name__}.{module}"), "SUBJECTS", ()):
            subjects[subject.name] = subject
    return subjects


def draw(subject: Subject, seed: int) -> Sequence:
    """The sequence of a seed; the same each time."""
    return subject.draw(Random(f"{subject.name} {seed}"))._replace(subject=subject.name, seed=seed)


def subject_of(subjects: list[Subject], seed: int) -> Subject:
    """The subject that a seed of a mixed run plays."""
    wheel = [subject for subject in subjects for _ in range(subject.weight)] or subjects
    return wheel[seed % len(wheel)]
