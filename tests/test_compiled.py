"""The choice between sources and compiled modules (src/oncelog/compiled.py), and the equality of their
behaviour.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from support.tool import load_tool

from oncelog import compiled

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(900)
IN_C = "pure Python with row loops in C"
IS_COMPILED = "import sys, oncelog.wire.records as m; sys.exit(not m.__file__.endswith('.so'))"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the files that `make compile` reads, without compiled modules."""
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("_compiled*", "__pycache__", "spark")
    )
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def _python(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "ONCELOG_PURE_PYTHON"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": str(tree / "src"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )


def _version(tree: Path, **environment: str) -> str:
    command = "from oncelog.cli.main import main; main()"
    return _python(tree, "-c", command, "--version", **environment).stdout.strip().split(", ", 2)[-1]


def test_a_tree_in_which_nothing_was_compiled_runs_the_sources(tree: Path) -> None:
    assert _version(tree) == "pure Python"


def test_an_edited_source_switches_all_compiled_modules_off_and_the_version_says_so(tree: Path) -> None:
    package = tree / "src" / "oncelog"
    edited = (package / "types.py").stat()
    for part in compiled.PARTS:
        directory = Path(compiled.directory_of(str(package), part))
        directory.mkdir()
        (directory / compiled.MANIFEST).write_text(
            f"suffix\t{EXTENSION_SUFFIXES[0]}\n"
            f"source\t{edited.st_mtime_ns - 1}\t{edited.st_size}\ttypes.py\n"
            "module\toncelog.types\n"
        )
    expected = "pure Python, because types.py has changed; `make compile` compiles again"
    assert _version(tree) == expected
    assert _version(tree, ONCELOG_PURE_PYTHON="1") == "pure Python, because ONCELOG_PURE_PYTHON is set"
    assert _version(tree, ONCELOG_PURE_PYTHON="mypyc") == expected, "the other part was refused for itself"


@pytest.mark.parametrize(
    ("suffix", "later_ns", "longer", "path", "reason"),
    [
        (EXTENSION_SUFFIXES[0], 0, 0, "a.py", None),
        (EXTENSION_SUFFIXES[0], 1, 0, "a.py", "a.py has changed"),
        (EXTENSION_SUFFIXES[0], 0, 1, "a.py", "a.py has changed"),
        (EXTENSION_SUFFIXES[0], 0, 0, "b.py", "b.py is gone"),
        (EXTENSION_SUFFIXES[0], None, 0, "a.py", None),
        (EXTENSION_SUFFIXES[0], None, 1, "a.py", "a.py has changed"),
        (".cpython-39-none.so", 0, 0, "a.py", "another Python compiled the modules"),
    ],
)
def test_compiled_modules_run_only_if_every_source_is_the_same(
    tmp_path: Path, suffix: str, later_ns: int | None, longer: int, path: str, reason: str | None
) -> None:
    source = tmp_path / "a.py"
    source.write_text("x = 1\n")
    found = source.stat()
    # The installation of a wheel changes file times, so the manifest of a wheel has 0 for each time.
    time_ns = 0 if later_ns is None else found.st_mtime_ns + later_ns
    sources = [(time_ns, found.st_size + longer, path)]
    assert compiled.difference(str(tmp_path), suffix, sources) == reason


def test_the_manifest_names_each_compiled_module_and_the_sources_that_it_imports(tmp_path: Path) -> None:
    tool = load_tool("compile")
    part = tool.mypyc_part()
    names, sources = part.modules[1:], part.find_sources()
    paths = {path for _, _, path in sources}
    assert {name.removeprefix("oncelog.").replace(".", "/") + ".py" for name in names} <= paths
    assert "errors.py" in paths, "compiled code relies on its types"
    (tmp_path / compiled.MANIFEST).write_text(part.manifest(sources))
    read = compiled.read_manifest(str(tmp_path))
    assert read == (EXTENSION_SUFFIXES[0], sources, {"oncelog_compiled__mypyc", *names})


def test_the_manifest_of_the_row_loops_names_each_c_file_and_the_python_files_that_it_replaces() -> None:
    part = load_tool("compile").c_part()
    paths = {path for _, _, path in part.find_sources()}
    assert {"wire/_records.c", "wire/records.py", "wire/fetched_records.py", "wire/columns.py"} <= paths
    assert "oncelog.wire._records" in part.modules


@pytest.mark.parametrize(
    ("running", "reasons", "form"),
    [
        ([], [], "pure Python"),
        (["c"], [], IN_C),
        (["mypyc", "c"], [], "compiled"),
        (["mypyc"], [], "compiled, without row loops in C"),
        (["c"], ["a has changed"], f"{IN_C}, because a has changed; `make compile` compiles again"),
    ],
)
def test_the_version_names_the_parts_that_run(running: list[str], reasons: list[str], form: str) -> None:
    assert compiled.describe(running, reasons) == form


def test_a_machine_without_a_compiler_is_told_so_in_one_line(tree: Path) -> None:
    result = _python(tree, str(tree / "tools" / "compile.py"), "--c-only", CC="no-such-compiler")
    assert result.returncode == 1
    assert (
        result.stderr
        == "compile: the C compiler (no-such-compiler) is missing, so Oncelog runs without row loops in C\n"
    )


BOTH_FORMS = """
import hashlib, random
from oncelog.wire.batch import build_batch
from oncelog.wire.records import NewRecord, decode_records
from oncelog.wire.header import HEADER_BYTES, read_header, write_crc

rng, digest = random.Random(18), hashlib.sha256()

def note(*values):
    digest.update(repr(values).encode())

def data():
    return rng.choice([None, b"", rng.randbytes(rng.choice([1, 63, 64, 127, 128, 8191, 8192]))])

for number in range(3000):
    headers = tuple((rng.choice(["", "h", "\\u00e9" * 40]), data()) for _ in range(rng.choice([0, 0, 1, 3])))
    records = [NewRecord(rng.randrange(2**41), data(), data(), headers) for _ in range(rng.choice([1, 2, 5]))]
    batch = bytearray(build_batch(records))
    note(bytes(batch), tuple(read_header(batch)), decode_records(batch))
    for _ in range(4):
        broken = bytearray(batch)
        for _ in range(rng.choice([1, 1, 3])):
            byte = rng.choice([0, 1, 3, 127, 128, 255, rng.randrange(256)])
            broken[rng.randrange(HEADER_BYTES, len(broken))] = byte
        write_crc(broken, 0, len(broken))
        try:
            note(decode_records(broken))
        except Exception as error:
            note(type(error).__name__, str(error))
print(digest.hexdigest())
"""


@pytest.mark.full("starts a compiler")
def test_the_row_loops_in_c_give_the_same_bytes_and_the_same_errors(tree: Path) -> None:
    tool = str(tree / "tools" / "compile.py")
    warnings = "-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -Wno-sign-compare"
    built = _python(tree, tool, "--c-only", CFLAGS=f"{warnings} -Werror")
    if "is missing" in built.stderr:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    assert _version(tree) == IN_C
    assert _python(tree, "-c", IS_COMPILED).returncode == 1
    again = _python(tree, tool, "--c-only")
    assert (again.returncode, again.stdout) == (0, ""), "nothing has changed, so nothing is compiled"

    forms = ({"PYTHONMALLOC": "debug"}, {"ONCELOG_PURE_PYTHON": "1"})
    results = [_python(tree, "-c", BOTH_FORMS, **form) for form in forms]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert results[0].stdout == results[1].stdout

    with open(tree / "src" / "oncelog" / "wire" / "records.py", "a") as source:
        source.write("\n")
    assert _version(tree).startswith("pure Python, because wire/records.py has changed")


@pytest.mark.full("starts a compiler")
def test_a_wheel_with_row_loops_in_c_runs_them_where_it_is_unpacked(tree: Path, tmp_path: Path) -> None:
    (tree / "docs").mkdir()
    for name in ("README.md", "LICENSE", "docs/alerts.yml", "docs/grafana.json"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    environment = {**os.environ, "ONCELOG_BUILD_C": "1"}
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if "is missing" in built.stderr:
        pytest.skip(built.stderr.strip().splitlines()[-1])
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    unpacked = tmp_path / "unpacked" / "src"
    shutil.unpack_archive(wheel, unpacked, "zip")
    assert _version(tmp_path / "unpacked") == IN_C


@pytest.mark.full("compiles all modules: 40 s")
def test_both_forms_give_the_same_bytes_and_the_same_errors(tree: Path) -> None:
    tool = str(tree / "tools" / "compile.py")
    built = _python(tree, tool)
    assert built.returncode == 0, built.stderr
    assert _version(tree) == "compiled"
    assert _python(tree, "-c", IS_COMPILED).returncode == 0
    assert _python(tree, "-OO", "-c", IS_COMPILED).returncode == 0
    assert _python(tree, "-c", IS_COMPILED, ONCELOG_PURE_PYTHON="1").returncode == 1
    again = _python(tree, tool)
    assert (again.returncode, again.stdout) == (0, ""), "nothing has changed, so nothing is compiled"

    results = [_python(tree, "-c", BOTH_FORMS, **form) for form in ({}, {"ONCELOG_PURE_PYTHON": "1"})]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr + results[1].stderr
    assert results[0].stdout == results[1].stdout

    with open(tree / "src" / "oncelog" / "errors.py", "a") as source:
        source.write("\n")
    assert _version(tree).startswith(f"{IN_C}, because errors.py has changed")
    assert _python(tree, "-c", IS_COMPILED).returncode == 1
