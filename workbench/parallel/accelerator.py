"""What accelerate supplies besides the device mesh: the process's state, its precision, and prepared optimizers.

Only the optimizer is prepared. A prepared model would be a DDP module, which sums gradients once more; a prepared data
loader would cut prompts' batches by ranks; a prepared scheduler takes one step for every rank. Clipping stays with
`finalize.apply_gradients`, whose norm is bitwise the same on every rank.
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, parse_flag_from_env

from workbench.errors import InvalidInputError

_WRAPPERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "TP")  # ACCELERATE_USE_... in the environment


def open_accelerator(*, on_gpus: bool) -> Accelerator:
    """This process's accelerator, as the environment (`accelerate launch`) configures it.

    Raises InvalidInputError for what the engine cannot honour, before any work: nothing that was configured is ignored.
    """
    refuse_wrappers()
    accelerator = Accelerator(cpu=not on_gpus, device_placement=False)
    precision = accelerator.mixed_precision
    if precision != "no":
        raise InvalidInputError(
            f"accelerate's mixed_precision={precision!r} cannot be honoured: autocast changes dtypes between "
            "operations that must repeat each other, and a scaler would skip updates; set mixed_precision: no and load "
            "the model in the dtype that is wanted, load_policy(..., dtype=torch.bfloat16)"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise InvalidInputError(
            f"accelerate's gradient_accumulation_steps={accelerator.gradient_accumulation_steps} reaches nothing: "
            "gradients are accumulated over the prompts of a step (TrainConfig.prompts_per_step); set it to 1"
        )
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise InvalidInputError("accelerate's dynamo_backend reaches nothing: no model is prepared; set it to no")
    return accelerator


def refuse_wrappers() -> None:
    """InvalidInputError where accelerate's configuration asks for a wrapper around the model."""
    for wrapper in _WRAPPERS:
        if parse_flag_from_env(f"ACCELERATE_USE_{wrapper}"):
            raise InvalidInputError(
                f"accelerate is configured for {wrapper}, which shards or wraps the model; weights are whole on every "
                "rank and open_mesh lays out the ranks: set distributed_type: MULTI_GPU or MULTI_CPU"
            )
