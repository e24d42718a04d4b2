"""The subjects of the fuzzer. Each module here that defines `SUBJECTS` provides some of them."""

from __future__ import annotations

import importlib
import pkgutil
from random import Random

from differential.sequence import Sequence, Subject


def all_subjects() -> dict[str, Subject]:
    """Return all subjects by name."""
    subjects: dict[str, Subject] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        for subject in getattr(importlib.import_module(f"{__name__}.{module}"), "SUBJECTS", ()):
            subjects[subject.name] = subject
    return subjects


def draw(subject: Subject, seed: int) -> Sequence:
    """Return the sequence of a seed. The same seed always gives the same sequence."""
    return subject.draw(Random(f"{subject.name} {seed}"))._replace(subject=subject.name, seed=seed)


def subject_of(subjects: list[Subject], seed: int) -> Subject:
    """Return the subject of a seed in a mixed run."""
    wheel = [subject for subject in subjects for _ in range(subject.weight)] or subjects
    return wheel[seed % len(wheel)]
