"""Words of the code that Pallas-Mosaic kernels write for a single thread."""

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def c32(value: int) -> ir.Value:
    """The i32 with the low 32 bits of `value`."""
    value &= 0xFFFFFFFF
    value = value - (1 << 32) if value >= 1 << 31 else value
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value))


def offset(pointer: ir.Value, byte_offset: ir.Value) -> ir.Value:
    """A pointer moved by an i32 or i64 of bytes."""
    return utils.getelementptr(pointer, [byte_offset], ir.IntegerType.get_signless(8))
