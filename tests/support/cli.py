"""`oncelog` commands, run in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Outcome:
    """The exit code, standard output and standard error of a command."""

    code: int
    out: str
    err: str


def oncelog(*arguments: str, servers: str | None = None) -> Outcome:
    """Run `oncelog ARGUMENTS`. If `servers` is given, add `-b SERVERS`."""
    from oncelog.cli.main import main

    argv = ["oncelog", *arguments, *(["-b", servers] if servers else [])]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())
