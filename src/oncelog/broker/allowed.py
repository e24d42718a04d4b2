"""What clients may do, as Metadata and DescribeCluster tell it: there are no users, so everything.

Source: Kafka's AclOperation codes and AclEntry.supportedOperations.
"""

from __future__ import annotations

_CREATE, _ALTER, _DESCRIBE, _CLUSTER_ACTION = 1 << 5, 1 << 7, 1 << 8, 1 << 9
_READ, _WRITE, _DELETE, _IDEMPOTENT_WRITE = 1 << 3, 1 << 4, 1 << 6, 1 << 12
_DESCRIBE_CONFIGS, _ALTER_CONFIGS = 1 << 10, 1 << 11

_BOTH = _CREATE | _ALTER | _DESCRIBE | _DESCRIBE_CONFIGS | _ALTER_CONFIGS
TOPIC_OPERATIONS = _BOTH | _READ | _WRITE | _DELETE
CLUSTER_OPERATIONS = _BOTH | _CLUSTER_ACTION | _IDEMPOTENT_WRITE
GROUP_OPERATIONS = _READ | _DESCRIBE | _DELETE | _DESCRIBE_CONFIGS | _ALTER_CONFIGS
