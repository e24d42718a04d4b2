"""Find the parts of a plan that may give different rows when Spark computes a micro-batch again.

The sink itself cannot do this: Spark creates it in a process that has neither the plan nor a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oncelog.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WALL_CLOCK = {"Now", "CurrentTime"}
"""Expressions that read the clock in each attempt. current_timestamp() and current_date() are not among them:
their times are stored in the checkpoint, so every attempt gets the same times.
"""
_BY_ORDER = {
    "GlobalLimit": "keeps the rows that arrive first",
    "Offset": "drops the rows that arrive first",
    "Tail": "keeps the rows that arrive last",
    "Sample": "chooses rows by their order",
    "MaxBy": "takes any of several rows with the same maximum",
    "MinBy": "takes any of several rows with the same minimum",
    "ApproximatePercentile": "depends on the order of its input",
    "HistogramNumeric": "depends on the order of its input",
    "First": "takes the row that arrives first",
    "Last": "takes the row that arrives last",
    "AnyValue": "takes the row that arrives first",
    "CollectList": "has its elements in the order of arrival",
    "CollectSet": "has its elements in the order of arrival",
    "ListAgg": "has its elements in the order of arrival",
    **dict.fromkeys(
        (
            *("HllSketchAgg", "HllUnionAgg", "TupleSketchAggDouble", "TupleUnionAggDouble"),
            *(f"Kll{kind}Agg{of}" for kind in ("Sketch", "Merge") for of in ("Bigint", "Float", "Double")),
        ),
        "depends on the order of its input",
    ),
    "Mode": "takes any of several values that are equally frequent",
}
_KEEPS_SOME_ROWS = {"GlobalLimit", "Offset", "Tail"}
_KEEPS_ORDER = {*_KEEPS_SOME_ROWS, "LocalLimit", "Project", "Filter", "SubqueryAlias"}
_SORTS_INPUT = {"SortArray", "ArraySort", "Size"}
"""Expressions whose result does not depend on the order of the elements of their first input."""
_DEDUPLICATES = {"Deduplicate", "DeduplicateWithinWatermark"}
_FLOAT_SUMS = {"Sum", "Average", "TrySum", "TryAverage", "RegrAvgX", "RegrAvgY"}
_FLOAT_MOMENTS = {
    "StddevPop",
    "StddevSamp",
    "VariancePop",
    "VarianceSamp",
    "Skewness",
    "Kurtosis",
    "Corr",
    "CovPopulation",
    "CovSample",
    "RegrSlope",
    "RegrIntercept",
    "RegrR2",
    "RegrSXX",
    "RegrSXY",
    "RegrSYY",
    "Product",
    "VectorSum",
    "VectorAvg",
}


@dataclass(frozen=True, slots=True)
class PlanPart:
    """An operator or expression of a plan.

    - `name`: the name of Spark's class.
    - `text`: the part's SQL, or a short description.
    - `is_random`: Spark reports that this part is not deterministic, although all of its inputs are.
    - `input_types`: the types of the part's inputs.
    - `has_dropped_columns`: the part is a deduplication that ignores some columns when it compares rows.
    - `is_sorted`: the plan sorts the part's input or output, or their order does not matter.
    """

    name: str
    text: str
    is_random: bool = False
    input_types: tuple[str, ...] = ()
    has_dropped_columns: bool = False
    is_sorted: bool = False


def find_reason(part: PlanPart) -> str | None:
    """Return why this part may give different rows when a micro-batch is repeated, or None."""
    if part.name in _WALL_CLOCK:
        return f"{part.text} is the time of each attempt; use current_timestamp()"
    if part.is_random:
        return f"{part.text} is not deterministic"
    if part.is_sorted:
        return None
    if part.name in _BY_ORDER:
        return f"{part.text} {_BY_ORDER[part.name]}"
    if part.name in _DEDUPLICATES and part.has_dropped_columns:
        return f"{part.text} keeps the row that arrives first, and ignores the other columns"
    is_float_sum = part.name in _FLOAT_SUMS and {"float", "double"} & set(part.input_types)
    if is_float_sum:
        return f"{part.text} adds floating-point numbers in the order in which they arrive; use decimals"
    if part.name in _FLOAT_MOMENTS:
        return f"{part.text} is computed with floating-point numbers, in the order in which they arrive"
    return None


def require_deterministic(df: DataFrame) -> DataFrame:
    """Return `df`, or raise ConfigError that names the parts of its plan that are not deterministic.

        orders.transform(require_deterministic).writeStream.format("oncelog")

    Functions in Python count as deterministic unless asNondeterministic() says otherwise. So do sources,
    and the order of equal rows in a window or sort. With Spark Connect the plan cannot be examined, so
    ConfigError is raised as well.
    """
    if not hasattr(df, "_jdf"):
        raise ConfigError(
            "require_deterministic needs a session of classic Spark: a client of Spark Connect cannot see "
            "the analyzed plan"
        )
    reasons = dict.fromkeys(filter(None, map(find_reason, _parts(df._jdf.queryExecution().analyzed()))))
    if reasons:
        raise ConfigError(
            "this plan may give other rows when a micro-batch is repeated: "
            + "; ".join(reasons)
            + ". Change these parts, or use write_atomic, which needs no deterministic plan"
        )
    return df


def _parts(plan: Any) -> Iterator[PlanPart]:
    """Yield the operators and expressions of a plan in the JVM, including those of its subqueries."""
    plans = [plan]
    while plans:
        # Use a loop instead of recursion: a plan can be deeper than Python's recursion limit. See
        # test_subqueries_and_long_plans_are_examined.
        plan = plans.pop()
        name = plan.getClass().getSimpleName()
        ignores = name in _DEDUPLICATES and plan.keys().size() < plan.output().size()
        keys = f"dropDuplicates({', '.join(key.name() for key in _items(plan.keys()))})" if ignores else ""
        is_sorted = name in _KEEPS_SOME_ROWS and _is_sorted(plan)
        yield PlanPart(name, keys or plan.nodeName(), has_dropped_columns=ignores, is_sorted=is_sorted)
        for expression in _items(plan.expressions()):
            yield from _expressions(expression)
        plans += [*_items(plan.subqueries()), *_items(plan.children())]


def _is_sorted(plan: Any) -> bool:
    """Return True if the rows of a plan come from a sort of all rows, and still have its order."""
    while (name := plan.getClass().getSimpleName()) in _KEEPS_ORDER and (inputs := _items(plan.children())):
        plan = inputs[0]
    return name == "Sort" and bool(getattr(plan, "global")())


def _expressions(expression: Any) -> Iterator[PlanPart]:
    expressions = [(expression, False)]
    while expressions:
        expression, is_sorted = expressions.pop()
        inputs = _items(expression.children())
        is_random = not expression.deterministic() and all(each.deterministic() for each in inputs)
        name = expression.getClass().getSimpleName()
        if name == "ListAgg":
            is_sorted |= expression.orderExpressions().size() > 0
        if is_random or name in _WALL_CLOCK | _BY_ORDER.keys() | _FLOAT_SUMS | _FLOAT_MOMENTS:
            types = tuple(each.dataType().simpleString() for each in inputs)
            yield PlanPart(name, expression.sql(), is_random, types, is_sorted=is_sorted)
        if name == "WindowExpression":
            is_sorted = expression.windowSpec().orderSpec().size() > 0
        else:
            is_sorted = name in _SORTS_INPUT or (is_sorted and name == "AggregateExpression")
        expressions += [(each, is_sorted and number == 0) for number, each in enumerate(inputs)]


def _items(seq: Any) -> list[Any]:
    return [seq.apply(index) for index in range(seq.size())]
