"""Grouped products of experts (`moe.grouped`): the rule, and the same numbers as the loop and as a definition.

Everything here runs on a CPU, whose `grouped_mm` is PyTorch's own; the rule is asked about CUDA with its answers
replaced. That nothing asks the device for a value is seen with tensors that have none.
"""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification

from raptor_hf.errors import PrivacyConfigError
from raptor_hf.grad_sample import per_sample_gradients
from raptor_hf.moe import attach_adapters, grouped, stream_parameters
from raptor_hf.moe import stack as stack_module
from raptor_hf.moe.experts import AllAdapters, OwnerAdapters, routed_experts
from raptor_hf.moe.grouped import experts_backend, obstacle, runs_grouped
from raptor_hf.moe.stack import ExpertStack
from tests.families import build, collate, config_of, records, shake
from tests.helpers import tiny_model

E, H, F, R, RECORDS, TOKENS = 5, 16, 24, 8, 4, 7
UNUSED, SCALING = 3, 0.7
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2}


def gated(x):
    first, second = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


ACTIVATIONS = {"gated": (gated, 2 * F), "plain": (torch.nn.functional.gelu, F)}


class Layer:
    """Experts, and tokens for them: one expert gets none, some tokens have no expert, some records none of their owner.

    All numbers are such that both the dtype under test and float64 hold them.
    """

    def __init__(self, dtype, activation="gated", top_k=2, biased=True, adapted=True):
        self.dtype, self.top_k, self.biased, self.adapted = dtype, top_k, biased, adapted
        self.activation, wide = ACTIVATIONS[activation]
        generator = torch.Generator().manual_seed(top_k + 2 * biased)

        def draw(*shape, scale=1.0, to=dtype):
            return (torch.randn(*shape, generator=generator) * scale).to(to)

        self.weights = draw(E, wide, H, scale=H**-0.5), draw(E, H, F, scale=F**-0.5)
        self.biases = (draw(E, wide), draw(E, H)) if biased else None
        # adapters are float32 whatever the weights are
        self.adapters = (
            (draw(E, R, H, scale=0.3, to=torch.float32), draw(E, wide, R, scale=0.3, to=torch.float32)),
            (draw(E, R, F, scale=0.3, to=torch.float32), draw(E, H, R, scale=0.3, to=torch.float32)),
        )
        self.x, self.out_grad = draw(RECORDS, TOKENS, H), draw(RECORDS, TOKENS, H)
        self.gate = torch.rand(RECORDS, TOKENS, top_k, generator=generator).to(dtype)
        ranks = torch.rand(RECORDS, TOKENS, E, generator=generator)
        ranks[..., UNUSED] = -1
        self.index = ranks.argsort(-1, descending=True)[..., :top_k].contiguous()
        self.index[torch.rand(RECORDS, TOKENS, generator=generator) < 0.2] = E
        self.owner = torch.tensor([0, UNUSED, 1, 2])
        assert (self.index == E).any() and not (self.index == UNUSED).any()

    def stack(self, by_group: bool) -> ExpertStack:
        adapters = self.adapters if self.adapted else None
        return ExpertStack(*self.weights, self.activation, adapters, SCALING, self.biases, by_group)

    def reference(self):
        """y, gradients to x and the gates, and every record's gradients to all adapters (R, E, ..), in float64."""
        first, second = (w.double() for w in self.weights)
        biases = [
            torch.zeros(E, w.shape[1]) if self.biases is None else self.biases[i] for i, w in enumerate((first, second))
        ]
        leaves = [t.double().requires_grad_() for pair in self.adapters for t in pair]
        scaling = SCALING if self.adapted else 0.0
        x, gate = self.x.double().requires_grad_(), self.gate.double().requires_grad_()
        rows, by_record = [], []
        for i in range(RECORDS):
            tokens = []
            for t in range(TOKENS):
                y = torch.zeros(H, dtype=torch.float64)
                for k in range(self.top_k):
                    if (e := int(self.index[i, t, k])) == E:
                        continue
                    a1, b1, a2, b2 = (leaf[e] for leaf in leaves)
                    act = self.activation((first[e] + scaling * b1 @ a1) @ x[i, t] + biases[0][e].double())
                    y = y + gate[i, t, k] * ((second[e] + scaling * b2 @ a2) @ act + biases[1][e].double())
                tokens.append(y)
            rows.append(torch.stack(tokens))
            loss = (rows[-1] * self.out_grad[i].double()).sum()
            by_record.append(torch.autograd.grad(loss, leaves, retain_graph=True))
        y = torch.stack(rows)
        to_x, to_gate = torch.autograd.grad((y * self.out_grad.double()).sum(), (x, gate))
        return y.detach(), to_x, to_gate, [torch.stack(g) for g in zip(*by_record, strict=True)]

    def run(self, by_group: bool, wanted=None):
        """y, and the gradients to x, the gates and what `wanted` holds."""
        x, gate = self.x.clone().requires_grad_(), self.gate.clone().requires_grad_()
        leaves = [] if wanted is None else [*wanted.first, *wanted.second]
        y = routed_experts(x, self.index, gate, self.stack(by_group), wanted)
        return y.detach(), *torch.autograd.grad(y, [x, gate, *leaves], self.out_grad, allow_unused=True)

    def owned(self):
        a1, b1, a2, b2 = (t[self.owner].clone().requires_grad_() for pair in self.adapters for t in pair)
        return OwnerAdapters(self.owner, (a1, b1), (a2, b2))


