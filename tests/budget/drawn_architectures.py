"""Small models of the architectures of transformers, made by the names of settings.

Each task's models are asked of the library, and each setting of a known name gets a
small value, in the parts of a configuration too.  So a new version brings new
architectures by itself.  Those whose settings do not fit together so are left out.
"""

import inspect
import random
import warnings

import torch
import transformers
from drawn import DrawnStep
from drawn_families import OPTIMIZERS
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from loaderkit.budget.step.train_step import Step

MOST_PARAMETERS = 1_500_000
_WIDTHS = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"),
    *("embedding_size", "word_embed_proj_dim", "d_embedding", "hidden_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "lru_width"),
    *("expert_ffn_hidden_size", "encoder_hidden_dim", "decoder_hidden_size"),
)
_INNER_WIDTHS = (
    *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "intermediate_size"),
    *("n_inner", "feed_forward_size", "ffn_hidden_size", "d_inner", "mlp_dim"),
    *("shared_intermediate_size", "intermediate_dim", "decoder_intermediate_size"),
)
_HEADS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
    *("num_encoder_attention_heads", "num_decoder_attention_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("linear_num_value_heads", "decoder_num_attention_heads"),
)
_LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_labels"),
    *("num_key_value_heads", "num_experts_per_tok", "moe_k", "moe_topk"),
    *("linear_num_key_heads", "num_feat_extract_layers", "mamba_expand"),
    *("eos_token_id", "decoder_start_token_id", "mask_time_length"),
)
_OF_HEADS = (
    *("head_dim", "attention_head_dim", "d_kv", "state_size", "mamba_d_state"),
    *("mamba_n_heads", "mamba_d_head", "mamba_head_dim", "mamba_num_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "v_head_dim", "patch_size"),
    *("qk_nope_head_dim", "qk_rope_head_dim"),
)
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_SMALL = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER_WIDTHS, 64),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_OF_HEADS, 8),
    **dict.fromkeys(_LENGTHS, 128),
    "vocab_size": 300,
    "image_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_group": 1,
    "topk_group": 1,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_WIDTHS_OF_STAGES = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "dims")
_TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "translating": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
}


def _architectures():
    found = {}
    for task, mapping in _TASKS.items():
        for kind, name in mapping.items():
            class_name = name if isinstance(name, str) else name[0]
            found[f"{task} {kind}"] = (task, kind, class_name)
    return found


ARCHITECTURES = _architectures()


def small_settings(config_class):
    """Small values of the settings that a configuration has."""
    try:
        default = config_class()
    except Exception:  # noqa: BLE001 -- some have no default
        return {}
    names = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))

    settings = {}
    for name in sorted(names):
        given = getattr(default, name, None)
        is_stages = isinstance(given, (list, tuple))
        if is_stages and name == "depths":
            settings[name] = [1] * len(given)
        elif is_stages and name in _WIDTHS_OF_STAGES:
            settings[name] = [max(8, width // 64 * 8) for width in given]
        elif name in _SMALL and is_stages == isinstance(_SMALL[name], list):
            settings[name] = _SMALL[name]
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if inspect.isclass(part) and part.__name__ != "AutoConfig":
            settings[name] = small_settings(part)
    return settings


class LossOf(nn.Module):
    """Gives the loss that a model of the library computes itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch).loss


def _batch(rng, task, config):
    count, length = rng.choice([1, 2, 4]), rng.choice([16, 32, 48])
    if task == "images":
        images = torch.randn(count + 1, 3, 32, 32)
        return {"pixel_values": images, "labels": torch.zeros(count + 1).long()}
    if task == "speech":
        labels = torch.randint(1, 30, (count, 4))
        return {"input_values": torch.randn(count, 1600), "labels": labels}
    words = torch.randint(
        3, min(280, config.get_text_config().vocab_size), (count, length)
    )
    mask = torch.ones_like(words)
    mask[0, length // 2 :] = 0
    labels = words[:, : length // 2] if task == "translating" else words
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": labels.clone(),
    }


def draw_architecture_step(seed, architecture):
    """Draw a step; None where the settings do not fit together, or it is large."""
    task, kind, class_name = ARCHITECTURES[architecture]
    rng = random.Random(f"architecture {architecture} {seed}")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config_class = CONFIG_MAPPING[kind]
            config = config_class(**small_settings(config_class))
            config.use_cache = False
            if task == "speech":
                config.vocab_size = 32
            if rng.random() < 0.25:
                config._attn_implementation = "eager"
            model_class = getattr(transformers, class_name)
            with torch.device("meta"):
                empty = model_class(config)
            if sum(p.numel() for p in empty.parameters()) > MOST_PARAMETERS:
                return None
            model = model_class(config).train()
            batch = _batch(rng, task, config)
            model(**batch).loss.backward()
        except Exception:  # noqa: BLE001 -- any configuration may refuse
            return None
    model.zero_grad()

    name = rng.choice(sorted(OPTIMIZERS))
    words = f"{seed}: {architecture}, {config._attn_implementation}; {name}"
    options = {"optimizer": OPTIMIZERS[name]}
    if rng.random() < 0.25:
        options["autocast"] = torch.bfloat16
        words += ", autocast"
    if rng.random() < 0.25 and model.supports_gradient_checkpointing:
        with warnings.catch_warnings():
            # Older versions have this name only, and newer ones warn of it.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
        words += ", checkpoints"
    if rng.random() < 0.2:
        parameters = list(model.parameters())
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad = False
        words += ", first half frozen"
    return DrawnStep(words, LossOf(model), batch, Step(**options), rng.choice([1, 2]))
