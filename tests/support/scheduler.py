"""The scheduler that decides which process of xdist runs which tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

from support import tiers_plugin

ROOT = Path(__file__).parents[2]


class OneOfEach(LoadFileScheduling):
    """A scheduler that gives all tests of a file to one process.

    All files with a Spark session go to a single process, and so do all that request the shared Apache Kafka.
    A second session or server costs more time than it saves. On few cores, two of them also slow each other
    down.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, is_quick=self.config.option.markexpr == "quick")


def group_of(nodeid: str, *, is_quick: bool) -> str:
    """Return the name of the group of tests that one process runs together. That is mostly the test's
    file.
    """
    file = nodeid.partition("::")[0]
    if file.startswith("tests/spark/") and _has_session(file):
        return "spark"
    is_for_apache_kafka = "apache" in tiers_plugin.words_of_parameters(nodeid) or _names_it(file)
    return "apache_kafka" if is_for_apache_kafka and not is_quick else file


@cache
def _names_it(file: str) -> bool:
    return "apache_kafka:" in (ROOT / file).read_text()


@cache
def _has_session(file: str) -> bool:
    """Return True for a file that requests the fixture `spark`, or starts its own drivers."""
    text = (ROOT / file).read_text()
    return "spark: Any" in text or "PYSPARK_PYTHON" in text
