"""Checks of the engine: it starts, takes weights, sleeps, repeats itself and forgets."""

from __future__ import annotations

from time import perf_counter

import torch

from trace_pl.commands.doctor.patient import Failed, Patient
from trace_pl.engines.protocol import Completion, GenerationRequest
from trace_pl.models.loading import load_tokenizer
from trace_pl.models.names import find_model
from trace_pl.models.weights import policy_tensors
from trace_pl.rollout.parity import PROMPT, check_parity

_GIB = 2**30


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
    return f"freed {', '.join(f'{each / _GIB:.2f}' for each in freed)} GiB; {found}"


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


def _free(patient: Patient) -> int:
    return 0 if patient.is_cpu else torch.cuda.mem_get_info(patient.device)[0]
