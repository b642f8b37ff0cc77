"""Compressed entries in the layout of the deployed model: FP8 and bfloat16 channels in one row.

A row of bytes holds the E4M3 codes of the channels without rotation, the rotated channels in
bfloat16, one E8M0 scale for every 64 codes, and zeros up to a multiple of 8 bytes: 584 bytes for
the released head of 512 channels, 64 of them rotated, instead of 1,024. Entries rounded by q2 come
back exactly.
"""

import jax
import jax.numpy as jnp

from ds4jax.config import ConfigError, ModelConfig
from pallas_kernels import codecs

BLOCK = 64  # channels that share a scale


def row_bytes(config: ModelConfig) -> int:
    """Bytes of an entry. Raises ConfigError when the channels are no whole blocks."""
    plain = config.plain_channels
    if plain % BLOCK:
        raise ConfigError(
            f"config.numerics.kv is 'fp8', but heads have {plain} channels without rotation: "
            f"expected a multiple of {BLOCK}, or config.numerics.kv='plain'"
        )
    return -(-(plain + 2 * config.rope_channels + plain // BLOCK) // 8) * 8


def pack(entries: jax.Array, rotated: int) -> jax.Array:
    """entries [n, K] bfloat16, the last `rotated` channels of them rotated -> u8 [n, bytes]."""
    plain = entries.shape[1] - rotated
    codes, scales = codecs.quantize_fp8(entries[:, :plain], BLOCK)
    turned = jax.lax.bitcast_convert_type(entries[:, plain:], jnp.uint8)
    used = plain + 2 * rotated + plain // BLOCK
    parts = [
        jax.lax.bitcast_convert_type(codes, jnp.uint8),
        turned.reshape(entries.shape[0], 2 * rotated),
        scales,
        jnp.zeros((entries.shape[0], -used % 8), jnp.uint8),
    ]
    return jnp.concatenate(parts, axis=1)


def unpack(rows: jax.Array, plain: int, rotated: int) -> jax.Array:
    """The entries [n, plain + rotated] bfloat16 of what `pack` gave."""
    count, scaled = rows.shape[0], plain // BLOCK
    codes = jax.lax.bitcast_convert_type(rows[:, :plain], jnp.float8_e4m3fn)
    turned = rows[:, plain : plain + 2 * rotated].reshape(count, rotated, 2)
    scales = codecs.decode_e8m0(rows[:, plain + 2 * rotated :][:, :scaled])
    values = codes.astype(jnp.float32).reshape(count, scaled, BLOCK) * scales[:, :, None]
    return jnp.concatenate(
        [
            codecs.round_to(values.reshape(count, plain), jnp.bfloat16),
            jax.lax.bitcast_convert_type(turned, jnp.bfloat16),
        ],
        axis=1,
    )
