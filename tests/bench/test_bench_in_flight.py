"""Measure batches in flight at a tiny size, and check the recorded fields, the page and the picture."""

from __future__ import annotations

import json
import socket
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from oncelog_bench import in_flight
from oncelog_bench.framework import figure
from oncelog_bench.page import write_page
from oncelog_bench.slow_link import SlowLink


def test_every_depth_round_trip_and_number_of_batches_is_measured(tmp_path: Path) -> None:
    done: list[int] = []
    taken = in_flight.measure(in_flight.QUICK, done.append)
    assert done == list(range(1, in_flight.QUICK.samples_count + 1))
    result = json.loads(json.dumps(taken))
    for depth in in_flight.QUICK.in_flight:
        for side in ("loopback", "1 ms"):
            figures = [figure(result, m.name, in_flight=depth, round_trip=side) for m in in_flight.SPEED]
            assert None not in figures and figures[0]
    for count in range(1, in_flight.QUICK.remembered + 1):
        assert figure(result, "cpu_us_per_append", remembered=count) is not None
    (tmp_path / "in_flight.json").write_text(json.dumps(result))
    write_page(tmp_path / "page.md", tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert "On loopback, five in flight carry" in text
    drawing = tmp_path / "benchmarks-in_flight.svg"
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_a_slow_link_carries_every_byte_both_ways() -> None:
    sent = bytes(range(256)) * 4_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with SlowLink(address, 1.0) as link:
            host, _, port = link.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=60) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(60)
                    for writer, reader in ((near, far), (far, near)):
                        writer.sendall(sent)
                        received = bytearray()
                        while len(received) < len(sent):
                            received += reader.recv(65_536)
                        assert received == sent
