"""The console's pages of messages, settings, resets, sinks and stories, and what read-only pages refuse."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from html import unescape

import pytest
from starlette.testclient import TestClient
from support.client import append, batch_of
from support.topics import new_topic, producer_of

from oncelog import Admin, NewTopic, OffsetAndMetadata, TopicPartition
from oncelog.client.admin.types import ConfigResource
from oncelog.web.app import make_app
from oncelog.wire.header import HEADER_BYTES, write_crc

_numbers = itertools.count()


@pytest.fixture
def admin(servers: str) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": servers}) as admin:
        yield admin


@pytest.fixture
def pages(servers: str, admin: Admin) -> Iterator[TestClient]:
    with TestClient(make_app(admin, hosts=["testserver"], servers=servers), follow_redirects=False) as client:
        yield client


def text(pages: TestClient, path: str) -> str:
    answer = pages.get(path)
    assert answer.status_code == 200, answer.text
    main = re.search(r"<main[^>]*>(.*)</main>", answer.text, re.DOTALL)
    assert main is not None
    return " ".join(re.sub(r"<[^>]*>", " ", main[1]).replace("&#39;", "'").replace("&#34;", '"').split())


def token_of(pages: TestClient, path: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', pages.get(path).text)
    assert found is not None
    return found[1]


@pytest.mark.behaviour("T14")
def test_each_message_shows_its_fate_producer_and_sequence(pages: TestClient, servers: str) -> None:
    topic, name = new_topic(servers), f"console-{os.getpid()}-{next(_numbers)}"
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b'{"amount": 42}', b"paid", headers=[("trace", b"7")]).result(60)
        producer.begin_transaction()
        producer.send(topic, b"taken back").result(60)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, b"undecided").result(60)
        shown = text(pages, f"/topics/{topic}/messages")
        producer.abort_transaction()
    producer_id = r"\d+"
    assert re.search(rf'0 0 committed \S+ \S+Z paid {{"amount": 42}} trace = 7 {producer_id} 0 0', shown)
    assert "COMMIT marker" in shown and "ABORT marker" in shown
    assert re.search(rf"aborted \S+ \S+Z null taken back {producer_id} \d 0", shown)
    assert re.search(rf"open \S+ \S+Z null undecided {producer_id} \d 0", shown)
    assert shown.index("undecided") < shown.index("taken back") < shown.index("amount"), "the newest first"


def test_a_search_continues_through_all_partitions_until_a_record_matches(
    pages: TestClient, servers: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"sought-{os.getpid()}-{next(_numbers)}"
    admin.create_topics([NewTopic(topic, 2)])
    with producer_of(servers) as producer:
        for index in range(12):
            value = b"wanted%d" % index if index in (6, 7, 11) else b"other"
            producer.send(topic, value, partition=index % 2).result(60)  # a batch each
    # The smallest part: a page decodes one batch of each partition.
    monkeypatch.setattr("oncelog.web.pages.MAX_DECODED_BYTES", 0)
    address = f"/topics/{topic}/messages"

    def link(page: str, words: str) -> str:
        (query,) = re.findall(rf'<a href="([^"]+)">{words}', page)
        return address + unescape(query)

    def follow(path: str) -> tuple[int, str]:
        """Follow the parts as the page's script does. Return their number, and the last page."""
        count, page = 1, pages.get(path).text
        while following := re.findall(r'<main[^>]* data-next="([^"]+)"', page):
            assert "No message in these offsets matches" in page and "go=" not in link(page, "Stop")
            count, page = count + 1, pages.get(address + unescape(following[0])).text
        return count, page

    first = pages.get(f"{address}?value=wanted&limit=1").text
    count, page = follow(link(first, "Search from the beginning"))
    assert count == 4 and "58 % of the offsets" in page and "wanted6" in page and "wanted7" not in page
    # The limit left out the match in the other partition, so the next part begins with it.
    count, page = follow(link(page, "Search on"))
    assert count == 1 and "wanted7" in page and "wanted6" not in page
    count, page = follow(link(page, "Search on"))
    assert count == 2 and "wanted11" in page and "100 % of the offsets" in page
    assert "The search has reached the end" in page and "Search on" not in page
    count, page = follow(f"{address}?from=each&value=nowhere&go=1")
    assert count == 6 and "The search has reached the end" in page
    assert pages.get(f"{address}?from=each&at=0:x").status_code == 400


