"""`trace-pl export`: what it writes loads elsewhere and says the same."""

import json
import resource
import shutil
import subprocess
import sys
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from cli_runner import run_cli
from fixed_experience import train
from peft import PeftModel
from random_models import make_llama, make_qwen3, make_qwen3_moe
from safetensors.torch import load_file
from torch.distributed.checkpoint import save
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
)

from trace_pl.engines.vllm import engine as vllm_engine
from trace_pl.engines.vllm.engine import VLLMEngine
from trace_pl.engines.vllm.setup import start_vllm
from trace_pl.models.adapters import LoRA
from trace_pl.models.checkpoint import write_meta
from trace_pl.models.loading import load_model
from trace_pl.rollout.parity import check_parity

MEMORY = Path(__file__).parents[1] / "anonymous_memory.py"
IDS = list(range(3, 60))


def trained(model_dir, folder, **model):
    """Train for one epoch and return the policy and its checkpoint."""
    module, trainer = train(model_dir, model=model)
    path = folder / "run" / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(path)
    return module.policy, path


def read(model, ids=IDS):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def in_transformers(folder, dtype="auto"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def check_in_vllm(folder, policy, adapter=None):
    """Raise unless vLLM says the same of a folder, or of one with an adapter beside it."""
    engine = VLLMEngine(str(folder), 256, max_num_seqs=4, kv_cache_gib=0.125, num_threads=1)
    if adapter is not None:
        from vllm.lora.request import LoRARequest

        add = engine._engine.add_request
        engine._engine.add_request = partial(add, lora_request=LoRARequest("a", 1, str(adapter)))
    check_parity(engine, policy, IDS, tolerance=1e-4)
    engine.close()


def test_a_trained_policy_says_the_same_in_transformers_and_vllm(tiny_model_dir, tmp_path):
    policy, checkpoint = trained(tiny_model_dir, tmp_path)
    (tmp_path / "run" / "config.yaml").write_text("seed_everything: 7\n")
    folder = tmp_path / "exported"
    assert run_cli("export", str(checkpoint), str(folder)) == 0
    torch.testing.assert_close(read(in_transformers(folder)), read(policy), atol=0.0, rtol=0.0)
    assert not torch.allclose(read(policy), read(in_transformers(tiny_model_dir)), atol=1e-3)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    card = (folder / "README.md").read_text()
    assert "after 1 updates" in card
    assert "seed_everything: 7" in card
    assert "loss/policy_loss" in card
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (folder, *folder.iterdir()))
    check_in_vllm(folder, policy)


@pytest.mark.parametrize("make", [make_llama, make_qwen3, make_qwen3_moe])
def test_every_kind_of_model_goes_back_to_its_own_names_shard_by_shard(
    make, tiny_model_dir, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(tiny_model_dir, source)  # for its tokenizer
    (source / "model.safetensors").unlink()
    make(**({"vocab_size": 512} if make is make_qwen3 else {})).save_pretrained(source)
    GenerationConfig(eos_token_id=[2, 5]).save_pretrained(source)
    policy, checkpoint = (
        trained(source, tmp_path) if make is make_qwen3 else fresh(source, tmp_path)
    )
    folder = tmp_path / "exported"
    assert run_cli("export", str(checkpoint), str(folder), "--max_shard_size=20KB") == 0
    assert len(list(folder.glob("*.safetensors"))) > 1
    exported = in_transformers(folder)
    torch.testing.assert_close(read(exported), read(policy), atol=1e-6, rtol=0.0)
    assert exported.generation_config.eos_token_id == [2, 5]


def fresh(model_dir, folder):
    """Return a model as it was saved, and a checkpoint with its weights."""
    policy = load_model(str(model_dir))
    path = folder / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": weights_of(policy), **about(model_dir)}, path)
    return policy, path


def fresh_adapter(model_dir, path):
    """Write a checkpoint with a random adapter of a model and return the adapted model."""
    policy, adapter = load_model(str(model_dir)).eval(), LoRA(rank=4)
    adapter.attach(policy)
    torch.manual_seed(1)
    for name, tensor in policy.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(tensor, std=0.1)
    weights = {name: t for name, t in weights_of(policy).items() if ".lora_" in name}
    saved = {"state_dict": weights, "adapter": asdict(adapter), **about(model_dir)}
    torch.save(saved, path)
    return policy


def weights_of(policy):
    return {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}


def about(model_dir):
    names = {"model_name": str(model_dir), "reference_name": str(model_dir)}
    return {**names, "metrics": {}, "global_step": 0}


def test_an_adapter_is_merged_or_written_as_it_is(tiny_model_dir, tmp_path, monkeypatch):
    policy, checkpoint = trained(tiny_model_dir, tmp_path, adapter=LoRA(rank=4))
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    assert run_cli("export", str(checkpoint), str(merged)) == 0
    assert run_cli("export", str(checkpoint), str(alone), "--adapter_only=true") == 0
    plain = in_transformers(tiny_model_dir)
    assert not torch.allclose(read(policy), read(plain), atol=1e-4)
    torch.testing.assert_close(read(in_transformers(merged)), read(policy), atol=1e-5, rtol=0.0)
    (weights,) = alone.glob("*.safetensors")
    assert weights.name == "adapter_model.safetensors"
    assert weights.stat().st_mode & 0o044 == 0o044
    torch.testing.assert_close(
        read(PeftModel.from_pretrained(plain, alone)), read(policy), atol=1e-6, rtol=0.0
    )
    check_in_vllm(merged, policy)
    monkeypatch.setattr(vllm_engine, "start_vllm", partial(start_vllm, enable_lora=True))
    check_in_vllm(tiny_model_dir, policy, alone)


def make_mixtral():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_hidden_layers=2))


