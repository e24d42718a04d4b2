"""Our broker and Apache Kafka must give the same responses to random sequences of requests
(tests/differential).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from differential.brokers import COMMON, apache_broker, oncelog_broker
from differential.operations import all_subjects, draw
from differential.runner import Fixed, Outcome, Pair
from differential.sequence import RESTARTS, Sequence, Subject
from differential.shrink import shrink
from differential.transcript import transcript

import oncelog

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
SUBJECTS = all_subjects()
SEQUENCES = 300
"""Number of sequences in a test run. They are shared among the subjects by their weights."""
WEIGHTS = sum(subject.weight for subject in SUBJECTS.values())


@pytest.fixture(scope="module")
def pair(kafka_class_path: str) -> Iterator[Pair]:
    """Yield both brokers. They have an authorizer and a listener on which clients log in, and permit short
    time-outs.
    """
    with oncelog_broker() as ours, apache_broker() as theirs:
        yield Pair(ours, theirs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, subject in SUBJECTS.items() if subject.weight])
def test_both_brokers_answer_random_sequences_the_same(pair: Pair, name: str) -> None:
    subject = SUBJECTS[name]
    drawn = [draw(subject, seed) for seed in range(SEQUENCES * subject.weight // WEIGHTS)]
    jobs = 8 if any(step.kind == "pause" for sequence in drawn for step in sequence.steps) else 2
    outcomes = pair.play_all([(sequence, subject.rules) for sequence in drawn], jobs)
    suspects = [outcome for outcome in outcomes if outcome.difference is not None]
    failed = [again for outcome in suspects if (again := pair.confirmed(outcome, subject.rules))]
    assert not failed, _report(pair, subject, failed)


def _report(pair: Pair, subject: Subject, failed: list[Outcome]) -> str:
    shortest = min(failed, key=lambda outcome: len(outcome.sequence.steps))
    shrunk, kept = shrink(shortest, lambda sequence: pair.run_sequence(sequence, subject.rules))
    seeds = [outcome.sequence.seed for outcome in failed]
    return f"differences in the sequences {seeds}\n{transcript(shrunk, kept)}"


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_seed_draws_the_same_sequence_each_time(name: str) -> None:
    subject = SUBJECTS[name]
    for seed in range(50):
        sequence = draw(subject, seed)
        assert sequence == draw(subject, seed)
        json.dumps([step.body for step in (*sequence.steps, *sequence.observations)])


def test_every_rule_names_its_entry_among_the_differences() -> None:
    text = DIFFERENCES.read_text()
    rules = [rule for subject in SUBJECTS.values() for rule in subject.rules]
    assert [rule.name for rule in rules if rule.key and rule.key not in text] == []


def test_a_planted_difference_is_found_and_shrunk_to_the_request_that_shows_it() -> None:
    """The planted difference: one broker permits a transaction timeout that the other one refuses."""
    subject = SUBJECTS["transactions"]
    with oncelog.Broker() as one, oncelog.Broker(config={"transaction.max.timeout.ms": 59_999}) as other:
        pair = Pair(Fixed(one.bootstrap_servers), Fixed(other.bootstrap_servers))

        def run_sequence(sequence: Sequence) -> Outcome:
            return pair.run_sequence(sequence, subject.rules)

        outcome, kept = shrink(run_sequence(draw(subject, 0)), run_sequence)
    assert outcome.difference is not None
    assert (outcome.difference.ours, outcome.difference.theirs) == ("NONE", "INVALID_TRANSACTION_TIMEOUT")
    assert len(kept) == 1 and len(outcome.sequence.steps) == 1
    assert "error_code: ours NONE, Kafka INVALID_TRANSACTION_TIMEOUT" in transcript(outcome, kept)


def with_each_api(subject: Subject, seeds: int) -> list[Sequence]:
    """Draw a sequence for each seed, and return those with an API that no earlier one has."""
    seen, chosen = set[str](), []
    for sequence in (draw(subject, seed) for seed in range(seeds)):
        apis = {step.api for step in sequence.steps}
        if not apis <= seen:
            seen |= apis
            chosen.append(sequence)
    return chosen


def test_the_same_broker_twice_shows_no_difference() -> None:
    """Values that each broker assigns (producer ids, topic ids, timestamps) must not count as differences."""
    with oncelog.Broker(config=COMMON) as one, oncelog.Broker(config=COMMON) as other:
        pair = Pair(Fixed(one.bootstrap_servers), Fixed(other.bootstrap_servers))
        subjects = [subject for subject in SUBJECTS.values() if subject.weight and not subject.secured]
        drawn = [sequence for subject in subjects for sequence in with_each_api(subject, seeds=8)]
        at_once = [
            (sequence, ())
            for sequence in drawn
            if not {step.kind for step in sequence.steps} & {*RESTARTS, "pause"}
        ]
        outcomes = list(pair.play_all(at_once, jobs=2))
    assert [transcript(outcome) for outcome in outcomes if outcome.difference is not None] == []
