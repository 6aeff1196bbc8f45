"""Routers that are watched, balanced and made to follow the sampler."""

import pytest
import torch
from fixed_experience import FixedExperience, KeepGradient, train
from random_models import make_qwen3_moe

from trace_pl.errors import ConfigError
from trace_pl.models.experts import Experts, RouterWatch, routers
from trace_pl.models.loading import load_model
from trace_pl.models.logprobs import read_mask, sampled_logprobs
from trace_pl.training.row_plan import BatchPlan


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_qwen3_moe().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def batch():
    (found,) = FixedExperience(BatchPlan()).buffer
    return found


def read(model, batch):
    with torch.no_grad():
        return sampled_logprobs(model, batch.token_ids_BT, batch.mask_BT)


def choices(model, batch):
    """Record the experts of a forward by hand."""
    seen = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[2]))
        for router in routers(model)
    ]
    read(model, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1)


def test_replaying_its_own_choices_changes_nothing(moe_dir, batch):
    model = load_model(moe_dir)
    watch = RouterWatch(model)
    plain, own = read(model, batch), choices(model, batch)
    watch.begin(own)
    torch.testing.assert_close(read(model, batch), plain, atol=1e-6, rtol=0.0)
    watch.begin(torch.full_like(own, -1))
    torch.testing.assert_close(read(model, batch), plain, atol=0.0, rtol=0.0)


def test_replay_brings_a_perturbed_router_closer_to_the_sampler(moe_dir, batch):
    sampler, trainer = load_model(moe_dir), load_model(moe_dir)
    torch.manual_seed(1)
    for router in routers(trainer):
        router.weight.data += 0.05 * torch.randn_like(router.weight)
    watch = RouterWatch(trainer)
    expected, chosen = read(sampler, batch), choices(sampler, batch)
    flips = float((choices(trainer, batch) != chosen).float().mean())
    assert flips > 0.01
    free = (read(trainer, batch) - expected).abs().mean()
    watch.begin(chosen)
    followed = (read(trainer, batch) - expected).abs().mean()
    assert followed < 0.8 * free


def test_replay_holds_when_layers_are_computed_again_in_the_backward_pass(moe_dir, batch):
    gradients = []
    for again in (False, True):
        model = load_model(moe_dir).train()
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        watch = RouterWatch(model)
        own = choices(model, batch)
        watch.begin((own + 1) % 4)
        sampled_logprobs(model, batch.token_ids_BT, batch.mask_BT).sum().backward()
        watch.finish()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_load_is_counted_once_for_each_forward(moe_dir, batch):
    model = load_model(moe_dir)
    watch = RouterWatch(model)
    own = choices(model, batch)
    watch.begin(torch.zeros_like(own))  # every token to the first of four experts
    read(model, batch)
    watch.finish()
    assert watch.load.compute() == {"max_load": 4.0, "unused": 0.75}


def test_the_balance_loss_is_that_of_transformers_and_trains_the_routers(moe_dir, batch):
    model = load_model(moe_dir)
    watch = RouterWatch(model)
    watch.begin()
    read(model, batch)
    packed = batch.token_ids_BT[read_mask(batch.mask_BT)][None]
    alone = load_model(moe_dir)
    alone.set_attn_implementation("eager")
    # Rows read as one long row are other hidden states, so compare a single row.
    row = packed[:, :9]
    watch.begin()
    with torch.no_grad():
        model.get_decoder()(input_ids=row)
        expected = alone(row, output_router_logits=True).aux_loss
    torch.testing.assert_close(watch.finish(), expected, atol=1e-5, rtol=1e-5)
    plain, balanced = KeepGradient(), KeepGradient()
    train(moe_dir, callbacks=[plain])
    _, trainer = train(
        moe_dir, callbacks=[balanced], model={"experts": Experts(balance_weight=1.0)}
    )
    assert not torch.allclose(plain.gradient, balanced.gradient, atol=1e-4)
    assert trainer.callback_metrics["loss/expert_balance"] > 0.9
    assert trainer.callback_metrics["experts/max_load"] >= 1.0


def test_the_balance_loss_of_micro_batches_is_weighed_by_tokens(moe_dir):
    experts = {"experts": Experts(balance_weight=1.0)}
    _, whole = train(moe_dir, model=experts)
    _, parts = train(moe_dir, BatchPlan(tokens_per_forward=60), model=experts)
    found = [float(t.callback_metrics["loss/expert_balance"]) for t in (whole, parts)]
    assert found[1] == pytest.approx(found[0], rel=0.2)  # balance of parts is not that of all


def test_replay_without_a_record_is_refused(moe_dir):
    with pytest.raises(ConfigError, match="record_experts"):
        train(moe_dir, model={"experts": Experts(replay=True)})


def test_a_dense_model_has_no_expert_metrics(tiny_model_dir):
    _, trainer = train(tiny_model_dir)
    assert not [name for name in trainer.callback_metrics if "expert" in name]


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match="balance_weight"):
        Experts(balance_weight=-1.0)
