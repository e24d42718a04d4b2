"""Every setting, once: key, type, default, range, meaning. Docs, --help and checks come from here.

Keys, defaults and meanings are Kafka's (ProducerConfig, ConsumerConfig, AdminClientConfig,
KafkaConfig, TopicConfig); a default that differs says so in its text.
"""

from __future__ import annotations

from typing import Any

from oncelog.settings import Setting, SettingsTable

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
"""Kafka's name for the authorizer that keeps ACLs in the cluster itself, as ours does."""

_ASSIGNORS = "org.apache.kafka.coordinator.group.assignor."
ASSIGNOR_NAMES = {
    "uniform": "uniform",
    "range": "range",
    f"{_ASSIGNORS}UniformAssignor": "uniform",
    f"{_ASSIGNORS}RangeAssignor": "range",
}
"""What group.consumer.assignors may name -> the assignor's name in the protocol."""


def _rows(*rows: tuple[Any, ...]) -> tuple[Setting, ...]:
    return tuple(Setting(*row) for row in rows)


# fmt: off
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_TLS = _rows(
    ("ssl.keystore.location", "str", None, "PEM file: certificate chain and private key of this side."),
    ("ssl.keystore.type", "str", "PEM", "Only PEM (Kafka's default is JKS).", None, None, ("PEM",)),
    ("ssl.keystore.certificate.chain", "password", None, "The chain itself, as PEM text."),
    ("ssl.keystore.key", "password", None, "The private key itself, as PEM text."),
    ("ssl.key.password", "password", None, "Of an encrypted private key."),
    ("ssl.truststore.location", "str", None, "PEM file: certificates of the authorities that the other side's must come from."),
    ("ssl.truststore.type", "str", "PEM", "Only PEM (Kafka's default is JKS).", None, None, ("PEM",)),
    ("ssl.truststore.certificates", "password", None, "These certificates themselves, as PEM text."),
    ("ssl.enabled.protocols", "list", ["TLSv1.2", "TLSv1.3"], "TLS versions that may be used."),
)

_CLIENT = _rows(
    ("bootstrap.servers", "list", None, "HOST:PORT of one or more brokers to start from."),
    ("client.id", "str", "oncelog", "Name of this client in the broker's logs."),
    ("request.timeout.ms", "int", 30_000, "How long one request may go unanswered.", 1),
    ("retry.backoff.ms", "int", 100, "First pause before a retry; doubles up to the maximum.", 0),
    ("retry.backoff.max.ms", "int", 1_000, "Longest pause between retries.", 0),
    ("metadata.max.age.ms", "int", 300_000, "Metadata older than this is fetched again.", 1),
    ("reconnect.backoff.ms", "int", 50, "First pause before connecting again.", 0),
    ("reconnect.backoff.max.ms", "int", 1_000, "Longest pause before connecting again.", 0),
    ("socket.connection.setup.timeout.ms", "int", 10_000, "How long connecting may take.", 1),
    ("connections.max.idle.ms", "int", 540_000, "Idle connections are closed after this.", -1),
    ("oncelog.bootstrap.timeout.ms", "int", 5_000, "How long a new client keeps trying when no bootstrap server can be reached. (Ours.)", 0),
    ("security.protocol", "str", "PLAINTEXT", "SSL is TLS; SASL says who one is.", None, None, PROTOCOLS),
    ("ssl.ca.location", "str", None, "librdkafka's name of ssl.truststore.location."),
    ("ssl.certificate.location", "str", None, "librdkafka's name of a PEM file with this side's certificate chain."),
    ("ssl.key.location", "str", None, "librdkafka's name of a PEM file with its private key."),
    ("ssl.endpoint.identification.algorithm", "str", "https", "https: the broker's certificate must name its host. none does not look.", None, None, ("https", "none", "")),
    ("sasl.mechanism", "str", None, "How to say who one is; needed with SASL_PLAINTEXT and SASL_SSL (Kafka's default is GSSAPI).", None, None, MECHANISMS),
    ("sasl.username", "str", None, "For PLAIN and SCRAM, as librdkafka."),
    ("sasl.password", "password", None, "For PLAIN and SCRAM, as librdkafka."),
    ("sasl.jaas.config", "password", None, 'Instead of these two, as Java: "...ScramLoginModule required username=... password=...;".'),
    ("sasl.oauthbearer.token.endpoint.url", "str", None, "For OAUTHBEARER: file:///PATH of a token, read anew each time one is needed."),
) + _TLS

