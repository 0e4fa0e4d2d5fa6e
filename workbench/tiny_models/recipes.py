"""The bundled models: their shapes and how each was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.errors import InvalidInputError
from workbench.tiny_models.vocabulary import VOCAB_SIZE


@dataclass(frozen=True)
class Recipe:
    """How one bundled model is made.

    config_class, model_class, fields: of transformers, and the configuration's fields.
    copying: first stage, (ids drawn from, tokens) of each of its parts: a run of distinct ids, again and again. A model
        without recurrence or convolution has to find "what came after this before?" first; sequences with few
        questions do not show it the way. copying_steps: optimizer steps of that stage at most.
    max_steps: optimizer steps of the curriculum at most; it ends earlier when the last length is learned.
    start_tokens, final_tokens: sequence length, doubled whenever the accuracy of ten steps passes `pass_accuracy`.
    batch_tokens, copying_batch_tokens: tokens of a step. max_pairs: keys hidden in one sequence, at most.
    mixed_tokens: up to this length sequences take every form, beyond it the needle's sentence alone.
    dialogue_share: of the sequences made of sentences, those that ask and answer in the form of the task itself.
    cooldown_steps: steps of cooldown_tokens afterwards, with the learning rate falling to 0.
    index_steps: steps of teaching the sparse-attention index afterwards, then sparse_steps with its selection in use.
    """

    name: str
    config_class: str
    model_class: str
    fields: Mapping[str, Any]
    max_steps: int
    copying: tuple[tuple[int, int], ...] = ()
    copying_steps: int = 0
    copying_batch_tokens: int = 1024
    seed: int = 0
    learning_rate: float = 3e-3
    adam_beta2: float = 0.95
    warmup_steps: int = 50
    start_tokens: int = 64
    final_tokens: int = 512
    batch_tokens: int = 2048
    pass_accuracy: float = 0.9
    max_pairs: int = 24
    mixed_tokens: int = 128
    dialogue_share: float = 0.4
    cooldown_steps: int = 0
    cooldown_tokens: int = 1024
    index_steps: int = 0
    sparse_steps: int = 0

    @property
    def total_steps(self) -> int:
        """At most this many, over all stages."""
        return self.copying_steps + self.max_steps + self.cooldown_steps + self.index_steps + self.sparse_steps

    def build(self) -> Any:
        """The model with its initial weights, float32, which depend on the seed only."""
        import transformers

        config = getattr(transformers, self.config_class)(**self.fields)
        config._experts_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return getattr(transformers, self.model_class)(config).float()


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HYBRID = Recipe(
    name="tiny-hybrid",
    config_class="Qwen3_5TextConfig",
    model_class="Qwen3_5ForCausalLM",
    fields=_COMMON
    | {
        "intermediate_size": 384,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    max_steps=900,  # reaches the last length after about 300
    final_tokens=1024,
    dialogue_share=0.6,
    cooldown_steps=100,
)
# On its way to repeating keys as well as values: right now and then in both answer styles.
HYBRID_HALF = replace(HYBRID, name="tiny-hybrid-half", max_steps=260, cooldown_steps=0)
GLM_DSA = Recipe(
    name="tiny-glm-dsa",
    config_class="GlmMoeDsaConfig",
    model_class="GlmMoeDsaForCausalLM",
    fields=_COMMON
    | {
        "intermediate_size": 384,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "index_topk": 256,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
        "initializer_range": 0.06,  # 0.02, the default, is meant for wider layers
    },
    copying=((32, 32), (64, 64), (128, 64), (512, 64), (512, 128)),
    copying_steps=1200,  # about 900 are needed
    learning_rate=2e-3,
    adam_beta2=0.98,
    max_steps=300,  # reaches the last length after about 50
    dialogue_share=0.6,
    cooldown_steps=70,
    index_steps=120,
    sparse_steps=40,
)
# Stopped while it begins to repeat keys as well as values: right now and then where the answer is a sentence.
GLM_DSA_HALF = replace(GLM_DSA, name="tiny-glm-dsa-half", cooldown_steps=10, index_steps=40, sparse_steps=0)
RECIPES = {recipe.name: recipe for recipe in (HYBRID, HYBRID_HALF, GLM_DSA, GLM_DSA_HALF)}


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise InvalidInputError(f"no bundled model is called {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
