"""Run a command against Oncelog or Apache Kafka, with the listeners and users that foreign test suites need.

    python tools/foreign_suites/run.py oncelog -- COMMAND ...
    python tools/foreign_suites/run.py kafka -X num.partitions=2 -- COMMAND ...

The environment of the command contains the broker's addresses; docs/internals/foreign-suites.md lists the
variables. Without a command the broker runs until SIGTERM. The exit code is the command's, or 124 if the
command ran longer than --limit seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization
from oncelog_devtools.apache_kafka import ApacheKafka, fetch_jars

from oncelog.client.admin.blocking import Admin
from oncelog.testing.process import NodeProcess, dying_with_parent, free_ports

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
USERS = {"admin": "admin", "test": "test", "testuser": "testpass", "alice": "alice-secret"}
"""Users for SCRAM and PLAIN, with their passwords. The first one is a super user."""

COMMON: dict[str, object] = {
    "node.id": 0,
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "super.users": "User:admin",
    "auto.create.topics.enable": "true",
    "num.partitions": 4,
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1000,
    "ssl.keystore.type": "PEM",
    "ssl.truststore.type": "PEM",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
}
SINGLE_KAFKA: dict[str, object] = {
    "inter.broker.listener.name": "PLAINTEXT",
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
}


def main() -> int:
    """Start the broker, run the command, stop the broker. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("broker", choices=["oncelog", "kafka"])
    parser.add_argument("--port", action="append", default=[], help="PROTOCOL=PORT; otherwise any free one.")
    parser.add_argument("--certificates", type=Path, help="Directory with server.key, server.crt and ca.crt.")
    parser.add_argument("--limit", type=float, default=1800, help="Seconds that the command may take.")
    parser.add_argument("-X", "--property", action="append", default=[], help="KEY=VALUE of the broker.")
    # argparse would parse the command's own options, even after `--`. So it gets only the words before `--`.
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    command = words[end + 1 :]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ports = dict(zip(PROTOCOLS, free_ports(4), strict=True))
    ports |= {protocol: int(port) for protocol, port in (item.split("=") for item in arguments.port)}
    with tempfile.TemporaryDirectory(prefix="foreign-suite-") as name:
        directory = Path(name)
        properties = COMMON | certificate_properties(arguments.certificates, directory)
        properties |= dict(item.split("=", 1) for item in arguments.property)
        # kafka-python reads this setting from the broker's properties.
        properties["advertised.listeners"] = ",".join(
            f"{name}://127.0.0.1:{ports[name]}" for name in PROTOCOLS
        )
        start = start_oncelog if arguments.broker == "oncelog" else start_kafka
        with start(directory, ports, properties):
            with Admin({"bootstrap.servers": f"127.0.0.1:{ports['PLAINTEXT']}"}) as admin:
                for user, password in USERS.items():
                    admin.set_user(user, password)
            print("ready", *(f"{protocol}=127.0.0.1:{port}" for protocol, port in ports.items()), flush=True)
            if not command:
                signal.pause()
            return run(command, suite_environment(directory, ports), arguments.limit)


