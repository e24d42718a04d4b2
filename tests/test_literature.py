"""docs/literature.md, the page of claims, is up to date. Each claim has a verdict, a reason, a command and
existing tests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from oncelog_bench.page import target_rows
from support.tool import load_tool
from test_docs import _check_command
from test_language import sentences

from oncelog.config import BROKER, CONSUMER, INT32_MAX, PRODUCER
from oncelog.explain.stories import STORIES
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
CONFORM = ROOT / "src" / "oncelog" / "conform"


literature = load_tool("literature")
SOURCES, CLAIMS = literature.load()
each_claim = pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)


def test_guides_with_figures_are_fresh() -> None:
    guides = literature.render_guides()
    assert {path.stem for path in guides} == {"choosing", "sizing", "scale", "comparison"}
    assert [path.name for path, text in guides.items() if path.read_text() != text] == [], (
        "run: make reference"
    )


def test_the_page_on_performance_names_the_missed_targets() -> None:
    page = (ROOT / "docs" / "internals" / "performance.md").read_text()
    named = [line.removeprefix("- ") for line in page.splitlines() if line.startswith("- ")]
    missed = [row["target"] for row in target_rows(ROOT / "bench" / "results") if row["met"] is False]
    assert sorted(named) == sorted(missed)


@pytest.mark.behaviour("I30")
def test_the_page_of_claims_is_fresh() -> None:
    assert literature.PAGE_FILE.read_text() == literature.render(), "run: make reference"


@pytest.mark.behaviour("I30")
def test_every_source_has_claims() -> None:
    assert len(CLAIMS) > 70
    assert {name[0] for name in CLAIMS} == set(SOURCES) == set("ABCDE")
    assert len({claim["says"] + claim["source"] for claim in CLAIMS.values()}) == len(CLAIMS)


@pytest.mark.behaviour("I30")
@each_claim
def test_a_claim_has_a_verdict_and_a_reason_of_one_or_two_sentences(claim: dict[str, Any]) -> None:
    assert set(claim) - {"since", "name"} == {"source", "says", "verdict", "reason", "command", "tests"}
    assert claim["verdict"] in ("true", "wrong")
    if "since" in claim:
        assert claim["verdict"] == "true" and re.fullmatch(r"\d\.\d+", claim["since"])
    assert 1 <= len(list(sentences(literature.reason_of(claim)))) <= 2


@pytest.mark.behaviour("I30")
@each_claim
def test_the_tests_and_scenarios_of_a_claim_exist(claim: dict[str, Any]) -> None:
    assert claim["tests"]
    for named in claim["tests"]:
        scenario = re.fullmatch(r"(scenarios/\w+\.md): (.+)", named)
        if scenario:
            files = [folder / scenario[1] for folder in (CONFORM, TESTS)]
            assert any(f"\n## {scenario[2]}\n" in file.read_text() for file in files if file.exists()), named
            continue
        test = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?", named)
        assert test, named
        assert f"\ndef {test[2]}(" in (TESTS / test[1]).read_text(), named
        assert test[3] is None or test[3] in STORIES, named


@pytest.mark.behaviour("I30")
@each_claim
def test_the_command_of_a_claim_can_be_given(claim: dict[str, Any]) -> None:
    """Other tests play the stories of `oncelog explain`, so here it is enough that the named story exists."""
    words = claim["command"].split()
    assert words[0] == "oncelog"
    _check_command(" ".join(words[1:]))
    if words[1] == "explain":
        assert words[2] in STORIES


def test_a_figure_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"idempotence\.json has no records_per_s"):
        literature.figure_of("idempotence records_per_s client=nobody")


def test_figures_are_compared_as_their_descriptions_say(monkeypatch: pytest.MonkeyPatch) -> None:
    medians = [{"k": 1, "mb": 40.0, "ratio": 0.8}, {"k": 5, "mb": 100.0}]
    monkeypatch.setattr(literature, "_result", lambda name: {"medians": medians})
    shown = [
        literature.figure_of(f"x {text}")
        for text in (
            "mb k=5",
            "ratio k=1 as=loss",
            "ratio k=1 as=gain",
            "ratio k=1 as=inverse",
            "ratio k=1 times=100",
        )
    ]
    assert shown == ["100", "20.0", "-20.0", "25.0", "80"]


@pytest.mark.behaviour("I30")
def test_defaults_that_the_sources_name() -> None:
    producer = {
        "enable.idempotence": True,
        "acks": "all",
        "retries": INT32_MAX,
        "max.in.flight.requests.per.connection": 5,
        "delivery.timeout.ms": 120_000,
        "transaction.timeout.ms": 60_000,
    }
    broker = {
        "transactional.id.expiration.ms": 7 * 24 * 3_600_000,
        "transaction.max.timeout.ms": 15 * 60_000,
        "transaction.state.log.num.partitions": 50,
        "transaction.state.log.segment.bytes": 100 * 1024 * 1024,
        "transaction.state.log.replication.factor": 1,
        "producer.id.expiration.ms": 24 * 3_600_000,
    }
    consumer = {"isolation.level": "read_committed", "enable.auto.commit": True}
    for table, expected in ((PRODUCER, producer), (BROKER, broker), (CONSUMER, consumer)):
        defaults = {key: setting.default for key in expected if (setting := table.get(key)) is not None}
        assert defaults == expected


@pytest.mark.behaviour("I30")
def test_a_batch_has_the_same_size_with_and_without_a_producer_id() -> None:
    records = [NewRecord(1_700_000_000_000, b"key", b"value")] * 3
    plain = build_batch(records)
    numbered = build_batch(records, producer_id=2**40, producer_epoch=7, base_sequence=2**30)
    assert len(plain) == len(numbered)
