"""The reaction of a producer to each error code of a Produce response. It depends on the producer's mode.

The table has a row for each code and a column for each mode. If a code has no row, the batch fails and is
treated as possibly stored. The error class tells the application what it can do:

    retriable   sending the record again may succeed; the client has used up its own retries
    abortable   the record has failed; the producer can continue, but must abort an open transaction first
    fatal       the producer cannot continue; create a new one

Source: behaviours I12 and I18 (docs/behaviours.md); Kafka's Sender, TransactionManager and Errors.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from oncelog.errors import ERROR_BY_CODE


class Mode(Enum):
    """The producer's use of sequence numbers: none, per session, or within transactions."""

    PLAIN = "plain"
    IDEMPOTENT = "idempotent"
    TRANSACTIONAL = "transactional"


class Action(Enum):
    """The producer's action for a batch after an error.

    DELIVER        report success, because the batch is stored already
    RETRY          send the batch again unchanged, with the same sequence
    REORDER        let `oncelog.rules.idempotence.sequencer` distinguish a reordering from a gap
    RENUMBER       send the batch under a new epoch if that is safe
    SPLIT          split the batch in two; a batch of one record fails
    FAIL           fail the batch; later batches get new sequences under a new epoch
    ABORT          fail the batch; the transaction can only be aborted
    FAIL_PRODUCER  fail the producer
    """

    DELIVER = "deliver"
    RETRY = "retry"
    REORDER = "reorder"
    RENUMBER = "renumber"
    SPLIT = "split"
    FAIL = "fail"
    ABORT = "abort"
    FAIL_PRODUCER = "fail producer"


class ErrorClass(Enum):
    """The error's meaning for the application. The module docstring explains the values."""

    RETRIABLE = "retriable"
    ABORTABLE = "abortable"
    FATAL = "fatal"


class ErrorPolicy(NamedTuple):
    """The action and the consequences of an error.

    `may_be_stored` is true if the broker may have stored the batch despite the error. `is_metadata_stale` is
    true if the producer must refresh its metadata before it sends again.
    """

    action: Action
    error_class: ErrorClass
    may_be_stored: bool
    is_metadata_stale: bool


_UNKNOWN_CODE = ("fail", "fail", "abort", True, False)

