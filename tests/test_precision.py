"""bfloat16 and activation checkpointing: what is computed in which type, and that the clipping norm holds in all."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from torch import nn

from raptor_hf.grad_sample import engine_gradients, model_loss, per_sample_gradients, residual_weighted
from raptor_hf.moe.lora import attach_adapters, stream_parameters
from raptor_hf.privacy.mechanism import ClippedSum
from tests.helpers import collate, tiny_model, tiny_records
from tests.trainer.build import fix_draws, make_config, make_trainer, perturb_adapters, values

RECORDS = tiny_records(6, seed=3, shortest=3)
LOSSES = {"shared": model_loss, "expert": residual_weighted(model_loss)}
CASES = ["autocast", "bf16 base"]
# bfloat16 has 8 bits: one rounding is 2^-9 relative, and a gradient goes through a few dozen of them
TOLERANCE = 0.1


def build(dtype=torch.float32, mode="functorch") -> nn.Module:
    torch.manual_seed(0)
    model = attach_adapters(tiny_model(dtype), make_config(grad_sample_mode=mode), "last")
    perturb_adapters(model, scale=0.1)
    return model.train()


def gradients(case: str, mode: str) -> dict[str, dict[str, torch.Tensor]]:
    """Per-sample gradients of both streams, formed."""
    model = build(torch.bfloat16 if case == "bf16 base" else torch.float32)
    batch = collate(RECORDS)
    owner = torch.tensor([0, 1, 2, 3, 0, 1])
    found = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        for stream, parameters in stream_parameters(model).items():
            found[stream] = per_sample_gradients(
                model, batch, parameters, mode=mode, loss_fn=LOSSES[stream],
                owner=owner if stream == "expert" else None,
            )  # fmt: skip
    return found


def flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.flatten(1).double() for g in grads.values()], dim=1)


@pytest.mark.parametrize("stream", ["shared", "expert"])
@pytest.mark.parametrize("mode", ["functorch", "hooks", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_float32_up_to_rounding(case, mode, stream):
    """The cosine with the float32 gradient: routing may flip for a token that is near a tie, which is legitimate."""
    found, wanted = flat(gradients(case, mode)[stream]), flat(gradients("float32", mode)[stream])
    used = wanted.norm(dim=1) > 1e-6
    cosine = torch.nn.functional.cosine_similarity(found[used], wanted[used])
    assert cosine.median() > 1 - TOLERANCE and used.any()
    ratio = found[used].norm(dim=1) / wanted[used].norm(dim=1)
    assert abs(float(ratio.median()) - 1) < TOLERANCE


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
@pytest.mark.parametrize("case", CASES)
def test_engines_agree(case, mode):
    found, wanted = gradients(case, mode), gradients(case, "reference")
    for stream in found:
        one, other = flat(found[stream]), flat(wanted[stream])
        assert float((one - other).norm() / other.norm()) < TOLERANCE


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", [1e-3, 0.05])
def test_a_clipped_sum_is_float64_and_never_above_the_norm(case, mode, norm):
    """The contribution of one record, for every record: at most C, in float64."""
    model = build(torch.bfloat16 if case == "bf16 base" else torch.float32)
    reached = []
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        for stream, parameters in stream_parameters(model).items():
            for record in RECORDS:
                owner = torch.tensor([1]) if stream == "expert" else None
                total = ClippedSum({n: p.shape for n, p in parameters.items()}, norm, num_owners=4 if owner is not None
                                   else None)  # fmt: skip
                total.add(engine_gradients(model, collate([record]), parameters, mode=mode, loss_fn=LOSSES[stream],
                                           owner=owner), owner)  # fmt: skip
                assert {value.dtype for value in total.sums.values()} == {torch.float64}
                reached.append(float(sum(v.double().square().sum() for v in total.sums.values()) ** 0.5))
    assert max(reached) <= norm
    assert max(reached) > 0.99 * norm  # some record is clipped, or the test shows nothing


@pytest.mark.parametrize("mode", ["functorch", "hooks", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_a_whole_run_keeps_adapters_gradients_and_noise_in_float32(case, mode):
    dtypes = {}

    def look(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dtypes.setdefault(group["stream"], set()).update({p.dtype, p.grad.dtype})

    model = tiny_model(torch.bfloat16 if case == "bf16 base" else torch.float32, dropout_rate=0.1)
    trainer = make_trainer(model=model, bf16=case == "autocast", grad_sample_mode=mode, max_steps=1)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trainer.create_optimizer().register_step_pre_hook(look)
    before = values(trainer.model)
    trainer.train()
    after = values(trainer.model)
    assert dtypes == {"shared": {torch.float32}, "expert": {torch.float32}}
    assert all(not torch.equal(before[s][n], after[s][n]) for s in before for n in before[s])
    current = dict(trainer.model.named_parameters())
    assert all(torch.equal(current[n], value) for n, value in frozen.items())
    wanted = torch.bfloat16 if case == "bf16 base" else torch.float32
    assert current["encoder.block.0.layer.0.SelfAttention.q.base_layer.weight"].dtype == wanted
    loss = trainer.evaluate(Dataset.from_list(tiny_records(6, seed=21)))["eval_loss"]
    assert loss == loss


# ---- Activation checkpointing ----


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("mode", ["hooks", "reference"])
def test_checkpointing_changes_no_gradient(mode):
    batch, owner = collate(RECORDS), torch.tensor([0, 1, 2, 3, 0, 1])
    plain, model = build(), checkpointed(build())
    runs = []
    model.encoder.block[2].layer[0].register_forward_pre_hook(lambda *_: runs.append(1))
    for stream in ("shared", "expert"):
        wanted, found = (
            per_sample_gradients(
                m, batch, stream_parameters(m)[stream], mode=mode, loss_fn=LOSSES[stream],
                owner=owner if stream == "expert" else None,
            )
            for m in (plain, model)
        )  # fmt: skip
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-7)
    calls = 1 if mode == "hooks" else len(RECORDS)
    assert len(runs) > 2 * calls  # it was computed again


@pytest.mark.parametrize("bf16", [False, True])
def test_training_with_checkpointing_is_training_without(bf16):
    """Same draws, no noise: the same adapters."""
    ends = []
    for on in (False, True):
        trainer = make_trainer(
            grad_sample_mode="hooks", activation_checkpointing=on, bf16=bf16, shared_noise_multiplier=0.0,
            expert_noise_multiplier=0.0,
        )  # fmt: skip
        perturb_adapters(trainer.model)
        fix_draws(trainer, [([0, 1, 2, 5], [3, 4]), ([6], [])]).train()
        ends.append(values(trainer.model))
        assert bool(trainer.model.is_gradient_checkpointing) == on
    for stream, tensors in ends[0].items():
        for name, value in tensors.items():
            torch.testing.assert_close(ends[1][stream][name], value, rtol=1e-5, atol=1e-6)
