"""The plan turned round: the longest prompt, the largest group, the fewest ranks, the best chunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from workbench.errors import InvalidInputError
from workbench.planner import graph, sizes
from workbench.planner.step_plan import Plan, plan_request

# Beyond any model and any budget: an answer this large means "no limit".
NO_LIMIT = 2**30
CHUNK_STEP = 64  # the scan's sub-chunk
_ACCEPTABLE = {"fits": ("fits",), "probe": ("fits", "probe")}


def with_request(planned: Plan, **changes: object) -> Plan:
    """The same model and machine, another request."""
    request = replace(planned.request, **changes)  # type: ignore[arg-type]
    return plan_request(planned.shape, planned.gpu, request, planned.calibration)


def largest_positions(planned: Plan, *, verdict: str = "fits") -> int:
    """Most positions (prompt plus one response) with at least this verdict; 0 if not even the shortest prompt has it.

    verdict: "fits" (the upper band does too) or "probe" (the middle does).
    """
    shortest = planned.request.response_tokens + 2
    return _largest(shortest, lambda positions: _allows(with_request(planned, positions=positions), verdict))


def largest_group(planned: Plan, *, verdict: str = "fits") -> int | None:
    """Most responses; None: any number, because they are replayed one at a time; 0: not even one."""
    found = _largest(1, lambda group: _allows(with_request(planned, group_size=group), verdict))
    return None if found >= NO_LIMIT else found


def smallest_context_parallel(planned: Plan, *, verdict: str = "fits", most: int = 1024) -> int | None:
    """Fewest ranks, a power of two times expert_parallel; None if even `most` do not do."""
    ranks = planned.request.expert_parallel
    while ranks <= most and ranks <= planned.request.chunk_tokens:
        if _allows(with_request(planned, context_parallel=ranks, num_gpus=None), verdict):
            return ranks
        ranks *= 2
    return None


def best_chunk(planned: Plan) -> int:
    """The chunk with the lowest peak, among powers of two times 64 that every rank has a token of.

    Small chunks keep many boundary carries, large ones a large graph. Between equals the largest: fewer passes.
    """
    request = planned.request
    longest = max(CHUNK_STEP, request.resident_tokens)
    sizes_tried = [CHUNK_STEP * 2**power for power in range(20)]
    tried = [c for c in sizes_tried if request.context_parallel <= c < 2 * longest]
    if not tried:
        raise InvalidInputError(
            f"best_chunk: no multiple of {CHUNK_STEP} gives {request.context_parallel} ranks a token each in "
            f"{request.resident_tokens} prompt tokens"
        )
    return min(tried, key=lambda chunk: (with_request(planned, chunk_tokens=chunk).peak_bytes, -chunk))


def optimal_chunk_estimate(planned: Plan) -> float:
    """sqrt(N s n / a): where boundary carries (N s / C) and graph (C a / n) of one rank weigh the same.

    N resident tokens, s bytes of one rank's carry, a bytes of graph per token, n context ranks.
    """
    shape, request = planned.shape, planned.request
    per_layer = graph.kept_between_layers_bytes if request.rebuilds_layers else graph.saved_bytes_per_token
    per_token = sum(count * per_layer(layer, request) for layer, count in shape.groups)
    carry = sizes.rank_carry_bytes(shape, request) * request.context_parallel
    return math.sqrt(request.resident_tokens * carry / per_token)


def _allows(planned: Plan, verdict: str) -> bool:
    if verdict not in _ACCEPTABLE:
        raise InvalidInputError(f"verdict={verdict!r} is not one of {', '.join(map(repr, _ACCEPTABLE))}")
    return planned.verdict in _ACCEPTABLE[verdict]


def _largest(start: int, allowed: Callable[[int], bool]) -> int:
    """The largest value from `start` on that is allowed, by doubling and bisection; `allowed` is monotone."""
    if not allowed(start):
        return 0
    low, high = start, min(2 * start, NO_LIMIT)
    while allowed(high):
        if high == NO_LIMIT:
            return NO_LIMIT
        low, high = high, min(2 * high, NO_LIMIT)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
