"""The one place that reads the user's environment variables (the launcher's are in `ranks`).

FSDPBENCH_CACHE: folder for preset models and converted checkpoints; default ~/.cache/fsdpbench.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder (not created here)."""
    explicit = os.environ.get("FSDPBENCH_CACHE")
    if explicit:
        return Path(explicit)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "fsdpbench"
