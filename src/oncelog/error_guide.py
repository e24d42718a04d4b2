"""The meaning of each error and what to do about it: the source of docs/reference/errors.md.

The keys are error names, not numbers. The meanings follow Kafka's Errors and its exception classes. The other
fields describe the broker, the clients and the commands of this project. `oncelog.errors` has the classes.
`oncelog.rules.idempotence.error_policy` and `oncelog.rules.groups.error_policy` decide how the clients react.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorGuide(NamedTuple):
    """The description of one error.

    `seen_by`: the clients that can get the error. `look`: how to find the cause. `action`: what to do about
    it. `look` and `action` are empty if this project's clients do not use the APIs that return the error.
    """

    meaning: str
    seen_by: str
    look: str = ""
    action: str = ""


_PRODUCER = "producers"
_TRANSACTIONAL = "transactional producers"
_CONSUMER = "consumers"
_SESSION = "clients with fetch sessions (KIP-227); Oncelog's consumer does not use them"
_MEMBER = "members of consumer groups"
_ADMIN = "admin clients"
_ANY = "any client"
_BROKERS = "brokers and controllers of a cluster, among themselves"
_TOKENS = "clients that use delegation tokens, which Oncelog does not offer"
_SHARE = "share consumers (KIP-932), which Oncelog does not offer"
_STREAMS = "Kafka Streams with KIP-1071 groups, which Oncelog does not offer"
_TELEMETRY = "clients that push telemetry (KIP-714), which Oncelog does not offer"

_COORDINATOR = "If the coordinator cannot write, the broker's log has the event `disk refuses`. `oncelog_partitions_offline` counts partitions that are offline because a sync failed."
_TRANSACTION = "`oncelog transactions describe` shows the state, the producer epoch and the start time of the transaction."
_GROUP = "`oncelog groups describe` shows the committed offsets; with `--members`, it shows the members and their partitions."
_TOPIC = "`oncelog topics describe` shows the partitions; with `--all-configs`, it shows all settings."
_PRODUCER_STATE = "`oncelog producers describe` shows each producer's epoch and last sequence on a partition. `oncelog dump` shows the epoch and the sequences of each stored batch."
_ACLS = "`oncelog acls list` shows all ACLs. A client's principal is the name under which it authenticated: see docs/security.md."
_RETRY = "Nothing: the clients retry. If the error lasts longer than the clients wait, raise `delivery.timeout.ms` or `request.timeout.ms`."
_ALLOW = "Add an ACL with `oncelog acls add`, or use another principal."

ERRORS: dict[str, ErrorGuide] = {
    "UNKNOWN_SERVER_ERROR": ErrorGuide(
        "The broker failed with an error that has no code in the protocol. The request may have been carried out.",
        _ANY,
        "The broker's log has the traceback. If a newer broker sent an unknown code, the text of the error contains that code.",
        "Before you send a record again, check whether it is stored. Report a traceback of Oncelog's broker as a bug.",
    ),
    "OFFSET_OUT_OF_RANGE": ErrorGuide(
        "The offset is below the log start offset or above the high watermark.",
        "consumers, and admin clients that delete records",
        "`oncelog topics describe` shows the start offset and the end offset of each partition. Retention and DeleteRecords raise the start offset.",
        "Set `auto.offset.reset`, seek to an offset that exists, or run `oncelog groups reset-offsets`. Raise `retention.ms` if consumers are slower than retention.",
    ),
    "CORRUPT_MESSAGE": ErrorGuide(
        "The CRC-32C checksum or the framing of a record batch is wrong.",
        "producers and consumers",
        "`oncelog dump` reads the segment files and names the offset. `oncelog audit --files` checks every batch.",
        "For a producer: nothing, because it sends the batch again. For a consumer: the stored batch is damaged; restore it from a backup or seek past it.",
    ),
    "UNKNOWN_TOPIC_OR_PARTITION": ErrorGuide(
        "The broker does not have this topic or partition.",
        _ANY,
        "`oncelog topics list` shows what exists. A client's metadata may be older than a new topic or partition.",
        "Create the topic with `oncelog topics create`, or correct its name. Clients retry, because a broker may not have the metadata of a new topic yet.",
    ),
    "INVALID_FETCH_SIZE": ErrorGuide("The fetch size is negative.", _CONSUMER),
    "LEADER_NOT_AVAILABLE": ErrorGuide(
        "The partition has no leader, for example while a leader is elected. Only clusters of several brokers send this error.",
        "producers and consumers",
        "`oncelog topics describe` shows the leader of each partition.",
        _RETRY,
    ),
    "NOT_LEADER_OR_FOLLOWER": ErrorGuide(
        "This broker does not lead the partition.",
        "producers and consumers",
        "`oncelog topics describe` shows the leader of each partition.",
        "Nothing: the clients fetch new metadata and send the request to the leader.",
    ),
    "REQUEST_TIMED_OUT": ErrorGuide(
        "The broker did not complete the request within its time limit. The broker may have carried out the request, or may do so later.",
        _ANY,
        "`oncelog_request_duration_seconds` shows which requests are slow. A slow disk delays acknowledgements.",
        _RETRY + " If `poll()` raises this error, call `poll()` again.",
    ),
    "BROKER_NOT_AVAILABLE": ErrorGuide("The broker is not available. Only old brokers send this error.", _ANY),
    "REPLICA_NOT_AVAILABLE": ErrorGuide(
        "The replica is not on this broker. A cluster sends this error while partitions are reassigned.",
        "producers and consumers",
        "`oncelog topics describe` shows the replicas.",
        _RETRY,
    ),
    "MESSAGE_TOO_LARGE": ErrorGuide(
        "The record batch is larger than `max.message.bytes` of the topic. Nothing of it is stored.",
        "producers; members of groups whose state would exceed the batch size of `__consumer_offsets`",
        _TOPIC,
        "The producer splits the batch. If a single record is too large, raise `max.message.bytes` of the topic (or `message.max.bytes` of the broker).",
    ),
    "STALE_CONTROLLER_EPOCH": ErrorGuide("The controller's epoch is older than the epoch that the broker knows.", _BROKERS),
    "OFFSET_METADATA_TOO_LARGE": ErrorGuide(
        "The metadata text of a committed offset is longer than `offset.metadata.max.bytes`.",
        _MEMBER,
        "Compare the length of the metadata with the broker's `offset.metadata.max.bytes`.",
        "Shorten the metadata, or raise `offset.metadata.max.bytes` of the broker.",
    ),
    "NETWORK_EXCEPTION": ErrorGuide(
        "The connection was lost before the response came. Java's client uses it internally; brokers do not send it.",
        _ANY,
        "The client's log names the broker and the reason.",
        _RETRY,
    ),
    "COORDINATOR_LOAD_IN_PROGRESS": ErrorGuide(
        "The coordinator is reading its partition of `__transaction_state` or `__consumer_offsets` after a restart.",
        "transactional producers and members of consumer groups",
        "The more groups or transactional ids a coordinator has, the longer it loads.",
        "Nothing: the clients retry until the coordinator has loaded.",
    ),
    "COORDINATOR_NOT_AVAILABLE": ErrorGuide(
        "No coordinator is available, or the coordinator could not store a change in time.",
        "transactional producers and members of consumer groups",
        _COORDINATOR,
        "Nothing: the clients find the coordinator again. If the error lasts, check the disk of the broker.",
    ),
    "NOT_COORDINATOR": ErrorGuide(
        "This broker is not the coordinator of the group or the transactional id, or the coordinator cannot write its log.",
        "transactional producers and members of consumer groups",
        _COORDINATOR,
        "Nothing: the clients find the coordinator again. If the disk failed, see docs/operations.md.",
    ),
    "INVALID_TOPIC_EXCEPTION": ErrorGuide(
        "The topic name is invalid, or the request would change an internal topic.",
        "producers and admin clients",
        "A valid name has 1 to 249 of the characters a-z, A-Z, 0-9, dot, hyphen and underscore. The names `.` and `..` are invalid.",
        "Use another name. Do not change `__consumer_offsets` or `__transaction_state`.",
    ),
    "RECORD_LIST_TOO_LARGE": ErrorGuide(
        "The record batch is larger than a segment (`segment.bytes`). Nothing of it is stored.",
        _PRODUCER,
        _TOPIC,
        "The producer splits the batch. If a single record is too large, raise `segment.bytes`.",
    ),
    "NOT_ENOUGH_REPLICAS": ErrorGuide(
        "Fewer replicas are in sync than `min.insync.replicas` requires. Nothing was stored. A transactional producer also gets this error while the transaction coordinator is not available.",
        "producers with acks=all",
        _TOPIC,
        "On one Oncelog broker set `min.insync.replicas` to 1. On a cluster, bring the missing brokers back.",
    ),
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": ErrorGuide(
        "The batch is stored on the leader, but fewer replicas are in sync than `min.insync.replicas` requires.",
        "producers with acks=all",
        _TOPIC,
        "Bring the missing brokers back. Without idempotence the retry stores the batch a second time.",
    ),
    "INVALID_REQUIRED_ACKS": ErrorGuide(
        "`acks` is not 0, 1 or -1 (all).", _PRODUCER, "Look at the client's setting `acks`.", "Set `acks` to 0, 1 or all."
    ),
    "ILLEGAL_GENERATION": ErrorGuide(
        "The member's generation is not the group's generation: the group has rebalanced without this member.",
        "members of classic groups; transactional producers that commit offsets for one",
        _GROUP,
        "A consumer joins again. A transaction must be aborted; the new owner of the partition reads the input records again.",
    ),
    "INCONSISTENT_GROUP_PROTOCOL": ErrorGuide(
        "The member's protocol type or assignors have nothing in common with the group's, or the group's members use another `group.protocol`.",
        _MEMBER,
        "Compare `partition.assignment.strategy` and `group.protocol` of all members.",
        "Give all members of a group one assignor in common, and use each group id for one purpose.",
    ),
    "INVALID_GROUP_ID": ErrorGuide(
        "The group id is empty or invalid.", _MEMBER, "Look at the client's setting `group.id`.", "Set `group.id`."
    ),
    "UNKNOWN_MEMBER_ID": ErrorGuide(
        "The group does not have this member: the member's session timed out, or the member left.",
        "members of consumer groups; transactional producers that commit offsets for one",
        _GROUP + " Compare the time between polls with `max.poll.interval.ms`.",
        "A consumer joins as a new member and loses its partitions. Poll more often, or raise `session.timeout.ms` or `max.poll.interval.ms`.",
    ),
    "INVALID_SESSION_TIMEOUT": ErrorGuide(
        "`session.timeout.ms` is outside the broker's bounds.",
        _MEMBER,
        "The bounds are `group.min.session.timeout.ms` and `group.max.session.timeout.ms`.",
        "Choose a value between the bounds, or change the bounds.",
    ),
    "REBALANCE_IN_PROGRESS": ErrorGuide(
        "The group is rebalancing: every member must join again.",
        _MEMBER,
        _GROUP,
        "Call `poll()`. An offset commit that fails with this error stored nothing. Commit again after the rebalance if the consumer still has the partition.",
    ),
    "INVALID_COMMIT_OFFSET_SIZE": ErrorGuide(
        "The committed offsets do not fit into one record batch of `__consumer_offsets`.",
        "members of consumer groups; transactional producers",
        "The limit is `max.message.bytes` of `__consumer_offsets`.",
        "Commit fewer partitions at once, or shorten the metadata.",
    ),
    "TOPIC_AUTHORIZATION_FAILED": ErrorGuide(
        "The principal is not allowed to perform this operation on the topic.", _ANY, _ACLS, _ALLOW
    ),
    "GROUP_AUTHORIZATION_FAILED": ErrorGuide(
        "The principal is not allowed to use the consumer group.",
        "members of consumer groups; transactional producers that commit offsets",
        _ACLS,
        _ALLOW,
    ),
    "CLUSTER_AUTHORIZATION_FAILED": ErrorGuide(
        "The principal is not allowed to perform this operation on the cluster, for example to change ACLs. An idempotent producer gets it without WRITE on any topic and without IDEMPOTENT_WRITE on the cluster (KIP-679).",
        "admin clients; idempotent producers",
        _ACLS,
        "Add an ACL with `oncelog acls add`, for a producer with `--producer --topic TOPIC`. Brokers before Kafka 2.8 need `--operation IDEMPOTENT_WRITE --cluster`. Or use another principal.",
    ),
    "INVALID_TIMESTAMP": ErrorGuide(
        "A record's timestamp is further from the broker's clock than the topic allows.",
        _PRODUCER,
        "The topic's `message.timestamp.before.max.ms` and `message.timestamp.after.max.ms` are the bounds.",
        "Correct the clock or the timestamps, or set `message.timestamp.type=LogAppendTime`.",
    ),
    "UNSUPPORTED_SASL_MECHANISM": ErrorGuide(
        "The broker does not offer this SASL mechanism.",
        "clients that use SASL",
        "The broker's `sasl.enabled.mechanisms` lists the mechanisms that it offers.",
        "Set `sasl.mechanism` of the client to a mechanism that the broker offers.",
    ),
    "ILLEGAL_SASL_STATE": ErrorGuide(
        "The request does not fit the state of the authentication, for example a SaslHandshake on a listener without SASL.",
        "clients that use SASL",
        "Compare `security.protocol` of the client with the listener's.",
        "Use the listener's security protocol.",
    ),
    "UNSUPPORTED_VERSION": ErrorGuide(
        "The broker does not support this version of the API, or a feature that the request needs is off.",
        _ANY,
        "docs/differences.md lists what Oncelog's broker leaves out.",
        "Use a newer broker, or a setting that does not need the API, for example `group.protocol=classic`.",
    ),
    "TOPIC_ALREADY_EXISTS": ErrorGuide(
        "A topic with this name exists.", _ADMIN, "`oncelog topics list` shows it.", "Use the topic, or `oncelog topics create --if-not-exists`."
    ),
    "INVALID_PARTITIONS": ErrorGuide(
        "The number of partitions is outside the broker's limits, or not above the topic's present number.",
        _ADMIN,
        "`oncelog topics describe` shows the present number.",
        "Choose a number within the limits, above the present number. Partitions cannot be removed.",
    ),
    "INVALID_REPLICATION_FACTOR": ErrorGuide(
        "The replication factor is larger than the number of brokers, or below 1.",
        _ADMIN,
        "An Oncelog broker offers only replication factor 1.",
        "Request 1, or set `oncelog.accept.any.replication.factor=true` on the broker.",
    ),
    "INVALID_REPLICA_ASSIGNMENT": ErrorGuide(
        "The assignment of replicas names unknown brokers or has gaps.",
        _ADMIN,
        "On an Oncelog broker, the only valid replica is the broker's own `node.id`.",
        "Leave the assignment out.",
    ),
    "INVALID_CONFIG": ErrorGuide(
        "A setting is unknown, malformed, out of range, or in conflict with another one.",
        _ADMIN,
        "The text of the error names the setting. See the [settings](configuration.md).",
        "Correct the setting.",
    ),
    "NOT_CONTROLLER": ErrorGuide(
        "This broker is not the controller. Only clusters send this error.", _ADMIN, "The client's log names the broker.", "Nothing: the client sends the request to the controller."
    ),
    "INVALID_REQUEST": ErrorGuide(
        "The request contradicts itself or the protocol.",
        _ANY,
        "The text of the error says what is wrong. `oncelog proxy` shows the request on the wire.",
        "Correct the call. If the call is correct and the client is Oncelog's, report a bug.",
    ),
    "UNSUPPORTED_FOR_MESSAGE_FORMAT": ErrorGuide(
        "The stored message format is too old for the request.", "producers and consumers on old brokers", "Look at the topic's message format.", "Upgrade the brokers and the format."
    ),
    "POLICY_VIOLATION": ErrorGuide(
        "A limit or policy of the broker refuses the request.",
        _ADMIN,
        "The text of the error names the limit.",
        "Stay below the limit, for example with several smaller requests.",
    ),
    "OUT_OF_ORDER_SEQUENCE_NUMBER": ErrorGuide(
        "The base sequence of the batch does not follow the last stored sequence: a batch is missing, or batches arrived in another order.",
        "idempotent and transactional producers",
        _PRODUCER_STATE,
        "Nothing while the producer can restore the order. If the records fail, they may be stored: read the log before you send them again.",
    ),
    "DUPLICATE_SEQUENCE_NUMBER": ErrorGuide(
        "The batch is stored already, but the broker no longer remembers its offset.",
        "idempotent and transactional producers",
        _PRODUCER_STATE,
        "Nothing: the producer reports the record as delivered, without an offset.",
    ),
    "INVALID_PRODUCER_EPOCH": ErrorGuide(
        "The producer's epoch is older than the epoch that the partition or the coordinator knows. A newer producer has taken over, or the producer itself raised its epoch.",
        "idempotent and transactional producers",
        "`oncelog producers describe` shows the newer epoch of a producer id, `oncelog transactions describe` that of a transactional id.",
        "Abort an open transaction. If PRODUCER_FENCED follows, close the producer: a newer producer uses its transactional id.",
    ),
    "INVALID_TXN_STATE": ErrorGuide(
        "The request does not fit the state of the transaction, for example a commit without a transaction.",
        _TRANSACTIONAL,
        _TRANSACTION,
        "If the exception's `reaction` is abortable, abort the transaction. Otherwise close the producer and make a new one.",
    ),
    "INVALID_PRODUCER_ID_MAPPING": ErrorGuide(
        "The transactional id now has another producer id, or has expired.",
        _TRANSACTIONAL,
        "Compare the time that the producer was idle with `transactional.id.expiration.ms`. " + _TRANSACTION,
        "Make a new producer with this transactional id.",
    ),
    "INVALID_TRANSACTION_TIMEOUT": ErrorGuide(
        "`transaction.timeout.ms` is above the broker's `transaction.max.timeout.ms`, or not above 0.",
        _TRANSACTIONAL,
        "Compare the two settings.",
        "Lower `transaction.timeout.ms`, or raise `transaction.max.timeout.ms`.",
    ),
    "CONCURRENT_TRANSACTIONS": ErrorGuide(
        "Another operation of this transactional id is in progress, usually the end of the previous transaction.",
        _TRANSACTIONAL,
        _TRANSACTION,
        "Nothing: the client retries. If the error lasts, a partition cannot store the transaction's markers, for example because its disk is full.",
    ),
    "TRANSACTION_COORDINATOR_FENCED": ErrorGuide(
        "A newer transaction coordinator has written markers for this producer id.", _BROKERS
    ),
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": ErrorGuide(
        "The principal is not allowed to use this transactional id.", _TRANSACTIONAL, _ACLS, _ALLOW
    ),
    "SECURITY_DISABLED": ErrorGuide(
        "The broker has no authorizer, so it has no ACLs.",
        _ADMIN,
        "Look at the broker's `authorizer.class.name`.",
        "Start the broker with an authorizer: see docs/security.md.",
    ),
    "OPERATION_NOT_ATTEMPTED": ErrorGuide(
        "Another partition of the same request failed, so the broker did not try this one.",
        _TRANSACTIONAL,
        "The error of the other partition is the cause.",
        "Nothing: the client raises the error of the other partition, or retries.",
    ),
    "KAFKA_STORAGE_ERROR": ErrorGuide(
        "The broker could not write to or read from its disk. The batch may be stored.",
        "producers and consumers",
        "The broker's log names the file and the error of the operating system. `oncelog_partitions_offline` and `oncelog_disk_free_bytes` show the state.",
        "Free or repair the disk, then restart the broker: see docs/operations.md.",
    ),
    "LOG_DIR_NOT_FOUND": ErrorGuide(
        "The broker does not have this log directory.", _ADMIN, "`oncelog serve` has one directory, `--data-dir`.", "Leave the directory out."
    ),
    "SASL_AUTHENTICATION_FAILED": ErrorGuide(
        "The user name, password or token is wrong.",
        "clients that use SASL",
        "`oncelog_authentications_failed_total` counts failed authentications. `oncelog users list` shows the SCRAM users.",
        "Correct the credentials.",
    ),
    "UNKNOWN_PRODUCER_ID": ErrorGuide(
        "The broker has no state of this producer id on this partition. Oncelog and Kafka since 2.5 accept such a batch instead.",
        "idempotent and transactional producers on old brokers",
        _PRODUCER_STATE,
        "For an idempotent producer: nothing, because it raises its epoch. A transaction must be aborted.",
    ),
    "REASSIGNMENT_IN_PROGRESS": ErrorGuide("The partition is being moved between brokers.", _ADMIN),
    "DELEGATION_TOKEN_AUTH_DISABLED": ErrorGuide("Delegation tokens are not enabled.", _TOKENS),
    "DELEGATION_TOKEN_NOT_FOUND": ErrorGuide("The delegation token does not exist.", _TOKENS),
    "DELEGATION_TOKEN_OWNER_MISMATCH": ErrorGuide("The principal does not own the delegation token.", _TOKENS),
    "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED": ErrorGuide("This connection is not allowed to request delegation tokens.", _TOKENS),
    "DELEGATION_TOKEN_AUTHORIZATION_FAILED": ErrorGuide("The principal is not allowed to use the delegation token.", _TOKENS),
    "DELEGATION_TOKEN_EXPIRED": ErrorGuide("The delegation token has expired.", _TOKENS),
    "INVALID_PRINCIPAL_TYPE": ErrorGuide("The type of the principal is not supported.", _TOKENS),
    "NON_EMPTY_GROUP": ErrorGuide(
        "The group has members, so it cannot be deleted or have its offsets set.",
        _ADMIN,
        _GROUP,
        "Stop the members first.",
    ),
    "GROUP_ID_NOT_FOUND": ErrorGuide(
        "The group does not exist, or its members use another `group.protocol`.",
        "admin clients and members of consumer groups",
        "`oncelog groups list` shows all groups.",
        "Correct the name. If the group was deleted, its members join again by themselves.",
    ),
    "FETCH_SESSION_ID_NOT_FOUND": ErrorGuide(
        "The broker no longer has the fetch session.",
        _SESSION,
        "`max.incremental.fetch.session.cache.slots` limits the number of sessions.",
        "Nothing: such a client begins a new session.",
    ),
    "INVALID_FETCH_SESSION_EPOCH": ErrorGuide(
        "The fetch session's epoch is not the expected one, for example after a lost response.",
        _SESSION,
        "The cause can be a client that uses one session on several connections.",
        "Nothing: such a client begins a new session.",
    ),
    "LISTENER_NOT_FOUND": ErrorGuide("The partition's leader has no listener with the name of the listener that received the request.", _ANY),
    "TOPIC_DELETION_DISABLED": ErrorGuide(
        "The broker does not allow the deletion of topics.", _ADMIN, "Look at the broker's `delete.topic.enable`.", "Set `delete.topic.enable=true`."
    ),
    "FENCED_LEADER_EPOCH": ErrorGuide(
        "The client's leader epoch is older than the broker's.",
        "producers and consumers",
        "The client's metadata is out of date.",
        "Nothing: the client fetches new metadata.",
    ),
    "UNKNOWN_LEADER_EPOCH": ErrorGuide(
        "The client's leader epoch is newer than the broker's, for example after a restored backup.",
        "producers and consumers",
        "The broker's metadata is older than the client's.",
        "Nothing while the broker catches up. After a restore, restart the clients.",
    ),
    "UNSUPPORTED_COMPRESSION_TYPE": ErrorGuide(
        "The codec is not allowed in this version of the request, for example zstd before Produce version 7.",
        "producers and consumers of old versions",
        "Look at the client's version and `compression.type`.",
        "Use another codec or a newer client.",
    ),
    "STALE_BROKER_EPOCH": ErrorGuide("The broker's epoch is older than the controller's.", _BROKERS),
    "OFFSET_NOT_AVAILABLE": ErrorGuide(
        "After an election, the new leader does not know the high watermark yet. Only clusters send this error.",
        "clients that look up offsets (ListOffsets)",
        "`oncelog topics describe` shows the leader of each partition.",
        _RETRY,
    ),
    "MEMBER_ID_REQUIRED": ErrorGuide(
        "The coordinator has assigned an id to the new member. The member must join again with this id.",
        "members of classic groups",
        "Since KIP-394, the first join of a member gets this error.",
        "Nothing: the consumer joins again with the id.",
    ),
    "PREFERRED_LEADER_NOT_AVAILABLE": ErrorGuide("The preferred leader cannot be elected.", _ADMIN),
    "GROUP_MAX_SIZE_REACHED": ErrorGuide(
        "The group has as many members as the broker allows, or its members' subscriptions need too much memory.",
        _MEMBER,
        "The limits are `group.max.size` and `group.consumer.max.size`.",
        "Start fewer members, subscribe to fewer topics, or raise the limit.",
    ),
    "FENCED_INSTANCE_ID": ErrorGuide(
        "Another member with the same `group.instance.id` has taken over.",
        "static members of consumer groups",
        _GROUP,
        "Give each consumer its own `group.instance.id`. Close the fenced consumer.",
    ),
    "ELIGIBLE_LEADERS_NOT_AVAILABLE": ErrorGuide("No replica can be elected leader.", _ADMIN),
    "ELECTION_NOT_NEEDED": ErrorGuide(
        "The preferred replica already leads the partition, so no election is needed.", _ADMIN, "A single Oncelog broker holds no elections.", "Nothing."
    ),
    "NO_REASSIGNMENT_IN_PROGRESS": ErrorGuide(
        "There is no reassignment to cancel.", _ADMIN, "A single Oncelog broker reassigns no partitions.", "Nothing."
    ),
    "GROUP_SUBSCRIBED_TO_TOPIC": ErrorGuide(
        "Members of the group are subscribed to the topic, so its offsets cannot be deleted.",
        _ADMIN,
        _GROUP,
        "Stop the members or change their subscription first.",
    ),
    "INVALID_RECORD": ErrorGuide(
        "A record or batch is invalid, for example a record without a key in a compacted topic.",
        _PRODUCER,
        "`record_errors` of the exception names each refused record.",
        "Correct the record. The other records of the batch can be sent again.",
    ),
    "UNSTABLE_OFFSET_COMMIT": ErrorGuide(
        "An open transaction has offsets for the partition, so the committed offset is not final.",
        _MEMBER,
        "`oncelog transactions list` shows the state of each transaction.",
        "Nothing: the consumer retries until the transaction ends.",
    ),
    "THROTTLING_QUOTA_EXCEEDED": ErrorGuide(
        "The client has exceeded a quota, and the broker refuses the request instead of delaying it.",
        "admin clients and producers that ask for producer ids",
        "`oncelog quotas list` shows the quotas. `oncelog_throttled_total` counts the throttled responses.",
        "Send fewer requests, or raise the quota with `oncelog quotas set`.",
    ),
    "PRODUCER_FENCED": ErrorGuide(
        "A newer producer with this transactional id has taken over.",
        _TRANSACTIONAL,
        _TRANSACTION,
        "Close this producer. If both should run, give each its own transactional id.",
    ),
    "RESOURCE_NOT_FOUND": ErrorGuide(
        "The named resource, for example a SCRAM user, does not exist.", _ADMIN, "`oncelog users list` shows the users.", "Correct the name."
    ),
    "DUPLICATE_RESOURCE": ErrorGuide(
        "The request names one resource twice.", _ADMIN, "The text of the error names the resource.", "Name each resource once."
    ),
    "UNACCEPTABLE_CREDENTIAL": ErrorGuide(
        "The credential is refused, for example with too few iterations or an empty user name.",
        _ADMIN,
        "The text of the error says why.",
        "Choose a credential that meets the rule.",
    ),
    "INCONSISTENT_VOTER_SET": ErrorGuide("The voter sets of two controllers differ.", _BROKERS),
    "INVALID_UPDATE_VERSION": ErrorGuide(
        "The feature cannot have this level.",
        _ADMIN,
        "The broker's setting `oncelog.transaction.version` is the level of the feature `transaction.version`.",
        "Set the level in the broker's configuration.",
    ),
    "FEATURE_UPDATE_FAILED": ErrorGuide("The feature could not be updated.", _ADMIN),
    "PRINCIPAL_DESERIALIZATION_FAILURE": ErrorGuide("A forwarded request's principal cannot be read.", _BROKERS),
    "SNAPSHOT_NOT_FOUND": ErrorGuide("The metadata snapshot does not exist.", _BROKERS),
    "POSITION_OUT_OF_RANGE": ErrorGuide("The position is outside the snapshot.", _BROKERS),
    "UNKNOWN_TOPIC_ID": ErrorGuide(
        "No topic has this id: the topic was deleted, or deleted and created again.",
        "producers, consumers and admin clients",
        "`oncelog topics list -o wide` shows the id of each topic.",
        "Producers fetch new metadata. A consumer's position belongs to the old topic: seek, or reset the group's offsets.",
    ),
    "DUPLICATE_BROKER_REGISTRATION": ErrorGuide("Two brokers have one node id.", _BROKERS),
    "BROKER_ID_NOT_REGISTERED": ErrorGuide("The broker is not registered with the controller.", _BROKERS),
    "INCONSISTENT_TOPIC_ID": ErrorGuide(
        "The topic id of the request is not the one in the broker's log.",
        "producers and consumers",
        "`oncelog topics list -o wide` shows the id of each topic.",
        "Producers fetch new metadata and retry. If `poll()` raises this error, call `poll()` again.",
    ),
    "INCONSISTENT_CLUSTER_ID": ErrorGuide("The request names another cluster id.", _BROKERS),
    "TRANSACTIONAL_ID_NOT_FOUND": ErrorGuide(
        "The coordinator does not know the transactional id, or it has expired.",
        _ADMIN,
        "`oncelog transactions list` shows all transactional ids.",
        "Correct the name.",
    ),
    "FETCH_SESSION_TOPIC_ID_ERROR": ErrorGuide(
        "A fetch session mixes requests with topic ids and with topic names.",
        _SESSION,
        "The cause is an upgrade or downgrade of the client.",
        "Nothing: such a client begins a new session.",
    ),
    "INELIGIBLE_REPLICA": ErrorGuide("The replica may not join the in-sync set.", _BROKERS),
    "NEW_LEADER_ELECTED": ErrorGuide("The change of the in-sync set elected another leader.", _BROKERS),
    "OFFSET_MOVED_TO_TIERED_STORAGE": ErrorGuide("The offset is in tiered storage.", _BROKERS),
    "FENCED_MEMBER_EPOCH": ErrorGuide(
        "The member's epoch is not the coordinator's (KIP-848). Its partitions may be assigned to other members.",
        "members of groups with `group.protocol=consumer`",
        _GROUP,
        "Nothing: the consumer gives up its partitions and joins again.",
    ),
    "UNRELEASED_INSTANCE_ID": ErrorGuide(
        "Another member still uses this `group.instance.id` (KIP-848).",
        "static members of groups with `group.protocol=consumer`",
        _GROUP,
        "Stop the other member, or wait until its session times out. Then poll again.",
    ),
    "UNSUPPORTED_ASSIGNOR": ErrorGuide(
        "The coordinator does not have the assignor of `group.remote.assignor`.",
        "members of groups with `group.protocol=consumer`",
        "The broker's `group.consumer.assignors` lists the assignors that it has.",
        "Name an assignor from that list, or leave the setting out.",
    ),
    "STALE_MEMBER_EPOCH": ErrorGuide(
        "The member's epoch is older than the coordinator's (KIP-848). The next heartbeat response has the new epoch.",
        "members of groups with `group.protocol=consumer`; transactional producers that commit offsets for one",
        _GROUP,
        "A consumer retries. A transaction must be aborted.",
    ),
    "MISMATCHED_ENDPOINT_TYPE": ErrorGuide(
        "The client asked a broker for controllers, or the other way round.", _ADMIN, "Look at the address of the bootstrap server.", "Use a broker's address."
    ),
    "UNSUPPORTED_ENDPOINT_TYPE": ErrorGuide(
        "The broker does not know this type of endpoint.", _ADMIN, "Look at the client's version.", "Use a broker's address."
    ),
    "UNKNOWN_CONTROLLER_ID": ErrorGuide("The controller id is unknown.", _BROKERS),
    "UNKNOWN_SUBSCRIPTION_ID": ErrorGuide("The telemetry subscription is unknown.", _TELEMETRY),
    "TELEMETRY_TOO_LARGE": ErrorGuide("The telemetry is larger than the broker accepts.", _TELEMETRY),
    "INVALID_REGISTRATION": ErrorGuide("The controller refuses the registration of a broker.", _BROKERS),
    "TRANSACTION_ABORTABLE": ErrorGuide(
        "The transaction cannot be committed; the producer can continue after an abort (KIP-890).",
        _TRANSACTIONAL,
        "The text of the error, or the exception's `__cause__`, shows the cause. " + _TRANSACTION,
        "Call `abort_transaction()`, then begin the transaction again from the last committed offsets.",
    ),
    "INVALID_RECORD_STATE": ErrorGuide("The record of the share group is not in the state that the request requires.", _SHARE),
    "SHARE_SESSION_NOT_FOUND": ErrorGuide("The share session does not exist.", _SHARE),
    "INVALID_SHARE_SESSION_EPOCH": ErrorGuide("The share session's epoch is not the expected one.", _SHARE),
    "FENCED_STATE_EPOCH": ErrorGuide("The share coordinator's state epoch is too old.", _SHARE),
    "INVALID_VOTER_KEY": ErrorGuide("The voter key does not belong to this controller.", _BROKERS),
    "DUPLICATE_VOTER": ErrorGuide("The controller is already a voter.", _BROKERS),
    "VOTER_NOT_FOUND": ErrorGuide("The controller is not a voter.", _BROKERS),
    "INVALID_REGULAR_EXPRESSION": ErrorGuide(
        "The regular expression is malformed or not in RE2's syntax.",
        "members of groups with `group.protocol=consumer`; admin clients that list transactions",
        "The text of the error says what is wrong.",
        "Correct the pattern: see docs/differences.md for the syntax.",
    ),
    "REBOOTSTRAP_REQUIRED": ErrorGuide("The client's metadata is too old; it must start from its bootstrap servers again (KIP-1102).", _ANY),
    "STREAMS_INVALID_TOPOLOGY": ErrorGuide("The topology of the application is invalid.", _STREAMS),
    "STREAMS_INVALID_TOPOLOGY_EPOCH": ErrorGuide("The epoch of the topology is invalid.", _STREAMS),
    "STREAMS_TOPOLOGY_FENCED": ErrorGuide("The epoch of the topology is too old.", _STREAMS),
    "SHARE_SESSION_LIMIT_REACHED": ErrorGuide("The broker has as many share sessions as it allows.", _SHARE),
}  # fmt: skip
"""The description of each error code, by Kafka's name of the error."""

