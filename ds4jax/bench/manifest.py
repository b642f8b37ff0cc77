"""What has to be known beside a measured number: versions, device, configuration, and the code."""

import hashlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ds4jax import report
from ds4jax.run_config import RunConfig


def manifest(config: RunConfig, checkpoint: str, device: jax.Device) -> dict[str, Any]:
    """Everything that a number depends on, as JSON."""
    values = config.to_dict()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": report.versions(),
        "device": report.device_facts(device),
        "memory_fraction": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
        "checkpoint": checkpoint,
        "config": values,
        "config_sha256": hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest(),
        "bench_sha256": _scripts_hash(),
    }


def spread(seconds: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def _scripts_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
