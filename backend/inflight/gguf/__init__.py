"""Files of llama.cpp: their header, and the configuration and tokenizer in it.  No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
