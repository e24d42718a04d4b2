"""The client of a schema registry: schemas by id and subject, with bounded caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

from oncelog.config import SCHEMA_REGISTRY
from oncelog.errors import SchemaRegistryError
from oncelog.schema_registry.cache import Cache
from oncelog.schema_registry.http import Request, RestClient
from oncelog.schema_registry.lookups import About, Lookups
from oncelog.schema_registry.schemas import RegisteredSchema, Schema, SchemaReference

T = TypeVar("T")

MAX_ID = 2**31 - 1
_TYPES = ("AVRO", "JSON", "PROTOBUF")


class SchemaRegistryClient:
    """A client of a schema registry with Confluent's REST API. Serializers and deserializers share it.

        registry = SchemaRegistryClient({"schema.registry.url": "http://127.0.0.1:8081"})
        registry.get_schema(5).text

    Settings are those of Confluent's Java serializers, in a mapping or as keywords with underscores. The
    constructor sends no request. Raises ConfigError for invalid settings.

    Methods cache their results, except those that the registry may change. They raise SchemaRegistryError, at
    the latest after request.timeout.ms. Any thread may use the client. Do not call these methods in an event
    loop: await `prepare` of the serializers there.
    """

    def __init__(self, config: Mapping[str, object] | None = None, **settings: object) -> None:
        self.settings = SCHEMA_REGISTRY.parse({**(config or {}), **settings})
        self._rest = RestClient(self.settings)
        capacity = self.settings["cache.capacity"]
        self.lookups = Lookups(self.settings["request.timeout.ms"])
        self._by_id: Cache[int, Schema] = Cache(capacity)
        self._versions: Cache[tuple[str, int], RegisteredSchema] = Cache(capacity)
        self._registered: Cache[tuple[Any, ...], int] = Cache(capacity)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Later requests raise SchemaRegistryError. Safe to call twice."""
        self._rest.close()

    @property
    def url(self) -> str:
        """The addresses of the registry without credentials, comma-separated."""
        return ",".join(self._rest.urls)

    def get_schema(self, schema_id: int) -> Schema:
        """Return the schema of an id. The result is cached, because an id never gets another schema."""
        schema = self._by_id.get(schema_id)
        if schema is None:
            schema = self._get_schema(schema_id, "")
            # Registries return the text of a .proto file, unless the request asks for a descriptor. They may
            # refuse that request for other types: Confluent's AvroSchema.formattedString does. Guard:
            # test_only_protobuf_is_asked_for_in_serialized_form.
            if schema.type == "PROTOBUF":
                schema = self._get_schema(schema_id, "?format=serialized")
            self._by_id.put(schema_id, schema)
        return schema

    def _get_schema(self, schema_id: int, query: str) -> Schema:
        request = Request("GET", f"/schemas/ids/{schema_id}{query}", schema_id=schema_id)
        return self._wait(request, lambda answer: _schema(answer, request))

    def get_version(self, subject: str, version: int) -> RegisteredSchema:
        """Return a version of a subject. The result is cached: a version never gets another schema."""
        found = self._versions.get((subject, version))
        if found is None:
            found = self._get_version(subject, str(version), is_deleted_too=True)
            self._versions.put((subject, version), found)
        return found

    def get_latest_version(self, subject: str) -> RegisteredSchema:
        """Return the latest version of a subject. The result is not cached, because it may change."""
        return self._get_version(subject, "latest")

    def register_schema(self, subject: str, schema: Schema) -> int:
        """Register a schema under a subject, and return its id. A registered schema keeps its id.

        Raises SchemaRegistryError: status 409 for a schema that is not compatible with the subject's earlier
        ones, 422 for an invalid schema.
        """
        references = tuple(astuple(reference) for reference in schema.references)
        key = (subject, schema.text, schema.type, references)
        schema_id = self._registered.get(key)
        if schema_id is None:
            request = self._about(subject, "/versions", schema)
            schema_id = self._wait(request, lambda answer: _whole(answer, "id", request))
            self._registered.put(key, schema_id)
        return schema_id

    def lookup_schema(self, subject: str, schema: Schema) -> RegisteredSchema:
        """Return id and version of a schema that is registered under a subject.

        Raises SchemaRegistryError: error code 40401 for an unknown subject, 40403 for a schema that the
        subject does not have.
        """
        request = self._about(subject, "", schema)
        # The registry may return the schema with a changed text. Data is written with the caller's schema, so
        # return that one.
        found = self._wait(request, lambda answer: _registered(answer, request))
        return replace(found, schema=schema)

    def _about(self, subject: str, path: str, schema: Schema) -> Request:
        normalize = "?normalize=true" if self.settings["normalize.schemas"] else ""
        path = f"/subjects/{quote(subject, safe='')}{path}{normalize}"
        return Request("POST", path, _body(schema), subject=subject)

    def _get_version(self, subject: str, version: str, *, is_deleted_too: bool = False) -> RegisteredSchema:
        deleted = "?deleted=true" if is_deleted_too else ""
        path = f"/subjects/{quote(subject, safe='')}/versions/{version}{deleted}"
        request = Request("GET", path, subject=subject)
        found = self._wait(request, lambda answer: _registered(answer, request))
        if found.schema.type == "PROTOBUF":
            return replace(found, schema=self.get_schema(found.id))
        return found

    def _wait(self, request: Request, result: Callable[[Any], T]) -> T:
        """Return the result of a request's response, within request.timeout.ms."""
        url = self._rest.urls[0] + request.path
        about = About(f"{request.method} {url}", url, request.subject, request.schema_id)
        key = (request.method, request.path, str(request.body))
        return self.lookups.wait(key, lambda: result(self._rest.call(request)), about)


