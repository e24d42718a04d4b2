"""Write docs/reference: settings, commands, metrics, errors and the Python API, from the code's own tables.

`python tools/reference.py` writes the pages, and `--check` lists those that are stale. tests/test_reference.py
keeps them fresh and complete.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src"

MADE = "<!-- `make reference` writes this page from the code; do not edit it. -->\n"

Row = Sequence[object]


def table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: object) -> str:
    """Return a value in code font, or nothing if the value is empty."""
    return f"`{value}`" if str(value) else ""


def prose(text: str, to_docs: str = "..") -> str:
    """Return a text from the code as Markdown: pages of docs/ become links, and `<` and `*` are escaped.

    `to_docs` is the path from the page to docs/.
    """
    text = text.replace("<", "&lt;").replace("*", "\\*")
    return re.sub(
        r"\bdocs/([\w/-]+)\.md\b",
        lambda match: f"[{match[1].rpartition('/')[2]}]({to_docs}/{match[1]}.md)",
        text,
    )


# Settings

_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "str": "text",
    "list": "list",
    "password": "password",
}
_DURATIONS = ((86_400_000, "day"), (3_600_000, "hour"), (60_000, "minute"), (1_000, "second"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LARGEST = {2**31 - 1: "2147483647 (no limit)", 2**63 - 1: "9223372036854775807 (no limit)"}


def default_text(key: str, value: object) -> str:
    """Return a default as text. A time or size is repeated in a readable unit."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, list):
        return code(",".join(value)) or "empty"
    if value in _LARGEST and isinstance(value, int):
        return _LARGEST[value]
    if isinstance(value, int) and key.endswith(".ms"):
        unit = next(((size, name) for size, name in _DURATIONS if value >= size and value % size == 0), None)
        if unit is not None and value >= 1_000:
            count = value // unit[0]
            return f"{code(value)} ({count} {unit[1]}{'s' if count > 1 else ''})"
    if isinstance(value, int) and re.search(r"bytes|size|memory", key):
        size_unit = next(((size, name) for size, name in _SIZES if value >= size and value % size == 0), None)
        if size_unit is not None:
            return f"{code(value)} ({value // size_unit[0]} {size_unit[1]})"
    return code(value) or "empty"


def valid_text(setting: Any) -> str:
    """Return the legal values of a setting."""
    if setting.choices:
        names = ", ".join(code(choice) or "empty" for choice in setting.choices)
        return f"any of {names}" if setting.kind == "list" else names
    low, high = (None if bound in (None, 2**31 - 1, 2**63 - 1) else f"{bound:g}" if isinstance(bound, float) else bound
                 for bound in (setting.low, setting.high))  # fmt: skip
    if setting.kind == "list":
        return f"at least {low}" if low is not None else ""
    if low is not None and high is not None:
        return f"only {low}" if low == high else f"{low} to {high}"
    return f"{low} or more" if low is not None else f"up to {high}" if high is not None else ""


def _setting_rows(settings: Iterable[Any], *more: Callable[[str], str]) -> Iterator[Row]:
    for setting in settings:
        yield (
            code(setting.key),
            _TYPES[setting.kind],
            default_text(setting.key, setting.default),
            valid_text(setting),
            *(cell(setting.key) for cell in more),
            prose(setting.doc),
        )


