"""DeepSeek-VL2 written out: one record, one view, one token and one head at a time, on tensors under original names.

From the published equations: SigLIP (pre-norm ViT, learned positions, no class token, GELU by tanh), the 2 x 2
unshuffle and MLP, the order of tiles, rotary attention (plain or latent), softmax or sigmoid routing, shared experts.
"""

from __future__ import annotations

import math

import torch

from tests.models.deepseek_vl2.build import GRID, HIDDEN, IMAGE, KINDS, LANGUAGE, PATCH, SIDE, WIDTH

HEADS, LAYERS, EXPERTS = LANGUAGE["num_attention_heads"], LANGUAGE["num_hidden_layers"], LANGUAGE["n_routed_experts"]
VISION_HEADS, VISION_LAYERS, VISION_HIDDEN = 2, 2, 12
State = dict[str, torch.Tensor]


def names(kind: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of an original checkpoint, with its shape."""
    h, inner, moe = HIDDEN, LANGUAGE["intermediate_size"], LANGUAGE["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"image_newline": (h,), "view_seperator": (h,)}

    def linear(name: str, out: int, inside: int, bias: bool = True) -> None:
        found[f"{name}.weight"] = (out, inside)
        if bias:
            found[f"{name}.bias"] = (out,)

    found["vision.patch_embed.proj.weight"] = (WIDTH, 3, PATCH, PATCH)
    found["vision.patch_embed.proj.bias"] = (WIDTH,)
    found["vision.pos_embed"] = (1, GRID * GRID, WIDTH)
    for i in range(VISION_LAYERS):
        block = f"vision.blocks.{i}"
        for norm in ("norm1", "norm2"):
            found[f"{block}.{norm}.weight"] = found[f"{block}.{norm}.bias"] = (WIDTH,)
        linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn.proj", WIDTH, WIDTH)
        linear(f"{block}.mlp.fc1", VISION_HIDDEN, WIDTH)
        linear(f"{block}.mlp.fc2", WIDTH, VISION_HIDDEN)
    found["vision.norm.weight"] = found["vision.norm.bias"] = (WIDTH,)
    linear("projector.layers.0", h, 4 * WIDTH)
    linear("projector.layers.2", h, h)
    found["language.model.embed_tokens.weight"] = found["language.lm_head.weight"] = (LANGUAGE["vocab_size"], h)
    found["language.model.norm.weight"] = (h,)
    for i in range(LAYERS):
        layer = f"language.model.layers.{i}"
        found[f"{layer}.input_layernorm.weight"] = found[f"{layer}.post_attention_layernorm.weight"] = (h,)
        if kind == "tiny":
            for name in "qkvo":
                linear(f"{layer}.self_attn.{name}_proj", h, h, bias=False)
        else:
            rank, rope, nope, value = (
                KINDS[kind][key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            )
            linear(f"{layer}.self_attn.q_proj", HEADS * (nope + rope), h, bias=False)
            linear(f"{layer}.self_attn.kv_a_proj_with_mqa", rank + rope, h, bias=False)
            found[f"{layer}.self_attn.kv_a_layernorm.weight"] = (rank,)
            linear(f"{layer}.self_attn.kv_b_proj", HEADS * (nope + value), rank, bias=False)
            linear(f"{layer}.self_attn.o_proj", h, HEADS * value, bias=False)
        mlps = {f"{layer}.mlp": inner}
        if i >= LANGUAGE["first_k_dense_replace"]:
            mlps = {f"{layer}.mlp.shared_experts": moe * LANGUAGE["n_shared_experts"]}
            mlps |= {f"{layer}.mlp.experts.{e}": moe for e in range(EXPERTS)}
            found[f"{layer}.mlp.gate.weight"] = (EXPERTS, h)
            if kind == "full":
                found[f"{layer}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        for mlp, width in mlps.items():
            linear(f"{mlp}.gate_proj", width, h, bias=False)
            linear(f"{mlp}.up_proj", width, h, bias=False)
            linear(f"{mlp}.down_proj", h, width, bias=False)
    return found


def random_state(kind: str, seed: int = 0) -> State:
    """Random tensors under the original names, float32."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in names(kind).items():
        noise = torch.randn(shape, generator=generator)
        if "correction" in name:
            noise = noise * 0.2
        elif "norm" in name and name.endswith("weight"):
            noise = 1 + noise * 0.3
        elif len(shape) > 1 and "embed" not in name:
            noise = noise / math.sqrt(math.prod(shape[1:]))
        state[name] = noise
    return state


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    out = state[f"{name}.weight"] @ x
    return out + state[f"{name}.bias"] if f"{name}.bias" in state else out


# ---- vision ----


def layer_norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + 1e-6) * state[f"{name}.weight"] + state[f"{name}.bias"]


