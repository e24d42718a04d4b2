"""Makes the collection of tests cheaper. Each process of xdist collects all of them.

In a fresh clone, pytest rewrites the asserts of every test module, and writes the result beside the bytecode.
That takes more processor time than the other work of a collection, and each process would do it for all
modules. With this plugin, each process first rewrites its share of the modules. The collected tests are kept
until the end, so it would be useless to search them for garbage.

The addopts in pyproject.toml name this plugin, so that it runs before anything imports Oncelog.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest

# These names are not public. If a version of pytest renames one, every run fails immediately.
from _pytest.assertion import rewrite as assertions


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let Python itself load the modules of Oncelog.

    pytest rewrites the asserts of all modules of a package that has a plugin for pytest. For Oncelog, that
    takes processor time in each process, and the asserts would run even under `python -OO`.
    """
    # test_pytest_leaves_the_modules_of_oncelog_to_python fails without this function.
    # pytest calls it when it loads this plugin, which is before it loads the plugin of Oncelog.
    hook = pluginmanager.rewrite_hook
    if isinstance(hook, assertions.AssertionRewritingHook):
        hook._must_rewrite.discard("oncelog")
        hook._marked_for_rewrite_cache.clear()


class Collection:
    """Divides the rewriting of asserts among the processes, and stops the garbage collector during the
    collection.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        worker = getattr(session.config, "workerinput", None)
        if worker is not None and not sys.dont_write_bytecode:
            number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
            rewrite(session.config, modules_in(session.config.args)[number % count :: count])
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()


def modules_in(arguments: Iterable[str]) -> list[Path]:
    """Return the test modules in those arguments of pytest that are directories."""
    directories = [path for path in map(Path, arguments) if path.is_dir()]
    return sorted({module.absolute() for path in directories for module in path.rglob("test_*.py")})


def rewrite(config: pytest.Config, modules: Sequence[Path]) -> None:
    """Rewrite the asserts of the modules whose bytecode with rewritten asserts is missing or out of date, and
    write it.
    """
    state = config.stash[assertions.assertstate_key]
    for path in modules:
        bytecode = assertions.get_cache_dir(path) / (path.name.removesuffix(".py") + assertions.PYC_TAIL)
        if assertions._read_pyc(path, bytecode, state.trace) is None:
            bytecode.parent.mkdir(exist_ok=True)
            digest, code = assertions._rewrite_test(path, config)
            assertions._write_pyc(state, code, digest, bytecode)
