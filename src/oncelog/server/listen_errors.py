"""The error text for an address on which the server cannot listen, for example because the port is in use."""

from __future__ import annotations

import errno
import os

_HINTS = {
    errno.EADDRINUSE: "stop the process that listens there, or use another port (port 0 chooses a free one)",
    errno.EADDRNOTAVAIL: "use an address of this machine",
    errno.EACCES: "use a port from 1024 up, or allow this user lower ports",
}


def listen_error_text(address: str, error: OSError | UnicodeError) -> str:
    """Return the reason why listening on `address` (HOST:PORT) failed, with a hint for common errors.

    The reason is the operating system's text, because the texts of asyncio and Python repeat the address.
    A UnicodeError means that the host is not a valid name.
    """
    number = (error.errno or 0) if isinstance(error, OSError) else 0
    reason = os.strerror(number) if number > 0 else str(error)
    hint = _HINTS.get(number)
    return f"cannot listen on {address}: {reason}" + (f"; {hint}" if hint else "")
