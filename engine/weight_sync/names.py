"""What each rollout engine calls a weight that we know by its Hugging Face or peft name: a table.

Dense text families travel under their Hugging Face names: vLLM and SGLang take those and fuse q, k,
v and gate, up themselves. A row is looked up by (dialect, model_type), then by (dialect, any). A
family whose names differ gets a row; its rules are tried in order and the first that matches
rewrites the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpbench.errors import WeightSyncError, list_names

ANY_FAMILY = "*"


@dataclass(frozen=True)
class NameRule:
    """A pattern at the beginning of a name and what stands there for the receiver."""

    pattern: str  # regular expression
    replacement: str  # as in re.sub


# Adapters keep peft's names (base_model.model...lora_A.weight): all three read them so.
SAME: tuple[NameRule, ...] = ()

NAME_MAPS: Mapping[tuple[str, str], tuple[NameRule, ...]] = {
    ("local", ANY_FAMILY): SAME,
    ("vllm", ANY_FAMILY): SAME,
    ("sglang", ANY_FAMILY): SAME,
}


def name_for(
    dialect: str,
    name: str,
    family: str = "",
    table: Mapping[tuple[str, str], tuple[NameRule, ...]] = NAME_MAPS,
) -> str:
    """Return the receiver's name of a weight; `family` is the model_type of its configuration."""
    rules = table.get((dialect, family), table.get((dialect, ANY_FAMILY)))
    if rules is None:
        known = list_names(sorted({known for known, _ in table}))
        raise WeightSyncError(f"dialect={dialect!r}: no map of names; known are {known}")
    for rule in rules:
        renamed, count = re.subn(f"^(?:{rule.pattern})", rule.replacement, name, count=1)
        if count:
            return renamed
    return name