def _body(schema: Schema) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": schema.text}
    if schema.type != "AVRO":
        body["schemaType"] = schema.type
    if schema.references:
        body["references"] = [
            {"name": reference.name, "subject": reference.subject, "version": reference.version}
            for reference in schema.references
        ]
    return body


def _registered(answer: Any, request: Request) -> RegisteredSchema:
    """Return the schema of a response. A response to a look-up may omit fields that were in the request."""
    if isinstance(answer, dict) and request.body is not None:
        answer = {**request.body, **answer}
    return RegisteredSchema(
        _schema(answer, request),
        _whole(answer, "id", request),
        request.subject or "",
        _whole(answer, "version", request),
    )


def _schema(answer: Any, request: Request) -> Schema:
    text, kind = _field(answer, "schema", request), answer.get("schemaType", "AVRO")
    if not isinstance(text, str):
        raise _malformed("schema is not text", request)
    if kind not in _TYPES:
        raise _malformed(f"schemaType is {kind!r}, not one of {', '.join(_TYPES)}", request)
    references = []
    listed = answer.get("references") or []
    if not isinstance(listed, list):
        raise _malformed("references is not a list", request)
    for reference in listed:
        name, subject = (_field(reference, field, request) for field in ("name", "subject"))
        if not isinstance(name, str) or not isinstance(subject, str):
            raise _malformed("a reference has no name or subject", request)
        references.append(SchemaReference(name, subject, _whole(reference, "version", request)))
    return Schema(text, kind, tuple(references))


def _field(answer: Any, name: str, request: Request) -> Any:
    if not isinstance(answer, dict) or name not in answer:
        raise _malformed(f"no field {name}", request)
    return answer[name]


def _whole(answer: Any, name: str, request: Request) -> int:
    value = _field(answer, name, request)
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise _malformed(f"{name} is {value!r}, not a whole number of 31 bits", request)
    return value


def _malformed(reason: str, request: Request) -> SchemaRegistryError:
    return SchemaRegistryError(
        f"{request.method} {request.path}: the response is malformed: {reason}",
        url=request.path,
        subject=request.subject,
        schema_id=request.schema_id,
    )