def close(found, expected, dtype):
    assert float(expected.abs().max()) > 1e-2, "gradients of nothing would agree with anything"
    worst = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    assert worst < TOLERANCE[dtype], worst


LAYERS = list(product(ACTIVATIONS, (1, 2, 3), (True, False), (True, False)))


@pytest.mark.parametrize(("activation", "top_k", "biased", "adapted"), LAYERS)
@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_forward_and_backward_equal_the_definition(dtype, by_group, activation, top_k, biased, adapted):
    layer = Layer(dtype, activation, top_k, biased, adapted)
    y, to_x, to_gate, by_record = layer.reference()
    found = layer.run(by_group)
    for value, expected in zip(found, (y, to_x, to_gate), strict=True):
        close(value, expected, dtype)
    assert not found[0][(layer.index == E).all(-1)].any(), "a token without an expert adds nothing"
    assert not found[2][layer.index == E].any()
    if adapted:
        of_owner = layer.run(by_group, layer.owned())[3:]
        for value, expected in zip(of_owner, by_record, strict=True):
            close(value, expected[torch.arange(RECORDS), layer.owner], dtype)
            assert not value[layer.owner == UNUSED].any(), "exactly zero"


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_owners_gradients_alone(top_k, dtype):
    """As the expert stream takes them: nothing else is differentiated, and only the owner's pairs are looked at."""
    layer = Layer(dtype, top_k=top_k)
    expected = layer.reference()[3]
    for by_group in (True, False):
        wanted = layer.owned()
        y = routed_experts(layer.x, layer.index, layer.gate, layer.stack(by_group), wanted)
        found = torch.autograd.grad(y, [*wanted.first, *wanted.second], layer.out_grad)
        for value, all_experts in zip(found, expected, strict=True):
            close(value, all_experts[torch.arange(RECORDS), layer.owner], dtype)


@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize("owned", [True, False])
def test_under_vmap(by_group, owned):
    layer = Layer(torch.float32)
    stack, expected = layer.stack(by_group), layer.reference()
    leaves = [t for pair in layer.adapters for t in pair]
    if owned:
        leaves = [t[layer.owner] for t in leaves]

    def loss(values, x, gate, index, owner, weight):
        a1, b1, a2, b2 = (v[None] for v in values) if owned else values
        wanted = OwnerAdapters(owner[None], (a1, b1), (a2, b2)) if owned else AllAdapters((a1, b1), (a2, b2))
        return (routed_experts(x[None], index[None], gate[None], stack, wanted) * weight).sum()

    rows = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(0 if owned else None, 0, 0, 0, 0, 0))
    adapters, to_x, to_gate = rows(leaves, layer.x, layer.gate, layer.index, layer.owner, layer.out_grad)
    close(to_x, expected[1], torch.float32)
    close(to_gate, expected[2], torch.float32)
    for value, wide in zip(adapters, expected[3], strict=True):
        close(value, wide[torch.arange(RECORDS), layer.owner] if owned else wide, torch.float32)


