"""Inputs of a model of transformers, from its configuration and the parameters of its forward.

What a processor would give, small: the first of several sets that eager takes.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.small import FIRST_SPECIAL

__all__ = ["NoInputs", "inputs_for"]

BATCH, TOKENS = 2, 12
Inputs = dict[str, Any]


class NoInputs(Exception):
    """No set of inputs that was tried is one that the model takes."""


def inputs_for(model: nn.Module, call: Callable[..., Any], seed: int = 0) -> tuple[str, Inputs]:
    """What the set is called, and the inputs.

    call     runs the model on inputs, and may change nothing
    raises   NoInputs, with what each set met
    """
    given = _Given(model)
    met: list[str] = []
    for name, make in given.sets():
        wanted = None
        for _ in range(3):
            torch.manual_seed(seed + 1)
            try:
                inputs = make(wanted)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                met.append(f"{name}: {_words(error)}")
                break
            try:
                call(inputs)
            except Exception as error:  # noqa: BLE001  any refusal makes the next set's turn
                met.append(f"{name}: {_words(error)}")
                found = _features(str(error))
                if found is None or found == wanted:
                    break
                wanted = found
            else:
                return name, inputs
    raise NoInputs(" | ".join(met))


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def _features(text: str) -> int | None:
    """How many tokens must stand for an image or a sound, if an error says that."""
    found = re.search(r"features:? (\d+)", text) or re.search(r"features torch.Size\(\[(\d+)", text)
    return int(found[1]) if found else None


class _Given:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self.main = str(getattr(model, "main_input_name", "input_ids"))

    def has(self, *names: str) -> bool:
        return all(name in self.parameters for name in names)

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of these settings, of the configuration or of a part of it."""
        for holder in self.holders():
            for name in names:
                value = getattr(holder, name, None)
                if value is not None:
                    return value
        return default

    def holders(self) -> Iterator[Any]:
        yield self.config
        for name in ("vision_config", "backbone_config", "audio_config", "encoder_config",
                     "encoder", "text_config", "thinker_config", "perceiver_config"):  # fmt: skip
            part = getattr(self.config, name, None)
            if part is not None:
                yield part
                for inner in ("vision_config", "audio_config", "text_config", "backbone_config"):
                    deeper = getattr(part, inner, None)
                    if deeper is not None:
                        yield deeper

    # ------------------------------------------------------------------ sets

    def sets(self) -> Iterator[tuple[str, Callable[[int | None], Inputs]]]:
        has_text = self.has("input_ids")
        if self.has("past_values"):
            yield "time series", self.series
            yield "time series, one channel", functools.partial(self.series, channels=0)
        if self.has("input_ids", "bbox"):
            if self.has("pixel_values") or self.has("image"):
                yield "text, boxes and image", self.document
            yield "text and boxes", self.boxed
        if self.has("states", "actions"):
            yield "states and actions", self.decisions
        if self.picture():
            for make in self.pictures():
                name = getattr(make, "__name__", "").strip("_")
                if has_text:
                    yield f"text and {name}", functools.partial(self.beside_text, make)
                if self.main.startswith("pixel_values") or not has_text:
                    yield name, functools.partial(self.alone, make)
        if self.sound():
            for make in self.sounds():
                if has_text:
                    yield "text and sound", functools.partial(self.beside_text, make)
                if not has_text or self.main != "input_ids":
                    yield "sound", functools.partial(self.alone, make)
        if has_text:
            yield "text", self.text
            yield "codes", self.codes
            yield "text without mask", self.bare
        for name, values in self.embeddings():
            yield name, functools.partial(self.one, name, values)

    def beside_text(self, make: Callable[[], Inputs], tokens_of_features: int | None) -> Inputs:
        return {**self.text(tokens_of_features), **make()}

    def alone(self, make: Callable[[], Inputs], _: int | None) -> Inputs:
        return {**make(), **self.rest()}

    def one(self, name: str, values: Tensor, _: int | None) -> Inputs:
        return {name: values}

    def bare(self, _: int | None) -> Inputs:
        return {"input_ids": self.ids()}

    def boxed(self, _: int | None) -> Inputs:
        return {**self.text(), "bbox": self.boxes()}

    def picture(self) -> bool:
        return self.has("pixel_values") or self.has("pixel_values_videos")

    def sound(self) -> bool:
        return any(self.has(x) for x in ("input_features", "input_values", "audio_values"))

    # ------------------------------------------------------------------ text

    def vocabulary(self) -> int:
        return min(int(self.find("vocab_size", "n_vocab", default=100)), FIRST_SPECIAL)

    def ids(self, tokens: int = TOKENS) -> Tensor:
        least = 3 if self.vocabulary() > 8 else 0
        found = torch.randint(least, self.vocabulary(), (BATCH, tokens))
        end = self.find("eos_token_id")
        if isinstance(end, int) and 0 <= end < self.vocabulary():
            found[:, -1] = end
        return found

    def codes(self, _: int | None) -> Inputs:
        """Several tokens for each step, as models of sound take."""
        books = int(self.find("num_codebooks", "num_quantizers", "num_channels", default=8))
        most = min(self.vocabulary(), int(self.find("codebook_size", default=100)))
        if self.has("decoder_input_ids"):
            inner = torch.randint(3, most, (BATCH * books, TOKENS))
            return {**self.text(), "decoder_input_ids": inner}
        return {"input_ids": torch.randint(3, most, (BATCH, TOKENS, books))}

    def text(self, tokens_of_features: int | None = None) -> Inputs:
        """Text; `tokens_of_features` of its tokens, in all, stand for images or sounds."""
        ids = self.ids()
        special = self.find("image_token_id", "image_token_index", "audio_token_id",
                            "audio_token_index", "media_token_id", "video_token_id")  # fmt: skip
        if special is not None and tokens_of_features:
            each = -(-tokens_of_features // BATCH)
            marks = torch.full((BATCH, each), int(special))
            ids = torch.cat([ids[:, :2], marks, ids[:, 2:]], dim=1)
        found: Inputs = {"input_ids": ids}
        if self.has("attention_mask"):
            found["attention_mask"] = torch.ones_like(ids)
        if self.has("mm_token_type_ids") and special is not None:
            found["mm_token_type_ids"] = (ids == special).long()
        if self.has("token_type_ids") and special is not None:
            found["token_type_ids"] = (ids == special).long()
        return {**found, **self.rest()}

    def rest(self) -> Inputs:
        """What a decoder takes beside the main input."""
        found: Inputs = {}
        is_pair = getattr(self.config, "is_encoder_decoder", False)
        if self.has("decoder_input_ids") and (is_pair or not self.has("input_ids")):
            found["decoder_input_ids"] = self.ids(6)
        if self.has("noise"):  # what a masked autoencoder would draw otherwise
            side, patch = self.side(), self.patch()
            found["noise"] = torch.rand(BATCH, (side[0] // patch) * (side[1] // patch))
        if (
            self.has("bool_masked_pos")
            and self.parameters["bool_masked_pos"].default is inspect._empty
        ):
            side, patch = self.side(), self.patch()
            count = (side[0] // patch) * (side[1] // patch)
            frames = int(self.find("num_frames", default=1)) // int(
                self.find("tubelet_size", default=1)
            )
            mask = torch.zeros(BATCH, count * max(1, frames), dtype=torch.bool)
            mask[:, ::2] = True
            found["bool_masked_pos"] = mask
        if self.has("qformer_input_ids"):
            found["qformer_input_ids"] = self.ids(6)
            found["qformer_attention_mask"] = torch.ones(BATCH, 6, dtype=torch.int64)
        if self.has("task_inputs"):
            found["task_inputs"] = self.ids(8)
        if self.has("input_points"):
            found["input_points"] = torch.rand(BATCH, 1, 2, 2) * self.side()[0]
        return found

    def boxes(self) -> Tensor:
        corner = torch.randint(0, 400, (BATCH, TOKENS, 2))
        return torch.cat([corner, corner + torch.randint(1, 400, (BATCH, TOKENS, 2))], dim=-1)

    def document(self, _: int | None) -> Inputs:
        pixels = "pixel_values" if self.has("pixel_values") else "image"
        side = (224, 224) if pixels == "image" else self.side()
        image = torch.rand(BATCH, 3, *side)
        return {**self.text(), "bbox": self.boxes(), pixels: image}

    # ------------------------------------------------------------------ images

    def side(self) -> tuple[int, int]:
        size = self.find("image_size", "img_size", "input_resolution", default=64)
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        return (int(size[0]), int(size[-1])) if isinstance(size, (tuple, list)) else (size, size)

    def patch(self) -> int:
        size = self.find("patch_size", default=16)
        return int(size[-1] if isinstance(size, (tuple, list)) else size)

    def channels(self) -> int:
        return int(self.find("num_channels", "in_channels", "in_chans", default=3))

    def pictures(self) -> list[Callable[[], Inputs]]:
        if self.has("image_grid_thw"):
            return [self._patches_of_a_grid, self._image]
        if self.has("pixel_values_videos") and not self.has("pixel_values"):
            return [self._video]
        order = [self._image, self._video, self._images, self._image_of_224, self._flat_patches]
        if self.find("num_frames", "frames") is not None:
            order.insert(0, order.pop(1))
        if self.has("image_sizes"):
            order.insert(1, self._image_with_its_size)
        if self.find("image_grid_pinpoints") is not None:
            order.insert(0, self._tiles)
        return order

    def named(self, pixels: Tensor) -> Inputs:
        return {("pixel_values" if self.has("pixel_values") else "pixel_values_videos"): pixels}

    def _image(self) -> Inputs:
        height, width = self.side()
        found = self.named(torch.rand(BATCH, self.channels(), height, width))
        if self.has("pixel_mask") and not self.has("bbox"):
            found["pixel_mask"] = torch.ones(BATCH, height, width, dtype=torch.int64)
        return found

    def _image_with_its_size(self) -> Inputs:
        height, width = self.side()
        return {**self._image(), "image_sizes": torch.tensor([[height, width]] * BATCH)}

    def _image_of_224(self) -> Inputs:
        return self.named(torch.rand(BATCH, self.channels(), 224, 224))

    def _images(self) -> Inputs:
        """One image each, on an axis of its own."""
        height, width = self.side()
        found = self.named(torch.rand(BATCH, 1, self.channels(), height, width))
        if self.has("image_attention_mask"):
            found["image_attention_mask"] = torch.ones(BATCH, TOKENS, 1, dtype=torch.int64)
        if self.has("aspect_ratio_ids"):
            found = self.named(torch.rand(BATCH, 1, 4, self.channels(), height, width))
            found["aspect_ratio_ids"] = torch.ones(BATCH, 1, dtype=torch.int64)
            found["aspect_ratio_mask"] = torch.ones(BATCH, 1, 4, dtype=torch.int64)
            found["cross_attention_mask"] = torch.ones(BATCH, TOKENS, 1, 4, dtype=torch.int64)
        return found

    def _tiles(self) -> Inputs:
        """An image whole and in two tiles by two."""
        height, width = self.side()
        found = self.named(torch.rand(BATCH, 5, self.channels(), height, width))
        found["image_sizes"] = torch.tensor([[2 * height, 2 * width]] * BATCH)
        return found

    def _video(self) -> Inputs:
        frames = int(self.find("num_frames", "frames", "frames_per_clip", default=4))
        return self.named(torch.rand(BATCH, frames, self.channels(), *self.side()))

    def _flat_patches(self) -> Inputs:
        size = self.patch()
        found = self.named(torch.rand(BATCH, 16, self.channels() * size * size))
        if self.has("pixel_attention_mask"):
            found["pixel_attention_mask"] = torch.ones(BATCH, 16, dtype=torch.int64)
        if self.has("spatial_shapes"):
            found["spatial_shapes"] = torch.tensor([[4, 4]] * BATCH)
        return found

    def _patches_of_a_grid(self) -> Inputs:
        frames = int(self.find("temporal_patch_size", default=1))
        size = self.channels() * frames * self.patch() ** 2
        return {
            "pixel_values": torch.rand(BATCH * 16, size),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        }

    # ------------------------------------------------------------------ sound

    def sounds(self) -> list[Callable[[], Inputs]]:
        name = next(x for x in ("input_features", "input_values", "audio_values") if self.has(x))
        names = ("num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel",
                 "input_channels", "mel_bins")  # fmt: skip
        bins = int(self.find(*names, default=80))
        frames = int(self.find("max_source_positions", "max_length", default=50))
        waves = [(BATCH, 4000), (BATCH, 1, 4000), (BATCH, 1, 16000), (BATCH, 16000)]
        spectra = [(BATCH, bins, 2 * frames), (BATCH, 100, bins), (BATCH, 1024, bins),
                   (BATCH, bins, 100), (BATCH, 1, 100, bins), (BATCH, bins, 3000),
                   (BATCH, 1, 1001, 64)]  # fmt: skip
        shapes = [*waves, *spectra] if name == "input_values" else [*spectra, *waves]
        return [functools.partial(self.heard, name, shape) for shape in shapes]

    def heard(self, name: str, shape: tuple[int, ...]) -> Inputs:
        found: Inputs = {name: torch.randn(shape) * 0.3}
        long = max(shape[1:])
        for mask in ("feature_attention_mask", "input_features_mask", "padding_mask"):
            if self.has(mask) and mask != "padding_mask":
                found[mask] = torch.ones(BATCH, long, dtype=torch.int64)
        if self.has("is_longer"):
            found["is_longer"] = torch.zeros(BATCH, 1, dtype=torch.bool)
        return found

    # ------------------------------------------------------------------ others

    def series(self, _: int | None, channels: int = -1) -> Inputs:
        config = self.config
        context = int(self.find("context_length", default=16))
        lags = getattr(config, "lags_sequence", None)
        past = context + (max(lags) if lags else 0)
        ahead = int(self.find("prediction_length", default=8) or 8)
        wide = (
            channels
            if channels >= 0
            else int(self.find("num_input_channels", "input_size", default=1))
        )
        flat = wide in (0, 1) and self.has("past_time_features")
        form = () if flat or not wide else (wide,)
        found: Inputs = {"past_values": torch.randn(BATCH, past, *form)}
        if self.has("past_time_features"):
            features = int(self.find("num_time_features", default=0)) or 1
            found["past_time_features"] = torch.randn(BATCH, past, features)
            found["past_observed_mask"] = torch.ones(BATCH, past, *form)
        if self.has("future_values") and getattr(config, "is_encoder_decoder", False):
            found["future_values"] = torch.randn(BATCH, ahead, *form)
            found["future_time_features"] = torch.randn(BATCH, ahead, features)
        if getattr(config, "num_static_categorical_features", 0):
            found["static_categorical_features"] = torch.zeros(
                BATCH, config.num_static_categorical_features, dtype=torch.int64
            )
        return found

    def decisions(self, _: int | None) -> Inputs:
        config, steps = self.config, 5
        return {
            "states": torch.randn(BATCH, steps, config.state_dim),
            "actions": torch.randn(BATCH, steps, config.act_dim),
            "rewards": torch.randn(BATCH, steps, 1),
            "returns_to_go": torch.randn(BATCH, steps, 1),
            "timesteps": torch.arange(steps).repeat(BATCH, 1),
            "attention_mask": torch.ones(BATCH, steps),
        }

    def embeddings(self) -> Iterator[tuple[str, Tensor]]:
        """For parts that take what another part computed."""
        width = self.find("hidden_size", "d_model", "model_in_dim", default=64)
        bins = int(self.find("num_mel_bins", "model_in_dim", default=80))
        for name in ("hidden_states", "inputs_embeds", "spectrogram", "input_embeds"):
            if self.has(name):
                yield name, torch.randn(BATCH, TOKENS, bins if name == "spectrogram" else width)
