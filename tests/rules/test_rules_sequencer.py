"""The sequencer: which batches are sent, which get new sequences, and which fail."""

from __future__ import annotations

import pytest

from oncelog.rules.idempotence.sequencer import (
    MAX_EPOCH,
    OutOfOrder,
    PartitionSequencer,
    ProducerIdAndEpoch,
    SequencedBatch,
    next_epoch,
)

FIRST = ProducerIdAndEpoch(7, 0)
SECOND = ProducerIdAndEpoch(7, 1)
RECORDS = 3
Sequences = PartitionSequencer[SequencedBatch]


def warm(**options: object) -> Sequences:
    """Return a sequencer whose first batch, with the sequences 0 to 2, the broker has acknowledged."""
    sequences: Sequences = PartitionSequencer(**options)  # type: ignore[arg-type]
    batch = SequencedBatch(RECORDS)
    sequences.assign_sequence(batch, FIRST)
    sequences.on_stored(batch)
    return sequences


def sent(sequences: Sequences, count: int, identity: ProducerIdAndEpoch = FIRST) -> list[SequencedBatch]:
    """Assign sequences to `count` new batches, which are then in flight, and return them."""
    batches = []
    for _ in range(count):
        assert sequences.may_assign_sequence(identity)
        batches.append(SequencedBatch(RECORDS))
        sequences.assign_sequence(batches[-1], identity)
    return batches


def bases(batches: list[SequencedBatch]) -> list[int | None]:
    return [batch.base_sequence for batch in batches]


@pytest.mark.behaviour("I5")
def test_sequences_start_at_0_step_by_records_and_wrap() -> None:
    sequences = warm()
    sequences.next_sequence = 2**31 - 2
    assert bases(sent(sequences, 2)) == [2**31 - 2, 1]


@pytest.mark.behaviour("I10", "I15")
def test_the_first_batch_of_an_id_goes_alone() -> None:
    sequences: Sequences = PartitionSequencer()
    (first,) = sent(sequences, 1)
    assert not sequences.may_assign_sequence(FIRST)
    sequences.on_stored(first)
    assert bases(sent(sequences, 5)) == [3, 6, 9, 12, 15]


@pytest.mark.behaviour("I10")
def test_five_are_unacknowledged_at_most() -> None:
    sequences = warm()
    batches = sent(sequences, 5)
    assert not sequences.may_assign_sequence(FIRST)
    sequences.on_stored(batches[0])
    assert sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I10")
def test_acknowledged_batches_count_as_long_as_one_before_them_is_not() -> None:
    sequences = warm()
    lowest, *later = sent(sequences, 5)
    for batch in later:
        sequences.on_stored(batch)
    assert not sequences.may_assign_sequence(FIRST), (
        "a sixth would push the lowest out of the broker's memory"
    )
    sequences.on_stored(lowest)
    assert sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I9", "I11")
def test_only_the_first_in_flight_is_sent_again_with_its_own_sequence() -> None:
    sequences = warm()
    batches = sent(sequences, 3)
    for batch in reversed(batches):
        sequences.on_no_outcome(batch, may_be_stored=True)
    assert not sequences.may_assign_sequence(FIRST)
    for batch in batches:
        assert sequences.next_retry() is batch
        sequences.send(batch)
        assert sequences.next_retry() is None
        sequences.on_stored(batch)
    assert bases(batches) == [3, 6, 9]


@pytest.mark.behaviour("I9")
def test_out_of_order_behind_another_is_a_reordering() -> None:
    sequences = warm()
    first, second = sent(sequences, 2)
    assert sequences.on_out_of_order(second) is OutOfOrder.RETRY
    sequences.on_stored(first)
    assert sequences.next_retry() is second
    assert (second.identity, second.base_sequence) == (FIRST, 6)
    assert not sequences.is_restart_needed


