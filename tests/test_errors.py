"""The error codes and names of the protocol equal an independent table, and do not depend on docstrings."""

from __future__ import annotations

import json
import subprocess
import sys

from kio.schema.errors import ErrorCode

from oncelog.error_guide import ERRORS
from oncelog.errors import ERROR_BY_CODE, BrokerError, error_for_code

NOT_ERRORS = {0}
EXPECTED = {
    code.value: (code.name.upper(), code.retriable) for code in ErrorCode if code.value not in NOT_ERRORS
}

PRINT_NAMES = """
import json
from oncelog.errors import ERROR_BY_CODE
print(json.dumps({code: error.kafka_name for code, error in ERROR_BY_CODE.items()}))
"""


def test_every_code_has_the_protocols_name_and_retriable_mark() -> None:
    assert {code: (error.kafka_name, error.retriable) for code, error in ERROR_BY_CODE.items()} == EXPECTED


def test_names_survive_an_interpreter_that_drops_docstrings() -> None:
    run = subprocess.run(
        [sys.executable, "-OO", "-c", PRINT_NAMES], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(run.stdout) == {str(code): name for code, (name, _) in EXPECTED.items()}


def test_an_error_names_itself_in_its_text() -> None:
    assert str(error_for_code(45, "late")) == "OUT_OF_ORDER_SEQUENCE_NUMBER (45): late"
    assert isinstance(error_for_code(30_000), BrokerError)


def test_every_code_has_a_description_that_survives_optimization_too() -> None:
    """The descriptions must not come from docstrings, which -OO drops.

    `make test-optimized` runs this file under -OO.
    """
    assert {name for name, guide in ERRORS.items() if guide.meaning and guide.seen_by} == {
        name for name, _ in EXPECTED.values()
    }
