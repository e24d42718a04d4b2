"""The pages in a real browser: a refresh does not disturb the user, and a missing response is shown."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect
from support.browser import chromium
from support.client import append, batch_of
from support.topics import new_topic, producer_of, values

from oncelog import Admin, Broker, NewTopic, TopicPartition

_numbers = itertools.count()
PATIENCE_MS = 120_000
expect.set_options(timeout=PATIENCE_MS)
FOCUSED = "document.activeElement.getAttribute('href')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Provide a tab whose clock stands still until a test moves it. A script error fails the test."""
    page = browser.new_page()
    errors: list[object] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.set_default_timeout(PATIENCE_MS)
    page.clock.install()
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(config={"transaction.partition.verification.enable": False}) as broker:
        yield broker


@pytest.fixture
def address(broker: Broker) -> Iterator[str]:
    """Run `oncelog web` for the fixture `broker`, and yield its address without the slash at the end."""
    with serve(broker.bootstrap_servers, "127.0.0.1:0", "-X", "request.timeout.ms=2000") as address:
        yield address


@contextlib.contextmanager
def serve(servers: str, listen: str, *arguments: str) -> Iterator[str]:
    """Run `oncelog web` for these servers; provide its address, without the slash at its end."""
    command = [sys.executable, "-m", "oncelog.cli.main", "web", "-b", servers, "--listen", listen]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().split()[-1].rstrip("/")
        finally:
            child.kill()


def refresh(page: Page) -> None:
    """Let the page refresh once. Wait for the response, and until the page shows it."""
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch"):
        page.clock.run_for(2_100)


def create(broker: Broker, *names: str) -> None:
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics([NewTopic(name) for name in names])


