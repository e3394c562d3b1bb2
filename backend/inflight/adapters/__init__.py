"""LoRA adapters (arXiv:2106.09685) as files in PEFT's format: what they say, and what of it is served.  No torch."""
