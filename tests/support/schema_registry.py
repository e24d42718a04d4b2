"""A schema registry in memory that follows Confluent's REST API: paths, JSON bodies, statuses, error codes.

Apache Avro's own checker tests the backward compatibility of Avro schemas. Protobuf schemas are registered
in base 64, and returned in base 64 only with `format=serialized`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import avro.schema
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from google.protobuf import descriptor_pb2

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"


class Refused(Exception):
    """An error response: status, error code and message."""

    def __init__(self, status: int, code: int, message: str) -> None:
        self.status, self.body = status, {"error_code": code, "message": message}


@dataclass(frozen=True)
class Stored:
    """A schema as it was registered; `text` is canonical."""

    text: str
    kind: str
    references: str

    def body(self, query: str = "") -> dict[str, Any]:
        """Return the schema's fields of a response. AVRO is left out, as registries do.

        As Confluent's registry: only Protobuf has the format `serialized`, and is else text of a .proto file.
        """
        if "format=serialized" in query and self.kind != "PROTOBUF":
            raise Refused(500, 500, "Internal Server Error")
        text = self.text
        if "format=serialized" not in query and self.kind == "PROTOBUF":
            text = f'syntax = "proto3"; // {len(text)} characters in base 64'
        kind = {} if self.kind == "AVRO" else {"schemaType": self.kind}
        references = json.loads(self.references)
        return {"schema": text, **kind, **({"references": references} if references else {})}


@dataclass
class Registry:
    """The stored schemas, and what a test prescribes: credentials, prepared responses and a gate.

    `authorization` is the expected value of the header. Each of `prepared` replaces the response to one
    request: a status and the bytes of a body. While `gate` is clear, no request is answered. `requests` has
    each request as `METHOD path?query`, and `ports` the client's port of each.
    """

    url: str = ""
    authorization: str | None = None
    prepared: list[tuple[int, bytes]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    schemas: list[Stored] = field(default_factory=list)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    query: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, target: str, body: Any) -> Any:
        """Return the body of a successful response. Raises Refused."""
        path, query = urlsplit(target).path, urlsplit(target).query
        for pattern, handle in _ROUTES[method]:
            if match := re.fullmatch(pattern, path):
                with self.lock:
                    self.query = query
                    return handle(self, *map(unquote, match.groups()), *([] if body is None else [body]))
        raise Refused(404, 404, "HTTP 404 Not Found")

    def by_id(self, schema_id: str) -> Any:
        if not schema_id.isdecimal() or not 0 < int(schema_id) <= len(self.schemas):
            raise Refused(404, 40403, f"Schema {schema_id} not found")
        return self.schemas[int(schema_id) - 1].body(self.query)

    def register(self, subject: str, body: Any) -> Any:
        schema = self._parsed(body)
        ids = self.subjects.get(subject, [])
        known = self.schemas.index(schema) + 1 if schema in self.schemas else None
        if known in ids:
            return {"id": known}
        if ids and not _is_compatible(self.schemas[ids[-1] - 1], schema):
            message = f"Schema being registered is incompatible with an earlier schema for {subject!r}"
            raise Refused(409, 409, message)
        if known is None:
            self.schemas.append(schema)
            known = len(self.schemas)
        self.subjects.setdefault(subject, []).append(known)
        return {"id": known}

    def look_up(self, subject: str, body: Any) -> Any:
        schema = self._parsed(body)
        ids = self._ids(subject)
        for version, schema_id in enumerate(ids, 1):
            if self.schemas[schema_id - 1] == schema:
                return self._registered(subject, version)
        raise Refused(404, 40403, "Schema not found")

    def version(self, subject: str, version: str) -> Any:
        ids = self._ids(subject)
        number = len(ids) if version == "latest" else int(version) if version.isdecimal() else 0
        if not version.isdecimal() and version != "latest":
            raise Refused(422, 42202, f"The specified version '{version}' is not a valid version id.")
        if not 0 < number <= len(ids):
            raise Refused(404, 40402, f"Version {version} not found.")
        return self._registered(subject, number)

    def versions(self, subject: str) -> Any:
        return list(range(1, len(self._ids(subject)) + 1))

    def names(self) -> Any:
        return list(self.subjects)

    def _registered(self, subject: str, version: int) -> Any:
        schema_id = self.subjects[subject][version - 1]
        schema = self.schemas[schema_id - 1].body(self.query)
        return {"subject": subject, "version": version, "id": schema_id, **schema}

    def _ids(self, subject: str) -> list[int]:
        if subject not in self.subjects:
            raise Refused(404, 40401, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _parsed(self, body: Any) -> Stored:
        text, kind = body["schema"], body.get("schemaType", "AVRO")
        references = body.get("references") or []
        for reference in references:
            self.version(reference["subject"], str(reference["version"]))
        try:
            if kind == "PROTOBUF":
                descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
            else:
                text = json.dumps(_canonical(json.loads(text)))
                if kind == "AVRO" and not references:
                    avro.schema.parse(text)
        except Exception as error:
            raise Refused(422, 42201, f"Invalid schema {text[:100]}: {error}") from error
        return Stored(text, kind, json.dumps(references))


_ROUTES: dict[str, list[tuple[str, Any]]] = {
    "GET": [
        (r"/schemas/ids/([^/]+)", Registry.by_id),
        (r"/subjects", Registry.names),
        (r"/subjects/([^/]+)/versions", Registry.versions),
        (r"/subjects/([^/]+)/versions/([^/]+)", Registry.version),
    ],
    "POST": [
        (r"/subjects/([^/]+)/versions", Registry.register),
        (r"/subjects/([^/]+)", Registry.look_up),
    ],
}


def _canonical(schema: Any) -> Any:
    """Return a schema as a registry does, which stores Avro's own text of it: {"type": "int"} is "int"."""
    is_plain = isinstance(schema, dict) and list(schema) == ["type"] and isinstance(schema["type"], str)
    return schema["type"] if is_plain else schema


