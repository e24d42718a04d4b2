"""Send every flight through the faulty network, under one of three delivery semantics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oncelog.errors import OncelogError
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy.events import Direction, WireEvent
from oncelog.testing.proxy.proxy import Proxy
from oncelog.testing.proxy.rules import Action, Rule
from oncelog_demo.flights import Flights


@dataclass(frozen=True, slots=True)
class Semantics:
    """A delivery guarantee, and the producer settings that provide it."""

    name: str
    topic: str
    settings: Mapping[str, object]

    def settings_text(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())


EXACTLY_ONCE = Semantics("exactly once", "flights", {"enable.idempotence": "true"})
AT_LEAST_ONCE = Semantics(
    "at least once", "flights-at-least-once", {"enable.idempotence": "false", "acks": "all"}
)
AT_MOST_ONCE = Semantics(
    "at most once", "flights-at-most-once", {"enable.idempotence": "false", "acks": "0", "retries": "0"}
)

# Settings of all three semantics. Short time-outs only shorten the demonstration; correctness does not depend
# on them.
COMMON_SETTINGS = {
    "request.timeout.ms": 2_000,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 200,
    "compression.type": "lz4",
}

FLUSH_TIMEOUT_S = 120.0


def fault_rules() -> list[Rule]:
    """Return the faults that the proxy injects into Produce requests and responses.

    The proxy's seed decides which messages the faults with a probability hit.
    """
    return [
        # The batch is stored but its acknowledgement is lost. Retries without idempotence double its records.
        Rule(action=Action.CUT, direction=Direction.RESPONSE, api="Produce", probability=0.01),
        # The request never arrives. Without a retry its records are lost.
        Rule(action=Action.CUT, direction=Direction.REQUEST, api="Produce", probability=0.005),
        # A later request overtakes this one. Without idempotence the batches are stored out of order.
        Rule(action=Action.HOLD, api="Produce", probability=0.01, release_after=1, delay_ms=100),
        Rule(action=Action.DELAY, direction=Direction.RESPONSE, api="Produce", probability=0.02, delay_ms=15),
        # This fault and the next two happen exactly once each, whatever the seed. On a slow machine the
        # producer sends few, full requests, so the faults with probabilities may hit none of them.
        Rule(action=Action.CUT, direction=Direction.RESPONSE, api="Produce", nth=12),
        Rule(action=Action.CUT, direction=Direction.REQUEST, api="Produce", nth=20),
        # The request is dropped, but the connection stays open.
        Rule(action=Action.DROP, direction=Direction.REQUEST, api="Produce", nth=40),
    ]


@dataclass(slots=True)
class Load:
    """The result of one load. Times are in seconds since the load started. `events` come from the proxy."""

    semantics: Semantics
    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    seconds: float = 0.0
    killed_at_s: float = 0.0
    restart_seconds: float = 0.0
    producer_id: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    events: list[WireEvent] = field(default_factory=list)


def run_load(
    semantics: Semantics,
    flights: Flights,
    broker: BrokerProcess,
    *,
    seed: int,
    rules: Sequence[Rule],
    on_progress: Callable[[Load], None],
    report_every: int = 5_000,
) -> Load:
    """Send all flights through a faulty network, and kill the broker after half of them were sent.

    `on_progress` is called after every `report_every` flights.
    """
    from oncelog import Producer

    load = Load(semantics)

    def delivered(_metadata: object, error: Exception | None) -> None:
        if error is None:
            load.acknowledged += 1
        else:
            load.failed += 1

    began = time.monotonic()
    with Proxy(broker.bootstrap_servers, rules=rules, seed=seed) as proxy:
        producer = Producer(
            {"bootstrap.servers": proxy.bootstrap_servers, **COMMON_SETTINGS, **semantics.settings}
        )
        try:
            for key, value, timestamp_ms in flights.records():
                producer.send(semantics.topic, value, key, timestamp_ms=timestamp_ms, on_delivery=delivered)
                load.sent += 1
                if load.sent == len(flights) // 2:
                    _kill_and_restart(broker, load, began)
                if load.sent % report_every == 0:
                    on_progress(load)
            producer.flush(FLUSH_TIMEOUT_S)
        finally:
            load.producer_id = producer.idempotence().producer_id
            load.metrics = dict(producer.metrics())
            producer.close(FLUSH_TIMEOUT_S)
        load.events = list(proxy.events)
    load.seconds = time.monotonic() - began
    on_progress(load)
    _check_all_reported(load)
    return load


def _kill_and_restart(broker: BrokerProcess, load: Load, began: float) -> None:
    broker.kill()
    load.killed_at_s = time.monotonic() - began
    load.restart_seconds = broker.start()


def _check_all_reported(load: Load) -> None:
    if load.acknowledged + load.failed != load.sent:
        unreported = load.sent - load.acknowledged - load.failed
        raise OncelogError(f"{load.semantics.name}: {unreported} records neither acknowledged nor failed")
