"""The machine and the software versions of a measurement, without which its figures mean nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from oncelog_devtools.apache_kafka import VERSION

PACKAGES = ("oncelog", "confluent-kafka", "aiokafka", "kafka-python", "crc32c", "pyarrow", "uvloop")
"""The packages whose versions affect the figures."""


def describe_machine() -> dict[str, object]:
    """Return processor, cores, memory, system, and the versions of the measured software."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "apache-kafka": VERSION,
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
