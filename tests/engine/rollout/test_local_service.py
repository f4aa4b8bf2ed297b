"""The service of a local rollout process, called in this process: updates, pauses, refusals."""

from __future__ import annotations

import itertools
import queue
import shutil
import threading
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from fsdpbench.engine.device import Device
from fsdpbench.engine.rollout.generation import (
    GeneratedSequence,
    SamplingSettings,
    build_request,
)
from fsdpbench.engine.rollout.local_service import LocalService
from fsdpbench.engine.weight_sync.digests import compute_digests
from fsdpbench.engine.weight_sync.groups import WeightGroup
from fsdpbench.engine.weight_sync.records import Bucket, TensorSpec
from tests.engine.rollout.reference import greedy

CPU = Device("cpu")
PATIENCE = 30.0
PROMPT = [5, 6, 7]


class Client:
    """Sends messages to a service and sorts its answers."""

    def __init__(self):
        self.numbers = itertools.count()
        self.answers = {}
        self.arrivals = queue.SimpleQueue()
        self.service = LocalService(self.arrivals.put)
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()

    def send(self, call, **arguments):
        number = next(self.numbers)
        self.service.receive({"id": number, "call": call, "arguments": arguments})
        return number

    def wait_for(self, number):
        while number not in self.answers:
            answer = self.arrivals.get(timeout=PATIENCE)
            self.answers[answer["id"]] = answer
        return self.answers.pop(number)

    def ask(self, call, **arguments):
        answer = self.wait_for(self.send(call, **arguments))
        assert "error" not in answer, answer
        return answer["result"]

    def refused(self, call, **arguments):
        return self.wait_for(self.send(call, **arguments))["text"]

    def generate(self, num_tokens=4):
        request = build_request(
            [GeneratedSequence(PROMPT)],
            SamplingSettings(num_tokens, temperature=0.0, stop_token_ids=()),
        )
        return self.send("generate", **request)

    def where(self):
        said = self.ask("describe")
        return said["state"], said["version"]


@pytest.fixture
def client(first_folder):
    one = Client()
    load(one, first_folder)
    yield one
    one.service.stop()
    one.thread.join(PATIENCE)
    assert not one.thread.is_alive()


def load(client, folder, version=0):
    client.ask("load", path=str(folder), dtype="float32", device="cpu", version=version)


def spec_of(name, tensor):
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def join(client):
    """Open a group and let the service come."""
    group = WeightGroup.listen("weights", 2, CPU, PATIENCE)
    number = client.send("init_group", address=asdict(group.address_for(1)))
    group.join()
    assert "error" not in client.wait_for(number)
    return group


def send_bucket(client, group, index, weights):
    """Broadcast tensors as one packed bucket; return the service's answer."""
    bucket = Bucket(index, tuple(spec_of(name, tensor) for name, tensor in weights.items()))
    number = client.send("bucket", bucket=bucket.to_json())
    packed = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for tensor, offset, spec in zip(weights.values(), bucket.offsets, bucket.specs, strict=True):
        packed[offset : offset + spec.num_bytes] = tensor.contiguous().view(-1).view(torch.uint8)
    group.broadcast(packed).wait()
    return client.wait_for(number)


def halves(folder):
    items = list(load_file(folder / "model.safetensors").items())
    return dict(items[:20]), dict(items[20:])


def tokens_of(answer):
    return answer["result"][0]["tokens"]


def test_an_update_through_a_group(client, first_model, second_folder, second_model):
    assert client.where() == ("ready", 0)
    assert tokens_of(client.wait_for(client.generate())) == greedy(first_model, PROMPT, 4)
    group = join(client)
    first_half, second_half = halves(second_folder)
    assert "pause_generation first" in client.refused(
        "bucket", bucket=Bucket(0, (spec_of("model.norm.weight", torch.ones(128)),)).to_json()
    )
    group.close()
    client.ask("pause", in_flight="abort")
    group = join(client)
    assert "error" not in send_bucket(client, group, 0, first_half)
    assert client.where() == ("updating", -1)
    assert "an update has not finished" in client.refused("continue")
    assert "an update has not finished" in client.refused("logprobs", sequences=[PROMPT])
    assert tokens_of(client.wait_for(client.generate())) == []
    assert "error" not in send_bucket(client, group, 1, second_half)
    digests = client.ask("finish", version=1, with_digests=True)
    assert digests == compute_digests((first_half | second_half).items())
    assert client.where() == ("paused", 1)
    client.ask("continue")
    answer = client.wait_for(client.generate())
    assert tokens_of(answer) == greedy(second_model, PROMPT, 4)
    assert answer["result"][0]["version"] == 1
    client.ask("destroy_group")
    group.close()


