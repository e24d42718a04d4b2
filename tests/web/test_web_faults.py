"""The console's page of faults: it switches faults of a proxy on and off, and shows the broker's verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient
from support.topics import new_topic, producer_of
from support.wait import wait_until

from oncelog import Admin
from oncelog.explain.diagram import Arrow, Tone
from oncelog.testing.proxy import BatchSummary, Direction, WireEvent, parse_rule
from oncelog.web.app import make_app
from oncelog.web.faults import MAX_EVENTS, MAX_PARTITIONS, PRESETS, FaultProxy, draw_newest


@pytest.fixture
def faults(ours: str) -> Iterator[FaultProxy]:
    faults = FaultProxy(ours, "127.0.0.1", 0)
    with faults.proxy:
        yield faults


@pytest.fixture
def admin(ours: str) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": ours}) as admin:
        yield admin


@pytest.fixture
def pages(ours: str, admin: Admin, faults: FaultProxy) -> Iterator[TestClient]:
    app = make_app(admin, hosts=["testserver"], servers=ours, fault_proxy=faults)
    with TestClient(app, follow_redirects=False) as client:
        yield client


def post(pages: TestClient, **fields: str) -> int:
    token = re.search(r'name="token" value="([^"]+)"', pages.get("/faults").text)
    assert token is not None
    return pages.post("/faults", data={"token": token[1], **fields}).status_code


@pytest.mark.behaviour("T14")
def test_a_lost_acknowledgement_is_shown_as_a_batch_that_is_stored_once(
    pages: TestClient, faults: FaultProxy, ours: str
) -> None:
    topic = new_topic(ours)
    assert post(pages, do="add", rule=f"response Produce cut topic={topic} count=1") == 303
    with producer_of(faults.proxy.bootstrap_servers) as producer:
        assert producer.send(topic, b"paid").result(60).offset == 0
    shown = pages.get("/faults").text
    assert f"response Produce cut count=1 topic={topic}" in shown
    assert "answer lost, connection cut" in shown and "duplicate: already stored at 0" in shown
    cards = dict(re.findall(r"<dt>([^<]+)<dd[^>]*>(\d+)<", shown))
    assert cards == {
        "Batches stored": "1",
        "Duplicates recognised": "1",
        "Lost messages": "1",
        "Batches refused": "0",
    }


def test_every_offered_fault_is_a_rule_that_can_be_added_and_removed(
    pages: TestClient, faults: FaultProxy
) -> None:
    for rule in PRESETS:
        assert post(pages, do="add", rule=rule) == 303
    assert [state.rule for state in faults.proxy.rules] == [parse_rule(rule) for rule in PRESETS]
    first = faults.proxy.rules[0].number
    assert post(pages, do="remove", number=str(first)) == 303
    assert first not in [state.number for state in faults.proxy.rules]
    assert post(pages, do="clear") == 303
    assert faults.proxy.rules == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"do": "add", "rule": "Produce explode"}, "&#39;explode&#39; is not a direction"),
        ({"do": "remove", "number": "first"}, "the form needs number"),
        ({"do": "dance"}, "the form needs do=add"),
    ],
)
def test_a_wrong_form_is_refused_with_its_reason(
    pages: TestClient, faults: FaultProxy, fields: dict[str, str], expected: str
) -> None:
    token = re.search(r'name="token" value="([^"]+)"', pages.get("/faults").text)
    assert token is not None
    answer = pages.post("/faults", data={"token": token[1], **fields})
    assert answer.status_code == 400 and expected in answer.text
    assert faults.proxy.rules == []


def test_held_messages_are_released_and_connections_cut_by_buttons(
    pages: TestClient, faults: FaultProxy, ours: str
) -> None:
    topic = new_topic(ours)
    faults.proxy.reorder(topic)
    with producer_of(faults.proxy.bootstrap_servers) as producer:
        future = producer.send(topic, b"held")
        wait_until(lambda: any(isinstance(step, Arrow) and step.tone is Tone.HELD for step in faults.steps()))
        assert post(pages, do="release") == 303
        assert future.result(60).offset == 0
        assert post(pages, do="cut") == 303
        assert producer.send(topic, b"on a new connection").result(60).offset == 1


def test_pages_without_a_proxy_say_how_to_start_one(ours: str, admin: Admin) -> None:
    with TestClient(make_app(admin, hosts=["testserver"], servers=ours)) as pages:
        assert "oncelog web --fault-proxy" in pages.get("/faults").text
        token = re.search(r'name="token" value="([^"]+)"', pages.get("/stories/lost-ack").text)
        assert token is not None
        assert pages.post("/faults", data={"token": token[1], "do": "clear"}).status_code == 404


def test_read_only_pages_show_the_rules_without_their_switches(
    ours: str, admin: Admin, faults: FaultProxy
) -> None:
    faults.proxy.lose_ack()
    app = make_app(admin, hosts=["testserver"], servers=ours, fault_proxy=faults, is_read_only=True)
    with TestClient(app) as pages:
        shown = pages.get("/faults").text
        assert "response Produce cut nth=1 count=1" in shown and "<form" not in shown
        assert pages.post("/faults", data={"do": "clear"}).status_code == 403
    assert len(faults.proxy.rules) == 1


def test_a_long_run_of_messages_is_kept_and_drawn_in_part() -> None:
    faults = FaultProxy("127.0.0.1:9", "127.0.0.1", 0)
    batches = tuple(BatchSummary("<b>" * 60, number, 1, 0, 0, 0, 1, 70) for number in range(40))
    for number in range(MAX_EVENTS + 50):
        faults._keep(WireEvent(Direction.REQUEST, "Produce", correlation_id=number, batches=batches))
        faults._keep(WireEvent(Direction.REQUEST, "Fetch"))
    steps = faults.steps()
    assert len(steps) == MAX_EVENTS
    drawing = draw_newest(steps)
    assert len(drawing) < 20_000 and "<b>" not in drawing


def test_large_requests_replace_older_ones() -> None:
    faults = FaultProxy("127.0.0.1:9", "127.0.0.1", 0)
    batches = tuple(BatchSummary("t", number, 1, 0, 0, 0, 1, 70) for number in range(MAX_PARTITIONS // 4))
    for number in range(7):
        faults._keep(WireEvent(Direction.REQUEST, "Produce", correlation_id=number, batches=batches))
    assert [event.correlation_id for event in faults._events] == [3, 4, 5, 6]
    faults._keep(WireEvent(Direction.REQUEST, "Produce", batches=batches * 5))
    assert faults.steps() == []
    faults._keep(WireEvent(Direction.REQUEST, "Produce", batches=batches))
    assert len(faults.steps()) == 1
