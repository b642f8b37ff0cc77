"""Opens the tensors of a checkpoint by what names it."""

import dataclasses
from os import PathLike

from ds4jax.checkpoint.converted import ConvertedSource, is_converted
from ds4jax.checkpoint.safetensors import open_checkpoint
from ds4jax.checkpoint.source import CheckpointError, TensorSource
from ds4jax.checkpoint.synthetic import SyntheticSource
from ds4jax.config import CONFIG_FOLDER, ConfigError, ModelConfig
from ds4jax.run_config import SyntheticConfig

SYNTHETIC = "synthetic:"


def open_source(
    checkpoint: str | PathLike[str], synthetic: SyntheticConfig | None = None
) -> TensorSource:
    """The tensors of a checkpoint, by what `--checkpoint` says.

    A folder in the published format or one that `convert` wrote; or "synthetic:NAME" for random
    weights of configs/models/NAME.json, or "synthetic:FILE.json" for those of any model config;
    `synthetic` says how these are made.
    """
    spec = str(checkpoint)
    if not spec.startswith(SYNTHETIC):
        try:
            return ConvertedSource(spec) if is_converted(spec) else open_checkpoint(spec)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {spec}: {error.filename or spec} cannot be read ({error.strerror}): "
                "expected a folder with files that you may read"
            ) from None
    name = spec.removeprefix(SYNTHETIC)
    options = dataclasses.asdict(synthetic or SyntheticConfig())
    if name.endswith(".json"):
        return SyntheticSource(ModelConfig.from_json(name), seed=0, **options)
    folder = CONFIG_FOLDER / "models"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name not in known:
        raise ConfigError(
            f"--checkpoint: {spec} names no model config, expected synthetic:FILE.json or one of "
            f"{', '.join(SYNTHETIC + name for name in known)}"
        )
    return SyntheticSource(ModelConfig.from_json(folder / f"{name}.json"), seed=0, **options)
