"""The limits of a request, by API: bytes of its frame, and elements of its arrays.

An element of one byte (an empty group id) becomes objects of up to 1,500 bytes: itself, its work, and its
part of the response. So the number of elements, not of bytes, bounds the memory and the time of a request.
The decoder counts elements before it allocates them (`oncelog.wire.compiler`). A request above its limit
ends its connection, and the reason is logged.

The limits are above what real clients send: the partitions and topics that one client can use, or 20,000
names of groups, resources or transactional ids. They were measured with the requests of
tests/broker/test_broker_worst_requests.py. docs/security.md states the cost of a request at its limit.
"""

from __future__ import annotations

from oncelog.errors import PeerError

MAX_PARTITIONS = 100_000
"""Elements of a request that names partitions. Each has a small result of fixed size."""
MAX_TOPICS = 50_000
MAX_NAMES = 20_000
"""Elements of other requests."""
MAX_BYTES = 16 << 20
"""Bytes of a request without data. Names of 32,767 bytes each would otherwise make gigabytes of text."""

_OF_PARTITIONS = (
    "Produce", "Fetch", "ListOffsets", "OffsetCommit", "OffsetFetch", "TxnOffsetCommit", "OffsetDelete",
    "OffsetForLeaderEpoch", "DeleteRecords", "DescribeProducers", "DescribeLogDirs", "ConsumerGroupHeartbeat",
)  # fmt: skip
_OF_TOPICS = ("Metadata", "AddPartitionsToTxn", "WriteTxnMarkers", "CreateTopics", "CreatePartitions")
_MAX_ELEMENTS = dict.fromkeys(_OF_PARTITIONS, MAX_PARTITIONS) | dict.fromkeys(_OF_TOPICS, MAX_TOPICS)
_WITH_DATA = frozenset({"Produce", "JoinGroup", "SyncGroup"})


def max_elements(api_name: str, size_bytes: int) -> int:
    """Return the number of elements that a request may have. Raises PeerError if it is too long."""
    if size_bytes > MAX_BYTES and api_name not in _WITH_DATA:
        raise PeerError(f"{api_name} of {size_bytes} bytes; allowed are {MAX_BYTES}: ask for less at a time")
    return _MAX_ELEMENTS.get(api_name, MAX_NAMES)
