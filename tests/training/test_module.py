from functools import partial

import pytest
import torch
from fixed_experience import FixedExperience, KeepBatches, KeepGradient, train
from random_models import make_qwen3

from trace_pl.errors import ConfigError, NumericalError
from trace_pl.losses import KLPenalty, LossInputs, TokenClip
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.training.module import TraceModule
from trace_pl.training.row_plan import BatchPlan


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("tokens_per_forward", [100, 1])
def test_micro_batches_give_the_gradient_of_one_big_batch(
    tiny_model_dir, num_steps, tokens_per_forward
):
    # Three steps share ten rows, so with one row at a time two steps get a row of zero weight.
    whole, parts = KeepGradient(), KeepGradient()
    plan = BatchPlan(num_steps, tokens_per_forward=tokens_per_forward)
    assert FixedExperience(plan).buffer.micro_batches > 1
    train(tiny_model_dir, BatchPlan(num_steps), [whole])
    train(tiny_model_dir, plan, [parts])
    torch.testing.assert_close(whole.gradient, parts.gradient, rtol=1e-4, atol=1e-6)
    assert whole.gradient.abs().max() > 1e-3


def test_only_the_policy_learns_and_is_saved(tiny_model_dir):
    module, trainer = train(tiny_model_dir)
    assert all(name.startswith("policy.") for name in module.state_dict())
    optimized = {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]}
    assert optimized == {id(p) for p in module.policy.parameters()}
    with module.reading_reference() as reference:
        assert not torch.equal(module.policy.model.norm.weight, reference.model.norm.weight)
        assert not any(p.requires_grad for p in reference.parameters())


def test_the_checkpoint_of_one_run_is_the_reference_of_another(tiny_model_dir, tmp_path):
    module, trainer = train(tiny_model_dir)
    trainer.save_checkpoint(tmp_path / "earlier.ckpt", weights_only=True)
    later = TraceModule(str(tiny_model_dir), reference_name=str(tmp_path / "earlier.ckpt"))
    later.configure_model()
    with later.reading_reference() as reference:
        assert not any(p.requires_grad for p in reference.parameters())
        for name, trained in module.policy.state_dict().items():
            assert torch.equal(reference.state_dict()[name], trained)


def test_a_reference_that_is_no_checkpoint_is_refused(tiny_model_dir, tmp_path):
    path = tmp_path / "broken.ckpt"
    with pytest.raises(ConfigError, match=r"broken\.ckpt"):
        TraceModule(str(tiny_model_dir), reference_name=str(path))
    path.write_bytes(b"not a checkpoint")
    module = TraceModule(str(tiny_model_dir), reference_name=str(path))
    with pytest.raises(ConfigError, match=r"broken\.ckpt"):
        module.configure_model()


def test_what_the_optimizer_refuses_is_one_line_that_names_its_settings(tiny_model_dir):
    backwards = partial(torch.optim.AdamW, lr=-1.0)
    with pytest.raises(ConfigError, match=r"Invalid learning rate: -1\.0.*model\.optimizer"):
        train(tiny_model_dir, model={"optimizer": backwards})


def test_a_loss_that_asks_for_the_reference_is_given_its_log_probs(tiny_model_dir):
    # Policy and reference start as one model: the first step sees no divergence, the second does.
    loss = TokenClip(kl=KLPenalty(1.0))
    _, first = train(tiny_model_dir, model={"loss": loss})
    assert first.callback_metrics["loss/reference_kl"] == 0.0
    _, second = train(tiny_model_dir, model={"loss": loss}, epochs=2)
    assert second.callback_metrics["loss/reference_kl"] > 0.0


def test_observation_template_and_prompt_positions_get_exactly_zero_gradient(tiny_model_dir):
    module = TraceModule(str(tiny_model_dir))
    module.configure_model()
    (batch,) = FixedExperience(BatchPlan()).buffer
    rows = []
    head = module.policy.lm_head
    head.register_forward_hook(lambda layer, inputs, logits: rows.append(len(logits)))
    logprobs = sampled_logprobs(module.policy, batch.token_ids_BT, batch.mask_BT)
    # The head runs on the positions that predict a sampled token, and on no other.
    assert rows == [int(batch.mask_BT.sum())]
    logprobs.retain_grad()
    old = logprobs.detach()
    inputs = LossInputs(logprobs, old, old, batch.advantages_BT, batch.mask_BT, 1.0, 1.0)
    TokenClip()(inputs).loss.backward()
    assert logprobs.grad is not None
    assert torch.count_nonzero(logprobs.grad[~batch.mask_BT]) == 0
    assert torch.count_nonzero(logprobs.grad[batch.mask_BT]) == int(batch.mask_BT.sum())


def test_log_probs_equal_a_full_forward_of_each_row_alone(tiny_model_dir):
    module = TraceModule(str(tiny_model_dir))
    module.configure_model()
    buffer = FixedExperience(BatchPlan()).buffer
    (batch,) = buffer
    with torch.no_grad():
        packed = sampled_logprobs(module.policy, batch.token_ids_BT, batch.mask_BT)
        for row, rollout_id in enumerate(batch.rollout_ids):
            rollout = next(r for r in buffer.rollouts if r.id == rollout_id)
            logits = module.policy(rollout.token_ids[None]).logits[0].float().log_softmax(-1)
            for t in rollout.loss_mask.nonzero().flatten().tolist():
                expected = logits[t - 1, rollout.token_ids[t]]
                torch.testing.assert_close(packed[row, t], expected, atol=1e-5, rtol=0)


