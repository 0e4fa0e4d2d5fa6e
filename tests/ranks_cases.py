"""What the tests of ranks run inside real ones: every case once per world, its measurements returned as JSON.

Steps are here (tests/test_ranks.py), whole training runs in train_ranks_cases.py (tests/test_train_ranks.py).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests import train_ranks_cases
from tests.helpers import device, float64_arithmetic
from workbench import (
    ObjectiveConfig,
    Policy,
    Sampled,
    Tail,
    capture_prompt,
    load_policy,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.comm import Comm, Mesh, every_rank
from workbench.errors import NonFiniteError, RanksDisagreeError, WorkbenchError
from workbench.model_sources import tiny_model
from workbench.ops.sharded_attention import attention_bytes_sent
from workbench.parallel import gather_experts, open_mesh, shard_experts
from workbench.planner import plan
from workbench.replicas import tensor_hash

ADVANTAGES = [1.0, -0.5, 0.25, -0.75]
LENGTHS = (5, 1, 3)
Gradients = dict[str, Tensor]
Case = Callable[[], dict[str, Any]]


class World:
    """The meshes of one set of processes, each made once."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug
        self._meshes: dict[tuple[int, int], Mesh] = {}
        self.plain = self.mesh()

    @property
    def size(self) -> int:
        return self.plain.world.size

    @property
    def first(self) -> bool:
        return self.plain.world.rank == 0

    def mesh(self, dp: int = 1, ep: int = 1) -> Mesh:
        if (dp, ep) not in self._meshes:
            self._meshes[dp, ep] = open_mesh(dp=dp, ep=ep, timeout_seconds=60, debug=self._debug)
        return self._meshes[dp, ep]


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def policy_of(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Policy:
    return Policy(tiny_model(family, 3, **overrides).to(device(), dtype))


def lora_policy(family: str, layers: list[int] | None = None, *, trained: bool = True) -> Policy:
    """LoRA on every layer or on some; B is not zero, so that the base model is another policy."""
    lora = {"r": 2} if layers is None else {"r": 2, "layers_to_transform": layers}
    policy = load_policy(tiny_model(family, 3).to(device(), torch.float64), lora=lora, dtype=torch.float64)
    if trained:
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, p in policy.model.named_parameters():
                if "lora_B" in name:
                    p.copy_((torch.randn(p.shape, generator=draw, dtype=torch.float64) * 0.05).to(p.device))
    return policy


def take(policy: Policy, mesh: Mesh | None = None) -> Gradients:
    found = {name: p.grad for name, p in policy.trainable_parameters() if p.grad is not None}
    if mesh is not None:
        found = gather_experts(found, policy.adapter.causal_lm, mesh)
    policy.model.zero_grad(set_to_none=True)
    return found


def per_parameter(found: Gradients, truth: Gradients, floor: float = 0.0) -> float:
    """Largest |g - g'| / max(|g'|, floor x |all g'|); parameters without a gradient must be the same ones."""
    assert found.keys() == truth.keys(), sorted(found.keys() ^ truth.keys())
    total = float(torch.stack([g.double().norm() for g in truth.values()]).norm())
    assert total > 0.0, "a reference of zeros cannot be compared with"
    worst = 0.0
    for name, right in truth.items():
        scale = max(float(right.double().norm()), floor * total)
        difference = float((found[name].double() - right.double()).norm())
        worst = max(worst, difference / scale if scale else difference)
    return worst


# ---------------------------------------------------------------- gradients


def gradient(
    world: World,
    make: Callable[[], Policy],
    *,
    ep: int = 1,
    prompt: int = 30,
    lengths: tuple[int, ...] = LENGTHS,
    chunk: int = 11,
    block: int = 3,
    floor: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """One step over the ranks against the same step on one process (rank 0 makes that)."""
    responses = [ids(n, 10 + i) for i, n in enumerate(lengths)]
    step: dict[str, Any] = {
        "advantages": ADVANTAGES[: len(lengths)], "chunk_tokens": chunk, "block_tokens": block,
        "measure_memory": False, **options
    }  # fmt: skip
    mesh, policy = world.mesh(ep=ep), make()
    shard_experts(policy.adapter.causal_lm, mesh)
    report = update_step(policy, ids(prompt, 1), responses, comm=mesh, **step)
    found = take(policy, mesh)
    measured = {"level": report.level, "loss": report.loss, "reduction": report.counters["gradient_reduction"]}
    if not world.first:
        return measured
    alone = make()
    single = update_step(alone, ids(prompt, 1), responses, **step)
    logprobs = max(float((a - b).abs().max()) for a, b in zip(report.logprobs, single.logprobs, strict=True) if len(a))
    return measured | {
        "error": per_parameter(found, take(alone), floor),
        "loss_error": abs(report.loss - single.loss),
        "norm_error": abs(report.metrics["grad_norm"] - single.metrics["grad_norm"]) / single.metrics["grad_norm"],
        "logprob_error": logprobs,
        "same_counters": all(
            report.counters[name] == value for name, value in single.counters.items() if name in COMPARED
        ),
    }


COMPARED = ("prompt_chunks_captured", "response_blocks_replayed", "prompt_chunk_starts_walked", "most_graphs_alive")


def adamw(world: World, make: Callable[[], Policy], *, ep: int = 1) -> dict[str, Any]:
    """Three clipped AdamW steps: ranks must stay bitwise equal, and near one process."""
    mesh, policy = world.mesh(ep=ep), make()
    shard_experts(policy.adapter.causal_lm, mesh)
    _three_steps(policy, mesh)
    names = [name for name, p in policy.trainable_parameters() if not hasattr(p, "expert_shard")]
    weights = gather_experts({n: p.detach() for n, p in policy.trainable_parameters()}, policy.adapter.causal_lm, mesh)
    hashes = torch.stack([tensor_hash(weights[name]) for name in sorted(weights)])
    everyone = mesh.world.all_gather(hashes, [len(weights)] * world.size, "test")
    result = {"replicas_differ": sum(int((h != hashes).sum()) for h in everyone), "replicated": len(names)}
    if world.first:
        alone = make()
        before = {name: p.detach().clone() for name, p in alone.trainable_parameters()}
        _three_steps(alone, None)
        after = {name: p.detach() for name, p in alone.trainable_parameters()}
        moved = {name: after[name] - before[name] for name in after}
        result["error"] = per_parameter({n: weights[n] - before[n] for n in after}, moved, floor=1e-3)
    return result


def _three_steps(policy: Policy, mesh: Mesh | None) -> None:
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=1e-3, weight_decay=0.1)
    for number in range(3):
        responses = [ids(n, 50 + 10 * number + i) for i, n in enumerate((4, 2))]
        update_step(
            policy, ids(19, number), responses, advantages=[1.0, -0.6], chunk_tokens=7, optimizer=optimizer, comm=mesh,
            objective=ObjectiveConfig(max_grad_norm=0.5), measure_memory=False,
        )  # fmt: skip


def data_parallel(world: World, dp: int) -> dict[str, Any]:
    """dp prompts at once, token-mean loss over all of them, against their weighted sum on one process."""
    mesh = world.mesh(dp=dp)
    groups = [([ids(n, 70 + 10 * g + i) for i, n in enumerate((3 + g, 1, 2))], ids(17 + g, 80 + g)) for g in range(dp)]
    step: dict[str, Any] = {
        "advantages": ADVANTAGES[:3], "chunk_tokens": 7, "objective": ObjectiveConfig(loss="dapo"),
        "measure_memory": False,
    }  # fmt: skip
    policy = policy_of("qwen3_5")
    responses, prompt = groups[mesh.data.rank]
    report = update_step(policy, prompt, responses, comm=mesh, **step)
    found = take(policy)
    if not world.first:
        return {}
    tokens = [sum(map(len, responses)) for responses, _ in groups]
    truth: Gradients = {}
    loss = 0.0
    for (responses, prompt), count in zip(groups, tokens, strict=True):
        loss += update_step(policy, prompt, responses, **step).loss * count / sum(tokens)
        for name, g in take(policy).items():
            truth[name] = truth.get(name, 0.0) + g * count / sum(tokens)
    return {"error": per_parameter(found, truth), "loss_error": abs(loss - report.loss), "level": report.level}


# ---------------------------------------------------------------- state, scores and samples


def resident(world: World) -> dict[str, Any]:
    """Rows of every rank, in every layer kind, of an odd prompt."""
    state = capture_prompt(policy_of("qwen3", torch.float32), ids(98, 1), chunk_tokens=9, comm=world.plain)
    rows = sum(page.layers[0]["keys"].shape[2] for page in state.pages)
    return {"rows": every_rank(world.plain.context, rows, device(), tag="test"), "positions": state.positions}


def scores(world: World, family: str) -> dict[str, Any]:
    policy, mesh = policy_of(family), world.plain
    responses = [ids(n, 30 + n) for n in (1, 6, 0)]
    state = capture_prompt(policy, ids(23, 1), chunk_tokens=5, comm=mesh)
    found = score_responses(policy, state, responses, block_tokens=4)
    alone = capture_prompt(policy, ids(23, 1), chunk_tokens=5)
    truth = score_responses(policy, alone, responses, block_tokens=4)
    return {"error": max(float((a - b).abs().max()) for a, b in zip(found, truth, strict=True) if len(a))}


def samples(world: World, family: str) -> dict[str, Any]:
    policy = policy_of(family, torch.float32)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "top_p": 0.9, "seed": 11}
    state = capture_prompt(policy, ids(23, 1), chunk_tokens=5, comm=world.plain)
    found = sample_responses(policy, state, 3, **options)
    truth = sample_responses(policy, capture_prompt(policy, ids(23, 1), chunk_tokens=5), 3, **options)
    return {
        "same_ids": [r.ids.tolist() for r in found] == [r.ids.tolist() for r in truth],
        "different": len({tuple(r.ids.tolist()) for r in found}),
        "logprob_error": max(float((a.logprobs - b.logprobs).abs().max()) for a, b in zip(found, truth, strict=True)),
    }


