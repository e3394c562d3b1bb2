"""How the weights of linear layers are stored: one scheme a file, chosen by `quantization` in model.json.

base.py        the Protocol
plain.py       in the model's dtype
int8.py        int8, packed for a CPU
fp8.py         e4m3, on a GPU; fp8_linear.py computes with it, by the products of fp8_product.py
int4.py        four bits, on a GPU; int4_linear.py computes with them
cpu_int4.py    four bits, on a CPU
input_squares.py     which inputs of a layer count the most, for both
in_float32.py  a model in half precision runs in float32, for the check and for input_squares.py
packing.py, stored_linear.py, stored_weight.py     layers in the integers of checkpoints, which checkpoint/ reads
schemes.py     which one a configuration asks for
"""
