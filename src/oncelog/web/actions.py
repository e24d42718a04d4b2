"""The four POST requests of the pages. Three of them change the cluster, and one plays a story.

Each request needs the token of these pages. With --read-only, all of them are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ConfigResource
from oncelog.errors import OncelogError
from oncelog.types import OffsetAndMetadata, TopicPartition
from oncelog.web.rendering import Renderer
from oncelog.web.stories import Stories

Action = Callable[[FormData], Response]
_FORM_TYPE = "application/x-www-form-urlencoded"


class _BadForm(Exception):
    """A form that is refused, with a text and an HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Actions:
    """The POST requests. Each action gets the form's fields, and returns a redirect to the next page."""

    def __init__(self, admin: Admin, renderer: Renderer, stories: Stories) -> None:
        self._admin = admin
        self._renderer = renderer
        self._stories = stories

    def post(self, action: Action) -> Any:
        """Return an endpoint that checks the form's token and calls `action` in a thread."""

        async def endpoint(request: Request) -> Response:
            if self._renderer.is_read_only:
                return self._renderer.refusal(
                    "these pages are read-only: start them without --read-only", 403
                )
            # Any page in the user's browser can send a form here. Starlette bounds the fields of a form in
            # this encoding, but writes the files of multipart/form-data to the disk, before the token can be
            # checked. Guard: test_a_form_with_a_file_is_refused_before_it_is_read.
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
                return self._renderer.refusal(f"the form must have the type {_FORM_TYPE}", 415)
            form = await request.form()
            if not self._renderer.has_token(form.get("token", "")):
                text = (
                    "this form is from another site or an earlier start of these pages: open the page again"
                )
                return self._renderer.refusal(text, 403)
            try:
                return await run_in_threadpool(partial(action, form))
            except _BadForm as error:
                return self._renderer.refusal(error, error.status)
            except OncelogError as error:
                return self._renderer.refusal(error, 502)

        return endpoint

    def abort(self, form: FormData) -> Response:
        """Abort an open transaction in one partition. transactions.html contains the form."""
        try:
            tp = TopicPartition(str(form["topic"]), int(str(form["partition"])))
            confirmed = [int(str(form[name])) for name in ("producer_id", "producer_epoch", "first_offset")]
        except (KeyError, ValueError):
            raise _BadForm(
                "the form needs topic, partition, producer_id, producer_epoch and first_offset"
            ) from None
        # Compare all fields that the page showed. The producer may have begun another transaction since then.
        for opened in self._admin.open_transactions([tp.topic]):
            shown = [opened.producer_id, opened.producer_epoch, opened.first_offset]
            if opened.tp == tp and shown == confirmed:
                self._admin.abort_transaction(opened)
                return RedirectResponse("/transactions", 303)
        text = f"producer id {confirmed[0]}, epoch {confirmed[1]} has no open transaction in {tp}"
        raise _BadForm(f"{text} from offset {confirmed[2]} on, so nothing was aborted", 404)

    def alter_setting(self, form: FormData) -> Response:
        """Change a topic's setting. An empty value removes it, so that the default applies."""
        try:
            topic, name = str(form["topic"]), str(form["name"])
        except KeyError:
            raise _BadForm("the form needs topic, name and value") from None
        value = str(form.get("value", "")).strip()
        self._admin.alter_configs({ConfigResource("topic", topic): {name: value or None}})
        return RedirectResponse(f"/topics/{quote(topic, safe='')}#settings", 303)

    def reset_offsets(self, form: FormData) -> Response:
        """Commit the offsets of a plan that reset.html showed. The form has them one by one."""
        try:
            group, topic = str(form["group"]), str(form["topic"])
            offsets = {
                TopicPartition(topic, int(partition)): OffsetAndMetadata(int(offset))
                for partition, offset in (str(text).split(":") for text in form.getlist("offset"))
            }
        except (KeyError, ValueError):
            raise _BadForm("the form needs group, topic and offset=PARTITION:OFFSET") from None
        if not offsets:
            raise _BadForm("the form has no offsets")
        self._admin.alter_group_offsets(group, offsets)
        return RedirectResponse(f"/groups/{quote(group, safe='')}", 303)

    def play(self, form: FormData) -> Response:
        """Play a story on a separate broker in this process, not on the cluster."""
        name = str(form.get("name", ""))
        if name not in self._stories.catalogue:
            raise _BadForm(f"there is no story {name!r}", 404)
        self._stories.play(name)
        return RedirectResponse(f"/stories/{quote(name, safe='')}", 303)
