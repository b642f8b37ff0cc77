"""The published tensor names as data: shape, dtype, purpose and place in the module tree.

Names have no prefix. `layers.L.` repeats for every main layer, `mtp.` holds a draft model, and a
quantised `X.weight` has its E8M0 scales in `X.scale`. Dimension names are resolved per layer by
`_dimensions`.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Set
from typing import Literal

import numpy as np
from absl import logging

from ds4jax.checkpoint.source import CheckpointError, TensorInfo, TensorSource
from ds4jax.config import OVERLAPPED_RATIO, ModelConfig
from ds4jax.quant import FP8_BLOCK

FP4_BLOCK = 32  # one E8M0 byte covers 32 consecutive inputs of an FP4 weight row
ExpertFormat = Literal["fp4", "fp8", "bf16", "f32"]
EXPERT_FORMATS: Mapping[str, ExpertFormat] = {
    "I8": "fp4",
    "F8_E4M3": "fp8",
    "BF16": "bf16",
    "F32": "f32",
}

# Components of `component_of`, in the order of reports.
COMPONENTS = (
    "embed",
    "head",
    "final norm",
    "norms",
    "hyper-connections",
    "attention",
    "compressors",
    "indexers",
    "routers",
    "shared experts",
    "experts",
)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What the format says about one tensor.

    shape      of the values: an FP4 weight [N, K] is stored as I8 [N, K / 2]
    dtype      the published storage dtype
    component  one of COMPONENTS
    path       where the values go in `model.abstract(config)`, as attribute names and indices;
               empty for routed experts, which are no part of the tree
    """

    shape: tuple[int, ...]
    dtype: str
    component: str
    path: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Accepted storage dtypes: the published one, or plain values without scales."""
        if self.dtype == "I64":
            return ("I64",)
        fp8 = ("F8_E4M3",) if self.dtype == "I8" else ()  # experts of the Base models
        return tuple(dict.fromkeys((self.dtype, *fp8, "BF16", "F32")))


@dataclasses.dataclass(frozen=True)
class _Row:
    name: str
    component: str
    shape: str  # space-separated dimension names
    dtype: str
    when: str = ""  # "", or a layer property of `_dimensions` that must be non-zero


_LAYER_ROWS = (
    _Row("hc_attn_fn", "hyper-connections", "maps streams*hidden", "F32"),
    _Row("hc_attn_base", "hyper-connections", "maps", "F32"),
    _Row("hc_attn_scale", "hyper-connections", "three", "F32"),
    _Row("attn_norm.weight", "norms", "hidden", "BF16"),
    _Row("attn.wq_a.weight", "attention", "q_rank hidden", "F8_E4M3"),
    _Row("attn.q_norm.weight", "attention", "q_rank", "BF16"),
    _Row("attn.wq_b.weight", "attention", "heads*head q_rank", "F8_E4M3"),
    _Row("attn.wkv.weight", "attention", "head hidden", "F8_E4M3"),
    _Row("attn.kv_norm.weight", "attention", "head", "BF16"),
    _Row("attn.attn_sink", "attention", "heads", "F32"),
    _Row("attn.wo_a.weight", "attention", "groups*o_rank heads*head/groups", "F8_E4M3"),
    _Row("attn.wo_b.weight", "attention", "hidden groups*o_rank", "F8_E4M3"),
    _Row("attn.compressor.wkv.weight", "compressors", "width hidden", "BF16", "ratio"),
    _Row("attn.compressor.wgate.weight", "compressors", "width hidden", "BF16", "ratio"),
    _Row("attn.compressor.ape", "compressors", "ratio width", "F32", "ratio"),
    _Row("attn.compressor.norm.weight", "compressors", "head", "BF16", "ratio"),
    _Row("attn.indexer.wq_b.weight", "indexers", "i_heads*i_head q_rank", "F8_E4M3", "csa"),
    _Row("attn.indexer.weights_proj.weight", "indexers", "i_heads hidden", "BF16", "csa"),
    _Row("attn.indexer.compressor.wkv.weight", "indexers", "i_width hidden", "BF16", "csa"),
    _Row("attn.indexer.compressor.wgate.weight", "indexers", "i_width hidden", "BF16", "csa"),
    _Row("attn.indexer.compressor.ape", "indexers", "ratio i_width", "F32", "csa"),
    _Row("attn.indexer.compressor.norm.weight", "indexers", "i_head", "BF16", "csa"),
    _Row("hc_ffn_fn", "hyper-connections", "maps streams*hidden", "F32"),
    _Row("hc_ffn_base", "hyper-connections", "maps", "F32"),
    _Row("hc_ffn_scale", "hyper-connections", "three", "F32"),
    _Row("ffn_norm.weight", "norms", "hidden", "BF16"),
    _Row("ffn.gate.weight", "routers", "experts hidden", "BF16"),
    _Row("ffn.gate.bias", "routers", "experts", "F32", "scored"),
    _Row("ffn.gate.tid2eid", "routers", "vocab top_k", "I64", "hashed"),
    _Row("ffn.shared_experts.w1.weight", "shared experts", "ffn hidden", "F8_E4M3"),
    _Row("ffn.shared_experts.w2.weight", "shared experts", "hidden ffn", "F8_E4M3"),
    _Row("ffn.shared_experts.w3.weight", "shared experts", "ffn hidden", "F8_E4M3"),
)
_EXPERT_ROWS = (
    _Row("w1.weight", "experts", "ffn hidden", "I8"),
    _Row("w2.weight", "experts", "hidden ffn", "I8"),
    _Row("w3.weight", "experts", "ffn hidden", "I8"),
)
_HEAD_ROWS = (
    _Row("norm.weight", "final norm", "hidden", "BF16"),
    _Row("hc_head_fn", "hyper-connections", "streams streams*hidden", "F32"),
    _Row("hc_head_base", "hyper-connections", "streams", "F32"),
    _Row("hc_head_scale", "hyper-connections", "one", "F32"),
)
_TABLE_ROWS = (
    _Row("embed.weight", "embed", "vocab hidden", "BF16"),
    _Row("head.weight", "head", "vocab hidden", "BF16"),
)
# What a multi-token-prediction block has besides a window-only, score-routed layer.
_MTP_ROWS = (
    _Row("enorm.weight", "norms", "hidden", "BF16"),
    _Row("hnorm.weight", "norms", "hidden", "BF16"),
    _Row("e_proj.weight", "attention", "hidden hidden", "F8_E4M3"),
    _Row("h_proj.weight", "attention", "hidden hidden", "F8_E4M3"),
)


def _dimensions(config: ModelConfig, ratio: int, hashed: bool) -> dict[str, int]:
    overlap = ratio == OVERLAPPED_RATIO
    return {
        "one": 1,
        "three": 3,
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "streams": config.hc_mult,
        "maps": config.hc_mult * (2 + config.hc_mult),
        "q_rank": config.q_lora_rank,
        "heads": config.num_attention_heads,
        "head": config.head_dim,
        "groups": config.o_groups,
        "o_rank": config.o_lora_rank,
        "ratio": ratio,
        "width": (2 if overlap else 1) * config.head_dim,
        "i_heads": config.index_n_heads,
        "i_head": config.index_head_dim,
        "i_width": 2 * config.index_head_dim,
        "experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "csa": int(overlap),
        "hashed": int(hashed),
        "scored": int(not hashed),
    }


def _size(expression: str, dimensions: Mapping[str, int]) -> int:
    """Value of "a", "a*b" or "a*b/c"."""
    product, _, divisor = expression.partition("/")
    size = math.prod(dimensions[name] for name in product.split("*"))
    return size // dimensions[divisor] if divisor else size


def _specs(
    rows: tuple[_Row, ...], prefix: str, path: str | None, dimensions: Mapping[str, int]
) -> Iterator[tuple[str, TensorSpec]]:
    """path  prefix of the tree path, None when the rows are no part of the tree."""
    for row in rows:
        if row.when and not dimensions[row.when]:
            continue
        shape = tuple(_size(expression, dimensions) for expression in row.shape.split())
        # In the tree a hyper-connection is one module: hc_attn_fn is hc_attn.fn.
        place = re.sub(r"^(hc_\w+)_(fn|base|scale)$", r"\1.\2", row.name)
        yield (
            prefix + row.name,
            TensorSpec(shape, row.dtype, row.component, "" if path is None else path + place),
        )


def resident_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the main model except routed experts and scales, by published name.

    Quantised weights are listed once, as `X.weight`; `scale_info` gives the scales that belong to
    the dtype they are stored in.
    """
    result: dict[str, TensorSpec] = {}
    outer = _dimensions(config, 0, False)
    for name, spec in _specs(_TABLE_ROWS, "", "", outer):
        # The two tables are bare arrays in the tree.
        result[name] = dataclasses.replace(spec, path=name.removesuffix(".weight"))
    for layer, ratio in enumerate(config.layer_ratios):
        dimensions = _dimensions(config, ratio, config.is_hash(layer))
        result |= _specs(_LAYER_ROWS, f"layers.{layer}.", f"blocks.{layer}.", dimensions)
    result |= _specs(_HEAD_ROWS, "", "", outer)
    return result


