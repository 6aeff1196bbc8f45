"""`trace-pl export`: what it writes loads elsewhere and says the same."""

import shutil

import pytest
import torch
from cli_runner import run_cli
from fixed_experience import train
from peft import PeftModel
from random_models import make_llama, make_qwen3, make_qwen3_moe
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_pl.adapters import LoRA
from trace_pl.policy import load_model
from trace_pl.rollout.parity import check_parity
from trace_pl.rollout.vllm_engine import VLLMEngine

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
    engine = VLLMEngine(str(folder), 256, max_num_seqs=4, kv_cache_gib=0.125)
    check_parity(engine, policy, IDS, tolerance=1e-4)
    engine.close()


@pytest.mark.parametrize("make", [make_llama, make_qwen3, make_qwen3_moe])
def test_every_kind_of_model_goes_back_to_its_own_names_shard_by_shard(
    make, tiny_model_dir, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(tiny_model_dir, source)  # for its tokenizer
    (source / "model.safetensors").unlink()
    make(**({"vocab_size": 512} if make is make_qwen3 else {})).save_pretrained(source)
    policy, checkpoint = (
        trained(source, tmp_path) if make is make_qwen3 else fresh(source, tmp_path)
    )
    folder = tmp_path / "exported"
    assert run_cli("export", str(checkpoint), str(folder), "--max_shard_size=20KB") == 0
    assert len(list(folder.glob("*.safetensors"))) > 1
    torch.testing.assert_close(read(in_transformers(folder)), read(policy), atol=1e-6, rtol=0.0)


def fresh(model_dir, folder):
    """Return a model as it was saved, and a checkpoint with its weights."""
    policy = load_model(str(model_dir))
    path = folder / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    weights = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
    about = {"model_name": str(model_dir), "reference_name": str(model_dir), "metrics": {}}
    torch.save({"state_dict": weights, **about, "global_step": 0}, path)
    return policy, path


def test_an_adapter_is_merged_or_written_as_it_is(tiny_model_dir, tmp_path):
    policy, checkpoint = trained(tiny_model_dir, tmp_path, adapter=LoRA(rank=4))
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    assert run_cli("export", str(checkpoint), str(merged)) == 0
    assert run_cli("export", str(checkpoint), str(alone), "--adapter_only=true") == 0
    plain = in_transformers(tiny_model_dir)
    assert not torch.allclose(read(policy), read(plain), atol=1e-4)
    torch.testing.assert_close(read(in_transformers(merged)), read(policy), atol=1e-5, rtol=0.0)
    assert {p.name for p in alone.glob("*.safetensors")} == {"adapter_model.safetensors"}
    torch.testing.assert_close(
        read(PeftModel.from_pretrained(plain, alone)), read(policy), atol=1e-6, rtol=0.0
    )


def test_another_number_format_is_written_and_named(tiny_model_dir, tmp_path):
    policy, checkpoint = trained(tiny_model_dir, tmp_path)
    folder = tmp_path / "exported"
    assert run_cli("export", str(checkpoint), str(folder), "--dtype=bfloat16") == 0
    model = in_transformers(folder)
    assert model.dtype is torch.bfloat16
    torch.testing.assert_close(read(model).float(), read(policy), atol=0.3, rtol=0.05)


def test_what_can_not_be_exported_is_refused_and_leaves_nothing(tiny_model_dir, tmp_path, capsys):
    _, checkpoint = trained(tiny_model_dir, tmp_path)
    (tmp_path / "there").mkdir()
    assert run_cli("export", str(checkpoint), str(tmp_path / "there")) == 2
    assert "which exists" in capsys.readouterr().err
    assert run_cli("export", str(tmp_path / "none.ckpt"), str(tmp_path / "new")) == 2
    assert "none.ckpt" in capsys.readouterr().err
    assert run_cli("export", str(checkpoint), str(tmp_path / "new"), "--adapter_only=true") == 2
    assert "trained all weights" in capsys.readouterr().err
    saved = torch.load(checkpoint, weights_only=True)
    saved["state_dict"].popitem()
    torch.save(saved, checkpoint)
    assert run_cli("export", str(checkpoint), str(tmp_path / "new")) == 2
    assert "Missing key" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
