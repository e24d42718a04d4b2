"""A client program as a child process: one line for each command, and one for each reply.

    producer default|idempotent                   start a producer with the client's defaults, or idempotent
    producer give-up MS                           idempotent; give a record up after about MS milliseconds
    producer transactional ID                     start a transactional producer and its first epoch
    send TOPIC PARTITION VALUE...                 send each value as a batch of its own, and do not wait
    flush SECONDS                                 wait for all records that have no result yet -> results
    begin | commit | abort                        a transaction; commit and abort flush first
    consume TOPIC GROUP COUNT ISOLATION PROTOCOL INSTANCE
                                                  join GROUP and read COUNT records -> records
    offsets TOPIC OFFSET                          add the consumer's offset of partition 0 to the transaction
    close                                         close the consumer
    version                                       the client's version -> ok VERSION

ISOLATION is `default` or `read_committed`, PROTOCOL is `classic` or `consumer`, and INSTANCE is `-` for none.
A program may pad values with spaces, which are removed here.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.errors import OncelogError
from oncelog_devtools.client_matrix.recording import Reply, ReplyKind, parse_reply

REPLY_LIMIT_S = 200.0
STOP_LIMIT_S = 5.0


class ProgramFailed(OncelogError):
    """The client program ended, did not reply in time, or wrote a line that is not a reply."""


class ClientProgram:
    """A client program that runs, as a context manager. `log_file` gets its standard error."""

    def __init__(self, command: Sequence[str], bootstrap_servers: str, log_file: Path) -> None:
        self._command = [*command, bootstrap_servers]
        self._log_file = log_file
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, command: str) -> Reply:
        """Send a command, and return the reply. Raises ProgramFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=REPLY_LIMIT_S)
        except BrokenPipeError:
            line = ""
        except queue.Empty:
            raise ProgramFailed(f"no reply to {command!r} within {REPLY_LIMIT_S:.0f} s") from None
        if not line:
            raise ProgramFailed(f"the program ended at {command!r}: {self._last_words()}")
        try:
            return parse_reply(line)
        except ValueError:
            raise ProgramFailed(f"{line.strip()!r} is no reply to {command!r}") from None

    def expect(self, command: str) -> Reply:
        """Send a command, and return the reply, which must not be an error. Raises ProgramFailed."""
        reply = self.ask(command)
        if reply.kind is ReplyKind.ERROR:
            raise ProgramFailed(f"{command.split()[0]}: {reply.text}")
        return reply

    def _last_words(self) -> str:
        text = self._log_file.read_text(errors="replace").strip()
        return text.splitlines()[-1][-300:] if text else "no message"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
