"""HTTP requests to a schema registry: authentication, TLS, retries, and limits of time and size."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from oncelog.errors import MAX_MESSAGE_CHARACTERS, ConfigError, MissingDependency, SchemaRegistryError
from oncelog.runtime import system
from oncelog.runtime.tls import tls_context
from oncelog.schema_registry.subjects import retry_pause_ms
from oncelog.settings import Settings

try:
    import httpx2 as httpx
except ImportError as error:
    raise MissingDependency(f"{error.name} is missing: pip install 'oncelog[schema-registry]'") from None

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_TLS_PREFIX = "schema.registry."


class Request(NamedTuple):
    """A request, and the subject or id that it is about, for errors."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    subject: str | None = None
    schema_id: int | None = None


class RestClient:
    """The connections to a registry. All methods may be called from several threads at once.

    Raises ConfigError for settings that are missing or contradict each other.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._runtime = system.current()
        self._closed = threading.Event()
        self.urls, of_url = _urls(settings["schema.registry.url"])
        self._max_bytes: int = settings["oncelog.max.response.bytes"]
        tls: ssl.SSLContext | bool = False
        if any(url.startswith("https:") for url in self.urls):
            tls = tls_context(
                {key.removeprefix(_TLS_PREFIX): value for key, value in settings.items() if ".ssl." in key}
            )
        timeout = httpx.Timeout(
            settings["http.read.timeout.ms"] / 1000, connect=settings["http.connect.timeout.ms"] / 1000
        )
        self._connect = partial(
            httpx.Client,
            verify=tls,
            auth=_basic_auth(settings, of_url),
            headers=_headers(settings),
            timeout=timeout,
        )
        # The connections by process id. Processes that share a connection after a fork could take each
        # other's responses, which have no id of their request. Guard:
        # test_a_forked_process_opens_a_connection_of_its_own.
        self._clients = {os.getpid(): self._connect()}

    def close(self) -> None:
        """Close the connections, and end the pauses between retries."""
        self._closed.set()
        client = self._clients.get(os.getpid())
        if client is not None:
            client.close()

    def _client(self) -> httpx.Client:
        """Return the connections of this process."""
        process_id = os.getpid()
        client = self._clients.get(process_id)
        return client or self._clients.setdefault(process_id, self._connect())

    def call(self, request: Request) -> Any:
        """Return the JSON value of a successful response.

        If a registry does not answer, or answers with an error that a retry may repair, the request goes to
        the next URL. After a pause, all URLs are tried again. Raises SchemaRegistryError.
        """
        settings, started_ns = self._settings, self._runtime.monotonic_ns()
        deadline_ns = started_ns + settings["request.timeout.ms"] * 1_000_000
        attempt = 0
        while True:
            url = self.urls[attempt % len(self.urls)] + request.path
            if self._closed.is_set():
                raise _failure("the client is closed", url, request)
            try:
                return self._once(url, request, deadline_ns)
            except SchemaRegistryError as error:
                pause_ms = retry_pause_ms(
                    attempt, error.status, len(self.urls), settings["max.retries"],
                    settings["retries.wait.ms"], settings["retries.max.wait.ms"],
                )  # fmt: skip
                passed_ms = (self._runtime.monotonic_ns() - started_ns) / 1e6
                if pause_ms is None or passed_ms + pause_ms >= settings["request.timeout.ms"]:
                    raise
            self._closed.wait(pause_ms / 1000)
            attempt += 1

    def _once(self, url: str, request: Request, deadline_ns: int) -> Any:
        content = None if request.body is None else json.dumps(request.body).encode()
        try:
            with self._client().stream(request.method, url, content=content) as response:
                status, data = response.status_code, self._read(response, url, request, deadline_ns)
        # RuntimeError: another thread closed the client.
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError, OSError) as error:
            raise _failure(f"{type(error).__name__}: {error}", url, request) from error
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _failure(f"HTTP {status} without JSON", url, request, status) from error
        if 200 <= status < 300:
            return value
        described = value if isinstance(value, dict) else {}
        code = described.get("error_code")
        code = code if isinstance(code, int) else None
        message = str(described.get("message") or "no message")[:MAX_MESSAGE_CHARACTERS]
        raise _failure(f"HTTP {status}, error code {code}: {message}", url, request, status, code)

    def _read(self, response: Any, url: str, request: Request, deadline_ns: int) -> bytes:
        """Return the body. A compressed body is refused, because its size is unknown before it is read.

        Stop reading at the deadline, because no caller waits any longer. Without it, a body that arrives byte
        by byte would keep a thread and a connection for days. Guard:
        test_a_response_that_never_ends_is_given_up.
        """
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _failure("the response is compressed, which was not requested", url, request, 200)
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if self._runtime.monotonic_ns() > deadline_ns:
                limit = f"request.timeout.ms={self._settings['request.timeout.ms']}"
                raise _failure(f"the response did not end within {limit}", url, request, response.status_code)
            if len(data) > self._max_bytes:
                limit = f"oncelog.max.response.bytes={self._max_bytes}"
                raise _failure(f"the response is larger than {limit}", url, request, response.status_code)
        return bytes(data)


def _failure(
    reason: str, url: str, request: Request, status: int | None = None, error_code: int | None = None
) -> SchemaRegistryError:
    about = ""
    if request.subject is not None:
        about = f" for subject {request.subject!r}"
    elif request.schema_id is not None:
        about = f" for schema id {request.schema_id}"
    return SchemaRegistryError(
        f"{request.method} {url}{about}: {reason}",
        url=url,
        subject=request.subject,
        schema_id=request.schema_id,
        status=status,
        error_code=error_code,
    )


def _urls(texts: list[str] | None) -> tuple[list[str], tuple[str, str] | None]:
    """Return the URLs without credentials, and the user name and password of the first one that has some.

    Raises ConfigError. Its text has no credentials.
    """
    urls: list[str] = []
    credentials = None
    for text in texts or ():
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise ConfigError(
                "schema.registry.url: expected http(s)://HOST:PORT or http(s)://HOST:PORT/PATH, "
                "comma-separated"
            )
        if credentials is None and parts.username is not None:
            credentials = unquote(parts.username), unquote(parts.password or "")
        address = f"[{host}]" if ":" in host else host
        address = address if port is None else f"{address}:{port}"
        urls.append(urlunsplit((parts.scheme, address, parts.path.rstrip("/"), "", "")))
    if not urls:
        raise ConfigError("schema.registry.url is not set")
    return urls, credentials


def _basic_auth(settings: Settings, of_url: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return user name and password, or None. Raises ConfigError."""
    source, info = settings["basic.auth.credentials.source"], settings["basic.auth.user.info"]
    if source is None and info is not None and of_url is not None:
        raise ConfigError(
            "basic.auth.user.info and schema.registry.url both have credentials; keep one of them"
        )
    if source == "URL" or (source is None and info is None):
        if source == "URL" and of_url is None:
            raise ConfigError("basic.auth.credentials.source=URL: schema.registry.url has no USER:PASSWORD@")
        return of_url
    if info is None or ":" not in info.value:
        raise ConfigError("basic.auth.user.info: expected USER:PASSWORD")
    user, _, password = info.value.partition(":")
    return user, password


def _headers(settings: Settings) -> dict[str, str]:
    headers = {
        "Accept": f"{CONTENT_TYPE}, application/json",
        "Accept-Encoding": "identity",
        "Content-Type": CONTENT_TYPE,
    }
    token = settings["bearer.auth.token"]
    has_basic = settings["basic.auth.user.info"] is not None or settings["basic.auth.credentials.source"]
    if token is not None and has_basic:
        raise ConfigError("bearer.auth.token and basic.auth.* exclude each other")
    if token is None and settings["bearer.auth.credentials.source"] is not None:
        raise ConfigError("bearer.auth.credentials.source=STATIC_TOKEN needs bearer.auth.token")
    if token is not None:
        if not token.value.isascii() or not token.value.isprintable():
            raise ConfigError("bearer.auth.token: expected printable ASCII")
        headers["Authorization"] = f"Bearer {token.value}"
    for key, name in (
        ("bearer.auth.logical.cluster", "target-sr-cluster"),
        ("bearer.auth.identity.pool.id", "Confluent-Identity-Pool-Id"),
    ):
        if settings[key] is not None:
            headers[name] = settings[key]
    return headers
