"""Images of DeepSeek-VL2: a global view and local tiles, S x S pixels each.

Shapes: V views of a record (each image's global view, then its tiles row by row), I images of a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from raptor_hf.errors import PrivacyConfigError

__all__ = ["DeepseekVL2ImageProcessor", "best_resolution", "stack_views", "tile_resolutions"]

Size = tuple[int, int]
"""(width, height), in pixels or in tiles."""


def tile_resolutions(tile: int = 384, most: int = 9) -> list[Size]:
    """All (m tile, n tile) with m n <= most: the candidates of the published checkpoints, smallest first."""
    grids = [(m, n) for m in range(1, most + 1) for n in range(1, most // m + 1)]
    return [(m * tile, n * tile) for m, n in sorted(grids, key=lambda grid: (grid[0] * grid[1], grid))]


def best_resolution(size: Size, candidates: Sequence[Size]) -> Size:
    """The candidate that keeps most pixels of an image, and among those the one with the least padding.

    An image is shrunk or enlarged to fit into a candidate; what it keeps is the smaller of its own area and its area
    there.
    """

    def merit(candidate: Size) -> tuple[int, int]:
        scale = min(candidate[0] / size[0], candidate[1] / size[1])
        kept = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        return kept, kept - candidate[0] * candidate[1]

    return max(candidates, key=merit)


def stack_views(views: Sequence[torch.Tensor], crops: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`pixel_values` (b, V, 3, S, S) and `spatial_crop` (b, I, 2) of b records, zeros behind shorter ones.

    Args:
        views: (V_i, 3, S, S) of each record. crops: (I_i, 2) int64 of each record, tiles wide and high.
    """
    return {"pixel_values": _stack(views), "spatial_crop": _stack(crops)}


