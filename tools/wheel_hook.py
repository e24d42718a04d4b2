"""A build hook of hatchling that puts the row loops in C into the wheel, if ONCELOG_BUILD_C=1.

Without it, the wheel has only sources and runs on every platform. See docs/internals/compiled.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledHook(BuildHookInterface[Any]):
    """The hook that adds `oncelog/_compiled_c` to the wheel."""

    def dependencies(self) -> list[str]:
        """Return the packages that the build needs besides hatchling."""
        return ["setuptools"] if is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the row loops for the Python that builds the wheel, and give the wheel this Python's tag.

        An editable wheel gets nothing: `make setup` compiles for a source tree.
        """
        if version == "editable" or not is_wanted():
            return
        tool = compile_tool(Path(self.root))
        part = tool.c_part()
        missing = tool.missing_tool(part.requires)
        if missing is not None:
            raise RuntimeError(f"ONCELOG_BUILD_C=1, but {missing} is missing")
        self._scratch = tempfile.TemporaryDirectory(prefix="oncelog-wheel-")
        scratch = Path(self._scratch.name)
        if not tool.build(part, scratch):
            raise RuntimeError("ONCELOG_BUILD_C=1, but the C compiler failed")
        # Write 0 as the time of each source: in a manifest, 0 matches any time, and an installation changes
        # the times of files.
        sources = [(0, size, path) for _, size, path in part.find_sources()]
        (scratch / "manifest.txt").write_text(part.manifest(sources))
        files = {scratch / "manifest.txt": "manifest.txt"}
        for name in part.modules:
            built = scratch.joinpath("lib", *name.split(".")).with_suffix(tool.SUFFIX)
            files[built] = f"{name}{tool.SUFFIX}"
        for file, name in files.items():
            build_data["force_include"][str(file)] = f"oncelog/{part.target.name}/{name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary directory of the build."""
        scratch = getattr(self, "_scratch", None)
        if scratch is not None:
            scratch.cleanup()


def is_wanted() -> bool:
    """Return True if the environment asks for a wheel with extension modules."""
    return os.environ.get("ONCELOG_BUILD_C", "0") not in ("", "0")


def compile_tool(root: Path) -> Any:
    """Return tools/compile.py as a module."""
    spec = importlib.util.spec_from_file_location("oncelog_compile_tool", root / "tools" / "compile.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool  # dataclass() looks the module up in sys.modules
    spec.loader.exec_module(tool)
    return tool
