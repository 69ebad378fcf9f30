"""Every part and the whole against `oracle.py`, which is loops over the published equations."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from raptor_hf.models.deepseek_vl2 import DeepseekVL2ForConditionalGeneration
from tests.models.deepseek_vl2 import oracle
from tests.models.deepseek_vl2.build import ITEMS, KINDS, PIXELS, SIDE, WIDTH, collate, inputs, values_of

FLOAT64 = torch.float64
TOLERANCE = {torch.float32: 1e-5, FLOAT64: 1e-10}
SINGLE = torch.float32  # the name itself is patched in float64 tests
DTYPES = pytest.mark.parametrize("dtype", [SINGLE, FLOAT64], ids=["float32", "float64"])


@pytest.fixture
def loaded(dtype, tmp_path, request):
    """kind -> (model in `dtype` from a file under original names, the same tensors in float64)."""

    def load(kind="tiny"):
        state = oracle.random_state(kind, seed=3)
        (tmp_path / "config.json").write_text(json.dumps(values_of(kind)))
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = DeepseekVL2ForConditionalGeneration.from_pretrained(
            tmp_path, dtype=dtype, attn_implementation="eager"
        ).eval()
        model.set_experts_implementation("eager")
        if dtype == FLOAT64:
            request.getfixturevalue("float64")  # after loading, which needs to tell the types apart
            text = model.language.model
            text.rotary_emb = type(text.rotary_emb)(text.config)
        return model, {name: value.double() for name, value in state.items()}

    return load


def close(found, expected, dtype):
    expected = torch.stack(expected) if isinstance(expected, list) else expected
    assert found.dtype == dtype and found.shape == expected.shape
    error = float((found.double() - expected).abs().max())
    assert error <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())), error
    assert float(expected.abs().max()) > 1e-2


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@DTYPES
@torch.no_grad()
def test_vision_block(loaded, dtype):
    model, state = loaded()
    tokens = noise(9, WIDTH)
    found = model.vision.blocks[1](tokens[None].to(dtype))[0]
    close(found, oracle.vision_block(state, "vision.blocks.1", list(tokens)), dtype)


@DTYPES
@torch.no_grad()
def test_vision_tower(loaded, dtype):
    model, state = loaded()
    view = noise(3, PIXELS, PIXELS)
    close(model.vision(view[None].to(dtype))[0], oracle.vision(state, view), dtype)


@DTYPES
@torch.no_grad()
def test_projector(loaded, dtype):
    model, state = loaded()
    patches = noise(9, WIDTH)
    expected = oracle.projector(state, list(patches))
    close(model.projector(patches[None].to(dtype))[0].flatten(0, 1), [x for row in expected for x in row], dtype)


@pytest.mark.parametrize("crop", [(1, 1), (2, 1), (1, 2), (3, 2)])
@DTYPES
@torch.no_grad()
def test_the_order_of_tiles(loaded, dtype, crop):
    wide, high = crop
    model, state = loaded()
    pixels = noise(1 + wide * high + 2, 3, PIXELS, PIXELS)  # two views more than the image has
    views = [oracle.projector(state, oracle.vision(state, view)) for view in pixels[: 1 + wide * high]]
    found = model._image_features(pixels.to(dtype), [crop])
    assert len(found) == model.config.image_tokens(wide, high)
    close(found, oracle.image(state, views, wide, high), dtype)
    newline = (found == model.image_newline).all(-1).nonzero().flatten().tolist()
    start = SIDE * (SIDE + 1) + 1
    assert newline == [2, 5] + [start + (row + 1) * (wide * SIDE + 1) - 1 for row in range(high * SIDE)]


@DTYPES
@torch.no_grad()
def test_the_global_view_can_come_last(loaded, dtype):
    model, state = loaded()
    model.config.global_view_pos = "tail"
    pixels = noise(2, 3, PIXELS, PIXELS)
    views = [oracle.projector(state, oracle.vision(state, view)) for view in pixels]
    tokens = oracle.image(state, views, 1, 1)
    first = SIDE * (SIDE + 1)
    close(model._image_features(pixels.to(dtype), [(1, 1)]), tokens[first + 1 :] + tokens[first:][:1] + tokens[:first],
          dtype)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@torch.no_grad()
def test_attention(loaded, dtype, kind):
    model, state = loaded(kind)
    tokens = noise(7, 16)
    attention = oracle.plain_attention if kind == "tiny" else oracle.latent_attention
    text = model.language.model
    mask = torch.full((7, 7), float("-inf"), dtype=dtype).triu(1)[None, None]
    x = tokens[None].to(dtype)
    positions = text.rotary_emb(x, torch.arange(7)[None])
    found = text.layers[1].self_attn(hidden_states=x, position_embeddings=positions, attention_mask=mask)[0][0]
    close(found, attention(state, "language.model.layers.1.self_attn", list(tokens)), dtype)


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@torch.no_grad()
def test_sparse_block(loaded, dtype, kind):
    model, state = loaded(kind)
    tokens = noise(11, 16)
    name = "language.model.layers.2.mlp"
    close(
        model.language.model.layers[2].mlp(tokens[None].to(dtype))[0],
        [oracle.moe(state, name, x, kind) for x in tokens],
        dtype,
    )
    used = {e for x in tokens for e in oracle.gates(state, name, x, kind)}
    assert used == set(range(4))


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@torch.no_grad()
def test_logits_of_a_padded_batch(loaded, dtype, kind):
    """Records with one image, two images, none: in one batch, with padding, against each one alone."""
    model, state = loaded(kind)
    batch = collate(ITEMS[:3], width=41, views=6, dtype=dtype)
    found = model(**inputs(batch)).logits
    for row, item in enumerate(ITEMS[:3]):
        close(found[row, : len(item["input_ids"])], oracle.logits(state, item, kind), dtype)


@DTYPES
@torch.no_grad()
def test_the_loss_is_that_of_the_labels(loaded, dtype):
    model, state = loaded()
    item = ITEMS[0]
    scores = oracle.logits(state, item, "tiny").log_softmax(-1)
    terms = [-scores[t - 1, label] for t, label in enumerate(item["labels"]) if label != -100]
    found = model(**collate([item], dtype=dtype)).loss
    assert float(found) == pytest.approx(float(sum(terms) / len(terms)), rel=10 * TOLERANCE[dtype])