def test_messages_are_found_by_offset_time_partition_and_content(
    pages: TestClient, servers: str, admin: Admin
) -> None:
    topic = f"found-{os.getpid()}-{next(_numbers)}"
    admin.create_topics([NewTopic(topic, 2)])
    with producer_of(servers) as producer:
        for index in range(10):
            stamp_ms = 1_000_000_000_000 + index * 60_000
            key, headers = b"k%d" % index, [("n", b"%d" % index)]
            producer.send(
                topic, b"v%d" % index, key, partition=index % 2, timestamp_ms=stamp_ms, headers=headers
            )
    address = f"/topics/{topic}/messages"

    def found(query: str) -> list[str]:
        return re.findall(r"\bv\d\b", text(pages, f"{address}?{query}"))

    assert found("") == [f"v{index}" for index in reversed(range(10))]
    assert found("partition=1&from=offset&at=2") == ["v5", "v7", "v9"]
    assert found("from=time&at=2001-09-09T01:53:40Z") == ["v7", "v8", "v9"]
    assert found("from=since&at=1+h") == []
    assert found("limit=3") == ["v9", "v8", "v7"]
    assert found("key=k4") == ["v4"] and found("value=v6") == ["v6"] and found("header=n%3D8") == ["v8"]
    assert "Searched: 1: 2 to 5" in text(pages, f"{address}?partition=1&from=offset&at=2")

    def earlier(query: str) -> list[str]:
        return [
            unescape(link) for link in re.findall(r'href="([^"]+)">earlier', pages.get(address + query).text)
        ]

    # A search continues before the offsets that were searched, with its filter.
    first = earlier("?from=offset&at=3&key=k0")
    assert first == [f"?partition={number}&from=offset&at=1&limit=50&key=k0" for number in (0, 1)]
    assert "No message in these offsets matches" in text(pages, address + first[0])
    (second,) = earlier(first[0])
    assert found(second.removeprefix("?")) == ["v0"]
    assert earlier("?partition=1&from=offset&at=3&limit=2") == ["?partition=1&from=offset&at=1&limit=2"]
    for wrong in ("partition=x", "from=offset&at=x", "from=since&at=soon", "from=time&at=x", "from=x&at=1"):
        assert pages.get(f"{address}?{wrong}").status_code == 400, wrong
    assert pages.get(f"{address}?partition=2").status_code == 404


def test_the_remembered_batches_of_a_producer_are_drawn(pages: TestClient, servers: str) -> None:
    topic = new_topic(servers)
    with producer_of(servers) as producer:
        for _ in range(7):
            producer.send(topic, b"x").result(60)
    page = pages.get(f"/topics/{topic}").text
    assert [f"{first}–{first}" in page for first in range(7)] == [False, False, True, True, True, True, True]


def test_a_setting_is_changed_and_returned_to_its_default(
    pages: TestClient, servers: str, admin: Admin
) -> None:
    topic = new_topic(servers)
    form = {"token": token_of(pages, f"/topics/{topic}"), "topic": topic, "name": "retention.ms"}

    def setting() -> tuple[str | None, str]:
        resource = ConfigResource("topic", topic)
        entry = admin.describe_configs([resource])[resource].entries["retention.ms"]
        return entry.value, entry.source

    default = setting()
    assert pages.post("/settings", data={**form, "value": "12345"}).status_code == 303
    assert setting() == ("12345", "topic")
    refused = pages.post("/settings", data={**form, "value": "soon"})
    assert refused.status_code == 502 and "retention.ms" in refused.text
    assert pages.post("/settings", data={**form, "value": ""}).status_code == 303
    assert setting() == default
    assert pages.post("/settings", data={"token": form["token"]}).status_code == 400


def test_offsets_are_reset_after_a_plan(pages: TestClient, servers: str, admin: Admin) -> None:
    topic, group = new_topic(servers), f"reset-{os.getpid()}-{next(_numbers)}"
    tp = TopicPartition(topic, 0)
    with producer_of(servers) as producer:
        for _ in range(5):
            producer.send(topic, b"x")
    admin.alter_group_offsets(group, {tp: OffsetAndMetadata(4)})
    plan = f"/reset?group={group}&topic={topic}&way=shift_by&value=-3"
    assert f"{topic}-0 4 1 -3" in text(pages, plan)
    assert admin.group_offsets(group)[tp].offset == 4, "a plan changes nothing"
    form = {"token": token_of(pages, plan), "group": group, "topic": topic, "offset": "0:1:4"}
    assert pages.post("/reset", data=form).status_code == 303
    assert admin.group_offsets(group)[tp].offset == 1
    assert pages.post("/reset", data={**form, "offset": "x"}).status_code == 400
    assert (
        pages.post("/reset", data={key: form[key] for key in ("token", "group", "topic")}).status_code == 400
    )
    assert pages.get(f"/reset?group={group}&topic={topic}&way=to_offset&value=x").status_code == 400


