"""Clients that are open when the interpreter exits or the process forks: no call waits forever."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.topics import new_topic, producer_of

from oncelog import Broker
from oncelog.errors import MisuseError

PROGRAM = """
import sys
from oncelog import Admin, Consumer, Producer
from oncelog.errors import MisuseError

at, topic = sys.argv[1:3]
CLOSE = lambda client: client.close()


class Kept:
    def __init__(self, client, use):
        self.client, self.use = client, use

    def __del__(self):
        try:
            print(self.use(self.client))
        except MisuseError as error:
            print("interpreter" in str(error))


MADE = {MADE}
sys.modules["kept"] = Kept(*MADE)
"""

CLIENTS = {
    "producer closes": "Producer(bootstrap_servers=at), CLOSE",
    "producer sends": "Producer(bootstrap_servers=at), lambda p: p.send(topic, b'v').result()",
    "producer flushes": "Producer(bootstrap_servers=at), lambda p: p.flush()",
    "transaction": "Producer(bootstrap_servers=at, transactional_id='t'), lambda p: p.init_transactions()",
    "consumer closes": "Consumer(bootstrap_servers=at), CLOSE",
    "consumer looks": "Consumer(bootstrap_servers=at), lambda c: c.partitions_for(topic)",
    "admin closes": "Admin(bootstrap_servers=at), CLOSE",
}
EXPECTED = {name: "None" if name.endswith("closes") else "True" for name in CLIENTS}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_used_by_a_finalizer_as_the_interpreter_ends_returns(ours: str, name: str) -> None:
    """Regression: a close waited forever for the client's thread, which had already stopped."""
    program = PROGRAM.replace("{MADE}", CLIENTS[name])
    command = [sys.executable, "-c", program, ours, new_topic(ours)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.split() == [EXPECTED[name]], ended.stderr


def test_a_child_is_told_at_once_of_records_that_its_parent_took(ours: str) -> None:
    topic = new_topic(ours)
    with producer_of(ours, linger_ms=600_000, delivery_timeout_ms=700_000) as producer:
        future = producer.send(topic, b"v")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                future.result(60)
            except MisuseError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not future.done()
        producer.flush(60)
        assert future.result(60).offset == 0


def test_a_forked_child_leaves_the_broker_of_its_parent_alone() -> None:
    """Regression: in the child, the first stop failed, and the second one removed the directory of the
    parent's broker.
    """
    with Broker() as broker:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                broker.stop()
                broker.stop()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert broker.data_dir.exists()
        with producer_of(broker.bootstrap_servers) as producer:
            assert producer.send("t", b"v").result(60).offset == 0
    assert not broker.data_dir.exists()


def test_a_broker_made_before_a_fork_gets_a_directory_in_each_process() -> None:
    """Regression: the second process failed to start its broker, and removed the directory of the running
    one.
    """
    broker = Broker()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.read(read_end, 1)  # waits until the parent's broker is running
            broker.start()
            name = str(broker.data_dir)
            broker.stop()
            code = os.path.exists(name)
        finally:
            os._exit(code)
    with broker:
        os.write(write_end, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert broker.data_dir.exists()
        with producer_of(broker.bootstrap_servers) as producer:
            assert producer.send("t", b"v").result(60).offset == 0
    os.close(read_end)
    os.close(write_end)
    assert not broker.data_dir.exists()
