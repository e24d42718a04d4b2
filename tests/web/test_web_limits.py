"""Limits of the data that one page reads, keeps and shows, tested with hostile and with large data. Also the
stop of the pages.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient
from support.client import append, batch_of
from support.topics import new_topic, producer_of

from oncelog import Admin, Consumer, OffsetAndMetadata, TopicPartition
from oncelog.client.consumer.partition_ends import PartitionEnds
from oncelog.web import actions, pages, reading
from oncelog.web.app import make_app
from oncelog.web.display import page_path
from oncelog.web.history import Sample
from oncelog.web.reading import LogReader, Search
from oncelog.web.sampler import MAX_GROUPS, Sampler

_numbers = itertools.count()


@pytest.fixture
def admin(ours: str) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": ours}) as admin:
        yield admin


@pytest.fixture
def client(ours: str, admin: Admin) -> Iterator[TestClient]:
    with TestClient(make_app(admin, hosts=["testserver"], servers=ours), follow_redirects=False) as client:
        yield client


@pytest.fixture
def reader(ours: str, admin: Admin) -> Iterator[LogReader]:
    with LogReader(admin, lambda: Consumer({"bootstrap.servers": ours})) as reader:
        yield reader


def token_of(client: TestClient, path: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', client.get(path).text)
    assert found is not None
    return found[1]


def new_group() -> str:
    return f"limits-{os.getpid()}-{next(_numbers)}"


def test_a_value_with_half_a_surrogate_pair_does_not_end_the_page(client: TestClient, ours: str) -> None:
    topic = new_topic(ours)
    append(ours, TopicPartition(topic, 0), batch_of(rb'{"a": "\ud800"}', b"beside"))
    page = client.get(f"/topics/{topic}/messages")
    assert page.status_code == 200 and r"\ud800" in page.text and "beside" in page.text


def test_a_page_shows_a_bounded_part_of_the_headers(client: TestClient, ours: str) -> None:
    topic = new_topic(ours)
    headers = [(f"n{index}-" + "x" * 2_000, bytes(2_000)) for index in range(100)]
    with producer_of(ours) as producer:
        producer.send(topic, b"x", headers=headers).result(60)
    page = client.get(f"/topics/{topic}/messages").text
    assert "n19-" in page and "n20-" not in page and "80 more headers" in page
    assert len(page) < 200_000


def test_a_page_decodes_a_bounded_number_of_records(
    reader: LogReader, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, batches, rows = new_topic(ours), 6, 300
    tp, ends = TopicPartition(topic, 0), PartitionEnds(0, batches * rows, batches * rows, None)
    for _ in range(batches):
        append(ours, tp, batch_of(*[b"x" * 100] * rows))
    decoded: list[int] = []
    decode = reading.decode_parts

    def counted(
        tp: TopicPartition, records: memoryview, batch: reading.FetchedBatch, start: int, **how: bool
    ):  # type: ignore[no-untyped-def]
        decoded.append(batch.header.base_offset)
        return decode(tp, records, batch, start, check_crcs=how["check_crcs"])

    monkeypatch.setattr(reading, "decode_parts", counted)

    def offsets(found: reading.Found) -> list[int]:
        return [message.offset for message in found.messages]

    last = batches * rows
    found = reader.search(tp, ends, 0, Search(5))
    assert (offsets(found), found.next_offset, decoded) == ([0, 1, 2, 3, 4], 5, [0])
    decoded.clear()
    found = reader.search_newest(tp, ends, Search(5))
    assert (offsets(found), found.start) == ([*range(last - 5, last)], last - rows)
    assert decoded == [last - rows]
    decoded.clear()
    found = reader.search(tp, ends, 0, Search(5, 100_000, value=b"y"))
    assert (offsets(found), found.next_offset, decoded) == ([], 2 * rows, [0, rows])
    decoded.clear()
    found = reader.search_newest(tp, ends, Search(5, 100_000, value=b"y"))
    assert (offsets(found), found.start) == ([], last - 2 * rows)
    assert decoded == [last - rows, last - 2 * rows]


def test_the_newest_of_large_batches_are_read(reader: LogReader, ours: str) -> None:
    topic = new_topic(ours)
    tp, ends = TopicPartition(topic, 0), PartitionEnds(0, 60, 60, None)
    for index in range(60):
        append(ours, tp, batch_of(b"%d" % index * 500))
    batches = reader.tail(tp, ends, 20_000)
    assert batches[-1].last_offset == 59 and 8 <= len(batches) < 50
    assert reader.tail(tp, ends, 1)[-1].last_offset == 59
    assert len(reader.tail(tp, ends)) == 60


def test_a_page_of_a_topic_reads_a_part_of_its_partitions(
    client: TestClient, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(ours, partitions=5)
    with producer_of(ours) as producer:
        for partition in range(5):
            producer.send(topic, b"x", partition=partition).result(60)
    limits: list[int] = []
    tail = LogReader.tail

    def counted(self: LogReader, tp: TopicPartition, ends: PartitionEnds, max_bytes: int) -> object:
        limits.append(max_bytes)
        return tail(self, tp, ends, max_bytes)

    monkeypatch.setattr(LogReader, "tail", counted)
    monkeypatch.setattr(pages, "MAX_SHOWN_PARTITIONS", 2)
    shown, path = [], f"/topics/{topic}"
    for _ in range(3):
        page = client.get(path).text
        shown.append(re.findall(r"<h2>Partition (\d)</h2>", page))
        assert f"{len(shown[-1])} of 5 partitions are shown" in page
        following = re.search(r'<a href="(\?from=\d+)">The next ones', page)
        path = f"/topics/{topic}{following[1]}" if following else ""
    assert (shown, path) == ([["0", "1"], ["2", "3"], ["4"]], "")
    assert limits == [reading.MAX_BYTES // 2] * 4 + [reading.MAX_BYTES]


def test_a_note_with_other_values_than_numbers_does_not_end_the_page(
    client: TestClient, ours: str, admin: Admin
) -> None:
    """Every client that may commit offsets can write such a note, or use such a group id."""
    at, sink = TopicPartition(new_topic(ours), 0), new_group()
    for part, note in (
        ("begun", {"begun_ms": "<b>"}),
        ("finished", {"rows": float("nan")}),
        ("0", {"rows": [1]}),
        ("1" * 5_000, {"rows": 1}),
    ):
        metadata = json.dumps({"oncelog": 1, **note})
        admin.alter_group_offsets(f"{sink}/{part}", {at: OffsetAndMetadata(3, None, metadata)})
    page = client.get("/sinks")
    assert page.status_code == 200 and sink in page.text


@pytest.mark.parametrize("name", ["a/../b", "..", ".", "a/b", "/x", "a?b=1#c", "é&<"])
def test_a_name_with_dots_and_slashes_has_a_page_of_its_own(
    client: TestClient, ours: str, admin: Admin, name: str
) -> None:
    """Like browsers, `urljoin` removes the segments "." and ".." from a path. So links must encode them."""
    at = TopicPartition(new_topic(ours), 0)
    admin.alter_group_offsets(name, {at: OffsetAndMetadata(0)})
    link = page_path("groups", name)
    assert f'href="{link.replace("&", "&amp;")}"' in client.get("/groups").text
    page = client.get(urljoin("http://testserver/groups", link))
    assert page.status_code == 200
    title = re.search(r"<h1>(.*)</h1>", page.text)
    assert title is not None and title[1] == name.replace("&", "&amp;").replace("<", "&lt;")
    assert f"{at}" in page.text


def test_a_plan_is_refused_once_other_offsets_are_committed(
    client: TestClient, ours: str, admin: Admin
) -> None:
    topic, group = new_topic(ours), new_group()
    tp = TopicPartition(topic, 0)
    with producer_of(ours) as producer:
        for _ in range(5):
            producer.send(topic, b"x").result(60)
    admin.alter_group_offsets(group, {TopicPartition(new_topic(ours), 0): OffsetAndMetadata(0)})
    plan = f"/reset?group={group}&topic={topic}&way=to_latest"
    for before, now in ((None, 1), (1, 2)):
        page = client.get(plan).text
        (offset,) = re.findall(r'name="offset" value="([^"]+)"', page)
        assert offset == f"0:5:{'' if before is None else before}"
        form = {"token": token_of(client, plan), "group": group, "topic": topic, "offset": offset}
        admin.alter_group_offsets(group, {tp: OffsetAndMetadata(now)})
        refused = client.post("/reset", data=form)
        assert refused.status_code == 409 and "out of date" in refused.text
        assert admin.group_offsets(group)[tp].offset == now
    assert client.post("/reset", data={**form, "offset": "0:5:2"}).status_code == 303
    assert admin.group_offsets(group)[tp].offset == 5
    assert client.post("/reset", data={**form, "offset": f"0:{1 << 63}:5"}).status_code == 400


def test_a_large_form_is_refused_unread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "MAX_FORM_BYTES", 1_000)
    monkeypatch.setattr(actions, "MAX_FORM_FIELDS", 10)
    token = token_of(client, "/stories/lost-ack")
    sent: list[int] = []

    def body() -> Iterator[bytes]:
        for _ in range(5):
            sent.append(600)
            yield b"a" * 600

    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/abort", content=body(), headers=kind).status_code == 413
    many = "&".join(["x=1"] * 20)
    for before, status in ((f"token={token}&", 400), ("", 403), ("xtoken=&token=%ff&", 403)):
        assert client.post("/abort", content=f"{before}{many}", headers=kind).status_code == status
    not_text = f"token={token}&group=".encode() + b"\xff"
    assert client.post("/reset", content=not_text, headers=kind).status_code == 400


def test_a_topic_of_many_partitions_can_be_reset(client: TestClient, ours: str) -> None:
    """The form has more fields than Starlette's limit of 1,000.

    The server reads the form, but refuses the reset because its plan is out of date.
    """
    topic = new_topic(ours)
    form = {"token": token_of(client, "/stories/lost-ack"), "group": new_group(), "topic": topic}
    offsets = [f"{partition}:0:7" for partition in range(2_000)]
    refused = client.post("/reset", data={**form, "offset": offsets})
    assert refused.status_code == 409 and "out of date" in refused.text


def test_a_sample_is_summed_by_topic_once() -> None:
    """Regression: each topic on a page summed the whole sample, so 10,000 topics took 40,000,000 steps."""

    class Ends(dict[TopicPartition, PartitionEnds]):
        passes = 0

        def items(self):  # type: ignore[no-untyped-def]
            self.passes += 1
            return super().items()

    ends = Ends({TopicPartition(f"t{n % 3}", n): PartitionEnds(n, 10 + n, None, None) for n in range(6)})
    sample = Sample(0.0, ends)
    assert [sample.topic_end(f"t{n}") for n in range(4)] == [23, 25, 27, 0]
    assert (sample.topic_offsets, sample.total_end) == ({"t0": 20, "t1": 20, "t2": 20}, 75)
    assert ends.passes == 1


def test_a_sampler_that_is_stopped_looks_at_no_further_group(admin: Admin, ours: str) -> None:
    at = TopicPartition(new_topic(ours), 0)
    for _ in range(3):
        admin.alter_group_offsets(new_group(), {at: OffsetAndMetadata(0)})
    sampler, looked = Sampler(admin), []
    find = admin.group_offsets

    def last(group: str) -> object:
        looked.append(group)
        sampler.stop()
        return find(group)

    admin.group_offsets = last  # type: ignore[method-assign, assignment]
    sampler.take()
    assert len(looked) == 1 < MAX_GROUPS


def test_ctrl_c_ends_pages_that_wait_for_a_silent_broker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "oncelog.cli.main", "web", "-b", servers, "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            [*command, "-X", "request.timeout.ms=3600000"], stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                assert child.stdout is not None
                host, _, port = child.stdout.readline().split("/")[2].rpartition(":")
                with socket.create_connection((host, int(port))) as browser:
                    browser.sendall(b"GET /groups HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                    silent.accept()[0].recv(1)  # the page now waits for the response of the silent broker
                    child.send_signal(signal.SIGINT)
                    assert child.wait(200) == 0
            finally:
                child.kill()


def test_a_long_table_is_cut_and_searched_by_name(
    client: TestClient, ours: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_ROWS", 2)
    stem, at = new_group(), TopicPartition(new_topic(ours), 0)
    for index in range(3):
        admin.alter_group_offsets(f"{stem}-{index}", {at: OffsetAndMetadata(0)})
    page = client.get(f"/groups?name={stem}").text
    assert "The first 2 of 3 are shown" in page and page.count(f"/groups/{stem}") == 2
    page = client.get(f"/groups?name={stem}-2").text
    assert page.count(f"/groups/{stem}") == 1 and "are shown" not in page
    for path in ("/topics", "/transactions"):
        assert client.get(f"{path}?name=no-such-name").status_code == 200


def test_a_sink_of_many_tasks_is_cut(
    client: TestClient, ours: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_SINK_TASKS", 2)
    sink, at = new_group(), TopicPartition(new_topic(ours), 0)
    for part in ("begun", "10", "2", "1"):
        note = OffsetAndMetadata(1, None, json.dumps({"oncelog": 1, "rows": 7}))
        admin.alter_group_offsets(f"{sink}/{part}", {at: note})
    page = client.get("/sinks").text
    section = page.partition(f'data-key="{sink}"')[2].partition("</section>")[0]
    assert re.findall(r'data-key="(\d+)"', section) == ["1", "2"]
    assert "1 more tasks are not shown" in section