# ---------------------------------------------------------------- bytes


def carry(world: World, **overrides: int) -> dict[str, Any]:
    """Peak bytes of the carry ledger on every rank, and what the planner says of the rank that has most.

    From the third response on a sum of two carries' gradients is made beside the sum so far: the plan's 2 x.
    """
    policy = policy_of("qwen3_5", torch.float32, **overrides)
    prompt, chunk, lengths = 40, 11, (5, 3, 2)
    report = update_step(
        policy, ids(prompt, 1), [ids(n, n) for n in lengths], advantages=[1.0, -1.0, 0.5], chunk_tokens=chunk,
        comm=world.plain,
    )  # fmt: skip
    planned = plan(
        policy.adapter.config.to_dict(), "H200", positions=prompt + max(lengths), group_size=3,
        response_tokens=max(lengths), chunk_tokens=chunk, context_parallel=world.size, weights="fp32", training="full",
        optimizer="none",
    )  # fmt: skip
    return {
        "measured": every_rank(world.plain.context, report.memory["carry"], device(), tag="test"),
        "planned": max(phase["carry"] + phase["boundary_carries"] for phase in planned.terms.values()),
    }


def traffic(world: World) -> dict[str, Any]:
    """Counted bytes of attention in capture and step, against the formula of ops/sharded_attention.py."""
    mesh, policy = world.plain, policy_of("qwen3", torch.float32)
    before = mesh.traffic()
    prompt, chunk, lengths = 31, 8, (5, 2)
    report = update_step(
        policy, ids(prompt, 1), [ids(n, n) for n in lengths], advantages=[1.0, -1.0], chunk_tokens=chunk, comm=mesh
    )
    sent = mesh.traffic().since(before)
    predicted = 0
    for forwards, backwards, start, stop in _segments(prompt, chunk, lengths, layers=2):
        own = _own_tokens(start, stop, world.plain.context)
        size: dict[str, Any] = {
            "ranks": world.size, "tokens": stop - start, "own_tokens": own, "heads": 4, "width": 16, "element_bytes": 4,
        }  # fmt: skip
        predicted += forwards * attention_bytes_sent(**size, backward=False)
        predicted += backwards * attention_bytes_sent(**size, backward=True)
    counted = sum(entry["bytes"] for tag, entry in sent.items() if tag.startswith("attention"))
    return {
        "counted": counted,
        "predicted": predicted,
        "in_report": report.counters["communication_bytes"],
        "in_total": sum(entry["bytes"] for entry in sent.values()),
        "calls": report.counters["communication_calls"],
        "reduction_bytes": report.counters["communication"]["gradients"]["bytes"],
        "elements": sum(p.numel() for _, p in policy.trainable_parameters()),
    }