def test_a_sink_shows_what_a_restart_would_skip(pages: TestClient, servers: str, admin: Admin) -> None:
    sink, at = f"oncelog-sink{os.getpid()}-{next(_numbers)}", TopicPartition(new_topic(servers), 0)

    def keep(part: str, batch_id: int, **note: object) -> None:
        metadata = json.dumps({"oncelog": 1, **note})
        admin.alter_group_offsets(f"{sink}/{part}", {at: OffsetAndMetadata(batch_id, None, metadata)})

    keep("finished", 7, lanes=2, rows=30, hash="0")
    keep("begun", 8, run="r", begun_ms=1)
    keep("0", 8, rows=4, hash="0")
    keep("1", 7, rows=3, hash="0")
    shown = text(pages, "/sinks")
    assert f"{sink} Newest micro-batch begun: 8" in shown and "Committed by all tasks: 7 (30 rows)" in shown
    assert "A restart skips 1 tasks" in shown


def test_a_story_is_played_on_a_broker_of_its_own(pages: TestClient, admin: Admin) -> None:
    before = {topic.name for topic in admin.list_topics()}
    path = "/stories/lost-ack"
    assert "ended as described" not in text(pages, path)
    form = {"token": token_of(pages, path), "name": "lost-ack"}
    played = pages.post("/play", data=form)
    assert (played.status_code, played.headers["location"]) == (303, path)
    assert "The story ended as described" in text(pages, path)
    assert '<div class="drawing"><svg' in pages.get(path).text
    assert {topic.name for topic in admin.list_topics()} == before
    assert pages.post("/play", data={**form, "name": "none"}).status_code == 404
    assert pages.get("/stories/none").status_code == 404


def test_read_only_pages_have_no_forms_and_refuse_every_change(servers: str, admin: Admin) -> None:
    topic = new_topic(servers)
    app = make_app(admin, hosts=["testserver"], servers=servers, is_read_only=True)
    with TestClient(app) as pages:
        for path in (f"/topics/{topic}", "/transactions", "/stories/lost-ack"):
            assert 'method="post"' not in pages.get(path).text
        for path in ("/abort", "/settings", "/reset", "/play"):
            refused = pages.post(path, data={"name": "lost-ack"})
            assert refused.status_code == 403 and "read-only" in refused.text, path


@pytest.mark.parametrize("path", ["/abort", "/settings", "/reset", "/play"])
def test_no_change_without_the_token(path: str, pages: TestClient) -> None:
    assert pages.post(path, data={"token": "x"}).status_code == 403


def test_the_overview_shows_rates_and_what_is_held_back(pages: TestClient, servers: str) -> None:
    topic = new_topic(servers)
    with producer_of(servers, transactional_id=f"held-{os.getpid()}") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"x").result(60)
        shown = text(pages, "/")
        producer.abort_transaction()
    assert re.search(r"Open transactions [1-9]\d* the oldest for", shown)
    # The shared Apache Kafka may have more partitions than the page samples, and then the page says so.
    assert f"{topic}-0 0 1 1" in shown or "This cluster is large" in shown


def test_a_damaged_batch_is_named_and_what_is_before_it_is_shown(ours: str) -> None:
    """The batch has bytes that are not records, as a damaged disk may return.

    The test uses only our broker, because Apache Kafka does not accept such a batch.
    """
    topic = new_topic(ours)
    tp = TopicPartition(topic, 0)
    append(ours, tp, batch_of(b"whole"))
    damaged = bytearray(batch_of(b"broken"))
    damaged[HEADER_BYTES] = 0x7F  # the size of the first record is now larger than the batch
    write_crc(damaged, 0, len(damaged))
    append(ours, tp, bytes(damaged))
    with (
        Admin({"bootstrap.servers": ours}) as admin,
        TestClient(make_app(admin, hosts=["testserver"], servers=ours)) as pages,
    ):
        shown = text(pages, f"/topics/{topic}/messages")
    assert "whole" in shown and "batch of offsets 1 to 1" in shown
