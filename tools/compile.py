"""Compile the modules that [tool.oncelog] in pyproject.toml names, with mypyc, for this tree and this Python.

The result is in src/oncelog/_compiled, which Git ignores and no wheel contains. Nothing is done if no source
has changed. Without a C compiler, Python.h or mypyc, one line says so and the exit code is 1. `--clean`
removes the result. See docs/internals/compiled.md.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "oncelog"
TARGET = PACKAGE / "_compiled"
GROUP = "oncelog_compiled"
"""Name of the library that has the code of all modules; mypyc adds `__mypyc`."""
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

BUILD = """\
import sys
from mypyc.build import mypycify
from setuptools import setup
group, *paths = sys.argv[1:]
options = ["--strict", "--config-file=", "--ignore-missing-imports", "--no-warn-unused-ignores"]
extensions = mypycify([*options, *paths], opt_level="2", multi_file=True, group_name=group)
setup(name=group, packages=[], ext_modules=extensions,
      script_args=["build_ext", "--build-lib=lib", f"--parallel={__import__('os').cpu_count() or 1}"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", action="store_true", help="remove the extension modules")
    if parser.parse_args().clean:
        shutil.rmtree(TARGET, ignore_errors=True)
        return 0
    names = module_names()
    sources = sources_of(names)
    if manifest_text(names, sources) == current_manifest():
        return 0
    missing = missing_tool()
    if missing is not None:
        print(f"compile: {missing} is missing, so Oncelog runs as pure Python", file=sys.stderr)
        return 1
    print(f"compile: compiling {len(names)} modules with mypyc (about a minute)", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oncelog-compile-") as scratch:
        if not build(names, Path(scratch)):
            return 1
        if sources_of(names) != sources:
            print("compile: a source changed meanwhile; run it again", file=sys.stderr)
            return 1
        install(names, Path(scratch) / "lib", manifest_text(names, sources))
    print(f"compile: done in {time.monotonic() - started:.0f} s")
    return 0


def module_names() -> list[str]:
    """Return the dotted names of the modules to compile."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        paths: list[str] = tomllib.load(file)["tool"]["oncelog"]["compiled"]
    return ["oncelog." + path.replace("/", ".") for path in paths]


def file_of(name: str) -> Path | None:
    """Return the source of a module or package of Oncelog, or None if the name is no module."""
    path = SOURCE.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def sources_of(names: list[str]) -> list[tuple[int, int, str]]:
    """Return time in ns, size and path of the modules' sources and of every source that these import.

    Compiled code relies on the types of what it imports, so a change there counts as well. `oncelog` itself
    is left out: it imports everything, lazily.
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
    return [
        (found.st_mtime_ns, found.st_size, file.relative_to(PACKAGE).as_posix())
        for file in sorted(files)
        if (found := file.stat())
    ]


def manifest_text(names: list[str], sources: list[tuple[int, int, str]]) -> str:
    """Return the manifest that oncelog/compiled.py reads."""
    lines = [f"suffix\t{SUFFIX}"]
    lines += [f"source\t{modified_ns}\t{size}\t{path}" for modified_ns, size, path in sources]
    lines += [f"module\t{name}" for name in (f"{GROUP}__mypyc", *names)]
    return "\n".join(lines) + "\n"


def current_manifest() -> str | None:
    try:
        return (TARGET / "manifest.txt").read_text()
    except FileNotFoundError:
        return None


def missing_tool() -> str | None:
    """Return what this machine lacks for a build, or None."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"the C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h (Debian, Ubuntu: sudo apt-get install python3-dev)"
    absent = [name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None]
    return f"{absent[0]} (`make setup` installs it)" if absent else None


def build(names: list[str], scratch: Path) -> bool:
    """Build the extension modules in `scratch`/lib. If it fails, print the end of its output."""
    paths = [str(file) for name in names if (file := file_of(name)) is not None]
    run = subprocess.run(
        [sys.executable, "-c", BUILD, GROUP, *paths],
        cwd=scratch,
        env={**os.environ, "MYPYPATH": str(SOURCE), "ONCELOG_PURE_PYTHON": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode:
        print("\n".join(run.stdout.splitlines()[-20:]), file=sys.stderr)
        print("compile: failed, so Oncelog runs as pure Python", file=sys.stderr)
    return run.returncode == 0


def install(names: list[str], built: Path, manifest: str) -> None:
    """Replace the result of an earlier build in one step each way: a process sees all of it or nothing."""
    new = Path(tempfile.mkdtemp(prefix="_compiled.", dir=PACKAGE))
    try:
        for name in (f"{GROUP}__mypyc", *names):
            shutil.copy(built.joinpath(*name.split(".")).with_suffix(SUFFIX), new / f"{name}{SUFFIX}")
        (new / "manifest.txt").write_text(manifest)
        new.chmod(0o755)
        shutil.rmtree(TARGET, ignore_errors=True)
        new.rename(TARGET)
    finally:
        shutil.rmtree(new, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
