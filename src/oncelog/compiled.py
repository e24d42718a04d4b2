"""Chooses, once per process, between the sources and the extension modules that mypyc compiled from them.

`make compile` writes the extension modules and a manifest to `_compiled` in this package. The manifest has
the size and the modification time of each source that took part. If all sources are still the same, `select`
adds a finder for the extension modules. Otherwise the whole process runs the sources: an edit always has
effect, and no process mixes old and new code. Without a manifest nothing is compiled and nothing is added.

The manifest is text, one entry a line, fields separated by tabs:

    suffix   .cpython-311-x86_64-linux-gnu.so
    source   1764000000000000000   12345   wire/records.py
    module   oncelog.wire.records

Guard: tests/test_compiled.py. See docs/internals/compiled.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

PACKAGE = os.path.dirname(__file__)
DIRECTORY = os.path.join(PACKAGE, "_compiled")
MANIFEST = "manifest.txt"

form = "pure Python"
"""The code that this process runs, as `oncelog --version` prints it."""


class _Finder:
    """Finds the extension modules of a manifest. All other modules are left to the usual finders."""

    def __init__(self, directory: str, suffix: str, modules: frozenset[str]) -> None:
        self._directory = directory
        self._suffix = suffix
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a compiled module, or None for any other name."""
        if name not in self._modules:
            return None
        file = os.path.join(self._directory, name + self._suffix)
        return spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))


def select() -> None:
    """Decide which form this process runs. Call this before any other module of the package is imported."""
    global form
    if os.environ.get("ONCELOG_PURE_PYTHON", "0") not in ("", "0"):
        form = "pure Python, because ONCELOG_PURE_PYTHON is set"
        return
    manifest = read_manifest(DIRECTORY)
    if manifest is None:
        return
    suffix, sources, modules = manifest
    reason = difference(PACKAGE, suffix, sources)
    if reason is not None:
        form = f"pure Python, because {reason}; `make compile` compiles again"
        return
    sys.meta_path.insert(0, _Finder(DIRECTORY, suffix, modules))
    form = "compiled"


def read_manifest(directory: str) -> tuple[str, list[tuple[int, int, str]], frozenset[str]] | None:
    """Return the suffix, the sources (modification time in ns, size, path) and the modules of a manifest.

    None if there is no manifest, as where nothing was compiled.
    """
    suffix, sources, modules = "", list[tuple[int, int, str]](), list[str]()
    try:
        with open(os.path.join(directory, MANIFEST), encoding="utf-8") as file:
            for line in file:
                kind, *values = line.rstrip("\n").split("\t")
                if kind == "source":
                    sources.append((int(values[0]), int(values[1]), values[2]))
                elif kind == "module":
                    modules.append(values[0])
                else:
                    suffix = values[0]
    except FileNotFoundError:
        return None
    return suffix, sources, frozenset(modules)


def difference(package: str, suffix: str, sources: list[tuple[int, int, str]]) -> str | None:
    """Return why extension modules must not run here, as a clause, or None if they may."""
    if suffix != EXTENSION_SUFFIXES[0]:
        return "another Python compiled the modules"
    for modified_ns, size_bytes, path in sources:
        try:
            found = os.stat(os.path.join(package, path))
        except OSError:
            return f"{path} is gone"
        if found.st_mtime_ns != modified_ns or found.st_size != size_bytes:
            return f"{path} has changed"
    return None
