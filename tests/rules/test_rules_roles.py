"""Tests of what producers with one epoch may do, and of the requests that end their transactions."""

from __future__ import annotations

import pytest

from oncelog.errors import MisuseError
from oncelog.rules.idempotence.sequencer import ProducerIdAndEpoch
from oncelog.rules.transactions.client_session import CoordinatorEntry, Operation
from oncelog.rules.transactions.roles import (
    Ending,
    Role,
    abort_ending,
    check_role,
    commit_ending,
    fencing_identity,
)

R, C, E = Role, Operation, Ending
ALLOWED = {
    R.ALONE: {C.INIT, C.BEGIN, C.SEND, C.SEND_OFFSETS, C.SHARE, C.HAND_OVER, C.COMMIT, C.ABORT},
    R.CONTINUING: {C.INIT, C.BEGIN, C.SEND, C.SEND_OFFSETS, C.HAND_OVER, C.COMMIT, C.ABORT},
    R.OWNER: {C.SEND, C.SEND_OFFSETS, C.SHARE, C.COMMIT, C.ABORT},
    R.JOINED: {C.SEND},
    R.TOOK_OVER: {C.SEND_OFFSETS, C.HAND_OVER, C.COMMIT, C.ABORT},
    R.HANDED_OVER: set(),
}


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("operation", Operation)
def test_every_operation_in_every_role(role: Role, operation: Operation) -> None:
    if operation in ALLOWED[role]:
        check_role(role, operation)
        return
    reason = "create a new producer" if operation is C.BEGIN else "this producer has"
    with pytest.raises(MisuseError) as raised:
        check_role(role, operation)
    assert str(raised.value).startswith(operation.value) and reason in str(raised.value)


@pytest.mark.behaviour("T4")
@pytest.mark.parametrize(
    ("role", "has_parts", "is_ongoing", "wanted"),
    [
        (R.ALONE, False, None, E.NOTHING),
        (R.ALONE, True, None, E.END),
        (R.CONTINUING, False, None, E.NOTHING),
        (R.CONTINUING, True, None, E.END),
        (R.OWNER, True, None, E.END),
        (R.OWNER, False, None, E.ASK),
        (R.OWNER, False, True, E.END),
        (R.OWNER, False, False, E.NEW_EPOCH),
        (R.TOOK_OVER, False, None, E.NEW_EPOCH),
        (R.TOOK_OVER, True, None, E.END),
    ],
)
def test_every_commit_in_every_role(
    role: Role, has_parts: bool, is_ongoing: bool | None, wanted: Ending
) -> None:
    assert commit_ending(role, has_parts=has_parts, is_ongoing=is_ongoing) is wanted


@pytest.mark.behaviour("T5")
@pytest.mark.parametrize("raises_epoch", [False, True])
@pytest.mark.parametrize(
    ("role", "has_parts", "may_have_parts", "wanted"),
    [
        (R.ALONE, False, False, E.NOTHING),
        (R.ALONE, False, True, E.TRY_TO_END),
        (R.ALONE, True, True, E.END),
        (R.CONTINUING, False, False, E.NOTHING),
        (R.CONTINUING, False, True, E.TRY_TO_END),
        (R.CONTINUING, True, True, E.END),
        (R.TOOK_OVER, False, True, E.TRY_TO_END),
        (R.TOOK_OVER, True, True, E.END),
    ],
)
def test_every_abort_in_every_role(
    role: Role, has_parts: bool, may_have_parts: bool, wanted: Ending, raises_epoch: bool
) -> None:
    ending = abort_ending(role, has_parts=has_parts, may_have_parts=may_have_parts, raises_epoch=raises_epoch)
    assert ending is wanted


@pytest.mark.behaviour("T5")
@pytest.mark.parametrize(("raises_epoch", "wanted"), [(False, E.NOTHING), (True, E.TRY_TO_END)])
def test_an_abort_of_an_empty_transaction_that_was_taken_over(raises_epoch: bool, wanted: Ending) -> None:
    ending = abort_ending(R.TOOK_OVER, has_parts=False, may_have_parts=False, raises_epoch=raises_epoch)
    assert ending is wanted


@pytest.mark.behaviour("T5")
@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize(("raises_epoch", "wanted"), [(False, E.NEW_EPOCH), (True, E.TRY_TO_END)])
def test_every_abort_of_an_owner_fences_the_members(
    has_parts: bool, raises_epoch: bool, wanted: Ending
) -> None:
    ending = abort_ending(R.OWNER, has_parts=has_parts, may_have_parts=has_parts, raises_epoch=raises_epoch)
    assert ending is wanted


OURS, RAISED, LATER, OTHER = (ProducerIdAndEpoch(*it) for it in ((7, 3), (7, 4), (7, 5), (8, 0)))


@pytest.mark.behaviour("T5")
@pytest.mark.parametrize(
    ("identity", "state", "sent", "wanted"),
    [
        (OURS, "Ongoing", None, OURS),
        (OURS, "Ongoing", OURS, OURS),
        (OURS, "Empty", None, OURS),
        (OURS, "CompleteCommit", OURS, OURS),
        (RAISED, "Empty", None, None),
        (RAISED, "CompleteAbort", None, None),
        (RAISED, "Ongoing", OURS, None),
        (RAISED, "PrepareEpochFence", OURS, RAISED),
        (RAISED, "PrepareAbort", OURS, RAISED),
        (RAISED, "CompleteAbort", OURS, RAISED),
        (RAISED, "CompleteAbort", RAISED, RAISED),
        (RAISED, "Empty", OURS, OURS),
        (RAISED, "CompleteCommit", OURS, OURS),
        (LATER, "Empty", OURS, OURS),
        (LATER, "Empty", RAISED, RAISED),
        (LATER, "CompleteAbort", RAISED, RAISED),
        (LATER, "Ongoing", RAISED, None),
        (OTHER, "Empty", RAISED, RAISED),
        (OTHER, "Ongoing", RAISED, None),
        (OTHER, "Empty", None, None),
    ],
)
def test_every_identity_of_an_owners_abort(
    identity: ProducerIdAndEpoch,
    state: str,
    sent: ProducerIdAndEpoch | None,
    wanted: ProducerIdAndEpoch | None,
) -> None:
    assert fencing_identity(CoordinatorEntry(identity, state), OURS, sent) == wanted
