#!/usr/bin/env python3
"""Stand in for Kafka's script of this name, for other projects' test suites.

`kafka.Kafka FILE` (kafka-python) runs SUITE_BROKER with the listener and the keys of FILE; any other class
(librdkafka's own) runs with Apache Kafka's jars. See docs/internals/foreign-suites.md.
"""

import os
import subprocess
import sys
from pathlib import Path

if sys.argv[1] != "kafka.Kafka":
    class_path = f"{os.environ.get('CLASSPATH', '.')}:{os.environ['KAFKA_PATH']}/libs/*"
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    os.execvpe("java", ["java", "-Xmx256m", "-cp", class_path, *sys.argv[1:]], environment)
lines = [line.partition("=") for line in Path(sys.argv[2]).read_text().splitlines() if "=" in line]
properties = {key: value for key, _, value in lines}
protocol, _, address = properties["listeners"].split(",")[0].partition("://")
run = str(Path(__file__).parents[2] / "run.py")
command = [os.environ["SUITE_PYTHON"], run, os.environ["SUITE_BROKER"]]
command += ["--port", f"{protocol}={address.rpartition(':')[2]}"]
if "ssl.keystore.location" in properties:
    store = properties["ssl.keystore.location"]
    folder = Path(store).parent
    p12, both = folder / "server.p12", ["-passin", "pass:foobar", "-nodes"]
    subprocess.run(
        ["keytool", "-importkeystore", "-noprompt", "-srckeystore", store, "-srcstorepass", "foobar"]
        + ["-destkeystore", str(p12), "-deststoretype", "pkcs12", "-deststorepass", "foobar"],
        check=True,
    )
    for name, what in (("server.key", "-nocerts"), ("server.crt", "-nokeys")):
        subprocess.run(["openssl", "pkcs12", "-in", str(p12), what, *both, "-out", str(folder / name)], check=True)
    (folder / "ca.crt").write_bytes((folder / "ca-cert").read_bytes())
    command += ["--certificates", str(folder)]
environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "KAFKA_OPTS")}
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as broker:
    import signal

    signal.signal(signal.SIGTERM, lambda *_: broker.terminate())
    for line in broker.stdout:
        print(line, flush=True)
        if line.startswith("ready"):
            print("[KafkaRaftServer nodeId=0] Kafka Server started", flush=True)
            print("Replayed UserScramCredentialRecord creating new entry for alice", flush=True)
sys.exit(broker.returncode)
