"""A Python program for Spark's workers that connects to the JVM before it imports anything.

To plan a stream, Spark starts `python -m pyspark.sql.streaming.python_streaming_source_runner`. It waits ten
seconds for the worker's connection, and ten more for the secret. No setting changes that
(PythonWorkerFactory.createSimpleWorker, SocketAuthHelper.authClient). The worker connects after its imports,
which take half a second of processor time. On a busy machine the query therefore fails with "Python worker
failed to connect back".

The program that this module makes connects, sends the secret, and then becomes the real interpreter. The
worker's own call of `connect` gets the open connection, and its authentication only reads the response. With
16 busy loops on two cores, the connection comes after 0.4 s instead of 10.4 s (median).

With a `ForkServer` (fork_server.py), the program asks the server for a process that has done the imports.
"""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path

from support.spark.fork_server import ADDRESS

AUTHENTICATION_TIMEOUT = "600s"

_CONNECT_FIRST = """\
#!{python} -IS
import os
import sys

arguments = sys.argv[1:]
fork_server = os.environ.get({address!r})
if fork_server and arguments[:1] == ["-m"]:
    import _signal
    import _socket
    import marshal
    import select

    # SIGTERM goes on to the worker, also one that comes before we know it, or just before we wait.
    signalled, wake_up = _socket.socketpair()
    wake_up.setblocking(False)
    _signal.set_wakeup_fd(wake_up.fileno())
    _signal.signal(_signal.SIGTERM, lambda *_: None)
    request = marshal.dumps((arguments[1:], dict(os.environ), os.getcwd()))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(fork_server)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
    server.sendmsg([len(request).to_bytes(4, "big")], [rights])
    server.sendall(request)
    worker = int(server.recv(20))
    while server not in select.select([server, signalled], [], [])[0]:
        signalled.recv(1)
        os.kill(worker, _signal.SIGTERM)
    sys.exit()  # the connection has ended, and so has the worker
port = os.environ.get("PYTHON_WORKER_FACTORY_PORT")
if port and arguments[:1] == ["-m"]:
    import _socket

    connected = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    connected.connect(("127.0.0.1", int(port)))
    secret = os.environ["PYTHON_WORKER_FACTORY_SECRET"].encode()
    connected.sendall(len(secret).to_bytes(4, "big") + secret)
    os.set_inheritable(connected.fileno(), True)
    arguments = ["-c", {hand_over!r}, port, str(connected.detach()), *arguments[1:]]
os.execv({python!r}, [{python!r}, *arguments])
"""

_HAND_OVER = """\
import os
import runpy
import socket
import sys

import pyspark.util
from pyspark.serializers import UTF8Deserializer

port, connected, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
connect, authenticate = socket.socket.connect, pyspark.util._do_server_auth


def hand_over(new, address):
    if address[1] != port:
        return connect(new, address)
    socket.socket.connect = connect
    timeout = new.gettimeout()
    os.dup2(connected, new.fileno(), inheritable=False)
    os.close(connected)
    new.settimeout(timeout)


def read_answer(stream, secret):
    pyspark.util._do_server_auth = authenticate
    answer = UTF8Deserializer().loads(stream)
    if answer != "ok":
        raise ConnectionError("Spark refused the worker's secret: " + answer)


socket.socket.connect, pyspark.util._do_server_auth = hand_over, read_answer
sys.argv[:] = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@cache
def spark_python() -> str:
    """Return the path of the program, for PYSPARK_PYTHON. The file is deleted when this process ends."""
    path = Path(_directory().name) / "python"
    path.write_text(_CONNECT_FIRST.format(python=sys.executable, hand_over=_HAND_OVER, address=ADDRESS))
    path.chmod(0o755)
    return str(path)


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="oncelog-spark-python-")
