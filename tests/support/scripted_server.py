"""A server that reads requests of Kafka's protocol. A function that the test passes makes the responses."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from oncelog.broker.state import OFFERED
from oncelog.wire.frames import RequestHeader, decode_request_header, encode_response
from oncelog.wire.messages import ApiVersionsResponse

Answer = Callable[[RequestHeader], bytes]
"""Returns the bytes to send in response to a request. With empty bytes, no response is sent."""
API_VERSIONS_KEY = 18


def offers_all(header: RequestHeader) -> bytes:
    """Answer ApiVersions with all APIs and versions that our client knows. Send no response to other
    requests.
    """
    if header.api_key != API_VERSIONS_KEY:
        return b""
    rows = [
        ApiVersionsResponse.ApiVersion(
            api_key=api.key, min_version=api.min_version, max_version=api.max_version
        )
        for api in OFFERED.values()
    ]
    message = ApiVersionsResponse(error_code=0, api_keys=rows)
    return encode_response(message, header.api_version, header.correlation_id)


@contextlib.contextmanager
def scripted_server(answer: Answer) -> Iterator[str]:
    """Run a server and return its address. At the end, its connections are closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):  # the listener was closed, because the block has ended
                while True:
                    connection = listener.accept()[0]
                    connections.append(connection)
                    threading.Thread(target=_serve, args=(connection, answer), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            for connection in connections:
                connection.close()


def _serve(connection: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
        while head := stream.read(4):
            (size,) = struct.unpack(">i", head)
            connection.sendall(answer(decode_request_header(stream.read(size))))