def _segments(prompt: int, chunk: int, lengths: tuple[int, ...], layers: int) -> list[tuple[int, int, int, int]]:
    """(forward calls, backward calls, start, stop): a prompt chunk's last layer stops before its attention."""
    boundary = prompt - 1
    chunks = [(a, min(a + chunk, boundary)) for a in range(0, boundary, chunk)]
    captured = [(2 * (layers - 1), layers - 1, a, b) for a, b in chunks]  # captured once, walked once
    return captured + [(layers, layers, boundary, boundary + n) for n in lengths]


def _own_tokens(start: int, stop: int, comm: Comm) -> int:
    each, rest = divmod(stop - start, comm.size)
    return each + ((comm.rank - start) % comm.size < rest)


# ---------------------------------------------------------------- refusals


def refused(kind: type[WorkbenchError], call: Callable[[], Any]) -> dict[str, Any]:
    """The message of the error that every rank must raise."""
    try:
        call()
    except kind as error:
        return {"error": str(error)}
    return {"error": None}


def step_of(policy: Policy, world: World, **options: Any) -> Any:
    given: dict[str, Any] = {
        "prompt": ids(17, 1), "advantages": [1.0, -1.0], "chunk_tokens": 6, "measure_memory": False, **options
    }  # fmt: skip
    return update_step(policy, given.pop("prompt"), [ids(3, 2), ids(2, 3)], comm=world.plain, **given)


