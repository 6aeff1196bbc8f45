import sys

import lightning
import pytest
import torch
from fixed_experience import FixedExperience, train
from random_models import make_qwen3_moe

from trace_pl.errors import ConfigError
from trace_pl.models.adapters import LoRA, adapter_off, merged_tensors
from trace_pl.models.loading import load_model
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.training.module import TraceModule
from trace_pl.training.row_plan import BatchPlan

ADAPTED = {"adapter": LoRA(rank=4)}


def read(model):
    (batch,) = FixedExperience(BatchPlan()).buffer
    with torch.no_grad():
        return sampled_logprobs(model, batch.token_ids_BT, batch.mask_BT)


def test_only_the_adapter_learns_and_the_reference_is_the_policy_without_it(tiny_model_dir):
    module, trainer = train(tiny_model_dir, model=ADAPTED)
    optimized = {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]}
    names = {name for name, p in module.policy.named_parameters() if id(p) in optimized}
    assert names == {name for name, _ in module.policy.named_parameters() if ".lora_" in name}
    plain = read(load_model(str(tiny_model_dir)))
    trained = read(module.policy)
    with module.reading_reference() as reference:
        torch.testing.assert_close(read(reference), plain, atol=0.0, rtol=0.0)
    assert not torch.allclose(trained, plain, atol=1e-4)
    torch.testing.assert_close(read(module.policy), trained, atol=0.0, rtol=0.0)


def test_a_fresh_adapter_changes_nothing(tiny_model_dir):
    model = load_model(str(tiny_model_dir))
    plain = read(model)
    LoRA().attach(model)
    torch.testing.assert_close(read(model), plain, atol=0.0, rtol=0.0)


def test_merged_weights_are_those_of_a_plain_model_that_computes_the_same(tiny_model_dir):
    module, _ = train(tiny_model_dir, model=ADAPTED)
    plain = load_model(str(tiny_model_dir))
    names = set(plain.state_dict()) - {"lm_head.weight"}  # tied
    merged = dict(merged_tensors(module.policy))
    assert merged.keys() == names
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(read(plain), read(module.policy), atol=1e-5, rtol=1e-5)


def test_a_mixture_is_adapted_outside_its_experts_and_routers():
    model = make_qwen3_moe()
    LoRA(rank=4).attach(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".self_attn." in name for name in trained)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    plain = make_qwen3_moe()
    unlike = read(plain)
    plain.load_state_dict(dict(merged_tensors(model)))
    assert not torch.allclose(read(plain), unlike, atol=1e-2)
    torch.testing.assert_close(read(plain), read(model), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="Fused experts"):
        LoRA(target_modules=["gate_proj", "up_proj"]).attach(make_qwen3_moe())


def test_a_checkpoint_holds_the_adapter_alone_and_brings_it_back(tiny_model_dir, tmp_path):
    module, trainer = train(tiny_model_dir, model=ADAPTED)
    path = tmp_path / "adapter.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved
    assert all(".lora_" in name for name in saved)
    resumed, _ = fit_from(path, tiny_model_dir, ADAPTED)
    torch.testing.assert_close(read(resumed.policy), read(module.policy), atol=0.0, rtol=0.0)


def fit_from(path, model_dir, model):
    """Load a checkpoint of one epoch into a run of one epoch: nothing is trained any more."""
    module = TraceModule(str(model_dir), **model)
    data = FixedExperience(BatchPlan())
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    return module, trainer


def test_the_checkpoint_of_another_adapter_is_refused(tiny_model_dir, tmp_path):
    _, trainer = train(tiny_model_dir, model=ADAPTED)
    path = tmp_path / "adapter.ckpt"
    trainer.save_checkpoint(path)
    other = {"adapter": LoRA(rank=4, target_modules=["q_proj"])}
    with pytest.raises(ConfigError, match=r"model\.adapter .* in the checkpoint"):
        fit_from(path, tiny_model_dir, other)


def test_the_adapter_is_on_again_after_an_error(tiny_model_dir):
    module, _ = train(tiny_model_dir, model=ADAPTED)
    before = read(module.policy)
    with pytest.raises(RuntimeError), adapter_off(module.policy):
        raise RuntimeError
    torch.testing.assert_close(read(module.policy), before, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}])
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        LoRA(**wrong)


def test_a_layer_that_is_not_there_is_refused(tiny_model_dir):
    with pytest.raises(ConfigError, match=r"target_modules.*no_such_layer"):
        LoRA(target_modules=["no_such_layer"]).attach(load_model(str(tiny_model_dir)))


def test_without_peft_the_error_says_what_to_install(tiny_model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"trace-pl\[lora\]"):
        LoRA().attach(load_model(str(tiny_model_dir)))
