"""Chooses, once per process, between the sources and the extension modules that were compiled from them.

There are two parts. Each has its own directory `_compiled_*` in this package, with a manifest:

    c       the row loops in C, beside the Python module that they replace (`make setup`)
    mypyc   the hot modules, compiled by mypyc from the same source (`make compile`)

A manifest has the size and the modification time of each source of its part. If all of them are still the
same, and this Python has the manifest's suffix, `select` adds a finder for the part's extension modules,
unless ONCELOG_PURE_PYTHON leaves it out. Otherwise the whole process runs without the part: an edit always
has effect, and no process mixes old and new code. Without a manifest, `select` adds no finder.

The manifest is text with one entry per line. Tabs separate the fields:

    suffix   .cpython-311-x86_64-linux-gnu.so
    source   1764000000000000000   12345   wire/records.py
    module   oncelog.wire.records

The files of a wheel get other modification times when it is installed, so a time of 0 matches any time.

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
PARTS = ("mypyc", "c")
MANIFEST = "manifest.txt"

Manifest = tuple[str, list[tuple[int, int, str]], frozenset[str]]
"""The suffix, the sources (modification time in ns, size, path) and the modules of a manifest."""

form = "pure Python"
"""A description of the code that this process runs, for `oncelog --version`. `select` sets it."""


class _Finder:
    """An import finder for the extension modules of one part. It leaves all other modules to the usual
    finders.
    """

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
    """Add the finders of the parts that may run, and set `form`. Call it before any other module of the
    package is imported.

    ONCELOG_PURE_PYTHON=c or =mypyc leaves out that part. Any other value, except 0 and the empty text, leaves
    out both.
    """
    global form
    refused = os.environ.get("ONCELOG_PURE_PYTHON", "0")
    if refused not in ("", "0", *PARTS):
        form = "pure Python, because ONCELOG_PURE_PYTHON is set"
        return
    running, reasons = [], []
    for part in PARTS:
        if part == refused:
            continue
        usable = read_usable(part)
        if isinstance(usable, tuple):
            suffix, _, modules = usable
            sys.meta_path.insert(0, _Finder(directory_of(PACKAGE, part), suffix, modules))
            running.append(part)
        elif usable is not None and usable not in reasons:
            reasons.append(usable)
    form = describe(running, reasons)


def read_usable(part: str) -> Manifest | str | None:
    """Return a part's manifest, or as a text why its extension modules must not run. Return None if nothing
    was compiled.
    """
    manifest = read_manifest(directory_of(PACKAGE, part))
    if manifest is None:
        return None
    suffix, sources, _ = manifest
    return difference(PACKAGE, suffix, sources) or manifest


def describe(running: list[str], reasons: list[str]) -> str:
    """Return the text of `form`: the parts that run, and the reasons why the other parts do not."""
    text = {
        (): "pure Python",
        ("c",): "pure Python with row loops in C",
        ("mypyc",): "compiled, without row loops in C",
    }.get(tuple(running), "compiled")
    if not reasons:
        return text
    return f"{text}, because {' and '.join(reasons)}; `make compile` compiles again"


def directory_of(package: str, part: str) -> str:
    """Return the directory of a part's extension modules."""
    return os.path.join(package, f"_compiled_{part}")


def read_manifest(directory: str) -> Manifest | None:
    """Return the manifest in a directory. Return None if there is none, because nothing was compiled."""
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
    """Return why the extension modules must not run, as a clause such as "wire/records.py has changed".
    Return None if they may run.
    """
    if suffix != EXTENSION_SUFFIXES[0]:
        return "another Python compiled the modules"
    for modified_ns, size_bytes, path in sources:
        try:
            found = os.stat(os.path.join(package, path))
        except OSError:
            return f"{path} is gone"
        if found.st_mtime_ns != modified_ns != 0 or found.st_size != size_bytes:
            return f"{path} has changed"
    return None
