"""Every story is executed and passes its own checks. The tests below check some facts a second time."""

from __future__ import annotations

from itertools import groupby

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka

from oncelog.errors import MisuseError
from oncelog.explain.stories import STORIES, StoryRun, play
from oncelog.testing.proxy import Direction, Fate


def failed_checks(runs: list[StoryRun]) -> list[str]:
    """Return the statements of the story that turned out false."""
    return [check.text for run in runs for check in run.checks if not check.is_true]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("all-acked", marks=pytest.mark.behaviour("I13", "I5")),
        pytest.param("lost-ack", marks=pytest.mark.behaviour("I1", "I7", "I10")),
        pytest.param("lost-ack-without-idempotence", marks=pytest.mark.behaviour("I1")),
        pytest.param("lost-acks", marks=pytest.mark.behaviour("I13", "I7", "I10")),
        pytest.param("lost-batch", marks=pytest.mark.behaviour("I13", "I11", "I9")),
        pytest.param("unordered", marks=pytest.mark.behaviour("I9")),
        pytest.param("reorder", marks=pytest.mark.behaviour("I9", "I10")),
        pytest.param("cache-miss", marks=pytest.mark.behaviour("I12", "I13", "I3")),
        pytest.param("stale-epoch", marks=pytest.mark.behaviour("I14", "I11")),
        pytest.param("unknown-producer", marks=pytest.mark.behaviour("I15", "I16")),
        pytest.param("restart", marks=pytest.mark.behaviour("I17", "I1")),
        pytest.param("two-sessions", marks=pytest.mark.behaviour("I16", "I4")),
        pytest.param("producer-per-record", marks=pytest.mark.behaviour("I4", "I16")),
        pytest.param("delivery", marks=pytest.mark.behaviour("I25")),
        pytest.param("transaction", marks=pytest.mark.behaviour("T5", "T6")),
        pytest.param("lost-commit", marks=pytest.mark.behaviour("T13")),
        pytest.param("fenced", marks=pytest.mark.behaviour("T3")),
        pytest.param("restarts", marks=pytest.mark.behaviour("T3", "I4")),
    ],
)
def test_the_story_passes_its_checks(name: str) -> None:
    runs = play(name)
    assert failed_checks(runs) == []
    for run in runs:
        assert run.checks
        assert run.counts.sent > 0
        assert any(event.batches for event in run.events)


def test_every_story_has_a_title_and_a_text() -> None:
    assert len(STORIES) == 18
    for story in STORIES.values():
        assert story.title
        assert story.text.endswith(".")


@pytest.mark.behaviour("I1")
def test_a_lost_acknowledgement_doubles_records_only_without_idempotence() -> None:
    (on,) = play("lost-ack")
    (off,) = play("lost-ack-without-idempotence")
    assert (on.counts.stored, on.counts.lost, on.counts.doubled) == (3, 0, 0)
    assert (off.counts.stored, off.counts.lost, off.counts.doubled) == (6, 0, 3)
    assert on.log == [1, 2, 3]
    assert off.log == [1, 2, 3, 1, 2, 3]
    for run in (on, off):
        fates = [event.fate for event in run.events if event.outcomes]
        assert fates == [Fate.CUT, Fate.PASSED]


@pytest.mark.behaviour("I25")
def test_each_of_the_three_semantics_loses_or_doubles_as_named() -> None:
    most, least, exactly = (run.counts for run in play("delivery"))
    assert (most.lost > 0, most.doubled) == (True, 0)
    assert (least.lost, least.doubled > 0) == (0, True)
    assert (exactly.lost, exactly.doubled, exactly.stored) == (0, 0, exactly.sent)


@pytest.mark.behaviour("I14")
def test_the_late_batch_was_of_the_older_epoch() -> None:
    (run,) = play("stale-epoch")
    late = [e for e in run.events if e.fate is Fate.RELEASED and e.direction is Direction.REQUEST]
    epochs = [batch.producer_epoch for event in run.events for batch in event.batches]
    assert [batch.producer_epoch for event in late for batch in event.batches] == [0]
    assert max(epoch for epoch in epochs if epoch is not None) == 1


@pytest.mark.behaviour("T3")
def test_each_start_and_each_commit_raise_the_epoch_of_a_transactional_id() -> None:
    """With transaction version 0, only a start raises the epoch."""
    classic, now, plain = play("restarts")
    epochs = [
        [batch.producer_epoch for event in run.events if event.fate is Fate.PASSED for batch in event.batches]
        for run in (classic, now, plain)
    ]
    assert (epochs[0][:3], epochs[1][:3], epochs[2]) == ([0, 1, 2], [0, 2, 4], [0, 0, 0])


def test_an_unknown_story_is_misuse() -> None:
    with pytest.raises(MisuseError, match="no story 'lost'; there are all-acked"):
        play("lost")


@pytest.mark.behaviour("I1", "I7", "I9", "I13", "I15")
@pytest.mark.parametrize("name", [name for name in STORIES if name not in ("restart", "delivery")])
def test_apache_kafka_gives_the_same_results(apache_kafka: object, name: str) -> None:
    runs = play(name, apache_kafka.bootstrap_servers)  # type: ignore[attr-defined]
    assert failed_checks(runs) == []


def test_a_given_cluster_is_not_killed() -> None:
    with pytest.raises(MisuseError, match="leave --bootstrap-server out"):
        play("restart", "127.0.0.1:1")


@pytest.mark.behaviour("T5")
def test_a_transaction_has_its_steps_in_order() -> None:
    """The steps are in this order both in the messages and in the logs."""
    now, before, _ = play("transaction")
    requests = [e.api for e in now.events if e.direction is Direction.REQUEST]
    expected = ["FindCoordinator", "InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn"]
    assert _once([api for api in requests if api in expected and api != "FindCoordinator"]) == expected[1:]
    requests = [e.api for e in before.events if e.direction is Direction.REQUEST]
    flow = ["InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn"]
    assert _once([api for api in requests if api in flow]) == flow
    for run, added in ((now, 1), (before, 0)):
        # On a busy machine, InitProducerId may be repeated, and each repetition raises the epoch.
        epoch = [e.producer[1] for e in run.events if e.api == "InitProducerId" and e.producer][-1] + added
        states = [line.split("  ")[2] for line in run.written if line.startswith("__transaction_state")]
        assert _once(states) == ["Empty", "Ongoing", "PrepareCommit", "CompleteCommit"]
        markers = [line for line in run.written if "COMMIT marker" in line]
        assert [line.rpartition("-")[0] for line in markers] == [
            run.topic,
            run.topic,
            "__consumer_offsets",
        ]
        assert all(line.endswith(f"epoch {epoch}") for line in markers)


@pytest.mark.parametrize("name", ["transaction", "lost-commit", "fenced", "restarts"])
def test_the_story_passes_its_checks_on_apache_kafka(apache_kafka: ApacheKafka, name: str) -> None:
    theirs, ours = play(name, apache_kafka.bootstrap_servers), play(name)
    assert failed_checks(theirs) == []
    for run, other in zip(theirs, ours, strict=True):
        assert _states(run) == _states(other)


def _states(run: StoryRun) -> list[str]:
    """Return the states in the coordinator's log with their epochs. Successive equal states count as one."""
    log = [line.split("  ") for line in run.written if line.startswith("__transaction_state")]
    return _once([f"{state} {identity.split()[-1]}" for _, _, state, identity in log])


def _once(steps: list[str]) -> list[str]:
    """Remove each step that is equal to the previous one.

    A run may add partitions together or one by one, and may repeat a request while a coordinator loads.
    """
    return [step for step, _ in groupby(steps)]
