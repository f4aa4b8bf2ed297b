"""The contracts name torch for types only, and a plain workflow satisfies the protocol."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from fsdpbench.engine.protocols import LossInputs, LossOutputs, WorkflowLike


class Echo:
    """Returns what it is given, or drops the sample."""

    async def arun_episode(self, engine, data):
        return dict(data) if data else None


def test_a_plain_class_is_a_workflow():
    workflow: WorkflowLike = Echo()
    assert asyncio.run(workflow.arun_episode(None, {"input_ids": 1})) == {"input_ids": 1}
    assert asyncio.run(workflow.arun_episode(None, {})) is None


def test_loss_records_have_their_defaults():
    inputs = LossInputs(logprobs=None, entropy=None, microbatch=None)
    assert inputs.entropy is None
    assert LossOutputs(loss=None).stats == {}


def test_importing_the_contracts_leaves_torch_out():
    code = "import sys, fsdpbench.engine.protocols; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
