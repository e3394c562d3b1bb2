"""Attention over the paged KV pool: Protocol, reference, registration with transformers, and the choice of a kernel."""
