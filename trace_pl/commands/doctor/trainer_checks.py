"""Checks of the trainer: attention, scoring, a step of training, experts and a checkpoint."""

from __future__ import annotations

import os
from time import perf_counter

import torch

from trace_pl.commands.doctor.patient import Failed, Patient, Skipped
from trace_pl.models.checkpoint import CheckpointFiles
from trace_pl.models.experts import routers
from trace_pl.models.logprobs import sampled_logprobs
from trace_pl.probes import Branch, ProbeRequest
from trace_pl.scoring import BranchedScorer, PrefixScorer

_GIB = 2**30


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
    return f"{os.path.getsize(path) / _GIB:.2f} GiB written in {seconds:.1f} s and read back equal"


def _require_close(patient: Patient, worst: float, what: str, part: str) -> None:
    tolerance = 1e-3 if patient.dtype == "float32" else 0.25
    if not worst <= tolerance:
        raise Failed(
            f"{what} differ by {worst:.2g} nats, beyond {tolerance:g}: {part} does not do what it "
            "should here. Try model.compile_layers false, and report it with this table."
        )


def _tokens(patient: Patient) -> int:
    if patient.tokens is not None:
        return patient.tokens
    return (
        min(patient.data.plan.tokens_per_forward, 2048)
        if patient.is_cpu
        else (patient.data.plan.tokens_per_forward)
    )


def _reset_peak(patient: Patient) -> None:
    if not patient.is_cpu:
        torch.cuda.reset_peak_memory_stats(patient.device)


def _peak(patient: Patient) -> str:
    if patient.is_cpu:
        return ""
    torch.cuda.synchronize(patient.device)
    return f", peak {torch.cuda.max_memory_allocated(patient.device) / _GIB:.1f} GiB"
