"""Compile the two parts that [tool.oncelog] in pyproject.toml names, for this tree and this Python.

`c_sources` are extension modules in C (seconds). `compiled` are modules for mypyc (about a minute), which
`--c-only` leaves out. The results are in src/oncelog/_compiled_*, which Git ignores and only a wheel of
tools/wheel_hook.py contains. A part whose sources have not changed is left as it is. Without a C compiler,
Python.h or mypyc, one line says so and the exit code is 1. `--clean` removes the results. See
docs/internals/compiled.md.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "oncelog"
GROUP = "oncelog_compiled"
"""Name of the library with the code of all modules that mypyc compiles. Mypyc appends `__mypyc` to it."""
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
Sources = list[tuple[int, int, str]]
"""For each source of a part: modification time in ns, size in bytes, and path in the package."""

BUILD_C = """\
import os, sys
from setuptools import Extension, setup
root, *names = sys.argv[1:]
def source(name):
    package, _, module = name.rpartition(".")
    return os.path.join(root, *package.split("."), module + ".c")
extra = [] if sys.platform == "win32" else ["-O3"]
extensions = [Extension(name, [source(name)], extra_compile_args=extra) for name in names]
setup(name="oncelog-c", packages=[], ext_modules=extensions,
      script_args=["build_ext", "--build-lib=lib", f"--parallel={os.cpu_count() or 1}"])
"""
BUILD_MYPYC = """\
import os, sys
from mypyc.build import mypycify
from setuptools import setup
group, *paths = sys.argv[1:]
options = ["--strict", "--config-file=", "--ignore-missing-imports", "--no-warn-unused-ignores"]
extensions = mypycify([*options, *paths], opt_level="2", multi_file=True, group_name=group)
setup(name=group, packages=[], ext_modules=extensions,
      script_args=["build_ext", "--build-lib=lib", f"--parallel={os.cpu_count() or 1}"])
"""


@dataclass(frozen=True)
class Part:
    """A part to compile: its modules, their sources, and the script that compiles them."""

    name: str
    modules: list[str]
    """Names of the extension modules. The build must leave all of them in the folder `lib`."""
    requires: list[str]
    """The Python packages that the build needs."""
    script: str
    arguments: list[str]
    find_sources: Callable[[], Sources]
    notice: str

    @property
    def target(self) -> Path:
        """Return the directory for the compiled modules and the manifest."""
        return PACKAGE / f"_compiled_{self.name}"

    def manifest(self, sources: Sources) -> str:
        """Return the manifest that oncelog/compiled.py reads."""
        lines = [f"suffix\t{SUFFIX}"]
        lines += [f"source\t{modified_ns}\t{size}\t{path}" for modified_ns, size, path in sources]
        lines += [f"module\t{name}" for name in self.modules]
        return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", action="store_true", help="remove the extension modules")
    parser.add_argument("--c-only", action="store_true", help="compile only the extension modules in C")
    arguments = parser.parse_args()
    parts = [c_part()] if arguments.c_only else [c_part(), mypyc_part()]
    if arguments.clean:
        for part in parts:
            shutil.rmtree(part.target, ignore_errors=True)
        return 0
    return 0 if all([compile_part(part) for part in parts]) else 1


def compile_part(part: Part) -> bool:
    """Compile a part if its sources have changed. Return False if a tool is missing or the build fails."""
    sources = part.find_sources()
    if part.manifest(sources) == current_manifest(part):
        return True
    missing = missing_tool(part.requires)
    if missing is not None:
        print(f"compile: {missing} is missing, so Oncelog runs without {part.notice}", file=sys.stderr)
        return False
    print(f"compile: compiling {part.notice}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oncelog-compile-") as scratch:
        if not build(part, Path(scratch)):
            return False
        if part.find_sources() != sources:
            print("compile: a source changed meanwhile; run it again", file=sys.stderr)
            return False
        install(part, Path(scratch) / "lib", part.manifest(sources))
    print(f"compile: done in {time.monotonic() - started:.0f} s")
    return True


def c_part() -> Part:
    """Return the part with the extension modules in C."""
    names = [dotted(path) for path in configuration()["c_sources"]]
    return Part(
        "c",
        names,
        ["setuptools"],
        BUILD_C,
        [str(SOURCE), *names],
        lambda: c_sources_of(names),
        "row loops in C",
    )


def mypyc_part() -> Part:
    """Return the part with the modules that mypyc compiles."""
    names = [dotted(path) for path in configuration()["compiled"]]
    paths = [str(file) for name in names if (file := file_of(name)) is not None]
    return Part(
        "mypyc",
        [f"{GROUP}__mypyc", *names],
        ["mypy", "mypyc", "setuptools"],
        BUILD_MYPYC,
        [GROUP, *paths],
        lambda: sources_of(names),
        f"{len(names)} modules compiled by mypyc (about a minute)",
    )


def configuration() -> dict[str, Any]:
    """Return [tool.oncelog] of pyproject.toml."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        content: dict[str, Any] = tomllib.load(file)["tool"]["oncelog"]
    return content


