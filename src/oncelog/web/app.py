"""The web pages as a Starlette application over an admin client (behaviour T14, docs/behaviours.md).

Each page shows the cluster's responses at the time of the request. The application stores only samples of the
last minutes, the last run of each story of `oncelog explain`, and the newest messages that passed the fault
proxy. `pages` has the data of the pages. `actions` handles the POST requests, which need a token that only
these pages contain.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from oncelog.client.admin.blocking import Admin
from oncelog.client.consumer.blocking import Consumer
from oncelog.web.actions import Actions
from oncelog.web.decoding import MessageDecoder
from oncelog.web.faults import FaultProxy
from oncelog.web.pages import Pages
from oncelog.web.reading import LogReader
from oncelog.web.rendering import Renderer
from oncelog.web.sampler import Sampler


def make_app(
    admin: Admin,
    *,
    hosts: Sequence[str],
    servers: str,
    make_consumer: Callable[[], Consumer] | None = None,
    fault_proxy: FaultProxy | None = None,
    deserializer: Any | None = None,
    is_read_only: bool = False,
    closes_admin: bool = False,
) -> Starlette:
    """Return the application.

    Requests are accepted only if their Host header is one of `hosts`. This prevents DNS rebinding: a page of
    another site cannot use the application through the user's browser. `servers` is the cluster's name on the
    pages. `make_consumer` returns a consumer without a group, for reading messages. If it is None, a consumer
    with the bootstrap servers `servers` is used. `fault_proxy` is a started proxy, whose page switches faults
    on and off. `deserializer` is an AnyDeserializer, for keys and values of messages. With `is_read_only`,
    the pages change nothing. With `closes_admin`, the application closes `admin` when it ends, so that calls
    which wait for a silent broker end too. `state.close_clients()` of the application closes it earlier.
    """
    reader = LogReader(admin, make_consumer or (lambda: Consumer({"bootstrap.servers": servers})))
    sampler = Sampler(admin)
    renderer = Renderer(servers, is_read_only=is_read_only)
    pages = Pages(admin, reader, sampler, renderer, fault_proxy, MessageDecoder(deserializer))
    actions = Actions(admin, renderer, pages.stories, fault_proxy)

    def close_clients() -> None:
        sampler.stop()
        if closes_admin:
            admin.close()
        reader.close()

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        # Pages may still wait for a broker that does not answer, and occupy every thread of the pool, so this
        # thread closes the clients. Guard: test_ctrl_c_ends_pages_that_wait_for_a_silent_broker.
        close_clients()
        sampler.close()

    app = Starlette(
        routes=_routes(pages, actions),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={404: renderer.not_found},
        lifespan=lifespan,
    )
    app.state.close_clients = close_clients
    return app


def _routes(pages: Pages, actions: Actions) -> list[Route]:
    return [
        Route("/", pages.show(pages.overview, "overview.html")),
        Route("/topics", pages.show(pages.topics, "topics.html")),
        Route("/topics/{name}", pages.show(pages.topic, "topic.html")),
        Route("/topics/{name}/messages", pages.show(pages.messages, "messages.html")),
        Route("/transactions", pages.show(pages.transactions, "transactions.html")),
        Route("/transactions/{id:path}", pages.show(pages.transaction, "transaction.html")),
        Route("/groups", pages.show(pages.groups, "groups.html")),
        Route("/groups/{id:path}", pages.show(pages.group, "group.html")),
        Route("/reset", pages.show(pages.reset, "reset.html", is_static=True)),
        Route("/sinks", pages.show(pages.sinks, "sinks.html")),
        Route("/stories", pages.show(pages.story_list, "stories.html", is_static=True)),
        Route("/stories/{name}", pages.show(pages.story, "story.html", is_static=True)),
        Route("/faults", pages.show(pages.faults, "faults.html")),
        Route("/abort", actions.post(actions.abort), methods=["POST"]),
        Route("/settings", actions.post(actions.alter_setting), methods=["POST"]),
        Route("/reset", actions.post(actions.reset_offsets), methods=["POST"]),
        Route("/play", actions.post(actions.play), methods=["POST"]),
        Route("/faults", actions.post(actions.change_faults), methods=["POST"]),
    ]
