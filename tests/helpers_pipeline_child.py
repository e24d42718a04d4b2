"""What the supervisor starts in its tests, in the place of Spark: `python helpers_pipeline_child.py PLAN`.

PLAN: JSON, a list of events per run; the number of the run comes from a file. A string in the list is
done: die (SIGKILL), exit, stay (until told to stop), deaf (stay, whatever is told), orphan (leave a process),
hold (the supervisor stands still), release (it goes on, and finds a SIGTERM).
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


if __name__ == "__main__":
    main(sys.argv[1])
