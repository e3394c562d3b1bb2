"""Weights that outlive the engine: a load that has passed its check is kept in a file, and the next start maps it.

identity.py        which checkpoint with which options, which program on which CPU: the name of the file
mapped_file.py     its format: a header, then tensors as the kernels read them, with checksums; its mapping
weights_file.py    tensors <-> such a file
prefetch.py        maps one while torch is imported
newly_kept.py      whether a spare process could map more than it did
cache_folder.py    where such files are: private, written atomically, bounded
saved_model.py     what a load has decided and packed <-> such a file
"""
