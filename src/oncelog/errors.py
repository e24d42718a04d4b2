"""All exceptions of Oncelog, and Kafka's error codes as classes.

| class | meaning |
| --- | --- |
| ConfigError | a setting is invalid, or two settings contradict each other |
| MissingDependency | an optional package is not installed |
| MisuseError | a call that is not allowed in the current state; the text names the right call |
| PeerError | the other side sent bytes that break the protocol |
| StorageError | the disk failed, data is unreadable, or another process has locked the data directory |
| TimedOut | an operation did not finish in time |
| AuthenticationError | TLS or SASL authentication failed |
| OutcomeUnknown | a record got no acknowledgement and is not sent again; it may be stored |
| TransactionAborted | a record's transaction was aborted before the record was stored |
| LoadRefused | the files, the topic or the options of a load have changed |
| SerializationError | a serializer failed, or its result was not bytes; the record was not sent |
| DeserializationError | a deserializer failed; the text names topic, partition and offset |
| ProvenanceError | a record's headers do not say which source record it was made from |
| SchemaRegistryError | the schema registry refused a request, or did not answer in time |
| SchemaDataError | data does not fit its schema, or is not in the wire format of a schema registry |
| BrokerError | the broker returned an error code; one class per code |
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

_E = TypeVar("_E", bound=Exception)


class OncelogError(Exception):
    """The base class of all exceptions of Oncelog.

    `delivery`: the outcome of the records that `send_many` or `send_table` had accepted before the error;
    otherwise None.
    """

    delivery: Any = None


class ConfigError(OncelogError, ValueError):
    """A setting is unknown, malformed, out of range, or in conflict with another setting."""


class MissingDependency(ConfigError, ImportError):
    """An optional package is not installed. The text has the command that installs it."""


class MisuseError(OncelogError, RuntimeError):
    """The call is not allowed in the current state. The text says what to do instead."""


class PeerError(OncelogError, ValueError):
    """The other side sent bytes that break the protocol. The connection cannot continue."""


class StorageError(OncelogError):
    """The disk failed, data on it is unreadable, or another process has locked the data directory."""


class TimedOut(OncelogError, TimeoutError):
    """A time-out (delivery.timeout.ms, max.block.ms, ...) passed before the operation had a result."""


class DisconnectedError(OncelogError, ConnectionError):
    """The connection ended. The broker may or may not have carried out the requests in flight."""


class NotConnectedError(DisconnectedError):
    """There was no connection, so the request was not sent."""


class AuthenticationError(NotConnectedError):
    """TLS or SASL authentication failed. A retry does not help."""


class OutcomeUnknown(OncelogError):
    """The record got no acknowledgement and is not sent again, but it may be stored.

    If you send the record again, it may be stored twice.

    `cause`: the last error. `code` and `kafka_name`: the broker's error, if the last error was a response.
    """

    def __init__(self, detail: str, cause: Exception | None = None) -> None:
        super().__init__(detail)
        self.cause = cause
        self.code: int | None = getattr(cause, "code", None)
        self.kafka_name: str | None = getattr(cause, "kafka_name", None)
        self.reaction: str | None = None


class DeliveryUnknown(OutcomeUnknown, TimedOut):
    """delivery.timeout.ms passed without a response that shows whether the record was stored."""


class TransactionAborted(OncelogError):
    """The record is not stored, because its transaction was aborted first."""


class LoadRefused(OncelogError):
    """The load cannot continue, for example because files, topic or options differ from those at its start.

    An open transaction is aborted. Records that the load committed before the error stay.
    """


class SerializationError(OncelogError, ValueError):
    """A serializer failed, or returned something other than bytes. The record was not sent.

    `part` is "key" or "value". `partition` is None if the application named none. `__cause__` is the error of
    the serializer.
    """

    def __init__(
        self, detail: str, *, topic: str | None = None, partition: int | None = None, part: str | None = None
    ) -> None:
        super().__init__(detail)
        self.topic, self.partition, self.part = topic, partition, part


class DeserializationError(OncelogError, ValueError):
    """A deserializer failed. The record counts as not delivered, so the next poll raises the error again.

    To skip the record, seek to `offset + 1`. `part` is "key" or "value". `record` is the record
    with its bytes. `__cause__` is the error of the deserializer.
    """

    def __init__(self, detail: str, *, part: str | None = None, record: Any = None) -> None:
        super().__init__(detail)
        self.part, self.record = part, record
        self.topic: str | None = record.topic if record is not None else None
        self.partition: int | None = record.partition if record is not None else None
        self.offset: int | None = record.offset if record is not None else None


class ProvenanceError(OncelogError, ValueError):
    """A record's headers with its source topic, partition and offset are missing or malformed.

    `topic`, `partition` and `offset` are the place of the record, not of its source.
    """

    def __init__(self, reason: str, topic: str, partition: int, offset: int) -> None:
        super().__init__(f"{topic}-{partition}, offset {offset}: {reason}")
        self.reason, self.topic, self.partition, self.offset = reason, topic, partition, offset


class SchemaRegistryError(OncelogError):
    """The schema registry refused a request, did not answer in time, or has no such schema.

    `url` is the address without credentials. `subject` and `schema_id` are what was requested, or None.
    `status` is the HTTP status, and None without a response. `error_code` is the registry's own code, such as
    40403 for an unknown schema id, or None.
    """

    def __init__(
        self,
        detail: str,
        *,
        url: str | None = None,
        subject: str | None = None,
        schema_id: int | None = None,
        status: int | None = None,
        error_code: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.url, self.subject, self.schema_id = url, subject, schema_id
        self.status, self.error_code = status, error_code


class SchemaDataError(OncelogError, ValueError):
    """Data does not fit its schema, a schema is invalid, or bytes are not in the registry's wire format.

    `subject` and `schema_id` name the schema, or are None.
    """

    def __init__(self, detail: str, *, subject: str | None = None, schema_id: int | None = None) -> None:
        super().__init__(detail)
        self.subject, self.schema_id = subject, schema_id


MAX_MESSAGE_CHARACTERS = 1_000
"""Maximum number of characters of the message in an error response."""


def copy_to_raise(error: _E) -> _E:
    """Return a copy of an error that is kept, and may be raised by many calls.

    If each call raised the same object, its traceback would grow with each call, and keep the variables of
    all callers in memory. Its `delivery` could be that of another call. Guard:
    test_an_error_that_many_calls_raise_keeps_nothing_of_them.
    """
    copied = error.__class__.__new__(error.__class__)
    copied.args = error.args
    copied.__dict__.update(error.__dict__)
    copied.__dict__.pop("delivery", None)
    if error.__cause__ is not None:
        copied.__cause__ = error.__cause__
    return copied


def without_traceback(error: _E) -> _E:
    """Remove the traceback and the context of an error that is kept, and return the error.

    Both refer to the variables of its callers, such as the records of a request. If one of these refers to
    the error, only the garbage collector frees them. Guard:
    test_a_refused_request_is_freed_without_the_garbage_collector.
    """
    error.__traceback__ = error.__context__ = None
    return error


def text_of(error: Exception) -> str:
    """Return the text of an exception, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "(the exception has no text)"


