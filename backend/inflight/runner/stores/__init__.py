"""What keeps KV beyond the pool: one file a medium, each a `KVStore` (`engine/tiers/base.py`)."""
