"""Every check and probe, each with a model or collator that is broken in just that way, and one that is not."""

from __future__ import annotations

import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn

from raptor_hf import RaptorTrainer
from raptor_hf.checks import check_model
from raptor_hf.errors import Finding, PrivacyConfigError, UnsupportedModelError
from raptor_hf.moe.lora import attach_adapters
from raptor_hf.moe.weights import train_weights
from raptor_hf.probes import probe_collator, probe_model
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.build import assert_refused, assert_refused_before_training, make_config, make_trainer

RECORDS = tiny_records(3, seed=5, shortest=4)
ENGINES = ["functorch", "hooks", "reference"]


def find(model, mode="functorch", records=(), collator=collate) -> tuple[Finding, ...]:
    return check_model(model, records=records, collate=collator, mode=mode, raise_on_error=False).findings


def only(findings, severity: str, *words: str) -> Finding:
    """The one finding, in three parts, with all `words`."""
    assert len(findings) == 1, [finding.what for finding in findings]
    (finding,) = findings
    assert finding.severity == severity
    assert all(len(part.split()) >= 3 for part in (finding.what, finding.why, finding.instead))
    text = str(finding.error()).lower()
    assert all(word.lower() in text for word in words), text
    return finding


def attached(model=None):
    return attach_adapters(tiny_model() if model is None else model, make_config(), "last")


# ---- A good model ----


@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_good_model_passes(mode, dtype):
    assert find(tiny_model(dtype, dropout_rate=0.0), mode, RECORDS) == ()


def test_dropout_between_records_is_no_leak():
    """Dropout outside the experts is drawn from secret randomness: the probes switch it off, and nothing else."""
    model = attached(tiny_model(dropout_rate=0.5))
    assert find(model, "hooks", RECORDS) == ()
    assert model.encoder.dropout.p == 0.5 and not model.training


def test_a_check_changes_nothing():
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert check_model(model, records=RECORDS, collate=collate).layout.sparse_layers
    assert torch.equal(torch.get_rng_state(), state)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert getattr(model, "raptor_adapters", None) is None


# ---- Structure ----


class Head(nn.Module):
    """A head with `middle` in front of the linear layer."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.middle, self.out = middle, nn.Linear(16, 3)

    @property
    def weight(self):
        return self.out.weight

    def forward(self, x):
        return self.out(self.middle(x))


def with_head(middle: nn.Module):
    model = tiny_model()
    model.score = Head(middle)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_normalisation(frozen):
    """Frozen weights do not help: in train mode its statistics are those of the batch."""
    model = with_head(nn.BatchNorm1d(16))
    model.score.middle.requires_grad_(not frozen)
    only(find(model), "error", "batch normalisation", "score.middle")
    with pytest.raises(UnsupportedModelError, match="batch normalisation"):
        check_model(model)


def test_opacus_says_what_it_sees(monkeypatch):
    from raptor_hf import checks

    monkeypatch.setattr(checks, "_normalisation", lambda model: [])
    only(find(with_head(nn.BatchNorm1d(16))), "error", "ModuleValidator", "BatchNorm")
    assert find(with_head(nn.LayerNorm(16))) == ()


@pytest.mark.parametrize("flag", ["output_router_logits", "add_router_probs"])
@pytest.mark.parametrize("part", ["", "encoder"])
def test_an_auxiliary_loss(flag, part):
    model = tiny_model()
    setattr(model.get_submodule(part).config, flag, True)
    only(find(model), "error", flag, "load-balancing")


def test_a_trainable_router():
    model = attached()
    assert find(model) == ()
    model.encoder.block[1].layer[1].mlp.router.classifier.weight.requires_grad_(True)
    only(find(model), "error", "router", "freeze")


def test_adapters_in_a_narrow_type():
    only(find(attached().to(torch.bfloat16)), "error", "not float32", "attach_adapters")
    assert find(attached(tiny_model(torch.bfloat16))) == ()


def test_jitter_and_dropout_inside_experts_warn_first_and_are_errors_later():
    assert find(tiny_model(dropout_rate=0.1))[0].severity == "warning"
    only(find(tiny_model(router_jitter_noise=0.1)), "warning", "jitter")
    model = attached()
    block = model.encoder.block[3].layer[1].mlp
    block.experts["expert_2"].dropout.p = 0.1
    only(find(model), "error", "dropout inside the routed experts", "expert_2")
    block.experts["expert_2"].dropout.p = 0.0
    block.router.jitter_noise = 0.1
    only(find(model), "error", "jitter")


def test_tied_trainable_weights():
    model = attached()
    query = model.encoder.block[0].layer[0].SelfAttention
    query.k.lora_A = query.q.lora_A
    only(find(model), "error", "tied", "tie_word_embeddings")
    model = tiny_model()
    model.other = model.score  # not attached yet: what matters is that the head will be trained
    assert any("tied" in finding.what and "score" in finding.what for finding in find(model))


def test_a_dense_model():
    config = tiny_model().config
    config.model_type = "bert"
    finding = only(find(_Dense(config)), "error", "dense")
    assert finding.kind is UnsupportedModelError


class _Dense(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config


# ---- Leaks ----


class BatchMean(nn.Module):
    """Takes the mean of the records off each: a leak without a parameter, a buffer or a name."""

    def forward(self, x):
        return x - 0.1 * x.mean(0, keepdim=True)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.shape[0]
        return x


class PaddingSum(nn.Module):
    """In front of the pooling: everything, padding too, moves every token a little."""

    def forward(self, x):
        return x + 0.05 * x.sum(1, keepdim=True)


def put(model, middle):
    """Put `middle` behind the encoder's last norm, where tensors are (records, tokens, hidden)."""
    norm = model.encoder.final_layer_norm
    model.encoder.final_layer_norm = nn.Sequential(norm, middle)
    return model


