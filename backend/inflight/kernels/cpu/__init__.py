"""CPU kernels: C++ sources, their build, and bindings through ctypes.

build.py      compiles the sources into one library
library.py    loads it, chooses the instruction set, allocates memory
attention.py  `AttentionBackend`
linear.py     linear layers with packed weights; weight_format.py says how they are stored
decoder.py    a decoder's forward pass as one native call
"""
