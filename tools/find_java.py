"""Check that Spark finds Java 17 or newer. If it does not, print how to install Java and fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

NEEDED = 17

HOW_TO_GET_IT = f"""\
setup: no Java {NEEDED} or newer found. Spark needs it; the broker and the clients do not.
  Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless
  Fedora:         sudo dnf install java-21-openjdk-headless
  macOS:          brew install openjdk@17
  then, if it is not on PATH: export JAVA_HOME=/path/to/it"""


def java_version(command: str) -> int | None:
    """Return the major version of a `java` command.

    Return None if the command cannot be run or prints no version.
    """
    try:
        run = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', run.stderr + run.stdout)
    if found is None:
        return None
    major = int(found[1])
    # The versions 1.8 and 8 both mean Java 8.
    return int(found[2] or 0) if major == 1 else major


def find_java() -> tuple[str, int] | None:
    """Return the command and the version of the Java that Spark uses (JAVA_HOME before PATH).

    Return None if that Java is missing or too old.
    """
    home = os.environ.get("JAVA_HOME")
    command = os.path.join(home, "bin", "java") if home else shutil.which("java")
    version = java_version(command) if command else None
    return (command, version) if command and version and version >= NEEDED else None


def main() -> int:
    found = find_java()
    if found is None:
        print(HOW_TO_GET_IT, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
