"""Responses that are made in bounded steps, between which other clients are served.

A handler writes its work as a generator. It yields where other requests may run, and returns the response.
The work between two yields is not interrupted. A response that needs more than one step blocks the pipeline
of its connection, as a waiting fetch does: the requests behind it start afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.log.background import BackgroundQueue, BackgroundTask, BlockingCall, Kind

_T = TypeVar("_T")
Work = Generator[BlockingCall | None, None, _T]
"""Work in bounded steps, as `oncelog.log.background` runs it. It returns a result of type T."""

NAME_COST_CHARACTERS = 64
"""Characters of a group or transactional id that cost as much as one element: Java's hash reads each."""


def name_cost(name: str) -> int:
    """Return the cost, in elements, of looking up a group or transactional id."""
    return 1 + len(name) // NAME_COST_CHARACTERS


class StepBudget:
    """The number of elements that one step of a request may handle."""

    __slots__ = ("_count", "_step_elements")

    def __init__(self, step_elements: int) -> None:
        self._count = 0
        self._step_elements = step_elements

    def spend(self, cost: int = 1) -> bool:
        """Count elements; return True if the step's budget is used up and the caller should yield."""
        self._count += cost
        if self._count < self._step_elements:
            return False
        self._count = 0
        return True


MAX_LARGE = 8
"""Large responses that may be made at a time. Each holds its decoded request and itself: up to 150 MB."""
FREE_STEPS = 5
"""Steps after which the response to a small request counts as large: a fetch of 5,000 partitions has five."""


class ResponseSlots:
    """A semaphore for large responses, first come, first served.

    A large request starts when it gets a slot. Until then it waits as undecoded bytes, which its connection
    counts. The response to a small request needs a slot from its sixth step on.
    See test_large_requests_wait_as_bytes_while_many_are_under_way.
    """

    def __init__(self, background: BackgroundQueue) -> None:
        self.background = background
        """Runs the steps of responses."""
        self._used_count = 0
        self._waiters: dict[Callable[[], None], None] = {}
        self._notified: set[Callable[[], None]] = set()
        """A slot is reserved for each of these."""
        self._is_offered = False

    def try_acquire(self, on_free: Callable[[], None]) -> bool:
        """Acquire a slot. If none is free or others wait, return False and call `on_free` once there is one.

        Then the caller acquires the slot with the same `on_free`, or declines it.
        """
        if on_free in self._notified:
            self._notified.remove(on_free)
        elif self._waiters or self._is_full:
            self._waiters[on_free] = None
            return False
        self._used_count += 1
        return True

    def decline(self, on_free: Callable[[], None]) -> None:
        """Give the slot that is reserved for `on_free` to the next waiter, unless it was acquired."""
        if on_free in self._notified:
            self._notified.remove(on_free)
            self._notify_next()

    def remove_waiter(self, on_free: Callable[[], None]) -> None:
        """Do not call `on_free` any more: its connection has ended."""
        self._waiters.pop(on_free, None)
        self.decline(on_free)

    def release(self) -> None:
        """Release a slot."""
        self._used_count -= 1
        self._notify_next()

    def run_with_slot(self, start: Callable[[], int]) -> int:
        """Start a large request that has a slot, and release it unless a response in steps has claimed it."""
        self._is_offered = True
        try:
            return start()
        finally:
            if self.claim():
                self.release()

    def claim(self) -> bool:
        """Return True if the request that is being started has a slot. The caller then has to release it."""
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
    """Run work that makes no blocking calls to its end, and return its result. Raises what it raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


def respond_in_steps(
    slots: ResponseSlots,
    work: Work[Any],
    *,
    is_cancellable: bool = True,
    keep_request: Callable[[PendingResponse], None] | None = None,
) -> Any:
    """Return the response, or a PendingResponse if it takes several steps. Raises what the first step raises.

    The work may itself return a PendingResponse, for a response that waits for the disk.
    `is_cancellable`: the work stops where it is when its client disconnects. Otherwise it is run to its end,
    and needs no slot, for it may hold what other requests need.
    `keep_request` is called before the second step. It keeps what the work needs of the request, and sets its
    size, which the connection limits. Such work needs no slot either.
    """
    try:
        call = next(work)
    except StopIteration as done:
        return done.value
    pending = PendingResponse(blocks_pipeline=True)
    if keep_request is not None:
        keep_request(pending)
    steps = _ResponseSteps(slots, work, pending, is_cancellable=is_cancellable, has_slot=slots.claim())
    steps.needs_slot = is_cancellable and keep_request is None
    steps.resume(call)
    if not pending.is_done:
        return pending
    responses: list[Any] = []  # no runner steps the background tasks, so all of it is done at once
    pending.add_done_callback(responses.append)
    return responses[0]


def continue_in_steps(slots: ResponseSlots, work: Work[Any], pending: PendingResponse) -> None:
    """Run the work for a response that waited, in steps. The work returns `pending` itself to wait again."""
    _ResponseSteps(slots, work, pending, is_cancellable=True, has_slot=False).resume(None)


class _ResponseSteps:
    """A response that is being made in steps."""

    __slots__ = (
        "_background", "_call", "_free_steps", "_has_slot", "_is_dropped", "_kind", "_on_cancelled",
        "_pending", "_slots", "_work", "needs_slot",
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
        self._free_steps = FREE_STEPS
        self._call: BlockingCall | None = None
        self._kind = Kind.REQUEST
        self._on_cancelled: Callable[[], None] | None = None
        """The callback that the pending response had before it waited for a slot."""

    def resume(self, call: BlockingCall | None) -> None:
        """Queue the blocking call that the last step asked for, and then the next steps."""
        self._call = call
        if call is not None:
            self._kind = Kind.REQUEST_WITH_CALLS
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
                    # Blocking calls have a queue of their own, so the steps move there.
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
        """Return False if the response has become a large one and has to wait for a slot."""
        if self._has_slot or not self.needs_slot:
            return True
        if self._free_steps:
            self._free_steps -= 1
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
        """Run one step and charge its time to the client; return True after the last one."""
        failure: Exception | None = None
        try:
            yield self._call
        except Exception as error:
            failure = error
        if self._is_over:
            return False  # cancelled since the last step: if the broker stops, the log is already closed
        try:
            self._call = self._pending.build(partial(_next_step, self._work, failure))
        except _Done as done:
            if done.response is not self._pending:
                self._pending.resolve_with(done.response)
            return True
        except Exception as error:
            self._pending.resolve(Disconnect(f"a request failed in one of its steps: {error!r}"))
            raise
        return False


class _Done(Exception):
    """The end of the work. StopIteration cannot pass through the generator `_step` unchanged (PEP 479)."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


def _next_step(work: Work[Any], failure: Exception | None) -> BlockingCall | None:
    try:
        return next(work) if failure is None else work.throw(failure)
    except StopIteration as done:
        raise _Done(done.value) from None
