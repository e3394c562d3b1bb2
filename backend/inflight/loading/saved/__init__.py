"""Weights that outlive the engine: a load that has passed its check is kept in a file, and the next start reads it.

identity.py        which checkpoint with which options, which program on which CPU: the name of the file
weights_file.py    its format: a header, then tensors as the kernels read them, with checksums
cache_folder.py    where such files are: private, written atomically, bounded
saved_model.py     what a load has decided and packed <-> such a file

The file is laid out so that it can also be mapped: its tensors begin at a multiple of 2 MiB, each aligned to 64 bytes.
"""