def test_an_update_that_is_broken_off_leaves_no_way_to_generate(client, second_folder):
    client.ask("pause", in_flight="abort")
    group = join(client)
    first_half, _ = halves(second_folder)
    send_bucket(client, group, 0, first_half)
    assert "did not come" in client.refused("finish", version=1, with_digests=False)
    assert client.where() == ("updating", -1)
    client.ask("abort", reason="the trainer lost a rank")
    assert client.where() == ("broken", -1)
    assert "the trainer lost a rank" in client.refused("continue")
    assert "no weights of it have arrived" in client.refused(
        "finish", version=1, with_digests=False
    )
    load_again = client.send("disk", path=str(second_folder), version=1, patience_seconds=0)
    assert "error" not in client.wait_for(load_again)
    client.ask("finish", version=1, with_digests=True)
    client.ask("continue")
    assert client.where() == ("ready", 1)
    group.close()


def test_a_bucket_that_is_refused_leaves_the_weights_in_force(client):
    client.ask("pause", in_flight="abort")
    group = join(client)
    for spec in (
        TensorSpec("model.norm.weight", (3,), "float32"),
        TensorSpec("model.norm.weight", (128,), "bfloat16"),
        TensorSpec("nowhere", (3,), "float32"),
    ):
        assert spec.name in client.refused("bucket", bucket=Bucket(0, (spec,)).to_json())
        assert client.where() == ("paused", 0)
    client.ask("continue")
    assert client.where() == ("ready", 0)
    group.close()


def test_an_abort_ends_a_wait_in_the_group(client):
    client.ask("pause", in_flight="abort")
    group = join(client)
    spec = TensorSpec("model.norm.weight", (128,), "float32")
    bucket = client.send("bucket", bucket=Bucket(0, (spec,)).to_json())
    while client.where()[0] != "updating":
        pass
    client.ask("abort", reason="the trainer gave up")
    assert "error" in client.wait_for(bucket)
    assert client.where() == ("broken", -1)
    group.close()


def test_a_faulty_folder_changes_nothing(client, first_folder, tmp_path):
    client.ask("pause", in_flight="abort")
    shutil.copytree(first_folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    arguments = {"path": str(tmp_path / "model"), "version": 1, "patience_seconds": 0}
    assert "truncated" in client.refused("disk", **arguments)
    assert client.where() == ("paused", 0)
    arguments["path"] = str(tmp_path / "v00000001")
    assert "no such folder" in client.refused("disk", **arguments)
    client.ask("continue")
    assert client.where() == ("ready", 0)


def test_pauses_let_requests_end_or_break_them_off(client):
    waited_for = client.generate(60)
    client.ask("pause", in_flight="wait")
    assert len(tokens_of(client.answers[waited_for])) == 60
    refused = client.wait_for(client.generate())["result"][0]
    assert (refused["tokens"], refused["finish_reason"]) == ([], "abort")
    client.ask("continue")
    running, queued = client.generate(4000), client.generate(4000)
    client.ask("pause", in_flight="abort")
    for number in (running, queued):
        part = client.answers[number]["result"][0]
        assert part["finish_reason"] == "abort"
        assert len(part["tokens"]) < 4000


def test_without_weights_nothing_is_generated_until_an_update(second_folder, second_model):
    client = Client()
    load(client, second_folder, version=None)
    assert client.where() == ("broken", -1)
    assert tokens_of(client.wait_for(client.generate())) == []
    client.ask("disk", path=str(second_folder), version=5, patience_seconds=0)
    client.ask("finish", version=5, with_digests=False)
    client.ask("continue")
    assert tokens_of(client.wait_for(client.generate())) == greedy(second_model, PROMPT, 4)
    client.service.stop()
    client.thread.join(PATIENCE)


def test_calls_without_a_model_are_refused(tmp_path):
    client = Client()
    nowhere = {"path": str(tmp_path), "dtype": "float32", "device": "cpu", "version": 0}
    assert "no model that can be built" in client.refused("load", **nowhere)
    assert "no whole set of weights" in client.refused("logprobs", sequences=[PROMPT])
    assert "no model is loaded" in client.refused("disk", path="x", version=0, patience_seconds=0)
    client.service.stop()
    client.thread.join(PATIENCE)