@pytest.mark.behaviour("I12")
def test_out_of_order_as_the_first_in_flight_restarts_the_sequences() -> None:
    sequences = warm()
    first, second = sent(sequences, 2)
    assert sequences.on_out_of_order(first) is OutOfOrder.RENUMBER
    assert not sequences.is_restart_due, "the second is still on the wire"
    assert sequences.on_out_of_order(second) is OutOfOrder.RETRY
    assert sequences.is_restart_due
    sequences.restart(SECOND)
    assert bases([first, second]) == [0, 3]
    assert {first.identity, second.identity} == {SECOND}
    assert sequences.next_retry() is first


@pytest.mark.behaviour("I12", "I13")
def test_a_batch_that_may_be_stored_is_never_renumbered_in_safe_mode() -> None:
    sequences = warm()
    (batch,) = sent(sequences, 1)
    sequences.on_no_outcome(batch, may_be_stored=True)
    sequences.send(batch)
    assert sequences.on_out_of_order(batch) is OutOfOrder.GIVE_UP
    assert sequences.unacknowledged == []
    assert sequences.is_restart_due


@pytest.mark.behaviour("I13")
def test_without_safe_mode_it_is_renumbered_and_may_be_doubled() -> None:
    sequences = warm(limit=6, safe_mode=False)
    (batch,) = sent(sequences, 1)
    sequences.on_no_outcome(batch, may_be_stored=True)
    sequences.send(batch)
    assert sequences.on_out_of_order(batch) is OutOfOrder.RENUMBER
    sequences.restart(SECOND)
    assert (batch.identity, batch.base_sequence) == (SECOND, 0)


@pytest.mark.behaviour("I11")
def test_a_rejected_batch_leaves_a_gap_and_a_lost_one_is_resolved_by_its_successor() -> None:
    refused = warm()
    first, second = sent(refused, 2)
    refused.on_no_outcome(first, may_be_stored=False)
    refused.on_given_up(first)
    assert refused.is_restart_needed
    assert refused.on_out_of_order(second) is OutOfOrder.RETRY
    assert refused.is_restart_due

    lost = warm()
    first, second = sent(lost, 2)
    lost.on_no_outcome(first, may_be_stored=True)
    lost.on_given_up(first)
    assert not lost.may_assign_sequence(FIRST), "whether the numbers go on is not known yet"
    lost.on_stored(second)
    assert not lost.is_restart_needed
    assert lost.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I11")
def test_a_lost_batch_without_successor_starts_a_new_epoch() -> None:
    sequences = warm()
    (batch,) = sent(sequences, 1)
    sequences.on_no_outcome(batch, may_be_stored=True)
    sequences.on_given_up(batch)
    assert sequences.is_restart_due
    sequences.restart(SECOND)
    assert bases(sent(sequences, 1, SECOND)) == [0]


def test_another_producer_id_waits_until_nothing_is_in_flight() -> None:
    sequences = warm()
    (batch,) = sent(sequences, 1)
    assert not sequences.may_assign_sequence(SECOND)
    sequences.on_stored(batch)
    assert bases(sent(sequences, 1, SECOND)) == [0]


def test_the_parts_of_a_split_batch_divide_its_sequences() -> None:
    sequences = warm()
    large, later = sent(sequences, 2)
    large.is_on_wire = False
    parts = [SequencedBatch(1), SequencedBatch(2)]
    sequences.split(large, parts)
    assert bases([*parts, later]) == [3, 4, 6]
    assert sequences.unacknowledged == [*parts, later]
    assert sequences.next_retry() is parts[0]
    with pytest.raises(ValueError, match="must hold its records"):
        sequences.split(later, [SequencedBatch(1)])


@pytest.mark.behaviour("I10")
def test_the_parts_of_a_split_batch_count_toward_the_five() -> None:
    sequences = warm()
    large, later, *_ = sent(sequences, 3)
    for batch in list(sequences.unacknowledged):
        sequences.on_no_outcome(batch, may_be_stored=False)
    parts = [SequencedBatch(1) for _ in range(RECORDS)]
    sequences.split(large, parts)
    for batch in sequences.unacknowledged:
        sequences.send(batch)
    assert not sequences.may_assign_sequence(FIRST), "five are numbered"
    sequences.on_stored(parts[0])
    assert len(sent(sequences, 1)) == 1
    for part in parts[1:]:
        sequences.on_stored(part)
    # Three batches are in flight: `later`, the one after it and the sixth. So two more may follow.
    assert sequences.unacknowledged[0] is later
    assert len(sent(sequences, 2)) == 2
    assert not sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I11")
