"""Measurements of whole runs (module prefill) and of single layers (module layers)."""
