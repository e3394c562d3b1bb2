"""The page for browsers at `/`, and the files that it and `/docs` consist of."""
