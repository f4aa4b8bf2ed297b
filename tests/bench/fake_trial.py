"""A trial that takes milliseconds: reads trial.json and does what its axis `behave` says.

Run as a script with the trial's folder; standard library only.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
spec = json.loads((folder / "trial.json").read_text())
behave = spec["axes"].get("behave", "ok")
seconds = spec["axes"].get("seconds", 0.0)


def beat(phase, step=None):
    (folder / "heartbeat" / "rank0").write_text(json.dumps({"phase": phase, "step": step}))


def finish(**fields):
    outcome = {"step_seconds": [0.1] * 6, "warmup_steps": 2, "tokens_per_second": 100.0, **fields}
    temporary = folder / "outcome.tmp"
    temporary.write_text(json.dumps(outcome))
    temporary.replace(folder / "outcome.json")


beat("init")
if behave == "ok":
    time.sleep(seconds)
    finish(environment={"torch": "fake"}, losses=[2.0, 1.0], peak_host_bytes=123)
elif behave == "crash":
    print("Traceback (most recent call last):\nValueError: boom", file=sys.stderr)
    sys.exit(3)
elif behave == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behave == "oom":
    finish(status="oom", error="torch.OutOfMemoryError: tried to allocate 1 PiB")
    sys.exit(1)
elif behave == "silent":
    pass
elif behave == "hang":
    beat("forward", 3)
    time.sleep(600)
elif behave == "endless":
    while True:
        beat("forward", time.monotonic_ns())
        time.sleep(0.02)
elif behave == "stacks":
    signal.signal(signal.SIGUSR1, lambda *_: (folder / "stacks").write_text("asked"))
    beat("forward", 3)
    while True:
        time.sleep(600)
elif behave == "orphan":
    # the grandchild leaves the session, so neither group nor session kills would find it
    code = (
        "import subprocess as s;"
        "print(s.Popen(['sleep', '600'], start_new_session=True, stdout=s.DEVNULL).pid)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    (folder / "orphan").write_text(made.stdout.strip())
    time.sleep(seconds)
    finish()
else:
    raise SystemExit(f"unknown behaviour {behave}")
