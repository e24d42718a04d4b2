"""Which topic names are legal. Source: org.apache.kafka.common.internals.Topic."""

from __future__ import annotations

import re
from collections.abc import Iterable

from oncelog.errors import InvalidTopicException

MAX_LENGTH = 249
"""So that `<topic>-<partition>.<uuid>-delete` stays a legal file name."""

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def check_topic_name(name: str) -> None:
    """Raises InvalidTopicException with what is wrong with the name."""
    if not name:
        raise InvalidTopicException("a topic name may not be empty")
    if name in (".", ".."):
        raise InvalidTopicException("a topic may not be called '.' or '..'")
    if len(name) > MAX_LENGTH:
        raise InvalidTopicException(f"a topic name has at most {MAX_LENGTH} characters, this one {len(name)}")
    if not _LEGAL.fullmatch(name):
        raise InvalidTopicException(
            f"topic name {name!r}: only ASCII letters, digits, '.', '_' and '-' are allowed"
        )


def check_no_collision(name: str, existing: Iterable[str]) -> None:
    """'.' and '_' are one character in metric names: two topics may not differ in nothing else."""
    folded = name.replace(".", "_")
    for other in existing:
        if other != name and other.replace(".", "_") == folded:
            raise InvalidTopicException(f"topic {name!r} collides with the existing topic {other!r}")
