"""The Switch classifier: full checkpoints, Auto classes, saving, pooling, losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, SwitchTransformersEncoderModel
from transformers import SwitchTransformersForConditionalGeneration as FullSwitch

from raptor_hf.models import SwitchTransformersForSequenceClassification as Classifier
from tests.helpers import LABELS, collate, randomise, tiny_config, tiny_model, tiny_records

RECORDS = tiny_records(5)
BATCH = collate(RECORDS, 14)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A full encoder-decoder checkpoint, as google/switch-base-8 is one."""
    directory = tmp_path_factory.mktemp("full")
    model = randomise(FullSwitch(tiny_config()), 4)
    model.save_pretrained(directory)
    return directory


def test_a_full_checkpoint_loads(checkpoint):
    model, info = Classifier.from_pretrained(checkpoint, num_labels=LABELS, output_loading_info=True)
    assert set(info["missing_keys"]) == {"score.weight", "score.bias"}
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    stock = FullSwitch.from_pretrained(checkpoint)
    assert torch.equal(model.shared.weight, stock.shared.weight)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    theirs = dict(stock.encoder.named_parameters())
    ours = dict(model.encoder.named_parameters())
    assert set(ours) == set(theirs) and all(torch.equal(p, theirs[n]) for n, p in ours.items())


def test_logits_are_the_head_on_the_mean_of_the_stock_encoder(checkpoint):
    model = randomise(Classifier.from_pretrained(checkpoint, num_labels=LABELS).eval(), 7)
    encoder = SwitchTransformersEncoderModel(tiny_config()).eval()
    encoder.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("score")}, strict=False)
    with torch.no_grad():
        found = model(**BATCH).logits
        for row, record in enumerate(RECORDS):
            hidden = encoder(input_ids=torch.tensor([record["input_ids"]])).last_hidden_state[0]
            mean = sum(hidden) / len(hidden)
            expected = model.score.weight @ mean + model.score.bias
            assert float((found[row] - expected).abs().max()) < 1e-4


def test_the_auto_class_knows_it(checkpoint, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=5).eval()
    assert type(model) is Classifier and model.score.out_features == 5
    assert type(AutoModelForSequenceClassification.from_config(tiny_config())) is Classifier
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(again(**BATCH).logits, model(**BATCH).logits) and again.config.num_labels == 5


def test_saving_and_loading_keeps_every_bit(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    again, info = Classifier.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(p, dict(again.named_parameters())[n]) for n, p in model.named_parameters())
    assert torch.equal(again.eval()(**BATCH).logits, model(**BATCH).logits)


def test_a_fresh_head_is_small(checkpoint):
    """Switch's own default for a linear layer has standard deviation 1."""
    torch.manual_seed(0)
    model = Classifier.from_pretrained(checkpoint, num_labels=50)
    assert 0.015 < float(model.score.weight.detach().std()) < 0.025 and not model.score.bias.any()
    assert 0.015 < float(Classifier(tiny_config(num_labels=50)).score.weight.detach().std()) < 0.025


@pytest.mark.parametrize(("width", "pad"), [(14, 0), (14, 9), (40, 3)])
def test_padding_does_not_matter(width, pad):
    model = tiny_model(torch.float64)
    batch = collate(RECORDS, width, pad)
    with torch.no_grad():
        together = model(**batch)
        for row, record in enumerate(RECORDS):
            alone = model(input_ids=torch.tensor([record["input_ids"]])).logits[0]
            assert float((together.logits[row] - alone).abs().max()) < 1e-5


def test_capacity_is_counted_in_each_record():
    model = tiny_model(expert_capacity=2)
    with torch.no_grad():
        together = model(**BATCH).logits
        for row, record in enumerate(RECORDS):
            alone = model(input_ids=torch.tensor([record["input_ids"]])).logits[0]
            assert float((together[row] - alone).abs().max()) < 1e-4
    assert not torch.allclose(together, tiny_model()(**BATCH).logits, atol=1e-3), "capacity 2 must drop something"


def test_losses():
    model = tiny_model()
    out = model(**BATCH)
    assert float(out.loss.detach()) == pytest.approx(float(F.cross_entropy(out.logits, BATCH["labels"]).detach()))
    regression = tiny_model(num_labels=1)
    target = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    out = regression(**{**BATCH, "labels": target})
    expected = F.mse_loss(out.logits.squeeze(-1), target)
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()))
    many = torch.rand(5, LABELS).round()
    out = tiny_model(problem_type="multi_label_classification")(**{**BATCH, "labels": many})
    expected = F.binary_cross_entropy_with_logits(out.logits, many)
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()))


def test_outputs_as_a_tuple():
    model = tiny_model()
    loss, logits = model(**BATCH, return_dict=False)
    assert torch.equal(logits, model(**BATCH).logits) and loss.ndim == 0
    (alone,) = model(BATCH["input_ids"], BATCH["attention_mask"], return_dict=False)
    assert torch.equal(alone, logits)


def test_embeddings_may_be_given_and_replaced():
    model = tiny_model()
    embedded = model.get_input_embeddings()(BATCH["input_ids"])
    given = model(inputs_embeds=embedded, attention_mask=BATCH["attention_mask"]).logits
    assert torch.equal(given, model(**BATCH).logits)
    model.resize_token_embeddings(70)
    assert model.shared.num_embeddings == model.encoder.embed_tokens.num_embeddings == 70
    assert torch.allclose(model(**BATCH).logits, given, atol=1e-6)


def test_the_batch_is_never_told_to_the_loss():
    """The Trainer would hand the count of the whole batch to a model that takes loss arguments."""
    assert Classifier.accepts_loss_kwargs is False


def test_there_is_no_load_balancing_loss():
    out = tiny_model()(**BATCH)
    assert set(out.keys()) == {"loss", "logits"}