def render_configuration() -> str:
    """Return docs/reference/configuration.md."""
    from oncelog import config
    from oncelog.broker.settings.dynamic_config import DYNAMIC
    from oncelog.broker.topics.topic_config import BROKER_DEFAULT_OF

    shared = {setting.key for setting in config.ADMIN.settings}
    columns = ("setting", "type", "default", "valid values")
    client = (*columns, "meaning")
    own = {
        name: [s for s in getattr(config, name).settings if s.key not in shared]
        for name in ("PRODUCER", "CONSUMER")
    }
    scoped = ", ".join(code(f"{key}*" if key.endswith(".") else key) for key in config.BROKER.scoped)
    parts = [
        "# Settings\n",
        MADE,
        _CONFIGURATION_INTRODUCTION,
        "## All clients\n",
        "Producers, consumers and admin clients have these settings. They hold for the life of the client.\n",
        table(client, _setting_rows(config.ADMIN.settings)),
        "## Producer\n",
        "Besides the settings of all clients:\n",
        table(client, _setting_rows(own["PRODUCER"])),
        "## Consumer\n",
        "Besides the settings of all clients:\n",
        table(client, _setting_rows(own["CONSUMER"])),
        "## Admin client\n",
        "The admin client has the settings of all clients and no others.\n",
        "## Broker\n",
        _BROKER_INTRODUCTION.format(scoped=scoped),
        table(
            (*columns, "dynamic", "meaning"),
            _setting_rows(config.BROKER.settings, lambda key: "yes" if key in DYNAMIC else ""),
        ),
        "## Topic\n",
        _TOPIC_INTRODUCTION,
        table(
            (*columns, "default from", "meaning"),
            _setting_rows(config.TOPIC.settings, lambda key: code(BROKER_DEFAULT_OF.get(key, ""))),
        ),
        "## Group\n",
        "Settings of one consumer group of the consumer protocol (KIP-848). All of them are dynamic: "
        "Kafka's kafka-configs changes them with `--entity-type groups`.\n",
        table(client, _setting_rows(config.GROUP.settings)),
        "## Pipeline\n",
        "`oncelog pipeline run` takes these settings with `-X NAME=VALUE`.\n",
        table(client, _setting_rows(config.PIPELINE.settings)),
        "## Schema registry\n",
        "`oncelog.schema_registry` takes these settings, and commands with `--schema-registry`; see "
        "[Schema registry](../guides/schema-registry.md).\n",
        table(client, _setting_rows(config.SCHEMA_REGISTRY.settings)),
        *_spark_options(),
        *_command_options(),
        "## Environment variables\n",
        table(("variable", "meaning"), [(code(name), prose(meaning)) for name, meaning in ENVIRONMENT]),
    ]
    return "\n".join(parts)


ENVIRONMENT = (
    ("ONCELOG_BOOTSTRAP_SERVERS", "Brokers that commands start from; ONCELOG_BOOTSTRAP_SERVER is the same."),
    (
        "ONCELOG_COMMAND_CONFIG",
        "A .properties file with client settings for commands, as `--command-config`.",
    ),
    ("ONCELOG_PROFILE", "The profile that commands use, as `--profile`."),
    ("ONCELOG_SETTING_NAME", "A client setting for commands, by its name in capitals with underscores."),
    ("ONCELOG_DATA_DIR", "The data directory of `oncelog serve`, as `--data-dir`."),
    (
        "ONCELOG_SINK_METRICS",
        "The file or named pipe for the figures of Spark's sink: see [Metrics](metrics.md#spark).",
    ),
    (
        "ONCELOG_PURE_PYTHON",
        "1 runs the Python sources where compiled modules exist, `mypyc` or `c` those of one part: see "
        "[Compiled modules](../internals/compiled.md).",
    ),
)
_CONFIGURATION_INTRODUCTION = """\
Names, defaults and meanings are Kafka's unless the description says otherwise. A name that begins
with `oncelog.` is Oncelog's own. A name or value that is not legal raises `ConfigError` before anything starts.

In Python a client takes a mapping with these names, or keywords with underscores for the dots. Commands take
`-X NAME=VALUE`, or an environment variable: `ONCELOG_` and the name in capitals with underscores, such as
`ONCELOG_SECURITY_PROTOCOL`. A list is comma-separated text, or a list in Python. Times are milliseconds and sizes are
bytes unless the name says otherwise.
"""
_BROKER_INTRODUCTION = """\
Set these settings with `oncelog serve --set NAME=VALUE`, in a file for `--config`, or in `oncelog.Broker(config)`.
Dynamic settings can be changed while the broker runs, for this broker or for the cluster, with `Admin.alter_configs` or
Kafka's kafka-configs. A change for this broker overrides a change for the cluster. Both override the value at the start.
The following settings can also be set for one listener, as `listener.name.NAME.SETTING`: {scoped}.
"""
_TOPIC_INTRODUCTION = """\
`oncelog topics create` sets these settings with `--config NAME=VALUE`. All of them are dynamic: `oncelog topics alter`
changes them at any time. A topic that does not set a value uses the broker setting in the column "default from".
"""


def _spark_options() -> Iterator[str]:
    from oncelog.spark.sink.sink_options import SINK_OPTIONS
    from oncelog.spark.source.source_options import OPTIONS

    columns = ("option", "default", "batch, stream", "meaning")
    for title, introduction, options in (
        ("Spark source", 'Options of `spark.read.format("oncelog")` and `spark.readStream`; see docs/spark.md.', OPTIONS),
        (
            "Spark sink",
            'Options of `df.write.format("oncelog")` and `df.writeStream`, and of `write_atomic`; see docs/spark.md.',
            SINK_OPTIONS,
        ),
    ):  # fmt: skip
        yield f"## {title}\n"
        yield prose(introduction) + " The case of option names does not matter.\n"
        rows = [
            (
                code(o.name),
                "unset" if o.default is None else code(o.default) or "empty",
                o.mode,
                prose(o.meaning),
            )
            for o in options
        ]
        yield table(columns, rows)


