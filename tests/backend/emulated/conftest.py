"""An emulated card for each test."""

from __future__ import annotations

from card_rig import card

__all__ = ["card"]