def other_prompt(world: World) -> dict[str, Any]:
    return refused(RanksDisagreeError, lambda: step_of(policy_of("qwen3"), world, prompt=ids(17, 1 + world.first)))


def other_option(world: World) -> dict[str, Any]:
    return refused(RanksDisagreeError, lambda: step_of(policy_of("qwen3"), world, chunk_tokens=6 + world.first))


def other_weights(world: World) -> dict[str, Any]:
    policy = policy_of("qwen3")
    if world.plain.world.rank == 1:
        with torch.no_grad():
            policy.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-12
    return refused(RanksDisagreeError, lambda: step_of(policy, world))


def not_finite(world: World) -> dict[str, Any]:
    """One token's embedding is NaN: only its rank sees that, all ranks must say so."""
    policy = policy_of("qwen3")
    with torch.no_grad():
        policy.model.model.embed_tokens.weight[ids(17, 1)[1]] = float("nan")
    policy.model.requires_grad_(True)
    world.plain.verified[policy] = policy.weight_version  # NaN differs from itself nowhere: bits are compared
    return refused(NonFiniteError, lambda: step_of(policy, world))


def unsummed(world: World) -> dict[str, Any]:
    """A reduction that forgets to sum must not go through."""
    with mock.patch("workbench.replicas._sum_over_ranks"):
        return refused(RanksDisagreeError, lambda: step_of(policy_of("qwen3"), world))


def forgetful_owner(world: World) -> dict[str, Any]:
    """An owner that drops what other ranks' queries want of its rows: the measured error shows that the check works."""
    from workbench.ops import attention, sharded_attention

    real, real_parts = attention._part_backward, sharded_attention._backward_parts

    def own_queries_only(grad_out: Tensor, *rest: Any) -> Any:
        dq, _, _ = real(grad_out, *rest)
        mine = torch.zeros_like(grad_out)
        tokens = grad_out.shape[2]
        cut = slice(
            tokens * world.plain.context.rank // world.size, tokens * (world.plain.context.rank + 1) // world.size
        )
        mine[:, :, cut] = grad_out[:, :, cut]
        _, dk, dv = real(mine, *rest)
        return dq, dk, dv

    def forgetful_parts(*given: Any) -> Any:  # over ranks only: the one process it is compared with stays right
        with mock.patch.object(attention, "_part_backward", own_queries_only):
            return real_parts(*given)

    with mock.patch.object(sharded_attention, "_backward_parts", forgetful_parts):
        return gradient(world, partial(policy_of, "qwen3"))


def swapped_collectives(world: World) -> dict[str, Any]:
    """Two collectives of the same shape in another order on rank 0: values would mix in silence."""
    comm = open_mesh(debug=True, timeout_seconds=60).world
    tags = ("a", "b") if world.first else ("b", "a")
    own = torch.zeros(2, device=device())
    return refused(RanksDisagreeError, lambda: [comm.all_gather(own, [2] * comm.size, tag) for tag in tags])


# ---------------------------------------------------------------- all of them


