"""Clients that are interrupted: in threads by the scheduler and by signals, on asyncio by cancellations."""

from __future__ import annotations

import threading

import pytest

from oncelog.sim.blocking import play_threads
from oncelog.sim.cancelling import play_cancelled
from oncelog.sim.loop import NoRest
from oncelog.sim.scheduler import Scheduler
from oncelog.sim.world import World


def play_race(seed: int) -> tuple[int, list[int]]:
    """Two threads add to a number without a lock; what they got to, and the order of their steps."""
    world = World(seed)
    scheduler = Scheduler(world.loop, world.chance("scheduler"), 0.0)
    total, order = 0, list[int]()

    def add(number: int) -> None:
        nonlocal total
        for _ in range(3):
            before = total
            scheduler.give_way()
            total = before + 1
            order.append(number)

    with scheduler.patched():
        for number in range(2):
            threading.Thread(target=add, args=(number,)).start()
        world.loop.run_until(world.loop.create_future(), 1_000_000)
    return total, order


def test_threads_race_as_the_seed_says() -> None:
    results = [play_race(seed) for seed in range(20)]
    assert results == [play_race(seed) for seed in range(20)]
    assert {total for total, _ in results} > {6} and len({tuple(order) for _, order in results}) > 5


def test_conditions_and_timeouts_of_threads_are_in_virtual_time() -> None:
    world = World(1)
    scheduler = Scheduler(world.loop, world.chance("scheduler"), 0.0)
    seen: list[object] = []

    def wait(event: threading.Event) -> None:
        seen.append((event.wait(5.0), world.now_us // 1_000_000))
        seen.append((event.wait(50.0), world.now_us // 1_000_000))

    with scheduler.patched():
        event = threading.Event()
        threading.Thread(target=wait, args=(event,)).start()
        world.later(20.0, lambda: threading.Thread(target=event.set).start())
        world.loop.run_until(world.loop.create_future(), 100_000_000)
    assert seen == [(False, 5), (True, 20)]


def test_threads_without_rest_are_noticed_and_ended() -> None:
    world = World(1)
    scheduler = Scheduler(world.loop, world.chance("scheduler"), 0.0)
    before = threading.active_count()

    def turn() -> None:
        while True:
            scheduler.switch()

    with scheduler.patched():
        for _ in range(2):
            threading.Thread(target=turn).start()
        with pytest.raises(NoRest):
            world.loop.run_until(world.loop.create_future(), 1_000_000)
    assert threading.active_count() == before


@pytest.mark.parametrize("play", [play_threads, play_cancelled])
def test_a_seed_gives_the_same_run_again(play: object) -> None:
    assert callable(play)
    for seed in range(6):
        one, other = play(seed), play(seed)
        assert (one.digest, one.timeline) == (other.digest, other.timeline)