@pytest.mark.parametrize("make", [make_qwen3_moe, make_mixtral])  # the second has names of old
def test_an_adapter_is_merged_into_a_mixture_shard_by_shard(make, tiny_model_dir, tmp_path):
    source, folder = tmp_path / "source", tmp_path / "exported"
    shutil.copytree(tiny_model_dir, source)  # for its tokenizer
    (source / "model.safetensors").unlink()
    make().save_pretrained(source, max_shard_size="20KB")
    policy = fresh_adapter(source, tmp_path / "lora.ckpt")
    assert not torch.allclose(read(policy), read(in_transformers(source)), atol=1e-2)
    assert run_cli("export", str(tmp_path / "lora.ckpt"), str(folder), "--max_shard_size=20KB") == 0
    torch.testing.assert_close(read(in_transformers(folder)), read(policy), atol=1e-4, rtol=0.0)


def test_an_export_never_holds_the_model_in_memory(tiny_model_dir, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model_dir, source)
    sizes = {"num_hidden_layers": 28, "hidden_size": 512, "moe_intermediate_size": 128}
    make_qwen3_moe(**sizes, num_experts=8, head_dim=64).save_pretrained(source)
    policy, single = fresh(source, tmp_path)
    num_mib = sum(p.nbytes for p in policy.parameters()) / 2**20
    sharded = tmp_path / "sharded.ckpt"
    with warnings.catch_warnings(action="ignore"):  # of a world of one
        save({"state_dict": weights_of(policy)}, checkpoint_id=sharded, no_dist=True)
    write_meta(sharded, about(source))
    fresh_adapter(source, tmp_path / "lora.ckpt")
    exports = [(single, "--dtype=bfloat16"), (sharded,), (tmp_path / "lora.ckpt",)]
    arguments = [
        [str(path), str(tmp_path / f"{number}"), "--max_shard_size=10MB", *more]
        for number, (path, *more) in enumerate(exports)
    ]
    done = subprocess.run(
        [sys.executable, str(MEMORY), json.dumps(arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert num_mib > 200
    assert int(done.stdout.split()[-1]) < 80, done.stderr[-3000:]


def test_another_number_format_is_written_and_named(tiny_model_dir, tmp_path):
    policy, checkpoint = trained(tiny_model_dir, tmp_path)
    folder = tmp_path / "exported"
    assert run_cli("export", str(checkpoint), str(folder), "--dtype=bfloat16") == 0
    model = in_transformers(folder)
    assert model.dtype is torch.bfloat16
    torch.testing.assert_close(read(model).float(), read(policy), atol=0.3, rtol=0.05)


def test_an_adapter_is_written_in_another_number_format(tiny_model_dir, tmp_path):
    policy = fresh_adapter(tiny_model_dir, tmp_path / "lora.ckpt")
    arguments = ["--adapter_only=true", "--dtype=bfloat16"]
    assert run_cli("export", str(tmp_path / "lora.ckpt"), str(tmp_path / "alone"), *arguments) == 0
    written = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    expected = {name: t for name, t in policy.state_dict().items() if ".lora_" in name}
    assert len(written) == len(expected)
    for name, tensor in expected.items():
        found = written[f"base_model.model.{name.replace('.default.', '.')}"]
        assert torch.equal(found, tensor.bfloat16())


def test_what_can_not_be_exported_is_refused_and_leaves_nothing(tiny_model_dir, tmp_path, capsys):
    _, checkpoint = trained(tiny_model_dir, tmp_path)
    (tmp_path / "there").mkdir()
    assert run_cli("export", str(checkpoint), str(tmp_path / "there")) == 2
    assert "which exists" in capsys.readouterr().err
    assert run_cli("export", str(tmp_path / "none.ckpt"), str(tmp_path / "new")) == 2
    assert "none.ckpt" in capsys.readouterr().err
    assert run_cli("export", str(checkpoint), str(tmp_path / "new"), "--adapter_only=true") == 2
    assert "trained all weights" in capsys.readouterr().err
    assert run_cli("export", str(checkpoint), str(tmp_path / "new"), "--max_shard_size=2") == 2
    assert "--max_shard_size, got '2'" in capsys.readouterr().err
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, found[1]))  # like a full disk
    try:
        assert run_cli("export", str(checkpoint), str(tmp_path / "new")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)
    assert "Free some space" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "there"}


@pytest.mark.parametrize("adapter", [None, LoRA(rank=4)])
def test_a_checkpoint_of_another_model_is_refused(adapter, tiny_model_dir, tmp_path, capsys):
    _, checkpoint = trained(tiny_model_dir, tmp_path, adapter=adapter)
    saved = torch.load(checkpoint, weights_only=True)
    *_, last = (name for name in saved["state_dict"] if "layers.1." in name)

    def message(change):
        state = dict(saved["state_dict"])
        change(state)
        torch.save({**saved, "state_dict": state}, checkpoint)
        assert run_cli("export", str(checkpoint), str(tmp_path / "new")) == 2
        assert {path.name for path in tmp_path.iterdir()} == {"run"}
        return capsys.readouterr().err

    short, wrong = last.removeprefix("policy."), {last: torch.ones(1)}
    assert short in message(lambda state: state.pop(last))
    assert "more'" in message(lambda state: state.update({"policy.more": torch.ones(1)}))
    assert short in message(lambda state: state.update(wrong))
