"""Write docs/grafana.json: a Grafana dashboard over the broker's metrics.

Import the file in Grafana (Dashboards, New, Import), and choose the Prometheus data source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"
_ON = '{instance=~"$instance"}'
_RATE = "[$__rate_interval]"
_BUCKETS = "oncelog_request_duration_seconds_bucket"

# For each panel: title, Grafana's unit, and (expression, legend) of each line in the panel.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Duplicates acknowledged and batches refused", "ops", (
        (f"rate(oncelog_duplicates_acknowledged_total{_ON}{_RATE})", "duplicates"),
        (f"rate(oncelog_out_of_order_refused_total{_ON}{_RATE})", "out of order"),
        (f"rate(oncelog_fenced_refused_total{_ON}{_RATE})", "fenced"),
    )),
    ("Held back from read_committed readers", "short", (
        (f"oncelog_records_held_back{_ON}", "records"),
        (f"oncelog_partitions_held_back{_ON}", "partitions"),
    )),
    ("Transactions", "short", (
        (f"oncelog_transactions_open{_ON}", "open"),
        (f"increase(oncelog_transactions_timed_out_total{_ON}{_RATE})", "timed out"),
    )),
    ("Records stored", "rps", ((f"rate(oncelog_records_stored_total{_ON}{_RATE})", "{{instance}}"),)),
    ("Bytes", "Bps", (
        (f"rate(oncelog_bytes_received_total{_ON}{_RATE})", "received"),
        (f"rate(oncelog_bytes_sent_total{_ON}{_RATE})", "sent"),
    )),
    ("Records by topic (oncelog.metrics.names)", "rps", (
        (f"sum by (topic) (rate(oncelog_partition_end_offset{_ON}{_RATE}))", "{{topic}}"),
    )),
    ("Size by topic (oncelog.metrics.names)", "bytes", (
        (f"sum by (topic) (oncelog_partition_size_bytes{_ON})", "{{topic}}"),
    )),
    ("Request duration, 99th percentile", "s", (
        (f"histogram_quantile(0.99, sum by (api, le) (rate({_BUCKETS}{_ON}{_RATE})))", "{{api}}"),
    )),
    ("Event loop lag", "s", ((f"oncelog_event_loop_lag_seconds{_ON}", "{{instance}}"),)),
    ("Append errors", "ops", ((f"rate(oncelog_append_errors_total{_ON}{_RATE})", "{{error}}"),)),
    ("Connections", "short", (
        (f"oncelog_connections{_ON}", "open"),
        (f"rate(oncelog_connections_ended_total{_ON}{_RATE})", "ended: {{bound}}"),
    )),
    ("Throttled responses", "ops", ((f"rate(oncelog_throttled_total{_ON}{_RATE})", "{{quota}}"),)),
    ("Processor", "percentunit", ((f"rate(process_cpu_seconds_total{_ON}{_RATE})", "{{instance}}"),)),
    ("Memory", "bytes", (
        (f"process_resident_memory_bytes{_ON}", "resident"),
        (f"oncelog_request_bytes_held{_ON}", "requests held"),
        (f"oncelog_response_bytes_held{_ON}", "responses held"),
    )),
    ("Free disk", "bytes", ((f"oncelog_disk_free_bytes{_ON}", "{{instance}}"),)),
    ("Producer states and partitions", "short", (
        (f"oncelog_producer_ids_active{_ON}", "producer states"),
        (f"oncelog_partitions{_ON}", "partitions"),
        (f"oncelog_partitions_offline{_ON}", "offline"),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: three panels in a row."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"x": index % 3 * 8, "y": index // 3 * 8, "w": 8, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + number), "expr": expression, "legendFormat": legend, "datasource": source}
                for number, (expression, legend) in enumerate(lines)
            ],
        }
        for index, (title, unit, lines) in enumerate(PANELS)
    ]
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "type": "query",
            "datasource": source,
            "query": "label_values(oncelog_build_info, instance)",
            "includeAll": True,
            "multi": True,
            "refresh": 2,
        },
    ]
    return {
        "title": "Oncelog",
        "uid": "oncelog",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables},
        "panels": panels,
    }


def text() -> str:
    """Return the content of docs/grafana.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
