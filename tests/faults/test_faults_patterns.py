"""The producer under seeded faults of every kind: its log and its messages are checked afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oncelog.explain.stories import StoryEnvironment, StoryRun
from oncelog.explain.stories.flows import numbers
from oncelog.explain.stories.story_run import PATIENCE_SECONDS
from oncelog.testing.proxy import Direction, Fate, Rule, WireEvent

BATCHES = 40
SENT_BY_CLIENT = {Fate.PASSED, Fate.DROPPED, Fate.CUT, Fate.HELD, Fate.FORGED}
REACHED_CLIENT = {Fate.PASSED, Fate.RELEASED}
Key = tuple[int | None, int | None, int | None]


def faults() -> list[Rule]:
    return [
        Rule(action="cut", api="Produce", direction="response", probability=0.10),
        Rule(action="cut", api="Produce", direction="request", probability=0.05),
        Rule(action="hold", api="Produce", probability=0.10, release_after=1, delay_ms=150),
        Rule(action="duplicate", api="Produce", probability=0.10),
        Rule(action="fail", api="Produce", probability=0.05, error="NOT_ENOUGH_REPLICAS"),
        Rule(action="fail", api="Produce", direction="response", probability=0.05, error="REQUEST_TIMED_OUT"),
    ]


def play(seed: int) -> StoryRun:
    """Send one batch without faults, and then a load with faults.

    The first batch makes the producer known. A broker accepts any first sequence of an unknown producer.
    """
    with (
        StoryEnvironment() as environment,
        environment.run("every kind of fault", seed=seed) as run,
        run.producer() as producer,
    ):
        run.send(producer, numbers(1))
        producer.flush(PATIENCE_SECONDS)
        for rule in faults():
            run.proxy.add(rule)
        run.send(producer, [number for number in numbers(BATCHES) if number not in numbers(1)])
        producer.flush(PATIENCE_SECONDS)
    return run


def sent_by_client(event: WireEvent) -> list[Key]:
    """Return the batches of each request that the client sent. Copies that the proxy made are left out."""
    is_copy = event.detail == "a copy"
    if event.direction is not Direction.REQUEST or event.fate not in SENT_BY_CLIENT or is_copy:
        return []
    return [(b.producer_epoch, b.base_sequence, b.last_sequence) for b in event.batches]


def check_the_wire(events: Sequence[WireEvent]) -> None:
    """Check that no batch has two sequences, no acknowledged batch is sent again, and at most five are in
    flight.
    """
    requests: dict[tuple[int, int], list[Key]] = {}
    acknowledged: set[Key] = set()
    outstanding: set[Key] = set()
    for event in events:
        journey = (event.connection, event.correlation_id)
        for key in sent_by_client(event):
            assert key not in acknowledged, f"{key} was sent again after its acknowledgement"
            requests.setdefault(journey, []).append(key)
            outstanding.add(key)
            assert len(outstanding) <= 5
        if event.fate in REACHED_CLIENT and any(o.error_code == 0 for o in event.outcomes):
            acknowledged.update(requests[journey])
            outstanding.difference_update(requests[journey])
    assert not outstanding
    assert {first for _, first, _ in acknowledged} == set(range(0, 3 * BATCHES, 3))
    assert {epoch for epoch, _, _ in acknowledged} == {0}


@pytest.mark.behaviour("I1", "I7", "I9", "I10")
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_every_record_once_and_in_order_under_any_pattern(seed: int) -> None:
    check(play(seed))


@pytest.mark.behaviour("I9", "I15")
def test_the_first_batch_of_a_new_producer_is_lost_on_its_way_and_comes_later() -> None:
    lost = Rule(action="fail", api="Produce", nth=1, error="NOT_ENOUGH_REPLICAS")
    with (
        StoryEnvironment() as environment,
        environment.run("the first batch fails", [lost]) as run,
        run.producer() as producer,
    ):
        run.send(producer, numbers(BATCHES))
        producer.flush(PATIENCE_SECONDS)
    assert run.log == list(numbers(BATCHES))


def check(run: StoryRun) -> None:
    assert run.log == list(numbers(BATCHES))
    assert run.counts.acknowledged == run.counts.sent
    assert sum(event.fate is not Fate.PASSED for event in run.events) > 5
    check_the_wire(run.events)
