"""Answers that are made in bounded steps, between which other clients are served.

A handler writes its work as a generator: it yields where others may have their turn, and returns the answer.
What it does between two yields is not divided. The client of a request that needs a second step waits, as for
a fetch; the requests behind it on its connection begin afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from oncelog.broker.purgatory import Deferred, Disconnect
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, Kind

_T = TypeVar("_T")
Work = Generator[BlockingCall | None, None, _T]
"""Work in bounded steps, as `oncelog.log.background` does it, and what comes of it."""


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


MAX_LARGE = 8
"""Large answers made in steps at a time. Each holds its decoded request and itself: 150 MB at the largest."""
FREE_STEPS = 5
"""Steps after which the answer to a small request counts as large: a fetch of 5,000 partitions has them."""


class StepQueue:
    """The places for large answers, first come, first served.

    A large request is begun when it has a place, and waits for one as bytes, which the connection counts. The
    answer to a small request needs a place from its sixth step on.
    See test_large_requests_wait_as_bytes_while_many_are_under_way.
    """

    def __init__(self, background: BackgroundQueue) -> None:
        self.background = background
        """Runs the steps of answers."""
        self._taken_count = 0
        self._waiting: dict[Callable[[], None], None] = {}
        self._called: set[Callable[[], None]] = set()
        """A place is kept for each of these."""
        self._is_lent = False

    def take(self, call: Callable[[], None]) -> bool:
        """Take a place; if none is free or others wait, return False and call `call` once it has one.

        Then it takes the place, or declines.
        """
        if call in self._called:
            self._called.remove(call)
        elif self._waiting or self._is_full:
            self._waiting[call] = None
            return False
        self._taken_count += 1
        return True

    def decline(self, call: Callable[[], None]) -> None:
        """Give the place that is kept for `call` to the next one, if `call` has not taken it."""
        if call in self._called:
            self._called.remove(call)
            self._call_next()

    def forget(self, call: Callable[[], None]) -> None:
        """Call it no more: its connection is gone."""
        self._waiting.pop(call, None)
        self.decline(call)

    def give_back(self) -> None:
        """End the use of a place."""
        self._taken_count -= 1
        self._call_next()

    def lend(self, begin: Callable[[], int]) -> int:
        """Begin a large request, which has a place. It is given back unless an answer in steps keeps it."""
        self._is_lent = True
        try:
            return begin()
        finally:
            if self.keep():
                self.give_back()

    def keep(self) -> bool:
        """Return True if the request that is being begun has a place, which the caller has to give back."""
        is_lent, self._is_lent = self._is_lent, False
        return is_lent

    @property
    def _is_full(self) -> bool:
        return self._taken_count + len(self._called) >= MAX_LARGE

    def _call_next(self) -> None:
        while self._waiting and not self._is_full:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._called.add(call)
            call()


def run_work(work: Work[_T]) -> _T:
    """Do work whose steps have no jobs to its end and return what comes of it. Raises what it raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def answer_in_steps(
    steps: StepQueue,
    work: Work[Any],
    *,
    is_dropped: bool = True,
    keep_request: Callable[[Deferred], None] | None = None,
) -> Any:
    """Return the answer, or a Deferred if it takes several steps. Raises what the first step raises.

    The work may return a Deferred itself, for an answer that waits for the disk.
    `is_dropped`: the work ends where it is when its client goes away; else it is done to its end, and waits
    for no place of the queue, for it may hold what others need.
    `keep_request`: called before a second step. It keeps what the work needs of the request, and notes its
    size, by which the connection bounds it. Such work waits for no place either.
    """
    try:
        call = next(work)
    except StopIteration as done:
        return done.value
    deferred = Deferred(holds_later_requests=True)
    if keep_request is not None:
        keep_request(deferred)
    answer = _Answer(steps, work, deferred, is_dropped=is_dropped, has_place=steps.keep())
    answer.needs_place = is_dropped and keep_request is None
    answer.go_on(call)
    if not deferred.is_done:
        return deferred
    answers: list[Any] = []  # no runner steps the background tasks, so all of it is done at once
    deferred.listen(answers.append)
    return answers[0]


