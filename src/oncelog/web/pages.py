"""The pages. Most methods return the variables of a template, from the cluster's responses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.offset_reset import WAYS, plan_reset
from oncelog.client.admin.types import ConfigResource
from oncelog.client.consumer.partition_ends import PartitionEnds, partition_ends
from oncelog.config import TOPIC
from oncelog.errors import (
    GroupIdNotFound,
    MisuseError,
    OncelogError,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
)
from oncelog.rules.transactions.hanging import Hanging
from oncelog.runtime import system
from oncelog.types import TopicPartition
from oncelog.web.decoding import MessageDecoder
from oncelog.web.fates import remembered
from oncelog.web.faults import PRESETS, FaultProxy, count_decisions, draw_newest
from oncelog.web.history import Sample
from oncelog.web.reading import MAX_BYTES, MAX_DECODED_BYTES, Found, LogReader, Message, Search
from oncelog.web.rendering import Renderer
from oncelog.web.sampler import Sampler
from oncelog.web.sinks import SinkState, sink_groups, sink_state, some_parts
from oncelog.web.stories import Stories
from oncelog.web.timeline import newest_init, past_transactions

Item = TypeVar("Item")
_NOT_THERE = (TransactionalIdNotFound, GroupIdNotFound, UnknownTopicOrPartition)
MAX_MESSAGES = 500
MAX_SHOWN_HEADERS, MAX_HEADER_BYTES = 20, 512
"""The maximum number of headers of a message that a page shows, and of bytes of each of them."""
MAX_SEARCHED_PARTITIONS = 32
"""The maximum number of partitions that one page of messages reads."""
MAX_SHOWN_PARTITIONS = 100
"""The maximum number of partitions on the page of a topic. The page links to the next ones."""
SHOWN_TRANSACTIONS = 20
MAX_SINKS = 20
MAX_SINK_TASKS = 200
"""The maximum number of a sink's tasks that a page looks up, each with a request."""
MAX_ROWS = 1_000
"""The maximum number of topics, groups or transactional ids in a table. Users search for others by name."""
_DURATION = re.compile(r"(\d{1,12})\s*(ms|s|min|m|h|d)$")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


