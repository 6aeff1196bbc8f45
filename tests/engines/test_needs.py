"""What an engine takes of a machine is known before it starts."""

from types import SimpleNamespace

from trace_pl.engines import (
    AutoEngine,
    EngineNeeds,
    HFEngine,
    RolloutEngine,
    ServerEngine,
    VLLMEngine,
)
from trace_pl.engines.server.main import _SERVE
from trace_pl.engines.vllm.setup import start_vllm


def test_engines_say_whose_gpus_they_use_and_how_their_cache_grows():
    assert [engine.needs({}).has_own_gpus for engine in (VLLMEngine, AutoEngine, HFEngine)] == (
        [False] * 3
    )
    assert ServerEngine.needs({"max_num_seqs": 8}) == EngineNeeds(
        "float32", max_num_seqs=8, pushes_files=True
    )
    remote = ServerEngine.needs({"urls": ["http://a:8000", "http://b:8000"]})
    assert remote == EngineNeeds("float32", has_own_gpus=True, num_servers=2, pushes_files=True)
    assert HFEngine.needs({}).caches_full_length
    assert not VLLMEngine.needs({}).caches_full_length


def test_settings_are_taken_by_name_and_others_are_not_theirs():
    needs = VLLMEngine.needs({"kv_cache_gib": None, "dtype": "bfloat16", "temperature": 0.7})
    assert needs == EngineNeeds(kv_cache_gib=None, dtype="bfloat16")


def test_an_engine_of_ones_own_may_say_it_in_other_words():
    class RemoteEngine(VLLMEngine):
        runs_apart = True

        @classmethod
        def needs(cls, settings):
            return super().needs({"max_num_seqs": settings["slots"]})

    assert RemoteEngine.needs({"slots": 3}) == EngineNeeds(
        "float32", max_num_seqs=3, has_own_gpus=True
    )


def test_on_a_gpu_vllm_reads_as_many_tokens_in_a_step_as_engines_say():
    vllm = SimpleNamespace(
        EngineArgs=dict, LLMEngine=SimpleNamespace(from_engine_args=lambda arguments: arguments)
    )
    arguments = start_vllm(vllm, "no-folder", 49_152, None, is_cpu=False)
    assert arguments["max_num_batched_tokens"] == VLLMEngine.needs({}).prefill_tokens == 8192
    assert "--max-num-batched-tokens=8192" in _SERVE


def test_a_default_is_that_of_the_engine_itself():
    class LongEngine(RolloutEngine):
        def __init__(self, model, max_model_len=65_536, spare=3):
            pass

    assert LongEngine.needs({}) == EngineNeeds(max_model_len=65_536)
    assert HFEngine.needs({}).dtype == "float32"
