"""KV events: which blocks the prefix cache has, for routers that send a prompt to where its prefix is.  No torch."""