def run(only: list[str] | None = None, debug: bool = False) -> dict[str, Any]:
    """All cases of this world; a failure is its case's result and ends the rest, as ranks would no longer agree."""
    torch.set_num_threads(1)
    with float64_arithmetic():
        world = World(debug)
        results: dict[str, Any] = {}
        for name, case in cases(world).items():
            if only and not any(part in name for part in only):
                continue
            began = time.perf_counter()
            try:
                results[name] = case()
            except Exception:
                results[name] = {"failed": traceback.format_exc()}
                break
            results[name]["seconds"] = time.perf_counter() - began
        return results


def cases(world: World) -> dict[str, Case]:
    size = world.size
    found: dict[str, Case] = {}

    def compare(name: str, make: Callable[[], Policy], **options: Any) -> None:
        found[f"gradient: {name}"] = partial(gradient, world, make, **options)

    def of(family: str, **overrides: Any) -> Callable[[], Policy]:
        return partial(policy_of, family, **overrides)

    hybrid, sparse = of("qwen3_5"), of("glm_moe_dsa", n_routed_experts=6)
    compare("hybrid", hybrid)
    compare("sparse with experts spread", sparse, ep=size)
    # attention over one key has no gradient in q and k: what is there is rounding, and is held against the whole
    compare("P = 1, one-token responses", hybrid, prompt=1, lengths=(1, 1), block=1, floor=1e-3)
    compare("fewer heads than ranks", of("qwen3_5", linear_num_value_heads=2, linear_num_key_heads=1), prompt=14)
    if size in (2, 4):
        compare("dense", of("qwen3"))
        compare("sliding", of("gemma3"))
        compare("sparse, P = 2, ranks without tokens", sparse, prompt=2, lengths=(1, 2), ep=size)
        compare("fewer experts than ranks", of("qwen3_5_moe", num_experts=3), ep=size, prompt=12, lengths=(2, 1))
    if size == 2:
        compare("hybrid with experts spread", of("qwen3_next"), ep=size)
        compare("sparse, experts replicated", of("deepseek_v32"))
        compare("float32 hybrid", of("qwen3_5", dtype=torch.float32), floor=1e-3)
        compare("float32 sparse", of("glm_moe_dsa", dtype=torch.float32), floor=1e-3, ep=2)
        compare("layer by layer", hybrid, checkpoint_layers=True)
        compare("sparse, layer by layer", sparse, checkpoint_layers=True, ep=2)
        compare("rows on the host", of("gemma3"), placement="host")
        compare("response only", hybrid, gradient_scope="response_only")
        compare("tail", of("gemma3"), gradient_scope=Tail(1))
        compare("sampled", of("qwen3"), gradient_scope=Sampled(0.5, 3))
        compare("single-token chunks", of("gemma3"), prompt=7, chunk=1, lengths=(2,))
        compare("LoRA with a reference", partial(lora_policy, "qwen3"), objective=ObjectiveConfig(beta=0.1))
        compare("LoRA in the last layer", partial(lora_policy, "qwen3_5", [3]))
        found["samples: dense"] = partial(samples, world, "qwen3")
        found["data parallel"] = partial(data_parallel, world, 2)
        found["scores: sparse"] = partial(scores, world, "glm_moe_dsa")
        for refusal in (other_prompt, other_option, other_weights, not_finite, unsummed, forgetful_owner):
            found[f"refused: {refusal.__name__}"] = partial(refusal, world)
    if size == 4:
        compare("experts over half the ranks", sparse, ep=2)
        found["data parallel"] = partial(data_parallel, world, 2)
    if size in (2, 4):
        found["AdamW: sparse with experts spread"] = partial(adamw, world, sparse, ep=size)
        found["AdamW: hybrid"] = partial(adamw, world, hybrid)
        found["samples: sparse"] = partial(samples, world, "glm_moe_dsa")
    found["samples: hybrid"] = partial(samples, world, "qwen3_5")
    found["resident rows"] = partial(resident, world)
    found["traffic"] = partial(traffic, world)
    found["carry: the first rank has most"] = partial(carry, world)
    # one column of convolution tail is less than a head: on 3 ranks the last, with 2 of 4 heads, has most
    found["carry: short tails"] = partial(carry, world, linear_conv_kernel_dim=2)
    if size == 2:
        found["swapped collectives"] = partial(swapped_collectives, world)
    return found | train_ranks_cases.cases(world)
