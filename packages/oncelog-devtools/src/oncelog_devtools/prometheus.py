"""Runs Prometheus on the loopback interface, with the alert rules of this project."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import oncelog
from oncelog.errors import ConfigError
from oncelog.testing.process import NodeProcess, dying_with_parent, free_ports
from oncelog_devtools.apache_kafka import MissingDependency

JOB = "oncelog"


class PrometheusServer:
    """A Prometheus that scrapes `targets` (HOST:PORT of their metrics) every `interval_s` seconds.

    `nodes` has one process. Its page is Prometheus's own. `token_file` contains the targets' bearer token.
    Where `setpriv` exists (Linux), the process dies with the thread that launched it, unless `outlive_parent`
    is set. Raises MissingDependency without Prometheus, and ConfigError without targets or the token file.
    """

    def __init__(
        self,
        directory: Path,
        targets: Sequence[str],
        *,
        interval_s: int = 15,
        token_file: Path | None = None,
        outlive_parent: bool = False,
    ) -> None:
        if not targets:
            raise ConfigError("name at least one HOST:PORT of metrics (oncelog serve --metrics-port PORT)")
        program = shutil.which("prometheus")
        if program is None:
            raise MissingDependency(
                "prometheus is not on PATH: install it (Debian, Ubuntu: sudo apt-get install prometheus)"
            )
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        settings = directory / "prometheus.yml"
        # YAML contains JSON.
        settings.write_text(json.dumps(_settings(targets, interval_s, token_file), indent=2) + "\n")
        (port,) = free_ports(1)
        launch = [] if outlive_parent else dying_with_parent()
        command = [*launch, program, f"--config.file={settings}", f"--web.listen-address=127.0.0.1:{port}"]
        command.append(f"--storage.tsdb.path={directory / 'data'}")
        log, page = directory / "server.log", f"http://127.0.0.1:{port}"
        # Prometheus accepts connections, and answers with status 503, while it still opens its data.
        node = NodeProcess(
            "prometheus", port, log, command, mark=str(settings), page=page, ready_path="/-/ready"
        )
        self.nodes = [node]

    def start(self) -> None:
        """Start Prometheus, and wait until it answers queries. Raises TimedOut."""
        self.nodes[0].start()

    def stop(self) -> None:
        """Stop Prometheus. Its data stays."""
        self.nodes[0].stop()


def _settings(targets: Sequence[str], interval_s: int, token_file: Path | None) -> dict[str, object]:
    job: dict[str, object] = {"job_name": JOB, "static_configs": [{"targets": list(targets)}]}
    if token_file is not None:
        if not token_file.is_file():
            raise ConfigError(f"{token_file}: no such file")
        job["authorization"] = {"credentials_file": str(token_file.absolute())}
    interval = {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"}
    return {"global": interval, "rule_files": [str(_alert_rules())], "scrape_configs": [job]}


def _alert_rules() -> Path:
    """Return the file of alert rules: in an installed wheel, or else in the checkout."""
    package = Path(oncelog.__file__).parent
    installed = package / "monitoring" / "alerts.yml"
    return installed if installed.exists() else package.parents[1] / "docs" / "alerts.yml"
