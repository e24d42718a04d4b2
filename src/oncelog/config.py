"""The definitions of all settings: key, type, default, range and description.

The parser, --help and the references use these tables.

Keys, defaults and meanings are Kafka's (ProducerConfig, ConsumerConfig, AdminClientConfig, KafkaConfig,
TopicConfig), unless the description says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oncelog.settings import Setting, SettingsTable

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
"""Kafka's name for the authorizer that stores ACLs in the cluster itself. It selects Oncelog's authorizer."""

_ASSIGNORS = "org.apache.kafka.coordinator.group.assignor."
ASSIGNOR_NAMES = {
    "uniform": "uniform",
    "range": "range",
    f"{_ASSIGNORS}UniformAssignor": "uniform",
    f"{_ASSIGNORS}RangeAssignor": "range",
}
"""The assignors' names in the protocol, by their names in group.consumer.assignors."""


def _rows(*rows: tuple[Any, ...]) -> tuple[Setting, ...]:
    return tuple(Setting(*row) for row in rows)


# fmt: off
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_TLS = _rows(
    ("ssl.keystore.location", "str", None, "PEM file with this side's certificate chain and private key."),
    ("ssl.keystore.type", "str", "PEM", "Must be PEM (Kafka's default is JKS).", None, None, ("PEM",)),
    ("ssl.keystore.certificate.chain", "password", None, "This side's certificate chain as PEM text."),
    ("ssl.keystore.key", "password", None, "This side's private key as PEM text."),
    ("ssl.key.password", "password", None, "Password of an encrypted private key."),
    ("ssl.truststore.location", "str", None, "PEM file with the certificate authorities that this side trusts."),
    ("ssl.truststore.type", "str", "PEM", "Must be PEM (Kafka's default is JKS).", None, None, ("PEM",)),
    ("ssl.truststore.certificates", "password", None, "The trusted certificate authorities as PEM text."),
    ("ssl.enabled.protocols", "list", ["TLSv1.2", "TLSv1.3"], "Allowed TLS versions."),
)

_CLIENT = _rows(
    ("bootstrap.servers", "list", None, "HOST:PORT of one or more brokers for the first connection."),
    ("client.id", "str", "oncelog", "Name of this client in the broker's logs and quotas (Kafka's default is empty)."),
    ("request.timeout.ms", "int", 30_000, "Maximum time to wait for the response to a request.", 1),
    ("retry.backoff.ms", "int", 100, "First pause before a retry. It doubles up to retry.backoff.max.ms.", 0),
    ("retry.backoff.max.ms", "int", 1_000, "Longest pause between retries.", 0),
    ("metadata.max.age.ms", "int", 300_000, "Age after which metadata is refreshed.", 1),
    ("reconnect.backoff.ms", "int", 50, "First pause before a reconnection.", 0),
    ("reconnect.backoff.max.ms", "int", 1_000, "Longest pause before a reconnection.", 0),
    ("socket.connection.setup.timeout.ms", "int", 10_000, "Maximum time to establish a connection.", 1),
    ("connections.max.idle.ms", "int", 540_000, "Idle time after which a connection is closed.", -1),
    ("oncelog.bootstrap.timeout.ms", "int", 5_000, "Maximum time that a new client retries if no bootstrap server is reachable. (Oncelog only.)", 0),
    ("security.protocol", "str", "PLAINTEXT", "SSL enables TLS; SASL_* adds authentication.", None, None, PROTOCOLS),
    ("ssl.ca.location", "str", None, "librdkafka's name of ssl.truststore.location."),
    ("ssl.certificate.location", "str", None, "librdkafka's name of a PEM file with this side's certificate chain."),
    ("ssl.key.location", "str", None, "librdkafka's name of a PEM file with this side's private key."),
    ("ssl.endpoint.identification.algorithm", "str", "https", "https: the broker's certificate must match its host name. none: no check.", None, None, ("https", "none", "")),
    ("sasl.mechanism", "str", None, "SASL mechanism, required with SASL_PLAINTEXT and SASL_SSL (Kafka's default is GSSAPI).", None, None, MECHANISMS),
    ("sasl.username", "str", None, "User name for PLAIN and SCRAM (librdkafka's name)."),
    ("sasl.password", "password", None, "Password for PLAIN and SCRAM (librdkafka's name)."),
    ("sasl.jaas.config", "password", None, 'User name and password in Java syntax: "...ScramLoginModule required username=... password=...;".'),
    ("sasl.oauthbearer.token.endpoint.url", "str", None, "For OAUTHBEARER: file:///PATH of a token. The file is read each time a token is needed."),
) + _TLS

