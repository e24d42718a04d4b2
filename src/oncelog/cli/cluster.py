"""`oncelog cluster`: brokers, features, and versions of APIs."""

from __future__ import annotations

from typing import Any

import click

from oncelog.cli.common import bootstrap_options, emit, new_admin, output_option
from oncelog.cli.watch import watch_option


@click.group("cluster")
def command() -> None:
    """Show the cluster's brokers, features and versions.

    \b
    Examples:
      oncelog cluster describe
      oncelog cluster features
      oncelog cluster versions --api Produce
    """


@command.command("describe")
@watch_option
@bootstrap_options
@output_option
def describe(output: str, client_config: dict[str, Any]) -> None:
    """Show the cluster id, the brokers, and which of them is the controller.

    With KRaft, Apache Kafka reports an arbitrary broker as the controller.
    """
    with new_admin(client_config) as admin:
        cluster = admin.describe_cluster()
    rows = [
        {
            "cluster_id": cluster.cluster_id,
            "broker": broker.node_id,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "controller": broker.node_id == cluster.controller_id,
        }
        for broker in cluster.brokers
    ]
    emit(rows, output, columns=["cluster_id", "broker", "host", "port", "rack", "controller"])


@command.command("features")
@watch_option
@bootstrap_options
@output_option
def features(output: str, client_config: dict[str, Any]) -> None:
    """Show the levels of features, such as transaction.version, and what each broker supports."""
    with new_admin(client_config) as admin:
        brokers = admin.describe_broker_versions()
    rows = [
        {
            "feature": feature.name,
            "broker": broker.node_id,
            "level": feature.level,
            "min_level": feature.min_level,
            "max_level": feature.max_level,
        }
        for broker in brokers
        for feature in broker.features
    ]
    emit(rows, output, columns=["feature", "broker", "level", "min_level", "max_level"])


@command.command("versions")
@watch_option
@click.option("--api", "names", multiple=True, help="Only this API, by name or number. Repeatable.")
@bootstrap_options
@output_option
def versions(names: tuple[str, ...], output: str, client_config: dict[str, Any]) -> None:
    """Show the versions of each API of Kafka's protocol that each broker supports."""
    from oncelog.wire.messages import API_BY_KEY

    with new_admin(client_config) as admin:
        brokers = admin.describe_broker_versions()
    rows = [
        {
            "api": API_BY_KEY[key].name if key in API_BY_KEY else None,
            "key": key,
            "broker": broker.node_id,
            "min_version": low,
            "max_version": high,
        }
        for broker in brokers
        for key, (low, high) in sorted(broker.apis.items())
    ]
    wanted = {name.lower() for name in names}
    chosen = [row for row in rows if not wanted or {str(row["api"]).lower(), str(row["key"])} & wanted]
    if wanted and not chosen:
        raise click.ClickException(f"no broker has the API {' or '.join(names)}")
    emit(chosen, output, columns=["api", "key", "broker", "min_version", "max_version"])
