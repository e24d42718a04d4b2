"""Checks of the arguments of public calls, before anything is sent.

A str is a collection of characters. If `delete_topics("x1")` only iterated over its argument, it would delete
the topics `x` and `1`. A TopicPartition is a tuple and has the same problem. Therefore a call that takes
several items also takes a single item, and raises MisuseError for anything else.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from oncelog.errors import MisuseError
from oncelog.types import OffsetAndMetadata, TopicPartition

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
_MAX_STRING_BYTES = 32_767
"""Maximum size of a string in a request, in bytes of UTF-8."""


def items_of(value: Iterable[T] | T, kind: type[T], what: str) -> list[T]:
    """Return `value`, one item or a collection, as a list. Raises MisuseError if an item is not a `kind`.

    `what` names the expected items in the error text.
    """
    if isinstance(value, kind):
        return [value]
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Iterable):
        raise MisuseError(f"expected {what}, one or a collection; got {value!r}")
    items = list(value)
    for item in items:
        if not isinstance(item, kind):
            raise MisuseError(f"expected {what}, one or a collection; got the item {item!r}")
    return items


def names_of(value: Iterable[str] | str, what: str = "topic names (str)") -> list[str]:
    """Return one name or a collection of names as a list. Raises MisuseError if an item is not a str."""
    return items_of(value, str, what)


def topic_of(value: str) -> str:
    """Return a topic name unchanged. Raises MisuseError if the name is not a str."""
    if not isinstance(value, str):
        raise MisuseError(f"topic name {value!r} must be a str")
    return value


def partitions_of(value: Iterable[TopicPartition] | TopicPartition) -> list[TopicPartition]:
    """Return one partition or a collection of partitions as a list.

    Raises MisuseError for an item that is not a valid TopicPartition.
    """
    partitions = items_of(value, TopicPartition, "TopicPartition(topic, partition)")
    for tp in partitions:
        _check_partition(tp)
    return partitions


def mapping_of(value: Mapping[T, Any], kind: type[T], what: str) -> dict[T, Any]:
    """Return a copy of a mapping. `what` names the expected keys in the error text.

    Raises MisuseError for another type, a key that is not a `kind`, and an invalid partition.
    """
    if not isinstance(value, Mapping):
        raise MisuseError(f"expected a mapping from {what}; got {value!r}")
    for key in value:
        if not isinstance(key, kind):
            raise MisuseError(f"expected a mapping from {what}; got the key {key!r}")
        if isinstance(key, TopicPartition):
            _check_partition(key)
    return dict(value)


def by_partition(value: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
    """Return a copy of a mapping that has partitions as keys. Raises MisuseError if a key is not a valid
    TopicPartition.
    """
    return mapping_of(value, TopicPartition, "TopicPartition(topic, partition)")


def offsets_of(
    value: Mapping[TopicPartition, OffsetAndMetadata | int],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return offsets to commit, with plain numbers converted to OffsetAndMetadata.

    Raises MisuseError for an invalid partition, offset, leader epoch or metadata.
    """
    return {tp: _offset(tp, offset) for tp, offset in by_partition(value).items()}


def headers_of(
    value: Iterable[tuple[str, bytes | None]] | Mapping[str, bytes | None],
) -> tuple[tuple[str, bytes | None], ...]:
    """Return headers as pairs of name and value, from pairs or a mapping.

    Raises MisuseError for other types, and for a name that cannot be written as UTF-8.
    """
    if isinstance(value, Mapping):
        value = value.items()
    elif isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise MisuseError(f"headers must be pairs of str and bytes, or a mapping; got {value!r}")
    return tuple(_header(pair) for pair in value)


def _header(pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise MisuseError(f"a header must be a pair of str and bytes or None, not {pair!r}")
    name, value = pair
    if not isinstance(name, str) or not (value is None or isinstance(value, (bytes, bytearray, memoryview))):
        raise MisuseError(f"a header must be a pair of str and bytes or None, not {(name, value)!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise MisuseError(f"the header name {name!r} cannot be written as UTF-8") from None
    return name, None if value is None else bytes(value)


def _check_partition(tp: TopicPartition) -> None:
    if not isinstance(tp.topic, str) or not hasattr(tp.partition, "__index__"):
        raise MisuseError(f"expected TopicPartition(topic: str, partition: int), not {tp!r}")
    if not 0 <= operator.index(tp.partition) <= _INT32_MAX:
        raise MisuseError(f"{tp!r}: partitions are numbered from 0 to {_INT32_MAX}")


def _offset(tp: TopicPartition, value: OffsetAndMetadata | int) -> OffsetAndMetadata:
    if not isinstance(value, OffsetAndMetadata):
        return OffsetAndMetadata(offset_of(tp, value))
    if value.leader_epoch is not None:
        _checked_int(value.leader_epoch, _INT32_MAX, f"the leader epoch of {tp}")
    _check_metadata(tp, value.metadata)
    return value._replace(offset=offset_of(tp, value.offset))


def offset_of(tp: TopicPartition, value: Any) -> int:
    """Return an offset as an int.

    Raises MisuseError unless `value` is an integer from 0 to 2^63 - 1. A bool is not accepted.
    """
    return _checked_int(value, _INT64_MAX, f"the offset of {tp}")


def _checked_int(value: Any, max_value: int, what: str) -> int:
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise MisuseError(f"{what} must be an int, not {value!r}")
    number = operator.index(value)
    if not 0 <= number <= max_value:
        raise MisuseError(f"{what} must lie between 0 and {max_value}; got {number}")
    return number


def _check_metadata(tp: TopicPartition, value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise MisuseError(f"the metadata of {tp} must be a str, not {value!r}")
    try:
        size_bytes = len((value or "").encode())
    except UnicodeEncodeError:
        raise MisuseError(f"the metadata of {tp} cannot be written as UTF-8") from None
    if size_bytes > _MAX_STRING_BYTES:
        raise MisuseError(f"the metadata of {tp} has {size_bytes} bytes, the limit is {_MAX_STRING_BYTES}")


def with_renamed_keyword(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts the old name of a parameter with a DeprecationWarning, and passes on
    the new name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if old in kwargs:
                text = f"{function.__qualname__}: the parameter {old} is deprecated; use {new}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
