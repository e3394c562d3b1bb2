"""GPU kernels in the Triton language.

launch.py                  whether they can run here
gpu_attention.py           `AttentionBackend`
gpu_attention_configs.py   tile shapes, and how many programs a launch has room for
gpu_attention_plan.py      which program computes what, decided on the device
gpu_attention_kernel.py    attention over the paged pool; gpu_attention_tiles.py is a part of it
gpu_kv_cache.py            the pool; gpu_kv_write.py is the kernel that writes to it
gpu_flash3.py              `AttentionBackend` by FlashAttention-3 for batches with prompts, on the same pool
gpu_varlen.py              the same by torch's `varlen_attn` for steps of whole prompts
gpu_ops.py                 `FusedOps`
gpu_split_k.py             linear layers for steps of a few tokens
gpu_int4.py                linear layers with weights in four bits
gpu_pdl.py                 kernels that start before the one before them has ended
gpu_sampler.py             the choice of tokens; with gpu_math.py, gpu_penalties.py
"""
