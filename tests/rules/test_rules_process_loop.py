"""Decisions of the consume-transform-produce loop: the table of errors, failed records, and rebalances."""

from __future__ import annotations

import itertools

import pytest
from support.append_notation import rows

from oncelog import errors
from oncelog.errors import (
    DeliveryUnknown,
    IllegalGeneration,
    InvalidTxnState,
    MessageTooLarge,
    NotConnectedError,
    OncelogError,
    OutcomeUnknown,
    TimedOut,
    TransactionAbortable,
)
from oncelog.rules.transactions.client_session import Session, State, may_have_succeeded
from oncelog.rules.transactions.process_loop import (
    AtRebalance,
    Reaction,
    Rebalance,
    Step,
    Verdict,
    at_rebalance,
    is_given_up,
    is_outage,
    is_refused_record,
    may_be_replaced,
    reaction_to,
    verdict_on,
)

CASES = list(rows("process_loop.txt"))


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(
    ("step", "error", "state", "overdue", "reaction"),
    [row[1:] for row in CASES],
    ids=[row[0] for row in CASES],
)
def test_each_error_has_the_reaction_of_its_row(
    step: str, error: str, state: str, overdue: str, reaction: str
) -> None:
    raised = getattr(errors, error)("case")
    assert reaction_to(Step(step), raised, State(state), is_overdue=overdue == "yes") is Reaction(reaction)


def test_the_table_has_every_step_and_reaction() -> None:
    assert {row[1] for row in CASES} == {step.value for step in Step}
    assert {row[5] for row in CASES} == {reaction.value for reaction in Reaction}


def test_an_unclear_commit_is_never_followed_by_an_abort() -> None:
    """For every error of a commit, the reaction is to repeat the commit or to stop.

    After a stop, the next start completes the transaction if its outcome was decided.
    """
    for error in every_error():
        reaction = reaction_to(Step.COMMIT, error, State.COMMITTING)
        assert reaction in (Reaction.REPEAT, Reaction.STOP), error


def test_a_fenced_loop_fences_nobody() -> None:
    """If a fenced loop started a new producer, two loops with one transactional.id would fence each other
    endlessly.
    """
    for step, error in itertools.product(Step, (errors.ProducerFenced(), errors.InvalidProducerEpoch())):
        assert reaction_to(step, error, State.FATAL) is Reaction.STOP


def test_every_fatal_error_may_come_from_a_successor_except_after_an_end_that_may_have_succeeded() -> None:
    """R1290: the codes were listed, and the list lacked INVALID_PRODUCER_ID_MAPPING."""
    for step, error in itertools.product(Step, every_error()):
        is_end = step in (Step.COMMIT, Step.ABORT)
        assert may_be_replaced(step, error) is not (is_end and may_have_succeeded(error)), (step, error)
    for error in (errors.ProducerFenced(), errors.InvalidProducerIdMapping(), InvalidTxnState()):
        assert all(may_be_replaced(step, error) for step in Step)


def every_error() -> list[OncelogError]:
    coded: list[OncelogError] = [kind() for kind in errors.ERROR_BY_CODE.values()]
    return [*coded, TimedOut(), NotConnectedError(), errors.AuthenticationError(), OutcomeUnknown("")]


def test_the_reaction_is_one_that_the_session_allows() -> None:
    """The reaction is an abort only in states in which `abort_transaction` may be called."""
    for state, error, step in itertools.product(State, every_error(), Step):
        if reaction_to(step, error, state) is Reaction.ABORT and state not in (
            State.READY,
            State.UNINITIALIZED,
        ):
            session = Session()
            session.state = state
            assert state in (State.IN_TRANSACTION, State.ABORTABLE_ERROR), (step, error)


def test_an_outage_is_told_from_an_error_that_would_come_again() -> None:
    late = TransactionAbortable("call abort_transaction()")
    late.__cause__ = DeliveryUnknown("no response")
    outages = [
        TimedOut(),
        NotConnectedError(),
        IllegalGeneration(),
        late,
        OutcomeUnknown("", NotConnectedError()),
    ]
    assert all(is_outage(error) for error in outages)
    others = [
        MessageTooLarge(),
        InvalidTxnState(),
        TransactionAbortable(),
        OutcomeUnknown("", MessageTooLarge()),
    ]
    assert not any(is_outage(error) for error in others)
    assert (
        is_refused_record(MessageTooLarge())
        and not is_refused_record(TimedOut())
        and not is_refused_record(None)
    )


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(
    ("failures", "has_topic", "must_go_back", "verdict"),
    [
        (1, False, False, Verdict.RETRY),
        (2, True, False, Verdict.RETRY),
        (2, True, True, Verdict.GO_BACK),
        (2, False, True, Verdict.GO_BACK),
        (3, False, False, Verdict.RAISE),
        (3, False, True, Verdict.RAISE),
        (3, True, False, Verdict.DEAD_LETTER),
        (3, True, True, Verdict.GO_BACK),
        (4, True, False, Verdict.RAISE),
        (4, True, True, Verdict.RAISE),
    ],
)
def test_a_failed_record_has_the_verdict_of_its_row(
    failures: int, has_topic: bool, must_go_back: bool, verdict: Verdict
) -> None:
    assert verdict_on(failures, 3, has_dead_letter_topic=has_topic, must_go_back=must_go_back) is verdict
    assert is_given_up(failures, 3) is (failures >= 3)


@pytest.mark.behaviour("T16")
@pytest.mark.parametrize(
    ("change", "is_open", "is_affected", "treatment"),
    [
        (Rebalance.ASSIGNED, True, True, AtRebalance.KEEP),
        (Rebalance.REVOKED, False, False, AtRebalance.KEEP),
        (Rebalance.REVOKED, True, False, AtRebalance.KEEP),
        (Rebalance.REVOKED, True, True, AtRebalance.COMMIT),
        (Rebalance.LOST, False, False, AtRebalance.KEEP),
        (Rebalance.LOST, True, False, AtRebalance.ABORT),
        (Rebalance.LOST, True, True, AtRebalance.ABORT),
    ],
)
def test_a_rebalance_treats_the_open_transaction_as_its_row_says(
    change: Rebalance, is_open: bool, is_affected: bool, treatment: AtRebalance
) -> None:
    assert at_rebalance(change, is_open=is_open, is_affected=is_affected) is treatment
