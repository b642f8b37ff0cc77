"""Times the FP8 linears of a Flash layer on this machine's GPU beside plain bfloat16 products.

python -m pallas_kernels.block_linear.bench --out=linears.json
"""

import argparse
import functools
import json
import sys

import jax
import jax.numpy as jnp

from pallas_kernels import bench
from pallas_kernels.block_linear import block_linear

TOKENS = 8192
SHAPES = {  # [outputs, inputs]
    "wq_a": (1024, 4096),
    "wq_b": (32768, 1024),
    "wkv": (512, 4096),
    "wo_b": (4096, 8192),
    "indexer.wq_b": (8192, 1024),
    "shared.w1": (2048, 4096),
    "shared.w2": (4096, 2048),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=bench.output_file, required=True)
    args = parser.parse_args(argv)
    rows = []
    for name, (outputs, inputs) in SHAPES.items():
        keys = jax.random.split(jax.random.key(0), 3)
        codes = jax.random.normal(keys[0], (outputs, inputs)).astype(jnp.float8_e4m3fn)
        blocks = (outputs // 128, inputs // 128)
        scales = jax.random.bits(keys[1], blocks, jnp.uint8) % jnp.uint8(5) + jnp.uint8(115)
        x = jax.random.normal(keys[2], (TOKENS, inputs), jnp.bfloat16)
        row: dict[str, object] = {"name": name, "shape": [outputs, inputs], "tokens": TOKENS}
        for label, quantize_input, weight, scale in (
            ("fp8_q1", True, codes, scales),
            ("fp8", False, codes, scales),
            ("bf16", False, codes.astype(jnp.bfloat16), None),
        ):
            run = functools.partial(block_linear, quantize_input=quantize_input, dtype=jnp.bfloat16)
            timing = bench.measure(jax.jit(run), x, weight, scale, runs=7, calls_per_run=5)
            row[f"{label}_ms"] = timing.median_s * 1e3
        row["bf16_tflops"] = 2 * TOKENS * outputs * inputs / row["bf16_ms"] / 1e9
        rows.append(row)
        print(
            " ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        )
    document = bench.origin("pallas_kernels.block_linear.bench", argv) | {"timings": rows}
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