class BrokerError(OncelogError):
    """The base class of the exceptions for Kafka's error codes (org.apache.kafka.common.protocol.Errors).

    `code` and `kafka_name` are the code and the name in Kafka's protocol. `retriable`: True if Java's
    exception for the code is a RetriableException. `oncelog.rules.idempotence.error_policy` decides how a
    producer reacts to a code.
    """

    code: ClassVar[int] = -1
    kafka_name: ClassVar[str] = "UNKNOWN_SERVER_ERROR"
    retriable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    reaction: str | None = None
    """The advised reaction of an application to this error: retriable, abortable or fatal.

    The client that raises the error sets it. It is None on the broker.
    """

    record_errors: tuple[tuple[int, str], ...] = ()
    """(index in the batch, reason) of each record that caused the rejection of its batch; empty if the broker
    named no record.
    """

    def __init_subclass__(cls, code: int, retriable: bool = False, hint: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kafka_name" not in cls.__dict__:
            raise TypeError(f"{cls.__name__} must set kafka_name")
        cls.code = code
        cls.retriable = retriable
        cls.hint = hint
        ERROR_BY_CODE[code] = cls

    def __init__(self, detail: str = "") -> None:
        self.detail = detail
        super().__init__(detail)

    @property
    def message(self) -> str:
        """The description without the error's name. A broker sends it as the `error_message` of a response.

        It is cut to MAX_MESSAGE_CHARACTERS, because it may quote long names that a client chose.
        """
        return (self.detail or self.hint)[:MAX_MESSAGE_CHARACTERS]

    def __str__(self) -> str:
        text = self.message
        return f"{self.kafka_name} ({self.code})" + (f": {text}" if text else "")


ERROR_BY_CODE: dict[int, type[BrokerError]] = {}
"""The class of each error code of the protocol, except 0."""
_ABSENT = {"UNKNOWN_TOPIC_OR_PARTITION", "GROUP_ID_NOT_FOUND", "TRANSACTIONAL_ID_NOT_FOUND"}


def named_text(code: int, name: str) -> str:
    """Return "NAME does not exist" if `code` says that a topic, group or transactional id does not exist;
    otherwise NAME.
    """
    known = ERROR_BY_CODE.get(code)
    return f"{name} does not exist" if known and known.kafka_name in _ABSENT else name


def error_for_code(code: int, detail: str = "") -> BrokerError:
    """Return the exception for an error code.

    If the code is unknown, the exception's text contains the number.
    """
    known = ERROR_BY_CODE.get(code)
    if known is None:
        return UnknownServerError(
            f"error code {code} is unknown to this version{': ' + detail if detail else ''}"
        )
    return known(detail)


def raise_for_code(code: int, detail: str = "") -> None:
    """Raise the exception for `code`; do nothing for 0 (success)."""
    if code:
        raise error_for_code(code, detail)


class UnknownServerError(BrokerError, code=-1):
    kafka_name = "UNKNOWN_SERVER_ERROR"


class OffsetOutOfRange(
    BrokerError, code=1, hint="the offset is below the log start or above the high watermark"
):
    kafka_name = "OFFSET_OUT_OF_RANGE"


class CorruptMessage(
    BrokerError, code=2, retriable=True, hint="the CRC-32C or the framing of a record batch is wrong"
):
    kafka_name = "CORRUPT_MESSAGE"


class UnknownTopicOrPartition(
    BrokerError, code=3, retriable=True, hint="the broker does not know this topic or partition"
):
    kafka_name = "UNKNOWN_TOPIC_OR_PARTITION"


class InvalidFetchSize(BrokerError, code=4):
    kafka_name = "INVALID_FETCH_SIZE"


class LeaderNotAvailable(BrokerError, code=5, retriable=True):
    kafka_name = "LEADER_NOT_AVAILABLE"


class NotLeaderOrFollower(
    BrokerError, code=6, retriable=True, hint="this broker does not lead the partition; refresh metadata"
):
    kafka_name = "NOT_LEADER_OR_FOLLOWER"


class RequestTimedOut(
    BrokerError, code=7, retriable=True, hint="the broker did not complete the request in time"
):
    kafka_name = "REQUEST_TIMED_OUT"


class BrokerNotAvailable(BrokerError, code=8):
    kafka_name = "BROKER_NOT_AVAILABLE"


class ReplicaNotAvailable(BrokerError, code=9, retriable=True):
    kafka_name = "REPLICA_NOT_AVAILABLE"


class MessageTooLarge(BrokerError, code=10, hint="the batch is larger than max.message.bytes"):
    kafka_name = "MESSAGE_TOO_LARGE"


class StaleControllerEpoch(BrokerError, code=11):
    kafka_name = "STALE_CONTROLLER_EPOCH"


class OffsetMetadataTooLarge(BrokerError, code=12):
    kafka_name = "OFFSET_METADATA_TOO_LARGE"


class NetworkException(BrokerError, code=13, retriable=True):
    kafka_name = "NETWORK_EXCEPTION"


class CoordinatorLoadInProgress(BrokerError, code=14, retriable=True):
    kafka_name = "COORDINATOR_LOAD_IN_PROGRESS"


class CoordinatorNotAvailable(BrokerError, code=15, retriable=True):
    kafka_name = "COORDINATOR_NOT_AVAILABLE"


class NotCoordinator(BrokerError, code=16, retriable=True):
    kafka_name = "NOT_COORDINATOR"


class InvalidTopicException(BrokerError, code=17, hint="the topic name is invalid, or the topic is internal"):
    kafka_name = "INVALID_TOPIC_EXCEPTION"


class RecordListTooLarge(BrokerError, code=18, hint="the batch is larger than a segment (segment.bytes)"):
    kafka_name = "RECORD_LIST_TOO_LARGE"


class NotEnoughReplicas(
    BrokerError,
    code=19,
    retriable=True,
    hint="fewer in-sync replicas than min.insync.replicas; nothing was stored",
):
    kafka_name = "NOT_ENOUGH_REPLICAS"


class NotEnoughReplicasAfterAppend(
    BrokerError, code=20, retriable=True, hint="stored, but fewer in-sync replicas than min.insync.replicas"
):
    kafka_name = "NOT_ENOUGH_REPLICAS_AFTER_APPEND"


class InvalidRequiredAcks(BrokerError, code=21, hint="acks must be 0, 1 or -1"):
    kafka_name = "INVALID_REQUIRED_ACKS"


class IllegalGeneration(BrokerError, code=22):
    kafka_name = "ILLEGAL_GENERATION"


class InconsistentGroupProtocol(BrokerError, code=23):
    kafka_name = "INCONSISTENT_GROUP_PROTOCOL"


class InvalidGroupId(BrokerError, code=24):
    kafka_name = "INVALID_GROUP_ID"


class UnknownMemberId(BrokerError, code=25):
    kafka_name = "UNKNOWN_MEMBER_ID"


class InvalidSessionTimeout(BrokerError, code=26):
    kafka_name = "INVALID_SESSION_TIMEOUT"


class RebalanceInProgress(BrokerError, code=27):
    kafka_name = "REBALANCE_IN_PROGRESS"


class InvalidCommitOffsetSize(BrokerError, code=28):
    kafka_name = "INVALID_COMMIT_OFFSET_SIZE"


class TopicAuthorizationFailed(BrokerError, code=29):
    kafka_name = "TOPIC_AUTHORIZATION_FAILED"


class GroupAuthorizationFailed(BrokerError, code=30):
    kafka_name = "GROUP_AUTHORIZATION_FAILED"


class ClusterAuthorizationFailed(BrokerError, code=31):
    kafka_name = "CLUSTER_AUTHORIZATION_FAILED"


class InvalidTimestamp(BrokerError, code=32, hint="a record's timestamp is outside what the topic allows"):
    kafka_name = "INVALID_TIMESTAMP"


class UnsupportedSaslMechanism(BrokerError, code=33):
    kafka_name = "UNSUPPORTED_SASL_MECHANISM"


class IllegalSaslState(BrokerError, code=34):
    kafka_name = "ILLEGAL_SASL_STATE"


class UnsupportedVersion(BrokerError, code=35, hint="the broker does not support this version of the API"):
    kafka_name = "UNSUPPORTED_VERSION"


class TopicAlreadyExists(BrokerError, code=36, hint="the topic exists already"):
    kafka_name = "TOPIC_ALREADY_EXISTS"


class InvalidPartitions(BrokerError, code=37, hint="the number of partitions is invalid"):
    kafka_name = "INVALID_PARTITIONS"


class InvalidReplicationFactor(
    BrokerError, code=38, hint="there are too few brokers for this replication factor"
):
    kafka_name = "INVALID_REPLICATION_FACTOR"


class InvalidReplicaAssignment(BrokerError, code=39):
    kafka_name = "INVALID_REPLICA_ASSIGNMENT"


class InvalidConfig(BrokerError, code=40):
    kafka_name = "INVALID_CONFIG"


class NotController(BrokerError, code=41, retriable=True):
    kafka_name = "NOT_CONTROLLER"


class InvalidRequest(BrokerError, code=42, hint="the request contradicts itself"):
    kafka_name = "INVALID_REQUEST"


class UnsupportedForMessageFormat(BrokerError, code=43):
    kafka_name = "UNSUPPORTED_FOR_MESSAGE_FORMAT"


class PolicyViolation(BrokerError, code=44):
    kafka_name = "POLICY_VIOLATION"


class OutOfOrderSequenceNumber(
    BrokerError,
    code=45,
    hint="the base sequence does not follow the last stored sequence; a batch is missing or out of order",
):
    kafka_name = "OUT_OF_ORDER_SEQUENCE_NUMBER"


class DuplicateSequenceNumber(BrokerError, code=46, hint="the batch is stored already"):
    kafka_name = "DUPLICATE_SEQUENCE_NUMBER"


class InvalidProducerEpoch(
    BrokerError,
    code=47,
    hint="this producer is fenced: the broker knows a newer epoch of its producer id",
):
    kafka_name = "INVALID_PRODUCER_EPOCH"


class InvalidTxnState(
    BrokerError, code=48, hint="the call is not allowed in the present state of the transaction"
):
    kafka_name = "INVALID_TXN_STATE"


class InvalidProducerIdMapping(BrokerError, code=49, hint="the transactional id has another producer id"):
    kafka_name = "INVALID_PRODUCER_ID_MAPPING"


class InvalidTransactionTimeout(
    BrokerError,
    code=50,
    hint="transaction.timeout.ms is above the broker's transaction.max.timeout.ms, or not above 0",
):
    kafka_name = "INVALID_TRANSACTION_TIMEOUT"


class ConcurrentTransactions(
    BrokerError, code=51, retriable=True, hint="another operation of this transaction is in progress"
):
    kafka_name = "CONCURRENT_TRANSACTIONS"


class TransactionCoordinatorFenced(BrokerError, code=52):
    kafka_name = "TRANSACTION_COORDINATOR_FENCED"


class TransactionalIdAuthorizationFailed(
    BrokerError, code=53, hint="not allowed to use this transactional id"
):
    kafka_name = "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"


class SecurityDisabled(BrokerError, code=54):
    kafka_name = "SECURITY_DISABLED"


class OperationNotAttempted(BrokerError, code=55):
    kafka_name = "OPERATION_NOT_ATTEMPTED"


class KafkaStorageError(
    BrokerError, code=56, retriable=True, hint="the broker could not write to or read from its disk"
):
    kafka_name = "KAFKA_STORAGE_ERROR"


class LogDirNotFound(BrokerError, code=57):
    kafka_name = "LOG_DIR_NOT_FOUND"


class SaslAuthenticationFailed(BrokerError, code=58):
    kafka_name = "SASL_AUTHENTICATION_FAILED"


class UnknownProducerId(BrokerError, code=59, hint="the broker does not know this producer id"):
    kafka_name = "UNKNOWN_PRODUCER_ID"


class ReassignmentInProgress(BrokerError, code=60):
    kafka_name = "REASSIGNMENT_IN_PROGRESS"


class DelegationTokenAuthDisabled(BrokerError, code=61):
    kafka_name = "DELEGATION_TOKEN_AUTH_DISABLED"


class DelegationTokenNotFound(BrokerError, code=62):
    kafka_name = "DELEGATION_TOKEN_NOT_FOUND"


class DelegationTokenOwnerMismatch(BrokerError, code=63):
    kafka_name = "DELEGATION_TOKEN_OWNER_MISMATCH"


class DelegationTokenRequestNotAllowed(BrokerError, code=64):
    kafka_name = "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED"


class DelegationTokenAuthorizationFailed(BrokerError, code=65):
    kafka_name = "DELEGATION_TOKEN_AUTHORIZATION_FAILED"


class DelegationTokenExpired(BrokerError, code=66):
    kafka_name = "DELEGATION_TOKEN_EXPIRED"


class InvalidPrincipalType(BrokerError, code=67):
    kafka_name = "INVALID_PRINCIPAL_TYPE"


class NonEmptyGroup(BrokerError, code=68):
    kafka_name = "NON_EMPTY_GROUP"


class GroupIdNotFound(BrokerError, code=69):
    kafka_name = "GROUP_ID_NOT_FOUND"


class FetchSessionIdNotFound(BrokerError, code=70, retriable=True):
    kafka_name = "FETCH_SESSION_ID_NOT_FOUND"


class InvalidFetchSessionEpoch(BrokerError, code=71, retriable=True):
    kafka_name = "INVALID_FETCH_SESSION_EPOCH"


class ListenerNotFound(BrokerError, code=72, retriable=True):
    kafka_name = "LISTENER_NOT_FOUND"


class TopicDeletionDisabled(BrokerError, code=73):
    kafka_name = "TOPIC_DELETION_DISABLED"


class FencedLeaderEpoch(BrokerError, code=74, retriable=True):
    kafka_name = "FENCED_LEADER_EPOCH"


class UnknownLeaderEpoch(BrokerError, code=75, retriable=True):
    kafka_name = "UNKNOWN_LEADER_EPOCH"


class UnsupportedCompressionType(
    BrokerError, code=76, hint="this version of the request does not support the codec"
):
    kafka_name = "UNSUPPORTED_COMPRESSION_TYPE"


class StaleBrokerEpoch(BrokerError, code=77):
    kafka_name = "STALE_BROKER_EPOCH"


class OffsetNotAvailable(BrokerError, code=78, retriable=True):
    kafka_name = "OFFSET_NOT_AVAILABLE"


class MemberIdRequired(BrokerError, code=79):
    kafka_name = "MEMBER_ID_REQUIRED"


class PreferredLeaderNotAvailable(BrokerError, code=80, retriable=True):
    kafka_name = "PREFERRED_LEADER_NOT_AVAILABLE"


class GroupMaxSizeReached(BrokerError, code=81):
    kafka_name = "GROUP_MAX_SIZE_REACHED"


class FencedInstanceId(BrokerError, code=82):
    kafka_name = "FENCED_INSTANCE_ID"


class EligibleLeadersNotAvailable(BrokerError, code=83, retriable=True):
    kafka_name = "ELIGIBLE_LEADERS_NOT_AVAILABLE"


class ElectionNotNeeded(BrokerError, code=84, retriable=True):
    kafka_name = "ELECTION_NOT_NEEDED"


class NoReassignmentInProgress(BrokerError, code=85):
    kafka_name = "NO_REASSIGNMENT_IN_PROGRESS"


class GroupSubscribedToTopic(BrokerError, code=86):
    kafka_name = "GROUP_SUBSCRIBED_TO_TOPIC"


class InvalidRecord(BrokerError, code=87, hint="the record or batch is invalid"):
    kafka_name = "INVALID_RECORD"


class UnstableOffsetCommit(BrokerError, code=88, retriable=True):
    kafka_name = "UNSTABLE_OFFSET_COMMIT"


class ThrottlingQuotaExceeded(BrokerError, code=89, retriable=True):
    kafka_name = "THROTTLING_QUOTA_EXCEEDED"


class ProducerFenced(
    BrokerError,
    code=90,
    hint="a newer producer with this transactional id has taken over; this one must close",
):
    kafka_name = "PRODUCER_FENCED"


class ResourceNotFound(BrokerError, code=91):
    kafka_name = "RESOURCE_NOT_FOUND"


class DuplicateResource(BrokerError, code=92):
    kafka_name = "DUPLICATE_RESOURCE"


class UnacceptableCredential(BrokerError, code=93):
    kafka_name = "UNACCEPTABLE_CREDENTIAL"


class InconsistentVoterSet(BrokerError, code=94):
    kafka_name = "INCONSISTENT_VOTER_SET"


class InvalidUpdateVersion(BrokerError, code=95):
    kafka_name = "INVALID_UPDATE_VERSION"


class FeatureUpdateFailed(BrokerError, code=96):
    kafka_name = "FEATURE_UPDATE_FAILED"


class PrincipalDeserializationFailure(BrokerError, code=97):
    kafka_name = "PRINCIPAL_DESERIALIZATION_FAILURE"


class SnapshotNotFound(BrokerError, code=98):
    kafka_name = "SNAPSHOT_NOT_FOUND"


class PositionOutOfRange(BrokerError, code=99):
    kafka_name = "POSITION_OUT_OF_RANGE"


class UnknownTopicId(BrokerError, code=100, retriable=True):
    kafka_name = "UNKNOWN_TOPIC_ID"


class DuplicateBrokerRegistration(BrokerError, code=101):
    kafka_name = "DUPLICATE_BROKER_REGISTRATION"


class BrokerIdNotRegistered(BrokerError, code=102):
    kafka_name = "BROKER_ID_NOT_REGISTERED"


class InconsistentTopicId(BrokerError, code=103, retriable=True):
    kafka_name = "INCONSISTENT_TOPIC_ID"


class InconsistentClusterId(BrokerError, code=104):
    kafka_name = "INCONSISTENT_CLUSTER_ID"


class TransactionalIdNotFound(BrokerError, code=105):
    kafka_name = "TRANSACTIONAL_ID_NOT_FOUND"


class FetchSessionTopicIdError(BrokerError, code=106, retriable=True):
    kafka_name = "FETCH_SESSION_TOPIC_ID_ERROR"


class IneligibleReplica(BrokerError, code=107):
    kafka_name = "INELIGIBLE_REPLICA"


class NewLeaderElected(BrokerError, code=108):
    kafka_name = "NEW_LEADER_ELECTED"


class OffsetMovedToTieredStorage(BrokerError, code=109):
    kafka_name = "OFFSET_MOVED_TO_TIERED_STORAGE"


class FencedMemberEpoch(BrokerError, code=110):
    kafka_name = "FENCED_MEMBER_EPOCH"


class UnreleasedInstanceId(BrokerError, code=111):
    kafka_name = "UNRELEASED_INSTANCE_ID"


class UnsupportedAssignor(BrokerError, code=112):
    kafka_name = "UNSUPPORTED_ASSIGNOR"


class StaleMemberEpoch(BrokerError, code=113):
    kafka_name = "STALE_MEMBER_EPOCH"


class MismatchedEndpointType(BrokerError, code=114):
    kafka_name = "MISMATCHED_ENDPOINT_TYPE"


class UnsupportedEndpointType(BrokerError, code=115):
    kafka_name = "UNSUPPORTED_ENDPOINT_TYPE"


class UnknownControllerId(BrokerError, code=116):
    kafka_name = "UNKNOWN_CONTROLLER_ID"


class UnknownSubscriptionId(BrokerError, code=117):
    kafka_name = "UNKNOWN_SUBSCRIPTION_ID"


class TelemetryTooLarge(BrokerError, code=118):
    kafka_name = "TELEMETRY_TOO_LARGE"


class InvalidRegistration(BrokerError, code=119):
    kafka_name = "INVALID_REGISTRATION"


class TransactionAbortable(BrokerError, code=120, hint="abort the transaction, then begin a new one"):
    kafka_name = "TRANSACTION_ABORTABLE"


class InvalidRecordState(BrokerError, code=121):
    kafka_name = "INVALID_RECORD_STATE"


class ShareSessionNotFound(BrokerError, code=122, retriable=True):
    kafka_name = "SHARE_SESSION_NOT_FOUND"


class InvalidShareSessionEpoch(BrokerError, code=123, retriable=True):
    kafka_name = "INVALID_SHARE_SESSION_EPOCH"


class FencedStateEpoch(BrokerError, code=124):
    kafka_name = "FENCED_STATE_EPOCH"


class InvalidVoterKey(BrokerError, code=125):
    kafka_name = "INVALID_VOTER_KEY"


class DuplicateVoter(BrokerError, code=126):
    kafka_name = "DUPLICATE_VOTER"


class VoterNotFound(BrokerError, code=127):
    kafka_name = "VOTER_NOT_FOUND"


class InvalidRegularExpression(BrokerError, code=128):
    kafka_name = "INVALID_REGULAR_EXPRESSION"


class RebootstrapRequired(BrokerError, code=129):
    kafka_name = "REBOOTSTRAP_REQUIRED"


class StreamsInvalidTopology(BrokerError, code=130):
    kafka_name = "STREAMS_INVALID_TOPOLOGY"


class StreamsInvalidTopologyEpoch(BrokerError, code=131):
    kafka_name = "STREAMS_INVALID_TOPOLOGY_EPOCH"


class StreamsTopologyFenced(BrokerError, code=132):
    kafka_name = "STREAMS_TOPOLOGY_FENCED"


class ShareSessionLimitReached(BrokerError, code=133, retriable=True):
    kafka_name = "SHARE_SESSION_LIMIT_REACHED"
