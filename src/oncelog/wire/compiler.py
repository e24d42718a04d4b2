"""Compiles the rows of the message tables to Python code: an encoder and a decoder per message and version.

The generated code reads a run of fixed-size fields, including the lengths of strings, with one `struct` call.
An encoder appends its parts to a list that is joined once.

A decoder checks every length. Strings and records must lie inside the message. An array must not have more
elements than the remaining bytes can contain. All arrays and tag blocks of a message share one element
budget, `left`. It limits the memory, because an element of one byte may become an object of a hundred bytes
or more.

Code is generated on first use. `compile_encoder` and `compile_decoder` also return its source text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

from oncelog.wire.primitives import (
    MAX_STRING_BYTES,
    UNBOUNDED,
    UVARINT,
    encode_uvarint,
    fail_array,
    fail_length,
    fail_string,
    read_uvarint_rest,
)
from oncelog.wire.schema import FIXED, Field, Struct

Encoder = Callable[[Any, Callable[[Any], None]], None]
"""(message, append): passes the parts of the encoded body to `append`."""
StepEncoder = Callable[[Any, Callable[[Any], None]], Iterator[None]]
"""An Encoder that is a generator and yields between its steps."""
Decoder = Callable[[memoryview, int, int, int], tuple[Any, int]]
"""(buffer, position, end, element budget) -> (message, position after the message)."""
StepDecoder = Callable[[memoryview, int, int, int], Generator[None, None, tuple[Any, int]]]
"""A Decoder that is a generator and yields between its steps."""


class _Source:
    """The text of a function that is being generated, with its indentation, names and constants."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.names = 0
        self.constants: dict[str, Any] = {
            "UV": UVARINT,
            "uv": encode_uvarint,
            "rest": read_uvarint_rest,
            "fail": fail_length,
            "fail_array": fail_array,
            "fail_string": fail_string,
            "new": object.__new__,
            "pack": struct.pack,
            "unpack_from": struct.unpack_from,
            "write_tags": write_tags,
            "bad_uuid": bad_uuid,
            "long_string": long_string,
        }

    def add(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    def constant(self, stem: str, value: Any) -> str:
        for known, old in self.constants.items():
            if known.startswith(stem) and old == value:
                return known
        name = self.name(stem)
        self.constants[name] = value
        return name


def bad_uuid(name: str, value: bytes) -> NoReturn:
    """Raise TypeError for a UUID of a wrong length. `Message.encode` turns the error into a MisuseError."""
    raise TypeError(f"{name} must be 16 bytes, not {len(value)}")


def long_string(size: int) -> NoReturn:
    """Raise TypeError for a string that is longer than any Kafka decoder accepts.

    `Message.encode` turns the error into a MisuseError.
    """
    raise TypeError(f"a string of {size} bytes; at most {MAX_STRING_BYTES} can be written")


def write_tags(append: Callable[[bytes], None], tags: list[tuple[int, list[bytes]]]) -> None:
    """Write a tag block: the number of fields, then tag, size and bytes of each field. Tags must ascend."""
    append(encode_uvarint(len(tags)))
    for tag, parts in tags:
        payload = b"".join(parts)
        append(encode_uvarint(tag) + encode_uvarint(len(payload)))
        append(payload)


def _build(source: _Source, head: str) -> tuple[Callable[..., Any], str]:
    text = "\n".join([head, *source.lines, ""])
    namespace = dict(source.constants)
    exec(compile(text, "<oncelog.wire>", "exec"), namespace)
    return namespace["codec"], text


def compile_encoder(message: Struct, version: int, flexible: bool) -> tuple[Encoder, str]:
    """Return the encoder of a message at a version, and its source text.

    `flexible`: True if this version has compact encodings and tag blocks.
    """
    source = _Source()
    _EncoderMaker(source, version, flexible).struct(message, "m", "append")
    if not source.lines:
        source.add("pass")
    return _build(source, "def codec(m, append):")


def compile_step_encoder(message: Struct, version: int, flexible: bool) -> StepEncoder:
    """Return an encoder that yields after each element of an array, except for arrays of numbers."""
    source = _Source()
    _EncoderMaker(source, version, flexible, in_steps=True).struct(message, "m", "append")
    source.add("yield")  # makes a generator of the encoder of a message without arrays
    return _build(source, "def codec(m, append):")[0]


def compile_decoder(
    message: Struct, cls: type[Any], version: int, flexible: bool, *, bounds_strings: bool = True
) -> tuple[Decoder, str]:
    """Return the decoder of a message at a version, and its source text.

    `flexible`: True if this version has compact encodings and tag blocks. `bounds_strings`: reject strings
    above MAX_STRING_BYTES, as Kafka's decoders do.
    """
    source = _Source()
    _DecoderMaker(source, version, flexible, bounds_strings).struct(message, "m", cls)
    source.add("return m, pos")
    return _build(source, _DECODER_HEAD)


def compile_step_decoder(
    message: Struct, cls: type[Any], version: int, flexible: bool, *, bounds_strings: bool = True
) -> StepDecoder:
    """Return a decoder that yields after each tagged field, and after each element of an array, except for
    arrays of numbers.
    """
    source = _Source()
    _DecoderMaker(source, version, flexible, bounds_strings, in_steps=True).struct(message, "m", cls)
    source.add("yield", "return m, pos")
    return _build(source, _DECODER_HEAD)[0]


_DECODER_HEAD = f"def codec(buf, pos, end, left={UNBOUNDED}):"


class _EncoderMaker:
    """Generates the lines of an encoder. `run`: fixed-size values that are not yet in a `pack` call.

    With `in_steps`, the encoder is a generator. It yields after each element of an array, except for arrays
    of numbers, which one call encodes.
    """

    def __init__(self, source: _Source, version: int, flexible: bool, *, in_steps: bool = False) -> None:
        self.source, self.version, self.flexible = source, version, flexible
        self.in_steps = in_steps
        self.run: list[tuple[str, str]] = []

    def flush(self, append: str) -> None:
        if self.run:
            pack = self.source.constant("pack_", struct.Struct(">" + "".join(f for f, _ in self.run)).pack)
            self.source.add(f"{append}({pack}({', '.join(e for _, e in self.run)}))")
            self.run = []

    def struct(self, struct_: Struct, var: str, append: str) -> None:
        fields = [field for field in struct_.fields if field.is_in(self.version)]
        for field in fields:
            if field.tag is None:
                self.value(field, f"{var}.{field.name}", append)
        if self.flexible:
            tagged = sorted((f for f in fields if f.tag is not None), key=lambda f: f.tag or 0)
            self.tags(tagged, var, append)
        self.flush(append)

    def value(self, field: Field, expression: str, append: str) -> None:
        nullable = field.is_nullable(self.version)
        if field.is_array:
            self.array(field, expression, nullable, append)
        elif field.struct is not None and nullable:
            self.flush(append)
            self.source.add(f"if {expression} is None: {append}(b'\\xff')", "else:")
            self.source.depth += 1
            self.run.append(("B", "1"))
            self.struct(field.struct, expression, append)
            self.source.depth -= 1
        elif field.struct is not None:
            self.struct(field.struct, expression, append)
        elif field.kind in FIXED:
            # Check the length of a UUID, because struct.pack would silently pad or cut a value of another
            # length.
            if field.kind == "uuid":
                self.source.add(f"if len({expression}) != 16: bad_uuid({field.name!r}, {expression})")
            self.run.append((FIXED[field.kind], expression))
        else:
            self.sized(field.kind, expression, nullable, append)

    def length(self, fmt: str, name: str, append: str) -> None:
        """Generate code that writes the value of the variable `name` as a length. The value -1 means null.

        Flexible versions have an unsigned varint of length + 1. Other versions have a number of the struct
        format `fmt`, which is added to `run`.
        """
        if self.flexible:
            self.flush(append)
            self.source.add(f"{append}(UV[{name} + 1] if {name} < 127 else uv({name} + 1))")
        else:
            self.run.append((fmt, name))

    def sized(self, kind: str, expression: str, nullable: bool, append: str) -> None:
        source, size, raw = self.source, self.source.name("n"), self.source.name("b")
        fmt, encode = ("h", ".encode()") if kind == "string" else ("i", "")
        source.add(f"{raw} = {expression}")
        if nullable:
            source.add(f"if {raw} is None:", f"    {raw} = b''; {size} = -1", "else:")
            source.depth += 1
        source.add(f"{raw} = {raw}{encode}; {size} = len({raw})" if encode else f"{size} = len({raw})")
        if nullable:
            source.depth -= 1
        if kind == "string" and self.flexible:
            source.add(f"if {size} > {MAX_STRING_BYTES}: long_string({size})")
        self.length(fmt, size, append)
        self.flush(append)
        source.add(f"{append}({raw})")

    def array(self, field: Field, expression: str, nullable: bool, append: str) -> None:
        source, size, items = self.source, self.source.name("n"), self.source.name("l")
        source.add(f"{items} = {expression}")
        if nullable:
            source.add(f"if {items} is None:", f"    {items} = (); {size} = -1")
            source.add("else:", f"    {size} = len({items})")
        else:
            source.add(f"{size} = len({items})")
        self.length("i", size, append)
        if field.kind in FIXED and field.kind != "uuid":
            self.flush(append)
            source.add(f"if {size} > 0: {append}(pack(f'>{{{size}}}{FIXED[field.kind]}', *{items}))")
            return
        self.flush(append)
        item = source.name("m")
        source.add(f"for {item} in {items}:")
        source.depth += 1
        element = field._replace(is_array=False, null_from=None)
        self.value(element, item, append)
        self.flush(append)
        if self.in_steps:
            source.add("yield")
        source.depth -= 1

    def tags(self, fields: list[Field], var: str, append: str) -> None:
        if not fields:
            self.run.append(("B", "0"))
            return
        self.flush(append)
        source, block = self.source, self.source.name("tags")
        is_set = [self.is_set(field, f"{var}.{field.name}") for field in fields]
        source.add(f"if not ({' or '.join(is_set)}):", f"    {append}(UV[0])", "else:")
        source.depth += 1
        source.add(f"{block} = []")
        for field, condition in zip(fields, is_set, strict=True):
            inner = source.name("a")
            source.add(f"if {condition}:")
            source.depth += 1
            source.add(f"{block}.append(({field.tag}, [])); {inner} = {block}[-1][1].append")
            self.value(field, f"{var}.{field.name}", inner)
            self.flush(inner)
            source.depth -= 1
        source.add(f"write_tags({append}, {block})")
        source.depth -= 1

    def is_set(self, field: Field, expression: str) -> str:
        """Return a Python condition that is true if the tagged field differs from its default and must be
        written.
        """
        if field.default is None:
            return f"{expression} is not None"
        return expression if field.is_array else f"{expression} != {field.default!r}"


_TAKEN = {"string": "str(buf[pos:e], 'utf-8')", "bytes": "bytes(buf[pos:e])", "records": "buf[pos:e]"}


class _DecoderMaker:
    """Generates the lines of a decoder.

    `run` has (struct format, assignment target) of successive fixed-size values. The next `flush` reads all
    of them with one `unpack` call. With `in_steps`, the decoder is a generator.
    """

    def __init__(
        self, source: _Source, version: int, flexible: bool, bounds_strings: bool, *, in_steps: bool = False
    ) -> None:
        self.source, self.version, self.flexible = source, version, flexible
        self.in_steps = in_steps
        # In versions that are not flexible, the length of a string is a 16-bit number. It cannot exceed
        # MAX_STRING_BYTES.
        self.bounds_strings = bounds_strings and flexible
        self.run: list[tuple[str, str]] = []

    def flush(self) -> None:
        if self.run:
            reader = struct.Struct(">" + "".join(fmt for fmt, _ in self.run))
            unpack = self.source.constant("unpack_", reader.unpack_from)
            self.source.add(
                f"{', '.join(t for _, t in self.run)}, = {unpack}(buf, pos); pos += {reader.size}"
            )
            self.run = []

    def struct(self, struct_: Struct, var: str, cls: type[Any]) -> None:
        self.source.add(f"{var} = new({self.source.constant('C_', cls)})")
        fields = [field for field in struct_.fields if field.is_in(self.version)]
        for field in struct_.fields:
            if field.tag is not None or field not in fields:
                value = "[]" if field.starts_as_list else repr(field.default)
                self.source.add(f"{var}.{field.name} = {value}")
        for field in fields:
            if field.tag is None:
                self.value(field, f"{var}.{field.name}", cls)
        if self.flexible:
            self.flush()
            self.tags([field for field in fields if field.tag is not None], var, cls)
        self.flush()

    def value(self, field: Field, target: str, owner: type[Any]) -> None:
        nullable = field.is_nullable(self.version)
        if field.is_array:
            self.array(field, target, nullable, owner)
        elif field.struct is not None:
            self.flush()
            self.nested(field.struct, target, owner, nullable)
        elif field.kind in FIXED:
            self.run.append((FIXED[field.kind], target))
        else:
            self.sized(field, target, nullable)

    def nested(self, struct_: Struct, target: str, owner: type[Any], nullable: bool) -> None:
        source, var = self.source, self.source.name("m")
        if nullable:
            source.add("pos += 1", f"if buf[pos - 1] > 127: {target} = None", "else:")
            source.depth += 1
        self.struct(struct_, var, owner._structs[struct_.name])
        source.add(f"{target} = {var}")
        if nullable:
            source.depth -= 1

    def number(self, name: str) -> None:
        """Generate code that reads an unsigned varint into `name`."""
        self.flush()
        self.source.add(
            f"{name} = buf[pos]; pos += 1", f"if {name} > 127: {name}, pos = rest(buf, pos, {name})"
        )

    def length(self, fmt: str) -> str:
        """Generate code that reads a length, and return the name of its variable.

        The variable is -1 for null.
        """
        name = self.source.name("n")
        if self.flexible:
            self.number(name)
            self.source.add(f"{name} -= 1")
        else:
            self.run.append((fmt, name))
            self.flush()
        return name

    def sized(self, field: Field, target: str, nullable: bool) -> None:
        size = self.length("h" if field.kind == "string" else "i")
        source = self.source
        if nullable:
            source.add(f"if {size} == -1: {target} = None", "else:")
            source.depth += 1
        source.add(
            f"e = pos + {size}",
            f"if {size} < 0 or e > end: fail({field.name!r}, {size}, end - pos)",
        )
        if field.kind == "string" and self.bounds_strings:
            source.add(f"if {size} > {MAX_STRING_BYTES}: fail_string({field.name!r}, {size})")
        source.add(f"{target} = {_TAKEN[field.kind]}", "pos = e")
        if nullable:
            source.depth -= 1

    def array(self, field: Field, target: str, nullable: bool, owner: type[Any]) -> None:
        size, source = self.length("i"), self.source
        if nullable:
            source.add(f"if {size} == -1: {target} = None", "else:")
            source.depth += 1
        element = field._replace(is_array=False, null_from=None, tag=None)
        least = max(1, self.least_bytes(element))
        source.add(
            f"left -= {size}",
            f"if {size} < 0 or {size} * {least} > end - pos or left < 0: "
            f"fail_array({field.name!r}, {size}, end - pos, left)",
        )
        if field.kind in FIXED and field.kind != "uuid":
            fmt = f"f'>{{{size}}}{FIXED[field.kind]}'"
            source.add(f"{target} = list(unpack_from({fmt}, buf, pos)); pos += {size} * {least}")
        else:
            items, item = source.name("l"), source.name("m")
            source.add(f"{target} = {items} = []", f"for _ in range({size}):")
            source.depth += 1
            if element.struct is not None:
                self.struct(element.struct, item, owner._structs[element.struct.name])
            else:
                self.value(element, item, owner)
                self.flush()
            source.add(f"{items}.append({item})")
            self.end_step()
            source.depth -= 1
        if nullable:
            source.depth -= 1

    def tags(self, fields: list[Field], var: str, owner: type[Any]) -> None:
        count, tag, size, stop = (self.source.name(stem) for stem in ("n", "t", "s", "e"))
        source = self.source
        self.number(count)
        source.add(f"while {count}:")
        source.depth += 1
        source.add("left -= 1", "if left < 0: fail_array('tagged fields', 1, end - pos, left)")
        source.depth -= 1
        source.depth += 1
        source.add(f"{count} -= 1")
        self.number(tag)
        self.number(size)
        source.add(f"{stop} = pos + {size}", f"if {stop} > end: fail('a tagged field', {size}, end - pos)")
        for position, field in enumerate(fields):
            source.add(f"{'el' if position else ''}if {tag} == {field.tag}:")
            source.depth += 1
            self.tagged(field, f"{var}.{field.name}", owner)
            source.add(f"if pos != {stop}: fail('tagged field {field.name}', {size}, pos - {stop} + {size})")
            source.depth -= 1
        source.add("else:" if fields else "if True:", f"    pos = {stop}")
        self.end_step()
        source.depth -= 1

    def end_step(self) -> None:
        if self.in_steps:
            self.source.add("yield")

    def tagged(self, field: Field, target: str, owner: type[Any]) -> None:
        # Null is the varint 0 if the struct is a tagged field, and the byte -1 elsewhere. In both cases, 1
        # means that a struct follows. Kafka writes null tagged structs: see
        # test_transactions_and_offsets_of_kafkas_go_on.
        is_nullable_struct = (
            field.struct is not None and not field.is_array and field.is_nullable(self.version)
        )
        if is_nullable_struct:
            self.source.add(f"if buf[pos] == 0: {target} = None; pos += 1", "else:")
            self.source.depth += 1
        self.value(field, target, owner)
        self.flush()
        if is_nullable_struct:
            self.source.depth -= 1

    def least_bytes(self, field: Field) -> int:
        """Return the minimum number of bytes of a value of this field at this version."""
        if field.is_array:
            return 1 if self.flexible else 4
        if field.struct is not None and field.is_nullable(self.version):
            return 1
        if field.struct is not None:
            inner = (f for f in field.struct.fields if f.is_in(self.version) and f.tag is None)
            return sum(map(self.least_bytes, inner)) + self.flexible
        if field.kind in FIXED:
            return struct.calcsize(">" + FIXED[field.kind])
        return 1 if self.flexible else 2 if field.kind == "string" else 4