@pytest.mark.parametrize("mode", ENGINES)
@pytest.mark.parametrize("middle", [BatchMean(), nn.Sequential(nn.Identity(), BatchMean())], ids=["plain", "nested"])
def test_a_layer_that_mixes_records(mode, middle):
    findings = probe_model(attached(put(tiny_model(), middle)), collate(RECORDS), mode=mode)
    text = " ".join(finding.what for finding in findings)
    assert "other records" in text and "logits" in text
    # vmap shows a layer one record at a time: its gradients are right, but owners come from batched passes
    assert ("gradient (shared stream)" in text) == (mode == "hooks")
    assert all(finding.severity == "error" for finding in findings)


def test_expert_capacity_shared_over_the_batch():
    """The way routers used to count: a token's place in its expert's queue runs on over the records."""
    model = attached(tiny_model(expert_capacity=3))
    block = model.encoder.block[1].layer[1].mlp
    route = block.route

    def over_the_batch(hidden):
        index, gate = route(hidden)
        probs = torch.softmax(nn.functional.linear(hidden, block.router.classifier.weight), -1)
        top = probs.argmax(-1).flatten()
        chosen = top[:, None] == torch.arange(block.num_experts)
        # the neighbours come first in the queue
        place = (chosen.flip(0).long().cumsum(0).flip(0) * chosen).sum(-1)
        kept = torch.where(place <= 3, top, block.num_experts)
        return kept.view_as(index), gate

    assert probe_model(model, collate(RECORDS), mode="hooks") == []
    block.route = over_the_batch
    findings = probe_model(model, collate(RECORDS), mode="hooks")
    assert any("other records" in finding.what for finding in findings)


@pytest.mark.parametrize("mode", ENGINES)
def test_padding_that_is_not_masked(mode):
    findings = probe_model(attached(put(tiny_model(), PaddingSum())), collate(RECORDS), mode=mode)
    assert any("padding" in finding.what for finding in findings)
    alone = probe_model(attached(put(tiny_model(), PaddingSum())), collate(RECORDS[:1]), mode=mode)
    assert any("padding" in finding.what for finding in alone)


def test_a_parameter_that_a_forward_pass_changes():
    """`max_norm` shortens the rows of a trained table that a record looks up, without noise."""
    model = train_weights(tiny_model(), "full", "last")
    assert probe_model(model, collate(RECORDS), mode="reference") == []
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim == model.config.d_model:
            module.max_norm = 0.05
    finding = only(probe_model(model, collate(RECORDS), mode="reference"), "error", "writes to the parameter")
    assert "shared.weight" in finding.what and "max_norm" in finding.instead


@pytest.mark.parametrize("mode", ["hooks", "reference"])
def test_a_buffer_that_a_forward_pass_changes(mode):
    model = attached(put(tiny_model(), Counter()))
    finding = only(probe_model(model, collate(RECORDS), mode=mode), "error", "buffer", "seen")
    assert finding.kind is UnsupportedModelError
    assert float(model.encoder.final_layer_norm[1].seen) == 0  # as it was


def test_an_engine_that_fails_is_a_finding():
    class Numbers(nn.Module):
        def forward(self, x):
            return x * float(x.detach().abs().mean() > -1)  # `.item()` has no batching rule

    model = attached(put(tiny_model(), Numbers()))
    only(probe_model(model, collate(RECORDS)), "error", "functorch", "fails")
    assert not any("fails" in f.what for f in probe_model(model, collate(RECORDS), mode="hooks"))


