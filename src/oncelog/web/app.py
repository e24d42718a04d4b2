"""The pages as a Starlette application over an admin client (row T14).

Every page is made from what the cluster answers at that moment; the application keeps nothing. Its one
action, the abort of a hanging transaction, is a POST with a token that only the pages know.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from jinja2 import Environment, PackageLoader
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from oncelog.client.admin.blocking import Admin
from oncelog.client.consumer.partition_ends import partition_ends
from oncelog.errors import (
    GroupIdNotFound,
    OncelogError,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
)
from oncelog.rules.transactions.hanging import Hanging
from oncelog.types import TopicPartition

_NOT_THERE = (TransactionalIdNotFound, GroupIdNotFound, UnknownTopicOrPartition)
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def make_app(admin: Admin, *, hosts: Sequence[str], servers: str) -> Starlette:
    """The application. `hosts`: names it may be asked by, so that no foreign page can pose as it."""
    pages = _Pages(admin, servers)
    routes = [
        Route("/", pages.show(pages.transactions, "transactions.html")),
        Route("/transactions/{id:path}", pages.show(pages.transaction, "transaction.html")),
        Route("/topics", pages.show(pages.topics, "topics.html")),
        Route("/topics/{name}", pages.show(pages.topic, "topic.html")),
        Route("/groups", pages.show(pages.groups, "groups.html")),
        Route("/groups/{id:path}", pages.show(pages.group, "group.html")),
        Route("/abort", pages.abort, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={404: pages.not_found},
    )


class _Pages:
    """What each page shows: a function of the path to what its template is given."""

    def __init__(self, admin: Admin, servers: str) -> None:
        self._admin = admin
        self._servers = servers
        self._token = secrets.token_urlsafe(32)
        self._server_id = secrets.token_urlsafe(8)
        self._templates = Environment(loader=PackageLoader("oncelog.web"), autoescape=True)
        self._templates.filters["time"] = _time_text
        self._templates.filters["offset"] = lambda offset: "–" if offset is None else offset

    def show(self, gather: Callable[[Request], dict[str, Any]], template: str) -> Any:
        """An endpoint: asks the cluster in a thread, and says what is wrong when that fails."""

        async def endpoint(request: Request) -> Response:
            try:
                found = await run_in_threadpool(partial(gather, request))
            except OncelogError as error:
                status = 404 if isinstance(error, _NOT_THERE) else 502
                return self._render("error.html", {"error": error}, status)
            return self._render(template, {**found, "here": request.url.path})

        return endpoint

    def _render(self, template: str, given: dict[str, Any], status: int = 200) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        text = self._templates.get_template(template).render(
            **given, nonce=nonce, token=self._token, server_id=self._server_id, servers=self._servers
        )
        headers = {name: value.replace("{nonce}", nonce) for name, value in _SECURITY.items()}
        return HTMLResponse(text, status, headers)

    def _refuse(self, error: object, status: int) -> HTMLResponse:
        """Answer a form: a page that does not ask for itself again, since its address takes only forms."""
        return self._render("error.html", {"error": error, "is_answer_to_form": True}, status)

    async def not_found(self, request: Request, _error: Exception) -> Response:
        """Answer an address that no page has."""
        return self._render("error.html", {"error": f"there is no page {request.url.path}"}, 404)

    def transactions(self, request: Request) -> dict[str, Any]:
        """Every transactional id, and who holds back which partition."""
        return {
            "listed": self._admin.list_transactions(),
            "held_back": self._admin.find_hanging(),
            "Hanging": Hanging,
        }

    def transaction(self, request: Request) -> dict[str, Any]:
        """One transactional id."""
        name = request.path_params["id"]
        return {"told": self._admin.describe_transactions([name])[name]}

    def topics(self, request: Request) -> dict[str, Any]:
        """All topics."""
        return {"topics": sorted(self._admin.list_topics(include_internal=True), key=lambda each: each.name)}

    def topic(self, request: Request) -> dict[str, Any]:
        """Offsets and producers of each partition."""
        name = request.path_params["name"]
        described = self._admin.describe_topics([name])[name]
        tps = [TopicPartition(name, part.partition) for part in described.partitions]
        ends = partition_ends(self._admin, tps)
        producers = self._admin.describe_producers(tps)
        rows = [
            {
                "partition": tp.partition,
                "ends": ends[tp],
                "producers": sorted(producers[tp].producers, key=lambda producer: producer.producer_id),
            }
            for tp in tps
        ]
        return {"name": name, "partitions": rows}

    def groups(self, request: Request) -> dict[str, Any]:
        """All groups."""
        return {"groups": self._admin.list_groups()}

    def group(self, request: Request) -> dict[str, Any]:
        """Members, and offsets with their lag."""
        name = request.path_params["id"]
        told = self._admin.describe_groups([name])[name]
        offsets = self._admin.group_offsets(name)
        rows = [
            (tp, offsets[tp].offset, ends)
            for tp, ends in partition_ends(self._admin, sorted(offsets)).items()
        ]
        return {"told": told, "offsets": rows}

    async def abort(self, request: Request) -> Response:
        """Abort a hanging transaction on one partition: the fields of the form in transactions.html."""
        form = await request.form()
        shown = str(form.get("token", "")).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, self._token.encode()):
            return self._refuse("this form is not of this page: open it again", 403)
        try:
            tp = TopicPartition(str(form["topic"]), int(str(form["partition"])))
            producer_id, producer_epoch, first_offset = (
                int(str(form[name])) for name in ("producer_id", "producer_epoch", "first_offset")
            )
        except (KeyError, ValueError):
            text = "topic, partition, producer_id, producer_epoch and first_offset are needed"
            return self._refuse(text, 400)
        try:
            is_found = await run_in_threadpool(
                partial(self._abort, tp, producer_id, producer_epoch, first_offset)
            )
        except OncelogError as error:
            return self._refuse(error, 502)
        if not is_found:
            text = f"producer id {producer_id}, epoch {producer_epoch} has no transaction open at {tp}"
            return self._refuse(f"{text} from offset {first_offset} on: nothing was aborted", 404)
        return RedirectResponse("/", 303)

    def _abort(self, tp: TopicPartition, producer_id: int, producer_epoch: int, first_offset: int) -> bool:
        # All of what the page showed: the producer may have begun another transaction since.
        agreed = (tp, producer_id, producer_epoch, first_offset)
        for opened in self._admin.open_transactions([tp.topic]):
            if (opened.tp, opened.producer_id, opened.producer_epoch, opened.first_offset) == agreed:
                self._admin.abort_transaction(opened)
                return True
        return False


def _time_text(timestamp_ms: int | None) -> str:
    if timestamp_ms is None or timestamp_ms < 0:
        return "–"
    try:
        return (
            datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(" ", "seconds").replace("+00:00", "Z")
        )
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
