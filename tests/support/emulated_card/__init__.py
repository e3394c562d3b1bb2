"""A card for tests without a GPU: it has `torch.cuda`'s interface, and CUDA's rules are enforced.

- Tensors say that they are on cuda:0.  Mixing devices is an error.
- Launches run as late as possible and in the order of their stream: reading results before an event, or overwriting a
  pinned buffer that a copy has still to read, gives wrong values.
- The host may wait for the card, but not under `torch.cuda.set_sync_debug_mode("error")`, and not in a capture.
- Memory that was not written, or was freed, is NaN, or an integer out of range.
- A graph replays launches at the addresses of its capture, which must still be allocated.
- Memory is limited, and accounted for as by torch's allocator.

It does not have times, several cards, or the order in which a GPU adds floating-point numbers.
"""

from emulated_card.card import Card
from emulated_card.install import emulated_card, is_emulated
from emulated_card.tensors import launch_function

__all__ = ["Card", "emulated_card", "is_emulated", "launch_function"]