@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
def test_noted_factors_multiply_to_the_gradients(by_group):
    """Adapters of all experts, as the hooks engine takes them."""
    layer, noted = Layer(torch.float32), []
    leaves = [t.requires_grad_() for pair in layer.adapters for t in pair]
    wanted = AllAdapters(*layer.adapters, lambda *args: noted.append(args))
    y = routed_experts(layer.x, layer.index, layer.gate, layer.stack(by_group), wanted)
    torch.autograd.grad(y, leaves, layer.out_grad, allow_unused=True)
    ((parts, spans, of, count),) = noted
    assert count == RECORDS and sum(end - start for _, start, end in spans) == len(of)
    for (left, right), expected in zip(parts, layer.reference()[3], strict=True):
        found = torch.zeros_like(expected)
        for e, start, end in spans:
            for u in range(start, end):
                found[of[u], e] += torch.outer(left[u], right[u]).double()
        close(found, expected, torch.float32)


@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
def test_cutting_into_pieces_changes_nothing_but_rounding(by_group, monkeypatch):
    from raptor_hf.moe import experts

    layer = Layer(torch.float32, top_k=2)
    whole = layer.run(by_group, layer.owned())
    for name in ("_PIECE", "_PIECE_BACK", "_BLOCK"):
        monkeypatch.setattr(experts, name, {"cpu": 3 * 2 * F * 4 if "PIECE" in name else 2 * 2 * F * 4})
    for value, expected in zip(layer.run(by_group, layer.owned()), whole, strict=True):
        close(value, expected, torch.float32)


class _Largest(TorchDispatchMode):
    """The largest tensor that an operation makes new, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, value.numel())
        return out


@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
def test_working_memory_is_bounded_however_the_tokens_fall(by_group, monkeypatch):
    """All tokens to one expert: no temporary of the backward pass is wider than a piece, or than the tokens."""
    from raptor_hf.moe import experts

    layer, rows = Layer(torch.float32, "gated", top_k=1), 5
    layer.index.fill_(1)
    for name in ("_PIECE", "_PIECE_BACK", "_BLOCK"):
        monkeypatch.setattr(experts, name, {"cpu": rows * 2 * F * 4})
    x, gate = layer.x.clone().requires_grad_(), layer.gate.clone().requires_grad_()
    y = routed_experts(x, layer.index, gate, layer.stack(by_group))
    with _Largest() as largest:
        torch.autograd.grad(y, [x, gate], layer.out_grad)
    assert largest.elements == x.numel() > rows * 2 * F


def test_what_is_kept_for_the_backward_pass():
    """The pre-activations alone have the pairs' width, and the inputs are kept where adapters need them."""
    layer = Layer(torch.float32, "gated", top_k=3)
    pairs = layer.index.numel()
    kept = {}
    for wanted in (None, layer.owned()):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # noqa: B023
            routed_experts(layer.x.clone().requires_grad_(), layer.index, layer.gate, layer.stack(False), wanted)
        kept[wanted is not None] = sorted(saved)
    assert kept[False] == sorted([pairs * 2 * F, pairs, pairs])
    assert layer.x.numel() in kept[True] and layer.x.numel() not in kept[False]


def test_no_pair_at_all():
    layer = Layer(torch.float32)
    layer.index.fill_(E)
    for by_group in (True, False):
        assert not any(value.any() for value in layer.run(by_group, layer.owned()))