def vision_block(state: State, name: str, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    width = WIDTH // VISION_HEADS
    qkv = [linear(state, f"{name}.attn.qkv", layer_norm(state, f"{name}.norm1", x)) for x in tokens]
    mixed = [torch.zeros_like(x) for x in tokens]
    for head in range(VISION_HEADS):
        part = slice(head * width, (head + 1) * width)
        query, key, value = ([x[i * WIDTH : (i + 1) * WIDTH][part] for x in qkv] for i in range(3))
        for i, q in enumerate(query):
            weight = torch.stack([(q @ k) / math.sqrt(width) for k in key]).softmax(0)
            mixed[i][part] = sum(w * v for w, v in zip(weight, value, strict=True))
    tokens = [x + linear(state, f"{name}.attn.proj", m) for x, m in zip(tokens, mixed, strict=True)]
    out = []
    for x in tokens:
        inner = linear(state, f"{name}.mlp.fc1", layer_norm(state, f"{name}.norm2", x))
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        out.append(x + linear(state, f"{name}.mlp.fc2", inner))
    return out


def vision(state: State, view: torch.Tensor) -> list[torch.Tensor]:
    """(3, S, S) -> patches row by row."""
    kernel, bias = state["vision.patch_embed.proj.weight"], state["vision.patch_embed.proj.bias"]
    tokens = []
    for row in range(GRID):
        for column in range(GRID):
            patch = view[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            tokens.append((kernel * patch).sum((1, 2, 3)) + bias + state["vision.pos_embed"][0, row * GRID + column])
    for i in range(VISION_LAYERS):
        tokens = vision_block(state, f"vision.blocks.{i}", tokens)
    return [layer_norm(state, "vision.norm", x) for x in tokens]


def projector(state: State, patches: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Patches row by row -> tokens by row and column."""
    rows = []
    for row in range(SIDE):
        rows.append([])
        for column in range(SIDE):
            joined = []
            for channel in range(WIDTH):
                for y in (2 * row, 2 * row + 1):
                    for x in (2 * column, 2 * column + 1):
                        inside = y < GRID and x < GRID
                        joined.append(patches[y * GRID + x][channel] if inside else patches[0].new_zeros(()))
            hidden = linear(state, "projector.layers.0", torch.stack(joined))
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
            rows[-1].append(linear(state, "projector.layers.2", hidden))
    return rows


def image(state: State, views: list[list[list[torch.Tensor]]], wide: int, high: int) -> list[torch.Tensor]:
    """Tokens of one image from its global view and its tiles (row by row)."""
    whole, tiles = views[0], views[1:]
    out = []
    for row in whole:
        out += [*row, state["image_newline"]]
    out.append(state["view_seperator"])
    for row in range(high * SIDE):
        for column in range(wide * SIDE):
            tile = tiles[(row // SIDE) * wide + column // SIDE]
            out.append(tile[row % SIDE][column % SIDE])
        out.append(state["image_newline"])
    return out


# ---- language ----


def rms_norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean() + 1e-6) * state[f"{name}.weight"]


def rotate(x: torch.Tensor, position: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
    out = x.clone()
    for i, (one, other) in enumerate(pairs):
        angle = position * LANGUAGE["rope_theta"] ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[one], out[other] = x[one] * cos - x[other] * sin, x[one] * sin + x[other] * cos
    return out


def causal(queries: list, keys: list, values: list, scale: float) -> list[torch.Tensor]:
    out = []
    for t, query in enumerate(queries):
        weight = torch.stack([(query @ key) * scale for key in keys[: t + 1]]).softmax(0)
        out.append(sum(w * v for w, v in zip(weight, values, strict=False)))
    return out


def plain_attention(state: State, name: str, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rotary pairs are (i, i + d/2)."""
    width = HIDDEN // HEADS
    pairs = [(i, i + width // 2) for i in range(width // 2)]
    heads = []
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        q, k, v = ([linear(state, f"{name}.{kind}_proj", x)[part] for x in tokens] for kind in "qkv")
        q, k = ([rotate(x, t, pairs) for t, x in enumerate(xs)] for xs in (q, k))
        heads.append(causal(q, k, v, width**-0.5))
    return [linear(state, f"{name}.o_proj", torch.cat([head[t] for head in heads])) for t in range(len(tokens))]


def latent_attention(state: State, name: str, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rotary pairs are (2i, 2i + 1), on a part of the key that all heads share."""
    rank, rope, nope, value = 8, 4, 4, 8
    pairs = [(2 * i, 2 * i + 1) for i in range(rope // 2)]
    shared, latent = [], []
    for t, x in enumerate(tokens):
        both = linear(state, f"{name}.kv_a_proj_with_mqa", x)
        latent.append(linear(state, f"{name}.kv_b_proj", rms_norm(state, f"{name}.kv_a_layernorm", both[:rank])))
        shared.append(rotate(both[rank:], t, pairs))
    heads = []
    for head in range(HEADS):
        queries, keys, values = [], [], []
        for t, x in enumerate(tokens):
            q = linear(state, f"{name}.q_proj", x)[head * (nope + rope) : (head + 1) * (nope + rope)]
            queries.append(torch.cat([q[:nope], rotate(q[nope:], t, pairs)]))
            kv = latent[t][head * (nope + value) : (head + 1) * (nope + value)]
            keys.append(torch.cat([kv[:nope], shared[t]]))
            values.append(kv[nope:])
        heads.append(causal(queries, keys, values, (nope + rope) ** -0.5))
    return [linear(state, f"{name}.o_proj", torch.cat([head[t] for head in heads])) for t in range(len(tokens))]


def swiglu(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    gate = linear(state, f"{name}.gate_proj", x)
    return linear(state, f"{name}.down_proj", gate * torch.sigmoid(gate) * linear(state, f"{name}.up_proj", x))


def gates(state: State, name: str, x: torch.Tensor, kind: str) -> dict[int, torch.Tensor]:
    """Expert -> gate weight of one token."""
    scores = linear(state, f"{name}.gate", x)
    ranked = scores = torch.sigmoid(scores) if kind == "full" else torch.exp(scores) / torch.exp(scores).sum()
    if kind == "full":
        ranked = scores + state[f"{name}.gate.e_score_correction_bias"]
    chosen = sorted(range(EXPERTS), key=lambda e: -float(ranked[e]))[: LANGUAGE["num_experts_per_tok"]]
    total = sum(scores[e] for e in chosen) if kind == "full" else 1.0
    return {e: scores[e] / total * LANGUAGE["routed_scaling_factor"] for e in chosen}


def moe(state: State, name: str, x: torch.Tensor, kind: str) -> torch.Tensor:
    routed = sum(g * swiglu(state, f"{name}.experts.{e}", x) for e, g in gates(state, name, x, kind).items())
    return routed + swiglu(state, f"{name}.shared_experts", x)


def embeddings(state: State, item: dict) -> list[torch.Tensor]:
    dtype = state["image_newline"].dtype
    views = [projector(state, vision(state, torch.tensor(view, dtype=dtype))) for view in item["pixel_values"]]
    tokens, first = [], 0
    for wide, high in item["spatial_crop"]:
        tokens += image(state, views[first : first + 1 + wide * high], wide, high)
        first += 1 + wide * high
    queue = iter(tokens)
    table = state["language.model.embed_tokens.weight"]
    out = [next(queue) if token == IMAGE else table[token] for token in item["input_ids"]]
    assert next(queue, None) is None
    return out


def logits(state: State, item: dict, kind: str) -> torch.Tensor:
    """(T, vocabulary) of one record."""
    tokens = embeddings(state, item)
    attention = plain_attention if kind == "tiny" else latent_attention
    for i in range(LAYERS):
        layer = f"language.model.layers.{i}"
        normed = [rms_norm(state, f"{layer}.input_layernorm", x) for x in tokens]
        mixed = attention(state, f"{layer}.self_attn", normed)
        tokens = [x + m for x, m in zip(tokens, mixed, strict=True)]
        for t, x in enumerate(tokens):
            inner = rms_norm(state, f"{layer}.post_attention_layernorm", x)
            dense = i < LANGUAGE["first_k_dense_replace"]
            tokens[t] = x + (swiglu(state, f"{layer}.mlp", inner) if dense else moe(state, f"{layer}.mlp", inner, kind))
    normed = [rms_norm(state, "language.model.norm", x) for x in tokens]
    return torch.stack([linear(state, "language.lm_head", x) for x in normed])