PRODUCER = SettingsTable(
    "producer",
    _CLIENT + _rows(
        ("enable.idempotence", "bool", True, "Store each record exactly once per producer session (KIP-98)."),
        ("acks", "str", "all", "Number of replicas that must store a batch before it is acknowledged: 0, 1 or all (-1).", None, None, ("0", "1", "all", "-1")),
        ("retries", "int", INT32_MAX, "Maximum number of retries of a batch before its records fail.", 0, INT32_MAX),
        ("max.in.flight.requests.per.connection", "int", 5, "Maximum number of unacknowledged requests per connection; at most 5 with idempotence.", 1),
        ("delivery.timeout.ms", "int", 120_000, "Maximum time from send() to success or failure; at least linger.ms + request.timeout.ms.", 0),
        ("linger.ms", "int", 5, "Maximum time that a batch that is not full waits for more records.", 0),
        ("batch.size", "int", 1_000_000, "Uncompressed size in bytes at which a batch is complete. The default is that of librdkafka; Kafka's Java producer has 16384.", 0),
        ("buffer.memory", "int", 33_554_432, "Bytes of unacknowledged records above which send() blocks.", 1),
        ("max.block.ms", "int", 60_000, "Maximum time that send() waits for metadata or buffer space.", 0),
        ("metadata.max.idle.ms", "int", 300_000, "Idle time after which the producer drops a topic's metadata.", 5_000),
        ("max.request.size", "int", 1_048_576, "Maximum size of a request, and thus of a record, in bytes.", 1),
        ("compression.type", "str", "none", "Compression codec of batches.", None, None, _CODECS),
        ("compression.gzip.level", "int", -1, "Level for gzip: -1 (the codec's default) or 1 to 9.", -1, 9),
        ("compression.lz4.level", "int", 9, "Level for lz4: 1 to 17.", 1, 17),
        ("compression.zstd.level", "int", 3, "Level for zstd: -131072 to 22.", -131_072, 22),
        ("partitioner", "str", "default", "default (murmur2 for keys, sticky for null keys), round_robin, or consistent_random (CRC-32, as librdkafka).", None, None, ("default", "round_robin", "consistent_random")),
        ("transactional.id", "str", None, "Identity of a transactional producer over restarts; implies idempotence."),
        ("transaction.timeout.ms", "int", 60_000, "Time after which the coordinator aborts an open transaction.", 1),
        ("oncelog.unsafe.max.in.flight", "int", None, "UNSAFE, for demonstrations: allow more than 5 requests in flight with idempotence. A batch that may be stored is then sent again under a new epoch. Records can be duplicated. (Oncelog only.)", 1),
    ),
)