def certificate_properties(given: Path | None, directory: Path) -> dict[str, object]:
    """Return the TLS settings. If no directory with a certificate is given, make one."""
    key_store, trust_store = directory / "server.pem", directory / "ca.pem"
    if given is not None:
        key_store.write_text((given / "server.key").read_text() + (given / "server.crt").read_text())
        trust_store.write_text((given / "ca.crt").read_text())
    else:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1", "localhost")
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        # Write the private key as PKCS #8, the only format in which Java reads it.
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        key_store.write_bytes(text + b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        authority.cert_pem.write_to_path(trust_store)
    return {"ssl.keystore.location": key_store, "ssl.truststore.location": trust_store}


@contextmanager
def start_oncelog(directory: Path, ports: dict[str, int], properties: dict[str, object]) -> Iterator[None]:
    """Run Oncelog's broker for the `with` block."""
    config = directory / "broker.properties"
    config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    command = [
        *dying_with_parent(),
        sys.executable,
        "-m",
        "oncelog.cli.main",
        "serve",
        "--config",
        str(config),
    ]
    command += ["--data-dir", str(directory / "data"), "--log-level", "warning"]
    for protocol, port in ports.items():
        command += ["--listen", f"{protocol}://127.0.0.1:{port}"]
    log = Path(os.environ.get("FOREIGN_SUITE_LOG", directory / "broker.log"))
    node = NodeProcess("oncelog", ports["PLAINTEXT"], log, command, mark=str(config))
    node.start()
    try:
        yield
    finally:
        node.stop()


@contextmanager
def start_kafka(directory: Path, ports: dict[str, int], properties: dict[str, object]) -> Iterator[None]:
    """Run Apache Kafka for the `with` block."""
    module = "org.apache.kafka.common.security"
    plain = " ".join(f'user_{user}="{password}"' for user, password in USERS.items())
    for protocol in ("sasl_plaintext", "sasl_ssl"):
        name = f"listener.name.{protocol}"
        properties[f"{name}.plain.sasl.jaas.config"] = f"{module}.plain.PlainLoginModule required {plain};"
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            properties[f"{name}.{mechanism}.sasl.jaas.config"] = f"{module}.scram.ScramLoginModule required;"
    (controller,) = free_ports(1)
    listeners = [f"{protocol}://127.0.0.1:{port}" for protocol, port in ports.items()]
    fixed = {
        "listeners": ",".join([*listeners, f"CONTROLLER://127.0.0.1:{controller}"]),
        "controller.quorum.voters": f"0@127.0.0.1:{controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,"
        + ",".join(f"{name}:{name}" for name in PROTOCOLS),
    }
    kafka = ApacheKafka(directory / "kafka", properties=SINGLE_KAFKA | properties | fixed, heap_mb=1024)
    kafka.nodes[0].port = ports["PLAINTEXT"]
    with kafka:
        yield


def suite_environment(directory: Path, ports: dict[str, int]) -> dict[str, str]:
    """Return the environment variables by which each suite finds the running broker."""
    address = {protocol: f"127.0.0.1:{port}" for protocol, port in ports.items()}
    test_conf = directory / "test.conf"
    test_conf.write_text(
        f"bootstrap.servers={address['PLAINTEXT']}\ntest.topic.random=true\ntest.timeout.multiplier=3\n"
    )
    secured_conf = directory / "test_sasl.conf"
    secured_conf.write_text(
        f"bootstrap.servers={address['SASL_PLAINTEXT']}\ntest.topic.random=true\ntest.timeout.multiplier=3\nsecurity.protocol=SASL_PLAINTEXT\n"
        "sasl.mechanism=SCRAM-SHA-256\nsasl.username=testuser\nsasl.password=testpass\n"
    )
    # Make a directory with the scripts and jars of a release of Apache Kafka, which librdkafka's tests
    # expect.
    kafka_path = directory / "kafka_root"
    kafka_path.mkdir()
    (kafka_path / "bin").symlink_to(Path(__file__).parent / "kafka_root" / "bin")
    (kafka_path / "libs").symlink_to(Path(fetch_jars()).parent)
    return {
        **os.environ,
        # franz-go
        "KGO_SEEDS": address["PLAINTEXT"],
        "KGO_TEST_RF": "1",
        "KGO_TEST_STABLE_FETCH": "true",
        "KGO_TEST_SCRAM_SEEDS": address["SASL_PLAINTEXT"],
        "KGO_TEST_SCRAM": "testuser:testpass",
        # librdkafka
        "RDKAFKA_TEST_CONF": str(test_conf),
        "TEST_KAFKA_VERSION": "4.3.0",
        "BROKERS": address["PLAINTEXT"],
        "RDKAFKA_TEST_CONF_SASL": str(secured_conf),
        "KAFKA_PATH": str(kafka_path),
        "SUITE_PYTHON": sys.executable,
        # kafka-python
        "KAFKA_URI": f"kafka://{address['PLAINTEXT']}",
        "KAFKA_VERSION": os.environ.get("KAFKA_VERSION", "4.3.0"),
        **{f"{protocol}_ADDRESS": text for protocol, text in address.items()},
    }


def run(command: list[str], environment: dict[str, str], limit_s: float) -> int:
    """Run the command in a new session. If it takes longer than `limit_s`, kill the session."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s", file=sys.stderr)
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
