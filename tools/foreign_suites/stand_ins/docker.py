"""A replacement for the package `docker` in aiokafka's fixtures: `containers.run` starts SUITE_BROKER.

See docs/internals/foreign-suites.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

RUN = str(Path(__file__).parents[1] / "run.py")
PORTS = {
    "PLAINTEXT": "ADVERTISED_PORT",
    "SSL": "ADVERTISED_SSL_PORT",
    "SASL_PLAINTEXT": "ADVERTISED_SASL_PLAINTEXT_PORT",
    "SASL_SSL": "ADVERTISED_SASL_SSL_PORT",
}
FLAGS = ("force", "add", "remove", "list", "cluster", "producer", "consumer")
RESOURCES = ("topic", "group", "transactional-id")
OPTIONS = (*RESOURCES, "allow-principal", "deny-principal", "operation", "authorizer-properties", "principal")


class Container:
    """A running broker, or the container in which aiokafka's fixtures make certificates."""

    def __init__(self, folder: str, port: object = None, process: Any = None) -> None:
        self._folder, self._bootstrap, self._process = folder, f"127.0.0.1:{port}", process

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)

    def exec_run(self, command: str | list[str], user: str = "") -> tuple[int, bytes]:
        """Do the work of a command in the container: make certificates, or add or remove ACLs.

        Return its exit code and output.
        """
        if isinstance(command, list):
            return _done(["bash", os.path.abspath("gen-ssl-certs.sh")], self._folder)
        program, *words = shlex.split(command)
        if program.endswith("kafka-acls.sh"):
            return _done([os.environ["SUITE_ONCELOG"], *_acl_command(words), "-b", self._bootstrap])
        # The only other command is kafka-configs.sh, which adds users. Do nothing: run.py has added them.
        return 0, b""


def _done(command: list[str], folder: str | None = None) -> tuple[int, bytes]:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(command, done.stdout.decode(), file=sys.stderr)
    return done.returncode, done.stdout


def _acl_command(words: list[str]) -> list[str]:
    """Translate the options of kafka-acls.sh to those of `oncelog acls`."""
    parser = argparse.ArgumentParser()
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action="store_true")
    for option in OPTIONS:
        parser.add_argument(f"--{option}")
    given = vars(parser.parse_args(words))
    if given["list"]:
        return ["acls", "list"]
    command = ["acls", "add"] if given["add"] else ["acls", "remove", "--yes"]
    for option in (*RESOURCES, *(("allow-principal", "deny-principal") if given["add"] else ())):
        if given[option.replace("-", "_")]:
            command += [f"--{option}", given[option.replace("-", "_")]]
    if given["add"]:
        command += ["--operation", given["operation"].upper()] if given["operation"] else []
        command += [f"--{flag}" for flag in ("producer", "consumer") if given[flag]]
    else:
        command += ["--principal", given["allow_principal"] or given["deny_principal"]]
    return [*command, "--cluster"] if given["cluster"] else command


class _Containers:
    def run(
        self,
        image: str,
        *,
        volumes: dict[Any, Any],
        environment: dict[str, Any] | None = None,
        **_: object,
    ) -> Container:
        folders = [str(folder) for folder, place in volumes.items() if place["bind"] == "/ssl_cert"]
        # A container without environment is the one that makes certificates. It needs no broker.
        if environment is None:
            return Container(folders[0])
        command = [os.environ["SUITE_PYTHON"], RUN, os.environ["SUITE_BROKER"], "--certificates", folders[0]]
        command += ["-X", f"num.partitions={environment['NUM_PARTITIONS']}", "-X", "ssl.client.auth=required"]
        # The fixtures set ACLs over the PLAINTEXT listener, so User:ANONYMOUS must be a super user.
        command += ["-X", "super.users=User:ANONYMOUS;User:admin"]
        for protocol, key in PORTS.items():
            command += ["--port", f"{protocol}={environment[key]}"]
        own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=own)
        assert process.stdout is not None and process.stdout.readline().startswith(b"ready")
        return Container(folders[0], environment["ADVERTISED_PORT"], process)


def from_env() -> Any:
    """Return a replacement for Docker's client, with the attributes that the fixtures use."""
    images = types.SimpleNamespace(pull=lambda image: None)
    return types.SimpleNamespace(containers=_Containers(), images=images, close=lambda: None)


models = types.SimpleNamespace(containers=types.SimpleNamespace(Container=Container))
