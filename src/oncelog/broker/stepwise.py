"""Answers that are made in bounded steps, between which other clients are served.

A handler writes its work as a generator: it yields where others may have their turn, and returns the answer.
What it does between two yields is not divided. The client of a request that needs a second step waits, as for
a fetch; the requests behind it on its connection begin afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from oncelog.broker.waiting import Deferred, Disconnect
from oncelog.log.chores import Chore, Job

if TYPE_CHECKING:
    from oncelog.broker.node import Node

_T = TypeVar("_T")
Work = Generator[Job | None, None, _T]
"""Work in bounded steps, as `oncelog.log.chores` does it, and what comes of it."""


NAME_COST_CHARACTERS = 64
"""Characters of a group or transactional id that cost as much as an element: Java's hash reads each."""


def name_cost(name: str) -> int:
    """Return how many elements' cost it takes to find what keeps a group or transactional id."""
    return 1 + len(name) // NAME_COST_CHARACTERS


class Pace:
    """The elements of one request that were answered since its last step."""

    __slots__ = ("_count", "_step_elements")

    def __init__(self, step_elements: int) -> None:
        self._count = 0
        self._step_elements = step_elements

    def next(self, cost: int = 1) -> bool:
        """Count an element, or one that costs as much as several; return True if others have their turn."""
        self._count += cost
        if self._count < self._step_elements:
            return False
        self._count = 0
        return True


MAX_UNDER_WAY = 8
"""Answers made in steps at a time. Each holds its decoded request and itself: 150 MB at the largest."""


class StepQueue:
    """The answers that are being made in steps, and who waits until there are fewer of them.

    A large request is begun only when there is room, and waits as bytes, which the connection counts.
    See test_large_requests_wait_as_bytes_while_many_are_under_way.
    """

    def __init__(self) -> None:
        self._count = 0
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_full(self) -> bool:
        """True when no more large requests should be begun."""
        return self._count >= MAX_UNDER_WAY

    def wait(self, try_again: Callable[[], None]) -> None:
        """Call `try_again` once when there is room, which others may have taken by then.

        Whoever is called calls `wake` afterwards, for it may not have used the room.
        """
        self._waiting[try_again] = None

    def forget(self, try_again: Callable[[], None]) -> None:
        """Call it no more: its connection is gone."""
        self._waiting.pop(try_again, None)

    def wake(self) -> None:
        """Call the one that waits longest if there is room."""
        if self._waiting and not self.is_full:
            try_again = next(iter(self._waiting))
            del self._waiting[try_again]
            try_again()

    def begin(self) -> None:
        """Count an answer that takes several steps."""
        self._count += 1

    def end(self) -> None:
        """Count it no more."""
        self._count -= 1
        self.wake()


def run_work(work: Work[_T]) -> _T:
    """Do work whose steps have no jobs to its end and return what comes of it. Raises what it raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def answer_in_steps(node: Node, work: Work[Any], *, is_dropped: bool = True) -> Any:
    """Return the answer, or a Deferred if it takes several steps. Raises what the first step raises.

    The work may return a Deferred itself, for an answer that waits for the disk.
    `is_dropped`: the work ends where it is when its client goes away; else it is done to its end.
    """
    try:
        job = next(work)
    except StopIteration as done:
        return done.value
    deferred = Deferred(holds_later_requests=True)
    node.steps.begin()
    node.log_manager.chores.add(_counted(node.steps, _go_on(work, job, deferred, is_dropped=is_dropped)))
    if not deferred.is_done:
        return deferred
    answers: list[Any] = []  # nobody drives the chores, and nothing waits for the disk: all is done
    deferred.listen(answers.append)
    return answers[0]


def _counted(steps: StepQueue, chore: Chore) -> Chore:
    try:
        yield from chore
    finally:
        steps.end()


def _go_on(work: Work[Any], job: Job | None, deferred: Deferred, *, is_dropped: bool) -> Chore:
    """Do the rest of the work, step by step, and charge it, while its client waits."""
    while not (is_dropped and deferred.is_cancelled):
        failure: Exception | None = None
        try:
            yield job
        except Exception as error:
            failure = error
        try:
            job = deferred.build(partial(_next_step, work, failure))
        except _Done as done:
            deferred.resolve_with(done.answer)
            return
        except Exception as error:
            deferred.resolve(Disconnect(f"a request failed in one of its steps: {error!r}"))
            raise
    work.close()


class _Done(Exception):
    """The end of the work. A StopIteration would not leave the generator above as it is."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def _next_step(work: Work[Any], failure: Exception | None) -> Job | None:
    try:
        return next(work) if failure is None else work.throw(failure)
    except StopIteration as done:
        raise _Done(done.value) from None
