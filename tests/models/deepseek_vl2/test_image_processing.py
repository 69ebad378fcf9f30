"""Views and crops of drawn images against NumPy and `PIL.ImageOps`, over all candidate resolutions."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.models.deepseek_vl2.image_processing import (
    DeepseekVL2ImageProcessor,
    best_resolution,
    stack_views,
    tile_resolutions,
)
from tests.models.deepseek_vl2.words import drawn

SIDE = 28
PROCESSOR = DeepseekVL2ImageProcessor(tile_resolutions(SIDE), patch_size=4, downsample_ratio=2)
SHAPES = [
    (28, 28),
    (20, 30),
    (300, 40),
    (41, 500),
    (1, 1),
    (3, 2),
    (100, 100),
    (57, 56),
    (84, 84),
    (2000, 1999),
    (29, 28),
]
THIN = [(900, 1), (1, 900)]


def brute_force(size, candidates):
    """The published rule, over all candidates at once: most pixels kept, then least padding, then the first."""
    w, h = size
    boxes = np.array(candidates, dtype=np.float64)
    scale = np.minimum(boxes[:, 0] / w, boxes[:, 1] / h)
    kept = np.minimum(np.floor(w * scale) * np.floor(h * scale), w * h)
    waste = boxes.prod(axis=1) - kept
    order = np.lexsort((np.arange(len(boxes)), waste, -kept))
    return tuple(int(edge) for edge in boxes[order[0]])


def expected_views(image, candidates, side, tiled=True):
    """float64 (V, 3, S, S) and (wide, high), by `ImageOps.pad` and slices."""
    picture = image.convert("RGB")
    width, height = brute_force(picture.size, candidates) if tiled else (side, side)
    whole = np.asarray(ImageOps.pad(picture, (side, side), color=(127, 127, 127)), dtype=np.float64)
    large = np.asarray(ImageOps.pad(picture, (width, height), color=(127, 127, 127)), dtype=np.float64)
    tiles = large.reshape(height // side, side, width // side, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    views = np.concatenate([whole[None], tiles]) / 127.5 - 1
    return views.transpose(0, 3, 1, 2), (width // side, height // side)


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_views_of_one_image(size, mode):
    image = drawn(*size, mode=mode)
    views, crops = PROCESSOR.views([image])
    expected, crop = expected_views(image, PROCESSOR.candidate_resolutions, SIDE)
    assert crops.tolist() == [list(crop)] and crops.dtype == torch.int64
    assert views.dtype == torch.float32 and views.shape == (1 + crop[0] * crop[1], 3, SIDE, SIDE)
    np.testing.assert_allclose(views.numpy(), expected, atol=1e-6)


def test_tiles_are_row_by_row():
    image = Image.new("RGB", (2 * SIDE, 3 * SIDE))
    for place in range(6):
        image.paste((40 * place, 0, 0), (place % 2 * SIDE, place // 2 * SIDE, (place % 2 + 1) * SIDE, 3 * SIDE))
    processor = DeepseekVL2ImageProcessor([(SIDE, SIDE), (2 * SIDE, 3 * SIDE)])
    views, crops = processor.views([image])
    assert crops.tolist() == [[2, 3]]
    centres = ((views[1:, 0, SIDE // 2, SIDE // 2] + 1) * 127.5).round().tolist()
    assert centres == [0, 40, 80, 120, 160, 200]


@pytest.mark.parametrize("size", THIN)
def test_a_very_thin_image_keeps_a_row_of_pixels(size):
    image = Image.new("RGB", size, (255, 0, 0))
    views, crops = PROCESSOR.views([image])
    red = (views[0] == torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1)).all(0)
    assert red.sum() == SIDE and (red.any(0).all() if size[0] > 1 else red.any(1).all())
    ground = (views[0][:, ~red] - (127 / 127.5 - 1)).abs().max()
    assert ground < 1e-6
    tiles = views[1:].permute(0, 2, 3, 1).reshape(crops[0, 1], crops[0, 0], SIDE, SIDE, 3)
    large = tiles.permute(0, 2, 1, 3, 4).reshape(crops[0, 1] * SIDE, crops[0, 0] * SIDE, 3)
    assert (large == torch.tensor([1.0, -1.0, -1.0])).all(-1).sum() == max(crops[0]) * SIDE


@pytest.mark.parametrize("side", [SIDE, 384])
def test_the_best_resolution_of_many_sizes(side):
    rng = np.random.default_rng(0)
    candidates = tile_resolutions(side)
    sizes = np.exp(rng.uniform(0, np.log(8 * side), (3_000, 2))).astype(int)
    shuffled = [candidates[i] for i in rng.permutation(len(candidates))]  # the smallest need not come first
    for size in sizes.tolist():
        for some in (candidates, shuffled):
            assert best_resolution(tuple(size), some) == brute_force(size, some), size


def test_known_resolutions_at_384():
    candidates = tile_resolutions()
    assert len(candidates) == len(set(candidates)) == 23 and candidates[0] == (384, 384)
    assert all(w % 384 == h % 384 == 0 and w * h <= 9 * 384**2 for w, h in candidates)
    # worked out by hand: nothing is gained by enlarging, and a tile more only where it keeps more of the image
    known = {(100, 50): (384, 384), (384, 384): (384, 384), (768, 384): (768, 384), (385, 384): (768, 384),
             (1152, 1152): (1152, 1152), (4000, 400): (3456, 384), (10, 5000): (384, 3456),
             (800, 600): (1152, 768)}  # fmt: skip
    assert {size: best_resolution(size, candidates) for size in known} == known


def test_a_tie_is_won_by_the_first():
    assert best_resolution((50, 50), [(20, 40), (40, 20)]) == (20, 40)
    assert best_resolution((50, 50), [(40, 20), (20, 40)]) == (40, 20)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_more_than_two_images_are_not_tiled(count):
    images = [drawn(200 + place, 30, seed=place) for place in range(count)]
    views, crops = PROCESSOR.views(images)
    expected = [expected_views(image, PROCESSOR.candidate_resolutions, SIDE, tiled=count <= 2) for image in images]
    assert crops.tolist() == [list(crop) for _, crop in expected]
    assert (crops == 1).all() == (count > 2)
    np.testing.assert_allclose(views.numpy(), np.concatenate([v for v, _ in expected]), atol=1e-6)
    assert PROCESSOR.crops([image.size for image in images]) == [crop for _, crop in expected]


def test_no_image():
    views, crops = PROCESSOR.views([])
    assert views.shape == (0, 3, SIDE, SIDE) and crops.shape == (0, 2) and crops.dtype == torch.int64


def test_mean_colour_and_normalisation_are_the_ones_given():
    mean, std = (0.2, 0.5, 0.9), (0.1, 0.2, 0.4)
    processor = DeepseekVL2ImageProcessor([(8, 8)], image_mean=mean, image_std=std)
    views, _ = processor.views([Image.new("RGB", (8, 4), (255, 0, 51))])
    ground = [(int(255 * m) / 255 - m) / s for m, s in zip(mean, std, strict=True)]
    inside = [(value - m) / s for value, m, s in zip((1, 0, 0.2), mean, std, strict=True)]
    np.testing.assert_allclose(views[0, :, 0, 0], ground, atol=1e-6)
    np.testing.assert_allclose(views[0, :, 4, 4], inside, atol=1e-6)
    plain = DeepseekVL2ImageProcessor([(8, 8)], image_mean=mean, image_std=std, do_normalize=False)
    np.testing.assert_allclose(plain.views([Image.new("RGB", (8, 4), (255, 0, 51))])[0][0, :, 4, 4], (1, 0, 0.2), 1e-6)


@pytest.mark.parametrize(
    ("side", "patch", "ratio", "h"), [(384, 14, 2, 14), (28, 4, 2, 4), (30, 4, 2, 4), (36, 4, 2, 5)]
)
@pytest.mark.parametrize("crop", [(1, 1), (3, 2), (1, 9)])
def test_placeholders_of_an_image(side, patch, ratio, h, crop):
    processor = DeepseekVL2ImageProcessor([(side, side)], patch_size=patch, downsample_ratio=ratio)
    assert processor.features_per_side == h == math.ceil((side // patch) / ratio)
    rows = [h + 1] * h + [1] + [crop[0] * h + 1] * (crop[1] * h)
    assert processor.num_image_tokens(crop) == sum(rows)


def test_arrays_and_preprocess():
    image = drawn(50, 60)
    views, crops = PROCESSOR.views([image])
    for given in (image, [image], [np.asarray(image)]):
        out = PROCESSOR.preprocess(given, return_tensors="pt")
        assert torch.equal(out["pixel_values"], views) and torch.equal(out["spatial_crop"], crops)
    assert set(out) == set(PROCESSOR.model_input_names)


@pytest.mark.parametrize("wrong", ["a.png", np.zeros((4, 4)), np.zeros((4, 4, 3)), Image.new("RGB", (0, 5)), None])
def test_what_is_no_image_is_refused(wrong):
    with pytest.raises(PrivacyConfigError, match=r"PIL\.Image\.Image"):
        PROCESSOR.views([wrong])


@pytest.mark.parametrize("wrong", [[], [(8, 4)], [(8, 8), (12, 8)], [(8, 8), (0, 8)]])
def test_resolutions_that_are_no_tiles_are_refused(wrong):
    with pytest.raises(PrivacyConfigError, match="whole number of tiles"):
        DeepseekVL2ImageProcessor(wrong)


def test_stacking_pads_with_zeros_behind():
    one, two = PROCESSOR.views([drawn(28, 28)]), PROCESSOR.views([drawn(90, 30), drawn(30, 90)])
    batch = stack_views([one[0], two[0]], [one[1], two[1]])
    assert batch["pixel_values"].shape == (2, len(two[0]), 3, SIDE, SIDE)
    assert torch.equal(batch["pixel_values"][0, : len(one[0])], one[0]) and len(one[0]) == 2
    assert not batch["pixel_values"][0, len(one[0]) :].any() and torch.equal(batch["pixel_values"][1], two[0])
    assert batch["spatial_crop"].tolist() == [[[1, 1], [0, 0]], two[1].tolist()]


def test_saved_and_loaded(tmp_path):
    made = DeepseekVL2ImageProcessor([(8, 8), (16, 8)], 2, 3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), False, 5)
    made.save_pretrained(tmp_path)
    loaded = DeepseekVL2ImageProcessor.from_pretrained(tmp_path)
    assert loaded.to_dict() == made.to_dict()
    image = drawn(40, 9)
    assert torch.equal(loaded.views([image])[0], made.views([image])[0])
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["max_tiled_images"] == 5