PRODUCER = SettingsTable(
    "producer",
    _CLIENT + _rows(
        ("enable.idempotence", "bool", True, "Each record is stored once per session (row I2)."), ( "acks", "str", "all", "0, 1 or all (-1): how many replicas must have a batch before it is acknowledged.", None, None, ("0", "1", "all", "-1")),
        ("retries", "int", INT32_MAX, "How often a batch is sent again before its records fail.", 0, INT32_MAX),
        ("max.in.flight.requests.per.connection", "int", 5, "Unacknowledged requests per connection; at most 5 with idempotence.", 1),
        ("delivery.timeout.ms", "int", 120_000, "Upper bound from send() to success or failure; at least linger.ms + request.timeout.ms.", 0),
        ("linger.ms", "int", 5, "How long an unfilled batch waits for more records.", 0),
        ("batch.size", "int", 16_384, "Bytes (before compression) at which a batch is closed.", 0),
        ("buffer.memory", "int", 33_554_432, "Bytes of unacknowledged records held before send() blocks.", 1),
        ("max.block.ms", "int", 60_000, "How long send() may wait for metadata or buffer space.", 0),
        ("metadata.max.idle.ms", "int", 300_000, "A topic that nothing was sent to for this long is forgotten, and its metadata with it.", 5_000),
        ("max.request.size", "int", 1_048_576, "Largest request, and so largest record, in bytes.", 1),
        ("compression.type", "str", "none", "Codec of the batches.", None, None, _CODECS),
        ("compression.gzip.level", "int", -1, "gzip: -1 (the codec's default) or 1..9.", -1, 9),
        ("compression.lz4.level", "int", 9, "lz4: 1..17.", 1, 17),
        ("compression.zstd.level", "int", 3, "zstd: -131072..22.", -131_072, 22),
        ("partitioner", "str", "default", "default (murmur2 for keys, sticky for null keys), round_robin, or consistent_random (CRC-32, as librdkafka).", None, None, ("default", "round_robin", "consistent_random")),
        ("transactional.id", "str", None, "Name of the transactional producer; implies idempotence."),
        ("transaction.timeout.ms", "int", 60_000, "The coordinator aborts a transaction left open longer.", 1),
        ("oncelog.unsafe.max.in.flight", "int", None, "UNSAFE, for demonstrations: requests in flight with idempotence on, above 5; also sends a batch that may be stored under a new epoch. Records can be doubled. (Ours, not Kafka's.)", 1),
    ),
)

CONSUMER = SettingsTable(
    "consumer",
    _CLIENT + _rows(
        ("isolation.level", "str", "read_committed", "read_committed or read_uncommitted. Default differs from the Java client's read_uncommitted.", None, None, ("read_committed", "read_uncommitted")),
        ("auto.offset.reset", "str", "latest", "Where to start when there is no position: earliest, latest or none (an error).", None, None, ("earliest", "latest", "none")),
        ("fetch.min.bytes", "int", 1, "The broker waits until it has this much.", 0),
        ("fetch.max.wait.ms", "int", 500, "... or until this long has passed.", 0),
        ("fetch.max.bytes", "int", 52_428_800, "Largest fetch response (one batch may exceed it).", 0),
        ("max.partition.fetch.bytes", "int", 1_048_576, "Largest share of one partition in a response.", 0),
        ("max.poll.records", "int", 500, "Most records one poll() returns.", 1),
        ("check.crcs", "bool", True, "Verify CRC-32C of every batch read."),
        ("consumer.timeout.ms", "int", None, "Iterating a consumer ends after this long without a record; unset: never.", 0),
        ("group.id", "str", None, "Consumer group."),
        ("group.instance.id", "str", None, "Name of a static member, which keeps its partitions over a restart."),
        ("group.protocol", "str", "classic", "classic, or consumer: the coordinator shares out partitions (KIP-848, Kafka 4.0).", None, None, ("classic", "consumer")),
        ("group.remote.assignor", "str", None, "The coordinator's assignor with group.protocol=consumer; unset: its first."),
        ("partition.assignment.strategy", "list", ["range"], "Assignors in order of preference: range, roundrobin, sticky, cooperative-sticky (which gives back only what moves, if named alone)."),
        ("session.timeout.ms", "int", 45_000, "A member that is silent this long is removed.", 1),
        ("heartbeat.interval.ms", "int", 3_000, "Pause between heartbeats; at most a third of session.timeout.ms is sensible.", 1),
        ("max.poll.interval.ms", "int", 300_000, "A member that does not poll for this long leaves its group.", 1),
        ("enable.auto.commit", "bool", True, "Positions are committed by poll() and close(); must be false where transactions commit them."),
        ("auto.commit.interval.ms", "int", 5_000, "How often.", 0),
    ),
)

