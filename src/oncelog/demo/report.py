"""The result as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import platform
from html import escape
from typing import Any

from oncelog.demo.flights import airline_names
from oncelog.demo.pictures import counts_picture, delay_picture, sequences_picture
from oncelog.demo.run import PARTITIONS, DemoResult, Judged
from oncelog.demo.story import first_lost_acknowledgement
from oncelog.page import page, table, verdict


def summary_rows(result: DemoResult) -> list[dict[str, Any]]:
    """The final table: a row per delivery semantics."""
    return [
        {
            "delivery": judged.load.semantics.name,
            "settings": judged.load.semantics.settings_text(),
            "sent": judged.load.sent,
            "acknowledged": judged.load.acknowledged,
            "acks_lost": judged.faults.acknowledgements_lost,
            "requests_lost": judged.faults.requests_lost,
            "in_topic": judged.counts.records,
            "lost": judged.counts.lost,
            "doubled": judged.counts.doubled,
            "seconds": round(judged.load.seconds, 1),
        }
        for judged in result.judged
    ]


def render_report(result: DemoResult) -> str:
    """The whole page."""
    exact = result.judged[0]
    assert result.pipeline is not None
    parts = [
        "<h1>One record, once</h1>",
        f"<p>{result.flights:,} flights that left New York City in 2013, sent over a network that loses "
        f"acknowledgements and requests and reorders (seed {result.seed}), into a broker killed by SIGKILL "
        f"in the middle and started again, read by a Spark stream. "
        f"Took {result.total_seconds:.0f} seconds.</p>",
        _verdict(result),
        "<h2>The same load under three promises</h2>",
        table(summary_rows(result)),
        counts_picture([(j.load.semantics.name, j.counts.lost, j.counts.doubled) for j in result.judged]),
        "<h2>How the exactly-once load went</h2>",
        _told(exact),
        sequences_picture(exact.marks, exact.load.killed_at_s),
        "<h2>One lost acknowledgement, step by step</h2>",
        _first_lost(exact),
        "<h2>What the Spark pipeline made of it</h2>",
        _pipeline_words(result),
        delay_picture(result.pipeline.table.to_pylist(), airline_names()),
        "<h2>Where the time went</h2>",
        table({"step": step, "seconds": f"{s:.1f}"} for step, s in result.step_seconds.items()),
        f"<p>{escape(platform.platform())}, Python {platform.python_version()}. "
        f"Again: <code>oncelog demo --seed {result.seed}</code></p>",
    ]
    return page("Oncelog: one record, once", parts)


def _verdict(result: DemoResult) -> str:
    if result.problems:
        return "".join(verdict(problem, is_good=False) for problem in result.problems)
    doubled = result.judged[1].counts.doubled
    words = (
        f"Exactly once: every one of {result.flights:,} flights is in the topic once, every sequence "
        f"unbroken. With idempotence off the same faults doubled {doubled:,} records."
    )
    return verdict(words, is_good=True)


def _told(judged: Judged) -> str:
    load, faults = judged.load, judged.faults
    return (
        f"<p>{faults.produce_requests:,} Produce requests. The network lost {faults.requests_lost} of them "
        f"and {faults.acknowledgements_lost} acknowledgements, and let {faults.requests_late} be overtaken. "
        f"The broker was killed after {load.killed_at_s:.1f} s and listened again "
        f"{load.restart_seconds:.2f} s later, on the same directory. It recognised "
        f"{faults.duplicates_recognised} batches as stored already and refused "
        f"{faults.out_of_order_refused} as out of order; the producer (id {load.producer_id}) put them in "
        f"order again. {PARTITIONS} partitions.</p>"
    )


def _first_lost(judged: Judged) -> str:
    rows = [
        {
            "time": f"{mark.time_ms / 1000:.3f} s",
            "partition": mark.partition,
            "sequences": f"{mark.sequence}-{mark.sequence + mark.records - 1}",
            "what happened": str(mark.happened),
            "offset": "" if mark.offset is None else mark.offset,
        }
        for mark in first_lost_acknowledgement(judged.marks)
    ]
    return table(rows) if rows else "<p>No acknowledgement was lost.</p>"


def _pipeline_words(result: DemoResult) -> str:
    assert result.pipeline is not None
    found = "nothing to object to" if result.audit and not result.audit.findings else "violations"
    return (
        f"<p>{result.pipeline.rows_read:,} records in {result.pipeline.batches} micro-batches became "
        f"{result.pipeline.table.num_rows} rows of Parquet, compared with the same aggregation over the "
        f"source data. The audit of every stored batch's sequence found {found}.</p>"
    )
