"""Norms, rotary embedding and the gate of the MLP: one Protocol (`base.py`), one implementation a device."""
