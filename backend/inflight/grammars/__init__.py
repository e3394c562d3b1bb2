"""Grammars, compiled beside the steps, and masks of the tokens with which a sequence can go on.  No torch."""