@pytest.mark.parametrize("mode", ["hooks", "reference"])
def test_adapters_that_no_gradient_reaches(mode):
    """Reentrant checkpointing switched on by hand: its inputs need no gradient, so nothing inside gets one."""
    model = attached()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    only(probe_model(model, collate(RECORDS), mode=mode), "error", "no gradient reaches", "reentrant")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert probe_model(model, collate(RECORDS), mode=mode) == []


# ---- Collators ----


def mixing(records):
    """Mixes the labels of neighbours."""
    batch = collate(records)
    return {**batch, "labels": 0.5 * (batch["labels"] + batch["labels"].flip(0))}


def cutting(records):
    """Cuts all records to the shortest."""
    shortest = min(len(record["input_ids"]) for record in records)
    return {k: v[:, :shortest] if v.dim() == 2 else v for k, v in collate(records).items()}


def reordering(records):
    return collate(sorted(records, key=lambda record: len(record["input_ids"])))


def packing(records):
    return {k: v.reshape(1, -1) if v.dim() == 2 else v[:1] for k, v in collate(records).items()}


def dropping(records):
    return collate(records[:2])


def masking(records):
    """Masks tokens at random, as for masked language modelling: where depends on the place in the batch."""
    batch = collate(records)
    return {**batch, "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.3, 1, batch["input_ids"])}


def contrasting(records):
    """Pads a record with its neighbour's tokens."""
    batch = collate(records)
    ids = torch.where(batch["attention_mask"] == 0, batch["input_ids"].flip(0), batch["input_ids"])
    return {**batch, "input_ids": ids}


@pytest.mark.parametrize("collator", [mixing, cutting, reordering, packing, dropping, masking, contrasting])
def test_a_collator_that_does_not_keep_records_apart(collator):
    records = tiny_records(3, seed=8, shortest=3)[::-1]
    assert len({len(record["input_ids"]) for record in records}) == 3
    only(probe_collator(collator, records), "error", "collator")
    only(find(tiny_model(), records=records, collator=collator), "error", "collator")
    trainer = make_trainer([*records, *tiny_records(12)])
    trainer._collate = collator
    assert_refused_before_training(trainer, PrivacyConfigError, "collator")


@pytest.mark.parametrize("width", [0, 20], ids=["longest", "fixed width"])
def test_a_collator_that_pads_passes(width):
    assert probe_collator(lambda records: collate(records, width=width), RECORDS) == []
    assert probe_collator(collate, RECORDS[:1]) == []


def test_the_collator_of_a_tokenizer_passes():
    from transformers import AutoTokenizer, DataCollatorWithPadding

    from raptor_hf.assets import tiny_switch_path

    tokenizer = AutoTokenizer.from_pretrained(tiny_switch_path())
    for multiple in (None, 8):
        assert probe_collator(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple), RECORDS) == []


# ---- The trainer ----


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_the_trainer_probes_before_training(mode):
    trainer = make_trainer(model=put(tiny_model(), BatchMean()), grad_sample_mode=mode)
    assert_refused_before_training(trainer, UnsupportedModelError, "other records")
    trainer = make_trainer(model=put(tiny_model(), Counter()), grad_sample_mode="hooks")
    assert_refused_before_training(trainer, UnsupportedModelError, "buffer")


def test_a_message_tells_nothing_of_the_records():
    trainer = make_trainer(model=put(tiny_model(), BatchMean()))
    message = assert_refused(trainer.train, UnsupportedModelError, "other records")
    assert not any(character.isdigit() for character in message)


@pytest.mark.parametrize("name", ["_get_train_sampler", "get_train_dataloader", "get_batch_samples", "training_step"])
def test_a_sampler_of_ones_own(name):
    """The way to pass a sampler to a `Trainer` is to override the method that makes it."""
    own = type("Own", (RaptorTrainer,), {name: lambda self, *args: None})
    below = type("Below", (own,), {})
    data = Dataset.from_list(RECORDS * 4)
    for cls in (own, below):
        assert_refused(lambda cls=cls: cls(tiny_model(), make_config(), train_dataset=data), PrivacyConfigError, name)
    fine = type("Fine", (RaptorTrainer,), {"log": lambda self, *args, **kwargs: None})
    assert fine(tiny_model(), make_config(), train_dataset=data, data_collator=collate)


def test_a_loader_with_a_sampler_of_its_own():
    data = Dataset.from_list(RECORDS * 4)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * len(data), 4)
    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=4)
    assert_refused(lambda: make_trainer(train_dataset=loader), PrivacyConfigError, "Poisson", "map-style")


@pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering"])
def test_a_head_of_another_task_is_refused(task):
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    model = getattr(transformers, f"MixtralFor{task}")(config)
    with pytest.raises(UnsupportedModelError, match=f"For{task}"):
        check_model(model)
