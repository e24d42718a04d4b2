"""What a producer does about an error code in a Produce answer, by its mode.

One row per code; the columns are the modes. A code without a row is not known to be harmless: its records
fail and count as possibly stored. `error_class` is what the application is told (row I18):

    retriable   sending the record again may succeed (the client's own retries ran out)
    abortable   this record is given up, the producer goes on; a transaction must be aborted first
    fatal       the producer cannot go on; make a new one

Source: rows I12, I18; Kafka's Sender, TransactionManager and Errors.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Mode(Enum):
    """How the producer numbers its batches: not at all, per session, or within transactions."""

    PLAIN = "plain"
    IDEMPOTENT = "idempotent"
    TRANSACTIONAL = "transactional"


class Action(Enum):
    """What becomes of the batch.

    DELIVER it is stored already. RETRY as it is, with the same sequence. REORDER:
    `rules.idempotence.sequencer` tells a reordering from a gap. RENUMBER: under a new epoch if that is safe.
    SPLIT: cut it in two; a batch of one record fails. FAIL: its records fail; numbers behind it start again
    under a new epoch. ABORT: as FAIL, and the transaction can only be aborted. DIE: the producer ends.
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
    """What the application is told about the error."""

    RETRIABLE = "retriable"
    ABORTABLE = "abortable"
    FATAL = "fatal"


class ErrorPolicy(NamedTuple):
    """`may_be_stored`: the answer does not exclude that the batch is in the log. `is_metadata_stale`: the
    cluster looks different from what the producer thinks."""

    action: Action
    error_class: ErrorClass
    may_be_stored: bool
    is_metadata_stale: bool


_UNKNOWN_CODE = ("fail", "fail", "abort", True, False)

# code: plain, idempotent, transactional, may it be stored, is metadata stale
_ROWS: dict[int, tuple[str, str, str, bool, bool]] = {
    -1: ("fail", "fail", "abort", True, False),  # UNKNOWN_SERVER_ERROR
    2: ("retry", "retry", "retry", False, False),  # CORRUPT_MESSAGE
    3: ("retry", "retry", "retry", True, True),  # UNKNOWN_TOPIC_OR_PARTITION
    5: ("retry", "retry", "retry", True, True),  # LEADER_NOT_AVAILABLE
    6: ("retry", "retry", "retry", True, True),  # NOT_LEADER_OR_FOLLOWER: also while waiting for replicas
    7: ("retry", "retry", "retry", True, False),  # REQUEST_TIMED_OUT: the data stays
    9: ("retry", "retry", "retry", True, True),  # REPLICA_NOT_AVAILABLE
    10: ("split", "split", "split", False, False),  # MESSAGE_TOO_LARGE
    13: ("retry", "retry", "retry", True, True),  # NETWORK_EXCEPTION
    14: ("retry", "retry", "retry", False, False),  # COORDINATOR_LOAD_IN_PROGRESS
    15: ("retry", "retry", "retry", False, False),  # COORDINATOR_NOT_AVAILABLE
    16: ("retry", "retry", "retry", False, False),  # NOT_COORDINATOR
    17: ("fail", "fail", "abort", False, False),  # INVALID_TOPIC_EXCEPTION
    18: ("split", "split", "split", False, False),  # RECORD_LIST_TOO_LARGE
    19: ("retry", "retry", "retry", False, False),  # NOT_ENOUGH_REPLICAS
    20: ("retry", "retry", "retry", True, False),  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
    21: ("fail", "fail", "abort", False, False),  # INVALID_REQUIRED_ACKS
    29: ("fail", "fail", "abort", False, False),  # TOPIC_AUTHORIZATION_FAILED
    31: ("fail producer", "fail producer", "fail producer", False, False),  # CLUSTER_AUTHORIZATION_FAILED
    32: ("fail", "fail", "abort", False, False),  # INVALID_TIMESTAMP
    35: ("fail", "fail", "abort", False, False),  # UNSUPPORTED_VERSION
    42: ("fail", "fail", "abort", False, False),  # INVALID_REQUEST
    43: ("fail", "fail", "abort", False, False),  # UNSUPPORTED_FOR_MESSAGE_FORMAT
    44: ("fail", "fail", "abort", False, False),  # POLICY_VIOLATION
    45: ("fail", "reorder", "reorder", False, False),  # OUT_OF_ORDER_SEQUENCE_NUMBER
    46: ("deliver", "deliver", "deliver", False, False),  # DUPLICATE_SEQUENCE_NUMBER
    47: ("fail", "fail", "abort", False, False),  # INVALID_PRODUCER_EPOCH
    48: ("fail", "fail", "abort", False, False),  # INVALID_TXN_STATE
    49: ("fail", "fail", "fail producer", False, False),  # INVALID_PRODUCER_ID_MAPPING
    51: ("retry", "retry", "retry", False, False),  # CONCURRENT_TRANSACTIONS
    53: (
        "fail producer",
        "fail producer",
        "fail producer",
        False,
        False,
    ),  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    56: ("retry", "retry", "retry", True, True),  # KAFKA_STORAGE_ERROR: perhaps written, not flushed
    59: ("fail", "renumber", "abort", False, False),  # UNKNOWN_PRODUCER_ID
    74: ("retry", "retry", "retry", False, True),  # FENCED_LEADER_EPOCH
    75: ("retry", "retry", "retry", False, True),  # UNKNOWN_LEADER_EPOCH
    76: ("fail", "fail", "abort", False, False),  # UNSUPPORTED_COMPRESSION_TYPE
    87: ("fail", "fail", "abort", False, False),  # INVALID_RECORD
    89: ("retry", "retry", "retry", False, False),  # THROTTLING_QUOTA_EXCEEDED
    90: ("fail", "fail producer", "fail producer", False, False),  # PRODUCER_FENCED: never sent on Produce
    100: ("retry", "retry", "retry", False, True),  # UNKNOWN_TOPIC_ID
    103: ("retry", "retry", "retry", False, True),  # INCONSISTENT_TOPIC_ID
    120: ("fail", "fail", "abort", False, False),  # TRANSACTION_ABORTABLE
}

_COLUMN = {Mode.PLAIN: 0, Mode.IDEMPOTENT: 1, Mode.TRANSACTIONAL: 2}


def error_policy_for(code: int, mode: Mode) -> ErrorPolicy:
    """The row of `code` (not 0) in the column of `mode`."""
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