CONSUMER = SettingsTable(
    "consumer",
    _CLIENT + _rows(
        ("isolation.level", "str", "read_committed", "read_committed or read_uncommitted (the Java client's default).", None, None, ("read_committed", "read_uncommitted")),
        ("auto.offset.reset", "str", "latest", "Start position if there is no committed offset: earliest, latest or none (an error).", None, None, ("earliest", "latest", "none")),
        ("fetch.min.bytes", "int", 1, "Bytes that the broker waits for before it answers a fetch.", 0),
        ("fetch.max.wait.ms", "int", 500, "Maximum time that the broker waits for fetch.min.bytes.", 0),
        ("fetch.max.bytes", "int", 52_428_800, "Maximum size of a fetch response in bytes. A single batch may exceed it.", 0),
        ("max.partition.fetch.bytes", "int", 1_048_576, "Maximum bytes of one partition in a fetch response. A single batch may exceed it.", 0),
        ("max.poll.records", "int", 500, "Maximum number of records that one poll() returns.", 1),
        ("check.crcs", "bool", True, "Verify the CRC-32C of each fetched batch."),
        ("consumer.timeout.ms", "int", None, "Time without a record after which iteration over a consumer ends; unset: never. (kafka-python's name.)", 0),
        ("group.id", "str", None, "Consumer group for subscriptions and committed offsets."),
        ("group.instance.id", "str", None, "Identity of a static member, which keeps its partitions over a restart (KIP-345)."),
        ("group.protocol", "str", "classic", "classic, or consumer: the coordinator assigns partitions (KIP-848, Kafka 4.0).", None, None, ("classic", "consumer")),
        ("group.remote.assignor", "str", None, "Assignor of the coordinator with group.protocol=consumer; unset: the coordinator's default."),
        ("partition.assignment.strategy", "list", ["range"], "Assignors in order of preference: range, roundrobin, sticky, cooperative-sticky. cooperative-sticky, if it is the only one, revokes only partitions that move. (Kafka's default also has cooperative-sticky.)"),
        ("session.timeout.ms", "int", 45_000, "Time without a heartbeat after which the coordinator removes a member.", 1),
        ("heartbeat.interval.ms", "int", 3_000, "Interval between heartbeats; should be at most a third of session.timeout.ms.", 1),
        ("max.poll.interval.ms", "int", 300_000, "Time without poll() after which a member leaves its group.", 1),
        ("enable.auto.commit", "bool", True, "Commit positions in poll() and close(). Set it to false if transactions commit offsets."),
        ("auto.commit.interval.ms", "int", 5_000, "Interval between automatic commits.", 0),
    ),
)

ADMIN = SettingsTable("admin", _CLIENT)