def _command_options() -> Iterator[str]:
    for title, introduction, name in (
        ("Audit", "Options of `oncelog audit`. `audit_topic`, `audit_files` and `audit_table` take them as arguments: "
         "see [oncelog.spark](api/spark.md) and [oncelog.local_audit](api/local_audit.md).", "audit"),
        ("Loader", "Options of `oncelog load`. `Load` and `Options` have the same options as fields: "
         "see [oncelog.load](api/load.md). Set the producer settings above with `-X`.", "load"),
    ):  # fmt: skip
        command, context = _command(name)
        yield f"## {title}\n"
        yield introduction + "\n"
        yield _parameters(command, context)


# Commands

EXIT_CODES = (
    (0, "success; an audit found nothing"),
    (1, "an error: the broker refused, or a connection failed"),
    (2, "wrong usage: an option, an argument, or a setting"),
    (3, "an audit found violations, or a scenario of `oncelog conform` failed"),
    (4, "a time-out"),
    (130, "interrupted with Ctrl-C"),
    (141, "the reader of standard output has gone; `consume` ends with 0"),
)
_CLI_INTRODUCTION = """\
`oncelog NOUN VERB`. Data goes to standard output, progress and logs go to standard error. Commands that delete or
abort name the cluster and ask, or do nothing without `--yes`.
"""


def _command(*names: str) -> tuple[click.Command, click.Context]:
    from oncelog.cli.main import cli

    command: click.Command = cli
    context = click.Context(cli, info_name="oncelog")
    for name in names:
        assert isinstance(command, click.Group)
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    return command, context


def commands() -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command of `oncelog`, including those of packages/. A group comes before its commands."""
    yield from _commands_under(*_command())


def _commands_under(
    command: click.Command, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None, name
            yield from _commands_under(child, click.Context(child, info_name=name, parent=context))


def render_cli() -> str:
    """Return docs/reference/cli.md."""
    from oncelog.cli.main import COMMANDS

    topics, topics_context = _command("topics", "list")
    connection = [option for option in _options(topics) if option.name in CONNECTION_OPTIONS]
    parts = [
        "# Command line\n",
        MADE,
        _CLI_INTRODUCTION,
        "## Exit codes\n",
        table(("code", "meaning"), EXIT_CODES),
        "## Connection options\n",
        "All commands that talk to a cluster have these options.\n",
        _option_table(connection, topics_context),
    ]
    shared = ""
    for command, context in commands():
        path = context.command_path
        depth = path.count(" ")
        if not depth:
            continue
        parts.append(f"{'#' * min(depth + 1, 4)} {path}\n")
        if depth == 1 and path.removeprefix("oncelog ") not in COMMANDS:
            parts.append("This command comes with a package of packages/, which `make setup` installs.\n")
        if isinstance(command, click.Group):
            shared = _shared_options(command, context)
            parts += [_help(command), shared and f"Options of its commands:\n\n{shared}"]
            continue
        usage = " ".join(command.collect_usage_pieces(context))
        options = _parameters(command, context)
        parts += [f"```text\n{path} {usage}\n```\n", _help(command), options if options != shared else ""]
    return "\n".join(part for part in parts if part)


CONNECTION_OPTIONS = {"bootstrap_servers", "properties", "command_config", "profile"}


def _shared_options(group: click.Group, context: click.Context) -> str:
    """Return the most common table of options in a group, if at least 10 commands have it, else ""."""
    below = [
        (child, child_context)
        for child, child_context in _commands_under(group, context)
        if child is not group
    ]
    counts = Counter(_parameters(child, child_context) for child, child_context in below)
    options, count = counts.most_common(1)[0]
    return options if count >= 10 else ""


def _help(command: click.Command) -> str:
    """Return a command's help as Markdown. A paragraph after click's mark \\b keeps its line breaks."""
    paragraphs = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        before, mark, kept = paragraph.partition("\b\n")
        if before.strip():
            paragraphs.append(prose(before.strip()))
        if mark:
            paragraphs.append(f"```text\n{kept.rstrip()}\n```")
    return "\n\n".join(paragraphs) + "\n"


def _options(command: click.Command) -> list[click.Option]:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return [option for option in options if "--help" not in option.opts and not option.hidden]


def _parameters(command: click.Command, context: click.Context) -> str:
    """Return the table of a command's options. A line below it stands for the connection options, if any."""
    options = _options(command)
    if not {option.name for option in options} >= CONNECTION_OPTIONS:
        return _option_table(options, context) if options else ""
    own = [option for option in options if option.name not in CONNECTION_OPTIONS]
    link = "[connection options](cli.md#connection-options)"
    return f"{_option_table(own, context)}\nAnd the {link}.\n" if own else f"The {link}.\n"