def _is_compatible(earlier: Stored, later: Stored) -> bool:
    """Return True if a reader with the later schema can read data of the earlier one (BACKWARD)."""
    if "AVRO" not in (earlier.kind, later.kind) or "[]" not in (earlier.references, later.references):
        return earlier.kind == later.kind
    if earlier.kind != later.kind:
        return False
    reader, writer = avro.schema.parse(later.text), avro.schema.parse(earlier.text)
    found = ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)
    return found.compatibility is SchemaCompatibilityType.compatible


@contextlib.contextmanager
def running_registry(tls: ssl.SSLContext | None = None) -> Iterator[Registry]:
    """Run a registry on a free port of loopback, with TLS if a context is given."""
    registry = Registry()
    registry.gate.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Send head and body at once. Otherwise the client acknowledges the head 40 ms later.
        wbufsize = 65_536
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            self._respond(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: object) -> None:
            pass

        def _respond(self, content: bytes | None) -> None:
            registry.ports.append(self.client_address[1])
            registry.requests.append(f"{self.command} {self.path}")
            registry.headers.append({name.lower(): value for name, value in self.headers.items()})
            registry.gate.wait(120)
            with contextlib.suppress(OSError):
                self._send(*self._outcome(content))

        def _outcome(self, content: bytes | None) -> tuple[int, bytes]:
            if registry.prepared:
                return registry.prepared.pop(0)
            try:
                if registry.authorization not in (None, self.headers["Authorization"]):
                    raise Refused(401, 401, "Unauthorized")
                body = None if content is None else json.loads(content)
                return 200, json.dumps(registry.answer(self.command, self.path, body)).encode()
            except Refused as error:
                return error.status, json.dumps(error.body).encode()

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Print nothing if a client resets its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    registry.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        registry.gate.set()
        server.shutdown()
        thread.join(60)
        server.server_close()
