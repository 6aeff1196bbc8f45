"""Which differences of engine and trainer a push may leave, and which wrong weights are caught."""

import pytest
import torch
from random_models import make_qwen3, make_qwen3_moe
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trace_pl.engines.transformers import HFEngine
from trace_pl.errors import WeightSyncError
from trace_pl.models.loading import load_model
from trace_pl.models.names import BUILT_IN_BASE, resolve_model
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity import ParityReport, check_parity
from trace_pl.rollout.parity_limits import HIGH, LARGEST, MEAN, ParityLimits

FLOAT, HALF = torch.float32, torch.bfloat16
PROMPT = [3 + (7 * place * place + 5 * place) % 90 for place in range(90)]
DENSE = [
    "embed_tokens", "input_layernorm", "post_attention_layernorm", "q_proj", "k_proj", "v_proj",
    "o_proj", "q_norm", "k_norm", "gate_proj", "up_proj", "down_proj", "model.norm", "lm_head",
]  # fmt: skip
EXPERTS = ["mlp.gate.weight", "experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"]


def limits(tolerance=None):
    if tolerance is None:
        return ParityLimits(0.1, 0.5, 1.0, is_largest_fatal=False, reason="bfloat16")
    return ParityLimits.of_tolerance(tolerance)


def report(*differences, tolerance=None):
    """Compare tokens of which the given ones differ by so much and 1,000 others not at all."""
    found = torch.zeros(1000 + len(differences))
    found[: len(differences)] = torch.tensor(differences)
    return ParityReport.of(found, torch.zeros_like(found), limits(tolerance))


# --- the judgement ---------------------------------------------------------------------------


def test_one_token_far_off_passes_and_many_near_ones_do_not():
    one = report(-8.0)
    assert one.by_tag() == {LARGEST: 8.0, MEAN: pytest.approx(8 / 1001), HIGH: 0.0}
    assert one.is_within
    assert not report(*[0.6] * 20).is_within  # the 99th percentile
    assert not report(*[0.4] * 400).is_within  # the mean
    assert report(*[0.3] * 400).is_within


def test_a_number_limits_the_largest_difference():
    assert not report(0.3, tolerance=0.25).is_within
    assert report(0.2, tolerance=0.25).is_within


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tolerance", [None, 1e9])
def test_what_is_no_number_fails(value, tolerance):
    assert not report(value, tolerance=tolerance).is_within


def test_of_few_tokens_the_two_furthest_do_not_judge():
    found = torch.zeros(20)
    found[:2] = 3.0
    assert ParityReport.of(found, torch.zeros(20), limits()).high_abs_diff < 0.301
    found = torch.tensor([2.0, 0.0])
    assert ParityReport.of(found, torch.zeros(2), limits()).high_abs_diff == 0.0


def test_each_figure_is_told_with_its_limit():
    assert str(report(*[0.4] * 400)) == (
        "0.4 nats (usual up to 1), 0.114 on average (limit 0.1) and 0.4 in the 99th percentile "
        "(limit 0.5)"
    )
    assert str(report(0.5, tolerance=0.25)) == (
        "0.5 nats (limit 0.25), 0.0005 on average and 0 in the 99th percentile"
    )


def test_limits_are_those_of_the_coarser_side_and_grow_with_depth():
    exact = ParityLimits.derived({FLOAT}, 2, has_experts=False)
    half = ParityLimits.derived({FLOAT, HALF}, 2, has_experts=False)
    deep = ParityLimits.derived({HALF}, 32, has_experts=False)
    assert exact.mean < 5e-5
    assert exact.high < 3e-4
    assert 0.05 < half.mean < deep.mean < 0.5
    assert deep.reason == "half precision in 32 layers"
    mixture = ParityLimits.derived({HALF}, 48, has_experts=True)
    assert mixture.reason == "half precision in 48 layers with experts"
    # Published: bfloat16 in vLLM and transformers, Qwen3-1.7B (28 layers, 25 tokens, largest 0.32),
    # and four layers of a 30B mixture.
    assert ParityLimits.derived({HALF}, 28, has_experts=False).mean / 3 > 0.046
    assert ParityLimits.derived({HALF}, 4, has_experts=True).mean / 2 > 0.064


# --- right engines pass ----------------------------------------------------------------------


def make_model(kind, folder):
    """Save a model whose norms are no ones, so that their order counts."""
    model = make_qwen3(**SIZES) if kind == "dense" else make_qwen3_moe(**SIZES)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return str(folder)


SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 512}


