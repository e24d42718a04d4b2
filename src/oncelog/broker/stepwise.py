"""Answers that are made in bounded steps, between which other clients are served.

A handler writes its work as a generator: it yields where others may have their turn, and returns the answer.
What it does between two yields is not divided. The client of a request that needs a second step waits, as for
a fetch; the requests behind it on its connection begin afterwards.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from oncelog.broker.waiting import Deferred, Disconnect
from oncelog.log.chores import Chore, Job

if TYPE_CHECKING:
    from oncelog.broker.node import Node

_T = TypeVar("_T")
Work = Generator[Job | None, None, _T]
"""Work in bounded steps, as `oncelog.log.chores` does it, and what comes of it."""


class Pace:
    """The elements of one request that were answered since its last step."""

    __slots__ = ("_count", "_step_elements")

    def __init__(self, step_elements: int) -> None:
        self._count = 0
        self._step_elements = step_elements

    def next(self) -> bool:
        """Count an element; return True if others have their turn now."""
        self._count += 1
        if self._count < self._step_elements:
            return False
        self._count = 0
        return True


def answer_in_steps(node: Node, work: Work[Any], *, is_dropped: bool = True) -> Any:
    """Return the answer, or a Deferred if it takes several steps. Raises what the first step raises.

    `is_dropped`: the work ends where it is when its client goes away; else it is done to its end.
    """
    try:
        job = next(work)
    except StopIteration as done:
        return done.value
    deferred = Deferred(holds_later_requests=True)
    node.log_manager.chores.add(_go_on(work, job, deferred, is_dropped=is_dropped))
    if not deferred.is_done:
        return deferred
    answers: list[Any] = []  # nobody drives the chores: all is done
    deferred.listen(answers.append)
    return answers[0]


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
            deferred.resolve(done.answer)
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
