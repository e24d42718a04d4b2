"""The sink refuses plans that may give other rows when a micro-batch is repeated, before it writes any
rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.spark.topics import Collected, create_topic, fill, read_stream, take_back

import oncelog
from oncelog.errors import ConfigError
from oncelog.spark import require_deterministic
from oncelog.spark.sink.determinism import PlanPart, _parts, find_reason

pytestmark = [pytest.mark.behaviour("P2"), pytest.mark.spark]
KINDS = "expressions", "subqueries", "children"
TABLE = Path(__file__).parents[1] / "tables" / "spark_determinism.txt"
ROWS = [
    [cell.strip() for cell in line.split("|")] for line in TABLE.read_text().splitlines() if line[0] != "#"
]


@pytest.mark.parametrize(("part", "inputs", "reason"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_parts_that_are_not_deterministic_have_a_reason(part: str, inputs: str, reason: str) -> None:
    name, *flags = part.split()
    marks = "drops" in flags, "sorted" in flags
    found = find_reason(PlanPart(name, "text", "random" in flags, tuple(inputs.split()), *marks))
    assert (found or "-").endswith(reason) or reason in (found or "-")


class Sequence(list[Any]):
    """A stand-in for a Scala sequence of the JVM."""

    size, apply = list.__len__, list.__getitem__


def node(name: str, **parts: list[Any]) -> Any:
    """Return a stand-in for an operator of a plan in the JVM."""
    methods = {key: (lambda found=Sequence(parts.get(key, [])): found) for key in KINDS}
    kind = SimpleNamespace(getSimpleName=lambda: name)
    return SimpleNamespace(getClass=lambda: kind, nodeName=lambda: name, **methods)


def test_subqueries_and_long_plans_are_examined() -> None:
    """A plan can have more levels than Python's limit of recursion."""
    plan = node("Project", subqueries=[node("GlobalLimit")])
    for _ in range(2000):
        plan = node("Filter", children=[plan])
    assert [part.name for part in _parts(plan) if find_reason(part)] == ["GlobalLimit"]


def sorted_plans(spark: Any, stream: Any) -> dict[str, Any]:
    from pyspark.sql.functions import collect_list, size, sort_array

    table = spark.range(9)
    window = "(PARTITION BY id % 3 ORDER BY id)"
    return {
        "a sorted window": table.selectExpr(f"first(id) OVER {window}", f"sum(id / 2D) OVER {window}"),
        "a sorted limit": stream.groupBy("value").count().orderBy("count").select("value").limit(3),
        "a sorted list": table.groupBy().agg(sort_array(collect_list("id")), size(collect_list("id"))),
        "a sorted string": table.selectExpr("listagg(CAST(id AS STRING), ',') WITHIN GROUP (ORDER BY id)"),
    }


def test_the_plan_of_a_stream_is_examined_before_it_writes(spark: Any) -> None:
    from pyspark.sql.functions import udf

    stream = spark.readStream.format("rate").load().withWatermark("timestamp", "10 seconds")
    for name, frame in {
        "columns": stream.selectExpr("CAST(value AS STRING) AS key", "current_timestamp() AS at"),
        "duplicates": stream.dropDuplicates(),
        "aggregates": stream.groupBy("value").agg({"value": "sum", "timestamp": "max"}),
        "a function in Python": stream.select(udf(lambda value: value)("value")),
        "a join": stream.join(spark.range(10).withColumnRenamed("id", "value"), "value"),
        **sorted_plans(spark, stream),
    }.items():
        assert frame.transform(require_deterministic) is frame, name
    stream.createOrReplaceTempView("examined_stream")
    spark.range(9).createOrReplaceTempView("examined_table")
    chosen = "SELECT * FROM examined_stream WHERE value IN (SELECT id FROM examined_table LIMIT 3)"
    first = "SELECT *, (SELECT first(id) FROM examined_table) FROM examined_stream"
    random = udf(lambda value: value).asNondeterministic()
    for reason, frame in {
        "rand(": stream.selectExpr("rand() AS r"),
        "uuid(": stream.selectExpr("upper(uuid()) AS r"),
        "now() is the time of each attempt": stream.selectExpr("now() AS r"),
        "is not deterministic": stream.select(random("value")),
        "shuffle(": stream.where("shuffle(array(value))[0] > 1"),
        "keeps the rows that arrive first": stream.limit(3),
        "dropDuplicates(value) keeps the row that arrives first": stream.dropDuplicates(["value"]),
        "keeps the row that arrives first": stream.dropDuplicatesWithinWatermark(["value"]),
        "first(value) takes the row that arrives first": stream.groupBy("timestamp").agg({"value": "first"}),
        "use decimals": stream.selectExpr("value * 0.5D AS d").groupBy().agg({"d": "sum"}),
        "chooses rows by their order": stream.sample(0.5),
        "last(value) takes the row": stream.selectExpr("last(value) OVER (PARTITION BY timestamp)"),
        "GlobalLimit keeps the rows that arrive first": spark.sql(chosen),
        "takes the row that arrives first": spark.sql(first),
    }.items():
        with pytest.raises(ConfigError, match=re.escape(reason)):
            frame.transform(require_deterministic)


@pytest.mark.full("runs a query twice to prove what the rule about clocks rests on")
def test_a_repeated_micro_batch_has_the_same_current_timestamp_and_another_now(
    spark: Any, shared_broker: oncelog.Broker, topic: str, checkpoint: str
) -> None:
    bootstrap = shared_broker.bootstrap_servers
    create_topic(bootstrap, topic)
    fill(bootstrap, topic, 0, 1)
    stream = read_stream(spark, bootstrap, subscribe=topic, startingOffsets="earliest")
    clocks = stream.selectExpr("current_timestamp() AS kept", "current_date() AS day", "now() AS now")
    first, second = Collected(), Collected()
    first.run(clocks, checkpoint)
    take_back(checkpoint, "commits")
    second.run(clocks, checkpoint)
    ((before,),), ((after,),) = first.batches, second.batches
    assert (before.kept, before.day) == (after.kept, after.day)
    assert before.now < after.now
