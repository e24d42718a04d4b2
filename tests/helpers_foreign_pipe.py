"""Programs that consume, transform and produce in transactions while something is killed: exact all the same.

A program's mode `pipe INPUT OUTPUT GROUP COUNT` copies COUNT records, partition by partition, in many
transactions, prints `committed` after each and `done` at the end.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers_foreign import Command
from helpers_interop import make_topic
from helpers_producer import read

from oncelog import Admin, Producer, TopicPartition
from oncelog.dev.served import ServedBroker

PARTITIONS = 2


def fill(servers: str, count: int) -> None:
    """Topic `in` with the numbers below `count`, and an empty topic `out`."""
    for topic in ("in", "out"):
        make_topic(servers, topic, PARTITIONS)
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(count):
            producer.send("in", b"%d" % number, partition=number % PARTITIONS)


def pipe(command: Command, servers: str, count: int) -> list[str]:
    """The command line of the copying program."""
    return command(servers, "pipe", "in", "out", "group", str(count))


def check_copied(servers: str, count: int) -> None:
    """Every record once, in order, and the group's offsets at the end of what was read."""
    copied = [(record.partition, int(record.value or b"")) for record in read(servers, "out")]
    assert copied == sorted((number % PARTITIONS, number) for number in range(count))
    with Admin({"bootstrap.servers": servers}) as admin:
        offsets = admin.group_offsets("group")
    assert {at: found.offset for at, found in offsets.items()} == {
        TopicPartition("in", partition): count // PARTITIONS for partition in range(PARTITIONS)
    }


def pipe_past_killed_brokers(command: Command, tmp_path: Path, count: int) -> None:
    """The broker is killed with SIGKILL after some of the transactions, while the program goes on."""
    with ServedBroker(tmp_path / "data") as broker:
        fill(broker.bootstrap_servers, count)
        arguments = pipe(command, broker.bootstrap_servers, count)
        lines: list[str] = []
        with (
            (tmp_path / "errors").open("w+") as errors,
            subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                lines.append(line.strip())
                if lines.count("committed") in (2, 7, 15):
                    broker.kill()
                    broker.start()
            assert child.wait(30) == 0, (tmp_path / "errors").read_text()[-3000:]
        assert lines[-1] == "done"
        assert lines.count("committed") > 15
        check_copied(broker.bootstrap_servers, count)