def _option_table(options: Iterable[click.Option], context: click.Context) -> str:
    rows = []
    for option in options:
        names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
        values = "" if option.is_flag else code(option.make_metavar(context))
        if isinstance(option.type, click.IntRange) and not option.metavar:
            low, high = option.type.min, option.type.max
            values = f"`INTEGER`, {low} or more" if high is None else f"`INTEGER`, {low} to {high}"
        text = prose(option.help or "")
        if option.envvar and str(option.envvar) not in text:
            text += f" Environment: `{option.envvar}`."
        properties = (
            ("required", option.required),
            ("repeatable", option.multiple and "Repeatable." not in (option.help or "")),
        )
        notes = ", ".join(name for name, is_so in properties if is_so)
        rows.append((names, values, _default_of(option, context), f"{text} ({notes})" if notes else text))
    return table(("option", "value", "default", "meaning"), rows)


def _default_of(option: click.Option, context: click.Context) -> str:
    default = option.get_default(context, call=False)
    if option.is_flag or callable(default) or default in (None, ()) or "UNSET" in repr(default):
        return ""
    return code(default)


# Metrics


def render_metrics() -> str:
    """Return docs/reference/metrics.md."""
    from oncelog.broker.metrics import LABELS, UNITS
    from oncelog.client.consumer.consumer_metrics import METRICS as CONSUMER_METRICS
    from oncelog.client.process.loop_metrics import METRICS as LOOP_METRICS
    from oncelog.client.producer.producer_metrics import METRICS as PRODUCER_METRICS
    from oncelog.server.process_metrics import PROCESS
    from oncelog.spark.sink.sink_metrics import FILE_VARIABLE
    from oncelog.spark.sink.sink_metrics import METRICS as SINK_METRICS

    rows = [
        (
            code(f.name),
            f.kind,
            UNITS[f.name.removeprefix("oncelog_")],
            ", ".join(map(code, labels)),
            prose(f.help),
        )
        for f, labels in broker_families()
    ]
    client = ("name", "type", "unit", "meaning")
    parts = [
        "# Metrics\n",
        MADE,
        "## Broker\n",
        prose(_BROKER_METRICS),
        table(("name", "type", "unit", "labels", "meaning"), rows),
        "The labels:\n",
        table(
            ("label", "meaning"), [(code(name), prose(meaning)) for name, meaning in sorted(LABELS.items())]
        ),
        "The metrics of the process are there too:\n",
        table(("name", "type", "unit", "meaning"), [(code(name), *row) for name, row in PROCESS.items()]),
        "## Producer\n",
        "`Producer.metrics()` returns these by name. Rates, averages and maxima look back 30 seconds.\n",
        table(client, [(code(name), *row) for name, row in PRODUCER_METRICS.items()]),
        "## Consumer\n",
        "`Consumer.metrics()` returns these by name. Rates, averages and maxima look back 30 seconds.\n",
        table(client, [(code(name), *row) for name, row in CONSUMER_METRICS.items()]),
        "## Processing loop\n",
        "`Processor.metrics()` and `process()` return these by name.\n",
        table(client, [(code(name), *row) for name, row in LOOP_METRICS.items()]),
        "## Spark\n",
        f"The driver writes one line of JSON per micro-batch to the file or named pipe of the environment variable "
        f"`{FILE_VARIABLE}`, and to the logger `oncelog.spark`. `oncelog pipeline run` shows the same figures.\n",
        table(("field", "unit", "meaning"), [(code(name), *row) for name, row in SINK_METRICS.items()]),
        "The source tells Spark its latest offsets, so that the lag is in `latestOffset` and `endOffset` of "
        "StreamingQueryProgress.\n",
    ]
    return "\n".join(parts)


