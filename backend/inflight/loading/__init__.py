"""Hugging Face checkpoint -> forward pass with paged attention.

loader.py          `load`, which calls the others
checkpoint.py      configuration and weights
probe.py           what each layer's attention requires
paged_layers.py    the KV caches of a model's attention layers
largest_step.py    the step that is measured on a GPU
memory_plan.py     where memory goes, and how many KV blocks fit
checks.py          the check at load: logits against transformers' attention
acceleration.py    the fastest forward pass that passes the check
recognition.py     what a module computes
native_decoder.py, packed_linear.py     forward passes on a CPU
fused_modules.py                        small operations on a GPU
"""
