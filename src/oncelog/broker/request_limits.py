"""The maximum size of a request: bytes of its frame, and elements of its arrays, by API.

An array element of one byte, such as an empty group id, needs up to 1,500 bytes of memory for objects, work
and its part of the response. So the number of elements bounds the memory and the time of a request, and the
number of bytes does not. The decoder counts elements before it allocates them (`oncelog.wire.compiler`). If a
request is above its maximum, the connection is closed and the reason is logged.

The maxima are above what real clients send: the partitions and topics that one client can use, or 20,000
names of groups, resources or transactional ids. They were measured with the requests of
tests/broker/test_broker_worst_requests.py. docs/security.md states the cost of a request at its maximum.
"""

from __future__ import annotations

from oncelog.errors import PeerError

MAX_PARTITIONS = 100_000
"""Maximum elements of a request that lists partitions (`_OF_PARTITIONS`). It is the highest maximum, because
the result for a partition is small.
"""
MAX_TOPICS = 50_000
MAX_NAMES = 20_000
"""Maximum elements of a request that is neither in `_OF_PARTITIONS` nor in `_OF_TOPICS`."""
MAX_BYTES = 16 << 20
"""Maximum bytes of a request, except for the requests in `_WITH_DATA`.

Without this limit, a request with 100,000 names of 32,767 bytes each would need 3 GB.
"""

_OF_PARTITIONS = (
    "Produce", "Fetch", "ListOffsets", "OffsetCommit", "OffsetFetch", "TxnOffsetCommit", "OffsetDelete",
    "OffsetForLeaderEpoch", "DeleteRecords", "DescribeProducers", "DescribeLogDirs", "ConsumerGroupHeartbeat",
)  # fmt: skip
_OF_TOPICS = ("Metadata", "AddPartitionsToTxn", "WriteTxnMarkers", "CreateTopics", "CreatePartitions")
_MAX_ELEMENTS = dict.fromkeys(_OF_PARTITIONS, MAX_PARTITIONS) | dict.fromkeys(_OF_TOPICS, MAX_TOPICS)
_WITH_DATA = frozenset({"Produce", "JoinGroup", "SyncGroup"})


def max_elements(api_name: str, size_bytes: int) -> int:
    """Return the maximum number of elements of a request. Raises PeerError if `size_bytes` is too large."""
    if size_bytes > MAX_BYTES and api_name not in _WITH_DATA:
        raise PeerError(
            f"{api_name} of {size_bytes} bytes: the limit is {MAX_BYTES}; use several smaller requests"
        )
    return _MAX_ELEMENTS.get(api_name, MAX_NAMES)
