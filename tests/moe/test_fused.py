"""Stacked experts: how close a choice was, chance switched off, and memory that does not grow with the experts."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raptor_hf.errors import UnsupportedModelError
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.moe import attach_adapters, find_moe_layout, owner_map, stream_parameters
from raptor_hf.moe.families import FUSED
from raptor_hf.moe.fused import read_fused_routing
from tests.families import FAMILIES, build, collate, records, shake

TOKENS = 400


def choose_by(router, logits):
    """Which experts a router chooses: the definition, on given logits, token by token."""
    tensors = dict([*router.named_buffers(), *router.named_parameters()])
    bias = next((v for n, v in tensors.items() if n.endswith("correction_bias")), None)
    softmax = hasattr(router, "moe_statics")  # Ernie's scores; DeepSeek-V3's and its kin's are sigmoids
    chosen = []
    for row in logits:
        scores = row
        if bias is not None:
            scores = (row.softmax(-1) if softmax else row.sigmoid()) + bias.reshape(-1).double()
        allowed = list(range(len(row)))
        if getattr(router, "topk_group", None) == 1 and getattr(router, "topk_method", "") != "greedy":
            halves = [allowed[: len(row) // 2], allowed[len(row) // 2 :]]
            # two groups of two experts: V3 adds a group's two best scores up, V2 takes the best
            values = [sum(scores[e] for e in h) if bias is not None else max(scores[e] for e in h) for h in halves]
            allowed = halves[int(values[1] > values[0])]
        chosen.append(sorted(sorted(allowed, key=lambda e: -float(scores[e]))[: router.top_k]))
    return chosen


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_gap_is_what_a_logit_may_move(family, top_k):
    """No logits nearer than half the gap choose otherwise; and the gap is not needlessly small."""
    changes = {"moe_k": top_k} if family == "ernie4_5_moe" else {"num_experts_per_tok": top_k}
    model = build(family, **changes)
    layer = find_moe_layout(model).sparse_layers[-1]
    block = model.get_submodule(layer.name)
    hidden = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))
    routing = read_fused_routing(block, hidden, FUSED[family][0])
    with torch.no_grad():
        logits = layer.router(hidden.view(-1, 16))[0].double()
    assert choose_by(layer.router, logits) == [sorted(row) for row in routing.index[0].tolist()]
    gap = routing.gap[0]
    finite = torch.where(gap.isinf(), torch.ones_like(gap), gap)
    assert bool((gap >= 0).all()) and float(finite.median()) > 1e-3
    signs = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) > 0.5).double() * 2 - 1
    moved = logits + 0.499 * finite.unsqueeze(-1) * signs
    assert choose_by(layer.router, moved) == choose_by(layer.router, logits)
    if family == "olmoe":
        worst = logits.clone()
        ranked = logits.argsort(dim=-1, descending=True)
        for row, order, g in zip(worst, ranked, gap, strict=True):
            row[order[top_k]] += 1.001 * g
        assert all(a != b for a, b in zip(choose_by(layer.router, worst), choose_by(layer.router, logits), strict=True))


def test_a_router_that_is_not_known_is_never_sure():
    model = build("deepseek_v3")
    block = model.get_submodule(find_moe_layout(model).sparse_layers[-1].name)
    hidden = torch.randn(1, TOKENS, 16, generator=torch.Generator().manual_seed(1))
    assert not read_fused_routing(block, hidden).gap.any()
    assert not read_fused_routing(block, hidden, "softmax").gap.all(), "where the choice is another: unsure"


def test_reading_leaves_the_block_as_it_was():
    model = build("qwen2_moe")
    block = model.get_submodule(find_moe_layout(model).sparse_layers[-1].name)
    hidden = torch.randn(2, 5, 16)
    expected = block(hidden)
    read_fused_routing(block, hidden, "logits")
    assert torch.equal(block(hidden), expected)
    attach_adapters(model, LoraConfig(r=2), "last")
    read_fused_routing(block, hidden, "logits")
    assert float((block(hidden) - expected).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_stay_in_evaluation_mode(family):
    model = attach_adapters(build(family), LoraConfig(r=2), "last").train()
    for layer in find_moe_layout(model).sparse_layers:
        block = model.get_submodule(layer.name)
        assert block.training and block.experts.training
        assert not any(module.training for module in block.get_submodule(layer.router_path).modules())


def test_jitter_is_switched_off_and_said():
    model = build("mixtral", router_jitter_noise=0.25).train()
    with pytest.warns(UserWarning, match=r"router jitter \(0\.25\)"):
        attach_adapters(model, LoraConfig(r=2), "last")
    batch = {key: value for key, value in collate(records(3)).items() if key != "labels"}
    model.train()
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    assert model.config.use_cache is False


@pytest.mark.parametrize("head", ["score", "lm"])
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "granitemoeshared"])
def test_gradient_checkpointing_changes_nothing(family, head):
    """The hooks engine computes every block twice, and notes each record once."""
    model = attach_adapters(build(family, head=head), LoraConfig(r=2), "first")
    shake(model)
    batch, owner = collate(records(4, causal=head == "lm")), torch.arange(4)

    def gradients():
        found = {}
        for stream, parameters in stream_parameters(model.train()).items():
            given = owner if stream == "expert" else None
            found.update(per_sample_gradients(model, batch, parameters, mode="hooks", owner=given))
        return found

    calls = []
    block = model.get_submodule(model.raptor_adapters.protected.name)
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients()  # the first one also checks the model's loss
    calls.clear()
    plain, once = gradients(), len(calls)
    model.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert len(calls) == 3 * once == 6, "blocks are computed again"
    assert all(float((checkpointed[name] - value).abs().max()) < 1e-6 for name, value in plain.items())
    assert max(float(value.abs().max()) for value in plain.values()) > 1e-2


class Largest(TorchDispatchMode):
    """The most elements in one tensor that an operation makes (views do not count)."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_memory_of_the_expert_stream_does_not_grow_with_the_experts(mode):
    """No tensor of a micro-batch has the experts as a dimension, but for the router's logits."""
    largest = {}
    for experts in (4, 64):
        model = build("olmoe", num_experts=experts, intermediate_size=32, num_hidden_layers=2)
        attach_adapters(model, LoraConfig(r=4), "last")
        batch, parameters = collate(records(6)), stream_parameters(model)["expert"]
        owner = torch.arange(6) % experts
        with Largest() as seen:
            found = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
        assert {tuple(v.shape) for v in found.values()} == {(6, 4, 16), (6, 64, 4), (6, 4, 32), (6, 16, 4)}
        largest[experts] = seen.elements
    assert largest[64] == largest[4] > 6 * 9 * 32


def test_a_router_that_chooses_an_expert_twice_is_refused():
    model = build("olmoe")
    layer = find_moe_layout(model).sparse_layers[0]
    owner_map(model, records(4), layer.index, data_collator=collate)

    def twice(_module, _args, out):
        logits, gate, index = out
        return logits, gate, index[:, :1].expand_as(index)

    layer.router.register_forward_hook(twice)
    with pytest.raises(UnsupportedModelError, match="one expert twice"):
        owner_map(model, records(4), layer.index, data_collator=collate)
