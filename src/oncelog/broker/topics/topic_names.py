"""Validation of topic names. Source: kafka org.apache.kafka.common.internals.Topic."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oncelog.errors import InvalidTopicException

MAX_LENGTH = 249
"""Longest topic name.

A directory name has at most 255 characters. `<topic>-<partition>` then leaves five for the partition index.
"""

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def check_topic_name(name: str) -> None:
    """Raise InvalidTopicException if the name is not legal in Kafka."""
    if not name:
        raise InvalidTopicException("a topic name may not be empty")
    if name in (".", ".."):
        raise InvalidTopicException("a topic name may not be '.' or '..'")
    if len(name) > MAX_LENGTH:
        raise InvalidTopicException(f"the topic name has {len(name)} characters; the limit is {MAX_LENGTH}")
    if not _LEGAL.fullmatch(name):
        raise InvalidTopicException(
            f"topic name {name!r}: only ASCII letters, digits, '.', '_' and '-' are allowed"
        )


class TopicNames:
    """The existing topic names, indexed so that thousands of new names can be checked quickly."""

    def __init__(self, existing: Iterable[str]) -> None:
        self._by_folded = {_folded(name): name for name in existing}

    def check(self, name: str) -> None:
        """Raise InvalidTopicException if the name differs from an existing one only in '.' and '_'.

        Kafka's metric names do not distinguish these two characters.
        """
        other = self._by_folded.get(_folded(name), name)
        if other != name:
            raise InvalidTopicException(f"topic {name!r} collides with the existing topic {other!r}")

    def add(self, name: str) -> None:
        self._by_folded[_folded(name)] = name


def _folded(name: str) -> str:
    return name.replace(".", "_")
