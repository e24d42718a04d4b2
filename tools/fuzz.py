"""Search for inputs that break a parser, guided by coverage (atheris), for a limited time.

    python tools/fuzz.py [TARGET...] [--seconds 60] [--keep]

The targets are those of tests/support/fuzz/targets.py, one after the other. A search starts from the target's
seeds and from its file in tests/fuzz/corpus (one input per line, base64). Its files are in out/fuzz. A
finding ends the search of its target, and its bytes are printed. `--replay FILE` runs such bytes again.
`--keep` adds the inputs that reached new code to the corpus. The exit code is 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import base64
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORPUS, WORK = ROOT / "tests/fuzz/corpus", ROOT / "out/fuzz"
MAX_INPUT_BYTES, MEMORY_LIMIT_MB, INPUT_TIMEOUT_S = 4096, 2048, 20
KEPT_BYTES = 200_000
"""Limit for a target's corpus in the repository, in bytes. The smallest inputs that fit are kept."""


def main() -> int:
    arguments = _arguments()
    sys.path.insert(0, str(ROOT / "tests"))
    if arguments.replay:
        from support.fuzz.targets import TARGETS

        TARGETS[arguments.targets[0]](Path(arguments.replay).read_bytes())
        return 0
    if arguments.child:
        _search(arguments.targets[0], arguments.seconds)
    found = [name for name in arguments.targets or _all_targets() if not _run(name, arguments)]
    print(f"found something in: {', '.join(found)}" if found else "nothing found")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--replay", metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _all_targets() -> list[str]:
    from support.fuzz.targets import TARGETS

    return list(TARGETS)


def _run(name: str, arguments: argparse.Namespace) -> bool:
    """Search in a child process, which ends at the first finding. Return True if there was none."""
    from support.fuzz.seeds import seeds

    directory = WORK / name
    directory.mkdir(parents=True, exist_ok=True)
    for data in [*seeds(name), *read_corpus(name)]:
        (directory / f"{hash(data) & 0xFFFFFFFFFFFF:012x}").write_bytes(data)
    print(f"{name}: {arguments.seconds} s from {len(list(directory.iterdir()))} inputs", flush=True)
    command = [sys.executable, __file__, name, "--child", "--seconds", str(arguments.seconds)]
    is_clean = subprocess.run(command, cwd=WORK, check=False).returncode == 0
    if arguments.keep:
        _keep(name)
    return is_clean


def _search(name: str, seconds: int) -> None:
    """Search until the given time has passed or there is a finding.

    Never return: atheris ends the process.
    """
    import atheris

    with atheris.instrument_imports(include=["oncelog"]):
        from support.fuzz.targets import TARGETS

    options = {
        "max_total_time": seconds,
        "max_len": MAX_INPUT_BYTES,
        "rss_limit_mb": MEMORY_LIMIT_MB,
        "timeout": INPUT_TIMEOUT_S,
        "artifact_prefix": f"{WORK}/{name}-",
        "print_final_stats": 1,
        "verbosity": 0,
    }
    command = [sys.argv[0], str(WORK / name), *(f"-{key}={value}" for key, value in options.items())]
    atheris.Setup(command, TARGETS[name])
    atheris.Fuzz()


def read_corpus(name: str) -> list[bytes]:
    """Return the inputs in the repository's corpus for a target."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def _keep(name: str) -> None:
    inputs = {path.read_bytes() for path in (WORK / name).iterdir()}
    lines, size = [], 0
    for data in sorted(inputs, key=lambda data: (len(data), data)):
        line = base64.b64encode(data).decode()
        size += len(line) + 1
        if size > KEPT_BYTES:
            break
        lines.append(line)
    CORPUS.mkdir(parents=True, exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
