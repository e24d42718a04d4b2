"""The pages with our broker and with Apache Kafka, and their only action, aborting a transaction, with its
protection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping

import pytest
from starlette.testclient import TestClient
from support.cli import oncelog
from support.client import append, batch_of
from support.topics import new_topic, producer_of, values

from oncelog import Admin, Consumer, OffsetAndMetadata, TopicPartition
from oncelog.client.admin.aio import AsyncAdmin
from oncelog.client.admin.transaction_requests import TransactionDescription
from oncelog.errors import TransactionalIdNotFound
from oncelog.web.app import make_app

_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"transaction.partition.verification.enable": False}


@pytest.fixture
def pages(servers: str) -> Iterator[TestClient]:
    with Admin({"bootstrap.servers": servers}) as admin:
        yield TestClient(make_app(admin, hosts=["testserver"], servers=servers), follow_redirects=False)


def text(pages: TestClient, path: str) -> str:
    """Return the visible text: no tags, single spaces."""
    answer = pages.get(path)
    assert answer.status_code == 200, answer.text
    main = answer.text.partition("<main>")[2].partition("</main>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", main).replace("&#39;", "'").split())


@pytest.mark.behaviour("T14")
def test_an_open_transaction_is_seen_everywhere(pages: TestClient, servers: str) -> None:
    name, topic = f"page-{os.getpid()}-{next(_numbers)}", new_topic(servers)
    with producer_of(servers, transactional_id=name) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(topic, b"a").result(60)
            front = text(pages, "/transactions")
            assert re.search(rf"{topic}-0 id \d+, epoch 0 0 20\S+ \S+Z no: '{name}' is Ongoing", front)
            assert re.search(rf"{name} \d+ Ongoing 1", front)
            one = text(pages, f"/transactions/{name}")
            assert "State Ongoing" in one and "Timeout 60000 ms" in one and f"{topic}-0" in one
            assert f"oncelog transactions terminate {name}" in one
            part = text(pages, f"/topics/{topic}")
            assert f"Offsets 0 to 1; stable end offset 0, held back by {name}" in part
            assert re.search(r"\d+ 0 0 20\S+ \S+Z 0", part), (
                "the producer: epoch, sequence, time, first offset"
            )
    assert topic in text(pages, f"/topics?name={topic}")


def test_the_page_of_a_transactional_id_says_who_was_fenced(pages: TestClient, servers: str) -> None:
    name, topic = f"page-{os.getpid()}-{next(_numbers)}", new_topic(servers)
    with producer_of(servers, transactional_id=name) as first:
        first.init_transactions()
        with first.transaction():
            first.send(topic, b"a").result(60)
        assert "Fenced" not in text(pages, f"/transactions/{name}")
        with producer_of(servers, transactional_id=name) as second:
            second.init_transactions()
            page = text(pages, f"/transactions/{name}")
    assert re.search(r"Fenced every producer before id \d+, epoch \d+, which InitProducerId gave at 20", page)


def _stable_end(servers: str, topic: str) -> int:
    """Return the last stable offset.

    A test with an open transaction cannot use `values`, which would wait for the end of the transaction.
    """
    tp = TopicPartition(topic, 0)
    with Consumer({"bootstrap.servers": servers}) as consumer:
        return consumer.end_offsets([tp])[tp]


@pytest.mark.behaviour("T14")
def test_a_hanging_transaction_is_aborted_by_its_button(ours: str) -> None:
    topic, producer_id = new_topic(ours), 800_000 + next(_numbers)
    lost = batch_of(
        b"lost", producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
    )
    append(ours, TopicPartition(topic, 0), lost, transactional_id="gone")
    append(ours, TopicPartition(topic, 0), batch_of(b"behind"))
    with Admin({"bootstrap.servers": ours}) as admin:
        pages = TestClient(make_app(admin, hosts=["testserver"], servers=ours), follow_redirects=False)
        page = pages.get("/transactions").text
        form = page.partition(f'name="topic" value="{topic}"')
        assert f"yes: no coordinator knows producer id {producer_id}" in page and form[1]
        token = re.findall(r'name="token" value="([^"]+)"', form[0])[-1]
        fields = {"topic": topic, "partition": "0", "producer_id": str(producer_id), "token": token}
        fields |= {"producer_epoch": "0", "first_offset": "0"}
        for wrong, status in [
            ({"token": "x"}, 403),
            ({"token": "é"}, 403),
            ({"partition": "x"}, 400),
            ({"producer_id": "1"}, 404),
            ({"producer_epoch": "1"}, 404),
            ({"first_offset": "1"}, 404),
        ]:
            assert pages.post("/abort", data={**fields, **wrong}).status_code == status
        assert _stable_end(ours, topic) == 0
        done = pages.post("/abort", data=fields)
        assert (done.status_code, done.headers["location"]) == (303, "/transactions")
        assert values(ours, topic) == [b"behind"]
        assert f"producer id {producer_id}" not in pages.get("/transactions").text


def test_a_form_with_a_file_is_refused_before_it_is_read(ours: str) -> None:
    """R1071: through such a form, a page of another site could fill the disk with temporary files."""
    with Admin({"bootstrap.servers": ours}) as admin:
        pages = TestClient(make_app(admin, hosts=["testserver"], servers=ours))
        for path in ("/abort", "/settings", "/reset", "/play"):
            answer = pages.post(path, data={"token": "x"}, files={"f": b"x"})
            assert (answer.status_code, "must have the type" in answer.text) == (415, True)
        assert pages.post("/abort", data={"token": "x"}).status_code == 403


def test_an_agreement_never_ends_on_the_producers_next_transaction(ours: str) -> None:
    topic, producer_id = new_topic(ours), 800_000 + next(_numbers)

    def begin(epoch: int) -> None:
        batch = batch_of(
            b"x", producer_id=producer_id, producer_epoch=epoch, base_sequence=0, is_transactional=True
        )
        append(ours, TopicPartition(topic, 0), batch, transactional_id="gone")

    begin(0)
    with Admin({"bootstrap.servers": ours}) as admin:
        pages = TestClient(make_app(admin, hosts=["testserver"], servers=ours), follow_redirects=False)
        (form,) = re.findall(
            rf'<form(?:(?!</form>).)*"{topic}".*?</form>', pages.get("/transactions").text, re.DOTALL
        )
        agreed = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', form))
        (opened,) = admin.open_transactions([topic])
        admin.abort_transaction(opened)
        begin(1)
        answer = pages.post("/abort", data=agreed)
        assert answer.status_code == 404 and "nothing was aborted" in answer.text
        (opened,) = admin.open_transactions([topic])
        assert (opened.producer_epoch, opened.first_offset) == (1, 2)
        aborted = oncelog(
            *("transactions", "abort", f"{topic}:0", "--producer-id", str(producer_id), "--yes"),
            *("--start-offset", "0"),
            servers=ours,
        )
        assert aborted.code == 1 and "another one from offset 2 on" in aborted.err
        assert admin.open_transactions([topic]) == [opened]


@pytest.mark.behaviour("T14")
def test_an_id_that_expires_while_it_is_looked_at_hides_nothing(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, names = new_topic(ours), [f"expiring-{os.getpid()}-{next(_numbers)}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(Admin({"bootstrap.servers": ours}))
        for name in names:
            producer = stack.enter_context(producer_of(ours, transactional_id=name))
            producer.init_transactions()
            producer.begin_transaction()
            producer.send(topic, b"a").result(60)
        describe = AsyncAdmin._describe_transaction

        async def expired(self: AsyncAdmin, transactional_id: str) -> TransactionDescription:
            if transactional_id == names[0]:
                raise TransactionalIdNotFound(transactional_id)
            return await describe(self, transactional_id)

        monkeypatch.setattr(AsyncAdmin, "_describe_transaction", expired)
        hanging = admin.find_hanging([topic])
        assert [held_back.hanging.value for held_back in hanging] == ["perhaps", "no"]
        pages = TestClient(make_app(admin, hosts=["testserver"], servers=ours), follow_redirects=False)
        assert topic in text(pages, "/transactions")


def test_the_pages_of_groups_show_members_offsets_and_lag(pages: TestClient, servers: str) -> None:
    group, topic = f"page-{os.getpid()}-{next(_numbers)}", new_topic(servers)
    with producer_of(servers) as producer:
        for _ in range(3):
            producer.send(topic, b"v")
    config = {"bootstrap.servers": servers, "group.id": group, "auto.offset.reset": "earliest"}
    with Consumer(config, client_id="of-the-page") as consumer:
        consumer.subscribe([topic])
        while not consumer.poll(0.5, max_records=1):
            pass
        consumer.commit()
        assert re.search(rf"{group} Stable consumer 1 (\d+|–)", text(pages, "/groups"))
        shown = text(pages, f"/groups/{group}")
        assert "of-the-page" in shown and f"{topic}-0 1 3 2 3" in shown


@pytest.mark.behaviour("T14")
def test_the_page_of_a_group_names_what_holds_it_back(pages: TestClient, servers: str) -> None:
    group, topic = f"page-{os.getpid()}-{next(_numbers)}", new_topic(servers)
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.alter_group_offsets(group, {TopicPartition(topic, 0): OffsetAndMetadata(0)})
    with producer_of(servers, transactional_id=f"open-{group}") as producer:
        producer.init_transactions()
        with producer.transaction():
            for _ in range(2):
                producer.send(topic, b"v").result(60)
            assert f"{topic}-0 0 2 2 0 open-{group}" in text(pages, f"/groups/{group}")


@pytest.mark.parametrize("path", ["/transactions/nobody", "/topics/nothing", "/elsewhere"])
def test_unknown_names_and_addresses_are_not_found(pages: TestClient, path: str) -> None:
    assert pages.get(path).status_code == 404


def test_names_are_shown_as_text(ours: str) -> None:
    name = f"<b>bold</b>/{next(_numbers)}"
    with producer_of(ours, transactional_id=name) as producer, Admin({"bootstrap.servers": ours}) as admin:
        producer.init_transactions()
        pages = TestClient(make_app(admin, hosts=["testserver"], servers=ours))
        assert (
            "<b>bold" not in pages.get("/transactions").text
            and "&lt;b&gt;bold" in pages.get("/transactions").text
        )
        link = re.findall(r'href="(/transactions/%3Cb[^"]+)"', pages.get("/transactions").text)[0]
        assert "State" in pages.get(link).text


def test_other_hosts_and_dead_clusters_are_told_so(ours: str) -> None:
    with Admin({"bootstrap.servers": ours}) as admin:
        posing = TestClient(
            make_app(admin, hosts=["127.0.0.1"], servers=ours), base_url="http://evil.example"
        )
        assert posing.get("/").status_code == 400
    quick = {"bootstrap.servers": "127.0.0.1:1", "request.timeout.ms": 300}
    with Admin(quick) as admin:
        dead = TestClient(make_app(admin, hosts=["testserver"], servers="127.0.0.1:1"))
        assert dead.get("/").status_code == 502


def test_the_command_serves_pages_until_it_is_interrupted(ours: str) -> None:
    command = [sys.executable, "-m", "oncelog.cli.main", "web", "-b", ours, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline().split()[-1]
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert "Partitions held back" in answer.read().decode()
                assert "script-src 'nonce-" in answer.headers["Content-Security-Policy"]
        finally:
            child.send_signal(signal.SIGINT)
        assert child.wait(200) == 0


@pytest.mark.parametrize(("host", "in_a_url"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")])
def test_a_host_stands_in_a_url_as_browsers_write_it(host: str, in_a_url: str) -> None:
    from oncelog.cli.web import in_url

    assert in_url(host) == in_a_url
