"""Weights of several experts of one layer, in one device buffer per matrix."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import codecs

Format = Literal["fp4", "fp8", "bf16", "f32"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate_up", "gate_up_scale", "down", "down_scale", "scale_range"],
    meta_fields=["format"],
)
@dataclasses.dataclass(frozen=True)
class ExpertSlab:
    """n experts of hidden size D and width F; rows of w1 (gate) come before those of w3 (up).

    format   gate_up                    down                      scales (u8, E8M0)
    "fp4"    u8 [n, 2F, D/2]            u8 [n, D, F/2]            one per 32 elements of a row
    "fp8"    float8_e4m3fn [n, 2F, D]   float8_e4m3fn [n, D, F]   one per 128x128 block
    "bf16"   bfloat16 [n, 2F, D]        bfloat16 [n, D, F]        None
    "f32"    float32 [n, 2F, D]         float32 [n, D, F]         None

    FP4 bytes hold the even element in the low nibble, as the checkpoint has them; the scales are
    [n, 2F, D/32] and [n, D, F/32]. The scales of the FP8 gate_up are those of w1 above those of w3,
    [n, 2 * ceil(F/128), ceil(D/128)], those of down [n, ceil(D/128), ceil(F/128)].

    scale_range, of FP4 slabs that stay for many calls: what `scale_range` finds. Without it every
    call that needs it reads all scales for it.
    """

    gate_up: jax.Array
    gate_up_scale: jax.Array | None
    down: jax.Array
    down_scale: jax.Array | None
    format: Format
    scale_range: jax.Array | None = None

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def width(self) -> int:
        return self.gate_up.shape[1] // 2

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    def check(self) -> None:
        """Raises ValueError unless dtypes and shapes are those of the table above."""
        dtypes = {
            "fp4": jnp.uint8,
            "fp8": jnp.float8_e4m3fn,
            "bf16": jnp.bfloat16,
            "f32": jnp.float32,
        }
        if self.format not in dtypes:
            raise ValueError(f"slab format is {self.format!r}, expected one of {list(dtypes)}")
        n, f, d = self.experts, self.width, self.hidden
        scales: dict[str, tuple[int, ...] | None] = {"gate_up": None, "down": None}
        packing = 1
        if self.format == "fp4":
            packing = 2
            scales = {"gate_up": (n, 2 * f, d // 32), "down": (n, d, f // 32)}
            if d % 32 or f % 32:
                raise ValueError(f"FP4 slab of D={d}, F={f}: expected multiples of 32")
        elif self.format == "fp8":
            blocks_f, blocks_d = -(-f // 128), -(-d // 128)
            scales = {"gate_up": (n, 2 * blocks_f, blocks_d), "down": (n, blocks_d, blocks_f)}
        shapes = {"gate_up": (n, 2 * f, d // packing), "down": (n, d, f // packing)}
        for name, shape in shapes.items():
            codes, scale = getattr(self, name), getattr(self, f"{name}_scale")
            if codes.shape != shape or codes.dtype != dtypes[self.format]:
                raise ValueError(
                    f"{self.format} slab of {n} experts, D={d}, F={f}: {name} is "
                    f"{codes.dtype}{list(codes.shape)}, expected "
                    f"{jnp.dtype(dtypes[self.format])}{list(shape)}"
                )
            wanted = scales[name]
            if (scale is None) != (wanted is None) or (
                scale is not None and (scale.shape != wanted or scale.dtype != jnp.uint8)
            ):
                found = None if scale is None else f"{scale.dtype}{list(scale.shape)}"
                raise ValueError(
                    f"{self.format} slab of {n} experts, D={d}, F={f}: {name}_scale is {found}, "
                    f"expected {None if wanted is None else f'uint8{list(wanted)}'}"
                )
        found = self.scale_range
        if found is not None and (found.shape != (n, 2, 2) or found.dtype != jnp.uint8):
            raise ValueError(
                f"scale_range is {found.dtype}{list(found.shape)}, expected uint8{[n, 2, 2]}"
            )

    def decode(self, row: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        """Weights of the expert at `row` (traced i32): gate_up [2F, D] and down [D, F]."""

        def at(array):
            return jax.lax.dynamic_index_in_dim(array, row, keepdims=False)

        gate_up, down = at(self.gate_up), at(self.down)
        if self.format in ("bf16", "f32"):
            return gate_up.astype(dtype), down.astype(dtype)
        gate_up_scale, down_scale = at(self.gate_up_scale), at(self.down_scale)
        if self.format == "fp4":
            gate_up = codecs.decode_fp4(gate_up, gate_up_scale, dtype)
            return gate_up, codecs.decode_fp4(down, down_scale, dtype)
        # w1 and w3 have block grids of their own: a width of 192 starts a new block at row 192.
        halves = jnp.stack(jnp.split(gate_up, 2))
        half_scales = jnp.stack(jnp.split(gate_up_scale, 2))
        gate_up = codecs.decode_fp8(halves, half_scales, dtype).reshape(gate_up.shape)
        return gate_up, codecs.decode_fp8(down, down_scale, dtype)


def scale_range(slab: ExpertSlab) -> jax.Array:
    """u8 [n, 2, 2]: the least and the largest scale byte of each gate_up and of each down."""
    return jnp.stack(
        [
            jnp.stack([scales.min(axis=(1, 2)), scales.max(axis=(1, 2))], axis=1)
            for scales in (slab.gate_up_scale, slab.down_scale)
        ],
        axis=1,
    )


def with_scale_range(slab: ExpertSlab) -> ExpertSlab:
    """The slab with its `scale_range`, found on its device; other formats than FP4 as they are."""
    if slab.format != "fp4":
        return slab
    return dataclasses.replace(slab, scale_range=jax.jit(scale_range)(slab))


def unreadable(
    x: jax.Array, slabs: Sequence[ExpertSlab], formats: Sequence[str], multiple: int
) -> str | None:
    """Why kernels for bfloat16 x, slabs of `formats` and widths of `multiple` cannot read these."""
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}, the kernels compute in bfloat16"
    for index, slab in enumerate(slabs):
        if slab.format not in formats:
            return f"slab {index} is {slab.format}, the kernels read {' and '.join(formats)}"
        for name, size in (("D", slab.hidden), ("F", slab.width)):
            if size % multiple:
                return f"slab {index} has {name}={size}, expected a multiple of {multiple}"
    return None
