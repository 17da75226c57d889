"""Every model family of transformers made small by rules: its configuration, its inputs and its loss.

A family is a folder of `transformers.models`. Of its classes the first that one process can build and train is taken.
None was looked at by hand: sizes are changed by the names of fields; where they do not go together, or where a batch is
refused, the next way is tried.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel, ResNetConfig

from shardwise.diagnosing.parity import parity
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import ShardwiseError
from shardwise.models.nested_tensors import cast_floating, find_tensors
from shardwise.models.random_state import seed_everything
from tests.zoo import multimodal_extra
from tests.zoo.case import Case, generator, normal

MAX_PARAMETERS = 12_000_000
VOCABULARY = 128
FIRST_SPECIAL = 100
"""Special tokens are numbered from here; batches are drawn from what is below."""
LENGTH = 12
STEPS = 2
MAX_POSITIONS = 128
MAX_CLASSES = 5


def names() -> list[str]:
    """Every folder with a model."""
    models = Path(transformers.__file__).parent / "models"
    return sorted(folder.name for folder in models.iterdir() if any(folder.glob("modeling_*.py")))


@dataclass(frozen=True)
class Way:
    """One way to make a configuration small."""

    divide: int = 16
    """Widths are divided by it: what is a sum or a product of others stays so. With 0 they are set to constants."""
    heads: int = 0
    """Number of attention heads; 0: as they are."""
    layers: int = 2
    image: int = 64
    sections: bool = False
    """Set the sections of rotary embeddings over time, height and width."""


WAYS = (
    Way(),
    Way(8),
    Way(0, heads=4),
    Way(4),
    Way(heads=4, sections=True),
    Way(layers=4),
    Way(8, image=224),
    Way(1),
    Way(1, layers=40),
)

_WHEN_MISSING: dict[str, Any] = {
    **dict.fromkeys(("prediction_length", "context_length"), 16),
    **dict.fromkeys(("n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "vocab_size": VOCABULARY,
    "vocabulary_map": {},
}
"""For fields without a default that some classes cannot do without."""
_SET: dict[str, Any] = {"use_timm_backbone": False, "attention_types": [[["global", "local"], 1]], "attn_layers": None}
_LAYERS = re.compile(r"layers?$|^depths?$|_depths?$|(num|n)_blocks?$|block_repeats$|_repeats$|^stage_num_blocks$")
_HEADS = re.compile(r"heads$|n_head$")
_LIMITS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"vocab_size$"), VOCABULARY),
    (re.compile(r"max.*position|^n_positions$|^n_ctx$|max_.*length|max_seq|num_position|max_len$"), MAX_POSITIONS),
    (re.compile(r"per_tok$|top_?k$|experts_per|^moe_k$|topk_method"), 2),
    (re.compile(r"experts?$|expert_num"), 4),
    (re.compile(r"^n_group$|^topk_group$|num_expert_groups"), 1),
    (re.compile(r"num_queries|num_.*query|query_length|num_denoising"), 12),
    (re.compile(r"^num_frames$|frames_per_clip"), 4),
    (re.compile(r"codebook_size$|num_embeddings$"), 64),
    (re.compile(r"max_source_positions"), 32),
    (re.compile(r"mamba_chunk_size"), 16),
)
_WIDTH = re.compile(
    r"(size|sizes|dim|dims|width|widths|inner|ff|ffn|rank|embd|hidden|channels?|planes|filters|features|section|mlp|"
    r"units|d_kv|d_state|state|emb|channel_list)$|^d_|_dim_|hidden_|intermediate|^dff$|sizes?_per"
)
_NO_WIDTH = re.compile(
    r"vocab|image|patch|kernel|window|crop|chunk|block_size|batch|stride|num_channels|pool|downsample|grid|token|mel|"
    r"buckets|group|pixel|codebook_size|temporal|max_|frame|sampl|memory|prediction|input_size|ratio|rate|step|factor|"
    r"resize|base_size|num_features|input_dim|feature_size|cardinality|label|tubelet|unit_size|n_mels"
)


_MAMBA: dict[str, Any] = {"hidden_size": 32, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_MAMBA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_SHARED_BLOCKS = ["linear_attention", "hybrid"] * 2
BY_HAND: dict[str, dict[str, Any]] = {
    "BambaConfig": {**_MAMBA, "attn_layer_indices": [1]},
    "CohereCompassTextConfig": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "n_heads": 4}
    | {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}, "d_model": 32},
    "DeepseekV2Config": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
    },
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "Dots1Config": {"n_shared_experts": 1, "moe_intermediate_size": 64},
    "EfficientNetConfig": {"in_channels": [32, 8, 8], "out_channels": [8, 8, 8], "kernel_sizes": [3, 3, 5]}
    | {"strides": [1, 2, 2], "num_block_repeats": [1, 1, 2], "expand_ratios": [1, 2, 2]}
    | {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "image_size": 32},
    "EsmConfig": {"pad_token_id": 1, "mask_token_id": 5},
    "Gemma3nTextConfig": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    | {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [64] * 4}
    | {"vocab_size_per_layer_input": VOCABULARY},
    "Glm5NextTextConfig": {"index_topk": 16, "index_kpool": 4},
    "GraniteMoeHybridConfig": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "HrmTextConfig": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Qwen4ExpTextConfig": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 2},
    "ReformerConfig": {"axial_pos_shape": [3, 4], "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4}
    | {"num_hashes": 1, "num_buckets": 2, "hash_seed": 0},
    "PerceiverConfig": {"num_self_attends_per_block": 2, "num_latents": 16},
    "TimesFm2_5Config": {"context_length": 64},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"layers_block_type": _SHARED_BLOCKS, "num_hidden_layers": 4, "use_mamba_kernels": False}
    | {"hidden_size": 32, "attention_hidden_size": 64, "attention_head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
    "Zamba2Config": {"layers_block_type": _SHARED_BLOCKS, "num_hidden_layers": 4, "use_mamba_kernels": False}
    | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "n_mamba_heads": 4}
    | {"mamba_d_state": 8, "chunk_size": 16, "intermediate_size": 64},
}
"""Fields by the name of the configuration's class, where the rules alone do not go together or give a slow model."""