def continue_in_steps(steps: StepQueue, work: Work[Any], deferred: Deferred) -> None:
    """Do all of the work for an answer that waited, in steps. It returns `deferred` to wait on."""
    _Answer(steps, work, deferred, is_dropped=True, has_place=False).go_on(None)


class _Answer:
    """An answer that is being made in steps."""

    __slots__ = (
        "_background", "_call", "_deferred", "_free_steps", "_has_place", "_is_dropped", "_kind",
        "_on_cancelled", "_queue", "_work", "needs_place",
    )  # fmt: skip

    def __init__(
        self, steps: StepQueue, work: Work[Any], deferred: Deferred, *, is_dropped: bool, has_place: bool
    ) -> None:
        self._background, self._queue = steps.background, steps
        self._work, self._deferred = work, deferred
        self._is_dropped, self._has_place = is_dropped, has_place
        self.needs_place = is_dropped
        self._free_steps = FREE_STEPS
        self._call: BlockingCall | None = None
        self._kind = Kind.REQUEST
        self._on_cancelled: Callable[[], None] | None = None
        """The deferred's callback for a cancelled request from before it waited for its place."""

    def go_on(self, call: BlockingCall | None) -> None:
        """Do the job, which the last step asked for, and then the next steps."""
        self._call = call
        if call is not None:
            self._kind = Kind.REQUEST_WITH_CALLS
        self._background.add(self._steps(), self._kind)

    def _steps(self) -> BackgroundTask:
        has_moved = False
        try:
            while not self._is_over:
                if not self._may_go_on():
                    return
                if (yield from self._step()):
                    return
                if self._call is not None and self._kind is Kind.REQUEST:
                    has_moved = True
                    self.go_on(self._call)
                    return
            self._work.close()
        finally:
            if self._has_place and not has_moved:
                self._has_place = False
                self._queue.give_back()

    @property
    def _is_over(self) -> bool:
        return self._is_dropped and self._deferred.is_cancelled

    def _may_go_on(self) -> bool:
        """Return False if the answer has become a large one and waits for its place."""
        if self._has_place or not self.needs_place:
            return True
        if self._free_steps:
            self._free_steps -= 1
            return True
        self._has_place = self._queue.take(self._called)
        if not self._has_place:
            self._on_cancelled, self._deferred.on_cancelled = self._deferred.on_cancelled, self._give_up
        return self._has_place

    def _called(self) -> None:
        self._has_place = self._queue.take(self._called)
        self._deferred.on_cancelled = self._on_cancelled
        self.go_on(self._call)

    def _give_up(self) -> None:
        self._queue.forget(self._called)
        self._work.close()
        if self._on_cancelled is not None:
            self._on_cancelled()

    def _step(self) -> Generator[BlockingCall | None, None, bool]:
        """Do one step and charge it; return True after the last one."""
        failure: Exception | None = None
        try:
            yield self._call
        except Exception as error:
            failure = error
        if self._is_over:
            return False  # cancelled since the last step: where the broker stops, the log is closed by now
        try:
            self._call = self._deferred.build(partial(_next_step, self._work, failure))
        except _Done as done:
            if done.answer is not self._deferred:
                self._deferred.resolve_with(done.answer)
            return True
        except Exception as error:
            self._deferred.resolve(Disconnect(f"a request failed in one of its steps: {error!r}"))
            raise
        return False


class _Done(Exception):
    """The end of the work. A StopIteration would not leave the generator above as it is."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def _next_step(work: Work[Any], failure: Exception | None) -> BlockingCall | None:
    try:
        return next(work) if failure is None else work.throw(failure)
    except StopIteration as done:
        raise _Done(done.value) from None