EXCEPTIONS: dict[str, ErrorGuide] = {
    "OncelogError": ErrorGuide(
        "The base class of all exceptions of Oncelog.", _ANY, "Look at the class and the text.", "Catch a subclass where you can act on it."
    ),
    "ConfigError": ErrorGuide(
        "A setting is unknown, malformed, out of range, or in conflict with another one. Nothing was started.",
        _ANY,
        "The text names the setting. If the name is unknown, the text has the most similar known name.",
        "Correct the setting: see [Settings](configuration.md).",
    ),
    "MissingDependency": ErrorGuide(
        "A package of an extra is not installed.", _ANY, "The text has the command that installs it.", "Run that command."
    ),
    "MisuseError": ErrorGuide(
        "The call is not allowed in the current state, for example `send()` after `close()`.",
        _ANY,
        "The text says what to do instead.",
        "Correct the order of the calls.",
    ),
    "PeerError": ErrorGuide(
        "The other side sent bytes that break the protocol. The connection is closed.",
        "any client, and the broker",
        "The text names the field. `oncelog proxy` shows the messages.",
        "Check that the port belongs to a Kafka-compatible broker and that the security protocols are equal.",
    ),
    "TooManyElements": ErrorGuide(
        "A message has more elements than its reader allows. The broker closes the connection of such a request.",
        "any client, and the broker",
        "The text has the limit.",
        "Send several smaller requests: see the limits of requests in docs/differences.md.",
    ),
    "StorageError": ErrorGuide(
        "The disk failed, or a file on it is unreadable.",
        "the broker, `oncelog dump` and `oncelog load`",
        "The text names the file and the position or the offset.",
        "See docs/operations.md.",
    ),
    "TimedOut": ErrorGuide(
        "An operation did not finish within its time limit, for example `max.block.ms`.",
        _ANY,
        "The text names the setting or the argument that limits the wait.",
        "Follow the text: a commit that timed out may have been carried out, and must be repeated, not aborted.",
    ),
    "DisconnectedError": ErrorGuide(
        "The connection was lost. Requests in flight may have been carried out.",
        _ANY,
        "The text names the broker and the reason.",
        "Repeat an operation only if it may be carried out twice. The idempotent producer and the consumer retry by themselves.",
    ),
    "NotConnectedError": ErrorGuide(
        "No connection could be made, so the request was not sent.",
        _ANY,
        "Check the address, the listener and the firewall.",
        "Retry when the broker can be reached.",
    ),
    "AuthenticationError": ErrorGuide(
        "TLS or SASL failed: one side does not accept the other. A retry does not help.",
        "clients of secured listeners",
        "The text has the reason of the TLS library or the broker.",
        "Correct the certificates or credentials: see docs/security.md.",
    ),
    "OutcomeUnknown": ErrorGuide(
        "The record got no acknowledgement and is not sent again. It may be stored.",
        _PRODUCER,
        "`cause` is the last error. If that error was a response of the broker, `code` and `kafka_name` are set. Look for the record in the log.",
        "Send the record again only if it is not in the log, or if it may be stored twice.",
    ),
    "DeliveryUnknown": ErrorGuide(
        "`delivery.timeout.ms` passed without a response that shows whether the record is stored. It may be stored.",
        _PRODUCER,
        "As for OutcomeUnknown.",
        "As for OutcomeUnknown. If the broker is often unavailable for longer, raise `delivery.timeout.ms`.",
    ),
    "TransactionAborted": ErrorGuide(
        "The record is not stored, because its transaction was aborted before.",
        _TRANSACTIONAL,
        "The exception's `__cause__`, if it is set, is the cause of the abort.",
        "Send the record again in the next transaction.",
    ),
    "LoadRefused": ErrorGuide(
        "The files, the topic or the options differ from those at the start of the load, or a file changed during the load. The open transaction is aborted. Records that the load committed before the error stay.",
        "`oncelog load` and `oncelog.load`",
        "The text names the file, the topic or the option that differs.",
        "Restore what differs, then run the same load again: it resumes. A load with another id stores all records again, also those that are committed already.",
    ),
    "SerializationError": ErrorGuide(
        "A serializer of the application failed, or returned something other than bytes. The record was not sent.",
        _PRODUCER,
        "The text names the topic, and key or value. `__cause__` is the error of the serializer.",
        "Correct the data or the serializer, then send the record again.",
    ),
    "DeserializationError": ErrorGuide(
        "A deserializer of the application failed. The record counts as not delivered, and the next poll raises the error again.",
        _CONSUMER,
        "The text names partition and offset. `record` is the record with its bytes, and `__cause__` the error of the deserializer.",
        "Seek to `offset + 1` to skip the record. `oncelog.process` has a dead-letter topic for such records.",
    ),
    "ProvenanceError": ErrorGuide(
        "A record's headers do not say from which source record it was made, so it cannot be told from a repetition.",
        "`oncelog.ProvenanceFilter`",
        "The text names the record's topic, partition and offset, and the header.",
        "Write the headers with `oncelog.spark.provenance_headers()`. If others write to the topic too, use `pass_unmarked=True`.",
    ),
    "SchemaRegistryError": ErrorGuide(
        "The schema registry refused a request, did not answer in time, or has no such schema.",
        "clients with serializers of `oncelog.schema_registry`",
        "The text names the request, the subject or id, and the address. `status` and `error_code` are those of the registry.",
        "See docs/guides/schema-registry.md.",
    ),
    "SchemaDataError": ErrorGuide(
        "Data does not fit its schema, a schema is invalid, or bytes are not in the wire format of a schema registry.",
        "clients with serializers of `oncelog.schema_registry`",
        "The text names the schema and the reason. `__cause__` is the error of the schema library.",
        "Correct the data or the schema. A topic may also have records that were written without a registry.",
    ),
    "BrokerError": ErrorGuide(
        "The broker returned an error code. Each code has its own subclass.",
        _ANY,
        "`code`, `kafka_name` and `retriable` describe the error. `reaction` says how the client treats it.",
        "See the error's name on this page.",
    ),
    "DataLossError": ErrorGuide(
        "Offsets that a Spark query needs are gone: retention, deleted records, or a topic that was created again.",
        "Spark's source",
        "The text names the partition, the requested offsets and the existing offsets.",
        "Decide whether the loss is acceptable; if so, set `failOnDataLoss=false`. See docs/spark.md.",
    ),
    "SinkError": ErrorGuide(
        "Spark's sink could not write.", "Spark's sink", "The text names the cause and the remedy.", "Follow the text, then restart the query from its checkpoint."
    ),
    "SinkRefused": ErrorGuide(
        "Spark's sink refuses the batch. After a restart, the sink refuses the batch again.",
        "Spark's sink",
        "The text says what must change.",
        "Follow the text, then restart the query. `oncelog pipeline` does not restart such a query by itself.",
    ),
    "RowRefused": ErrorGuide(
        "A row can never be written as it is, for example without a topic or above `kafka.max.request.size`.",
        "Spark's sink",
        "The text names the row and the reason.",
        "Correct or filter the row.",
    ),
}  # fmt: skip
"""The description of each exception without an error code, by the name of its Python class."""