_BROKER_METRICS = """\
With `oncelog serve --metrics-port PORT`, these metrics are at `/metrics` in Prometheus' text format. `Broker.metrics()`
returns the same metrics as a dictionary, without the prefix `oncelog_` and without `_total`.
[alerts.yml](../alerts.yml) has alert rules for them, and [grafana.json](../grafana.json) is a dashboard for Grafana.
In a checkout, `oncelog dev prometheus start HOST:PORT` runs Prometheus with these rules.
Both are in the wheel, in `oncelog/monitoring`. Counters begin at 0 when the broker starts. The metrics of partitions
need `oncelog.metrics.names=true`, because they reveal topic names; the first 5,000 partitions have them.

`/healthz` answers 200 while the broker serves requests. `/readyz` answers 503 if a partition is offline. Neither needs
the token.
"""


def broker_families() -> list[tuple[Any, list[str]]]:
    """Return every metric family of the broker with the names of its labels."""
    from oncelog.broker.metrics import GAUGES, Metrics, PartitionOffsets, families, partition_families

    metrics = Metrics()
    # Add a sample to the families with labels, because the labels of a family are read from its samples.
    metrics.append_errors["CORRUPT_MESSAGE"] = 1
    metrics.observe("Produce", 0.001)
    found = []
    row = PartitionOffsets("topic", 0, 0, 0, 0, 0)
    by_partition = partition_families([row])
    for family in (*families(metrics, dict.fromkeys(GAUGES, 0.0)), *by_partition):
        labels = dict.fromkeys(name for _, pairs, _ in family.samples for name, _ in pairs)
        found.append((family, list(labels)))
    return found


# Errors

_PRODUCE_ACTIONS = {
    "deliver": "the record counts as delivered",
    "retry": "the batch is sent again",
    "reorder": "the batch is sent again in order, or fails if records are missing",
    "renumber": "the batch is sent again under a new epoch if that is safe",
    "split": "the batch is split and sent again; a single record fails",
    "fail": "the records fail",
    "abort": "the records fail, and the transaction must be aborted",
    "fail producer": "the producer fails",
}
_COORDINATOR_ACTIONS = {
    "retry": "retried",
    "find coordinator": "the coordinator is looked up, then retried",
    "abort": "abortable",
    "fail producer": "fatal",
    "raise": "raised",
}
_GROUP_ACTIONS = {
    "retry": "retried",
    "find": "the coordinator is looked up, then retried",
    "join": "the member joins again",
    "lost": "the member joins again and loses its partitions",
    "reset": "the member joins as a new one and loses its partitions",
    "raise": "raised",
    "end": "the member ends",
}


def render_errors() -> str:
    """Return docs/reference/errors.md."""
    from oncelog.error_guide import ERRORS, EXCEPTIONS
    from oncelog.errors import ERROR_BY_CODE

    guided = [error for _, error in sorted(ERROR_BY_CODE.items()) if ERRORS[error.kafka_name].action]
    others = [error for _, error in sorted(ERROR_BY_CODE.items()) if not ERRORS[error.kafka_name].action]
    parts = [
        "# Errors\n",
        MADE,
        _ERRORS_INTRODUCTION,
        table(
            (
                "number",
                "name",
                "retriable in Kafka",
                "idempotent producer",
                "transactional producer",
                "group member",
            ),
            (_error_row(error, ERRORS[error.kafka_name].seen_by) for error in guided),
        ),
        "## Error by error\n",
        *(_error_section(error, ERRORS[error.kafka_name]) for error in guided),
        "## Errors that these clients do not meet\n",
        "Oncelog's broker does not send them, or its clients do not use the APIs that answer them. They have classes in "
        "`oncelog.errors`, too.\n",
        table(
            ("number", "name", "meaning", "seen by"),
            [
                (e.code, code(e.kafka_name), ERRORS[e.kafka_name].meaning, ERRORS[e.kafka_name].seen_by)
                for e in others
            ],
        ),
        "## Exceptions without an error code\n",
        "Python classes that do not stand for one code of the protocol.\n",
        *(_exception_section(name, module, EXCEPTIONS[name]) for name, module in exceptions()),
    ]
    return "\n".join(parts)


_ERRORS_INTRODUCTION = """\
A broker answers a request, or a part of it, with an error code. Each code is a class of
[oncelog.errors](api/errors.md); all of them are subclasses of `BrokerError`. The exception's attribute
`reaction` says what it means for the client that raised it:

- **retriable**: the client has retried until its time or its retries ran out. Sending again may succeed.
- **abortable**: the record has failed, and the producer can continue. A transaction must be aborted first.
- **fatal**: this producer cannot continue. Close it, and make a new one.

The column "retriable in Kafka" says if the error is a RetriableException in Java. The other columns show what Oncelog's
clients do. A transactional producer may treat an error differently in its coordinator's response and in a Produce
response. The reaction of a group member depends on the request; the section of each error says more.
"""


