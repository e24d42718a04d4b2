"""The supervisor's child in tests, instead of Spark: `python support/pipeline/child_program.py PLAN`.

PLAN is JSON: a list of events for each run. A file counts the runs. A string in the list is an action:

    die       SIGKILL itself
    exit      exit with an error
    stay      run until asked to stop
    deaf      run even if asked to stop
    orphan    leave a process behind
    fork      leave a process behind that has this process's descriptors
    hold      suspend the supervisor
    release   resume the supervisor, with a SIGTERM pending
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

BATCH = {"event": "batch", "batch_id": 0, "rows_in": 3, "rows_out": 3, "seconds": 0.1, "lag": 0}


def main(plan: str) -> None:
    job = json.loads(sys.stdin.readline())
    counter = Path(os.environ["COUNTER"])
    run = len(counter.read_text().splitlines()) if counter.exists() else 0
    with counter.open("a") as file:
        print(json.dumps({**job, "pid": os.getpid(), "setting": os.environ.get("SETTING")}), file=file)
    runs = json.loads(plan)
    with os.fdopen(job["report_fd"], "w") as reports:
        for step in runs[min(run, len(runs) - 1)]:
            if isinstance(step, dict):
                print(json.dumps(step), file=reports, flush=True)
            elif step == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif step == "exit":
                os._exit(7)
            elif step == "stay":
                assert sys.stdin.readline() == "stop\n"
            elif step == "deaf":
                time.sleep(600)
            elif step == "hold":
                os.kill(os.getppid(), signal.SIGSTOP)
            elif step == "release":
                os.kill(os.getppid(), signal.SIGTERM)
                os.kill(os.getppid(), signal.SIGCONT)
            elif step == "orphan":
                left = subprocess.Popen(["sleep", "600"])
                counter.with_name("orphan").write_text(str(left.pid))
            elif step == "fork":
                if (pid := os.fork()) == 0:
                    time.sleep(600)
                    os._exit(0)
                counter.with_name("orphan").write_text(str(pid))


if __name__ == "__main__":
    main(sys.argv[1])
