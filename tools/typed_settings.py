"""Write src/oncelog/typed_settings.py, the TypedDicts of all settings, from the tables of oncelog/config.py.

`make reference` runs it. tests/test_reference.py keeps the file fresh.
"""

from __future__ import annotations

from pathlib import Path

from oncelog import config
from oncelog.settings import Setting, SettingsTable

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "oncelog" / "typed_settings.py"

HEAD = '''"""TypedDicts of the settings: with them, a type checker and an editor know keys and types.

    config: oncelog.ProducerSettings = {"bootstrap.servers": "127.0.0.1:9092", "linger.ms": 20}

They exist only for type checkers. Producer, Consumer and the other classes accept any mapping, and check it
in their constructors. `make reference` writes this file from the tables in config.py; do not edit it.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from oncelog.settings import Password
'''
CLASSES = (
    ("ProducerSettings", config.PRODUCER, "Settings of a Producer."),
    ("ConsumerSettings", config.CONSUMER, "Settings of a Consumer."),
    ("AdminSettings", config.ADMIN, "Settings of an Admin client."),
    ("BrokerSettings", config.BROKER, "Settings of a Broker, without those of single listeners."),
    ("TopicSettings", config.TOPIC, "Settings of a topic, for `NewTopic(configs=...)`."),
)
TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str"}
TYPES |= {"list": "list[str] | str", "password": "Password | str"}


def type_of(setting: Setting) -> str:
    """Return the type of a setting's value as source text."""
    if setting.kind == "str" and setting.choices:
        choices = ", ".join(f'"{choice}"' for choice in setting.choices)
        kind = f"Literal[{choices}]"
    else:
        kind = TYPES[setting.kind]
    return f"{kind} | None" if setting.default is None else kind


def class_of(name: str, table: SettingsTable, doc: str) -> str:
    """Return the source text of one TypedDict."""
    rows = [f'        "{setting.key}": {type_of(setting)},' for setting in table.settings]
    lines = [f"{name} = TypedDict(", f'    "{name}",', "    {", *rows, "    },", "    total=False,", ")"]
    return "\n".join([*lines, f'"""{doc}"""', ""])


def render() -> str:
    """Return the source text of the module."""
    classes = [class_of(*row) for row in CLASSES]
    return "\n".join([HEAD, "# fmt: off", *classes, "# fmt: on", ""])


if __name__ == "__main__":
    TARGET.write_text(render())
