"""Runs all scenarios on one broker, reports how each one ended, and cleans up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from oncelog.conform.deadline import STEP_S, Deadline
from oncelog.conform.raw_connection import Endpoint, NoAnswer, RawConnection, Unsupported
from oncelog.conform.scenario_reader import Scenario
from oncelog.conform.scenario_run import Run, StepFailed
from oncelog.conform.target import NOT_READY, Target
from oncelog.conform.topic_pool import Names
from oncelog.conform.values import Mismatch
from oncelog.errors import OncelogError, TimedOut

Result = Literal["pass", "differs", "fail", "skipped"]
RESULTS: tuple[Result, ...] = ("pass", "differs", "fail", "skipped")
PROBE_S, CLEAN_UP_S = 10.0, 60.0
OUT_OF_TIME = "the time of the whole run was over"
NO_MORE_ANSWERS = "the broker does not answer any more"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of a scenario.

    The result `differs` means that the response is a documented deviation of Oncelog's broker from Apache
    Kafka; `reason` names the deviation's entry in docs/differences.md.
    """

    section: str
    scenario: str
    version: str | None
    """The API and the version under test, such as `Produce 12`."""
    result: Result
    reason: str | None = None
    step: str | None = None
    expected: str | None = None
    received: str | None = None

    def to_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """The time limits of one scenario and of the whole run, in seconds."""

    scenario_s: float = 30.0
    whole_s: float = 900.0


class Suite:
    """A test run that performs scenarios on a broker, one after the other."""

    def __init__(self, endpoints: Sequence[Endpoint], prefix: str, limits: Limits) -> None:
        """Choose the first address that answers. Raises OncelogError if none answers."""
        self.names = Names(f"{prefix}-{os.urandom(4).hex()}")
        self.limits = limits
        self._end = Deadline(limits.whole_s)
        self.target = Target(_first_that_answers(endpoints, self._end), self.names)
        self.stopped: str | None = None
        """The reason why the remaining scenarios were not run, or None."""

    def prepare(self) -> None:
        """Choose the node of a cluster, and create a topic to check that scenarios can run at all.

        Raises OncelogError.
        """
        deadline = self._end.within(self.limits.scenario_s)
        try:
            client = RawConnection(self.target.endpoint, deadline)
            try:
                self.target.choose_node(client)
            finally:
                client.close()
            client = RawConnection(self.target.endpoint, deadline)
            try:
                self.target.topics.take(client, self.target.creation(client), (), 1, deadline)
            finally:
                client.close()
        except NoAnswer as error:
            raise TimedOut(f"{self.target.endpoint.peer}: {error}") from error
        except (Mismatch, Unsupported) as error:
            raise OncelogError(f"{self.target.endpoint.peer}: {error}") from error

    def run(self, scenarios: Sequence[Scenario], *, newest_only: bool, keep: bool) -> Iterator[Outcome]:
        """Run the scenarios and yield their outcomes. Each section's topics and groups are deleted after it,
        unless `keep` is set or the broker does not answer any more. With `newest_only`, run only the newest
        version that the broker offers.
        """
        for section in dict.fromkeys(scenario.file for scenario in scenarios):
            for scenario in scenarios:
                if scenario.file == section:
                    yield from self._run_versions(scenario, newest_only=newest_only)
            if not keep and self.stopped != NO_MORE_ANSWERS:
                self._clean_up_after_section()

    def clean_up(self) -> None:
        """Delete all topics and groups that scenarios left. Raises OncelogError if the broker does not delete
        them.
        """
        try:
            self.target.clean_up(Deadline(CLEAN_UP_S), also_unused=True)
        except (Mismatch, Unsupported) as error:
            raise OncelogError(str(error)) from error

    def _clean_up_after_section(self) -> None:
        topics = list(self.target.topics.taken)
        try:
            self.target.clean_up(self._end.within(CLEAN_UP_S), also_unused=False)
        except (Mismatch, Unsupported, OncelogError):
            # `clean_up` will delete them later, and raise the error if there still is one.
            self.target.topics.taken += topics

    def _run_versions(self, scenario: Scenario, *, newest_only: bool) -> Iterator[Outcome]:
        versions = list(scenario.cases())
        if not newest_only:
            yield from (self._outcome(scenario, version) for version in versions)
            return
        outcome = None
        for version in reversed(versions):
            outcome = self._outcome(scenario, version)
            if outcome.result != "skipped":
                break
        assert outcome is not None
        yield outcome

    def _outcome(self, scenario: Scenario, version: int | None) -> Outcome:
        if not self._end.left_s():
            self.stopped = self.stopped or OUT_OF_TIME
        if self.stopped:
            return _outcome(scenario, version, "skipped", self.stopped)
        try:
            self.target.expects = "apache"
            self._run(scenario, version)
        except Unsupported as error:
            return _outcome(scenario, version, "skipped", str(error))
        except StepFailed as failure:
            if scenario.differs and self._has_documented_deviation(scenario, version):
                return _outcome(scenario, version, "differs", scenario.differs, failure)
            if not self._end.left_s():
                # The time limit of the whole run ended the scenario, so its failure proves nothing about the
                # broker. Guard: test_a_scenario_that_the_end_of_the_time_cuts_is_no_failure.
                self.stopped = OUT_OF_TIME
                return _outcome(scenario, version, "skipped", OUT_OF_TIME)
            if isinstance(failure.cause, NoAnswer) and not self._answers():
                self.stopped = NO_MORE_ANSWERS
            return _outcome(scenario, version, "fail", str(failure.cause), failure)
        return _outcome(scenario, version, "pass", None)

    def _run(self, scenario: Scenario, version: int | None) -> None:
        """Run a scenario. If it fails because a coordinator is still loading, run it again, until the
        scenario's deadline.
        """
        deadline = self._end.within(self.limits.scenario_s)
        while True:
            try:
                Run(scenario, version, self.target, deadline).run()
            except StepFailed as failure:
                is_loading = any(error in str(failure.cause) for error in NOT_READY)
                if not (is_loading and deadline.left_s()):
                    raise
            else:
                return
            deadline.pause(STEP_S)

    def _has_documented_deviation(self, scenario: Scenario, version: int | None) -> bool:
        """Run the scenario with the responses expected from Oncelog's broker. Return True if it passes."""
        self.target.expects = "oncelog"
        try:
            self._run(scenario, version)
        except (StepFailed, Unsupported):
            return False
        return True

    def _answers(self) -> bool:
        try:
            client = RawConnection(self.target.endpoint, self._end.within(PROBE_S))
            try:
                client.offer()
            finally:
                client.close()
        except (OncelogError, OSError, Mismatch):
            return False
        return True


def _outcome(
    scenario: Scenario,
    version: int | None,
    result: Result,
    reason: str | None,
    failure: StepFailed | None = None,
) -> Outcome:
    tested = f"{scenario.api.name} {version}" if scenario.api is not None and version is not None else None
    cause = failure.cause if failure else None
    return Outcome(
        section=scenario.file,
        scenario=scenario.title,
        version=tested,
        result=result,
        reason=reason,
        step=failure.step if failure else None,
        expected=getattr(cause, "expected", None),
        received=getattr(cause, "received", None),
    )


def _first_that_answers(endpoints: Sequence[Endpoint], deadline: Deadline) -> Endpoint:
    """Return the first endpoint that answers ApiVersions. If none does, raise the error of the last one."""
    last: OncelogError | None = None
    for endpoint in endpoints:
        try:
            client = RawConnection(endpoint, deadline)
            try:
                client.offer()
            finally:
                client.close()
            return endpoint
        except OncelogError as error:
            last = error
    assert last is not None
    raise last
