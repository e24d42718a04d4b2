"""The client of a schema registry: requests, errors, retries, authentication, TLS and limits."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.interrupts import Interrupt, each_place
from support.schema_registry import CONTENT_TYPE, Registry, running_registry
from support.schemas import ORDER, ORDER_JSON, protobuf_classes
from support.security.brokers import make_certificates
from support.wait import LIMIT_S, wait_until

from oncelog.errors import ConfigError, SchemaRegistryError
from oncelog.schema_registry import ProtobufSerializer, Schema, SchemaReference, SchemaRegistryClient, lookups
from oncelog.schema_registry.cache import Cache
from oncelog.schema_registry.protobuf import file_text

WITH_DEFAULT = json.dumps(
    {
        **json.loads(ORDER),
        "fields": [*json.loads(ORDER)["fields"], {"name": "n", "type": "int", "default": 0}],
    }
)
INCOMPATIBLE = json.dumps(
    {**json.loads(ORDER), "fields": [*json.loads(ORDER)["fields"], {"name": "m", "type": "int"}]}
)


def client_of(registry: Registry, **settings: object) -> SchemaRegistryClient:
    quick = {"retries_wait_ms": 1, "retries_max_wait_ms": 5}
    return SchemaRegistryClient({"schema.registry.url": registry.url}, **{**quick, **settings})


def test_a_schema_is_registered_once_and_found_by_id_version_and_text(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    schema = Schema(ORDER)
    assert client.register_schema("orders-value", schema) == 1
    assert client.register_schema("orders-value", schema) == 1
    assert registry.requests == ["POST /subjects/orders-value/versions"]
    assert json.loads(client.get_schema(1).text) == json.loads(ORDER)
    found = client.lookup_schema("orders-value", schema)
    assert (found.id, found.version, found.subject) == (1, 1, "orders-value")
    assert client.get_latest_version("orders-value").version == 1
    assert client.get_version("orders-value", 1).id == 1
    assert registry.headers[0]["content-type"] == CONTENT_TYPE


def test_schemas_by_id_and_version_are_asked_for_once_and_the_latest_each_time(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    client.register_schema("s", Schema(ORDER))
    registry.requests.clear()
    for _ in range(3):
        client.get_schema(1)
        client.get_version("s", 1)
        client.get_latest_version("s")
    assert registry.requests == [
        "GET /schemas/ids/1",
        "GET /subjects/s/versions/1?deleted=true",
        *["GET /subjects/s/versions/latest"] * 3,
    ]


def test_a_schema_has_its_type_and_references(registry: Registry, client: SchemaRegistryClient) -> None:
    client.register_schema("item", Schema('{"type": "enum", "name": "Item", "symbols": ["LAMP"]}'))
    reference = SchemaReference("Item", "item", 1)
    client.register_schema("json", Schema(ORDER_JSON, "JSON"))
    text = '{"type": "record", "name": "R", "fields": [{"name": "i", "type": "Item"}]}'
    assert client.register_schema("r", Schema(text, references=(reference,))) == 3
    assert client.get_schema(2).type == "JSON"
    assert client.get_schema(3).references == (reference,)
    assert client.lookup_schema("r", Schema(text, references=(reference,))).schema.references == (reference,)


def test_a_subject_may_have_any_name(registry: Registry, client: SchemaRegistryClient) -> None:
    name = "a/b?c=%2F#ü ../x"
    client.register_schema(name, Schema(ORDER))
    assert registry.subjects == {name: [1]}
    assert client.lookup_schema(name, Schema(ORDER)).id == 1


def test_errors_have_the_registrys_code_and_name_what_was_requested(
    registry: Registry, client: SchemaRegistryClient
) -> None:
    with pytest.raises(
        SchemaRegistryError, match=r"schema id 5: HTTP 404, error code 40403: Schema 5 not"
    ) as raised:
        client.get_schema(5)
    assert (raised.value.status, raised.value.error_code, raised.value.schema_id) == (404, 40403, 5)
    assert raised.value.url == f"{registry.url}/schemas/ids/5"
    with pytest.raises(SchemaRegistryError, match=r"subject 'none': HTTP 404, error code 40401") as raised:
        client.lookup_schema("none", Schema(ORDER))
    assert raised.value.subject == "none"
    client.register_schema("s", Schema(ORDER))
    with pytest.raises(SchemaRegistryError, match="error code 40403"):
        client.lookup_schema("s", Schema('"string"'))
    with pytest.raises(SchemaRegistryError, match="error code 40402"):
        client.get_version("s", 9)
    assert client.register_schema("s", Schema(WITH_DEFAULT)) == 2
    with pytest.raises(SchemaRegistryError, match="incompatible with an earlier schema") as raised:
        client.register_schema("s", Schema(INCOMPATIBLE))
    assert (raised.value.status, raised.value.error_code) == (409, 409)
    with pytest.raises(SchemaRegistryError, match="Invalid schema") as raised:
        client.register_schema("s", Schema('{"type": "no such"}'))
    assert (raised.value.status, raised.value.error_code) == (422, 42201)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, b"<html>", "HTTP 200 without JSON"),
        (200, b"[]", "malformed: no field schema"),
        (200, b'{"schema": 5}', "malformed: schema is not text"),
        (200, b'{"schema": "x", "schemaType": "XML"}', "malformed: schemaType is 'XML'"),
        (200, b'{"schema": "x", "references": 7}', "malformed: references is not a list"),
        (200, b'{"schema": "x", "references": [{"name": 1, "subject": "s", "version": 1}]}', "has no name"),
        (200, b'{"schema": "x", "references": [{"name": "n", "subject": "s", "version": -1}]}', "31 bits"),
        (200, b"[" * 100_000, "without JSON"),
        (403, b'{"error_code": "x", "message": null}', "HTTP 403, error code None: no message"),
        (302, b"{}", "HTTP 302"),
    ],
)
def test_malformed_responses_are_refused(
    registry: Registry, client: SchemaRegistryClient, status: int, body: bytes, text: str
) -> None:
    registry.prepared.append((status, body))
    with pytest.raises(SchemaRegistryError, match=text):
        client.get_schema(1)


def test_a_response_above_the_limit_is_not_read(registry: Registry) -> None:
    registry.prepared.append((200, json.dumps({"schema": "x" * 5_000}).encode()))
    with (
        client_of(registry, oncelog_max_response_bytes=1_000) as client,
        pytest.raises(SchemaRegistryError, match=r"larger than oncelog\.max\.response\.bytes=1000"),
    ):
        client.get_schema(1)
    assert len(registry.requests) == 1


def test_an_error_of_the_registry_is_retried(registry: Registry, client: SchemaRegistryClient) -> None:
    registry.prepared += [(500, b'{"error_code": 50001, "message": "store"}'), (503, b"busy")]
    assert client.register_schema("s", Schema(ORDER)) == 1
    assert len(registry.requests) == 3


def test_retries_end_with_the_last_error(registry: Registry) -> None:
    registry.prepared += [(503, b"{}")] * 9
    with client_of(registry, max_retries=2) as client, pytest.raises(SchemaRegistryError) as raised:
        client.get_schema(1)
    assert (raised.value.status, len(registry.requests)) == (503, 3)


def test_the_next_url_is_asked_if_one_does_not_answer(registry: Registry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    urls = f"http://127.0.0.1:{port}, {registry.url}/"
    with SchemaRegistryClient({"schema.registry.url": urls}) as client:
        assert client.register_schema("s", Schema(ORDER)) == 1
        assert client.url == f"http://127.0.0.1:{port},{registry.url}"


def test_a_registry_that_is_down_is_named_without_credentials() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    config = {"schema.registry.url": f"http://alice:secret@127.0.0.1:{port}/api", "max.retries": 0}
    with (
        SchemaRegistryClient(config) as client,
        pytest.raises(SchemaRegistryError, match=f"127.0.0.1:{port}/api/schemas/ids/1") as raised,
    ):
        client.get_schema(1)
    assert raised.value.status is None
    chain = f"{raised.value} {raised.value.__cause__!r} {raised.value.url} {client.url}"
    assert "secret" not in chain and "alice" not in chain


def test_a_registry_that_does_not_answer_ends_the_wait(registry: Registry) -> None:
    registry.gate.clear()
    with (
        client_of(registry, request_timeout_ms=100) as client,
        pytest.raises(SchemaRegistryError, match=r"no result within request\.timeout\.ms=100") as raised,
    ):
        client.get_schema(1)
    assert (raised.value.schema_id, raised.value.status) == (1, None)
    assert raised.value.url == f"{registry.url}/schemas/ids/1"


def test_callers_of_one_schema_share_a_request(registry: Registry, client: SchemaRegistryClient) -> None:
    client.register_schema("s", Schema(ORDER))
    registry.requests.clear()
    registry.gate.clear()
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(client.get_schema(1).text)) for _ in range(5)]
    for thread in threads:
        thread.start()
    registry.gate.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == 5
    # A thread that started late finds the schema in the cache, or asks again if it came in between.
    assert len(registry.requests) < 5


def test_a_closed_client_sends_nothing(registry: Registry, client: SchemaRegistryClient) -> None:
    client.close()
    client.close()
    with pytest.raises(SchemaRegistryError, match="the client is closed"):
        client.get_schema(1)
    assert registry.requests == []


@pytest.mark.parametrize(
    "settings",
    [
        {"basic.auth.user.info": "alice:se:cret"},
        {"basic.auth.credentials.source": "USER_INFO", "basic.auth.user.info": "alice:se:cret"},
        {"of url": "alice:se%3Acret"},
        {"of url": "alice:se%3Acret", "basic.auth.credentials.source": "URL"},
    ],
    ids=["user info", "USER_INFO", "URL by itself", "URL"],
)
def test_basic_authentication(registry: Registry, settings: dict[str, str]) -> None:
    registry.authorization = "Basic " + base64.b64encode(b"alice:se:cret").decode()
    url, settings = registry.url, dict(settings)
    if (userinfo := settings.pop("of url", None)) is not None:
        url = url.replace("://", f"://{userinfo}@")
    with SchemaRegistryClient({"schema.registry.url": url, **settings}) as client:
        assert client.register_schema("s", Schema(ORDER)) == 1
        assert "cret" not in repr(client.settings.user_set().get("basic.auth.user.info"))


def test_a_bearer_token_is_sent_with_its_cluster_and_pool(registry: Registry) -> None:
    registry.authorization = "Bearer abc"
    settings = {
        "bearer.auth.credentials.source": "STATIC_TOKEN",
        "bearer.auth.token": "abc",
        "bearer.auth.logical.cluster": "lsrc-1",
        "bearer.auth.identity.pool.id": "pool-1",
    }
    with SchemaRegistryClient({"schema.registry.url": registry.url, **settings}) as client:
        client.register_schema("s", Schema(ORDER))
    sent = registry.headers[0]
    assert (sent["target-sr-cluster"], sent["confluent-identity-pool-id"]) == ("lsrc-1", "pool-1")


def test_wrong_credentials_are_refused_and_not_retried(registry: Registry) -> None:
    registry.authorization = "Basic other"
    with (
        client_of(registry, basic_auth_user_info="alice:secret") as client,
        pytest.raises(SchemaRegistryError, match="HTTP 401, error code 401: Unauthorized") as raised,
    ):
        client.get_schema(1)
    assert len(registry.requests) == 1
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "schema.registry.url is not set"),
        ({"schema.registry.url": "127.0.0.1:8081"}, "expected http"),
        ({"schema.registry.url": "ftp://alice:secret@host"}, "expected http"),
        ({"schema.registry.url": "http://host:port"}, "expected http"),
        ({"schema.registry.url": "http://host?x=1"}, "expected http"),
        ({"basic.auth.user.info": "alice"}, "expected USER:PASSWORD"),
        ({"basic.auth.credentials.source": "USER_INFO"}, "expected USER:PASSWORD"),
        ({"basic.auth.credentials.source": "URL"}, "has no USER:PASSWORD@"),
        ({"basic.auth.credentials.source": "SASL_INHERIT"}, "expected one of URL, USER_INFO"),
        ({"schema.registry.url": "http://a:b@host", "basic.auth.user.info": "a:b"}, "both have credentials"),
        ({"bearer.auth.token": "abc", "basic.auth.user.info": "a:b"}, "exclude each other"),
        ({"bearer.auth.credentials.source": "STATIC_TOKEN"}, "needs bearer.auth.token"),
        ({"bearer.auth.token": "abc\r\nX: y"}, "expected printable ASCII"),
        ({"schema.registry.urll": "http://host"}, "did you mean schema.registry.url"),
        (
            {"schema.registry.ssl.truststore.location": "/none.pem", "schema.registry.url": "https://host"},
            "no such",
        ),
    ],
)
def test_invalid_settings_are_refused(config: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        SchemaRegistryClient({"schema.registry.url": "http://host", **config} if config else {})
    assert "secret" not in str(raised.value)


def test_tls_with_client_certificates(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    context.load_cert_chain(certificates.broker)
    context.verify_mode = ssl.CERT_REQUIRED
    trusted = {"schema.registry.ssl.truststore.location": str(certificates.authority), "max.retries": 0}
    own = {"schema.registry.ssl.keystore.location": str(certificates.client)}
    with running_registry(context) as registry:
        url = {"schema.registry.url": registry.url}
        with SchemaRegistryClient({**url, **trusted, **own}) as client:
            assert client.register_schema("s", Schema(ORDER)) == 1
        for settings in (trusted, {**own, "max.retries": 0}):
            with SchemaRegistryClient({**url, **settings}) as client, pytest.raises(SchemaRegistryError):
                client.get_schema(1)


def test_only_protobuf_is_asked_for_in_serialized_form(registry: Registry) -> None:
    """Confluent's registry answers such a request for another type with status 500."""
    classes = protobuf_classes()
    with client_of(registry) as client:
        client.register_schema("order", Schema(ORDER))
        ProtobufSerializer(client, classes["Money"]).serialize("money", classes["Money"]())
        for schema_id in (1, 2):
            client.get_schema(schema_id)
        assert client.get_schema(2).text == file_text(classes["Money"].DESCRIPTOR.file)
        assert client.get_version("money-value", 1).schema == client.get_latest_version("money-value").schema
        assert client.get_version("money-value", 1).schema == client.get_schema(2)
    assert [request for request in registry.requests if "serialized" in request] == [
        "GET /schemas/ids/2?format=serialized"
    ]


