"""The best that was measured on a card: what a kernel's bandwidth is held against."""

from __future__ import annotations

from typing import Any

__all__ = ["of"]

# Bytes per second, bytes read plus bytes written. One NVIDIA H200, driver 580.159.04, CuPy 14.2, 2026-11-30: the best geometry of each kernel,
# medians of CUDA events over buffers of 1 GiB (read grid-stride, triad and copy one-shot, write grid-stride).
_RECORDED: dict[str, dict[str, float]] = {
    "NVIDIA H200": {"read": 4.40e12, "triad": 4.33e12, "copy": 4.20e12, "write": 4.12e12},
}


def of(device: str) -> dict[str, Any]:
    """``read triad copy write`` in bytes/s, ``origin`` and ``device``; empty where this card was never measured."""
    for name, rates in _RECORDED.items():
        if name in device:
            return {**rates, "origin": "recorded", "device": name}
    return {}
