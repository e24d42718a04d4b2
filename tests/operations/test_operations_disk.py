"""Disks that are full, read-only or owned by another user, under load and at the start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.broker import RawClient, batch
from support.operations import Load, fill, frozen, mounted, wait_for
from support.topics import producer_of
from support.wait import pause

from oncelog import errors
from oncelog.errors import DeliveryUnknown
from oncelog.server.embedded import Broker
from oncelog.testing.broker_process import BrokerProcess
from oncelog.wire.messages import InitProducerIdRequest

SMALL = {
    "offsets.topic.num.partitions": 2,
    "transaction.state.log.num.partitions": 2,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 200,
}


def refusal_of(client: RawClient) -> int:
    """Send an idempotent batch to the topic `probe`, and return the error code."""
    return int(client.produce("probe", batch(bytes(5000))).error_code)


def refusal_of_session(client: RawClient) -> int:
    """Ask for a new transactional id, and return the error code. It is 0 while the disk has space for a small
    record.
    """
    asked = InitProducerIdRequest(transactional_id="x" * 500, transaction_timeout_ms=60_000)
    return int(client.ask(asked, 4).error_code)


@pytest.mark.behaviour("I7", "I17")
@pytest.mark.parametrize(
    "ending", ["no end", *(pytest.param(end, marks=pytest.mark.soak) for end in ("SIGKILL", "SIGTERM"))]
)
def test_a_full_disk_under_load(tmp_path: Path, ending: str) -> None:
    """No acknowledged record is lost, consumers continue, and all clients recover once the disk has space
    again.
    """
    with (
        mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as disk,
        BrokerProcess(disk / "data", log_file=tmp_path / "broker.log", settings=SMALL) as broker,
        RawClient(broker.bootstrap_servers) as client,
        Load(broker.bootstrap_servers, padding=300) as load,
    ):
        client.create_topic("probe")
        load.wait_for_progress()
        fill(disk / "ballast")
        wait_for(lambda: refusal_of(client) == errors.KafkaStorageError.code)
        acked = load.acknowledged()
        load.check(acked=acked)
        with producer_of(broker.bootstrap_servers, delivery_timeout_ms=1500, request_timeout_ms=500) as late:
            sent = late.send("probe", bytes(5000))
            # The outcome of the batch is unknown: the broker sends the same error if it wrote the batch and
            # only the sync failed.
            with pytest.raises(DeliveryUnknown, match=r"last error: KAFKA_STORAGE_ERROR.* No space left"):
                sent.result(60)
        wait_for(lambda: refusal_of_session(client) == errors.NotCoordinator.code)
        if ending != "no end":
            broker.stop() if ending == "SIGTERM" else broker.kill()
            broker.start()
            load.check(acked=acked)
        (disk / "ballast").unlink()
        load.wait_for_progress()
        load.stop()
        load.check()
        log = (tmp_path / "broker.log").read_text()
        assert "Traceback" not in log
        assert 'event="disk refuses"' in log and "No space left on device: make room" in log


def serve(data_dir: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run `oncelog serve`, which must end by itself."""
    command = [*prefix, sys.executable, "-m", "oncelog.cli.main", "serve", "--data-dir", str(data_dir)]
    command += ["--listen", "127.0.0.1:0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_read_only_disk_at_the_start(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=8m", "tmpfs") as disk:
        with BrokerProcess(disk / "data", log_file=tmp_path / "broker.log"):
            pass
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=240)
        refused = serve(disk / "data")
    assert refused.returncode == 1
    assert f"{disk}/data" in refused.stderr and "Traceback" not in refused.stderr
    assert "Read-only file system" in refused.stderr and "mount the disk read-write" in refused.stderr


@pytest.mark.parametrize("denied", [".", "t-0/{}.log"])
def test_files_without_permissions_stop_the_start_with_the_remedy(tmp_path: Path, denied: str) -> None:
    """For example, files get such permissions if the broker was once started as root."""
    data_dir = tmp_path / "data"
    with Broker(data_dir) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        client.produce("t", batch(b"x"))
    # Root may read all files. So run the broker without the privileges that permit this.
    prefix = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    if prefix and shutil.which("setpriv") is None:
        pytest.skip("root may read everything: there is no setpriv to give that up")
    path = data_dir / denied.format("0" * 20)
    path.chmod(0o000)
    refused = serve(data_dir, *prefix)
    path.chmod(0o700)
    assert refused.returncode == 1, refused.stderr
    assert str(data_dir) in refused.stderr and "Traceback" not in refused.stderr
    assert "Permission denied" in refused.stderr and "chown, chmod" in refused.stderr


@pytest.mark.soak
@pytest.mark.behaviour("I7", "I17")
def test_a_disk_that_becomes_read_only_under_load(tmp_path: Path) -> None:
    """With errors=remount-ro, ext4 becomes read-only at an error.

    Consumers continue. Producers continue after repair and restart.
    """
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("no disk to break: there is no mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=240)
    how = ("-o", "loop,errors=remount-ro", str(image))
    with ExitStack() as stack:
        disk = stack.enter_context(mounted(tmp_path / "disk", *how))
        # Sync each record: the error may destroy unsynced data in the file system's journal, as a power loss
        # does.
        settings = SMALL | {"log.flush.interval.messages": 1}
        broker = BrokerProcess(disk / "data", log_file=tmp_path / "broker.log", settings=settings)
        broker.start()
        stack.callback(broker.kill)
        client = stack.enter_context(RawClient(broker.bootstrap_servers))
        client.create_topic("probe")
        load = stack.enter_context(Load(broker.bootstrap_servers, padding=300))
        load.wait_for_progress()
        with frozen(broker):
            # Wait until no sync is running: ext4 may report success to a sync during which the error occurs.
            pause(1)
            trigger_error(disk)
        wait_for(lambda: refusal_of(client) == errors.KafkaStorageError.code)
        acked = load.acknowledged()
        load.check(acked=acked)
        broker.kill()
        subprocess.run(["umount", str(disk)], check=True, timeout=240)
        subprocess.run(["e2fsck", "-fy", str(image)], timeout=60, capture_output=True)
        subprocess.run(["mount", *how, str(disk)], check=True, timeout=240)
        broker.start()
        load.wait_for_progress()
        load.stop()
        load.check()


def trigger_error(disk: Path) -> None:
    """Make the kernel find an error in the ext4 file system that is mounted there."""
    found = subprocess.run(
        ["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True, timeout=240
    )
    trigger = Path("/sys/fs/ext4") / Path(found.stdout.strip()).name / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip(f"no disk to break: there is no {trigger}")
    trigger.write_text("broken on purpose")