def _is_for(seen_by: str, *words: str) -> bool:
    return seen_by == "any client" or any(word in seen_by for word in words)


def _error_row(error: Any, seen_by: str) -> Row:
    from oncelog.rules.idempotence.error_policy import Mode

    idempotent = (
        _mark(error, Mode.IDEMPOTENT) if "idempotent" in seen_by or _is_for(seen_by, "producers") else ""
    )
    return (
        error.code,
        f"[{error.kafka_name}](#{error.kafka_name.lower()})",
        "yes" if error.retriable else "",
        idempotent if not seen_by.startswith("transactional") else "",
        _transactional_mark(error, seen_by) if _is_for(seen_by, "producer") else "",
        _fetch_text(error).partition(" ")[0] if _is_for(seen_by, "consumers") else "",
        _short_group_text(error) if _is_for(seen_by, "member") else "",
    )


def _is_produce_error(error: Any) -> bool:
    """Return True if a Produce response can contain the error."""
    from oncelog.rules.idempotence import error_policy

    return error.code in error_policy._ROWS


def _mark(error: Any, mode: Any) -> str:
    from oncelog.rules.idempotence.error_policy import error_policy_for

    return str(error_policy_for(error.code, mode).error_class.value) if _is_produce_error(error) else ""


def _is_coordinator_error(error: Any, seen_by: str) -> bool:
    """Return True if a response of the transaction coordinator can contain the error."""
    from oncelog.rules.transactions import client_session

    return error.code in client_session._DEFAULT_ACTIONS or _is_for(seen_by, "transactional")


def _transactional_mark(error: Any, seen_by: str) -> str:
    from oncelog.rules.idempotence.error_policy import Mode

    produce = _mark(error, Mode.TRANSACTIONAL)
    marks = {"retried": "retriable", _COORDINATOR_ACTIONS["find coordinator"]: "retriable"}
    coordinator = " or ".join(
        dict.fromkeys(marks.get(action, action) for action in _by_coordinator_action(error))
    )
    if not _is_coordinator_error(error, seen_by):
        return produce
    if not produce or coordinator == produce:
        return coordinator
    return f"{produce} (coordinator: {coordinator})"


def _error_section(error: Any, guide: Any) -> str:
    from oncelog.rules.idempotence.error_policy import Mode

    rows: list[Row] = [
        ("Number, class", f"{error.code}, `oncelog.errors.{error.__name__}`"),
        ("Seen by", guide.seen_by),
    ]
    if _is_for(guide.seen_by, "producer"):
        if _is_produce_error(error) and not guide.seen_by.startswith("transactional"):
            if _is_for(guide.seen_by, "producers"):
                rows.append(("Producer without idempotence", _produce_text(error, Mode.PLAIN)))
            rows.append(("Idempotent producer", _produce_text(error, Mode.IDEMPOTENT)))
        rows.append(("Transactional producer", _transactional_text(error, guide.seen_by)))
    if _is_for(guide.seen_by, "consumers"):
        rows.append(("Consumer, Fetch", _fetch_text(error)))
    if _is_for(guide.seen_by, "member"):
        rows.append(("Group member", _group_text(error)))
    rows += [("Where to look", guide.look), ("What to do", guide.action)]
    body = table(("", ""), [(name, prose(str(text))) for name, text in rows])
    return f"### {error.kafka_name}\n\n{prose(guide.meaning)}\n\n{body}"


def _produce_text(error: Any, mode: Any) -> str:
    from oncelog.rules.idempotence.error_policy import error_policy_for

    policy = error_policy_for(error.code, mode)
    text = _PRODUCE_ACTIONS[policy.action.value]
    stored = "; the batch may be stored" if policy.may_be_stored else ""
    return f"{policy.error_class.value}: {text}{stored}"


def _transactional_text(error: Any, seen_by: str) -> str:
    from oncelog.rules.idempotence.error_policy import Mode

    produce = f"Produce: {_produce_text(error, Mode.TRANSACTIONAL)}" if _is_produce_error(error) else ""
    if not _is_coordinator_error(error, seen_by):
        return produce
    coordinator = f"Coordinator: {_grouped(_by_coordinator_action(error))}"
    return f"{produce}. {coordinator}" if produce else coordinator