TOPIC = SettingsTable(
    "topic",
    _rows(
        ("cleanup.policy", "list", ["delete"], "delete, compact or both; empty: records are never removed.", None, None, ("delete", "compact")),
        ("compression.gzip.level", "int", -1, "Level for gzip if the broker recompresses: -1 (the codec's default) or 1 to 9.", -1, 9),
        ("compression.lz4.level", "int", 9, "Level for lz4 if the broker recompresses: 1 to 17.", 1, 17),
        ("compression.zstd.level", "int", 3, "Level for zstd if the broker recompresses: -131072 to 22.", -131_072, 22),
        ("compression.type", "str", "producer", "producer keeps the producer's codec; with any other value the broker recompresses.", None, None, ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")),
        ("delete.retention.ms", "int", 86_400_000, "Time for which compacted topics keep tombstones.", 0),
        ("file.delete.delay.ms", "int", 60_000, "Delay before a deleted file is removed from disk.", 0),
        ("flush.messages", "int", INT64_MAX, "Number of records after which the log is synced to disk; 1: before each acknowledgement.", 1),
        ("flush.ms", "int", INT64_MAX, "Maximum time between two syncs of the log to disk.", 0),
        ("index.interval.bytes", "int", 4_096, "Bytes of log between two index entries. Values above 65536 act as 65536.", 0, INT32_MAX),
        ("max.message.bytes", "int", 1_048_588, "Maximum size of a batch, compressed and with its header.", 0, INT32_MAX),
        ("message.timestamp.type", "str", "CreateTime", "CreateTime or LogAppendTime.", None, None, ("CreateTime", "LogAppendTime")),
        ("message.timestamp.before.max.ms", "int", INT64_MAX, "Maximum age of a CreateTime timestamp.", 0),
        ("message.timestamp.after.max.ms", "int", 3_600_000, "Maximum lead of a CreateTime timestamp over the broker's clock.", 0),
        ("min.cleanable.dirty.ratio", "float", 0.5, "Share of a log that is not compacted yet at which compaction starts.", 0, 1),
        ("min.compaction.lag.ms", "int", 0, "Minimum age of a record before it is compacted.", 0),
        ("max.compaction.lag.ms", "int", INT64_MAX, "Maximum time before a record is compacted.", 1),
        ("min.insync.replicas", "int", 1, "Minimum number of in-sync replicas for acks=all.", 1, INT32_MAX),
        ("retention.bytes", "int", -1, "Maximum size of a partition; negative: no limit."),
        ("retention.ms", "int", 604_800_000, "Time for which a segment is kept; -1: no limit.", -1),
        ("segment.bytes", "int", 1_073_741_824, "Size at which a segment is closed. Clients cannot set less than 1048576.", 14, INT32_MAX),
        ("internal.segment.bytes", "int", None, "For tests, as in Kafka: a smaller segment.bytes.", 14, INT32_MAX),
        ("segment.index.bytes", "int", 10_485_760, "Maximum size of an index file.", 4, INT32_MAX),
        ("segment.ms", "int", 604_800_000, "Age at which a segment is closed.", 1),
        ("segment.jitter.ms", "int", 0, "Must be 0: segments are closed at segment.ms exactly.", 0, 0),
        ("preallocate", "bool", False, "Must be false: files grow as they are written.", None, None, ("false",)),
        ("unclean.leader.election.enable", "bool", False, "Without effect: one node holds no elections."),
        ("leader.replication.throttled.replicas", "list", [], "Without effect: one node does not replicate."),
        ("follower.replication.throttled.replicas", "list", [], "Without effect: one node does not replicate."),
        ("remote.storage.enable", "bool", False, "Must be false: there is no tiered storage.", None, None, ("false",)),
        ("remote.log.copy.disable", "bool", False, "Without effect: there is no tiered storage."),
        ("remote.log.delete.on.disable", "bool", False, "Without effect: there is no tiered storage."),
        ("local.retention.ms", "int", -2, "Without effect: there is no tiered storage.", -2),
        ("local.retention.bytes", "int", -2, "Without effect: there is no tiered storage.", -2),
    ),
)

GROUP = SettingsTable(
    "group",
    _rows(
        ("consumer.session.timeout.ms", "int", 45_000, "Time without a heartbeat after which a member of the consumer protocol is removed.", 1, INT32_MAX),
        ("consumer.heartbeat.interval.ms", "int", 5_000, "Heartbeat interval of members of the consumer protocol.", 1, INT32_MAX),
    ),
)

BROKER = SettingsTable(
    "broker",
    _rows(
        ("node.id", "int", 1, "Id of this broker (Kafka has no default).", 0),
        ("listeners", "list", ["127.0.0.1:9092"], "Addresses to listen on: [NAME://]HOST:PORT,... Port 0 selects a free port. (Kafka's default is every interface.)"),
        ("listener.security.protocol.map", "list", [], "Security protocols of named listeners: NAME:PROTOCOL,..."),
        ("advertised.listeners", "list", [], "Addresses that clients of a listener get: [NAME://]HOST:PORT,...; default: the listener itself."),
        ("auto.create.topics.enable", "bool", True, "Create a topic when a client requests an unknown one."),
        ("num.partitions", "int", 1, "Default number of partitions of a new topic.", 1),
        ("default.replication.factor", "int", 1, "Must be 1, because there is one node.", 1),
        ("oncelog.accept.any.replication.factor", "bool", False, "Accept topics with a replication factor above 1, but store one replica. (Oncelog only.)"),
        ("delete.topic.enable", "bool", True, "Allow the deletion of topics."),
        ("socket.request.max.bytes", "int", 104_857_600, "Maximum size of a request; a larger one closes its connection.", 1),
        ("connections.max.idle.ms", "int", 600_000, "Idle time after which a connection is closed.", -1),
        ("max.connections", "int", 10_000, "Maximum number of connections; more are refused. (Kafka's default is no limit, and above a limit connections wait.)", 1),
        ("max.connections.per.ip", "int", INT32_MAX, "Maximum number of connections from one address; more are refused.", 0),
        ("max.connections.per.ip.overrides", "str", "", "Limits for single addresses: 10.0.0.1:50,[::1]:200. (Kafka also accepts host names.)"),
        ("queued.max.request.bytes", "int", 268_435_456, "Maximum bytes of the incomplete or waiting requests of all connections. Above it, the slowest connections are closed. (Kafka's default is -1, no limit; above a limit Kafka stops reading.)", -1),
        ("oncelog.takeover.accept", "list", [], "Losses to accept when a data directory of Apache Kafka is taken over: acls, broker-settings, formats, metadata, partitions, quotas, settings, strays, users. (Oncelog only.)"),
        ("oncelog.queued.max.response.bytes", "int", 268_435_456, "Maximum bytes of the responses of all connections that clients have not read. Near the limit, fetch responses shrink. Above it, the slowest connections are closed. -1: no limit. (Oncelog only.)", -1),
        ("oncelog.request.read.timeout.ms", "int", 60_000, "Maximum time from the first to the last byte of a request; -1: no limit. (Oncelog only.)", -1),
        ("oncelog.connection.max.pending.bytes", "int", 1_048_576, "Bytes of unread responses, or of requests that wait, at which the broker stops reading a connection. (Oncelog only.)", 1),
        ("oncelog.connection.max.pending.requests", "int", 1_000, "Maximum number of unanswered requests per connection; the next one waits. (Oncelog only.)", 1),
        ("fetch.max.bytes", "int", 57_671_680, "Maximum size of a fetch response.", 1_024),
        ("max.incremental.fetch.session.cache.slots", "int", 1_000, "Maximum number of fetch sessions (KIP-227).", 0),
        ("max.request.partition.size.limit", "int", 2_000, "Maximum number of partitions in a DescribeTopicPartitions response.", 1, INT32_MAX),
        ("message.max.bytes", "int", 1_048_588, "Default of max.message.bytes.", 0, INT32_MAX),
        ("compression.type", "str", "producer", "Default of the topic setting.", None, None, ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")),
        ("min.insync.replicas", "int", 1, "Default of the topic setting.", 1, INT32_MAX),
        ("log.segment.bytes", "int", 1_073_741_824, "Default of segment.bytes.", 14, INT32_MAX),
        ("log.roll.ms", "int", 604_800_000, "Default of segment.ms.", 1),
        ("log.index.interval.bytes", "int", 4_096, "Default of index.interval.bytes.", 0, INT32_MAX),
        ("log.index.size.max.bytes", "int", 10_485_760, "Default of segment.index.bytes.", 4, INT32_MAX),
        ("log.retention.ms", "int", 604_800_000, "Default of retention.ms.", -1),
        ("log.retention.bytes", "int", -1, "Default of retention.bytes."),
        ("log.retention.check.interval.ms", "int", 300_000, "Interval at which retention is applied.", 1),
        ("log.cleanup.policy", "list", ["delete"], "Default of cleanup.policy.", None, None, ("delete", "compact")),
        ("log.segment.delete.delay.ms", "int", 60_000, "Default of file.delete.delay.ms.", 0),
        ("log.message.timestamp.type", "str", "CreateTime", "Default of message.timestamp.type.", None, None, ("CreateTime", "LogAppendTime")),
        ("log.message.timestamp.before.max.ms", "int", INT64_MAX, "Default of message.timestamp.before.max.ms.", 0),
        ("log.message.timestamp.after.max.ms", "int", 3_600_000, "Default of message.timestamp.after.max.ms.", 0),
        ("log.flush.interval.messages", "int", INT64_MAX, "Default of flush.messages.", 1),
        ("log.flush.interval.ms", "int", INT64_MAX, "Default of flush.ms.", 0),
        ("log.flush.offset.checkpoint.interval.ms", "int", 60_000, "Interval at which recovery points and high watermarks are written to disk.", 1),
        ("producer.id.expiration.ms", "int", 86_400_000, "Time since its last append after which the state of an idle producer is removed.", 1),
        ("producer.id.expiration.check.interval.ms", "int", 600_000, "Interval at which expired producer state is removed.", 1),
        ("log.cleaner.enable", "bool", True, "Compact topics with cleanup.policy=compact."),
        ("log.cleaner.backoff.ms", "int", 15_000, "Interval at which partitions are checked for compaction.", 0),
        ("log.cleaner.min.cleanable.ratio", "float", 0.5, "Default of min.cleanable.dirty.ratio.", 0, 1),
        ("log.cleaner.min.compaction.lag.ms", "int", 0, "Default of min.compaction.lag.ms.", 0),
        ("log.cleaner.max.compaction.lag.ms", "int", INT64_MAX, "Default of max.compaction.lag.ms.", 1),
        ("log.cleaner.delete.retention.ms", "int", 86_400_000, "Default of delete.retention.ms.", 0),
        ("transaction.max.timeout.ms", "int", 900_000, "Maximum transaction.timeout.ms of a producer.", 1),
        ("transaction.state.log.num.partitions", "int", 50, "Number of partitions of __transaction_state; must never change.", 1),
        ("transaction.state.log.segment.bytes", "int", 104_857_600, "segment.bytes of __transaction_state.", 1),
        ("transaction.state.log.replication.factor", "int", 1, "Must be 1, because there is one node (Kafka's default is 3).", 1),
        ("transaction.state.log.min.isr", "int", 1, "Must be 1, because there is one node (Kafka's default is 2).", 1),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "int", 10_000, "Interval at which transactions past their timeout are aborted.", 1),
        ("transactional.id.expiration.ms", "int", 604_800_000, "Idle time after which a transactional id is removed.", 1),
        ("transaction.remove.expired.transaction.cleanup.interval.ms", "int", 3_600_000, "Interval at which expired transactional ids are removed.", 1),
        ("transaction.partition.verification.enable", "bool", True, "Store a transactional batch only if the coordinator has its partition in the transaction (KIP-890)."),
        ("oncelog.transaction.version", "int", 2, "Level of the feature transaction.version. 0 and 1: classic. 2: each transaction raises the epoch (KIP-890). (Oncelog only; Kafka sets it with kafka-features.)", 0, 2),
        ("oncelog.fence.transactions", "bool", False, "At startup, fence all transactional producers and abort open transactions. Use it for the first start on a restored backup. (Oncelog only.)"),
        ("offsets.topic.num.partitions", "int", 50, "Number of partitions of __consumer_offsets; must never change.", 1),
        ("offsets.topic.segment.bytes", "int", 104_857_600, "segment.bytes of __consumer_offsets.", 1),
        ("offsets.topic.replication.factor", "int", 1, "Must be 1, because there is one node (Kafka's default is 3).", 1),
        ("offsets.retention.minutes", "int", 10_080, "Time after which the offsets of an empty group expire.", 1),
        ("offsets.retention.check.interval.ms", "int", 600_000, "Interval at which expired offsets are removed.", 1),
        ("offset.metadata.max.bytes", "int", 4_096, "Maximum size of the metadata of a committed offset.", 0),
        ("group.min.session.timeout.ms", "int", 6_000, "Minimum session.timeout.ms of a member.", 0),
        ("group.max.session.timeout.ms", "int", 1_800_000, "Maximum session.timeout.ms of a member.", 1),
        ("group.max.size", "int", INT32_MAX, "Maximum number of members of a group.", 1),
        ("group.initial.rebalance.delay.ms", "int", 0, "Time that an empty group waits for more members before its first rebalance (Kafka's default is 3000).", 0),
        ("group.coordinator.rebalance.protocols", "list", ["classic", "consumer"], "Supported group protocols.", 1, None, ("classic", "consumer", "share", "streams")),
        ("group.consumer.session.timeout.ms", "int", 45_000, "Time without a heartbeat after which a member of the consumer protocol is removed.", 1),
        ("group.consumer.heartbeat.interval.ms", "int", 5_000, "Heartbeat interval of members of the consumer protocol.", 1),
        ("group.consumer.min.session.timeout.ms", "int", 45_000, "Minimum consumer.session.timeout.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.session.timeout.ms", "int", 60_000, "Maximum consumer.session.timeout.ms of a group.", 1, INT32_MAX),
        ("group.consumer.min.heartbeat.interval.ms", "int", 5_000, "Minimum consumer.heartbeat.interval.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.heartbeat.interval.ms", "int", 15_000, "Maximum consumer.heartbeat.interval.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.size", "int", INT32_MAX, "Maximum number of members of a group of the consumer protocol.", 1),
        ("group.consumer.assignors", "list", ["uniform", "range"], "Assignors of the consumer protocol, the default first: their names, or the names of Kafka's classes.", 1, None, tuple(ASSIGNOR_NAMES)),
        ("security.protocol", "str", "PLAINTEXT", "Security protocol of a listener without a name. (Oncelog only.)", None, None, PROTOCOLS),
        ("oncelog.insecure", "bool", False, "Allow listeners beyond loopback without authentication, or with unencrypted passwords. (Oncelog only.)"),
        ("oncelog.metrics.names", "bool", False, "Export metrics by topic and partition. They reveal topic names. (Oncelog only.)"),
        ("oncelog.metrics.token", "password", None, "Token that readers of the metrics must send in the header Authorization: Bearer TOKEN. (Oncelog only.)"),
        ("ssl.client.auth", "str", "none", "Client certificates: none, requested or required.", None, None, ("none", "requested", "required")),
        ("ssl.principal.mapping.rules", "str", "DEFAULT", "Rules that turn a certificate's name into a principal: DEFAULT, RULE:pattern/replacement/[LU]."),
        ("sasl.enabled.mechanisms", "list", ["SCRAM-SHA-256", "SCRAM-SHA-512"], "Offered SASL mechanisms (Kafka's default is GSSAPI). PLAIN checks the password against the SCRAM credentials."),
        ("sasl.server.max.receive.size", "int", 524_288, "Maximum size of a request before authentication.", 1),
        ("connections.max.reauth.ms", "int", 0, "Time after which a SASL client must authenticate again or is disconnected; 0: never.", 0),
        ("connection.failed.authentication.delay.ms", "int", 100, "Delay of the response to a failed authentication.", 0),
        ("sasl.oauthbearer.jwks.endpoint.url", "str", None, "file:///PATH of the keys (JWKS) that verify tokens. The file is read again when it changes."),
        ("sasl.oauthbearer.expected.audience", "list", None, "Accepted audiences of a token (claim aud)."),
        ("sasl.oauthbearer.expected.issuer", "str", None, "Required issuer of a token (claim iss)."),
        ("sasl.oauthbearer.sub.claim.name", "str", "sub", "Claim of a token that contains the principal's name."),
        ("sasl.oauthbearer.clock.skew.seconds", "int", 30, "Tolerated difference between clocks.", 0),
        ("authorizer.class.name", "str", "", "Kafka's name of its authorizer, which enforces ACLs. Empty: everything is allowed.", None, None, ("", AUTHORIZER)),
        ("super.users", "str", "", "Principals without restrictions: User:a;User:b."),
        ("quota.window.num", "int", 11, "Number of samples of a client quota. This number times quota.window.size.seconds is the largest burst, in seconds of the client's rate.", 1),
        ("quota.window.size.seconds", "int", 1, "Duration of one quota sample in seconds.", 1),
        ("allow.everyone.if.no.acl.found", "bool", False, "Allow everybody to use a resource without any ACL."),
    ) + _TLS,
    scoped=("ssl.", "sasl.enabled.mechanisms", "connections.max.reauth.ms"),
)

PIPELINE = SettingsTable(
    "pipeline",
    _rows(
        ("restart.backoff.ms", "int", 1_000, "First pause before a failed query is restarted. It doubles with each failure; half of it is random.", 0),
        ("restart.backoff.max.ms", "int", 60_000, "Longest pause before a failed query is restarted.", 0),
        ("restart.max.failures", "int", 10, "Number of failures within restart.window.ms after which the query is not restarted; 1: never restart.", 1),
        ("restart.window.ms", "int", 600_000, "Time during which a failure counts.", 1),
    ),
)

_REGISTRY_TLS = tuple(replace(row, key=f"schema.registry.{row.key}") for row in _TLS) + _rows(
    ("schema.registry.ssl.endpoint.identification.algorithm", "str", "https", "https: the registry's certificate must match its host name. none: no check.", None, None, ("https", "none", "")),
)

SCHEMA_REGISTRY = SettingsTable(
    "schema registry",
    _rows(
        ("schema.registry.url", "list", None, "URLs of the schema registry: http(s)://HOST:PORT/PATH. If one does not answer, the next one is asked."),
        ("basic.auth.credentials.source", "str", None, "Source of user name and password: URL (USER:PASSWORD@ in schema.registry.url) or USER_INFO (basic.auth.user.info). Unset: the one that is set. (Java's default is URL.)", None, None, ("URL", "USER_INFO")),
        ("basic.auth.user.info", "password", None, "USER:PASSWORD for basic authentication."),
        ("bearer.auth.credentials.source", "str", None, "Source of the bearer token. Unset: bearer.auth.token, if present.", None, None, ("STATIC_TOKEN",)),
        ("bearer.auth.token", "password", None, "Token for bearer authentication."),
        ("bearer.auth.logical.cluster", "str", None, "The registry's logical cluster, sent as target-sr-cluster."),
        ("bearer.auth.identity.pool.id", "str", None, "The identity pool, sent as Confluent-Identity-Pool-Id."),
        ("auto.register.schemas", "bool", True, "Register a serializer's schema under its subject. If false, the subject must already have the schema."),
        ("normalize.schemas", "bool", False, "Let the registry normalize a schema before it registers it or looks it up."),
        ("use.latest.version", "bool", False, "Serialize with the latest schema of the subject. Needs auto.register.schemas=false."),
        ("use.schema.id", "int", None, "Serialize with the schema of this id. Needs auto.register.schemas=false. (Java's default is -1.)", 0, INT32_MAX),
        ("subject.name.strategy", "str", "TopicNameStrategy", "Subject of a schema: TopicNameStrategy (TOPIC-key or TOPIC-value), RecordNameStrategy (RECORD) or TopicRecordNameStrategy (TOPIC-RECORD). Java's class names are accepted too."),
        ("json.fail.invalid.schema", "bool", True, "Check JSON values against their JSON Schema. (Java's default is false.)"),
        ("max.retries", "int", 3, "Maximum number of retries. Each retry asks every URL once.", 0),
        ("retries.wait.ms", "int", 1_000, "First pause before a retry. It doubles up to retries.max.wait.ms.", 0),
        ("retries.max.wait.ms", "int", 20_000, "Longest pause before a retry.", 0),
        ("http.connect.timeout.ms", "int", 5_000, "Maximum time to connect to the registry. (Java's default is 60000.)", 1),
        ("http.read.timeout.ms", "int", 10_000, "Maximum time without a byte of a response. (Java's default is 60000.)", 1),
        ("request.timeout.ms", "int", 30_000, "Maximum time of a look-up or registration with all its retries. (Java has none.)", 1),
        ("cache.capacity", "int", 1_000, "Maximum number of schemas in each cache.", 10),
        ("oncelog.max.response.bytes", "int", 10_000_000, "Maximum size of a registry's response in bytes. (Oncelog only.)", 1),
    ) + _REGISTRY_TLS,
)

TABLES = (PRODUCER, CONSUMER, ADMIN, BROKER, TOPIC, GROUP, PIPELINE, SCHEMA_REGISTRY)
# fmt: on