def test_a_look_up_that_gets_no_thread_fails(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: all later look-ups of the same schema waited for one that did not run."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    client = client_of(registry, request_timeout_ms=2_000)
    schema_id = client.register_schema("s", Schema('"long"'))
    with monkeypatch.context() as patched:
        patched.setattr(lookups, "start_new_thread", refuse)
        with pytest.raises(SchemaRegistryError, match="can't start new thread"):
            client.get_schema(schema_id)
    assert client.get_schema(schema_id).text == '"long"'


@pytest.mark.parametrize("raises", [True, False])
def test_an_interrupt_at_any_call_of_a_look_up_blocks_nobody(raises: bool) -> None:
    """Regression: a signal handler that raised could leave a look-up that never ran, for which all later
    callers of the same schema waited. A handler that looked up a schema itself could wait forever.
    """
    registry, cache = lookups.Lookups(LIMIT_S * 1000), Cache[int, str](1)
    about = lookups.About("a schema", "http://127.0.0.1")

    def look_up(place: int) -> None:
        if cache.get(place) is None:
            cache.put(place, registry.wait(place, lambda: "found", about))

    def handler() -> None:
        look_up(0)
        if raises:
            raise Interrupt

    for place in each_place(look_up, handler):
        look_up(place)
        assert cache.get(place) == "found"
        assert len(cache) == 1


def test_a_forked_process_opens_a_connection_of_its_own(registry: Registry) -> None:
    """Regression: processes shared a connection after a fork, and could get each other's schemas. A look-up
    that ran at the time of the fork never ended in the child.
    """
    with client_of(registry, request_timeout_ms=LIMIT_S * 1000) as client:
        schema_ids = [client.register_schema(text, Schema(f'"{text}"')) for text in ("long", "string")]
        registry.gate.clear()
        waiting = threading.Thread(target=client.get_schema, args=(schema_ids[0],))
        waiting.start()
        wait_until(lambda: len(registry.requests) == 3)
        child = os.fork()
        if child == 0:
            is_right = False
            with suppress(SchemaRegistryError):
                texts = [client.get_schema(schema_id).text for schema_id in schema_ids]
                is_right = texts == ['"long"', '"string"']
            os._exit(0 if is_right else 1)
        wait_until(lambda: len(registry.requests) == 4)
        registry.gate.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        waiting.join()
    assert len(set(registry.ports)) == 2
    assert registry.ports[-1] != registry.ports[0]


def test_a_response_that_never_ends_is_given_up() -> None:
    """Regression: its thread and connection stayed as long as the registry sent some bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n")
                while not ended.wait(0.05):
                    connection.sendall(b" ")

        sending = threading.Thread(target=drip, daemon=True)
        sending.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        client = SchemaRegistryClient({"schema.registry.url": url, "request.timeout.ms": 300})
        with pytest.raises(SchemaRegistryError, match=r"request\.timeout\.ms=300"):
            client.get_schema(1)
        sending.join(20)  # the client closes the connection
        is_closed = not sending.is_alive()
        ended.set()
    assert is_closed