@pytest.fixture(scope="module", params=["dense", "experts"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return make_model(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def engines(folder):
    """An engine for each number format."""
    return {dtype: HFEngine(folder, 256, dtype=dtype) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_weights_pass_in_any_two_formats(engines, folder, dtype, engine_dtype):
    engine, policy = engines[engine_dtype], load_model(folder, dtype)
    engine.push_weights(policy_tensors(policy), version=1)
    found = check_parity(engine, policy, PROMPT)
    is_exact = dtype == engine_dtype == "float32"
    assert ("float32" in found.limits.reason) is is_exact
    assert (found.mean_abs_diff > 1e-3) is (dtype != engine_dtype)


# --- wrong weights do not --------------------------------------------------------------------


def parts_of(kind):
    mlp = ("gate_proj", "up_proj", "down_proj")
    return DENSE if kind == "dense" else [p for p in DENSE if p not in mlp] + EXPERTS


def wrong_push(engine, policy, part, damage):
    """Push everything but one tensor right; return its name."""
    tensors = dict(policy_tensors(policy))
    name = next(n for n in tensors if part in n and (".layers." not in n or ".layers.1." in n))
    tensors[name] = damage(name, tensors)
    engine.push_weights(tensors.items(), version=1)
    return name


def permuted(name, tensors):
    """Return the rows in another order."""
    order = torch.randperm(len(tensors[name]), generator=torch.Generator().manual_seed(0))
    return tensors[name][order]


def of_another_layer(name, tensors):
    """Return the tensor of the next layer."""
    return tensors[name.replace("layers.1.", "layers.2.")]


def frozen(name, tensors):
    """Return the tensor as it was before it moved by a twentieth, one expert's by a quarter."""
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    return tensors[name] * (1 + (0.25 if "experts" in name else 0.05) * noise)


def a_step_behind(name, tensors):
    """Return the tensor before a step of Adam with a learning rate of 1e-6."""
    return tensors[name] + 1e-6


def caught(engine, policy, part, damage):
    """Return whether a wrong push is refused, and by the name of what is wrong."""
    name = wrong_push(engine, policy, part, damage)
    try:
        check_parity(engine, policy, PROMPT)
    except WeightSyncError as error:
        return "experts" in name or f"differ most: '{name}' by" in str(error)
    return False


@pytest.mark.parametrize("damage", [permuted, of_another_layer, frozen])
def test_in_float32_every_kind_of_weight_is_caught(engines, folder, kind, damage):
    policy = load_model(folder)
    parts = set(parts_of(kind))
    if damage is of_another_layer:
        parts -= {"embed_tokens", "model.norm", "lm_head"}
    assert [p for p in sorted(parts) if not caught(engines["float32"], policy, p, damage)] == []


@pytest.mark.parametrize("damage", [permuted, of_another_layer])
def test_in_half_precision_matrices_of_another_order_or_layer_are_caught(
    engines, folder, kind, damage
):
    policy = load_model(folder, "bfloat16")
    parts = {part for part in parts_of(kind) if "proj" in part and "experts" not in part}
    if damage is permuted:
        parts |= {"embed_tokens", "lm_head"}
    assert [p for p in sorted(parts) if not caught(engines["bfloat16"], policy, p, damage)] == []


def test_in_half_precision_a_weight_that_missed_a_small_change_is_not_seen(engines, folder):
    """The limit of the check: a step of 1e-6 is far below the rounding of either side."""
    for dtype in ("float32", "bfloat16"):
        policy = load_model(folder, dtype)
        assert not caught(engines["bfloat16"], policy, "q_proj", a_step_behind)


def test_an_error_says_the_figures_the_weight_and_what_to_change(engines, folder):
    policy = load_model(folder)
    name = wrong_push(engines["float32"], policy, "v_proj", permuted)
    with pytest.raises(WeightSyncError) as error:
        check_parity(engines["float32"], policy, PROMPT)
    for words in (
        "after pushing policy version 1, got a difference of ",
        "on average (limit ",
        "in the 99th percentile (limit ",
        "on 89 tokens; the limits are those of float32 in 3 layers",
        f"differ most: '{name}' by ",
        "set `data.parity_tolerance`",
    ):
        assert words in str(error.value)


class Rough(TorchFunctionMode):
    """Rounds what attention multiplies to the 10 bits of mantissa that TF32 keeps."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            args = [self.rounded(value) for value in args[:3]] + list(args[3:])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def rounded(x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class RoughEngine(HFEngine):
    """Attends as a GPU does that multiplies float32 in TF32."""

    def prompt_logprobs(self, token_ids):
        with Rough():
            return super().prompt_logprobs(token_ids)


@pytest.mark.parametrize("model", ["random", BUILT_IN_BASE])
def test_float32_that_is_multiplied_in_tf32_is_caught(model, tmp_path):
    path = make_model("dense", tmp_path) if model == "random" else resolve_model(model)
    policy = load_model(path)
    check_parity(HFEngine(path, 256), policy, PROMPT)
    with pytest.raises(WeightSyncError):
        check_parity(RoughEngine(path, 256), policy, PROMPT)
