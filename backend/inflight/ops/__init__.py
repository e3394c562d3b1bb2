"""Norms, rotary embedding and the MLP's gate: Protocol, reference, and the choice of an implementation."""