def shrink(config: PreTrainedConfig, way: Way, ids: dict[int, int] | None = None) -> PreTrainedConfig:
    """A small configuration of the same class.

    Args:
        config: The default one of its class.
        way: How.
        ids: New numbers of special tokens by their old ones, the same in all parts of a model.
    """
    ids = {} if ids is None else ids
    if type(config).__name__.startswith("Timm"):  # needs a package; another backbone does as well
        config = ResNetConfig(out_indices=getattr(config, "out_indices", None))
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.init}
    given = {name: _value(config, name) for name in defaults}
    num_layers = next((v for n in ("num_hidden_layers", "num_layers", "n_layer") if (v := given.get(n))), None)
    chosen = {}
    for name, value in given.items():
        if name in _SET:
            chosen[name] = _SET[name] if _SET[name] is not None else value
        elif value is None:
            chosen |= {name: _WHEN_MISSING[name]} if name in _WHEN_MISSING else {}
        elif isinstance(value, PreTrainedConfig):
            chosen[name] = shrink(value, way, ids)
        elif isinstance(value, (list, tuple)) and (defaults[name] is None or len(value) == num_layers):
            if not value or isinstance(value[0], str) or len(value) == num_layers:
                kinds = list(dict.fromkeys(map(str, value)))
                if name == "layer_types" and len(kinds) > 1:
                    chosen[name] = [*kinds, *[kinds[-1]] * (way.layers - len(kinds))]
                elif defaults[name] is not None:
                    chosen[name] = [_smaller(name, part, way, ids) for part in value[: way.layers]]
                continue  # derived from the others when it is built
            chosen[name] = _smaller(name, value, way, ids)
        else:
            chosen[name] = _smaller(name, value, way, ids)
    if (indices := _value(config, "out_indices")) is not None:  # of a backbone
        chosen = {name: value for name, value in chosen.items() if name not in ("_out_features", "_out_indices")}
        if isinstance(num_layers, int) and max(indices) > way.layers and "num_hidden_layers" in given:
            chosen["num_hidden_layers"] = layers = max(way.layers, len(indices))
            indices = range(layers - len(indices) + 1, layers + 1)
        chosen["out_indices"] = list(indices)
    if "layer_types" in chosen:
        chosen |= {name: len(chosen["layer_types"]) for name in ("num_hidden_layers", "num_layers") if name in chosen}
    heads, hidden = chosen.get("num_attention_heads"), chosen.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int):
        derived = {"head_dim": hidden // heads, "num_key_value_heads": heads}
        chosen |= {name: value for name, value in derived.items() if name in given and given[name] is None}
        ropes = [value for value in chosen.values() if isinstance(value, dict) and "rope_type" in value]
        for rope in [rope for rope in ropes if way.sections or "mrope_section" in rope]:
            rotated = chosen.get("head_dim", hidden // heads) * rope.get("partial_rotary_factor", 1) // 2
            rope["mrope_section"] = [int(rotated - 2 * (rotated // 3)), *[int(rotated // 3)] * 2]
    return type(config)(**chosen | BY_HAND.get(type(config).__name__, {}))


def _value(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # differs between layers
        return vars(config).get(name)


def _smaller(name: str, value: Any, way: Way, ids: dict[int, int]) -> Any:
    """The value of a field in a small configuration."""
    if isinstance(value, dict):
        return {key: _smaller(str(key), part, way, ids) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_smaller(name, part, way, ids) for part in value)
    if isinstance(value, float):
        return 0.0 if re.search(r"layerdrop|drop_path|stochastic", name) else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.search(r"(token|index|_id|_ids|_idx)$", name):
        return value if value < FIRST_SPECIAL else ids.setdefault(value, min(FIRST_SPECIAL + len(ids), VOCABULARY - 1))
    if name.endswith("image_size"):
        return min(value, way.image)
    for pattern, limit in _LIMITS:
        if pattern.search(name):
            return min(value, limit)
    if _LAYERS.search(name):
        return min(value, way.layers)
    if _HEADS.search(name) and way.heads:
        return min(value, way.heads // 2 if "key_value" in name or "kv" in name else way.heads)
    if name == "num_groups":
        return min(value, 4)
    if _WIDTH.search(name) and not _NO_WIDTH.search(name) and value >= (2 if "section" in name else 8):
        if way.divide:
            return max(value // way.divide, 1)
        return 8 if name == "head_dim" else 64 if re.search(r"inter|ff|inner|mlp", name) else 32
    return value


class CannotRun(Exception):
    """No class of the family can be built small and trained in one process, for these reasons."""


class Found(NamedTuple):
    """What was found to work, to be taken again without trying the rest."""

    model_class: str
    way: int
    batch: int
    image_tokens: int


_LAST_NAMES = (
    "ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "ForImageTextToText",
    "ForImageClassification", "ForObjectDetection", "ForUniversalSegmentation", "ForCTC", "ForDepthEstimation",
    "ForPrediction", "Model",
)  # fmt: skip


OF_THE_ZOO = {case.name: case for case in multimodal_extra.CASES if case.name == "pi0"}
"""Those whose inputs depend on each other."""


def case_of(family: str, found: Found | None = None) -> tuple[Case, Found]:
    """A case for the family, and what was found to work.

    Raises:
        CannotRun: Nothing does.
    """
    if family in OF_THE_ZOO:
        return OF_THE_ZOO[family], Found(type(OF_THE_ZOO[family].build()).__name__, -1, 0, 0)
    classes = _classes(family)
    if found is not None:
        model_class = next(each for each in classes if each.__name__ == found.model_class)
        return _case(family, model_class, found.way, found)
    reasons = [] if classes else ["there is no class with a configuration"]
    for model_class in classes:
        for way in range(len(WAYS)):
            try:
                return _case(family, model_class, way)
            except Exception as error:
                reasons.append(f"{model_class.__name__}: {type(error).__name__}: {str(error).strip()[:300]}")
                if isinstance(error, ImportError):
                    break
    raise CannotRun("\n".join(dict.fromkeys(reasons)))


def _classes(family: str) -> list[Any]:
    """Classes that can be built from a configuration, those that compute a loss first."""
    found: dict[str, Any] = {}
    for path in sorted((Path(transformers.__file__).parent / "models" / family).glob("modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        except ImportError as error:
            raise CannotRun(str(error)) from error
        for name, value in vars(module).items():
            is_model = (
                inspect.isclass(value) and issubclass(value, PreTrainedModel) and not name.endswith("TrainedModel")
            )
            if is_model and value.__module__ == module.__name__ and getattr(value, "config_class", None) is not None:
                found[name] = value
    order = {
        name: next((i for i, last in enumerate(_LAST_NAMES) if name.endswith(last)), len(_LAST_NAMES)) for name in found
    }
    return [found[name] for name in sorted(found, key=lambda name: (order[name], len(name)))][:MAX_CLASSES]


def _case(family: str, model_class: Any, way: int, found: Found | None = None) -> tuple[Case, Found]:
    config = shrink(model_class.config_class(), WAYS[way])

    def build() -> nn.Module:
        return model_class(copy.deepcopy(config))

    with torch.device("meta"):
        size = sum(p.numel() for p in build().parameters())
    if size > MAX_PARAMETERS:
        raise CannotRun(f"{size:,} parameters")
    seed_everything(0)
    model = build()
    problems: list[str] = []
    batches = Batches(model, config, found.image_tokens if found is not None else 0)
    for number, make_batch in enumerate(batches.forms()):
        if found is None or found.batch == number:
            try:
                _check_runs(model, make_batch)
            except Exception as error:
                batches.learn(str(error))
                problems.append(f"{type(error).__name__}: {str(error).strip()[:200]}")
            else:
                case = Case(name=family, build=build, make_batch=make_batch, loss=loss_of)
                return case, Found(model_class.__name__, way, number, batches.image_tokens)
    raise CannotRun(" | ".join(dict.fromkeys(problems)) or "its inputs have unknown names")


def _check_runs(model: nn.Module, make_batch: Callable[[int], Any]) -> None:
    for seed in (1, 2):
        loss = loss_of(model, make_batch(seed))
        if not loss.requires_grad or not bool(loss.isfinite()):
            raise CannotRun("the loss is not finite, or has no gradient")
        loss.backward()
    if not any(p.grad is not None and bool(p.grad.any()) for p in model.parameters()):
        raise CannotRun("no parameter has a gradient")


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The model's own loss, or a weighted mean of its outputs: a plain sum of normalised ones is constant.

    Some return numbers close to the largest there are, for what does not count.
    """
    output = model(**batch)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad:
        return own.mean()
    parts = [each for each in find_tensors(output, objects=-1) if each.requires_grad and each.numel()]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    means = [(part.tanh() * torch.arange(part.numel()).sin().view(part.shape)).mean() for part in parts]
    return torch.stack([mean.double() for mean in means]).sum()


Maker = Callable[[int], Any]


class Batches:
    """The batches that a model may take, by the names of its inputs; the fullest ones first."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig, image_tokens: int) -> None:
        self.image_tokens = image_tokens
        """Placeholders for an image in a sample's text, told by the error that there are too few."""
        self._configs = [config, *_nested(config)]
        self._accepted = inspect.signature(model.forward).parameters
        self._main = getattr(model, "main_input_name", "input_ids")
        self._makers = {name: make for name, make in self._known().items() if name in self._accepted}

    def learn(self, message: str) -> None:
        """Note how many placeholders an error asks for."""
        if (match := re.search(r"tokens do not match.*features:? *(\d+)", message)) and not self.image_tokens:
            count = int(match[1]) // 2
            texts = [config for config in self._configs if _value(config, "vocab_size")]
            widths = [width for config in texts if isinstance(width := _value(config, "hidden_size"), int)]
            # Some count elements, not vectors.
            self.image_tokens = next((count // width for width in widths if count and count % width == 0), count)

    def forms(self) -> Iterator[Maker]:
        """Functions from a seed to a batch."""
        for names in self._choices():
            alternatives = max((len(self._makers[name]) for name in names), default=0)
            for alternative in range(alternatives):
                for label in self._labels(names):
                    yield lambda seed, chosen=(names, alternative, label): self._make(seed, *chosen)

    def _choices(self) -> list[list[str]]:
        required = [
            name
            for name, parameter in self._accepted.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        first = [name for name in dict.fromkeys([self._main, *required]) if name in self._makers]
        others = [name for name in self._makers if name not in (*first, "inputs_embeds")]
        decoder = [name for name in others if name.startswith(("decoder", "past", "future"))]
        choices = [[*first, *others], [*first, *others], [*first, *decoder], first]
        choices += [[*first, other] for other in others] + [[other] for other in others]
        return [names for names in choices if names]

    def _labels(self, names: list[str]) -> list[Maker | None]:
        if "labels" not in self._accepted:
            return [None]
        texts = [name for name in ("decoder_input_ids", "input_ids") if name in names]
        of_class = [lambda seed, batch: torch.randint(0, 2, (2,), generator=generator(seed))]
        of_text = [lambda seed, batch: batch[texts[0]].clone()] if texts else []
        return [*of_text, *of_class, None]  # pyrefly: ignore[bad-return]

    def _make(self, seed: int, names: list[str], alternative: int, label: Any) -> dict[str, Any]:
        batch = {}
        for index, name in enumerate(names):
            makers = self._makers[name]
            batch[name] = makers[min(alternative, len(makers) - 1)](seed + 7 * index)
        placeholder = self._find("image_token_id", "image_token_index", "media_token_id", default=None)
        if "pixel_values" in batch and "input_ids" in batch and placeholder is not None and self.image_tokens:
            images = torch.full((2, self.image_tokens), placeholder)
            batch["input_ids"] = torch.cat([batch["input_ids"][:, :2], images, batch["input_ids"][:, 2:]], 1)
            batch.pop("attention_mask", None)
            if "mm_token_type_ids" in self._accepted:
                batch["mm_token_type_ids"] = (batch["input_ids"] == placeholder).long()
        if label is not None:
            batch["labels"] = label(seed, batch)
        return batch

    def _find(self, *fields: str, default: Any) -> Any:
        values = (_value(config, name) for config in self._configs for name in fields)
        return next((value for value in values if value is not None), default)

    def _known(self) -> dict[str, list[Maker]]:
        """How to make what a forward may ask for, by its name; in several shapes where models differ."""
        find = self._find
        size = find("image_size", "img_size", default=96)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        channels = find("num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        vocabulary = min(FIRST_SPECIAL, find("vocab_size", default=FIRST_SPECIAL))
        mels = find(
            "feature_projection_input_dim", "num_mel_bins", "feature_size", "input_feat_per_channel", default=None
        )
        mels = mels or find("n_mels", default=80)
        frames, clip = 2 * find("max_source_positions", default=32), find("num_frames", default=4)
        past, future = find("context_length", default=16), find("prediction_length", default=16)
        series = find("num_input_channels", "input_size", default=1)
        lags, times = max(find("lags_sequence", default=[0])), find("num_time_features", default=0)
        patch, merge = find("patch_size", default=14), find("spatial_merge_size", default=2)
        patch = patch if isinstance(patch, int) else patch[0]
        codebooks = find("num_codebooks", default=0)
        flat = find("patch_embed_hidden_size", default=patch**2 * channels)
        patch_values = channels * find("temporal_patch_size", default=2) * patch**2

        def ids(seed: int) -> Tensor:
            return torch.randint(min(4, vocabulary - 1), vocabulary, (2, LENGTH), generator=generator(seed))

        def streams(seed: int) -> Tensor:
            """Tokens of several codebooks, as rows."""
            return torch.randint(0, min(64, vocabulary), (2 * codebooks, LENGTH), generator=generator(seed))

        def boxes(seed: int) -> Tensor:
            return torch.randint(0, 50, (2, LENGTH, 4), generator=generator(seed)).sort(-1).values

        texts: list[Maker] = [ids, streams] if codebooks else [ids]

        def of(*shape: int) -> Maker:
            return lambda seed: normal(seed, *shape)

        def ones(*shape: int) -> Maker:
            return lambda seed: torch.ones(shape, dtype=torch.long)

        images = [
            of(2, channels, height, width),
            of(2, clip, channels, height, width),
            of(2, 1, channels, height, width),
        ]
        if "image_grid_thw" in self._accepted or "grid_thw" in self._accepted:
            images = [of(2 * 16 * merge**2 // 4, patch_values)]
        grid: list[Maker] = [lambda seed: torch.tensor([[1, 4, merge**2]] * 2)]
        audio = [of(2, 4000), of(2, 1, 4000), of(2, find("max_length", default=64), mels)]
        return {
            "input_ids": texts,
            "decoder_input_ids": texts,
            "attention_mask": [ones(2, LENGTH)],
            "pixel_values": images,
            "image_grid_thw": grid,
            "grid_thw": grid,
            "pixel_mask": [ones(2, height, width)],
            "input_values": audio,
            "input_features": [of(2, mels, frames), of(2, frames, mels), of(2, frames, 4 * mels)],
            "image_attention_mask": [ones(2, LENGTH, 1)],
            "pixel_values_videos": [of(2, clip, channels, height, width)],
            "bbox": [boxes],
            "past_values": [of(2, past, series), of(2, past + lags), of(2, past)],
            "past_time_features": [of(2, past + lags, times)],
            "past_observed_mask": [ones(2, past + lags)],
            "future_values": [of(2, future, series), of(2, future)],
            "future_time_features": [of(2, future, times)],
            "visual_feats": [of(2, 4, find("visual_feat_dim", default=8))],
            "visual_pos": [of(2, 4, 4)],
            "flattened_patches": [lambda seed: normal(seed, 2, 8, flat + 2).abs()],
            "inputs_embeds": [of(2, LENGTH, find("hidden_size", "d_model", default=32))],
        }


def _nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield value
            yield from _nested(value)


def outcome_of(family: str, found: Found | None, mesh: DeviceMesh) -> dict[str, Any]:
    """Train the family sharded and in one process, and say how that ended.

    Ranks:
        Collective.
    """
    found, reason = on_rank_zero(lambda: _search(family, found))
    if found is None:
        return {"family": family, "outcome": "cannot run", "reason": reason}
    case, _ = case_of(family, found)
    row: dict[str, Any] = {"family": family, "found": list(found)}
    try:
        result = parity(case.build, case.make_batch, case.loss, case.config, mesh=mesh, steps=STEPS)
        if not result.equal:  # it may be rounding, or random numbers that only its first forward draws
            row["exact"] = True
            exact = _exact(case)
            result = parity(exact.build, exact.make_batch, exact.loss, exact.config, mesh=mesh, steps=STEPS)
    except ShardwiseError as error:
        return {**row, "outcome": "refused", "reason": str(error)}
    except Exception:
        return {**row, "outcome": "raised", "reason": traceback.format_exc()}
    return {**row, "outcome": "equal"} if result.equal else {**row, "outcome": "wrong", "reason": str(result)}


def _exact(case: Case) -> Case:
    """The case in float64, without dropout and without batch statistics, which amplify differences without bounds."""

    def build() -> nn.Module:
        model = case.build().double()
        with torch.no_grad():
            model(**make_batch(0))
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and (name == "p" or "drop" in name):
                    setattr(module, name, 0.0)
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval().train = lambda mode=True, module=module: module
        return model

    def make_batch(seed: int) -> Any:
        return cast_floating(case.make_batch(seed), torch.float64)

    return dataclasses.replace(case, build=build, make_batch=make_batch)


def _search(family: str, found: Found | None) -> tuple[Found | None, str]:
    try:
        return case_of(family, found)[1], ""
    except (CannotRun, StopIteration, IndexError) as error:
        # What was found before may be of another version.
        return (None, str(error)) if found is None else _search(family, None)