def _by_coordinator_action(error: Any) -> dict[str, list[str]]:
    """Return the requests to coordinators, grouped by what a transactional producer does after this error."""
    from oncelog.errors import error_for_code
    from oncelog.rules.transactions import client_session as session

    by_action: dict[str, list[str]] = {}
    for request in (session.INIT, session.ADD_PARTITIONS, session.COMMIT_OFFSETS, session.END):
        reaction = session.error_action(request, error_for_code(error.code))
        by_action.setdefault(_COORDINATOR_ACTIONS[reaction.value], []).append(request.name)
    return by_action


def _grouped(by_action: dict[str, list[str]]) -> str:
    if len(by_action) == 1:
        return next(iter(by_action))
    return "; ".join(f"{action} ({', '.join(names)})" for action, names in by_action.items())


def _fetch_text(error: Any) -> str:
    from oncelog.client.consumer.core import _STALE_LEADER
    from oncelog.errors import OffsetOutOfRange

    if error is OffsetOutOfRange:
        return "reset to the position of `auto.offset.reset`; raised by poll if that is none"
    return "retried with new metadata" if error.code in _STALE_LEADER else "raised by poll"


def _group_text(error: Any) -> str:
    return _grouped(_by_group_action(error))


def _short_group_text(error: Any) -> str:
    short = {
        _GROUP_ACTIONS["find"]: "retried",
        _GROUP_ACTIONS["join"]: "rejoins",
        _GROUP_ACTIONS["lost"]: "rejoins",
        _GROUP_ACTIONS["reset"]: "rejoins",
        _GROUP_ACTIONS["end"]: "ends",
    }
    return " or ".join(dict.fromkeys(short.get(action, action) for action in _by_group_action(error)))


def _by_group_action(error: Any) -> dict[str, list[str]]:
    from oncelog.rules.groups.error_policy import GroupRequest, group_action

    by_action: dict[str, list[str]] = {}
    for request in GroupRequest:
        action = _GROUP_ACTIONS[group_action(error.code, request).value]
        by_action.setdefault(action, []).append(str(request.value))
    return by_action


def _exception_section(name: str, module: str, guide: Any) -> str:
    rows = [
        ("Class", f"`{module}.{name}`"),
        ("Seen by", guide.seen_by),
        ("Where to look", guide.look),
        ("What to do", guide.action),
    ]
    body = table(("", ""), [(title, prose(text)) for title, text in rows])
    return f"### {name}\n\n{prose(guide.meaning)}\n\n{body}"


