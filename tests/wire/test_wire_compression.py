"""The codecs: all framings that clients use, bounded output, damage, and missing libraries."""

from __future__ import annotations

import gzip
import importlib
import struct
import threading
import tracemalloc
from typing import Any

import cramjam
import kafka.codec
import lz4.frame
import pytest
import zstandard

from oncelog.errors import ConfigError, CorruptMessage, InvalidRecord, UnsupportedCompressionType
from oncelog.types import Compression
from oncelog.wire import compression
from oncelog.wire.compression import check_available, compress, decompress

CODECS = [codec for codec in Compression if codec]
DATA = bytes(range(256)) * 300 + b"abc" * 40_000
THEIRS: dict[Compression, tuple[Any, Any]] = {
    Compression.GZIP: (kafka.codec.gzip_encode, kafka.codec.gzip_decode),
    Compression.SNAPPY: (kafka.codec.snappy_encode, kafka.codec.snappy_decode),
    Compression.LZ4: (kafka.codec.lz4_encode, kafka.codec.lz4_decode),
    Compression.ZSTD: (kafka.codec.zstd_encode, kafka.codec.zstd_decode),
}


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "one", "large"])
@pytest.mark.parametrize("codec", CODECS)
def test_kafka_python_and_we_decompress_each_other(codec: Compression, data: bytes) -> None:
    encode, decode = THEIRS[codec]
    packed = compress(codec, memoryview(data))
    assert bytes(decompress(codec, packed)) == data
    assert bytes(decompress(codec, memoryview(b"." + packed)[1:])) == data
    assert bytes(decode(packed)) == data
    assert bytes(decompress(codec, encode(data))) == data


def test_no_codec_is_no_copy() -> None:
    assert decompress(Compression.NONE, DATA) is DATA
    assert compress(Compression.NONE, DATA) == DATA


def test_bare_snappy_is_read_and_xerial_is_written() -> None:
    assert decompress(Compression.SNAPPY, bytes(cramjam.snappy.compress_raw(DATA))) == DATA
    packed = compress(Compression.SNAPPY, DATA)
    assert packed.startswith(b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1))
    (first,) = struct.unpack_from(">i", packed, 16)
    assert cramjam.snappy.decompress_raw(packed[20 : 20 + first]).len() == 32 << 10


def test_lz4_frames_are_those_java_accepts() -> None:
    packed = compress(Compression.LZ4, DATA, 9)
    flags = packed[4]
    assert packed[:4] == b"\x04\x22\x4d\x18"
    assert flags >> 6 == 1 and flags & 0x20, "version 1, blocks independent"
    for options in ({"store_size": True}, {"block_checksum": True}, {"content_checksum": True}):
        assert decompress(Compression.LZ4, lz4.frame.compress(DATA, block_linked=False, **options)) == DATA


def test_zstd_without_content_size_with_checksum_and_in_several_frames() -> None:
    writer = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True)
    assert decompress(Compression.ZSTD, writer.compress(DATA)) == DATA
    assert decompress(Compression.ZSTD, writer.compress(b"a") + writer.compress(b"b")) == b"ab"


def test_gzip_with_several_members_is_read() -> None:
    assert decompress(Compression.GZIP, gzip.compress(b"a") + gzip.compress(b"b")) == b"ab"


@pytest.mark.parametrize(
    ("codec", "level"), [(Compression.GZIP, 1), (Compression.LZ4, 12), (Compression.ZSTD, 19)]
)
def test_compression_levels_are_applied(codec: Compression, level: int) -> None:
    text = b" ".join(b"record %d of %d" % (n, n * n) for n in range(5000))
    packed = compress(codec, text, level)
    assert decompress(codec, packed) == text
    assert packed != compress(codec, text)


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_within_bounded_memory(codec: Compression) -> None:
    bomb = compress(codec, bytes(200 << 20))
    limit = 4 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRecord, match="larger than"):
            decompress(codec, bomb, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * limit + 2 * len(bomb) + (4 << 20)


def test_the_limit_itself_is_allowed() -> None:
    for codec in CODECS:
        assert len(decompress(codec, compress(codec, DATA), len(DATA))) == len(DATA)
        with pytest.raises(InvalidRecord):
            decompress(codec, compress(codec, DATA), len(DATA) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_truncated_data_is_an_error(codec: Compression) -> None:
    packed = compress(codec, DATA)
    for cut in [*range(1, 60), len(packed) // 2, len(packed) - 1]:
        try:
            data = decompress(codec, packed[: len(packed) - cut])
        except CorruptMessage:
            continue
        # A Xerial stream has no end mark, so a cut between two blocks leaves a valid stream.
        assert codec is Compression.SNAPPY and DATA.startswith(data) and len(data) < len(DATA)


def test_the_size_in_a_snappy_block_is_not_trusted() -> None:
    # Followed by six bytes, this is a block that claims to decompress to 2^28 - 1 bytes.
    claim = b"\xff\xff\xff\x7f"
    with pytest.raises(CorruptMessage, match="bytes after decompression"):
        decompress(Compression.SNAPPY, claim + b"123456", 1 << 30)
    with pytest.raises(CorruptMessage, match="no length"):
        decompress(Compression.SNAPPY, b"\xff\xff\xff\xff\xff\xff")
    for tail in (b"\0\0", b"\0\0\0\x09ab", b"\xff\xff\xff\xff"):
        with pytest.raises(CorruptMessage):
            decompress(Compression.SNAPPY, compress(Compression.SNAPPY, b"a") + tail)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    packed = {codec: compress(codec, b"a") for codec in CODECS}
    monkeypatch.setattr(compression.importlib, "import_module", missing)
    for codec in (Compression.SNAPPY, Compression.LZ4, Compression.ZSTD):
        with pytest.raises(ConfigError, match=r"pip install 'oncelog\[compression\]'"):
            compress(codec, b"a")
        with pytest.raises(UnsupportedCompressionType, match=r"oncelog\[compression\]'"):
            decompress(codec, packed[codec])
    check_available(Compression.GZIP)
    assert importlib.import_module is missing


def test_zstd_contexts_are_not_shared_by_threads() -> None:
    failures: list[object] = []

    def work(seed: int) -> None:
        data = bytes([seed]) * 300_000 + DATA
        for _ in range(30):
            if decompress(Compression.ZSTD, compress(Compression.ZSTD, data)) != data:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_zstd_contexts_are_reused() -> None:
    """A new context for each small batch would take two to three times as long as the compression."""
    decompress(Compression.ZSTD, compress(Compression.ZSTD, DATA, 5))
    made = (list(compression._zstd_compressors[5]), list(compression._zstd_decompressors))
    decompress(Compression.ZSTD, compress(Compression.ZSTD, DATA, 5))
    assert (compression._zstd_compressors[5], compression._zstd_decompressors) == made
