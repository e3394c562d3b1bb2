"""Hugging Face checkpoint -> forward pass with paged attention.

loader.py          `load`, which calls the others
checkpoint.py      configuration and weights
probe.py           what each layer's attention requires
memory_plan.py     how many KV blocks fit
checks.py          the check at load: logits against transformers' attention
acceleration.py    the fastest forward pass that passes the check
recognition.py     what a module computes
native_decoder.py, packed_linear.py     forward passes on a CPU
fused_modules.py                        small operations on a GPU
"""
