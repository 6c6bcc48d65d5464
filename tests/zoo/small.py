"""Small configurations of transformers' models, found by the names of what a configuration holds.

A configuration is built by its class from what differs from the defaults, so that whatever it
derives is derived anew. Widths keep their proportions, as far as that gives whole heads.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SCALES", "Scale", "small"]

VOCABULARY = 128
FIRST_SPECIAL = 100

_LAYERS = re.compile(
    r"^(num_|n_)?((en|de)coder_|hidden_|prelude_|coda_|text_|vision_|attn_|temporal_|e_|d_)*"
    r"(num_)?(layers?|n_layers?|num_layers|hidden_layers|depth|stages_repeats)$"
    r"|_layers$|^n_layer$|num_hidden_layers|_num_blocks$|^num_blocks$|^num_encoder_blocks$"
)
_NO_LAYERS = re.compile(
    r"max_window_layers|feature_layers?|encode_proj_layers|mlp_only_layers|skip|kv_shared"
    r"|num_adapter_layers|no_rope|interval|conv_num_layers|feat_extract|num_feature|residual_layers"
    r"|full_attn|first_num|iou_head_depth|use_|has_|_ids$"
)
_HEADS = re.compile(r"heads?$|^n_heads?$|num_key_value_heads|_heads$|groups_of_heads")
_EXPERTS = re.compile(r"^(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts)$")
_WIDTH = re.compile(
    r"(hidden|intermediate|embedding|embed|projection|ffn|d_model|d_ff|d_kv|n_embd|n_inner|mlp_dim"
    r"|width|channels?|feature|inner|output|input|state|latent|lora|rank|head_dim|conv_dim|dim)s?"
    r"(_size|_dim|_channels|_rank)?(s|_list)?$|_dims?$|^dim$|_ffn_dim$|hidden_sizes|_width$"
)
_NO_WIDTH = re.compile(
    r"num_channels|in_channels|out_channels|in_chans|image|patch|window|kernel|vocab|type_|stride|position"
    r"|bins|audio_channels|chunk|block_size|context_len|num_|max_|topk|top_k|index_select|group_size"
    r"|mel|^input_size$|^feature_size$|sampling|codebook_size|label|n_fft|memory|shared_dim"
    r"|encoder_in_channels|decoder_in_channels|time_step|feat_|spec"
)
_PIXELS = re.compile(r"^(image_size|img_size|input_resolution|eval_size|anchor_image_size)$")
_IDS = re.compile(r"(token_id|token_index|token_ids|_index|bos|eos|pad)$|_token$")
_PLACEHOLDER = re.compile(r"^(image|video|audio)_token_(id|index)$")
_FOR_TEXT = re.compile(r"^(out|text|llm|lm|language|text_config)_hidden_size$")
_VOCABULARY = re.compile(r"vocab_?size|^n_vocab|codebook_size$|num_embeddings$|vocab_size")
_POSITIONS = re.compile(r"max_position|n_positions|max_source|max_target|max_sequence|n_ctx")
_LAYER_LISTS = re.compile(
    r"layer_types$|layers_block_type|_layer_types|block_types?$|attention_types"
)


@dataclass(frozen=True)
class Scale:
    """How small: widths are divided until a hidden size is `width`; 0 leaves them."""

    name: str
    width: int
    heads: int
    layers: int = 2
    pixels: int = 64
    experts: int = 4


SCALES = (
    Scale("small", 64, 4),
    Scale("small, 3 layers", 64, 4, layers=3),
    Scale("small, large images", 64, 4, pixels=224),
    Scale("small, 4 layers", 64, 4, layers=4),
    Scale("wider", 128, 8, layers=2, pixels=0),
    Scale("few layers", 0, 0, layers=2, pixels=0),
    Scale("few layers, 4", 0, 0, layers=4, pixels=0),
    Scale("as it is", 0, 0, layers=0, pixels=0, experts=0),
)


@dataclass
class _Shrink:
    scale: Scale
    ids: dict[tuple[str, int], int] = field(default_factory=dict)

    def configuration(self, config: Any, given: Mapping[str, Any] = {}) -> Any:
        """A smaller one of the same class."""
        cls, changed = type(config), {}
        defaults = inspect.signature(cls.__init__).parameters
        width = _hidden(config)
        factor = max(1.0, width / self.scale.width) if self.scale.width else 1.0
        nested = getattr(cls, "sub_configs", {})
        for name in [*defaults, *(n for n in nested if n not in defaults)]:
            if name in ("self", "kwargs", "args", "dtype", "id2label", "label2id"):
                continue
            parameter = defaults.get(name)
            value = _read(config, name, parameter.default if parameter else None)
            if name in nested and value is None:
                continue
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                changed[name] = self.configuration(value, given.get(name) or {})
                continue
            if value is None and _PLACEHOLDER.search(name):
                changed[name] = self.id(name, 10**6 + len(self.ids))
                continue
            if parameter is not None and parameter.default is None and not _IDS.search(name):
                if not _LAYER_LISTS.search(name) or not isinstance(value, (list, tuple)):
                    continue  # derived from others
            smaller = self.value(name, value, factor, config)
            if smaller is not value:
                changed[name] = smaller
        self.fit(config, changed)
        rope = _read(config, "rope_parameters")
        has_sections = "mrope_section" in getattr(cls, "ignore_keys_at_rope_validation", ())
        if isinstance(rope, dict) and rope and self.scale.heads:
            smaller = _rotary(rope, _head(config, changed), has_sections)
            if smaller != rope:
                changed["rope_parameters"] = smaller
        self.stages(config, changed)
        is_part = {k: k in changed and isinstance(v, dict) for k, v in given.items()}
        changed.update({k: v for k, v in given.items() if not is_part[k] or "model_type" in v})
        return cls(**changed)

    def fit(self, config: Any, changed: dict[str, Any]) -> None:
        """Numbers that must agree with each other."""

        def now(name: str) -> Any:
            return changed.get(name, _read(config, name))

        for heads, groups in (("num_attention_heads", "num_key_value_heads"),
                              ("n_heads", "n_kv_heads"), ("n_head", "n_head_kv")):  # fmt: skip
            if groups in changed and _read(config, heads) == _read(config, groups):
                changed[groups] = now(heads)
        # fmt: off
        for heads, width, times in (("mamba_n_heads", "mamba_d_head", "mamba_expand"),
                                    ("num_heads", "head_dim", "expand"),
                                    ("mamba_num_heads", "mamba_head_dim", "expand"),
                                    ("n_mamba_heads", "mamba_headdim", "mamba_expand")):
            if now(times) and all(isinstance(now(x), int) for x in (heads, width, "hidden_size")):
                changed[heads] = 4
                inner = now("mamba_d_ssm") or int(now(times) * now("hidden_size"))
                changed[width] = inner // 4
        # fmt: on

    def stages(self, config: Any, changed: dict[str, Any]) -> None:
        """Which layers a backbone gives, when it has fewer of them."""
        given = _read(config, "_out_indices")
        layers = changed.get("num_hidden_layers")
        if isinstance(given, (list, tuple)) and isinstance(layers, int) and max(given) > layers:
            count = min(len(given), layers)
            changed["out_indices"] = list(range(layers - count + 1, layers + 1))
            changed.pop("_out_indices", None)
            changed.pop("_out_features", None)

    def value(self, name: str, value: Any, factor: float, config: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int):
            return self.number(name, value, factor)
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (dict, str)):
            return self.numbers(name, value, factor)
        if isinstance(value, (list, tuple)) and _LAYER_LISTS.search(name) and self.scale.layers:
            return type(value)(_kinds(value, self.scale.layers))
        return value

    def number(self, name: str, value: int, factor: float) -> int:
        if isinstance(value, bool):
            return value
        scale = self.scale
        if _IDS.search(name):
            return self.id(name, value)
        if _FOR_TEXT.search(name) and scale.width:
            return scale.width
        if _VOCABULARY.search(name):
            return min(value, VOCABULARY) if value > 2 * VOCABULARY else value
        if _EXPERTS.search(name) and scale.experts:
            return min(value, scale.experts)
        if re.search(r"experts_per_tok|moe_topk|moe_k$|num_selected_experts|top_k_experts", name):
            return min(value, 2)
        if name == "num_kv_shared_layers":
            return 0
        if name == "base_channels":
            return min(value, 32)
        if name in ("n_group", "topk_group", "num_expert_group"):
            return 1
        if re.search(r"_layer_offset$", name):
            return min(value, 1)
        if re.search(r"layer_group_size|_period$|full_attention_interval|_every_n", name):
            return min(value, 2)
        if re.search(r"^(mamba_)?n_?groups$", name) and scale.heads:
            return min(value, 2)
        if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
            return min(value, 1)
        if _LAYERS.search(name) and not _NO_LAYERS.search(name) and scale.layers:
            return min(value, scale.layers)
        if _PIXELS.search(name) and scale.pixels:
            return min(value, scale.pixels)
        if _POSITIONS.search(name):
            return min(value, 512) if value > 0 else value
        if _HEADS.search(name) and scale.heads:
            return self.heads(name, value)
        if _WIDTH.search(name) and not _NO_WIDTH.search(name):
            return _width(value, factor)
        return value

    def heads(self, name: str, value: int) -> int:
        if "key_value" in name or "kv" in name:
            return value if value == 1 else max(1, min(value, self.scale.heads // 2))
        return min(value, self.scale.heads)

    def numbers(self, name: str, values: Any, factor: float) -> Any:
        if _PIXELS.search(name) and self.scale.pixels:
            return type(values)(min(x, self.scale.pixels) for x in values)
        if name in ("depths", "num_blocks", "layers", "layer_depths") and self.scale.layers:
            return type(values)(min(x, 1) if isinstance(x, int) else x for x in values)
        if _WIDTH.search(name) and not _NO_WIDTH.search(name) and factor > 1:
            if all(isinstance(x, int) for x in values):
                most = factor if factor > 1 else max(1, max(values) / 64)
                return type(values)(_width(x, most) for x in values)
        if _IDS.search(name) and all(isinstance(x, int) for x in values):
            return type(values)(self.id(name, x) for x in values)
        return values

    def id(self, name: str, value: int) -> int:
        """The number of a special token, below the vocabulary's end."""
        if value < FIRST_SPECIAL:
            return value
        known = {number for (_, number) in self.ids}
        key = ("", value)
        if value not in known:
            self.ids[key] = FIRST_SPECIAL + len(self.ids) % (VOCABULARY - FIRST_SPECIAL)
        return self.ids[key]