def expert_tensors(config: ModelConfig, layer: int | str) -> dict[str, TensorSpec]:
    """The routed experts of a main layer, or of "mtp.0", by published name, without scales."""
    specs = expert_specs(config)
    return {
        f"{expert_prefix(layer, expert)}{matrix}.weight": spec
        for expert in range(config.n_routed_experts)
        for matrix, spec in specs.items()
    }


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the main model except scales, by published name."""
    result = resident_tensors(config)
    for layer in range(config.num_hidden_layers):
        result |= expert_tensors(config, layer)
    return result


def mtp_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the multi-token-prediction block `mtp.0` except scales.

    Paths are those of `mtp.abstract_mtp(config)`.
    """
    dimensions = _dimensions(config, 0, False)
    result = dict(_specs(_LAYER_ROWS, "mtp.0.", "block.", dimensions))
    result |= _specs(_MTP_ROWS + _HEAD_ROWS, "mtp.0.", "", dimensions)
    return result | expert_tensors(config, "mtp.0")


def expert_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The matrices of one routed expert: "w1" (gate), "w2" (down) and "w3" (up)."""
    rows = _specs(_EXPERT_ROWS, "", None, _dimensions(config, 0, False))
    return {name.removesuffix(".weight"): spec for name, spec in rows}


def expert_dtype(format: ExpertFormat) -> str:
    """Storage dtype of the expert codes of a format."""
    return next(dtype for dtype, name in EXPERT_FORMATS.items() if name == format)


def expert_prefix(layer: int | str, expert: int) -> str:
    """Name prefix of the matrices of one routed expert of a main layer, or of "mtp.0"."""
    block = f"layers.{layer}" if isinstance(layer, int) else layer
    return f"{block}.ffn.experts.{expert}."


def stored_info(spec: TensorSpec, dtype: str) -> TensorInfo:
    """Header entry of a tensor that is stored in `dtype`."""
    if dtype == "I8":
        return TensorInfo("I8", (*spec.shape[:-1], spec.shape[-1] // 2))
    return TensorInfo(dtype, spec.shape)


def scale_info(spec: TensorSpec, dtype: str) -> TensorInfo | None:
    """Header entry of the scales of a weight that is stored in `dtype`; None if it has none.

    The same dtype means two grids: 1 x 32 for packed FP4 (I8), 128 x 128 for F8_E4M3.
    """
    if dtype == "I8":
        return TensorInfo("F8_E8M0", (spec.shape[0], -(-spec.shape[1] // FP4_BLOCK)))
    if dtype == "F8_E4M3":
        return TensorInfo("F8_E8M0", tuple(-(-size // FP8_BLOCK) for size in spec.shape))
    return None


def scale_name(name: str) -> str:
    """Name of the scales of the weight `name`."""
    return name.removesuffix("weight") + "scale"


def with_scales(specs: Mapping[str, TensorSpec], infos: Mapping[str, TensorInfo]) -> list[str]:
    """The names of `specs`, and those of the scales that they have in this header."""
    names = list(specs)
    for name, spec in specs.items():
        if scale_info(spec, infos[name].dtype) is not None:
            names.append(scale_name(name))
    return names


def official_header(
    config: ModelConfig, experts: str = "fp4", *, mtp: bool = True
) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of the published checkpoint of a model, scales included.

    experts  "fp4", or "fp8" for the Base variants
    mtp      whether the multi-token-prediction block is included
    """
    specs = expected_tensors(config)
    if mtp:
        specs |= mtp_tensors(config)
    header: dict[str, TensorInfo] = {}
    entries: dict[TensorSpec, tuple[TensorInfo, TensorInfo | None]] = {}  # experts share a few
    for name, spec in specs.items():
        if spec not in entries:
            dtype = "F8_E4M3" if spec.dtype == "I8" and experts == "fp8" else spec.dtype
            entries[spec] = stored_info(spec, dtype), scale_info(spec, dtype)
        header[name], scales = entries[spec]
        if scales is not None:
            header[scale_name(name)] = scales
    return header


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a complete checkpoint holds.

    skipped  one phrase for each group of tensors that prefill does not use
    """

    expert_format: ExpertFormat
    skipped: tuple[str, ...]

    def log_skipped(self) -> None:
        """Logs one line for each skipped group."""
        for phrase in self.skipped:
            logging.info("checkpoint: skipped %s", phrase)


_IMAGE_BIAS = re.compile(r"layers\.\d+\.ffn\.gate\.bias_vl")


def drafter(infos: Mapping[str, TensorInfo]) -> str | None:
    """The draft model of a checkpoint: "MTP", "DSpark" or None.

    num_nextn_predict_layers is 1 for both kinds; only the tensors tell them apart.
    """
    if any(name.startswith("mtp.") and ".enorm." in name for name in infos):
        return "MTP"
    return "DSpark" if any(name.startswith("mtp.") for name in infos) else None


def check_complete(source: TensorSource) -> Contents:
    """Compares the tensors of a checkpoint with what its config asks for, both ways.

    Reads no data. Raises CheckpointError that lists everything missing, unexpected, of a wrong
    shape or dtype, and experts stored in more than one format. Draft models (`mtp.*`) and the
    image routing bias of vision variants are recognised and not checked.
    """
    infos = source.infos()
    comparison = _Comparison(infos, expected_tensors(source.config))
    skipped = []
    draft = [name for name in infos if name.startswith("mtp.")]
    if draft:
        skipped.append(
            f"mtp.* ({drafter(infos)} draft model, {len(draft)} tensors): not used by prefill"
        )
    image = [name for name in infos if _IMAGE_BIAS.fullmatch(name)]
    if image:
        skipped.append(f"ffn.gate.bias_vl (image routing bias, {len(image)} tensors): text only")
    expert_format = comparison.finish("checkpoint", {*draft, *image})
    for field in ("hidden_size", "moe_intermediate_size"):
        width = getattr(source.config, field)
        if expert_format == "fp4" and width % FP4_BLOCK:
            raise CheckpointError(
                f"{field} of config.json is {width}, expected a multiple of {FP4_BLOCK} as the "
                f"experts are FP4 with a scale for {FP4_BLOCK} inputs each"
            )
    return Contents(expert_format, tuple(skipped))


def check_mtp(source: TensorSource) -> ExpertFormat:
    """Compares `mtp.0.*` with the multi-token-prediction block; returns its expert format.

    Raises CheckpointError as `check_complete` does, also when the draft model is another one.
    """
    infos = source.infos()
    kind = drafter(infos)
    if kind != "MTP":
        raise CheckpointError(
            f"the checkpoint has {kind or 'no'} draft model, expected the multi-token-prediction "
            "block (mtp.0 with enorm): only the original V4-Flash and V4-Pro files hold one"
        )
    comparison = _Comparison(infos, mtp_tensors(source.config))
    main = {name for name in infos if not name.startswith("mtp.")}
    return comparison.finish("mtp.0 block", main)


class _Comparison:
    """Tensors of a header against expected ones; collects every difference."""

    def __init__(self, infos: Mapping[str, TensorInfo], specs: Mapping[str, TensorSpec]) -> None:
        self.infos = infos
        self.problems: list[str] = []
        self.known: set[str] = set()
        self.expert_dtypes: dict[str, str] = {}  # dtype -> a tensor that has it
        for name, spec in specs.items():
            self._compare(name, spec)

    def _compare(self, name: str, spec: TensorSpec) -> None:
        self.known.add(name)
        info = self.infos.get(name)
        if info is None or info.dtype not in spec.dtypes:
            # How the weight should have been stored is unknown, so its scales are not judged.
            self.known.add(scale_name(name))
            self.problems.append(
                f"missing: {name} {list(spec.shape)} {spec.dtype}"
                if info is None
                else f"wrong dtype: {name} is {info.dtype}, expected {' or '.join(spec.dtypes)}"
            )
            return
        if spec.component == "experts":
            self.expert_dtypes.setdefault(info.dtype, name)
        parts = {name: stored_info(spec, info.dtype)}
        scales = scale_info(spec, info.dtype)
        if scales is not None:
            self.known.add(scale_name(name))
            parts[scale_name(name)] = scales
        for part, expected in parts.items():
            self.problems.extend(_differences(part, self.infos.get(part), expected))

    def finish(self, what: str, others: Set[str]) -> ExpertFormat:
        """Raises what was found, unexpected names that are not in `others` included."""
        problems = self.problems + [
            f"unexpected: {name}{_unexpected_hint(name)}"
            for name in self.infos
            if name not in self.known and name not in others
        ]
        if len(self.expert_dtypes) > 1:
            problems.append(
                "experts are stored in several formats, expected one: "
                + ", ".join(f"{dtype} ({name})" for dtype, name in self.expert_dtypes.items())
            )
        if problems:
            raise CheckpointError.listing(f"the {what} does not fit its config.json", problems)
        return EXPERT_FORMATS[next(iter(self.expert_dtypes))]


def _differences(name: str, found: TensorInfo | None, expected: TensorInfo) -> Iterator[str]:
    if found is None:
        yield f"missing: {name} {list(expected.shape)} {expected.dtype}"
        return
    if found.dtype != expected.dtype:
        yield f"wrong dtype: {name} is {found.dtype}, expected {expected.dtype}"
    if found.shape != expected.shape:
        yield f"wrong shape: {name} is {list(found.shape)}, expected {list(expected.shape)}"


def _unexpected_hint(name: str) -> str:
    if name.startswith("model."):
        return " (a name of the transformers layout; the published names are needed)"
    if name.endswith(".scale"):
        return " (scales beside a weight that is not quantised, or without one)"
    return ""


def expert_format(source: TensorSource, layer: int | str = 0) -> ExpertFormat:
    """How the routed experts of a layer are stored: "fp4", "fp8", "bf16" or "f32"."""
    name = expert_prefix(layer, 0) + "w1.weight"
    dtype = source.info(name).dtype
    if dtype not in EXPERT_FORMATS:
        raise CheckpointError(f"{name} is {dtype}, expected one of {', '.join(EXPERT_FORMATS)}")
    return EXPERT_FORMATS[dtype]


@dataclasses.dataclass(frozen=True)
class ResidentBytes:
    """Bytes of `load.load_resident` by layer, of the embedding, and of the final norm and head."""

    layers: tuple[int, ...]
    embed: int
    head: int


def resident_parts(
    config: ModelConfig, infos: Mapping[str, TensorInfo] | None = None
) -> ResidentBytes:
    """Bytes of the arrays of `load.load_resident`: the main model without routed experts.

    infos  the header of a checkpoint; the published storage formats without it
    """
    layers, embed, head = [0] * config.num_hidden_layers, 0, 0
    for name, spec in resident_tensors(config).items():
        info = stored_info(spec, spec.dtype) if infos is None else infos[name]
        scales = scale_info(spec, info.dtype)
        nbytes = math.prod(info.shape) * loaded_dtype(spec, info).itemsize
        nbytes += 0 if scales is None else scales.nbytes
        if name.startswith("layers."):
            layers[layer_of(name, config)] += nbytes
        elif name.startswith("embed."):
            embed += nbytes
        else:
            head += nbytes
    return ResidentBytes(tuple(layers), embed, head)


def resident_bytes(
    config: ModelConfig,
    infos: Mapping[str, TensorInfo] | None = None,
    layers: range | None = None,
) -> int:
    """`resident_parts` together.

    layers  only these, with the embedding if the first and the head if the last is among them
    """
    parts = resident_parts(config, infos)
    chosen = range(config.num_hidden_layers) if layers is None else layers
    total = sum(parts.layers[layer] for layer in chosen)
    total += parts.embed if 0 in chosen else 0
    return total + (parts.head if config.num_hidden_layers - 1 in chosen else 0)


def layer_of(name: str, config: ModelConfig) -> int:
    """The main layer that a resident tensor belongs to, or has to be on the same device as.

    That is the first layer for the embedding and the last one for the final norm and the head.
    """
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return 0 if name.startswith("embed.") else config.num_hidden_layers - 1


def loaded_dtype(spec: TensorSpec, info: TensorInfo) -> np.dtype:
    """Dtype that a resident tensor has in memory.

    Token tables become int32, tensors that the format keeps in float32 are float32 even if a file
    has them in bfloat16; everything else stays as it is stored.
    """
    if spec.dtype == "I64":
        return np.dtype(np.int32)
    return np.dtype(np.float32) if spec.dtype == "F32" else info.numpy_dtype


def expert_bytes(config: ModelConfig, infos: Mapping[str, TensorInfo] | None = None) -> int:
    """Bytes of one routed expert, scales included, as it is stored and moved.

    infos  the header of a checkpoint; the published FP4 format without it
    """
    total = 0
    for matrix, spec in expert_specs(config).items():
        name = f"{expert_prefix(0, 0)}{matrix}.weight"
        dtype = spec.dtype if infos is None else infos[name].dtype
        scales = scale_info(spec, dtype)
        total += stored_info(spec, dtype).nbytes + (0 if scales is None else scales.nbytes)
    return total


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of tensors and their bytes, in total and by dtype."""

    tensors: int
    nbytes: int
    by_dtype: dict[str, int]


def component_of(name: str) -> str:
    """The component of a published tensor name; draft models count as "mtp.N"."""
    if name.startswith("mtp."):
        return ".".join(name.split(".")[:2])
    if ".ffn.experts." in name:
        return "experts"
    local = re.sub(r"^layers\.\d+\.", "", name).removesuffix(".scale")
    for row in _LAYER_ROWS + _HEAD_ROWS + _TABLE_ROWS:
        if local == row.name.removesuffix(".weight") or local == row.name:
            return row.component
    return "other"


def component_sizes(infos: Mapping[str, TensorInfo]) -> dict[str, Size]:
    """Bytes of a header by component, in the order of COMPONENTS, others after them."""
    tensors: dict[str, int] = {}
    nbytes: dict[str, dict[str, int]] = {}
    for name, info in infos.items():
        component = component_of(name)
        tensors[component] = tensors.get(component, 0) + 1
        dtypes = nbytes.setdefault(component, {})
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
    order = [name for name in COMPONENTS if name in tensors]
    order += sorted(name for name in tensors if name not in COMPONENTS)
    return {name: Size(tensors[name], sum(nbytes[name].values()), nbytes[name]) for name in order}
