"""Eight CPU devices, strict dtypes and ranks, true float32 products: set before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "cpu" not in os.environ["JAX_PLATFORMS"].split(","):
    os.environ["JAX_PLATFORMS"] += ",cpu"  # beside a GPU, whose results are compared with it
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"

import jax  # after the variables above: it reads them when it is imported

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
