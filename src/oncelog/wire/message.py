"""The base classes of messages: slots, keyword constructors, comparison by value, and codecs compiled on
first use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from oncelog.errors import MisuseError, PeerError, UnsupportedVersion
from oncelog.wire.compiler import (
    Decoder,
    Encoder,
    StepDecoder,
    StepEncoder,
    compile_decoder,
    compile_encoder,
    compile_step_decoder,
    compile_step_encoder,
)
from oncelog.wire.primitives import UNBOUNDED, Buffer
from oncelog.wire.schema import ApiTable, DataTable, Struct


class Api(NamedTuple):
    """One API of the protocol.

    The broker advertises the versions `min_version` to `max_version`. The codec can read and write
    `first_version` to `last_version`. The two ranges differ only for Produce: 0 is advertised because old
    versions of librdkafka require it, but the first supported version is 3.
    """

    key: int
    name: str
    min_version: int
    max_version: int
    first_version: int
    last_version: int
    flexible_from: int
    request: type[Message]
    response: type[Message]

    def is_flexible(self, version: int) -> bool:
        """Return True if this version has compact encodings, tag blocks and the newer headers."""
        return version >= self.flexible_from


class Part:
    """A struct inside a message, or a whole message.

    It is mutable, has one slot per field and a keyword constructor, and is compared by value.
    """

    __slots__ = ()
    _struct: ClassVar[Struct]
    _structs: ClassVar[dict[str, type[Any]]]
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, **values: Any) -> None:
        # The first call compiles an __init__ for the class. The compiled method replaces this one.
        cls = type(self)
        cls.__init__ = init = _compile_init(cls._struct)  # type: ignore[method-assign]
        init(self, **values)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in self._struct.fields)

    def __repr__(self) -> str:
        values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in self._struct.fields)
        return f"{type(self).__name__}({values})"


class Message(Part):
    """The body of a request or response."""

    __slots__ = ()
    api: ClassVar[Api]
    _bounds_strings: ClassVar[bool] = True
    _ignores_rest: ClassVar[bool] = False
    """True for requests: bytes after the body are ignored, as in Kafka. `decode` explains why."""
    _encoders: ClassVar[dict[int, Encoder]]
    _step_encoders: ClassVar[dict[int, StepEncoder]]
    _decoders: ClassVar[dict[int, Decoder]]
    _step_decoders: ClassVar[dict[int, StepDecoder]]

    def encode(self, version: int) -> bytes:
        """Return the encoded body.

        Fields that do not exist at this version are omitted. Raises MisuseError for a value that does not fit
        its field, and UnsupportedVersion for an unsupported version.
        """
        parts: list[bytes] = []
        self.encode_into(version, parts.append)
        return b"".join(parts)

    def encode_into(self, version: int, append: Callable[[Any], None]) -> None:
        """Pass the parts of the encoded body to `append`. Records are passed without a copy."""
        encoder = self._encoders.get(version) or _encoder(type(self), version)
        try:
            encoder(self, append)
        except _WRONG_VALUES as error:
            raise self._not_written(version, error) from error

    def encode_in_steps(self, version: int, append: Callable[[Any], None]) -> Iterator[None]:
        """Do the work of `encode_into`. Yield after each element of an array, except for arrays of numbers.

        An array may be any iterable with a length, so its elements can be made while they are encoded.
        """
        encoder = self._step_encoders.get(version) or _step_encoder(type(self), version)
        try:
            yield from encoder(self, append)
        except _WRONG_VALUES as error:
            raise self._not_written(version, error) from error

    @classmethod
    def _not_written(cls, version: int, error: Exception) -> MisuseError:
        return MisuseError(f"{cls.__name__} cannot be written at version {version}: {error}")

    @classmethod
    def decode(
        cls,
        version: int,
        buffer: Buffer,
        position: int = 0,
        end: int | None = None,
        *,
        max_elements: int = UNBOUNDED,
    ) -> Self:
        """Return the message in buffer[position:end]. Its `records` are views of the buffer.

        Bytes after a request's body are ignored, as in Apache Kafka's broker: librdkafka sends up to three of
        them (in Metadata and AlterUserScramCredentials). Bytes after a response or a stored value are an
        error, because they mean that the version is wrong.

        Raises PeerError if the bytes are not a message of this version. Raises TooManyElements, which is a
        PeerError, if arrays and tag blocks together have more than `max_elements` elements. Elements beyond
        this limit are not allocated.
        """
        decoder = cls._decoders.get(version) or _decoder(cls, version)
        view = memoryview(buffer)
        if end is not None:
            view = view[:end]
        end = len(view)
        try:
            message, stop = decoder(view, position, end, max_elements)
        except _WRONG_BYTES as error:
            raise cls._not_read(version, end, error) from error
        cls._check_end(version, stop, end)
        return message  # type: ignore[no-any-return]

    @classmethod
    def decode_in_steps(
        cls, version: int, view: memoryview, position: int, *, max_elements: int = UNBOUNDED
    ) -> Generator[None, None, Self]:
        """Do the work of `decode`. Yield after each tagged field, and after each element of an array, except
        for arrays of numbers.
        """
        decoder = cls._step_decoders.get(version) or _step_decoder(cls, version)
        end = len(view)
        try:
            message, stop = yield from decoder(view, position, end, max_elements)
        except _WRONG_BYTES as error:
            raise cls._not_read(version, end, error) from error
        cls._check_end(version, stop, end)
        return message  # type: ignore[no-any-return]

    @classmethod
    def _not_read(cls, version: int, end: int, error: Exception) -> PeerError:
        if isinstance(error, UnicodeDecodeError):
            return cls._malformed(version, f"contains text that is not UTF-8: {error}")
        return cls._malformed(version, f"is truncated after {end} bytes: {error}")

    @classmethod
    def _check_end(cls, version: int, stop: int, end: int) -> None:
        if stop != end and not cls._ignores_rest:
            raise cls._malformed(version, f"has {end - stop} bytes after its end")

    @classmethod
    def _malformed(cls, version: int, what: str) -> PeerError:
        return PeerError(f"{cls.__name__} version {version} {what}")


class EncodedResponse(Message):
    """The body of a response that is already encoded, in the version of its request.

    Its class for an API defines `api`. `parts`: the parts of the body.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = parts

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._parts))

    def encode_into(self, version: int, append: Callable[[Any], None]) -> None:
        for part in self._parts:
            append(part)


