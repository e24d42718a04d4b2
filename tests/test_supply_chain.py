"""Dependencies: imported ones are declared, the set-up installs by hash, and builds with pinned tools."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from oncelog_devtools import apache_kafka

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-build.lock")
OF_OTHERS = {
    "attrs": "jsonschema",
    "jsonschema-specifications": "jsonschema",
    "markupsafe": "jinja2",
    "py4j": "pyspark",
    "pytest": "only pytest imports the plugin",
    "referencing": "jsonschema",
}
"""Packages that are imported without being declared, and why each is there."""


def pinned(lock: str) -> dict[str, str]:
    """Return the pinned version of each package. Fail if an entry has no hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / lock).read_text().strip()):
        head = re.match(r"(\S+)==(\S+)", entry)
        assert head and "--hash=sha256:" in entry, entry
        found[head[1]] = head[2]
    return found


def declared(project: Path) -> set[str]:
    """Return the packages that users of a project get, with all its extras for users."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = table.get("optional-dependencies", {})
    texts = [text for name, texts in extras.items() if name not in ("dev", "docs", "demo") for text in texts]
    return {re.split(r"[^\w-]", text)[0] for text in [*table["dependencies"], *texts]}


@pytest.mark.parametrize(
    "project", [ROOT, *sorted((ROOT / "packages").iterdir())], ids=lambda path: path.name
)
def test_a_user_gets_every_package_that_is_imported(project: Path) -> None:
    """Packages of the extra `dev` are there in each other test, but not for users."""
    found = packages_distributions()
    code = "\n".join(path.read_text() for path in (project / "src").rglob("*.py"))
    # Lines of docstrings match too, but few of their second words are the name of a package.
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE)) & found.keys()
    names = {name for name in imported if not name.startswith("oncelog")}
    assert "click" in names
    given = declared(project) | declared(ROOT) | OF_OTHERS.keys()
    for name in names:
        distributions = {package.lower().replace("_", "-") for package in found[name]}
        assert distributions & given, f"{name} is not declared"


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_hashes(lock: str) -> None:
    assert pinned(lock)


def test_both_locks_name_the_same_build_tools() -> None:
    tools, packages = (pinned(lock) for lock in reversed(LOCKS))
    assert {"hatchling", "setuptools", "uv", "wheel", "editables"} <= tools.keys()
    assert all(packages[name] == version for name, version in tools.items() if name in packages)


def test_the_set_up_takes_nothing_without_a_hash_and_builds_nothing_in_isolation() -> None:
    script = (ROOT / "tools" / "make_venv.sh").read_text()
    lines = [line.strip() for line in script.splitlines()]
    arguments = {line.partition("=")[0]: line for line in lines if line.startswith(("locked=", "packages="))}
    assert "--no-deps --require-hashes --no-build-isolation" in arguments["locked"]
    assert "--no-deps --no-build-isolation" in arguments["packages"]
    installs = [line for line in lines if '"${pip[@]}"' in line or '"${uv[@]}"' in line]
    assert len(installs) == 4
    for line in installs:
        is_build = "--no-deps --require-hashes --only-binary :all:" in line
        used = line.count('"${locked[@]}"') + line.count('"${packages[@]}"')
        assert is_build or used == line.count('"${uv[@]}"') + line.count('"${pip[@]}"'), line


def test_jars_of_an_earlier_pom_are_removed_and_checksums_are_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode, stdout = 0, ""

    def run(command: list[str], **_: object) -> Done:
        commands.append(command)
        (tmp_path / "jars").mkdir()
        return Done()

    monkeypatch.setattr(apache_kafka.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(apache_kafka.subprocess, "run", run)
    apache_kafka.fetch_pom("old", tmp_path, "a test")
    (tmp_path / "jars" / "old.jar").touch()
    jars = apache_kafka.fetch_pom("old", tmp_path, "a test")
    assert (jars / "old.jar").exists() and len(commands) == 1
    jars = apache_kafka.fetch_pom("new", tmp_path, "a test")
    assert not (jars / "old.jar").exists()
    assert all("--strict-checksums" in command for command in commands)
