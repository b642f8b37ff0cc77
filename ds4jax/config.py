"""What model is run (`ModelConfig`) and with which roundings (`Numerics`).

Both are frozen and hashable: they are static arguments of jitted functions and static fields of
modules. Field names of `ModelConfig` are those of the published `config.json`.
"""

import dataclasses
import difflib
import enum
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# models/NAME.json and runs/NAME.toml, in a checkout (where this is a link) and when installed.
CONFIG_FOLDER = pathlib.Path(__file__).parent / "_configs"
OVERLAPPED_RATIO = 4  # a ratio of 4 means CSA: overlapping blocks and an indexer


class ConfigError(ValueError):
    """A configuration that cannot be run: names the key, the value found and what would do."""


class LayerKind(enum.Enum):
    """How a layer sees the past beyond its sliding window."""

    SWA = "swa"  # window only
    CSA = "csa"  # window + overlapping 4:1 entries chosen by the indexer
    HCA = "hca"  # window + all entries of a coarse compressor (128:1 in the released models)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the CSA and HCA layers; `type` is always "yarn"."""

    type: str
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The published configuration of a DeepSeek-V4 model; see `from_json`.

    compress_ratios holds one value per main layer and one or more trailing zeros of the draft
    blocks: 0 = SWA, 4 = CSA, any other value = HCA of that ratio.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    num_nextn_predict_layers: int = 1
    bos_token_id: int = 0
    eos_token_id: int = 1

    @classmethod
    def from_json(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> "ModelConfig":
        """Reads a `config.json` (path or parsed mapping).

        Raises ConfigError for another architecture, a missing key (with the nearest name that is
        present) and values this engine does not implement.
        """
        where = "config"
        if not isinstance(source, Mapping):
            where = os.fspath(source)
            try:
                with open(source, encoding="utf-8") as file:
                    source = json.load(file)
            except FileNotFoundError:
                raise ConfigError(
                    f"{where} does not exist: a checkpoint folder needs its config.json"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"{where} cannot be read ({error.strerror}): expected a JSON file"
                ) from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is not JSON ({error}): fetch it again") from None
            if not isinstance(source, dict):
                raise ConfigError(f"{where} holds {type(source).__name__}, expected one object")
        _require_architecture(source, where)
        for key, wanted in _FIXED.items():
            if key in source and source[key] != wanted:
                raise ConfigError(
                    f"{where}: {key} is {source[key]!r}, only {wanted!r} is implemented"
                )
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in source:
                values[field.name] = source[field.name]
            elif field.default is dataclasses.MISSING:
                near = difflib.get_close_matches(field.name, list(source), n=1)
                hint = f"; did it get renamed to {near[0]}?" if near else ""
                raise ConfigError(f"{where}: key {field.name} is missing{hint}")
        if not isinstance(values["compress_ratios"], list | tuple):
            raise ConfigError(
                f"{where}: compress_ratios is {values['compress_ratios']!r}, expected a list with "
                "one integer per layer"
            )
        values["compress_ratios"] = tuple(values["compress_ratios"])
        values["rope_scaling"] = _rope_scaling(values["rope_scaling"], where)
        _require_blocks(source.get("quantization_config"), where)
        config = cls(**values)
        config.validate(where)
        return config

    def validate(self, where: str = "config") -> None:
        """Raises ConfigError for values that no model has and for fields that contradict."""
        for field in dataclasses.fields(self):
            _check_number(field, getattr(self, field.name), f"{where}: {field.name}")
        for field in dataclasses.fields(self.rope_scaling):
            value = getattr(self.rope_scaling, field.name)
            _check_number(field, value, f"{where}: rope_scaling.{field.name}")
        if len(self.compress_ratios) < self.num_hidden_layers:
            raise ConfigError(
                f"{where}: compress_ratios has {len(self.compress_ratios)} values for "
                f"{self.num_hidden_layers} layers: expected at least one per layer"
            )
        if any(type(r) is not int or not 0 <= r <= _LARGEST for r in self.compress_ratios):
            raise ConfigError(
                f"{where}: compress_ratios is {list(self.compress_ratios)}, expected integers from "
                f"0 to {_LARGEST}"
            )
        for name, value, divisor in (
            ("num_attention_heads", self.num_attention_heads, self.o_groups),
            ("qk_rope_head_dim", self.qk_rope_head_dim, 2),
        ):
            if value % divisor:
                raise ConfigError(f"{where}: {name} is {value}, expected a multiple of {divisor}")
        for name, value, limit_name in (
            ("qk_rope_head_dim", self.qk_rope_head_dim, "head_dim"),
            ("qk_rope_head_dim", self.qk_rope_head_dim, "index_head_dim"),
            ("num_experts_per_tok", self.num_experts_per_tok, "n_routed_experts"),
            ("bos_token_id", self.bos_token_id + 1, "vocab_size"),
            ("eos_token_id", self.eos_token_id + 1, "vocab_size"),
        ):
            limit = getattr(self, limit_name)
            if value > limit:
                bound = "less than" if name.endswith("_id") else "at most"
                raise ConfigError(
                    f"{where}: {name} is {getattr(self, name)}, expected {bound} {limit_name} "
                    f"{limit}"
                )
        if self.index_head_dim & (self.index_head_dim - 1):
            raise ConfigError(
                f"{where}: index_head_dim is {self.index_head_dim}, expected a power of two "
                "(the indexer applies a Hadamard transform)"
            )
        for name in ("rope_theta", "compress_rope_theta"):
            if getattr(self, name) <= 1:
                raise ConfigError(
                    f"{where}: {name} is {getattr(self, name)}, expected a number above 1"
                )
        if self.rope_scaling.beta_slow > self.rope_scaling.beta_fast:
            raise ConfigError(
                f"{where}: rope_scaling.beta_slow is {self.rope_scaling.beta_slow}, expected at "
                f"most beta_fast {self.rope_scaling.beta_fast}"
            )

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each main layer (0 = window only)."""
        return self.compress_ratios[: self.num_hidden_layers]

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of main layer `layer`."""
        ratio = self.layer_ratios[layer]
        if ratio == 0:
            return LayerKind.SWA
        return LayerKind.CSA if ratio == OVERLAPPED_RATIO else LayerKind.HCA

    def is_hash(self, layer: int) -> bool:
        """Whether main layer `layer` takes its experts from the token table."""
        return layer < self.num_hash_layers

    @property
    def rope_channels(self) -> int:
        """Rotated channels at the end of every head."""
        return self.qk_rope_head_dim

    @property
    def plain_channels(self) -> int:
        """Channels of a head before the rotated ones; these carry the KV fake quantisation."""
        return self.head_dim - self.qk_rope_head_dim


_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _require_architecture(source: Mapping[str, Any], where: str) -> None:
    model_type = source.get("model_type")
    architectures = source.get("architectures")
    if model_type == "deepseek_v4":
        return
    if model_type == "deepseek_v41":
        raise ConfigError(
            f"{where}: model_type is 'deepseek_v41' (DeepSeek-V4.1), a different architecture "
            "(shared compressed KV, block pre-selection, Engram tables): this engine runs "
            "'deepseek_v4' only"
        )
    raise ConfigError(
        f"{where}: model_type is {model_type!r} (architectures {architectures!r}), expected "
        "'deepseek_v4'"
    )


def _rope_scaling(value: Any, where: str) -> RopeScaling:
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    if not isinstance(value, Mapping) or any(name not in value for name in names):
        raise ConfigError(f"{where}: rope_scaling is {value!r}, expected the keys {names}")
    if value["type"] != "yarn":
        raise ConfigError(f"{where}: rope_scaling.type is {value['type']!r}, expected 'yarn'")
    return RopeScaling(**{name: value[name] for name in names})


def _require_blocks(value: Any, where: str) -> None:
    """Another grid of scales than the released one is another format, not a broken file."""
    block = value.get("weight_block_size", [128, 128]) if isinstance(value, Mapping) else [128, 128]
    if block != [128, 128]:
        raise ConfigError(
            f"{where}: quantization_config.weight_block_size is {block!r}, only [128, 128] is "
            "implemented"
        )


_MAY_BE_ZERO = ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id")
_LARGEST = 2**31 - 1  # positions and ids are int32
_FLOATS = (1e-37, 1e38)  # what is above 0 and finite in float32 as well


def _check_number(field: dataclasses.Field, value: Any, what: str) -> None:
    if field.type not in (int, float):
        return
    number = isinstance(value, int if field.type is int else (int, float))
    least = 0 if field.name in _MAY_BE_ZERO else 1
    low, high = _FLOATS if field.type is float else (least, _LARGEST)
    kind = "a number" if field.type is float else "an integer"
    if not number or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{what} is {value!r:.80}, expected {kind} from {low} to {high}")


SIMULATIONS = ("q1", "q2", "q3")
KV_FORMS = ("plain", "fp8")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Which roundings the forward pass makes.

    compute   "float32": every product is a true float32 product and nothing is rounded to
              bfloat16. "bfloat16": the roundings of the published inference code.
    simulate  the activation quantisations that are reproduced: q1 = FP8 1x128 inputs of the FP8
              and FP4 linears, q2 = FP8 1x64 of the KV channels without rotation, q3 = FP4 1x32 of
              indexer queries and keys.
    kv        how compressed entries are kept: "plain" in the compute dtype, or "fp8", which holds
              what q2 leaves of them exactly, see `kv`; the results are the same.
    """

    compute: str = "bfloat16"
    simulate: tuple[str, ...] = ()
    kv: str = "plain"

    def __post_init__(self) -> None:
        if self.compute not in ("float32", "bfloat16"):
            raise ConfigError(
                f"config.numerics.compute is {self.compute!r}, expected 'float32' or 'bfloat16'"
            )
        unknown = [name for name in self.simulate if name not in SIMULATIONS]
        if unknown:
            raise ConfigError(
                f"config.numerics.simulate has {unknown[0]!r}, expected any of "
                f"{', '.join(SIMULATIONS)} or 'none'"
            )
        object.__setattr__(
            self, "simulate", tuple(name for name in SIMULATIONS if name in self.simulate)
        )
        if self.kv not in KV_FORMS:
            raise ConfigError(f"config.numerics.kv is {self.kv!r}, expected 'plain' or 'fp8'")
        if self.kv == "fp8" and not (self.q2 and self.compute == "bfloat16"):
            raise ConfigError(
                f"config.numerics.kv is 'fp8' with {self.compute} and simulations "
                f"{','.join(self.simulate) or 'none'}: expected bfloat16 with q2, whose values it "
                "holds, or config.numerics.kv='plain'"
            )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of activations, streams and KV state."""
        return jnp.dtype(self.compute)

    @property
    def precision(self) -> jax.lax.Precision | None:
        """Precision argument of dot products whose operands have `dtype`."""
        return jax.lax.Precision.HIGHEST if self.compute == "float32" else None

    @property
    def q1(self) -> bool:
        """Whether inputs of FP8 and FP4 linears are quantised."""
        return "q1" in self.simulate

    @property
    def q2(self) -> bool:
        """Whether KV channels without rotation are quantised."""
        return "q2" in self.simulate

    @property
    def q3(self) -> bool:
        """Whether indexer queries and keys are quantised."""
        return "q3" in self.simulate

    def __str__(self) -> str:
        kept = "" if self.kv == "plain" else f"+kv_{self.kv}"
        return f"{self.compute}+{'+'.join(self.simulate) or 'none'}{kept}"


PRESETS = {
    "oracle": Numerics("float32"),
    "bfloat16": Numerics("bfloat16"),
    "official": Numerics("bfloat16", SIMULATIONS),
}
