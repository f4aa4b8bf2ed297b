"""A whole run, told apart by `kind`: which engines it has and what it feeds them.

Sections whose machinery is not here yet are checked for shape only, and `find_unavailable` names
the kinds that cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
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
    actor: TrainEngineConfig
    """The engine that is trained."""
    tracing: PerfTracerConfig = Field(default_factory=PerfTracerConfig)
    """Whether and where spans are recorded."""

    @property
    def engines(self) -> dict[str, TrainEngineConfig]:
        """The engines of the run by the name of their section."""
        names = ("actor", "critic", "ref")
        found = {name: getattr(self, name, None) for name in names}
        return {name: engine for name, engine in found.items() if engine is not None}


class SFTRun(RunConfig):
    """Supervised fine-tuning."""

    kind: Literal["sft"]
    dataset: DatasetConfig
    """Tokens to learn."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Length of the run."""

    @rule("actor.optimizer")
    def _actor_is_trained(self) -> Violation | None:
        return _need_optimizer(self.actor, "actor")

    def finetune_spec(self, dataset_size: int) -> FinetuneSpec:
        """Return the length of the run for a data set of this many samples."""
        return FinetuneSpec(
            total_train_epochs=self.trainer.total_train_epochs,
            dataset_size=dataset_size,
            train_batch_size=self.trainer.train_batch_size,
        )


class SweepRun(RunConfig):
    """A space of configurations around `actor`; `fsdpbench.bench` gives the axes their meaning."""

    kind: Literal["sweep"]
    axes: dict[str, list[Any]]
    """Values of each axis by its name."""
    workload: Section = Field(default_factory=dict)
    """What each trial trains on and for how long."""

    @rule("axes")
    def _axes_have_values(self) -> Violation | None:
        empty = [name for name, values in self.axes.items() if not values]
        if not empty:
            return None
        return Violation(f"axes.{empty[0]}", "[]", "must list one value or more")

    @rule("actor.optimizer")
    def _actor_is_trained(self) -> Violation | None:
        return _need_optimizer(self.actor, "actor")


class AlgorithmRun(RunConfig):
    """Reinforcement learning, reward models and preference training."""

    kind: Literal["grpo", "ppo", "rw", "dpo"]
    dataset: DatasetConfig
    """Prompts or preference pairs."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Length of the run."""
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

    @rule("actor.optimizer")
    def _actor_is_trained(self) -> Violation | None:
        return _need_optimizer(self.actor, "actor")

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


def _need_optimizer(engine: TrainEngineConfig, where: str) -> Violation | None:
    if engine.optimizer is not None:
        return None
    return Violation(f"{where}.optimizer", "None", "is required: this engine is trained")


RUN_KINDS: dict[str, type[RunConfig]] = {
    "sft": SFTRun,
    "sweep": SweepRun,
    "grpo": AlgorithmRun,
    "ppo": AlgorithmRun,
    "rw": AlgorithmRun,
    "dpo": AlgorithmRun,
}


def build_run_config(data: Mapping[str, Any]) -> RunConfig:
    """Build the run that `kind` names."""
    kind = data.get("kind")
    model = RUN_KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        close = get_close_matches(str(kind), RUN_KINDS, n=1)
        remedy = f"did you mean {close[0]!r}?" if close else ""
        allowed = f"must be one of {', '.join(RUN_KINDS)}"
        raise ConfigError([Violation("kind", repr(kind), allowed, remedy)])
    return model.model_validate(data)
