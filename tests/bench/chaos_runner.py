"""Runs a sweep of short fake trials, continuing what is there: the victim of the SIGKILL test.

Arguments: the run folder and the number of trials. Each start of a trial is noted in RUN/starts.
"""

import sys
from pathlib import Path

from fsdpbench.bench.folders import RunFolder
from fsdpbench.bench.runner import run_sweep
from tests.bench.fakes import Notes, make_harness, make_plan

folder = Path(sys.argv[1])


class Starts(Notes):
    def start_trial(self, spec):
        with (folder / "starts").open("a") as file:
            file.write(f"{spec.id}\n")


points = [{"behave": "orphan", "seconds": 0.05, "n": n} for n in range(int(sys.argv[2]))]
harness = make_harness(observer=Starts())
sys.exit(run_sweep(make_plan(points), RunFolder(folder), harness, resume=True).exit_code)
