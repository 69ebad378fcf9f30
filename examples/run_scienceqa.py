"""Fine-tune a vision-language or a language model on ScienceQA with differential privacy; questions are records.

    python examples/run_scienceqa.py examples/configs/scienceqa_deepseek_vl2_tiny.yaml --target_epsilon 1

    python examples/run_scienceqa.py --model_name_or_path allenai/OLMoE-1B-7B-0924 --no_images --which text \
        --dataset_name derek-thomas/ScienceQA --target_epsilon 8 --expected_batch_size 1000 \
        --per_device_train_batch_size 8 --num_train_epochs 5 --output_dir outputs/scienceqa-olmoe

    python examples/run_scienceqa.py --tiny_random --problems_file problems.json --no_images \
        --target_epsilon 8 --expected_batch_size 64 --max_steps 10 --output_dir outputs/scienceqa-tiny

Settings come from a YAML file, flags, or both (flags win). The answer is the likeliest letter, before training and
after it. `--method monolithic_lora` is the baseline. The last sparse layer is protected: there is no public corpus of
the same form. A model without images (OLMoE, ...) is asked in text alone. `--tiny_random` makes a model of random
weights, which answers by chance and shows that all works; its vocabulary comes from the evaluation questions.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    set_seed,
)

from raptor_hf import RaptorConfig, RaptorTrainer
from raptor_hf.data import CompletionCollator, MultimodalCollator, Question, ScienceQADataset, load_scienceqa
from raptor_hf.data.scienceqa import letter_accuracy
from raptor_hf.models.deepseek_vl2 import (
    DeepseekVL2Config,
    DeepseekVL2ForConditionalGeneration,
    DeepseekVL2ImageProcessor,
    DeepseekVL2Processor,
)
from raptor_hf.scripts._config import parse_dataclasses

TINY_VIEW = 28  # pixels, 4 x 4 patches, 2 x 2 tokens


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or path of the base model."})
    tiny_random: bool = field(default=False, metadata={"help": "A tiny DeepSeek-VL2 of random weights instead."})
    dtype: str = field(default="float32", metadata={"help": "Type of the frozen base weights, e.g. bfloat16."})
    problems_file: str | None = field(default=None, metadata={"help": "The published problems.json."})
    image_root: str | None = field(default=None, metadata={"help": "Its images; default: `images` beside the file."})
    dataset_name: str | None = field(default=None, metadata={"help": "Or a dataset, e.g. derek-thomas/ScienceQA."})
    evaluation_split: str = field(default="validation", metadata={"help": "'validation' or 'test'."})
    images: bool = field(default=True, metadata={"help": "Show the images; --no_images asks in text alone."})
    which: str = field(default="all", metadata={"help": "'all' questions, with 'image', or of 'text' alone."})
    hint: bool = field(default=True, metadata={"help": "Put the hint into the prompt."})
    lecture: bool = field(default=False, metadata={"help": "Put the lecture into the prompt."})
    max_seq_length: int | None = field(default=None, metadata={"help": "Cut longer records; default: model's limit."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many questions."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many questions."})


def tiny_processor(questions: list[Question]) -> DeepseekVL2Processor:
    """With a vocabulary from the given questions. It is saved with the adapter: never give the training questions."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<pad>"]
    core.train_from_iterator(
        [question.text(lecture=True) for question in questions],
        trainers.BpeTrainer(
            vocab_size=2_000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2_048
    )
    sizes = [(w * TINY_VIEW, h * TINY_VIEW) for w, h in ((1, 1), (1, 2), (2, 1), (2, 2))]
    return DeepseekVL2Processor(DeepseekVL2ImageProcessor(sizes, patch_size=7, downsample_ratio=2), tokenizer)


def tiny_model(processor: DeepseekVL2Processor) -> DeepseekVL2ForConditionalGeneration:
    tokenizer = processor.tokenizer
    config = DeepseekVL2Config(
        language_config=dict(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=2,
            num_experts_per_tok=2, first_k_dense_replace=1, use_mla=False, kv_lora_rank=None, q_lora_rank=None,
            max_position_embeddings=2_048, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=dict(image_size=TINY_VIEW, patch_size=7, width=16, layers=2, heads=2, mlp_ratio=2.0),
        projector_config=dict(input_dim=16, n_embed=32, depth=2, downsample_ratio=2),
        candidate_resolutions=processor.image_processor.candidate_resolutions,
        image_token_id=processor.image_token_id,
    )  # fmt: skip
    return DeepseekVL2ForConditionalGeneration(config)


def load(args: ScriptArguments, evaluation: list[Question]) -> tuple[Any, Any]:
    """The model, and its processor (with images) or tokenizer (text alone)."""
    if args.tiny_random == (args.model_name_or_path is not None):
        raise SystemExit("Give --model_name_or_path or --tiny_random.")
    if args.tiny_random:
        processor = tiny_processor(evaluation)
        return tiny_model(processor), processor
    name = args.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype))
    if isinstance(model.config, DeepseekVL2Config):
        processor = DeepseekVL2Processor.from_pretrained(name)
        if model.config.image_token_id is None:
            model.config.image_token_id = processor.image_token_id
        if model.config.image_token_id != processor.image_token_id:
            raise SystemExit(f"{name}: model and tokenizer have other ids for {processor.image_token}.")
        return model, processor
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def main(argv: list[str] | None = None) -> dict[str, float]:
    arguments = sys.argv[1:] if argv is None else argv
    args, training_args = parse_dataclasses((ScriptArguments, RaptorConfig), arguments, prog="run_scienceqa.py")
    set_seed(training_args.seed)
    training_args.remove_unused_columns = False  # the collator needs `images`, which no model takes

    questions = load_scienceqa(
        problems_file=args.problems_file, image_root=args.image_root, dataset_name=args.dataset_name,
        images=args.images, which=args.which,
    )  # fmt: skip
    some, held_out = questions.get("train"), questions.get(args.evaluation_split)
    if not some or not held_out:
        raise SystemExit(f"There are no questions in the split 'train' or {args.evaluation_split!r}.")
    some, held_out = some[: args.max_train_samples], held_out[: args.max_eval_samples]
    model, processing_class = load(args, held_out)
    length = args.max_seq_length or model.config.max_position_embeddings
    train, evaluation = (
        ScienceQADataset(split, processing_class, hint=args.hint, lecture=args.lecture, max_length=length)
        for split in (some, held_out)
    )
    if hasattr(processing_class, "image_processor"):
        collator: Any = MultimodalCollator(processing_class, max_length=length)
    else:
        collator = CompletionCollator(processing_class.pad_token_id, max_length=length)

    trainer = RaptorTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=processing_class,
        data_collator=collator,
    )

    def accuracy() -> float:
        return letter_accuracy(model, evaluation, collator, batch_size=training_args.per_device_eval_batch_size)

    result = {"questions": len(held_out), "accuracy_before": accuracy()}
    result["accuracy_by_chance"] = sum(1 / len(question.choices) for question in held_out) / len(held_out)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    result["accuracy"] = accuracy()
    print(trainer.privacy_statement().verdict)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
