"""The demonstration's result as one self-contained HTML file: no script, no font, no network."""

from __future__ import annotations

import platform
from html import escape
from typing import Any

from oncelog.html_report import page, table, verdict
from oncelog_demo.flights import airline_names
from oncelog_demo.pictures import counts_picture, delay_picture, sequences_picture, tasks_picture
from oncelog_demo.run import PARTITIONS, CheckedEnrichment, CheckedLoad, DemoResult
from oncelog_demo.sink_attempts import AttemptResult
from oncelog_demo.timeline import first_lost_acknowledgement


def summary_rows(result: DemoResult) -> list[dict[str, Any]]:
    """Return the final table: a row per delivery semantics, then a row per Spark sink.

    `sent` counts the records that the application passed to the producer, or all rows that a Spark sink
    stored. `aborted` counts records in the log that no read_committed consumer returns.
    """
    rows = [
        {
            "delivery": checked.load.semantics.name,
            "settings": checked.load.semantics.settings_text(),
            "sent": checked.load.sent,
            "acks_lost": checked.faults.acknowledgements_lost,
            "requests_lost": checked.faults.requests_lost,
            "aborted": 0,
            "in_topic": checked.counts.records,
            "lost": checked.counts.lost,
            "doubled": checked.counts.doubled,
            "seconds": round(checked.load.seconds, 1),
        }
        for checked in result.loads
    ]
    rows += [_enrichment_row(checked) for checked in (result.enriched, result.control) if checked is not None]
    return rows


def _enrichment_row(checked: CheckedEnrichment) -> dict[str, Any]:
    return {
        "delivery": checked.enrichment.sink.name,
        "settings": f'format("{checked.enrichment.sink.format}"), driver killed',
        "sent": checked.enrichment.rows_stored,
        "acks_lost": checked.faults.acknowledgements_lost,
        "requests_lost": checked.faults.requests_lost,
        "aborted": checked.aborted,
        "in_topic": checked.counts.records,
        "lost": checked.counts.lost,
        "doubled": checked.counts.doubled,
        "seconds": round(checked.enrichment.seconds, 1),
    }


def render_report(result: DemoResult) -> str:
    """Return the whole page as HTML."""
    exact, summary = result.loads[0], summary_rows(result)
    assert result.pipeline is not None and result.enriched is not None
    enrichment = result.enriched.enrichment
    parts = [
        "<h1>One record, once</h1>",
        f"<p>{result.flights:,} flights that left New York City in 2013, sent over a network that loses "
        f"and reorders requests and loses acknowledgements (seed {result.seed}). The broker was killed with "
        f"SIGKILL halfway and restarted. Spark then read the flights, joined them with airline, airport and "
        f"aircraft, and wrote them to another topic. Spark's driver was killed halfway, too. "
        f"All of it took {result.total_seconds:.0f} seconds.</p>",
        _verdict(result),
        "<h2>The same flights under each delivery guarantee</h2>",
        table(summary),
        counts_picture([(row["delivery"], row["lost"], row["doubled"]) for row in summary]),
        "<h2>The exactly-once load</h2>",
        _load_text(exact),
        sequences_picture(exact.marks, exact.load.killed_at_s),
        "<h2>One lost acknowledgement, step by step</h2>",
        _first_lost(exact),
        "<h2>Spark's driver is killed in the middle of a micro-batch</h2>",
        _enrichment_text(result.flights, result.enriched),
        _control_text(result),
        tasks_picture(enrichment.attempts, enrichment.killed_at_ms),
        "<h2>Spark's aggregation of the enriched flights</h2>",
        _pipeline_text(result),
        delay_picture(result.pipeline.table.to_pylist(), airline_names()),
        "<h2>Duration of each step</h2>",
        table({"step": step, "seconds": f"{s:.1f}"} for step, s in result.step_seconds.items()),
        f"<p>{escape(platform.platform())}, Python {platform.python_version()}. "
        f"Run it again: <code>oncelog demo --seed {result.seed}</code></p>",
    ]
    return page("Oncelog: one record, once", parts)


