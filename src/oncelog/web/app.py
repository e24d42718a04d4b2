"""The web pages as a Starlette application over an admin client (behaviour T14, docs/behaviours.md).

Each page shows the cluster's responses at the time of the request. The application stores nothing. Its only
action is the abort of a hanging transaction: a POST request with a token that only these pages contain.
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
    """Return the application.

    Requests are accepted only if their Host header is one of `hosts`. This prevents DNS rebinding: a page of
    another site cannot use the application through the user's browser. `servers`: the cluster's name on the
    pages.
    """
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
    """The pages. For most pages, a method returns the variables of the page's template."""

    def __init__(self, admin: Admin, servers: str) -> None:
        self._admin = admin
        self._servers = servers
        self._token = secrets.token_urlsafe(32)
        self._server_id = secrets.token_urlsafe(8)
        self._templates = Environment(loader=PackageLoader("oncelog.web"), autoescape=True)
        self._templates.filters["time"] = _time_text
        self._templates.filters["offset"] = lambda offset: "–" if offset is None else offset

    def show(self, query: Callable[[Request], dict[str, Any]], template: str) -> Any:
        """Return an endpoint that calls `query` in a thread and renders `template` with the result.

        If the query fails, the endpoint renders an error page.
        """

        async def endpoint(request: Request) -> Response:
            try:
                variables = await run_in_threadpool(partial(query, request))
            except OncelogError as error:
                status = 404 if isinstance(error, _NOT_THERE) else 502
                return self._render("error.html", {"error": error}, status)
            return self._render(template, {**variables, "here": request.url.path})

        return endpoint

    def _render(self, template: str, variables: dict[str, Any], status: int = 200) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        text = self._templates.get_template(template).render(
            **variables, nonce=nonce, token=self._token, server_id=self._server_id, servers=self._servers
        )
        headers = {name: value.replace("{nonce}", nonce) for name, value in _SECURITY.items()}
        return HTMLResponse(text, status, headers)

    def _refuse(self, error: object, status: int) -> HTMLResponse:
        """Return the error page for a rejected form.

        This page does not refresh itself: its address accepts only POST requests.
        """
        return self._render("error.html", {"error": error, "is_answer_to_form": True}, status)

    async def not_found(self, request: Request, _error: Exception) -> Response:
        """Return the response for an unknown address."""
        return self._render("error.html", {"error": f"page {request.url.path} does not exist"}, 404)

    def transactions(self, request: Request) -> dict[str, Any]:
        """Return all transactional ids, and the open transactions that hold back a last stable offset."""
        return {
            "listed": self._admin.list_transactions(),
            "held_back": self._admin.find_hanging(),
            "Hanging": Hanging,
        }

    def transaction(self, request: Request) -> dict[str, Any]:
        """Return the state of the transactional id in the address."""
        name = request.path_params["id"]
        return {"transaction": self._admin.describe_transactions([name])[name]}

    def topics(self, request: Request) -> dict[str, Any]:
        """Return all topics."""
        return {
            "topics": sorted(self._admin.list_topics(include_internal=True), key=lambda topic: topic.name)
        }

    def topic(self, request: Request) -> dict[str, Any]:
        """Return the offsets and producers of each partition of the topic in the address."""
        name = request.path_params["name"]
        described = self._admin.describe_topics([name])[name]
        tps = [TopicPartition(name, partition.partition) for partition in described.partitions]
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
        """Return all groups."""
        return {"groups": self._admin.list_groups()}

    def group(self, request: Request) -> dict[str, Any]:
        """Return the members of the group in the address, and its committed offsets with their lag."""
        name = request.path_params["id"]
        group = self._admin.describe_groups([name])[name]
        offsets = self._admin.group_offsets(name)
        rows = [
            (tp, offsets[tp].offset, ends)
            for tp, ends in partition_ends(self._admin, sorted(offsets)).items()
        ]
        return {"group": group, "offsets": rows}

    async def abort(self, request: Request) -> Response:
        """Abort a hanging transaction on one partition. The form's fields are in transactions.html."""
        form = await request.form()
        token = str(form.get("token", "")).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(token, self._token.encode()):
            return self._refuse(
                "this form is from another site or an earlier start of these pages: open the page again", 403
            )
        try:
            tp = TopicPartition(str(form["topic"]), int(str(form["partition"])))
            producer_id, producer_epoch, first_offset = (
                int(str(form[name])) for name in ("producer_id", "producer_epoch", "first_offset")
            )
        except (KeyError, ValueError):
            text = "the form needs topic, partition, producer_id, producer_epoch and first_offset"
            return self._refuse(text, 400)
        try:
            is_found = await run_in_threadpool(
                partial(self._abort, tp, producer_id, producer_epoch, first_offset)
            )
        except OncelogError as error:
            return self._refuse(error, 502)
        if not is_found:
            text = f"producer id {producer_id}, epoch {producer_epoch} has no open transaction in {tp}"
            return self._refuse(f"{text} from offset {first_offset} on, so nothing was aborted", 404)
        return RedirectResponse("/", 303)

    def _abort(self, tp: TopicPartition, producer_id: int, producer_epoch: int, first_offset: int) -> bool:
        # Compare all fields that the page showed. The producer may have begun another transaction since then.
        confirmed = (tp, producer_id, producer_epoch, first_offset)
        for opened in self._admin.open_transactions([tp.topic]):
            if (opened.tp, opened.producer_id, opened.producer_epoch, opened.first_offset) == confirmed:
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