def _stack(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    most = max(len(row) for row in rows)
    out = rows[0].new_zeros(len(rows), most, *rows[0].shape[1:])
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out


class DeepseekVL2ImageProcessor(BaseImageProcessor):
    """Cuts the images of one record into views.

    Args:
        candidate_resolutions: (width, height) that an image may be tiled to, in pixels; the first is one tile, S x S.
            None: `tile_resolutions()`.
        patch_size, downsample_ratio: of the vision tower and the projector: a view becomes h x h features, with
            h = ceil(S // patch_size / downsample_ratio).
        image_mean, image_std: of the three channels, on a scale from 0 to 1. Padding has the mean colour.
        do_normalize: subtract the mean and divide by the standard deviation.
        max_tiled_images: a record with more images than this has none of them tiled (their crop is (1, 1)).
    """

    model_input_names = ["pixel_values", "spatial_crop"]

    def __init__(
        self,
        candidate_resolutions: Sequence[Sequence[int]] | None = None,
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        do_normalize: bool = True,
        max_tiled_images: int = 2,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        resolutions = tile_resolutions() if candidate_resolutions is None else candidate_resolutions
        self.candidate_resolutions = [(int(width), int(height)) for width, height in resolutions]
        self.patch_size, self.downsample_ratio = int(patch_size), int(downsample_ratio)
        self.image_mean, self.image_std = tuple(image_mean), tuple(image_std)
        self.do_normalize, self.max_tiled_images = do_normalize, max_tiled_images
        side = self.candidate_resolutions[0][0] if self.candidate_resolutions else 0
        if not side or self.candidate_resolutions[0][1] != side or any(
            edge % side or not edge for size in self.candidate_resolutions for edge in size
        ):  # fmt: skip
            raise PrivacyConfigError(
                f"`candidate_resolutions={resolutions}` was given",
                "The first must be one square tile, and every other a whole number of tiles wide and high",
                "Use `tile_resolutions(384)`, or those of the model's own processor",
            )

    @property
    def image_size(self) -> int:
        """S: width and height of a view, in pixels."""
        return self.candidate_resolutions[0][0]

    @property
    def features_per_side(self) -> int:
        """h: a view becomes h x h features."""
        return math.ceil(self.image_size // self.patch_size / self.downsample_ratio)

    # ---- Counts, from sizes alone ----

    def crops(self, sizes: Sequence[Size]) -> list[Size]:
        """(tiles wide, tiles high) of each image of one record, from their sizes (width, height) in pixels."""
        if len(sizes) > self.max_tiled_images:
            return [(1, 1)] * len(sizes)
        fitted = (best_resolution(size, self.candidate_resolutions) for size in sizes)
        return [(width // self.image_size, height // self.image_size) for width, height in fitted]

    def crops_of(self, images: Sequence[Any]) -> list[Size]:
        """`crops` of images, of which only the sizes are read."""
        return self.crops([_checked(image).size for image in images])

    def num_image_tokens(self, crop: Size) -> int:
        """Placeholder tokens of one image: global rows, a separator, local rows; each row ends with a newline."""
        h = self.features_per_side
        return h * (h + 1) + 1 + crop[1] * h * (crop[0] * h + 1)

    # ---- Pixels ----

    def views(self, images: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(V, 3, S, S) views of one record's images, and their crops (I, 2) int64: tiles wide, tiles high.

        Args:
            images: of `PIL.Image.Image`, any mode, or uint8 arrays (height, width, 3). An alpha channel is dropped.

        Returns:
            float32 from -1 to 1 for a mean and deviation of 0.5 (from 0 to 1 without `do_normalize`).
        """
        pictures = [_checked(image).convert("RGB") for image in images]
        crops = self.crops([picture.size for picture in pictures])
        side = self.image_size
        colour = tuple(int(mean * 255) for mean in self.image_mean)
        found = []
        for picture, (wide, high) in zip(pictures, crops, strict=True):
            found.append(_pixels(_padded(picture, (side, side), colour)))
            tiled = _pixels(_padded(picture, (wide * side, high * side), colour))
            found += [tiled[y : y + side, x : x + side] for y in range(0, high * side, side)
                      for x in range(0, wide * side, side)]  # fmt: skip
        stacked = np.stack(found) if found else np.zeros((0, side, side, 3), np.uint8)
        values = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
        if self.do_normalize:
            mean, std = (torch.tensor(list(v)).view(3, 1, 1) for v in (self.image_mean, self.image_std))
            values = (values - mean) / std
        return values.contiguous(), torch.tensor(crops, dtype=torch.int64).reshape(-1, 2)

    def preprocess(self, images: Any, return_tensors: str | None = None) -> BatchFeature:
        """`pixel_values` (V, 3, S, S) and `spatial_crop` (I, 2) of one record; see `views`."""
        values, crops = self.views(images if isinstance(images, (list, tuple)) else [images])
        return BatchFeature({"pixel_values": values, "spatial_crop": crops}, tensor_type=return_tensors)


def _checked(image: Any) -> Image.Image:
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image) or 0 in image.size:
        raise PrivacyConfigError(
            "An image without pixels was given" if isinstance(image, Image.Image) else
            f"An image of type `{type(image).__name__}` was given",
            "Its size and colours cannot be told",
            "Give a `PIL.Image.Image`, or a uint8 array (height, width, 3)",
        )  # fmt: skip
    return image


def _padded(picture: Image.Image, size: Size, colour: tuple[int, ...]) -> Image.Image:
    """The picture scaled to fit into `size`, in the middle of it, on a ground of one colour."""
    width, height = picture.size
    # as `PIL.ImageOps.pad`, but a picture that is far wider than high keeps one row of pixels
    if width * size[1] > height * size[0]:
        fitted = (size[0], max(1, round(height / width * size[0])))
    elif width * size[1] < height * size[0]:
        fitted = (max(1, round(width / height * size[1])), size[1])
    else:
        fitted = size
    scaled = picture.resize(fitted, Image.Resampling.BICUBIC)
    ground = Image.new("RGB", size, colour)
    ground.paste(scaled, (round((size[0] - fitted[0]) * 0.5), round((size[1] - fitted[1]) * 0.5)))
    return ground


def _pixels(picture: Image.Image) -> np.ndarray:
    """(height, width, 3) uint8."""
    return np.asarray(picture)
