"""Every page of the console in Chromium under live traffic: accessible, not wider than the window, and
photographed.

`ONCELOG_PHOTOS=docs/images/console pytest tests/web/test_web_photos.py` writes the photographs for the guide.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FloatRect, Page
from support.browser import chromium
from support.client import append, batch_of
from support.foreign.clients import CACHE, prepare, state_of
from support.topics import producer_of
from support.wait import wait_until
from web.test_web_browser import in_thread, serve

from oncelog import Admin, Broker, Consumer, NewTopic, OffsetAndMetadata, TopicPartition
from oncelog.errors import OncelogError

AXE = Path(__file__).parent / "axe"
PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "messages": "/topics/payments/messages?limit=20",
    "transactions": "/transactions",
    "transaction": "/transactions/teller",
    "groups": "/groups",
    "group": "/groups/billing",
    "reset": "/reset?group=nightly&topic=orders&way=shift_by&value=-5",
    "sinks": "/sinks",
    "faults": "/faults",
    "stories": "/stories",
    "story": "/stories/lost-ack",
}
FATES = {
    "committed": "/topics/payments/messages?from=offset&at=0",
    "plain": "/topics/orders/messages?from=offset&at=0",
    "open": "/topics/held/messages?from=offset&at=0",
    "aborted": "/topics/payments/messages?from=offset&at=0",
}
"""For each fate, a page of messages that shows it whatever the traffic has done."""
SERIOUS = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
    .filter(found => ["serious", "critical"].includes(found.impact))
    .map(found => found.id + ": " + found.nodes.slice(0, 3).map(node => node.html).join(" | "))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def axe() -> str:
    """The JavaScript source of axe-core, a checker of accessibility, from npm."""
    if not shutil.which("npm"):
        pytest.skip("axe-core comes from npm, which is not installed")
    home = CACHE / f"axe-{state_of(*AXE.iterdir())}"
    if not (home / "complete").exists():
        shutil.copytree(AXE, home, dirs_exist_ok=True)
        prepare(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], "axe-core", home)
        (home / "complete").touch()
    return (home / "node_modules" / "axe-core" / "axe.min.js").read_text()


class Traffic:
    """Transactions that commit and abort, plain records and a member of a group, until the end of the block.

    One transaction is open throughout, and one is hanging.
    """

    def __init__(self, servers: str) -> None:
        self._config = {"bootstrap.servers": servers}
        self._ended = threading.Event()
        self.rounds = 0
        with Admin(self._config) as admin:
            topics = [NewTopic("payments", 3), NewTopic("orders", 2), NewTopic("held"), NewTopic("hanging")]
            admin.create_topics(topics)
            for offset, group in ((8, "oncelog-enrich/begun"), (7, "oncelog-enrich/finished")):
                self._keep(admin, group, offset)
            for task in range(3):
                self._keep(admin, f"oncelog-enrich/{task}", 8 - task % 2)
            admin.alter_group_offsets("nightly", {TopicPartition("orders", 0): OffsetAndMetadata(3)})
        lost = batch_of(b"lost", producer_id=901, producer_epoch=0, base_sequence=0, is_transactional=True)
        append(servers, TopicPartition("hanging", 0), lost, transactional_id="gone")
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _keep(self, admin: Admin, group: str, batch_id: int) -> None:
        note = {
            "oncelog": 1,
            "lanes": 3,
            "rows": 1_000,
            "hash": "0",
            "run": "r",
            "begun_ms": 1_764_000_000_000,
        }
        at = {TopicPartition("held", 0): OffsetAndMetadata(batch_id, None, json.dumps(note))}
        admin.alter_group_offsets(group, at)

    def _send(self) -> None:
        servers = self._config["bootstrap.servers"]
        with (
            producer_of(servers, transactional_id="teller") as teller,
            # With the default of a minute, the broker would abort this transaction on a slow machine.
            producer_of(servers, transactional_id="stuck", transaction_timeout_ms=900_000) as stuck,
            producer_of(servers) as plain,
        ):
            stuck.init_transactions()
            stuck.begin_transaction()
            stuck.send("held", b"undecided").result(60)
            teller.init_transactions()
            while not self._ended.is_set():
                teller.begin_transaction()
                for index in range(5):
                    value = json.dumps({"amount": 12.5 + index, "to": f"account-{index}"}).encode()
                    teller.send(
                        "payments", value, b"account-%d" % (self.rounds % 7), headers=[("trace", b"7")]
                    )
                if self.rounds % 4 == 3:
                    teller.flush()
                    teller.abort_transaction()
                else:
                    teller.commit_transaction()
                plain.send("orders", b"order %d" % self.rounds).result(60)
                plain.send("held", bytes(range(60))).result(60)
                self.rounds += 1
                self._ended.wait(0.05)
            with suppress(OncelogError):
                stuck.abort_transaction()

    def _read(self) -> None:
        settings = {**self._config, "group.id": "billing", "auto.offset.reset": "earliest"}
        with Consumer(settings, client_id="billing-1") as consumer:
            consumer.subscribe(["payments", "orders"])
            while not self._ended.is_set():
                consumer.poll(0.2, max_records=3)

    def end(self) -> None:
        """Stop the traffic."""
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def address(browser: Browser) -> Iterator[str]:
    """Run the console in a process, for a broker with traffic. Yield its address.

    In this process, the event loop of the browser prevents a second one.
    """
    held: list[Traffic] = []
    with Broker(config={"transaction.partition.verification.enable": False}) as broker:
        in_thread(lambda: held.append(Traffic(broker.bootstrap_servers)))
        try:
            with serve(broker.bootstrap_servers, "127.0.0.1:0", "--fault-proxy", "127.0.0.1:0") as address:
                wait_until(lambda: held[0].rounds >= 12)
                yield address
        finally:
            held[0].end()


def _page(browser: Browser, scheme: str, width: int) -> Page:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(120_000)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_fault_of_accessibility(
    scheme: str, browser: Browser, axe: str, address: str
) -> None:
    page = _page(browser, scheme, 1280)
    for name, path in PAGES.items():
        page.goto(address + path)
        # The pages' security policy forbids scripts in the page, but permits those of the browser's debugger.
        page.evaluate(axe)
        assert page.evaluate(SERIOUS) == [], name
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_fate_of_every_record_is_readable(scheme: str, browser: Browser, axe: str, address: str) -> None:
    """Regression: `open` had too little contrast on white. The test of all pages noticed that only if a page
    happened to show an open record.
    """
    page = _page(browser, scheme, 1280)
    for fate, path in FATES.items():
        page.goto(address + path)
        page.locator(f".fate.{fate}").first.wait_for()
        page.evaluate(axe)
        assert page.evaluate(SERIOUS) == [], fate
    page.context.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_every_page_fits_the_window_and_runs_no_failing_script(
    width: int, browser: Browser, address: str
) -> None:
    page = _page(browser, "light", width)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    for name, path in PAGES.items():
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    assert errors == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_labels_of_past_transactions_are_readable_in_a_narrow_window(
    scheme: str, browser: Browser, address: str
) -> None:
    """Regression: the chart was scaled to the window with its labels, which were 5 pixels high."""
    page = _page(browser, scheme, 360)
    page.goto(address + PAGES["transaction"])
    lane = page.locator(".lane").first
    assert lane.evaluate("lane => parseFloat(getComputedStyle(lane).fontSize)") >= 12
    boxes = [part.bounding_box() for part in lane.locator("span, svg").all()]
    (begun, bar, outcome) = [box for box in boxes if box is not None]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 360 for box in (begun, bar, outcome))
    assert begun["x"] + begun["width"] <= outcome["x"] and begun["y"] + begun["height"] <= bar["y"]
    page.context.close()


def _lose_an_acknowledgement(page: Page) -> None:
    """Switch a fault on in the page, and produce through the proxy, so that an acknowledgement is lost."""
    page.get_by_role("button", name="Lose the next acknowledgement").click()
    proxy = page.locator("main code").first.inner_text()

    def send() -> None:
        with producer_of(proxy) as producer:
            for number in range(3):
                producer.send("orders", b"paid %d" % number, partition=0).result(60)

    in_thread(send)


def test_every_page_is_photographed(browser: Browser, address: str, tmp_path: Path) -> None:
    """The guide describes one photograph for each page. All of them must be made."""
    target = Path(os.environ.get("ONCELOG_PHOTOS", tmp_path))
    target.mkdir(parents=True, exist_ok=True)
    page = _page(browser, "light", 1280)
    words = {
        "overview": "Partitions held back",
        "topic": "Remembered batches",
        "messages": "ABORT marker",
        "transactions": "no coordinator knows producer id 901",
        "transaction": "committed",
        "group": "billing-1",
        "sinks": "A restart skips",
        "faults": "duplicate: already stored",
    }
    for name, path in PAGES.items():
        page.goto(address + path)
        if name == "story":
            page.get_by_role("button", name="Play it").click()
            page.locator(".drawing svg").wait_for()
        if name == "faults":
            _lose_an_acknowledgement(page)
        if name in words:
            page.get_by_text(words[name]).first.wait_for()
        # The diagram of the faults is below the first 900 pixels.
        height = 1300 if name == "faults" else 900
        clip: FloatRect = {"x": 0, "y": 0, "width": 1280, "height": height}
        page.screenshot(path=target / f"{name}.png", full_page=True, clip=clip)
        assert (target / f"{name}.png").stat().st_size > 10_000
    page.context.close()
