"""Fine-tune a model on a few sentences with the engine alone, under torchrun.

    torchrun --nproc-per-node 2 examples/train_sft.py --backend fsdp:d2 --path tiny-qwen3

Any mesh works: fsdp:d1t2 (tensor parallel), fsdp:d1c2 (context), fsdp:d2c2t2 on 8 processes.
"""

from __future__ import annotations

import argparse

import torch

from fsdpbench.engine.algorithms.sft import FSDPLMEngine
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.log import configure_logging
from fsdpbench.ranks import read_ranks

SENTENCES = [
    "Data parallel ranks see different sequences.",
    "Tensor parallel ranks share each matrix.",
    "Context parallel ranks share each sequence.",
    "Every rank runs the same number of micro-batches.",
]


def make_batch(rows: slice) -> dict[str, torch.Tensor]:
    """Return byte tokens of this data-parallel rank's sentences, padded on the right."""
    texts = [list(sentence.encode()) for sentence in SENTENCES[rows]]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return {"input_ids": ids, "attention_mask": torch.arange(width) < lengths[:, None]}


def main() -> None:
    """Train and print the loss of each step on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="tiny-qwen3", help="preset, local HF folder or hub id")
    parser.add_argument("--backend", default="", help="fsdp:d2t2, ...; empty: data parallel")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    rank = read_ranks().rank
    configure_logging(rank)
    config = TrainEngineConfig(
        path=options.path,
        backend=options.backend,
        mb_spec={"max_tokens_per_mb": 128},
        optimizer={"lr": 1e-3, "lr_scheduler_type": "cosine"},
    )
    engine = FSDPLMEngine(config)
    engine.create_process_group()
    engine.initialize(
        ft_spec=FinetuneSpec(
            total_train_epochs=options.steps,
            dataset_size=len(SENTENCES),
            train_batch_size=len(SENTENCES),
        )
    )
    batch = make_batch(slice(engine.data_parallel_rank, None, engine.data_parallel_world_size))
    for step in range(options.steps):
        stats = engine.train_lm(batch)
        engine.lr_scheduler_step()
        if rank == 0:
            print(f"step {step}: loss {stats['loss']:.4f}, norm {stats['grad_norm']:.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
