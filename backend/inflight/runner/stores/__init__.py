"""Media that keep KV beyond the pool: one file for each, a `KVStore` (`engine/tiers/base.py`)."""
