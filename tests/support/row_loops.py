"""Load the extension modules in C, so that tests can compare them with the Python functions that they
replace.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from typing import Any

import pytest

from oncelog import compiled


@functools.cache
def c_module(name: str) -> Any:
    """Return an extension module of this tree, even if ONCELOG_PURE_PYTHON is set.

    Skip the test if the module was not compiled from the present sources. `make setup` compiles it.
    """
    if name in sys.modules:
        return sys.modules[name]
    directory = compiled.directory_of(compiled.PACKAGE, "c")
    usable = compiled.read_usable("c")
    if usable is None:
        pytest.skip("the row loops in C were not compiled (`make setup` does it if there is a C compiler)")
    if isinstance(usable, str):
        pytest.skip(f"the row loops in C are old: {usable}")
    file = os.path.join(directory, name + EXTENSION_SUFFIXES[0])
    spec = importlib.util.spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
