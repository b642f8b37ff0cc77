"""Commands: `python -m ds4jax.cli.NAME`, or the console scripts ds4jax-NAME."""
