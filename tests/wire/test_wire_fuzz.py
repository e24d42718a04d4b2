"""Damaged frames, batches and compressed data raise a typed error, and take a bounded amount of memory.

The seeds are fixed. A failure names its seed, with which it can be repeated.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from support.wire import RECORDS, random_part

from oncelog.errors import CorruptMessage, InvalidRecord, PeerError, UnsupportedCompressionType
from oncelog.types import Compression
from oncelog.wire.batch import HEADER_BYTES, build_batch, iter_batches
from oncelog.wire.columns import batches_to_arrow
from oncelog.wire.compression import compress, decompress
from oncelog.wire.frames import FrameReader, decode_request, decode_response, encode_request, encode_response
from oncelog.wire.header import write_crc
from oncelog.wire.messages import API_BY_KEY, Api
from oncelog.wire.records import decode_records

BATCH_ERRORS = (CorruptMessage, InvalidRecord, UnsupportedCompressionType)
APIS = list(API_BY_KEY.values())


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return a damaged copy of the data: cut, extended, with changed bytes, or with a huge length."""
    raw = bytearray(data)
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(raw[: rng.randrange(len(raw) + 1)])
    if kind == 1:
        return bytes(raw) + rng.randbytes(rng.randrange(1, 9))
    if kind == 2 and len(raw) > 4:
        at = rng.randrange(len(raw) - 4)
        raw[at : at + 4] = rng.choice(
            [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\x7f"]
        )
        return bytes(raw)
    for _ in range(rng.randrange(1, 5)):
        if raw:
            raw[rng.randrange(len(raw))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(raw)


def ends_well(action: Callable[[], Any], errors: tuple[type[Exception], ...]) -> bool:
    """Return True if the call succeeds, and False if it raises one of the typed errors. Other errors pass."""
    try:
        action()
    except errors:
        return False
    return True


def peak_bytes(action: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_broken_frames_raise_typed_errors(api: Api) -> None:
    rng = random.Random(api.key)
    refused = 0
    for version in range(api.first_version, api.last_version + 1):
        request = random_part(rng, api.request._struct, api.request, version)
        response = random_part(rng, api.response._struct, api.response, version)
        asked = encode_request(request, version, 1, "fuzz")[4:]
        answered = encode_response(response, version, 1)[4:]
        for _ in range(40):
            frame = mutated(rng, asked)
            refused += not ends_well(lambda f=frame: decode_request(f), (PeerError,))
            frame = mutated(rng, answered)
            refused += not ends_well(
                lambda f=frame, v=version: decode_response(api.response, v, f), (PeerError,)
            )
    assert refused > 0


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_every_truncation_is_an_error(api: Api) -> None:
    """No complete message is the beginning of a longer one, so every truncated message must raise an
    error.
    """
    rng = random.Random(api.key)
    for version in (api.first_version, api.last_version):
        request = random_part(rng, api.request._struct, api.request, version)
        body = request.encode(version)
        for cut in range(len(body)):
            with pytest.raises(PeerError):
                api.request.decode(version, body[:cut])


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_garbage_allocates_little_memory(api: Api) -> None:
    """If a message claims 2^31-1 elements somewhere, decoding must allocate memory only for the bytes that
    arrived.
    """
    rng = random.Random(api.key)
    claims = b"\x7f\xff\xff\xff\x0f\xff\xff\xff\x07\x00\x00\x00\x02"
    garbage = [bytes(rng.choice(claims) for _ in range(300)) for _ in range(20)]

    def decode_all() -> None:
        for version in {api.first_version, api.last_version}:
            for data in garbage:
                ends_well(lambda d=data, v=version: api.request.decode(v, d), (PeerError,))
                ends_well(lambda d=data, v=version: api.response.decode(v, d), (PeerError,))

    decode_all()
    assert peak_bytes(decode_all) < 500_000


def test_a_frame_reader_holds_only_what_arrived() -> None:
    def claim_much() -> None:
        for _ in range(50):
            FrameReader(1 << 30).feed(b"\x3f\xff\xff\xff" + b"x" * 100)

    claim_much()
    assert peak_bytes(claim_much) < 100_000


@pytest.mark.parametrize("codec", Compression)
def test_broken_batches_raise_typed_errors(codec: Compression) -> None:
    """Some damaged batches have a correct checksum, so that the damage reaches the parsers.

    Rows and columns must agree.
    """
    rng = random.Random(int(codec))
    original = build_batch(RECORDS[:4], compression=codec, producer_id=1, producer_epoch=0, base_sequence=0)
    refused = 0
    for _ in range(1500):
        raw = bytearray(mutated(rng, bytes(original)))
        if len(raw) >= HEADER_BYTES and rng.random() < 0.9:
            raw[8:12] = (len(raw) - 12).to_bytes(4, "big")
            write_crc(raw, 0, len(raw))
        data = bytes(raw)
        is_read = ends_well(lambda d=data: decode_records(d, max_bytes=1 << 20), BATCH_ERRORS)
        refused += not is_read
        columns_read = ends_well(
            lambda d=data: batches_to_arrow(d, topic="t", partition=0, include_headers=True), BATCH_ERRORS
        )
        ends_well(lambda d=data: list(iter_batches(d)), BATCH_ERRORS)
        assert columns_read or not is_read
    assert refused > 500


@pytest.mark.parametrize("codec", [codec for codec in Compression if codec])
def test_broken_compressed_data_raises_typed_errors(codec: Compression) -> None:
    rng = random.Random(int(codec))
    original = compress(codec, b"".join(b"line %d\n" % n for n in range(3000)))
    refused = 0
    for _ in range(1500):
        data = mutated(rng, original)
        refused += not ends_well(lambda d=data: decompress(codec, d, 1 << 20), BATCH_ERRORS)
    for _ in range(500):
        data = rng.randbytes(rng.randrange(60))
        refused += not ends_well(lambda d=data: decompress(codec, d, 1 << 20), BATCH_ERRORS)
    assert refused > 200


def test_broken_batches_take_bounded_memory() -> None:
    rng = random.Random(11)
    batches = [build_batch(RECORDS[:4], compression=codec) for codec in Compression]
    broken = []
    for _ in range(100):
        raw = bytearray(mutated(rng, bytes(rng.choice(batches))))
        if len(raw) >= HEADER_BYTES:
            raw[8:12] = (len(raw) - 12).to_bytes(4, "big")
            write_crc(raw, 0, len(raw))
        broken.append(bytes(raw))

    def decode_all() -> None:
        for data in broken:
            ends_well(lambda d=data: decode_records(d, max_bytes=1 << 20), BATCH_ERRORS)

    decode_all()
    assert peak_bytes(decode_all) < 8 << 20
