"""Supervised fine-tuning: the engine with a token-level cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fsdpbench.engine.fsdp_engine import FSDPEngine
from fsdpbench.engine.ops.sft_loss import sft_loss, sft_loss_weight


class FSDPLMEngine(FSDPEngine):
    """Trains a language model on token sequences; `loss_mask` [B, L] says which tokens count."""

    def train_lm(self, data: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Run one optimizer step. Every rank calls it; ranks of one dp index with the same data.

        Returns the stats of `train_batch`; `loss` is the mean negative log-probability in nats.
        """
        self.train()
        return self.train_batch(data, sft_loss, sft_loss_weight)

    def evaluate_lm(self, data: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the mean loss over the data without training. Every rank calls it."""
        self.eval()
        return self.eval_batch(data, sft_loss, sft_loss_weight)
