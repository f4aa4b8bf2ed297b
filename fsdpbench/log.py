"""Logging of the package: one logger tree, warnings said once, nothing configured at import."""

from __future__ import annotations

import logging

_warned: set[str] = set()  # messages already given by `warn_once` in this process


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning the first time this message is seen in the process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def configure_logging(rank: int = 0, level: int = logging.INFO) -> None:
    """Send the package's records to standard error, tagged with the rank; for commands only."""
    handler = logging.StreamHandler()
    style = f"%(asctime)s [rank{rank}] %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(style))
    logger = logging.getLogger("fsdpbench")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