@pytest.mark.parametrize("by_group", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize("owned", [True, False])
def test_only_the_loop_asks_the_device_for_values(by_group, owned, monkeypatch):
    """Tensors of the fake mode have shapes but no values, so that reading one is an error: on CUDA, a wait.

    The mode knows `grouped_mm` in bfloat16 only, as on CUDA only that has a kernel that does not wait.
    """

    def of_bfloat16(x, weights, group):
        return grouped.grouped_mm(x.bfloat16(), weights.bfloat16(), group).to(x.dtype)

    monkeypatch.setattr(stack_module, "grouped_mm", of_bfloat16)
    layer = Layer(torch.float32)
    leaves = [t for pair in layer.adapters for t in pair]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer.weights = tuple(mode.from_tensor(t) for t in layer.weights)
        layer.biases = tuple(mode.from_tensor(t) for t in layer.biases)
        layer.adapters = tuple(tuple(mode.from_tensor(t) for t in pair) for pair in layer.adapters)
        for name in ("x", "out_grad", "gate", "index", "owner"):
            setattr(layer, name, mode.from_tensor(getattr(layer, name)))
        if not by_group:
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                layer.run(by_group)
        else:
            found = layer.run(by_group, layer.owned() if owned else None)
            assert [tuple(g.shape) for g in found[3:]] == [(RECORDS, *t.shape[1:]) for t in leaves if owned]


# ---- Whole models ----

MODELS = ("olmoe", "gpt_oss", "qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("mode", ["functorch", "hooks"])
@pytest.mark.parametrize("stream", ["shared", "expert"])
def test_engines_with_grouped_products(stream, mode, family):
    model = attach_adapters(build(family), LoraConfig(r=4, lora_alpha=4), "last")
    shake(model)
    batch, parameters = collate(records(6)), stream_parameters(model)[stream]
    owner = torch.arange(6) % 4 if stream == "expert" else None
    found = {}
    for backend in ("loop", "grouped_mm"):
        with experts_backend(backend):
            found[backend] = per_sample_gradients(model, batch, parameters, mode=mode, owner=owner)
    assert any(float(value.abs().max()) > 1e-2 for value in found["loop"].values())
    for name, value in found["loop"].items():
        assert torch.allclose(found["grouped_mm"][name], value, rtol=1e-3, atol=1e-5 * float(value.abs().max() + 1)), (
            name
        )


# ---- The rule ----


def operands(dtype=torch.float32, hidden=16, rank=4):
    return torch.empty(3, 8, hidden, dtype=dtype), torch.empty(3, hidden, 8, dtype=dtype), torch.empty(3, rank, hidden)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (operands(), None),
        (operands(torch.bfloat16), None),
        (operands(torch.float16), None),
        (operands(torch.float64), "float64"),
        (operands(rank=3), "multiples"),
        (operands(torch.bfloat16, hidden=20), "multiples"),
        ((torch.empty(3, 8, 32)[..., ::2],), "laid out"),
        ((torch.empty(3 * 8 * 16 + 1)[1:].view(3, 8, 16),), "laid out"),
        ((torch.empty(3, 16, 8).mT,), None),
    ],
)
def test_what_stands_in_the_way(given, why):
    found = obstacle(given)
    assert found is None if why is None else why in found


@pytest.mark.parametrize(("given", "why"), [(operands(), None), (operands(rank=3), "no")])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm", None])
@pytest.mark.parametrize("able", [True, False])
def test_the_rule(able, implementation, given, why, monkeypatch):
    monkeypatch.setattr(grouped, "_able", lambda _device: able)
    assert runs_grouped(given, implementation) == (able and implementation == "grouped_mm" and why is None)
    assert not runs_grouped(None, implementation), "separate weights"
    with experts_backend("loop"):
        assert not runs_grouped(given, implementation)


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_which_devices(capability, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert grouped._able(torch.device("cuda", 0)) == able
    assert not grouped._able(torch.device("cpu"))


@pytest.mark.parametrize("given", [None, operands(torch.float64)])
def test_a_forced_choice_that_cannot_be_is_refused(given):
    with experts_backend("grouped_mm"), pytest.raises(ValueError, match="cannot be used"):
        runs_grouped(given, "grouped_mm")
    with pytest.raises(PrivacyConfigError), experts_backend("batched_mm"):
        pass


def test_the_models_setting_is_what_the_rule_sees(monkeypatch):
    monkeypatch.setattr(grouped, "_able", lambda _device: True)
    model = attach_adapters(build("olmoe"), LoraConfig(r=4, lora_alpha=4), "last")
    block = next(m for m in model.modules() if hasattr(m, "stacked_weights"))
    assert not block.stack().grouped, "this model was set to eager"
    model.model.set_experts_implementation("grouped_mm")
    assert block.stack().grouped
    stacked = block.stack()
    assert stacked.first.data_ptr() == block.experts.gate_up_proj.data_ptr(), "nothing is copied"


def test_the_setting_can_be_given_to_raptors_own_classifiers():
    config = config_of("olmoe")
    for given, expected in ((None, "grouped_mm"), ("eager", "eager"), ("grouped_mm", "grouped_mm")):
        model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config), experts_implementation=given)
        assert model.config._experts_implementation == expected
    model.set_experts_implementation("eager")
    assert {m.config._experts_implementation for m in model.modules() if hasattr(m, "has_gate")} == {"eager"}


def test_switch_is_looped_over(monkeypatch):
    monkeypatch.setattr(grouped, "_able", lambda _device: True)
    model = attach_adapters(tiny_model(torch.float32), LoraConfig(r=4, lora_alpha=4), 3)
    block = next(m for m in model.modules() if hasattr(m, "stacked_weights"))
    assert not block.stack().grouped
