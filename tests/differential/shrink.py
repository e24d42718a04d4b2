"""Remove the steps of a sequence that are not needed to show its difference."""

from __future__ import annotations

from collections.abc import Callable

from differential.runner import Outcome
from differential.sequence import Sequence, Step, restarts_of

MAX_TRIALS, MAX_RESTARTS = 150, 25


def keep(sequence: Sequence, numbers: list[int]) -> Sequence:
    """Return the sequence with only these steps."""
    return sequence._replace(steps=tuple(sequence.steps[number] for number in numbers))


def shrink(outcome: Outcome, run_sequence: Callable[[Sequence], Outcome]) -> tuple[Outcome, list[int]]:
    """Return the outcome of the shortest sequence that was found with the same signature, and the numbers of
    its steps.

    Chunks of steps are dropped as in delta debugging, and their size is halved repeatedly. If a second run of
    all steps does not show the difference, return the outcome unchanged.
    """
    if outcome.difference is None:
        return outcome, list(range(len(outcome.sequence.steps)))
    signature = outcome.difference.signature
    whole = outcome.sequence
    numbers = list(range(min(len(whole.steps), outcome.difference.number + 1)))
    best, trials = outcome, 0
    limit = MAX_RESTARTS if restarts_of(whole) else MAX_TRIALS

    def fails(kept: list[int]) -> Outcome | None:
        nonlocal trials
        trials += 1
        result = run_sequence(keep(whole, kept))
        return result if result.difference and result.difference.signature == signature else None

    if (first := fails(numbers)) is None:
        return outcome, list(range(len(whole.steps)))
    best, size = first, max(1, len(numbers) // 2)
    while trials < limit:
        dropped = False
        start = 0
        while start < len(numbers) and trials < limit:
            kept = numbers[:start] + numbers[start + size :]
            if result := fails(kept):
                best, numbers, dropped = result, kept, True
            else:
                start += size
        if size == 1 and not dropped:
            break
        size = max(1, size // 2)
    return best, numbers


def steps_of(sequence: Sequence) -> list[Step]:
    """Return steps and observations in the order in which they run."""
    return [*sequence.steps, *sequence.observations]
