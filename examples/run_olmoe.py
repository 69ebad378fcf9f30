"""Fine-tune OLMoE (or any supported decoder) with differential privacy: classification, or prompts with completions.

Classification puts a linear head on the last token; with "completion" the model learns to write the completion after
the prompt, and multiple choice is answered by the likeliest choice. Two ways to own a record: "gate" adds up gate
weights, "vote" counts choices of experts (as in the paper's OLMoE runs).

    python examples/run_olmoe.py --model_name_or_path allenai/OLMoE-1B-7B-0924 --dataset_name nyu-mll/glue \
        --dataset_config_name sst2 --text_column sentence --ownership vote --lora_rank 128 --lora_alpha 128 \
        --target_epsilon 8 --expected_batch_size 1000 --per_device_train_batch_size 8 --num_train_epochs 5 \
        --output_dir outputs/olmoe-sst2

    python examples/run_olmoe.py --objective completion --train_file questions.jsonl --validation_file test.jsonl \
        --model_name_or_path allenai/OLMoE-1B-7B-0924 --target_epsilon 8 --output_dir outputs/olmoe-questions

Files for "completion" are JSON lines with `prompt` and `completion`, or `prompt`, `choices` and `answer` (an index).
`--model_name_or_path tiny-random` is a model of random weights and the bundled tokenizer: it shows that all works.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    OlmoeConfig,
    set_seed,
)

from raptor_hf import RaptorConfig, RaptorTrainer
from raptor_hf.assets import tiny_switch_path
from raptor_hf.data import (
    CompletionCollator,
    DataArguments,
    choose,
    classification_metrics,
    encode_completion,
    load_task,
    tokenize_task,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str = field(metadata={"help": "Hub id or path; 'tiny-random' has random weights."})
    objective: str = field(default="classification", metadata={"help": "'classification' or 'completion'."})
    dtype: str = field(default="float32", metadata={"help": "Type of the frozen base weights, e.g. bfloat16."})


def load_model(args: ScriptArguments, tokenizer: Any, **head: Any):
    auto = AutoModelForCausalLM if args.objective == "completion" else AutoModelForSequenceClassification
    if args.model_name_or_path != "tiny-random":
        model = auto.from_pretrained(args.model_name_or_path, dtype=getattr(torch, args.dtype), **head)
    else:
        config = OlmoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_experts=4,
            num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, **head,
        )  # fmt: skip
        model = auto.from_config(config)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model


def read_questions(path: str | None, limit: int | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    rows = load_dataset("json", data_files=path, split="train").to_list()[:limit]
    return [{**row, "completion": row.get("completion") or row["choices"][row["answer"]]} for row in rows]


def accuracy(model: Any, tokenizer: Any, questions: list[dict[str, Any]]) -> float:
    right = [choose(model, tokenizer, q["prompt"], q["choices"])[0] == q["answer"] for q in questions]
    return sum(right) / len(right)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = HfArgumentParser((ScriptArguments, DataArguments, RaptorConfig))
    args, data, training_args = parser.parse_args_into_dataclasses(argv)
    set_seed(training_args.seed)
    tiny = args.model_name_or_path == "tiny-random"
    tokenizer = AutoTokenizer.from_pretrained(tiny_switch_path() if tiny else args.model_name_or_path)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    questions: list[dict[str, Any]] = []
    public = metrics = None
    if args.objective == "completion":
        rows = read_questions(data.train_file, data.max_train_samples)
        questions = read_questions(data.validation_file, data.max_eval_samples)
        train, evaluation = (
            Dataset.from_list(
                [encode_completion(tokenizer, q["prompt"], q["completion"], max_length=data.max_seq_length) for q in qs]
            )
            for qs in (rows, questions)
        )
        model = load_model(args, tokenizer)
        collator: Any = CompletionCollator(tokenizer.pad_token_id, max_length=data.max_seq_length)
    else:
        task = tokenize_task(load_task(data), tokenizer, data.max_seq_length)
        train, evaluation, public = task.train, task.evaluation, task.public
        model = load_model(args, tokenizer, **task.head)
        collator, metrics = DataCollatorWithPadding(tokenizer), classification_metrics()

    trainer = RaptorTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=evaluation if evaluation is not None and len(evaluation) else None,
        public_dataset=public,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    print(json.dumps(json.loads(trainer.privacy_statement().to_json())["verdict"]))
    result = trainer.evaluate() if trainer.eval_dataset is not None else {}
    if any("choices" in question for question in questions):
        result["eval_accuracy"] = accuracy(model, tokenizer, [q for q in questions if "choices" in q])
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
