"""Moves named byte ranges from disk or host memory to devices ahead of the compute that needs them."""

# `ds4jax` checks this marker at import: other distributions install packages of the same name.
OWNER = "ds4jax"
