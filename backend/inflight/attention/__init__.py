"""Attention over the paged KV pool: one Protocol (`base.py`), several kernels (`selection.py`)."""
