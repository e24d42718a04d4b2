"""A program that only reads and writes messages does not import the libraries for columns and codecs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "pyarrow", "lz4", "zstandard", "cramjam", "asyncio")
SCRIPT = f"""
import sys
import oncelog.wire.frames, oncelog.wire.batch, oncelog.wire.control
from oncelog.wire.messages import API_BY_KEY
print([name for name in {HEAVY} if name in sys.modules])
print(sum(len(m._encoders) + len(m._decoders) for a in API_BY_KEY.values() for m in (a.request, a.response)))
"""


def test_the_core_imports_little_and_compiles_nothing_until_used() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["[]", "0"]
