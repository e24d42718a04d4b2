"""Responses that are made in bounded steps, between which other clients' requests are handled.

A handler writes the work for a response as a generator. Each `yield` ends a step, after which other requests
may be handled. The generator returns the response. A response that needs more than one step blocks the
pipeline of its connection, as a delayed fetch does. The connection's next requests are handled only when the
response is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, Kind

_T = TypeVar("_T")
Work = Generator[BlockingCall | None, None, _T]
"""Work in bounded steps, as `oncelog.log.background` runs it. It returns a result of type T."""

NAME_COST_CHARACTERS = 64
"""Number of characters of a group or transactional id that cost as much to look up as one element. Java's
hash, which picks the coordinator's partition, reads every character.
"""


def name_cost(name: str) -> int:
    """Return the cost of looking up a group or transactional id, in request elements (see `StepBudget`)."""
    return 1 + len(name) // NAME_COST_CHARACTERS


class RoundMeter:
    """The extra work of requests in a round, in records: the work beyond the fixed cost of each request.

    `server/request_handler.py` reads the difference before and after a request, and ends the round if it is
    large. Otherwise one client could pipeline many small requests that each take milliseconds. See
    test_small_requests_with_much_work_end_the_round.
    """

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records = 0

    def add(self, records: int) -> None:
        """Count work that takes as long as handling this number of records."""
        self.records += records

    def fill_round(self) -> None:
        """Count work that ends the round, such as writing and syncing a file."""
        self.records += _ROUND_RECORDS


_ROUND_RECORDS = 1 << 20
"""More records than the cost of any round."""


ELEMENT_RECORDS = 16
"""Cost of one element in records of `RoundMeter`: a request that fills a step ends its round."""


class StepBudget:
    """The maximum cost of a step, and the cost of the current step so far, both in request elements.

    The elements also count in `round_meter`. A request whose work almost fills a step gets its response at
    once, and may be small. Without this count, a round could have 64 of them. See
    test_requests_that_almost_fill_a_step_end_their_round.
    """

    __slots__ = ("_count", "_round_meter", "_step_elements")

    def __init__(self, step_elements: int, round_meter: RoundMeter | None = None) -> None:
        self._count = 0
        self._step_elements, self._round_meter = step_elements, round_meter

    def spend(self, cost: int = 1) -> bool:
        """Count `cost` elements, and return True if the budget is used up.

        After True, the caller must yield. The next call then begins a new budget.
        """
        if self._round_meter is not None:
            self._round_meter.records += ELEMENT_RECORDS * cost
        self._count += cost
        if self._count < self._step_elements:
            return False
        self._count = 0
        return True


SORTED_PER_ELEMENT = 16
"""Number of sorted names that cost as much as one element."""
SORTED_BY_KEY_PER_ELEMENT = 4
"""The same for values that are sorted by a key, such as the seven fields of an ACL."""
_RUN_NAMES = 4096


def sorted_in_steps(
    names: Iterable[_T], budget: StepBudget, key: Callable[[_T], Any] | None = None
) -> Work[Iterator[_T]]:
    """Return an iterator over the names, or other values, sorted by `key`. The iteration needs steps, too.

    Sorting 300,000 names at once takes 0.2 s.
    """
    remaining, runs = iter(names), []
    per_element = SORTED_PER_ELEMENT if key is None else SORTED_BY_KEY_PER_ELEMENT
    while run := sorted(islice(remaining, _RUN_NAMES), key=key):  # type: ignore[type-var, arg-type]
        runs.append(run)
        if budget.spend(1 + len(run) // per_element):
            yield None
    return merge(*runs, key=key)  # type: ignore[arg-type]


def joined_steps(steps: Generator[None, None, _T], count: int) -> Work[_T]:
    """Run `count` small steps in each step, and return the result of `steps`."""
    while True:
        for _ in range(count):
            try:
                next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
        yield None


class Continuation(NamedTuple):
    """A result of work whose response is made by `start`. This is the handler of a request that the work has
    decoded, or a change that must run to its end. `start` takes over the slot of the work: it may call
    `respond_in_steps`.
    """

    start: Callable[[], Any]


MAX_LARGE = 8
"""The maximum number of large responses in progress. One response and its request may need 150 MB."""
FREE_STEPS = 5
"""The number of steps after the first one that need no slot. A fetch of 5,000 partitions takes five."""


class ResponseSlots:
    """A semaphore that limits the number of large responses in progress. Waiters are served in order.

    A large request is decoded and handled only once it has a slot. Until then, its undecoded bytes count
    against the memory limit of its connection. The response to a small request needs a slot from its seventh
    step on. See test_large_requests_wait_as_bytes_while_many_are_under_way.
    """

    def __init__(self, background: BackgroundQueue) -> None:
        self.background = background
        """The queue that runs the steps of responses."""
        self._used_count = 0
        self._waiters: dict[Callable[[], None], None] = {}
        self._notified: set[Callable[[], None]] = set()
        """The callbacks of waiters for which a slot is reserved."""
        self._is_offered = False

    def try_acquire(self, on_free: Callable[[], None]) -> bool:
        """Acquire a slot and return True, or return False and call `on_free` once a slot is reserved.

        False is returned if all slots are used or other requests wait. After the call of `on_free`, the
        caller calls `try_acquire` with the same `on_free`, or `decline`.
        """
        if on_free in self._notified:
            self._notified.remove(on_free)
        elif self._waiters or self._is_full:
            self._waiters[on_free] = None
            return False
        self._used_count += 1
        return True

    def decline(self, on_free: Callable[[], None]) -> None:
        """Give the slot that is reserved for `on_free` to the next waiter. Without a reserved slot, this does
        nothing.
        """
        if on_free in self._notified:
            self._notified.remove(on_free)
            self._notify_next()

    def remove_waiter(self, on_free: Callable[[], None]) -> None:
        """Remove `on_free` from the waiters, because its connection has ended. A reserved slot is
        passed on.
        """
        self._waiters.pop(on_free, None)
        self.decline(on_free)

    def release(self) -> None:
        """Release an acquired slot, and reserve it for the next waiter."""
        self._used_count -= 1
        self._notify_next()

    def run_with_slot(self, start: Callable[[], _T]) -> _T:
        """Call `start`, which handles a large request whose slot is acquired, and return its result.

        If the response takes several steps, its task has claimed the slot and releases it at the end.
        Otherwise the slot is released here.
        """
        self._is_offered = True
        try:
            return start()
        finally:
            if self.claim():
                self.release()

    def claim(self) -> bool:
        """Claim the slot of the request that is being started, and return True: the caller must then release
        the slot.

        Return False if the request has no slot.
        """
        is_offered, self._is_offered = self._is_offered, False
        return is_offered

    @property
    def _is_full(self) -> bool:
        return self._used_count + len(self._notified) >= MAX_LARGE

    def _notify_next(self) -> None:
        while self._waiters and not self._is_full:
            on_free = next(iter(self._waiters))
            del self._waiters[on_free]
            self._notified.add(on_free)
            on_free()


def run_work(work: Work[_T]) -> _T:
    """Run work and its blocking calls to its end, and return its result. Raises the error of the work."""
    failure: Exception | None = None
    while True:
        try:
            call = _next_step(work, failure)
        except _Done as done:
            return done.response  # type: ignore[no-any-return]
        failure = None
        if call is not None:
            try:
                call()
            except Exception as error:
                failure = error


def respond_in_steps(
    slots: ResponseSlots,
    work: Work[Any],
    *,
    is_cancellable: bool = True,
    keep_request: Callable[[PendingResponse], None] | None = None,
    free_steps: int = FREE_STEPS,
) -> Any:
    """Run the first step, and return the response, or a PendingResponse if more steps are needed.

    Raises the error of the first step. The work may itself return a PendingResponse, for example if its
    response waits for a flush, or a Continuation.

    - `is_cancellable`: the work stops if its client disconnects. If false, the work is a change. It runs to
      its end, and needs no slot, because other requests may be waiting for its end.
    - `keep_request`: called before the second step, to copy the parts of the request that the work
      needs, and to set `request_bytes`. Work with this callback needs no slot, because the connection counts
      `request_bytes` against its memory limit.
    - `free_steps`: the number of steps after the first one that need no slot.
    """
    try:
        call = next(work)
    except StopIteration as done:
        return done.value.start() if isinstance(done.value, Continuation) else done.value
    pending = PendingResponse(blocks_pipeline=True)
    if keep_request is not None:
        keep_request(pending)
    steps = _ResponseSteps(slots, work, pending, is_cancellable=is_cancellable, has_slot=slots.claim())
    steps.needs_slot, steps.free_steps = is_cancellable and keep_request is None, free_steps
    steps.resume(call)
    if not pending.is_done:
        return pending
    responses: list[Any] = []  # without a runner, the work has run to its end
    pending.add_done_callback(responses.append)
    return responses[0]


def continue_in_steps(slots: ResponseSlots, work: Work[Any], pending: PendingResponse) -> None:
    """Run work in steps for a pending response, such as a delayed fetch.

    The work returns the response, or `pending` itself if the response must wait again.
    """
    _ResponseSteps(slots, work, pending, is_cancellable=True, has_slot=False).resume(None)


class _ResponseSteps:
    """The background task that makes a response in steps."""

    __slots__ = (
        "_background", "_call", "_has_slot", "_is_dropped", "_kind", "_on_cancelled", "_pending", "_slots",
        "_work", "free_steps", "needs_slot",
    )  # fmt: skip

    def __init__(
        self,
        slots: ResponseSlots,
        work: Work[Any],
        pending: PendingResponse,
        *,
        is_cancellable: bool,
        has_slot: bool,
    ) -> None:
        self._background, self._slots = slots.background, slots
        self._work, self._pending = work, pending
        self._is_dropped, self._has_slot = is_cancellable, has_slot
        self.needs_slot = is_cancellable
        """True if the steps after `free_steps` further ones need a slot."""
        self.free_steps = FREE_STEPS
        self._call: BlockingCall | None = None
        self._kind = Kind.REQUEST
        self._on_cancelled: Callable[[], None] | None = None
        """The original `on_cancelled` of the pending response, while this task waits for a slot."""

    def resume(self, call: BlockingCall | None) -> None:
        """Start a background task for the next steps. It first runs `call`, the blocking call of the last
        step.
        """
        self._call = call
        if call is not None:
            self._kind = Kind.REQUEST_WITH_CALLS if self._is_dropped else Kind.CHANGE
        self._background.add(self._steps(), self._kind)

    def _steps(self) -> BackgroundTask:
        has_moved = False
        try:
            while not self._is_over:
                if not self._has_slot_if_needed():
                    return
                if (yield from self._step()):
                    return
                if self._call is not None and self._kind is Kind.REQUEST:
                    # Tasks with blocking calls are of another kind, so a new task runs the remaining steps.
                    has_moved = True
                    self.resume(self._call)
                    return
            self._work.close()
        finally:
            if self._has_slot and not has_moved:
                self._has_slot = False
                self._slots.release()

    @property
    def _is_over(self) -> bool:
        return self._is_dropped and self._pending.is_cancelled

    def _has_slot_if_needed(self) -> bool:
        """Return True if the next step may run; False if the response must first wait for a slot."""
        if self._has_slot or not self.needs_slot:
            return True
        if self.free_steps:
            self.free_steps -= 1
            return True
        self._has_slot = self._slots.try_acquire(self._on_slot_free)
        if not self._has_slot:
            self._on_cancelled, self._pending.on_cancelled = self._pending.on_cancelled, self._stop_waiting
        return self._has_slot

    def _on_slot_free(self) -> None:
        self._has_slot = self._slots.try_acquire(self._on_slot_free)
        self._pending.on_cancelled = self._on_cancelled
        self.resume(self._call)

    def _stop_waiting(self) -> None:
        self._slots.remove_waiter(self._on_slot_free)
        self._work.close()
        if self._on_cancelled is not None:
            self._on_cancelled()

    def _step(self) -> Generator[BlockingCall | None, None, bool]:
        """Run one step, and charge its duration to the client. Return True if it was the last step."""
        failure: Exception | None = None
        try:
            yield self._call
        except Exception as error:
            failure = error
        if self._is_over:
            # The response was cancelled since the last step. Do no further work: the broker may be stopping,
            # with its log closed.
            return False
        try:
            self._call = self._pending.build(partial(self._next_step, failure))
        except _Done as done:
            if done.response is not self._pending:
                self._pending.resolve_with(done.response)
            return True
        except Exception as error:
            self._pending.resolve(Disconnect(f"a request failed in one of its steps: {error!r}"))
            raise
        return False

    def _next_step(self, failure: Exception | None) -> BlockingCall | None:
        """Run a step of the work, and begin to encode its response. Raises _Done with the response."""
        try:
            return _next_step(self._work, failure)
        except _Done as done:
            response = done.response
            if isinstance(response, Continuation):
                response = self._hand_over(response)
            encode = self._pending.encode
            encoding = None if encode is None or self._pending.is_cancelled else encode(response)
            if encoding is None:
                raise _Done(response) from None
            self._work = encoding
        return _next_step(self._work, None)

    def _hand_over(self, continuation: Continuation) -> Any:
        """Start a continuation, and return its response. It gets the slot, if there is one."""
        self.free_steps = FREE_STEPS
        if not self._has_slot:
            return continuation.start()
        self._has_slot = False
        return self._slots.run_with_slot(continuation.start)


class _Done(Exception):
    """Raised by `_next_step` when the work has ended. `response` is the value that the work returned."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def _next_step(work: Work[Any], failure: Exception | None) -> BlockingCall | None:
    try:
        return next(work) if failure is None else work.throw(failure)
    except StopIteration as done:
        raise _Done(done.value) from None
