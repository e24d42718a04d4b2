"""Settings of glibc's allocator for a broker process.

By default, glibc raises both thresholds by itself with the sizes that it frees. Responses of many megabytes
then lie in the heap, and small objects behind them keep it from shrinking. It also returns the end of the
heap after almost every response of a megabyte, and requests it again for the next one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

MMAP_THRESHOLD_BYTES = 4 << 20
"""Buffers of at least this size get their own mapping, which ends with the buffer. It is above 1 MB, the
default of `max.request.size` and `max.partition.fetch.bytes`: a mapping costs a page fault per page."""
TRIM_THRESHOLD_BYTES = 32 << 20
"""Freed bytes at the end of the heap from which they are returned to the operating system."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_trims: list[Callable[[int], int]] = []
"""glibc's malloc_trim, once `tune_allocator` has set the thresholds."""


def tune_allocator() -> bool:
    """Set both thresholds for this process. Return whether it was done.

    Nothing is changed without glibc, or if the environment sets an option of its allocator.
    """
    if os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}:
        return False
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version
    except (OSError, TypeError, AttributeError):  # TypeError: Windows has no library of this name
        return False
    was_set = [
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
    ]
    _trims.extend([libc.malloc_trim] * all(was_set))
    return all(was_set)


class HeapTrimmer:
    """Returns free pages in the middle of the heap to the operating system when requests and responses have
    been freed. Small objects behind them keep the heap from shrinking.
    """

    def __init__(self) -> None:
        self._peak_bytes = 0
        """The most bytes that were held since the last trim."""

    def note(self, held_bytes: int) -> None:
        """Take the bytes of all requests and responses that are held now, and trim the heap if they fell.

        Without `tune_allocator`, the process is not the broker's alone, and its heap is not trimmed.
        """
        self._peak_bytes = max(self._peak_bytes, held_bytes)
        if self._peak_bytes - held_bytes >= TRIM_THRESHOLD_BYTES:
            self._peak_bytes = held_bytes
            for trim in _trims:
                trim(0)
