"""Rows that our sink's two modes lose or double under faults. Spark's own sink is measured for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.spark.faults import CALM, FAULTS, Leg, Outcome, Query, run, table

from oncelog.spark.audit.audit import audit_topic
from oncelog.testing.broker_process import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(3600)]

MATRIX = [Query(sink, broker) for sink in ("lane", "batch", "kafka") for broker in ("ours", "apache")]
QUICK = [
    Query("batch", "ours", (Leg("local", ("driver in write",)), Leg("local", ("worker",)))),
]
DOUBLING = {
    "task raises",
    "worker",
    "executor",
    "driver in write",
    "driver before commit",
    "driver in commit",
    "speculation",
    "query stopped",
}
"""Faults after which Spark's own sink writes rows again that it had already stored."""

SECOND = {"lane": "another attempt took over", "batch": "had begun to write"}
"""If two attempts write at the same time, the error text of the second one, for each mode of our sink."""

Runner = Callable[[Query], Outcome]


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a function that runs a query when it is first requested, and then returns the same outcome.

    If a query fails, all tests that request it fail.
    """
    done: dict[str, Outcome | BaseException] = {}
    directory = tmp_path_factory.mktemp("faults")

    def ask(query: Query) -> Outcome:
        if str(query) not in done:
            broker = served if query.broker == "ours" else request.getfixturevalue("apache_kafka")
            try:
                done[str(query)] = run(query, broker, directory / str(query))
            except (Exception, pytest.skip.Exception, pytest.fail.Exception) as error:
                done[str(query)] = error
        found = done[str(query)]
        if isinstance(found, BaseException):
            raise found
        return found

    with BrokerProcess(directory / "data") as served:
        yield ask


def cells() -> Iterator[Any]:
    for query in [*QUICK, *MATRIX]:
        for fault in dict.fromkeys(query.faults):
            marks = [] if query in QUICK else [pytest.mark.soak]
            yield pytest.param(query, fault, id=f"{query}-{fault}", marks=marks)


@pytest.mark.behaviour("P2", "P3", "T11")
@pytest.mark.parametrize(("query", "fault"), list(cells()))
def test_rows_are_stored_once_under_each_fault(outcome_of: Runner, query: Query, fault: str) -> None:
    outcome = outcome_of(query)
    lost, doubled = outcome.lost_and_doubled(fault)
    if query.sink == "kafka":
        assert lost == 0
        assert doubled or fault not in DOUBLING
    else:
        assert (lost, doubled) == (0, 0)


@pytest.mark.behaviour("P2", "P3")
@pytest.mark.parametrize(
    "query", [*QUICK, *(pytest.param(query, marks=pytest.mark.soak) for query in MATRIX)], ids=str
)
def test_the_audit_finds_the_same_doubled_rows(spark: Any, outcome_of: Runner, query: Query) -> None:
    outcome = outcome_of(query)
    result = audit_topic(spark, outcome.servers, outcome.topic, key_check=True)
    assert result.keys is not None
    doubled = sum(outcome.lost_and_doubled(fault)[1] for fault in dict.fromkeys(query.faults))
    if query.sink == "kafka":
        assert result.verdict == "violated" and doubled >= result.keys.repeated > 0
        return
    assert result.verdict == "clean" and doubled == 0, result.findings[:5]
    assert query.sink != "lane" or outcome.has_order
    # The faults really happened: attempts failed halfway, and read_committed readers do not see their rows.
    happened = {name.partition("-")[2] for name in outcome.files if name.startswith("happened")}
    assert happened == {str(n) for n, fault in enumerate(query.faults) if fault != CALM}
    assert outcome.all_rows > len(outcome.rows)


@pytest.mark.soak
@pytest.mark.parametrize("query", [each for each in MATRIX if each.sink != "kafka"], ids=str)
def test_the_faults_include_two_attempts_that_wrote_and_lost_responses(
    outcome_of: Runner, query: Query
) -> None:
    outcome = outcome_of(query)
    batch = query.faults.index("speculation")
    failures = [text for name, text in outcome.files.items() if name.startswith(f"failed-{batch}-")]
    assert any(SECOND[query.sink] in text for text in failures)
    assert outcome.cuts >= 3


@pytest.mark.soak
def test_the_table_of_lost_and_doubled_rows_is_printed(
    outcome_of: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is for docs/spark.md. Figures of Spark's own sink differ from run to run."""
    outcomes = [outcome_of(query) for query in MATRIX]
    with capsys.disabled():
        print("", "Rows lost/doubled, of 120 in each micro-batch:", table(outcomes), sep="\n")
    assert all(outcome.lost_and_doubled(fault)[0] == 0 for outcome in outcomes for fault in FAULTS)
