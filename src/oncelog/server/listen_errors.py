"""The text about an address that cannot be listened on."""

from __future__ import annotations

import errno
import os

_REMEDIES = {
    errno.EADDRINUSE: "stop what listens there, or take another port (port 0 takes a free one)",
    errno.EADDRNOTAVAIL: "give an address of this machine",
    errno.EACCES: "take a port from 1024 up, or let this user have lower ones",
}


def listen_error_text(address: str, error: OSError) -> str:
    """Return what went wrong at this HOST:PORT, and what to do about it where that is known.

    The system's own words are taken, since asyncio and Python put the address into theirs once more.
    """
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else str(error)
    remedy = _REMEDIES.get(number)
    return f"cannot listen on {address}: {reason}" + (f"; {remedy}" if remedy else "")
