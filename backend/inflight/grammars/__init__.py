"""What a sequence may still write: grammars, compiled beside the steps, and masks of tokens for rows.  No torch."""
