"""From a tensor source to the modules and slabs that the model runs on."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ds4jax import model, mtp
from ds4jax.checkpoint import keys, synthetic_device
from ds4jax.checkpoint.source import CheckpointError, TensorSource, config_text
from ds4jax.config import ModelConfig
from ds4jax.quant import QTensor
from pallas_kernels.routed_experts import ExpertSlab, with_scale_range

E8M0_NAN = 255
SMALL_BYTES = 16384  # tensors up to this size are part of a fingerprint


def load_resident(
    source: TensorSource, *, device: jax.Device | Sequence[jax.Device | None] | None = None
) -> model.Transformer:
    """The main model without routed experts, placed on `device` (JAX's default without it).

    With a device for every layer, the embedding goes to the first one and the head to the last;
    where that is None the tensors are not read and stay ShapeDtypeStructs.
    Values keep their storage dtype, see `keys.loaded_dtype`. The host holds one layer at a time.
    Raises CheckpointError when the checkpoint is incomplete, a scale is NaN or a token table
    names an expert that does not exist.
    """
    keys.check_complete(source).log_skipped()
    config = source.config
    specs = keys.resident_tensors(config)
    if device is None or isinstance(device, jax.Device):
        return _fill_tree(source, model.abstract(config), specs, lambda name: device)

    def place(name: str) -> jax.Device | None:
        return device[keys.layer_of(name, config)]

    here = {name: spec for name, spec in specs.items() if place(name) is not None}
    return _fill_tree(source, model.abstract(config), here, place)


def load_mtp(source: TensorSource, *, device: jax.Device | None = None) -> mtp.MTPBlock:
    """The multi-token-prediction block without its routed experts; errors as `load_resident`.

    Its experts come from `load_expert_slab(source, "mtp.0", experts)`.
    """
    keys.check_mtp(source)
    specs = keys.mtp_tensors(source.config)
    return _fill_tree(source, mtp.abstract_mtp(source.config), specs, lambda name: device)


def _fill_tree(
    source: TensorSource,
    tree: Any,
    specs: Mapping[str, keys.TensorSpec],
    place: Callable[[str], jax.Device | None],
) -> Any:
    """`tree` of ShapeDtypeStructs with the tensors of `specs` in it, on the devices of `place`.

    Other leaves stay as they are.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    is_matrix = {
        path: isinstance(leaf, QTensor) for path, (_, leaf) in zip(paths, leaves, strict=True)
    }
    groups: dict[str, dict[str, keys.TensorSpec]] = {}
    for name, spec in specs.items():
        if spec.path:
            layer = re.match(r"layers\.\d+", name)
            groups.setdefault(layer[0] if layer else name, {})[name] = spec
    loaded: dict[str, Any] = {}
    for group in groups.values():
        device = place(next(iter(group)))
        made = synthetic_device.maker(source, device)
        arrays = made.resident(group) if made else _read_group(source, group, device)
        for name, spec in group.items():
            values, scales = arrays[name], arrays.get(keys.scale_name(name))
            loaded[spec.path] = QTensor(values, scales) if is_matrix[spec.path] else values
    filled = [loaded.get(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, filled)


def _read_group(
    source: TensorSource, group: Mapping[str, keys.TensorSpec], device: Any
) -> dict[str, jax.Array]:
    """The tensors of `group` and their scales, by name, checked and on `device`."""
    arrays = source.read_many(keys.with_scales(group, source.infos()))
    for name, spec in group.items():
        require_valid(name, spec, arrays, source.config)
        dtype = keys.loaded_dtype(spec, source.info(name))
        arrays[name] = arrays[name].astype(dtype, copy=False)
        if (scale := keys.scale_name(name)) in arrays:
            arrays[scale] = arrays[scale].view(np.uint8)
    return jax.device_put(arrays, device)


def require_valid(
    name: str, spec: keys.TensorSpec, arrays: Mapping[str, np.ndarray], config: ModelConfig
) -> None:
    """Raises CheckpointError when the scales of a resident tensor, or a token table, are wrong.

    arrays  holds the tensor as it is stored, and its scales if it has any
    """
    scales = arrays.get(keys.scale_name(name))
    if scales is not None:
        require_numbers(keys.scale_name(name), scales.view(np.uint8))
    if spec.dtype == "I64":
        _require_experts(name, arrays[name], config.n_routed_experts)


def require_numbers(name: str, scales: np.ndarray) -> None:
    """Raises CheckpointError when a scale byte (uint8, any shape) is 255, the NaN of E8M0."""
    if scales.max(initial=0) == E8M0_NAN:
        position = [int(index[0]) for index in np.nonzero(scales == E8M0_NAN)]
        count = int(np.count_nonzero(scales == E8M0_NAN))
        raise CheckpointError(
            f"{name}{position} is NaN (byte 255), {count} such scales in the tensor: expected "
            "powers of two, fetch the checkpoint again"
        )


def _require_experts(name: str, table: np.ndarray, experts: int) -> None:
    wrong = (table < 0) | (table >= experts)
    if wrong.any():
        position = [int(index[0]) for index in np.nonzero(wrong)]
        raise CheckpointError(
            f"{name}{position} is {int(table[tuple(position)])}, expected an expert 0.."
            f"{experts - 1}: {int(wrong.sum())} entries are out of range"
        )


def empty_expert_slab(config: ModelConfig, format: keys.ExpertFormat, experts: int) -> ExpertSlab:
    """A slab of uninitialised numpy arrays for `experts` experts stored in `format`."""
    specs = keys.expert_specs(config)
    dtype = keys.expert_dtype(format)

    def stack(info_of: Any, names: tuple[str, ...]) -> Any:
        infos = [info_of(specs[name], dtype) for name in names]
        if infos[0] is None:
            return None
        rows = sum(info.shape[0] for info in infos)
        stored = infos[0].numpy_dtype
        # Packed FP4 codes and E8M0 scales are bytes without a sign in memory.
        bytes_like = np.dtype(np.uint8) if infos[0].dtype in ("I8", "F8_E8M0") else stored
        return np.empty((experts, rows, infos[0].shape[1]), bytes_like)

    gate_up, down = ("w1", "w3"), ("w2",)
    return ExpertSlab(
        stack(keys.stored_info, gate_up),
        stack(keys.scale_info, gate_up),
        stack(keys.stored_info, down),
        stack(keys.scale_info, down),
        format,
    )


def abstract_expert_slab(source: TensorSource, experts: int, *, resident: bool) -> ExpertSlab:
    """The shapes of a slab of a main layer, as it stays on a device or as it is streamed."""
    one = empty_expert_slab(source.config, keys.expert_format(source), 1)
    slab = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((experts, *array.shape[1:]), array.dtype), one
    )
    return jax.eval_shape(with_scale_range, slab) if resident else slab


def slab_parts(
    slab: ExpertSlab, layer: int | str, experts: Sequence[int]
) -> list[tuple[str, np.ndarray]]:
    """Tensor names and the (contiguous) pieces of a numpy slab that hold them."""
    parts = []
    for row, expert in enumerate(experts):
        prefix = keys.expert_prefix(layer, expert)
        for suffix, both, down in (
            ("weight", slab.gate_up, slab.down),
            ("scale", slab.gate_up_scale, slab.down_scale),
        ):
            if both is not None:
                both, down = np.asarray(both), np.asarray(down)
                half = both.shape[1] // 2
                parts.append((f"{prefix}w1.{suffix}", both[row, :half]))
                parts.append((f"{prefix}w3.{suffix}", both[row, half:]))
                parts.append((f"{prefix}w2.{suffix}", down[row]))
    return parts


def place_expert_slab(
    source: TensorSource, layer: int | str, experts: Sequence[int], device: jax.Device
) -> ExpertSlab:
    """As `load_expert_slab`, on `device`, with the range of the scales."""
    if made := synthetic_device.maker(source, device):
        return with_scale_range(made.slab(layer, experts))
    return with_scale_range(jax.device_put(load_expert_slab(source, layer, experts), device))


def load_expert_slab(
    source: TensorSource, layer: int | str, experts: Sequence[int], out: ExpertSlab | None = None
) -> ExpertSlab:
    """Routed experts of one layer as numpy arrays, read in parallel, in the given order.

    layer    a main layer, or "mtp.0"
    out      a slab of numpy arrays (page-locked ones for instance) that is filled and returned
    Raises CheckpointError when a tensor is missing or one of its scales is NaN.
    """
    format = keys.expert_format(source, layer)
    if out is None:
        out = empty_expert_slab(source.config, format, len(experts))
    elif out.format != format or out.experts != len(experts):
        raise ValueError(
            f"the slab holds {out.experts} {out.format} experts, {len(experts)} {format} experts "
            f"of layer {layer} were asked for"
        )
    parts = slab_parts(out, layer, experts)
    source.fill(parts)
    for name, array in parts:
        if name.endswith(".scale"):
            require_numbers(name, array)
    return out


def fingerprint(source: TensorSource) -> str:
    """SHA-256 that tells checkpoints of the same architecture apart without reading much.

    Covers the config, the names, dtypes and shapes of the main model, and the content of its
    small resident tensors (norms, sinks, scales, biases). Equal for a checkpoint and its
    converted form.
    """
    infos = {name: info for name, info in source.infos().items() if not name.startswith("mtp.")}
    digest = hashlib.sha256(config_text(source.config).encode())
    for name, info in sorted(infos.items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
    small = sorted(
        name
        for name, info in infos.items()
        if info.nbytes <= SMALL_BYTES and ".ffn.experts." not in name
    )
    arrays = source.read_many(small)
    for name in small:
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
