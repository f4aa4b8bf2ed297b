"""A whole run, told apart by `kind`: which engines it has and what it feeds them.

Sections whose machinery is not here yet are checked for shape only, and `find_unavailable` names
the kinds that cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fsdpbench.engine.config.strict import Count, StrictModel, rule
from fsdpbench.engine.config.tracing import PerfTracerConfig
from fsdpbench.engine.config.train import FinetuneSpec, TrainEngineConfig
from fsdpbench.errors import ConfigError, Violation

Section = dict[str, Any]


class DatasetConfig(StrictModel):
    """What the run reads."""

    path: Annotated[str, Field(min_length=1)]
    """JSONL or text file."""


class TrainerConfig(StrictModel):
    """Length of the run."""

    total_train_epochs: Count = 1
    """Passes over the data set."""
    train_batch_size: Count = 8
    """Samples of one optimizer step, over all ranks."""


class RunConfig(StrictModel):
    """What every kind of run has."""

    kind: str
    """Which algorithm runs; it decides which sections there are."""

    @property
    def engines(self) -> dict[str, TrainEngineConfig]:
        """The engines of the run by the name of their section."""
        return {}


class TrainingRun(RunConfig):
    """What the kinds that train have in common."""

    actor: TrainEngineConfig
    """The engine that is trained."""
    dataset: DatasetConfig
    """What it learns from."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Length of the run."""
    tracing: PerfTracerConfig = Field(default_factory=PerfTracerConfig)
    """Whether and where spans are recorded."""

    @property
    def engines(self) -> dict[str, TrainEngineConfig]:
        """The engines of the run by the name of their section."""
        return {"actor": self.actor}

    @rule("actor.optimizer")
    def _actor_is_trained(self) -> Violation | None:
        if self.actor.optimizer is not None:
            return None
        return Violation("actor.optimizer", "None", "is required: this engine is trained")

    @rule("tracing")
    def _traces_have_a_place(self) -> Violation | None:
        if self.tracing.output_dir or not self.tracing.enabled:
            return None
        return Violation("tracing.output_dir", "''", "must name a folder when tracing is enabled")

    @property
    def dataset_file(self) -> Path:
        """The data set's file, `~` expanded."""
        return Path(self.dataset.path).expanduser()

    def finetune_spec(self, dataset_size: int) -> FinetuneSpec:
        """Return the length of the run for a data set of this many samples."""
        return FinetuneSpec(
            total_train_epochs=self.trainer.total_train_epochs,
            dataset_size=dataset_size,
            train_batch_size=self.trainer.train_batch_size,
        )


class SFTRun(TrainingRun):
    """Supervised fine-tuning."""

    kind: Literal["sft"]
    """Supervised fine-tuning."""


class AlgorithmRun(TrainingRun):
    """Reinforcement learning, reward models and preference training."""

    kind: Literal["grpo", "ppo", "rw", "dpo"]
    """The algorithm."""
    critic: TrainEngineConfig | None = None
    """The value model; ppo needs it."""
    ref: TrainEngineConfig | None = None
    """The frozen reference model."""
    rollout: Section | None = None
    """How samples are generated; grpo and ppo need it."""
    workflow: Section | None = None
    """How one episode runs; grpo and ppo only."""
    reward: Section | None = None
    """How an episode is scored; grpo and ppo only."""

    @property
    def engines(self) -> dict[str, TrainEngineConfig]:
        """The engines of the run by the name of their section."""
        found = {"actor": self.actor, "critic": self.critic, "ref": self.ref}
        return {name: engine for name, engine in found.items() if engine is not None}

    @rule("kind", "critic")
    def _critic_goes_with_ppo(self) -> Violation | None:
        if self.kind == "ppo" and self.critic is None:
            return Violation("critic", "None", "is required by kind ppo")
        if self.kind != "ppo" and self.critic is not None:
            return Violation("critic", "", f"has no place in kind {self.kind}", "leave it out")
        return None

    @rule("kind", "rollout", "workflow", "reward")
    def _rollout_goes_with_policies(self) -> Violation | None:
        generates = self.kind in ("grpo", "ppo")
        if generates and self.rollout is None:
            return Violation("rollout", "None", f"is required by kind {self.kind}")
        sections = {"rollout": self.rollout, "workflow": self.workflow, "reward": self.reward}
        surplus = [name for name, section in sections.items() if section is not None]
        if surplus and not generates:
            return Violation(surplus[0], "", f"has no place in kind {self.kind}", "leave it out")
        return None


RUN_KINDS: Mapping[str, type[RunConfig]] = {
    "sft": SFTRun,
    **dict.fromkeys(("grpo", "ppo", "rw", "dpo"), AlgorithmRun),
}
OTHER_KINDS = {"sweep": "a sweep is read by `fsdpbench sweep` and `fsdpdiag check`"}


def build_run_config(data: Mapping[str, Any]) -> RunConfig:
    """Build the run that `kind` names."""
    kind = data.get("kind")
    model = RUN_KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        close = get_close_matches(str(kind), RUN_KINDS, n=1)
        remedy = OTHER_KINDS.get(str(kind)) or (f"did you mean {close[0]!r}?" if close else "")
        raise ConfigError(
            [Violation("kind", repr(kind), f"must be one of {', '.join(RUN_KINDS)}", remedy)]
        )
    return model.model_validate(data)
