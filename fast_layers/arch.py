"""What a call may be lowered for: one frozen `Arch` per kind of device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

# Compute capability by name, for devices that are described but not present (deviceless compilation, export).
_CAPABILITY_BY_NAME = {
    "A100": (8, 0),
    "H100": (9, 0),
    "H200": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
}


@dataclasses.dataclass(frozen=True)
class Arch:
    """Facts of one kind of device. `capability` is NVIDIA's (major, minor), None elsewhere or where unknown."""

    platform: str
    name: str = ""
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        capability = f", sm_{self.capability[0]}{self.capability[1]}" if self.capability else ""
        return f"{self.platform}{f' ({self.name}{capability})' if self.name else ''}"

    @classmethod
    def of_device(cls, device: Any) -> Arch:
        """From a `jax.Device`, or from the description that an abstract mesh carries."""
        if device.platform not in ("gpu", "cuda", "rocm"):
            return cls(device.platform)
        capability = getattr(device, "compute_capability", None)
        if capability is None:
            words = device.device_kind.replace("-", " ").split()
            known = next((_CAPABILITY_BY_NAME[word] for word in words if word in _CAPABILITY_BY_NAME), None)
            return cls("cuda", device.device_kind, known)
        if str(capability).startswith("gfx"):
            return cls("rocm", device.device_kind)
        major, minor = (int(part) for part in str(capability).split("."))
        return cls("cuda", device.device_kind, (major, minor))


def lowering_targets() -> tuple[Arch, ...]:
    """The kinds of device that the code being traced may be lowered for, likeliest first.

    An abstract mesh that carries a device settles it. Otherwise the default device comes first, but a trace can
    still be lowered for the CPU (a committed input, `jax.export`) or for a GPU that is not here.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        present = [d for d in jax.devices() if d.device_kind == described.device_kind]
        return (Arch.of_device(present[0] if present else described),)
    default = jax.config.jax_default_device or jax.devices()[0]
    first = Arch.of_device(jax.devices(default)[0] if isinstance(default, str) else default)
    others = (Arch("cpu"), Arch("cuda"))
    return (first, *(arch for arch in others if arch.platform != first.platform))