ADMIN = SettingsTable("admin", _CLIENT)

TOPIC = SettingsTable(
    "topic",
    _rows(
        ("cleanup.policy", "list", ["delete"], "delete, compact or both; empty: nothing is removed.", None, None, ("delete", "compact")),
        ("compression.gzip.level", "int", -1, "gzip, where the broker re-encodes: -1 (the codec's default) or 1..9.", -1, 9),
        ("compression.lz4.level", "int", 9, "lz4, where the broker re-encodes: 1..17.", 1, 17),
        ("compression.zstd.level", "int", 3, "zstd, where the broker re-encodes: -131072..22.", -131_072, 22),
        ("compression.type", "str", "producer", "producer keeps the producer's codec; otherwise the broker re-encodes.", None, None, ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")),
        ("delete.retention.ms", "int", 86_400_000, "How long tombstones of a compacted topic stay.", 0),
        ("file.delete.delay.ms", "int", 60_000, "Wait before a deleted file is removed.", 0),
        ("flush.messages", "int", INT64_MAX, "fdatasync after this many records; 1 = before every acknowledgement.", 1),
        ("flush.ms", "int", INT64_MAX, "fdatasync at least this often.", 0),
        ("index.interval.bytes", "int", 4_096, "Bytes between two index entries.", 0, INT32_MAX),
        ("max.message.bytes", "int", 1_048_588, "Largest batch the topic takes, compressed, with its header.", 0, INT32_MAX),
        ("message.timestamp.type", "str", "CreateTime", "CreateTime or LogAppendTime.", None, None, ("CreateTime", "LogAppendTime")),
        ("message.timestamp.before.max.ms", "int", INT64_MAX, "How far in the past a CreateTime may lie.", 0),
        ("message.timestamp.after.max.ms", "int", 3_600_000, "How far in the future a CreateTime may lie.", 0),
        ("min.cleanable.dirty.ratio", "float", 0.5, "Share of a log not compacted yet at which compaction begins.", 0, 1),
        ("min.compaction.lag.ms", "int", 0, "Records younger than this are not compacted.", 0),
        ("max.compaction.lag.ms", "int", INT64_MAX, "A record is compacted at the latest after this.", 1),
        ("min.insync.replicas", "int", 1, "acks=all is refused with fewer in-sync replicas than this.", 1, INT32_MAX),
        ("retention.bytes", "int", -1, "Largest size of a partition; negative is unlimited."),
        ("retention.ms", "int", 604_800_000, "How long a segment is kept; -1 is for ever.", -1),
        ("segment.bytes", "int", 1_073_741_824, "Size at which a segment is closed; clients may set 1048576 and more.", 14, INT32_MAX),
        ("internal.segment.bytes", "int", None, "For tests, as Kafka's: a smaller segment.bytes.", 14, INT32_MAX),
        ("segment.index.bytes", "int", 10_485_760, "Largest size of an index file.", 4, INT32_MAX),
        ("segment.ms", "int", 604_800_000, "Age at which a segment is closed.", 1),
        ("segment.jitter.ms", "int", 0, "Only 0: segments are closed at segment.ms exactly.", 0, 0),
        ("preallocate", "bool", False, "Only false: files grow as they are written.", None, None, ("false",)),
        ("unclean.leader.election.enable", "bool", False, "Without effect: one node holds no elections."),
        ("leader.replication.throttled.replicas", "list", [], "Without effect: one node does not replicate."),
        ("follower.replication.throttled.replicas", "list", [], "Without effect: one node does not replicate."),
        ("remote.storage.enable", "bool", False, "Only false: there is no tiered storage.", None, None, ("false",)),
        ("remote.log.copy.disable", "bool", False, "Without effect: there is no tiered storage."),
        ("remote.log.delete.on.disable", "bool", False, "Without effect: there is no tiered storage."),
        ("local.retention.ms", "int", -2, "Without effect: there is no tiered storage.", -2),
        ("local.retention.bytes", "int", -2, "Without effect: there is no tiered storage.", -2),
    ),
)

GROUP = SettingsTable(
    "group",
    _rows(
        ("consumer.session.timeout.ms", "int", 45_000, "A member of the consumer protocol that is silent this long is removed.", 1, INT32_MAX),
        ("consumer.heartbeat.interval.ms", "int", 5_000, "How often such a member is to send a heartbeat.", 1, INT32_MAX),
    ),
)

BROKER = SettingsTable(
    "broker",
    _rows(
        ("node.id", "int", 1, "Id of this broker.", 0),
        ("listeners", "list", ["127.0.0.1:9092"], "Where to listen: [NAME://]HOST:PORT,... (Kafka's default is every interface); port 0 takes a free one."),
        ("listener.security.protocol.map", "list", [], "What a listener speaks whose name is no security protocol: NAME:PROTOCOL,..."),
        ("advertised.listeners", "list", [], "What clients of a listener are told to connect to: [NAME://]HOST:PORT,...; default: the listener itself."),
        ("auto.create.topics.enable", "bool", True, "A client that asks for an unknown topic creates it."),
        ("num.partitions", "int", 1, "Partitions of a topic created without a number.", 1),
        ("default.replication.factor", "int", 1, "Only 1 can be given by one node.", 1),
        ("oncelog.accept.any.replication.factor", "bool", False, "Take topics asked for with a replication factor above 1 and give them 1. (Ours, not Kafka's.)"),
        ("delete.topic.enable", "bool", True, "Topics may be deleted."),
        ("socket.request.max.bytes", "int", 104_857_600, "Largest request; a larger one closes its connection.", 1),
        ("connections.max.idle.ms", "int", 600_000, "Idle connections are closed after this.", -1),
        ("max.connections", "int", 10_000, "More connections than this are refused. (Kafka's default is no limit, and above it the next one waits.)", 1),
        ("max.connections.per.ip", "int", INT32_MAX, "More connections than this from one address are refused.", 0),
        ("max.connections.per.ip.overrides", "str", "", "Other limits for some addresses: 10.0.0.1:50,[::1]:200. (Kafka takes names of hosts, too.)"),
        ("queued.max.request.bytes", "int", 268_435_456, "Bytes of requests that are not carried out yet (incomplete, or behind others), of all connections together; above it the slowest ones are closed. (Kafka's default is no limit, -1, and above it it reads no further.)", -1),
        ("oncelog.takeover.accept", "list", [], "What may be lost when a directory of Apache Kafka is taken over: acls, broker-settings, formats, metadata, partitions, quotas, settings, strays, users. (Ours.)"),
        ("oncelog.queued.max.response.bytes", "int", 268_435_456, "Bytes of answers that clients have not taken yet, of all connections together; the nearer it comes the smaller fetch responses are, above it the slowest connections are closed; -1: no limit. (Ours.)", -1),
        ("oncelog.request.read.timeout.ms", "int", 60_000, "How long after its first byte a request's last byte may come; -1: any time. (Ours.)", -1),
        ("oncelog.connection.max.pending.bytes", "int", 1_048_576, "Bytes, of answers not taken or of requests behind them, at which a connection is no longer read. (Ours.)", 1),
        ("oncelog.connection.max.pending.requests", "int", 1_000, "Unanswered requests at which a connection's next one is not begun. (Ours.)", 1),
        ("fetch.max.bytes", "int", 57_671_680, "Largest fetch response.", 1_024),
        ("max.incremental.fetch.session.cache.slots", "int", 1_000, "Fetch sessions remembered.", 0),
        ("max.request.partition.size.limit", "int", 2_000, "Most partitions that one DescribeTopicPartitions answers.", 1, INT32_MAX),
        ("message.max.bytes", "int", 1_048_588, "Default of max.message.bytes.", 0, INT32_MAX),
        ("compression.type", "str", "producer", "Default of the topic setting.", None, None, ("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")),
        ("min.insync.replicas", "int", 1, "Default of the topic setting.", 1, INT32_MAX),
        ("log.segment.bytes", "int", 1_073_741_824, "Default of segment.bytes.", 14, INT32_MAX),
        ("log.roll.ms", "int", 604_800_000, "Default of segment.ms.", 1),
        ("log.index.interval.bytes", "int", 4_096, "Default of index.interval.bytes.", 0, INT32_MAX),
        ("log.index.size.max.bytes", "int", 10_485_760, "Default of segment.index.bytes.", 4, INT32_MAX),
        ("log.retention.ms", "int", 604_800_000, "Default of retention.ms.", -1),
        ("log.retention.bytes", "int", -1, "Default of retention.bytes."),
        ("log.retention.check.interval.ms", "int", 300_000, "How often retention is applied.", 1),
        ("log.cleanup.policy", "list", ["delete"], "Default of cleanup.policy.", None, None, ("delete", "compact")),
        ("log.segment.delete.delay.ms", "int", 60_000, "Default of file.delete.delay.ms.", 0),
        ("log.message.timestamp.type", "str", "CreateTime", "Default of message.timestamp.type.", None, None, ("CreateTime", "LogAppendTime")),
        ("log.message.timestamp.before.max.ms", "int", INT64_MAX, "Default of message.timestamp.before.max.ms.", 0),
        ("log.message.timestamp.after.max.ms", "int", 3_600_000, "Default of message.timestamp.after.max.ms.", 0),
        ("log.flush.interval.messages", "int", INT64_MAX, "Default of flush.messages.", 1),
        ("log.flush.interval.ms", "int", INT64_MAX, "Default of flush.ms.", 0),
        ("log.flush.offset.checkpoint.interval.ms", "int", 60_000, "How often recovery points and high watermarks are written down.", 1),
        ("producer.id.expiration.ms", "int", 86_400_000, "Idle producer state is forgotten after this, counted from its last append.", 1),
        ("producer.id.expiration.check.interval.ms", "int", 600_000, "How often that is looked at.", 1),
        ("log.cleaner.enable", "bool", True, "Topics with cleanup.policy=compact are compacted."),
        ("log.cleaner.backoff.ms", "int", 15_000, "How often partitions are looked at for compaction.", 0),
        ("log.cleaner.min.cleanable.ratio", "float", 0.5, "Default of min.cleanable.dirty.ratio.", 0, 1),
        ("log.cleaner.min.compaction.lag.ms", "int", 0, "Default of min.compaction.lag.ms.", 0),
        ("log.cleaner.max.compaction.lag.ms", "int", INT64_MAX, "Default of max.compaction.lag.ms.", 1),
        ("log.cleaner.delete.retention.ms", "int", 86_400_000, "Default of delete.retention.ms.", 0),
        ("transaction.max.timeout.ms", "int", 900_000, "Largest transaction.timeout.ms a client may ask for.", 1),
        ("transaction.state.log.num.partitions", "int", 50, "Partitions of __transaction_state; must never change.", 1),
        ("transaction.state.log.segment.bytes", "int", 104_857_600, "segment.bytes of __transaction_state.", 1),
        ("transaction.state.log.replication.factor", "int", 1, "Only 1 can be given by one node (Kafka's default is 3).", 1),
        ("transaction.state.log.min.isr", "int", 1, "Only 1 can be given by one node (Kafka's default is 2).", 1),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", "int", 10_000, "How often transactions past their timeout are looked for and aborted.", 1),
        ("transactional.id.expiration.ms", "int", 604_800_000, "A transactional id without a change for this long is forgotten.", 1),
        ("transaction.remove.expired.transaction.cleanup.interval.ms", "int", 3_600_000, "How often that is looked at.", 1),
        ("transaction.partition.verification.enable", "bool", True, "A transactional batch is stored only if the coordinator knows its partition."),
        ("oncelog.transaction.version", "int", 2, "Level of the feature transaction.version: 0 and 1 classic, 2 KIP-890's epoch per transaction. (Ours; Kafka sets it with kafka-features.)", 0, 2),
        ("oncelog.fence.transactions", "bool", False, "Fence every transactional producer at the start, and abort what is open: for the first start on a restored backup. (Ours.)"),
        ("offsets.topic.num.partitions", "int", 50, "Partitions of __consumer_offsets; must never change.", 1),
        ("offsets.topic.segment.bytes", "int", 104_857_600, "segment.bytes of __consumer_offsets.", 1),
        ("offsets.topic.replication.factor", "int", 1, "Only 1 can be given by one node (Kafka's default is 3).", 1),
        ("offsets.retention.minutes", "int", 10_080, "Offsets of a group that is empty this long are forgotten.", 1),
        ("offsets.retention.check.interval.ms", "int", 600_000, "How often that is looked at.", 1),
        ("offset.metadata.max.bytes", "int", 4_096, "Largest metadata of a committed offset.", 0),
        ("group.min.session.timeout.ms", "int", 6_000, "Smallest session.timeout.ms a member may ask for.", 0),
        ("group.max.session.timeout.ms", "int", 1_800_000, "Largest session.timeout.ms a member may ask for.", 1),
        ("group.max.size", "int", INT32_MAX, "Most members of a group.", 1),
        ("group.initial.rebalance.delay.ms", "int", 0, "How long an empty group waits for more members (Kafka's default is 3000).", 0),
        ("group.coordinator.rebalance.protocols", "list", ["classic", "consumer"], "Group protocols served.", 1, None, ("classic", "consumer", "share", "streams")),
        ("group.consumer.session.timeout.ms", "int", 45_000, "A member of the consumer protocol that is silent this long is removed.", 1),
        ("group.consumer.heartbeat.interval.ms", "int", 5_000, "How often such a member is to send a heartbeat.", 1),
        ("group.consumer.min.session.timeout.ms", "int", 45_000, "Least consumer.session.timeout.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.session.timeout.ms", "int", 60_000, "Largest consumer.session.timeout.ms of a group.", 1, INT32_MAX),
        ("group.consumer.min.heartbeat.interval.ms", "int", 5_000, "Least consumer.heartbeat.interval.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.heartbeat.interval.ms", "int", 15_000, "Largest consumer.heartbeat.interval.ms of a group.", 1, INT32_MAX),
        ("group.consumer.max.size", "int", INT32_MAX, "Most members of such a group.", 1),
        ("group.consumer.assignors", "list", ["uniform", "range"], "Assignors of the consumer protocol, the default first; Kafka's classes of them may be named.", 1, None, tuple(ASSIGNOR_NAMES)),
        ("security.protocol", "str", "PLAINTEXT", "Name of a listener without one. (Ours.)", None, None, PROTOCOLS),
        ("oncelog.insecure", "bool", False, "Listen on more than loopback although anybody may connect, or read passwords on their way. (Ours.)"),
        ("oncelog.metrics.token", "password", None, "What a reader of the metrics must show, as Authorization: Bearer TOKEN. (Ours.)"),
        ("ssl.client.auth", "str", "none", "Whether clients must show a certificate.", None, None, ("none", "requested", "required")),
        ("ssl.principal.mapping.rules", "str", "DEFAULT", "How a certificate's name becomes a principal: DEFAULT, RULE:pattern/replacement/[LU]."),
        ("sasl.enabled.mechanisms", "list", ["SCRAM-SHA-256", "SCRAM-SHA-512"], "SASL mechanisms offered (Kafka's default is GSSAPI). PLAIN checks the password against the SCRAM credentials."),
        ("sasl.server.max.receive.size", "int", 524_288, "Largest request of a client that has not said who it is.", 1),
        ("connections.max.reauth.ms", "int", 0, "A SASL client must say again who it is after this long, or is cut off; 0: never.", 0),
        ("connection.failed.authentication.delay.ms", "int", 100, "How long the answer to a failed authentication is held back.", 0),
        ("sasl.oauthbearer.jwks.endpoint.url", "str", None, "file:///PATH of the key set (JWKS) that signs tokens; read again when it changes."),
        ("sasl.oauthbearer.expected.audience", "list", None, "A token must be for one of these."),
        ("sasl.oauthbearer.expected.issuer", "str", None, "A token must come from here."),
        ("sasl.oauthbearer.sub.claim.name", "str", "sub", "The claim that names the principal."),
        ("sasl.oauthbearer.clock.skew.seconds", "int", 30, "How far clocks may differ.", 0),
        ("authorizer.class.name", "str", "", "Kafka's name of its authorizer: ACLs hold. Empty: everybody may do everything.", None, None, ("", AUTHORIZER)),
        ("super.users", "str", "", "Principals that may do everything: User:a;User:b."),
        ("quota.window.num", "int", 11, "Samples of a client quota: together with quota.window.size.seconds what a client may use at once, in seconds of its rate.", 1),
        ("quota.window.size.seconds", "int", 1, "Seconds of one such sample.", 1),
        ("allow.everyone.if.no.acl.found", "bool", False, "What no ACL speaks of is open to everybody."),
    ) + _TLS,
    scoped=("ssl.", "sasl.enabled.mechanisms", "connections.max.reauth.ms"),
)

PIPELINE = SettingsTable(
    "pipeline",
    _rows(
        ("restart.backoff.ms", "int", 1_000, "First pause before a query that failed is started again; doubles with each failure, half of it is left to chance.", 0),
        ("restart.backoff.max.ms", "int", 60_000, "Longest such pause.", 0),
        ("restart.max.failures", "int", 10, "With this many failures within restart.window.ms the query is given up; 1: never started again.", 1),
        ("restart.window.ms", "int", 600_000, "How long a failure counts.", 1),
    ),
)

TABLES = (PRODUCER, CONSUMER, ADMIN, BROKER, TOPIC, GROUP, PIPELINE)
# fmt: on
