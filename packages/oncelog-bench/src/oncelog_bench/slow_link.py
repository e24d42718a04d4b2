"""A TCP link with an artificial round-trip time, between a load generator and a broker on one machine."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Self

_CHUNK_BYTES = 262_144


class SlowLink:
    """Forwards connections to `address` and delivers each byte half a round trip after it arrived.

    Bytes that arrive together leave together, so requests in flight share the round trip as on a real link.
    The link runs in threads of the caller's process, from the start to the end of its `with` block.
    """

    def __init__(self, address: str, round_trip_ms: float) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = round_trip_ms / 2000
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []

    @property
    def address(self) -> str:
        """The address HOST:PORT at which the link accepts connections."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer has closed the connection
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # `__exit__` has closed the listener
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            for reader, writer in ((near, far), (far, near)):
                reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(reader, chunks), daemon=True).start()
                threading.Thread(target=_write, args=(writer, chunks), daemon=True).start()

    def _read(self, reader: socket.socket, chunks: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        chunk = b"first"
        while chunk:
            try:
                chunk = reader.recv(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            chunks.put((time.perf_counter() + self._delay_s, chunk))


def _write(writer: socket.socket, chunks: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """Write each chunk when it is due. An empty chunk closes this direction of the connection."""
    while True:
        due, chunk = chunks.get()
        if (wait := due - time.perf_counter()) > 0:
            time.sleep(wait)
        try:
            if not chunk:
                writer.shutdown(socket.SHUT_WR)
                return
            writer.sendall(chunk)
        except OSError:
            return  # the peer has closed the connection