# error name: action by mode (plain, idempotent, transactional), may_be_stored, is_metadata_stale
_ROWS_BY_NAME: dict[str, tuple[str, str, str, bool, bool]] = {
    "UNKNOWN_SERVER_ERROR": ("fail", "fail", "abort", True, False),
    "CORRUPT_MESSAGE": ("retry", "retry", "retry", False, False),
    "UNKNOWN_TOPIC_OR_PARTITION": ("retry", "retry", "retry", True, True),
    "LEADER_NOT_AVAILABLE": ("retry", "retry", "retry", True, True),
    # May be stored: a broker also sends this if it loses the leadership while the stored batch waits for
    # replicas.
    "NOT_LEADER_OR_FOLLOWER": ("retry", "retry", "retry", True, True),
    # May be stored: the batch stays in the log when its replication times out.
    "REQUEST_TIMED_OUT": ("retry", "retry", "retry", True, False),
    "REPLICA_NOT_AVAILABLE": ("retry", "retry", "retry", True, True),
    "MESSAGE_TOO_LARGE": ("split", "split", "split", False, False),
    "NETWORK_EXCEPTION": ("retry", "retry", "retry", True, True),
    "COORDINATOR_LOAD_IN_PROGRESS": ("retry", "retry", "retry", False, False),
    "COORDINATOR_NOT_AVAILABLE": ("retry", "retry", "retry", False, False),
    "NOT_COORDINATOR": ("retry", "retry", "retry", False, False),
    "INVALID_TOPIC_EXCEPTION": ("fail", "fail", "abort", False, False),
    "RECORD_LIST_TOO_LARGE": ("split", "split", "split", False, False),
    "NOT_ENOUGH_REPLICAS": ("retry", "retry", "retry", False, False),
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": ("retry", "retry", "retry", True, False),
    "INVALID_REQUIRED_ACKS": ("fail", "fail", "abort", False, False),
    "TOPIC_AUTHORIZATION_FAILED": ("fail", "fail", "abort", False, False),
    "CLUSTER_AUTHORIZATION_FAILED": ("fail producer", "fail producer", "fail producer", False, False),
    "INVALID_TIMESTAMP": ("fail", "fail", "abort", False, False),
    "UNSUPPORTED_VERSION": ("fail", "fail", "abort", False, False),
    "INVALID_REQUEST": ("fail", "fail", "abort", False, False),
    "UNSUPPORTED_FOR_MESSAGE_FORMAT": ("fail", "fail", "abort", False, False),
    "POLICY_VIOLATION": ("fail", "fail", "abort", False, False),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": ("fail", "reorder", "reorder", False, False),
    "DUPLICATE_SEQUENCE_NUMBER": ("deliver", "deliver", "deliver", False, False),
    "INVALID_PRODUCER_EPOCH": ("fail", "fail", "abort", False, False),
    "INVALID_TXN_STATE": ("fail", "fail", "abort", False, False),
    "INVALID_PRODUCER_ID_MAPPING": ("fail", "fail", "fail producer", False, False),
    "CONCURRENT_TRANSACTIONS": ("retry", "retry", "retry", False, False),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": (
        "fail producer",
        "fail producer",
        "fail producer",
        False,
        False,
    ),
    # May be stored: the batch may have been written but not flushed.
    "KAFKA_STORAGE_ERROR": ("retry", "retry", "retry", True, True),
    "UNKNOWN_PRODUCER_ID": ("fail", "renumber", "abort", False, False),
    "FENCED_LEADER_EPOCH": ("retry", "retry", "retry", False, True),
    "UNKNOWN_LEADER_EPOCH": ("retry", "retry", "retry", False, True),
    "UNSUPPORTED_COMPRESSION_TYPE": ("fail", "fail", "abort", False, False),
    "INVALID_RECORD": ("fail", "fail", "abort", False, False),
    "THROTTLING_QUOTA_EXCEEDED": ("retry", "retry", "retry", False, False),
    # Only for completeness: brokers do not send this in a Produce response.
    "PRODUCER_FENCED": ("fail", "fail producer", "fail producer", False, False),
    "UNKNOWN_TOPIC_ID": ("retry", "retry", "retry", False, True),
    "INCONSISTENT_TOPIC_ID": ("retry", "retry", "retry", False, True),
    "TRANSACTION_ABORTABLE": ("fail", "fail", "abort", False, False),
}
_CODE_BY_NAME = {error.kafka_name: code for code, error in ERROR_BY_CODE.items()}
_ROWS = {_CODE_BY_NAME[name]: row for name, row in _ROWS_BY_NAME.items()}

_COLUMN = {Mode.PLAIN: 0, Mode.IDEMPOTENT: 1, Mode.TRANSACTIONAL: 2}


def error_policy_for(code: int, mode: Mode) -> ErrorPolicy:
    """Return the policy for an error code, which must not be 0 (NONE)."""
    row = _ROWS.get(code, _UNKNOWN_CODE)
    action = Action(row[_COLUMN[mode]])
    return ErrorPolicy(action, _class_of(action, mode), row[3], row[4])


def _class_of(action: Action, mode: Mode) -> ErrorClass:
    match action:
        case Action.RETRY | Action.DELIVER:
            return ErrorClass.RETRIABLE
        case Action.FAIL_PRODUCER:
            return ErrorClass.FATAL
        case Action.REORDER | Action.RENUMBER if mode is Mode.IDEMPOTENT:
            return ErrorClass.RETRIABLE
        case _:
            return ErrorClass.ABORTABLE
