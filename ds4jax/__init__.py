"""DeepSeek-V4 prefill in JAX.

`ds4jax.load(path)` gives an engine; `engine.prefill(token_ids)` gives logits, state and a report.

Letters in shapes: T tokens of a call (padding included), D hidden size, S residual streams, H
heads, K head channels, R rotated channels, E experts, k experts of a token, F expert width, W
sliding window, N rows of compressed entries, V vocabulary.
"""

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds4jax.cache import SequenceState
    from ds4jax.checkpoint.source import CheckpointError
    from ds4jax.config import PRESETS, ConfigError, ModelConfig, Numerics
    from ds4jax.engine import Engine, load
    from ds4jax.model import Transformer
    from ds4jax.readings import PrefillResult
    from ds4jax.report import OutputError
    from ds4jax.run_config import RunConfig
    from ds4jax.text import PromptError
    from sharding.cost import PlanError

_SIBLINGS = ("pallas_kernels", "sharding", "streaming")

# Where each public name lives; imported on first use, so that `import ds4jax` stays light.
_PUBLIC = {
    "CheckpointError": "ds4jax.checkpoint.source",
    "ConfigError": "ds4jax.config",
    "Engine": "ds4jax.engine",
    "ModelConfig": "ds4jax.config",
    "Numerics": "ds4jax.config",
    "OutputError": "ds4jax.report",
    "PRESETS": "ds4jax.config",
    "PlanError": "sharding.cost",
    "PrefillResult": "ds4jax.readings",
    "PromptError": "ds4jax.text",
    "RunConfig": "ds4jax.run_config",
    "SequenceState": "ds4jax.cache",
    "Transformer": "ds4jax.model",
    "load": "ds4jax.engine",
}

__all__ = [
    "PRESETS",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "ModelConfig",
    "Numerics",
    "OutputError",
    "PlanError",
    "PrefillResult",
    "PromptError",
    "RunConfig",
    "SequenceState",
    "Transformer",
    "load",
]


def _require_own(name: str) -> None:
    """Raises ImportError unless top-level package `name` is the one that belongs to ds4jax.

    Other distributions install packages of the same names, and pip does not report the clash. A
    foreign package may fail while it is imported, so the import itself is part of the check.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(
            f"ds4jax needs its own package {name!r}, which is not installed: reinstall ds4jax "
            "(pip install --force-reinstall ds4jax, or pip install -e . in a checkout)"
        )
    try:
        owner = getattr(importlib.import_module(name), "OWNER", None)
    except Exception as error:
        owner = f"unknown ({type(error).__name__}: {error})"
    if owner == "ds4jax":
        return
    places = list(spec.submodule_search_locations or ())
    found = spec.origin or (places[0] if places else "an unknown place")
    others = sorted(set(importlib.metadata.packages_distributions().get(name, ())) - {"ds4jax"})
    blame = f", installed by {' and '.join(others)}" if others else ""
    raise ImportError(
        f"ds4jax needs its own package {name!r}, but Python found {found}{blame} (owner "
        f"{owner!r}, expected 'ds4jax'): uninstall the other distribution or use a separate "
        "environment, then reinstall ds4jax"
    )


for _name in _SIBLINGS:
    _require_own(_name)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ds4jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
