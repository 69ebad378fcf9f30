"""Peak memory of one micro-batch of the expert stream on one layer of OLMoE-1B-7B's size (random weights, Linux).

python benchmarks/olmoe_layer_memory.py --experts 64 --mode functorch
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, OlmoeConfig

import raptor_hf.models  # noqa: F401 (registers the classifier)
from raptor_hf.grad_sample import engine_gradients
from raptor_hf.moe import attach_adapters, stream_parameters


def memory(kind: str) -> float:
    """VmHWM or VmRSS in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) / 1024


def one_layer(experts: int):
    config = OlmoeConfig(
        vocab_size=100, hidden_size=2048, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=16, num_experts=experts, num_experts_per_tok=8, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    model = model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.uniform_(-0.03, 0.03)
    return attach_adapters(model, LoraConfig(r=128, lora_alpha=128), "last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--mode", default="functorch", choices=["functorch", "hooks"])
    parser.add_argument("--records", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    model = one_layer(args.experts)
    shape = (args.records, args.tokens)
    batch = {
        "input_ids": torch.randint(1, 100, shape),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.arange(args.records) % 2,
    }
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    resident, start = memory("VmRSS"), time.process_time()
    owner = torch.arange(args.records) % args.experts
    found = engine_gradients(model, batch, stream_parameters(model)["expert"], mode=args.mode, owner=owner)
    size = sum(value.numel() * value.element_size() for value in found.values()) / 2**20
    print(
        f"{args.experts} experts, {args.mode}: resident {resident:.0f} MB, peak above it "
        f"{memory('VmHWM') - resident:.0f} MB, gradients {size:.0f} MB, {time.process_time() - start:.1f} s of CPU"
    )


if __name__ == "__main__":
    main()
