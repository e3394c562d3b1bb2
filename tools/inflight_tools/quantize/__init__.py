"""`inflight quantize`: a checkpoint in four bits, by GPTQ on text that the model writes itself."""
