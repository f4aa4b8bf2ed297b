"""The sample of docs/checkpoints.md does what the page says."""

import re
from pathlib import Path

from tests.distributed.pool import run_on_ranks

PAGE = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()


def test_the_sample_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (left,) = run_on_ranks(
        "tests.distributed.payloads.checkpoint_dcp:run_sample",
        1,
        code=code,
        folder=str(tmp_path),
        timeout_seconds=60,
    )
    assert left == ["latest", "model", "step1"]
