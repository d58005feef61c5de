"""Takes seeds and offsets of random numbers from torch's generators at every launch.

A kernel's random number is Philox 4x32-10 of (seed, offset, index of the element). So the same numbers come again after
``torch.manual_seed``, and others at every call. They are not the numbers that torch would have made.

* CUDA: seed and offset are those of the device's generator, whose offset is moved on by four for each tensor of random
  numbers, the least that torch itself moves it.
* CPU: torch's generator has no offset, so that a seed is drawn from it. torch's own next numbers are others after that.

A CUDA graph would replay one offset for ever, so that a launch under capture is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jitgen.errors import UnsupportedError


def drawer(name: str, device: torch.device, offsets: int) -> Callable[[], tuple[int, int]]:
    """Returns a function that draws (seed, offset), both within int64, for a call of ``name``, and advances the
    generator of ``device`` by ``offsets``."""
    if device.type != "cuda":
        return _seed_of_cpu
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator, capturing = torch.cuda.default_generators[index], torch.cuda.is_current_stream_capturing

    def draw() -> tuple[int, int]:
        if capturing():
            raise UnsupportedError(
                f"{name}: a captured CUDA graph would make the same random numbers at every replay; make them outside "
                "of the capture, or with torch, and pass them as an argument"
            )
        offset = generator.get_offset()
        generator.set_offset(offset + offsets)
        return _signed(generator.initial_seed()), _signed(offset)

    return draw


def _seed_of_cpu() -> tuple[int, int]:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()), 0


def _signed(number: int) -> int:
    """Reinterprets a uint64 as an int64."""
    return number - 2**64 if number >= 2**63 else number
