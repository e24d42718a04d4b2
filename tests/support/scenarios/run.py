"""Scenarios of tests: those of oncelog.conform and of tests/scenarios, on a broker that steps may restart."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from oncelog.client.connection.cluster import parse_bootstrap
from oncelog.config import ADMIN
from oncelog.conform.context import Context, Verbs
from oncelog.conform.deadline import Deadline
from oncelog.conform.raw_connection import Endpoint
from oncelog.conform.scenario_reader import FOLDER, Scenario, read_scenarios
from oncelog.conform.scenario_run import Run
from oncelog.conform.target import Expectations, Target
from oncelog.conform.topic_pool import Names, TopicPool, wait_until_led
from support import TESTS
from support.scenarios.consumer_groups import ConsumerGroupSteps
from support.scenarios.groups import GroupSteps

LIMIT_S = 240.0
EPOCHS_OF_A_RESTART = 2
"""The rise of leader epochs over a restart of Apache Kafka: once when the broker is fenced, and once when it
is elected again.
"""


class RestartableBroker(Protocol):
    """A broker that steps may restart."""

    target: Target
    epochs_rise: bool
    """True if a restart gives every partition a new leader epoch."""

    def restart(self, *, kill: bool) -> str:
        """Stop the broker by SIGTERM or SIGKILL, start it, and return its address."""
        ...


def all_scenarios() -> list[Scenario]:
    return read_scenarios(FOLDER, TESTS / "scenarios")


def endpoint_of(address: str) -> Endpoint:
    ((host, port),) = parse_bootstrap([address])
    return Endpoint(host, port, ADMIN.parse({"client.id": "raw"}))


def target_at(address: str, expects: Expectations) -> Target:
    return Target(endpoint_of(address), Names("conformance"), expects)


def run_scenario(scenario: Scenario, version: int | None, broker: RestartableBroker) -> None:
    """Run a scenario. Raises StepFailed if an expectation is wrong, and Unsupported if the broker lacks a
    version.
    """
    more = (GroupSteps, ConsumerGroupSteps, partial(RestartSteps, broker))
    Run(scenario, version, broker.target, Deadline(LIMIT_S), more).run()


class RestartSteps:
    """Steps that stop the broker and start it again."""

    def __init__(self, broker: RestartableBroker, context: Context) -> None:
        self._broker, self._context = broker, context
        self.verbs: Verbs = {
            "restart": lambda: self._restart(kill=False),
            "kill": lambda: self._restart(kill=True),
        }

    def _restart(self, *, kill: bool) -> None:
        """Restart the broker, and wait for leaders of the scenario's topics."""
        context, target = self._context, self._context.target
        context.disconnect()
        target.endpoint = endpoint_of(self._broker.restart(kill=kill))
        # Use new topics after the restart, so that those of each scenario begin at leader epoch 0.
        target.topics = TopicPool(target.names)
        context.restarts += 1
        # The broker of Apache Kafka shows its old epochs until the controller has fenced it and elected it
        # again.
        epochs = EPOCHS_OF_A_RESTART * context.restarts
        counts, min_epoch = context.partition_counts, epochs if self._broker.epochs_rise else -1
        wait_until_led(context.client, counts, min_epoch, context.deadline)