class Data(Message):
    """The key or value of a stored record. Its bytes begin with a 16-bit version."""

    __slots__ = ()
    # Do not limit the length of strings: long strings that an earlier release stored must stay readable.
    _bounds_strings = False

    def to_bytes(self, version: int) -> bytes:
        """Return version and body. Raises the exceptions of `encode`."""
        return version.to_bytes(2, "big", signed=True) + self.encode(version)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the key or value in `data`.

        Raises PeerError if it is malformed or has an unknown version.
        """
        return cls.decode(version_of(data), data, 2)


def version_of(data: bytes) -> int:
    """Return the 16-bit version at the start of a key or value. Raises PeerError if `data` is too short."""
    if len(data) < 2:
        raise PeerError(f"{len(data)} bytes are too short for a version")
    return int.from_bytes(data[:2], "big", signed=True)


def _check_version(api: Api, version: int, error: type[UnsupportedVersion | PeerError]) -> None:
    if not api.first_version <= version <= api.last_version:
        raise error(
            f"{api.name} version {version} is not supported; use {api.first_version}-{api.last_version}"
        )


_WRONG_VALUES = (struct.error, TypeError, AttributeError, UnicodeEncodeError)
"""The errors that an encoder raises for a value that does not fit its field."""

_WRONG_BYTES = (struct.error, IndexError, UnicodeDecodeError)
"""The errors that a decoder raises for bytes that end too early or are not text."""


def _step_encoder(cls: type[Message], version: int) -> StepEncoder:
    _check_version(cls.api, version, UnsupportedVersion)
    encoder = compile_step_encoder(cls._struct, version, cls.api.is_flexible(version))
    cls._step_encoders[version] = encoder
    return encoder


def _encoder(cls: type[Message], version: int) -> Encoder:
    _check_version(cls.api, version, UnsupportedVersion)
    encoder, _ = compile_encoder(cls._struct, version, cls.api.is_flexible(version))
    cls._encoders[version] = encoder
    return encoder


def _decoder(cls: type[Message], version: int) -> Decoder:
    _check_version(cls.api, version, PeerError)
    decoder, _ = compile_decoder(
        cls._struct, cls, version, cls.api.is_flexible(version), bounds_strings=cls._bounds_strings
    )
    cls._decoders[version] = decoder
    return decoder


def _step_decoder(cls: type[Message], version: int) -> StepDecoder:
    _check_version(cls.api, version, PeerError)
    decoder = compile_step_decoder(
        cls._struct, cls, version, cls.api.is_flexible(version), bounds_strings=cls._bounds_strings
    )
    cls._step_decoders[version] = decoder
    return decoder


def _compile_init(struct_: Struct) -> Callable[..., None]:
    fields = struct_.fields
    arguments = ", ".join(f"{f.name}={'E' if f.starts_as_list else repr(f.default)}" for f in fields)
    lines = [f"def __init__(self{', *, ' if fields else ''}{arguments}):"]
    for f in fields:
        lines.append(
            f"    self.{f.name} = {f'[] if {f.name} is E else ' if f.starts_as_list else ''}{f.name}"
        )
    namespace: dict[str, Any] = {"E": ()}
    exec("\n".join([*lines, "    pass"]), namespace)
    init: Callable[..., None] = namespace["__init__"]
    return init


def _make_part(struct_: Struct, base: type[Part], module: str, owner: str) -> type[Any]:
    inner = {
        f.struct.name: _make_part(f.struct, Part, module, struct_.name)
        for f in struct_.fields
        if f.struct is not None
    }
    names = tuple(field.name for field in struct_.fields)
    body = {"__slots__": names, "__module__": module, "_struct": struct_, "_structs": inner}
    body["__qualname__"] = f"{owner}.{struct_.name}" if owner else struct_.name
    return type(struct_.name, (base,), body)


def make_api(table: ApiTable, module: str) -> Api:
    """Create the classes of an API from its table.

    The classes of the structs inside a message, at any depth, are attributes of the message's class.
    """
    request = _make_part(table.request, Message, module, "")
    response = _make_part(table.response, Message, module, "")
    api = Api(
        table.key, table.name, table.offer_first, table.offer_last, table.first, table.last,
        table.flexible_from, request, response,
    )  # fmt: skip
    for message in (request, response):
        message.api, message._encoders, message._decoders = api, {}, {}
        message._step_encoders, message._step_decoders = {}, {}
        _publish(message, message)
    request._ignores_rest = True
    return api


def make_data(table: DataTable, module: str) -> type[Data]:
    """Create the class of a stored key or value from its table."""
    data: type[Data] = _make_part(table.struct, Data, module, "")
    versions = (table.first, table.last)
    data.api = Api(-1, table.name, *versions, *versions, table.flexible_from, data, data)
    data._encoders, data._decoders = {}, {}
    data._step_encoders, data._step_decoders = {}, {}
    _publish(data, data)
    return data


def _publish(message: type[Any], part: type[Any]) -> None:
    for name, inner in part._structs.items():
        inner.__qualname__ = f"{message.__name__}.{name}"
        setattr(message, name, inner)
        _publish(message, inner)
