"""Array-in, array-out operations of DeepSeek-V4, each with a plain-JAX reference beside it.

This package knows nothing of checkpoints, models or machines; `ds4jax` is the only caller.
"""

# `ds4jax` checks this marker at import: other distributions install packages of the same name.
OWNER = "ds4jax"
