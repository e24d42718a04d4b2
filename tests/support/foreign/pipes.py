"""Programs that consume, transform and produce in transactions while the program or the broker is killed.

The mode `pipe INPUT OUTPUT GROUP COUNT` of a program copies COUNT records, partition by partition, in many
transactions. It prints `committed` after each transaction and `done` at the end.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from queue import SimpleQueue

from oncelog import Admin, Broker, Producer, TopicPartition
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy import Fate, Proxy, Rule, WireEvent
from support.foreign.clients import Command, run
from support.foreign.functions import make_topic
from support.topics import read

PARTITIONS = 2
JOINING = ("InitProducerId", "JoinGroup", "SyncGroup", "OffsetFetch")
CLASSIC_STEPS = ("AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
STEPS = ("Produce", "TxnOffsetCommit", "EndTxn")
"""The APIs of a transaction with transaction.version 2, in which clients do not send AddPartitionsToTxn."""


def fill(servers: str, count: int) -> None:
    """Create the topic `in` with the numbers below `count`, and an empty topic `out`."""
    for topic in ("in", "out"):
        make_topic(servers, topic, PARTITIONS)
    with Producer({"bootstrap.servers": servers}) as producer:
        for number in range(count):
            producer.send("in", b"%d" % number, partition=number % PARTITIONS)


def pipe(command: Command, servers: str, count: int) -> list[str]:
    """Return the command line of the copying program."""
    return command(servers, "pipe", "in", "out", "group", str(count))


def check_copied(servers: str, count: int) -> None:
    """Check that every record was copied once, in order, and that the group's offsets are at the end."""
    copied = [(record.partition, int(record.value or b"")) for record in read(servers, "out")]
    assert copied == sorted((number % PARTITIONS, number) for number in range(count))
    with Admin({"bootstrap.servers": servers}) as admin:
        offsets = admin.group_offsets("group")
    assert {at: found.offset for at, found in offsets.items()} == {
        TopicPartition("in", partition): count // PARTITIONS for partition in range(PARTITIONS)
    }


def pipe_past_killed_brokers(command: Command, tmp_path: Path, count: int) -> None:
    """Kill the broker by SIGKILL after some of the transactions, while the program continues."""
    with BrokerProcess(tmp_path / "data") as broker:
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
                if lines.count("committed") in (3, 12):
                    broker.kill()
                    broker.start()
            assert child.wait(200) == 0, (tmp_path / "errors").read_text()[-3000:]
        assert lines[-1] == "done"
        assert lines.count("committed") > 12
        check_copied(broker.bootstrap_servers, count)


def pipe_past_lost_answers(command: Command, count: int) -> None:
    """Cut the connection at two responses to EndTxn, after the broker has ended the transaction."""
    lost = [Rule(action="cut", api="EndTxn", direction="response", nth=nth) for nth in (2, 6)]
    with Broker() as broker:
        fill(broker.bootstrap_servers, count)
        with Proxy(broker.bootstrap_servers, rules=lost) as proxy:
            lines = run(pipe(command, proxy.bootstrap_servers, count))
            assert sum(event.fate is Fate.CUT for event in proxy.events) == 2
        assert lines[-1] == "done"
        check_copied(broker.bootstrap_servers, count)


def pipe_killed_at_every_step(command: Command, steps: Sequence[str], version: int, count: int) -> None:
    """For each step, kill the program before the broker handles it, and then after that. Each time, a new
    program continues.
    """
    with Broker(config={"oncelog.transaction.version": version}) as broker:
        fill(broker.bootstrap_servers, count)
        for api, direction in product([*JOINING, *steps], ("request", "response")):
            rule = Rule(action="cut", api=api, direction=direction, nth=1 if api in JOINING else 2)
            started: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()

            def kill(event: WireEvent) -> None:
                if event.fate is Fate.CUT:
                    started.get().kill()  # noqa: B023  # the proxy of this round ends with it

            with Proxy(broker.bootstrap_servers, rules=[rule], on_event=kill) as proxy:
                arguments = pipe(command, proxy.bootstrap_servers, count)
                child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
                started.put(child)
                assert child.wait(200) == -signal.SIGKILL, (api, direction)
        assert run(pipe(command, broker.bootstrap_servers, count))[-1] == "done"
        check_copied(broker.bootstrap_servers, count)


def broker_killed_at_every_step(
    command: Command, steps: Sequence[str], data_dir: Path, version: int, count: int
) -> None:
    """For each step, kill the broker before it handles the step, and then after that. The program
    continues.
    """
    with BrokerProcess(data_dir, settings={"oncelog.transaction.version": version}) as broker:
        fill(broker.bootstrap_servers, count)

        def kill(event: WireEvent) -> None:
            if event.fate is Fate.CUT:  # kill in the proxy's thread, so that no message passes meanwhile
                broker.kill()
                broker.start()

        with Proxy(broker.bootstrap_servers, on_event=kill) as proxy:
            arguments = pipe(command, proxy.bootstrap_servers, count)
            with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
                for number, (api, direction) in enumerate(product(steps, ("request", "response")), 1):
                    proxy.add(Rule(action="cut", api=api, direction=direction, nth=3))
                    assert proxy.wait_until(lambda events: _cuts(events) == number, 30), (api, direction)  # noqa: B023
                output, _ = child.communicate(timeout=200)
                assert child.returncode == 0
        assert output.splitlines()[-1] == "done"
        check_copied(broker.bootstrap_servers, count)


def _cuts(events: Sequence[WireEvent]) -> int:
    return sum(event.fate is Fate.CUT for event in events)