def _verdict(result: DemoResult) -> str:
    if result.problems:
        return "".join(verdict(problem, is_good=False) for problem in result.problems)
    doubled = result.loads[1].counts.doubled
    words = (
        f"Exactly once: each of the {result.flights:,} flights is once in the loaded topic "
        f"and once in the topic that Spark wrote, and no sequence has a gap. Without idempotence, faults of "
        f"the same kinds doubled {doubled:,} records."
    )
    return verdict(words, is_good=True)


def _load_text(checked: CheckedLoad) -> str:
    load, faults = checked.load, checked.faults
    return (
        f"<p>{faults.produce_requests:,} Produce requests. The network lost {faults.requests_lost} of them "
        f"and {faults.acknowledgements_lost} acknowledgements, and {faults.requests_late} requests were "
        f"overtaken. The broker was killed after {load.killed_at_s:.1f} s and accepted requests again "
        f"{load.restart_seconds:.2f} s later, with the same data directory. It recognised "
        f"{faults.duplicates_recognised} batches as already stored and rejected "
        f"{faults.out_of_order_rejected} as out of order; the producer (id {load.producer_id}) sent those "
        f"again in order. The topic has {PARTITIONS} partitions.</p>"
    )


def _first_lost(checked: CheckedLoad) -> str:
    rows = [
        {
            "time": f"{mark.time_ms / 1000:.3f} s",
            "partition": mark.partition,
            "sequences": f"{mark.sequence}-{mark.sequence + mark.records - 1}",
            "what happened": str(mark.event),
            "offset": "" if mark.offset is None else mark.offset,
        }
        for mark in first_lost_acknowledgement(checked.marks)
    ]
    return table(rows) if rows else "<p>No acknowledgement was lost.</p>"


def _enrichment_text(flights: int, checked: CheckedEnrichment) -> str:
    e = checked.enrichment
    killed = max(attempt.batch for attempt in e.attempts if attempt.begin_ms < e.killed_at_ms)
    again = [
        attempt for attempt in e.attempts if attempt.batch == killed and attempt.begin_ms > e.killed_at_ms
    ]
    skipped = sum(attempt.result is AttemptResult.SKIPPED for attempt in again)
    return (
        "<p>Spark divides the stream into micro-batches. Each task of a micro-batch writes in its own "
        f"transaction, over the same faulty network. When the commit of a task of batch {killed} was lost, "
        f"the driver was killed with SIGKILL. The log then held {e.rows_at_kill:,} rows, of which "
        f"<code>read_committed</code> consumers saw {e.rows_visible_at_kill:,}. Restarted from its "
        f"checkpoint, Spark repeated batch {killed}: {skipped} tasks found the marker of their earlier "
        f"commit, compared their rows with it and wrote nothing; the other {len(again) - skipped} "
        f"wrote.</p><p>In the end {checked.counts.records:,} rows are committed, one for each of the "
        f"{flights:,} flights, with the flight's airline, airport and aircraft from the source data. "
        f"{checked.aborted:,} more rows in the log belong to aborted attempts. "
        "<code>read_committed</code> consumers skip them.</p>"
    )


def _control_text(result: DemoResult) -> str:
    if result.control is None:
        reason = escape(result.control_left_out)
        return f"<p>The comparison with Spark's own Kafka sink was left out: {reason}.</p>"
    return (
        f"<p>The driver was killed in the middle of the same micro-batch with Spark's own Kafka sink, too. "
        f"That sink doubled {result.control.counts.doubled:,} rows.</p>"
    )


def _pipeline_text(result: DemoResult) -> str:
    assert result.pipeline is not None
    violations = "no violations" if result.audit and not result.audit.findings else "violations"
    return (
        f"<p>A second stream read the enriched flights: {result.pipeline.rows_read:,} records in "
        f"{result.pipeline.batches} micro-batches became {result.pipeline.table.num_rows} rows of Parquet, "
        f"which were compared with the same aggregation of the "
        f"source data. The audit of every stored batch's sequence numbers, in both topics, found "
        f"{violations}.</p>"
    )