def exceptions() -> list[tuple[str, str]]:
    """Return (name, module) of each public exception without an error code. Base classes come first."""
    from oncelog import errors

    classes = [
        (node, ".".join(path.relative_to(SOURCE).with_suffix("").parts))
        for path in sorted(SOURCE.rglob("*.py"))
        # Skip the broker's exceptions, because clients see them as error codes.
        if "broker" not in path.parts
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    classes.sort(key=lambda pair: pair[1] != "oncelog.errors")
    codes = {error.__name__ for error in errors.ERROR_BY_CODE.values()}
    found: dict[str, str] = {"OncelogError": "oncelog.errors"}
    size = 0
    while size != len(found):
        size = len(found)
        for node, module in classes:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & found.keys() and node.name not in codes:
                found.setdefault(node.name, module)
    return list(found.items())


# Python

API_PAGES: dict[str, tuple[str, str, tuple[tuple[str, tuple[str, ...] | None], ...]]] = {
    "oncelog": ("oncelog", "Broker, clients and the values they use.", (("oncelog", None),)),
    "aio": ("oncelog.aio", "The clients for asyncio.", (("oncelog.aio", None),)),
    "errors": (
        "oncelog.errors",
        "Exceptions. [Errors](../errors.md) says for each code what it means and what to do.",
        (("oncelog.errors", None),),
    ),
    "types": ("oncelog.types", "Values that all parts share.", (("oncelog.types", None),)),
    "spark": (
        "oncelog.spark",
        'Spark source, sink and audit. `format("oncelog")` needs no import: [its options](../configuration.md#spark-source).',
        (("oncelog.spark", None), ("oncelog.spark.audit", None)),
    ),
    "local_audit": (
        "oncelog.local_audit",
        "The audit without Spark, for what fits one machine; see [The audit](../../spark.md#the-audit).",
        (("oncelog.local_audit", None),),
    ),
    "load": (
        "oncelog.load",
        "Files into a topic, each record exactly once; see [Loading files once](../../loading.md).",
        (
            ("oncelog.load.loader", ("Load", "Report", "run_load")),
            ("oncelog.load.parsing", ("Options",)),
            ("oncelog.load.on_spark", ("run_load_on_spark",)),
        ),
    ),
    "tracing": (
        "oncelog.tracing",
        "OpenTelemetry spans for sent and processed records; see [Tracing](../../guides/tracing.md).",
        (("oncelog.tracing", None),),
    ),
    "schema_registry": (
        "oncelog.schema_registry",
        "Serializers and deserializers for a schema registry; see [Schema registry](../../guides/schema-registry.md).",
        (("oncelog.schema_registry", None),),
    ),
    "testing": (
        "oncelog.testing",
        "For tests: pytest fixtures, an assertion, a fault proxy, a broker as a process, and a disk in memory.",
        (
            ("oncelog.testing", None),
            (
                "oncelog.testing.pytest_plugin",
                (
                    "oncelog_broker",
                    "oncelog_session_broker",
                    "oncelog_admin",
                    "oncelog_topic",
                    "oncelog_producer",
                    "oncelog_consumer",
                    "oncelog_faults",
                ),
            ),
            ("oncelog.testing.proxy", None),
            ("oncelog.testing.broker_process", None),
            ("oncelog.testing.memory_disk", ("MemoryDisk",)),
        ),
    ),
}
"""Each page's title, introduction, and modules with their public names.

If the names are None, the page has the names in the module's `__all__`, or else those that it defines.
"""


def public_names(module_name: str) -> list[str]:
    """Return `__all__` of a module. Without `__all__`, return the public names that the module defines."""
    module = importlib.import_module(module_name)
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not inspect.ismodule(getattr(module, name))]
    tree = ast.parse(Path(str(module.__file__)).read_text())
    names = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.append(node.targets[0].id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def summary(module_name: str, name: str) -> str:
    """Return the first sentence of a name's documentation, or nothing if it has none."""
    value = getattr(importlib.import_module(module_name), name)
    if hasattr(value, "kafka_name") and module_name == "oncelog.errors":
        return value.kafka_name if name != "BrokerError" else "An error code of the Kafka protocol."
    doc = _constant_doc(module_name, name)
    if doc is None:
        doc = inspect.getdoc(value) or ""
    return re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()), maxsplit=1)[0]


def _constant_doc(module_name: str, name: str) -> str | None:
    """Return the docstring below the assignment of a constant; "" if it has none.

    An imported constant is looked up in the module that defines it. Return None for functions and classes.
    """
    body = ast.parse(Path(str(importlib.import_module(module_name).__file__)).read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.ImportFrom(module=str(origin), names=names) if any(
                alias.name == name for alias in names
            ):
                return _constant_doc(origin, name)
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)) if (
                target == name
            ):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                return str(after.value.value) if is_text else ""  # type: ignore[union-attr]
    return None


def render_api(page: str) -> str:
    """Return one page of docs/reference/api: a table of the names, then a mkdocstrings block for each."""
    title, introduction, modules = API_PAGES[page]
    parts = [f"# {title}\n", MADE, introduction + "\n"]
    details = []
    for module, names in modules:
        rows = []
        for name in names or public_names(module):
            is_code = (
                module == "oncelog.errors" and re.search(r"\w", name) and summary(module, name).isupper()
            )
            rows.append((code(name), prose(summary(module, name), "../..")))
            if not is_code:
                details.append(f"::: {module}.{name}\n")
        if len(modules) > 1:
            parts.append(f"From `{module}`:\n")
        parts.append(table(("name", "what it is"), rows))
    return "\n".join([*parts, "## Details\n", *details])


def pages() -> dict[Path, Callable[[], str]]:
    """Return a map from the path of every generated page to the function that renders it."""
    found: dict[Path, Callable[[], str]] = {
        REFERENCE / "configuration.md": render_configuration,
        REFERENCE / "cli.md": render_cli,
        REFERENCE / "metrics.md": render_metrics,
        REFERENCE / "errors.md": render_errors,
    }
    for page in API_PAGES:
        found[REFERENCE / "api" / f"{page}.md"] = lambda page=page: render_api(page)  # type: ignore[misc]
    return found


def main() -> None:
    is_check = sys.argv[1:] == ["--check"]
    stale = 0
    for path, render in pages().items():
        text = render()
        if not path.exists() or path.read_text() != text:
            stale += 1
            print(f"{'stale' if is_check else 'written'}: {path.relative_to(ROOT)}")
            if not is_check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    sys.exit(is_check and stale > 0)


if __name__ == "__main__":
    main()
