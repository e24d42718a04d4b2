"""Work that must not hold up requests: large snapshots, deletions, rounds over every partition.

A chore is a generator; each step is a bounded piece of work. What it yields is done before its next step:
None is nothing, a function is a call that may take long (a sync, a deletion) and is safe in another
thread. Without a driver a chore runs to its end in `add`, as tests and the simulator want it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator

from oncelog.log.disk import PartitionClosed

Job = Callable[[], None]
Chore = Generator[Job | None, None, None]


class Chores:
    """Chores under way; they take turns.

    `on_added` is set by a driver, who then calls `step` until there is nothing left, and runs the jobs.
    """

    def __init__(self) -> None:
        self._waiting: deque[Chore] = deque()
        self._error: Exception | None = None
        self.on_added: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, chore: Chore) -> None:
        """Begin a chore. Small ones are done when this returns; what they raise is raised here."""
        if self.on_added is None:
            run(chore)
            return
        self._waiting.append(chore)
        self.on_added()

    def step(self) -> Job | None:
        """One step of the chore whose turn it is; a job must be run before the next call.

        Raises what the chore raised, which is over then. A chore of a partition that was closed just ends.
        """
        chore, error = self._waiting.popleft(), self._error
        self._error = None
        if inspect.getgeneratorstate(chore) == inspect.GEN_CLOSED:
            return None  # given up while its job ran, which may have met files that were closed
        try:
            job = next(chore) if error is None else chore.throw(error)
        except (StopIteration, PartitionClosed):
            return None
        # Nothing comes between a job and the step that follows it.
        if job is None:
            self._waiting.append(chore)
        else:
            self._waiting.appendleft(chore)
        return job

    def failed(self, error: Exception) -> None:
        """The job that `step` returned raised: the next step tells its chore."""
        self._error = error

    def finish(self) -> None:
        """Everything now, as on closing. Raises the first error, after the other chores."""
        errors: list[Exception] = []
        while self._waiting:
            try:
                job = self.step()
            except Exception as error:
                errors.append(error)
                continue
            try:
                if job is not None:
                    job()
            except Exception as error:
                self.failed(error)
        if errors:
            raise errors[0]


def run(chore: Chore) -> None:
    """Do a chore to its end. Raises what it raises; what a job raises it may handle."""
    alone = Chores()
    alone._waiting.append(chore)
    try:
        alone.finish()
    finally:
        chore.close()
