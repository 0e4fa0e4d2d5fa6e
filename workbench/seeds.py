"""Seeds that depend on where in a run something is drawn, and on nothing else: resumed runs and ranks draw the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from workbench.types import GradientScope, Sampled


def derived_seed(*parts: Any) -> int:
    """A seed of 62 bits that depends on all parts and on nothing else."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2


def scope_at(scope: GradientScope, *place: int) -> GradientScope:
    """The scope for one place of a run. `Sampled` draws anew at each: the same chunks throughout would be a bias."""
    return replace(scope, seed=derived_seed("walk", scope.seed, *place)) if isinstance(scope, Sampled) else scope
