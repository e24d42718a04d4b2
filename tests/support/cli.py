"""Running `oncelog` commands in this process, as a shell would see them."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def oncelog(*arguments: str, servers: str | None = None) -> Outcome:
    """Run `oncelog ARGUMENTS`, with `-b servers` at its end if given."""
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