def dotted(path: str) -> str:
    """Return the name of the module at a path in the package."""
    return "oncelog." + path.replace("/", ".")


def file_of(name: str) -> Path | None:
    """Return the source of a module or package of Oncelog, or None if the name is not a module."""
    path = SOURCE.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def c_sources_of(names: list[str]) -> Sources:
    """Return the C sources, all headers, and the Python modules whose functions the C code replaces.

    `wire/_records.c` replaces functions of `wire/records.py`. `wire/_fetched_records.c` also replaces some
    of `wire/columns.py`, which imports it. Guard:
    test_the_manifest_of_the_row_loops_names_each_c_file_and_the_python_files_that_it_replaces.
    """
    files = {*PACKAGE.rglob("*.h")}
    for name in names:
        path = SOURCE.joinpath(*name.split("."))
        files |= {path.with_suffix(".c"), path.with_name(path.name.removeprefix("_") + ".py")}
    imports = tuple(form.encode() for name in names for form in (f"import {name} ", f"from {name} "))
    for file in PACKAGE.rglob("*.py"):
        content = file.read_bytes()
        if any(statement in content for statement in imports):
            files.add(file)
    return facts_of(files)


def sources_of(names: list[str]) -> Sources:
    """Return the modules' sources and every source that these import.

    Compiled code relies on the types of the modules that it imports, so changes of those modules count as
    well. The package `oncelog` itself is left out, because it imports all modules lazily.
    """
    files: set[Path] = set()
    waiting = list(names)
    while waiting:
        file = file_of(waiting.pop())
        if file is None or file in files or file == PACKAGE / "__init__.py":
            continue
        files.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names if alias.name.startswith("oncelog.")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("oncelog"):
                waiting.append(node.module or "")
                waiting += [f"{node.module}.{alias.name}" for alias in node.names]
    return facts_of(files)


def facts_of(files: set[Path]) -> Sources:
    """Return modification time, size and path of files of the package, in the order of their paths."""
    return [
        (found.st_mtime_ns, found.st_size, file.relative_to(PACKAGE).as_posix())
        for file in sorted(files)
        if (found := file.stat())
    ]


def current_manifest(part: Part) -> str | None:
    """Return the manifest of an earlier build, or None."""
    try:
        return (part.target / "manifest.txt").read_text()
    except FileNotFoundError:
        return None


def missing_tool(packages: list[str]) -> str | None:
    """Return the tool that this machine lacks for a build, or None."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"the C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h (Debian, Ubuntu: sudo apt-get install python3-dev)"
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"{absent[0]} (`make setup` installs it)" if absent else None


def build(part: Part, scratch: Path) -> bool:
    """Build the extension modules in `scratch`/lib. If it fails, print the end of its output."""
    run = subprocess.run(
        [sys.executable, "-c", part.script, *part.arguments],
        cwd=scratch,
        env={**os.environ, "MYPYPATH": str(SOURCE), "ONCELOG_PURE_PYTHON": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode:
        print("\n".join(run.stdout.splitlines()[-20:]), file=sys.stderr)
        print(f"compile: failed, so Oncelog runs without {part.notice}", file=sys.stderr)
    return run.returncode == 0


def install(part: Part, built: Path, manifest: str) -> None:
    """Replace the result of an earlier build. The new result appears in one step, by a rename."""
    new = Path(tempfile.mkdtemp(prefix="_compiled.", dir=PACKAGE))
    try:
        for name in part.modules:
            shutil.copy(built.joinpath(*name.split(".")).with_suffix(SUFFIX), new / f"{name}{SUFFIX}")
        (new / "manifest.txt").write_text(manifest)
        new.chmod(0o755)
        shutil.rmtree(part.target, ignore_errors=True)
        new.rename(part.target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