def test_of_two_lost_batches_only_a_successor_of_the_higher_proves_both_stored() -> None:
    sequences = warm()
    lowest, between, highest, successor = sent(sequences, 4)
    for batch in (lowest, highest):
        sequences.on_no_outcome(batch, may_be_stored=True)
    sequences.on_given_up(highest)
    sequences.on_given_up(lowest)
    sequences.on_stored(between)
    assert not sequences.may_assign_sequence(FIRST), "nothing proves that the higher one is stored"
    sequences.on_stored(successor)
    assert sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I11")
def test_parts_below_a_lost_batch_do_not_prove_it_stored() -> None:
    sequences = warm()
    large, lost, successor = sent(sequences, 3)
    sequences.on_no_outcome(lost, may_be_stored=True)
    sequences.on_given_up(lost)
    sequences.on_no_outcome(large, may_be_stored=False)
    parts = [SequencedBatch(1) for _ in range(RECORDS)]
    sequences.split(large, parts)
    for part in parts:
        sequences.on_stored(part)
        assert not sequences.may_assign_sequence(FIRST)
    sequences.on_stored(successor)
    assert sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I11")
def test_after_a_gap_a_batch_that_may_be_stored_is_sent_again_once_nothing_is_in_flight() -> None:
    sequences = warm()
    refused, maybe, on_wire = sent(sequences, 3)
    sequences.on_no_outcome(refused, may_be_stored=False)
    sequences.on_given_up(refused)
    sequences.on_no_outcome(maybe, may_be_stored=True)
    assert sequences.next_retry() is None
    sequences.on_no_outcome(on_wire, may_be_stored=False)
    assert sequences.next_retry() is maybe
    assert not sequences.is_restart_due


@pytest.mark.behaviour("I11")
def test_a_part_above_a_lost_batch_proves_it_stored() -> None:
    sequences = warm()
    lost, large = sent(sequences, 2)
    sequences.on_no_outcome(lost, may_be_stored=True)
    sequences.on_given_up(lost)
    sequences.on_no_outcome(large, may_be_stored=False)
    parts = [SequencedBatch(1) for _ in range(RECORDS)]
    sequences.split(large, parts)
    for part in parts:
        sequences.send(part)
    sequences.on_stored(parts[0])
    assert sequences.may_assign_sequence(FIRST)
    assert not parts[0].is_on_wire


@pytest.mark.behaviour("I11")
def test_nothing_is_sent_before_the_sequences_restart() -> None:
    sequences = warm()
    refused, behind = sent(sequences, 2)
    sequences.on_no_outcome(refused, may_be_stored=False)
    sequences.on_given_up(refused)
    sequences.on_no_outcome(behind, may_be_stored=False)
    assert sequences.next_retry() is None, "surely refused: it is numbered again"
    assert not sequences.may_assign_sequence(FIRST)
    sequences.on_given_up(behind)
    assert not sequences.may_assign_sequence(FIRST)


@pytest.mark.behaviour("I10")
def test_no_new_batch_is_sent_while_one_waits_to_be_sent_again() -> None:
    sequences = warm()
    assert sequences.next_retry() is None
    first, _ = sent(sequences, 2)
    sequences.on_no_outcome(first, may_be_stored=True)
    assert not sequences.may_assign_sequence(FIRST)


def test_an_id_that_the_broker_forgot_is_a_gap_even_behind_another_batch() -> None:
    sequences = warm()
    _, second = sent(sequences, 2)
    assert sequences.on_unknown_producer(second) is OutOfOrder.RENUMBER
    assert sequences.is_restart_needed


def test_epochs_end_at_32767() -> None:
    assert MAX_EPOCH == 32_767
    assert next_epoch(ProducerIdAndEpoch(7, MAX_EPOCH - 1)) == ProducerIdAndEpoch(7, MAX_EPOCH)
    assert next_epoch(ProducerIdAndEpoch(7, MAX_EPOCH)) is None
