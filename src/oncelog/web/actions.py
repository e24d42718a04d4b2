"""The POST requests of the pages. They change the cluster, play a story of `oncelog explain`, or switch the
faults of a proxy on and off.

Each request needs the token that the pages contain. With --read-only, all requests are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, unquote_plus

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ConfigResource
from oncelog.errors import ConfigError, OncelogError
from oncelog.testing.proxy.rules import parse_rule
from oncelog.types import OffsetAndMetadata, TopicPartition
from oncelog.web.display import page_path
from oncelog.web.faults import FaultProxy
from oncelog.web.rendering import Renderer
from oncelog.web.stories import Stories

Action = Callable[[FormData], Response]
_FORM_TYPE = "application/x-www-form-urlencoded"
MAX_FORM_BYTES = 8_000_000
MAX_FORM_FIELDS = 200_000
"""Maximum number of fields in a form. It is high, because the form of an offset reset has a field for each
partition.
"""
_TOKEN_FIELD = re.compile(rb"(?:^|&)token=([^&]*)")
_MAX_OFFSET = (1 << 63) - 1


class _BadForm(Exception):
    """A form that is refused, with a text and an HTTP status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Actions:
    """The POST requests. Each action gets the form's fields, and returns a redirect to the next page."""

    def __init__(
        self, admin: Admin, renderer: Renderer, stories: Stories, fault_proxy: FaultProxy | None
    ) -> None:
        self._admin = admin
        self._renderer = renderer
        self._stories = stories
        self._fault_proxy = fault_proxy

    def post(self, action: Action) -> Any:
        """Return an endpoint that checks the form's token and calls `action` in a thread."""

        async def endpoint(request: Request) -> Response:
            if self._renderer.is_read_only:
                return self._renderer.refusal(
                    "these pages are read-only: start them without --read-only", 403
                )
            try:
                form = await self._read_form(request)
                return await run_in_threadpool(partial(action, form))
            except _BadForm as error:
                return self._renderer.refusal(error, error.status)
            except OncelogError as error:
                return self._renderer.refusal(error, 502)

        return endpoint

    async def _read_form(self, request: Request) -> FormData:
        """Return the fields of a form that has the pages' token. Raises _BadForm for any other form.

        Any page in the user's browser can send a form here. Starlette's `request.form` would write files to
        the disk, and keep up to 1 GB of fields in memory, before the token could be checked. It would also
        refuse the reset of a topic with 1,000 partitions. Guards: test_a_large_form_is_refused_unread,
        test_a_form_with_a_file_is_refused_before_it_is_read, test_a_topic_of_many_partitions_can_be_reset.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM_TYPE:
            raise _BadForm(f"the form must have the type {_FORM_TYPE}", 415)
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                raise _BadForm(f"the form has more than {MAX_FORM_BYTES} bytes", 413)
        found = _TOKEN_FIELD.search(body)
        if not self._renderer.has_token(unquote_plus(found[1].decode("latin-1")) if found else ""):
            raise _BadForm(
                "this form is from another site or an earlier start of these pages: open the page again", 403
            )
        try:
            fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
            return FormData([*fields])
        except ValueError:
            raise _BadForm(f"the form is not UTF-8, or has more than {MAX_FORM_FIELDS} fields") from None

    def abort(self, form: FormData) -> Response:
        """Abort an open transaction in one partition. transactions.html contains the form."""
        try:
            tp = TopicPartition(str(form["topic"]), int(str(form["partition"])))
            confirmed = [int(str(form[name])) for name in ("producer_id", "producer_epoch", "first_offset")]
        except (KeyError, ValueError):
            raise _BadForm(
                "the form needs topic, partition, producer_id, producer_epoch and first_offset"
            ) from None
        # Abort only if all values are still those that the page showed: the producer may have begun another
        # transaction since then.
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
        """Commit the offsets of the plan that reset.html showed. The form has a field for each partition.

        A field has the partition, the new offset and the committed offset that the page showed. If another
        offset was committed since then, change nothing: the group was in use.
        """
        try:
            group, topic = str(form["group"]), str(form["topic"])
            rows = [str(text).split(":") for text in form.getlist("offset")]
            offsets = {TopicPartition(topic, int(partition)): int(new) for partition, new, _ in rows}
            shown = {TopicPartition(topic, int(row[0])): int(row[2]) if row[2] else None for row in rows}
        except (KeyError, ValueError):
            raise _BadForm("the form needs group, topic and offset=PARTITION:NEW:COMMITTED") from None
        if not offsets or not all(0 <= offset <= _MAX_OFFSET for offset in offsets.values()):
            raise _BadForm("the form has no offsets, or invalid ones")
        held = self._admin.group_offsets(group)
        for tp, offset in shown.items():
            now = held[tp].offset if tp in held else None
            if now != offset:
                text = f"the plan is out of date: {tp} has the committed offset {now}, and had {offset}"
                raise _BadForm(f"{text}. Nothing was changed; make the plan again", 409)
        self._admin.alter_group_offsets(
            group, {tp: OffsetAndMetadata(offset) for tp, offset in offsets.items()}
        )
        return RedirectResponse(page_path("groups", group), 303)

    def play(self, form: FormData) -> Response:
        """Play a story on a separate broker in this process, not on the cluster."""
        name = str(form.get("name", ""))
        if name not in self._stories.catalogue:
            raise _BadForm(f"there is no story {name!r}", 404)
        self._stories.play(name)
        return RedirectResponse(f"/stories/{quote(name, safe='')}", 303)

    def change_faults(self, form: FormData) -> Response:
        """Add or remove a rule of the fault proxy, cut its connections, or release the messages that it
        holds.
        """
        if self._fault_proxy is None:
            raise _BadForm("these pages have no fault proxy: start them with --fault-proxy", 404)
        proxy, todo = self._fault_proxy.proxy, str(form.get("do", ""))
        try:
            if todo == "add":
                proxy.add(parse_rule(str(form.get("rule", ""))))
            elif todo == "remove":
                proxy.remove(int(str(form.get("number", ""))))
            elif todo in ("clear", "cut", "release"):
                getattr(proxy, todo)()
            else:
                raise _BadForm("the form needs do=add, remove, clear, cut or release")
        except ConfigError as error:
            raise _BadForm(str(error)) from None
        except ValueError:
            raise _BadForm("the form needs number, the number of a rule") from None
        return RedirectResponse("/faults", 303)
