"""One table of all checks, line by line as they end."""

from __future__ import annotations

from time import perf_counter

from trace_pl.commands.doctor.checks import CHECKS, Check
from trace_pl.commands.doctor.patient import Failed, Patient, Skipped
from trace_pl.errors import TraceError, with_place


def examine(arguments: list[str], layers: int, tokens: int | None) -> int:
    """Run every check on what `trace-pl fit ARGUMENTS` would use; return 1 if one failed.

    Args:
        arguments: Those of `trace-pl fit`.
        layers: Most layers of the model that is made.
        tokens: Tokens of a forward; None takes the config's.

    Raises:
        ConfigError: if the config is wrong, as `trace-pl fit` would say it.
    """
    patient = Patient.of_config(arguments, layers, tokens)
    num_failed = 0
    start = perf_counter()
    try:
        for name, check in CHECKS:
            status, told = _outcome(patient, check)
            num_failed += status == "FAILED"
            print(f"{status:<8}{name:<26}{told}", flush=True)
    finally:
        patient.close()
    result = f"{num_failed} of {len(CHECKS)} checks failed" if num_failed else "All checks passed"
    print(f"\n{result} in {perf_counter() - start:.0f} s.")
    return int(num_failed > 0)


def _outcome(patient: Patient, check: Check) -> tuple[str, str]:
    try:
        return "ok", check(patient)
    except Skipped as reason:
        return "-", str(reason)
    except (Failed, TraceError) as failure:
        return "FAILED", str(failure)
    except Exception as error:  # whatever a part says that does not work here is the finding
        return "FAILED", with_place(error)