def in_thread(call: Callable[..., object], *arguments: object, **named: object) -> None:
    """Call a function in another thread, and wait for it.

    In this thread, Playwright's event loop is running, so asyncio.run cannot be called.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call, *arguments, **named).result()


def test_the_keyboards_focus_and_a_selection_stay_over_a_refresh(
    broker: Broker, address: str, page: Page
) -> None:
    create(broker, "b", "d", "f")
    page.goto(f"{address}/topics")
    while page.evaluate(FOCUSED) != "/topics/d":
        page.keyboard.press("Tab")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('a[href=\"/topics/f\"]'))")
    create(broker, "a", "c", "e", "g")
    with Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.delete_topics(["b"])
    refresh(page)
    expect(page.locator("main td:first-child")).to_have_text(["a", "c", "d", "e", "f", "g"])
    assert page.evaluate(FOCUSED) == "/topics/d"
    assert page.evaluate("getSelection().toString()") == "f"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("d")


def test_the_consent_to_abort_stays_with_its_transaction(broker: Broker, address: str, page: Page) -> None:
    servers = broker.bootstrap_servers
    first, second = sorted(new_topic(servers) for _ in range(2))

    def hang(topic: str, producer_id: int) -> None:
        lost = batch_of(
            b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
        )
        in_thread(append, servers, TopicPartition(topic, 0), lost, transactional_id=f"gone-{producer_id}")

    hang(second, 801)
    page.goto(f"{address}/transactions")
    page.get_by_role("checkbox").check()
    hang(first, 800)
    refresh(page)
    boxes = page.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    expect(boxes.nth(0)).not_to_be_checked()
    expect(boxes.nth(1)).to_be_checked()
    assert page.evaluate("document.activeElement.type") == "checkbox"
    with Admin({"bootstrap.servers": servers}) as admin:
        (opened,) = admin.open_transactions([second])
        admin.abort_transaction(opened)
    hang(second, 802)
    refresh(page)
    expect(page.get_by_text("id 802, epoch")).to_be_visible()
    expect(page.get_by_role("checkbox").nth(1)).not_to_be_checked()
    page.get_by_role("checkbox").nth(0).check()
    page.get_by_role("button", name="Abort").nth(0).click()
    expect(page.get_by_text("id 800, epoch")).to_have_count(0)
    in_thread(append, servers, TopicPartition(first, 0), batch_of(b"behind"))
    assert values(servers, first) == [b"behind"]


def test_pages_of_another_server_replace_the_whole_page(broker: Broker, browser: Browser, page: Page) -> None:
    """Two clusters may have transactions with the same name and numbers.

    If the user confirms an action for one of them, that must not count for the other.
    """

    with Broker(config={"transaction.partition.verification.enable": False}) as other:
        for servers in (broker.bootstrap_servers, other.bootstrap_servers):
            in_thread(_create_and_hang, servers)
        with serve(broker.bootstrap_servers, "127.0.0.1:0") as address:
            page.goto(f"{address}/transactions")
            page.get_by_role("checkbox").check()
        with serve(other.bootstrap_servers, address.removeprefix("http://")):
            page.clock.run_for(2_100)
            expect(page.locator("nav span")).to_have_text(other.bootstrap_servers)
            expect(page.get_by_role("checkbox")).not_to_be_checked()


def _create_and_hang(servers: str) -> None:
    with Admin({"bootstrap.servers": servers}) as admin:
        admin.create_topics([NewTopic("same")])
    lost = batch_of(b"x", producer_id=803, producer_epoch=0, base_sequence=0, is_transactional=True)
    append(servers, TopicPartition("same", 0), lost, transactional_id="gone-803")


def test_an_answer_that_comes_after_pause_changes_nothing(broker: Broker, address: str, page: Page) -> None:
    page.goto(f"{address}/topics")
    held: list[Route] = []
    page.route("**/topics", lambda route: held.append(route))
    page.clock.run_for(2_100)
    while not held:
        page.wait_for_timeout(10)
    page.get_by_role("button", name="Pause updates").click()
    create(broker, "late")
    with page.expect_response("**/topics"):
        held[0].continue_()
    page.evaluate("new Promise(done => queueMicrotask(done))")
    page.clock.run_for(10_000)
    expect(page.locator("main")).not_to_contain_text("late")


@pytest.mark.parametrize("way", ["reload", "back"])
def test_no_browser_ticks_a_box_of_an_earlier_page(
    way: str, broker: Broker, address: str, page: Page
) -> None:
    in_thread(_create_and_hang, broker.bootstrap_servers)
    page.goto(f"{address}/transactions")
    page.get_by_role("checkbox").check()
    if way == "reload":
        page.reload()
    else:
        page.get_by_role("link", name="Groups").click()
        expect(page.locator("h1")).to_have_text("Groups")
        page.go_back()
    expect(page.get_by_role("checkbox")).not_to_be_checked()


def test_a_page_says_that_the_broker_is_gone_and_how_old_its_data_are(
    broker: Broker, address: str, page: Page
) -> None:
    create(broker, "kept")
    page.goto(f"{address}/topics")
    refresh(page)
    stale = page.locator("#stale")
    expect(stale).to_be_hidden()
    broker.stop()
    refresh(page)
    page.clock.run_for(9_000)
    expect(stale).to_be_visible()
    expect(stale).to_contain_text("cannot connect to 127.0.0.1")
    expect(stale).to_contain_text("s old")
    expect(page.locator("main")).to_contain_text("kept")


def test_pages_whose_own_server_is_gone_say_so(browser: Browser, broker: Broker, page: Page) -> None:
    create(broker, "kept")
    command = [sys.executable, "-m", "oncelog.cli.main", "web", "-b", broker.bootstrap_servers]
    command += ["--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        page.goto(child.stdout.readline().split()[-1] + "topics")
        child.kill()
        child.wait()
        page.clock.run_for(9_000)
    expect(page.locator("#stale")).to_contain_text("The pages' own server does not answer. What you see is")
    expect(page.locator("main")).to_contain_text("kept")


def test_a_server_that_does_not_answer_at_all_is_told(address: str, page: Page) -> None:
    page.goto(f"{address}/topics")
    page.route("**/*", lambda route: None)
    page.clock.run_for(9_000)
    expect(page.locator("#stale")).to_have_text("No answer: What you see is 9 s old.")


def test_updates_can_be_paused_and_resumed(broker: Broker, address: str, page: Page) -> None:
    page.goto(f"{address}/topics")
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))
    page.get_by_role("button", name="Pause updates").click()
    create(broker, "new")
    page.clock.run_for(60_000)
    assert requests == []
    page.reload()
    requests.clear()
    page.clock.run_for(60_000)
    assert [request.resource_type for request in requests if request.resource_type == "fetch"] == []
    page.get_by_role("button", name="Resume updates").click()
    expect(page.get_by_role("button", name="Pause updates")).to_be_visible()
    refresh(page)
    expect(page.locator("main")).to_contain_text("new")


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways_or_runs_what_a_name_says(
    width: int, broker: Broker, address: str, page: Page
) -> None:
    servers, hostile = broker.bootstrap_servers, "<img src=x onerror=alert(1)>\x1b[2J\u202e\u202eé中"
    create(broker, "n" * 249)
    page.set_viewport_size({"width": width, "height": 800})
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    with producer_of(servers, transactional_id=f"{hostile}{os.getpid()}") as producer:
        producer.init_transactions()
        long = f"/topics/{'n' * 249}"
        topics = ("/topics", long, f"{long}/messages")
        others = ("/transactions", "/groups", "/sinks", "/stories", "/stories/lost-ack", "/nowhere")
        for path in ("/", *topics, *others, "/transactions/nobody"):
            page.goto(f"{address}{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        page.goto(f"{address}/transactions")
        page.get_by_role("link", name="<img src=x").click()
        expect(page.locator("h1")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("img").count() == 0


def test_a_search_continues_by_itself_until_it_is_stopped_or_matches(
    page: Page, broker: Broker, address: str
) -> None:
    create(broker, "sought")
    with producer_of(broker.bootstrap_servers) as producer:
        for _ in range(24):  # a page reads at most 8 MB of a partition
            producer.send("sought", bytes(1_000_000)).result(60)
        producer.send("sought", b"wanted").result(60)
    page.goto(f"{address}/topics/sought/messages?value=wanted&partition=0&from=offset&at=0")
    page.get_by_text("Search from the beginning").click()
    expect(page.get_by_text("100 % of the offsets are searched")).to_be_visible()
    expect(page.locator("tr[data-key]")).to_contain_text("wanted")
    assert "at=0%3A" in page.url, "the address is that of the part with the match"

    held: list[Route] = []
    page.route("**/messages?*at=0%3A*go=1", lambda route: held.append(route))
    page.goto(f"{address}/topics/sought/messages?value=wanted&partition=0&from=each&at=&go=1")
    page.get_by_role("link", name="Stop").click()
    expect(page.get_by_role("link", name="Search on")).to_be_visible()
    assert page.locator("main").get_attribute("data-next") is None
