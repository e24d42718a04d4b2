"""The generated reference: its pages are fresh, and nothing that users can name is missing from them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tool import load_tool
from test_language import BANNED, BARE_ERROR

import oncelog
from oncelog import config, errors
from oncelog.client.consumer.core import ConsumerCore
from oncelog.client.producer.producer_metrics import METRICS as PRODUCER_METRICS
from oncelog.client.producer.producer_metrics import ProducerMetrics
from oncelog.error_guide import ERRORS, EXCEPTIONS
from oncelog.explain.stories import STORIES
from oncelog.log.disk import Disk
from oncelog.settings import Setting

ROOT = Path(__file__).parents[1]


reference = load_tool("reference")
typed_settings = load_tool("typed_settings")
PAGES = reference.pages()


def _page(name: str) -> str:
    return (reference.REFERENCE / name).read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_page_is_fresh(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run: make reference"


def test_no_page_of_the_reference_is_written_by_hand() -> None:
    assert set(reference.REFERENCE.rglob("*.md")) == set(PAGES)


def _settings() -> Iterator[tuple[str, Setting]]:
    for settings_table in config.TABLES:
        for setting in settings_table.settings:
            yield settings_table.name, setting


def test_every_setting_is_described() -> None:
    page = _page("configuration.md")
    assert [f"{name}: {s.key}" for name, s in _settings() if f"| `{s.key}` |" not in page or not s.doc] == []


def test_typed_settings_are_fresh() -> None:
    assert typed_settings.TARGET.read_text() == typed_settings.render(), "run: make reference"


def test_typed_settings_have_all_keys_of_the_tables() -> None:
    keys = {name: set(getattr(oncelog, name).__annotations__) for name, _, _ in typed_settings.CLASSES}
    assert keys == {name: set(table.key_names()) for name, table, _ in typed_settings.CLASSES}


def test_every_environment_variable_is_described() -> None:
    source = "".join(path.read_text() for path in reference.SOURCE.rglob("*.py"))
    # ONCELOG_KEY_NAME stands for the variable of any setting.
    names = set(re.findall(r"\bONCELOG_[A-Z_]+\b", source)) - {"ONCELOG_KEY_NAME"}
    assert names - {"ONCELOG_" + s.key.replace(".", "_").upper() for _, s in _settings()} <= set(
        re.findall(r"ONCELOG_[A-Z_]+", _page("configuration.md"))
    )


def test_every_command_is_described() -> None:
    page = _page("cli.md")
    missing = [
        context.command_path
        for command, context in reference.commands()
        if not command.help or (context.parent and f"# {context.command_path}\n" not in page)
    ]
    assert missing == []


def test_every_option_has_a_help_text() -> None:
    rows = re.findall(r"^\| (`-.*)\|$", _page("cli.md"), re.MULTILINE)
    described = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    assert len(described) > 150
    assert [row for row in described if not row[3] or row[3].startswith("(re")] == []


def test_every_metric_of_the_broker_has_a_unit_and_its_labels_a_meaning() -> None:
    from oncelog.broker.metrics import LABELS, UNITS

    families = reference.broker_families()
    assert {family.name.removeprefix("oncelog_") for family, _ in families} == set(UNITS)
    assert {label for _, labels in families for label in labels} == set(LABELS)
    assert all(family.help for family, _ in families)


def test_every_metric_of_the_clients_is_described() -> None:
    from oncelog.client.consumer.consumer_metrics import METRICS as CONSUMER_METRICS
    from oncelog.client.process.loop_metrics import METRICS as LOOP_METRICS
    from oncelog.client.process.loop_metrics import LoopMetrics

    assert set(ProducerMetrics().to_dict(0.0, 0, 0)) == set(PRODUCER_METRICS)
    core = ConsumerCore(config.CONSUMER.parse({}))
    assert set(core.metric_values(0.0)) == set(CONSUMER_METRICS)
    assert set(LoopMetrics().to_dict()) == set(LOOP_METRICS)


def test_every_figure_of_the_sink_is_described() -> None:
    from oncelog.spark.sink.sink_metrics import METRICS, SinkMetrics

    assert set(SinkMetrics.__slots__) == set(METRICS)


def test_every_error_code_is_described() -> None:
    names = {error.kafka_name for error in errors.ERROR_BY_CODE.values()}
    assert names == set(ERRORS)
    assert [name for name, guide in ERRORS.items() if bool(guide.look) != bool(guide.action)] == []
    page = _page("errors.md")
    assert [name for name in names if name not in page] == []


def test_every_exception_without_a_code_is_described() -> None:
    assert {name for name, _ in reference.exceptions()} == set(EXCEPTIONS)


def test_descriptions_of_errors_are_plain() -> None:
    guides = [*ERRORS.values(), *EXCEPTIONS.values()]
    texts = [text for guide in guides for text in guide if text]
    assert [text for text in texts if BANNED.search(text) or BARE_ERROR.search(text)] == []


def test_every_picture_is_on_the_page_of_pictures_with_the_command_that_plays_it() -> None:
    page = (ROOT / "docs" / "guides" / "pictures.md").read_text()
    drawn = {path.stem for path in (ROOT / "docs" / "flows").glob("*.svg")}
    assert drawn == set(re.findall(r"]\(\.\./flows/([\w-]+)\.svg\)", page))
    assert set(STORIES) == set(re.findall(r"`oncelog explain ([a-z][\w-]*)`", page))


def test_every_public_name_is_described() -> None:
    missing = [
        f"{module}.{name}"
        for _, _, modules in reference.API_PAGES.values()
        for module, names in modules
        for name in names or reference.public_names(module)
        if not reference.summary(module, name)
    ]
    assert missing == []


def test_every_public_method_is_described() -> None:
    missing = [
        f"{module}.{name}.{method}"
        for _, _, modules in reference.API_PAGES.values()
        for module, names in modules
        for name in names or reference.public_names(module)
        for method in _undescribed(getattr(importlib.import_module(module), name))
    ]
    assert missing == []


def _undescribed(value: object) -> Iterator[str]:
    """Yield the methods of a class of this project that have no docstring. Methods that the protocol Disk
    describes are exempt.
    """
    if not inspect.isclass(value) or not value.__module__.startswith("oncelog"):
        return
    for name in dir(value):
        member = inspect.getattr_static(value, name)
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        is_ours = inspect.isfunction(function) and function.__module__.startswith("oncelog")
        if is_ours and not name.startswith("_") and not inspect.getdoc(function) and not hasattr(Disk, name):
            yield name