def _read(config: Any, name: str, default: Any = None) -> Any:
    """An attribute; the default of one that differs from layer to layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers' own, which is no AttributeError
        return default


def _kinds(values: Any, count: int) -> list[Any]:
    """As many of them, each kind among them if that goes."""
    first = list(dict.fromkeys(values))[:count]
    rest = [x for x in values if x not in first] or list(values)
    return first + rest[: count - len(first)]


def _width(value: int, factor: float) -> int:
    if value < 32 or factor <= 1:
        return value
    least = 16 if value >= 64 else 8
    return max(least, round(value / factor / 8) * 8)


def _head(config: Any, changed: Mapping[str, Any]) -> int:
    """The width of one head of attention."""

    def now(name: str) -> Any:
        return changed.get(name, _read(config, name))

    defaults = inspect.signature(type(config).__init__).parameters
    if "head_dim" in defaults and (changed.get("head_dim") or defaults["head_dim"].default):
        return int(now("head_dim"))
    return int(now("hidden_size") or 64) // int(now("num_attention_heads") or 4)


def _rotary(rope: dict[str, Any], head: int, has_sections: bool) -> dict[str, Any]:
    """Rotary settings whose sections, for positions of several axes, fill half a head."""
    found = {
        name: _rotary(value, head, has_sections) if isinstance(value, dict) else value
        for name, value in rope.items()
    }
    sections = rope.get("mrope_section") or ([16, 24, 24] if has_sections else None)
    if sections and not any(isinstance(value, dict) for value in rope.values()):
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        share = [max(1, x * half // sum(sections)) for x in sections]
        share[0] += half - sum(share)
        found["mrope_section"] = share
    return found


def _hidden(config: Any) -> int:
    """What is called the hidden size; of one that has several, the first's."""
    for name in ("hidden_size", "d_model", "embed_dim", "n_embd", "dim", "hidden_dim", "model_dim"):
        value = _read(config, name)
        if isinstance(value, (list, tuple)) and value:
            value = value[-1]
        if isinstance(value, int) and value > 0:
            return value
    for name in ("hidden_sizes", "embed_dims", "encoder_hidden_size", "channels", "neck_channels"):
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and isinstance(value[-1], int):
            return int(value[-1])
        if isinstance(value, int):
            return value
    return 1


def small(make: Callable[[], Any], scale: Scale, given: Mapping[str, Any] = {}) -> Any:
    """A configuration like `make()`'s, at that scale.

    given   values to take as they are
    raises  whatever the configuration's class raises
    """
    return _Shrink(scale).configuration(make(), given)