def test_old_log_probs_are_fixed_before_the_first_of_several_steps(tiny_model_dir):
    data = FixedExperience(BatchPlan(num_steps=2))
    module, _ = train(tiny_model_dir, BatchPlan(num_steps=2), data=data)
    with torch.no_grad(), module.reading_reference() as reference:
        for rollout in data.buffer.rollouts[:3]:
            ids, mask = rollout.token_ids[None], rollout.loss_mask[None]
            expected = sampled_logprobs(reference, ids, mask)[0]
            torch.testing.assert_close(
                data.buffer.old_logprobs[rollout.id], expected, atol=1e-5, rtol=0
            )


def test_strictly_on_policy_needs_no_second_forward(tiny_model_dir):
    data = FixedExperience(BatchPlan())
    train(tiny_model_dir, data=data)
    assert data.buffer.old_logprobs is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_what_is_read_beside_the_steps_has_their_precision(tiny_model_dir, precision):
    still = partial(torch.optim.SGD, lr=0.0)
    plan = BatchPlan(num_steps=1, num_passes=2)
    module, trainer = train(tiny_model_dir, plan, model={"optimizer": still}, precision=precision)
    with module.reading_reference():
        assert torch.is_autocast_enabled("cpu") == (precision == "bf16-mixed")
        assert torch.get_default_dtype() is torch.float32
    # The old log-probs are those of the training forward.
    assert trainer.callback_metrics["loss/policy_kl"] == pytest.approx(0.0, abs=1e-7)


def test_advantages_stay_float32_in_half_precision(tiny_model_dir):
    seen = KeepBatches()
    train(tiny_model_dir, callbacks=[seen], precision="bf16-true")
    assert seen.dtypes == {torch.float32}


def test_metrics_stay_float64_in_half_precision_and_enter_no_state(tiny_model_dir):
    module, _ = train(tiny_model_dir, precision="bf16-true")
    module._metrics.average({"x": torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64)})
    assert module._metrics.compute()["x"] == 1.0 + 2**-41
    assert not [name for name in module.state_dict() if "policy." not in name]


def test_an_epoch_that_is_cut_short_has_its_metrics(tiny_model_dir):
    _, trainer = train(tiny_model_dir, BatchPlan(num_steps=3), max_steps=1)
    assert {"loss/surprisal", "time/update_s"} <= trainer.callback_metrics.keys()


def test_a_non_finite_loss_skips_the_step_and_then_stops_the_run(tiny_model_dir):
    data = FixedExperience(BatchPlan(num_steps=3), poison=float("nan"))
    with pytest.raises(NumericalError, match="2 steps in a row"):
        train(tiny_model_dir, BatchPlan(num_steps=3), data=data)


@pytest.mark.parametrize("name", ["model_name", "reference_name"])
def test_a_checkpoint_of_another_model_or_reference_is_refused(tiny_model_dir, name):
    module = TraceModule(str(tiny_model_dir))
    with pytest.raises(ConfigError, match=f"model.{name} 'other'"):
        module.on_load_checkpoint({"global_step": 0, name: "other"})


def test_computing_activations_again_changes_no_gradient(tiny_model_dir):
    module = assert_same_gradient(tiny_model_dir, activation_checkpointing=True)
    assert module.policy.is_gradient_checkpointing


def test_compiling_changes_no_gradient(tmp_path):
    # One layer, since every graph costs seconds of compilation.
    make_qwen3(num_hidden_layers=1).save_pretrained(tmp_path)
    module = assert_same_gradient(tmp_path, compile_layers=True)
    assert module.policy.get_decoder()._compiled_call_impl is not None
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1


def assert_same_gradient(folder, **setting):
    plain, changed = KeepGradient(), KeepGradient()
    train(folder, callbacks=[plain])
    module, _ = train(folder, callbacks=[changed], model=setting)
    torch.testing.assert_close(changed.gradient, plain.gradient, rtol=1e-4, atol=1e-6)
    return module


def test_an_optimizer_with_a_state_of_8_bits_learns_and_its_checkpoint_is_safe_to_load(
    tiny_model_dir, tmp_path
):
    # Not among the developer's packages: once installed, it greets every start with warnings.
    optimizer = pytest.importorskip("torchao.optim").AdamW8bit
    module, trainer = train(tiny_model_dir, model={"optimizer": optimizer})
    with module.reading_reference() as reference:
        assert not torch.equal(module.policy.model.norm.weight, reference.model.norm.weight)
    states = trainer.optimizers[0].state.values()
    assert any(type(state["exp_avg"]).__name__ == "OptimState8bit" for state in states)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["state"]


def test_the_policys_weights_can_be_read_again_until_it_moves(tiny_model_dir, monkeypatch):
    module = TraceModule(str(tiny_model_dir))
    module.configure_model()
    tensors = module.policy_tensors()
    first, second = dict(tensors), dict(tensors)
    assert first.keys() == second.keys() == dict(module.policy.named_parameters()).keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.setattr(TraceModule, "policy_version", 1)
    with pytest.raises(AssertionError, match="moved on"):
        iter(tensors)