class Pages:
    """The data of all pages about one cluster. Each public method except `show` returns the variables for one
    page's template.
    """

    def __init__(
        self,
        admin: Admin,
        reader: LogReader,
        sampler: Sampler,
        renderer: Renderer,
        fault_proxy: FaultProxy | None = None,
        decoder: MessageDecoder | None = None,
    ) -> None:
        self.stories = Stories()
        self._decoder = decoder or MessageDecoder()
        self._fault_proxy = fault_proxy
        self._admin = admin
        self._reader = reader
        self._sampler = sampler
        self._renderer = renderer

    def show(
        self, query: Callable[[Request], dict[str, Any]], template: str, *, is_static: bool = False
    ) -> Any:
        """Return an endpoint that calls `query` in a thread and renders `template` with the result.

        If the query fails, the endpoint renders an error page. A static page does not refresh itself.
        """

        async def endpoint(request: Request) -> Response:
            self._sampler.touch()
            try:
                variables = await run_in_threadpool(partial(query, request))
            except MisuseError as error:
                return self._renderer.page("error.html", {"error": error}, 400)
            except OncelogError as error:
                status = 404 if isinstance(error, _NOT_THERE) else 502
                return self._renderer.page("error.html", {"error": error}, status)
            variables |= {"here": request.url.path, "is_static": is_static}
            return self._renderer.page(template, variables)

        return endpoint

    # Overview

    def overview(self, request: Request) -> dict[str, Any]:
        """Return the cluster's brokers, and rates and trends of the last minutes."""
        cluster = self._admin.describe_cluster()
        sample = self._sampler.history.latest or self._sampler.take()
        history = self._sampler.history
        topics = sorted({tp.topic for tp in sample.ends})
        busiest = sorted(topics, key=lambda name: history.rate(_end_of(name)) or 0.0, reverse=True)[:10]
        return {
            "cluster": cluster,
            "sample": sample,
            "topic_count": len(topics),
            "is_partial": self._sampler.is_partial,
            "records_rate": history.rate(lambda past: past.total_end),
            "records_line": history.rates(lambda past: past.total_end),
            "bytes_rate": history.rate(lambda past: sum(past.topic_bytes.values())),
            "bytes_line": history.rates(lambda past: sum(past.topic_bytes.values())),
            "open_line": history.values(lambda past: past.open_count),
            "held_line": history.values(lambda past: len(past.held_back)),
            "busiest": [
                (name, history.rate(_end_of(name)), history.rates(_end_of(name))) for name in busiest
            ],
            "held_back": sorted(sample.held_back.items()),
        }

    # Topics

    def topics(self, request: Request) -> dict[str, Any]:
        """Return all topics, with their offset counts, sizes and rates from the samples."""
        listed = sorted(self._admin.list_topics(include_internal=True), key=lambda topic: topic.name)
        topics, shown = _named(request, listed, lambda topic: topic.name)
        sample, history = self._sampler.history.latest, self._sampler.history
        rows = [
            {
                "topic": topic,
                "offsets": sample.topic_offsets.get(topic.name) if sample else None,
                "bytes": sample.topic_bytes.get(topic.name) if sample else None,
                "rate": history.rate(_end_of(topic.name)),
            }
            for topic in topics
        ]
        return {"rows": rows, **shown}

    def topic(self, request: Request) -> dict[str, Any]:
        """Return the settings of the topic in the URL, and its partitions' offsets and producers."""
        name = request.path_params["name"]
        every, first = self._partitions(name), _whole(request.query_params.get("from") or "0", "from")
        tps = [tp for tp in every if tp.partition >= first][:MAX_SHOWN_PARTITIONS]
        ends = partition_ends(self._admin, tps)
        producers = self._admin.describe_producers(tps, raise_errors=False)
        # The partitions share the limit. Guard: test_a_page_of_a_topic_reads_a_part_of_its_partitions.
        tail_bytes = MAX_BYTES // max(len(tps), 1)
        rows = [
            {
                "partition": tp.partition,
                "tp": tp,
                "ends": ends[tp],
                "producers": sorted(producers[tp].producers, key=lambda producer: producer.producer_id),
                "remembered": self._remembered(tp, ends[tp], tail_bytes) if producers[tp].producers else {},
            }
            for tp in tps
        ]
        described = self._admin.describe_configs([ConfigResource("topic", name)])
        entries = next(iter(described.values())).entries.values()
        settings = [
            (entry, setting.doc if (setting := TOPIC.get(entry.name)) else "")
            for entry in sorted(entries, key=lambda entry: (entry.source != "topic", entry.name))
        ]
        history = self._sampler.history
        return {
            "name": name,
            "partitions": rows,
            "partition_count": len(every),
            "next": tps[-1].partition + 1 if tps and tps[-1] != every[-1] else None,
            "settings": settings,
            "rate": history.rate(_end_of(name)),
            "line": history.rates(_end_of(name)),
        }

    def _partitions(self, topic: str) -> list[TopicPartition]:
        described = self._admin.describe_topics([topic])[topic]
        return [TopicPartition(topic, partition.partition) for partition in described.partitions]

    def _remembered(self, tp: TopicPartition, ends: PartitionEnds, max_bytes: int) -> dict[int, Any]:
        try:
            return remembered(self._reader.tail(tp, ends, max_bytes))
        except OncelogError:
            return {}  # the client may describe producers, but not read the topic

    # Messages

    def messages(self, request: Request) -> dict[str, Any]:
        """Return those messages of the topic in the URL that the URL's query selects.

        The query has `partition` (a number, or empty for all), `from` (last, offset, each, since or time)
        with its `at`, `limit`, and the filters `key`, `value` and `header`. With `go`, the page continues by
        itself until a record matches.
        """
        query = {name: str(value).strip() for name, value in request.query_params.items()}
        topic, tps = request.path_params["name"], self._partitions(request.path_params["name"])
        chosen = tps
        if query.get("partition"):
            number = _whole(query["partition"], "partition")
            chosen = [tp for tp in tps if tp.partition == number]
            if not chosen:
                raise UnknownTopicOrPartition(f"{topic} has no partition {number}")
        limit = min(max(_whole(query.get("limit") or "50", "limit"), 1), MAX_MESSAGES)
        filters = {name: query.get(name, "").encode() for name in ("key", "value", "header")}
        ends = partition_ends(self._admin, chosen[:MAX_SEARCHED_PARTITIONS])
        search = Search(limit, MAX_DECODED_BYTES // max(len(ends), 1), **filters)
        way = query.get("from") or "last"
        if way == "last":
            found = {tp: self._reader.search_newest(tp, ends[tp], search) for tp in ends}
        else:
            starts = self._starts(ends, way, query.get("at", ""))
            found = {tp: self._reader.search(tp, ends[tp], starts[tp], search) for tp in ends}
        messages = _merged(found, limit, is_newest=way == "last")
        # With a filter, few of the searched offsets are shown: go back by as many as were searched.
        earlier = {
            tp: max(part.start - (part.next_offset - part.start if any(filters.values()) else limit), 0)
            for tp, part in found.items()
        }
        kept = {name: query[name] for name in filters if query.get(name)}

        def page_link(tp: TopicPartition, offset: int) -> str:
            return _link(tp.partition, limit, kept, "offset", offset)

        shown, registry_error = self._decoder.shown(messages)
        return {
            "name": topic,
            "query": query,
            "limit": limit,
            "partitions": tps,
            "is_cut": len(chosen) > MAX_SEARCHED_PARTITIONS,
            "messages": messages,
            "shown": shown,
            "registry_error": registry_error,
            "found": found,
            "filters": kept,
            "earlier": earlier,
            "page_link": page_link,
            "whole": _link(query.get("partition", ""), limit, kept, "each", "", go=1),
            "continued": _continued(query, limit, kept, found, ends, messages) if way == "each" else None,
            "ends": ends,
            "max_headers": MAX_SHOWN_HEADERS,
            "max_header_bytes": MAX_HEADER_BYTES,
        }

    def _starts(
        self, ends: dict[TopicPartition, PartitionEnds], way: str, at: str
    ) -> dict[TopicPartition, int]:
        """Return the offset in each partition at which the search begins."""
        if way == "offset":
            return dict.fromkeys(ends, _whole(at or "0", "offset"))
        if way == "each":
            return dict.fromkeys(ends, 0) | _positions(next(iter(ends)).topic if ends else "", at)
        moment_ms = _moment_ms(way, at)
        listed = self._admin.list_offsets(dict.fromkeys(ends, moment_ms), raise_errors=False)
        return {
            tp: (known.end or 0) if (offset := listed[tp].offset) is None else offset
            for tp, known in ends.items()
        }

    # Transactions

    def transactions(self, request: Request) -> dict[str, Any]:
        """Return all transactional ids, and the open transactions that hold back a last stable offset."""
        listed, shown = _named(
            request, self._admin.list_transactions(), lambda listing: listing.transactional_id
        )
        return {
            "listed": listed,
            **shown,
            "held_back": self._admin.find_hanging(),
            "Hanging": Hanging,
        }

    def transaction(self, request: Request) -> dict[str, Any]:
        """Return the state of the transactional id in the URL, and its past transactions."""
        name = request.query_params.get("id", request.path_params["id"])
        described = self._admin.describe_transactions([name])[name]
        past, init, unreadable = [], None, None
        try:
            entries = self._reader.transaction_log(name)
            past, init = past_transactions(entries), newest_init(entries)
        except OncelogError as error:
            unreadable = error
        return {
            "transaction": described,
            "past": past[-SHOWN_TRANSACTIONS:],
            "init": init,
            "unreadable": unreadable,
            "now_ms": system.current().wall_ns() // 1_000_000,
        }

    # Groups

    def groups(self, request: Request) -> dict[str, Any]:
        """Return all groups, with their total lag and its trend."""
        history = self._sampler.history
        groups, shown = _named(request, self._admin.list_groups(), lambda group: group.group_id)
        rows = [
            (group, history.values(lambda past, name=group.group_id: past.group_lags.get(name)))  # type: ignore[misc]
            for group in groups
        ]
        return {"rows": rows, **shown}

    def group(self, request: Request) -> dict[str, Any]:
        """Return the members of the group in the URL, and its committed offsets with their lag."""
        name = request.query_params.get("id", request.path_params["id"])
        group = self._admin.describe_groups([name])[name]
        offsets = self._admin.group_offsets(name)
        ends = partition_ends(self._admin, sorted(offsets))
        rows = [(tp, offsets[tp].offset, known) for tp, known in ends.items()]
        lags = [known.end - offset for _, offset, known in rows if known.end is not None]
        return {
            "group": group,
            "offsets": rows,
            "total_lag": sum(max(lag, 0) for lag in lags) if lags else None,
            "topics": sorted({tp.topic for tp in offsets}),
            "ways": WAYS,
        }

    def reset(self, request: Request) -> dict[str, Any]:
        """Return the plan of a reset: `group`, `topic`, `way` and `value` are in the query."""
        query = request.query_params
        group, topic, way = query.get("group", ""), query.get("topic", ""), query.get("way", "to_earliest")
        state = self._admin.describe_groups([group])[group].state
        planned = plan_reset(self._admin, group, self._partitions(topic), way, query.get("value", ""))
        return {"group": group, "topic": topic, "way": way, "planned": planned, "state": state}

    # Sinks and stories

    def sinks(self, request: Request) -> dict[str, Any]:
        """Return the Spark sinks that keep their state on the cluster."""
        found = sink_groups(group.group_id for group in self._admin.list_groups())
        states: list[SinkState | None] = []
        task_counts: dict[str, int] = {}
        for sink, parts in sorted(found.items())[:MAX_SINKS]:
            looked_up = some_parts(parts, MAX_SINK_TASKS)
            offsets = {part: self._admin.group_offsets(group_id) for part, group_id in looked_up.items()}
            states.append(sink_state(sink, offsets))
            task_counts[states[-1].name if states[-1] else sink] = len(parts) - len(looked_up)
        return {
            "sinks": [state for state in states if state is not None],
            "count": len(found),
            "more_tasks": task_counts,
        }

    def story_list(self, request: Request) -> dict[str, Any]:
        """Return all stories of the catalogue."""
        return {"stories": self.stories.catalogue.values()}

    def story(self, request: Request) -> dict[str, Any]:
        """Return the story in the URL, with its last run."""
        name = request.path_params["name"]
        story = self.stories.catalogue.get(name)
        if story is None:
            raise UnknownTopicOrPartition(f"there is no story {name!r}")
        return {"story": story, "played": self.stories.played(name)}

    def faults(self, request: Request) -> dict[str, Any]:
        """Return the fault proxy's address, its rules, and the newest messages of producers."""
        if self._fault_proxy is None:
            return {"proxy": None}
        steps = self._fault_proxy.steps()
        return {
            "proxy": self._fault_proxy.proxy.bootstrap_servers,
            "presets": PRESETS,
            "rules": self._fault_proxy.proxy.rules,
            "counts": {tone.value: count for tone, count in count_decisions(steps).items()},
            "drawing": draw_newest(steps) if steps else None,
        }


def _end_of(topic: str) -> Callable[[Sample], float]:
    return lambda sample: sample.topic_end(topic)


def _named(
    request: Request, items: Sequence[Item], name_of: Callable[[Item], str]
) -> tuple[Sequence[Item], dict[str, Any]]:
    """Return the items whose names contain the query's `name`, and the variables of rows.html.

    At most MAX_ROWS are returned: a cluster may have 100,000 transactional ids or groups, and a page is sent
    every two seconds. Guard: test_a_long_table_is_cut_and_searched_by_name.
    """
    part = request.query_params.get("name", "")
    matching = [item for item in items if part in name_of(item)]
    return matching[:MAX_ROWS], {"name_part": part, "row_count": len(matching)}


def _merged(found: dict[TopicPartition, Found], limit: int, *, is_newest: bool) -> list[Message]:
    """Return at most `limit` messages of all partitions: newest first if `is_newest`, else oldest first."""
    order: Collection[Message] = [message for part in found.values() for message in part.messages]
    messages = sorted(order, key=lambda message: (message.timestamp_ms, message.tp, message.offset))
    return messages[-limit:][::-1] if is_newest else messages[:limit]


def _link(
    partition: object, limit: int, filters: Mapping[str, str], way: str, at: object, **more: int
) -> str:
    return "?" + urlencode({"partition": partition, "from": way, "at": at, "limit": limit, **filters, **more})


@dataclass(frozen=True, slots=True)
class Continued:
    """A search through whole partitions, of which one page is a bounded part.

    `link` is the next part; None at the end. `stop_link` is this part, without a next one by itself.
    `is_running` is True if the page gets the next part by itself. `searched` is the part of all offsets that
    has been searched, in percent.
    """

    link: str | None
    stop_link: str
    is_running: bool
    searched: int


def _continued(
    query: Mapping[str, str],
    limit: int,
    filters: Mapping[str, str],
    found: Mapping[TopicPartition, Found],
    ends: Mapping[TopicPartition, PartitionEnds],
    messages: Sequence[Message],
) -> Continued:
    shown = {(message.tp, message.offset) for message in messages}
    following, is_ended, searched, total = {}, True, 0, 0
    for tp, part in found.items():
        # The limit holds for all partitions together, so some matches of a partition may not be shown.
        left_out = [message.offset for message in part.messages if (tp, message.offset) not in shown]
        following[tp] = min([part.next_offset, *left_out])
        start, end = ends[tp].start or 0, ends[tp].end or 0
        searched, total = searched + max(following[tp] - start, 0), total + end - start
        # Compaction may have removed the last offsets: then the search gets no further, and has ended.
        is_ended = is_ended and (following[tp] >= end or (part.next_offset == part.start and not left_out))
    positions = ",".join(f"{tp.partition}:{offset}" for tp, offset in following.items())
    partition = query.get("partition", "")
    return Continued(
        None if is_ended else _link(partition, limit, filters, "each", positions, go=1),
        _link(partition, limit, filters, "each", query.get("at", "")),
        bool(query.get("go")) and not messages and not is_ended,
        100 if is_ended else 100 * searched // max(total, 1),
    )


def _positions(topic: str, text: str) -> dict[TopicPartition, int]:
    """Return the offsets of `PARTITION:OFFSET,...`."""
    pairs = [part.partition(":") for part in text.split(",") if part]
    return {
        TopicPartition(topic, _whole(partition, "partition")): _whole(offset, "offset")
        for partition, _, offset in pairs
    }


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise MisuseError(f"{name}={text!r} must be a whole number") from None


def _moment_ms(way: str, at: str) -> int:
    """Return the start time of a search in ms, from a duration before now ("1 h") or an ISO 8601 time."""
    from datetime import datetime

    if way == "since":
        match = _DURATION.fullmatch(at)
        if match is None:
            raise MisuseError(f"{at!r} is not a duration such as 30 s, 5 min, 1 h or 2 d")
        now_ms = system.current().wall_ns() // 1_000_000
        return max(now_ms - int(match[1]) * _UNIT_MS[match[2]], 0)
    if way != "time":
        raise MisuseError(f"from={way!r} must be last, offset, since or time")
    try:
        return max(int(datetime.fromisoformat(at).timestamp() * 1000), 0)
    except (ValueError, OverflowError, OSError):
        raise MisuseError(f"{at!r} is not a time such as 2026-11-28T12:00:00+00:00") from None
