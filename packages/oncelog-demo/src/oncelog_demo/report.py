"""The result as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

import platform
from html import escape
from typing import Any

from oncelog.html_report import page, table, verdict
from oncelog_demo.flights import airline_names
from oncelog_demo.pictures import counts_picture, delay_picture, lanes_picture, sequences_picture
from oncelog_demo.run import PARTITIONS, DemoResult, Judged, JudgedEnrichment
from oncelog_demo.sink_attempts import Ended
from oncelog_demo.timeline import first_lost_acknowledgement


def summary_rows(result: DemoResult) -> list[dict[str, Any]]:
    """The final table: a row per delivery semantics, and one of what Spark wrote.

    `sent` counts what an application, or Spark's tasks, gave to producers, `aborted` what is on the log and
    no reader with read_committed is given.
    """
    rows = [
        {
            "delivery": judged.load.semantics.name,
            "settings": judged.load.semantics.settings_text(),
            "sent": judged.load.sent,
            "acks_lost": judged.faults.acknowledgements_lost,
            "requests_lost": judged.faults.requests_lost,
            "aborted": 0,
            "in_topic": judged.counts.records,
            "lost": judged.counts.lost,
            "doubled": judged.counts.doubled,
            "seconds": round(judged.load.seconds, 1),
        }
        for judged in result.judged
    ]
    rows += [_enrichment_row(judged) for judged in (result.enriched, result.control) if judged is not None]
    return rows


def _enrichment_row(judged: JudgedEnrichment) -> dict[str, Any]:
    return {
        "delivery": judged.enrichment.sink.name,
        "settings": f'format("{judged.enrichment.sink.format}"), driver killed',
        "sent": judged.enrichment.rows_stored,
        "acks_lost": judged.faults.acknowledgements_lost,
        "requests_lost": judged.faults.requests_lost,
        "aborted": judged.aborted,
        "in_topic": judged.counts.records,
        "lost": judged.counts.lost,
        "doubled": judged.counts.doubled,
        "seconds": round(judged.enrichment.seconds, 1),
    }


def render_report(result: DemoResult) -> str:
    """The whole page."""
    exact, summary = result.judged[0], summary_rows(result)
    assert result.pipeline is not None and result.enriched is not None
    enrichment = result.enriched.enrichment
    parts = [
        "<h1>One record, once</h1>",
        f"<p>{result.flights:,} flights that left New York City in 2013, sent over a network that loses "
        f"acknowledgements and requests and reorders (seed {result.seed}), into a broker killed by SIGKILL "
        f"in the middle and started again; from there read by Spark, joined with airline, airport and "
        f"aircraft, and written back, though Spark's driver was killed in the middle too. "
        f"Took {result.total_seconds:.0f} seconds.</p>",
        _verdict(result),
        "<h2>The same flights under each promise</h2>",
        table(summary),
        counts_picture([(row["delivery"], row["lost"], row["doubled"]) for row in summary]),
        "<h2>How the exactly-once load went</h2>",
        _told(exact),
        sequences_picture(exact.marks, exact.load.killed_at_s),
        "<h2>One lost acknowledgement, step by step</h2>",
        _first_lost(exact),
        "<h2>Spark writes, and its driver is killed in the middle of a micro-batch</h2>",
        _enrichment_words(result.flights, result.enriched),
        _control_words(result),
        lanes_picture(enrichment.attempts, enrichment.killed_at_ms),
        "<h2>What Spark made of the enriched flights</h2>",
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
        f"Exactly once: every one of {result.flights:,} flights is in the topic once, and once in the topic "
        f"that Spark wrote, every sequence unbroken. With idempotence off the same faults doubled "
        f"{doubled:,} records."
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


def _enrichment_words(flights: int, judged: JudgedEnrichment) -> str:
    e = judged.enrichment
    killed = max(each.batch for each in e.attempts if each.begin_ms < e.killed_at_ms)
    again = [each for each in e.attempts if each.batch == killed and each.begin_ms > e.killed_at_ms]
    skipped = sum(each.ended is Ended.SKIPPED for each in again)
    return (
        f"<p>Spark cuts the stream into micro-batches, and each lane of a micro-batch is written in a "
        f"transaction of its own, over the same faulty network. As the commit of a lane of batch {killed} "
        f"was lost on its way, the driver was killed by SIGKILL: the log held {e.rows_at_kill:,} rows, of "
        f"which readers with <code>read_committed</code> were given {e.rows_visible_at_kill:,}. Begun again "
        f"from its checkpoint, Spark repeated batch {killed}: {skipped} lanes found their marker of it, "
        f"compared their rows with it and wrote nothing; the other {len(again) - skipped} wrote.</p>"
        f"<p>In the end {judged.counts.records:,} rows are committed, one for each of {flights:,} flights, "
        f"with the airline, airport and aircraft that the source data gives it; {judged.aborted:,} more are "
        f"on the log, of attempts that were aborted, and <code>read_committed</code> hides them.</p>"
    )


def _control_words(result: DemoResult) -> str:
    if result.control is None:
        return f"<p>The same with Spark's own Kafka sink was left out: {escape(result.control_left_out)}.</p>"
    return (
        f"<p>Spark's own Kafka sink, its driver killed in the middle of the same micro-batch, doubled "
        f"{result.control.counts.doubled:,} rows.</p>"
    )


def _pipeline_words(result: DemoResult) -> str:
    assert result.pipeline is not None
    found = "nothing to object to" if result.audit and not result.audit.findings else "violations"
    return (
        f"<p>A second stream read them: {result.pipeline.rows_read:,} records in "
        f"{result.pipeline.batches} micro-batches became {result.pipeline.table.num_rows} rows of Parquet, "
        f"compared with the same aggregation over the "
        f"source data. The audit of every stored batch's sequence, in both topics, found {found}.</p>"
    )
