"""Checkpoints: reading the published format, converting it, making one up, saving state."""
